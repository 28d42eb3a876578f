"""The parser of train.py, jsonargparse's with stricter types, short errors and a short
--help; and a run's config: completed from what the data knows, and written down, enough
to repeat the run."""

import copy
import inspect
import json
import math
import pkgutil
import re
import sys
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
from jsonargparse.typing import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    register_type,
    restricted_number_type,
)
from lightning import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lightbase.commands.arguments import SEE_HELP, meant
from lightbase.core.command_line import path_of_class, users_classes
from lightbase.core.compat import resolve_class_names
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, did_you_mean
from lightbase.core.folder import flatten

TRAINER_TYPES: dict[str, Any] = {
    # Lightning wrote int | float, which typing may hold as float | int: 1, one batch,
    # would be read as 1.0, all batches
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
    "num_sanity_val_steps": restricted_number_type("CountOrAll", int, (">=", -1))
    | None,
    "gradient_clip_val": NonNegativeFloat | None,
    "default_root_dir": Path | None,
}
# null in config.yaml unless given: run/record.py fills them in when the run has a
# folder
LOGGER_TYPES: dict[str, Any] = {
    "save_dir": Path | None,
    "name": str | None,
    "experiment_name": str | None,
    "default_hp_metric": bool | None,
}
# "l1_unstructured" cannot be dumped as Lightning's Callable | str
PRUNING_TYPES: dict[str, Any] = {"pruning_fn": str}
# lines of an error of jsonargparse that say nothing: of a union, None and a path of a
# file
NOISE = ("Expected a <class 'NoneType'>", "Expected a path", "Given value")


class Parser(LightningArgumentParser):
    """Reports mistakes as a UserError of two lines. Replaces some types that Lightning
    declares."""

    folder = Path()  # the working folder; jsonargparse leaves it while it reads a file

    def __init__(self, **options: Any) -> None:
        yaml_of = get_loader("yaml")
        # jsonargparse hands a null on as the text None
        load = lambda text: None if text == "None" else yaml_of(text)  # noqa: E731
        set_loader("with_null", load, (yaml.YAMLError,))
        # a path in a flag is relative to the working folder; a saved one means the same
        # anywhere
        absolute = lambda path: Parser.folder / path  # noqa: E731
        register_type(Path, str, absolute, fail_already_registered=False)
        resolve_class_names(path_of_class)
        usage = "python scripts/train.py [--KEY VALUE] ..."
        super().__init__(**{**options, "parser_mode": "with_null", "usage": usage})

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, **options: Any
    ) -> list[str]:
        # jsonargparse calls this for the Trainer, and for the class of each logger
        types = LOGGER_TYPES if issubclass(class_type, Logger) else {}
        types = {Trainer: TRAINER_TYPES, ModelPruning: PRUNING_TYPES}.get(
            class_type, types
        )
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
        if (
            not self.exit_on_error
        ):  # a parser inside the parser: part of a longer message
            super().error(message, ex)
        raise UserError(f"{explain(message, self)}", SEE_HELP, 2) from ex


def explain(message: str, parser: ArgumentParser) -> str:
    """One line for an error of jsonargparse: the key, the value, what is wrong with
    it."""
    keys = list(parser.get_defaults().keys(branches=True))
    if message.lower().startswith("unrecognized arguments: "):
        flag = message.split()[2].partition("=")[0]
        return f"unknown argument {flag}{meant(flag, [f'--{key}' for key in keys])}"
    key, class_path, reason = deepest_reason(message)
    if class_path.endswith("MetricCollection"):
        return f"{key}: give metrics by name, without MetricCollection: --model.metrics.f1 CLASS"
    unknown = re.fullmatch(
        r"(?:Group '(.+)' does not accept option|Option) '(.+?)'.*", reason
    )
    if unknown:
        return unknown_key(
            ".".join(filter(None, [key, *unknown.groups()])), class_path, keys
        )
    if reason.startswith(("module ", "No module named ")):
        module, _, name = class_path.rpartition(".")
        is_there = module in sys.modules
        names = dir(sys.modules[module]) if is_there else sys.modules
        reason += did_you_mean(name if is_there else module, names)
    reason = re.sub(r"a <class '([\w.]+)'>", r"\1", reason)
    reason = reason.replace("'NoneType'", "null").replace("a typing.Literal", "one of ")
    if "Expected a dot import path string: " in reason:
        paths = {path.rpartition(".")[2]: path for path, _ in users_classes()}
        reason += did_you_mean(reason.split()[-1], paths)
    if listed := re.fullmatch(
        r"Expected list. Got value: ([^\[\]{}]+,[^\[\]{}]+)", reason
    ):
        reason += f"; a list has brackets: [{listed[1]}]"
    value = re.search(
        r"Given value: (?:NestedArg\(.*val=)?'?(.{0,60}?)'?\)?$", message, re.M
    )
    if value and "Got value" not in reason and not value[1].startswith("Namespace("):
        reason = f"{value[1]!r}: {reason}"
    return f"{key}: {reason}"[:400] if key else reason[:400]


