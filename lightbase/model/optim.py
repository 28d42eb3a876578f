"""Optimizers, parameter groups and learning-rate schedules by name."""

import inspect
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightbase.compat import forget_train_loader, make_train_loader
from lightbase.config.errors import (
    SEE_HELP,
    UserError,
    did_you_mean,
    first_line,
    imported,
)

Options = dict[str, Any]
"""Arguments of an optimizer or a scheduler, or a parameter group, by name."""

IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}
"""Options that choose how a step is computed. An optimizer takes at most one."""

FUSED_ON = {
    torch.optim.SGD: ("cpu", "cuda"),
    torch.optim.Adam: ("cpu", "cuda"),
    torch.optim.AdamW: ("cpu", "cuda"),
    torch.optim.Adagrad: ("cpu",),  # torch 2.11 refuses it on a GPU at the first step
}
"""The types of devices on which torch has a fused step."""

MISTAKES = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
)
"""What a class raises for arguments that it cannot use."""


class WarmupCosineLR(LambdaLR):
    """Raise the rate in a line over `warmup_steps`, then lower it along half a cosine
    to 0 at `total_steps`.

    The factor of the rate is (step + 1) / warmup_steps during the warm-up, so it is
    never 0 there. The cosine is from Loshchilov and Hutter, "SGDR", 2017; the warm-up
    is from Goyal et al., "Accurate, large minibatch SGD", 2017.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps {warmup_steps} is negative")

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return (1 + math.cos(math.pi * min(progress, 1))) / 2

        super().__init__(optimizer, factor)
        self.total_steps = total_steps  # a resume compares it


class FinalDecayLR(LambdaLR):
    """Keep the rate, then lower it in a line to 0 over the last `decay_fraction`, in
    (0, 1], of `total_steps`: the cooldown of Zhai et al., "Scaling vision
    transformers", 2022."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, decay_fraction: float = 0.1
    ) -> None:
        if not 0 < decay_fraction <= 1:
            raise ValueError(f"decay_fraction {decay_fraction} is not in (0, 1]")

        def factor(step: int) -> float:
            return min(1.0, max(0.0, 1 - step / total_steps) / decay_fraction)

        super().__init__(optimizer, factor)
        self.total_steps = total_steps  # a resume compares it


SCHEDULERS = {"WarmupCosineLR": WarmupCosineLR, "FinalDecayLR": FinalDecayLR}
"""The schedulers of this file by name."""

MADE_FOR_STEPS = {"OneCycleLR", "CyclicLR", *SCHEDULERS}
"""Schedulers that step after each step by default. Others step after each epoch."""

KINDS = {
    "optimizer": (torch.optim, Optimizer),
    "scheduler": (lr_scheduler, LRScheduler),
}
"""The module that has the classes of a kind, and their base class."""


def find_class(kind: str, name: str) -> Any:
    """Return the class of an "optimizer" or "scheduler" by its name in torch or in this
    file, or by its import path."""
    module, base = KINDS[kind]
    cls = SCHEDULERS.get(name) or getattr(module, name, None)
    if cls is None and "." in name:
        cls = imported(f"model.{kind}", name, base)
    if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
        return cls
    hint = did_you_mean(name, {*module.__all__, *SCHEDULERS} - {base.__name__})
    raise UserError(
        f"model.{kind}: no {kind} {name!r} in {module.__name__}{hint}", SEE_HELP, 2
    )


def build(kind: str, cls: type, args: Options, first: Any, **filled_in: Any) -> Any:
    """Return `cls(first, **filled_in, **args)`. Raise UserError if the class does not
    take an argument, or refuses its value.

    first: The parameter groups of an optimizer, or the optimizer of a scheduler.
    filled_in: Arguments that the library chooses, such as the learning rate.
    """
    try:
        return cls(first, **filled_in, **args)
    except MISTAKES as error:
        accepted = [*inspect.signature(cls).parameters][1:]
        raise UserError(
            f"model.{kind} {cls.__name__} with {args}: {first_line(error)}",
            f"it takes {', '.join(accepted)}",
            2,
        ) from error


def build_optimizer(
    name: str, args: Options, groups: list[Options], lr: float, fused: bool = False
) -> Optimizer:
    """Return an optimizer.

    name, args: A class of torch.optim or the import path of another class, and its
        arguments without `lr`.
    groups: Parameter groups, see `grouped`.
    lr: The learning rate of groups that have none.
    fused: Compute a step in one kernel, which is by far the fastest way for small
        networks, if torch can do it for all parameters and `args` choose no other.
    """
    cls = find_class("optimizer", name)
    device_types = FUSED_ON.get(cls, ())
    can_fuse = all(
        parameter.device.type in device_types and parameter.is_floating_point()
        for parameter in chain.from_iterable(group["params"] for group in groups)
    )
    if fused and can_fuse and not IMPLEMENTATIONS & args.keys():
        args = {**args, "fused": True}
    return build("optimizer", cls, args, groups, lr=lr)


