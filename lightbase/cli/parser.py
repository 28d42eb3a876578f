"""The parser of train.py: jsonargparse's, with stricter types, short errors and a short --help."""

import argparse
import inspect
import pkgutil
import re
import sys
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader
from jsonargparse.typing import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    restricted_number_type,
)
from lightning import Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lightbase.cli.command_line import renamed
from lightbase.compat import arguments_of
from lightbase.errors import UserError, did_you_mean

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])  # the range of NumPy's seeds
NumThreads = restricted_number_type("NumThreads", int, [(">", 0), ("<=", 1024)])  # 100000 crash
TRAINER_TYPES: dict[str, Any] = {
    # Lightning wrote int | float, which typing may hold as float | int: 1, one batch, would be read
    # as 1.0, all batches
    "limit_train_batches": int | float | None,
    "limit_val_batches": int | float | None,
    "limit_test_batches": int | float | None,
    "limit_predict_batches": int | float | None,
    "val_check_interval": int | float | str | None,
    # Lightning accepts numbers below zero here
    "min_epochs": NonNegativeInt | None,
    "min_steps": NonNegativeInt | None,
    "max_time": dict[str, NonNegativeInt] | str | None,
    "log_every_n_steps": NonNegativeInt | None,
    "check_val_every_n_epoch": PositiveInt | None,
    "accumulate_grad_batches": PositiveInt,
    "num_sanity_val_steps": restricted_number_type("CountOrAll", int, (">=", -1)) | None,
    "gradient_clip_val": NonNegativeFloat | None,
}
# null in config.yaml unless given: run/record.py fills them in when the run has a folder
LOGGER_TYPES: dict[str, Any] = {
    "save_dir": str | None,
    "name": str | None,
    "experiment_name": str | None,
    "default_hp_metric": bool | None,
}
# the flags of the Trainer that --help shows
HELP = {
    "trainer.accelerator": "cpu, gpu or auto (a GPU if there is one).",
    "trainer.devices": "How many, `auto`, or which GPUs: [1] is the second one.",
    "trainer.precision": "32-true, 16-mixed, bf16-mixed and others.",
    "trainer.max_epochs": "Epochs of training.",
    "trainer.default_root_dir": "Where runs are kept instead of logs/.",
    "trainer.fast_dev_run": "One batch of everything, nothing written.",
}
# "l1_unstructured" cannot be dumped as Lightning's Callable | str
PRUNING_TYPES: dict[str, Any] = {"pruning_fn": str}
USAGE = "python scripts/train.py [--config FILE] [--KEY VALUE] ..."
DESCRIPTION = """\
Train a network, then test its best checkpoint. Without --config: configs/default.yaml."""
EPILOG = """\
Lightning's other Trainer flags work too, and each argument of model and data: --model.lr 0.1.
--print_config shows them all, --model.help CLASS and --data.help CLASS explain them."""
# lines of an error of jsonargparse that say nothing: of a union, None and a path of a file
NOISE = ("Expected a <class 'NoneType'>", "Expected a path", "Given value")


class Parser(LightningArgumentParser):
    """Reports mistakes as a UserError of two lines. Replaces some types that Lightning declares.
    Knows the import paths of earlier versions."""

    def __init__(self, **options: Any) -> None:
        load_yaml = get_loader("yaml")
        set_loader("with_old_names", lambda text: renamed(load_yaml(text)), (yaml.YAMLError,))
        super().__init__(**{**options, "parser_mode": "with_old_names"})

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, **options: Any
    ) -> list[str]:
        # jsonargparse calls this for the Trainer, and for the class of each logger
        types = LOGGER_TYPES if issubclass(class_type, Logger) else {}
        types = {Trainer: TRAINER_TYPES, ModelPruning: PRUNING_TYPES}.get(class_type, types)
        parameters = inspect.signature(class_type).parameters
        names = types.keys() & parameters.keys()
        options["skip"] = {*(options.get("skip") or ()), *names}
        added = super().add_class_arguments(class_type, nested_key, **options)
        for name in sorted(names):
            default = parameters[name].default if class_type is Trainer else None
            added.append(f"{nested_key}.{name}" if nested_key else name)
            self.add_argument(f"--{added[-1]}", type=types[name], default=default)
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser inside the parser: part of a longer message
            super().error(message, ex)
        way_out = "see --help, or --print_config for every argument"
        raise UserError(f"{explain(message, self)}\n{way_out}", 2) from ex

    def format_help(self, *args: Any) -> str:
        """What people change often: Lightning's own help has 450 lines."""
        self.usage, self.description, self.epilog = USAGE, DESCRIPTION, EPILOG
        for key, group in (self.groups or {}).items():
            group.title = key.capitalize()
        for action in arguments_of(self):
            if action.dest.startswith("trainer"):
                action.help = HELP.get(action.dest, argparse.SUPPRESS)
        return super().format_help(*args)


