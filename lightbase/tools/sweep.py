"""Search the flags of train.py. Each trial is a run; lists alone are a grid.

python scripts/sweep.py --config configs/small_net.yaml --search model.lr=log:1e-4..1e-1 --trials 20
python scripts/sweep.py --config configs/small_net.yaml --search model.lr=0.001,0.01 --num_workers 2
python scripts/sweep.py --data.num_folds 3 --search data.fold=0,1,2 --name folds

FLAG=a,b,c is a list of values. FLAG=16..512 is a range, of whole numbers if both ends are whole;
FLAG=log:1e-4..1e-1 is a range on a logarithmic scale. Optuna's TPE chooses the values of ranges,
and its median pruner stops trials that are worse than the others by --monitor. The same command
continues after a kill. All other flags are those of train.py. See docs/sweep.md.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from filelock import FileLock
from jsonargparse.typing import PositiveInt
from lightning import Callback, LightningModule, Trainer
from numpy.random import SeedSequence

from lightbase.cli.config import write_config
from lightbase.cli.script import ScriptParser, short_errors
from lightbase.compat import quiet_lightning
from lightbase.devices.devices import cpu_threads, num_gpus
from lightbase.devices.processes import end_with_parent
from lightbase.devices.signals import SIGNALS, Stopped
from lightbase.errors import UserError, first_line
from lightbase.folder import PLACE, PROJECT, flatten, is_running, root_folder, short, write_whole
from lightbase.ranks import printable
from lightbase.run.checks import choose_selection
from lightbase.run.train import parse, train
from lightbase.tools.runs import as_table

NUMBER = r"-?\d*\.?\d+(?:e[-+]?\d+)?"
RANGE = re.compile(rf"(log:)?({NUMBER})\.\.({NUMBER})")
NOT_FOR_TRIALS = ("ckpt_path", "trainer.fast_dev_run", "print_config")
# sweep.py sets the first two; trials are compared by the others
NOT_SEARCHED = ("name", "trainer.default_root_dir", "monitor", "monitor_mode")
# flags that repeat a training: what counts is the mean over them
REPEATS = ("data.fold", "seed_everything")
NUM_NOT_PRUNED = 5  # the first trials, from which the pruner takes its first median


class Dimension(NamedTuple):
    """A flag that is searched.

    texts: The values of a list, as they are typed; of a range both ends.
    range: The range as Optuna describes it; None for a list.
    """

    flag: str
    texts: list[str]
    range: Any = None

    def argument(self, value: Any) -> str:
        """Return the argument of train.py for a value from trial.json.

        The file may be somebody else's: raises UserError for a value that is not searched.
        """
        is_searched = value in self.texts
        if self.range is not None:
            is_number = isinstance(value, int | float)
            is_searched = is_number and self.range.low <= value <= self.range.high
        if not is_searched:
            raise UserError(f"trial.json has {self.flag} {value!r}, which --search does not have")
        return f"--{self.flag}={value}"


def read_search(search: str) -> Dimension:
    """Read FLAG=log:1e-4..1e-1, FLAG=16..512 or FLAG=a,b,c. Raises UserError."""
    flag, _, values = (part.strip() for part in search.partition("="))
    flag = plain_flag(flag)
    if flag in NOT_FOR_TRIALS + NOT_SEARCHED:
        raise UserError(f"--search {search}: {flag} cannot be searched", 2)
    if match := RANGE.fullmatch(values):
        try:
            return Dimension(flag, [match[2], match[3]], read_range(*match.groups()))
        except ValueError as error:
            raise UserError(f"--search {search}: {error}", 2) from error
        except ImportError as error:
            raise UserError('a range needs optuna: pip install -e ".[sweep]"', 2) from error
    text = f"[{values}]"  # YAML splits at the commas outside brackets and quotes
    try:
        items: Any = yaml.compose(text)
    except yaml.YAMLError:
        items = None
    if not flag or items is None or not items.value:
        forms = "FLAG=a,b,c, FLAG=1..9 or FLAG=log:1e-4..1e-1"
        raise UserError(f"--search {search!r}: give {forms}", 2)
    texts = [text[item.start_mark.index : item.end_mark.index] for item in items.value]
    return Dimension(flag, texts)


def read_range(log: str | None, low: str, high: str) -> Any:
    """Raises ValueError for ends that Optuna refuses."""
    from optuna.distributions import FloatDistribution, IntDistribution

    is_log = log is not None
    if re.search(r"[.e]", low + high):
        return FloatDistribution(float(low), float(high), log=is_log)
    return IntDistribution(int(low), int(high), log=is_log)


def plain_flag(flag: str) -> str:
    """The one name of a flag that has several: --model.init_args.lr is model.lr."""
    return flag.removeprefix("--").replace(".init_args.", ".").removesuffix(".class_path")


@dataclass
class Trial:
    """A trial as trial.json in its folder records it.

    values: By flag; of a list the text that is typed, of a range a number.
    state: running (also after a kill), finished, failed, or pruned: stopped below the median.
    best: The best value of the monitored metric.
    curve: The monitored metric by epoch, for the pruner.
    """

    folder: Path
    values: dict[str, Any]
    state: str = "running"
    best: float | None = None
    reason: str = ""
    curve: dict[int, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Trial":
        record = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
        record["curve"] = {int(epoch): value for epoch, value in record["curve"].items()}
        return cls(folder, **record)

    def write(self) -> None:
        record = asdict(self)
        del record["folder"]
        write_whole(self.folder / "trial.json", json.dumps(record, indent=2) + "\n")

    @property
    def run(self) -> Path | None:
        """The run's folder, None before the first start."""
        return max(self.folder.glob("version_*"), default=None)

    def result(self, name: str) -> dict[str, Any]:
        """What the run has written into progress.json or metrics.json."""
        file = (self.run or self.folder) / name
        return dict(json.loads(file.read_text())) if file.is_file() else {}


