"""What all data modules share: loading, loaders, and the batch transforms on the
device."""

from collections.abc import Callable, Collection, Iterator, Sized
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from lightbase.core.batches import (
    Batch,
    DatasetSamples,
    EpochBatchSampler,
    ResumableLoader,
    Samples,
    TensorBatches,
    as_tensors,
    convert_types,
    inputs_of,
    share_from_worker,
    targets_of,
    tensors_in,
    with_parts,
)
from lightbase.core.compat import epochs_done
from lightbase.core.errors import UserError
from lightbase.core.images import read_image
from lightbase.core.project import PROJECT
from lightbase.core.splits import (
    Fold,
    fold_of_flags,
    seeded_order,
    split_fold,
    split_validation,
)

TEST_SEED = 0
"""Decides which fifth is the test set of data without one. No flag changes it."""
SPLIT_ARGUMENTS = ("val_fraction", "split_seed", "num_folds", "fold")
"""Arguments that decide which samples are for training, validation and test."""


class BaseDataModule(LightningDataModule):
    """Splits, loaders and batch transforms of data in memory, or of any Dataset. A new
    data set sets `classes` and `image_shape`, if it has them, and overrides `load`,
    maybe `normalize`, `augment`, `collate`, `transform_batch`, `prepare_data`: see
    docs/data.md.

    Args:
        data_dir: Folder of the data set's files; `data` in the repository if not given.
        batch_size: Samples a batch, on each device (with the strategy dp: on all of
            them together).
        num_workers: Processes that make batches; 0 makes them in the training process,
            the fastest way for small data.
        resident: Keep arrays on the GPU; if not given, if a quarter of its free memory
            is enough. Not with workers.
        pin_memory: Page-locked batches, which copy faster to a GPU; if not given, with
            a GPU. Not for resident data.
        persistent_workers: Keep the workers from epoch to epoch.
        val_fraction: Share of the training set for validation, if there is no
            validation set. With 0 the curves of val/ are of the test set.
        split_seed: Decides which samples go to validation, and to which fold.
        num_folds: Divide the training set into so many folds. One of them is the test
            set, and the data's own test set is not used.
        fold: The number of the fold that is the test set, from 0.
        drop_last: Leave out the last, smaller batch of a training epoch: it shakes the
            weights.
        eval_batch_size: In validation, test and prediction; if not given, batch_size.
    """

    classes: list[str] = []
    """Target i stands for classes[i]. Empty for targets that are not classes."""
    image_shape: tuple[int, int, int] | None = None
    """Channels, height and width. None if the inputs are not images."""
    own_splits: Collection[str] = ("train", "test")
    """The splits that `load` knows. With "val", no samples of the training set are for
    validation."""
    input_spec: Tensor | None = None
    """Inputs (0, ...) as loaded: their shape and dtype. None before `setup`, and if
    they are not a tensor."""
    trainer: Any  # set by Lightning before it asks for loaders

    def __init__(
        self,
        data_dir: Path | None = None,
        batch_size: PositiveInt = 64,
        num_workers: NonNegativeInt = 0,
        resident: bool | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        val_fraction: ClosedUnitInterval = 0.1,
        split_seed: NonNegativeInt = 0,
        num_folds: PositiveInt | None = None,
        fold: NonNegativeInt | None = None,
        drop_last: bool = True,
        eval_batch_size: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        self.data_dir = PROJECT.data if data_dir is None else Path(data_dir)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.resident = resident
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.fold = fold_of_flags(fold, num_folds, split_seed)
        self.trained_fold: Fold | None = None  # the fold of the checkpoint
        self.test_seed = TEST_SEED
        self.drop_last = drop_last
        self.eval_batch_size = eval_batch_size
        self.shuffle_seed: int | None = None
        self.splits: dict[str, Samples] = {}
        # copies on the GPU, by the samples in CPU memory
        self.on_gpu: dict[TensorBatches, TensorBatches] = {}

    @property
    def num_classes(self) -> int | None:
        """The number of classes, or None if the targets are not classes."""
        return len(self.classes or []) or None

    def load(self, split: Literal["train", "test"]) -> Any:
        """Return the samples of one of `own_splits`.

        They are tensors or arrays (N, ...), mostly the pair (inputs, targets), with
        images as uint8 (N, C, H, W); or any tuple or dict of them, also nested; or a
        map-style Dataset of any samples. The transforms of a Dataset change validation
        samples, too; `augment` and `transform_batch` can change training samples only.
        """
        raise UserError(
            f"data: {type(self).__name__} has no method load(split)", status=2
        )

    def collate(self, samples: list) -> Batch:
        """Return the batch of these samples, such as padded sequences. float64 becomes
        float32, and the targets of a pair, if they are one tensor, become float32 or
        int64."""
        return default_collate(samples)

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return what the network gets, float32, for the inputs of a batch, (N, ...) on
        its device."""
        return inputs

    def augment(self, inputs: Tensor) -> Tensor:
        """Change the inputs of a training batch at random, (N, ...) on its device,
        before `normalize`. The random numbers should come from the generator of that
        device: its state is in every checkpoint."""
        return inputs

    def transform_batch(self, batch: Batch, training: bool) -> Batch:
        """Return what the steps get, for a batch on its device.

        Unless overridden, `augment` and `normalize` change the inputs: the first part
        of a tuple or list, else the batch itself.

        Args:
            training: Whether a training step gets the batch. Without it, `augment` is
                left out.
        """
        inputs = inputs_of(batch)
        changed = self.augment(inputs) if training else inputs
        changed = self.normalize(changed)
        if inputs is batch:
            return changed
        return with_parts(batch, changed, *batch[1:])

    def setup(self, stage: str) -> None:
        """Load the splits that a stage needs. A split is loaded once only.

        Args:
            stage: "fit" and "validate" need the training and validation samples.
                "test" and "predict" need the test set, which is a part of the
                training set if there are folds.
        """
        if self.classes is None:
            self.classes = []
        trains = stage in ("fit", "validate")
        if (trains or self.fold) and "train" not in self.splits:
            self._load_train_and_val()
        if not trains:
            self._load_test()
        if stage == "fit" and self.trainer and self.shuffle_seed is None:
            seed = torch.initial_seed() % 2**63  # of the run, or drawn at random
            self.shuffle_seed = self.trainer.strategy.broadcast(seed)

    def _load_train_and_val(self) -> None:
        """Load the training set and take the fold and the validation samples from
        it."""
        train = self._load_split("train")
        if self.fold:
            self.splits["test"], train = split_fold(train, self.fold)
        if "val" in self.own_splits:
            self.splits["val"] = self._load_split("val")
        elif self.val_fraction > 0:
            val, train = split_validation(train, self.val_fraction, self.split_seed)
            self.splits["val"] = val
        else:
            self._load_test()
            if "test" not in self.splits:
                raise UserError(
                    "data.val_fraction 0 validates on the test set: there is none",
                    status=2,
                )
            self.splits["val"] = self.splits["test"]
        self.splits["train"] = train

    def _load_test(self) -> None:
        if "test" not in self.splits and "test" in self.own_splits:
            self.splits["test"] = self._load_split("test")

    def _load_split(self, split: Any) -> Samples:
        """Load a split and compare a sample with `image_shape` and `classes`. Raise
        UserError if they do not fit."""
        name = f"the {split} set of {type(self).__name__}"
        collate = None
        if self.collate != MethodType(BaseDataModule.collate, self):  # it is the user's
            collate = self.collate
        samples = as_samples(self.load(split), name, collate)
        if not len(samples):
            raise UserError(f"{name} is empty")
        batch = samples.__getitems__([0])
        inputs, targets = inputs_of(batch), targets_of(batch)
        if isinstance(inputs, Tensor):
            shape = tuple(inputs.shape[1:])
            if self.image_shape is not None and shape != tuple(self.image_shape):
                raise UserError(
                    f"{name} has samples {shape} for image_shape {self.image_shape}"
                )
            self.input_spec = inputs.new_empty(0, *shape)
        if self.classes and isinstance(targets, Tensor) and targets.dim() == 1:
            check_classes(samples, targets, name, len(self.classes))
        return samples

    def seeded_part(self, num: int, split: Literal["train", "test"]) -> Tensor:
        """Return the indices of a split, for samples that have no test set. A fifth is
        for "test", the others are for "train", the same ones in every run.

        Args:
            num: Number of all samples.
            split: With folds, all samples are for "train". Raise UserError if the
                checkpoint was trained on a fold and the test set is to be another one.
        """
        if self.fold:
            return torch.arange(num)
        if self.trained_fold:
            raise UserError(
                "data.num_folds null: the fold is the only test set of this data",
                status=2,
            )
        order = seeded_order(num, self.test_seed)
        if split == "test":
            return order[: num // 5]
        return order[num // 5 :]

    def train_dataloader(self) -> DataLoader:
        """Return the loader of the training samples, in a new order in each epoch.
        Raise UserError if there are too few samples for one batch."""
        overfit = self.trainer.overfit_batches > 0  # the same batches again and again
        drop_last = self.drop_last and not overfit
        num, num_ranks = len(self.splits["train"]), self.trainer.world_size
        if drop_last and num < num_ranks * self.batch_size:
            raise UserError(
                f"data.batch_size {self.batch_size} times {num_ranks} processes: "
                f"only {num} training samples; try --data.drop_last false"
            )
        loader = self._loader(
            "train",
            self.batch_size,
            shuffle=not overfit,
            even=True,
            drop_last=drop_last,
            seed=self.shuffle_seed,
        )
        # Workers read ahead before Lightning sets the epoch.
        loader.batch_sampler.set_epoch(epochs_done(self.trainer))
        return loader

    def val_dataloader(self) -> DataLoader:
        return self._loader("val", self.eval_batch_size or self.batch_size)

    def test_dataloader(self) -> DataLoader | list:
        if "test" not in self.splits:
            return []
        return self._loader("test", self.eval_batch_size or self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Return the test set in torch's own DataLoader: Lightning makes it again from
        its keyword arguments, to shard it over the processes."""
        return DataLoader(
            self.splits["test"],
            batch_size=self.eval_batch_size or self.batch_size,
            collate_fn=share_from_worker,
            num_workers=self.num_workers,
        )

    def _loader(self, split: str, batch_size: int, **order: Any) -> ResumableLoader:
        """Return the loader of a split, for this process.

        Args:
            batch_size: Samples a batch, on each device.
            order: Options of the EpochBatchSampler.
        """
        samples = self.splits[split]
        num_ranks = self.trainer.world_size
        if len(samples) < num_ranks:
            raise UserError(
                f"{num_ranks} processes for the {len(samples)} samples of {split}"
            )
        sampler = EpochBatchSampler(
            len(samples),
            batch_size,
            rank=self.trainer.global_rank,
            num_ranks=num_ranks,
            **order,
        )
        pins = self.pin_memory
        if pins is None:
            pins = self.trainer.strategy.root_device.type == "cuda"
        if isinstance(samples, TensorBatches):
            samples = self._resident(samples)
            if samples.device.type != "cpu":  # torch pins CPU memory only
                pins = False
            if not self.num_workers:
                sampler.batches_at_once = samples.batches_at_once(batch_size)
        return ResumableLoader(
            samples,
            sampler,
            collate_fn=share_from_worker,
            num_workers=self.num_workers,
            pin_memory=pins,
            persistent_workers=self.persistent_workers and self.num_workers > 0,
        )

    def _resident(self, samples: TensorBatches) -> TensorBatches:
        """Return a copy of the samples on the GPU, if they are to be kept there, and
        otherwise the samples themselves. Two splits of the same samples share one
        copy."""
        device = self.trainer.strategy.root_device
        if device.type != "cuda" or self.num_workers or self.resident is False:
            return samples
        if samples not in self.on_gpu:
            free_bytes, _ = torch.cuda.mem_get_info(device)
            num_bytes = len(samples) * samples.sample_bytes
            if not self.resident and 4 * num_bytes > free_bytes:
                return samples
            self.on_gpu[samples] = samples.to(device)
        return self.on_gpu[samples]

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Apply `transform_batch`. Lightning calls it with each batch on its device."""
        batch = self.transform_batch(batch, self.trainer.training)
        # with a precision such as bf16-true, the weights are not float32
        return self.trainer.precision_plugin.convert_input(batch)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a new process gets, for `collate` in a worker."""
        return {**vars(self), "trainer": None, "splits": {}, "on_gpu": {}}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the order of the samples, and what the model
        and the test depend on. A subclass adds its statistics here."""
        state: dict[str, Any] = {
            "shuffle_seed": self.shuffle_seed,
            "classes": self.classes,
            "empty_batch": self.input_spec,  # its name in version 0.3
            "test_seed": self.test_seed,
        }
        if self.fold:
            state["fold"] = list(self.fold)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what a checkpoint keeps. Raise UserError if the data has other
        classes, or another fold than the training. Raise ValueError for values that
        `state_dict` does not write."""
        classes, seed = state_dict["classes"], state_dict["shuffle_seed"]
        if not isinstance(classes, list) or {*map(type, classes)} - {str}:
            raise ValueError("the classes are not a list of names")
        if not isinstance(seed, int) or seed < 0:
            raise ValueError("the seed of the order is not a number from 0")
        if "train" in self.splits and self.classes != classes:
            names = ", ".join(classes)[:80]
            raise UserError(
                f"the checkpoint was trained on {len(classes)} classes: {names}",
                f"the data has others: {', '.join(self.classes)[:100]}",
            )
        self.shuffle_seed = seed
        self.classes = classes
        # until version 0.3 the test part followed from split_seed
        self.test_seed = state_dict.get("test_seed", self.split_seed)
        if "fold" in state_dict:
            self.trained_fold = Fold(*state_dict["fold"])
            if self.fold not in (None, self.trained_fold):
                raise UserError(
                    f"data.fold: the test set of the checkpoint is {self.trained_fold}",
                    "leave num_folds, fold and split_seed out",
                    status=2,
                )
        if not self.splits:
            self.input_spec = state_dict["empty_batch"]

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *_: Any, **__: Any) -> NoReturn:
        """Refuse: Lightning's method would build what any file names."""
        raise UserError(
            f"lightbase.load({str(checkpoint_path)!r}) gives the module and its data"
        )

    def read_inputs(self, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield a name and a sample for each input in a file, for predict.py.

        A tensor is an input without a target. Anything else that `collate` takes is a
        sample, as `load` gives it. Unless overridden, the file is read as an image if
        the inputs are uint8 images. Raise UserError for a file that cannot be read.
        """
        spec = self.input_spec  # (0, C, H, W) for images
        is_image = spec is not None and spec.shape[1:-2] in ((1,), (3,))
        if spec is None or not is_image or spec.dtype != torch.uint8:
            raise UserError(
                f"{type(self).__name__} has no read_inputs(path), nor uint8 images"
            )
        channels, height, width = spec.shape[1:]
        yield str(path), read_image(path, (channels, height, width))

    def to_text(self, values: Tensor) -> str:
        """Return a sample of a text task, int64 (length,), as people read it. Unless
        overridden, it is printed as numbers."""
        return " ".join(map(str, values.tolist()))


def as_samples(
    loaded: Any, name: str, collate: Callable[[list], Any] | None
) -> Samples:
    """Return what `load` has returned, as samples.

    Args:
        name: What the message of the UserError begins with, if it is anything else.
        collate: The user's function; None for torch's.
    """
    if type(loaded) is TensorDataset:
        loaded = loaded.tensors
    if isinstance(loaded, Tensor | np.ndarray | tuple | list | dict):
        values = convert_types(as_tensors(loaded))
        # the number of samples in each tensor, 1 for a single number
        sizes = dict.fromkeys(x.shape[:1].numel() for x in tensors_in(values))
        if len(sizes) != 1:
            raise UserError(
                f"{name} has arrays of {[*sizes]} samples: they must be equally long"
            )
        samples = TensorBatches(values)
        return DatasetSamples(samples, collate) if collate else samples
    is_stream = isinstance(loaded, IterableDataset) or not isinstance(loaded, Sized)
    if isinstance(loaded, Dataset) and not is_stream:
        return DatasetSamples(loaded, collate or default_collate)
    raise UserError(
        f"{name} is a {type(loaded).__name__}:",
        "load returns arrays, or a Dataset with __len__; "
        "else write a LightningDataModule",
    )


def check_classes(
    samples: Samples, targets: Tensor, name: str, num_classes: int
) -> None:
    """Raise UserError for targets that are not class numbers.

    Args:
        targets: Of the first sample. The others are read if they are in memory.
        name: What the message begins with.
    """
    if targets.is_floating_point():
        raise UserError(
            f"{name} has {targets.dtype} targets: make them int64, or empty `classes`"
        )
    if isinstance(samples, TensorBatches):
        targets = samples.targets
    first, last = int(targets.min()), int(targets.max())
    if first < 0 or last >= num_classes:
        raise UserError(
            f"{name} has targets {first} to {last}, not 0 to {num_classes - 1}"
        )
