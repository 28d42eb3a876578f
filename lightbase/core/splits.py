"""Which samples are for training, validation and test: seeded splits and folds."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightbase.core.batches import Samples
from lightbase.core.errors import UserError


class Fold(NamedTuple):
    """The fold that is the test set. Samples are dealt out to `num_folds` folds, by
    `seed`."""

    number: int
    num_folds: int
    seed: int


def fold_of_flags(number: int | None, num_folds: int | None, seed: int) -> Fold | None:
    """Return the fold, or None without folds. Raise UserError if one of the flags is
    missing, or the fold does not exist."""
    if number is None and num_folds is None:
        return None
    if number is None or num_folds is None or not number < num_folds or num_folds < 2:
        raise UserError(
            f"data.fold {number} of data.num_folds {num_folds}: no such fold", status=2
        )
    return Fold(int(number), int(num_folds), seed)


def split_fold(samples: Samples, fold: Fold) -> tuple[Samples, Samples]:
    """Return the samples of the fold, and all others.

    The sizes of the folds differ by one at most. So do their numbers of samples of a
    class, for arrays, and for a Dataset that has its class numbers as `targets`. Raise
    UserError if there are fewer samples than folds.
    """
    num = len(samples)
    if num < fold.num_folds:
        raise UserError(
            f"data.num_folds {fold.num_folds}: there are only {num} samples", status=2
        )
    order = seeded_order(num, fold.seed)
    labels = class_numbers(samples)
    if labels is not None:
        order = order[labels[order].argsort(stable=True)]
    return divide(samples, order[fold.number :: fold.num_folds])


def split_validation(
    samples: Samples, fraction: float, seed: int
) -> tuple[Samples, Samples]:
    """Return the samples for validation, and the others.

    Args:
        fraction: The share of the samples that is for validation, in [0, 1]. Raise
            UserError if this is no sample, or all of them.
    """
    num = len(samples)
    num_val = round(num * fraction)
    if not 0 < num_val < num:
        raise UserError(
            f"data.val_fraction {fraction} of {num} samples is {num_val} samples"
        )
    return divide(samples, seeded_order(num, seed)[:num_val])


def divide(samples: Samples, chosen: Tensor) -> tuple[Samples, Samples]:
    """Return the samples at the chosen positions, int64 (M,), and all others, each in
    the order of the data set."""
    is_chosen = torch.zeros(len(samples), dtype=torch.bool)
    is_chosen[chosen] = True
    others = samples.select((~is_chosen).nonzero().flatten())
    return samples.select(is_chosen.nonzero().flatten()), others


def seeded_order(num: int, seed: int) -> Tensor:
    """Return 0 to num - 1, shuffled by the seed, equally on any machine."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def class_numbers(samples: Samples) -> Tensor | None:
    """Return the class of each sample, int64 (N,), or None if the samples do not have
    one integer each as target. No sample is read."""
    try:
        targets = torch.as_tensor(samples.targets)
    except (TypeError, ValueError, RuntimeError):  # None, or not numbers
        return None
    if targets.shape != (len(samples),) or targets.is_floating_point():
        return None
    return targets.long()
