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
import importlib.util
import itertools
import json
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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from filelock import FileLock
from jsonargparse.typing import PositiveInt
from lightning import Callback, LightningModule, Trainer
from numpy.random import SeedSequence

from lightbase.cli.config import write_config
from lightbase.cli.script import DISK_ERRORS, ScriptParser, short_errors
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.devices.devices import cpu_threads, num_gpus
from lightbase.devices.processes import end_with_parent
from lightbase.devices.signals import SIGNALS, Stopped
from lightbase.errors import UserError, first_line
from lightbase.folder import (
    PLACE,
    PROJECT,
    flatten,
    is_running,
    root_folder,
    short,
    versions,
    write_whole,
)
from lightbase.ranks import printable
from lightbase.run.checks import choose_selection
from lightbase.run.train import parse, train
from lightbase.tools.tables import as_table

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
    ends: The two ends of a range, None for a list.
    """

    flag: str
    texts: list[str]
    ends: tuple[float, float] | None = None
    is_log: bool = False

    def argument(self, value: Any) -> str:
        """Return the argument of train.py for a value from trial.json.

        The file may be somebody else's: raises UserError for a value that is not searched.
        """
        if self.ends is None:
            is_searched = value in self.texts
        else:
            is_number = isinstance(value, int | float)
            is_searched = is_number and self.ends[0] <= value <= self.ends[1]
        if not is_searched:
            raise UserError(f"trial.json has {self.flag} {value!r}, which --search does not have")
        return f"--{self.flag}={value}"

    def distribution(self) -> Any:
        """The values as Optuna describes them."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.ends is None:
            return CategoricalDistribution(self.texts)
        is_whole = all(isinstance(end, int) for end in self.ends)
        kind: Any = IntDistribution if is_whole else FloatDistribution
        return kind(*self.ends, log=self.is_log)


def read_search(search: str) -> Dimension:
    """Read FLAG=log:1e-4..1e-1, FLAG=16..512 or FLAG=a,b,c. Raises UserError."""
    flag, _, values = (part.strip() for part in search.partition("="))
    flag = plain_flag(flag)
    if not flag or not values:
        forms = "FLAG=a,b,c, FLAG=1..9 or FLAG=log:1e-4..1e-1"
        raise UserError(f"--search {search!r}: give {forms}", 2)
    if flag in NOT_FOR_TRIALS + NOT_SEARCHED:
        raise UserError(f"--search {search}: {flag} cannot be searched", 2)
    match = RANGE.fullmatch(values)
    if match is not None:
        is_log, texts = match[1] is not None, [match[2], match[3]]
        low, high = (int(end) if end.lstrip("-").isdecimal() else float(end) for end in texts)
        if low >= high or (is_log and low <= 0):
            positive = " and positive" if is_log else ""
            raise UserError(f"--search {search}: the first end must be smaller{positive}", 2)
        return Dimension(flag, texts, (low, high), is_log)
    if values.startswith("log:"):
        raise UserError(f"--search {search}: log: wants two numbers, log:1e-4..1e-1", 2)
    try:
        texts = split_list(values)
    except yaml.YAMLError as error:
        raise UserError(f"--search {search}: {values} is no list of values", 2) from error
    if len(set(texts)) < len(texts):
        raise UserError(f"--search {search}: a value is given twice", 2)
    return Dimension(flag, texts)


def plain_flag(flag: str) -> str:
    """The one name of a flag that has several: --model.init_args.lr is model.lr."""
    return flag.removeprefix("--").replace(".init_args.", ".").removesuffix(".class_path")


def split_list(values: str) -> list[str]:
    """Split at the commas outside brackets and quotes, by the rules of YAML."""
    text = f"[{values}]"
    items: Any = yaml.compose(text)
    return [text[item.start_mark.index : item.end_mark.index] for item in items.value]


