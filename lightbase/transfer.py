"""Where a new training begins: weights from a file, frozen parameters, an initializer."""

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

from lightbase.data.batches import for_network
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError, first_line, function_at, is_raised_on_purpose
from lightbase.optim import matches, no_such_name
from lightbase.ranks import say

LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how files of torch before 1.6 begin
MAX_DEPTH = 9  # of dicts in a file of weights
NUM_SAMPLES = 1000  # for an initializer


class WeightsFile(str):
    """The absolute path of a file. A bare name that is not in the working folder is looked for in
    torch hub's folder, where torchvision keeps its weights."""

    def __new__(cls, path: str) -> "WeightsFile":
        in_hub = Path(torch.hub.get_dir(), "checkpoints", path)
        is_bare_name = Path(path).name == path
        if is_bare_name and not Path(path).exists() and in_hub.is_file():
            return super().__new__(cls, in_hub.absolute())
        return super().__new__(cls, Path(path).absolute())


register_type(WeightsFile)


def load_weights(net: nn.Module, path: str) -> set[str]:
    """Copy into `net` what fits by name and shape, and say so. Returns the names that stay as
    initialised.

    The names of the file, or those of the network, may have a prefix, such as "net.", "module." or
    "backbone.". Raises UserError for a file that is missing, damaged, not safe to load, or does not
    fit at all.
    """
    file = Path(WeightsFile(path))
    state: dict[str, Tensor] = net.state_dict()
    refuse_lazy("weights", state)
    tables = list(tensor_tables(read_weights(file)))
    if not tables:
        what = f"model.weights {file} holds no plain tensors by name"
        raise UserError(f"{what}: give a checkpoint or a state_dict", 2)
    table = max(tables, key=lambda table: len(fitting(state, table)))
    fit = fitting(state, table)
    # A single number, such as BatchNorm's counter, fits any network.
    if not any(tensor.dim() for tensor in fit.values()):
        what = f"model.weights {file}: none of its {len(table)} tensors fits {type(net).__name__}"
        raise UserError(
            f"{what}\nit has {listed(state, state)}; the file has {listed(table, table)}", 2
        )
    net.load_state_dict(fit, strict=False)
    names = matching_names(state, table)
    say_what_fits(file, state, table, names, fit)
    return state.keys() - fit.keys()


