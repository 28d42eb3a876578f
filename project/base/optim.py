"""Optimisers and learning-rate schedulers by name."""

import importlib
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from project.base.errors import UserError, did_you_mean


class WarmupCosineLR(LambdaLR):
    """Linear warm-up over `warmup_steps`, then half a cosine down to 0 at `total_steps`.

    Loshchilov and Hutter, "SGDR", 2017 (the cosine); Goyal et al., "Accurate, large minibatch SGD", 2017 (the warm-up).
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps {warmup_steps} is negative")

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return (1 + math.cos(math.pi * min(progress, 1))) / 2

        super().__init__(optimizer, factor)
        self.total_steps = total_steps


class FinalDecayLR(LambdaLR):
    """Constant, then a straight line down to 0 over the last `decay_fraction` of `total_steps`.

    The steady part is that of a constant rate, whatever the length of the training, and the last one takes out its
    noise. Zhai et al., "Scaling vision transformers", 2022, call it a cooldown.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, decay_fraction: float = 0.1) -> None:
        if not 0 < decay_fraction <= 1:
            raise ValueError(f"decay_fraction {decay_fraction} is not in (0, 1]")
        super().__init__(optimizer, lambda step: min(1.0, max(0.0, 1 - step / total_steps) / decay_fraction))
        self.total_steps = total_steps


OWN_SCHEDULERS = {cls.__name__: cls for cls in (WarmupCosineLR, FinalDecayLR)}


# ways to compute a step, of which an optimiser of torch has one
IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}


def build_optimizer(
    name: str,
    args: dict[str, Any],
    parameters: Iterable[Parameter],
    lr: float,
    fused: bool = False,
) -> Optimizer:
    """An optimiser of torch.optim by class name, or any other by its full import path.

    fused: take the optimiser's implementation in one kernel, much the fastest for small networks, where it has one for
        these parameters and `args` do not choose another.
    Raises UserError for an unknown name and for arguments that the class does not take.
    """
    optimizer_class = _find_class("optimizer", name, torch.optim, Optimizer)
    parameters = list(parameters)
    if fused and not IMPLEMENTATIONS & args.keys() and has_fused(optimizer_class, parameters):
        args = {**args, "fused": True}
    return _build("optimizer", optimizer_class, args, parameters, lr=lr)


def has_fused(optimizer_class: type, parameters: list[Parameter]) -> bool:
    """Whether a fused step exists for parameters on these devices: of torch's own optimisers, SGD, Adam, ..."""
    if "fused" not in inspect.signature(optimizer_class).parameters or not optimizer_class.__module__.startswith(
        "torch."
    ):
        return False
    return all(parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() for parameter in parameters)


def build_scheduler(name: str, args: dict[str, Any], optimizer: Optimizer, num_steps: int | None) -> LRScheduler:
    """A scheduler of torch.optim.lr_scheduler or of this file by class name, or any other by its full import path.

    num_steps: how often it will step in the whole training, None if that has no end; the schedulers' `T_max` or
    `total_steps` unless given.
    Raises UserError for an unknown name and for arguments that the class does not take.
    """
    scheduler_class = OWN_SCHEDULERS.get(name) or _find_class("scheduler", name, lr_scheduler, LRScheduler)
    accepted = inspect.signature(scheduler_class).parameters
    # OneCycleLR computes total_steps from these two
    own_length = {"epochs", "steps_per_epoch"} & args.keys()
    length = {key: num_steps for key in ("T_max", "total_steps") if key in accepted and not own_length}
    if num_steps is None and length.keys() - args.keys():
        raise UserError(f"model.scheduler {name} needs a training with an end: give --trainer.max_epochs", 2)
    return _build("scheduler", scheduler_class, length | args, optimizer)


def _find_class(kind: str, name: str, module: Any, base: type) -> type:
    if "." in name:
        module_name, class_name = name.rsplit(".", 1)
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise UserError(f"model.{kind} {name!r} cannot be imported: {error}", status=2) from error
    else:
        found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    known = [n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base) and c is not base]
    known += list(OWN_SCHEDULERS) if kind == "scheduler" else []
    hint = did_you_mean(name, known) or f"; try {', '.join(sorted(known))}"
    raise UserError(f"model.{kind} {name!r} is no {kind} of {module.__name__}{hint}", status=2)


def _build(kind: str, cls: type, args: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
    accepted = list(inspect.signature(cls).parameters)[1:]
    for key in args:
        if key not in accepted:
            hint = did_you_mean(key, accepted) or f"; it takes {', '.join(accepted)}"
            raise UserError(f"model.{kind}_args.{key}: {cls.__name__} has no such argument{hint}", status=2)
    if "lr" in args and "lr" in keywords:
        raise UserError(f"model.{kind}_args.lr {args['lr']}: the learning rate is --model.lr", status=2)
    try:
        return cls(*positional, **keywords, **args)
    except (TypeError, ValueError) as error:
        raise UserError(f"model.{kind} {cls.__name__} with {args}: {error}", status=2) from error