@dataclass
class Trial:
    """A trial as trial.json in its folder records it.

    values: By flag; of a list the text that is typed, of a range a number.
    state: running (also after a kill), finished, pruned or failed.
    best: The best value of the monitored metric.
    curve: The monitored metric by epoch, for the pruner.
    is_below_median: The pruner has stopped the training.
    """

    folder: Path
    values: dict[str, Any]
    state: str = "running"
    best: float | None = None
    reason: str = ""
    curve: dict[int, float] = field(default_factory=dict)
    is_below_median: bool = False

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
    def number(self) -> int:
        return int(self.folder.name.removeprefix("trial_"))

    @property
    def run(self) -> Path | None:
        """The run's folder, None before the first start."""
        return next(reversed(versions(self.folder).values()), None)

    def result(self, name: str) -> dict[str, Any]:
        """What the run has written into progress.json or metrics.json."""
        file = (self.run or self.folder) / name
        content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        return content

    def describe(self) -> str:
        """One line for the terminal."""
        values = ", ".join(f"{flag} {value}" for flag, value in self.values.items())
        result = self.reason[:160] if self.best is None else f"best {self.best:.4g}"
        return printable(f"{self.folder.name} {self.state} ({values}): {result}".rstrip(": "))


@dataclass
class Sweep:
    """The trials below ROOT/NAME, which several processes may train at once.

    A process holds the lock of a trial's folder while it trains the trial. A trial that is running
    and that no process holds was interrupted; it is continued.

    flags: Those of train.py that all trials have.
    monitor, mode: The metric by which trials are compared; None in a grid without a validation.
    """

    root: Path
    name: str
    dimensions: list[Dimension]
    flags: list[str]
    num_trials: int
    prune: bool
    seed: int = 0
    monitor: str | None = None
    mode: str | None = None

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def lock(self) -> FileLock:
        """Held while a trial is taken, and while its end is recorded. Without it a process could
        take a trial that another process has just finished."""
        return FileLock(self.folder / ".sweep.lock")

    def begin(self, config: dict[str, Any], monitor: str | None, mode: str | None) -> None:
        """Write sweep.json, or see that its search and config are the same. Raises UserError."""
        search = {item.flag: [*["log"] * item.is_log, *item.texts] for item in self.dimensions}
        record = {"search": search, "config": config, "monitor": monitor, "mode": mode}
        file = self.folder / "sweep.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "study.db").exists():
            what = f"{short(self.folder)} is a sweep of an earlier version"
            raise UserError(f"{what}\ngive another --name")
        with self.lock:
            if not file.exists():
                write_whole(file, json.dumps(record, indent=2) + "\n")
        before, now = json.loads(file.read_text()), json.loads(json.dumps(record))
        way_out = f"give the same, or another --name; {short(self.folder)} has the trials"
        if before["search"] != now["search"]:
            raise UserError(f"--search: this sweep was begun with {before['search']}\n{way_out}", 2)
        for key in before["config"] | now["config"]:
            old, new = before["config"].get(key), now["config"].get(key)
            if old != new:
                raise UserError(f"--{key} {new}: this sweep was begun with {old}\n{way_out}", 2)

    def read(self) -> None:
        """Read the seed and the monitored metric from sweep.json."""
        record = json.loads((self.folder / "sweep.json").read_text())
        self.seed = record["config"]["seed_everything"]
        self.monitor, self.mode = record["monitor"], record["mode"]

    def trials(self) -> list[Trial]:
        """In the order of their numbers."""
        trials = [Trial.read(file.parent) for file in self.folder.glob("trial_*/trial.json")]
        return sorted(trials, key=lambda trial: trial.number)

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
                trial = next((trial for trial in running if not is_running(trial.folder)), None)
                trial = trial or self.new_trial(trials)
                if trial is not None:
                    lock = FileLock(trial.folder / ".lock")
                    lock.acquire()
                    return trial, lock
            if not running:
                return None
            time.sleep(0.5)

    def new_trial(self, trials: Sequence[Trial]) -> Trial | None:
        """The trial with the smallest number that is free; None if there are enough trials."""
        taken = {trial.number for trial in trials}
        number = next((i for i in range(self.num_trials) if i not in taken), None)
        if number is None:
            return None
        folder = self.folder / f"trial_{number:03d}"
        trial = Trial(folder, self.choose_values(number, trials))
        folder.mkdir(exist_ok=True)
        trial.write()
        return trial

    def choose_values(self, number: int, trials: Sequence[Trial]) -> dict[str, Any]:
        """The values follow from the seed, the number and the results of the other trials."""
        if is_grid(self.dimensions):
            flags = [dimension.flag for dimension in self.dimensions]
            return dict(zip(flags, combinations(self.dimensions)[number], strict=True))
        from optuna.samplers import TPESampler

        seed = int(SeedSequence([self.seed, number]).generate_state(1)[0])
        study = self.study(trials, sampler=TPESampler(seed=seed))
        values: dict[str, Any] = study.ask(self.distributions()).params
        return values

    def distributions(self) -> dict[str, Any]:
        return {dimension.flag: dimension.distribution() for dimension in self.dimensions}

    def study(self, trials: Sequence[Trial], **options: Any) -> Any:
        """An Optuna study, in memory, of the trials that have ended."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        complete, pruned = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
        direction: Any = "maximize" if self.mode == "max" else "minimize"
        study = optuna.create_study(direction=direction, **options)
        for trial in trials:
            if trial.state in ("finished", "pruned"):
                past = optuna.trial.create_trial(
                    state=complete if trial.state == "finished" else pruned,
                    params=trial.values,
                    distributions=self.distributions(),
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
        """Record and print how a trial ended. Raises UserError if all trials failed alike."""
        with self.lock:
            trial.write()
        print(trial.describe(), flush=True)
        reasons = [other.reason for other in self.trials() if other.state != "running"]
        if trial.reason and len(reasons) >= 3 and set(reasons) == {trial.reason}:
            what = f"all {len(reasons)} trials failed alike: {trial.reason}"
            raise UserError(f"{what}\ncorrect it, and remove {short(self.folder)}")


def is_grid(dimensions: Sequence[Dimension]) -> bool:
    """Whether all values are listed."""
    return all(dimension.ends is None for dimension in dimensions)


def combinations(dimensions: Sequence[Dimension]) -> list[tuple[str, ...]]:
    """The trials of a grid."""
    return list(itertools.product(*(dimension.texts for dimension in dimensions)))


class Report(Callback):
    """Records each epoch's validation in the trial, and stops a trial that is below the median."""

    def __init__(self, sweep: Sweep, trial: Trial) -> None:
        self.sweep, self.trial = sweep, trial

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # stopped below the median, then killed: without a checkpoint the last epoch is repeated
        epochs = max(self.trial.curve, default=0)
        trainer.should_stop = self.trial.is_below_median and trainer.current_epoch >= epochs

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.sweep.monitor or "")
        if trainer.sanity_checking or not trainer.is_last_batch:
            return
        if value is None or not value.isfinite():
            return
        self.trial.curve[trainer.current_epoch + 1] = float(value)
        num_warmup = max(0, trainer.max_epochs or 0) // 3
        if self.sweep.is_below_median(self.trial, num_warmup):
            self.trial.is_below_median = trainer.should_stop = True
        self.trial.write()


