"""The record of a run: its settings, which of them the user named, and where it starts.

Read `CommandLine` and `RunSpec` first. `CommandLine` reads the arguments of a command
and its config files. Three functions make a `RunSpec`: `new_spec` for a new run,
`saved_spec` for the settings in a checkpoint, and `spec_without_classes` for a model
and data that are Python objects. The rest checks settings and turns them into YAML.
"""

import argparse
import copy
import functools
import inspect
import json
import math
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from jsonargparse import Namespace

from lightbase.core.compat import none_has_to_fit, parse_unvalidated
from lightbase.core.config_files import path_of_class, read_config
from lightbase.core.errors import UserError
from lightbase.core.mistakes import explain, parser_of
from lightbase.core.names import flatten
from lightbase.core.parser import SEE_HELP, Parser, make_parser
from lightbase.core.project import PROJECT

LOCATION = ("ckpt_path", "name", "trainer.default_root_dir", "trust_checkpoint")
"""Flags that say where a run is and whether its file is trusted."""
NOT_KEPT = ("print_config", "trust_checkpoint")
"""Settings of one command, which the run does not keep."""
YAML_TYPES = (bool, int, float, str, list, tuple, dict, Namespace, Path, type(None))
"""Types of values that config.yaml can hold."""


class FirstParser(argparse.ArgumentParser):
    """Reads the flags that decide how the other arguments are read.

    These are --config, --model, --data, and the flags in `LOCATION`. `RunSpec.parser`
    reads the other arguments: it can be made only after the model's class is known.
    """

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--config", "-c", action="append", default=[])
        self.add_argument("--model", "--model.class_path")
        self.add_argument("--data", "--data.class_path")
        for name in LOCATION[:-1]:
            self.add_argument(f"--{name}")
        self.add_argument("--trust_checkpoint", nargs="?", const="true")

    def error(self, message: str) -> NoReturn:
        """Raise UserError with argparse's message, instead of the usage and an exit."""
        raise UserError(message.removeprefix("argument "), SEE_HELP, 2)


class CommandLine:
    """The arguments of a command.

    args: The arguments as the shell splits them, without the name of the script.
    configs: {path: content} of the --config files, in their order. They are read once.
    model, data: The import paths of --model and --data, or None.
    location: {flag: text} for each flag in `LOCATION` that is given.
    others: All other arguments, as they were typed.

    Raises UserError for a config file that is missing or not valid, and for a flag in
    `LOCATION` without a value.
    """

    def __init__(self, args: Sequence[str]) -> None:
        options, self.others = FirstParser().parse_known_args(args)
        values = vars(options)
        self.configs = {path: read_config(Path(path)) for path in values["config"]}
        self.model: str | None = values["model"] and path_of_class(values["model"])
        self.data: str | None = values["data"] and path_of_class(values["data"])
        self.location: dict[str, str] = {}
        for name in LOCATION:
            if values[name] == "":  # a variable of a shell that is not set
                problem = f"--{name}= has no value"
                raise UserError(problem, f"give one, or leave --{name} out", 2)
            if values[name] is not None:
                self.location[name] = values[name]

    @property
    def names_experiment(self) -> bool:
        """Whether the command names what to train: by a config file, or by --model and
        --data together. Otherwise it trains the default experiment."""
        return bool(self.configs) or bool(self.model and self.data)

    @property
    def flags(self) -> list[str]:
        """All arguments but the --config files, as a list for the parser. The classes
        come first, because they decide which further flags there are."""
        first = {"model": self.model, "data": self.data, **self.location}
        given = [
            f"--{key}={value}" for key, value in first.items() if value is not None
        ]
        return [*given, *self.others]

    @functools.cached_property
    def file_settings(self) -> dict[str, Any]:
        """The settings of all config files by the names of flags, such as "model.lr".
        If two files have the same setting, the later file counts."""
        settings: dict[str, Any] = {}
        for content in self.configs.values():
            settings |= flatten(content)
        return settings

    def place(self, key: str) -> Any:
        """Return a setting that says where the run is, or None if it is not given. A
        flag counts before the config files.

        key: One of `LOCATION`.
        """
        return self.location.get(key, self.file_settings.get(key))

    def names(self, key: str) -> bool:
        """Return whether a flag sets this setting or a part of its value.

        --model CLASS counts for every setting of the model, too. Config files do not
        count.

        key: The setting, such as "model.lr".
        """
        for word in self.flags:
            if word.startswith("--"):
                name = word.partition("=")[0].removeprefix("--").rstrip("+")
                name = name.replace(".init_args", "")
                if f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}."):
                    return True
        return False


def default_experiment() -> Path:
    """Return the path of configs/default.yaml, which a command without an experiment
    trains. Raises UserError if the file does not exist."""
    if PROJECT.default_config is None:
        raise UserError(
            "there is no configs/default.yaml, so a command has to name its experiment",
            "give --config FILE, or both --model CLASS and --data CLASS",
            2,
        )
    return PROJECT.default_config


