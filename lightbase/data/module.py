"""The base class of data modules: loading, splits, loaders, and the transforms of
batches on their device. `ArrayData` is for data without a class.

A data set overrides the methods of `BaseDataModule` from `load` to `transform_batch`:
read them first. Then come those that Lightning calls, those that load and divide the
samples, and the state in a checkpoint.
"""

import inspect
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightbase.compat import batches_trained, epochs_done
from lightbase.config.errors import UserError, say
from lightbase.config.files import Values
from lightbase.config.paths import PROJECT
from lightbase.data.loader import (
    DatasetSamples,
    Samples,
    as_samples,
    check_targets,
    make_loader,
    share_from_worker,
)
from lightbase.data.sampler import (
    LARGE,
    EpochBatchSampler,
    PermutedPart,
    seeded_order,
)
from lightbase.data.splits import (
    Fold,
    check_unchanged,
    class_numbers,
    constants_of,
    divide,
    fingerprint,
    fold_indices,
    fold_of_flags,
    group_numbers,
    hash_of,
    measure_targets,
    part_indices,
    part_size,
    split_labels,
    time_spans,
)
from lightbase.data.stream import StreamLoader, StreamSamples, check_stream, state_of
from lightbase.data.tensors import (
    Batch,
    as_tensors,
    inputs_of,
    map_tensors,
    read_image,
    with_parts,
)

SPLIT_ARGUMENTS = (
    "val_fraction",
    "val_split",
    "gap",
    "split_seed",
    "num_folds",
    "fold",
)
"""Arguments that decide which samples are for training, validation and test."""

PLACES: Values = {"grouped": group_numbers, "ordered": time_spans}
"""By val_split: functions that return numbers for the groups or times of samples."""

MAX_WEIGHTS = 2**24
"""The limit of torch.multinomial."""

ALONE: Any = SimpleNamespace(
    global_rank=0,
    world_size=1,
    overfit_batches=0,
    strategy=SimpleNamespace(root_device=torch.device("cpu")),
)
"""What a data module needs of a Trainer if it has none: one process on the CPU."""


