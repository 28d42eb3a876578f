"""The process that sweep.py starts to train trials, one after the other.

A trial's number, values and state stand in the study, Optuna's; all else in its run folder. Whoever
trains a trial holds its lock. A trial that is running in the study and that nobody holds is gone on
with, from its last checkpoint.
"""

import contextlib
import gc
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from filelock import FileLock, Timeout
from optuna.trial import TrialState

from lightbase.cli.script import short_errors
from lightbase.compat import quiet_lightning, unfinished_trial
from lightbase.devices.devices import cpu_threads
from lightbase.devices.signals import SIGNALS, Stopped
from lightbase.errors import UserError, first_line
from lightbase.folder import PROJECT, versions
from lightbase.resume.checkpoints import read_checkpoint
from lightbase.run.train import parse, train
from lightbase.tools.sweep_report import Report
from lightbase.tools.sweep_search import dimension, suggest
from lightbase.tools.sweep_study import CANNOT_WRITE, STARTUP, cannot_write, open_study, sampler


class Worker:
    """Trains trials until there are no more.

    task: root and name of the sweep, seed, flags, search, num_trials, monitor (None where nothing
    is compared), prune, num_warmup (validations before it prunes), index of the worker.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.folder = Path(task["root"], task["name"])
        self.dimensions = [dimension(search) for search in task["search"]]
        pruner = optuna.pruners.MedianPruner(STARTUP, task["num_warmup"]) if task["prune"] else None
        self.study = open_study(self.folder / "study.db", pruner)
        self.note = self.folder / f".worker_{task['index']}"  # the trial that dies with it

    def run(self) -> None:
        while found := self.next_trial():
            trial, lock = found
            try:
                self.run_trial(trial)
            finally:
                lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)
            self.note.write_text("")
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def next_trial(self) -> tuple[optuna.Trial, Any] | None:
        """One that was left, or a new one, with its lock; None where all are finished."""
        while True:
            with FileLock(self.folder / ".study.lock"):
                trials = self.study.get_trials(deepcopy=False)
                left = [trial for trial in trials if trial.state == TrialState.RUNNING]
                for trial in left:
                    if lock := self.lock(trial.number):
                        if (
                            self.study.get_trials(deepcopy=False)[trial.number].state
                            == TrialState.RUNNING
                        ):
                            self.study.sampler = sampler(self.task["seed"], trial.number)
                            return unfinished_trial(self.study, trial), lock
                        lock.release()  # another worker has just finished it
                waiting = [trial.number for trial in trials if trial.state == TrialState.WAITING]
                if waiting or len(trials) < self.task["num_trials"]:
                    number = min(waiting, default=len(trials))
                    lock = self.lock(number)
                    self.study.sampler = sampler(self.task["seed"], number)
                    return self.study.ask(), lock
            if not left:
                return None
            time.sleep(0.5)  # another worker has them, and may die

    def lock(self, number: int) -> FileLock | None:
        lock = FileLock(self.folder / f".trial_{number:03d}.lock", blocking=False)
        try:
            lock.acquire()
        except Timeout:
            return None
        self.note.write_text(str(number))
        return lock

    def run_trial(self, trial: optuna.Trial) -> None:
        name = f"trial_{trial.number:03d}"
        place = [
            f"--name={self.task['name']}/{name}",
            f"--trainer.default_root_dir={self.task['root']}",
        ]
        flags = [f"--{found.flag}={found.text(suggest(trial, found))}" for found in self.dimensions]
        (self.folder / name).mkdir(exist_ok=True)
        runs = list(versions(self.folder / name).values())
        if runs and (runs[-1] / "config.yaml").is_file():
            args = ["--ckpt_path=last", *place]  # a resume has its own config
        else:
            args = [*self.task["flags"], *flags, *place, *["--ckpt_path=last"] * bool(runs)]
        if not runs or not (runs[-1] / "metrics.json").is_file():
            with output_to(self.folder / name / "output.txt"), SIGNALS.handled():
                try:
                    train_reporting(
                        args, Report(trial, self.task["monitor"]), [*self.task["flags"], *flags]
                    )
                except Exception as error:
                    if cannot_write(error):
                        raise  # it is no fault of the trial's
                    if isinstance(error, UserError):
                        print(f"error: {error}", file=sys.stderr, flush=True)
                        self.fail(trial, "; ".join(str(error).splitlines()), error.status == 2)
                        return
                    traceback.print_exc()
                    self.fail(trial, f"{type(error).__name__}: {first_line(error)}", True)
                    if torch.cuda.is_initialized():
                        raise  # the GPU may be lost for this process
                    return
        self.tell(trial, list(versions(self.folder / name).values())[-1])

    def tell(self, trial: optuna.Trial, run: Path) -> None:
        """Of a run that has ended."""
        score = 0.0
        if self.task["monitor"]:
            best = read_checkpoint(run / "checkpoints" / "last.ckpt")["callbacks"][
                "RunCheckpoint/best"
            ]
            known = best["best_model_score"]
            if best["monitor"] != self.task["monitor"] or known is None or not math.isfinite(known):
                self.fail(trial, f"there is no best epoch by {self.task['monitor']}", True)
                return
            score = float(known)
        for key, value in json.loads((run / "metrics.json").read_text()).items():
            trial.set_user_attr(key, value)
        if "pruned" in trial.user_attrs:
            trial.set_user_attr("best", score)
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, score)

    def fail(self, trial: optuna.Trial, reason: str, is_mistake: bool) -> None:
        """is_mistake: others may well fail in the same way."""
        trial.set_user_attr("reason", reason)
        trial.set_user_attr("is_mistake", is_mistake)
        self.study.tell(trial, state=TrialState.FAIL)


def train_reporting(args: Sequence[str], report: Report, first_flags: Sequence[str]) -> None:
    """first_flags: those of the trial; `args` of one that goes on has fewer."""
    sys.argv = [
        str(PROJECT.root / "scripts" / "train.py"),
        *args,
    ]  # for environment.txt: it repeats the run
    cli = parse(args, first_flags)
    own = cli.config_init.trainer.callbacks or []
    cli.config_init.trainer.callbacks = [*(own if isinstance(own, list) else [own]), report]
    with cpu_threads(cli.config.num_threads):
        train(cli)


@contextlib.contextmanager
def output_to(file: Path) -> Iterator[None]:
    """What this process and those that it starts print goes to the file, behind what is there."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with file.open("a") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for i in range(2):
                os.dup2(kept[i], i + 1)
                os.close(kept[i])


def end_with_sweep() -> None:
    """A killed sweep.py closes the pipe that is this process's stdin: the next one finds the trial
    free."""
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with_sweep, daemon=True).start()
    with short_errors():
        quiet_lightning()
        # what the imports have made need not be looked at after each trial, which takes 0.3 s
        gc.freeze()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            Worker(json.loads(sys.argv[1])).run()
        except Stopped as stopped:  # sweep.py has the word
            sys.exit(stopped.code)
        except Exception as error:
            if cannot_write(error):
                sys.exit(CANNOT_WRITE)
            raise
        finally:
            gc.unfreeze()  # or nanobind, of Triton, tells of leaks at the end
