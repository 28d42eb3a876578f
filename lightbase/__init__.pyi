# What type checkers read in place of `__init__.py`, which imports on first use. The
# names are those of NAMES; a test compares them.
from lightbase.commands.checkpoint import Result as Result
from lightbase.commands.predict import predict as predict
from lightbase.commands.python import confusion_matrix as confusion_matrix
from lightbase.commands.python import load as load
from lightbase.commands.python import mistakes as mistakes
from lightbase.commands.python import pictures as pictures
from lightbase.commands.python import train as train
from lightbase.commands.train import main as main
from lightbase.config.errors import UserError as UserError
from lightbase.config.errors import say as say
from lightbase.data.downloads import open_or_download as open_or_download
from lightbase.data.downloads import short_download_errors as short_download_errors
from lightbase.data.image_folder import ImageFolder as ImageFolder
from lightbase.data.loader import ResumableLoader as ResumableLoader
from lightbase.data.module import BaseDataModule as BaseDataModule
from lightbase.data.sampler import EpochBatchSampler as EpochBatchSampler
from lightbase.data.tensors import Batch as Batch
from lightbase.data.tensors import at_least_float32 as at_least_float32
from lightbase.data.transforms import alternating_flip as alternating_flip
from lightbase.data.transforms import crop_and_flip as crop_and_flip
from lightbase.data.transforms import flip_where as flip_where
from lightbase.data.transforms import random_crop as random_crop
from lightbase.data.transforms import random_flip as random_flip
from lightbase.data.transforms import to_float as to_float
from lightbase.model.curves import run_folder as run_folder
from lightbase.model.metrics import Metrics as Metrics
from lightbase.model.metrics import collection as collection
from lightbase.model.module import BaseModule as BaseModule
from lightbase.model.optim import FinalDecayLR as FinalDecayLR
from lightbase.model.optim import WarmupCosineLR as WarmupCosineLR

__version__: str
NAMES: dict[str, tuple[str, ...]]
MODULES: dict[str, str]
__all__: list[str]
