"""Training steps in turns, and as CUDA graphs: faster, with the weights, curves and
checkpoints of ordinary steps.

The loader yields up to 20 batches as a `Turn`, and Lightning's training loop turns once
for all of them. On a CPU the steps of a turn are Lightning's. On a GPU they are replays
of one recorded step: to launch a step of a small network takes Python more time than
the GPU needs to compute it.

Read `CudaGraphs` first. Without its line in `make_extras` (commands/train.py), all
steps are ordinary.
"""

import contextlib
import copy
import functools
import gc
import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import default_collate

from lightbase.compat import (
    batch_index,
    begin_batch,
    call_before_fetch,
    count_optimizer_step,
    logged_step,
    num_batches,
    replace_optimization,
    uncounted_step,
)
from lightbase.config.errors import first_line, say
from lightbase.data.loader import ResumableLoader, Turn
from lightbase.data.tensors import map_tensors, tensors_in
from lightbase.model.module import BaseModule
from lightbase.run.signals import SIGNALS
from lightbase.run.state import RandomState

NUM_WARM = 3
"""Ordinary steps before the first recording. They make the state of the optimizer and
the handles of NVIDIA's libraries. Later recordings need one."""

MAX_SECONDS = 0.1
"""A turn of ordinary steps ends after this time: the progress bar has to move."""

TOLERANCE = 1e-3
"""The largest difference between replays and ordinary steps, as a share of the change.
It is for kernels that add in any order; with --trainer.deterministic it is 0."""

NUMBER_METHODS = (
    "__bool__ __int__ __index__ __float__ __eq__ __hash__ __mod__ __lt__ __gt__ __le__ "
    "__ge__ __add__ __radd__ __mul__ __rmul__ __sub__ __truediv__ __format__ __str__"
)

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")

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


class NotCapturableError(Exception):
    """The step does something that a replay would not repeat."""


def refuse(what: str) -> Callable[..., Any]:
    """Return a function that raises NotCapturableError."""

    def refused(*_: Any, **__: Any) -> Any:
        raise NotCapturableError(f"the step {what}")

    return refused


FROZEN = type(
    "Frozen", (), dict.fromkeys(NUMBER_METHODS.split(), refuse("looks at batch_idx"))
)()
"""Stands for batch_idx in a recording."""


class Recorder:
    """Stands before the accumulator of the training: `track` gives its values to `add`.

    In a recording they go to the row `counter` of `rows`, and `pour` passes the rows on
    after the replays. Otherwise they go on at once. The first turn also `keeps` copies,
    of which `make_rows` makes the rows, before the recording. Made within it, the rows
    would get memory that is in use earlier in the step: a replay would overwrite the
    rows of the replays before it.

    rows: {"values": {name: tensor (limit,)}, "pair": outputs and targets}, each tensor
        (limit, ...). None if the steps do not call `track`.
    """

    rows: Any = None
    keeps = records = False
    size = num_calls = 0

    def __init__(self, counter: Tensor) -> None:
        self.counter = counter
        self.kept: list[Any] = []

    def replace(self, accumulator: Any) -> None:
        self.pass_on = accumulator.add
        accumulator.add = self.add

    def add(
        self, size: int, values: Any, outputs: Any, targets: Any, copies: bool = True
    ) -> None:
        has_pair = outputs is not None and targets is not None
        pair = [outputs, targets] if has_pair else []
        parts = map_tensors(Tensor.detach, {"values": values, "pair": pair})
        if self.keeps:
            self.size = size
            self.kept.append(map_tensors(torch.clone, parts))
        if not self.records:
            self.pass_on(size, values, outputs, targets, copies)
            return
        self.num_calls += 1
        rows = tensors_in(self.rows)
        for row, part in zip(rows, tensors_in(parts), strict=True):
            row.index_copy_(0, self.counter, part[None])

    def make_rows(self, limit: int) -> None:
        if self.kept:
            self.kept = default_collate(self.kept)
            self.rows = map_tensors(
                lambda x: x.new_zeros(limit, *x.shape[1:]), self.kept
            )

    def pour(self, num: int) -> None:
        """Give the first `num` rows to the accumulator."""
        rows = map_tensors(lambda x: x[:num].clone(), self.rows)
        for i in range(num if rows else 0):
            row = map_tensors(itemgetter(i), rows)
            outputs, targets = row["pair"] or (None, None)
            self.pass_on(self.size, row["values"], outputs, targets, copies=False)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all recordings. cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


