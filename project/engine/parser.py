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
from project.engine.script import ScriptParser

# as far as NumPy's seeds go
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])

DEFAULT_SYSTEM = "project.classifier.Classifier"
# Trainer flags where 1 means one batch and 1.0 all of them
NUM_OR_SHARE = {f"limit_{stage}_batches": int | float | None for stage in ("train", "val", "test", "predict")} | {
    "val_check_interval": int | float | str | None
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
        options: Any = {"fail_untyped": False, "instantiate": False, "sub_configs": True, "skip": set(NUM_OR_SHARE)}
        added = self.add_class_arguments(Trainer, nested_key, **options)
        for name, number in NUM_OR_SHARE.items():
            self.add_argument(f"--{nested_key}.{name}", type=number, default=None)
        return [*added, *(f"{nested_key}.{name}" for name in NUM_OR_SHARE)]

    def format_help(self, *args: Any) -> str:
        shorten_help(self)
        return super().format_help(*args)


def arguments(args: Sequence[str]) -> list[str]:
    """The command line in the order in which it counts: the system's class, the --config files, all other flags.

    The class comes first, so that arguments are never taken for those of another class; and again after the files,
    which may name a class too.
    """
    order = ScriptParser(add_help=False)
    order.add_argument("-c", "--config", action="append", default=[])
    order.add_argument("--model", "--model.class_path")
    found, others = order.parse_known_args(args)
    for path in found.config:
        check_config_file(Path(path))
    configs = [f"--config={path}" for path in found.config]
    own = [f"--model={found.model}"] if found.model is not None else []
    return [*(own or [f"--model={DEFAULT_SYSTEM}"]), *configs, *own, *others]


def make_paths_absolute(config: Any) -> None:
    """Paths in flags are relative to the working folder; the saved config must mean the same from anywhere."""
    data = (config.data or {}).get("init_args") or {}  # None where it is missing, which is said later
    for key, value in dict(data).items():
        if key.endswith(("_dir", "_path")) and isinstance(value, str):
            data[key] = str(Path(value).absolute())
    if config.trainer.default_root_dir is not None:
        config.trainer.default_root_dir = str(Path(config.trainer.default_root_dir).absolute())


def make_plain(config: Any) -> None:
    """PositiveInt and the like become plain numbers: a class that asks for those could not be dumped with them."""
    for key, value in list(config.items()):
        for plain in (int, float):
            if isinstance(value, plain) and type(value) not in (plain, bool):
                config[key] = plain(value)
