"""From flags and configs to model, data and Trainer."""

import contextlib
import copy
import os
import platform
import secrets
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightbase.cli.config import drop_objects, facts_of, fill_in
from lightbase.cli.messages import explain, is_of_library, is_of_parser, pretrained_hint
from lightbase.cli.parser import Parser, Seed, make_paths_absolute, make_plain, validate_nulls
from lightbase.cli.trust import Trust
from lightbase.compat import arguments_of, parse_unvalidated
from lightbase.devices import data_parallel
from lightbase.devices.devices import check_devices, has_bf16, num_devices, num_gpus, settle_devices
from lightbase.devices.steps import SeveralSteps, say_single_steps
from lightbase.errors import UserError, first_line, is_raised_on_purpose
from lightbase.folder import PROJECT
from lightbase.module import BaseModule
from lightbase.ranks import rank, say
from lightbase.resume.changes import Restart
from lightbase.watch.progress import EpochLines, TrainingProgressBar


class TrainingCLI(LightningCLI):
    """Flags and configs, parsed; then `model` and `datamodule`, built. `make_trainer` builds the
    Trainer.

    args: the command line.
    saved: a config to start from, as a checkpoint holds it, where args has no --config.
    trust: what it may construct; None: anything.
    """

    def __init__(
        self, args: Sequence[str], saved: dict[str, Any] | None = None, trust: Trust | None = None
    ) -> None:
        self.saved, self.trust = saved, trust
        self.restart: Restart | None = None  # what --ckpt_path asked for
        self.failures: list[Exception] = []
        # a class of the user's is found as with python -m; the script's own folder is scripts/
        sys.path[:0] = [
            folder for folder in (str(Path.cwd()), str(PROJECT.root)) if folder not in sys.path
        ]
        with self.import_rules():
            super().__init__(
                *(LightningModule, LightningDataModule),
                subclass_mode_model=True,
                subclass_mode_data=True,
                run=False,
                args=list(args),
                parser_class=Parser,
                parser_kwargs={"allow_abbrev": False},
                trainer_defaults={
                    "max_epochs": 10,
                    "log_every_n_steps": 100,
                    "enable_model_summary": False,
                },
                save_config_callback=None,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )

    def import_rules(self) -> contextlib.AbstractContextManager[None]:
        """Around what reads the config: of a config that is not trusted, only what it may construct
        is imported."""
        return self.trust.enforced(self.saved) if self.trust else contextlib.nullcontext()

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything", type=bool | Seed, default=42, help="True draws one."
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        def add(flag: str, kind: Any, default: Any, help: str) -> None:
            parser.add_argument(flag, type=kind, default=default, help=help)

        add(
            "--name",
            str | None,
            None,
            "The run's folder is ROOT/NAME/version_N; the model's class unless given.",
        )
        add(
            "--ckpt_path",
            str | None,
            None,
            "Resume from `last` or `best` of the newest run NAME, or from a file.",
        )
        add(
            "--trust_checkpoint",
            bool,
            False,
            "Construct whatever the config in the file of --ckpt_path names.",
        )
        add(
            "--monitor",
            str | None,
            "auto",
            "What best.ckpt goes by; auto: the first metric; null: the last epoch.",
        )
        add(
            "--monitor_mode",
            Literal["min", "max"] | None,
            None,
            "Which is better; the metric's own unless given.",
        )
        add(
            "--patience",
            PositiveInt | None,
            None,
            "Stop after so many validations without a better --monitor.",
        )
        add(
            "--steps_per_execution",
            PositiveInt,
            1,
            "Steps in one turn of the loop; 20 is faster for small nets.",
        )
        add("--try_network", bool, True, "On two samples, before the run starts.")
        add("--stop_on_nan", bool, True, "End the run at a loss or weight that is NaN or infinite.")
        add("--num_threads", PositiveInt | None, None, "CPU threads; all cores unless given.")
        add("--device_monitor", bool, True, "Curves of the devices.")
        add("--step_timer", bool, True, "Shares of a step's time.")
        add(
            "--gradient_norm",
            bool | Literal["modules"],
            False,
            "A curve; modules: one of each part of the network.",
        )
        add("--histograms_every_n_epochs", NonNegativeInt, 0, "Of the weights; 0: none.")
        add("--figures_every_n_epochs", NonNegativeInt, 5, "0: no pictures.")
        add("--keep_every_epoch", bool, False, "Keep all checkpoints.")
        for action in arguments_of(parser):
            if isinstance(action.default, bool):  # --trainer.fast_dev_run alone
                action.nargs, action.const = "?", True

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # not validated before the data has filled in what it knows
        saved = copy.deepcopy(self.saved)  # parsing changes it
        start = {"namespace": parse_unvalidated(parser.parse_object, saved)} if saved else {}
        self.config = parse_unvalidated(parser.parse_args, args, **copy.deepcopy(start))
        self.given = parse_unvalidated(parser.parse_args, args, **start, defaults=False)
        if self.config.seed_everything is None:  # a blank in a YAML: Lightning would take 0
            raise UserError(
                "seed_everything: null is no seed; give a number, or true to draw one", 2
            )
        if self.config.seed_everything is True:  # Lightning would always take 0
            drawn = str(secrets.randbelow(2**32))
            # the first process hands its seed to those that it starts
            self.config.seed_everything = int(
                os.environ.get("PL_GLOBAL_SEED", drawn) if rank() > 0 else drawn
            )

    def before_instantiate_classes(self) -> None:
        if self.trust:
            self.trust.check(self.config)
        make_paths_absolute(self.config)
        make_plain(self.config)
        drop_objects(self.config)
        settle_devices(self.config.trainer)
        with warnings.catch_warnings():
            # jsonargparse 5 drops it; what replaces it holds for all parsers of the process
            warnings.simplefilter("ignore", DeprecationWarning)
            self.parser.add_instantiator(self.build, object, subclasses=True)
        data = Namespace(data=self.config.data)
        self.validate(data, skip_required=True)  # the model is missing
        self.datamodule: LightningDataModule = self.instantiate(data).data
        if not self.saved:  # a saved config is complete, and its data may not be here
            fill_in(self.config.model, self.given.get("model"), facts_of(self.datamodule))
        self.validate(self.config)
        self.config.name = self.config.name or self.config.model.class_path.rpartition(".")[2]

    def validate(self, config: Namespace, skip_required: bool = False) -> None:
        try:
            self.parser.validate(config, skip_required=skip_required)
            validate_nulls(self.parser, config)
        except (TypeError, ValueError, KeyError) as error:
            self.parser.error(str(error), error)

    def read(self, files: Sequence[Path]) -> dict[str, Any]:
        """What config files themselves say."""
        args = [f"--model={self.config.model.class_path}", *(f"--config={file}" for file in files)]
        found = parse_unvalidated(self.parser.parse_args, args, defaults=False)
        said: dict[str, Any] = yaml.safe_load(self.parser.dump(found, skip_validation=True))
        return said

    def check_devices(self) -> None:
        """Raise UserError where the flags ask for devices that are not there."""
        trainer = self.config.trainer
        check_devices(trainer.accelerator, trainer.devices, trainer.strategy, trainer.num_nodes)

    def build(
        self, cls: type, *args: Any, applied_instantiation_links: Any = None, **kwargs: Any
    ) -> Any:
        try:
            return cls(*args, **kwargs)
        except Exception as error:  # jsonargparse turns it into a ValueError of its own
            self.failures.append(error)
            raise

    def instantiate(self, config: Namespace) -> Namespace:
        try:
            with self.import_rules():
                return self.parser.instantiate(config)
        except ValueError as error:
            failure = next(
                iter(self.failures), error.__cause__
            )  # the latter of a function, or the parser's own
            if not isinstance(failure, Exception) or is_of_parser(failure):
                raise UserError(explain(str(error), self.parser), 2) from error
            # a constructor's word for an argument that it cannot take, or for a package or file
            # that it wants
            on_purpose = isinstance(failure, ValueError | AssertionError) and is_raised_on_purpose(
                failure
            )
            of_function = not self.failures and is_of_library(failure)
            if on_purpose or of_function or isinstance(failure, ImportError | OSError):
                is_outside = isinstance(failure, OSError)  # a file, a server, the internet
                what = (
                    "what the config names cannot be had"
                    if is_outside
                    else "the config does not fit"
                )
                hint = pretrained_hint(config.get("model"))
                raise UserError(
                    f"{what}: {first_line(failure)}{hint}", 1 if is_outside else 2
                ) from failure
            raise failure from None

    def instantiate_classes(self) -> None:
        config = self.config.clone()
        del config["data"]  # is there already
        config.trainer.logger = None  # made when there is a run's folder
        self.config_init = self.instantiate(config)
        self.model: LightningModule = self.config_init.model

    def make_trainer(self, **arguments: Any) -> Trainer:
        """The Trainer of the flags and configs, with `arguments` on top; callbacks and plugins add
        to theirs."""
        self.check_devices()
        config = {**self.config_init.trainer, **arguments}
        for key in ("callbacks", "plugins"):
            own = self.config_init.trainer[key] or []
            config[key] = [*(own if isinstance(own, list) else [own]), *arguments.get(key, [])]
        if isinstance(self.model, BaseModule):  # before all others
            config["callbacks"].insert(0, self.model.curves_callback)
        own_bar = any(isinstance(callback, ProgressBar) for callback in config["callbacks"])
        if config["enable_progress_bar"] is None:
            config["enable_progress_bar"] = own_bar or sys.stdout.isatty()
        if not own_bar:
            config["callbacks"].append(
                TrainingProgressBar() if config["enable_progress_bar"] else EpochLines()
            )
        if config["val_check_interval"] == 0:
            raise UserError(
                "trainer.val_check_interval 0: more than 0 of an epoch, or 1 batch, is the least", 2
            )
        on_cpu = config["accelerator"] == "cpu" or not num_gpus()
        if config["precision"] in ("16-mixed", "16", 16) and on_cpu:
            say(
                f"Precision {config['precision']} needs a GPU: training in bf16-mixed on the "
                "CPU instead"
            )
            config["precision"] = "bf16-mixed"
        if (
            "bf16" in str(config["precision"])
            and on_cpu
            and not has_bf16()
            and "86" in platform.machine()
        ):
            say(
                f"This CPU has no bf16 instructions: {config['precision']} is up to ten times "
                "slower here than 32-true"
            )
        if (asked := self.config.steps_per_execution) > 1:
            if (
                config["strategy"] in ("auto", "single_device")
                and num_devices(config["devices"]) == 1
            ):
                config["strategy"] = SeveralSteps(asked)
            else:
                say_single_steps(
                    asked,
                    f"trainer.strategy {config['strategy']} on trainer.devices {config['devices']}",
                )
        data_parallel.register()
        try:
            return Trainer(**config)
        except (
            MisconfigurationException,
            ValueError,
            TypeError,
            ImportError,
            RuntimeError,
        ) as error:
            raise UserError(f"the trainer flags do not fit: {first_line(error)}", 2) from error
