"""Trials before a run starts: of a config file, and of the network on its data."""

import json
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning import LightningModule
from torch import Tensor

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError, did_you_mean
from project.base.rank import say
from project.base.system import System
from project.engine.devices import num_gpus, parse_devices


def check_config_file(path: Path) -> None:
    """Raises UserError for a config that is missing, unreadable or not a mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        json.dumps(content, default=str, skipkeys=True)
    except OSError as error:
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.y*ml")])
        raise UserError(f"--config {path}: {error.strerror}{near}", 2) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--config {path} is not a text file; give a YAML file such as configs/mnist_mlp.yaml", 2
        ) from error
    except ValueError as error:
        raise UserError(f"--config {path}: a part of it refers to itself", 2) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(
            f"--config {path}{where}: not valid YAML: {str(getattr(error, 'problem', error)).splitlines()[0]}", 2
        ) from error
    if not isinstance(content, dict):
        what = "is empty" if content is None else f"holds a {type(content).__name__}, not keys with values"
        raise UserError(f"--config {path} {what}; configs/mnist_mlp.yaml is an example", 2)
    for key in ("trainer", "model", "data"):
        if key in content and not isinstance(content[key], dict | str):
            raise UserError(f"--config {path}: {key} is {content[key]!r}, where keys with values belong", 2)
    if isinstance(content.get("trainer"), str):
        raise UserError(f"--config {path}: trainer is {content['trainer']!r}, where keys with values belong", 2)


def trial_device(trainer: Any) -> torch.device | None:
    """Where the Trainer's flags will have the network; None where this process must leave the GPU to its children."""
    if trainer.accelerator == "cpu" or not num_gpus():
        return torch.device("cpu")
    if str(trainer.strategy).startswith(("ddp_fork", "ddp_notebook")):
        return None
    indices = parse_devices(trainer.devices)
    index = indices[0] if isinstance(indices, list) else 0
    return torch.device("cuda", index) if torch.cuda.is_available() else torch.device("mps")


def try_network(model: LightningModule, data: TensorDataModule, trainer: Any, split: str = "train") -> None:
    """Try `model.net`, where there is one, on two samples of a split on the run's device, and print its size.

    trainer: the Trainer's flags.
    Raises UserError if it cannot take them or has fewer outputs than there are classes.
    """
    device = trial_device(trainer)
    if not isinstance(model, System) or device is None:
        return
    net, samples = model.net, data.splits[split]
    inputs = samples.__getitems__(list(range(min(2, len(samples)))))[0]
    if not isinstance(inputs, Tensor):
        return
    was_training = net.training
    with torch.no_grad():
        inputs = data.normalize(inputs.to(device))
        try:
            outputs = net.to(device).eval()(inputs)
        except RuntimeError as error:
            file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if Path(torch.__file__).parent not in file.parents:  # a bug of the network's own
                raise
            raise UserError(
                f"{type(net).__name__} cannot take the samples {tuple(inputs.shape[1:])} of {type(data).__name__}: "
                f"{str(error).splitlines()[0]}\nchange the arguments of model.net or of data, "
                "or leave the trial out: --try_network false"
            ) from error
    net.train(was_training).to("cpu")  # where Lightning, and the processes that it starts, expect it
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] < (data.num_classes or 0):
        raise UserError(
            f"{type(net).__name__} has {outputs.shape[1]} outputs for the {data.num_classes} classes of "
            f"{type(data).__name__}\nchange the arguments of model.net or of data, or use --try_network false"
        )
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    say(f"Network: {type(net).__name__}, {num_parameters:,} parameters")
