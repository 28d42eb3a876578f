"""The processes that train the trials of a sweep, sweeping.py: starts them, and looks after
them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from lightbase.compat import unfinished_trial
from lightbase.devices.signals import Stopped
from lightbase.errors import UserError
from lightbase.folder import PROJECT, short
from lightbase.ranks import printable
from lightbase.tools.sweep_results import line
from lightbase.tools.sweep_study import CANNOT_WRITE, open_study


def train_all(folder: Path, task: dict[str, Any], num_workers: int, devices: Sequence[str]) -> None:
    """Have workers train until all trials are finished, and print a line for each."""
    study = open_study(folder / "study.db")
    workers, died = dict[int, subprocess.Popen[bytes]](), Counter[int]()
    said = {trial.number for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()}
    if said:
        print(f"Going on: {len(said)} of {task['num_trials']} trials are finished", flush=True)
    try:
        while True:
            trials = study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state.is_finished() and trial.number not in said:
                    print(printable(line(trial, task["monitor"])), flush=True)
                    said.add(trial.number)
            check_failures(trials, folder)
            num_left = task["num_trials"] - sum(trial.state.is_finished() for trial in trials)
            for index in range(num_workers):
                process = workers.get(index)
                if process and process.poll() == CANNOT_WRITE:
                    what = f"{short(folder)} cannot be written, as on a full disk"
                    way_out = "make room, then give the same command, which goes on"
                    raise UserError(
                        f"{what}; {len(said)} of {task['num_trials']} trials are "
                        f"finished\n{way_out}"
                    )
                if process and process.poll():
                    note_death(study, folder, index, process.returncode, died)
                if num_left > index if process is None else num_left and process.poll() is not None:
                    workers[index] = start_worker({**task, "index": index}, num_workers, devices)
            if num_left == 0 and all(process.poll() is not None for process in workers.values()):
                return
            time.sleep(0.2)
    except Stopped as stopped:
        for process in workers.values():
            process.terminate()
        for process in workers.values():
            process.wait()
        stopped.hint = (
            f"; {len(said)} of {task['num_trials']} trials are finished, the same command goes on"
        )
        raise
    finally:
        for process in workers.values():
            process.kill()
        for file in folder.glob(".worker_*"):
            file.unlink(missing_ok=True)


def start_worker(
    task: dict[str, Any], num_workers: int, devices: Sequence[str]
) -> subprocess.Popen[bytes]:
    threads = (
        {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_workers))}
        if num_workers > 1
        else {}
    )
    gpu = {"CUDA_VISIBLE_DEVICES": devices[task["index"] % len(devices)]} if devices else {}
    program = (
        "from lightbase.cli.script import starting\n"
        f"with starting({str(PROJECT.root / 'scripts' / 'sweep.py')!r}, "
        f"{PROJECT.default_model!r}):\n"
        "    from lightbase.tools import sweeping\n"
        "sweeping.main()"
    )
    command = [sys.executable, "-c", program, json.dumps(task)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**threads, **os.environ, **gpu})


def note_death(study: Any, folder: Path, index: int, status: int, died: Counter[int]) -> None:
    """Of a worker: its trial goes on in the next one, and has failed where that dies, too."""
    note = folder / f".worker_{index}"
    number = int(note.read_text() or -1) if note.exists() else -1
    why = signal.Signals(-status).name if status < 0 else f"status {status}"
    died[number] += 1
    if number == -1 and died[number] > 2:
        raise UserError(
            f"a worker ended with {why} before its trial, three times: the reason stands above"
        )
    if (
        number >= 0
        and died[number] > 1
        and not study.get_trials(deepcopy=False)[number].state.is_finished()
    ):
        trial = unfinished_trial(study, study.get_trials(deepcopy=False)[number])
        memory = ", as one that takes more memory than there is" * (status == -signal.SIGKILL)
        trial.set_user_attr("reason", f"its process died twice by {why}{memory}")
        study.tell(trial, state=TrialState.FAIL)
    note.unlink(missing_ok=True)


def check_failures(trials: Sequence[Any], folder: Path) -> None:
    """Raise UserError where the first three have all failed alike, by a mistake in the flags or the
    code."""
    ended = [trial for trial in trials if trial.state.is_finished()]
    reasons = {
        trial.user_attrs.get("reason") for trial in ended if trial.user_attrs.get("is_mistake")
    }
    if (
        len(ended) >= 3
        and len(reasons) == 1
        and all(trial.user_attrs.get("is_mistake") for trial in ended)
    ):
        way_out = f"mend it, then give another --name, or remove {short(folder)}"
        raise UserError(f"the first {len(ended)} trials failed alike: {reasons.pop()}\n{way_out}")
