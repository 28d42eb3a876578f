"""Optimisers and learning-rate schedulers by name."""

import inspect
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightbase.compat import forget_train_loader
from lightbase.data.batches import ResumableLoader
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError, did_you_mean, imported
from lightbase.ranks import say


class WarmupCosineLR(LambdaLR):
    """Linear warm-up over `warmup_steps`, then half a cosine down to 0 at `total_steps`.

    Loshchilov and Hutter, "SGDR", 2017 (the cosine); Goyal et al., "Accurate, large minibatch SGD",
    2017 (the warm-up).
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
    """Constant, then a straight line down to 0 over the last `decay_fraction` of `total_steps`,
    which takes out noise.

    Zhai et al., "Scaling vision transformers", 2022, call it a cooldown.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, decay_fraction: float = 0.1) -> None:
        if not 0 < decay_fraction <= 1:
            raise ValueError(f"decay_fraction {decay_fraction} is not in (0, 1]")
        super().__init__(
            optimizer, lambda step: min(1.0, max(0.0, 1 - step / total_steps) / decay_fraction)
        )
        self.total_steps = total_steps


OWN_SCHEDULERS = {cls.__name__: cls for cls in (WarmupCosineLR, FinalDecayLR)}
MADE_FOR_STEPS = {"OneCycleLR", "CyclicLR", *OWN_SCHEDULERS}


def build_optimizer(
    name: str,
    args: dict[str, Any],
    parameters: Iterable[Parameter] | Iterable[dict[str, Any]],
    lr: float,
    fused: bool = False,
) -> Optimizer:
    """An optimiser of torch.optim by class name, or any other by its import path. Raises UserError
    for what is wrong.

    parameters: may be in groups, see `grouped`.
    fused: a step in one kernel, much the fastest for small networks, where torch has it and `args`
    choose no other.
    """
    found = _find_class("optimizer", name, torch.optim, Optimizer)
    given: list[Any] = list(parameters)
    groups = [entry if isinstance(entry, dict) else {"params": [entry]} for entry in given]
    for group in groups:  # torch checks values of the whole optimiser only
        own = {
            key: value for key, value in group.items() if key in inspect.signature(found).parameters
        }
        if len(own) > 1:
            rest = {"params": [Parameter(torch.zeros(1))], "lr": own.get("lr", lr)}
            _build(
                "optimizer",
                found,
                args | {key: value for key, value in own.items() if key not in rest},
                **rest,
            )
    is_torchs = (
        found.__module__.startswith("torch.") and "fused" in inspect.signature(found).parameters
    )
    flat = [parameter for group in groups for parameter in group["params"]]
    devices = (
        ("cpu",) if found is torch.optim.Adagrad else ("cpu", "cuda")
    )  # torch 2.11 has no other Adagrad
    fits = all(
        parameter.device.type in devices and parameter.is_floating_point() for parameter in flat
    )
    if fused and is_torchs and fits and not IMPLEMENTATIONS & args.keys():
        args = {**args, "fused": True}
    return _build("optimizer", found, args, given, lr=lr)


def build_scheduler(
    name: str, args: dict[str, Any], optimizer: Optimizer, num_steps: int | None
) -> LRScheduler:
    """A scheduler of torch.optim.lr_scheduler or of this file by class name, or any other by its
    import path.

    num_steps: how often it will step in the whole training, None if that has no end; `T_max` or
    `total_steps` unless
        given. A `max_lr` is the optimiser's learning rate. Raises UserError for what is wrong.
    """
    found = _find_class("scheduler", name, lr_scheduler, LRScheduler)
    accepted = inspect.signature(found).parameters
    own_length = {
        "epochs",
        "steps_per_epoch",
    } & args.keys()  # from which OneCycleLR computes total_steps
    length = {
        key: num_steps for key in ("T_max", "total_steps") if key in accepted and not own_length
    }
    if num_steps is None and length.keys() - args.keys():
        raise UserError(
            f"model.scheduler {name} needs a training with an end: give --trainer.max_epochs", 2
        )
    if "max_lr" in accepted:
        lr = optimizer.defaults["lr"]
        if args.get("max_lr", lr) != lr:
            raise UserError(
                f"model.scheduler_args.max_lr {args['max_lr']}: the highest rate is "
                f"--model.lr, {lr}",
                2,
            )
        rates = [group["lr"] for group in optimizer.param_groups]
        args = {**args, "max_lr": rates if len(rates) > 1 else rates[0]}
    groups_momenta = {
        str(group.get("betas", group.get("momentum"))) for group in optimizer.param_groups
    }
    if (
        "cycle_momentum" in accepted
        and args.get("cycle_momentum", True)
        and len(groups_momenta) > 1
    ):
        what = f"model.scheduler {name} gives all parameter_groups the same momentum"
        raise UserError(
            f"{what}, which they have not: --model.scheduler_args.cycle_momentum false", 2
        )
    return _build("scheduler", found, length | args, optimizer)


