# The public names: for type checkers, and for lazy_loader, which imports them on first
# use.
from .commands.checkpoint import Result as Result
from .commands.predict import predict as predict
from .commands.python import confusion_matrix as confusion_matrix
from .commands.python import load as load
from .commands.python import mistakes as mistakes
from .commands.python import pictures as pictures
from .commands.python import train as train
from .commands.train import main as main
from .config.errors import UserError as UserError
from .config.errors import say as say
from .data.downloads import open_or_download as open_or_download
from .data.downloads import short_download_errors as short_download_errors
from .data.image_folder import ImageFolder as ImageFolder
from .data.loader import ResumableLoader as ResumableLoader
from .data.module import BaseDataModule as BaseDataModule
from .data.sampler import EpochBatchSampler as EpochBatchSampler
from .data.tensors import Batch as Batch
from .data.tensors import at_least_float32 as at_least_float32
from .data.transforms import alternating_flip as alternating_flip
from .data.transforms import crop_and_flip as crop_and_flip
from .data.transforms import flip_where as flip_where
from .data.transforms import random_crop as random_crop
from .data.transforms import random_flip as random_flip
from .data.transforms import to_float as to_float
from .data.windows import windows as windows
from .model.curves import run_folder as run_folder
from .model.metrics import Metrics as Metrics
from .model.metrics import collection as collection
from .model.module import BaseModule as BaseModule
from .model.optim import FinalDecayLR as FinalDecayLR
from .model.optim import WarmupCosineLR as WarmupCosineLR

__version__: str
__all__: list[str]
