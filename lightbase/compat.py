"""Every private attribute of another package that this library reads or sets, what it
reads from Lightning's loops, and the messages of Lightning that it leaves out.

Each docstring says why, with which version it was tested, and which issue of the other
package would make the function unnecessary. lightbase/tests/test_compat.py fails when a
package changes; test_house.py finds private attributes in other files. Tested with
Lightning 2.6.6, torch 2.11 and 2.15, jsonargparse 4.52 and 4.53, torchvision 0.26 and
0.29, optuna 5.0 and wandb 0.31.
"""

import argparse
import contextlib
import functools
import logging
import os
import re
import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jsonargparse import _loaders_dumpers, _typehints, set_parsing_settings
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.progress import _OptimizationProgress
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

# Log lines of Lightning that are left out: advertisements, lines about devices (ours
# say more), and lines of the tuner that stand in the table of tune.py. The hint about
# Tensor Cores is left out because float32 stays as exact as torch has it; our advice
# names bf16-mixed, which gains more.
LOG_LINES = (
    r"(\[rank: \d+\] )?(💡|-----|Initializing distributed|GPU available|"
    r"TPU available|LOCAL_RANK|"
    r"SLURM auto-requeueing|Found current_model_state|Seed set|Restor|Loaded|"
    r"`Trainer.fit` stopped|`weights_only` was not set|LR finder stopped early|"
    r"Experiment with name|You are using a CUDA device .* that has Tensor Cores|"
    r"Batch size |The batch size |Reached the maximum batch|Finished batch size)"
)

# Warnings about what is intended: no worker processes for data in memory, an epoch
# without a log step (its curves have a point at its end), one process on a machine of
# a cluster, a run that resumes in its folder or without one of its callbacks, no test
# data, a CPU beside a GPU, an array that must not be written (samples are only read;
# torch has no tensors that cannot be written, its issue 44027), a driver or GPU that
# is too old (our lines say so), Tensor Cores as above (from inductor of torch 2.11),
# shards that one process reads, an import path that jsonargparse 5 will refuse and that
# names no class anyway.
# `LeafSpec` is a deprecated call within Lightning 2.6. The last two are of ddp on
# GPUs: Lightning sets it up on another stream (its issue 21567), and torch takes the
# layouts of a 1 x 1 convolution for different ones (pytorch issue 157862).
WARNINGS = (
    r".*does not have many workers|The `srun` command is available|"
    r"The number of training batches .* is smaller than the logging interval|"
    r"Checkpoint directory .* exists and is not|Be aware that when using `ckpt_path`|"
    r"Total length of `list` across ranks is zero|"
    r"`isinstance\(treespec, LeafSpec\)` is deprecated|"
    r"The given NumPy array is not writable|"
    r"GPU available but not used|TensorFloat32 tensor cores|"
    r"torch.distributed is disabled, unavailable or uninitialized|"
    r"CUDA initialization: The NVIDIA driver|\s*Found GPU\d+ .* which is of compute|"
    r"\s*By default only one Jsonargparse|"
    r"(.|\n)*denied by the '\w+' entry of the import path|"
    r"The AccumulateGrad node's stream|"
    r"Grad strides do not match(.|\n)*grad.sizes\(\) = \[\d+, \d+, 1, 1\]"
)


Checkpoint = dict[str, Any]  # the content of a checkpoint, or a part of it

Counts = dict[str, int]

# jsonargparse's function, before `resolve_class_names` replaces it
FIND_CLASS = _typehints.resolve_class_path_by_name


def is_wanted(line: logging.LogRecord) -> bool:
    return not re.match(LOG_LINES, line.getMessage())


def quiet_lightning() -> None:
    """Leave out the log lines and warnings above, in this process."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(is_wanted)  # a second time it has no effect
    warnings.filterwarnings("ignore", message=WARNINGS)
    # Lightning sets this variable. Without a GPU, torch then looks for NVML in each
    # step of Adam, which costs 0.1 ms.
    if not torch.cuda.is_available():
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)


def arguments_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser, to change their help or number of values.

    argparse has no public list of them: cpython issue 144932.
    """
    return parser._actions


