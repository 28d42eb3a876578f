"""What all data modules share: splits, loaders, and the batch transforms on the device."""

from collections.abc import Collection, Sized
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightbase.data.batches import (
    Batch,
    DatasetSamples,
    ResumableLoader,
    Samples,
    TensorBatches,
    as_it_is,
    eval_size,
    to_usual,
)
from lightbase.data.folds import (
    Fraction,
    NumFolds,
    asked_fold,
    seeded_part,
    trained_fold,
    validation_and_rest,
)
from lightbase.data.sampler import EpochBatchSampler
from lightbase.errors import UserError, first_line
from lightbase.folder import PROJECT

Values = Tensor | np.ndarray | list  # of numbers
Loaded = tuple[Values, Values] | Dataset


def as_samples(
    loaded: Any, where: str, classes: list[str], image_shape: tuple[int, int, int] | None
) -> Samples:
    """What a data module loads, if it agrees with what the module says; else a UserError that
    begins with `where`."""
    samples = as_stored(loaded, where, bool(classes))
    if not len(samples):
        raise UserError(f"{where} is empty")
    if (
        image_shape
        and isinstance(samples, TensorBatches)
        and (1, *samples.inputs.shape[1:]) == tuple(image_shape)
    ):
        samples = TensorBatches(samples.inputs[:, None], samples.targets)  # grey images (N, H, W)
    inputs, targets = samples.__getitems__([0])
    if image_shape and isinstance(inputs, Tensor) and inputs.shape[1:] != tuple(image_shape):
        shapes = f"shape {tuple(inputs.shape[1:])} and image_shape {tuple(image_shape)}"
        raise UserError(
            f"{where} has samples of {shapes}: make them agree (channels, height, width)"
        )
    if classes and isinstance(targets, Tensor) and targets.dim() == 1:  # one number a sample
        if targets.is_floating_point():
            raise UserError(
                f"{where} has {targets.dtype} targets: they must be integers, or `classes` empty"
            )
        all_targets = samples.targets if isinstance(samples, TensorBatches) else targets
        first, last = int(all_targets.min()), int(all_targets.max())
        if not 0 <= first <= last < len(classes):
            numbers = f"targets {first} to {last} for {len(classes)} classes"
            raise UserError(
                f"{where} has {numbers}: they must be 0 to {len(classes) - 1}, or `classes` more"
            )
    return samples


def as_stored(loaded: Any, where: str, are_classes: bool) -> Samples:
    if isinstance(loaded, TensorDataset) and len(loaded.tensors) == 2:
        loaded = loaded.tensors
    if (
        isinstance(loaded, Dataset)
        and isinstance(loaded, Sized)
        and not isinstance(loaded, IterableDataset)
    ):
        return DatasetSamples(loaded, are_classes)
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        what = (
            "load returns (inputs, targets) or a map-style Dataset of them (__len__, __getitem__)"
        )
        raise UserError(
            f"{where} is a {type(loaded).__name__}:\n{what}; for others write a LightningDataModule"
        )
    try:
        # C, W: torch takes no negative strides, and warns of memory that is read-only
        arrays = [
            part if isinstance(part, Tensor) else np.require(part, requirements=["C", "W"])
            for part in loaded
        ]
        inputs, targets = torch.as_tensor(arrays[0]), torch.as_tensor(arrays[1])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where} is not made of numbers in one shape:\n{first_line(error)}"
        ) from error
    if len(inputs) != len(targets):
        raise UserError(
            f"{where} has {len(inputs)} inputs and {len(targets)} targets: each input needs one"
        )
    return TensorBatches(*to_usual(inputs, targets, are_classes))


def no_inputs(samples: Samples) -> Tensor | None:
    """An empty batch (0, ...), which tells shape and dtype of the inputs; None where they are no
    tensors."""
    first = samples.__getitems__([0])[0]
    return first.new_empty(0, *first.shape[1:]) if isinstance(first, Tensor) else None


def shape_of_images(batch: Tensor | None) -> tuple[int, int, int] | None:
    """Channels, height, width of uint8 images, for which files can stand; None for other inputs."""
    if batch is None or batch.dtype != torch.uint8 or batch.dim() != 4:
        return None
    return (batch.shape[1], batch.shape[2], batch.shape[3])


