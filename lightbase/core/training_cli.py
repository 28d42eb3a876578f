"""From flags and configs to model, data and Trainer."""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse
from jsonargparse import Namespace, set_parsing_settings
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightbase.commands.arguments import FLAGS, TRAINER_DEFAULTS, Seed
from lightbase.commands.script import is_interactive
from lightbase.core.compat import arguments_of, parse_unvalidated
from lightbase.core.config import (
    Parser,
    drop_objects,
    explain,
    facts_of,
    fill_in,
    make_plain,
)
from lightbase.core.devices import check_devices, num_devices, settle_devices
from lightbase.core.errors import UserError, first_line, raised_at
from lightbase.core.folder import PROJECT
from lightbase.core.module import BaseModule
from lightbase.extras import data_parallel as strategies
from lightbase.extras.progress import EpochLines, TrainingProgressBar


class TrainingCLI(LightningCLI):
    """Flags and configs, parsed; then `model` and `datamodule`, built. `make_trainer`
    builds the Trainer.

    args: Arguments in the order of `CommandLine.parser_args`.
    saved: A config to start from, as a checkpoint of the user's holds it.
    """

    def __init__(
        self, args: Sequence[str], saved: dict[str, Any] | None = None
    ) -> None:
        Parser.folder = Path.cwd()
        self.saved = saved
        self.restart: Any = None  # the run that --ckpt_path names, see resume/load.py
        self.failures: list[Exception] = []  # of constructors
        # the user's classes are found as with python -m; the script's folder is
        # scripts/
        for folder in (str(PROJECT.root), str(Path.cwd())):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            args=list(args),
            parser_class=Parser,
            parser_kwargs={"allow_abbrev": False},
            trainer_defaults=TRAINER_DEFAULTS,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--seed_everything", type=Seed, default=42)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, kind, default in FLAGS:
            parser.add_argument(f"--{name}", type=kind, default=default)
        for action in arguments_of(parser):
            if isinstance(action.default, bool):  # --trainer.fast_dev_run alone
                action.nargs, action.const = "?", True

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # not validated before the data has filled in what it knows
        saved = copy.deepcopy(self.saved)  # parsing changes it
        start = (
            {"namespace": parse_unvalidated(parser.parse_object, saved)}
            if saved
            else {}
        )
        self.config = parse_unvalidated(parser.parse_args, args, **copy.deepcopy(start))
        self.given = parse_unvalidated(parser.parse_args, args, **start, defaults=False)
        # Lightning would take 0 for null before the rest is validated
        self.validate(
            Namespace(seed_everything=self.config.seed_everything), skip_required=True
        )

    def before_instantiate_classes(self) -> None:
        make_plain(self.config)
        drop_objects(self.config)
        settle_devices(self.config.trainer)
        data = Namespace(data=self.config.data)
        self.validate(data, skip_required=True)  # the model is missing
        self.datamodule: LightningDataModule = self.instantiate(data).data
        if not self.saved:  # a saved config is complete, and its data may not be here
            fill_in(
                self.config.model, self.given.get("model"), facts_of(self.datamodule)
            )
        self.validate(self.config)
        self.config.name = (
            self.config.name or self.config.model.class_path.rpartition(".")[2]
        )

    def validate(self, config: Namespace, skip_required: bool = False) -> None:
        """None must fit its type, too: jsonargparse takes it for "not given", and would
        let `model.lr: null` pass."""
        try:
            self.parser.validate(config, skip_required=skip_required)
            set_parsing_settings(unset_sentinel=True)
            self.parser.validate(config, skip_required=True)
        except (TypeError, ValueError, KeyError) as error:
            self.parser.error(str(error), error)
        finally:
            set_parsing_settings(unset_sentinel=False)

    def build(self, cls: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls(*args, **kwargs)
        except Exception as error:  # jsonargparse turns it into a ValueError of its own
            self.failures.append(error)
            raise

    def instantiate(self, config: Namespace) -> Namespace:
        try:
            return self.parser.instantiate(
                config, instantiators=[(self.build, object, True)]
            )
        except ValueError as error:
            # without a failure of a class, that of a function may be the cause
            failure: Any = (
                self.failures[0] if self.failures else error.__cause__ or error
            )
            file, line = raised_at(failure)
            if file.parent == Path(jsonargparse.__file__).parent:
                raise UserError(explain(str(error), self.parser), status=2) from error
            reason = first_line(failure)
            if isinstance(
                failure, ImportError | OSError
            ):  # a package, a file, a server
                raise UserError(
                    f"what the config names is not there: {reason}"
                ) from failure
            mistakes = (ValueError, AssertionError, MisconfigurationException)
            if isinstance(failure, mistakes) and line.startswith("raise "):
                raise UserError(
                    f"the config does not fit: {reason}", status=2
                ) from failure
            raise failure from None  # a bug in the user's code

    def instantiate_classes(self) -> None:
        config = self.config.clone()
        del config["data"]  # is there already
        config.trainer.logger = None  # made when there is a run's folder
        self.config_init = self.instantiate(config)
        self.model: LightningModule = self.config_init.model
        if str(self.config.trainer.precision) in ("64", "64-true"):
            # Lightning does it after it has read the weights of a checkpoint
            self.model.double()

    def make_trainer(self, first: Sequence[Callback] = (), **arguments: Any) -> Trainer:
        """The Trainer of the flags and configs, with `arguments` on top. `callbacks`
        and `plugins` are added to those of the config. first: Callbacks before all
        others."""
        check_devices(self.config.trainer)
        config = {**self.config_init.trainer, **arguments}
        for key in ("callbacks", "plugins"):
            configured = self.config_init.trainer[key] or []
            configured = configured if isinstance(configured, list) else [configured]
            config[key] = [*configured, *arguments.get(key, [])]
        if isinstance(self.model, BaseModule):  # before all others
            config["callbacks"].insert(0, self.model.curves_callback)
        config["callbacks"] = [*first, *config["callbacks"]]
        has_bar = any(
            isinstance(callback, ProgressBar) for callback in config["callbacks"]
        )
        if config["enable_progress_bar"] is None:
            config["enable_progress_bar"] = (
                has_bar or sys.stdout.isatty() or is_interactive()
            )
        has_ours = config["enable_progress_bar"] and not has_bar
        config["callbacks"].append(TrainingProgressBar() if has_ours else EpochLines())
        if config["val_check_interval"] == 0:
            least = "more than 0 of an epoch, or 1 batch, is the least"
            raise UserError(f"trainer.val_check_interval 0: {least}", status=2)
        if self.config.steps_per_execution > 1:
            self.use_several_steps(config)
        StrategyRegistry.register("dp", strategies.DataParallelStrategy, override=True)
        mistakes = (
            MisconfigurationException,
            ValueError,
            TypeError,
            ImportError,
            RuntimeError,
        )
        try:
            return Trainer(**config)
        except mistakes as error:
            raise UserError(
                f"the trainer flags do not fit: {first_line(error)}", status=2
            ) from error

    def use_several_steps(self, config: dict[str, Any]) -> None:
        num_steps, strategy = self.config.steps_per_execution, config["strategy"]
        if (
            strategy in ("auto", "single_device")
            and num_devices(config["devices"]) == 1
        ):
            config["strategy"] = strategies.SeveralSteps(num_steps)
        else:
            where = (
                f"trainer.strategy {strategy} on trainer.devices {config['devices']}"
            )
            strategies.say_single_steps(num_steps, where)
