"""The command line of a script, read before the parser: which classes, files and run it
names."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightbase.core.errors import UserError, did_you_mean
from lightbase.core.folder import LARGEST_TEXT, PROJECT, check_readable, flatten, short

EXAMPLE = "configs/mnist_mlp.yaml is an example"
DEEPEST, LARGEST = 50, 100_000  # levels and values of a config
CLASS = re.compile(r"^class (\w+)(?:\((.*)\))?:", re.MULTILINE)
FLAG = re.compile(r"--|-[A-Za-z]")  # -1 is a value
ONE_VALUE = 'all options of a group go into one value: --model.parameter_groups.bias "{lr: 0.1}"'
PATHS = ("class_path", "optimizer", "scheduler")
"""Keys of a config whose text may be an import path."""


class CommandLine:
    """Arguments of a command and the contents of its --config files, read once.

    configs: {path: content} of the --config files, in their order.
    model: the class path that --model has, None without the flag.
    flags: all other arguments as (flag, value), such as ("--model.lr", "0.1"). The
    value is None where there is none.

    Raises UserError for a config file that is missing or not valid.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.configs: dict[str, dict[str, Any]] = {}
        self.model: str | None = None
        self.flags: list[tuple[str, str | None]] = []
        for flag, value in flags_with_values(args):
            if value and flag.removesuffix(".class_path") in ("--model", "--data"):
                value = path_of_class(value)
            if flag in ("-c", "--config"):
                if not value:
                    raise UserError(
                        "--config: expected one argument, a file", "see --help", 2
                    )
                self.configs[value] = read_config(Path(value))
            elif value == "" and flag.endswith(
                ("dir", "path")
            ):  # a variable of a shell, not set
                raise UserError(
                    f"{flag}= has no value: give one, or leave {flag} out", status=2
                )
            elif flag in ("--model", "--model.class_path") and value is not None:
                self.model = value
            else:
                # jsonargparse would drop the other options of a group
                if "parameter_groups." in flag and not str(value).lstrip().startswith(
                    "{"
                ):
                    raise UserError(f"{flag} {value}:", ONE_VALUE, 2)
                self.flags.append((flag, value))

    @property
    def names_experiment(self) -> bool:
        """Whether there is a config, or both a model and its data. Otherwise the
        default experiment is meant."""
        has_data = any(
            flag in ("--data", "--data.class_path") for flag, _ in self.flags
        )
        return bool(self.configs) or (self.model is not None and has_data)

    @property
    def flag_args(self) -> list[str]:
        """All arguments but the --config files, as the parser takes them."""
        model = [] if self.model is None else [f"--model={self.model}"]
        return model + [
            flag if value is None else f"{flag}={value}" for flag, value in self.flags
        ]

    @property
    def parser_args(self) -> list[str]:
        """All arguments in the order in which they count: class of the model, --config
        files, flags.

        The class stands first, or arguments would be taken for those of another class.
        It stands again after the files, which may name one.
        """
        is_help = any(flag.endswith(".help") for flag, _ in self.flags)
        configs = [*self.configs]
        if not self.names_experiment and not (
            is_help and PROJECT.default_config is None
        ):
            configs = [str(default_experiment())]
        first = f"--model={self.model or PROJECT.default_model}"
        return [first, *(f"--config={path}" for path in configs), *self.flag_args]

    def value(self, key: str) -> Any:
        """The value of a setting such as "trainer.max_epochs": the text of the last
        flag, or what the last config file with it has; None where there is none."""
        for flag, value in reversed(self.flags):
            if flag == f"--{key}":
                return "true" if value is None else value
        for content in reversed(self.configs.values()):
            settings = flatten(content)
            if key in settings:
                return settings[key]
        return None


def default_experiment() -> Path:
    """The YAML of a command that names no experiment. Raises UserError if there is
    none."""
    if PROJECT.default_config is None:
        what = (
            "there is no configs/default.yaml, so a command has to name its experiment"
        )
        raise UserError(
            what, "give --config FILE, or both --model CLASS and --data CLASS", 2
        )
    return PROJECT.default_config


