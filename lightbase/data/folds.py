"""Seeded splits: which samples are for validation, for the test, or in a fold of a
cross-validation."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightbase.data.batches import Samples
from lightbase.errors import UserError
from lightbase.ranks import say


class Fold(NamedTuple):
    """The fold that is the test set. Samples are dealt out to `num_folds` folds, by `seed`."""

    number: int
    num_folds: int
    seed: int


def fold_of_flags(number: int | None, num_folds: int | None, seed: int) -> Fold | None:
    """Raises UserError if one of the flags is missing, or the fold does not exist."""
    if number is None and num_folds is None:
        return None
    if number is None or num_folds is None or not number < num_folds or num_folds < 2:
        what = f"data.fold {number} with data.num_folds {num_folds}: there is no such fold"
        raise UserError(f"{what}\none of 5 folds is --data.num_folds 5 --data.fold 0", 2)
    return Fold(int(number), int(num_folds), seed)


def split_fold(samples: Samples, fold: Fold, has_classes: bool) -> tuple[Samples, Samples]:
    """The samples of the fold, and all others. Each class is dealt out over the folds: their sizes,
    and their numbers of samples of a class, differ by one at most."""
    num = len(samples)
    if num < fold.num_folds:
        raise UserError(f"data.num_folds {fold.num_folds}: there are only {num} samples", 2)
    order = seeded_order(num, fold.seed)
    labels = class_numbers(samples)
    if labels is not None:
        order = order[labels[order].argsort(stable=True)]
    elif has_classes:
        say("Folds: not stratified by class; the Dataset has no `targets`, their class numbers")
    folds = torch.empty_like(order)
    folds[order] = torch.arange(num) % fold.num_folds
    return split_by_mask(samples, folds == fold.number)


def split_validation(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """The share of the samples for validation, and the others."""
    if fraction == 1:
        raise UserError("data.val_fraction: 1 leaves no sample to train on; give a number <1", 2)
    num, num_val = len(samples), round(len(samples) * fraction)
    if not 0 < num_val < num:
        raise UserError(f"data.val_fraction {fraction} of {num} samples is {num_val} samples")
    return split_by_mask(samples, seeded_order(num, seed).argsort() < num_val)


def split_by_mask(samples: Samples, mask: Tensor) -> tuple[Samples, Samples]:
    """The samples where the mask, bool (N,), is true, and the others."""
    return samples.select(mask.nonzero().flatten()), samples.select((~mask).nonzero().flatten())


def seeded_order(num: int, seed: int) -> Tensor:
    """0 to num - 1, shuffled by the seed, equally on any machine."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def class_numbers(samples: Samples) -> Tensor | None:
    """int64 (N,), without reading a sample; None if they are not available."""
    try:
        targets = torch.as_tensor(samples.targets)
    except (TypeError, ValueError, RuntimeError):  # None, or no numbers
        return None
    is_one_integer_each = targets.shape == (len(samples),) and not targets.is_floating_point()
    return targets.long() if is_one_integer_each else None
