"""From a checkpoint back to a run: rebuilt to be used, or to go on."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightbase.cli.training_cli import TrainingCLI
from lightbase.cli.trust import Trust
from lightbase.compat import data_fetcher, forget_train_loader, start_at_epoch_begin
from lightbase.curves import NEVER, gather
from lightbase.data.random_state import random_state, restore_random_state
from lightbase.devices.devices import HasDevices
from lightbase.errors import UserError
from lightbase.module import BaseModule
from lightbase.optim import IMPLEMENTATIONS, grouped
from lightbase.ranks import say
from lightbase.resume.checkpoints import plain, read_checkpoint
from lightbase.run.checks import has_named_optimizer, schedule_at


def load_run(path: Path, flags: Sequence[str] = (), is_trusted: bool = False) -> TrainingCLI:
    """Model and data of a run, rebuilt from the config in its checkpoint, with the checkpoint's
    weights.

    flags: --data.* and --trainer.* flags that differ from those of the run.
    is_trusted: whether the config may construct anything, and not only what `Trust` allows.
    Raises UserError where the file is not a sound checkpoint, names what is not allowed, or does
    not fit today's code.
    """
    checkpoint = read_checkpoint(path)
    config = checkpoint["config"]
    # the devices of the run may not be here; what changes the result stays
    kept = {key: config["trainer"][key] for key in ("precision", "limit_test_batches")}
    if config["trainer"]["accelerator"] == "cpu":
        kept["accelerator"] = "cpu"
    if "initializer" in config["model"].get("init_args", {}):
        config["model"]["init_args"]["initializer"] = None  # its work is done
    trust = None if is_trusted else Trust(path, flags)
    cli = TrainingCLI(flags, saved=config | {"trainer": kept}, trust=trust)
    check_weights(checkpoint, cli.model, path)
    cli.model.on_load_checkpoint(checkpoint)  # as Lightning does
    cli.model.load_state_dict(checkpoint["state_dict"])
    if (data_state := checkpoint.get(type(cli.datamodule).__qualname__)) is not None:
        cli.datamodule.load_state_dict(data_state)
    return cli


def check_resume(
    checkpoint: dict[str, Any], model: LightningModule, config: Namespace, path: Path
) -> None:
    """Raise UserError where the training of the checkpoint cannot go on with this model and
    config."""
    check_weights(checkpoint, model, path)
    if not {"loops", "optimizer_states", "lr_schedulers", "callbacks"} <= checkpoint.keys():
        raise UserError(
            f"checkpoint {path} holds weights only: the state of its training is missing"
        )
    if has_named_optimizer(model) and checkpoint.get("parameter_groups", []) != names_in_groups(
        model
    ):
        raise UserError(
            f"checkpoint {path} was trained with other model.parameter_groups: they must be "
            "the same",
            2,
        )
    max_epochs = config.trainer.max_epochs
    done = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if max_epochs is not None and 0 <= max_epochs < done:
        more = f"give --trainer.max_epochs more than {max_epochs}"
        raise UserError(f"checkpoint {path} has {done} epochs behind it: {more}", 2)
    if max_epochs == done:
        say(f"All {done} epochs are trained already; --trainer.max_epochs {2 * done} would go on")


def check_weights(checkpoint: dict[str, Any], model: LightningModule, path: Path) -> None:
    """Raise UserError if the checkpoint's weights are those of another network."""
    own = model.state_dict()
    for name in {**checkpoint["state_dict"], **own}:
        pair = [checkpoint["state_dict"].get(name), own.get(name)]
        if any(is_lazy(value) for value in pair):
            continue  # has no shape yet
        was, now = (tuple(value.shape) if torch.is_tensor(value) else "missing" for value in pair)
        if was != now:
            config = checkpoint["config"]["model"]
            net = (
                config.get("init_args", {})
                .get("net", {})
                .get("class_path", config.get("class_path"))
            )
            what = f"its {name} is {was}, here it is {now}\nit was trained with {net}"
            raise UserError(f"checkpoint {path} is of another model: {what}")