class Graph:
    """A function that is recorded as a CUDA graph. `replay` runs it again.

    Raise whatever the function raises, or an error of CUDA. Then nothing has been
    computed.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.replay = self.graph.replay
        generator = torch.cuda.default_generators[device.index or 0]
        before = generator.clone_state()
        deterministic: Any = torch.utils.deterministic
        fills = deterministic.fill_uninitialized_memory
        deterministic.fill_uninitialized_memory = False  # in each replay
        was_collecting = gc.isenabled()
        gc.disable()  # to free memory may end a recording
        torch.cuda.synchronize(device)
        try:
            with torch.cuda.stream(capture_stream(device)):
                self.graph.capture_begin(capture_error_mode="thread_local")
                try:
                    function()
                except BaseException:
                    with contextlib.suppress(Exception):  # the first error counts
                        self.graph.capture_end()
                    raise
                self.graph.capture_end()
        except BaseException:
            # a recording that has failed leaves the generator unusable
            generator.graphsafe_set_state(before)
            raise
        finally:
            deterministic.fill_uninitialized_memory = fills
            if was_collecting:
                gc.enable()


class State(NamedTuple):
    """What a step may change.

    tensors: Copies of `CudaGraphs.tensors`.
    random: The states of the random generators.
    attributes: {(name of a module or "data module", attribute): value}, the numbers,
        texts, lists, dicts and tensors.
    optimized: The weights that have a state in the optimizer.
    """

    tensors: list[Tensor]
    random: dict[str, Any]
    attributes: dict[tuple[str, str], Any]
    optimized: list[Tensor]


class CudaGraphs(Callback):
    """Trains the batches of a turn, on a GPU by replays.

    What is recorded is Lightning's own step: transforms, training_step, backward, hooks
    and the optimizer. A recording is of one epoch, so that what changes from epoch to
    epoch may be Python code. It is also made again if an option of the optimizer
    changes, or if a weight moves in memory.

    The first turn is computed twice: by ordinary steps, and by replays from the same
    state. The training continues with the ordinary result. If the other one differs,
    all steps stay ordinary.

    reason: Why steps are not replayed, or "".
    has_turns: Whether the loader yields turns.
    replays: Whether steps are replayed.
    graph: The recording, or None.
    """

    trainer: Any
    model: Any
    reason = ""
    has_turns = replays = was_tried = by_step = False
    graph: Any = None
    recorder: Any = None
    output: Any = None
    kwargs: Any = None
    key: Any = None
    num_warm = 0
    num_needed = NUM_WARM
    acting: Any = ()  # callbacks that need some steps only
    # a test on the CPU has others
    make_graph: Callable[..., Any] = Graph
    rate_type = torch.float32

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.trainer, self.model = trainer, pl_module
        self.device = trainer.strategy.root_device
        self.has_turns = self.replays = True
        if reason := next(against_turns(trainer), ""):
            self.has_turns = False
            self.give_up(reason)
        elif reason := next(against_graphs(trainer), ""):
            self.give_up(reason)
        if not self.has_turns:
            return
        self.optimizer = trainer.optimizers[0]
        self.by_step = any(x.interval == "step" for x in trainer.lr_scheduler_configs)
        (self.random,) = (x for x in trainer.callbacks if isinstance(x, RandomState))
        self.original = replace_optimization(trainer, self.run)
        self.to_device = trainer.strategy.batch_to_device
        trainer.strategy.batch_to_device = self.batch_to_device
        call_before_fetch(trainer, self.choose_turn)
        self.acting = acting_at_intervals(trainer.callbacks)
        for callback in self.acting:
            hook = functools.partial(end_turn, callback.on_train_batch_end)
            vars(callback)["on_train_batch_end"] = hook

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Let go of the memory on the GPU: a test may follow."""
        if self.recorder and isinstance(self.model, BaseModule):
            vars(self.model.curves_callback.means["train"]).pop("add", None)
        self.graph = self.rows = self.recorder = self.output = self.kwargs = None

    def give_up(self, reason: str) -> None:
        """Let all steps be ordinary from now on, and print why."""
        self.reason = reason
        self.replays = False
        self.graph = None
        self.has_turns = self.has_turns and self.device.type != "cuda"
        say(f"Ordinary steps, no CUDA graphs: {reason}")

    def batch_to_device(self, batch: Any, *args: Any, **options: Any) -> Any:
        """Leave a Turn as it is: its transforms are a part of the steps."""
        if isinstance(batch, Turn):
            return batch
        return self.to_device(batch, *args, **options)

    def choose_turn(self) -> None:
        """Let the next turn reach to the next log step, the next validation, the next
        step at which a callback acts, or the end, as far as the loader can give as many
        batches. Lightning calls this before it fetches a batch."""
        trainer = self.trainer
        is_ordinary = not self.has_turns or trainer.accumulate_grad_batches != 1
        # the user may make another loader in a later epoch
        is_ordinary |= not isinstance(trainer.train_dataloader, ResumableLoader)
        if is_ordinary or (self.replays and self.is_stale()):
            return
        ready = batch_index(trainer) + 1
        lengths = [trainer.train_dataloader.num_at_once]
        lengths.append(trainer.num_training_batches - ready)
        for callback in self.acting:
            every = callback.acts_every_n_steps
            lengths.append(every - trainer.global_step % every)
        if trainer.max_steps >= 0:
            lengths.append(trainer.max_steps - trainer.global_step)
        if every := trainer.log_every_n_steps:
            lengths.append(every - logged_step(trainer) % every)
        every = trainer.val_check_batch
        if every != float("inf"):
            if trainer.check_val_every_n_epoch is None:  # over all epochs
                ready = num_batches(trainer)
            lengths.append(every - ready % every)
        length = int(min(lengths))
        # a single batch would not show what changes from step to step
        if length > 1 or self.was_tried:
            trainer.train_dataloader.turn_length = length

    def is_stale(self) -> bool:
        """Forget a recording that no longer holds. Return whether ordinary steps have
        to come first."""
        options = [
            {**group, "params": [], "lr": self.by_step or group["lr"]}
            for group in self.optimizer.param_groups
        ]
        weights = (*self.model.parameters(), *self.model.buffers())
        places = [(x.data_ptr(), x.requires_grad) for x in weights]
        key = (self.trainer.current_epoch, str(options), places)
        if key != self.key:
            if self.graph and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # it may still be running
            self.key = key
            self.graph = None
            self.num_warm = 0
        return self.graph is None and self.num_warm < self.num_needed

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """Train a batch or a turn. Lightning calls this in place of its own function.
        Return the result of the last step."""
        turn = kwargs["batch"]
        if not isinstance(turn, Turn):
            return self.single_step(optimizer, batch_idx, kwargs)
        if self.replays and not self.was_tried:
            return self.try_out(batch_idx, kwargs)
        if self.replays and not self.graph:
            self.record(turn, kwargs)
        if not self.replays:
            return self.ordinary_steps(batch_idx, kwargs)
        self.rates = []
        for i in range(turn.num):
            if i:
                begin_batch(self.trainer, None, is_first=False)
            self.rates.append(self.rates_now())
            count_optimizer_step(self.trainer)
        self.launch(turn)
        self.recorder.pour(turn.num)
        self.show_rates()
        return map_tensors(torch.clone, self.output)

    def single_step(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """Train a batch. In the last step before a recording, look for a line that
        waits for the GPU."""
        self.num_warm += 1
        is_last = self.replays and self.num_warm == self.num_needed
        if not is_last or self.device.type != "cuda":
            return self.original(optimizer, batch_idx, kwargs)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True, action="always") as caught:
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = self.original(optimizer, batch_idx, kwargs)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for line in caught:
            text = str(line.message)
            if "synchronizing CUDA operation" in text:
                if self.replays:
                    self.give_up(f"{line.filename}:{line.lineno} waits for the GPU")
            elif not text.startswith("Synchronization debug mode"):  # about this search
                warnings.warn_explicit(
                    line.message, line.category, line.filename, line.lineno
                )
        return output

    def ordinary_steps(self, batch_idx: int, kwargs: Any) -> Any:
        """Train the batches of a turn one after the other, as Lightning does. The turn
        ends early at a signal, if somebody sets `should_stop`, and after
        MAX_SECONDS."""
        trainer, turn = self.trainer, kwargs["batch"]
        end = time.monotonic() + MAX_SECONDS
        if self.recorder and self.recorder.keeps:
            end = math.inf  # one step would not show what changes from step to step
        output: Any = {}
        self.rates = []
        for i in range(turn.num):
            batch = self.on_device(turn.batch(i))
            begin_batch(trainer, batch, is_first=not i)
            self.rates.append(self.rates_now())
            values = {"batch": batch, "batch_idx": batch_idx + i}
            own = {name: values[name] for name in kwargs}
            output = self.original(self.optimizer, batch_idx + i, own) or output
            if trainer.should_stop or SIGNALS.received or time.monotonic() > end:
                trainer.train_dataloader.num_batches -= turn.num - i - 1
                turn.num = i + 1
                break
        return output

    def on_device(self, batch: Any) -> Any:
        """Return a batch of a turn as training_step gets it."""
        with self.trainer.profiler.profile("batch_to_device"):
            batch = self.trainer.precision_plugin.convert_input(batch)
            return self.to_device(batch, dataloader_idx=0)

    def rates_now(self) -> list[Any]:
        """Return the learning rates of the next step, if a schedule by steps changes
        them."""
        groups = self.optimizer.param_groups if self.by_step else []
        return [group["lr"] for group in groups]

    def try_out(self, batch_idx: int, kwargs: Any) -> Any:
        """Train the first turn by ordinary steps. Record a step, and compare replays of
        the turn with them. Return the result of the ordinary steps."""
        turn = kwargs["batch"]
        try:
            self.make_room(turn)
            before = self.state()
        except torch.OutOfMemoryError as error:
            self.give_up(first_line(error))
            return self.ordinary_steps(batch_idx, kwargs)
        self.recorder.keeps = True
        output = self.ordinary_steps(batch_idx, kwargs)
        self.recorder.keeps = False
        if turn.num == 1:  # a signal has ended it
            return output
        self.was_tried = True
        try:
            after = self.state()
        except torch.OutOfMemoryError as error:
            self.give_up(first_line(error))
            return output
        if len(before.optimized) != len(after.optimized):
            self.give_up("the optimizer has the state of more weights than before")
            return output
        try:
            self.restore(before)
            self.record(turn, kwargs)
            if self.replays and not self.is_equal(turn, before, after):
                problem = "replays give other weights or curves than ordinary steps"
                self.give_up(problem)
        except torch.OutOfMemoryError as error:
            self.give_up(first_line(error))
        finally:
            self.restore(after)
        self.show_rates()
        return output

    def show_rates(self) -> None:
        """Give the curves the learning rates of the newest step."""
        if isinstance(self.model, BaseModule):
            self.model.curves_callback.on_train_batch_start(self.trainer)

    def make_room(self, turn: Turn) -> None:
        """Make the tensors that a recording reads: the batches of the longest turn, the
        position in the turn, and the learning rates."""
        self.limit = self.trainer.train_dataloader.num_at_once
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        rate = torch.zeros((), dtype=self.rate_type, device=self.device)
        self.rate = [rate.clone() for _ in self.rates_now()]
        self.rows = map_tensors(
            lambda x: x.new_empty(
                self.limit, turn.size, *x.shape[1:], device=self.device
            ),
            turn.values,
        )
        self.recorder = Recorder(self.counter)
        if isinstance(self.model, BaseModule):
            self.recorder.replace(self.model.curves_callback.means["train"])

    def record(self, turn: Turn, kwargs: Any) -> None:
        """Record a step. Nothing is computed yet: weights and random numbers stay. Give
        up if a replay would not repeat the step."""
        before = self.state()
        self.kwargs = dict(kwargs)
        if "batch_idx" in kwargs:
            self.kwargs["batch_idx"] = FROZEN
        self.output = {}
        try:
            if self.num_needed == NUM_WARM:
                gc.collect()  # what holds an earlier step's graph of gradients
                self.recorder.make_rows(self.limit)
            self.num_needed = 1
            self.fill(turn)
            self.graph = self.make_graph(self.step, self.device)
            if on_host(self.state()) != on_host(before):
                raise NotCapturableError(
                    "the step changes an attribute, or draws random numbers on the CPU"
                )
            if self.recorder.num_calls != bool(self.recorder.rows):
                raise NotCapturableError("the step does not call track once")
            if not self.output:
                raise NotCapturableError("training_step returned no loss")
        except Exception as error:
            self.give_up(first_line(error) or type(error).__name__)
        finally:
            self.restore(before)

    def fill(self, turn: Turn) -> None:
        """Copy the batches of a turn to where the recording reads them, and go to the
        first one."""
        self.counter.zero_()
        pairs = zip(tensors_in(self.rows), tensors_in(turn.values), strict=True)
        for row, values in pairs:
            num = turn.num * turn.size
            row.flatten(0, 1)[:num].copy_(values[:num], non_blocking=True)

    def step(self) -> None:
        """Make Lightning's step of the batch in row `counter`. This is recorded."""
        rows = map_tensors(lambda x: x.index_select(0, self.counter)[0], self.rows)
        batch = self.on_device(rows)
        begin_batch(self.trainer, batch)
        with self.frozen():
            kwargs = {**self.kwargs, "batch": batch}
            self.output = self.original(self.optimizer, 0, kwargs)
        self.counter.add_(1)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within this context, learning rates by step are tensors, `track` writes to
        rows, and `self.log` and `global_step` raise NotCapturableError."""
        groups = self.optimizer.param_groups
        saved = [{**group} for group in groups]
        for i, group in enumerate(groups):
            if self.by_step:
                group["lr"] = self.rate[i]
            if "capturable" in group:
                group["capturable"] = True
        vars(self.model)["log"] = refuse("calls self.log")
        self.recorder.records = True
        self.recorder.num_calls = 0
        try:
            with uncounted_step(self.trainer, refuse("looks at global_step")):
                yield
        finally:
            self.recorder.records = False
            del vars(self.model)["log"]
            for group, options in zip(groups, saved, strict=True):
                group.update(options)

    def launch(self, turn: Turn) -> None:
        """Replay a step for each batch of a turn, with its learning rates."""
        with self.trainer.profiler.profile("batch_to_device"):
            self.fill(turn)
        with self.trainer.profiler.profile("replayed_steps"):
            for rates in self.rates:
                for tensor, value in zip(self.rate, rates, strict=True):
                    tensor.fill_(value)
                self.graph.replay()

    def state(self) -> State:
        attributes: dict[tuple[str, str], Any] = {}
        for name, owner in self.owners().items():
            for key, value in vars(owner).items():
                is_own = not key.startswith("_")  # not torch's
                if isinstance(value, int | float | str | None):
                    attributes[name, key] = value
                elif is_own and isinstance(value, list | dict):
                    attributes[name, key] = copy.copy(value)
                elif is_own and isinstance(value, Tensor):
                    attributes[name, key] = value
        tensors = [x.clone() for x in self.tensors()]
        return State(tensors, self.random.state(), attributes, [*self.optimizer.state])

    def restore(self, state: State) -> None:
        """Set everything back to a result of `state`."""
        owners = self.owners()
        for (name, key), value in state.attributes.items():
            now = vars(owners[name]).get(key)
            if isinstance(value, list) and isinstance(now, list):
                now[:] = value  # others may hold the list
            elif isinstance(value, dict) and isinstance(now, dict):
                now.clear()
                now.update(value)
            else:
                vars(owners[name])[key] = value
        for weight in self.optimizer.state.keys() - state.optimized:
            del self.optimizer.state[weight]  # a recording has begun it
        for tensor, value in zip(self.tensors(), state.tensors, strict=True):
            tensor.copy_(value)
        self.random.restore(state.random)

    def owners(self) -> dict[str, Any]:
        modules = dict(self.model.named_modules())
        return {**modules, "data module": self.trainer.datamodule}

    def tensors(self) -> list[Tensor]:
        """Return the weights, the buffers, other tensors that are attributes of
        modules, and the state of the optimizer."""
        states = [dict(state) for state in self.optimizer.state.values()]
        return [part.detach() for part in (*self.held(), *tensors_in(states))]

    def held(self) -> list[Tensor]:
        others = [
            value
            for module in self.model.modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and not key.startswith("_")
        ]
        return [*self.model.parameters(), *self.model.buffers(), *others]

    def is_equal(self, turn: Turn, before: Any, expected: Any) -> bool:
        """Return whether replays of a turn give what ordinary steps gave.

        before, expected: The states before and after the ordinary steps.
        """
        self.launch(turn)
        found = self.state()
        if plain(found.random) != plain(expected.random):
            return False
        num = len([*self.model.parameters()])
        states = (found, expected, before)
        pairs = [(x.tensors[:num], x.tensors[num:]) for x in states]
        triples = [*zip(*pairs, strict=True)]
        for row, kept in zip(
            tensors_in(self.recorder.rows), tensors_in(self.recorder.kept), strict=True
        ):
            rows = row[: turn.num]
            triples.append(([rows], [kept], [torch.zeros_like(kept)]))
        tolerance = TOLERANCE
        if torch.are_deterministic_algorithms_enabled():
            tolerance = 0.0
        return all(
            distance(one, other) <= tolerance * distance(other, start)
            for one, other, start in triples
        )


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the Euclidean distance of two lists of tensors."""
    parts = [(x.double() - y).norm() for x, y in zip(one, other, strict=True)]
    return float(torch.stack(parts).norm()) if parts else 0.0