def num_scheduler_steps(trainer: Any, every: Literal["epoch", "step"]) -> int | None:
    """How often a scheduler steps in the whole training; None if the training has no end."""
    loader = (
        trainer.datamodule.train_dataloader()
        if isinstance(trainer.datamodule, BaseDataModule)
        else None
    )
    if isinstance(loader, ResumableLoader):
        # Lightning's setup would start its workers, before a resumed run knows its epoch
        num_batches, limit = len(loader), trainer.limit_train_batches
        num_batches = (
            min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
        )
    else:
        trainer.fit_loop.setup_data()
        num_batches = trainer.num_training_batches
        forget_train_loader(trainer)
    steps_per_epoch = max(1, math.ceil(num_batches / trainer.accumulate_grad_batches))
    limits = (
        trainer.max_epochs * steps_per_epoch,
        trainer.max_steps,
    )  # below 0 where there is none
    num_steps = min((max(1, limit) for limit in limits if limit >= 0), default=None)
    if num_steps is None or every == "step":
        return num_steps
    return math.ceil(num_steps / steps_per_epoch)


def interval_of(scheduler: str | LRScheduler | None) -> Literal["epoch", "step"]:
    """After what a scheduler, or one of this name, is made to step."""
    name = scheduler if isinstance(scheduler, str) else type(scheduler).__name__
    return "step" if name.rpartition(".")[2] in MADE_FOR_STEPS else "epoch"


def _find_class(kind: str, name: str, module: Any, base: type) -> type:
    classes = {
        key: value for key, value in vars(module).items() if isinstance(value, type)
    } | OWN_SCHEDULERS
    known = {key: cls for key, cls in classes.items() if issubclass(cls, base) and cls is not base}
    if name in known:
        return known[name]
    if "." in name:
        found = imported(kind, name)
        if isinstance(found, type) and issubclass(found, base):
            return found
    hint = did_you_mean(name, known) or f"; try {', '.join(sorted(known))}"
    raise UserError(f"model.{kind} {name!r} is no {kind} of {module.__name__}{hint}", 2)


def _build(kind: str, cls: type, args: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
    accepted = list(inspect.signature(cls).parameters)[1:]
    for key in args:
        if key not in accepted:
            hint = did_you_mean(key, accepted) or f"; it takes {', '.join(accepted)}"
            raise UserError(
                f"model.{kind}_args.{key}: {cls.__name__} has no such argument{hint}", 2
            )
    if "lr" in args and "lr" in keywords:
        raise UserError(f"model.{kind}_args.lr {args['lr']}: the learning rate is --model.lr", 2)
    try:
        return cls(*positional, **keywords, **args)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise UserError(f"model.{kind} {cls.__name__} with {args}: {error}", 2) from error


VECTORS = "norms_and_biases"  # the name of a group
IMPLEMENTATIONS = {
    "fused",
    "foreach",
    "capturable",
    "differentiable",
}  # of a step: an optimiser takes one at most


def grouped(
    named: Iterable[tuple[str, Parameter]], groups: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The parameters that no group names, if any, and each group with its options.

    groups: by what the names of its parameters begin with or match, such as "head" or "*.bias";
    norms_and_biases are
        those of one dimension. A parameter is in the first that it fits. Raises UserError for a
        group without any.
    """
    parameters = [(name.removeprefix("net."), parameter) for name, parameter in named]
    found: dict[str, list[Parameter]] = {"": [], **{group: [] for group in groups}}
    for name, parameter in parameters:
        found[next((group for group in groups if fits(group, name, parameter)), "")].append(
            parameter
        )
    for group, options in groups.items():
        flag, lr = f"model.parameter_groups.{group}", options.get("lr", 1.0)
        if not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 < lr < math.inf:
            raise UserError(f"{flag}.lr {lr!r}: a learning rate is a number over 0", 2)
        if not found[group]:
            if any(fits(group, name, parameter) for name, parameter in parameters):
                raise UserError(
                    f"{flag}: the groups before it have all of its parameters; put it first", 2
                )
            raise no_such_name(flag, group, [name for name, _ in parameters])
    rest = [{"params": found[""]}] if found[""] else []
    return [*rest, *({**options, "params": found[group]} for group, options in groups.items())]


def fits(group: str, name: str, part: Parameter | Module) -> bool:
    is_vector = (
        group == VECTORS and isinstance(part, Parameter) and not is_lazy(part) and part.dim() == 1
    )
    return is_vector or name.startswith(f"{group}.") or fnmatchcase(name, group)


def no_such_name(flag: str, wanted: str, names: list[str]) -> UserError:
    beginnings = [name[:i] for name in names for i, letter in enumerate(name) if letter == "."]
    hint = did_you_mean(wanted, [*names, *beginnings]) or f"; {', '.join(names[:4])} are some names"
    return UserError(f"{flag}: no parameter of the network has such a name{hint}", 2)


def check_options(groups: dict[str, dict[str, Any]], optimizer: Optimizer) -> None:
    """Raise UserError for an option that the optimiser has not: torch would take it, and never look
    at it. Say which groups do not train at all."""
    known = sorted(optimizer.defaults.keys() - IMPLEMENTATIONS)
    for group, options in groups.items():
        for key, value in options.items():
            if key in known:
                continue
            hint = did_you_mean(key, known) or f"; it has {', '.join(known)}"
            if isinstance(value, dict):  # a flag whose dots were taken for levels
                hint = (
                    "; names with dots go into one value: --model.parameter_groups "
                    f"'{{{group}.{key}: {value}}}'"
                )
            raise UserError(
                f"model.parameter_groups.{group}: no option {key} of "
                f"{type(optimizer).__name__}{hint}",
                2,
            )
    for group, found in zip(groups, optimizer.param_groups[-len(groups) :], strict=False):
        if not any(parameter.requires_grad for parameter in found["params"]):
            say(f"model.parameter_groups.{group} has no effect: its parameters are frozen")
