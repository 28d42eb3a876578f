"""Search the flags of train.py. Each trial is a run; lists alone are a grid."""

import contextlib
import gc
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
import yaml
from filelock import FileLock, Timeout
from numpy.random import SeedSequence

from lightbase.commands import arguments
from lightbase.commands.runs import as_lines, as_table, as_text
from lightbase.commands.script import short_errors
from lightbase.core.callbacks import end_with_parent
from lightbase.core.checks import choose_selection, load_data
from lightbase.core.compat import quiet_lightning
from lightbase.core.config import write_config
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import check_one_device, cpu_threads, num_gpus
from lightbase.core.errors import UserError, first_line, printable
from lightbase.core.folder import (
    PLACE,
    PROJECT,
    flatten,
    is_running,
    read_json,
    refuse_links,
    root_folder,
    short,
    write_whole,
)
from lightbase.core.run import parse, train
from lightbase.core.signals import SIGNALS, Stopped

NUMBER = r"-?\d*\.?\d+(?:e[-+]?\d+)?"
RANGE = re.compile(rf"(log:)?({NUMBER})\.\.({NUMBER})")
NOT_SEARCHED = (*PLACE, "monitor", "monitor_mode")  # the monitor compares the trials
REPEATS = (
    "data.fold",
    "seed_everything",
)  # flags that repeat a training: the mean counts


class Dimension(NamedTuple):
    """A flag that is searched."""

    flag: str
    texts: list[str]  # the values of a list, as they are typed; of a range both ends
    range: Any = None  # as Optuna describes it; None for a list

    def argument(self, value: Any) -> str:
        """The argument of train.py."""
        return f"--{self.flag}={value}"


def read_search(search: str) -> Dimension:
    """Read FLAG=log:1e-4..1e-1, FLAG=16..512 or FLAG=a,b,c. Raises UserError."""
    flag, _, values = (part.strip() for part in search.partition("="))
    # --model.init_args.lr is model.lr
    flag = (
        flag.removeprefix("--").replace(".init_args.", ".").removesuffix(".class_path")
    )
    if flag in NOT_SEARCHED:
        raise UserError(f"--search {search}: {flag} cannot be searched", status=2)
    if match := RANGE.fullmatch(values):
        try:
            return Dimension(flag, [match[2], match[3]], read_range(*match.groups()))
        except (ImportError, ValueError) as error:
            needs = 'a range needs a lower end, and Optuna: pip install -e ".[sweep]"'
            raise UserError(f"--search {search}: {error}", needs, 2) from error
    text = f"[{values}]"  # YAML splits at the commas outside brackets and quotes
    try:
        items = yaml.compose(text).value  # type: ignore[union-attr]
    except yaml.YAMLError:
        items = []
    if not flag or not items:
        forms = "FLAG=a,b,c, FLAG=1..9 or FLAG=log:1e-4..1e-1"
        raise UserError(f"--search {search!r}: give {forms}", status=2)
    return Dimension(
        flag, [text[item.start_mark.index : item.end_mark.index] for item in items]
    )


def read_range(log: str | None, low: str, high: str) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    if re.search(r"[.e]", low + high):
        return FloatDistribution(float(low), float(high), log=log is not None)
    return IntDistribution(int(low), int(high), log=log is not None)


@dataclass
class Trial:
    """A trial as trial.json in its folder records it."""

    folder: Path
    values: dict[
        str, Any
    ]  # by flag; of a list the text that is typed, of a range a number
    state: str = "running"  # also after a kill; or finished, or failed
    reason: str = ""

    @classmethod
    def read(cls, folder: Path) -> "Trial":
        record = read_json(folder / "trial.json")
        if [*map(type, record.values())] != [dict, str, str]:
            raise UserError(
                f"{folder / 'trial.json'} is damaged: delete the folder of the trial"
            )
        return cls(folder, **record)

    def write(self) -> None:
        record = {"values": self.values, "state": self.state, "reason": self.reason}
        write_whole(self.folder / "trial.json", json.dumps(record, indent=2) + "\n")

    @property
    def run(self) -> Path:
        """The run's folder; before the first start the trial's."""
        return max(self.folder.glob("version_*"), default=self.folder)

    def result(self, name: str) -> dict[str, Any]:
        """What the run has written into progress.json or metrics.json."""
        file = self.run / name
        return read_json(file) if file.exists() else {}

    @property
    def best(self) -> float | None:
        """The best value of the monitored metric."""
        return self.result("progress.json").get("best")