def deepest_reason(message: str) -> tuple[str, str, str]:
    """The key, the class path there, and the error itself. jsonargparse writes an
    indented tree: keys and classes on the way, and an error for each type of a union.
    The most indented error says most."""
    path: dict[int, str] = {}  # the key at each indent
    class_path, key, reason, depth = "", "", "", -1
    for line in message.splitlines():
        text = line.strip(" -")
        indent = len(line) - len(line.lstrip(" -"))
        if match := re.match(r'Parser key "(.+?)":', text):
            path = {i: name for i, name in path.items() if i < indent} | {
                indent: match[1]
            }
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
    """path: the unknown key, "model.nett" for instance. keys: all that the parser
    has."""
    parent, _, name = path.rpartition(".")
    if name == "class_path":
        return f"{path}: beside it there is only the key init_args, which holds all arguments"
    before = f"{parent}." if parent else ""
    names = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent]
    if (
        class_path.rpartition(".")[0] in sys.modules
    ):  # nothing is imported for a message
        arguments = parser_of(class_path).get_defaults().keys()
        names = [*arguments, "class_path", "init_args", "dict_kwargs"]
    hint = (
        did_you_mean(name, names, before) or f"; there are {', '.join(sorted(names))}"
    )
    return f"unknown key {path}{hint}"


def parser_of(class_path: str) -> ArgumentParser:
    """A parser of the arguments of a class or function, with their defaults."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    made_by = pkgutil.resolve_name(class_path)
    is_class = inspect.isclass(made_by)
    add = parser.add_class_arguments if is_class else parser.add_function_arguments
    add(made_by, fail_untyped=False)
    return parser


LOOKS_ON = (
    *("num_workers", "pin_memory", "persistent_workers", "resident"),
    *("data_dir", "eval_batch_size"),
)
"""Arguments of data that change no batch of a training."""
NOT_KEPT = ("config", "trust_checkpoint")
"""Settings of one command: its config files, and its trust in a checkpoint."""
PLAIN = (bool, int, float, str, list, tuple, dict, Path, Namespace, type(None))


def facts_of(data: LightningDataModule) -> dict[str, Any]:
    """What the data knows, by the names of the arguments that take it."""
    facts: dict[str, Any] = {}
    if num_classes := getattr(data, "num_classes", None):
        facts["num_classes"] = int(num_classes)
    if isinstance(data, BaseDataModule) and data.image_shape:
        facts["image_shape"] = [int(size) for size in data.image_shape]
        facts["in_channels"] = facts["in_chans"] = facts["image_shape"][
            0
        ]  # as timm calls them
    return facts


def fill_in(config: Any, given: Any, facts: dict[str, Any]) -> None:
    """Give each class in `config`, {class_path: ..., init_args: {...}}, the facts that
    it takes and that `given`, the user's part of the config, does not set."""
    if isinstance(config, list):
        for inner, inner_given in zip_longest(
            config, given if isinstance(given, list) else []
        ):
            fill_in(inner, inner_given, facts)
    values, given_values = entries(config), entries(given)
    if "class_path" in values:
        path = values["class_path"]
        values, given_values = arguments(values), arguments(given_values)
        for name in facts.keys() & values.keys() - given_values.keys():
            values[name] = facts[name]
        is_function = inspect.isroutine(pkgutil.resolve_name(path))
        if is_function and path.startswith("timm."):
            # they take them in **kwargs
            taken = {
                name: facts[name]
                for name in ("num_classes", "in_chans")
                if name in facts
            }
            config["dict_kwargs"] = taken | entries(config.get("dict_kwargs"))
        elif (
            is_function
            and path.startswith("torchvision.models.")
            and "num_classes" in facts
        ):
            # mobilenet_v3_small and others take it in **kwargs, where jsonargparse sees
            # no default
            values.setdefault("num_classes", facts["num_classes"])
    for name, inner in values.items():
        fill_in(inner, given_values.get(name), facts)