def flags_with_values(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """Arguments in pairs, `--flag=value` and `--flag value`."""
    pairs: list[tuple[str, str | None]] = []
    for arg in args:
        if FLAG.match(arg):
            flag, has_value, value = arg.partition("=")
            pairs.append((flag, value if has_value else None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], arg)
        else:
            pairs.append((arg, None))  # the parser refuses it
    return pairs


class ConfigLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would drop the first."""

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
    """The content of a config file, with the key `trainer` at least.

    Raises UserError for a file that is missing, unreadable or no mapping.
    """
    try:
        check_readable(path, LARGEST_TEXT)
        content = checked(yaml.load(path.read_text(encoding="utf-8"), ConfigLoader))
    except OSError as error:
        near = did_you_mean(path.stem, config_files(path.parent))
        raise UserError(f"config {path}: {error.strerror}{near}", status=2) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"config {path}: not valid YAML: {reason}", EXAMPLE, 2
        ) from error
    if not isinstance(content, dict):
        what = f"holds a {type(content).__name__}, not keys with values"
        what = "is empty" if content is None else what
        raise UserError(f"config {path} {what}; {EXAMPLE}", status=2)
    trainer = content.setdefault("trainer", {})
    if not isinstance(trainer, dict):  # jsonargparse would take it
        what = f"trainer is {trainer!r}, where keys with values belong"
        raise UserError(f"config {path}: {what}", status=2)
    return {str(key): value for key, value in renamed(content, PROJECT.package).items()}


def config_files(folder: Path) -> dict[str, str]:
    """The paths of the YAML files in the folder and in configs/, by their names without
    ending."""
    folders = (PROJECT.configs, folder)
    return {
        file.stem: short(file)
        for path in folders
        for file in sorted(path.glob("*.y*ml"))
    }


def users_classes() -> list[tuple[str, str]]:
    """The import path of each class in the user's package, and what is in its
    brackets."""
    package = PROJECT.root / PROJECT.package
    classes = []
    for file in sorted(package.rglob("*.py")):
        module = ".".join(file.relative_to(PROJECT.root).with_suffix("").parts)
        for name, bases in CLASS.findall(
            file.read_text(encoding="utf-8", errors="replace")
        ):
            classes.append((f"{module.removesuffix('.__init__')}.{name}", bases))
    return classes


def path_of_class(name: str) -> str:
    """The import path of a class of the user's package; any other text unchanged."""
    is_name = name.isidentifier() and name[0].isupper()
    paths = (
        [path for path, _ in users_classes() if path.endswith(f".{name}")]
        if is_name
        else []
    )
    return paths[0] if len(paths) == 1 else name


def checked(config: Any) -> Any:
    """The config itself. Raises ValueError where it is nested too deep, as one that
    holds itself, or has too many values, as aliases of aliases have."""
    values, count = [(config, 0)], 0
    while values:
        value, depth = values.pop()
        count += 1
        if depth > DEEPEST or count > LARGEST:
            raise ValueError(
                f"more than {DEEPEST} levels, or more than {LARGEST:,} values"
            )
        if isinstance(value, dict | list | tuple):
            inner = value.values() if isinstance(value, dict) else value
            values += [(each, depth + 1) for each in inner]
    return config


def renamed(config: Any, package: str, key: str = "") -> Any:
    """A copy of a config, or of its value `key`, in which import paths of the user's
    package have its name of today. package: Its name when the config was written."""
    if isinstance(config, dict):
        return {
            name: renamed(value, package, str(name)) for name, value in config.items()
        }
    if isinstance(config, list):
        return [renamed(value, package, "class_path") for value in config]
    if (
        config == "lightbase.Features"
    ):  # in version 0.3, where it was part of the library
        return f"{PROJECT.package}.data.features.Features"
    is_path = (
        isinstance(config, str) and key in PATHS and config.startswith(f"{package}.")
    )
    if is_path and PROJECT.package:
        return PROJECT.package + config.removeprefix(package)
    return config
