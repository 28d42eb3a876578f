"""Several optimiser steps in one call of Lightning's loop, as Keras's steps_per_execution.

A step of a small network takes less time than Lightning's loop around it. With `--steps_per_execution 20` the loop
turns once for 20 batches, which are trained one after the other as ever: the same weights, curves and step counts.
Callbacks then see 20 batches as one. What needs Lightning's loop around each batch (accumulation, clipping, several
devices) goes on one step at a time.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.rank import say
from project.engine.cuda_graph import GraphedStep


class StepsTrainer(Trainer):
    """Counts batches where Lightning would count the calls that train several of them."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        if self.train_dataloader is None:
            self.fit_loop.setup_data()
        loader: Any = self.train_dataloader
        if self.max_epochs == -1:
            return self.max_steps if self.max_steps != -1 else math.inf
        num_steps = loader.batch_sampler.num_batches * max(self.max_epochs or 0, 1)
        return min(num_steps, self.max_steps) if self.max_steps != -1 else num_steps


def train_batches(module: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """A `training_step` of `module`, a Classifier, that makes an optimiser step for each batch."""
    trainer = module.trainer
    epoch_loop = trainer.fit_loop.epoch_loop
    optimizer = trainer.strategy.optimizers[0]  # torch's own: Lightning's wrapper costs as much as a small step
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    progress = epoch_loop.manual_optimization.optim_step_progress
    every = trainer.log_every_n_steps
    profiler = trainer.profiler  # for the step timer: what begins and ends here
    profiler.start("loop")
    for x, y in batches:
        if trainer.max_steps == module.global_step:
            break
        if every and (module.global_step + 1) % every == 0:
            module.step_lr = float(optimizer.param_groups[0]["lr"])  # the schedule moves on before the step is logged
        profiler.start("forward")
        module.make_step(x, y)
        profiler.stop("forward")
        # what global_step is made of, and the axis of the curves; Lightning itself adds one to the latter
        progress.increment_ready()
        progress.increment_completed()
        epoch_loop._batches_that_stepped += 1
        if module.scheduler_interval == "step":
            profiler.start("lr_scheduler_step")
            step_schedulers(schedulers)
            profiler.stop("lr_scheduler_step")
        if every and module.global_step % every == 0:
            profiler.start("logging")
            values = module.train_metrics()
            numbers = {name: float(value) for name, value in values.items()} | {"epoch": trainer.current_epoch}
            for logger in trainer.loggers:  # itself: Lightning would log at the end of the call only
                logger.log_metrics(numbers, step=module.global_step - 1)
            module.log("lr", values.pop("lr"), logger=False)
            module.log_dict(values, logger=False, prog_bar=True)
            profiler.stop("logging")
    profiler.stop("loop")
    epoch_loop._batches_that_stepped -= 1
    if module.scheduler_interval == "epoch" and trainer.is_last_batch:
        step_schedulers(schedulers)


def step_maker(module: Any, cuda_graph: bool) -> Callable[[Tensor, Tensor], None]:
    """A whole training step of a Classifier on a batch."""
    optimizer = module.trainer.strategy.optimizers[0]
    # what a graph holds cannot be timed from outside: all of it counts as forward
    profiler = PassThroughProfiler() if cuda_graph else module.trainer.profiler

    def step(x: Tensor, y: Tensor) -> None:
        loss = module.loss(x, y)
        profiler.start("optimizer_zero_grad")
        optimizer.zero_grad()
        profiler.stop("optimizer_zero_grad")
        profiler.start("backward")
        loss.backward()
        profiler.stop("backward")
        profiler.start("optimizer_step")
        optimizer.step()
        profiler.stop("optimizer_step")

    if not cuda_graph:
        return step
    for group in optimizer.param_groups:  # a number would stay as it was at the capture
        group["lr"] = torch.tensor(float(group["lr"]), device=module.device)
    return GraphedStep(step)


def step_schedulers(schedulers: Iterable[Any]) -> None:
    for scheduler in schedulers:
        if not isinstance(scheduler, ReduceLROnPlateau):  # that one steps after validation
            scheduler.step()


def choose_steps(config: Any, model: Any, data: Any) -> None:
    """Prepare model and data for `config.steps_per_execution` steps in one call; say so where something is in the way,
    and make one step at a time then. The results are the same."""
    asked = config.steps_per_execution
    reason = obstacle(config, model, data) if asked > 1 else None
    if reason:
        say(f"One step at a time: --steps_per_execution {asked} does not go with {reason}")
    if config.cuda_graph and (asked == 1 or reason):
        raise UserError(
            f"--cuda_graph true needs --steps_per_execution over 1{f' without {reason}' if reason else ''}", 2
        )
    if asked > 1 and not reason:
        model.cuda_graph = config.cuda_graph
        data.steps_per_execution = asked
        model.automatic_optimization = False
        # it counts calls
        warnings.filterwarnings(
            "ignore", message="The number of training batches .* is smaller than the logging interval"
        )


def obstacle(config: Any, model: Any, data: Any) -> str | None:
    """What needs Lightning's loop to see each batch."""
    step = type(model).training_step
    if not hasattr(model, "train_metrics") or step.__globals__.get("train_batches") is not train_batches:
        return f"the training_step of {type(model).__name__}"
    if not isinstance(data, TensorDataModule):
        return f"{type(data).__name__}, which is no TensorDataModule"
    if model.optimizer == "LBFGS":
        return "model.optimizer LBFGS"
    usual: dict[str, tuple[Any, ...]] = {
        "accumulate_grad_batches": (None, 1),
        "gradient_clip_val": (None, 0),
        "strategy": ("auto", "single_device"),
        "limit_train_batches": (None, 1.0),
        "overfit_batches": (0,),
        "val_check_interval": (None, 1.0),
        "fast_dev_run": (False,),
        "profiler": (None,),
    }
    flags = {name: config.trainer[name] for name, values in usual.items() if config.trainer[name] not in values}
    if str(config.trainer.precision) in ("16", "16-mixed", "16-true"):
        flags["precision"] = config.trainer.precision
    return next((f"trainer.{name} {value}" for name, value in flags.items()), None)
