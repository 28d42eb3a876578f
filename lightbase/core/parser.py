"""The parser of a run's settings: jsonargparse's, with stricter types and short
errors."""

import inspect
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from jsonargparse import Namespace, get_loader, set_loader
from jsonargparse.typing import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    register_type,
    restricted_number_type,
)
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lightbase.core.compat import arguments_of, resolve_class_names
from lightbase.core.config_files import path_of_class
from lightbase.core.errors import UserError
from lightbase.core.mistakes import explain

# the range of NumPy's seeds
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
# 100000 threads crash torch
NumThreads = restricted_number_type("NumThreads", int, [(">", 0), ("<=", 1024)])
CountOrAll = restricted_number_type("CountOrAll", int, (">=", -1))

FLAGS: list[tuple[str, Any, Any]] = [
    ("name", str | None, None),
    ("ckpt_path", str | None, None),
    ("trust_checkpoint", bool, False),
    ("monitor", str | None, "auto"),
    ("monitor_mode", Literal["min", "max"] | None, None),
    ("patience", PositiveInt | None, None),
    ("try_network", bool, True),
    ("stop_on_nan", bool, True),
    ("num_threads", NumThreads | None, None),
    ("keep_every_epoch", bool, False),
]
"""Name, type and default of the flags of train.py that are not Lightning's."""
EXTRA_FLAGS: list[tuple[str, Any, Any]] = []
"""The flags of the extras. They change nothing in what is trained. Filled by
lightbase/commands/extras.py."""
TRAINER_DEFAULTS = {
    "max_epochs": 10,
    "log_every_n_steps": 100,
    "enable_model_summary": False,
}
TRAINER_TYPES: dict[str, Any] = {
    # Lightning wrote int | float, which typing may hold as float | int: 1, one batch,
    # would be read as 1.0, all batches
    "limit_train_batches": int | float | None,
    "limit_val_batches": int | float | None,
    "limit_test_batches": int | float | None,
    "limit_predict_batches": int | float | None,
    "val_check_interval": int | float | str | None,
    # Lightning accepts numbers below zero here
    "min_epochs": NonNegativeInt | None,
    "min_steps": NonNegativeInt | None,
    "max_time": dict[str, NonNegativeInt] | str | None,
    "log_every_n_steps": NonNegativeInt | None,
    "check_val_every_n_epoch": PositiveInt | None,
    "accumulate_grad_batches": PositiveInt,
    "num_sanity_val_steps": CountOrAll | None,
    "gradient_clip_val": NonNegativeFloat | None,
    "default_root_dir": Path | None,
}
# null in config.yaml unless given: record.py fills them in when the run has a folder
LOGGER_TYPES: dict[str, Any] = {
    "save_dir": Path | None,
    "name": str | None,
    "experiment_name": str | None,
    "default_hp_metric": bool | None,
}
# "l1_unstructured" cannot be dumped as Lightning's Callable | str
PRUNING_TYPES: dict[str, Any] = {"pruning_fn": str}
SEE_HELP = "see --help, or --print_config for every argument"


def types_for(class_type: type) -> dict[str, Any]:
    """Return the types that replace those of a class, by the names of its arguments."""
    if class_type is Trainer:
        return TRAINER_TYPES
    if class_type is ModelPruning:
        return PRUNING_TYPES
    if issubclass(class_type, Logger):
        return LOGGER_TYPES
    return {}


def absolute(text: str) -> Path:
    """Return the path from the working folder, so that a saved config means the same
    from anywhere. Raises ValueError for an empty text."""
    if not text:
        raise ValueError("no path is given")
    return Path(text).absolute()


def load_value(text: str) -> Any:
    """Return the value of a flag."""
    if text == "None":  # jsonargparse makes it of a null
        return None
    return get_loader("yaml")(text)


class Parser(LightningArgumentParser):
    """Reports mistakes as a UserError of two lines. Replaces some types that Lightning
    declares.

    parsed: The settings so far. A message about an unknown flag names what they have.
    """

    def __init__(self, **options: Any) -> None:
        set_loader("with_null", load_value, (yaml.YAMLError,))
        register_type(Path, str, absolute, fail_already_registered=False)
        resolve_class_names(path_of_class)
        options |= {
            "parser_mode": "with_null",
            "allow_abbrev": False,
            "print_config": None,
            "usage": "python scripts/train.py [--KEY VALUE] ...",
        }
        super().__init__(**options)
        self.parsed = Namespace()

    def add_class_arguments(
        self, class_type: type, nested_key: str | None = None, **options: Any
    ) -> list[str]:
        # jsonargparse calls this for the Trainer, and for the class of each logger
        types = types_for(class_type)
        parameters = inspect.signature(class_type).parameters
        names = sorted(types.keys() & parameters.keys())
        options["skip"] = {*(options.get("skip") or ()), *names}
        added = super().add_class_arguments(class_type, nested_key, **options)
        for name in names:
            default = parameters[name].default if class_type is Trainer else None
            key = f"{nested_key}.{name}" if nested_key else name
            self.add_argument(f"--{key}", type=types[name], default=default)
            added.append(key)
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser inside the parser: part of a message
            super().error(message, ex)
        raise UserError(explain(message, self, self.parsed), SEE_HELP, 2) from ex


def make_parser(default_model: str | None) -> Parser:
    """Return a parser of all settings of a run.

    default_model: The import path of the model's class where no setting names one.
        None: model and data are objects, and the parser takes their descriptions.
    """
    parser = Parser()
    parser.add_argument("--seed_everything", type=Seed, default=42)
    parser.add_argument("--print_config", type=bool, default=False)
    for name, kind, default in (*FLAGS, *EXTRA_FLAGS):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.set_defaults({f"trainer.{key}": x for key, x in TRAINER_DEFAULTS.items()})
    if default_model is None:
        parser.add_argument("--model", type=dict)
        parser.add_argument("--data", type=dict)
        parser.add_argument("--built_in_python", type=bool, default=True)
    else:
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
        parser.set_defaults({"model": {"class_path": default_model}})
    for action in arguments_of(parser):
        if isinstance(action.default, bool):  # --trainer.fast_dev_run alone
            action.nargs = "?"
            action.const = True
    return parser