def train_trials(sweep: Sweep) -> None:
    """Train trials until all have ended. What a training prints goes to output.txt."""
    while (taken := sweep.take_trial()) is not None:
        trial, lock = taken
        try:
            with (
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
        # a signal during a failed training or gc.collect has raised nothing
        SIGNALS.waits = False
        SIGNALS.install()
        if SIGNALS.received:
            raise Stopped(SIGNALS.received)


def train_trial(sweep: Sweep, trial: Trial) -> None:
    """Train a trial, or continue it, and note how it ended. Raises the error of a full disk."""
    values = [item.argument(trial.values[item.flag]) for item in sweep.dimensions]
    flags = [*sweep.flags, *values]
    args = [f"--name={sweep.name}/{trial.folder.name}"]
    args += [f"--trainer.default_root_dir={sweep.root}"]
    run = trial.run
    if run is not None:
        args += ["--ckpt_path=last"]
    if run is None or not (run / "config.yaml").is_file():  # a resume has the run's config
        args = [*flags, *args]
    try:
        if run is None or not (run / "metrics.json").is_file():
            cli = parse(args, first_flags=flags)
            if sweep.prune:
                callbacks = cli.config_init.trainer.callbacks or []
                callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
                cli.config_init.trainer.callbacks = [*callbacks, Report(sweep, trial)]
            with cpu_threads(cli.config.num_threads):
                train(cli)
        if sweep.monitor is not None:
            trial.best = trial.result("progress.json").get("best")
            if trial.best is None:
                raise UserError(f"no epoch has a value of {sweep.monitor}", 2)
        trial.state = "pruned" if trial.is_below_median else "finished"
    except Exception as error:
        if is_disk_error(error):
            raise
        trial.state = "failed"
        trial.reason = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, UserError):
            trial.reason = "; ".join(str(error).splitlines())
        traceback.print_exc()