@dataclass
class Sweep:
    """The trials below ROOT/NAME, which several processes may train at once.

    A process holds the lock of a trial's folder while it trains the trial. A trial that is running
    and that no process holds was interrupted; it is continued.

    flags: Those of train.py that all trials have.
    """

    dimensions: list[Dimension]
    flags: list[str]
    num_trials: int
    prune: bool
    root: Path = Path()
    name: str = ""

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def lock(self) -> FileLock:
        """Held while a trial is taken, and while its end is recorded. Without it a process could
        take a trial that another process has just finished."""
        return FileLock(self.folder / ".sweep.lock")

    @cached_property
    def record(self) -> dict[str, Any]:
        """The search, and the config of the first trial. `monitor` compares trials; it is None in a
        grid without a validation."""
        return dict(json.loads((self.folder / "sweep.json").read_text()))

    def trials(self) -> list[Trial]:
        """In the order of their names."""
        return [Trial.read(file.parent) for file in sorted(self.folder.glob("trial_*/trial.json"))]

    def num_ended(self) -> int:
        return sum(trial.state != "running" for trial in self.trials())

    def progress(self) -> str:
        return f"{self.num_ended()} of {self.num_trials} trials have ended"

    def take_trial(self) -> tuple[Trial, FileLock] | None:
        """Return a trial to train, and its lock, which is held; None when all trials have ended.

        Waits for the trials of other processes, because these processes may die.
        """
        while True:
            with self.lock:
                trials = self.trials()
                running = [trial for trial in trials if trial.state == "running"]
                free = [trial for trial in running if not is_running(trial.folder)]
                taken = {trial.folder for trial in trials}
                numbers = [i for i in range(self.num_trials) if self.trial_folder(i) not in taken]
                if not free and numbers:
                    free = [self.new_trial(numbers[0], trials)]
                if free:
                    lock = FileLock(free[0].folder / ".lock")
                    lock.acquire()
                    return free[0], lock
            if not running:
                return None
            time.sleep(0.5)

    def trial_folder(self, number: int) -> Path:
        return self.folder / f"trial_{number:03d}"

    def new_trial(self, number: int, trials: Sequence[Trial]) -> Trial:
        trial = Trial(self.trial_folder(number), self.choose_values(number, trials))
        trial.folder.mkdir(exist_ok=True)
        trial.write()
        return trial

    def choose_values(self, number: int, trials: Sequence[Trial]) -> dict[str, Any]:
        """The values follow from the seed, the number and the results of the other trials."""
        if is_grid(self.dimensions):
            return combinations(self.dimensions)[number]
        from optuna.samplers import TPESampler

        seed = int(SeedSequence([self.record["seed_everything"], number]).generate_state(1)[0])
        study = self.study(trials, sampler=TPESampler(seed=seed))
        return dict(study.ask(self.distributions).params)

    @property
    def distributions(self) -> dict[str, Any]:
        """The values of each flag as Optuna describes them."""
        from optuna.distributions import CategoricalDistribution

        return {
            flag: values or CategoricalDistribution(texts)
            for flag, texts, values in self.dimensions
        }

    def study(self, trials: Sequence[Trial], **options: Any) -> Any:
        """An Optuna study, in memory, of the trials that have ended."""
        import optuna
        from optuna.trial import TrialState, create_trial

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction: Any = "maximize" if self.record["monitor_mode"] == "max" else "minimize"
        study = optuna.create_study(direction=direction, **options)
        states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
        for trial in trials:
            if trial.state in states:
                past = create_trial(
                    state=states[trial.state],
                    params=trial.values,
                    distributions=self.distributions,
                    value=trial.best,
                    intermediate_values=trial.curve,
                )
                study.add_trial(past)
        return study

    def is_below_median(self, trial: Trial, num_warmup: int) -> bool:
        """Whether the best epoch so far is worse than the median of the finished trials at the same
        epoch. Never in the first `num_warmup` epochs."""
        from optuna.pruners import MedianPruner

        study = self.study(self.trials(), pruner=MedianPruner(NUM_NOT_PRUNED, num_warmup))
        copy = study.ask()
        for epoch, value in trial.curve.items():
            copy.report(value, epoch)
        return bool(copy.should_prune())

    def end(self, trial: Trial) -> None:
        """Record and print how a trial ended."""
        with self.lock:
            trial.write()
        values = ", ".join(f"{flag} {value}" for flag, value in trial.values.items())
        result = trial.reason if trial.best is None else f"best {trial.best:.4g}"
        line = f"{trial.folder.name} {trial.state} ({values}): {result}"
        print(printable(line.rstrip(": ")), flush=True)


