"""What the command line says: errors cut to the bad value and the nearest right one, and a short --help."""

import argparse
import importlib
import pkgutil
import re
import sys
import textwrap

from jsonargparse import ArgumentParser

import project
from project.base.errors import did_you_mean

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
HELP_END = """Lightning's other Trainer flags work too, and so does each argument of model and data: --model.lr 0.1,
--data.batch_size 256. --print_config shows them all, --model.help CLASS and --data.help CLASS explain them."""

# said of every union, of None as one of its types, and of a class that could have been a file
NOISE = ("Does not validate", "Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>", "Expected a path")


def explain(message: str, parser: ArgumentParser) -> str:
    """What jsonargparse says of a wrong flag or config, on one line: the key, the value, what is wrong with it."""
    if message.lower().startswith("unrecognized arguments: "):
        flag = message.split()[2].partition("=")[0]
        group, _, name = flag.removeprefix("--").partition(".")
        groups = [f"{key}.{name}" for key in ("model", "data") if key != group]  # --modle.lr
        known = [f"--{key}" for key in (*parser.get_defaults().keys(branches=True), *groups)]
        return f"unknown argument {flag}{did_you_mean(flag, known)}"
    # a tree: the keys and classes on the way, then what is wrong, for each type of a union
    rows = [(len(line) - len(line.lstrip(" -")), line.strip(" -")) for line in message.splitlines() if line.strip()]
    keys, reasons = list[str](), list[str]()
    key_depth, reason_depth, class_path = -1, 0, ""
    for depth, text in rows:
        if reasons and (depth < reason_depth or text.startswith(("Parser key", "Problem with", "Subclass types"))):
            break  # of another type of the union
        if found := re.fullmatch(r'Parser key "(.+)":', text):
            keys, key_depth = [*keys, found[1]], depth
        elif found := re.fullmatch(r"Problem with given class_path '(.+)':", text):
            class_path = found[1]
        elif not text.startswith(NOISE):
            reasons, reason_depth = [*reasons, text], depth
    types = r"an? (?:<class '(?:[\w.]*\.)?(\w+)'>|typing\.Literal\[(.+?)\])"
    reason = re.sub(types, lambda found: found[1] or f"one of {found[2]}", " or ".join(reasons))
    if found := re.fullmatch(r"(?:Group '(.+)' does not accept option|Option) '(.+?)'.*", reason):
        return _unknown_key([*keys, *filter(None, found.groups())], class_path, parser)
    if reason.startswith(("module ", "No module named ")):
        reason += _nearest_import(class_path)
    given = [text[12:] for depth, text in rows if text.startswith("Given value:") and depth > key_depth]
    value = [repr(text.rpartition("val=")[2].strip(" ')")) for text in given[:1] if len(text) < 80]
    line = ": ".join([*([".".join(keys)] if keys else []), *value, reason.replace(" or Expected ", " or ")])
    return textwrap.shorten(line, 400, placeholder=" ...")


def _unknown_key(keys: list[str], class_path: str, parser: ArgumentParser) -> str:
    name, prefix = keys[-1], "".join(f"{key}." for key in keys[:-1])
    if name == "class_path":
        return f"{prefix}class_path: beside it there is only the key init_args, which holds all arguments"
    if class_path:
        cls = pkgutil.resolve_name(class_path)
        scratch = ArgumentParser(exit_on_error=False, add_help=False)
        add = scratch.add_class_arguments if isinstance(cls, type) else scratch.add_function_arguments
        known = {"class_path", "init_args", *add(cls, fail_untyped=False)}
    else:
        own = [key for key in parser.get_defaults().keys(branches=True) if key.startswith(prefix)]
        known = {key.removeprefix(prefix).partition(".")[0] for key in own}
    return f"unknown key {prefix}{name}{did_you_mean(name, known) or '; there are ' + ', '.join(sorted(known))}"


def _nearest_import(path: str) -> str:
    module, _, name = path.rpartition(".")
    try:
        return did_you_mean(name, dir(importlib.import_module(module)))
    except ImportError:
        own = [file.name for file in pkgutil.walk_packages(project.__path__, "project.")]
        return did_you_mean(module, [*own, *sys.modules])


def shorten_help(parser: ArgumentParser) -> None:
    """Keep --help to what people change often: Lightning's own would be 450 lines."""
    parser.usage = "python scripts/train.py [--config FILE] [--KEY VALUE] ..."
    parser.description = "Train a network, then test its best checkpoint. Without --config: configs/default.yaml."
    parser.epilog = HELP_END
    for key, group in (parser.groups or {}).items():
        group.title = key.capitalize()
    for action in parser._actions:  # argparse has no public list of them
        if action.dest in HELP or action.dest.startswith("trainer"):
            action.help = HELP.get(action.dest, argparse.SUPPRESS)
