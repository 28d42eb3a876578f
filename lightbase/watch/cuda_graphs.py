"""Training steps as CUDA graphs: --cuda_graphs true, on an NVIDIA GPU.

To launch the kernels of a small network takes Python more time than the GPU needs to
compute them. So Lightning's step of a batch is recorded, once an epoch, and replayed
for the batches that follow. The loop, the transforms of a batch, the hooks around a
step, the counters and the checkpoints stay Lightning's.

Read `CudaGraphs` first. Without its line in `make_callbacks` (commands/train.py) all
steps are ordinary.
"""

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightbase.compat import (
    count_optimizer_step,
    replace_optimization,
    trial_counters,
    written,
)
from lightbase.config.errors import UserError, first_line, own_line
from lightbase.data.loader import ResumableLoader
from lightbase.data.tensors import map_tensors, tensors_in
from lightbase.model.module import BaseModule
from lightbase.run.state import RandomState

NUM_STEPS = 6
"""Steps of the trial: three ordinary ones, which make the state of the optimizer
and the handles of NVIDIA's libraries, one that is recorded, one that is compared, and a
replay."""

TOLERANCE = 1e-2
"""The largest difference between a replay and an ordinary step, as a share of the
change of a tensor. It is for kernels that add in any order; with
--trainer.deterministic it is 0."""

