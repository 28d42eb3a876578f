"""Import paths of earlier versions. Checkpoints, config files and flags that have them load."""

from typing import Any

from lightbase.folder import PROJECT

MOVED = {
    "base.callback": "lightbase.curves",
    "base.datamodule": "lightbase.data.module",
    "base.means": "lightbase.metrics",
    "base.optim": "lightbase.optim",
    "base.system": "lightbase.module",
    "callbacks.device_monitor": "lightbase.watch.device_monitor",
    "callbacks.phase_clock": "lightbase.watch.step_timer",
    "callbacks.prediction_figures": "lightbase.watch.figures",
    "callbacks.progress": "lightbase.watch.progress",
    "callbacks.step_timer": "lightbase.watch.step_timer",
    "data.features": "lightbase.data.tables",
    "data.image_folder": "lightbase.data.images",
    "data.torchvision_set": "lightbase.data.torchvision_set",
    "data.transforms": "lightbase.data.transforms",
}
"""Modules that were in the user's package before 0.3, and where their classes are now."""
RENAMED = {"System": "BaseModule", "TensorDataModule": "BaseDataModule"}
"""Classes of these modules that have another name now."""
REMOVED = ("gradient_norm", "histograms_every_n_epochs")
"""Flags of version 0.2 that are dropped from a saved config."""
PATHS = ("class_path", "optimizer", "scheduler", "initializer", "test_views")
"""Keys of a config whose text may be an import path."""


def renamed(config: Any) -> Any:
    """A copy of a config, or of one value, with today's import paths."""
    if isinstance(config, dict):
        return {key: renamed(value) for key, value in config.items()}
    if isinstance(config, list):
        return [renamed(value) for value in config]
    return current_path(config) if isinstance(config, str) else config


def saved_config(config: Any) -> Any:
    """A copy of a run's config with today's import paths and without the removed flags."""
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if key not in REMOVED}
    return renamed(config)


def current_path(path: str) -> str:
    """Today's import path of a class or function; any other text unchanged.

    A module that the user's package has today keeps its name: it may be the user's.
    """
    package, _, rest = path.partition(".")
    module, _, name = rest.rpartition(".")
    if package != PROJECT.package or module not in MOVED:
        return path
    file = PROJECT.root.joinpath(package, *module.split("."))
    if file.is_dir() or file.with_suffix(".py").is_file():
        return path
    return f"{MOVED[module]}.{RENAMED.get(name, name)}"


def with_todays_package(config: Any, package: str, key: str = "") -> Any:
    """A copy of a config in which the user's package, once called `package`, has today's name."""
    if isinstance(config, dict):
        return {name: with_todays_package(value, package, name) for name, value in config.items()}
    if isinstance(config, list):
        return [with_todays_package(value, package, "class_path") for value in config]
    if key in PATHS and isinstance(config, str) and config.startswith(f"{package}."):
        return PROJECT.package + config.removeprefix(package)
    return config
