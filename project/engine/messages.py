"""What the command line says: errors cut to the bad value and the nearest right one, and a short --help."""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator

from jsonargparse import ArgumentParser
from lightning import LightningDataModule, LightningModule, Trainer
from torch import nn

from project.base.errors import did_you_mean

# the Trainer flags that --help shows; all others work too
COMMON_FLAGS = {
    "accelerator": "cpu, gpu or auto (a GPU if there is one).",
    "devices": "How many, `auto`, or which GPUs: [1] is the second one.",
    "precision": "32-true, 16-mixed, bf16-mixed and others.",
    "max_epochs": "Epochs of training.",
    "default_root_dir": "Where runs are kept instead of logs/.",
    "fast_dev_run": "One batch of everything, nothing written.",
}
HELP_END = """Every other argument of Lightning's Trainer is a flag too (--trainer.gradient_clip_val 1), and so is every
argument of the model and the data (--model.lr 0.1, --data.batch_size 256). --print_config shows them all with their
values, --data.help CLASS and --model.help CLASS explain those of a class, such as project.data.mnist.MNIST."""
# whose classes are not proposed for a misspelt key
LIBRARIES = ("torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning")


def explain(message: str, parser: ArgumentParser) -> str:
    """What jsonargparse says of a wrong flag or config, on one line: the key, the value, what is wrong with it."""
    if unknown := re.search(r"[Uu]nrecognized arguments: (.+)", message):
        return _unknown_flag(unknown[1].split()[0].split("=")[0], parser)
    if group := re.search(r"Group '(.+?)' does not accept option '(.+?)'", message):
        return _unknown_key(f"{group[1]}.{group[2]}", parser)
    keys = re.findall(r'Parser key "(.+?)"', message)
    nested = re.search(r"NestedArg\(key='(.+?)'", message)
    key = ".".join([*keys[:1], nested[1]]) if nested else ".".join(keys)
    if option := re.search(r"Option '(.+?)' is not accepted", message):
        prefix = f"{keys[0]}.{nested[1].rpartition('.')[0]}".strip(".") if nested else key
        return _unknown_key(f"{prefix}.{option[1]}".strip("."), parser)
    reason = _reason(message, key.rpartition(".")[2])
    return f"{key}: {reason}" if key and key != "config" else reason


def _unknown_flag(flag: str, parser: ArgumentParser) -> str:
    if not flag.startswith("-"):
        return f"unexpected argument {flag!r}; every argument is a flag with a value"
    return f"unknown flag {flag}{did_you_mean(flag, [f'--{key}' for key in _known_keys(parser)])}"


def _unknown_key(key: str, parser: ArgumentParser) -> str:
    prefix, _, name = key.rpartition(".")
    known = _known_keys(parser)
    same_level = sorted({k.removeprefix(f"{prefix}.") for k in known if k.startswith(f"{prefix}." if prefix else "")})
    siblings = ", ".join(k for k in same_level if "." not in k and k != "help")
    return f"unknown key {key}{did_you_mean(name, same_level) or f'; there are {siblings}'}"


def _known_keys(parser: ArgumentParser) -> set[str]:
    """All flags, and the constructor arguments of every system, network and data module that has been imported."""
    keys = {option[2:] for action in parser._actions for option in action.option_strings if option.startswith("--")}
    for prefix, base in (("model", LightningModule), ("model.net", nn.Module), ("data", LightningDataModule)):
        own = [cls for cls in _subclasses(base) if cls.__module__.partition(".")[0] not in LIBRARIES]
        keys |= {f"{prefix}.{name}" for cls in own for name in _init_args(cls)}
    return keys


def _subclasses(cls: type) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _init_args(cls: type) -> list[str]:
    """Names of the constructor's arguments, those that it passes on as **kwargs to its bases included."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]
            if not any(p.kind == p.VAR_KEYWORD for p in parameters):
                break
    return names


def _reason(message: str, name: str) -> str:
    value = re.search(r"Given value: (?:NestedArg\(key='.+?', val=(.+)\)|(.+))", message)
    given = (value[1] or value[2]).strip("'") if value else ""
    if found := re.search(rf"'{re.escape(name)}': ([^,}}]+)", given):  # a whole dict is shown: its one wrong value
        given = found[1]
    given = next(iter(re.findall(r"Got value: (.+)", message)), given)
    if found := re.search(r"Not of type \w+: (\S*) ?does not conform to restriction (.+)", message):
        return f"{given or found[1]} is out of range, it must be {found[2].replace('v', '')}"
    if found := re.search(r"invalid literal for int\(\) with base 10: (.+)", message):
        return f"{found[1]} is not a whole number"
    if found := re.search(r"could not convert string to float: (.+)", message):
        return f"{found[1]} is not a number"
    if found := re.search(r"module '(.+?)' has no attribute '(.+?)'", message):
        return f"{found[1]} has no {found[2]!r}{did_you_mean(found[2], dir(sys.modules.get(found[1])))}"
    if found := re.search(r"No module named '(.+?)'", message):
        return f"there is no module {found[1]!r}{did_you_mean(found[1], sys.modules)}"
    if found := re.search(r"Expected a dot import path string: (.+)", message):
        return f"{found[1]!r} is no import path; give the full one, such as project.models.mlp.MLP"
    if found := re.search(r"Multiple subclasses with name (\S+)\. .+?: (.+?)\.$", message, re.M):
        return f"{found[1]!r} is the name of several classes; give the full import path: {found[2]}"
    if found := re.search(r"Import path (.+) does not correspond to a subclass of (.+)", message):
        return f"{found[1]} is no {found[2]}"
    if found := re.search(r"the following arguments are required: (.+)", message):
        return f"{found[1]} is missing; give it in the config or as a flag"
    expected = [_type_name(t) for t in re.findall(r"Expected an? (.+?)(?:\. Got value|$)", message, re.M)]
    if wanted := list(dict.fromkeys(t for t in expected if t not in ("NoneType", "path"))):
        return f"{given!r} is not valid, expected {' or '.join(wanted)}"
    text = " ".join(message.split())
    return text if len(text) < 200 else f"{given[:100]} does not fit there"


def _type_name(text: str) -> str:
    text = re.sub(r"<class '(?:.*\.)?(\w+)'>", r"\1", text)
    text = re.sub(r"typing\.Literal\[(.+?)\]", lambda found: "one of " + found[1].replace("'", ""), text)
    return text if not text.startswith("path") else "path"


def shorten_help(parser: ArgumentParser) -> None:
    """Keep --help to what people change often: Lightning's own would be 450 lines."""
    parser.usage = "python scripts/train.py [--config FILE] [--KEY VALUE] ..."
    parser.description = "Train a network, then test its best checkpoint. Without --config: configs/default.yaml."
    parser.epilog = HELP_END
    for group in parser._action_groups:
        for base, title in ((Trainer, "Trainer"), (LightningModule, "Model"), (LightningDataModule, "Data")):
            if str(group.title) in (str(base), str(base.__doc__).strip().splitlines()[0]):
                group.title = title
    for action in parser._actions:
        key = action.dest
        if key.startswith("trainer"):
            action.help = COMMON_FLAGS.get(key.removeprefix("trainer."), argparse.SUPPRESS)
        elif key == "print_config":
            action.help = "Print the whole config that the other flags make, and exit."
