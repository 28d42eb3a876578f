"""Optimizers and learning-rate schedulers by name."""

import inspect
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lightbase.core.compat import forget_train_loader
from lightbase.core.errors import UserError, did_you_mean, first_line, imported

# Options that choose how a step is computed. An optimizer takes one of them at most.
IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}
FUSED_ON = {
    torch.optim.SGD: ("cpu", "cuda"),
    torch.optim.Adam: ("cpu", "cuda"),
    torch.optim.AdamW: ("cpu", "cuda"),
    torch.optim.Adagrad: ("cpu",),  # torch 2.11 refuses it on a GPU at the first step
}
"""Where torch has a fused step."""


class WarmupCosineLR(LambdaLR):
    """Linear warm-up over `warmup_steps`, then half a cosine down to 0 at
    `total_steps`.

    Loshchilov and Hutter, "SGDR", 2017 (the cosine); Goyal et al., "Accurate, large
    minibatch SGD", 2017 (the warm-up).
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
        self.total_steps = total_steps


class FinalDecayLR(LambdaLR):
    """Constant, then a straight line down to 0 over the last `decay_fraction` of
    `total_steps`: a cooldown, as in Zhai et al., "Scaling vision transformers", 2022.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, decay_fraction: float = 0.1
    ) -> None:
        if not 0 < decay_fraction <= 1:
            raise ValueError(f"decay_fraction {decay_fraction} is not in (0, 1]")

        def factor(step: int) -> float:
            return min(1.0, max(0.0, 1 - step / total_steps) / decay_fraction)

        super().__init__(optimizer, factor)
        self.total_steps = total_steps


OWN_SCHEDULERS = {cls.__name__: cls for cls in (WarmupCosineLR, FinalDecayLR)}
MADE_FOR_STEPS = {"OneCycleLR", "CyclicLR", *OWN_SCHEDULERS}


def build_optimizer(
    name: str,
    args: dict[str, Any],
    groups: list[dict[str, Any]],
    lr: float,
    fused: bool = False,
) -> Optimizer:
    """An optimizer of torch.optim by class name, or any other by its import path.

    groups: of parameters, see `grouped`.
    fused: compute a step in one kernel, if torch can and `args` choose no other
        implementation. That is much the fastest for small networks.
    Raises UserError for an unknown name or argument.
    """
    cls = find_class("optimizer", name, torch.optim, Optimizer)
    weights, devices = (
        [x for group in groups for x in group["params"]],
        FUSED_ON.get(cls, ()),
    )
    can_be_fused = all(
        x.device.type in devices and x.is_floating_point() for x in weights
    )
    if fused and can_be_fused and not IMPLEMENTATIONS & args.keys():
        args = {**args, "fused": True}
    return build("optimizer", cls, args, groups, lr=lr)


def build_scheduler(
    name: str, args: dict[str, Any], optimizer: Optimizer, num_steps: int | None
) -> LRScheduler:
    """A scheduler of torch.optim.lr_scheduler or of this file by class name, or any
    other by its import path.

    num_steps: how often it will step in the whole training; None if the training has no
        end. It becomes `T_max` or `total_steps`, unless they are given.
    Raises UserError for an unknown name or argument, and for a `max_lr` that is not the
    optimizer's learning rate.
    """
    cls = find_class("scheduler", name, lr_scheduler, LRScheduler)
    accepted = inspect.signature(cls).parameters
    length = dict.fromkeys(open_lengths(name, args), num_steps)
    if num_steps is None and length:
        raise UserError(
            f"model.scheduler {name} needs an end: give --trainer.max_epochs", status=2
        )
    if "max_lr" in accepted:
        lr = optimizer.defaults["lr"]
        if args.get("max_lr", lr) != lr:
            what = f"model.scheduler_args.max_lr {args['max_lr']}"
            raise UserError(f"{what}: the highest rate is --model.lr, {lr}", status=2)
        rates = [group["lr"] for group in optimizer.param_groups]
        args = {**args, "max_lr": rates if len(rates) > 1 else rates[0]}
    return build("scheduler", cls, length | args, optimizer)


def open_lengths(name: str, args: dict[str, Any]) -> list[str]:
    """The arguments of a scheduler that are the length of the training, and are not
    given."""
    if {"epochs", "steps_per_epoch"} & args.keys():
        return []  # OneCycleLR computes total_steps from them
    accepted = inspect.signature(
        find_class("scheduler", name, lr_scheduler, LRScheduler)
    ).parameters
    return [
        key for key in ("T_max", "total_steps") if key in accepted and key not in args
    ]


def num_scheduler_steps(trainer: Any, every: Literal["epoch", "step"]) -> int | None:
    """How often a scheduler steps in the whole training, as Lightning estimates it;
    None if the training has no end. Raises UserError if the number of steps in an epoch
    changes."""
    if every == "epoch" and trainer.max_steps == -1:
        return max(1, trainer.max_epochs) if trainer.max_epochs >= 0 else None
    if any(
        isinstance(callback, GradientAccumulationScheduler)
        for callback in trainer.callbacks
    ):
        what = "a schedule by steps needs to know their number: GradientAccumulationScheduler"
        way_out = "use --trainer.accumulate_grad_batches, or a schedule by epochs"
        raise UserError(f"{what} changes it from epoch to epoch", way_out, 2)
    trainer.fit_loop.setup_data()
    num_steps, num_batches = (
        trainer.estimated_stepping_batches,
        trainer.num_training_batches,
    )
    # Lightning makes the loader anew, with the checkpoint's state, when the training
    # starts.
    forget_train_loader(trainer)
    if num_steps in (-1, math.inf):
        return None
    steps_per_epoch = max(1, math.ceil(num_batches / trainer.accumulate_grad_batches))
    return max(
        1, num_steps if every == "step" else math.ceil(num_steps / steps_per_epoch)
    )


