"""The command line before anything is built: the parser, the order of the arguments, values made plain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse.typing import restricted_number_type
from lightning import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from project.base.errors import UserError
from project.engine.checks import check_config_file
from project.engine.messages import explain, shorten_help

# as far as NumPy's seeds go
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])

# Trainer flags where 1 means one batch and 1.0 all of them
NUM_OR_SHARE = {
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), int | float | None),
    "limit_predict_batches": int | float | None,
    "val_check_interval": int | float | str | None,
}


class Parser(LightningArgumentParser):
    """Reports mistakes as a UserError of two lines."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser inside the parser, whose message becomes part of another
            super().error(message, ex)
        raise UserError(f"{explain(message, self)}\nsee --help, or --print_config for every argument", 2) from ex

    def add_lightning_class_args(self, lightning_class: Any, nested_key: str, *args: Any, **kwargs: Any) -> list[str]:
        """As Lightning's own, but "1" stays one batch.

        typing takes Optional[Union[int, float]] for Optional[Union[float, int]] if that was made first, anywhere; then
        --trainer.limit_val_batches 1 would mean 1.0, all batches.
        """
        if lightning_class is not Trainer:
            return super().add_lightning_class_args(lightning_class, nested_key, *args, **kwargs)
        added = self.add_class_arguments(
            Trainer, nested_key, fail_untyped=False, instantiate=False, sub_configs=True, skip=set(NUM_OR_SHARE)
        )
        for name, number in NUM_OR_SHARE.items():
            self.add_argument(f"--{nested_key}.{name}", type=number, default=None)
        return [*added, *(f"{nested_key}.{name}" for name in NUM_OR_SHARE)]

    def format_help(self, *args: Any) -> str:
        shorten_help(self)
        return super().format_help(*args)


def arguments(args: Sequence[str]) -> list[str]:
    """The command line in the order in which it counts: the system's class, the --config files, all other flags.

    The class comes first, so that arguments are never taken for those of another class; it is the Classifier unless
    a flag or a file names another one.
    """
    args = list(args)
    model = ["--model", "project.classifier.Classifier"]
    configs: list[str] = []
    others: list[str] = []
    while args:
        arg, has_value, value = args.pop(0).partition("=")
        if arg in ("--config", "-c", "--model", "--model.class_path") and (has_value or args):
            value = value if has_value else args.pop(0)
            if arg.startswith("--model"):
                model = ["--model", value]
                others += model  # again, for where a file names a class too
            else:
                configs += ["--config", value]
                check_config_file(Path(value))
        else:
            others.append(arg + has_value + value)
    return model + configs + others


def make_paths_absolute(config: Any) -> None:
    """Paths in flags are relative to the working folder; the saved config must mean the same from anywhere."""
    data = config.data.get("init_args") or {}
    for key, value in dict(data).items():
        if key.endswith(("_dir", "_path")) and isinstance(value, str):
            data[key] = str(Path(value).absolute())
    if config.trainer.default_root_dir is not None:
        config.trainer.default_root_dir = str(Path(config.trainer.default_root_dir).absolute())


def make_plain(config: Any) -> None:
    """Numbers of jsonargparse's restricted types, such as PositiveInt, become plain ones: a class that asks for a plain
    number could not be dumped with the others."""
    for key, value in list(config.items()):
        for plain in (int, float):
            if isinstance(value, plain) and type(value) not in (plain, bool):
                config[key] = plain(value)
