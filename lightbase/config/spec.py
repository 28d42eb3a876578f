"""The record of a run: its settings, which of them the user named, and where it starts.
`read_spec` makes it of config files or of a checkpoint's settings.
"""

import argparse
import copy
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningModule
from torch import Tensor

from lightbase.compat import none_has_to_fit, parse_unvalidated
from lightbase.config.errors import SEE_HELP, UserError, imported
from lightbase.config.files import Values
from lightbase.config.parser import Parser, make_parser, parser_of
from lightbase.config.paths import PROJECT
from lightbase.config.yaml_files import (
    RUN_LOCATION_KEYS,
    flatten,
    path_of_class,
    plain_yaml,
    read_config,
)

SWITCHES = ("print_config", "trust_checkpoint")
"""Settings of one command, which the run does not keep. Without a value they are
true."""

YAML_TYPES = (bool, int, float, str, list, tuple, dict, Namespace, Path, type(None))
"""Types of values that config.yaml can hold."""


def first_parser() -> argparse.ArgumentParser:
    """Return a parser of the flags that decide how the other arguments are read."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("--config", "-c", action="append", default=[])
    parser.add_argument("--model", "--model.class_path")
    parser.add_argument("--data", "--data.class_path")
    for name in RUN_LOCATION_KEYS:
        parser.add_argument(f"--{name}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", nargs="?", const="true")
    return parser


class CommandLine:
    """The arguments of a command, without the name of the script.

    configs: {path: content} of the --config files, in their order.
    first: {flag: text} for the given flags of `first_parser`, without --config.
    flags: All arguments but the --config files. Those of `first` come first, because
        the classes decide which further flags there are.
    file_settings: The settings of all config files by the names of flags. A later file
        counts before an earlier one.
    """

    def __init__(self, args: Sequence[str]) -> None:
        try:
            options, others = first_parser().parse_known_args(args)
        except argparse.ArgumentError as error:
            problem = str(error).removeprefix("argument ")
            raise UserError(problem, SEE_HELP, 2) from error
        files = vars(options).pop("config")
        self.configs = {path: read_config(PROJECT.found(path)) for path in files}
        self.file_settings: Values = {}
        for content in self.configs.values():
            self.file_settings |= flatten(content)
        self.first: dict[str, str] = {}
        for name, value in vars(options).items():
            if value == "":  # a variable of a shell that is not set
                problem = f"--{name}= has no value"
                raise UserError(problem, f"give one, or leave --{name} out", 2)
            if value is not None:
                self.first[name] = value
        self.flags = [f"--{name}={value}" for name, value in self.first.items()]
        self.flags += others

    @property
    def names_experiment(self) -> bool:
        """Whether the command names what to train: by a config file, or by --model and
        --data together. Otherwise it trains the default experiment."""
        return bool(self.configs) or {"model", "data"} <= self.first.keys()

    @property
    def model(self) -> str | None:
        """The import path of --model, or None."""
        return path_of_class(self.first.get("model", "")) or None

    def place(self, key: str) -> str | None:
        """Return the text of a flag of `first_parser`, or else of the config files, or
        None if it is null or not given."""
        value = self.first.get(key, self.file_settings.get(key))
        if value in (None, "null", ""):
            return None
        return str(value)


def default_experiment() -> Path:
    """Return the path of configs/default.yaml, which has to exist."""
    if not PROJECT.default_config.is_file():
        raise UserError(
            "configs/default.yaml does not exist: a command has to name its experiment",
            "give --config FILE, or both --model CLASS and --data CLASS",
            2,
        )
    return PROJECT.default_config


@dataclass
class RunSpec:
    """The record of one run.

    config: All settings of the run, with defaults.
    given: The names of the settings that the user has chosen, such as
        "model.net.sizes", for a saved run by the flags.
    parser: It reads the settings, writes them as YAML, and builds their objects.
    is_complete: Whether all settings are given, as by a saved run.
    folder: The folder of a resumed run, otherwise None.
    checkpoint: The file from which the training starts, otherwise None.
    trainer: The Trainer's arguments, with callbacks and similar ones as objects, once
        `build` has filled them in.
    """

    config: Namespace
    given: frozenset[str]
    parser: Parser
    is_complete: bool = False
    folder: Path | None = None
    checkpoint: Path | None = None
    trainer: Values = field(default_factory=dict)


def new_spec(line: CommandLine) -> RunSpec:
    """Return the record of a new run, from the config files and the flags of a command.
    Types are checked later, by `validate`: the data may still fill in values."""
    contents = list(line.configs.values())
    if not line.names_experiment:
        contents = [read_config(default_experiment())]
    return read_spec(contents, line, line.model or PROJECT.default_model)


def read_spec(
    contents: list[Values],
    line: CommandLine,
    model: str | None,
    is_complete: bool = False,
) -> RunSpec:
    """Return the record of a run. A later value replaces an earlier one, and flags
    count last. With --print_config, print the settings and raise SystemExit.

    contents: The settings of config files, or of a saved run, in their order.
    line: Its flags count. Its config files are not read here.
    model: The class of the model, see `make_parser`.
    is_complete: See `RunSpec`.
    """
    # imports find the user's modules there, as with `python -m`
    for folder in (str(PROJECT.root), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if model:
        imported("model", model, LightningModule)
    # the config of a Python object has its class only
    builds_data = model is not None or "init_args" in entries(contents[0]["data"])
    parser = make_parser(model, builds_data)
    from_files = Namespace()
    for content in contents:
        # parsing changes its argument
        content = copy.deepcopy(content)
        from_files = parse_unvalidated(
            parser.parse_object, content, namespace=from_files, defaults=False
        )
    parser.parsed = from_files
    repeated = {}
    if is_complete:  # a flag that repeats the saved value is not a change
        repeated = flatten(from_files.as_dict())
    settings = parse_unvalidated(
        parser.parse_args, line.flags, namespace=from_files, defaults=False
    )
    values = flatten(settings.as_dict()).items()
    given = frozenset(item[0] for item in values if item not in repeated.items())
    spec = RunSpec(with_defaults(parser, settings), given, parser, is_complete)
    config = spec.config
    if config.pop("print_config"):
        print(as_yaml(spec), end="")
        raise SystemExit(0)
    if config.get("data") is None:
        for key in vars(config).keys() - vars(parser.get_defaults()).keys():
            parser.error(f"Option {key!r} is not accepted")  # such as Hydra's defaults
        raise UserError("the following arguments are required: data", SEE_HELP, 2)
    if not config.name:
        config.name = config.model["class_path"].rpartition(".")[2]
    return spec


def with_defaults(parser: Parser, settings: Any) -> Namespace:
    """Return settings with the defaults of all others, in a form that YAML and
    checkpoints can hold: plain numbers, for example. Parsing changes `settings`."""
    config = parse_unvalidated(parser.parse_object, settings)
    for key, value in list(config.items()):
        if isinstance(value, int | float):
            config[key] = as_plain(value)
    drop_objects(config)
    return config


def validate(spec: RunSpec, config: Namespace) -> None:
    """Raise UserError if a value does not fit the type of its argument. None has to
    fit, too: by default jsonargparse would accept `model.lr: null`."""
    try:
        with none_has_to_fit():
            spec.parser.validate(config, skip_required=True)
    except (TypeError, ValueError, KeyError) as error:
        spec.parser.error(str(error), error)


def drop_objects(config: Any) -> None:
    """Remove defaults that are objects, such as a functools.partial, in place: YAML
    cannot hold them, and the class has them anyway."""
    if isinstance(config, list):
        for item in config:
            drop_objects(item)
    for inner in entries(config).values():
        drop_objects(inner)
    values = arguments(config)
    for name, value in [*values.items()]:
        is_object = not isinstance(value, YAML_TYPES) or isinstance(value, Enum)
        # The default of a function's argument may be a class, as in torchvision's
        # swin_t. jsonargparse would give the function a partial of this class.
        if "class_path" in entries(value):
            is_object = inspect.isroutine(pkgutil.resolve_name(config["class_path"]))
        if is_object:
            default = parser_of(config["class_path"]).get_defaults().get(name)
            if repr(default) == repr(value):
                del values[name]


def as_yaml(spec: RunSpec) -> str:
    """Return the settings as config.yaml and checkpoints have them. They describe the
    run, not the command: `SWITCHES` are left out, and ckpt_path is null."""
    to_repeat = spec.config.clone()
    to_repeat.ckpt_path = None
    for key in SWITCHES:
        to_repeat.pop(key, None)
    return spec.parser.dump(to_repeat, skip_unset=False, skip_validation=True)


def as_values(spec: RunSpec) -> Values:
    return plain_yaml(as_yaml(spec))  # type: ignore[no-any-return]


def check_round_trip(spec: RunSpec, text: str) -> Values:
    """Return the settings of `as_yaml` as plain values. Raise UserError if a setting
    changes when it is read again: neither a resume nor a test could repeat such a run.
    """
    plain: Values = plain_yaml(text)
    config = with_defaults(spec.parser, copy.deepcopy(plain))
    values = flatten(as_values(replace(spec, config=config)))
    for key, value in flatten(plain).items():
        if values.get(key) != value:
            raise UserError(
                "this config could not be read again, for a resume or a test:",
                f"{key} would get another value",
                2,
            )
    return plain


def arguments(config: Any) -> Values:
    """Return the init_args of {class_path: ..., init_args: {...}}, or an empty dict."""
    return entries(entries(config).get("init_args"))


def entries(config: Any) -> Values:
    """Return a dict or Namespace as a dict that shares its entries, and an empty dict
    for any other value."""
    if isinstance(config, Namespace):
        return vars(config)
    if isinstance(config, dict):
        return config
    return {}


def as_plain(value: Any) -> Any:
    """Return a copy of `value` that safe loading accepts. Other objects, such as paths,
    become text."""
    if isinstance(value, dict):
        return {str(key): as_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    if value is None or type(value) is Tensor:
        return value
    for kind in (bool, int, float):  # which jsonargparse's PositiveInt, too, is
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, None as an empty list, and any other value as a list of
    one."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]
