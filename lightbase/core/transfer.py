"""Where a new training begins: weights from a file, frozen parameters."""

import importlib
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from jsonargparse.typing import register_type
from torch import Tensor, nn

from lightbase.core.errors import UserError, first_line, say
from lightbase.core.folder import check_readable
from lightbase.core.optim import matches, no_such_name

LEGACY = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how files of torch before 1.6 begin
)


class WeightsFile(str):
    """The absolute path of a file."""

    def __new__(cls, path: str) -> "WeightsFile":
        return super().__new__(cls, Path(path).absolute())


register_type(WeightsFile)


def load_weights(
    net: nn.Module, path: str, is_complete: bool = False, content: Any = None
) -> None:
    """Copy into `net` what fits by name and shape, and say so.

    The names of the file, or those of the network, may have a prefix, such as "net.",
    "module." or "backbone.". Raises UserError for a file that is missing, damaged, not
    safe to load, or does not fit at all. With `is_complete` all tensors of the network
    have to be in the file.

    content: Of the file, if it has been read already.
    """
    if content is None:
        content = read_weights(Path(path))
    state, tables = net.state_dict(), tensor_tables(content)
    fit = max((fitting(state, table) for table in tables), key=len, default={})
    missing = [
        name
        for name, value in state.items()
        if name not in fit and torch.is_tensor(value)
    ]
    if is_complete and missing:
        what = (
            f"{path} has no tensor of the same name and shape for {shortened(missing)}"
        )
        raise UserError(
            what, f"the file is of another network than this {type(net).__name__}", 2
        )
    # A single number, such as BatchNorm's counter, fits any network.
    if not any(tensor.dim() for tensor in fit.values()):
        what = f"model.weights {path}: no tensor in it fits {type(net).__name__}"
        in_file = (
            shortened([name for table in tables for name in table])
            or "no tensors by name"
        )
        raise UserError(
            what, f"it has {shortened([*state])}; the file has {in_file}", 2
        )
    net.load_state_dict(fit, strict=False)
    left = [name for name in state if name not in fit]
    note = f"; left as initialised: {shortened(left)}" if left else ""
    say(f"Weights: {len(fit)} of {len(state)} tensors are those of {path}{note}")


def tensor_tables(content: Any) -> list[dict[str, Tensor]]:
    """The tensors by name in what a file holds: {name: tensor}, or {"state_dict":
    {...}}."""
    tables = [content, *content.values()] if isinstance(content, dict) else []
    # torch.compile renames the parts of a network that it compiles
    return [
        {
            str(name).replace("_orig_mod.", ""): x
            for name, x in table.items()
            if torch.is_tensor(x)
        }
        for table in tables
        if isinstance(table, dict)
    ]


def fitting(state: dict[str, Tensor], table: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the table, by the network's names, that agree in name and shape.
    The names may differ by a prefix, which is the same for all, and is chosen so that
    most tensors fit."""
    tables = [
        {prefix + name: table[name] for name in table} for prefix in prefixes(state)
    ]
    for prefix in prefixes(table):
        inner = [name for name in table if name.startswith(prefix)]
        tables.append({name.removeprefix(prefix): table[name] for name in inner})
    fits = []
    for renamed in tables:
        both = state.keys() & renamed.keys()
        equal = [name for name in both if renamed[name].shape == state[name].shape]
        fits.append({name: renamed[name] for name in equal})
    return max(fits, key=len)


def prefixes(names: Iterable[str]) -> list[str]:
    """The beginnings of dotted names, of two parts at most: "", "a." and "a.b." of
    a.b.c.weight."""
    beginnings = {""}
    for name in names:
        parts = name.split(".")[:-1]
        beginnings |= {
            ".".join(parts[:num]) + "." for num in (1, 2) if num <= len(parts)
        }
    return sorted(beginnings)


def shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def read_weights(file: Path) -> Any:
    """The content of a file of weights. Raises UserError if it is missing, damaged or
    not safe to load."""
    if file.suffix != ".safetensors" or not file.is_file():
        way_out = "if you trust it, torch.save(net.state_dict(), FILE) makes one of the weights"
        return load_checked(file, "model.weights", f"\n{way_out}")
    try:
        return importlib.import_module("safetensors.torch").load_file(file)
    except Exception as error:  # safetensors' errors have no other base class
        raise UserError(
            f"model.weights {file} cannot be read: {first_line(error)}"
        ) from error


def load_checked(path: Path, what: str = "checkpoint", way_out: str = "") -> Any:
    """The content of a file of torch.save, on the CPU. Raises UserError if it is
    damaged, or holds
    more than tensors and plain values: no code of it is run."""
    try:
        check_readable(path, psutil.virtual_memory().total)
        with path.open("rb") as file:
            if file.read(len(LEGACY)) != LEGACY:
                check_records(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{what} {path} holds objects: not safe to load{way_out}"
        ) from error
    except OSError as error:
        reason = f"{error.strerror or error}\ncheckpoints are in logs/NAME/version_N/checkpoints"
        raise UserError(f"{what} {path} cannot be read: {reason}") from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"{what} {path} is damaged or no checkpoint: {reason}"
        ) from error


def check_records(path: Path) -> None:
    """Raise BadZipFile for a record with a wrong CRC-32, which torch.load does not
    check."""
    with zipfile.ZipFile(path) as archive:
        # torch.save sets neither. torch.load reads wrong numbers from a record marked
        # as a folder.
        marked = [
            i.filename for i in archive.infolist() if i.compress_type or i.external_attr
        ]
        damaged = marked[0] if marked else archive.testzip()
    if damaged:
        raise zipfile.BadZipFile(f"its record {damaged} is not as torch.save writes it")


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Freeze the parameters whose names match one of the patterns, and say how many.
    Returns the modules that match, or have no other parameters; they are in eval mode
    now.

    Raises UserError for a pattern that matches nothing, or if nothing would train.
    """
    parameters = [
        (name.removeprefix("net."), value) for name, value in model.named_parameters()
    ]
    modules = [
        (name.removeprefix("net."), module) for name, module in model.named_modules()
    ]
    modules = [(name, module) for name, module in modules if name not in ("", "net")]
    matched = []
    for pattern in patterns:
        parts = [
            part
            for name, part in [*parameters, *modules]
            if matches(pattern, name, part)
        ]
        if not parts:
            raise no_such_name(
                f"model.freeze {pattern}", pattern, [name for name, _ in parameters]
            )
        matched += parts
    for part in matched:
        part.requires_grad_(False)  # of a module, all its parameters
    num_frozen = sum(
        value.numel() for _, value in parameters if not value.requires_grad
    )
    total = sum(value.numel() for _, value in parameters)
    if num_frozen == total:
        raise UserError(
            f"model.freeze {', '.join(patterns)}: nothing would train", status=2
        )
    say(f"Frozen: {num_frozen:,} of {total:,} parameters")
    warnings.filterwarnings("ignore", "Found .* in eval mode at the start of training")
    in_eval = []
    for _, module in modules:
        inner = [*module.parameters()]
        is_frozen = bool(inner) and not any(value.requires_grad for value in inner)
        if is_frozen or any(module is part for part in matched):
            in_eval.append(module.eval())
    return in_eval