STEP_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""A replay calls none of these, nor those of OWN_STEP. With `is_recordable = True` a
callback promises that they do the same to tensors on the GPU in each step of an epoch,
and nothing else. Then they are recorded with the step."""

OWN_STEP = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)

PLAIN = (int, float, str, type(None))

CONTAINERS = (list, dict, set, deque)


def refuse(what: str) -> Callable[..., Any]:
    """Return a function that raises RuntimeError, as CUDA does within a recording."""

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"the step {what}")

    return refused


class BatchIndex:
    """Stands for batch_idx in a recording: a step that looks at it raises TypeError."""

    __eq__ = __bool__ = None  # type: ignore[assignment]


@functools.cache
def memory_pool() -> Any:
    """Return the memory of all recordings, of which there is one at a time."""
    return torch.cuda.graph_pool_handle()


def cuda_graph(function: Callable[[], None]) -> Any:
    """Record a function as a CUDA graph, and return it. Its `replay` runs the function
    again. Raise whatever the function raises, or an error of CUDA."""
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # to free memory may end a recording
    try:
        with torch.cuda.graph(graph, memory_pool(), capture_error_mode="thread_local"):
            function()
    finally:
        gc.enable()
    return graph


class CudaGraphs(Callback):
    """Replays recorded steps. Lightning must call it after the other callbacks that act
    when a training starts.

    A step is recorded when the step before it had the same `key`. Before that, and
    where a learning rate changes from step to step, steps are ordinary. The batch after
    the recording is trained twice, by Lightning and by a replay from the same state.
    The training continues with Lightning's result.

    Raise UserError for a step that cannot be recorded, or whose replay differs: before
    the first step, or where the step changes later.

    graph: The recording, or None.
    output: What Lightning's loop gets of a step; a replay writes to its tensors.
    inputs: The batch that a replay reads.
    calls: What the newest step has given to `track`.
    recorded: What the recorded step has given; a replay writes to its tensors.
    """

    key: Any = None
    graph: Any = None
    is_compared = False
    # a test on the CPU has another one
    make_graph = staticmethod(cuda_graph)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer, self.model = trainer, pl_module
        for obstacle in obstacles(trainer):
            raise not_recordable(obstacle)
        (self.random,) = (x for x in trainer.callbacks if isinstance(x, RandomState))
        accumulator = self.model.curves_callback.means["train"]
        self.pass_on, accumulator.add = accumulator.add, self.add
        self.original = replace_optimization(trainer, self.begin)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Let go of the memory on the GPU: a test may follow."""
        vars(self).clear()

    def begin(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """Train the first batch several times, and record its step. Then set everything
        back, and train it by `run`, which Lightning calls from now on."""
        self.optimizer = optimizer
        start, optimized = self.state(), [*optimizer.state]
        with trial_counters(self.trainer):
            for _ in range(NUM_STEPS):
                before = self.attributes()
                self.train(batch_idx, kwargs)
        for name, value in self.attributes().items():
            if before.get(name) != value:
                raise not_recordable(f"the step changes the attribute {name}")
        if not (self.graph and self.is_compared):
            raise not_recordable("the state of the optimizer is another in each step")
        self.key = self.graph = None
        for weight in optimizer.state.keys() - optimized:
            del optimizer.state[weight]
        self.restore(start)
        replace_optimization(self.trainer, self.run)
        return self.run(optimizer, batch_idx, kwargs)

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """Train a batch. Lightning calls this in place of its own function, and gets
        the same result."""
        self.optimizer = optimizer
        output = self.train(batch_idx, kwargs)
        for call in self.calls:
            self.pass_on(*call, copies=False)
        return output

    def train(self, batch_idx: int, kwargs: Any) -> Any:
        """Train a batch by Lightning, by a replay, or by both."""
        before, self.key = self.key, self.key_of(kwargs["batch"])
        self.calls: list[Any] = []
        if self.key != before:
            self.graph = None
        elif not self.graph:
            self.record(kwargs)
        elif not self.is_compared:
            return self.replay_and_compare(batch_idx, kwargs)
        else:
            with self.trainer.profiler.profile("replayed_step"):
                self.replay(kwargs["batch"])
            count_optimizer_step(self.trainer)
            self.calls = map_tensors(torch.clone, self.recorded)
            return map_tensors(torch.clone, self.output)
        return self.original(self.optimizer, batch_idx, kwargs)

    def add(self, *args: Any) -> None:
        """Keep what `track` gives to the accumulator of the training."""
        self.calls.append(map_tensors(Tensor.detach, args))

    def replay(self, batch: Any) -> None:
        pairs = zip(tensors_in(self.inputs), tensors_in(batch), strict=True)
        for row, values in pairs:
            row.copy_(values, non_blocking=True)
        self.graph.replay()

    def attributes(self) -> dict[str, Any]:
        """Return by name what Python code may change in a module: numbers, texts, the
        lengths of containers, and which object an attribute is."""
        found = {}
        for name, module in self.model.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, CONTAINERS):
                    value = len(value)
                elif not isinstance(value, PLAIN):
                    value = id(value)
                found[f"{name}.{key}"] = value
        return found

    def key_of(self, batch: Any) -> Any:
        """Return what is the same in all steps of a recording."""
        groups = [{**group, "params": None} for group in self.optimizer.param_groups]
        shapes = [(x.shape, x.dtype) for x in tensors_in(batch)]
        places = [(x.data_ptr(), x.requires_grad) for x in self.tensors()]
        epoch = self.trainer.current_epoch
        return epoch, id(self.optimizer), groups, shapes, places, self.attributes()

    def record(self, kwargs: Any) -> None:
        """Record the step of a batch. Nothing is computed."""
        random, self.is_compared = self.random.state(), False
        self.inputs = map_tensors(torch.clone, kwargs["batch"])
        self.kwargs = kwargs | {"batch": self.inputs}
        if "batch_idx" in kwargs:
            self.kwargs["batch_idx"] = BatchIndex()
        try:
            self.graph = self.make_graph(self.step)
        except (RuntimeError, TypeError) as error:
            raise not_recordable(first_line(error), own_line(error)) from error
        self.recorded, self.calls = self.calls, []
        self.random.restore(random)  # the code on the CPU has drawn its numbers

    def step(self) -> None:
        """Make Lightning's step of the batch in `inputs`. This is recorded."""
        groups = self.optimizer.param_groups
        options = [{**group} for group in groups]
        for group in groups:
            if "capturable" in group:
                group["capturable"] = True
        vars(self.model)["log"] = refuse("calls self.log")
        try:
            with trial_counters(self.trainer, refuse("looks at global_step")):
                self.output = self.original(self.optimizer, 0, self.kwargs)
        finally:
            del vars(self.model)["log"]
            for group, values in zip(groups, options, strict=True):
                group.update(values)
        if not self.output:
            raise RuntimeError("training_step returned no loss")

    def replay_and_compare(self, batch_idx: int, kwargs: Any) -> Any:
        """Train a batch by Lightning and by a replay. Return Lightning's result."""
        before = self.state()
        output = self.original(self.optimizer, batch_idx, kwargs)
        after = self.state()
        if len(after[0]) != len(before[0]):
            raise not_recordable("a weight gets its first gradient in this step")
        self.restore(before)
        self.replay(kwargs["batch"])
        tracked = tensors_in(self.calls)
        replayed = self.tensors() + tensors_in(self.recorded)
        expected = after[0] + tracked
        start = before[0] + [*map(torch.zeros_like, tracked)]
        for triple in zip(replayed, expected, start, strict=True):
            if not is_close(*triple):
                raise not_recordable("a replay gives other values than Lightning")
        self.restore(after)
        self.is_compared = True
        return output

    def state(self) -> Any:
        """Return copies of `tensors`, and the random state."""
        return [x.clone() for x in self.tensors()], self.random.state()

    def restore(self, state: Any) -> None:
        """Set everything back to a result of `state`."""
        values, random = state
        for tensor, value in zip(self.tensors(), values, strict=True):
            tensor.copy_(value)
        self.random.restore(random)

    def tensors(self) -> list[Tensor]:
        """Return the weights, the buffers, other tensors that are attributes of
        modules, and the state of the optimizer."""
        parts = [*self.model.parameters(), *self.model.buffers()]
        for module in self.model.modules():
            parts += [x for x in vars(module).values() if isinstance(x, Tensor)]
        for state in self.optimizer.state.values():
            parts += tensors_in(dict(state))
        return [part.detach() for part in parts]