def is_disk_error(error: BaseException | None) -> bool:
    """Whether a disk that is full, or that cannot be written, caused the error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def run_workers(sweep: Sweep, num_workers: int, args: Sequence[str]) -> None:
    """Train the trials in processes of this command, which take the GPUs in turn."""
    command = [sys.executable, str(PROJECT.root / "scripts" / "sweep.py"), *args]
    command += ["--worker", str(sweep.root), sweep.name]
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)
    gpus = visible_gpus()
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
        for worker in workers:
            worker.wait()
    if sweep.num_ended() < sweep.num_trials:
        statuses = " and ".join(str(worker.returncode) for worker in workers)
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
        if (flag in given and flag != "config") or searched.count(flag) > 1:
            raise UserError(f"--search {flag}: the flag is given twice; leave one out", 2)
        if flag in REPEATS and not is_grid(dimensions):
            raise UserError(f"--search {flag} repeats a training: search lists only, a grid", 2)
    if not is_grid(dimensions) and options.trials is None:
        raise UserError("--trials N: how many? a range has no end", 2)
    needs_optuna = options.prune == "true" or not is_grid(dimensions)
    if needs_optuna and importlib.util.find_spec("optuna") is None:
        raise UserError('ranges and --prune true need optuna\npip install -e ".[sweep]"', 2)


def parse_all(flags: Sequence[str], dimensions: Sequence[Dimension]) -> TrainingCLI:
    """Parse the command of a trial with each searched value once: a wrong one is found before the
    first trial. Returns the command with the first values."""
    first = [f"--{dimension.flag}={dimension.texts[0]}" for dimension in dimensions]
    cli = parse([*flags, *first])
    check_device(cli.config.trainer)
    for i, dimension in enumerate(dimensions):
        for text in dimension.texts[1:]:
            values = [*first[:i], f"--{dimension.flag}={text}", *first[i + 1 :]]
            check_device(parse([*flags, *values]).config.trainer)
    return cli


def check_device(trainer: Any) -> None:
    """Raise UserError for a trial on several devices, or on a certain one, which workers take."""
    if trainer.strategy not in ("auto", "single_device") or trainer.devices not in (1, "1"):
        what = "sweep.py trains a trial on one device"
        raise UserError(f"{what}: leave --trainer.strategy and --trainer.devices out", 2)


def visible_gpus() -> list[str]:
    """Their names in CUDA_VISIBLE_DEVICES."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",") if names else [str(i) for i in range(num_gpus())]


