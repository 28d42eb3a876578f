"""Several optimiser steps in one turn of Lightning's loop, as Keras's steps_per_execution.

A step of a small network takes less time than the loop around it. This strategy makes the steps of
a few batches itself, by the model's own `training_step`, and leaves the last one to Lightning,
whose counters it moves on as if each had been made there: weights, curves and checkpoints are the
same.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightbase.compat import data_fetcher, increase_logged_step, logged_step, logger_connector
from lightbase.curves import MayMissSteps, MaySampleSteps
from lightbase.ranks import say
from lightbase.watch.step_timer import PhaseClock

BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
STEP_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
MODEL_HOOKS = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class SeveralSteps(SingleDeviceStrategy):
    """One device, `num_steps` optimiser steps in one turn of the loop; single ones, with a line
    that says why, where something must see each step."""

    strategy_name = "several_steps"

    def __init__(self, num_steps: int, **options: Any) -> None:
        super().__init__(**options)
        self.asked = num_steps
        self.num_steps = 1
        self.losses: list[Tensor | None] = []  # of this turn, but the last
        self.parallel_devices: list[torch.device] = []  # filled in by the Trainer

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit":
            if reason := obstacle(trainer):
                say_single_steps(self.asked, reason)
            self.num_steps = 1 if reason else self.asked
            self.transfer = transfer(trainer, self.root_device)

    def training_step(self, batch: Any, *args: Any) -> Any:
        """args: the index of the batch, if the model's `training_step` takes it."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        self.losses, num_more = [], self.num_steps - 1
        if trainer.max_steps >= 0:
            num_more = min(num_more, trainer.max_steps - trainer.global_step - 1)
        if num_more > 0:
            batch, outputs = self.make_steps(trainer, batch, len(args) > 0, num_more)
            if outputs:
                return outputs[0]
            args = (trainer.fit_loop.batch_idx,) if args else ()
        return super().training_step(batch, *args)

    def make_steps(
        self, trainer: Any, batch: Any, takes_index: bool, num: int
    ) -> tuple[Any, list[Any]]:
        """Make up to `num` steps; the batch that is left is Lightning's, with its output if that
        ends the run."""
        model: Any = self.lightning_module
        optimizer = self.optimizers[0]
        epoch_loop, fetcher = trainer.fit_loop.epoch_loop, data_fetcher(trainer)
        batches, steps = (
            epoch_loop.batch_progress,
            epoch_loop.automatic_optimization.optim_progress.optimizer.step,
        )
        connector, every = logger_connector(trainer), trainer.log_every_n_steps
        schedulers = [
            config for config in trainer.lr_scheduler_configs if config.interval == "step"
        ]
        phase = trainer.profiler.profile  # for the step timer: what begins and ends here
        with phase("loop"):
            while num > 0 and not fetcher.done and not trainer.should_stop:
                num -= 1
                with phase("forward"), self.precision_plugin.train_step_context():
                    output = model.training_step(
                        batch, *((batches.current.ready - 1,) if takes_index else ())
                    )
                    if trainer.should_stop:
                        return batch, [output]
                    # a dict, or none; Lightning would divide a loss by 1, which backward then does
                    # too
                    is_loss = isinstance(output, Tensor)
                    loss = (
                        output
                        if is_loss
                        else ClosureResult.from_training_step_output(output).closure_loss
                    )
                with phase("optimizer_zero_grad"):
                    optimizer.zero_grad()
                if loss is not None:
                    with phase("backward"):
                        loss.backward()
                self.losses.append(None if loss is None else loss.detach().clone())
                steps.increment_ready()
                with phase("optimizer_step"):
                    optimizer.step()
                steps.increment_completed()
                # the end of a batch and the beginning of the next, as in Lightning's `advance`
                batches.increment_processed()
                for config in schedulers:
                    if (
                        not config.reduce_on_plateau
                        and batches.current.ready % config.frequency == 0
                    ):
                        with phase("lr_scheduler_step"):
                            config.scheduler.step()
                if every and (logged_step(trainer) + 1) % every == 0:
                    with phase("logging"):
                        connector.on_batch_end()
                        connector.update_train_step_metrics()
                batches.increment_completed()
                increase_logged_step(trainer)
                batch, _, _ = next(fetcher)
                batches.is_last_batch = fetcher.done
                with phase("transforms"):
                    batch = self.transfer(batch)
                batches.increment_ready()
                connector.on_batch_start(batch)
                batches.increment_started()
        return batch, []


def transfer(trainer: Any, device: torch.device) -> Callable[[Any], Any]:
    """A batch to the device, through the hooks that are overridden: Lightning's own way to them
    costs 0.1 ms."""
    model, data, hooks = trainer.lightning_module, trainer.datamodule, []
    for name in TRANSFER_HOOKS:
        owner = data if data is not None and is_overridden(name, data) else model
        if is_overridden(name, owner) or (
            name == "transfer_batch_to_device" and device.type != "cpu"
        ):
            hooks.append(
                (getattr(owner, name), (device, 0) if name == "transfer_batch_to_device" else (0,))
            )

    def to_device(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        for hook, args in hooks:
            batch = hook(batch, *args)
        return batch

    return to_device


def say_single_steps(asked: int, reason: str) -> None:
    say(f"One step at a time: --steps_per_execution {asked} does not go with {reason}")


def obstacle(trainer: Any) -> str | None:
    """What must see each step."""
    model = trainer.lightning_module
    if not model.automatic_optimization:
        return f"the manual optimisation of {type(model).__name__}"
    for hook in (*BATCH_HOOKS, *STEP_HOOKS, *MODEL_HOOKS):
        if is_overridden(hook, model, LightningModule):
            return f"{hook} of {type(model).__name__}"
    for callback in trainer.callbacks:
        if isinstance(callback, MaySampleSteps):
            continue
        if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
            return type(callback).__name__
        hooks = [hook for hook in (*BATCH_HOOKS, *STEP_HOOKS) if is_overridden(hook, callback)]
        is_plain_bar = type(callback) in (TQDMProgressBar, RichProgressBar)
        if isinstance(callback, MayMissSteps) or is_plain_bar or is_by_epoch(callback):
            hooks = [hook for hook in hooks if hook in STEP_HOOKS]
        if hooks:
            return f"{hooks[0]} of {type(callback).__name__}"
    if len(trainer.optimizers) != 1:
        return f"{len(trainer.optimizers)} optimisers"
    kind = type(trainer.optimizers[0])
    if (
        not kind.__module__.startswith("torch.optim") or kind is torch.optim.LBFGS
    ):  # it may want its loss again
        return f"the optimiser {kind.__name__}"
    if "dataloader_iter" in inspect.signature(model.training_step).parameters:
        return "the dataloader_iter of a training_step"
    flags = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
        "gradient_clip_val": trainer.gradient_clip_val,
        "val_check_interval": trainer.val_check_interval != 1.0,
        "precision": trainer.precision
        in ("16-mixed", "16-true", "transformer-engine", "transformer-engine-float16"),
        "profiler": not isinstance(trainer.profiler, PassThroughProfiler | PhaseClock),
    }
    return next(
        (f"trainer.{name} {getattr(trainer, name)}" for name, is_set in flags.items() if is_set),
        None,
    )


def is_by_epoch(callback: Any) -> bool:
    """A checkpoint that is not written every so many steps or minutes."""
    if not isinstance(callback, ModelCheckpoint) or is_overridden(
        "on_train_batch_end", callback, ModelCheckpoint
    ):
        return False
    return bool(callback.every_n_epochs)