def is_grid(dimensions: Sequence[Dimension]) -> bool:
    """Whether all values are listed."""
    return all(dimension.range is None for dimension in dimensions)


def combinations(dimensions: Sequence[Dimension]) -> list[dict[str, str]]:
    """The values of each trial of a grid, by flag."""
    flags = [dimension.flag for dimension in dimensions]
    grid = itertools.product(*(dimension.texts for dimension in dimensions))
    return [dict(zip(flags, values, strict=True)) for values in grid]


class Report(Callback):
    """Records each epoch's validation in the trial, and stops a trial that is below the median."""

    def __init__(self, sweep: Sweep, trial: Trial) -> None:
        self.sweep, self.trial = sweep, trial

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.sweep.record["monitor"])
        is_whole_epoch = trainer.is_last_batch and not trainer.sanity_checking
        if not is_whole_epoch or value is None or not value.isfinite():
            return
        self.trial.curve[trainer.current_epoch + 1] = float(value)
        num_warmup = max(0, trainer.max_epochs or 0) // 3
        if self.sweep.is_below_median(self.trial, num_warmup):
            self.trial.state = "pruned"
            trainer.should_stop = True
        self.trial.write()


def train_trials(sweep: Sweep) -> None:
    """Train trials until all have ended. What a training prints goes to output.txt."""
    while (taken := sweep.take_trial()) is not None:
        trial, lock = taken
        try:
            with (
                SIGNALS.handled(),
                (trial.folder / "output.txt").open("a", buffering=1, encoding="utf-8") as output,
                contextlib.redirect_stdout(output),
                contextlib.redirect_stderr(output),
            ):
                train_trial(sweep, trial)
            sweep.end(trial)
        finally:
            lock.release()
        gc.collect()  # frees the memory of the GPU
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # raises if the trial has left the GPU unusable
            torch.cuda.empty_cache()
        if SIGNALS.received:  # during a failed training or gc.collect, where it raises nothing
            raise Stopped(SIGNALS.received)


def train_trial(sweep: Sweep, trial: Trial) -> None:
    """Train a trial, or continue it, and note how it ended."""
    values = [item.argument(trial.values[item.flag]) for item in sweep.dimensions]
    flags = [*sweep.flags, *values]
    name = f"--name={sweep.name}/{trial.folder.name}"
    args = [name, f"--trainer.default_root_dir={sweep.root}"]
    run = trial.run or trial.folder
    if trial.run is not None:
        args += ["--ckpt_path=last"]
    if not (run / "config.yaml").is_file():  # a resume has the run's config
        args = [*flags, *args]
    try:
        if not (run / "metrics.json").is_file():
            cli = parse(args, first_flags=flags)
            if sweep.prune:
                callbacks = cli.config_init.trainer.callbacks or []
                callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
                cli.config_init.trainer.callbacks = [*callbacks, Report(sweep, trial)]
            with cpu_threads(cli.config.num_threads):
                train(cli)
        if sweep.record["monitor"] is not None:
            trial.best = trial.result("progress.json").get("best")
            if trial.best is None:
                raise UserError(f"no epoch has a value of {sweep.record['monitor']}", 2)
        if trial.state == "running":
            trial.state = "finished"
    except Exception as error:
        trial.state = "failed"
        trial.reason = f"{type(error).__name__}: {first_line(error)}"
        traceback.print_exc()