@dataclass
class RunSpec:
    """The record of one run.

    config: All settings of the run, with defaults.
    given: The names of the settings that the user has chosen, such as
        "model.net.sizes". For a new run the flags and the YAML count, for a saved run
        the flags only.
    parser: The parser that has read the settings. It also writes them as YAML, and
        builds the objects that they describe.
    origin: "new"; "resume": a saved run continues in its folder; "checkpoint": the
        settings of a saved run are used for a new run, or to test, predict or export.
    folder: The folder of a resumed run, otherwise None.
    checkpoint: The file from which the training starts, otherwise None.
    trainer: The Trainer's arguments, with callbacks and similar ones as objects. It is
        empty until `build` fills it.
    """

    config: Namespace
    given: frozenset[str]
    parser: Parser = field(repr=False)
    origin: Literal["new", "resume", "checkpoint"] = "new"
    folder: Path | None = None
    checkpoint: Path | None = None
    trainer: dict[str, Any] = field(default_factory=dict, repr=False)


def new_spec(line: CommandLine) -> RunSpec:
    """Return the record of a new run.

    The config files are read first, then the flags. The later value counts. Defaults
    are added last, so that `given` has only what the user has chosen.

    With --print_config, print the settings as YAML and raise SystemExit with status 0.
    Raises UserError for an unknown setting, or if data or an experiment is missing.
    Types are checked later, by `validate`: the data may still fill in values.
    """
    find_users_modules()
    parser = make_parser(line.model or PROJECT.default_model)
    configs = list(line.configs.values())
    is_help = any(
        word.startswith(("--model.help", "--data.help")) for word in line.others
    )
    if not line.names_experiment and not (is_help and PROJECT.default_config is None):
        configs = [read_config(default_experiment())]
    given = Namespace()
    for content in configs:
        given = parse_unvalidated(
            parser.parse_object, content, namespace=given, defaults=False
        )
    parser.parsed = given
    flags = with_class_to_explain(line.flags, given)
    given = parse_unvalidated(parser.parse_args, flags, namespace=given, defaults=False)
    names = frozenset(flatten(given.as_dict()))
    # this adds the defaults, and reads nothing
    config = parse_unvalidated(parser.parse_object, given)
    spec = RunSpec(config, names, parser)
    if config.print_config:
        print(as_yaml(spec), end="")
        raise SystemExit(0)
    settle(spec)
    return spec


def with_class_to_explain(flags: list[str], given: Namespace) -> list[str]:
    """Return the flags. If the last one is a bare --model.help or --data.help, it gets
    the class that the config names.

    given: The settings of the config files.
    """
    for name in ("model", "data"):
        flag = f"--{name}.help"
        class_path = given.get(f"{name}.class_path")
        if flags[-1:] == [flag] and class_path:
            return [*flags[:-1], f"{flag}={class_path}"]
    return flags


def saved_spec(saved: dict[str, Any], line: CommandLine, origin: Any) -> RunSpec:
    """Return the record of a saved run, with the changes that the flags make.

    saved: The config in the checkpoint of the run.
    line: Its config files are not used here.
    origin: "resume" or "checkpoint", see `RunSpec`.
    """
    find_users_modules()
    parser = make_parser(PROJECT.default_model)
    # parsing changes its argument
    start = parse_unvalidated(parser.parse_object, copy.deepcopy(saved))
    parser.parsed = start
    config = parse_unvalidated(
        parser.parse_args, line.flags, namespace=start, defaults=False
    )
    names = frozenset(key for key in flatten(config.as_dict()) if line.names(key))
    spec = RunSpec(config, names, parser, origin)
    settle(spec)
    return spec


def spec_without_classes(saved: dict[str, Any], line: CommandLine) -> RunSpec:
    """Return the record of a training whose model and data are Python objects. The
    caller adds descriptions of both to `config`.

    saved: The config of the run that continues, or an empty dict for a new run.
    """
    parser = make_parser(None)
    start = parse_unvalidated(parser.parse_object, copy.deepcopy(saved))
    config = parse_unvalidated(
        parser.parse_args, line.flags, namespace=start, defaults=False
    )
    config.pop("print_config", None)
    make_plain(config)
    names = frozenset(key for key in flatten(config.as_dict()) if line.names(key))
    return RunSpec(config, names, parser)


