"""The user's config files, and the names in them: of settings, metrics and classes. A
setting has the name of its flag, a metric that of its curve.

Read `read_config` first. The classes are found by searching the source code as text:
the messages of errors and --help list them, and need not import torch for that.
"""

import re
from pathlib import Path
from typing import Any

import yaml

import lightbase
from lightbase.config.errors import UserError
from lightbase.config.files import Values
from lightbase.config.paths import PROJECT

EXAMPLE = (
    "write `key: value`, indented with spaces; configs/mnist_mlp.yaml is an example"
)

SCALARS = {
    "str": r"[-+]?(0[\d_]+|\d[\d_]*(:[\d_.]+)+)$",
    "float": r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$",
}
"""Text and numbers that YAML 1.1 would read as something else."""

CLASS = re.compile(r"^class (\w+)", re.MULTILINE)  # at the top level of a file

IMPORT_PATH_KEYS = ("class_path", "optimizer", "scheduler")
"""Keys of a config whose text may be an import path."""

MOVED = {
    "lightbase.core.arrays": "lightbase.data.module",
    "lightbase.core.checkpoint": "lightbase.run.checkpoint",
    "lightbase.core.curves": "lightbase.model.curves",
    "lightbase.core.metrics": "lightbase.model.metrics",
    "lightbase.data.arrays": "lightbase.data.module",
    "lightbase.extras.device_monitor": "lightbase.watch.device_monitor",
    "lightbase.extras.figures": "lightbase.watch.figures",
    "lightbase.extras.progress": "lightbase.watch.progress",
    "lightbase.extras.step_timer": "lightbase.watch.step_timer",
}
"""{module in an earlier version: module now}, of classes that a config may name"""

REMOVED = "steps_per_execution"
"""A setting of an earlier version that changed no result. It is left out."""


RUN_LOCATION_KEYS = ("ckpt_path", "name", "trainer.default_root_dir")
"""Settings that say where a run is, not what it does."""

SAME_TRAINING_KEYS = (*RUN_LOCATION_KEYS, "test")
"""Settings that change nothing in what a run trains."""

WITHOUT_EFFECT = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "resident",
    "data_dir",
    "eval_batch_size",
)
"""Arguments of data that change no batch of a training."""

# the last words of metrics' names that tell which values are better
LOWER_IS_BETTER = re.compile("loss|error|err|mae|mse|rmse|nll|perplexity")

HIGHER_IS_BETTER = re.compile(
    r"acc|accuracy|top\d+|f1|auc|auroc|precision|recall|iou|dice|r2|map|psnr"
)


def read_numbers_as_flags(loader: Any) -> None:
    """Let a loader of PyYAML read 1e3 as a number, and 042, 12:30:45 and dates as text.
    In YAML 1.1, 1e3 is text, 042 is 34, and 12:30:45 is 45045 in base 60."""
    pairs = [
        (f"tag:yaml.org,2002:{kind}", re.compile(pattern))
        for kind, pattern in SCALARS.items()
    ]
    resolvers = loader.yaml_implicit_resolvers
    loader.yaml_implicit_resolvers = {
        first: [*pairs, *others] for first, others in resolvers.items()
    }
    loader.add_constructor("tag:yaml.org,2002:timestamp", loader.construct_yaml_str)