def run_workers(sweep: Sweep, num_workers: int, args: Sequence[str]) -> None:
    """Train the trials in processes of this command, which take the GPUs in turn."""
    command = [sys.executable, str(PROJECT.root / "scripts" / "sweep.py"), *args]
    command += ["--worker", str(sweep.root), sweep.name]
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = names.split(",") if names else [str(i) for i in range(num_gpus())]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for i in range(num_workers):
            env = {"OMP_NUM_THREADS": str(num_threads)} | os.environ
            if gpus:
                env["CUDA_VISIBLE_DEVICES"] = gpus[i % len(gpus)]
            workers.append(subprocess.Popen(command, env=env))
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.terminate()
        statuses = [worker.wait() for worker in workers]
    if sweep.num_ended() < sweep.num_trials:
        what = f"{sweep.progress()}; the workers ended with status {statuses}"
        raise UserError(f"{what}\nif a reason is above, correct it; the same command continues")


def check_options(options: Any, flags: Sequence[str], dimensions: Sequence[Dimension]) -> None:
    """Raise UserError for flags that a sweep cannot have."""
    given = [plain_flag(flag.partition("=")[0]) for flag in flags if flag.startswith("--")]
    searched = [dimension.flag for dimension in dimensions]
    for flag in NOT_FOR_TRIALS:
        if flag in given:
            raise UserError(f"--{flag} is no flag for a sweep: each trial is a run", 2)
    for flag in searched:
        # a second --config adds to the first one
        if flag != "config" and [*given, *searched].count(flag) > 1:
            raise UserError(f"--search {flag}: the flag is given twice; leave one out", 2)
        if flag in REPEATS and not is_grid(dimensions):
            raise UserError(f"--search {flag} repeats a training: search lists only, a grid", 2)
    if not is_grid(dimensions) and options.trials is None:
        raise UserError("--trials N: how many? a range has no end", 2)


def check_one_device(trainer: Any) -> None:
    """Raise UserError for flags of the Trainer that name several devices, or a certain one."""
    if trainer.strategy not in ("auto", "single_device") or trainer.devices not in (1, "1"):
        what = "this command trains on one device"
        raise UserError(f"{what}: leave --trainer.strategy and --trainer.devices out", 2)


def show_results(sweep: Sweep) -> None:
    """Print the means over folds or seeds, the best flags, and the command for the table."""
    finished = [trial for trial in sweep.trials() if trial.state == "finished"]
    if not finished:
        raise UserError(f"no trial finished: see {short(sweep.folder / 'trial_000/output.txt')}")
    compared = [item for item in sweep.dimensions if item.flag not in REPEATS]
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in finished:
        values = tuple(trial.values[item.flag] for item in compared)
        groups.setdefault(values, []).append(trial)
    has_repeats = len(compared) < len(sweep.dimensions)
    if has_repeats:
        print_means(groups, [item.flag for item in compared])
    monitor = sweep.record["monitor"]
    if monitor is not None and compared:
        means = {key: statistics.fmean(run.best or 0.0 for run in groups[key]) for key in groups}
        choose = max if sweep.record["monitor_mode"] == "max" else min
        best = groups[choose(means, key=means.__getitem__)][0]
        if not has_repeats:
            file = short((best.run or best.folder) / "checkpoints" / "best.ckpt")
            print(f"Best checkpoint, {monitor} {best.best:.4g}: {file}")
        flags = [*sweep.flags, *(item.argument(best.values[item.flag]) for item in compared)]
        if "data.fold" in best.values:
            flags.append("--data.num_folds=null")
        print(f"Best flags: {shlex.join(flags)}")
    flags = [sweep.name, f"--trainer.default_root_dir={short(sweep.root)}"]
    print(f"Table of the trials: python scripts/runs.py {shlex.join(flags)}")