@dataclass
class Sweep:
    """The trials in a folder, which several processes may train at once.

    A process holds the lock of a trial's folder while it trains the trial. A trial that
    is running and that no process holds was interrupted; it is continued.
    """

    dimensions: list[Dimension]
    flags: list[str]  # of train.py, which all trials have
    num_trials: int  # 0 before `begin`: all of a grid
    folder: Path = Path()
    # the config of the first trial; `monitor` is None in a grid without a validation
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> list[tuple[str, ...]]:
        """The values of each trial; empty if Optuna chooses them."""
        if any(dimension.range for dimension in self.dimensions):
            return []
        texts = [dimension.texts for dimension in self.dimensions]
        return list(itertools.product(*texts))[: self.num_trials or None]

    def trials(self) -> list[Trial]:
        return [
            Trial.read(file.parent)
            for file in sorted(self.folder.glob("trial_*/trial.json"))
        ]

    def best(self, groups: Iterable[list[Trial]]) -> list[Trial]:
        """The group with the best mean of the monitored metric; empty if there is
        none."""
        choose = max if self.record["monitor_mode"] == "max" else min
        compared = groups if self.record["monitor"] else []
        return choose(
            compared, key=lambda group: fmean(x.best or 0.0 for x in group), default=[]
        )

    def open_trials(self) -> Generator[Trial, None, None]:
        """Yield each trial to train, locked. Waits for those of other processes: they
        may die."""
        is_waiting = True
        while is_waiting:
            is_waiting = False
            for number in range(self.num_trials):
                folder = self.folder / f"trial_{number:03d}"
                folder.mkdir(exist_ok=True)
                try:
                    refuse_links([folder, *folder.glob("*"), folder / ".lock"])
                    with FileLock(folder / ".lock", blocking=False):
                        if not (folder / "trial.json").exists():
                            Trial(folder, self.choose_values(number)).write()
                        trial = Trial.read(folder)
                        if trial.state == "running":
                            yield trial
                except Timeout:
                    is_waiting = True
            time.sleep(0.5 * is_waiting)

    def choose_values(self, number: int) -> dict[str, Any]:
        """The values follow from the seed, the number and the results of the other
        trials."""
        if self.grid:
            flags = [dimension.flag for dimension in self.dimensions]
            return dict(zip(flags, self.grid[number], strict=True))
        import optuna
        from optuna.distributions import CategoricalDistribution

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = int(
            SeedSequence([self.record["seed_everything"], number]).generate_state(1)[0]
        )
        direction: Any = (
            "maximize" if self.record["monitor_mode"] == "max" else "minimize"
        )
        sampler = optuna.samplers.TPESampler(seed=seed)
        study = optuna.create_study(direction=direction, sampler=sampler)
        ranges: dict[str, Any] = {
            flag: values or CategoricalDistribution(texts)
            for flag, texts, values in self.dimensions
        }
        for trial in self.trials():
            if trial.state == "finished":
                past: Any = {
                    "params": trial.values,
                    "distributions": ranges,
                    "value": trial.best,
                }
                study.add_trial(optuna.trial.create_trial(**past))
        return dict(study.ask(ranges).params)


@contextlib.contextmanager
def workers(args: Sequence[str], num: int) -> Iterator[None]:
    """While this lasts, `num` more processes, each with the next GPU, share the
    trials."""
    command = [
        sys.executable,
        str(PROJECT.root / "scripts" / "sweep.py"),
        *args,
        "--worker",
    ]
    env = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (num + 1)))
    } | os.environ
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(num_gpus())]
    started = []
    try:
        for i in range(num):
            gpu = {"CUDA_VISIBLE_DEVICES": gpus[(i + 1) % len(gpus)]} if gpus else {}
            started.append(subprocess.Popen(command, env=env | gpu))
        yield
        for process in started:
            process.wait()
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def train_trials(sweep: Sweep) -> None:
    """Train trials until all have ended. What a training prints goes to output.txt."""
    start = time.monotonic()
    with contextlib.closing(sweep.open_trials()) as trials:
        for num_trained, trial in enumerate(trials, start=1):
            with (
                SIGNALS.handled(),
                (trial.folder / "output.txt").open(
                    "a", buffering=1, encoding="utf-8"
                ) as output,
                contextlib.redirect_stdout(output),
                contextlib.redirect_stderr(output),
            ):
                train_trial(sweep, trial)
            trial.write()
            seconds = (time.monotonic() - start) / num_trained
            print(printable(describe_progress(sweep, trial, seconds)), flush=True)
            gc.collect()  # frees the memory of the GPU
            if torch.cuda.is_initialized():
                # raises if the trial has left the GPU unusable
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            if (
                SIGNALS.received
            ):  # during a failed training or gc.collect, where it raises nothing
                raise Stopped(SIGNALS.received)


