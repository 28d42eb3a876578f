"""Which samples are for training, validation and test: seeded splits and folds.

`BaseDataModule` calls these functions. A split depends only on the number of samples,
their classes and the seed, so it is the same on any machine.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightbase.core.batches import Samples, seeded_order
from lightbase.core.errors import UserError


class Fold(NamedTuple):
    """The fold that is the test set. The samples are divided into `num_folds` folds;
    this is fold `number`, from 0. `seed` decides which samples are in which fold."""

    number: int
    num_folds: int
    seed: int


def fold_of_flags(number: int | None, num_folds: int | None, seed: int) -> Fold | None:
    """Return the fold of the flags, or None if both are missing. Raise UserError if
    only one is given, if there are fewer than two folds, or if the fold does not exist.

    Args:
        number: The flag data.fold.
        num_folds: The flag data.num_folds.
        seed: The flag data.split_seed.
    """
    if number is None and num_folds is None:
        return None
    if number is None or num_folds is None or not number < num_folds or num_folds < 2:
        raise UserError(
            f"data.fold {number} of data.num_folds {num_folds}: no such fold",
            "give both; the folds have the numbers from 0 to num_folds - 1",
            2,
        )
    return Fold(int(number), int(num_folds), seed)


def split_fold(samples: Samples, fold: Fold) -> tuple[Samples, Samples]:
    """Return two sets: the samples of the fold, and all other samples.

    The sizes of two folds differ by at most one. If the class numbers are known without
    reading samples (see `class_numbers`), the folds are stratified: of each class, two
    folds have equally many samples or differ by one. Raise UserError if there are fewer
    samples than folds.
    """
    num = len(samples)
    if num < fold.num_folds:
        raise UserError(
            f"data.num_folds {fold.num_folds}: there are only {num} samples", status=2
        )
    order = seeded_order(num, fold.seed)
    labels = class_numbers(samples)
    if labels is not None:
        # class by class, shuffled within a class; then every n-th sample is taken
        order = order[labels[order].argsort(stable=True)]
    return divide(samples, order[fold.number :: fold.num_folds])


def split_validation(
    samples: Samples, fraction: float, seed: int
) -> tuple[Samples, Samples]:
    """Return two sets: the samples for validation, chosen at random, and the others.

    Raise UserError if the fraction makes one of the sets empty.

    Args:
        fraction: The share of the samples for validation, in [0, 1].
    """
    num = len(samples)
    num_val = round(num * fraction)
    if not 0 < num_val < num:
        raise UserError(
            f"data.val_fraction {fraction} of {num} samples is {num_val} samples",
            "give more samples, or another --data.val_fraction",
        )
    return divide(samples, seeded_order(num, seed)[:num_val])


def divide(samples: Samples, chosen: Tensor) -> tuple[Samples, Samples]:
    """Return two sets: the chosen samples, and all others. Both are in the order of the
    data set.

    Args:
        chosen: The positions of the chosen samples, int64 (M,), in any order.
    """
    is_chosen = torch.zeros(len(samples), dtype=torch.bool)
    is_chosen[chosen] = True
    others = samples.select((~is_chosen).nonzero().flatten())
    return samples.select(is_chosen.nonzero().flatten()), others


def class_numbers(samples: Samples) -> Tensor | None:
    """Return the class number of each sample, int64 (N,). Return None if the targets
    are not one integer for each sample, or if they are unknown. No sample is read:
    arrays are in memory, and a Dataset may have an attribute `targets`."""
    try:
        targets = torch.as_tensor(samples.targets)
    except (TypeError, ValueError, RuntimeError):  # they are None, or not numbers
        return None
    if targets.shape != (len(samples),) or targets.is_floating_point():
        return None
    return targets.long()
