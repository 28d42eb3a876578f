"""The config of objects that were built in Python, as far as it can be told."""

import inspect
import pkgutil
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightbase.core.errors import UserError
from lightbase.core.folder import flatten

PLAIN = (bool, int, float, str, type(None))
LOST = "<built in Python: "
"""How the text begins that stands in a config for an object that cannot be built
again."""


class RecordsArguments:
    """Keeps the arguments of the constructor, for the config of a training from
    Python."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__new__(cls)
        names = [*inspect.signature(cls.__init__).parameters][1:]
        vars(instance)["constructor_arguments"] = (
            dict(zip(names, args, strict=False)) | kwargs
        )
        return instance


def config_of(value: Any) -> Any:
    """A value as a config holds it: plain, or {class_path: ..., init_args: ...} for an
    object."""
    for kind in (
        bool,
        int,
        float,
        str,
    ):  # jsonargparse's PositiveInt, for instance, is an int
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, Path):
        return value and str(value)
    if isinstance(value, list | tuple):
        return [config_of(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): config_of(inner) for key, inner in value.items()}
    if inspect.isclass(value) or inspect.isroutine(value):
        return import_path(value)
    return {"class_path": import_path(type(value)), "init_args": arguments_of(value)}


def import_path(definition: Any) -> str:
    path = f"{definition.__module__}.{definition.__qualname__}"
    try:
        if (
            definition.__module__ != "__main__"
            and pkgutil.resolve_name(path) is definition
        ):
            return path
    except (
        ImportError,
        AttributeError,
        ValueError,
    ):  # inside of a function, for instance
        pass
    return f"{LOST}{definition.__qualname__}>"


def arguments_of(value: Any) -> Any:
    """The arguments of an object's constructor, with today's values where attributes
    have their names."""
    if not isinstance(value, RecordsArguments):
        return arguments_by_attributes(value)
    arguments = dict(vars(value)["constructor_arguments"])
    for cls in type(value).__mro__:  # a base class takes what **kwargs hands on
        for name in inspect.signature(cls.__init__).parameters:  # type: ignore[misc]
            now = vars(value).get(name)
            if (
                now is not None
                and type(now) is type(arguments.get(name, now))
                and is_plain(now)
            ):
                arguments[name] = now
    return config_of(arguments)


def is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return isinstance(value, PLAIN)


def arguments_by_attributes(value: Any) -> Any:
    """Of an object that keeps all its arguments as attributes, as many networks and all
    metrics do; proven by building it again."""
    arguments: dict[str, Any] = {}
    lost = f"{LOST}{type(value).__qualname__}>"
    is_of_torch = type(value).__module__.startswith(
        "torch"
    )  # its constructors ignore old names
    for name, parameter in [
        *inspect.signature(type(value).__init__).parameters.items()
    ][1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # nothing tells what was in them
        if hasattr(value, name) and is_plain(getattr(value, name)):
            arguments[name] = getattr(value, name)
        elif not is_of_torch or parameter.default is parameter.empty:
            return lost
    try:
        with isolate_rng():
            again = type(value)(**arguments)
    except (
        Exception
    ):  # whatever a constructor raises for arguments that are not its own
        return lost
    return arguments if shape_of(again) == shape_of(value) else lost


def shape_of(value: Any) -> Any:
    """What two objects of the same arguments have in common."""
    if not isinstance(value, nn.Module):
        return repr(vars(value))
    return repr(value), {
        name: tensor.shape for name, tensor in value.state_dict().items()
    }


def check_no_objects(config: Any, path: Path) -> None:
    """Raise UserError for a config that lacks objects."""
    for key, text in flatten(config).items():
        if str(text).startswith(LOST):
            what = f"{path}: {key} was {text.removeprefix('<').removesuffix('>')}"
            raise UserError(
                what, "give the objects: lightbase.load(path, module, data)", 2
            )
