"""A run's config as it is written down: complete, plain, and enough to repeat the run."""

import inspect
import pkgutil
import re
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from project.base.errors import UserError
from project.engine.messages import explain

PLAIN = (bool, int, float, str, list, tuple, dict, Namespace, type(None))


def drop_objects(config: Any) -> None:
    """Leave out of {class_path: ..., init_args: {...}} the defaults that are objects, such as a functools.partial: no
    text gives them back, and the class has them anyway."""
    for inner in config if isinstance(config, list) else vars(config).values() if isinstance(config, Namespace) else ():
        drop_objects(inner)
    if isinstance(config, Namespace) and isinstance(config.get("init_args"), Namespace):
        values = vars(config.init_args)
        if objects := [name for name, value in values.items() if not isinstance(value, PLAIN)]:
            cls, scratch = pkgutil.resolve_name(config.class_path), ArgumentParser(exit_on_error=False)
            add = scratch.add_class_arguments if inspect.isclass(cls) else scratch.add_function_arguments
            add(cls, fail_untyped=False)
            for name in objects:
                if repr(scratch.get_defaults().get(name)) == repr(values[name]):
                    del values[name]


def write_config(parser: LightningArgumentParser, config: Namespace) -> tuple[dict[str, Any], str]:
    """The config as plain values and as YAML. Raises UserError where reading would not give it back."""
    to_repeat = config.clone()
    to_repeat.ckpt_path = None
    try:
        text = parser.dump(to_repeat, skip_unset=False)
        again = parser.parse_object(yaml.safe_load(text))  # changes what it is given
        drop_objects(again)
        no_arguments = re.compile(r"\n +init_args: \{\}")  # of a class that has none
        is_same = no_arguments.sub("", parser.dump(again, skip_unset=False)) == no_arguments.sub("", text)
    except (UserError, ValueError, TypeError) as error:
        reason = (str(error) if isinstance(error, UserError) else explain(str(error), parser)).partition("\n")[0]
        raise UserError(f"this config could not be read again, for a resume or a test:\n{reason}", 2) from error
    if not is_same:
        raise UserError("this config would be another one when it is read again, for a resume or a test", 2)
    return yaml.safe_load(text), text
