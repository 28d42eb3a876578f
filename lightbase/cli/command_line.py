"""The command line of a script, read before the parser: which classes, files and run it names."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightbase.cli.old_names import current_path, renamed
from lightbase.errors import UserError, did_you_mean
from lightbase.folder import PROJECT, flatten
from lightbase.ranks import say

EXAMPLE = "configs/mnist_mlp.yaml is an example"
FLAG = re.compile(r"--|-[A-Za-z]")  # -1 is a value
NAMES_CLASSES = ("--model", "--data", "--trainer")  # flags whose values may name classes
NAMES_PLACE = ("dir", "path")  # the last letters of flags among them whose values do not


class CommandLine:
    """Arguments of a command and the contents of its --config files, read once.

    configs: {path: content} of the --config files, in their order.
    model: the class path that --model has, None without the flag.
    flags: all other arguments as (flag, value), such as ("--model.lr", "0.1"). The value is None
    where there is none.

    Raises UserError for a config file that is missing or not valid.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.configs: dict[str, dict[str, Any]] = {}
        self.model: str | None = None
        self.flags: list[tuple[str, str | None]] = []
        for flag, value in flags_with_values(args):
            if flag in ("-c", "--config"):
                if not value:
                    raise UserError("--config: expected one argument, a file\nsee --help", 2)
                self.configs[value] = read_config(Path(value))
            elif value == "" and flag.endswith(NAMES_PLACE):  # a shell's variable that is not set
                raise UserError(f"{flag}= has no value: give one, or leave {flag} out", 2)
            elif flag in ("--model", "--model.class_path") and value is not None:
                self.model = value
            else:
                self.flags.append((flag, value))
        check_group_flags(self.flags)

    @property
    def names_experiment(self) -> bool:
        """Whether there is a config, or both a model and its data. Otherwise the default experiment
        is meant."""
        has_data = any(flag in ("--data", "--data.class_path") for flag, _ in self.flags)
        return bool(self.configs) or (self.model is not None and has_data)

    @property
    def flag_args(self) -> list[str]:
        """All arguments but the --config files, as the parser takes them."""
        model = [] if self.model is None else [f"--model={self.model}"]
        return model + [flag if value is None else f"{flag}={value}" for flag, value in self.flags]

    @property
    def parser_args(self) -> list[str]:
        """All arguments in the order in which they count: class of the model, --config files,
        flags.

        The class stands first, or arguments would be taken for those of another class. It stands
        again after the files, which may name one.
        """
        configs = [*self.configs] if self.names_experiment else [str(PROJECT.default_config)]
        first = f"--model={self.model or PROJECT.default_model}"
        return [first, *(f"--config={path}" for path in configs), *self.flag_args]

    def has(self, *flags: str) -> bool:
        return any(flag in flags for flag, _ in self.flags)

    def value(self, key: str) -> Any:
        """The value of a setting such as "trainer.max_epochs": the text of the last flag, or what
        the last config file with it has; None where there is none."""
        for flag, value in reversed(self.flags):
            if flag == f"--{key}":
                return "true" if value is None else value
        for content in reversed(self.configs.values()):
            settings = flatten(content)
            if key in settings:
                return settings[key]
        return None

    def values_that_name_classes(self) -> list[Any]:
        """Values of flags, read as YAML, and whole config files."""
        texts = [self.model or ""]
        for flag, value in self.flags:
            if value and flag.startswith(NAMES_CLASSES) and not flag.endswith(NAMES_PLACE):
                texts.append(value)
        return [*map(from_yaml, texts), *self.configs.values()]

    def say_replaced_callbacks(self) -> None:
        """Print a line where a later config or flag replaces callbacks of an earlier one."""
        places = [
            f"--config {path}"
            for path, content in self.configs.items()
            if "callbacks" in content["trainer"]
        ]
        places += ["--trainer.callbacks"] * self.has("--trainer.callbacks")
        if len(places) > 1:
            way_out = "the key callbacks+ would add to them"
            say(f"Callbacks: {places[-1]} replaces those before it; {way_out}")


def flags_with_values(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """Arguments in pairs, `--flag=value` and `--flag value`, with today's names of classes."""
    pairs: list[tuple[str, str | None]] = []
    for arg in args:
        if FLAG.match(arg):
            flag, has_value, value = arg.partition("=")
            pairs.append((flag, current_path(value) if has_value else None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], current_path(arg))
        else:
            pairs.append((arg, None))  # the parser refuses it
    return pairs


def check_group_flags(flags: Sequence[tuple[str, str | None]]) -> None:
    """Raise UserError for a flag that sets one option of a parameter group: jsonargparse would drop
    the group's other options."""
    for flag, value in flags:
        match = re.fullmatch(r"--model\.(?:init_args\.)?parameter_groups\.(.+)\.(\w+)", flag)
        if match and not str(value).lstrip().startswith("{"):
            pattern, option = match.groups()
            way_out = f'--model.parameter_groups.{pattern} "{{{option}: {value}}}"'
            what = f"{flag} {value}: all options of a group go into one value"
            raise UserError(f"{what}\n{way_out}", 2)


class UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping: YAML would drop the first one silently."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                problem = f"{key.value!r} stands twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add(str(key.value))
        return node


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config file, with the key `trainer` at least and today's names of classes.

    Raises UserError for a file that is missing, unreadable or no mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
        json.dumps(content, default=str, skipkeys=True)  # refuses a part that refers to itself
    except OSError as error:
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.y*ml")])
        raise UserError(f"--config {path}: {error.strerror}{near}", 2) from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--config {path}: not valid YAML: {reason}\n{EXAMPLE}", 2) from error
    if content is None:
        raise UserError(f"--config {path} is empty; {EXAMPLE}", 2)
    if not isinstance(content, dict):
        what = f"holds a {type(content).__name__}, not keys with values"
        raise UserError(f"--config {path} {what}; {EXAMPLE}", 2)
    trainer = content.setdefault("trainer", {})
    if not isinstance(trainer, dict):  # jsonargparse would take it
        what = f"trainer is {trainer!r}, where keys with values belong"
        raise UserError(f"--config {path}: {what}", 2)
    return {str(key): value for key, value in renamed(content).items()}


def from_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