def plain(values: Any) -> Any:
    """Return values that == compares in place of tensors."""
    return map_tensors(Tensor.tolist, values)


def on_host(state: State) -> Any:
    """Return what the CPU changes of a state, for ==."""
    attributes: dict[Any, Any] = {}
    for name, value in state.attributes.items():
        attributes[name] = value
        if isinstance(value, list | dict):
            attributes[name] = len(value)
        elif isinstance(value, Tensor):  # its content is the GPU's
            attributes[name] = id(value)
    return plain({**state.random, "cuda": []}), attributes, len(state.optimized)


def overridden(hooks: tuple[str, ...], owners: Any) -> Iterator[str]:
    """Yield "HOOK of CLASS" for each of the hooks that somebody has written. The
    callbacks of this library may miss some."""
    for owner in owners:
        for hook in hooks:
            is_ours = type(owner).__module__.startswith("lightbase.")
            # on an instance it may be any callable, which Lightning cannot compare
            method = getattr(owner, hook, overridden)
            has_own = not hasattr(method, "__code__") or is_overridden(hook, owner)
            if has_own and not is_ours:
                yield f"{hook} of {type(owner).__name__}"


def acting_at_intervals(callbacks: list[Callback]) -> list[Any]:
    """Return the callbacks whose on_train_batch_end need not see each batch.

    With the attribute `acts_every_n_steps` a callback promises that this hook has no
    effect except where `trainer.global_step` is a multiple of it, and after the last
    step of the training.
    """
    return [x for x in callbacks if getattr(x, "acts_every_n_steps", 1) > 1]


