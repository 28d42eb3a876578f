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

EXAMPLE = "configs/mnist_mlp.yaml is an example"


def check_config_file(path: Path) -> None:
    """Raises UserError for a config that is missing, unreadable or not a mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        json.dumps(content, default=str, skipkeys=True)  # refuses a part that refers to itself
    except OSError as error:
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.y*ml")])
        raise UserError(f"--config {path}: {error.strerror}{near}", 2) from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--config {path}: not valid YAML: {reason}\n{EXAMPLE}", 2) from error
    if not isinstance(content, dict):
        what = "is empty" if content is None else f"holds a {type(content).__name__}, not keys with values"
        raise UserError(f"--config {path} {what}; {EXAMPLE}", 2)
    if not isinstance(content.get("trainer", {}), dict):  # jsonargparse would take it
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
    """Try `model.net` on two samples of a split on the device of the Trainer's flags, and print its size.

    Raises UserError if it cannot take them or has fewer outputs than there are classes.
    """
    device, samples = trial_device(trainer), data.splits[split]
    inputs = samples.__getitems__(list(range(min(2, len(samples)))))[0]
    if not isinstance(model, System) or not isinstance(inputs, Tensor) or device is None:
        return
    net, name = model.net, type(model.net).__name__
    trained = [module for module in net.modules() if module.training]  # a frozen part may not be
    way_out = "change the arguments of model.net or of data, or use --try_network false"
    with torch.no_grad():
        inputs = data.normalize(inputs.to(device))
        try:
            outputs = net.to(device).eval()(inputs)
        except RuntimeError as error:
            file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if Path(torch.__file__).parent not in file.parents:  # a bug of the network's own
                raise
            cannot = f"{name} cannot take the samples {tuple(inputs.shape[1:])} of {type(data).__name__}"
            raise UserError(f"{cannot}: {str(error).splitlines()[0]}\n{way_out}") from error
    net.to("cpu")  # where Lightning, and the processes that it starts, expect it
    for module in trained:
        module.training = True
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] < (data.num_classes or 0):
        classes = f"the {data.num_classes} classes of {type(data).__name__}"
        raise UserError(f"{name} has {outputs.shape[1]} outputs for {classes}\n{way_out}")
    say(f"Network: {name}, {sum(parameter.numel() for parameter in net.parameters()):,} parameters")
