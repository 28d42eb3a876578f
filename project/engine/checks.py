"""What must hold before a run starts, and the words for it where it does not."""

import json
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning import LightningDataModule, LightningModule
from torch.nn.parameter import is_lazy

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError, did_you_mean
from project.base.rank import say


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


def check_network(model: LightningModule, data: TensorDataModule, split: str = "train") -> None:
    """Try `model.net`, where there is one, on two samples of a split, and print its size.

    Raises UserError if it cannot take them or has fewer outputs than there are classes.
    """
    net = getattr(model, "net", None)
    if not isinstance(net, torch.nn.Module):
        return
    samples = data.splits[split]
    inputs = data.normalize(samples.__getitems__(list(range(min(2, len(samples)))))[0])
    was_training = net.training
    with torch.no_grad():
        try:
            outputs = net.eval()(inputs)
        except RuntimeError as error:
            file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if Path(torch.__file__).parent not in file.parents:  # a bug of the network's own
                raise
            raise UserError(
                f"{type(net).__name__} cannot take the samples {tuple(inputs.shape[1:])} of {type(data).__name__}: "
                f"{str(error).splitlines()[0]}\nchange the arguments of model.net or of data"
            ) from error
    net.train(was_training)
    if outputs.shape[-1] < len(data.classes):
        raise UserError(
            f"{type(net).__name__} has {outputs.shape[-1]} outputs for the {len(data.classes)} classes of "
            f"{type(data).__name__}\nchange the arguments of model.net or of data"
        )
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    say(f"Network: {type(net).__name__}, {num_parameters:,} parameters")


def check_selection(config: Any, model: LightningModule, data: LightningDataModule) -> bool:
    """Whether epochs can be compared by a validation metric. Nothing is ever selected on test data."""
    on_test_data = getattr(data, "val_fraction", None) == 0
    if on_test_data:
        say("Validation: none (data.val_fraction 0); val/ is measured on the test set, best.ckpt is the last epoch")
    validates = not on_test_data and config.trainer.limit_val_batches != 0
    for flag, value in (("patience", config.patience), ("model.scheduler", getattr(model, "scheduler", None))):
        if not validates and value is not None and (flag == "patience" or value == "ReduceLROnPlateau"):
            raise UserError(
                f"--{flag} {value} needs validation data: give --data.val_fraction and limit_val_batches", 2
            )
    return validates


def check_resume(
    checkpoint: dict[str, Any], model: LightningModule, data: Any, max_epochs: int | None, path: Path
) -> None:
    """Raise UserError where the training of the checkpoint cannot go on with this config."""
    check_weights(checkpoint, model, path)
    steps, own_steps = (checkpoint.get("steps_per_execution", 1), getattr(data, "steps_per_execution", 1))
    if steps != own_steps:  # Lightning's counters mean something else then
        raise UserError(
            f"checkpoint {path} was trained with {steps} steps at a time, here it would be {own_steps}:\n"
            f"go on with --steps_per_execution {steps}, and with the trainer flags that it had"
        )
    if not {"loops", "optimizer_states", "lr_schedulers", "callbacks"} <= checkpoint.keys():
        raise UserError(f"checkpoint {path} holds weights only: the state of its training is missing")
    saved = checkpoint["config"]["model"].get("init_args", {}).get("optimizer")
    own = getattr(model, "optimizer", saved)
    if saved != own:
        raise UserError(f"checkpoint {path} was trained with {saved}, whose state model.optimizer {own} cannot use", 2)
    done = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if max_epochs is not None and 0 <= max_epochs < done:
        raise UserError(
            f"checkpoint {path} has {done} epochs behind it: give --trainer.max_epochs more than {max_epochs}", 2
        )
    if max_epochs == done:
        say(f"All {done} epochs are trained already; --trainer.max_epochs {2 * done} would go on")


def check_weights(checkpoint: dict[str, Any], model: LightningModule, path: Path) -> None:
    """Raise UserError if the checkpoint's weights are those of another network."""
    saved = {name: tuple(getattr(value, "shape", ())) for name, value in checkpoint["state_dict"].items()}
    # a lazy layer has no shape yet
    own = {
        name: saved.get(name) if is_lazy(value) else tuple(value.shape) for name, value in model.state_dict().items()
    }
    if saved == own:
        return
    name = next(name for name in {**saved, **own} if saved.get(name) != own.get(name))
    raise UserError(
        f"checkpoint {path} is of another model: its {name} is {saved.get(name, 'missing')}, "
        f"here it is {own.get(name, 'missing')}\nit was trained with {_net_name(checkpoint['config'])}"
    )


def _net_name(config: dict[str, Any]) -> Any:
    return config["model"].get("init_args", {}).get("net", {}).get("class_path", config["model"].get("class_path"))
