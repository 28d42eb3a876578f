"""A training, from its settings to the result of its test.

Read `train` first: it shows a training from start to end. `fit_and_test` and `run_test`
follow, then the callbacks and the Trainer of a run.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import (
    ProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import (
    MisconfigurationException,
    SIGTERMException,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from lightbase.compat import epochs_done, written_hooks_only
from lightbase.config.errors import (
    SEE_HELP,
    UserError,
    first_line,
    imported,
    rank,
    say,
)
from lightbase.config.files import as_text, json_text, read_json, relative_to_cwd
from lightbase.config.spec import RunSpec, as_list, as_yaml, check_round_trip
from lightbase.model.curves import is_of_class
from lightbase.model.module import BaseModule
from lightbase.model.monitor import choose_monitor
from lightbase.model.scores import CONSTANTS, constant_name
from lightbase.run.checkpoint import (
    AtomicCheckpointIO,
    ValidatedWeights,
)
from lightbase.run.devices import (
    check_devices,
    check_strategy,
    describe_devices,
    num_processes_started,
)
from lightbase.run.folder import LockedFolder, root_folder, script_command
from lightbase.run.record import RunRecorder, best_callback, recorder_of
from lightbase.run.results import read_file
from lightbase.run.signals import SIGNALS, Stopped
from lightbase.run.state import (
    note_on_state,
)
from lightbase.run.stops import (
    end_processes,
)


def train(
    spec: RunSpec,
    model: LightningModule,
    data: LightningDataModule,
    dry_run: Callable[[RunSpec, LightningModule, LightningDataModule], None],
    open_loggers: Callable[
        [RunSpec, LockedFolder | None], AbstractContextManager[list[Logger]]
    ],
    make_callbacks: Callable[..., list[Callback]],
) -> tuple[dict[str, Any], Trainer]:
    """Train and test. Return the content of metrics.json, and the Trainer.

    Only the first process (rank 0) makes the run's folder and writes into it. With
    fast_dev_run, no process does. The folder is made as late as possible, so that a
    wrong setting leaves no folder behind. It is locked until this function ends.

    Args:
        spec, model, data: The result of `lightbase.setup.build.build`.
        dry_run: Tries the parts of the run. Only the first process calls it.
        open_loggers: Returns a context in which the run's loggers are open. It gets
            None in a process that writes nothing.
        make_callbacks: Returns the callbacks of the run, from the record, the model,
            the run's RunRecorder and the metric that compares epochs, or None.

    Raises:
        UserError: For a mistake of the user.
        Stopped: After a signal.
    """
    config = spec.config
    root = root_folder(config)
    check_devices(config.trainer)
    if rank() == 0:
        dry_run(spec, model, data)
    monitor = choose_monitor(config, model, data)
    run = None
    if rank() == 0 and not config.trainer.fast_dev_run:
        run = LockedFolder(root, config.name, spec.folder)
    try:
        text = as_yaml(spec)
        values = check_round_trip(spec, text)
        if run and run.is_new:
            run.write("config.yaml", text)  # a run that is killed soon can start again
        recorder = RunRecorder(values, text, run)
        callbacks = make_callbacks(spec, model, recorder, monitor)
        with open_loggers(spec, run) as loggers:
            checkpoint_io = AtomicCheckpointIO()
            for callback in callbacks:
                if isinstance(callback, ValidatedWeights):
                    checkpoint_io.validated = callback
            trainer = make_trainer(
                spec, callbacks, logger=loggers or False, plugins=[checkpoint_io]
            )
            metrics = fit_and_test(trainer, model, data, spec, run)
            return metrics, trainer
    except (Exception, Stopped) as error:
        if run:
            end_early(run, error)
        raise
    finally:
        if run:
            run.close()


def end_early(run: LockedFolder, error: Exception | Stopped) -> None:
    """Remove the folder of a new run that has made no step. After a signal, `error`
    gets the command that continues a run with a checkpoint.

    Raise UserError if somebody has removed the folder.
    """
    run.check_exists()
    progress = read_file(run.folder / "progress.json")
    if any(run.checkpoints.glob("*.ckpt")):
        if isinstance(error, Stopped):
            error.hint = f"; to continue:\n{resume_command(run)}"
    elif run.is_new and not progress.get("steps"):
        run.discard()


def resume_command(run: LockedFolder) -> str:
    """Return the command that continues this run, for the working folder."""
    start = "torchrun (or srun) ..."
    if num_processes_started() == (0, 0):
        start = "python"
    path = relative_to_cwd(run.checkpoints / "last.ckpt")
    return f"{start} {script_command('train.py', path, run.root)}"


def fit_and_test(
    trainer: Any,
    model: LightningModule,
    data: LightningDataModule,
    spec: RunSpec,
    run: LockedFolder | None,
) -> dict[str, Any]:
    """Train, test the best checkpoint unless --test is false, and write and print the
    results. Return the content of metrics.json.

    run: The run's folder, or None in a process that writes nothing.
    """
    say(describe_devices(trainer))
    recorder = recorder_of(trainer)
    path = spec.checkpoint
    test_metrics: dict[str, Any] = {}
    without = NO_TEST
    with short_endings(trainer, recorder):
        try:
            with written_hooks_only():
                trainer.fit(model, data, ckpt_path=path, weights_only=True)
        except Exception as error:
            if path and not recorder.has_started:  # Lightning was restoring the state
                error.add_note(note_on_state(path))
            raise
        checkpoints = best_callback(trainer)
        if checkpoints:
            checkpoints.say_best(epochs_done(trainer))
        best = best_checkpoint(trainer)
        if spec.config.test:
            test_metrics = run_test(trainer, model, data, best)
        else:
            without = how_to_test(spec, run, best)
    length = recorder.length(trainer)
    if run:  # with ddp_spawn another process has trained, and has written the file
        progress = read_json(run.folder / "progress.json")
        length = {key: progress[key] for key in length}
    values = test_metrics | length
    SIGNALS.waits = True  # the run is complete: a signal no longer ends it
    if run:
        run.write("metrics.json", json_text(values, indent=2) + "\n")
    end_processes(trainer)
    say_results(values, best, without)
    if run:
        say(f"Run folder: {relative_to_cwd(run.folder)}")
    else:
        say("fast_dev_run: nothing written")
    return values


def how_to_test(spec: RunSpec, run: LockedFolder | None, best: Path | None) -> str:
    """Return the line in place of a test that --test false has left out.

    best: The checkpoint that would be tested, or None.
    """
    text = "No test (--test false)"
    if spec.config.get("built_in_python"):  # scripts cannot open such a run
        return f'{text}; the same call with test=True, ckpt_path="last" tests it'
    if run and best:
        path = f"{spec.config.name}/{run.folder.name}"
        command = script_command("evaluate.py", path, run.root)
        return f"{text}; to test it: python {command}"
    return text


@contextmanager
def short_endings(trainer: Trainer, recorder: RunRecorder) -> Iterator[None]:
    """Turn Lightning's SIGTERMException, which ends a training after a signal, into
    Stopped. Note in progress.json which error ends a training."""
    try:
        yield
    except SIGTERMException as error:
        # the state is saved; Lightning would exit with status 0 (its issue 21623)
        SIGNALS.waits = False
        recorder.write_progress(trainer)
        end_processes(trainer)
        if trainer.local_rank > 0 and num_processes_started() == (0, 0):
            # Lightning has started this process. It ends the run if one fails.
            sys.exit(0)
        raise Stopped(SIGNALS.received) from error
    except Exception as error:
        if recorder.has_started:
            failed = f"{type(error).__name__}: {first_line(error)}"
            try:
                recorder.write_progress(trainer, failed=failed)
            except UserError as unwritten:  # the disk may be full
                say(first_line(unwritten))
        raise


LENGTHS = ("epochs", "steps", "train_seconds")
"""Keys of metrics.json beside the metrics."""

NO_TEST = (
    "No test: the model or the data has none, the data has no batch for it, or nothing "
    "is logged with self.track or self.log"
)
"""The line in place of the test metrics."""


def best_checkpoint(trainer: Trainer) -> Path | None:
    """Return the path of best.ckpt, or None. All processes have to call this: the
    first one decides, because only it writes the file."""
    best = best_callback(trainer)
    if best is None:
        return None
    path = Path(str(best.dirpath), "best.ckpt")
    if trainer.strategy.broadcast(path.is_file()):
        return path
    return None


def run_test(
    trainer: Any, model: LightningModule, data: LightningDataModule, path: Path | None
) -> dict[str, Any]:
    """Test a checkpoint. Return the metrics; {} if there are none, see `NO_TEST`.

    The random generators are seeded with 0 for the test, and restored after it. So the
    result does not depend on random numbers that the training has drawn.

    Args:
        trainer: Loses its callbacks of type WeightAveraging.
        path: The checkpoint, or None to test the weights that the model has now.
    """
    if not has_test(model, data):
        return {}
    # best.ckpt holds the averaged weights; WeightAveraging would replace them
    trainer.callbacks = [
        callback
        for callback in trainer.callbacks
        if not isinstance(callback, WeightAveraging)
    ]
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        results = trainer.test(
            model, data, ckpt_path=path, verbose=False, weights_only=True
        )
    metrics: dict[str, Any] = {}
    for result in results:
        for key, value in result.items():
            # in the digits of float32: 0.979, not 0.9789999723434448
            metrics[key] = float(str(np.float32(value)))
            if key == "test/num_samples":
                metrics[key] = int(value)
    return metrics


def has_test(model: LightningModule, data: LightningDataModule) -> bool:
    """Return whether the model has a test_step and the data a test_dataloader."""
    return is_overridden("test_step", model) and is_overridden("test_dataloader", data)


def say_results(
    values: Mapping[str, Any], tested: Path | None, without: str = NO_TEST
) -> None:
    """Print the length of the training and the test metrics. Metrics of single classes
    follow, the lowest value first.

    Args:
        values: The content of metrics.json.
        tested: The checkpoint that was tested, or None for the last weights.
        without: The line in place of the test metrics if there are none.
    """
    say(
        f"Trained {values['epochs']} epochs, {values['steps']:,} steps in "
        f"{values['train_seconds']:.1f} s"
    )
    metrics = [name for name in values if name not in LENGTHS]
    if not metrics:
        say(without)
        return
    weights = "the last weights"
    if tested:
        weights = f"the best checkpoint {relative_to_cwd(tested)}"
    texts = []
    for name in filterfalse(is_of_class, metrics):
        text = f"{name} {as_text(values[name])}"
        for constant in CONSTANTS:
            if f"{name}_{constant}" in values:
                score = as_text(values[f"{name}_{constant}"])
                text += f" ({constant_name(constant)}: {score})"
        if not name.endswith(tuple(CONSTANTS)):
            texts.append(text)
    say(f"Test of {weights}: {', '.join(texts)}")
    class_metrics = filter(is_of_class, metrics)
    for name in sorted(class_metrics, key=values.__getitem__):  # the worst class first
        say(f"  {name:<40}{as_text(values[name])}")


def users_callbacks(spec: RunSpec, model: LightningModule) -> list[Callback]:
    """Return the callback that logs the curves, and those of the settings, which see
    what it logs. The user may override `configure_callbacks`."""
    callbacks = as_list(spec.trainer["callbacks"])
    if isinstance(model, BaseModule):
        return [model.curves_callback, *callbacks]
    return callbacks


NAMED_OR_CLASS = {
    "accelerator": Accelerator,
    "strategy": Strategy,
    "profiler": Profiler,
}
"""{argument of the Trainer that is a name of Lightning's or an import path: base class
of what it names}"""


def make_trainer(spec: RunSpec, callbacks: list[Callback], **options: Any) -> Trainer:
    """Return the Trainer that the settings of a run describe.

    Args:
        callbacks: All callbacks, also those of the settings.
        options: Arguments that replace the settings, except `plugins`, which are added.
            A CheckpointIO of the settings takes the place of ours.

    Raises:
        UserError: If devices are missing, or if the Trainer refuses its arguments.
    """
    check_devices(spec.config.trainer)
    trainer_options = spec.trainer | options
    plugins = as_list(spec.trainer["plugins"])
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins = [*plugins, *options.get("plugins", [])]
    if trainer_options["val_check_interval"] == 0:
        raise UserError(
            "trainer.val_check_interval 0: more than 0 of an epoch, or 1 batch, is the "
            "least",
            status=2,
        )
    if trainer_options["enable_progress_bar"] is None:
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        trainer_options["enable_progress_bar"] = has_bar
    mistakes = (
        MisconfigurationException,
        ValueError,
        TypeError,
        ImportError,
        RuntimeError,
    )
    try:
        for name, base in NAMED_OR_CLASS.items():
            value = trainer_options[name]
            if isinstance(value, str) and "." in value:
                trainer_options[name] = imported(f"trainer.{name}", value, base)()
        trainer_options |= {"plugins": plugins, "callbacks": callbacks}
        trainer = Trainer(**trainer_options)
    except mistakes as error:
        problem = f"the trainer flags do not fit: {first_line(error)}"
        raise UserError(problem, SEE_HELP, status=2) from error
    check_strategy(trainer.strategy)
    return trainer