def explain(message: str, parser: ArgumentParser) -> str:
    """One line for an error of jsonargparse: the key, the value, what is wrong with it."""
    keys = list(parser.get_defaults().keys(branches=True))
    if message.lower().startswith("unrecognized arguments: "):
        flag = message.split()[2].partition("=")[0]
        name = flag.partition(".")[2]  # of --modle.lr
        flags = [f"--{key}" for key in (*keys, f"model.{name}", f"data.{name}")]
        return f"unknown argument {flag}{did_you_mean(flag, flags)}"
    key, class_path, reason = deepest_reason(message)
    if class_path.endswith("MetricCollection"):
        return (
            f"{key}: give the metrics by name, without MetricCollection: --model.metrics.f1 CLASS"
        )
    unknown = re.fullmatch(r"(?:Group '(.+)' does not accept option|Option) '(.+?)'.*", reason)
    if unknown:
        return unknown_key(".".join(filter(None, [key, *unknown.groups()])), class_path, keys)
    if reason.startswith(("module ", "No module named ")):
        reason += nearest_import(class_path)
    reason = re.sub(r"a <class '([\w.]+)'>", r"\1", reason)
    reason = reason.replace("'NoneType'", "null").replace("a typing.Literal", "one of ")
    value = re.search(r"Given value: (?:NestedArg\(.*val=)?'?(.{0,60}?)'?\)?$", message, re.M)
    if value and "Got value" not in reason and not value[1].startswith("Namespace("):
        reason = f"{value[1]!r}: {reason}"
    return f"{key}: {reason}"[:400] if key else reason[:400]


def deepest_reason(message: str) -> tuple[str, str, str]:
    """The key, the class path there, and the error itself. jsonargparse writes an indented tree:
    keys and classes on the way, and an error for each type of a union. The most indented error says
    most."""
    path: dict[int, str] = {}  # the key at each indent
    class_path, key, reason, depth = "", "", "", -1
    for line in message.splitlines():
        text = line.strip(" -")
        indent = len(line) - len(line.lstrip(" -"))
        if match := re.match(r'Parser key "(.+?)":', text):
            path = {i: name for i, name in path.items() if i < indent} | {indent: match[1]}
        elif match := re.fullmatch(r"Problem with given class_path '(.+)':", text):
            class_path = match[1]
        elif text.startswith(NOISE) or not text or indent < depth:
            continue
        elif indent > depth:
            key, reason, depth = ".".join(path.values()), text, indent
        elif text not in reason:
            reason += f" or {text.removeprefix('Expected ')}"
    return key, class_path, reason


def unknown_key(path: str, class_path: str, keys: list[str]) -> str:
    """path: the unknown key, "model.nett" for instance. keys: all that the parser has."""
    parent, _, name = path.rpartition(".")
    if name == "class_path":
        return f"{path}: beside it there is only the key init_args, which holds all arguments"
    before = f"{parent}." if parent else ""
    names = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent]
    if class_path.rpartition(".")[0] in sys.modules:  # nothing is imported for a message
        arguments = parser_of(class_path).get_defaults().keys()
        names = [*arguments, "class_path", "init_args", "dict_kwargs"]
    hint = did_you_mean(name, names, before) or f"; there are {', '.join(sorted(names))}"
    return f"unknown key {path}{hint}"


def parser_of(class_path: str) -> ArgumentParser:
    """A parser of the arguments of a class or function, with their defaults."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    made_by = pkgutil.resolve_name(class_path)
    is_class = inspect.isclass(made_by)
    add = parser.add_class_arguments if is_class else parser.add_function_arguments
    add(made_by, fail_untyped=False)
    return parser


def nearest_import(path: str) -> str:
    """A hint for an import path that does not exist."""
    module, _, name = path.rpartition(".")
    if module in sys.modules:
        return did_you_mean(name, dir(sys.modules[module]))
    return did_you_mean(module, sys.modules)
