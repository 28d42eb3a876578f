"""Search the flags of train.py: each trial is a run. Lists alone are a grid, which a cross-validation is, too.

python scripts/sweep.py --config configs/small_net.yaml --search model.lr=log:1e-4..1e-1 --trials 20
python scripts/sweep.py --config configs/small_net.yaml --search model.lr=0.001,0.01 --search data.batch_size=32,64
python scripts/sweep.py --config configs/small_net.yaml --data.num_folds 5 --search data.fold=0,1,2,3,4

FLAG=a,b,c is a list of values, FLAG=16..512 a range, of whole numbers where both ends are, FLAG=log:1e-4..1e-1 one on a
logarithmic scale. Optuna's TPE chooses the values, its median pruner stops trials that fall behind by --monitor.
The same command goes on after a kill. All other flags are train.py's; runs and study are in ROOT/NAME, NAME_sweep
of the config unless --name is given. See docs/sweep.md.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from project.engine.script import ScriptParser, short_errors  # isort: skip  # first: it hears Ctrl-C

from filelock import FileLock, Timeout

from project.base.errors import UserError
from project.engine.cli import TrainingCLI
from project.engine.devices import num_gpus
from project.engine.folder import root_folder
from project.engine.quiet import quiet_lightning
from project.engine.run import parse, short
from project.engine.selection import choose_selection
from project.engine.signals import Stopped

with short_errors():
    if importlib.util.find_spec("optuna") is None:
        raise UserError('sweep.py needs optuna: pip install -e ".[sweep]"', 2)

import optuna
from optuna.trial import TrialState
from sweep_results import line, repeats_of, show
from sweep_search import Dimension, begin, dimension, open_study

PRUNES = {"true": True, "false": False}


def main(args: Sequence[str] | None = None) -> Any:
    """Returns the study."""
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--search", action="append", required=True, metavar="FLAG=VALUES", help="may stand repeatedly")
    parser.add_argument("--trials", type=int, help="how many; of a grid at most so many")
    parser.add_argument("--num_workers", type=int, default=1, help="processes that train a trial each, on a GPU each")
    parser.add_argument("--prune", choices=list(PRUNES), help="stop trials below the median; true unless it is a grid")
    parser.add_argument("--name", help="folder of the sweep below ROOT; that of the config and _sweep unless given")
    with short_errors():
        options, flags = parser.parse_known_args(args)
        quiet_lightning()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        dimensions = [dimension(search) for search in options.search]
        is_grid = all(found.is_list for found in dimensions)
        check_options(options, flags, dimensions, is_grid)
        cli = parse_all(flags, dimensions)
        selection = choose_selection(cli.config, cli.model, cli.datamodule)
        if selection is None and not is_grid:
            raise UserError("a search compares trials by a validation, and there is none: see the line above", 2)
        cli.config.name = name = options.name or f"{cli.config.name}_sweep"
        root = root_folder(cli.config)
        cli.datamodule.prepare_data()  # once: a download, for instance
        (root / name).mkdir(parents=True, exist_ok=True)
        with held(root / name):
            num_trials = begin(root / name, cli, dimensions, selection, options.trials)
            max_epochs = max(0, cli.config.trainer.max_epochs or 0)
            task = {
                **{"root": str(root.absolute()), "name": name, "seed": cli.config.seed_everything, "flags": flags},
                **{"search": options.search, "num_trials": num_trials, "monitor": selection and selection.monitor},
                **{"prune": PRUNES.get(options.prune, not is_grid), "num_warmup": max_epochs // 3},
            }
            train_all(root / name, task, options.num_workers, gpus(cli.config.trainer))
            study = open_study(root / name / "study.db")
            command = shlex.join(["python", short(Path(__file__).with_name("train.py")), *flags])
            show(study, root / name, dimensions, selection, command)
        return study


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Against another sweep.py."""
    try:
        with FileLock(folder / ".sweep.lock", blocking=False):
            yield
    except Timeout:
        raise UserError(f"{short(folder)} is in use by another sweep.py; --num_workers is for more") from None


def check_options(options: Any, flags: Sequence[str], dimensions: Sequence[Dimension], is_grid: bool) -> None:
    given = [flag.partition("=")[0].removeprefix("--") for flag in flags if flag.startswith("--")]
    given = [flag for flag in given if flag != "config"]  # a later one adds to it
    searched = [found.flag for found in dimensions]
    for flag in searched:
        if flag in given or searched.count(flag) > 1:
            raise UserError(f"--search {flag}: the flag stands twice; leave one out", 2)
    for flag in {"ckpt_path", "trainer.fast_dev_run"} & {*given}:
        raise UserError(f"--{flag} is no flag for a sweep: each trial is a run of its own, which goes on by itself", 2)
    if not is_grid and repeats_of(dimensions):
        raise UserError("data.fold and seed_everything repeat a training: search them by lists alone, as a grid", 2)
    if not is_grid and options.trials is None:
        raise UserError("--trials N: how many? a range has no end", 2)
    for flag in ("trials", "num_workers"):
        if (value := getattr(options, flag)) is not None and value < 1:
            raise UserError(f"--{flag} {value}: 1 is the least", 2)