def drop_objects(config: Any) -> None:
    """Leave out of {class_path: ..., init_args: {...}} the defaults that are objects,
    such as a functools.partial: YAML cannot hold them, and the class has them
    anyway."""
    for inner in config if isinstance(config, list) else entries(config).values():
        drop_objects(inner)
    if not isinstance(config, Namespace) or not isinstance(
        config.get("init_args"), Namespace
    ):
        return
    values = vars(config.init_args)
    objects = {
        k: v
        for k, v in values.items()
        if isinstance(v, Enum) or not isinstance(v, PLAIN)
    }
    if inspect.isroutine(pkgutil.resolve_name(config.class_path)):
        # a default that is a class, as of swin_t: jsonargparse would hand over a
        # partial of it
        objects |= {k: v for k, v in values.items() if "class_path" in entries(v)}
    defaults = parser_of(config.class_path).get_defaults() if objects else Namespace()
    for name, value in objects.items():
        if repr(defaults.get(name)) == repr(value):
            del values[name]


def configs_of_loggers(config: Any) -> list[Namespace]:
    """Of trainer.logger; none where it is a bool or null."""
    loggers = config if isinstance(config, list) else [config]
    return [logger for logger in loggers if isinstance(logger, Namespace)]


def make_plain(config: Any) -> None:
    """PositiveInt and similar types become plain numbers, which can be dumped. Raises
    UserError for the text None, for an infinite number where the type has a range, and
    for a whole number that no tensor or seed holds."""
    for key, value in list(config.items()):
        flag = key.replace(".init_args", "")
        if isinstance(value, float) and math.isinf(value) and type(value) is not float:
            raise UserError(
                f"{flag}: {value} is out of range; give a finite number", status=2
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(
                f"{flag}: {value} is out of range; whole numbers have 64 bits", status=2
            )
        if value == "None":  # jsonargparse makes it of a blank where only text fits
            raise UserError(f"{flag}: None is no value; null may be one", status=2)
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[key] = int(value) if isinstance(value, int) else float(value)


def write_config(
    parser: LightningArgumentParser, config: Namespace
) -> tuple[dict[str, Any], str]:
    """The config as plain values and as YAML. Raises UserError where reading would not
    give it back."""
    to_repeat = config.clone()
    to_repeat.ckpt_path = None
    for key in NOT_KEPT:
        to_repeat.pop(key, None)
    try:
        text = parser.dump(to_repeat, skip_unset=False, skip_validation=True)
        plain = yaml.safe_load(text)
        again = parser.parse_object(copy.deepcopy(plain))  # changes its argument
        drop_objects(again)
        text_again = parser.dump(
            again, format="json", skip_unset=False, skip_validation=True
        )
        values = flatten(json.loads(text_again))
        changed = [
            key for key, value in flatten(plain).items() if values.get(key) != value
        ]
        if changed:
            raise ValueError(f"{changed[0]} would get another value")
    except (UserError, ValueError, TypeError, yaml.YAMLError) as error:
        reason = (
            str(error) if isinstance(error, UserError) else explain(str(error), parser)
        )
        what = "this config could not be read again, for a resume or a test"
        raise UserError(f"{what}:", f"{reason.splitlines()[0]}", 2) from error
    return plain, text


def arguments(config: Any) -> dict[str, Any]:
    """The arguments in {class_path: ..., init_args: {...}}."""
    return entries(entries(config).get("init_args"))


def entries(config: Any) -> dict[str, Any]:
    """The entries of a dict or Namespace, in the same object; empty for a plain
    value."""
    if isinstance(config, Namespace):
        return vars(config)
    return config if isinstance(config, dict) else {}