class ConfigLoader(yaml.SafeLoader):
    """Loads YAML, and refuses a mapping that has a key twice. PyYAML would drop the
    first value without a message. See `read_numbers_as_flags`."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if key.value in keys:
                problem = f"duplicate key {key.value!r}"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            keys.add(key.value)
        return node


read_numbers_as_flags(ConfigLoader)


def read_config(path: Path) -> Values:
    """Return the content of a config file, a mapping, with today's import paths and
    without the setting `REMOVED`. The parser checks keys and types of values."""
    try:
        content = yaml.load(path.read_text("utf-8"), ConfigLoader)
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror}", status=2) from error
    except (ValueError, yaml.YAMLError) as error:
        # PyYAML does not know the name of the file
        reason = str(error).replace('"<unicode string>", ', "")
        reason = " ".join(reason.split())[:200]
        problem = f"config {path}: not valid YAML: {reason}"
        raise UserError(problem, EXAMPLE, 2) from error
    if not isinstance(content, dict):
        raise UserError(f"config {path} has to hold keys with values", EXAMPLE, 2)
    if not isinstance(content.get("trainer", {}), dict):  # jsonargparse would take it
        problem = f"config {path}: trainer has to hold keys with values"
        raise UserError(problem, EXAMPLE, 2)
    content.pop(REMOVED, None)
    return renamed(content, PROJECT.package)  # type: ignore[no-any-return]


LARGEST_FOR_C = 20_000
"""Characters of YAML that the fast loader reads. In a longer text, brackets could be
nested so deeply that they end the process."""


def plain_yaml(text: str) -> Any:
    """Return the content of YAML that a run has written, without building objects."""
    loader: Any = yaml.SafeLoader
    if yaml.__with_libyaml__ and len(text) <= LARGEST_FOR_C:
        loader = yaml.CSafeLoader
    return yaml.load(text, loader)


def renamed(config: Any, package: str, key: str = "") -> Any:
    """Return a copy of a saved config with today's import paths. They differ if the
    user has renamed the package since, or if a class has moved since the run.

    package: The name of the user's package when the config was written.
    key: The key of `config` if that is one value of a larger config.
    """
    if isinstance(config, dict):
        return {
            name: renamed(value, package, str(name)) for name, value in config.items()
        }
    if isinstance(config, list):
        return [renamed(value, package) for value in config]
    first, _, name = str(config).rpartition(".")
    if f"{first}.".startswith("lightbase.") and isinstance(config, str):
        if name == "Features":  # in version 0.3 it was part of the library
            return f"{PROJECT.package}.data.features.Features"
        if name in lightbase.__all__:
            return f"lightbase.{name}"
    if key in IMPORT_PATH_KEYS and first in MOVED:
        return f"{MOVED[first]}.{name}"
    if key in IMPORT_PATH_KEYS and str(config).startswith(f"{package}."):
        return PROJECT.package + str(config).removeprefix(package)
    return config


def users_classes() -> list[str]:
    """Return the import path of each class at the top level of a file of the user's
    package. No file is imported."""
    classes = []
    for file in sorted((PROJECT.root / PROJECT.package).rglob("*.py")):
        path = file.relative_to(PROJECT.root).with_suffix("")
        module = ".".join(path.parts).removesuffix(".__init__")
        for name in CLASS.findall(file.read_text("utf-8", "replace")):
            classes.append(f"{module}.{name}")
    return classes


def path_of_class(name: str) -> str:
    """Return the import path for the bare name of a class, such as "MLP": of the only
    class of this name in the user's package, or of a public name of the library. Any
    other text is returned unchanged."""
    if name[:1].isupper():
        paths = [path for path in users_classes() if path.endswith(f".{name}")]
        if len(paths) == 1:
            return paths[0]
        if not paths and name in lightbase.__all__:
            return f"lightbase.{name}"
    return name


def flatten(config: Any, key: str = "") -> Values:
    """Return {name of the flag: value} for a nested config, such as {"model.lr": 0.01,
    "model.net": "my.models.mlp.MLP", "model.net.sizes": [2, 2]}.

    key: The name of the flag for the config itself; "" for all settings.
    """
    if not isinstance(config, dict):
        return {key: config}
    flat: Values = {}
    for name, value in config.items():
        if name in ("class_path", "init_args"):
            flat |= flatten(value, key)
        else:
            flat |= flatten(value, f"{key}.{name}".lstrip("."))
    return flat


def better_by_name(metric: str) -> str | None:
    """Return "min" if lower values of a metric are better, "max" if higher ones are, or
    None if the last word of the name does not tell, such as acc in val/top5_acc."""
    word = metric.rpartition("/")[2].lower().rpartition("_")[2]
    if LOWER_IS_BETTER.fullmatch(word):
        return "min"
    if HIGHER_IS_BETTER.fullmatch(word):
        return "max"
    return None
