"""Training and loading from Python, with objects instead of a command line."""

import inspect
import json
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lightbase.commands.arguments import TRAINER_DEFAULTS
from lightbase.commands.script import find_project, python_errors
from lightbase.core import run as command
from lightbase.core.command_line import CommandLine
from lightbase.core.compat import quiet_lightning
from lightbase.core.config import make_plain
from lightbase.core.devices import cpu_threads, settle_devices, short_device_errors
from lightbase.core.errors import say
from lightbase.core.folder import flatten
from lightbase.core.form import state_errors
from lightbase.core.objects import LOST, config_of, is_plain
from lightbase.core.resume import (
    find_restart,
    go_on,
    load_data_state,
    load_run,
    load_state,
    read_checkpoint,
)
from lightbase.core.training_cli import TrainingCLI


def load(
    path: str | Path,
    module: LightningModule | None = None,
    data: LightningDataModule | None = None,
    trust: bool = False,
) -> tuple[LightningModule, LightningDataModule]:
    """The module and the data of a checkpoint, with its weights, on the CPU.

    module, data: Objects that take the weights and the state of the checkpoint. Unless
        both are given, they are built from the config in it, which names classes: it
        has to be a file in your folder of runs.
    trust: Take another file for one of yours.
    Raises UserError for a file that is no sound checkpoint, is somebody else's, or fits
    other classes.
    """
    find_project()
    path = Path(path)
    if module is None or data is None:
        run = load_run(path, trust=trust)
        return run.model, run.datamodule
    checkpoint = read_checkpoint(path)
    with state_errors(path):
        module.on_load_checkpoint(checkpoint)
        load_state(checkpoint, module, path)
        load_data_state(checkpoint, data)
    return module, data


def train(
    module: LightningModule,
    data: LightningDataModule,
    trust: bool = False,
    **flags: Any,
) -> dict[str, Any]:
    """Train and test these objects as `python scripts/train.py` does, with the same
    folder, curves and checkpoints. Return what metrics.json holds; `module` has the
    best weights then.

    trust: Continue a training also from a file that is not in your folder of runs.
    flags: Those of train.py by their last names, and the arguments of Lightning's
        Trainer: max_epochs=3, name="try", monitor="val/loss", ckpt_path="last",
            callbacks=[EMA()].
    Raises UserError for a mistake; after Ctrl-C, when the state is saved,
    KeyboardInterrupt.
    """
    find_project()
    quiet_lightning()
    flags = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in flags.items()
    }
    objects = {name: value for name, value in flags.items() if not is_plain(value)}
    of_trainer = inspect.signature(Trainer).parameters
    args = []
    for name, value in flags.items():
        if name not in objects:
            flag = f"trainer.{name}" if name in of_trainer else name
            args.append(
                f"--{flag}={value if isinstance(value, str) else json.dumps(value)}"
            )
    if trust:
        args.append("--trust_checkpoint=true")
    if "name" not in flags:
        args.append(f"--name={type(module).__name__}")
    way_out = '; the same call with ckpt_path="last" goes on'
    with python_errors(way_out), short_device_errors():
        line = CommandLine(args)
        restart = find_restart(line)
        saved = restart.start_config if restart else None
        cli = ObjectCLI(module, data, line.flag_args, objects, saved)
        if restart:
            go_on(restart, cli, line)
        with cpu_threads(cli.config.num_threads):
            return command.train(cli)


class ObjectCLI(TrainingCLI):
    """A training of objects: the command line has the other flags.

    objects: Arguments of the Trainer that a config cannot hold, such as callbacks.
    """

    def __init__(
        self,
        module: LightningModule,
        data: LightningDataModule,
        args: list[str],
        objects: dict[str, Any],
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.objects = (module, data)
        self.trainer_objects = objects
        super().__init__(args, saved)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults(
            {f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()}
        )
        for name in ("model", "data"):
            parser.add_argument(f"--{name}", type=dict)

    def before_instantiate_classes(self) -> None:
        module, self.datamodule = self.objects
        self.config.model, self.config.data = (
            config_of(module),
            config_of(self.datamodule),
        )
        make_plain(self.config)
        settle_devices(self.config.trainer)
        self.validate(self.config)
        config = {"model": self.config.model, "data": self.config.data}
        names = [
            key for key, text in flatten(config).items() if str(text).startswith(LOST)
        ]
        if names := [*names, *self.trainer_objects]:
            what = (
                "evaluate.py and a resume cannot build them; in Python give them again"
            )
            say(f"Objects that the config cannot hold: {', '.join(names)}: {what}")

    def instantiate_classes(self) -> None:
        config = self.config.clone()
        config.trainer.logger = None  # made when there is a run's folder
        self.config_init = self.instantiate(Namespace(trainer=config.trainer))
        vars(self.config_init.trainer).update(self.trainer_objects)
        self.model = self.objects[0]
