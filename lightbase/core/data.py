"""What all data modules share: seeded splits and folds, loaders, and the batch
transforms on the device."""

from collections.abc import Callable, Collection, Iterator, Sized
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NamedTuple, NoReturn

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
    as_it_is,
    as_tensors,
    convert_types,
    inputs_of,
    targets_of,
    tensors_in,
    with_parts,
)
from lightbase.core.errors import UserError
from lightbase.core.folder import PROJECT
from lightbase.core.objects import RecordsArguments

TEST_SEED = 0
"""Decides which fifth is the test set of data without one. No flag changes it."""
SPLIT_ARGUMENTS = ("val_fraction", "split_seed", "num_folds", "fold")
"""Arguments that decide which samples are for training, validation and test."""


class Fold(NamedTuple):
    """The fold that is the test set. Samples are dealt out to `num_folds` folds, by
    `seed`."""

    number: int
    num_folds: int
    seed: int


class BaseDataModule(RecordsArguments, LightningDataModule):
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

    classes: list[
        str
    ] = []  # target i stands for classes[i]; empty for targets that are no classes
    image_shape: tuple[int, int, int] | None = (
        None  # channels, height, width; None: no images
    )
    # The splits that `load` knows. With "val", no samples of the training set are for
    # validation.
    own_splits: Collection[str] = ("train", "test")
    # Inputs (0, ...) as loaded: their shape and dtype. None before `setup`, and if they
    # are no tensors.
    empty_batch: Tensor | None = None
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
        self.on_gpu: dict[
            TensorBatches, TensorBatches
        ] = {}  # by the samples in CPU memory

    @property
    def num_classes(self) -> int | None:
        return len(self.classes or []) or None

    def load(self, split: Literal["train", "test"]) -> Any:
        """The samples of one of `own_splits`: tensors or arrays (N, ...), mostly the
        pair (inputs, targets), with images as uint8 (N, C, H, W); any tuple or dict of
        them, also nested; or a map-style Dataset of any samples. Its transforms change
        validation samples, too; `augment` and `transform_batch` can change training
        samples only."""
        raise UserError(
            f"data: {type(self).__name__} has no method load(split)", status=2
        )

    def collate(self, samples: list) -> Batch:
        """The batch of these samples, such as padded sequences. float64 becomes
        float32, and the targets of a pair, if they are one tensor, become float32 or
        int64."""
        return default_collate(samples)

    def normalize(self, inputs: Tensor) -> Tensor:
        """The network's inputs, float32, from a batch (N, ...) on its device."""
        return inputs

    def augment(self, inputs: Tensor) -> Tensor:
        """Random changes to the inputs (N, ...) of a training batch, on its device,
        before `normalize`."""
        return inputs

    def transform_batch(self, batch: Batch, training: bool) -> Batch:
        """What the steps get, from a batch on its device. Unless overridden, `augment`
        (if training) and `normalize` change the inputs: the first part of a tuple or
        list, else the batch itself."""
        inputs = inputs_of(batch)
        changed = self.normalize(self.augment(inputs) if training else inputs)
        return changed if inputs is batch else with_parts(batch, changed, *batch[1:])

    def setup(self, stage: str) -> None:
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
        train = self._samples("train")
        if self.fold:
            self.splits["test"], train = split_fold(train, self.fold)
        self.splits["train"] = train
        if "val" in self.own_splits:
            self.splits["val"] = self._samples("val")
        elif self.val_fraction > 0:
            parts = split_validation(train, self.val_fraction, self.split_seed)
            self.splits["val"], self.splits["train"] = parts
        else:
            self._load_test()
            if "test" not in self.splits:
                raise UserError(
                    "data.val_fraction 0 validates on the test set: there is none",
                    status=2,
                )
            self.splits["val"] = self.splits["test"]

    def _load_test(self) -> None:
        if "test" not in self.splits and "test" in self.own_splits:
            self.splits["test"] = self._samples("test")

    def _samples(self, split: Any) -> Samples:
        name = f"the {split} set of {type(self).__name__}"
        is_overridden = self.collate != MethodType(BaseDataModule.collate, self)
        samples = as_samples(
            self.load(split), name, self.collate if is_overridden else None
        )
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
            self.empty_batch = inputs.new_empty(0, *inputs.shape[1:])
        if self.classes and isinstance(targets, Tensor) and targets.dim() == 1:
            check_classes(samples, targets, name, len(self.classes))
        return samples

    def seeded_part(self, num: int, split: Literal["train", "test"]) -> Tensor:
        """The indices of a split, for `num` samples that have no test set: a fifth for
        "test", the others for "train", the same ones in every run. With folds all are
        for "train"."""
        if self.fold:
            return torch.arange(num)
        if self.trained_fold:
            raise UserError(
                "data.num_folds null: the fold is the only test set of this data",
                status=2,
            )
        order = seeded_order(num, self.test_seed)
        return order[: num // 5] if split == "test" else order[num // 5 :]

    def train_dataloader(self) -> DataLoader:
        overfit = self.trainer.overfit_batches > 0  # the same batches again and again
        drop_last = self.drop_last and not overfit
        num, num_ranks = len(self.splits["train"]), self.trainer.world_size
        if drop_last and num < num_ranks * self.batch_size:
            what = f"data.batch_size {self.batch_size} times {num_ranks} processes"
            raise UserError(
                f"{what}: only {num} training samples; try --data.drop_last false"
            )
        order = {"shuffle": not overfit, "seed": self.shuffle_seed}
        options: Any = {"even": True, "drop_last": drop_last, **order}
        loader = self._loader("train", self.batch_size, **options)
        # Workers read ahead before Lightning sets the epoch.
        loader.batch_sampler.set_epoch(
            self.trainer.fit_loop.epoch_progress.current.processed
        )
        return loader

    def val_dataloader(self) -> DataLoader:
        return self._loader("val", self.eval_batch_size or self.batch_size)

    def test_dataloader(self) -> DataLoader | list:
        size = self.eval_batch_size or self.batch_size
        return self._loader("test", size) if "test" in self.splits else []

    def predict_dataloader(self) -> DataLoader:
        """The test set, by torch's own DataLoader: Lightning makes it again from its
        keyword arguments, to shard it over the processes."""
        return DataLoader(
            self.splits["test"],
            batch_size=self.eval_batch_size or self.batch_size,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
        )

    def _loader(self, split: str, batch_size: int, **order: Any) -> ResumableLoader:
        samples, num_ranks = self.splits[split], self.trainer.world_size
        if len(samples) < num_ranks:
            raise UserError(
                f"{num_ranks} processes for the {len(samples)} samples of {split}"
            )
        pins = self.pin_memory
        if pins is None:
            pins = self.trainer.strategy.root_device.type == "cuda"
        if isinstance(samples, TensorBatches):
            samples = self._resident(samples)
            pins = (
                pins and samples.device.type == "cpu"
            )  # torch cannot pin other memory
            if not self.num_workers:
                order["batches_at_once"] = samples.batches_at_once(batch_size)
        sampler = EpochBatchSampler(
            len(samples),
            batch_size,
            rank=self.trainer.global_rank,
            num_ranks=num_ranks,
            **order,
        )
        return ResumableLoader(
            samples,
            sampler,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            pin_memory=pins,
            persistent_workers=self.persistent_workers and self.num_workers > 0,
        )

    def _resident(self, samples: TensorBatches) -> TensorBatches:
        """The samples on the GPU, if they are to be kept there; otherwise the samples
        as they are."""
        device = self.trainer.strategy.root_device
        if device.type != "cuda" or self.num_workers or self.resident is False:
            return samples
        if samples not in self.on_gpu:
            free_bytes, _ = torch.cuda.mem_get_info(device)
            if (
                not self.resident
                and 4 * len(samples) * samples.sample_bytes > free_bytes
            ):
                return samples
            self.on_gpu[samples] = samples.to(device)
        return self.on_gpu[samples]

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        batch = self.transform_batch(batch, self.trainer.training)
        # with a precision such as bf16-true, the weights are not float32
        return self.trainer.precision_plugin.convert_input(batch)

    def __getstate__(self) -> dict[str, Any]:
        """What a new process gets, for `collate` in a worker."""
        return {**vars(self), "trainer": None, "splits": {}, "on_gpu": {}}

    def state_dict(self) -> dict[str, Any]:
        state = {
            "shuffle_seed": self.shuffle_seed,
            "classes": self.classes,
            "empty_batch": self.empty_batch,
            "test_seed": self.test_seed,
        }
        return state | {"fold": list(self.fold)} if self.fold else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trained, seed = state_dict["classes"], state_dict["shuffle_seed"]
        if not isinstance(trained, list) or not all(
            isinstance(name, str) for name in trained
        ):
            raise ValueError("the classes are no list of names")
        if not isinstance(seed, int) or seed < 0:
            raise ValueError("the seed of the order is no number from 0")
        if "train" in self.splits and self.classes != trained:
            what = f"the checkpoint was trained on {len(trained)} classes: {', '.join(trained)}"
            raise UserError(
                f"{what[:120]}", f"the data has others: {', '.join(self.classes)[:100]}"
            )
        self.shuffle_seed, self.classes = seed, trained
        # until version 0.3 the test part followed from split_seed
        self.test_seed = state_dict.get("test_seed", self.split_seed)
        if "fold" in state_dict:
            self.trained_fold = Fold(*state_dict["fold"])
            if self.fold not in (None, self.trained_fold):
                what = (
                    f"data.fold: the test set of the checkpoint is {self.trained_fold}"
                )
                raise UserError(what, "leave num_folds, fold and split_seed out", 2)
        if not self.splits:
            self.empty_batch = state_dict["empty_batch"]

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *_: Any, **__: Any) -> NoReturn:
        """Refused: Lightning's method would build what any file names."""
        raise UserError(
            f"lightbase.load({str(checkpoint_path)!r}) gives the module and its data"
        )

    def read_inputs(self, path: Path) -> Iterator[tuple[str, Any]]:
        """For predict.py: a name and a sample for each input in a file. A tensor is an
        input without a target; what else `collate` takes is a sample, as `load` gives
        it. Raises UserError for a file that cannot be read."""
        from lightbase.extras.image_folder import (
            read_image,
        )  # which imports this module

        batch = self.empty_batch
        are_images = (
            batch is not None and batch.dtype == torch.uint8 and batch.dim() == 4
        )
        if batch is None or not are_images or batch.shape[1] not in (1, 3):
            raise UserError(
                f"{type(self).__name__} has no read_inputs(path), nor uint8 images"
            )
        channels, height, width = batch.shape[1:]
        yield str(path), read_image(path, (channels, height, width))

    def to_text(self, values: Tensor) -> str:
        """A sample of a text task, int64 (length,), as people read it; else its
        numbers."""
        return " ".join(map(str, values.tolist()))


