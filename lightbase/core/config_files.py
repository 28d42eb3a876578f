"""What the user's repository holds, read as text: config files and names of classes."""

import re
from pathlib import Path
from typing import Any

import yaml

from lightbase.core.errors import UserError, did_you_mean
from lightbase.core.files import read_text, relative_to_cwd
from lightbase.core.project import PROJECT

EXAMPLE = "configs/mnist_mlp.yaml is an example"
MAX_LEVELS = 50
MAX_VALUES = 100_000
CLASS = re.compile(r"^class (\w+)(?:\((.*)\))?:", re.MULTILINE)
IMPORT_PATH_KEYS = ("class_path", "optimizer", "scheduler")
"""Keys of a config whose text may be an import path."""


class ConfigLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice. YAML would drop the first value."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} stands twice", problem_mark=key.start_mark
                )
            keys.add(str(key.value))
        return node


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config file.

    Raises UserError for a file that is missing, unreadable or no mapping.
    """
    try:
        content = checked(yaml.load(read_text(path), ConfigLoader))
    except OSError as error:
        near = did_you_mean(path.stem, config_files(path.parent))
        raise UserError(f"config {path}: {error.strerror}{near}", status=2) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"config {path}: not valid YAML: {reason}", EXAMPLE, 2
        ) from error
    if content is None:
        raise UserError(f"config {path} is empty; {EXAMPLE}", status=2)
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise UserError(
            f"config {path} holds a {kind}, not keys with values; {EXAMPLE}", status=2
        )
    trainer = content.get("trainer", {})
    if not isinstance(trainer, dict):  # jsonargparse would take it
        raise UserError(
            f"config {path}: trainer is {trainer!r}, where keys with values belong",
            status=2,
        )
    config = {str(key): value for key, value in content.items()}
    return renamed(config, PROJECT.package)  # type: ignore[no-any-return]


def checked(config: Any) -> Any:
    """Return the config. Raise ValueError if it is nested too deep or has too many
    values.

    A config that holds itself is nested without end. Aliases of aliases have too many
    values.
    """
    waiting = [(config, 0)]
    num_values = 0
    while waiting:
        value, level = waiting.pop()
        num_values += 1
        if level > MAX_LEVELS or num_values > MAX_VALUES:
            raise ValueError(
                f"more than {MAX_LEVELS} levels, or more than {MAX_VALUES:,} values"
            )
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            waiting += [(inner, level + 1) for inner in value]
    return config


def renamed(config: Any, package: str, key: str = "") -> Any:
    """Return a copy of a saved config with the import paths of today.

    package: The name that the user's package had when the config was written.
    key: The key of `config`, which is one value of a larger config.
    """
    if isinstance(config, dict):
        return {
            name: renamed(value, package, str(name)) for name, value in config.items()
        }
    if isinstance(config, list):
        return [renamed(value, package, "class_path") for value in config]
    if config == "lightbase.Features":  # in version 0.3 it was part of the library
        return f"{PROJECT.package}.data.features.Features"
    is_path = isinstance(config, str) and key in IMPORT_PATH_KEYS
    if is_path and PROJECT.package and config.startswith(f"{package}."):
        return PROJECT.package + config.removeprefix(package)
    return config


def config_files(folder: Path) -> dict[str, str]:
    """Return the paths of the YAML files in configs/ and in `folder`, by their names
    without ending."""
    files = [*sorted(PROJECT.configs.glob("*.y*ml")), *sorted(folder.glob("*.y*ml"))]
    return {file.stem: relative_to_cwd(file) for file in files}


def users_classes() -> list[tuple[str, str]]:
    """Return the import path and the base classes, as text, of each class in the user's
    package."""
    package = PROJECT.root / PROJECT.package
    classes = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(PROJECT.root).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        source = file.read_text(encoding="utf-8", errors="replace")
        for name, bases in CLASS.findall(source):
            classes.append((f"{module}.{name}", bases))
    return classes


def path_of_class(name: str) -> str:
    """Return the import path of a class of the user's package; any other text
    unchanged."""
    if not name.isidentifier() or not name[0].isupper():
        return name
    paths = [path for path, _ in users_classes() if path.endswith(f".{name}")]
    return paths[0] if len(paths) == 1 else name
