"""Weights of a file, for a new training to start with."""

import difflib
import importlib
import pickle
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import register_type
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError, did_you_mean, first_line, function_at, is_raised_on_purpose
from lightbase.optim import fits, no_such_name
from lightbase.ranks import say

# the beginning of what torch.save wrote before 1.6: no archive
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"


class WeightsFile(str):
    """The absolute path of a file; a bare name that is not here may be one in torch hub's folder,
    where torchvision keeps its weights."""

    def __new__(cls, path: str) -> "WeightsFile":
        is_of_hub = Path(path).name == path and not Path(path).exists() and (hub() / path).is_file()
        return super().__new__(cls, (hub() / path if is_of_hub else Path(path)).absolute())


register_type(WeightsFile)


def hub() -> Path:
    return Path(torch.hub.get_dir(), "checkpoints")


def load_weights(net: nn.Module, path: str) -> set[str]:
    """Give `net` what fits it by name and shape, and say so. Returns the names that are left as
    initialised.

    The names of one may all lie below a prefix in the other, such as "net.", "module." or
    "backbone.". Raises UserError for a file that is missing, damaged, not safe to load, or does not
    fit at all.
    """
    file = Path(WeightsFile(path))
    own: dict[str, Tensor] = net.state_dict()
    refuse_lazy("weights", own)
    found = [(table, same_names(own, table)) for table in tables(read_weights(file))]
    if not found:
        raise UserError(
            f"model.weights {file} holds no plain tensors by name: give a checkpoint or a "
            "state_dict",
            2,
        )
    table, names = max(found, key=lambda pair: len(fitting(own, *pair)))
    fit = fitting(own, table, names)
    if not any(
        tensor.dim() for tensor in fit.values()
    ):  # a single number, such as BatchNorm's counter, fits any
        wanted = list(own)[:3]
        near = dict.fromkeys(
            difflib.get_close_matches(name, table, n=1, cutoff=0)[0] for name in wanted
        )
        what = f"model.weights {file}: none of its {len(table)} tensors fits {type(net).__name__}"
        theirs = (
            f"the nearest in the file are {shortened(with_shape(name, table) for name in near)}"
        )
        raise UserError(
            f"{what}\nit has {shortened(with_shape(name, own) for name in wanted)}; {theirs}", 2
        )
    net.load_state_dict(fit, strict=False)
    others = [name for name in names if name not in fit]
    left = [
        f"{with_shape(name, own)}, in the file {tuple(table[names[name]].shape)}" for name in others
    ]
    left += [name for name in own if name not in names]
    unused = [name for name in table if name not in names.values()]
    text = f"Weights: {len(fit)} of {len(own)} tensors are those of {file}"
    text += f"; left as initialised: {shortened(left)}" if left else ""
    say(text + (f"; not used: {shortened(unused)}" if unused else ""))
    return own.keys() - fit.keys()


def refuse_lazy(argument: str, tensors: Mapping[str, Tensor]) -> None:
    if lazy := [name for name, tensor in tensors.items() if is_lazy(tensor)]:
        what = f"model.{argument}: the network's {lazy[0]} has no shape before a sample was seen"
        raise UserError(f"{what}; give its size in place of a lazy module", 2)


def fitting(
    own: dict[str, Tensor], table: dict[str, Tensor], names: dict[str, str]
) -> dict[str, Tensor]:
    return {
        name: table[theirs]
        for name, theirs in names.items()
        if table[theirs].shape == own[name].shape
    }


def same_names(own: dict[str, Tensor], table: dict[str, Tensor]) -> dict[str, str]:
    """The network's names, and those of the table for the same, below the prefix, if any, with
    which most agree."""
    votes: Counter[tuple[str, str]] = Counter()

    def vote(name: str, start: int, theirs: str, their_start: int) -> None:
        votes[name[:start], theirs[:their_start]] += 1 + 1000 * (
            own[name].shape == table[theirs].shape
        )

    for theirs in table:
        for start in starts(theirs):
            if theirs[start:] in own:
                vote(theirs[start:], 0, theirs, start)
    for name in own:
        for start in starts(name)[1:]:
            if name[start:] in table:
                vote(name, start, name[start:], 0)
    own_prefix, prefix = max(votes, key=lambda pair: votes[pair], default=("", ""))
    below = {
        name: prefix + name.removeprefix(own_prefix) for name in own if name.startswith(own_prefix)
    }
    return {name: theirs for name, theirs in below.items() if theirs in table}


def starts(name: str) -> list[int]:
    """Where what is left of a dotted name may begin."""
    return [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]


def with_shape(name: str, table: dict[str, Tensor]) -> str:
    return f"{name} {tuple(table[name].shape)}"


