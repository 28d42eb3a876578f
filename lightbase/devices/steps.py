"""Several optimizer steps in one turn of Lightning's loop, as Keras's steps_per_execution.

A step of a small network takes less time than the loop around it. This strategy makes the steps of
all batches but the last itself, with the model's own `training_step`, and advances Lightning's
counters as if the loop had made them. Lightning makes the last step. Weights, curves and
checkpoints are the same as with single steps.
"""

from collections.abc import Callable, Iterator, Sequence
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
        self.hooks = transfer_hooks(trainer, self.root_device)

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
            for hook, args in self.hooks:
                batch = hook(batch, *args)
        progress.increment_ready()
        connector.on_batch_start(batch)
        progress.increment_started()
        return batch


def transfer_hooks(trainer: Any, device: torch.device) -> list[tuple[Callable[..., Any], Any]]:
    """What moves a batch to the device, with the arguments after the batch: the hooks that are
    overridden. To call them all, as Lightning does, takes 0.1 ms a batch."""
    model, data = trainer.lightning_module, trainer.datamodule
    hooks: list[Any] = [(trainer.precision_plugin.convert_input, ())]
    for name, args in (
        ("on_before_batch_transfer", (0,)),
        ("transfer_batch_to_device", (device, 0)),
        ("on_after_batch_transfer", (0,)),
    ):
        owner = data if data is not None and is_overridden(name, data) else model
        is_needed = name == "transfer_batch_to_device" and device.type != "cpu"
        if is_needed or is_overridden(name, owner):
            hooks.append((getattr(owner, name), args))
    return hooks


def say_single_steps(num_steps: int, reason: str) -> None:
    say(f"One step at a time: --steps_per_execution {num_steps} does not go with {reason}")


def obstacle(trainer: Any) -> str | None:
    """What must see each step; None if nothing must."""
    obstacles = [*model_obstacles(trainer), *flag_obstacles(trainer)]
    for callback in trainer.callbacks:
        obstacles += callback_obstacles(callback)
    return next(iter(obstacles), None)


def model_obstacles(trainer: Any) -> Iterator[str]:
    model = trainer.lightning_module
    name = type(model).__name__
    if not model.automatic_optimization:
        yield f"the manual optimisation of {name}"
    for hook in MODEL_HOOKS:
        if is_overridden(hook, model, LightningModule):
            yield f"{hook} of {name}"
    kinds = [type(optimizer) for optimizer in trainer.optimizers]
    if len(kinds) != 1:
        yield f"{len(kinds)} optimisers"
    for kind in kinds:
        # its step may call for the loss again
        if kind is torch.optim.LBFGS or not kind.__module__.startswith("torch.optim"):
            yield f"the optimiser {kind.__name__}"


def flag_obstacles(trainer: Any) -> list[str]:
    needs_each_step = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
        "gradient_clip_val": bool(trainer.gradient_clip_val),
        "val_check_interval": trainer.val_check_interval != 1.0,
        "precision": trainer.precision in FP16,
        "profiler": not isinstance(trainer.profiler, PassThroughProfiler),
    }
    flags = [flag for flag, is_needed in needs_each_step.items() if is_needed]
    return [f"trainer.{flag} {getattr(trainer, flag)}" for flag in flags]


def callback_obstacles(callback: Any) -> list[str]:
    name = type(callback).__name__
    if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
        return [name]
    # a checkpoint that is not written every n steps or minutes
    is_by_epoch = (
        isinstance(callback, ModelCheckpoint)
        and not is_overridden("on_train_batch_end", callback, ModelCheckpoint)
        and bool(callback.every_n_epochs)
    )
    is_bar = type(callback) in (TQDMProgressBar, RichProgressBar)
    may_miss_batches = isinstance(callback, MayMissSteps) or is_bar or is_by_epoch
    hooks = STEP_HOOKS if may_miss_batches else (*BATCH_HOOKS, *STEP_HOOKS)
    return [f"{hook} of {name}" for hook in hooks if is_overridden(hook, callback)]