def parse_all(flags: Sequence[str], dimensions: Sequence[Dimension]) -> TrainingCLI:
    """Each value in turn, beside the first ones of the others: what is wrong is found before a trial. Returns the
    first."""
    first = [f"--{found.flag}={found.texts[0]}" for found in dimensions]
    cli = parse([*flags, *first])
    trainer: Any = cli.config.trainer
    if trainer.strategy not in ("auto", "single_device", "dp") or not (trainer.devices in (1, "1") or one(trainer)):
        raise UserError("sweep.py trains a trial on one device: leave --trainer.strategy and --trainer.devices out", 2)
    if trainer.enable_checkpointing is False:
        raise UserError("trainer.enable_checkpointing false: a sweep goes by checkpoints; leave it out", 2)
    if cli.given.get("seed_everything") is True:
        raise UserError("seed_everything true draws another seed for each trial: give a number, or search a list", 2)
    for i, found in enumerate(dimensions):
        for text in found.texts[1:]:
            parse([*flags, *first[:i], f"--{found.flag}={text}", *first[i + 1 :]])
    return cli


def one(trainer: Any) -> bool:
    return isinstance(trainer.devices, list) and len(trainer.devices) == 1


def gpus(trainer: Any) -> list[str]:
    """Those that workers take in turn; none where the flags name one, or the CPU."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = seen.split(",") if seen else [str(i) for i in range(num_gpus())]
    return [] if trainer.accelerator == "cpu" or one(trainer) or trainer.strategy == "dp" else names


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
                    print(line(trial, task["monitor"]), flush=True)
                    said.add(trial.number)
            check_failures(trials, folder)
            num_left = task["num_trials"] - sum(trial.state.is_finished() for trial in trials)
            for index in range(num_workers):
                process = workers.get(index)
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
        stopped.hint = f"; {len(said)} of {task['num_trials']} trials are finished, the same command goes on"
        raise
    finally:
        for process in workers.values():
            process.kill()
        for file in folder.glob(".worker_*"):
            file.unlink(missing_ok=True)


def start_worker(task: dict[str, Any], num_workers: int, devices: Sequence[str]) -> subprocess.Popen[bytes]:
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_workers))} if num_workers > 1 else {}
    gpu = {"CUDA_VISIBLE_DEVICES": devices[task["index"] % len(devices)]} if devices else {}
    program = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import sweeping; sweeping.main()"
    command = [sys.executable, "-c", program, json.dumps(task)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env={**threads, **os.environ, **gpu})


def note_death(study: Any, folder: Path, index: int, status: int, died: Counter[int]) -> None:
    """Of a worker: its trial goes on in the next one, and has failed where that dies, too."""
    note = folder / f".worker_{index}"
    number = int(note.read_text() or -1) if note.exists() else -1
    why = signal.Signals(-status).name if status < 0 else f"status {status}"
    died[number] += 1
    if number == -1 and died[number] > 2:
        raise UserError(f"a worker ended with {why} before its trial, three times: the reason stands above")
    if number >= 0 and died[number] > 1 and not study.get_trials(deepcopy=False)[number].state.is_finished():
        trial = optuna.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
        memory = ", as one that takes more memory than there is" * (status == -signal.SIGKILL)
        trial.set_user_attr("reason", f"its process died twice by {why}{memory}")
        study.tell(trial, state=TrialState.FAIL)
    note.unlink(missing_ok=True)


def check_failures(trials: Sequence[Any], folder: Path) -> None:
    """Raise UserError where the first three have all failed alike, by a mistake in the flags or the code."""
    ended = [trial for trial in trials if trial.state.is_finished()]
    reasons = {trial.user_attrs.get("reason") for trial in ended if trial.user_attrs.get("is_mistake")}
    if len(ended) >= 3 and len(reasons) == 1 and all(trial.user_attrs.get("is_mistake") for trial in ended):
        way_out = f"mend it, then give another --name, or remove {short(folder)}"
        raise UserError(f"the first {len(ended)} trials failed alike: {reasons.pop()}\n{way_out}")


if __name__ == "__main__":
    main()