def shortened(names: Iterable[str]) -> str:
    first, rest = list(names)[:4], list(names)[4:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")


def tables(content: Any, depth: int = 9) -> Iterator[dict[str, Tensor]]:
    """The tensors by name of each dict in what a file holds, such as {"state_dict": {...}}, from
    the outside in."""
    if isinstance(content, dict) and depth:  # a dict may hold itself
        # a part that torch.compile had wrapped has another name
        if table := {
            str(name).replace("_orig_mod.", ""): value
            for name, value in content.items()
            if is_plain(value)
        }:
            yield table
        for inner in content.values():
            yield from tables(inner, depth - 1)


def is_plain(value: Any) -> bool:
    """Whether it is a tensor whose numbers can be copied into a weight."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_meta or value.is_quantized)
    )


def read_weights(file: Path) -> Any:
    """What a file of weights holds. Raises UserError for one that is missing, damaged or not safe
    to load."""
    if file.is_dir():
        raise UserError(f"model.weights {file} is a folder: give a file in it")
    if not file.is_file():
        names = [
            path.name
            for folder in (file.parent, hub())
            if folder.is_dir()
            for path in folder.iterdir()
        ]
        what = f"is not there, nor is {file.name} in {hub()}"
        raise UserError(f"model.weights {file} {what}{did_you_mean(file.name, names)}")
    if file.suffix != ".safetensors":
        way_out = (
            "\nwhere it is trusted, torch.save(net.state_dict(), FILE) makes one of the "
            "weights alone"
        )
        return load_checked(file, "model.weights", way_out)
    try:
        safetensors, from_file = (
            importlib.import_module(name) for name in ("safetensors", "safetensors.torch")
        )
    except ImportError as error:
        raise UserError(
            f'model.weights {file} needs safetensors: pip install -e ".[timm]"', 2
        ) from error
    try:
        return from_file.load_file(file)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(
            f"model.weights {file} is cut short or no safetensors at all: {first_line(error)}"
        ) from error


def load_checked(path: Path, what: str = "checkpoint", way_out: str = "") -> Any:
    """What a file holds, on the CPU, checked to be whole and loaded without running any code in it.

    torch.save writes a zip archive with a CRC-32 of each record, which torch.load does not look at.
    """
    try:
        with path.open("rb") as file:
            is_legacy = file.read(len(LEGACY)) == LEGACY
        if not is_legacy:
            with zipfile.ZipFile(path) as archive:
                # torch.save sets neither; torch.load finds other numbers in a record that is marked
                # as a folder
                marked = [
                    info.filename
                    for info in archive.infolist()
                    if info.compress_type or info.external_attr
                ]
                damaged = marked[0] if marked else archive.testzip()
            if damaged:
                raise UserError(
                    f"{what} {path} is damaged: its record {damaged} is not as torch.save writes it"
                )
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        message = f"{what} {path} holds more than tensors and plain values: not safe to load"
        raise UserError(message + way_out) from error
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, KeyError, ValueError) as error:
        raise UserError(
            f"{what} {path} is cut short or no checkpoint at all: {first_line(error)}"
        ) from error


def freeze_parameters(
    model: nn.Module, prefixes: Sequence[str], untrained: Collection[str] = ()
) -> list[nn.Module]:
    """Let the parameters whose names begin with or match one of the prefixes not train, and say how
    many those are. Returns the modules that have no others, or are named so; they are in eval mode
    now.

    untrained: names in the network of what no file has given. Raises UserError for a prefix without
    a parameter, or where nothing would train.
    """
    parameters = [
        (name.removeprefix("net."), parameter) for name, parameter in model.named_parameters()
    ]
    modules = [
        (name.removeprefix("net."), module)
        for name, module in model.named_modules()
        if name not in ("", "net")
    ]
    if prefixes:
        refuse_lazy("freeze", dict(parameters))
    chosen: list[nn.Parameter | nn.Module] = []
    for prefix in prefixes:
        found = [part for name, part in (*parameters, *modules) if fits(prefix, name, part)]
        if not found:
            raise no_such_name(f"model.freeze {prefix}", prefix, [name for name, _ in parameters])
        chosen += found
    # a pattern may name modules: "block?" is all that is in them
    ids = {
        id(own)
        for part in chosen
        for own in (part.parameters() if isinstance(part, nn.Module) else [part])
    }
    frozen = [(name, parameter) for name, parameter in parameters if id(parameter) in ids]
    is_new = any(parameter.requires_grad for _, parameter in frozen)
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    if is_new:
        sizes = [(parameter.numel(), parameter.requires_grad) for _, parameter in parameters]
        num, total = (
            sum(size for size, trains in sizes if not trains),
            sum(size for size, _ in sizes),
        )
        if num == total:
            raise UserError(
                f"model.freeze {', '.join(prefixes)}: that is all of the network; nothing "
                "would train",
                2,
            )
        random = [name for name, _ in frozen if name in untrained]
        note = f"; among them, not of the file, {shortened(random)}" if random else ""
        say(f"Frozen: {num:,} of {total:,} parameters{note}")
        warnings.filterwarnings("ignore", "Found .* in eval mode at the start of training")
    still = []
    for _, module in modules:
        own = [id(parameter) in ids for parameter in module.parameters()]
        if (own and all(own)) or any(module is part for part in chosen):
            still.append(module.eval())
    return still


NUM_SAMPLES = 1000


def initialize(net: nn.Module, initializer: str | Callable[..., Any], data: Any) -> None:
    """Call initializer(net, inputs) with up to 1,000 training samples, evenly spread, as the
    network gets them."""
    if not isinstance(data, BaseDataModule):
        raise UserError(
            f"model.initializer needs data from a BaseDataModule; {type(data).__name__} is none", 2
        )
    set_weights: Any = function_at("initializer", initializer)
    samples = data.splits["train"]
    num = min(len(samples), NUM_SAMPLES)
    inputs = samples.__getitems__([i * len(samples) // num for i in range(num)])[0]
    with torch.no_grad():
        try:
            set_weights(net, data.normalize(inputs))
        except ValueError as error:
            if is_raised_on_purpose(error):  # its word for a network that it is not made for
                raise UserError(f"model.initializer: {first_line(error)}", 2) from error
            raise
