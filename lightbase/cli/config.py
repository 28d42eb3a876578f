"""A run's config: filled in from what the data knows, and written down complete, plain and enough
to repeat the run."""

import copy
import inspect
import pkgutil
from enum import Enum
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

from lightbase.cli.messages import explain
from lightbase.compat import parse_unvalidated
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError
from lightbase.folder import flatten

LOOKS_ON = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "resident",
    "data_dir",
    "eval_batch_size",
)
"""Of data: they change no batch of a training."""
NOT_KEPT = ("config", "trust_checkpoint")
"""The names of config files, and what holds for one command alone."""
PLAIN = (bool, int, float, str, list, tuple, dict, Namespace, type(None))


@runtime_checkable
class KnowsClasses(Protocol):
    num_classes: int | None


def facts_of(data: LightningDataModule) -> dict[str, Any]:
    """By the names of the arguments that take them; plain, not jsonargparse's PositiveInt."""
    facts: dict[str, Any] = {}
    if isinstance(data, KnowsClasses) and data.num_classes:
        facts["num_classes"] = int(data.num_classes)
    if isinstance(data, BaseDataModule) and data.image_shape:
        facts["image_shape"] = [int(size) for size in data.image_shape]
        facts["in_channels"] = facts["in_chans"] = facts["image_shape"][0]  # as timm calls them
    return facts


def fill_in(config: Any, given: Any, facts: dict[str, Any]) -> None:
    """Give each class in `config`, {class_path: ..., init_args: {...}}, the facts that it takes and
    `given`, what the user gave of `config`, lacks."""
    if isinstance(config, list):
        for inner, own in zip_longest(config, given if isinstance(given, list) else []):
            fill_in(inner, own, facts)
    values, own = as_dict(config), as_dict(given)
    if "class_path" in values:
        values, own, path = (
            as_dict(values.get("init_args")),
            as_dict(own.get("init_args")),
            values["class_path"],
        )
        for name in facts.keys() & values.keys() - own.keys():
            values[name] = facts[name]
        if path.startswith("timm.") and inspect.isroutine(
            pkgutil.resolve_name(path)
        ):  # its **kwargs take them
            taken = {name: facts[name] for name in ("num_classes", "in_chans") if name in facts}
            config["dict_kwargs"] = taken | as_dict(config.get("dict_kwargs"))
    for name, inner in values.items():
        fill_in(inner, own.get(name), facts)


def drop_objects(config: Any) -> None:
    """Leave out of {class_path: ..., init_args: {...}} the defaults that are objects, such as a
    functools.partial: no text gives them back, and the class has them anyway."""
    for inner in config if isinstance(config, list) else as_dict(config).values():
        drop_objects(inner)
    if isinstance(config, Namespace) and isinstance(config.get("init_args"), Namespace):
        values = vars(config.init_args)
        objects = [
            key
            for key, value in values.items()
            if isinstance(value, Enum) or not isinstance(value, PLAIN)
        ]
        if objects:
            cls, scratch = (
                pkgutil.resolve_name(config.class_path),
                ArgumentParser(exit_on_error=False),
            )
            add = (
                scratch.add_class_arguments
                if inspect.isclass(cls)
                else scratch.add_function_arguments
            )
            add(cls, fail_untyped=False)
            for name in objects:
                if repr(scratch.get_defaults().get(name)) == repr(values[name]):
                    del values[name]


def write_config(parser: LightningArgumentParser, config: Namespace) -> tuple[dict[str, Any], str]:
    """The config as plain values and as YAML. Raises UserError where reading would not give it
    back."""
    to_repeat = config.clone()
    to_repeat.ckpt_path = None
    for key in NOT_KEPT:
        to_repeat.pop(key, None)
    lost: list[str] = []
    try:
        text = parser.dump(
            to_repeat, skip_unset=False, skip_validation=True
        )  # it has been validated
        plain = yaml.safe_load(text)
        # parse_object changes what it is given
        same = parse_unvalidated(parser.parse_object, copy.deepcopy(plain))
        for key in NOT_KEPT:
            same.pop(key, None)
        if same != to_repeat:  # otherwise there is no need to look further, which takes longer
            again = parser.parse_object(copy.deepcopy(plain))
            drop_objects(again)
            again.pop("trust_checkpoint", None)
            was, now = flatten(plain), flatten(yaml.safe_load(parser.dump(again, skip_unset=False)))
            lost = [key for key in was | now if was.get(key) != now.get(key)]
    except (UserError, ValueError, TypeError, yaml.YAMLError) as error:
        reason = (
            str(error) if isinstance(error, UserError) else explain(str(error), parser)
        ).partition("\n")[0]
        raise UserError(
            f"this config could not be read again, for a resume or a test:\n{reason}", 2
        ) from error
    if lost:
        raise UserError(f"{lost[0]}: another value would be read again, for a resume or a test", 2)
    return plain, text


def as_dict(config: Any) -> dict[str, Any]:
    """The same object's entries by name; empty for a plain value."""
    return (
        vars(config)
        if isinstance(config, Namespace)
        else config
        if isinstance(config, dict)
        else {}
    )