def end_turn(
    hook: Any, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int
) -> None:
    """Call an on_train_batch_end as after the last batch of a turn, but without the
    batch: Lightning has the whole turn."""
    if isinstance(batch, Turn):
        batch_idx, batch = batch_idx + batch.num - 1, None
    hook(trainer, model, outputs, batch, batch_idx)


def against_turns(trainer: Any) -> Iterator[str]:
    """Yield why Lightning's loop has to turn once for each batch."""
    model, loader = trainer.lightning_module, trainer.train_dataloader
    if type(trainer.strategy) is not SingleDeviceStrategy or trainer.world_size > 1:
        yield "several devices"
    if "dataloader_iter" in inspect.signature(model.training_step).parameters:
        yield "training_step takes dataloader_iter"
    if not model.automatic_optimization:
        yield f"{type(model).__name__} has manual optimization"
    if trainer.accumulate_grad_batches != 1:
        yield "trainer.accumulate_grad_batches"
    if trainer.val_check_batch is None:
        yield "trainer.val_check_interval is a time"
    if not isinstance(trainer.profiler, PassThroughProfiler):
        yield "trainer.profiler"
    if not isinstance(loader, ResumableLoader) or loader.num_at_once == 1:
        yield "the loader reads single batches"
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.reduce_on_plateau:
            yield "ReduceLROnPlateau by steps"
    yield from overridden(("on_train_batch_start",), (*trainer.callbacks, model))
    acting = acting_at_intervals(trainer.callbacks)
    others = (x for x in (*trainer.callbacks, model) if x not in acting)
    yield from overridden(("on_train_batch_end",), others)
    yield from overridden(("on_before_batch_transfer",), (model, trainer.datamodule))


def against_graphs(trainer: Any) -> Iterator[str]:
    """Yield why a step cannot be recorded, as far as its code need not run for it."""
    model = trainer.lightning_module
    if trainer.strategy.root_device.type != "cuda":
        yield "no NVIDIA GPU"
    if trainer.precision not in PRECISIONS:
        yield f"trainer.precision {trainer.precision}"
    if trainer.log_every_n_steps == 1:
        yield "trainer.log_every_n_steps 1"
    if getattr(model, "compile_net", None):
        yield "model.compile_net"
    for optimizer in trainer.optimizers:
        groups = optimizer.param_groups
        if not all(group.get("fused") or group.get("capturable") for group in groups):
            yield f"{type(optimizer).__name__} is not fused"
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and getattr(config.scheduler, "cycle_momentum", 0):
            yield f"{type(config.scheduler).__name__} changes the momentum in each step"
    yield from overridden((*STEP_HOOKS, *OWN_STEP), (model,))
    others = [x for x in trainer.callbacks if not getattr(x, "is_recordable", False)]
    yield from overridden(STEP_HOOKS, others)
