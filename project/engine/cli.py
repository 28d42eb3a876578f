"""From flags and configs to model, data and Trainer; and back from a checkpoint."""

import os
import secrets
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from project.base.errors import UserError
from project.base.rank import rank, say
from project.callbacks.progress import EpochLines, TrainingProgressBar
from project.engine.checkpoints import read_checkpoint
from project.engine.checks import check_weights
from project.engine.data_parallel import DataParallelStrategy  # noqa: F401  # makes "dp" known
from project.engine.devices import check_devices, num_gpus, settle_devices
from project.engine.messages import explain
from project.engine.parser import Parser, Seed, make_paths_absolute, make_plain
from project.engine.steps import StepsTrainer


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
        parser.add_argument("--seed_everything", type=bool | Seed, default=42, help="True draws one.")

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
        parser.add_argument(
            "--steps_per_execution",
            type=PositiveInt,
            default=1,
            help="Steps in one call of Lightning's loop; 20 is faster for small nets.",
        )
        parser.add_argument("--cuda_graph", type=bool, default=False, help="As CUDA graphs.")
        parser.add_argument("--num_threads", type=PositiveInt | None, help="CPU threads; all cores unless given.")
        parser.add_argument("--device_monitor", type=bool, default=True, help="Curves of the devices.")
        parser.add_argument("--step_timer", type=bool, default=True, help="Shares of a step's time.")
        parser.add_argument(
            "--figures_every_n_epochs",
            type=NonNegativeInt,
            default=5,
            help="0: no pictures.",
        )
        parser.add_argument("--keep_every_epoch", type=bool, default=False, help="Keep all checkpoints.")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        namespace = parser.parse_object(self.saved) if self.saved else None
        self.config = parser.parse_args(args, namespace=namespace)
        if self.config.seed_everything is True:  # Lightning would always take 0
            drawn = str(secrets.randbelow(2**32))
            # the first process hands its seed to those that it starts
            self.config.seed_everything = int(os.environ.get("PL_GLOBAL_SEED", drawn) if rank() > 0 else drawn)

    def before_instantiate_classes(self) -> None:
        make_paths_absolute(self.config)
        make_plain(self.config)
        settle_devices(self.config.trainer)
        # complete and plain: enough to repeat the run
        to_repeat = self.config.clone()
        to_repeat.ckpt_path = None
        self.plain_yaml = self.parser.dump(to_repeat, skip_unset=False)
        self.plain_config: dict[str, Any] = yaml.safe_load(self.plain_yaml)

    def check_devices(self) -> None:
        """Raise UserError where the flags ask for devices that are not there."""
        trainer = self.config.trainer
        check_devices(trainer.accelerator, trainer.devices, trainer.strategy, trainer.num_nodes)

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
        self.check_devices()
        config = {**self.config_init.trainer, **arguments}
        for key in ("callbacks", "plugins"):
            own = self.config_init.trainer[key] or []
            config[key] = [*(own if isinstance(own, list) else [own]), *arguments.get(key, [])]
        own_bar = any(isinstance(callback, ProgressBar) for callback in config["callbacks"])
        if config["enable_progress_bar"] is None:
            config["enable_progress_bar"] = own_bar or sys.stdout.isatty()
        if not own_bar:
            config["callbacks"].append(TrainingProgressBar() if config["enable_progress_bar"] else EpochLines())
        for key in ("accumulate_grad_batches", "check_val_every_n_epoch"):
            if config[key] is not None and config[key] < 1:
                raise UserError(f"trainer.{key} {config[key]}: 1 is the least", 2)
        if config["precision"] in ("16-mixed", "16", 16) and (config["accelerator"] == "cpu" or not num_gpus()):
            say(f"Precision {config['precision']} needs a GPU: training in bf16-mixed on the CPU instead")
            config["precision"] = "bf16-mixed"
        try:
            several = getattr(self.datamodule, "steps_per_execution", 1) > 1
            return (StepsTrainer if several else Trainer)(**config)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
            raise UserError(f"the trainer flags do not fit: {str(error).splitlines()[0]}", 2) from error


def is_raised_on_purpose(error: Exception) -> bool:
    """Whether the line that raised the error is a raise statement, and not a call gone wrong."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (where.line or "").startswith("raise ")


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