class BaseDataModule(LightningDataModule):
    """Splits, loaders and batch transforms of data in memory, or of any Dataset. A new data set
    sets `classes` and `image_shape`, if it has them, and overrides `load`, maybe `normalize`,
    `augment`, `prepare_data`: see README.md.

    Args:
        data_dir: Folder of the data set's files; `data` in the repository if not given.
        batch_size: Samples a batch, on each device (with the strategy dp: on all of them together).
        num_workers: Processes that make batches; 0 makes them in the training process, the fastest
            way for small data.
        resident: Keep arrays on the GPU; if not given, if a quarter of its free memory is enough.
            Not with workers.
        pin_memory: Page-locked batches, which copy faster to a GPU; with one if not given. Not of
            resident data.
        persistent_workers: Keep the workers from epoch to epoch.
        val_fraction: Share of the training set kept for validation, if there is no val set; 0: val/
            is of the test set.
        split_seed: Which samples go to validation, and to which fold.
        num_folds: Cut the training set into so many folds: one of them is the test set, in place of
            the set's own.
        fold: Which of them, from 0.
        drop_last: Leave out the last, smaller batch of a training epoch: it shakes the weights.
        eval_batch_size: In validation, test and prediction; if not given batch_size, on a GPU up to
            8 times as many.
    """

    classes: list[str] = []  # target i stands for classes[i]; empty for targets that are no classes
    image_shape: tuple[int, int, int] | None = (
        None  # channels, height, width; None for samples that are no images
    )
    own_splits: Collection[str] = (
        "train",
        "test",
    )  # what `load` knows; with "val", none is cut off the training set
    empty_batch: Tensor | None = (
        None  # inputs (0, ...) as loaded, which tell shape and dtype; known when loaded
    )
    trainer: Any  # set before it asks for loaders

    def __init__(
        self,
        data_dir: str | None = None,
        batch_size: PositiveInt = 64,
        num_workers: NonNegativeInt = 0,
        resident: bool | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        val_fraction: Fraction = 0.1,
        split_seed: NonNegativeInt = 0,
        num_folds: NumFolds | None = None,
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
        self.fold, self.trained_fold = (
            asked_fold(fold, num_folds, split_seed),
            trained_fold(None, None),
        )
        self.drop_last = drop_last
        self.eval_batch_size = eval_batch_size
        self.shuffle_seed: int | None = None
        self.splits: dict[str, Samples] = {}
        self.on_gpu: dict[str, TensorBatches] = {}

    @property
    def num_classes(self) -> int | None:
        return len(self.classes) or None

    def load(self, split: Literal["train", "test"]) -> Loaded:
        """Inputs (N, ...), images as uint8 (N, C, H, W), and targets (N, ...) of one of
        `own_splits`; or a map-style Dataset. Its own transforms change validation samples too:
        `augment` changes training alone."""
        raise NotImplementedError

    def normalize(self, inputs: Tensor) -> Tensor:
        """What the network sees of a batch (N, ...), on its device: float32."""
        return inputs

    def augment(self, inputs: Tensor) -> Tensor:
        """Random changes to the inputs (N, ...) of a training batch, on its device, before
        `normalize`."""
        return inputs

    def setup(self, stage: str) -> None:
        trains = stage in ("fit", "validate")
        if trains and "train" not in self.splits:
            self._load_train_and_val()
        if not trains and "test" not in self.splits and (self.fold or "test" in self.own_splits):
            self.splits["test"] = self._test_samples()
        if stage == "fit" and self.trainer and self.shuffle_seed is None:
            self.shuffle_seed = self.trainer.strategy.broadcast(
                torch.initial_seed() % 2**63
            )  # of the run, or drawn

    def _load_train_and_val(self) -> None:
        samples = self.splits["train"] = self._samples("train")
        if self.fold:
            self.splits["test"], self.splits["train"] = self.fold.cut(samples, bool(self.classes))
        if "val" in self.own_splits:
            self.splits["val"] = self._samples("val")
        elif self.val_fraction == 0 and not self.fold and "test" not in self.own_splits:
            raise UserError(
                "data.val_fraction 0 validates on the test set, and there is none: give 0.1, say", 2
            )
        elif self.val_fraction == 0:
            self.splits["val"] = self.splits["test"] = self.splits.get("test") or self._samples(
                "test"
            )
        else:
            splits = validation_and_rest(self.splits["train"], self.val_fraction, self.split_seed)
            self.splits["val"], self.splits["train"] = splits

    def _test_samples(self) -> Samples:
        return (
            self.fold.cut(self._samples("train"), bool(self.classes))[0]
            if self.fold
            else self._samples("test")
        )

    def _samples(self, split: Any) -> Samples:
        name = f"the {split} set of {type(self).__name__}"
        samples = as_samples(self.load(split), name, self.classes, self.image_shape)
        self.empty_batch = no_inputs(samples)
        return samples

    def seeded_part(self, num: int, split: Literal["train", "test"]) -> Tensor:
        """Of `num` samples without a test set of their own, a fifth for "test", the others, or with
        folds all, for "train": indices."""
        return (
            torch.arange(num)
            if self.fold
            else seeded_part(num, split, self.split_seed, self.trained_fold)
        )

    def train_dataloader(self) -> DataLoader:
        overfit = self.trainer.overfit_batches > 0  # the same batches again and again
        drop_last = self.drop_last and not overfit
        num, num_ranks = len(self.splits["train"]), self.trainer.world_size
        if drop_last and num < num_ranks * self.batch_size:
            what = f"data.batch_size {self.batch_size}" + (
                f" on {num_ranks} processes" if num_ranks > 1 else ""
            )
            raise UserError(
                f"{what} is more than the {num} training samples:\ngive less, or "
                "--data.drop_last false"
            )
        loader = self._loader(
            "train", shuffle=not overfit, even=True, drop_last=drop_last, seed=self.shuffle_seed
        )
        # workers fetch ahead before Lightning sets the epoch
        loader.batch_sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return loader

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader | list:
        return self._loader("test") if "test" in self.splits else []

    def predict_dataloader(self) -> DataLoader:
        """The test set, by a loader of torch's: Lightning makes it anew, to share it out and note
        the indices."""
        loader = self._loader("test")
        options = {
            "pin_memory": loader.pin_memory,
            "num_workers": self.num_workers,
            "generator": loader.generator,
        }
        return DataLoader(
            loader.dataset,
            batch_size=loader.batch_sampler.batch_size,
            collate_fn=as_it_is,
            **options,
        )

    def _loader(self, split: str, **order: Any) -> ResumableLoader:
        data, num_ranks = self.splits[split], self.trainer.world_size
        if len(data) < num_ranks:
            what = (
                f"{num_ranks} processes share the {len(data)} samples of the {split} set: "
                "each needs one"
            )
            raise UserError(f"{what}\ngive at most --trainer.devices {len(data)}")
        pins = (
            self.trainer.strategy.root_device.type == "cuda"
            if self.pin_memory is None
            else self.pin_memory
        )
        size = (
            self.batch_size
            if order
            else self.eval_batch_size or eval_size(data, self.batch_size, self.trainer)
        )
        if isinstance(data, TensorBatches):
            data = self._resident(split, data)
            pins = pins and data.device.type == "cpu"  # torch pins nothing else
            order["batches_at_once"] = 1 if self.num_workers else data.batches_at_once(size)
        return ResumableLoader(
            data,
            EpochBatchSampler(
                len(data), size, rank=self.trainer.global_rank, num_ranks=num_ranks, **order
            ),
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            pin_memory=pins,
            persistent_workers=self.persistent_workers and self.num_workers > 0,
        )

    def _resident(self, split: str, data: TensorBatches) -> TensorBatches:
        """The same on the GPU, if it is to be there."""
        device = self.trainer.strategy.root_device
        may_be = device.type == "cuda" and not self.num_workers and self.resident is not False
        is_new = may_be and split not in self.on_gpu
        if is_new and (self.resident or 4 * data.num_bytes <= torch.cuda.mem_get_info(device)[0]):
            self.on_gpu[split] = data.to(device)
        return self.on_gpu.get(split, data)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        inputs = self.augment(batch[0]) if self.trainer.training else batch[0]
        # for precisions such as bf16-true, whose weights are not float32
        return self.trainer.precision_plugin.convert_input(self.normalize(inputs)), batch[1]

    def state_dict(self) -> dict[str, Any]:
        own = {"fold": list(self.fold)} if self.fold else {}
        return {
            "shuffle_seed": self.shuffle_seed,
            "classes": self.classes,
            "empty_batch": self.empty_batch,
            **own,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        was, now = (
            state_dict["classes"],
            self.classes if "train" in self.splits else state_dict["classes"],
        )
        if was != now:
            what = f"the checkpoint was trained on {len(was)} classes, {', '.join(was)[:60]}"
            raise UserError(
                f"{what}\nthe data has {len(now)}, {', '.join(now)[:60]}: they must be the same"
            )
        self.shuffle_seed, self.classes = state_dict["shuffle_seed"], was
        self.trained_fold = trained_fold(state_dict.get("fold"), self.fold)
        if not self.splits:
            self.empty_batch = state_dict.get("empty_batch")  # 0.1 did not keep it
