"""The command line before anything is built: the parser, the order of the arguments, values made
plain."""

import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from jsonargparse.typing import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    restricted_number_type,
)
from lightning import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightbase.cli.config import check_config_file
from lightbase.cli.messages import explain, shorten_help
from lightbase.cli.script import ScriptParser
from lightbase.errors import UserError
from lightbase.folder import PROJECT
from lightbase.ranks import say

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])  # as far as NumPy's go
TRAINER_TYPES: dict[str, Any] = {
    # typing may hold float | int where Lightning wrote int | float: 1 would be read as 1.0, which
    # is all batches
    **dict.fromkeys(
        [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")],
        int | float | None,
    ),
    "val_check_interval": int | float | str | None,
    # Lightning accepts numbers below zero here
    **dict.fromkeys(("min_epochs", "min_steps", "log_every_n_steps"), NonNegativeInt | None),
    "check_val_every_n_epoch": PositiveInt | None,
    "accumulate_grad_batches": PositiveInt,
    "num_sanity_val_steps": restricted_number_type("CountOrAll", int, (">=", -1)) | None,
    "gradient_clip_val": NonNegativeFloat | None,
}
# null in config.yaml unless given: run/loggers.py fills them in when the run has a folder
LOGGER_TYPES: dict[type, dict[str, Any]] = {
    CSVLogger: {"save_dir": str | None, "name": str | None},
    TensorBoardLogger: {
        "save_dir": str | None,
        "name": str | None,
        "default_hp_metric": bool | None,
    },
    WandbLogger: {"save_dir": str | None},
    MLFlowLogger: {"save_dir": str | None, "experiment_name": str | None},
}


class Parser(LightningArgumentParser):
    """Reports mistakes as a UserError of two lines. Replaces some types that Lightning declares."""

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, **options: Any
    ) -> list[str]:
        # jsonargparse calls this for the Trainer, and for the class of each logger
        types = TRAINER_TYPES if class_type is Trainer else LOGGER_TYPES.get(class_type, {})
        options["skip"] = {*(options.get("skip") or ()), *types}
        added = super().add_class_arguments(class_type, nested_key, **options)
        for name, kind in types.items():
            default = (
                inspect.signature(Trainer).parameters[name].default
                if class_type is Trainer
                else None
            )
            added.append(f"{nested_key}.{name}" if nested_key else name)
            self.add_argument(f"--{added[-1]}", type=kind, default=default)
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if (
            not self.exit_on_error
        ):  # a parser inside the parser, whose message becomes part of another
            super().error(message, ex)
        raise UserError(
            f"{explain(message, self)}\nsee --help, or --print_config for every argument", 2
        ) from ex

    def format_help(self, *args: Any) -> str:
        shorten_help(self)
        return super().format_help(*args)


def validate_nulls(parser: ArgumentParser, config: Any) -> None:
    """None must fit its type: jsonargparse takes it for "not given", and lets `model.lr: null`
    pass."""
    set_parsing_settings(unset_sentinel=True)
    try:
        parser.validate(config, skip_required=True)
    finally:
        set_parsing_settings(unset_sentinel=False)


def arguments(args: Sequence[str]) -> list[str]:
    """The command line in the order in which it counts: the system's class, the --config files, all
    other flags.

    The class stands first, or arguments would be taken for those of another; and again after files
    that may name one.
    """
    order = ScriptParser(add_help=False)
    order.add_argument("-c", "--config", action="append", default=[])
    order.add_argument("--model", "--model.class_path")
    found, others = order.parse_known_args(args)
    check_group_flags(others)
    configs = {path: check_config_file(Path(path)) for path in found.config}
    with_callbacks = [
        f"--config {path}" for path, content in configs.items() if "callbacks" in content["trainer"]
    ]
    with_callbacks += [arg for arg in others if arg.partition("=")[0] == "--trainer.callbacks"]
    if len(with_callbacks) > 1:
        say(
            f"Callbacks: {with_callbacks[-1]} replaces those before it; the key callbacks+ "
            "would add to them"
        )
    own = [f"--model={found.model}"] if found.model is not None else []
    return [
        *(own or [f"--model={PROJECT.default_model}"]),
        *(f"--config={path}" for path in found.config),
        *own,
        *others,
    ]


def check_group_flags(args: Sequence[str]) -> None:
    """Raise UserError for one option of a parameter group: jsonargparse would drop the group's
    others, or refuse it."""
    for arg, after in zip(args, [*args[1:], ""], strict=False):
        flag, is_whole, value = arg.partition("=")
        value = value if is_whole else after
        found = re.fullmatch(r"--model\.(?:init_args\.)?parameter_groups\.(.+)\.(\w+)", flag)
        if found and not value.lstrip().startswith("{"):
            way_out = f'--model.parameter_groups.{found[1]} "{{{found[2]}: {value}}}"'
            raise UserError(
                f"{flag} {value}: all options of a group go into one value\n{way_out}", 2
            )


def make_paths_absolute(config: Any) -> None:
    """Paths in flags are relative to the working folder; the saved config must mean the same from
    anywhere."""
    data = (config.data or {}).get(
        "init_args"
    ) or {}  # None where it is missing, which is said later
    for key, value in dict(data).items():
        if key.endswith(("_dir", "_path")) and isinstance(value, str):
            data[key] = str(Path(value).absolute())
    if config.trainer.default_root_dir is not None:
        config.trainer.default_root_dir = str(Path(config.trainer.default_root_dir).absolute())
    for logger in configs_of_loggers(config.trainer.logger):
        own = logger.get("init_args") or {}
        for key in ("save_dir", "dir", "tracking_uri"):
            # the last may be that of a server, or of a folder
            if own.get(key) is not None and ":" not in str(own[key]) and own[key] != "databricks":
                own[key] = str(Path(own[key]).absolute())


def configs_of_loggers(config: Any) -> list[Namespace]:
    """Of trainer.logger; none where it is a bool or null."""
    return [
        logger
        for logger in (config if isinstance(config, list) else [config])
        if isinstance(logger, Namespace)
    ]


def make_plain(config: Any) -> None:
    """PositiveInt and the like become plain numbers: a class that asks for those could not be
    dumped with them.

    Raises UserError for an infinite PositiveFloat, or another type with a range."""
    for key, value in list(config.items()):
        if isinstance(value, float) and math.isinf(value) and type(value) is not float:
            raise UserError(
                f"{key.replace('.init_args', '')}: {value} is out of range; give a finite number", 2
            )
        if value == "None":  # typed, or what jsonargparse makes of a blank where only text fits
            raise UserError(
                f"{key.replace('.init_args', '')}: None is no value; null may be one", 2
            )
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[key] = int(value) if isinstance(value, int) else float(value)