def describe_progress(sweep: Sweep, ended: Trial, seconds: float) -> str:
    """A line for a trial that has ended. seconds: For a trial, the mean of this
    process."""
    trials = sweep.trials()
    running = [trial for trial in trials if trial.state == "running"]
    best = sweep.best([trial] for trial in trials if trial.state == "finished")
    num_ended = len(trials) - len(running)
    num_processes = 1 + sum(is_running(trial.folder) for trial in running)
    left = str(
        timedelta(
            seconds=round(seconds * (sweep.num_trials - num_ended) / num_processes)
        )
    )
    text = f"Trial {num_ended} of {sweep.num_trials}"
    text += (
        f", best {sweep.record['monitor']} {as_text(best[0].best, '/')}" if best else ""
    )
    values = [
        f"{flag.rpartition('.')[2]} {as_text(value)}"
        for flag, value in ended.values.items()
    ]
    text += f", {left.removeprefix('0:').removeprefix('0')} left; {', '.join(values)}"
    return f"{text}: " + (
        f"failed, {ended.reason}" if ended.reason else as_text(ended.best, "/")
    )


def train_trial(sweep: Sweep, trial: Trial) -> None:
    """Train a trial, or continue it, and note how it ended."""
    values = [item.argument(trial.values[item.flag]) for item in sweep.dimensions]
    flags = [*sweep.flags, *values]
    name = f"--name={sweep.folder.name}/{trial.folder.name}"
    args = [name, f"--trainer.default_root_dir={sweep.folder.parent}"]
    can_go_on = (trial.run / "checkpoints" / "last.ckpt").is_file()
    args += (
        ["--ckpt_path=last"] if can_go_on else flags
    )  # a resume has the run's config
    try:
        if not (trial.run / "metrics.json").is_file():
            if trial.run != trial.folder and not can_go_on:
                shutil.rmtree(trial.run)  # killed before its first checkpoint
            cli = parse(args)
            with cpu_threads(cli.config.num_threads):
                train(cli)
        if sweep.record["monitor"] is not None and trial.best is None:
            raise UserError(
                f"no epoch has a value of {sweep.record['monitor']}", status=2
            )
        trial.state = "finished"
    except Exception as error:
        trial.state = "failed"
        trial.reason = f"{type(error).__name__}: {first_line(error)}"
        traceback.print_exc()


def show_results(sweep: Sweep) -> None:
    """Print the trials, the means over folds or seeds, the best flags, and the next
    command."""
    trials = sweep.trials()
    compared = [item for item in sweep.dimensions if item.flag not in REPEATS]
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        if trial.state == "finished":
            values = tuple(trial.values[item.flag] for item in compared)
            groups.setdefault(values, []).append(trial)
    best = sweep.best(groups.values()) if compared else []
    rows = []
    for trial in trials:
        mark = "best" if trial in best else trial.state.removeprefix("finished")
        first = {"": mark, "trial": trial.folder.name}
        metric = {str(sweep.record["monitor"]): trial.best}
        rows.append(
            first | metric | trial.values | {"state": trial.reason or trial.state}
        )
    print("\n".join(as_lines(rows)))
    if not groups:
        raise UserError(
            f"no trial finished: see {short(sweep.folder / 'trial_000/output.txt')}"
        )
    if len(compared) < len(sweep.dimensions):
        print_means(groups, [item.flag for item in compared])
    if best:
        flags = [
            *sweep.flags,
            *(item.argument(best[0].values[item.flag]) for item in compared),
        ]
        if "data.fold" in best[0].values:
            flags.append("--data.num_folds=null")
        print(f"Best flags: {shlex.join(flags)}")
    where = [sweep.folder.name]
    if sweep.folder.parent != PROJECT.logs:
        where.append(f"--trainer.default_root_dir={short(sweep.folder.parent)}")
    print(
        f"Tests and curves: python scripts/runs.py {shlex.join(where)} --plot curves.png"
    )


