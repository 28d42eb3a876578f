"""A run's config: filled in from what the data knows, and written down complete, plain and enough
to repeat the run."""

import copy
import inspect
import json
import math
import pkgutil
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml
from jsonargparse import Namespace
from lightning import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

from lightbase.cli.parser import explain, parser_of
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError
from lightbase.folder import flatten

LOOKS_ON = (
    *("num_workers", "pin_memory", "persistent_workers", "resident"),
    *("data_dir", "eval_batch_size"),
)
"""Arguments of data that change no batch of a training."""
NOT_KEPT = ("config", "trust_checkpoint")
"""Settings of one command: its config files, and its trust in a checkpoint."""
PLAIN = (bool, int, float, str, list, tuple, dict, Namespace, type(None))


@runtime_checkable
class KnowsClasses(Protocol):
    num_classes: int | None


def facts_of(data: LightningDataModule) -> dict[str, Any]:
    """What the data knows, by the names of the arguments that take it."""
    facts: dict[str, Any] = {}
    if isinstance(data, KnowsClasses) and data.num_classes:
        facts["num_classes"] = int(data.num_classes)
    if isinstance(data, BaseDataModule) and data.image_shape:
        facts["image_shape"] = [int(size) for size in data.image_shape]
        facts["in_channels"] = facts["in_chans"] = facts["image_shape"][0]  # as timm calls them
    return facts


def fill_in(config: Any, given: Any, facts: dict[str, Any]) -> None:
    """Give each class in `config`, {class_path: ..., init_args: {...}}, the facts that it takes and
    that `given`, the user's part of the config, does not set."""
    if isinstance(config, list):
        for inner, inner_given in zip_longest(config, given if isinstance(given, list) else []):
            fill_in(inner, inner_given, facts)
    values, given_values = entries(config), entries(given)
    if "class_path" in values:
        path = values["class_path"]
        values, given_values = arguments(values), arguments(given_values)
        for name in facts.keys() & values.keys() - given_values.keys():
            values[name] = facts[name]
        if path.startswith("timm.") and inspect.isroutine(pkgutil.resolve_name(path)):
            # timm's functions take them in **kwargs
            taken = {name: facts[name] for name in ("num_classes", "in_chans") if name in facts}
            config["dict_kwargs"] = taken | entries(config.get("dict_kwargs"))
    for name, inner in values.items():
        fill_in(inner, given_values.get(name), facts)


def drop_objects(config: Any) -> None:
    """Leave out of {class_path: ..., init_args: {...}} the defaults that are objects, such as a
    functools.partial: YAML cannot hold them, and the class has them anyway."""
    for inner in config if isinstance(config, list) else entries(config).values():
        drop_objects(inner)
    if not isinstance(config, Namespace) or not isinstance(config.get("init_args"), Namespace):
        return
    values = vars(config.init_args)
    objects = {k: v for k, v in values.items() if isinstance(v, Enum) or not isinstance(v, PLAIN)}
    if inspect.isroutine(pkgutil.resolve_name(config.class_path)):
        # a default that is a class, as of swin_t: jsonargparse would hand over a partial of it
        objects |= {k: v for k, v in values.items() if "class_path" in entries(v)}
    defaults = parser_of(config.class_path).get_defaults() if objects else Namespace()
    for name, value in objects.items():
        if repr(defaults.get(name)) == repr(value):
            del values[name]


def make_paths_absolute(config: Any) -> None:
    """Paths in flags are relative to the working folder; the saved config must mean the same from
    anywhere."""
    loggers = configs_of_loggers(config.trainer.logger)
    for values in (entries(config.trainer), *map(arguments, [config.model, config.data, *loggers])):
        for key, value in values.items():
            is_path = key == "dir" or key.endswith(("_dir", "_path", "_uri"))
            # a uri may be the address of a server; sub_dir is below the folder of a run
            if is_path and key != "sub_dir" and value is not None and ":" not in str(value):
                values[key] = str(Path(value).absolute())


def configs_of_loggers(config: Any) -> list[Namespace]:
    """Of trainer.logger; none where it is a bool or null."""
    loggers = config if isinstance(config, list) else [config]
    return [logger for logger in loggers if isinstance(logger, Namespace)]


def make_plain(config: Any) -> None:
    """PositiveInt and similar types become plain numbers, which can be dumped. Raises UserError for
    the text None, for an infinite number where the type has a range, and for a whole number that no
    tensor or seed holds."""
    for key, value in list(config.items()):
        flag = key.replace(".init_args", "")
        if isinstance(value, float) and math.isinf(value) and type(value) is not float:
            raise UserError(f"{flag}: {value} is out of range; give a finite number", 2)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(f"{flag}: {value} is out of range; whole numbers have 64 bits", 2)
        if value == "None":  # jsonargparse makes it of a blank where only text fits
            raise UserError(f"{flag}: None is no value; null may be one", 2)
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[key] = int(value) if isinstance(value, int) else float(value)


def write_config(parser: LightningArgumentParser, config: Namespace) -> tuple[dict[str, Any], str]:
    """The config as plain values and as YAML. Raises UserError where reading would not give it
    back."""
    to_repeat = config.clone()
    to_repeat.ckpt_path = None
    for key in NOT_KEPT:
        to_repeat.pop(key, None)
    try:
        text = parser.dump(to_repeat, skip_unset=False, skip_validation=True)
        plain = yaml.safe_load(text)
        check_reading(parser, plain)
    except (UserError, ValueError, TypeError, yaml.YAMLError) as error:
        reason = str(error) if isinstance(error, UserError) else explain(str(error), parser)
        what = "this config could not be read again, for a resume or a test"
        raise UserError(f"{what}:\n{reason.splitlines()[0]}", 2) from error
    return plain, text


def check_reading(parser: LightningArgumentParser, plain: dict[str, Any]) -> None:
    """Raise ValueError for a setting that differs when the plain values of a config are read."""
    again = parser.parse_object(copy.deepcopy(plain))  # changes its argument
    drop_objects(again)
    again.pop("trust_checkpoint", None)
    text = parser.dump(again, format="json", skip_unset=False, skip_validation=True)
    old, new = flatten(plain), flatten(json.loads(text))
    for key in old | new:
        if old.get(key) != new.get(key):
            raise ValueError(f"{key} would get another value")


def arguments(config: Any) -> dict[str, Any]:
    """The arguments in {class_path: ..., init_args: {...}}."""
    return entries(entries(config).get("init_args"))


def entries(config: Any) -> dict[str, Any]:
    """The entries of a dict or Namespace, in the same object; empty for a plain value."""
    if isinstance(config, Namespace):
        return vars(config)
    return config if isinstance(config, dict) else {}
