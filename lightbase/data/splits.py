"""Which samples are for training, validation and test: seeded splits, splits in time,
and folds.

A split depends only on the number of samples, their classes, groups and times, and the
seed, so it is the same on any machine. Stratified and grouped splits may change with
the version of scikit-learn.
"""

import hashlib
import warnings
from collections.abc import Iterator, Sized
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightbase.config.errors import UserError, say
from lightbase.data.loader import DatasetSamples, Samples, TensorBatches
from lightbase.data.sampler import seeded_order
from lightbase.data.tensors import spread, tensors_in

NUM_DRAWS = 50
"""How often a number of groups is drawn: more draws hardly come nearer to a share."""

NUM_READ = 8
"""How many samples a fingerprint reads."""

LISTS_OF_FILES = ("samples", "files", "images")
"""Attributes in which Datasets, such as those of torchvision, keep their files."""


class Fold(NamedTuple):
    """The fold that is the test set: fold `number`, from 0, of `num_folds` folds that
    `seed` chooses."""

    number: int
    num_folds: int
    seed: int


def fold_of_flags(number: int | None, num_folds: int | None, seed: int) -> Fold | None:
    """Return the fold of the flags data.fold, data.num_folds and data.split_seed."""
    if number is None and num_folds is None:
        return None
    if number is None or num_folds is None or not number < num_folds or num_folds < 2:
        raise UserError(
            f"data.fold {number} of data.num_folds {num_folds}: no such fold",
            "give both; the folds have the numbers from 0 to num_folds - 1",
            2,
        )
    return Fold(int(number), int(num_folds), seed)


def divide(
    kind: str, gap: float, index: Tensor, chosen: Tensor, places: Any
) -> tuple[Tensor, Tensor]:
    """Return the values of `index` at the chosen positions and the others, both in the
    order of `index`. With the kind "ordered", the others have to end before the chosen
    ones begin.

    kind, gap: The flags data.val_split and data.gap. places: See `fold_indices`.
    """
    is_chosen = torch.zeros(len(index), dtype=torch.bool)
    is_chosen[chosen] = True
    part, left = index[is_chosen], index[~is_chosen]
    if kind == "ordered":
        left = left[places[left, -1] + gap < places[part, 0].min()]
        if not len(left):
            raise UserError("data.val_split ordered leaves no training samples")
    return part, left


def fold_indices(kind: str, fold: Fold, classes: Tensor, places: Any) -> Tensor:
    """Return the positions of the samples in a fold, int64.

    The sizes of two folds differ by at most one, and so do the numbers of samples of
    each class: the folds are stratified. With the kind "grouped", no group is in two
    folds, and the folds are as equal as whole groups allow. With "ordered" they follow
    one another, as the tests of scikit-learn's TimeSeriesSplit do: the oldest samples
    are in none. The folds are as equal in the number of different times.

    Args:
        kind: The flag data.val_split.
        classes: The class number of each sample, int64 (N,), or 0 if it is unknown.
        places: For "grouped" the number of each sample's group, an array (N,). For
            "ordered" the times of each sample, see `time_spans`.
    """
    num = len(classes)
    if num < fold.num_folds:
        raise UserError(
            f"data.num_folds {fold.num_folds}: there are only {num} samples", status=2
        )
    if kind == "ordered":
        from sklearn.model_selection import TimeSeriesSplit  # it takes seconds

        times, numbers = places[:, 0].unique(return_inverse=True)
        parts = [*parts_of(TimeSeriesSplit(fold.num_folds), times)]
        return torch.isin(numbers, parts[fold.number]).nonzero()[:, 0]
    if kind == "grouped":
        from sklearn.model_selection import StratifiedGroupKFold  # it takes seconds

        splitter = StratifiedGroupKFold(
            fold.num_folds, shuffle=True, random_state=fold.seed
        )
        if classes.unique(return_counts=True)[1].max() < fold.num_folds:
            classes = 0 * classes  # no class has a sample for each fold
        with warnings.catch_warnings(action="ignore"):  # a class may have few samples
            return [*parts_of(splitter, classes, places)][fold.number]
    order = seeded_order(num, fold.seed)
    # class by class, shuffled within a class; then every n-th sample is taken
    order = order[classes[order].argsort(stable=True)]
    return order[fold.number :: fold.num_folds]


def part_size(num: int, fraction: float) -> int:
    """Return the number of samples in a share of `num` samples."""
    size = round(num * fraction)
    if not 0 < size < num:
        raise UserError(
            f"data.val_fraction {fraction} of {num} samples is {size} samples",
            "give more samples, or another --data.val_fraction",
        )
    return size