def is_close(found: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Return whether a replay has changed a tensor as an ordinary step has."""
    tolerance = 0.0 if torch.are_deterministic_algorithms_enabled() else TOLERANCE
    change = (expected.double() - before.double()).norm()
    return bool((found.double() - expected.double()).norm() <= tolerance * change)


def not_recordable(problem: str, place: str = "") -> UserError:
    """Return the error of a step that cannot be recorded. place: The user's line."""
    way_out = place or "leave the flag out, or see docs/performance.md"
    return UserError(f"--cuda_graphs true: {problem}", way_out, 2)


def obstacles(trainer: Any) -> Iterator[str]:
    """Yield why a step cannot be recorded, as far as its code need not run for it."""
    model, strategy = trainer.lightning_module, trainer.strategy
    groups = trainer.optimizers[0].param_groups
    loader = trainer.train_dataloader
    problems = {
        "there is no NVIDIA GPU": strategy.root_device.type != "cuda",
        "there are several devices": type(strategy) is not SingleDeviceStrategy,
        "the model is no BaseModule": not isinstance(model, BaseModule),
        "the model has manual optimization": not model.automatic_optimization,
        "the data has its own DataLoader": not isinstance(loader, ResumableLoader),
        "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
        "trainer.precision 16-mixed": trainer.precision == "16-mixed",
        "model.compile_net": getattr(model, "compile_net", None),
        "the optimizer is not fused": not all(group.get("fused") for group in groups),
    }
    yield from (text for text, is_so in problems.items() if is_so)
    for hook in (*STEP_HOOKS, *OWN_STEP):
        for owner in written(hook, (model, *trainer.callbacks)):
            if not getattr(owner, "is_recordable", False):
                yield f"a replay would not call {hook} of {type(owner).__name__}"
