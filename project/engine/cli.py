"""From flags and configs to model, data and Trainer."""

import copy
import os
import secrets
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import yaml
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.rank import rank, say
from project.base.system import System
from project.callbacks.progress import EpochLines, TrainingProgressBar
from project.engine.data_parallel import DataParallelStrategy  # noqa: F401  # makes "dp" known
from project.engine.devices import check_devices, num_gpus, parse_devices, settle_devices
from project.engine.known import facts_of, fill_in
from project.engine.messages import explain
from project.engine.parser import Parser, Seed, make_paths_absolute, make_plain
from project.engine.steps import SeveralSteps, say_single_steps


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
        parser.add_argument("--name", type=str, default="run", help="The run's folder is ROOT/NAME/version_N.")
        parser.add_argument(
            "--ckpt_path", type=str | None, help="Resume from `last` or `best` of the newest run NAME, or from a file."
        )
        parser.add_argument(
            "--monitor", type=str | None, help="What best.ckpt goes by; the model's first metric unless given."
        )
        parser.add_argument(
            "--monitor_mode", type=Literal["min", "max"] | None, help="Which is better; the metric's own unless given."
        )
        parser.add_argument(
            "--patience", type=PositiveInt | None, help="Stop after so many validations without a better --monitor."
        )
        parser.add_argument(
            "--steps_per_execution",
            type=PositiveInt,
            default=1,
            help="Steps in one call of Lightning's loop; 20 is faster for small nets.",
        )
        parser.add_argument("--try_network", type=bool, default=True, help="On two samples, before the run starts.")
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
        # not validated before the data has filled in what it knows
        start = {"namespace": parser.parse_object(self.saved, _skip_validation=True)} if self.saved else {}
        self.config = parser.parse_args(args, **copy.deepcopy(start), _skip_validation=True)
        self.given = parser.parse_args(args, **start, defaults=False, _skip_validation=True)
        if self.config.seed_everything is True:  # Lightning would always take 0
            drawn = str(secrets.randbelow(2**32))
            # the first process hands its seed to those that it starts
            self.config.seed_everything = int(os.environ.get("PL_GLOBAL_SEED", drawn) if rank() > 0 else drawn)

    def before_instantiate_classes(self) -> None:
        make_paths_absolute(self.config)
        make_plain(self.config)
        settle_devices(self.config.trainer)
        self.prepare_instantiation()
        data = Namespace(data=self.config.data)
        self.validate(data, skip_required=True)  # the model is missing
        self.datamodule: LightningDataModule = self.instantiate(data).data
        if isinstance(self.datamodule, TensorDataModule):  # whose loaders share the samples out themselves
            self.config.trainer.use_distributed_sampler = False
        fill_in(self.config.model, self.given.get("model"), facts_of(self.datamodule))
        self.validate(self.config)

    def validate(self, config: Namespace, skip_required: bool = False) -> None:
        try:
            self.parser.validate(config, skip_required=skip_required)
        except (TypeError, ValueError, KeyError) as error:
            self.parser.error(str(error), error)

    def plain_config(self) -> tuple[dict[str, Any], str]:
        """The config as plain values and as YAML: complete, enough to repeat the run."""
        to_repeat = self.config.clone()
        to_repeat.ckpt_path = None
        text = self.parser.dump(to_repeat, skip_unset=False)
        return yaml.safe_load(text), text

    def check_devices(self) -> None:
        """Raise UserError where the flags ask for devices that are not there."""
        trainer = self.config.trainer
        check_devices(trainer.accelerator, trainer.devices, trainer.strategy, trainer.num_nodes)

    def prepare_instantiation(self) -> None:
        """Keep what a constructor raises: jsonargparse turns it into a ValueError of its own."""
        self.failures: list[Exception] = []

        def build(built_class: type, *args: Any, applied_instantiation_links: Any = None, **kwargs: Any) -> Any:
            try:
                return built_class(*args, **kwargs)
            except Exception as error:
                self.failures.append(error)
                raise

        with warnings.catch_warnings():
            # jsonargparse 5 drops add_instantiator; what replaces it came after 4.50, our lower bound
            warnings.simplefilter("ignore", DeprecationWarning)
            self.parser.add_instantiator(build, object, subclasses=True)

    def instantiate(self, config: Namespace) -> Namespace:
        try:
            return self.parser.instantiate(config)
        except ValueError as error:
            if not self.failures:
                raise UserError(explain(str(error), self.parser), 2) from error
            failure = self.failures[0]
            # a constructor's word for an argument that it cannot take, or for a package that it wants
            if (isinstance(failure, ValueError) and is_raised_on_purpose(failure)) or isinstance(failure, ImportError):
                raise UserError(f"the config does not fit: {str(failure).strip().splitlines()[0]}", 2) from failure
            raise failure from None

    def instantiate_classes(self) -> None:
        config = self.config.clone()
        del config["data"]  # is there already
        self.config_init = self.instantiate(config)
        self.model: LightningModule = self.config_init.model

    def make_trainer(self, **arguments: Any) -> Trainer:
        """The Trainer of the flags and configs, with `arguments` on top; callbacks and plugins add to theirs."""
        self.check_devices()
        config = {**self.config_init.trainer, **arguments}
        for key in ("callbacks", "plugins"):
            own = self.config_init.trainer[key] or []
            config[key] = [*(own if isinstance(own, list) else [own]), *arguments.get(key, [])]
        if isinstance(self.model, System):  # before all others
            config["callbacks"].insert(0, self.model.curves)
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
        self.make_steps(config)
        try:
            return Trainer(**config)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
            raise UserError(f"the trainer flags do not fit: {str(error).splitlines()[0]}", 2) from error

    def make_steps(self, trainer: dict[str, Any]) -> None:
        """Several steps in one turn of the loop, where the Trainer's flags allow them."""
        asked = self.config.steps_per_execution
        if asked == 1:
            return
        devices = parse_devices(trainer["devices"])
        is_one = devices == 1 or (isinstance(devices, list) and len(devices) == 1)
        if trainer["strategy"] in ("auto", "single_device") and is_one:
            trainer["strategy"] = SeveralSteps(asked)
        else:
            say_single_steps(asked, f"trainer.strategy {trainer['strategy']} on trainer.devices {trainer['devices']}")


def is_raised_on_purpose(error: Exception) -> bool:
    """Whether the line that raised the error is a raise statement, and not a call gone wrong."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (where.line or "").startswith("raise ")