def print_means(
    groups: dict[tuple[Any, ...], list[Trial]], flags: Sequence[str]
) -> None:
    """Print mean, standard deviation and standard error of each test metric of each
    group."""
    rows = [(*flags, "metric", "n", "mean", "spread", "standard error")]
    for values, trials in groups.items():
        tests = [trial.result("metrics.json") for trial in trials]
        for name in tests[0]:
            numbers = [test[name] for test in tests if test.get(name) is not None]
            if (
                name.startswith("test/")
                and name != "test/num_samples"
                and len(numbers) > 1
            ):
                spread = stdev(numbers)
                cells = (fmean(numbers), spread, spread / len(numbers) ** 0.5)
                texts = [f"{cell:.4g}" for cell in cells]
                rows.append((*map(str, values), name, str(len(numbers)), *texts))
    print("\n".join(as_table(rows)))


def main(args: Sequence[str] | None = None) -> list[Trial]:
    """Train the trials. Returns them in the order of their numbers."""
    with short_errors():
        args = sys.argv[1:] if args is None else args
        options, flags = arguments.sweep().read(args)
        if options.worker:
            end_with_parent(is_worker=True)
        quiet_lightning()
        dimensions = [read_search(search) for search in options.search]
        sweep = Sweep(dimensions, flags, options.trials or 0)
        begin(sweep, options.name, options.search)
        if not options.worker:
            print(
                f"{sweep.num_trials} trials in {short(sweep.folder)}, each with its output.txt"
            )
        try:
            with workers(args, 0 if options.worker else options.num_workers - 1):
                train_trials(sweep)
        except Stopped as stopped:
            stopped.hint = "; the same command continues"
            raise
        if not options.worker:
            show_results(sweep)
        return sweep.trials()


def begin(sweep: Sweep, name: str | None, search: list[str]) -> None:
    """Check all values, prepare the data, and write or compare sweep.json. Raises
    UserError."""
    sweep.num_trials = len(sweep.grid) or sweep.num_trials
    if not sweep.num_trials:
        raise UserError("--trials N: how many? a range has no end", status=2)
    if not sweep.grid and any(
        dimension.flag in REPEATS for dimension in sweep.dimensions
    ):
        raise UserError(
            f"{' and '.join(REPEATS)} repeat a training: search lists only, a grid",
            status=2,
        )
    num_values = max(len(dimension.texts) for dimension in sweep.dimensions)
    for i in reversed(range(num_values)):
        values = [
            f"--{flag}={texts[i % len(texts)]}" for flag, texts, _ in sweep.dimensions
        ]
        cli = parse([*sweep.flags, *values])
        check_one_device(cli.config.trainer)
    # the last command has the first values
    selection = choose_selection(cli.config, cli.model, cli.datamodule)
    if selection is None and not sweep.grid:
        raise UserError(
            "a search compares trials by a validation, and there is none", status=2
        )
    cli.config.name = name or f"{cli.config.name}_sweep"
    sweep.folder = root_folder(cli.config).absolute() / cli.config.name
    if isinstance(cli.datamodule, BaseDataModule):
        load_data(cli.datamodule, with_test=False)  # once, a download for instance
    config = flatten(write_config(cli.parser, cli.config)[0])
    record = {key: value for key, value in config.items() if key not in PLACE}
    monitor, mode = selection or (None, None)
    record |= {"search": search, "monitor": monitor, "monitor_mode": mode}
    text = json.dumps(record, indent=2) + "\n"
    sweep.folder.mkdir(parents=True, exist_ok=True)
    file = sweep.folder / "sweep.json"
    lock = sweep.folder / ".sweep.lock"
    refuse_links([sweep.folder, lock])
    with FileLock(lock):
        if not file.exists():
            write_whole(file, text)
    sweep.record = now = json.loads(text)
    before = read_json(file)
    for key in before | now:
        if before.get(key) != now.get(key):
            what = (
                f"--{key} {now.get(key)}: {short(sweep.folder)} has {before.get(key)}"
            )
            raise UserError(what, "give the same, or another --name", 2)
