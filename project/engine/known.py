"""What the data knows, written into the model's config before the model is built."""

from typing import Any, Protocol, runtime_checkable

from jsonargparse import Namespace
from lightning import LightningDataModule

from project.base.datamodule import TensorDataModule


@runtime_checkable
class KnowsClasses(Protocol):
    """A data module with this attribute, whatever its class."""

    num_classes: int | None


def facts_of(data: LightningDataModule) -> dict[str, Any]:
    """By the names of the arguments that take them."""
    facts: dict[str, Any] = {}
    if isinstance(data, KnowsClasses) and data.num_classes:
        facts["num_classes"] = int(data.num_classes)
    if isinstance(data, TensorDataModule) and data.image_shape:
        shape = [int(size) for size in data.image_shape]  # not jsonargparse's PositiveInt
        facts |= {"in_channels": shape[0], "image_shape": shape}
    return facts


def fill_in(config: Any, given: Any, facts: dict[str, Any]) -> None:
    """Give every class in `config` that takes an argument of one of these names the value, unless the user has.

    config: of the model, complete: networks, losses and metrics in it are {class_path: ..., init_args: {...}}.
    given: what the user gave of it, of the same form.
    """
    if isinstance(config, list):
        for index, inner in enumerate(config):
            fill_in(inner, given[index] if isinstance(given, list) and index < len(given) else None, facts)
    if not isinstance(config, Namespace | dict):
        return
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
