"""`lightbase.train` and `lightbase.load`, for scripts and notebooks.

`train` does what scripts/train.py does, with a config file or with objects.
"""

import inspect
import json
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule, Trainer

from lightbase.commands import train as command
from lightbase.commands.script import find_project, python_errors
from lightbase.core.build import begin, build_rest
from lightbase.core.compat import quiet_lightning
from lightbase.core.device_errors import short_device_errors
from lightbase.core.errors import UserError, say
from lightbase.core.load import load_run, read_checkpoint, restore
from lightbase.core.resume import check_restart, find_restart, resumed_spec
from lightbase.core.spec import CommandLine, read_spec


def load(
    path: str | Path,
    module: LightningModule | None = None,
    data: LightningDataModule | None = None,
    trust: bool = False,
) -> tuple[LightningModule, LightningDataModule]:
    """Return the module and the data of a checkpoint, with its weights, on the CPU.

    module, data: Objects that take the weights and the state of the checkpoint. Unless
        both are given, they are built from the config in it. The config names classes,
        so the file has to be in your folder of runs.
    trust: Open a file from anywhere. Use it only for a file that you would run as a
        program.
    Raise UserError for a file that is no sound checkpoint, is somebody else's, or fits
    other classes.
    """
    find_project()
    path = Path(path)
    if module is None or data is None:
        _, module, data = load_run(path, trust=trust)
    else:
        restore(read_checkpoint(path), module, data, path)
    return module, data


def train(
    module: LightningModule | str | Path,
    data: LightningDataModule | dict[str, Any] | None = None,
    trust: bool = False,
    **flags: Any,
) -> dict[str, Any]:
    """Train and test as `python scripts/train.py` does, with the same folder, curves
    and checkpoints. Return the content of metrics.json.

    module, data: Objects; `module` has the best weights afterwards. Or a config file
        and settings that differ from it, by the names of flags:
        `train("configs/mnist_mlp.yaml", {"model.lr": 0.01})`. Every script can open
        such a run. `lightbase.load(path, module, data)` opens a run of objects.
    trust: Continue a training also from a file that is not in your folder of runs.
    flags: Flags of train.py by their last names, and arguments of Lightning's Trainer:
        max_epochs=3, name="try", monitor="val/loss", ckpt_path="last",
        callbacks=[EMA()].
    Raise UserError for a mistake. After Ctrl-C save the state, then raise
    KeyboardInterrupt.
    """
    find_project()
    quiet_lightning()
    way_out = '; the same call with ckpt_path="last" goes on'
    flags = {"trust_checkpoint": trust, **flags}
    with python_errors(way_out), short_device_errors():
        if isinstance(module, str | Path):
            settings: Any = data or {}
            args, objects = as_arguments(settings | flags)
            spec, model, data = command.parse([f"--config={module}", *args])
            spec.trainer |= objects
            return command.train(spec, model, data)
        if not isinstance(data, LightningDataModule):
            raise UserError("lightbase.train takes a module and its data module")
        args, objects = as_arguments({"name": type(module).__name__, **flags})
        line = CommandLine(args)
        restart = find_restart(line)
        classes = {"model": class_config(module), "data": class_config(data)}
        if restart:
            spec = resumed_spec(restart, line, classes)
        else:
            spec = read_spec([classes], line, None, is_saved=True)
        begin(spec, spec.config)
        build_rest(spec, Namespace(trainer=spec.config.trainer))
        spec.trainer |= objects
        say("Scripts cannot open a run of objects; lightbase.load(path, module, data)")
        if restart:
            check_restart(restart, spec, module, data)
        return command.train(spec, module, data)


def class_config(value: object) -> dict[str, str]:
    """Return the config of a Python object: only its class."""
    return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}"}


def as_arguments(settings: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return (arguments of a command line, objects).

    A value that JSON can hold becomes an argument such as "--model.lr=0.01". A command
    line cannot hold other values, such as callbacks. They are returned by the names of
    the Trainer's arguments.

    settings: The values by the names of flags. An argument of Lightning's Trainer, such
        as max_epochs, is a flag without "trainer.", too.
    """
    trainer_arguments = inspect.signature(Trainer).parameters
    args: list[str] = []
    objects: dict[str, Any] = {}
    for name, value in settings.items():
        flag = name
        if name in trainer_arguments:
            flag = f"trainer.{name}"
        text = value
        if not isinstance(value, str | Path):
            try:
                text = json.dumps(value)
            except TypeError:
                objects[name.removeprefix("trainer.")] = value
                continue
        args.append(f"--{flag}={text}")
    return args, objects
