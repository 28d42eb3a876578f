"""Where a new training begins: weights from a file, frozen parameters."""

import importlib
import pickle
import textwrap
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightbase.config.errors import UserError, first_line, say
from lightbase.config.spec import entries
from lightbase.model.optim import matches, no_such_name
from lightbase.model.shards import load_shards

Table = dict[str, Tensor]


def load_weights(
    net: nn.Module, path: Path, is_complete: bool = False, content: Any = None
) -> None:
    """Copy the tensors of a file that fit by name and shape into `net`, and print how
    many fit. The names in the file or in the network may have a prefix, such as "net.",
    "module." or "backbone.".

    path: The file. FILE:NAME takes the part NAME of the file, or fills the part NAME of
        the network, such as encoder_q. The error for several parts has their names.
    is_complete: The file must have all tensors of the network.
    content: The content of the file, if the caller has read it already.
    """
    wanted = ""
    if ":" in path.name and not path.exists():
        file, _, wanted = str(path).rpartition(":")
        path = Path(file)
    if content is None:
        content = read_weights(path)
    state = net.state_dict()
    tables = tensor_tables(content)
    parts: dict[str, Table] = {"": {}}
    for key, table in tables.items():
        for prefix, tensors in fitting(state, table).items():
            parts[f"{key}.{prefix}".strip(".")] = tensors
    if wanted:
        parts = {wanted: parts.get(wanted, {})}
    most = max(map(len, parts.values()))
    names = sorted(name for name in parts if len(parts[name]) == most)
    matched = parts[names[0]]
    unmatched = [name for name in state if name not in matched]
    # a single number, such as BatchNorm's counter, fits any network
    has_weights = any(tensor.dim() for tensor in matched.values())
    if not has_weights or (is_complete and unmatched):
        in_file = [name for table in tables.values() for name in table]
        raise UserError(
            f"model.weights {path}: no tensor in it fits {type(net).__name__} by name "
            f"and shape for {shortened(unmatched)}",
            f"the file has {shortened(in_file) or 'no tensors by name'}",
            2,
        )
    if len(names) > 1 and names[0]:  # the part without a name comes before others
        raise UserError(
            f"model.weights {path}: several parts fit equally well: {shortened(names)}",
            f"name one of them: --model.weights {path}:{names[-1]}",
            2,
        )
    check_dtypes(path, state, matched)
    net.load_state_dict(matched, strict=False)
    text = f"Weights: {len(matched)} of {len(state)} tensors are those of {path}"
    if unmatched:
        text += f"; left as initialised: {shortened(unmatched)}"
    say(text)


def check_dtypes(path: Path, state: Table, matched: Table) -> None:
    """Raise UserError for integers in place of floating-point numbers, such as
    quantised weights without their scale."""
    for name, value in matched.items():
        is_other = value.is_floating_point() != state[name].is_floating_point()
        if is_other and value.dim():
            raise UserError(
                f"model.weights {path}: {name} is {value.dtype}",
                "give a file with weights as floating-point numbers",
                2,
            )


def tensor_tables(content: Any) -> dict[str, Table]:
    """Return each table {name: tensor} that a file holds, by its key: the file's dict
    itself as "", and every dict in it, such as "state_dict"."""
    tables = {}
    for key, table in {"": content, **entries(content)}.items():
        # WeightAveraging keeps the weights before the averaging under this key
        if isinstance(table, dict) and key != "current_model_state":
            # torch.compile renames the parts of a network that it compiles
            tables[key] = {
                name.replace("_orig_mod.", ""): value
                for name, value in table.items()
                if isinstance(name, str) and torch.is_tensor(value)
            }
    return tables


