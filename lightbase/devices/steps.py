"""Several optimizer steps in one turn of Lightning's loop, as Keras's steps_per_execution.

A step of a small network takes less time than the loop around it. This strategy makes the steps of
all batches but the last itself, with the model's own `training_step`, and advances Lightning's
counters as if the loop had made them. Lightning makes the last step. Weights, curves and
checkpoints are the same as with single steps.
"""

import inspect
from collections.abc import Callable, Sequence
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
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightbase.compat import data_fetcher, increase_logged_step, logged_step, logger_connector
from lightbase.curves import MayMissSteps
from lightbase.ranks import say

BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
STEP_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
MODEL_HOOKS = (
    *BATCH_HOOKS,
    *STEP_HOOKS,
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
FP16 = ("16-mixed", "16-true", "transformer-engine", "transformer-engine-float16")


class StepProfiler(Profiler):
    """A profiler that also understands several steps in one call."""


class SeveralSteps(SingleDeviceStrategy):
    """One device; at most `max_num_steps` optimizer steps in one turn of the loop.

    If something must see each step, it makes single steps, and a line says so.
    """

    strategy_name = "several_steps"

    def __init__(self, max_num_steps: int, **options: Any) -> None:
        super().__init__(**options)
        self.max_num_steps = max_num_steps
        self.num_steps = 1  # of the turns of this training
        self.parallel_devices: list[torch.device] = []  # the Trainer fills it in

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        reason = obstacle(trainer)
        if reason:
            say_single_steps(self.max_num_steps, reason)
        self.num_steps = 1 if reason else self.max_num_steps
        self.transfer = transfer(trainer, self.root_device)

    def training_step(self, batch: Any, *args: Any) -> Any:
        """args: the index of the batch, if the model's `training_step` takes it."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        num_more = self.num_steps - 1
        if trainer.max_steps >= 0:
            num_more = min(num_more, trainer.max_steps - trainer.global_step - 1)
        if num_more > 0:
            with trainer.profiler.profile("loop"):
                for _ in range(num_more):
                    if data_fetcher(trainer).done or trainer.should_stop:
                        break
                    output = self.forward(trainer, batch, args)
                    if trainer.should_stop:
                        return output  # Lightning makes this step, the last one
                    self.step(trainer, output)
                    batch = self.next_batch(trainer)
                    args = (trainer.fit_loop.batch_idx,) if args else ()
        return super().training_step(batch, *args)

    def forward(self, trainer: Any, batch: Any, args: Sequence[int]) -> Any:
        model: Any = self.lightning_module
        with trainer.profiler.profile("forward"), self.precision_plugin.train_step_context():
            return model.training_step(batch, *args)

    def step(self, trainer: Any, output: Any) -> None:
        """Backward and the optimizer's step. output: what the model's training_step returned."""
        phase = trainer.profiler.profile  # tells the step timer what begins and ends
        optimizer = self.optimizers[0]
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        # Lightning would divide a loss by 1, and backward would do so, too
        is_loss = isinstance(output, Tensor)
        loss = output if is_loss else ClosureResult.from_training_step_output(output).closure_loss
        with phase("optimizer_zero_grad"):
            optimizer.zero_grad()
        if loss is not None:
            with phase("backward"):
                loss.backward()
        progress.increment_ready()
        with phase("optimizer_step"):
            optimizer.step()
        progress.increment_completed()

    def next_batch(self, trainer: Any) -> Any:
        """End this batch and begin the next one, as Lightning's `advance` does."""
        phase, connector = trainer.profiler.profile, logger_connector(trainer)
        fetcher = data_fetcher(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        progress.increment_processed()
        for config in trainer.lr_scheduler_configs:
            is_by_step = config.interval == "step" and not config.reduce_on_plateau
            if is_by_step and progress.current.ready % config.frequency == 0:
                with phase("lr_scheduler_step"):
                    config.scheduler.step()
        every = trainer.log_every_n_steps
        if every and (logged_step(trainer) + 1) % every == 0:
            with phase("logging"):
                connector.on_batch_end()
                connector.update_train_step_metrics()
        progress.increment_completed()
        increase_logged_step(trainer)
        batch, _, _ = next(fetcher)
        progress.is_last_batch = fetcher.done
        with phase("transforms"):
            batch = self.transfer(batch)
        progress.increment_ready()
        connector.on_batch_start(batch)
        progress.increment_started()
        return batch


def transfer(trainer: Any, device: torch.device) -> Callable[[Any], Any]:
    """A function that moves a batch to the device, as Lightning does, and saves its 0.1 ms a batch.

    It calls only the hooks that are overridden.
    """
    model, data = trainer.lightning_module, trainer.datamodule
    hooks: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for name, args, is_needed in (
        ("on_before_batch_transfer", (0,), False),
        ("transfer_batch_to_device", (device, 0), device.type != "cpu"),
        ("on_after_batch_transfer", (0,), False),
    ):
        owner = data if data is not None and is_overridden(name, data) else model
        if is_needed or is_overridden(name, owner):
            hooks.append((getattr(owner, name), args))

    def to_device(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        for hook, args in hooks:
            batch = hook(batch, *args)
        return batch

    return to_device


def say_single_steps(num_steps: int, reason: str) -> None:
    say(f"One step at a time: --steps_per_execution {num_steps} does not go with {reason}")


def obstacle(trainer: Any) -> str | None:
    """What must see each step; None if nothing must."""
    reasons = [model_obstacle(trainer.lightning_module), optimizer_obstacle(trainer.optimizers)]
    reasons += [callback_obstacle(callback) for callback in trainer.callbacks]
    reasons += [flag_obstacle(trainer)]
    return next((reason for reason in reasons if reason), None)


def model_obstacle(model: Any) -> str | None:
    name = type(model).__name__
    if not model.automatic_optimization:
        return f"the manual optimisation of {name}"
    for hook in MODEL_HOOKS:
        if is_overridden(hook, model, LightningModule):
            return f"{hook} of {name}"
    if "dataloader_iter" in inspect.signature(model.training_step).parameters:
        return f"the dataloader_iter of {name}"
    return None


def optimizer_obstacle(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    if len(optimizers) != 1:
        return f"{len(optimizers)} optimisers"
    kind = type(optimizers[0])
    is_torchs = kind.__module__.startswith("torch.optim")
    if is_torchs and kind is not torch.optim.LBFGS:
        return None
    return f"the optimiser {kind.__name__}"  # its step may call for the loss again


def callback_obstacle(callback: Any) -> str | None:
    name = type(callback).__name__
    if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
        return name
    hooks = STEP_HOOKS if misses_batches(callback) else (*BATCH_HOOKS, *STEP_HOOKS)
    seen = [hook for hook in hooks if is_overridden(hook, callback)]
    return f"{seen[0]} of {name}" if seen else None


def misses_batches(callback: Any) -> bool:
    """Whether the batch hooks of a callback need not see each batch."""
    if isinstance(callback, MayMissSteps) or type(callback) in (TQDMProgressBar, RichProgressBar):
        return True
    # a checkpoint that is not written every n steps or minutes
    return (
        isinstance(callback, ModelCheckpoint)
        and not is_overridden("on_train_batch_end", callback, ModelCheckpoint)
        and bool(callback.every_n_epochs)
    )


def flag_obstacle(trainer: Any) -> str | None:
    has_profiler = not isinstance(trainer.profiler, PassThroughProfiler | StepProfiler)
    flags = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
        "gradient_clip_val": bool(trainer.gradient_clip_val),
        "val_check_interval": trainer.val_check_interval != 1.0,
        "precision": trainer.precision in FP16,
        "profiler": has_profiler,
    }
    for name, is_set in flags.items():
        if is_set:
            return f"trainer.{name} {getattr(trainer, name)}"
    return None