def show_results(sweep: Sweep) -> None:
    """Print the means over folds or seeds, the best flags, and the command for the table."""
    finished = [trial for trial in sweep.trials() if trial.state == "finished"]
    if not finished:
        raise UserError(f"no trial finished: see {short(sweep.folder / 'trial_000/output.txt')}")
    repeats = [item.flag for item in sweep.dimensions if item.flag in REPEATS]
    compared = [item for item in sweep.dimensions if item.flag not in REPEATS]
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in finished:
        values = tuple(trial.values[item.flag] for item in compared)
        groups.setdefault(values, []).append(trial)
    if repeats:
        print_means(groups, [item.flag for item in compared])
    if sweep.monitor is not None and compared:
        choose = max if sweep.mode == "max" else min
        best = choose(groups.values(), key=mean_best)[0]
        if not repeats:
            file = short((best.run or best.folder) / "checkpoints" / "best.ckpt")
            print(f"Best checkpoint, {sweep.monitor} {best.best:.4g}: {file}")
        flags = [*sweep.flags, *(item.argument(best.values[item.flag]) for item in compared)]
        if "data.fold" in repeats:
            flags.append("--data.num_folds=null")
        print(f"Best flags: {command_line('train', flags)}")
    flags = [sweep.name]
    if sweep.root != PROJECT.logs.absolute():
        flags += ["--trainer.default_root_dir", short(sweep.root)]
    print(f"Table of the trials: {command_line('runs', flags)}")


def command_line(script: str, args: Sequence[str]) -> str:
    """A command to paste."""
    return shlex.join(["python", short(PROJECT.root / "scripts" / f"{script}.py"), *args])


def mean_best(trials: Sequence[Trial]) -> float:
    """The mean of the monitored metric over folds or seeds."""
    return statistics.fmean(trial.best or 0.0 for trial in trials)


def print_means(groups: dict[tuple[Any, ...], list[Trial]], flags: Sequence[str]) -> None:
    """Print mean, standard deviation and standard error of each test metric of each group."""
    rows = [(*flags, "metric", "n", "mean", "spread", "standard error")]
    for values, trials in groups.items():
        tests = [trial.result("metrics.json") for trial in trials]
        for name in dict.fromkeys(name for test in tests for name in test):
            numbers = [test[name] for test in tests if test.get(name) is not None]
            if not name.startswith("test/") or name == "test/num_samples" or not numbers:
                continue
            cells = [f"{statistics.fmean(numbers):.4g}", "-", "-"]
            if len(numbers) > 1:
                spread = statistics.stdev(numbers)
                cells[1:] = [f"{spread:.4g}", f"{spread / len(numbers) ** 0.5:.4g}"]
            rows.append((*map(str, values), name, str(len(numbers)), *cells))
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
        if options.worker is not None:
            root, name = options.worker
            work(
                Sweep(Path(root), name, dimensions, flags, options.trials, options.prune == "true")
            )
            return []
        cli = parse_all(flags, dimensions)
        selection = choose_selection(cli.config, cli.model, cli.datamodule)
        if selection is None and not is_grid(dimensions):
            raise UserError("a search compares trials by a validation, and there is none", 2)
        cli.config.name = options.name or f"{cli.config.name}_sweep"
        root, name = root_folder(cli.config).absolute(), cli.config.name
        cli.datamodule.prepare_data()  # once, a download for instance
        sweep = Sweep(root, name, dimensions, flags, options.trials, options.prune == "true")
        config = flatten(write_config(cli.parser, cli.config)[0])
        config = {key: value for key, value in config.items() if key not in PLACE}
        sweep.begin(config, *(selection[:2] if selection else (None, None)))
        sweep.read()
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


def work(sweep: Sweep) -> None:
    """Train trials in a process that `run_workers` has started."""
    end_with_parent(is_worker=True)
    sweep.read()
    try:
        train_trials(sweep)
    except Stopped as stopped:
        sys.exit(stopped.code)  # the first process prints the line