def fitting(state: Table, table: Table) -> dict[str, Table]:
    """Return the tensors of a file that fit a network by name and shape: by prefix, and
    then by the network's names. The prefix is removed from the names of the file or
    added to them.

    state, table: The tensors of the network and of the file by name.
    """
    parts: dict[str, Table] = defaultdict(dict)
    for name in state | table:
        for prefix in prefixes(name):
            rest = name.removeprefix(prefix)
            for old, new in ((name, rest), (rest, name)):
                is_there = old in table and new in state
                if is_there and table[old].shape == state[new].shape:
                    parts[prefix][new] = table[old]
    return parts


def prefixes(name: str) -> list[str]:
    """Return the beginnings of a dotted name, of at most two parts: "", "a." and "a.b."
    for a.b.c.weight."""
    parts = [f"{part}." for part in name.split(".")[:-1]]
    return ["", *accumulate(parts[:2])]


def shortened(names: Iterable[str]) -> str:
    return textwrap.shorten(", ".join(names), 80)


def read_weights(file: Path) -> Any:
    """Return the content of a file of weights, of torch.save or of safetensors."""
    if file.suffix != ".safetensors" or not file.is_file():
        way_out = (
            "if you trust it, torch.save(net.state_dict(), FILE) makes one of the "
            "weights"
        )
        return load_shards(load_checked(file, "model.weights", way_out), file)
    try:
        return importlib.import_module("safetensors.torch").load_file(file)
    except Exception as error:  # safetensors' errors have no other base class
        raise UserError(
            f"model.weights {file} cannot be read: {first_line(error)}"
        ) from error


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Freeze the parameters whose names match one of the patterns, and print how many
    numbers they hold. Return the modules that are now in eval mode, because all their
    parameters are frozen. Call `eval` on them again after `model.train()`.

    model: The module that trains. Its network is the attribute `net`.
    patterns: Names or patterns without "net.", see `lightbase.model.optim.matches`.
    """
    named = {
        name.removeprefix("net."): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for pattern in patterns:
        names = [name for name in named if matches(pattern, name, named[name])]
        if not names:
            raise no_such_name(f"model.freeze {pattern}", [*named])
        for name in names:
            named[name].requires_grad_(False)
    parameters = {*named.values()}  # a shared one has several names
    frozen = sum(value.numel() for value in parameters if not value.requires_grad)
    total = sum(value.numel() for value in parameters)
    say(f"Frozen: {frozen:,} of {total:,} parameters")
    warnings.filterwarnings("ignore", "Found .* in eval mode at the start of training")
    in_eval = []
    for module in model.modules():
        requires_grad = [parameter.requires_grad for parameter in module.parameters()]
        if requires_grad and not any(requires_grad):
            in_eval.append(module.eval())
    return in_eval


def load_checked(path: Path, name: str = "checkpoint", way_out: str = "") -> Any:
    """Return the content of a file that torch.save has written, on the CPU. No code in
    the file is run. Sharded tensors have no values, see `load_shards`.

    name: What messages call such a file.
    way_out: What the user can do if the file holds objects.
    """
    try:
        check_records(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{name} {path} holds objects: not safe to load", way_out
        ) from error
    except OSError as error:
        raise UserError(
            f"{name} {path} cannot be read: {error.strerror or error}",
            "checkpoints are in logs/NAME/version_N/checkpoints",
        ) from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, KeyError, ValueError) as error:
        raise UserError(
            f"{name} {path} is damaged or no checkpoint: {first_line(error)}"
        ) from error


def check_records(path: Path) -> None:
    """Raise BadZipFile for a record with a wrong checksum (CRC-32), which torch.load
    does not check, and for a file of torch before 1.6, which has no records."""
    with zipfile.ZipFile(path) as archive:
        # torch.save writes records without compression and without attributes.
        # torch.load reads wrong numbers from a record that is marked as a folder.
        damaged = [
            record.filename
            for record in archive.infolist()
            if record.compress_type or record.external_attr
        ]
        name = damaged[0] if damaged else archive.testzip()
    if name:
        raise zipfile.BadZipFile(f"its record {name} is not as torch.save writes it")