def find_users_modules() -> None:
    """Let imports find modules in the user's repository and in the working folder, as
    `python -m` does. Python itself adds only scripts/, the folder of the script."""
    for folder in (str(PROJECT.root), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def settle(spec: RunSpec) -> None:
    """Bring the settings into the form in which they are used and saved. A run without
    a name gets the name of the model's class.

    Raises UserError if the settings name no data.
    """
    config = spec.config
    config.pop("print_config", None)
    if config.get("data") is None:
        raise UserError("the following arguments are required: data", SEE_HELP, 2)
    make_plain(config)
    drop_objects(config)
    if not config.name:
        config.name = config.model.class_path.rpartition(".")[2]


def make_plain(config: Namespace) -> None:
    """Turn PositiveInt and similar types into plain numbers, in place. YAML can hold
    plain numbers only.

    Raises UserError for values that no argument takes: the text None, a whole number of
    more than 64 bits, and an infinite value of an argument that has a range.
    """
    for key, value in list(config.items()):
        flag = key.replace(".init_args", "")
        if value == "None":  # jsonargparse makes it of a blank where only text fits
            raise UserError(f"{flag}: None is no value; null may be one", status=2)
        if isinstance(value, bool):
            continue
        if isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise out_of_range(flag, value, "whole numbers have 64 bits")
            config[key] = int(value)
        elif isinstance(value, float):
            if math.isinf(value) and type(value) is not float:  # its type has a range
                raise out_of_range(flag, value, "give a finite number")
            config[key] = float(value)


def out_of_range(flag: str, value: float, way_out: str) -> UserError:
    """Return the error for a number that is too large.

    flag: The name of the setting, such as "model.lr".
    """
    return UserError(f"{flag}: {value} is out of range; {way_out}", status=2)


def validate(spec: RunSpec, config: Namespace) -> None:
    """Raise UserError if a value does not fit the type of its argument.

    None has to fit, too. By default jsonargparse takes None for "not given", and would
    accept `model.lr: null`.

    config: All settings of the run, or a part of them.
    """
    try:
        with none_has_to_fit():
            spec.parser.validate(config, skip_required=True)
        return
    except (TypeError, ValueError, KeyError) as error:
        strict_error = error
    try:
        # this error names arguments that are missing; the one above says they are None
        spec.parser.validate(config, skip_required=True)
    except (TypeError, ValueError, KeyError) as error:
        spec.parser.error(str(error), error)
    spec.parser.error(str(strict_error), strict_error)


def drop_objects(config: Any) -> None:
    """Remove defaults that are objects, such as a functools.partial, in place.

    YAML cannot hold such an object. The class has it as its default, so the saved
    config does not need it. An object that differs from the default stays.

    config: All settings or a part of them. Each {class_path: ..., init_args: {...}} in
        it is searched, at any depth.
    """
    inner_configs = config if isinstance(config, list) else entries(config).values()
    for inner in inner_configs:
        drop_objects(inner)
    if not isinstance(config, Namespace):
        return
    if not isinstance(config.get("init_args"), Namespace):
        return
    values = vars(config.init_args)
    is_function = inspect.isroutine(pkgutil.resolve_name(config.class_path))
    objects = {}
    for name, value in values.items():
        # a default that is a class, as of swin_t, would become a partial of the class
        is_class = is_function and "class_path" in entries(value)
        if is_class or isinstance(value, Enum) or not isinstance(value, YAML_TYPES):
            objects[name] = value
    if not objects:
        return
    defaults = parser_of(config.class_path).get_defaults()
    for name, value in objects.items():
        if repr(defaults.get(name)) == repr(value):
            del values[name]


def as_yaml(spec: RunSpec) -> str:
    """Return the settings as YAML text, as config.yaml and checkpoints have them. The
    settings in `NOT_KEPT` are left out, and ckpt_path is null: the text describes the
    run, not the command that started it."""
    to_repeat = spec.config.clone()
    to_repeat.ckpt_path = None
    for key in NOT_KEPT:
        to_repeat.pop(key, None)
    return spec.parser.dump(to_repeat, skip_unset=False, skip_validation=True)


def as_values(spec: RunSpec) -> dict[str, Any]:
    """Return the settings of `as_yaml` as dicts, lists, texts and numbers."""
    return yaml.safe_load(as_yaml(spec))  # type: ignore[no-any-return]


def check_round_trip(spec: RunSpec, text: str) -> dict[str, Any]:
    """Return the saved settings as plain values. Raise UserError if a setting changes
    when they are read again: neither a resume nor a test could repeat such a run.

    text: The settings as `as_yaml` returns them.
    """
    parser = spec.parser
    plain: dict[str, Any] = yaml.safe_load(text)
    try:
        # parsing changes its argument
        parsed_again = parse_unvalidated(parser.parse_object, copy.deepcopy(plain))
        drop_objects(parsed_again)
        dumped = parser.dump(
            parsed_again, format="json", skip_unset=False, skip_validation=True
        )
        values = flatten(json.loads(dumped))
        for key, value in flatten(plain).items():
            if values.get(key) != value:
                raise ValueError(f"{key} would get another value")
    except (UserError, ValueError, TypeError, yaml.YAMLError) as error:
        reason = str(error)
        if not isinstance(error, UserError):
            reason = explain(reason, parser, spec.config)
        raise UserError(
            "this config could not be read again, for a resume or a test:",
            reason.splitlines()[0],
            2,
        ) from error
    return plain


def arguments(config: Any) -> dict[str, Any]:
    """Return the init_args of {class_path: ..., init_args: {...}}, or an empty dict. A
    change of the returned dict changes the config."""
    return entries(entries(config).get("init_args"))


def entries(config: Any) -> dict[str, Any]:
    """Return a dict or Namespace as a dict, and an empty dict for any other value. A
    change of the returned dict changes the config."""
    if isinstance(config, Namespace):
        return vars(config)
    if isinstance(config, dict):
        return config
    return {}
