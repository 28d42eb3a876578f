"""Where a new training begins: weights from a file, frozen parameters."""

import importlib
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import register_type
from torch import Tensor, nn

from lightbase.core.checkpoint import load_checked
from lightbase.core.errors import UserError, first_line, say
from lightbase.core.optim import matches, no_such_name


class WeightsFile(str):
    """The absolute path of a file."""

    def __new__(cls, path: str) -> "WeightsFile":
        return super().__new__(cls, Path(path).absolute())


register_type(WeightsFile)


def load_weights(
    net: nn.Module, path: str, is_complete: bool = False, content: Any = None
) -> None:
    """Copy the tensors of a file that fit by name and shape into `net`, and print which
    do.

    The names of the file, or those of the network, may have a prefix, such as "net.",
    "module." or "backbone.".

    is_complete: All tensors of the network have to be in the file.
    content: The content of the file, if it has been read already.
    Raises UserError for a file that is missing, damaged, not safe to load, or does not
    fit at all.
    """
    if content is None:
        content = read_weights(Path(path))
    state = net.state_dict()
    tables = tensor_tables(content)
    fits = [fitting(state, table) for table in tables]
    fit = max(fits, key=len, default={})
    left = [name for name in state if name not in fit]
    missing = [name for name in left if torch.is_tensor(state[name])]
    if is_complete and missing:
        problem = f"{path} has no tensor of the same name and shape for"
        raise UserError(
            f"{problem} {shortened(missing)}",
            f"the file is of another network than this {type(net).__name__}",
            2,
        )
    # A single number, such as BatchNorm's counter, fits any network.
    if not any(tensor.dim() for tensor in fit.values()):
        names = [name for table in tables for name in table]
        raise UserError(
            f"model.weights {path}: no tensor in it fits {type(net).__name__}",
            f"it has {shortened([*state])}; the file has "
            f"{shortened(names) or 'no tensors by name'}",
            2,
        )
    net.load_state_dict(fit, strict=False)
    text = f"Weights: {len(fit)} of {len(state)} tensors are those of {path}"
    if left:
        text += f"; left as initialised: {shortened(left)}"
    say(text)


def tensor_tables(content: Any) -> list[dict[str, Tensor]]:
    """Return the tensors by name that a file holds: as {name: tensor}, or as
    {"state_dict": {name: tensor}} under any key."""
    if not isinstance(content, dict):
        return []
    tables = []
    for table in [content, *content.values()]:
        if isinstance(table, dict):
            # torch.compile renames the parts of a network that it compiles
            tensors = {
                str(name).replace("_orig_mod.", ""): value
                for name, value in table.items()
                if torch.is_tensor(value)
            }
            tables.append(tensors)
    return tables


def fitting(state: dict[str, Tensor], table: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the table, by the network's names, that agree in name and
    shape. Either the names of the table or those of the network may have a prefix. It
    is the same for all names, and chosen so that most tensors fit."""
    pairs = [("", prefix) for prefix in prefixes(state)]
    pairs += [(prefix, "") for prefix in prefixes(table)]
    best: dict[str, Tensor] = {}
    for old, new in pairs:
        fit = {}
        for name, value in table.items():
            if name.startswith(old):
                fit[new + name.removeprefix(old)] = value
        fit = {
            name: value
            for name, value in fit.items()
            if name in state and state[name].shape == value.shape
        }
        best = max(best, fit, key=len)
    return best


def prefixes(names: Iterable[str]) -> list[str]:
    """Return the beginnings of dotted names, of two parts at most: "", "a." and "a.b."
    of a.b.c.weight."""
    beginnings = {""}
    for name in names:
        parts = name.split(".")[:-1]
        for num in range(min(len(parts), 2)):
            beginnings.add(".".join(parts[: num + 1]) + ".")
    return sorted(beginnings)


def shortened(names: Sequence[str]) -> str:
    """Return the first four names and the number of the others: "a, b, c, d and 3
    more"."""
    text = ", ".join(names[:4])
    if len(names) > 4:
        text += f" and {len(names) - 4} more"
    return text


def read_weights(file: Path) -> Any:
    """Return the content of a file of weights, of torch.save or of safetensors.

    Raises UserError if it is missing, damaged or not safe to load.
    """
    if file.suffix != ".safetensors" or not file.is_file():
        way_out = "if you trust it, torch.save(net.state_dict(), FILE) makes one of the"
        return load_checked(file, "model.weights", f"{way_out} weights")
    try:
        return importlib.import_module("safetensors.torch").load_file(file)
    except Exception as error:  # safetensors' errors have no other base class
        problem = f"model.weights {file} cannot be read: {first_line(error)}"
        raise UserError(problem) from error


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Freeze the parameters whose names match one of the patterns, and print how many.

    model: The module that trains. Its network is the attribute `net`.
    patterns: Names or patterns without "net.", see `lightbase.core.optim.matches`.
    Return the modules that match, or have no other parameters. They are in eval mode
    now.

    Raises UserError for a pattern that matches nothing, or if nothing would train.
    """
    named = [
        (name.removeprefix("net."), part)
        for name, part in (*model.named_parameters(), *model.named_modules())
        if name not in ("", "net")
    ]
    matching: list[nn.Parameter | nn.Module] = []
    for pattern in patterns:
        parts = [part for name, part in named if matches(pattern, name, part)]
        if not parts:
            names = [name for name, _ in named]
            raise no_such_name(f"model.freeze {pattern}", pattern, names)
        matching += parts
    for part in matching:
        part.requires_grad_(False)  # of a module, all its parameters
    total = num_frozen = 0
    for parameter in model.parameters():
        total += parameter.numel()
        if not parameter.requires_grad:
            num_frozen += parameter.numel()
    if num_frozen == total:
        problem = f"model.freeze {', '.join(patterns)}: nothing would train"
        raise UserError(problem, status=2)
    say(f"Frozen: {num_frozen:,} of {total:,} parameters")
    warnings.filterwarnings("ignore", "Found .* in eval mode at the start of training")
    in_eval = []
    for _, part in named:
        if isinstance(part, nn.Module):
            requires_grad = [parameter.requires_grad for parameter in part.parameters()]
            is_frozen = bool(requires_grad) and not any(requires_grad)
            if is_frozen or any(part is match for match in matching):
                in_eval.append(part.eval())
    return in_eval