def fold_of_flags(number: int | None, num_folds: int | None, seed: int) -> Fold | None:
    """Raises UserError if one of the flags is missing, or the fold does not exist."""
    if number is None and num_folds is None:
        return None
    if number is None or num_folds is None or not number < num_folds or num_folds < 2:
        raise UserError(
            f"data.fold {number} of data.num_folds {num_folds}: no such fold", status=2
        )
    return Fold(int(number), int(num_folds), seed)


def split_fold(samples: Samples, fold: Fold) -> tuple[Samples, Samples]:
    """The samples of the fold, and all others. The sizes of the folds differ by one at
    most, and so do their numbers of samples of a class, if a Dataset has its class
    numbers as `targets`."""
    num = len(samples)
    if num < fold.num_folds:
        raise UserError(
            f"data.num_folds {fold.num_folds}: there are only {num} samples", status=2
        )
    order = seeded_order(num, fold.seed)
    labels = class_numbers(samples)
    if labels is not None:
        order = order[labels[order].argsort(stable=True)]
    folds = torch.empty_like(order)
    folds[order] = torch.arange(num) % fold.num_folds
    return split_by_mask(samples, folds == fold.number)


def split_validation(
    samples: Samples, fraction: float, seed: int
) -> tuple[Samples, Samples]:
    """The share of the samples for validation, and the others."""
    num, num_val = len(samples), round(len(samples) * fraction)
    if not 0 < num_val < num:
        raise UserError(
            f"data.val_fraction {fraction} of {num} samples is {num_val} samples"
        )
    return split_by_mask(samples, seeded_order(num, seed).argsort() < num_val)


