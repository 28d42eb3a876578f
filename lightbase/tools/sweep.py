"""Search the flags of train.py: each trial is a run. Lists alone are a grid, which a
cross-validation is, too.

python scripts/sweep.py --config configs/small_net.yaml --search model.lr=log:1e-4..1e-1 --trials 20
python scripts/sweep.py --config configs/small_net.yaml --search model.lr=0.001,0.01 --search
data.batch_size=32,64
python scripts/sweep.py --config configs/small_net.yaml --data.num_folds 5 --search
data.fold=0,1,2,3,4

FLAG=a,b,c is a list of values, FLAG=16..512 a range, of whole numbers where both ends are,
FLAG=log:1e-4..1e-1 one on a logarithmic scale. Optuna's TPE chooses the values, its median pruner
stops trials that fall behind by --monitor. The same command goes on after a kill. All other flags
are train.py's; runs and study are in ROOT/NAME, NAME_sweep of the config unless --name is given.
See docs/sweep.md.
"""

import contextlib
import importlib.util
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightbase.errors import UserError

if importlib.util.find_spec("optuna") is None:
    raise UserError('sweep.py needs optuna: pip install -e ".[sweep]"', 2)
import optuna
from filelock import FileLock, Timeout

from lightbase.cli.script import ScriptParser, short_errors
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.devices.devices import num_gpus
from lightbase.folder import PROJECT, root_folder, short
from lightbase.run.selection import choose_selection
from lightbase.run.train import parse
from lightbase.tools.sweep_results import repeats_of, show
from lightbase.tools.sweep_search import Dimension, dimension, one_name
from lightbase.tools.sweep_study import begin, open_study, study_errors
from lightbase.tools.sweep_workers import train_all

PRUNES = {"true": True, "false": False}


def main(args: Sequence[str] | None = None) -> Any:
    """Returns the study."""
    parser = ScriptParser(description=__doc__)
    parser.add_argument(
        "--search",
        action="append",
        required=True,
        metavar="FLAG=VALUES",
        help="may stand repeatedly",
    )
    parser.add_argument("--trials", type=int, help="how many; of a grid at most so many")
    parser.add_argument(
        "--num_workers",
        type=int,
        default=1,
        help="processes that train a trial each, on a GPU each",
    )
    parser.add_argument(
        "--prune",
        choices=list(PRUNES),
        help="stop trials below the median; true unless it is a grid",
    )
    parser.add_argument(
        "--name", help="folder of the sweep below ROOT; that of the config and _sweep unless given"
    )
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
            raise UserError(
                "a search compares trials by a validation, and there is none: see the line above", 2
            )
        cli.config.name = name = options.name or f"{cli.config.name}_sweep"
        root = root_folder(cli.config)
        cli.datamodule.prepare_data()  # once: a download, for instance
        with held(root / name), study_errors(root / name):
            num_trials = begin(root / name, cli, dimensions, selection, options.trials)
            max_epochs = max(0, cli.config.trainer.max_epochs or 0)
            task = {
                **{
                    "root": str(root.absolute()),
                    "name": name,
                    "seed": cli.config.seed_everything,
                    "flags": flags,
                },
                **{
                    "search": options.search,
                    "num_trials": num_trials,
                    "monitor": selection and selection.monitor,
                },
                **{"prune": PRUNES.get(options.prune, not is_grid), "num_warmup": max_epochs // 3},
            }
            train_all(root / name, task, options.num_workers, gpus(cli.config.trainer))
            study = open_study(root / name / "study.db")
            command = shlex.join(["python", short(PROJECT.root / "scripts" / "train.py"), *flags])
            show(study, root / name, dimensions, selection, command)
        return study


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Made, and held against another sweep.py."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{short(folder)} cannot be made: {error.strerror}; give another --name"
        ) from error
    try:
        with FileLock(folder / ".sweep.lock", blocking=False):
            yield
    except Timeout:
        raise UserError(
            f"{short(folder)} is in use by another sweep.py; --num_workers is for more"
        ) from None


def check_options(
    options: Any, flags: Sequence[str], dimensions: Sequence[Dimension], is_grid: bool
) -> None:
    given = [one_name(flag.partition("=")[0]) for flag in flags if flag.startswith("--")]
    given = [flag for flag in given if flag != "config"]  # a later one adds to it
    searched = [found.flag for found in dimensions]
    for flag in searched:
        if flag in given or searched.count(flag) > 1:
            raise UserError(f"--search {flag}: the flag stands twice; leave one out", 2)
    for flag in {"ckpt_path", "trainer.fast_dev_run"} & {*given}:
        raise UserError(
            f"--{flag} is no flag for a sweep: each trial is a run of its own, which goes on "
            "by itself",
            2,
        )
    if not is_grid and repeats_of(dimensions):
        raise UserError(
            "data.fold and seed_everything repeat a training: search them by lists alone, as "
            "a grid",
            2,
        )
    if not is_grid and options.trials is None:
        raise UserError("--trials N: how many? a range has no end", 2)
    for flag in ("trials", "num_workers"):
        if (value := getattr(options, flag)) is not None and value < 1:
            raise UserError(f"--{flag} {value}: 1 is the least", 2)


def parse_all(flags: Sequence[str], dimensions: Sequence[Dimension]) -> TrainingCLI:
    """Each value in turn, beside the first ones of the others: what is wrong is found before a
    trial. Returns the first."""
    first = [f"--{found.flag}={found.texts[0]}" for found in dimensions]
    cli = parse([*flags, *first])
    check_trial(cli)
    for i, found in enumerate(dimensions):
        for text in found.texts[1:]:
            check_trial(parse([*flags, *first[:i], f"--{found.flag}={text}", *first[i + 1 :]]))
    return cli


def check_trial(cli: TrainingCLI) -> None:
    trainer: Any = cli.config.trainer
    if trainer.strategy not in ("auto", "single_device", "dp") or not (
        trainer.devices in (1, "1") or one(trainer)
    ):
        raise UserError(
            "sweep.py trains a trial on one device: leave --trainer.strategy and "
            "--trainer.devices out",
            2,
        )
    if trainer.enable_checkpointing is False:
        raise UserError(
            "trainer.enable_checkpointing false: a sweep goes by checkpoints; leave it out", 2
        )
    if cli.given.get("seed_everything") is True:
        raise UserError(
            "seed_everything true draws another seed for each trial: give a number, or search "
            "a list",
            2,
        )


def one(trainer: Any) -> bool:
    return isinstance(trainer.devices, list) and len(trainer.devices) == 1


def gpus(trainer: Any) -> list[str]:
    """Those that workers take in turn; none where the flags name one, or the CPU."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = seen.split(",") if seen else [str(i) for i in range(num_gpus())]
    return [] if trainer.accelerator == "cpu" or one(trainer) or trainer.strategy == "dp" else names
