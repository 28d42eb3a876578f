"""Which samples of a training set are for validation; which are the fold that is tested, in a
cross-validation."""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from jsonargparse.typing import restricted_number_type
from torch import Tensor
from torch.utils.data import Subset

from lightbase.data.batches import Samples, TensorBatches
from lightbase.errors import UserError
from lightbase.ranks import say

if TYPE_CHECKING:
    Fraction = float
    NumFolds = int
else:
    Fraction = restricted_number_type("Fraction", float, [(">=", 0), ("<", 1)])
    NumFolds = restricted_number_type("NumFolds", int, (">=", 2))


@runtime_checkable
class KnowsTargets(Protocol):
    """A Dataset that has all its targets at hand, by the name that torchvision's have: class
    numbers (N,), or None."""

    targets: Any


class Fold(NamedTuple):
    """One fold: its number, of how many, and the seed that deals the samples out."""

    number: int
    num_folds: int
    seed: int

    def cut(self, samples: Samples, has_classes: bool) -> tuple[Samples, Samples]:
        """Its samples, and all others."""
        return parts(
            samples, folds_of(samples, self.num_folds, self.seed, has_classes) == self.number
        )


def asked_fold(number: int | None, num_folds: int | None, seed: int) -> Fold | None:
    """That of the flags. Raises UserError where one of them is missing or too large."""
    if number is not None and num_folds is not None and number < num_folds:
        return Fold(int(number), int(num_folds), seed)
    if num_folds is None and number is not None:
        raise UserError(f"data.fold {number}: of how many folds? give --data.num_folds 5, say", 2)
    if num_folds is not None:
        what = (
            f"data.num_folds {num_folds}: which is the test set?"
            if number is None
            else f"data.fold {number} is none"
        )
        every = (
            ",".join(map(str, range(num_folds))) if num_folds < 20 else f"0,1,...,{num_folds - 1}"
        )
        way_out = (
            f"give --data.fold 0 to {num_folds - 1}; all in turn: scripts/sweep.py "
            f"--search data.fold={every}"
        )
        raise UserError(f"{what}\n{way_out}", 2)
    return None


def trained_fold(was: list[int] | None, now: Fold | None) -> Fold | None:
    """That of a checkpoint, `was`. Raises UserError where samples of today's were trained on."""
    if was is not None and now is not None and list(now) != was:
        what = (
            f"data.fold {now.number}: the checkpoint was trained on it, to be tested on "
            f"fold {was[0]} of {was[1]}"
        )
        raise UserError(f"{what}\nleave num_folds, fold and split_seed out, or train anew", 2)
    return None if was is None else Fold(*was)


def seeded_part(num: int, split: str, seed: int, trained: Fold | None) -> Tensor:
    """A fifth of `num` for "test", the others for "train": indices."""
    if trained is not None:
        raise UserError(
            f"data.num_folds null: there is no test set but the fold, {trained.number}; train "
            "without folds",
            2,
        )
    order = seeded_order(num, seed)
    return order[: num // 5] if split == "test" else order[num // 5 :]


def seeded_order(num: int, seed: int) -> Tensor:
    """0 to num - 1, shuffled as the seed says, on any machine."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def parts(samples: Samples, chosen: Tensor) -> tuple[Samples, Samples]:
    """The samples that are chosen, bool (N,), and the others."""
    return samples.select(chosen.nonzero().flatten()), samples.select(
        chosen.logical_not().nonzero().flatten()
    )


def validation_and_rest(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    num, num_val = len(samples), round(len(samples) * fraction)
    if not 0 < num_val < num:
        raise UserError(
            f"data.val_fraction {fraction} of {num} samples leaves {num_val} for validation"
        )
    return parts(samples, seeded_order(num, seed).argsort() < num_val)


def folds_of(samples: Samples, num_folds: int, seed: int, has_classes: bool) -> Tensor:
    """The number of each sample's fold, (N,). Each class is dealt out over the folds in a seeded
    order: their sizes differ by one at most, and so do their numbers of samples of a class."""
    if len(samples) < num_folds:
        raise UserError(
            f"data.num_folds {num_folds}: there are {len(samples)} samples, and each fold "
            "needs one",
            2,
        )
    order = seeded_order(len(samples), seed)
    labels = labels_of(samples.targets if isinstance(samples, TensorBatches) else samples.dataset)
    if labels is not None and labels.shape == order.shape:
        order = order[labels[order].argsort(stable=True)]
    elif has_classes:
        say(
            "Folds: not stratified by class, since the Dataset has no `targets`, the class "
            "number of each sample"
        )
    folds = torch.empty_like(order)
    folds[order] = torch.arange(len(samples)) % num_folds
    return folds


def labels_of(source: Any) -> Tensor | None:
    """Class numbers (N,) of targets, or of a Dataset that has them at hand: none is read for it."""
    if isinstance(source, Subset):
        whole = labels_of(source.dataset)
        return None if whole is None else whole[torch.as_tensor(source.indices, dtype=torch.int64)]
    try:
        found = torch.as_tensor(source.targets if isinstance(source, KnowsTargets) else source)
    except (TypeError, ValueError, RuntimeError):  # no numbers
        return None
    return None if found.is_floating_point() or found.dim() != 1 else found.long()
