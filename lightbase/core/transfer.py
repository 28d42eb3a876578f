"""Where a new training begins: weights from a file, frozen parameters.

`load_weights` copies a file into a network, even if the names have another prefix.
`freeze_parameters` selects by names what does not train.
"""

import importlib
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightbase.core.checkpoint import load_checked
from lightbase.core.errors import UserError, first_line, say
from lightbase.core.optim import matches, no_such_name


def load_weights(
    net: nn.Module, path: Path, is_complete: bool = False, content: Any = None
) -> None:
    """Copy the tensors of a file that fit by name and shape into `net`, and print how
    many fit.

    The names in the file, or the names in the network, may have a prefix, such as
    "net.", "module." or "backbone.".

    is_complete: The file must have all tensors of the network.
    content: The content of the file, if the caller has read it already.

    Raise UserError for a file that is missing, damaged, not safe to load, or without a
    fitting tensor of at least one dimension.
    """
    if content is None:
        content = read_weights(path)
    state = net.state_dict()
    tables = tensor_tables(content)
    candidates = [fitting(state, table) for table in tables]
    matched = max(candidates, key=len, default={})
    unmatched = [name for name in state if name not in matched]
    # A single number, such as BatchNorm's counter, fits any network.
    has_weights = any(tensor.dim() for tensor in matched.values())
    if not has_weights or (is_complete and unmatched):
        names = [name for table in tables for name in table]
        raise UserError(
            f"model.weights {path}: no tensor in it fits {type(net).__name__} by name "
            f"and shape for {shortened(unmatched)}",
            f"the file has {shortened(names) or 'no tensors by name'}",
            2,
        )
    net.load_state_dict(matched, strict=False)
    text = f"Weights: {len(matched)} of {len(state)} tensors are those of {path}"
    if unmatched:
        text += f"; left as initialised: {shortened(unmatched)}"
    say(text)


def tensor_tables(content: Any) -> list[dict[str, Tensor]]:
    """Return each table {name: tensor} that a file holds: the file's dict itself, and
    every dict in it, such as "state_dict". Return nothing for other content."""
    if not isinstance(content, dict):
        return []
    tables = []
    for table in [content, *content.values()]:
        if isinstance(table, dict):
            # torch.compile renames the parts of a network that it compiles
            tables.append(
                {
                    str(name).replace("_orig_mod.", ""): value
                    for name, value in table.items()
                    if torch.is_tensor(value)
                }
            )
    return tables


def fitting(state: dict[str, Tensor], table: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file that fit a network by name and shape, by the
    network's names.

    A prefix is removed from the names of the file or added to them. It is the same for
    all names. Of all prefixes, the one that makes most tensors fit is taken.

    state: The tensors of the network by name.
    table: The tensors of the file by name.
    """
    pairs = [("", prefix) for prefix in prefixes(state)]
    pairs += [(prefix, "") for prefix in prefixes(table)]
    best: dict[str, Tensor] = {}
    for old, new in pairs:
        matched = {}
        for name, value in table.items():
            renamed = new + name.removeprefix(old)
            if renamed in state and state[renamed].shape == value.shape:
                matched[renamed] = value
        best = max(best, matched, key=len)
    return best


def prefixes(names: Iterable[str]) -> list[str]:
    """Return the beginnings of dotted names, of at most two parts: "", "a." and "a.b."
    for the name a.b.c.weight."""
    beginnings = {""}
    for name in names:
        parts = [f"{part}." for part in name.split(".")[:-1]]
        beginnings.update(accumulate(parts[:2]))
    return sorted(beginnings)


def shortened(names: Iterable[str]) -> str:
    """Return the names with commas, at most 80 characters: "a, b, c [...]"."""
    return textwrap.shorten(", ".join(names), 80)


def read_weights(file: Path) -> Any:
    """Return the content of a file of weights, of torch.save or of safetensors.

    Raise UserError if it is missing, damaged or not safe to load.
    """
    if file.suffix != ".safetensors" or not file.is_file():
        return load_checked(
            file,
            "model.weights",
            "if you trust it, torch.save(net.state_dict(), FILE) makes one of the "
            "weights",
        )
    try:
        return importlib.import_module("safetensors.torch").load_file(file)
    except Exception as error:  # safetensors' errors have no other base class
        raise UserError(
            f"model.weights {file} cannot be read: {first_line(error)}"
        ) from error


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Freeze the parameters whose names match one of the patterns, and print how many
    numbers they hold.

    model: The module that trains. Its network is the attribute `net`.
    patterns: Names or patterns without "net.", see `lightbase.core.optim.matches`.

    Return the modules that are now in eval mode, because all their parameters are
    frozen. Call `eval` on them again after `model.train()`.

    Raise UserError for a pattern that matches nothing, or if nothing would train.
    """
    named = {
        name.removeprefix("net."): parameter
        for name, parameter in model.named_parameters()
    }
    for pattern in patterns:
        names = [name for name in named if matches(pattern, name, named[name])]
        if not names:
            raise no_such_name(f"model.freeze {pattern}", pattern, [*named])
        for name in names:
            named[name].requires_grad_(False)
    frozen = [value.numel() for value in named.values() if not value.requires_grad]
    if len(frozen) == len(named):
        raise UserError(
            f"model.freeze {', '.join(patterns)}: nothing would train", status=2
        )
    total = sum(value.numel() for value in named.values())
    say(f"Frozen: {sum(frozen):,} of {total:,} parameters")
    warnings.filterwarnings("ignore", "Found .* in eval mode at the start of training")
    in_eval = []
    for module in model.modules():
        requires_grad = [parameter.requires_grad for parameter in module.parameters()]
        if requires_grad and not any(requires_grad):
            in_eval.append(module.eval())
    return in_eval
