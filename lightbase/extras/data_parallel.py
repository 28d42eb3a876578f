"""Two strategies: one process that splits each batch over the GPUs of a machine, and
several optimizer steps in one turn of Lightning's loop, as Keras's
steps_per_execution."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parallel import replicate
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from lightbase.core.compat import (
    data_fetcher,
    increase_logged_step,
    logged_step,
    logger_connector,
)
from lightbase.core.curves import MayMissSteps
from lightbase.core.errors import UserError, say
from lightbase.core.module import BaseModule

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


class DataParallelStrategy(SingleDeviceStrategy):
    """Splits the forward of the LightningModule's attribute `net` over several GPUs.

    Step, loss, metrics, logging and optimizer run once, on the first GPU; so
    checkpoints are the same as on one device. torch.nn.DataParallel splits in the same
    way; Lightning's strategy "dp" was removed in 2.0. A layer that looks at the batch,
    such as BatchNorm, sees the part on its GPU; its running statistics are those of the
    first GPU.

    parallel_devices: the first one holds the LightningModule. The Trainer fills them in
        by default.
    """

    strategy_name = "dp"

    def __init__(
        self, parallel_devices: Sequence[torch.device] = (), **options: Any
    ) -> None:
        super().__init__(**options)
        self.parallel_devices = list(parallel_devices)
        self.net: Any = nn.Module()  # until `setup`

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    def setup(self, trainer: Trainer) -> None:
        model: Any = self.lightning_module
        if isinstance(model, BaseModule) and model.compile_net:
            raise UserError(
                "dp cannot split a compiled network: leave model.compile_net out"
            )
        super().setup(trainer)
        if len(self.parallel_devices) > 1:
            self.net = model.get_submodule("net")
            self.net.forward = functools.partial(
                split_forward, self.net, self.parallel_devices
            )

    def teardown(self) -> None:
        vars(self.net).pop("forward", None)  # the forward of the class is back
        super().teardown()


def split_forward(
    net: nn.Module, devices: list[torch.device], *args: Any, **kwargs: Any
) -> Any:
    """The outputs of `net`, on the first device."""
    # torch's parallel_apply passes on neither autocast's dtype nor inference mode
    args_of, kwargs_of = scatter_kwargs(args, kwargs, devices)
    devices = devices[: len(args_of)]  # a batch may be smaller
    outputs = []
    for i, replica in enumerate(
        replicate(net, devices, detach=not torch.is_grad_enabled())
    ):
        del replica.forward  # copied from net
        with torch.accelerator.device_index(devices[i].index):
            # not __call__: the hooks of `net` run once, around all parts
            outputs.append(replica.forward(*args_of[i], **kwargs_of[i]))
    return gather(outputs, devices[0])


class SeveralSteps(SingleDeviceStrategy):
    """One device; at most `max_num_steps` optimizer steps in one turn of Lightning's
    loop.

    A step of a small network takes less time than the loop around it. This strategy
    makes the steps of all batches but the last itself, with the model's own
    `training_step`, and advances Lightning's counters as if the loop had made them.
    Lightning makes the last step. Weights, curves and checkpoints are the same as with
    single steps. If something must see each step, it makes single steps, and a line
    says so.
    """

    strategy_name = "several_steps"

    def __init__(self, max_num_steps: int, **options: Any) -> None:
        super().__init__(**options)
        self.max_num_steps = max_num_steps
        self.num_steps = 1  # of the turns of this training
        self.parallel_devices: list[torch.device] = []  # the Trainer fills it in

    @property
    def root_device(self) -> torch.device:
        return (
            self.parallel_devices[0] if self.parallel_devices else super().root_device
        )

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
        with trainer.profiler.profile("loop"):
            for _ in range(num_more):
                if data_fetcher(trainer).done or trainer.should_stop:
                    break
                with trainer.profiler.profile("forward"):
                    output = super().training_step(batch, *args)
                if trainer.should_stop:
                    return output  # Lightning makes this step, the last one
                self.step(trainer, output)
                batch = self.next_batch(trainer)
                args = (trainer.fit_loop.batch_idx,) if args else ()
        return super().training_step(batch, *args)

    def step(self, trainer: Any, output: Any) -> None:
        """Backward and the optimizer's step. output: what the model's training_step
        returned."""
        phase = trainer.profiler.profile  # tells the step timer what begins and ends
        optimizer = self.optimizers[0]
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        # Lightning would divide a loss by 1, and backward would do so, too
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


def transfer_hooks(
    trainer: Any, device: torch.device
) -> list[tuple[Callable[..., Any], Any]]:
    """What moves a batch to the device, with the arguments after the batch: the hooks
    that are overridden. To call them all, as Lightning does, takes 0.1 ms a batch."""
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
    say(
        f"One step at a time: --steps_per_execution {num_steps} does not go with {reason}"
    )


def obstacle(trainer: Any) -> str | None:
    """What must see each step; None if nothing must."""
    return next(obstacles(trainer), None)


def obstacles(trainer: Any) -> Iterator[str]:
    model = trainer.lightning_module
    name = type(model).__name__
    if not model.automatic_optimization:
        yield f"the manual optimisation of {name}"
    yield from (
        f"{x} of {name}"
        for x in MODEL_HOOKS
        if is_overridden(x, model, LightningModule)
    )
    if len(trainer.optimizers) != 1:
        yield f"{len(trainer.optimizers)} optimisers"
    for kind in map(type, trainer.optimizers):
        # its step may call for the loss again
        if kind is torch.optim.LBFGS or not kind.__module__.startswith("torch.optim"):
            yield f"the optimiser {kind.__name__}"
    needs_each_step = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
        "gradient_clip_val": bool(trainer.gradient_clip_val),
        "val_check_interval": trainer.val_check_interval != 1.0,
        "precision": trainer.precision in FP16,
        "profiler": not isinstance(trainer.profiler, PassThroughProfiler),
    }
    for flag, is_obstacle in needs_each_step.items():
        if is_obstacle:
            yield f"trainer.{flag} {getattr(trainer, flag)}"
    for callback in trainer.callbacks:
        yield from callback_obstacles(callback)


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
    may_miss_batches = isinstance(callback, MayMissSteps) or is_by_epoch
    hooks = STEP_HOOKS if may_miss_batches else (*BATCH_HOOKS, *STEP_HOOKS)
    return [f"{hook} of {name}" for hook in hooks if is_overridden(hook, callback)]
