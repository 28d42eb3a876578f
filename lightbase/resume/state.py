"""The checkpoints of a run: written whole or not at all, by the run's rules, with all the state
that makes a resume exact."""

import io
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import (
    Checkpoint,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightbase.cli.command_line import renamed
from lightbase.compat import data_fetcher, forget_train_loader, start_at_epoch_begin
from lightbase.curves import gather
from lightbase.devices.devices import devices_of
from lightbase.errors import UserError, say
from lightbase.folder import write_whole
from lightbase.module import BaseModule, has_named_optimizer
from lightbase.optim import IMPLEMENTATIONS, num_scheduler_steps, schedule_at
from lightbase.transfer import load_checked


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and moves it there, so that a file with that name is
    always whole. Lightning's move may be a copy, which a crash cuts short."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        for key in {"hyper_parameters", "datamodule_hyper_parameters"} & checkpoint.keys():
            # for a person who reads the file: runs are rebuilt from their config
            checkpoint[key] = plain(checkpoint[key])
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        way_out = "make room, then start again, or continue with --ckpt_path last"
        write_whole(path, buffer.getbuffer(), way_out)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return load_checked(Path(path))  # type: ignore[no-any-return]


def plain(value: Any) -> Any:
    """The value with everything in it that safe loading refuses, such as paths, turned into
    text."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), str)
    return value if value is None or type(value) is torch.Tensor else kind(value)


class RunCheckpoint(ModelCheckpoint):
    """Writes FILENAME.ckpt when an epoch ends: of the best epoch by `monitor`, or of the newest
    without a monitor.

    every_n_epochs: None writes after every validation.
    """

    def __init__(
        self,
        folder: Path,
        filename: str,
        monitor: str | None = None,
        mode: str = "min",
        keep_all: bool = False,
        every_n_epochs: int | None = 1,
    ) -> None:
        super().__init__(
            dirpath=folder,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=-1 if keep_all else 1,
            every_n_epochs=every_n_epochs,
            # at the very end, so that a resumed run starts with the next epoch
            save_on_train_epoch_end=every_n_epochs is not None,
            auto_insert_metric_name=False,
            enable_version_counter=False,  # the file is replaced, not numbered
        )
        self.step_at_epoch_end = 0

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}/{self.filename}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            is_late = isinstance(callback, StochasticWeightAveraging) or (
                isinstance(callback, WeightAveraging) and callback.should_update(epoch_idx=10**9)
            )
            if is_late:
                what = f"{type(callback).__name__} averages weights after an epoch's validation"
                raise UserError(f"{what}\nuse WeightAveraging of Lightning, by steps", 2)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # without a validation yet, as with max_steps in the first epoch, there is nothing to
        # compare
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)
            self.step_at_epoch_end = trainer.global_step

    def on_exception(self, trainer: Trainer, _: Any, exception: BaseException) -> None:
        # Lightning cannot go on from the middle of a validation; and when an epoch has ended, the
        # checkpoint is there already
        between_batches = trainer.training and self.step_at_epoch_end != trainer.global_step
        if isinstance(exception, SIGTERMException) and self.filename == "last" and between_batches:
            trainer.save_checkpoint(Path(str(self.dirpath), "last.ckpt"), weights_only=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best score so far where the run goes on in its folder, also if that has
        been moved."""
        if not Path(str(self.dirpath), "last.ckpt").exists():
            return  # a new run that starts from another one's checkpoint
        old, new = state_dict["dirpath"], str(self.dirpath)
        best = state_dict["best_k_models"].items()
        state = apply_to_collection(state_dict, str, lambda text: text.replace(old, new))
        state["best_k_models"] = {path.replace(old, new): value for path, value in best}
        super().load_state_dict(state)


def as_built(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Change a saved state of an optimizer of the same parameters, so that it steps as it was
    built: `fused` and similar options stay, and its moments lie in memory as the weights do now,
    which a fused step relies on."""
    # torch itself reports groups that do not fit
    for built, group in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        for name in (IMPLEMENTATIONS | {"name"}) & {*built, *group}:
            group[name] = built.get(name)
        for weight, index in zip(built["params"], group["params"], strict=False):
            state = saved["state"].get(index, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == weight.shape:
                    state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


class RandomState(Callback):
    """Keeps the random generators' states of all processes in checkpoints. Each process draws its
    own numbers: equal ones would be the same dropout on all of them."""

    resumed: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        is_alone = trainer.world_size == 1
        devices = devices_of(trainer.strategy) if is_alone else [trainer.strategy.root_device]
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
            epochs = loop.epoch_progress.current
            if epochs.processed == epochs.ready:  # an epoch begins
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

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
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
    """Steps each ReduceLROnPlateau at the end of an epoch, by Lightning's rules, before the
    checkpoint is written. Lightning steps it after that, so a resume would lose the step.

    A Checkpoint, so that the module's `on_train_epoch_end` is called before it: that may log the
    value.
    """

    resumed: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.frequencies = [
            (config, config.frequency)
            for config in trainer.lr_scheduler_configs
            if config.reduce_on_plateau and config.interval == "epoch"
        ]
        for config, _ in self.frequencies:
            config.frequency = sys.maxsize  # Lightning steps it in no epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_epoch_over(trainer):  # max_steps has cut it short
            return
        for config, frequency in self.frequencies:
            config.frequency = frequency
        trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        for config, _ in self.frequencies:
            config.frequency = sys.maxsize

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        watched = {config.monitor for config, _ in self.frequencies}
        values = trainer.callback_metrics
        checkpoint["watched"] = {name: values[name] for name in watched if name in values}

    def on_load_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        self.resumed = checkpoint.get("watched", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.callback_metrics.update(self.resumed)  # of a validation before the stop


class ResumedOptimizer(Callback):
    """Lets a resumed optimizer step as this run has built it. If the training has another length
    now, optimizer and schedule, both by name, continue where they would be had it always had this
    length. Others stay as Lightning restores them."""

    # states are restored after this hook
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_load_state_dict_pre_hook(as_built)
        if trainer.ckpt_path:
            # `trainer.estimated_stepping_batches` in configure_optimizers makes the loaders before
            # the epoch and the loader's state are restored; without them Lightning makes them anew,
            # and restores both
            forget_train_loader(trainer)

    def on_save_checkpoint(self, _: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if has_named_optimizer(pl_module):
            checkpoint["schedule"] = schedule_options(pl_module)

    def on_load_checkpoint(self, trainer: Any, model: Any, checkpoint: dict[str, Any]) -> None:
        is_fit = trainer.state.fn == "fit" and "schedule" in checkpoint
        if is_fit and has_named_optimizer(model):
            # it may name a class
            saved = renamed(checkpoint["schedule"], str(checkpoint["package"]))
            check_schedule(saved, model)
            change_length(checkpoint, model)


def check_schedule(saved: dict[str, Any], model: BaseModule) -> None:
    """Raise UserError where the code gives other options than the checkpoint has. In other groups a
    fused step would read the state of another parameter, past its end."""
    options = schedule_options(model)
    for name, value in saved.items():
        if value != options.get(name):
            what = f"{type(model).__name__} has the {name} {options.get(name)}"
            raise UserError(f"{what}: a resume goes on with {value}; leave --ckpt_path out", 2)


def change_length(checkpoint: dict[str, Any], model: BaseModule) -> None:
    """Give the optimizer and the schedule in a checkpoint the rates that they would have now, had
    the training always had this model's number of steps."""
    (saved,) = checkpoint["lr_schedulers"] or [{}]
    old_length = saved.get("T_max", saved.get("total_steps"))
    num_steps = num_scheduler_steps(model.trainer, model.step_scheduler_every())
    is_given = {"T_max", "total_steps"} & model.scheduler_args.keys()
    if is_given or old_length is None or num_steps in (None, old_length):
        return
    optimizer, scheduler = schedule_at(saved["last_epoch"], model, num_steps)
    checkpoint["lr_schedulers"] = [scheduler.state_dict()] if scheduler else []
    saved_groups = checkpoint["optimizer_states"][0]["param_groups"]
    for group, rebuilt in zip(saved_groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in rebuilt.items() if key != "params"})
    length = f"{num_steps} {model.step_scheduler_every()}s"
    say(f"Resume: {model.scheduler} goes on as in a training of {length}, before {old_length}")


def schedule_options(model: BaseModule) -> dict[str, Any]:
    """What sets the options of the optimizer's parameter groups, as a checkpoint can hold it."""
    names = ["lr", "optimizer_args", "scheduler", "scheduler_args"]
    names += ["parameter_groups"] if model.parameter_groups else []
    options: dict[str, Any] = plain({name: getattr(model, name) for name in names})
    return options | {"scheduler_interval": model.step_scheduler_every()}


def random_state(gpus: list[torch.device]) -> dict[str, Any]:
    """The state of the global random generators, as a checkpoint can hold it."""
    name, key, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in gpus],
        "python": random.getstate(),
        # safe loading allows tensors, but no numpy arrays
        "numpy": [name, torch.tensor(np.asarray(key, dtype=np.int64)), *rest],
    }


def restore_random_state(state: dict[str, Any], gpus: list[torch.device]) -> None:
    torch.set_rng_state(state["torch"])
    for gpu, gpu_state in zip(gpus, state["cuda"], strict=False):  # the number may have changed
        torch.cuda.set_rng_state(gpu_state, gpu)
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