def print_means(groups: dict[tuple[Any, ...], list[Trial]], flags: Sequence[str]) -> None:
    """Print mean, standard deviation and standard error of each test metric of each group."""
    rows = [(*flags, "metric", "n", "mean", "spread", "standard error")]
    for values, trials in groups.items():
        tests = [trial.result("metrics.json") for trial in trials]
        for name in dict.fromkeys(name for test in tests for name in test):
            numbers = [test[name] for test in tests if test.get(name) is not None]
            if not name.startswith("test/") or name == "test/num_samples" or not numbers:
                continue
            spread = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
            cells = (statistics.fmean(numbers), spread, spread / len(numbers) ** 0.5)
            texts = [f"{cell:.4g}" for cell in cells]
            rows.append((*map(str, values), name, str(len(numbers)), *texts))
    print("\n".join(as_table(rows)))


def main(args: Sequence[str] | None = None) -> list[Trial]:
    """Train the trials. Returns them in the order of their numbers."""
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("--search", action="append", required=True, metavar="FLAG=VALUES", help="repeatable")
    add("--trials", type=PositiveInt, help="how many; of a grid at most so many")
    add("--num_workers", type=PositiveInt, default=1, help="processes that train, on a GPU each")
    prune = "stop trials that are below the median; true unless it is a grid"
    add("--prune", choices=["true", "false"], help=prune)
    add("--name", help="the sweep is in ROOT/NAME; the config's name and _sweep unless given")
    add("--worker", nargs=2, help=argparse.SUPPRESS)  # ROOT and NAME, for run_workers
    with short_errors():
        args = list(sys.argv[1:] if args is None else args)
        options, flags = parser.parse_known_args(args)
        quiet_lightning()
        dimensions = [read_search(search) for search in options.search]
        if options.prune is None:
            options.prune = "false" if is_grid(dimensions) else "true"
        check_options(options, flags, dimensions)
        if is_grid(dimensions):
            options.trials = len(combinations(dimensions)[: options.trials])
        sweep = Sweep(dimensions, flags, options.trials, options.prune == "true")
        if options.worker is not None:
            sweep.root, sweep.name = Path(options.worker[0]), options.worker[1]
            end_with_parent(is_worker=True)
            train_trials(sweep)
            return []
        begin(sweep, options.name, options.search)
        print(sweep.progress(), flush=True)
        try:
            if options.num_workers == 1:
                train_trials(sweep)
            else:
                run_workers(sweep, min(options.num_workers, sweep.num_trials), args)
        except Stopped as stopped:
            stopped.hint = f"; {sweep.progress()}, the same command continues"
            raise
        show_results(sweep)
        return sweep.trials()


def begin(sweep: Sweep, name: str | None, search: list[str]) -> None:
    """Check all values, prepare the data, and write sweep.json, or see that it has the same search
    and config. Raises UserError."""
    num_values = max(len(dimension.texts) for dimension in sweep.dimensions)
    for i in reversed(range(num_values)):
        values = [f"--{flag}={texts[i % len(texts)]}" for flag, texts, _ in sweep.dimensions]
        cli = parse([*sweep.flags, *values])
        check_one_device(cli.config.trainer)
    # the last command has the first values
    selection = choose_selection(cli.config, cli.model, cli.datamodule)
    if selection is None and not is_grid(sweep.dimensions):
        raise UserError("a search compares trials by a validation, and there is none", 2)
    cli.config.name = name or f"{cli.config.name}_sweep"
    sweep.root, sweep.name = root_folder(cli.config).absolute(), cli.config.name
    cli.datamodule.prepare_data()  # once, a download for instance
    config = flatten(write_config(cli.parser, cli.config)[0])
    record = {key: value for key, value in config.items() if key not in PLACE}
    monitor, mode = selection[:2] if selection else (None, None)
    record |= {"search": search, "monitor": monitor, "monitor_mode": mode}
    text = json.dumps(record, indent=2) + "\n"
    sweep.folder.mkdir(parents=True, exist_ok=True)
    file = sweep.folder / "sweep.json"
    with sweep.lock:
        if not file.exists() and any(sweep.folder.glob("trial_*")):
            what = f"{short(sweep.folder)} has trials of an earlier version"
            raise UserError(f"{what}\ngive another --name")
        if not file.exists():
            write_whole(file, text)
    now, before = json.loads(text), sweep.record
    for key in before | now:
        if before.get(key) != now.get(key):
            what = f"--{key} {now.get(key)}: this sweep was begun with {before.get(key)}"
            way_out = f"give the same, or another --name; {short(sweep.folder)} has the trials"
            raise UserError(f"{what}\n{way_out}", 2)
