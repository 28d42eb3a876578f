"""The user's config files, and the names of the user's classes.

Read `read_config` first. The classes are found by searching the source code as text:
the messages of errors and --help list them, and need not import torch for that.
"""

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
"""Limits of a config, far above any config that a person writes."""
CLASS = re.compile(r"^class (\w+)(?:\((.*)\))?:", re.MULTILINE)
"""A class at the top level of a file: its name and its base classes."""
IMPORT_PATH_KEYS = ("class_path", "optimizer", "scheduler")
"""Keys of a config whose text may be an import path."""


class ConfigLoader(yaml.SafeLoader):
    """Loads YAML, and refuses a mapping that has a key twice. PyYAML would drop the
    first value without a message."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return a mapping as a node of YAML. Raises MarkedYAMLError for a key that
        stands in it twice."""
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
    """Return the content of a config file, with today's import paths.

    Types of values are not checked here, and keys need not exist: the parser does this.
    Raises UserError for a file that is missing, unreadable, empty or no mapping.
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
    """Return the config unchanged. Raise ValueError if it has more than `MAX_LEVELS`
    levels or more than `MAX_VALUES` values.

    YAML allows both in a few lines. An alias inside its anchor makes levels without
    end, and aliases of aliases make billions of values.
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
    """Return a copy of a saved config with today's import paths. They differ if the
    user has renamed the package since, or if a class has moved since version 0.3.

    package: The name of the user's package when the config was written.
    key: The key of `config`, which is one value of a larger config. Only the values of
        `IMPORT_PATH_KEYS` and the texts in lists can be import paths.
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
    """Return {name without .yaml: path} of the YAML files in configs/ and in `folder`.
    A file in `folder` counts before a file of the same name in configs/."""
    files = [*sorted(PROJECT.configs.glob("*.y*ml")), *sorted(folder.glob("*.y*ml"))]
    return {file.stem: relative_to_cwd(file) for file in files}


def users_classes() -> list[tuple[str, str]]:
    """Return (import path, base classes as text) for each class in the user's package.
    No file is imported. Classes inside other classes or functions are left out."""
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
    """Return the import path for the bare name of a class, such as "MLP".

    The class has to be in the user's package, and no other class there may have this
    name. Any other text is returned unchanged.
    """
    if not name.isidentifier() or not name[0].isupper():
        return name
    paths = [path for path, _ in users_classes() if path.endswith(f".{name}")]
    return paths[0] if len(paths) == 1 else name
