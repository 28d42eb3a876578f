"""Parameters in groups, each with options of its own, as optimisers take them."""

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from project.base.errors import UserError, did_you_mean
from project.base.rank import say

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
