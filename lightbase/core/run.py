"""A training, from the record of the run to its test result.

Read `train` first. It lets the extras check what can be checked without a folder, makes
the folder and the callbacks, opens the loggers, makes the Trainer, and calls
`fit_and_test`. A run can end early by a mistake of the user, a full disk or a signal:
`end_early` and `short_endings` handle this.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import (
    MisconfigurationException,
    SIGTERMException,
)

from lightbase.core.build import make_trainer
from lightbase.core.callbacks import AverageFollows, leave, make_callbacks
from lightbase.core.checkpoint import AtomicCheckpointIO
from lightbase.core.compat import epochs_done
from lightbase.core.device_errors import short_device_errors
from lightbase.core.devices import (
    check_devices,
    describe_devices,
    num_processes_started,
)
from lightbase.core.errors import UserError, first_line, rank, say
from lightbase.core.extra import Extra
from lightbase.core.files import json_text, read_json, relative_to_cwd
from lightbase.core.folder import Run, root_folder, script_command
from lightbase.core.monitor import choose_monitor
from lightbase.core.record import RunRecorder, best_callback, recorder_of
from lightbase.core.signals import SIGNALS, Stopped
from lightbase.core.spec import RunSpec
from lightbase.core.state_errors import state_errors
from lightbase.core.testing import NO_TEST, best_checkpoint, run_test, say_results


def train(
    spec: RunSpec,
    model: LightningModule,
    data: LightningDataModule,
    extras: Sequence[Extra] = (),
) -> tuple[dict[str, Any], Trainer]:
    """Train and test. Return the content of metrics.json, and the Trainer.

    Only the first process (rank 0) makes the run's folder and writes into it. With
    fast_dev_run, no process does. The folder is made as late as possible, so that a
    wrong setting leaves no folder behind. It is locked until this function ends.

    spec, model, data: As `lightbase.core.build.build` has made them.
    extras: They watch the training and do not change it. Without the extra that opens
        loggers, the run has no curves.
    Raises UserError for a mistake of the user, and Stopped after a signal.
    """
    config = spec.config
    root = root_folder(config)
    check_devices(config.trainer)
    if rank() == 0:
        for extra in extras:
            extra.before_run(spec, model, data)
    monitor = choose_monitor(config, model, data)
    run = None
    if rank() == 0 and not config.trainer.fast_dev_run:  # others write nothing
        run = Run(root, config.name, spec.folder)
    try:
        folder = root
        if run:
            folder = run.checkpoints
        first = [extra for extra in extras if extra.is_first]
        others = [extra for extra in extras if not extra.is_first]
        callbacks = make_callbacks(spec, folder, run, monitor, others)
        with ExitStack() as stack, short_device_errors():
            loggers: list[Logger] = []
            for extra in extras:
                loggers += stack.enter_context(extra.around_run(spec, model, run))
            checks = []
            if monitor:  # without one, no validation has measured best.ckpt
                checks = [extra.check_best for extra in extras]
            trainer = make_trainer(
                spec,
                model,
                callbacks,
                first=[AverageFollows(), *first],
                logger=loggers or False,
                plugins=[AtomicCheckpointIO(checks)],
            )
            metrics = fit_and_test(trainer, model, data, spec, run)
            return metrics, trainer
    except (Exception, Stopped) as error:
        if run:
            end_early(run, error, config, model)
        raise
    finally:
        if run:
            run.close()


def end_early(
    run: Run, error: Exception | Stopped, config: Any, model: LightningModule
) -> None:
    """Keep or remove the folder of a run that could not finish. Raise UserError if
    somebody has removed it.

    A folder with a checkpoint stays. If a signal ended this run, `error` gets the
    command that continues it. A folder without a checkpoint is removed if the run is
    new. But after a signal, it stays if the run was to write no checkpoints. After an
    unexpected error it stays if the run has trained: the curves show what has happened.

    error: The error that ends the run.
    config: The settings of the run.
    """
    run.check_exists()
    is_reported = isinstance(error, UserError | OSError | Stopped)
    if model.global_step and not is_reported:
        return
    has_checkpoints = config.trainer.enable_checkpointing is not False
    if any(run.checkpoints.glob("*.ckpt")):
        if isinstance(error, Stopped):
            error.hint = f"; to continue:\n{resume_command(run)}"
    elif run.is_new and (has_checkpoints or not isinstance(error, Stopped)):
        run.discard()


def resume_command(run: Run) -> str:
    """Return the command that continues this run. It has no other settings of the run,
    because the checkpoint has them. Paths are relative to the working folder."""
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
    run: Run | None,
) -> dict[str, Any]:
    """Train, test the best checkpoint, write and print the results. Return the content
    of metrics.json. With --test false nothing is tested.

    spec: The record of the run.
    run: The run's folder, or None in a process that writes nothing.
    Raises Stopped after a signal, and UserError for a flag that Lightning refuses only
    in the training.
    """
    say(describe_devices(trainer))
    recorder = recorder_of(trainer)
    path = spec.checkpoint
    test_metrics: dict[str, Any] = {}
    without = NO_TEST
    with short_endings(trainer, recorder), state_errors(path):
        trainer.fit(model, data, ckpt_path=path, weights_only=True)
        say_best(trainer)
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
    leave(trainer)
    say_results(values, best, without)
    if run:
        say(f"Run folder: {relative_to_cwd(run.folder)}")
    else:
        say("fast_dev_run: nothing written")
    return values


def how_to_test(spec: RunSpec, run: Run | None, best: Path | None) -> str:
    """Return the line in place of a test that --test false has left out.

    run: The run's folder, or None in a process that writes nothing.
    best: The checkpoint that would be tested, or None if there is none.
    """
    text = "No test (--test false)"
    if spec.config.get("built_in_python"):  # scripts cannot open such a run
        return f'{text}; the same call with test=True, ckpt_path="last" tests it'
    if run and best:
        path = f"{spec.config.name}/{run.folder.name}"
        command = script_command("evaluate.py", path, run.root)
        return f"{text}; to test it: python {command}"
    return text


def say_best(trainer: Trainer) -> None:
    """Print which epoch is the best, if a metric compares epochs."""
    best = best_callback(trainer)
    if best and best.monitor:
        text = best.best_text(epochs_done(trainer))
        if text:
            say(text)


@contextmanager
def short_endings(trainer: Trainer, recorder: RunRecorder) -> Iterator[None]:
    """Turn Lightning's errors about flags into UserError, and its SIGTERMException,
    which ends a training after a signal, into Stopped.

    A ValueError or RuntimeError is about a flag only if it has a known text. Otherwise
    it is a bug, and is raised as it is.
    """
    try:
        yield
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        line = first_line(error)
        is_of_flag = line.startswith(("`val_check_interval`", "Early stopping"))
        if not is_of_flag and not isinstance(error, MisconfigurationException):
            raise
        raise UserError(line, status=2) from error
    except SIGTERMException as error:
        # the state is saved; Lightning would exit with status 0 (its issue 21623)
        SIGNALS.waits = False
        recorder.write_progress(trainer)
        leave(trainer)
        if trainer.local_rank > 0 and num_processes_started() == (0, 0):
            # Lightning has started this process. It ends the run if one fails.
            sys.exit(0)
        raise Stopped(SIGNALS.received) from error
