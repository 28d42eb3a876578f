"""What the command line says: errors cut to the bad value and the nearest right one, and a short
--help."""

import argparse
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import jsonargparse
import torch
from jsonargparse import ArgumentParser

from lightbase.compat import arguments_of
from lightbase.errors import did_you_mean
from lightbase.folder import PROJECT

# of the Trainer's flags --help shows these
HELP = {
    "print_config": "Print the whole config that the other flags make, and exit.",
    "trainer.accelerator": "cpu, gpu or auto (a GPU if there is one).",
    "trainer.devices": "How many, `auto`, or which GPUs: [1] is the second one.",
    "trainer.precision": "32-true, 16-mixed, bf16-mixed and others.",
    "trainer.max_epochs": "Epochs of training.",
    "trainer.default_root_dir": "Where runs are kept instead of logs/.",
    "trainer.fast_dev_run": "One batch of everything, nothing written.",
}
EXTRAS = ("timm",)  # of pyproject.toml, by the name of their package
# said of every union, of None as one of its types, and of a class that could have been a file
NOISE = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Expected a <class 'NoneType'>",
    "Expected a path",
)


def explain(message: str, parser: ArgumentParser) -> str:
    """What jsonargparse says of a wrong flag or config, on one line: the key, the value, what is
    wrong with it."""
    known = list(parser.get_defaults().keys(branches=True))
    if message.lower().startswith("unrecognized arguments: "):
        flag = message.split()[2].partition("=")[0]
        name = flag.partition(".")[2]  # --modle.lr
        near = did_you_mean(flag, [f"--{key}" for key in (*known, f"model.{name}", f"data.{name}")])
        return f"unknown argument {flag}{near}"
    # a tree: the keys and classes on the way, what is wrong for each type of a union, the value
    rows = [
        (len(line) - len(line.lstrip(" -")), line.strip(" -"))
        for line in message.splitlines()
        if line.strip(" -")
    ]
    keys, reasons, key_depth, reason_depth, class_path = list[str](), list[str](), -1, 0, ""
    for depth, text in rows:
        if text.startswith("Problem with") and reasons == ["Expected a <class 'list'>"]:
            reasons = []  # what could have been a list is a class, which has more to say
        if reasons and (
            depth < reason_depth
            or text.startswith(("Parser key", "Problem with", "Subclass types"))
        ):
            break  # of another type of the union
        if found := re.fullmatch(r'Parser key "(.+)":', text):
            keys, key_depth = [*keys, found[1]], depth
        elif found := re.fullmatch(r"Problem with given class_path '(.+)':", text):
            class_path = found[1]
        elif not text.startswith(NOISE):
            reasons, reason_depth = [*reasons, text], depth
    reason = (
        " or ".join(reasons).replace("a typing.Literal", "one of ").replace(" or Expected ", " or ")
    )
    reason = re.sub(r"a <class '([\w.]+)'>", r"\1", reason).replace("'NoneType'", "null")
    if found := re.fullmatch(r"(?:Group '(.+)' does not accept option|Option) '(.+?)'.*", reason):
        return unknown_key(".".join([*keys, *filter(None, found.groups())]), class_path, known)
    if reason.startswith(("module ", "No module named ")):
        reason += nearest_import(class_path)
    given = [
        text[12:] for depth, text in rows if text.startswith("Given value:") and depth > key_depth
    ]
    value = [repr(text.rpartition("val=")[2].strip(" ')")) for text in given[:1] if len(text) < 80]
    return ": ".join([*filter(None, [".".join(keys)]), *value, reason])[:400]


def unknown_key(path: str, class_path: str, known: list[str]) -> str:
    parent, dot, name = path.rpartition(".")
    if name == "class_path":
        return f"{path}: beside it there is only the key init_args, which holds all arguments"
    names = {
        key.removeprefix(parent + dot).partition(".")[0]
        for key in known
        if key.startswith(parent + dot)
    }
    if (
        class_path.rpartition(".")[0] in sys.modules
    ):  # the message may quote a file: nothing is imported for it
        cls, scratch = (
            pkgutil.resolve_name(class_path),
            ArgumentParser(exit_on_error=False, add_help=False),
        )
        add = (
            scratch.add_class_arguments if isinstance(cls, type) else scratch.add_function_arguments
        )
        arguments, own = add(cls, fail_untyped=False), inspect.signature(cls).parameters
        names = {"class_path", "init_args", *arguments}
        if set(arguments) < own.keys() and any(
            value.kind is value.VAR_KEYWORD for value in own.values()
        ):
            names.add(f"dict_kwargs.{name} where its **kwargs take that")
    elif not names:  # a section that is none
        path = name = path.partition(".")[0]
        parent = dot = ""
        names = {key.partition(".")[0] for key in known}
    return (
        "unknown key "
        f"{path}"
        f"{did_you_mean(name, names, parent + dot) or '; there are ' + ', '.join(sorted(names))}"
    )


def nearest_import(path: str) -> str:
    module, _, name = path.rpartition(".")
    try:
        return did_you_mean(name, dir(sys.modules[module]))
    except KeyError:
        if module.partition(".")[0] in EXTRAS:
            return f'; pip install -e ".[{module.partition(".")[0]}]"'
        own = modules_of_user()
        package = module.partition(".")[0]
        missing = f"; pip install {package}" if importlib.util.find_spec(package) is None else ""
        return did_you_mean(module, [*own, *sys.modules]) or missing


def modules_of_user() -> list[str]:
    """The import paths of the modules of the user's package and of lightbase."""
    packages = [sys.modules.get(name) for name in (PROJECT.package, "lightbase")]
    return [
        module.name
        for package in packages
        if package is not None
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


def is_of_parser(error: Exception) -> bool:
    """Whether jsonargparse itself has raised it, and not what it called."""
    return (
        Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent
        == Path(jsonargparse.__file__).parent
    )


def is_of_library(error: Exception) -> bool:
    """Whether an installed package refuses what it is given: in a network of its own for any
    reason, below a network of the user's by what torch raises for a wrong shape or type. Everything
    else may be a bug of the user's."""
    packages = Path(torch.__file__).parents[1]
    foreign = [
        packages in Path(line.filename).parents
        for line in traceback.extract_tb(error.__traceback__)[1:]
    ]
    return all(foreign) or (
        foreign[-1] and isinstance(error, RuntimeError | ValueError | AssertionError)
    )


def pretrained_hint(model: Any) -> str:
    """For a network that takes no weights of its package: where they cannot be fetched, or are of
    other classes."""
    arguments = model.get("init_args.net.init_args") if model else None
    found = [name for name in ("weights", "pretrained") if arguments and arguments.get(name)]
    return (
        f"\nwithout model.net.{found[0]}, --model.weights FILE takes what fits of a file"
        if found
        else ""
    )


def shorten_help(parser: ArgumentParser) -> None:
    """Keep --help to what people change often: Lightning's own would be 450 lines."""
    parser.usage = "python scripts/train.py [--config FILE] [--KEY VALUE] ..."
    parser.description = (
        "Train a network, then test its best checkpoint. Without --config: configs/default.yaml."
    )
    others = (
        "Lightning's other Trainer flags work too, and each argument of model and data: "
        "--model.lr 0.1."
    )
    known = "--print_config shows them all, --model.help CLASS and --data.help CLASS explain them."
    parser.epilog = f"{others} {known} --version prints the versions."
    for key, group in (parser.groups or {}).items():
        group.title = key.capitalize()
    for action in arguments_of(parser):
        if action.dest in HELP or action.dest.startswith("trainer"):
            action.help = HELP.get(action.dest, argparse.SUPPRESS)
