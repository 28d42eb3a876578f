"""The command line of training: from flags and configs to a finished run."""

import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse.typing import PositiveInt, restricted_number_type
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from project.checkpoints import read_checkpoint
from project.checks import check_config_file, check_weights
from project.devices import check_devices, num_gpus
from project.errors import UserError
from project.messages import explain, shorten_help

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


class TrainingCLI(LightningCLI):
    """Flags and configs, parsed; then `model` and `datamodule`, built. `make_trainer` builds the Trainer.

    args: the command line.
    saved: a config to start from, as a checkpoint holds it, where args has no --config.
    """

    def __init__(self, args: Sequence[str], saved: dict[str, Any] | None = None) -> None:
        self.saved = saved
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            args=list(args),
            parser_class=Parser,
            parser_kwargs={"allow_abbrev": False},
            trainer_defaults={"max_epochs": 10, "log_every_n_steps": 100, "enable_model_summary": False},
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--seed_everything", type=bool | Seed, default=42, help="Seed; true draws one.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"trainer.use_distributed_sampler": False})  # our own sampler shares the batches out
        parser.add_argument("--name", type=str, default="run", help="The run's folder is ROOT/NAME/version_N.")
        parser.add_argument(
            "--ckpt_path", type=str | None, help="Resume from `last` or `best` of the newest run NAME, or from a file."
        )
        parser.add_argument("--monitor", type=str, default="val/acc", help="The metric that best.ckpt goes by.")
        parser.add_argument(
            "--patience", type=PositiveInt | None, help="Stop after so many validations without a better --monitor."
        )
        parser.add_argument("--keep_every_epoch", type=bool, default=False, help="Keep a checkpoint of every epoch.")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        namespace = parser.parse_object(self.saved) if self.saved else None
        self.config = parser.parse_args(args, namespace=namespace)

    def before_instantiate_classes(self) -> None:
        make_paths_absolute(self.config)
        make_plain(self.config)
        trainer = self.config.trainer
        check_devices(trainer.accelerator, trainer.devices, trainer.strategy)
        # complete and plain: enough to repeat the run
        to_repeat = self.config.clone()
        to_repeat.ckpt_path = None
        self.plain_yaml = self.parser.dump(to_repeat, skip_unset=False)
        self.plain_config: dict[str, Any] = yaml.safe_load(self.plain_yaml)

    def instantiate_classes(self) -> None:
        failures: list[Exception] = []

        def build(built_class: type, *args: Any, applied_instantiation_links: Any = None, **kwargs: Any) -> Any:
            try:
                return built_class(*args, **kwargs)
            except Exception as error:
                failures.append(error)
                raise

        with warnings.catch_warnings():
            # jsonargparse 5 drops add_instantiator; what replaces it came after 4.50, our lower bound
            warnings.simplefilter("ignore", DeprecationWarning)
            self.parser.add_instantiator(build, object, subclasses=True)
        try:
            self.config_init = self.parser.instantiate(self.config)
        except ValueError as error:
            # jsonargparse turns whatever a constructor raises into a ValueError of its own
            if not failures:
                raise UserError(explain(str(error), self.parser), 2) from error
            failure = failures[0]
            # a constructor's word for an argument that it cannot take, or for a package that it wants
            if (isinstance(failure, ValueError) and is_raised_on_purpose(failure)) or isinstance(failure, ImportError):
                raise UserError(f"the config does not fit: {str(failure).strip().splitlines()[0]}", 2) from failure
            raise failure from None
        self.model: LightningModule = self.config_init.model
        self.datamodule: LightningDataModule = self.config_init.data

    def make_trainer(self, **arguments: Any) -> Trainer:
        """The Trainer of the flags and configs, with `arguments` on top; callbacks and plugins add to theirs."""
        config = {**self.config_init.trainer, **arguments}
        for key in ("callbacks", "plugins"):
            own = self.config_init.trainer[key] or []
            config[key] = [*(own if isinstance(own, list) else [own]), *arguments.get(key, [])]
        own_bar = any(isinstance(callback, ProgressBar) for callback in config["callbacks"])
        if config["enable_progress_bar"] is None:
            config["enable_progress_bar"] = own_bar or sys.stdout.isatty()
        if config["enable_progress_bar"] and not own_bar:
            config["callbacks"].append(TQDMProgressBar(refresh_rate=50))  # a refresh costs as much as a small step
        for key in ("accumulate_grad_batches", "check_val_every_n_epoch"):
            if config[key] is not None and config[key] < 1:
                raise UserError(f"trainer.{key} {config[key]}: 1 is the least", 2)
        if config["precision"] in ("16-mixed", "16", 16) and (config["accelerator"] == "cpu" or not num_gpus()):
            print(f"Precision {config['precision']} needs a GPU: training in bf16-mixed on the CPU instead")
            config["precision"] = "bf16-mixed"
        try:
            return Trainer(**config)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
            raise UserError(f"the trainer flags do not fit: {str(error).splitlines()[0]}", 2) from error


def is_raised_on_purpose(error: Exception) -> bool:
    """Whether the line that raised the error is a raise statement, and not a call gone wrong."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (where.line or "").startswith("raise ")


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


def load_run(path: Path, flags: Sequence[str] = ()) -> TrainingCLI:
    """Model and data of a run, rebuilt from the config in its checkpoint, with the checkpoint's weights.

    flags: --data.* and --trainer.* flags that differ from those of the run.
    Raises UserError where the file is not a sound checkpoint or does not fit the code of today.
    """
    checkpoint = read_checkpoint(path)
    config = checkpoint["config"]
    # the devices of the run may not be here; what changes the result stays
    kept = {key: config["trainer"][key] for key in ("precision", "limit_test_batches")}
    if config["trainer"]["accelerator"] == "cpu":
        kept["accelerator"] = "cpu"
    cli = TrainingCLI(flags, saved=config | {"trainer": kept})
    check_weights(checkpoint, cli.model, path)
    cli.model.load_state_dict(checkpoint["state_dict"])
    data_state = checkpoint.get(type(cli.datamodule).__qualname__)
    if data_state is not None:
        cli.datamodule.load_state_dict(data_state)
    return cli