def as_built(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Change a saved state of an optimiser of the same parameters, so that it steps as it was
    built: `fused` and its like stay, and its moments lie in memory as the weights do now, which a
    fused step relies on."""
    for own, group in zip(
        optimizer.param_groups, saved["param_groups"], strict=False
    ):  # torch says what does not fit
        for name in IMPLEMENTATIONS & {*own, *group}:
            group[name] = own.get(name)
        for weight, index in zip(own["params"], group["params"], strict=False):
            for name, value in saved["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape == weight.shape:
                    saved["state"][index][name] = torch.empty_like(weight, dtype=value.dtype).copy_(
                        value
                    )


class RandomState(Callback):
    """Keeps the random generators' states of all processes in checkpoints. Each process draws its
    own numbers: equal ones would be the same dropout on all of them."""

    resumed: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        devices = [trainer.strategy.root_device]
        if trainer.world_size == 1 and isinstance(trainer.strategy, HasDevices):
            devices = trainer.strategy.parallel_devices
        self.gpus = [device for device in devices if device.type == "cuda"]

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": gather(random_state(self.gpus))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict["ranks"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank = trainer.global_rank
        if rank < len(self.resumed):
            restore_random_state(self.resumed[rank], self.gpus)
            loop: Any = trainer.fit_loop
            if (
                loop.epoch_progress.current.processed == loop.epoch_progress.current.ready
            ):  # an epoch begins
                # again: a stock DataLoader draws its order from the generators
                iter(data_fetcher(trainer))
        elif rank > 0:
            seed = (torch.initial_seed() + rank) % 2**32
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        self.resumed = []


def is_epoch_over(trainer: Trainer) -> bool:
    """Whether all batches of this epoch were trained on."""
    num_batches = trainer.fit_loop.batch_idx + 1
    return num_batches >= trainer.num_training_batches or trainer.is_last_batch


class WholeEpochs(Callback):
    """Lightning takes an epoch that max_steps or max_time cuts short for a whole one, and a resume
    leaves out its rest; with max_steps it takes a resume from an epoch's end for one in its middle,
    and leaves out the next epoch."""

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        is_cut = not is_epoch_over(trainer)
        if is_cut and progress["current"]["processed"] == progress["current"]["ready"]:
            for counts in progress.values():
                counts["processed"] -= 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if loop.restarted_on_epoch_end:
            loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            start_at_epoch_begin(trainer)


class PlateauFirst(Checkpoint):
    """Steps a user's ReduceLROnPlateau at the end of an epoch, by Lightning's rules, before the
    checkpoint is written. Lightning steps it after that, so a resume would lose the step.

    A Checkpoint, so that the module's `on_train_epoch_end` is called before it: that may log the
    value.
    """

    resumed: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # what BaseModule builds itself is stepped by Curves
        others = [config for config in trainer.lr_scheduler_configs if config.frequency != NEVER]
        found = [
            config for config in others if config.reduce_on_plateau and config.interval == "epoch"
        ]
        self.frequencies = [(config, config.frequency) for config in found]
        self.keep_from_lightning()

    def keep_from_lightning(self) -> None:
        for config, _ in self.frequencies:
            config.frequency = sys.maxsize

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        if is_epoch_over(trainer):  # not an epoch that max_steps cuts short
            for config, frequency in self.frequencies:
                config.frequency = frequency
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            self.keep_from_lightning()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        watched = {config.monitor for config, _ in self.frequencies}
        values = trainer.callback_metrics
        checkpoint["watched"] = {name: values[name] for name in watched if name in values}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.resumed = checkpoint.get("watched", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.callback_metrics.update(self.resumed)  # of a validation before the stop


class ResumedOptimizer(Callback):
    """Lets a resumed optimizer step as this run has built it. If the training has another length
    now, optimizer and schedule, both by name, continue where they would be had it always had this
    length. Others stay as Lightning restores them."""

    def on_fit_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:  # states are restored after it
        for optimizer in trainer.optimizers:
            optimizer.register_load_state_dict_pre_hook(as_built)
        if trainer.ckpt_path:
            # `trainer.estimated_stepping_batches` in configure_optimizers makes the loaders before
            # the epoch and the loader's state are restored; without them Lightning makes them anew,
            # and restores both
            forget_train_loader(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if has_named_optimizer(pl_module):
            checkpoint["schedule"] = schedule_options(pl_module)
            checkpoint["parameter_groups"] = names_in_groups(pl_module)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if (
            trainer.state.fn != "fit"
            or not has_named_optimizer(pl_module)
            or "schedule" not in checkpoint
        ):
            return
        before, now = checkpoint["schedule"], schedule_options(pl_module)
        for name, value in before.items():
            if value != now.get(name):
                what = (
                    f"{type(pl_module).__name__} has the {name} {now.get(name)}: a resume "
                    f"goes on with {value}"
                )
                raise UserError(
                    f"{what}\nstart a new run: without --ckpt_path and with --model.weights", 2
                )
        (saved,) = checkpoint["lr_schedulers"] or [{}]
        length, num_steps = (
            saved.get("T_max", saved.get("total_steps")),
            pl_module.num_scheduler_steps(),
        )
        is_given = {"T_max", "total_steps"} & pl_module.scheduler_args.keys()
        if is_given or length is None or num_steps in (None, length):
            return
        optimizer, scheduler = schedule_at(saved["last_epoch"], pl_module, num_steps)
        checkpoint["lr_schedulers"] = [scheduler.state_dict()] if scheduler else []
        saved_groups = checkpoint["optimizer_states"][0]["param_groups"]
        for group, rebuilt in zip(saved_groups, optimizer.param_groups, strict=True):
            group.update({key: value for key, value in rebuilt.items() if key != "params"})
        unit = f"{now['scheduler_interval']}s"
        say(
            f"Resume: {pl_module.scheduler} goes on as in a training of {num_steps} {unit}, "
            f"before {length}"
        )


def names_in_groups(model: BaseModule) -> list[list[str]]:
    """The names of the parameters of each group, where there are groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = (
        grouped(model.named_parameters(), model.parameter_groups) if model.parameter_groups else []
    )
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def schedule_options(model: BaseModule) -> dict[str, Any]:
    """What sets the options of the optimiser's parameter groups, as a checkpoint can hold it."""
    names = ("lr", "optimizer_args", "scheduler", "scheduler_args")
    found: dict[str, Any] = plain({name: getattr(model, name) for name in names})
    found |= {"parameter_groups": plain(model.parameter_groups)} if model.parameter_groups else {}
    return found | {"scheduler_interval": model.step_scheduler_every()}