def part_indices(
    kind: str, fraction: float, seed: int, classes: Tensor, places: Any
) -> Tensor:
    """Return the positions of the samples in a part of a set, int64.

    With the kind "stratified", the part has the same share of each class, within one
    sample. With "grouped", all samples of a group are in the part, or none: groups are
    drawn many times, and the draw with the nearest number of samples is taken. With
    "ordered", the part has the samples that begin last. It has more if times are equal.

    Args:
        fraction: The share of the samples, in [0, 1].
        kind, classes, places: See `fold_indices`.
    """
    num_chosen = part_size(len(classes), fraction)
    if kind == "ordered":
        starts = places[:, 0]
        border = starts.kthvalue(len(starts) - num_chosen + 1).values
        return (starts >= border).nonzero()[:, 0]
    if kind == "random":
        return seeded_order(len(classes), seed)[:num_chosen]
    from sklearn.model_selection import GroupShuffleSplit, StratifiedShuffleSplit

    if kind == "stratified":
        splitter = StratifiedShuffleSplit(1, test_size=num_chosen, random_state=seed)
        return next(parts_of(splitter, classes))
    num_groups = len(np.unique(places))
    draws = []
    # without the largest groups, a share of the samples takes more groups
    for share in (fraction, 2 * fraction, 4 * fraction):
        size = min(max(1, round(share * num_groups)), num_groups - 1)
        splitter = GroupShuffleSplit(NUM_DRAWS, test_size=size, random_state=seed)
        draws.append(parts_of(splitter, classes, places))
    return min(chain(*draws), key=lambda part: abs(len(part) - num_chosen))


def parts_of(splitter: Any, classes: Tensor, groups: Any = None) -> Iterator[Tensor]:
    """Yield the positions of the samples in each part that a splitter of scikit-learn
    makes, int64."""
    for _, part in splitter.split(classes, classes, groups):
        yield torch.as_tensor(part)


def split_labels(samples: Samples, kind: str, places: Any = None) -> tuple[Tensor, Any]:
    """Return the labels by which samples are divided: class numbers, int64 (N,), and
    the `places` of `fold_indices`. Unknown labels become zeros. kind: The flag
    data.val_split."""
    num = len(samples)
    classes = class_numbers(samples)
    if classes is None:
        if kind == "stratified":
            raise UserError(
                "data.val_split stratified: the classes of the samples are unknown",
                "they are int64 targets (N,), or the attribute `targets` of a Dataset",
                2,
            )
        classes = torch.zeros(1, dtype=torch.int64).expand(num)  # one number in memory
    if places is None:
        places = np.broadcast_to(np.zeros(1), num)
    return classes, places


def group_numbers(labels: Any, num: int, name: str) -> Any:
    """Return a number for the group of each sample, int64 (num,).

    Args:
        labels: Integers or texts. Equal texts are a group, so missing labels are one.
        name: The class of the data module, for the message.
    """
    _, groups = np.unique(np.asarray(labels).astype(str), return_inverse=True)
    if groups.shape != (num,):
        raise UserError(
            f"data.val_split grouped: {name} has {num} samples, and groups of the "
            f"shape {groups.shape}",
            f"write {name}.groups(split): it returns a label for each sample; without "
            "a test set, give them to seeded_part",
            2,
        )
    return groups


def time_spans(times: Any, num: int, name: str) -> Tensor:
    """Return the times of each sample, float64 (num, 1), or (num, 2) with the first and
    the last time of a sample that has several. Dates become hours.

    Args:
        times: Numbers, datetime64 or texts of ISO dates, (num,) or (num, 2). None
            stands for the positions of the samples.
        name: The class of the data module, for the message.
    """
    values: Any = np.arange(num)
    if times is not None:
        values = np.asarray(times)
    try:
        if values.dtype.kind not in "iuf":
            since_1970 = values.astype("datetime64[us]").view("timedelta64[us]")
            values = since_1970 / np.timedelta64(1, "h")
        spans = torch.from_numpy(values.reshape(num, -1)).double()
        if spans.isnan().any():
            raise ValueError("some are missing")
    except ValueError as error:
        raise UserError(
            f"the times of {num} samples of {name}: {error}",
            "give a number, or an ISO date such as 2026-01-31 12:00, for each sample",
        ) from error
    return spans


def measure_targets(samples: Samples) -> list[Tensor]:
    """Return the mean and the standard deviation of the targets of a set, float32, for
    each number of a target. The deviation of equal numbers is 1."""
    targets = samples.targets
    if not isinstance(targets, Tensor):
        raise UserError("data.scale_targets: load has to return arrays or windows")
    std, mean = torch.std_mean(targets.double(), dim=0, correction=0)
    return [mean.float(), torch.where(std > 0, std, 1).float()]


