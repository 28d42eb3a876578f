"""What the data knows, written into the model's config before the model is built."""

from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

from jsonargparse import Namespace
from lightning import LightningDataModule

from project.base.datamodule import TensorDataModule


@runtime_checkable
class KnowsClasses(Protocol):
    num_classes: int | None


def facts_of(data: LightningDataModule) -> dict[str, Any]:
    """By the names of the arguments that take them; plain, not jsonargparse's PositiveInt."""
    facts: dict[str, Any] = {}
    if isinstance(data, KnowsClasses) and data.num_classes:
        facts["num_classes"] = int(data.num_classes)
    if isinstance(data, TensorDataModule) and data.image_shape:
        facts["image_shape"] = [int(size) for size in data.image_shape]
        facts["in_channels"] = facts["image_shape"][0]
    return facts


def fill_in(config: Any, given: Any, facts: dict[str, Any]) -> None:
    """Give each class in `config`, {class_path: ..., init_args: {...}}, the facts that it takes and `given`, what the
    user gave of `config`, lacks."""
    if isinstance(config, list):
        for inner, own in zip_longest(config, given if isinstance(given, list) else []):
            fill_in(inner, own, facts)
    values, own = as_dict(config), as_dict(given)
    if "class_path" in values:
        values, own = as_dict(values.get("init_args")), as_dict(own.get("init_args"))
        for name in facts.keys() & values.keys() - own.keys():
            values[name] = facts[name]
    for name, inner in values.items():
        fill_in(inner, own.get(name), facts)


def as_dict(config: Any) -> dict[str, Any]:
    """The same object's entries by name; empty for a plain value."""
    return vars(config) if isinstance(config, Namespace) else config if isinstance(config, dict) else {}
