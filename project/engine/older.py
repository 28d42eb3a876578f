"""The name of the package, which scripts/rename.py changes, and the names that checkpoints from
before have for it."""

from typing import Any

PACKAGE = __name__.partition(".")[0]
PATHS = ("class_path", "optimizer", "scheduler", "initializer", "test_views")


def rename_classes(config: Any, package: str) -> None:
    """Change the import paths in a config that was written when the package was called
    `package`."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if key in PATHS and str(value).startswith(f"{package}."):
            config[key] = PACKAGE + value.removeprefix(package)
        elif isinstance(value, dict | list):
            rename_classes(value, package)
