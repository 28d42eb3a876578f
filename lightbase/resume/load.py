"""A run rebuilt from its checkpoint: for evaluate.py, predict.py and export.py, or to train on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import LightningModule
from torch.nn.parameter import is_lazy

from lightbase.cli.command_line import CommandLine
from lightbase.cli.training_cli import TrainingCLI
from lightbase.cli.trust import Trust
from lightbase.errors import UserError
from lightbase.module import has_named_optimizer
from lightbase.ranks import say
from lightbase.resume.checkpoints import read_checkpoint
from lightbase.resume.state import names_in_groups


def load_run(path: Path, flags: Sequence[str] = (), is_trusted: bool = False) -> TrainingCLI:
    """Model and data of a run, rebuilt from the config in its checkpoint, with the checkpoint's
    weights.

    flags: --data.* and --trainer.* flags that differ from those of the run.
    is_trusted: Whether the config may construct anything, and not only what `Trust` allows.
    Raises UserError where the file is not a sound checkpoint, names what is not allowed, or does
    not fit today's code.
    """
    checkpoint = read_checkpoint(path)
    config = checkpoint["config"]
    # the devices of the run may not be here; what changes the result stays
    trainer = {key: config["trainer"][key] for key in ("precision", "limit_test_batches")}
    if config["trainer"]["accelerator"] == "cpu":
        trainer["accelerator"] = "cpu"
    if "initializer" in config["model"].get("init_args", {}):
        config["model"]["init_args"]["initializer"] = None  # its work is done
    line = CommandLine(flags)
    trust = None if is_trusted else Trust(path, line)
    cli = TrainingCLI(line.flag_args, saved=config | {"trainer": trainer}, trust=trust)
    check_weights(checkpoint, cli.model, path)
    cli.model.on_load_checkpoint(checkpoint)  # as Lightning does
    cli.model.load_state_dict(checkpoint["state_dict"])
    data_state = checkpoint.get(type(cli.datamodule).__qualname__)
    if data_state is not None:
        cli.datamodule.load_state_dict(data_state)
    return cli


def check_weights(checkpoint: dict[str, Any], model: LightningModule, path: Path) -> None:
    """Raise UserError if the weights in the checkpoint are of another network."""
    saved, built = checkpoint["state_dict"], model.state_dict()
    for name in {**saved, **built}:
        pair: list[Any] = [saved.get(name), built.get(name)]
        if any(is_lazy(value) for value in pair):
            continue  # has no shape yet
        old, new = (tuple(value.shape) if torch.is_tensor(value) else "missing" for value in pair)
        if old == new and not torch.can_cast(saved[name].dtype, built[name].dtype):
            old, new = saved[name].dtype, built[name].dtype
        if old != new:
            config = checkpoint["config"]["model"]
            net = config.get("init_args", {}).get("net", {})
            trained = net.get("class_path", config.get("class_path"))
            what = f"its {name} is {old}, here it is {new}\nit was trained with {trained}"
            raise UserError(f"checkpoint {path} is of another model: {what}")


def check_resume(
    checkpoint: dict[str, Any], model: LightningModule, config: Namespace, path: Path
) -> None:
    """Raise UserError where the training of the checkpoint cannot go on with this model and
    config."""
    check_weights(checkpoint, model, path)
    if not {"loops", "optimizer_states", "lr_schedulers", "callbacks"} <= checkpoint.keys():
        what = "the state of its training is missing"
        raise UserError(f"checkpoint {path} holds weights only: {what}")
    groups = names_in_groups(model) if has_named_optimizer(model) else None
    if groups is not None and groups != checkpoint.get("parameter_groups", []):
        what = "was trained with other model.parameter_groups: they must be the same"
        raise UserError(f"checkpoint {path} {what}", 2)
    max_epochs = config.trainer.max_epochs
    done = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if max_epochs is not None and 0 <= max_epochs < done:
        more = f"give --trainer.max_epochs more than {max_epochs}"
        raise UserError(f"checkpoint {path} has {done} epochs behind it: {more}", 2)
    if max_epochs == done:
        say(f"All {done} epochs are trained already; --trainer.max_epochs {2 * done} would go on")