def fitting(state: dict[str, Tensor], table: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the table, by the network's names, that agree in name and shape."""
    names = matching_names(state, table)
    return {
        name: table[other]
        for name, other in names.items()
        if table[other].shape == state[name].shape
    }


def say_what_fits(
    file: Path,
    state: dict[str, Tensor],
    table: dict[str, Tensor],
    names: dict[str, str],
    fit: dict[str, Tensor],
) -> None:
    text = f"Weights: {len(fit)} of {len(state)} tensors are those of {file}"
    left = [
        f"{name} {tuple(state[name].shape)}, in the file {tuple(table[other].shape)}"
        for name, other in names.items()
        if name not in fit
    ]
    left += [name for name in state if name not in names]
    if left:
        text += f"; left as initialised: {shortened(left)}"
    if unused := [name for name in table if name not in names.values()]:
        text += f"; not used: {shortened(unused)}"
    say(text)


def refuse_lazy(argument: str, tensors: Mapping[str, Tensor]) -> None:
    if lazy := [name for name, tensor in tensors.items() if is_lazy(tensor)]:
        what = f"model.{argument}: the network's {lazy[0]} has no shape before a sample was seen"
        raise UserError(f"{what}; give its size in place of a lazy module", 2)


def matching_names(state: dict[str, Tensor], table: dict[str, Tensor]) -> dict[str, str]:
    """For each name of the network the name in the table, if it is there. The two names differ by a
    prefix, which is the same for all, and is chosen so that most names and shapes agree."""
    votes: Counter[tuple[str, str]] = Counter()

    def vote(name: str, other: str, prefix: str, other_prefix: str) -> None:
        votes[prefix, other_prefix] += 1001 if state[name].shape == table[other].shape else 1

    for other in table:
        for prefix in prefixes(other):
            name = other.removeprefix(prefix)
            if name in state:
                vote(name, other, "", prefix)
    for name in state:
        for prefix in prefixes(name)[1:]:
            other = name.removeprefix(prefix)
            if other in table:
                vote(name, other, prefix, "")
    prefix, other_prefix = max(votes, key=lambda pair: votes[pair], default=("", ""))
    names = {name: other_prefix + name.removeprefix(prefix) for name in state}
    return {n: other for n, other in names.items() if n.startswith(prefix) and other in table}


def prefixes(name: str) -> list[str]:
    """The beginnings of a dotted name: "", "a." and "a.b." of a.b.c."""
    return ["", *(name[: i + 1] for i, letter in enumerate(name) if letter == ".")]


def listed(names: Iterable[str], tensors: Mapping[str, Tensor]) -> str:
    return shortened([f"{name} {tuple(tensors[name].shape)}" for name in names])


def shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def tensor_tables(content: Any, depth: int = MAX_DEPTH) -> Iterator[dict[str, Tensor]]:
    """The tensors by name of each dict in what a file holds, such as {"state_dict": {...}}, from
    the outside in."""
    if not isinstance(content, dict) or depth == 0:  # a dict may hold itself
        return
    # torch.compile renames the parts of a network that it compiles
    named = {str(name).replace("_orig_mod.", ""): value for name, value in content.items()}
    if table := {name: value for name, value in named.items() if is_plain(value)}:
        yield table
    for inner in content.values():
        yield from tensor_tables(inner, depth - 1)


def is_plain(value: Any) -> bool:
    """Whether it is a tensor whose numbers can be copied into a weight."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not value.is_meta and not value.is_quantized


def read_weights(file: Path) -> Any:
    """The content of a file of weights. Raises UserError if it is missing, damaged or not safe to
    load."""
    if not file.is_file():
        hub = Path(torch.hub.get_dir(), "checkpoints")
        raise UserError(f"model.weights {file} is not there, nor is {file.name} in {hub}")
    if file.suffix != ".safetensors":
        way_out = (
            "if you trust it, torch.save(net.state_dict(), FILE) makes one of the weights alone"
        )
        return load_checked(file, "model.weights", f"\n{way_out}")
    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError as error:
        needs = 'needs safetensors: pip install -e ".[timm]"'
        raise UserError(f"model.weights {file} {needs}", 2) from error
    try:
        return safetensors.load_file(file)
    except Exception as error:  # safetensors' errors have no other base class
        what = f"model.weights {file} is cut short or no safetensors at all"
        raise UserError(f"{what}: {first_line(error)}") from error


def load_checked(path: Path, what: str = "checkpoint", way_out: str = "") -> Any:
    """The content of a file of torch.save, on the CPU. Raises UserError if it is damaged, or holds
    more than tensors and plain values: no code of it is run."""
    try:
        if not is_legacy(path):
            with zipfile.ZipFile(path) as archive:
                damaged = damaged_record(archive)
            if damaged:
                reason = f"its record {damaged} is not as torch.save writes it"
                raise UserError(f"{what} {path} is damaged: {reason}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        message = f"{what} {path} holds more than tensors and plain values: not safe to load"
        raise UserError(message + way_out) from error
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"{what} {path} is cut short or no checkpoint at all: {reason}") from error


def is_legacy(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(LEGACY)) == LEGACY


def damaged_record(archive: zipfile.ZipFile) -> str | None:
    """The name of a record with a wrong CRC-32, which torch.load does not check."""
    for info in archive.infolist():
        # torch.save sets neither. torch.load reads wrong numbers from a record marked as a folder.
        if info.compress_type or info.external_attr:
            return info.filename
    return archive.testzip()


def freeze_parameters(
    model: nn.Module, patterns: Sequence[str], untrained: Collection[str] = ()
) -> list[nn.Module]:
    """Freeze the parameters whose names match one of the patterns, and say how many. Returns the
    modules that have no other parameters, or match themselves; they are in eval mode now.

    untrained: names of parameters that no file has set. Raises UserError for a pattern that matches
    nothing, or if nothing would train.
    """
    if not patterns:
        return []
    parameters = [(name.removeprefix("net."), value) for name, value in model.named_parameters()]
    modules = [(name.removeprefix("net."), module) for name, module in model.named_modules()]
    modules = [(name, module) for name, module in modules if name not in ("", "net")]
    refuse_lazy("freeze", dict(parameters))
    matched = [part for pattern in patterns for part in matched_parts(pattern, parameters, modules)]
    frozen_ids = {id(value) for part in matched for value in parameters_of(part)}
    frozen = [(name, value) for name, value in parameters if id(value) in frozen_ids]
    is_new = any(value.requires_grad for _, value in frozen)
    for _, value in frozen:
        value.requires_grad_(False)
    if is_new:
        if not any(value.requires_grad for _, value in parameters):
            what = f"model.freeze {', '.join(patterns)}: that is all of the network"
            raise UserError(f"{what}; nothing would train", 2)
        say_frozen(model, [name for name, _ in frozen if name in untrained])
    in_eval = []
    for _, module in modules:
        inner = list(module.parameters())
        is_frozen = bool(inner) and all(id(value) in frozen_ids for value in inner)
        if is_frozen or any(module is part for part in matched):
            in_eval.append(module.eval())
    return in_eval


def matched_parts(
    pattern: str, parameters: list[tuple[str, nn.Parameter]], modules: list[tuple[str, nn.Module]]
) -> list[nn.Parameter | nn.Module]:
    """The parameters and modules that the pattern means; a module stands for all parameters in
    it."""
    named_parts: list[tuple[str, Any]] = [*parameters, *modules]
    parts = [part for name, part in named_parts if matches(pattern, name, part)]
    if not parts:
        raise no_such_name(f"model.freeze {pattern}", pattern, [name for name, _ in parameters])
    return parts


def parameters_of(part: nn.Parameter | nn.Module) -> Iterable[nn.Parameter]:
    return part.parameters() if isinstance(part, nn.Module) else [part]


def say_frozen(model: nn.Module, untrained: list[str]) -> None:
    total = sum(value.numel() for value in model.parameters())
    num = sum(value.numel() for value in model.parameters() if not value.requires_grad)
    note = f"; among them, not of the file, {shortened(untrained)}" if untrained else ""
    say(f"Frozen: {num:,} of {total:,} parameters{note}")
    warnings.filterwarnings("ignore", "Found .* in eval mode at the start of training")


def initialize(net: nn.Module, initializer: str | Callable[..., Any], data: Any) -> None:
    """Call initializer(net, inputs) with up to 1,000 training samples, evenly spread, as the
    network gets them."""
    if not isinstance(data, BaseDataModule):
        what = f"model.initializer needs data from a BaseDataModule, not from {type(data).__name__}"
        raise UserError(what, 2)
    set_weights: Any = function_at("initializer", initializer)
    samples = data.splits["train"]
    num = min(len(samples), NUM_SAMPLES)
    inputs, _ = samples.__getitems__([i * len(samples) // num for i in range(num)])
    with torch.no_grad():
        try:
            set_weights(net, for_network(data.normalize(inputs), net))
        except ValueError as error:
            if is_raised_on_purpose(error):  # it is not made for this network
                raise UserError(f"model.initializer: {first_line(error)}", 2) from error
            raise