def split_by_mask(samples: Samples, mask: Tensor) -> tuple[Samples, Samples]:
    """The samples where the mask, bool (N,), is true, and the others."""
    return samples.select(mask.nonzero().flatten()), samples.select(
        (~mask).nonzero().flatten()
    )


def seeded_order(num: int, seed: int) -> Tensor:
    """0 to num - 1, shuffled by the seed, equally on any machine."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def class_numbers(samples: Samples) -> Tensor | None:
    """int64 (N,), without reading a sample; None if they are not available."""
    try:
        targets = torch.as_tensor(samples.targets)
    except (TypeError, ValueError, RuntimeError):  # None, or no numbers
        return None
    is_one_integer_each = (
        targets.shape == (len(samples),) and not targets.is_floating_point()
    )
    return targets.long() if is_one_integer_each else None


def as_samples(
    loaded: Any, name: str, collate: Callable[[list], Any] | None
) -> Samples:
    """What `load` has returned, as samples. collate: the user's function; None for
    torch's. Raises UserError, which begins with `name`, for anything else."""
    if type(loaded) is TensorDataset:
        loaded = loaded.tensors
    if isinstance(loaded, Tensor | np.ndarray | tuple | list | dict):
        values = convert_types(as_tensors(loaded))
        sizes = {
            len(tensor) if tensor.dim() else 1: None for tensor in tensors_in(values)
        }
        if len(sizes) != 1:
            raise UserError(
                f"{name} has arrays of {[*sizes]} samples: they must be equally long"
            )
        samples = TensorBatches(values)
        return DatasetSamples(samples, collate) if collate else samples
    is_map_style = isinstance(loaded, Sized) and not isinstance(loaded, IterableDataset)
    if isinstance(loaded, Dataset) and is_map_style:
        return DatasetSamples(loaded, collate or default_collate)
    needs = "load returns arrays, or a Dataset with __len__; else write a LightningDataModule"
    raise UserError(f"{name} is a {type(loaded).__name__}:", needs)


def check_classes(
    samples: Samples, targets: Tensor, name: str, num_classes: int
) -> None:
    """Raises UserError for targets that are no class numbers. targets: of the first
    sample; of a Dataset, the others are not read."""
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