class BaseDataModule(LightningDataModule):
    """Makes splits and loaders, and transforms batches on their device. The data may be
    arrays in memory, any map-style Dataset, or an IterableDataset.

    A data set is a subclass. It overrides `load`. It sets `classes` and `image_shape`
    if it has them. It may override `normalize`, `augment`, `collate`,
    `transform_batch`, `prepare_data` and others: see docs/data.md.

    Args:
        data_dir: The folder with the files of the data set. The default is the folder
            `data` in the repository.
        batch_size: Samples in a batch, on each device. With the strategy dp it is for
            all devices together.
        num_workers: Processes that make batches. With 0 the training process makes
            them, which is the fastest way for small data.
        resident: Keep arrays on the GPU. By default they are kept there if they take at
            most a quarter of the free memory. It has no effect with workers.
        pin_memory: Put batches into page-locked memory, from which copies to a GPU are
            faster. The default is true with a GPU. It has no effect on resident data.
        persistent_workers: Keep the worker processes from epoch to epoch.
        val_fraction: The share of the training set that is used for validation, if
            there is no validation set. With 0 each epoch is measured on the test set,
            as the curves test_each_epoch/, and selects nothing.
        val_split: How samples are chosen for validation: at "random"; "stratified",
            the same share of each class; "grouped", where no group (see the method
            `groups`) is on two sides; or "ordered", the last ones in the order of
            `load`, or of `times`. The last two hold for folds and `seeded_part`, too.
            An ordered fold trains on what lies before it.
        gap: Of samples in order, how many are left out between two parts. If they have
            times, how long a time: in the unit of the times, and for dates in hours.
        split_seed: The seed that chooses the samples for validation and for the folds.
        num_folds: Divide the training set into this number of folds. One fold is the
            test set, and the test set of the data is not used.
        fold: The number of the fold that is the test set, from 0.
        drop_last: Leave out the last batch of a training epoch if it is smaller: its
            gradient varies more than others.
        eval_batch_size: Samples in a batch in validation, test and prediction, by
            default batch_size.
        scale_targets: Train on standardised numbers: (targets - mean) / deviation of
            the training samples. Metrics, pictures and predictions have the units of
            the data, and losses have none. By default only the `target_columns` of a
            table are standardised.
    """

    classes: list[str] = []
    """The names of the classes: target i stands for classes[i]. The list is empty if
    the targets are not classes."""
    image_shape: tuple[int, int, int] | None = None
    """Channels, height and width of the images. None if the inputs are not images."""
    columns: list[str] = []
    """The names of the features, if the inputs are rows of a table."""
    own_splits: Collection[str] = ("train", "test")
    """The splits that `load` can return. If "val" is one of them, no samples are taken
    from the training set for validation."""
    input_spec: Tensor | None = None
    """An empty tensor (0, ...) with the shape and dtype of the inputs that `load`
    returns. None before `setup`, and if the inputs are not one tensor."""
    keeps_float64 = False
    """Whether inputs of float64 reach `normalize` as they are, because float32 has too
    few digits for them. By default they become float32 before."""
    shuffle_block = 1000
    """How many samples of a stream a worker reads together and shuffles, in training.
    With 1 the order of the stream stays."""
    test_seed = 0
    """The seed that chooses a fifth as the test set, if the data has none. No flag
    changes it, so that all runs have the same test set."""
    trained_fold: Fold | None = None
    """The fold of the checkpoint."""
    lists_parts = False
    """Whether the parts of a large Dataset are lists of its samples, as in earlier
    checkpoints."""
    shuffle_seed: int | None = None
    """The seed of the order of the training samples."""
    training_samples: Samples
    """The samples of `splits["train"]` with the transforms of training, for the
    training loader. They are the same object if `load` does not take `training`."""
    train_weights: Tensor | None = None
    """The weights with which training samples are drawn, float64 (N,), or None."""
    target_scale: list[Tensor] | None = None
    """Mean and standard deviation of the targets of the training, if they are
    standardised."""
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
        val_split: Literal["random", "stratified", "grouped", "ordered"] = "random",
        gap: NonNegativeFloat = 0,
        split_seed: NonNegativeInt = 0,
        num_folds: PositiveInt | None = None,
        fold: NonNegativeInt | None = None,
        drop_last: bool = True,
        eval_batch_size: PositiveInt | None = None,
        scale_targets: bool | None = None,
    ) -> None:
        super().__init__()
        self.data_dir = PROJECT.data if data_dir is None else Path(data_dir)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.resident = resident
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.val_fraction = val_fraction
        self.val_split: str = val_split
        self.gap = gap
        if gap and val_split != "ordered":
            raise UserError(f"data.gap {gap} needs --data.val_split ordered", status=2)
        self.split_seed = split_seed
        self.fold = fold_of_flags(fold, num_folds, split_seed)
        self.drop_last = drop_last
        self.eval_batch_size = eval_batch_size or batch_size
        self.scale_targets = bool(scale_targets)
        self.splits: dict[str, Samples] = {}
        # predictions that need no network, of the training targets
        self.constants: dict[str, Tensor] = {}
        # with val_split grouped the groups of the samples, with ordered their times
        self.split_groups: Values = {}
        # {split: samples that are not old enough to be trained before it}
        self.num_left_out: dict[str, int] = {}
        # {split: hash of its samples}, now and in the checkpoint
        self.fingerprints: dict[str, str] = {}
        self.saved_fingerprints: dict[str, str] = {}

    @property
    def num_classes(self) -> int | None:
        """The number of classes. None if the targets are not classes."""
        return len(self.classes) or None

    @property
    def validates_on_test(self) -> bool:
        """Whether the samples for validation are those of the test, see
        `val_fraction`. Then no epoch may be selected by them."""
        return not self.val_fraction and "val" not in self.own_splits

    def load(self, split: Literal["train", "test"]) -> Any:
        """Return the samples of a split, one of `own_splits`. Every data set overrides
        this.

        Most return a pair of arrays or tensors (inputs, targets), each (N, ...). Images
        are uint8 (N, C, H, W). Any tuple or dict of arrays is possible, also nested.
        So is a map-style Dataset of any samples, or an IterableDataset, which is
        divided among ranks and workers (docs/large_data.md).

        A Dataset with random transforms needs the method `load(split, training)`. It is
        called twice for the training set: with training=True for the training, and with
        False for the same samples in the same order, with the transforms of evaluation,
        from which validation and a test fold are taken. Other splits get False.
        """
        raise UserError(
            f"data: {type(self).__name__} has no method load(split)",
            "write it: docs/data.md has examples",
            2,
        )

    def groups(self, split: Literal["train"]) -> Any:
        """Return the group of each sample of a split, such as its patient or scene:
        integers or texts (N,), in the order of `load`. Override this for val_split
        grouped. This version returns the groups that `load` has given to `seeded_part`.
        """
        return self.split_groups.get(split)

    def times(self, split: Literal["train"]) -> Any:
        """Return the time of each sample of a split, for val_split ordered: numbers,
        datetime64 or texts of ISO dates (N,), in the order of `load`. For samples that
        have several times return the first and the last one, (N, 2). None stands for
        the order of `load`. This version returns the times that `load` has given to
        `seeded_part`.
        """
        return self.split_groups.get(split)

    def sample_weights(self, split: Literal["train"]) -> Any:
        """Return a weight of at least 0 for each training sample, (N,), in the order of
        `load(split)`, or None, as this version does: then each comes once in an epoch.

        With weights the samples of an epoch are drawn with replacement, with twice the
        weight twice as often. The number of steps stays the same. It is called after
        `load`, in each process.
        """
        return None

    def collate(self, samples: list) -> Batch:
        """Return one batch made of these samples. Override this if samples differ in
        shape: to pad sequences, for example. Afterwards float64 becomes float32, and
        the targets of a pair become float32 or int64 if they are one tensor."""
        return default_collate(samples)

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return the inputs of a batch (N, ...) as the network gets them, float32, in
        all stages, on the device of the training."""
        return inputs

    def augment(self, inputs: Tensor) -> Tensor:
        """Return the inputs of a training batch (N, ...) with random changes, before
        `normalize`. Take random numbers from the default generator of their device. Its
        state is in every checkpoint, so a resumed run draws the same numbers."""
        return inputs

    def transform_batch(self, batch: Batch, training: bool) -> Batch:
        """Return a batch as the steps get it. Override this to change inputs and
        targets together, such as images and their masks.

        This version passes the inputs through `augment`, if `training`, and
        `normalize`. The inputs are the first part of a tuple or list; any other batch
        is the inputs itself. The batch is on the device of the training.
        """
        inputs = inputs_of(batch)
        changed = self.normalize(self.augment(inputs) if training else inputs)
        if inputs is batch:
            return changed
        return with_parts(batch, changed, *batch[1:])

    def setup(self, stage: str) -> None:
        """Load the splits that a stage needs, unless they are loaded already. Lightning
        calls it in each process. With folds the test set is a part of the training set,
        so every stage loads that."""
        trains = stage in ("fit", "validate")
        if (trains or self.fold) and "train" not in self.splits:
            self._load_train_and_val()
        if not trains:
            self._load_test()
        elif self.scale_targets and self.target_scale is None:
            self.target_scale = measure_targets(self.splits["train"])
        if stage == "fit" and self.trainer and self.shuffle_seed is None:
            # the seed of the run, or a random number if the run has no seed
            seed = torch.initial_seed() % 2**63
            self.shuffle_seed = self.trainer.strategy.broadcast(seed)
        check_unchanged(
            type(self).__name__,
            self.saved_fingerprints,
            self.fingerprints,
            trains=stage == "fit",
        )

    def train_dataloader(self) -> DataLoader:
        """Return the loader of the training samples, which fill at least one batch in
        each process."""
        trainer = self.trainer or ALONE
        # with overfit_batches the same batches come in each epoch
        shuffle = not trainer.overfit_batches
        drop_last = self.drop_last and shuffle
        if isinstance(self.training_samples, StreamSamples):
            return self._stream_loader(
                self.training_samples,
                even=True,
                batch_size=self.batch_size,
                shuffle=shuffle,
                block_size=self.shuffle_block if shuffle else 1,
                drop_last=drop_last,
                seed=self.shuffle_seed or 0,
            )
        num = len(self.training_samples)
        num_ranks = trainer.world_size
        if drop_last and num < num_ranks * self.batch_size:
            raise UserError(
                f"data.batch_size {self.batch_size} times {num_ranks} processes: "
                f"only {num} training samples; try --data.drop_last false"
            )
        loader = self._loader(
            self.training_samples,
            self.batch_size,
            shuffle=shuffle,
            even=True,
            drop_last=drop_last,
            seed=self.shuffle_seed or 0,  # None without a Trainer
            weights=self.train_weights,
        )
        if self.trainer:
            loader.trainer = self.trainer
            # Lightning sets the epoch after workers have begun to read
            loader.batch_sampler.set_epoch(epochs_done(self.trainer))
        return loader

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.splits["val"], self.eval_batch_size)

    def test_dataloader(self) -> DataLoader | list:
        """Return the loader of the test set, or an empty list if there is none."""
        if "test" not in self.splits:
            return []
        return self._loader(self.splits["test"], self.eval_batch_size)

    def predict_dataloader(self, split: str = "test") -> DataLoader:
        """Return a split in torch's DataLoader, in the order of the data. Lightning
        makes one for each process from its keyword arguments."""
        return DataLoader(
            self.splits[split],
            batch_size=self.eval_batch_size,
            collate_fn=share_from_worker,
            num_workers=self.num_workers,
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Apply `transform_batch` to a batch on its device, and standardise targets."""
        batch = self.transform_batch(batch, self.trainer.training)
        if self.target_scale:
            # copied once: a copy waits for the GPU
            device = self.trainer.strategy.root_device
            mean, std = self.target_scale = [x.to(device) for x in self.target_scale]
            targets = map_tensors(lambda x: (x - mean) / std, batch[1:])
            batch = with_parts(batch, batch[0], *targets)
        # with a precision such as bf16-true the weights, and so the inputs, are not
        # float32
        return self.trainer.precision_plugin.convert_input(batch)

    def read_inputs(self, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield (name, sample) for each input in a file, for predict.py. Override this
        for data other than uint8 images.

        The sample is either a tensor, which is an input without a target, or a sample
        of the kind that `load` returns, which `collate` takes. Raise UserError for a
        file that cannot be read.
        """
        spec = self.input_spec  # (0, C, H, W) for images
        if spec is None or spec.dim() != 4 or spec.dtype != torch.uint8:
            raise UserError(
                f"{type(self).__name__} has no read_inputs(path), nor uint8 images"
            )
        _, channels, height, width = spec.shape
        yield str(path), read_image(path, (channels, height, width))

    def to_text(self, values: Tensor) -> str:
        """Return the text of a sample in a text task. Override it: this version prints
        the numbers. values: Token numbers, int64 (length,)."""
        return " ".join(map(str, values.tolist()))

    def seeded_part(
        self,
        num: int,
        split: Literal["train", "test"],
        groups: Any = None,
        times: Any = None,
    ) -> Tensor:
        """Return the indices of a split, int64, for data without a test set. `load` can
        use it. A fifth of the samples is for "test", the others are for "train", the
        same in every run. With folds, all indices are returned, because a fold of the
        training set is the test set.

        Args:
            num: The number of all samples.
            groups: The group of each sample, for val_split grouped: no group is in
                both splits. The method `groups` then need not be overridden.
            times: The times of each sample, for val_split ordered: the newest fifth is
                for "test". The method `times` then need not be overridden. None stands
                for the order of the samples.
        """
        everything = torch.arange(num)
        given = {"grouped": groups, "ordered": times}.get(self.val_split)
        if self.fold:
            self.split_groups[split] = given
            return everything
        if self.trained_fold:  # the network has seen samples of this test set
            raise UserError(
                "data.num_folds null: the fold is the only test set of this data",
                status=2,
            )
        if self.val_split not in PLACES:
            order = seeded_order(num, self.test_seed)
            if split == "test":
                return order[: num // 5]
            return order[num // 5 :]
        places = PLACES[self.val_split](given, num, type(self).__name__)
        chosen = part_indices(self.val_split, 0.2, self.test_seed, everything, places)
        test, train = divide(self.val_split, self.gap, everything, chosen, places)
        self.num_left_out["test"] = num - len(test) - len(train)
        part = {"test": test, "train": train}[split]
        self.split_groups[split] = places[part]
        return part

    def _loader(self, samples: Any, batch_size: int, **order: Any) -> Any:
        """Return the loader of this process. order: Options of EpochBatchSampler."""
        if isinstance(samples, StreamSamples):
            return self._stream_loader(samples, even=False, batch_size=batch_size)
        trainer = self.trainer or ALONE
        ranks = {"rank": trainer.global_rank, "num_ranks": trainer.world_size}
        return make_loader(
            samples,
            EpochBatchSampler(len(samples), batch_size, **ranks, **order),
            trainer.strategy.root_device,
            num_workers=self.num_workers,
            resident=self.resident,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers,
        )

    def _stream_loader(
        self, samples: StreamSamples, even: bool, **options: Any
    ) -> StreamLoader:
        """Return the loader of a stream, for this process. options: Options of
        StreamSamples."""
        trainer = self.trainer or ALONE
        ranks = {"rank": trainer.global_rank, "num_ranks": trainer.world_size}
        pin_memory = self.pin_memory
        if pin_memory is None:
            pin_memory = trainer.strategy.root_device.type == "cuda"
        return StreamLoader(
            replace(samples, **ranks, **options),
            self._position,
            even,
            num_workers=self.num_workers,
            pin_memory=pin_memory,
        )

    def _position(self) -> tuple[int, int]:
        """Return the number of this epoch, and of its batches that are trained."""
        if not self.trainer:
            return 0, 0
        return epochs_done(self.trainer), batches_trained(self.trainer)

    def _load_stream(self, samples: Any) -> None:
        """Make the splits of a stream of training samples, of which no part can be
        taken. Raise UserError for settings that need the number of a sample."""
        takes_val = self.val_fraction and "val" not in self.own_splits
        is_weighted = is_overridden("sample_weights", self, BaseDataModule)
        if takes_val or self.fold or self.val_split != "random" or is_weighted:
            raise UserError(
                f"the train set of {type(self).__name__} is a stream: its samples have "
                "no numbers, for a validation part, folds, val_split or sample_weights",
                'return a split "val" from load, too, and add it to own_splits',
                2,
            )
        self.splits["train"] = self.training_samples = samples
        if self._takes_training():
            self.training_samples = self._load_split("train", training=True)
        self._load_val()

    def _load_train_and_val(self) -> None:
        """Load the training set, and take the test fold and the validation samples from
        it, as far as they are needed. The rest is for the training."""
        samples = self._load_split("train")
        if isinstance(samples, StreamSamples):
            self._load_stream(samples)
            return
        places = None
        if self.val_split in PLACES:
            given = self._places(samples)
            places = PLACES[self.val_split](given, len(samples), type(self).__name__)
        classes, places = split_labels(samples, self.val_split, places)
        left: Any = slice(None)  # positions that no split has taken yet: all
        if self.fold:
            chosen = fold_indices(self.val_split, self.fold, classes, places)
            left = self._take("test", chosen, left, samples, places)
        if "val" not in self.own_splits and self.val_fraction > 0:
            kind, fraction, seed = self.val_split, self.val_fraction, self.split_seed
            if isinstance(samples, DatasetSamples) and self._computes_parts(samples):
                left = self._take_computed_val(samples)
            else:
                chosen = part_indices(kind, fraction, seed, classes[left], places[left])
                left = self._take("val", chosen, left, samples, places)
        else:
            self._load_val()
        if isinstance(left, slice) and self.val_split != "random":
            say(
                f"data.val_split {self.val_split} chooses no validation samples: the "
                "data has its own, or val_fraction is 0"
            )
        self._keep_for_training(left, samples, places)

    def _places(self, samples: Samples) -> Any:
        """Return the groups or the times of the training samples."""
        if self.val_split == "grouped":
            return self.groups("train")
        times = self.times("train")
        self.split_groups.clear()  # times of many windows take much memory
        if samples.times is None:
            return times
        if times is not None and not np.array_equal(times, samples.times):
            raise UserError(
                f"the times of {type(self).__name__} are not those of its windows",
                "for windows w: seeded_part(len(w), split, times=w.times)",
            )
        return samples.times

    def _take(
        self, split: str, chosen: Tensor, left: Any, samples: Samples, places: Any
    ) -> Tensor:
        """Make a split of the samples at the positions left[chosen]. Return the others
        that are for training or validation."""
        index = torch.arange(len(samples))[left]
        part, left = divide(self.val_split, self.gap, index, chosen, places)
        self.num_left_out[split] = len(index) - len(part) - len(left)
        self.splits[split] = samples.select(part)
        if self.val_split == "grouped":
            self.split_groups[split] = places[part]
        self.fingerprints[f"chosen {split}"] = hash_of(chosen)
        return left

    def _computes_parts(self, samples: DatasetSamples) -> bool:
        """Return whether the parts are computed while they are used. In memory, their
        lists would take 8 bytes a sample in each process."""
        is_random = self.val_split == "random" and not self.fold
        return len(samples) >= LARGE and is_random and not self.lists_parts

    def _take_computed_val(self, samples: DatasetSamples) -> PermutedPart:
        """Make the validation split of a random part. Return the others."""
        num = len(samples)
        size = part_size(num, self.val_fraction)
        part = PermutedPart(num, self.split_seed, 0, size)
        self.splits["val"] = samples.select(part)
        self.fingerprints["chosen val"] = str(part)
        return replace(part, first=size, last=num)

    def _keep_for_training(self, left: Any, samples: Samples, places: Any) -> None:
        """Make the split of the training. Load its samples a second time, with the
        transforms of training, if `load` takes the argument `training`."""
        training_samples, targets = samples, samples.targets
        if self._takes_training():
            training_samples = self._load_split("train", training=True)
        if len(training_samples) != len(samples):
            raise UserError(
                f"load('train', training): {len(training_samples)} samples with "
                f"training, and {len(samples)} without",
                "return the same samples in the same order, with other transforms",
            )
        num = len(samples)
        if not isinstance(left, slice):
            samples = samples.select(left)
            training_samples = training_samples.select(left)
        self.splits["train"] = samples
        self.training_samples = training_samples
        if not isinstance(left, PermutedPart):
            self.constants = constants_of(targets, num, left)
        if self.val_split == "grouped":
            self.split_groups["train"] = places[left]
        weights = self.sample_weights("train")
        if weights is not None:
            if isinstance(left, PermutedPart):
                left = left[torch.arange(len(left))]
            weights = as_tensors(weights).double()
            if weights.shape != (num,):
                raise UserError(
                    f"sample_weights: {[*weights.shape]} weights for {num} samples",
                    "return one number for each sample of load",
                )
            if num > MAX_WEIGHTS:
                raise UserError(
                    f"sample_weights: torch draws from at most {MAX_WEIGHTS:,} samples",
                    "leave sample_weights out, or load fewer samples",
                )
            self.train_weights = weights[left]

    def _takes_training(self) -> bool:
        return "training" in inspect.signature(self.load).parameters

    def _load_val(self) -> None:
        """Load the validation set of the data, or with val_fraction 0 take the test
        set."""
        if "val" in self.own_splits:
            self.splits["val"] = self._load_split("val")
            return
        self._load_test()
        if "test" not in self.splits:
            raise UserError(
                "data.val_fraction 0 validates on the test set: there is none",
                status=2,
            )
        self.splits["val"] = self.splits["test"]

    def _load_test(self) -> None:
        """Load the test set, unless it is loaded already or the data has none."""
        if "test" not in self.splits and "test" in self.own_splits:
            self.splits["test"] = self._load_split("test")

    def _load_split(self, split: Any, training: bool = False) -> Any:
        """Load a split, and set `input_spec`."""
        name = f"the {split} set of {type(self).__name__}"
        if self._takes_training():
            loaded = self.load(split, training=training)  # type: ignore[call-arg]
        else:
            loaded = self.load(split)
        collate = None
        if is_overridden("collate", self, BaseDataModule):
            collate = self.collate
        if isinstance(loaded, IterableDataset):
            samples: Any = StreamSamples(
                loaded, state_of(loaded), collate or default_collate
            )
            check_stream(samples, name)
        else:
            samples = as_samples(loaded, name, collate, self.keeps_float64)
            if not len(samples):
                raise UserError(f"{name} is empty")
        if not training:
            self.fingerprints[split] = fingerprint(samples)
        inputs = inputs_of(samples.__getitems__([0]))
        if isinstance(inputs, Tensor):
            shape = tuple(inputs.shape[1:])
            if self.image_shape and shape != tuple(self.image_shape):
                raise UserError(
                    f"{name} has samples {shape} for image_shape {self.image_shape}"
                )
            self.input_spec = inputs.new_empty(0, *shape)
        if self.classes:
            check_targets(samples, len(self.classes), name)
        return samples

    def never_has(self, target: int | None) -> bool:
        """Return whether no loaded split can have this target: all targets are class
        numbers, and batches are not transformed."""
        if target is None or is_overridden("transform_batch", self, BaseDataModule):
            return False
        for samples in self.splits.values():
            classes = class_numbers(samples)
            if classes is None or (classes == target).any():
                return False
        return True

    def __getstate__(self) -> Values:
        """Return the attributes for a worker process. A worker only calls `collate` of
        this object, so it needs neither the Trainer nor the samples."""
        samples: Values = {"splits": {}, "split_groups": {}}
        return {**vars(self), **samples, "training_samples": None, "trainer": None}

    def state_dict(self) -> Values:
        """Return the values for a checkpoint. A subclass adds those that it computes
        from the data, such as a mean."""
        state: Values = {
            "shuffle_seed": self.shuffle_seed,
            "classes": self.classes,
            "empty_batch": self.input_spec,  # the key of version 0.3, for its files
            "test_seed": self.test_seed,
            "lists_parts": self.lists_parts,
            "fingerprints": self.fingerprints,
            "constants": self.constants,
            "target_scale": map_tensors(Tensor.cpu, self.target_scale),
        }
        if self.fold:
            state["fold"] = list(self.fold)
        return state

    def load_state_dict(self, state_dict: Values) -> None:
        """Take over the values of a checkpoint, whose classes and fold have to be those
        of the data."""
        classes = state_dict["classes"]
        if "train" in self.splits and self.classes != classes:
            raise UserError(
                f"the checkpoint has the classes {', '.join(classes)[:100]}",
                f"the data has others: {', '.join(self.classes)[:100]}",
            )
        self.shuffle_seed = state_dict["shuffle_seed"]
        self.constants = state_dict.get("constants", self.constants)
        self.lists_parts = state_dict.get("lists_parts", True)
        self.target_scale = state_dict.get("target_scale")
        self.classes = classes
        # in checkpoints up to version 0.3, split_seed chose the test set
        self.test_seed = state_dict.get("test_seed", self.split_seed)
        # earlier versions have none
        self.saved_fingerprints = dict(state_dict.get("fingerprints", {}))
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
        """Raise UserError: Lightning's method would build any class that a file names;
        `lightbase.load` does so only for your files."""
        raise UserError(
            f"lightbase.load({str(checkpoint_path)!r}) gives the module and its data"
        )


class ArrayData(BaseDataModule):
    """Samples that exist already: arrays, such as a pair (inputs, targets), or
    Datasets. The inputs are not normalised.

    Args:
        class_names: The names of the classes: target i stands for class_names[i].
        image_shape: Channels, height and width of the inputs if they are images. Then
            the run has pictures.
        arguments: Arguments of BaseDataModule, such as batch_size.
    """

    def __init__(
        self,
        class_names: list[str] | None = None,
        image_shape: tuple[int, int, int] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.classes = class_names or []
        self.image_shape = image_shape
        self.parts: Values = {}
        self.own_splits = self.parts  # without "val", some of "train" is for validation

    def load(self, split: Literal["train", "test"]) -> Any:
        return self.parts[split]


def in_units(data: Any, numbers: Any) -> Any:
    """Return outputs, or targets of a batch, in the units of the data, see its argument
    `scale_targets`. numbers: Tensors in any structure, on the device of the batch."""
    if not isinstance(data, BaseDataModule) or not data.target_scale:
        return numbers
    mean, std = data.target_scale
    return map_tensors(lambda x: x * std + mean, numbers)


def loader_data(loaders: Values) -> LightningDataModule:
    """Return a data module of the user's own loaders, which are used as they are.

    loaders: "train", and if they are there "val" and "test".
    """
    data = LightningDataModule()
    for split, loader in loaders.items():
        if not isinstance(loader, DataLoader):
            raise UserError(f"train is a DataLoader, so {split} has to be one, too")
        setattr(data, f"{split}_dataloader", lambda loader=loader: loader)
    return data