def find_class(kind: str, name: str, module: Any, base: type) -> type:
    """The subclass of `base` that `name` means: in `module`, in this file, or by its
    import path."""

    def fits(cls: Any) -> bool:
        return isinstance(cls, type) and issubclass(cls, base) and cls is not base

    classes = {
        key: cls for key, cls in {**vars(module), **OWN_SCHEDULERS}.items() if fits(cls)
    }
    cls: Any = classes.get(name) or ("." in name and imported(kind, name))
    if not fits(cls):
        near = did_you_mean(name, [key for key in classes if not key.startswith("_")])
        raise UserError(
            f"model.{kind} {name!r} is no {kind} of {module.__name__}{near}", status=2
        )
    return cls  # type: ignore[no-any-return]


def build(
    kind: str, cls: type, args: dict[str, Any], *positional: Any, **keywords: Any
) -> Any:
    """An object of cls. Raises UserError for an argument that it does not take, or
    refuses."""
    if "lr" in args and "lr" in keywords:
        raise UserError(
            f"model.{kind}_args.lr {args['lr']}: the learning rate is --model.lr",
            status=2,
        )
    try:
        return cls(*positional, **keywords, **args)
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        accepted = ", ".join([*inspect.signature(cls).parameters][1:])
        what = f"model.{kind} {cls.__name__} with {args}: {first_line(error)}"
        raise UserError(what, f"it takes {accepted}", 2) from error


def grouped(
    named: Iterable[tuple[str, Parameter]], groups: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Parameter groups as torch's optimizers take them: first the parameters that are
    in no group, if any, then each group with its options.

    groups: options by name. A parameter is in the first group whose name it matches,
    see `matches`. Raises UserError for a group without parameters, or with an
    impossible learning rate.
    """
    parameters = [(name.removeprefix("net."), parameter) for name, parameter in named]
    members: dict[str | None, list[Parameter]] = {
        group: [] for group in (None, *groups)
    }
    for name, parameter in parameters:
        group = next(
            (group for group in groups if matches(group, name, parameter)), None
        )
        members[group].append(parameter)
    for group, options in groups.items():
        flag, lr = f"model.parameter_groups.{group}", options.get("lr", 1.0)
        if (
            not isinstance(lr, int | float)
            or isinstance(lr, bool)
            or not 0 < lr < math.inf
        ):
            raise UserError(
                f"{flag}.lr {lr!r}: a learning rate is a number over 0", status=2
            )
        if not members[group]:
            rule = "each parameter is in the first group that it matches"
            raise no_such_name(
                f"{flag} ({rule})", group, [name for name, _ in parameters]
            )
    rest: dict[str, Any] = {"params": members[None]} | (
        {"name": "rest"} if groups else {}
    )
    more = [
        {**options, "params": members[name], "name": name}
        for name, options in groups.items()
    ]
    return [rest, *more] if rest["params"] else more


def matches(pattern: str, name: str, part: Parameter | Module) -> bool:
    """Whether a parameter or module of this name is meant: `pattern` is the first part
    of the name (head), a pattern (*.bias), or norms_and_biases, for all parameters of
    one dimension."""
    if name.startswith(f"{pattern}.") or fnmatchcase(name, pattern):
        return True
    if (
        pattern != "norms_and_biases"
        or not isinstance(part, Parameter)
        or is_lazy(part)
    ):
        return False
    return part.dim() == 1


def no_such_name(flag: str, pattern: str, names: list[str]) -> UserError:
    beginnings = [
        name[:i] for name in names for i, letter in enumerate(name) if letter == "."
    ]
    hint = (
        did_you_mean(pattern, [*names, *beginnings])
        or f"; some names: {', '.join(names[:4])}"
    )
    return UserError(
        f"{flag}: no parameter of the network has such a name{hint}", status=2
    )


def check_options(groups: dict[str, dict[str, Any]], optimizer: Optimizer) -> None:
    """Raises UserError for an option that the optimizer does not have: torch would
    ignore it."""
    accepted = sorted(optimizer.defaults.keys() - IMPLEMENTATIONS)
    for group, options in groups.items():
        for key in options.keys() - accepted:
            what = f"model.parameter_groups.{group}: no option {key} of {type(optimizer).__name__}"
            raise UserError(f"{what}; it has {', '.join(accepted)}", status=2)


def try_schedule(model: Any) -> None:
    """Build the model's optimizer and scheduler by name, for a hundred steps, and make
    three. Each parameter group has a single number as its parameter, so that this takes
    no time.

    Raises UserError for names or arguments that do not work.
    """
    groups = grouped(model.named_parameters(), model.parameter_groups)
    for group in groups:
        parameter = Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        group["params"] = [parameter]
    optimizer = build_optimizer(
        str(model.optimizer), model.optimizer_args, groups, model.lr
    )
    check_options(model.parameter_groups, optimizer)
    if model.scheduler is None and model.scheduler_args:
        raise UserError(
            f"model.scheduler_args {model.scheduler_args} need a model.scheduler",
            status=2,
        )
    scheduler = None
    try:
        if isinstance(model.scheduler, str):
            scheduler = build_scheduler(
                model.scheduler, model.scheduler_args, optimizer, 100
            )
        for _ in range(3):
            # LBFGS needs a loss
            optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
            if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        what = f"model.optimizer {model.optimizer} with {model.optimizer_args}"
        what += f" and model.scheduler {model.scheduler} with {model.scheduler_args}"
        raise UserError(f"{what}: {first_line(error)}", status=2) from error