def parse_unvalidated(parse: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `parse`, a parse_* method of a jsonargparse parser, and return its result.
    It does not check types and required values: the data fills in some values after
    parsing.

    No issue is known. An earlier jsonargparse 4 called the option `_skip_check`.
    """
    return parse(*args, _skip_validation=True, **options)


@contextlib.contextmanager
def none_has_to_fit() -> Iterator[None]:
    """Within this context, let jsonargparse check None like any other value. By
    default, None means "not given" and fits every type.

    The setting is for the whole process, and with it parse_args(defaults=False) loses
    the classes of defaults. So it is on only while values are validated. No issue
    is known.
    """
    set_parsing_settings(unset_sentinel=True)
    try:
        yield
    finally:
        set_parsing_settings(unset_sentinel=False)


def resolve_class_names(path_of_class: Callable[[str], str]) -> None:
    """Let an argument whose type is a class take the bare name of a class, in flags and
    in YAML files.

    jsonargparse finds a class by its name only after its module is imported. No issue
    is known.

    path_of_class: A function that returns the import path for a name, and any other
        text as it is.
    """

    def resolve(base: Any, name: str) -> str:
        return FIND_CLASS(base, path_of_class(name))

    _typehints.resolve_class_path_by_name = resolve  # type: ignore[assignment]


@contextlib.contextmanager
def no_worker() -> Iterator[None]:
    """Within this context, let a stream that divides itself by
    `torch.utils.data.get_worker_info` read all of its samples: the loader divides it
    among workers and ranks already. Torch has no public function for this.
    """
    module = torch.utils.data._utils.worker
    info, module._worker_info = module._worker_info, None
    try:
        yield
    finally:
        module._worker_info = info


def has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a stream of `datasets` shuffles samples in a buffer, which its
    state_dict leaves out. Tested with version 5.2; there is no public name."""
    layer = getattr(stream, "_ex_iterable", None)
    while layer is not None and getattr(layer, "buffer_size", 1) == 1:
        layer = getattr(layer, "ex_iterable", None)
    return layer is not None


@functools.cache
def change_yaml_loader(change: Callable[[Any], None]) -> None:
    """Call `change` once with the class that jsonargparse reads YAML with.

    jsonargparse reads text for an int or a float with this class, whatever the loader
    of the parser is. No issue is known.
    """
    change(_loaders_dumpers.get_yaml_default_loader())


def replace_epoch_start(
    trainer: Any, function: Callable[[Callable[[], None]], None]
) -> None:
    """Let Lightning call `function` to begin each epoch of the training, with the
    function that it would call itself. This one calls the hooks on_train_epoch_start.
    No batch is fetched before.

    Callbacks have no hook that comes before or after the hooks of all others.
    """
    loop = trainer.fit_loop
    loop.on_advance_start = functools.partial(function, loop.on_advance_start)


def resumes_within_epoch(trainer: Any) -> bool:
    """Return whether the training resumes within this epoch. Lightning leaves the hooks
    on_train_epoch_start out then. No issue is known."""
    return trainer.fit_loop.restarted_mid_epoch


def resumes_at_epoch_start(trainer: Any) -> bool:
    """Return whether one of the hooks on_train_epoch_start has saved the checkpoint
    from which the training resumes. Lightning calls all of them again."""
    return trainer.fit_loop.restarted_on_epoch_start


def call_epoch_start(trainer: Any) -> None:
    """Call the hooks on_train_epoch_start, as Lightning does at an epoch's start."""
    call._call_callback_hooks(trainer, "on_train_epoch_start")
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")


def restore_checkpoint(trainer: Any) -> None:
    """Give module, data, callbacks, optimizers and schedules their state in the
    checkpoint once more. The counters of the loops stay.

    Lightning restores them together with the loops only.
    """
    connector = trainer._checkpoint_connector
    # it has to stay: `check_length` clears it, see `forget_train_loader`
    loader = trainer.fit_loop._combined_loader
    connector._restore_modules_and_callbacks(trainer.ckpt_path)
    connector.restore_optimizers_and_schedulers()
    connector.resume_end()
    trainer.fit_loop._combined_loader = loader


def begin_epoch_again(trainer: Any) -> None:
    """Let the training loader of this epoch start again, after the random generators
    are restored. A stock DataLoader has drawn its order before that.

    No issue is known.
    """
    iter(trainer.fit_loop._data_fetcher)


def make_train_loader(trainer: Any) -> None:
    """Let Lightning make the training loader now, so that `configure_optimizers` knows
    the number of steps. Only the loop has a function for it."""
    trainer.fit_loop.setup_data()


def forget_train_loader(trainer: Any) -> None:
    """Let Lightning make the training loader again at the start of training.

    A loader that was made in `configure_optimizers` would not get its state from the
    checkpoint: Lightning issue 20550. Lightning's finders of batch size and learning
    rate do the same.
    """
    trainer.fit_loop._combined_loader = None


def batch_index(trainer: Any) -> int:
    """Return the index of the newest training batch in its epoch, from 0; -1 before the
    first one. Callbacks get it in the hooks of a batch only."""
    return trainer.fit_loop.batch_idx


def num_batches(trainer: Any) -> int:
    """Return the number of training batches so far, over all epochs. The Trainer counts
    only steps of optimizers."""
    return trainer.fit_loop.total_batch_idx + 1


def batches_trained(trainer: Any) -> int:
    """Return the number of batches of this epoch whose steps are done."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.processed


def batches_in_flight(trainer: Any) -> int:
    """Return how many batches of this epoch are fetched and not trained yet: 1 within a
    step, otherwise 0. A checkpoint that is saved within a step repeats the step.

    A step that takes `dataloader_iter` fetches what it wants. No issue is known.
    """
    loop = trainer.fit_loop
    if not isinstance(loop._data_fetcher, _PrefetchDataFetcher):
        return 0
    return loop._data_fetcher.fetched - batches_trained(trainer)


def epochs_done(trainer: Any) -> int:
    """Return the number of epochs whose batches are all done. `trainer.current_epoch`
    counts an epoch only after its checkpoints are written."""
    return trainer.fit_loop.epoch_progress.current.processed


def logged_step(trainer: Any) -> int:
    """Return how many batches have ended in an optimizer step: the x of the next point
    in the loggers.

    There is no public name, and `global_step` counts each optimizer: Lightning issues
    13752 and 20240.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def saved_epochs(checkpoint: Checkpoint) -> dict[str, Counts]:
    """Return the counts of epochs in a checkpoint. Under "current", "ready" counts the
    epochs that have begun, "processed" the epochs whose batches are all done."""
    return checkpoint["loops"]["fit_loop"]["epoch_progress"]


def saved_logged_step(checkpoint: Checkpoint) -> int:
    """Return `logged_step` of a training that continues from a checkpoint.

    A ModelCheckpoint with `every_n_train_steps` writes before Lightning counts the
    batch. The steps of a single optimizer are counted then; of several, there are none.
    """
    loop = checkpoint["loops"]["fit_loop"]
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    num_batches = loop["epoch_loop.state_dict"]["_batches_that_stepped"]
    return max(num_batches, steps["step"]["total"]["completed"])


def newest_batch(trainer: Any) -> Any:
    """Return the batch that the step gets. `track` counts its samples if it is given
    nothing else to count, as `self.log` does.

    There is no public name, and no issue is known.
    """
    return trainer._results.batch


def has_epoch_means(trainer: Any) -> bool:
    """Return whether a mean of `self.log(..., on_epoch=True)` waits for the end of this
    epoch. Lightning keeps such means in no checkpoint. No issue is known."""
    results = trainer._results.valid_items()
    return any(result.meta.on_epoch for _, result in results)


def skip_ended_epoch(trainer: Any) -> None:
    """Let a training that resumes between two epochs start with the next one.

    With max_steps, Lightning treats the end of an epoch as the middle of the next one.
    From a checkpoint that a hook on_train_epoch_start has saved, it would find the
    epoch over. The public setter of `restarting` always sets True: Lightning issue
    19617.
    """
    loop = trainer.fit_loop
    if loop.restarted_on_epoch_end:
        loop.epoch_progress.increment_completed()
        loop.reset_restart_stage()
        loop._restarting = False
        loop.epoch_loop.restarting = False
    if loop.restarted_on_epoch_start:
        loop.epoch_loop.restarting = False


def take_over_plateau_schedules(trainer: Any) -> Callable[[], None]:
    """Return a function that steps the schedules of an epoch that watch a metric. From
    now on Lightning does not step them: it would do so after it has written the epoch's
    checkpoint. No issue is known."""
    loop = trainer.fit_loop.epoch_loop
    update = loop.update_lr_schedulers

    def update_others(interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "step" or not update_plateau_schedulers:
            update(interval, update_plateau_schedulers)

    loop.update_lr_schedulers = update_others
    return functools.partial(update, "epoch", update_plateau_schedulers=True)


def leave_out_signals(trainer: Any) -> None:
    """Let Lightning set no signal handlers, and exchange no signals before each batch.

    Its exchange waits for the GPU each time: its issue 21487. Its pull request 21640
    adds an option. No issue about the handlers is known.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def call_between_steps(
    trainer: Any, function: Callable[[], None], is_due: Callable[[], bool]
) -> None:
    """Let Lightning call `function` after an optimizer step, where the state is
    complete: the curves are written, and neither a validation nor the end of the epoch
    follows or has just been. `is_due` tells before each step whether it is needed.

    The hooks of callbacks come before the curves. No issue is known.
    """
    loop = trainer.fit_loop.epoch_loop
    on_advance_end = loop.on_advance_end

    def advance_end(fetcher: Any) -> None:
        calls = is_due() and not loop._should_check_val_fx(fetcher)
        on_advance_end(fetcher)
        if calls and not loop.done and not loop._should_accumulate():
            function()

    loop.on_advance_end = advance_end


STEP_HOOKS = {
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
}


class WrittenIn(dict[type, list[Any]]):
    """{class: the attributes of the class and of its bases, up to Lightning's own}, of
    callbacks and modules."""

    def __missing__(self, cls: type) -> list[Any]:
        self[cls] = []
        for base in cls.__mro__:
            if base in (Callback, LightningModule):
                break
            self[cls].append(vars(base))
        return self[cls]


WRITTEN_IN = WrittenIn()


def written(hook: str, owners: Iterable[Any]) -> Iterator[Any]:
    """Yield the callbacks or modules for which somebody has written a hook, in the
    class or as an attribute of the object. It calls no function for the others."""
    for owner in owners:
        if hook in owner.__dict__:
            yield owner
            continue
        for names in WRITTEN_IN[owner.__class__]:
            if hook in names:
                yield owner
                break


@contextlib.contextmanager
def written_hooks_only() -> Iterator[None]:
    """Within this context, let Lightning call the hooks of a step only where somebody
    has written them, in its order and within its profiler. It would call each of them
    for each callback, 132 times a step with 22 callbacks. No issue is known.

    Every call looks again: a callback that is added, replaced or given a hook in the
    meantime is called.
    """
    functions: Any = call
    before = call._call_callback_hooks, call._call_lightning_module_hook

    def call_callbacks(trainer: Any, hook: str, *args: Any, **options: Any) -> None:
        if hook not in STEP_HOOKS:
            before[0](trainer, hook, *args, **options)
            return
        module, profiler = trainer.lightning_module, trainer.profiler
        outer = module._current_fx_name
        for callback in written(hook, trainer.callbacks):
            function = getattr(callback, hook)
            if function is None:
                continue
            module.__dict__["_current_fx_name"] = hook  # not by the slow __setattr__
            with profiler.profile(f"[Callback]{callback.state_key}.{hook}"):
                function(trainer, module, *args)
        module.__dict__["_current_fx_name"] = outer

    def call_module(trainer: Any, hook: str, *args: Any, **options: Any) -> Any:
        if hook in STEP_HOOKS and not [*written(hook, [trainer.lightning_module])]:
            return None
        return before[1](trainer, hook, *args, **options)

    functions._call_callback_hooks = call_callbacks
    functions._call_lightning_module_hook = call_module
    try:
        yield
    finally:
        functions._call_callback_hooks, functions._call_lightning_module_hook = before


def replace_optimization(trainer: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Let Lightning's loop call `run` to train a batch. Return the function that it
    would call. Both take the optimizer, the index of the batch, and the arguments of
    training_step by name.

    A strategy can replace only parts of this. No issue is known.
    """
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    original = optimization.run
    optimization.run = run
    return original


def count_optimizer_step(trainer: Any) -> None:
    """Count a step that Lightning has not made. No issue is known."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.automatic_optimization.optim_progress.optimizer
    progress.step.increment_ready()
    progress.zero_grad.increment_ready()
    progress.zero_grad.increment_started()
    progress.zero_grad.increment_completed()
    progress.step.increment_completed()


@contextlib.contextmanager
def trial_counters(
    trainer: Any, refuse: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """Within this context, Lightning counts steps of the optimizer apart. Whoever reads
    `global_step` calls `refuse`, if it is given. No issue is known."""
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    counted = optimization.optim_progress
    names: dict[str, Any] = {}
    if refuse:
        names = {"optimizer_steps": property(refuse)}
    optimization.optim_progress = type("Trial", (_OptimizationProgress,), names)()
    try:
        yield
    finally:
        optimization.optim_progress = counted


def started_processes(trainer: Trainer) -> list[subprocess.Popen]:
    """Return the other processes of this machine that Lightning has started by a
    command, as for ddp, or [] if there are none.

    Lightning does not look at their exit status: its issue 17248.
    """
    launcher = trainer.strategy.launcher
    return launcher.procs if isinstance(launcher, _SubprocessScriptLauncher) else []


def shard_over_all_processes(strategy: ModelParallelStrategy) -> None:
    """Let a ModelParallelStrategy make a mesh of all processes. Only the constructor
    takes the size, which is not known there."""
    strategy._data_parallel_size = strategy.num_nodes * strategy.num_processes


def follow_until_averaged(callback: WeightAveraging, module: LightningModule) -> None:
    """Copy the weights of the module into the average of a WeightAveraging, if nothing
    has been averaged yet. The average has the weights of the start otherwise.

    The first update copies the weights, and does not average. No issue is known.
    """
    average = callback._average_model
    if average is not None and not average.n_averaged:
        average.update_parameters(module)
        average.n_averaged.zero_()


def flattened(checkpoint: Checkpoint) -> Checkpoint:
    """Return the values in the dicts and lists of a checkpoint by the names that
    torch.distributed.checkpoint gives them, such as "state_dict.net.0.weight". Torch
    has no public function for this."""
    return flatten_state_dict(checkpoint)[0]


def round_as_eager() -> None:
    """Let the kernels of inductor round to bf16 and float16 where eager steps do.

    A fused kernel keeps float32. The gradient of amax, which compares values with their
    rounded maximum, then finds none that is equal, and divides by 0: NaN. Seen with
    torch 2.11 and 2.15; no issue is known. torch.compile takes no `options` beside
    `mode`.
    """
    torch._inductor.config.emulate_precision_casts = True