def build_scheduler(
    name: str, args: Options, optimizer: Optimizer, num_steps: int | None
) -> LRScheduler:
    """Return a scheduler. `max_lr` is filled in with the learning rates of the groups.

    name, args: A class of torch.optim.lr_scheduler or of this file, or the import path
        of another class, and its arguments.
    num_steps: How often it will step in the whole training; None if the training has no
        end. It becomes the argument of `length_argument`, unless `args` have it.
    """
    cls = find_class("scheduler", name)
    length = length_argument(name, args)
    if length and num_steps is None:
        raise UserError(
            f"model.scheduler {name} needs an end: give --trainer.max_epochs", status=2
        )
    if length:
        args = {**args, length: num_steps}
    if "max_lr" in inspect.signature(cls).parameters:
        lr = optimizer.defaults["lr"]
        max_lr = args.get("max_lr", lr)
        if max_lr != lr:
            raise UserError(
                f"model.scheduler_args.max_lr {max_lr}: the highest rate is --model.lr,"
                f" {lr}",
                status=2,
            )
        rates = [group["lr"] for group in optimizer.param_groups]
        args = {**args, "max_lr": rates}
        if len(rates) == 1:
            args["max_lr"] = rates[0]
    return build("scheduler", cls, args, optimizer)


def length_argument(name: str, args: Options) -> str | None:
    """Return the name of the scheduler's argument that is the length of the training:
    "T_max", "total_steps", or "total_iters" of PolynomialLR. Return None if it has no
    such argument, or if the user's `args` determine it."""
    if {"epochs", "steps_per_epoch"} & args.keys():
        return None  # OneCycleLR computes total_steps from them
    names = {"T_max", "total_steps"}
    if name.endswith("PolynomialLR"):  # in others total_iters is the warm-up
        names = {"total_iters"}
    accepted = inspect.signature(find_class("scheduler", name)).parameters
    return next(iter((names & accepted.keys()) - args.keys()), None)


def schedule_length(trainer: Any, interval: Literal["epoch", "step"]) -> int | None:
    """Return how often a scheduler steps in the whole training, at least 1. Return None
    if the training has no end, and for a schedule by epochs if max_steps ends the
    training and the length of an epoch is unknown.

    interval: The scheduler steps after each "epoch" or after each "step".
    """
    if interval == "epoch" and trainer.max_steps == -1:
        if trainer.max_epochs < 0:
            return None
        return max(1, trainer.max_epochs)
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            raise UserError(
                "a schedule by steps needs to know their number: "
                "GradientAccumulationScheduler changes it from epoch to epoch",
                "use --trainer.accumulate_grad_batches, or a schedule by epochs",
                2,
            )
    make_train_loader(trainer)
    num_steps = trainer.estimated_stepping_batches
    num_batches = trainer.num_training_batches
    # Lightning makes the loader anew, with the checkpoint's state, when the training
    # starts.
    forget_train_loader(trainer)
    if num_steps in (-1, math.inf):
        return None
    if interval == "epoch":
        if num_batches == math.inf:
            return None
        steps_per_epoch = math.ceil(num_batches / trainer.accumulate_grad_batches)
        num_steps = math.ceil(num_steps / max(1, steps_per_epoch))
    return max(1, num_steps)


def grouped(
    named: Iterable[tuple[str, Parameter]], groups: dict[str, Options]
) -> list[Options]:
    """Return parameter groups as torch's optimizers take them. The first group, "rest",
    holds the parameters that are in no other group. It is left out if there are none,
    and has no name if `groups` is empty.

    named: The names and parameters of a model.
    groups: {name: options}, such as {"head": {"lr": 0.1}}. A parameter is in the first
        group whose name it matches, see `matches`.
    """
    rest = [(name.removeprefix("net."), parameter) for name, parameter in named]
    names = [name for name, _ in rest]
    chosen = []
    for group, options in groups.items():
        members = [x for name, x in rest if matches(group, name, x)]
        rest = [(name, x) for name, x in rest if not matches(group, name, x)]
        if not members:
            rule = "each parameter is in the first group that it matches"
            raise no_such_name(f"model.parameter_groups.{group} ({rule})", names)
        chosen.append({**options, "params": members, "name": group})
    if rest:
        chosen.insert(0, {"params": [parameter for _, parameter in rest]})
    if rest and groups:
        chosen[0]["name"] = "rest"
    return chosen


def matches(pattern: str, name: str, part: Parameter | Module) -> bool:
    """Return whether a pattern selects a parameter or module.

    pattern: The start of its name (head), a pattern (*.bias), or norms_and_biases,
        which selects all parameters of one dimension.
    name: The name of `part` in the network.
    """
    if name.startswith(f"{pattern}.") or fnmatchcase(name, pattern):
        return True
    if pattern != "norms_and_biases" or not isinstance(part, Parameter):
        return False
    return not is_lazy(part) and part.dim() == 1


def no_such_name(flag: str, names: list[str]) -> UserError:
    """Return the error for a flag with a pattern that selects none of the names."""
    parts = dict.fromkeys(name.partition(".")[0] for name in names)
    return UserError(
        f"{flag}: no parameter of the network has such a name",
        f"its parts are {', '.join(parts)[:200]}",
        2,
    )


def check_options(groups: dict[str, Options], optimizer: Optimizer) -> None:
    """Raise UserError if a group, see `grouped`, has an option that the optimizer does
    not have. torch would ignore the option."""
    accepted = sorted(optimizer.defaults.keys() - IMPLEMENTATIONS)
    for group, options in groups.items():
        for key in options.keys() - accepted:
            raise UserError(
                f"model.parameter_groups.{group}: no option {key} of "
                f"{type(optimizer).__name__}; it has {', '.join(accepted)}",
                status=2,
            )
