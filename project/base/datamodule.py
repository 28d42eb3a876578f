"""What all data modules share: splits, loaders, and the batch transforms on the device."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type
from lightning import LightningDataModule
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils.data import DataLoader

from project.base.errors import UserError
from project.base.sampler import EpochBatchSampler
from project.base.samples import Batch, ResumableLoader, Samples, TensorBatches, as_it_is

DATA_DIR = Path(__file__).parents[2] / "data"
if TYPE_CHECKING:
    Fraction = float
else:
    Fraction = restricted_number_type("Fraction", float, [(">=", 0), ("<", 1)], docstring="A number in [0, 1).")


class TensorDataModule(LightningDataModule):
    """A data set that fits in memory.

    A new data set sets `classes` and overrides `load`; also `prepare_data` to download, `normalize` and `augment`
    for what happens to a batch on the device. One that does not fit in memory overrides `samples`.

    Args:
        data_dir: Folder of the data set's files; `data` beside project/ if not given.
        batch_size: Samples a batch, on each device (with the strategy dp: on all of them together).
        num_workers: Processes that make batches; 0 makes them in the training process, the fastest way for small data.
        resident: Keep the data on the GPU as a whole, so that no step has to copy it; unless said otherwise if it takes
            less than a quarter of the free GPU memory. Not with workers.
        pin_memory: Page-locked batches, which copy faster to a GPU; unless said otherwise if a GPU is used and the data
            is not resident.
        persistent_workers: Keep the workers from epoch to epoch.
        val_fraction: Share of the training set kept for validation. With 0 all of it trains and the val/ curves are
            measured on the test set; nothing is then selected by them.
        split_seed: Which samples go to validation.
        drop_last: Leave out the last, smaller batch of a training epoch (a smaller one shakes the weights). Otherwise
            all samples train, but for the number of samples modulo the number of processes.
    """

    classes: list[str]
    """Names of the classes; label i stands for classes[i]."""

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
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        self.data_dir = Path(data_dir) if data_dir is not None else DATA_DIR
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.resident = resident
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.drop_last = drop_last
        self.steps_per_execution = 1
        """Batches that training gets at once."""
        self.shuffle_seed: int | None = None
        self.splits: dict[str, Samples] = {}
        self.on_gpu: dict[str, Samples] = {}

    def load(self, split: Literal["train", "test"]) -> Batch:
        """Inputs (N, ...), images as uint8 (N, C, H, W), and labels int64 (N,) of the official training or test set."""
        raise NotImplementedError

    def samples(self, split: Literal["train", "test"]) -> Samples:
        """The official training or test set."""
        inputs, labels = self.load(split)
        if len(inputs) != len(labels):
            raise UserError(
                f"{type(self).__name__} has {len(inputs)} inputs and {len(labels)} labels in its {split} set"
            )
        return TensorBatches(inputs, labels)

    def normalize(self, inputs: Tensor) -> Tensor:
        """What the network sees of a batch (N, ...), on its device: float32."""
        return inputs

    def augment(self, inputs: Tensor) -> Tensor:
        """Random changes to a training batch (N, ...), on its device, before `normalize`."""
        return inputs

    def setup(self, stage: str) -> None:
        if stage in ("fit", "validate") and "train" not in self.splits:
            self._load_train_and_val()
        if (stage in ("test", "predict") or self.val_fraction == 0) and "test" not in self.splits:
            self.splits["test"] = self._checked("test")
        if self.val_fraction == 0 and stage in ("fit", "validate"):
            self.splits["val"] = self.splits["test"]
        if stage == "fit" and self.trainer and self.shuffle_seed is None:
            # the seed of the run, or the one that torch drew on the first rank
            self.shuffle_seed = self.trainer.strategy.broadcast(torch.initial_seed() % 2**63)

    def _checked(self, split: Literal["train", "test"]) -> Samples:
        samples = self.samples(split)
        where = f"the {split} set of {type(self).__name__}"
        if not len(samples):
            raise UserError(f"{where} is empty")
        first, last = int(samples.labels.min()), int(samples.labels.max())
        if not 0 <= first <= last < len(self.classes):
            raise UserError(f"{where} has labels {first} to {last} for {len(self.classes)} classes")
        return samples

    def _load_train_and_val(self) -> None:
        samples = self._checked("train")
        num_val = round(len(samples) * self.val_fraction)
        if self.val_fraction > 0 and not 0 < num_val < len(samples):
            raise UserError(
                f"data.val_fraction {self.val_fraction} of {len(samples)} samples leaves {num_val} for validation"
            )
        num_train = len(samples) - num_val
        if num_train < (self.batch_size if self.drop_last else 1):
            raise UserError(
                f"data.batch_size {self.batch_size} is more than the {num_train} training samples:\n"
                "give a smaller one, or --data.drop_last false"
            )
        if num_val == 0:
            self.splits["train"] = samples
            return
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(self.split_seed))
        self.splits["train"] = samples.select(order[num_val:].sort().values)
        self.splits["val"] = samples.select(order[:num_val].sort().values)

    def train_dataloader(self) -> ResumableLoader:
        assert self.shuffle_seed is not None
        trainer: Any = self.trainer
        overfit = trainer.overfit_batches > 0  # the same batches again and again
        drop_last = self.drop_last and not overfit
        num_train = len(self.splits["train"])
        if num_train < trainer.world_size * (self.batch_size if drop_last else 1):
            raise UserError(
                f"data.batch_size {self.batch_size} on {trainer.world_size} processes is more than the {num_train} "
                "training samples:\ngive a smaller one, or --data.drop_last false, or fewer devices"
            )
        order = {"shuffle": not overfit, "drop_last": drop_last, "even": True, "seed": self.shuffle_seed}
        loader = self._loader("train", batches_at_once=self.steps_per_execution, **order)
        # workers fetch ahead before Lightning sets the epoch
        loader.batch_sampler.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
        return loader

    def val_dataloader(self) -> ResumableLoader:
        return self._loader("val")

    def test_dataloader(self) -> ResumableLoader:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        """The test set. Lightning makes this loader anew to note the samples' indices, and can do so with torch's own
        samplers only."""
        rank, num_ranks = self._rank("test")
        data = self._where_it_is_read("test")
        share = range(rank, len(data), num_ranks)
        return DataLoader(data, batch_size=self.batch_size, sampler=share, **self._loader_options(data))

    def _loader(self, split: str, **order: Any) -> ResumableLoader:
        data = self._where_it_is_read(split)
        rank, num_ranks = self._rank(split)
        sampler = EpochBatchSampler(len(data), self.batch_size, rank=rank, num_ranks=num_ranks, **order)
        return ResumableLoader(data, batch_sampler=sampler, **self._loader_options(data))

    def _where_it_is_read(self, split: str) -> Samples:
        """The split, copied to the GPU if it shall be resident there."""
        data = self.splits[split]
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        if device.type != "cuda" or self.resident is False or self.num_workers or not isinstance(data, TensorBatches):
            return data
        if self.resident is None and 4 * data.num_bytes > torch.cuda.mem_get_info(device)[0]:
            return data
        if split not in self.on_gpu:
            self.on_gpu[split] = data.to(device)
        return self.on_gpu[split]

    def _rank(self, split: str) -> tuple[int, int]:
        """This process and how many there are, each of which must have a sample."""
        trainer = self.trainer
        assert trainer is not None
        if len(self.splits[split]) < trainer.world_size:
            raise UserError(
                f"{trainer.world_size} processes share the {len(self.splits[split])} samples of the {split} set: "
                f"each needs one\ngive at most --trainer.devices {len(self.splits[split])}"
            )
        return trainer.global_rank, trainer.world_size

    def _loader_options(self, data: Samples) -> dict[str, Any]:
        pin_memory = self.pin_memory
        if pin_memory is None:
            assert self.trainer is not None
            is_there = data.labels.device.type != "cpu"
            pin_memory = not is_there and not isinstance(self.trainer.accelerator, CPUAccelerator)
        return {
            "collate_fn": as_it_is,  # a batch, not a list of samples
            "num_workers": self.num_workers,
            "pin_memory": pin_memory,
            "persistent_workers": self.persistent_workers and self.num_workers > 0,
            "generator": torch.Generator(),  # leaves the global random state alone
        }

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        if self.trainer.training and self.steps_per_execution > 1:
            return self._one_after_the_other(batch)
        return self._transform(*batch)

    def _one_after_the_other(self, batch: Batch) -> Iterator[Batch]:
        """The batches in one of several, each transformed when it is asked for."""
        assert self.trainer is not None
        profiler = self.trainer.profiler  # type: ignore[attr-defined]
        for part in zip(*(tensor.split(self.batch_size) for tensor in batch), strict=True):
            profiler.start("transforms")
            transformed = self._transform(*part)
            profiler.stop("transforms")
            yield transformed

    def _transform(self, inputs: Tensor, labels: Tensor) -> Batch:
        assert self.trainer is not None
        if self.trainer.training:
            inputs = self.augment(inputs)
        # for precisions such as bf16-true, whose weights are not float32
        return self.trainer.precision_plugin.convert_input(self.normalize(inputs)), labels

    def state_dict(self) -> dict[str, Any]:
        return {"shuffle_seed": self.shuffle_seed, "classes": self.classes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shuffle_seed = state_dict["shuffle_seed"]
        self.classes = state_dict["classes"]