def hash_of(index: Tensor) -> str:
    return hashlib.sha256(index.numpy().tobytes()).hexdigest()


def check_unchanged(
    name: str, saved: dict[str, str], now: dict[str, str], trains: bool
) -> None:
    """Raise UserError if a split differs from the checkpoint. If no training follows,
    print a line instead.

    Args:
        name: The class of the data module, for the message.
        saved, now: {split: hash of its samples}. Only splits in both are compared.
        trains: Whether a training follows. Then the test set of the data may differ.
    """
    changed = [split for split in saved if now.get(split, saved[split]) != saved[split]]
    if trains:
        changed = [split for split in changed if split != "test"]
    if not changed:
        return
    problem = (
        f"{name} has other {changed[0]} samples than in the training, or in another "
        "order: the data or a package has changed"
    )
    if trains:
        raise UserError(
            problem,
            "restore the data, and the versions in environment.txt, or start a new run "
            "without --ckpt_path",
        )
    say(f"Warning: {problem}. The training may have had samples of this split")


def fingerprint(samples: Samples) -> str:
    """Return a hash that tells the samples of a set, and their order, from others, on
    any machine and in any folder.

    It depends on the classes, and on some samples of arrays, or the names of the files
    of a Dataset. If that has neither `targets` nor files, a few samples are read, and
    count unless they are random.
    """
    if not isinstance(samples, Sized):  # a stream
        return hashlib.sha256(bytes_of(samples.__getitems__([0]))).hexdigest()
    dataset: Any = samples
    if isinstance(samples, DatasetSamples):
        dataset = samples.dataset
    content = names_of_files(dataset) + bytes_of(class_numbers(samples))
    if not content or isinstance(dataset, TensorBatches):
        for i in spread(len(samples), NUM_READ).tolist():
            first = bytes_of(samples.__getitems__([i]))
            if first == bytes_of(samples.__getitems__([i])):
                content += first
    return hashlib.sha256(content + str(len(samples)).encode()).hexdigest()


def names_of_files(dataset: Any) -> bytes:
    """Return the names of a Dataset's files, without their folders, or b"" if there are
    none, see LISTS_OF_FILES."""
    names = [Path(file).name for files in lists_of_files(dataset) for file in files]
    return "\n".join(names).encode(errors="replace")


def lists_of_files(dataset: Any) -> Iterator[list[str | Path]]:
    """Yield the paths in each list of files of a Dataset, see LISTS_OF_FILES."""
    for attribute in LISTS_OF_FILES:
        files = getattr(dataset, attribute, None)
        if isinstance(files, list):
            # torchvision's `samples` are pairs with the class number
            files = [file[0] if isinstance(file, tuple) else file for file in files]
            yield [file for file in files if isinstance(file, str | Path)]


def bytes_of(values: Any) -> bytes:
    """Return the content of tensors, in any structure, for a hash. Floats are rounded
    to 8 bits: generated data may differ in the last bits on another machine."""
    content = b""
    for tensor in tensors_in(values):
        if tensor.is_floating_point():
            tensor = tensor.bfloat16().float()
        content += tensor.numpy().tobytes()
    return content


def constants_of(targets: Any, num: int, index: Any) -> dict[str, Tensor]:
    """Return the predictions that need no network, by name: "largest_class", int64 (),
    and "training_mean", float32 (...), of targets (N,) or (N, outputs). Return none if
    they are not known numbers.

    num: The number of samples.
    index: The positions of those that train.
    """
    try:
        targets = torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError):  # None, or texts
        return {}
    if targets.dim() not in (1, 2) or len(targets) != num:
        return {}
    targets = targets[index]
    constants = {"training_mean": targets.double().mean(0).float()}
    # numbers above 1, such as prices, are no labels
    if targets[0].numel() == 1 and not (
        targets.is_floating_point() and targets.max() > 1
    ):
        labels = targets[targets >= 0]  # a loss ignores the others, such as -100
        if len(labels):
            constants["largest_class"] = labels.mode().values.long()
    return constants


def class_numbers(samples: Samples) -> Tensor | None:
    """Return the class number of each sample, int64 (N,), or None if the targets are
    unknown or not one integer for each sample. No sample is read: arrays are in memory,
    and a Dataset may have an attribute `targets`."""
    try:
        targets = torch.as_tensor(samples.targets)
    except (TypeError, ValueError, RuntimeError):  # they are None, or not numbers
        return None
    if targets.shape != (len(samples),) or targets.is_floating_point():
        return None
    return targets.long()
