"""Train one experiment with several seeds. The run of seed 3 is NAME/seed_3.

Read `train_seeds` first. The same command continues what was interrupted: a run that
is complete is not trained again, and an incomplete one goes on from its newest state.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightbase.core.config_files import read_config
from lightbase.core.errors import UserError, first_line, say
from lightbase.core.files import read_json, relative_to_cwd
from lightbase.core.folder import newest_version, root_folder
from lightbase.core.names import RUN_LOCATION_KEYS, flatten
from lightbase.core.signals import Stopped
from lightbase.core.spec import RunSpec, as_values

NOT_COMPARED = (*RUN_LOCATION_KEYS, "seed_everything")
"""Settings in which the runs of one command differ."""


@dataclass
class SeedResults:
    """What the runs of several seeds have reached.

    folder: ROOT/NAME, which holds the runs.
    values: {metric: {seed: value}} of the runs that are complete.
    failures: {seed: the first line of the error} of the others.
    """

    folder: Path
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, seed: int, run: Path) -> None:
        """Add the results of a complete run: the metrics of the test, and the best
        value of the monitored metric."""
        metrics = read_json(run / "metrics.json")
        progress = read_json(run / "progress.json")
        numbers = {key: x for key, x in metrics.items() if key.startswith("test/")}
        numbers.pop("test/num_samples", None)
        if "best" in progress:
            numbers = {f"best {progress['monitor']}": progress["best"]} | numbers
        for metric, value in numbers.items():
            if isinstance(value, float):
                self.values.setdefault(metric, {})[seed] = value


def read_seeds(text: str) -> list[int]:
    """Return the seeds that --seeds names: 1 to N for a single number N, or the numbers
    of a list such as 1,2,3. Raise UserError for other text."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if len(seeds) == 1:
        seeds = [*range(1, seeds[0] + 1)]
    if len(seeds) < 2 or len({*seeds}) < len(seeds) or min(seeds) < 0:
        raise UserError(
            f"--seeds {text!r} names no seeds",
            "give how many, such as 5, or a list such as 1,2,3",
            2,
        )
    return seeds


def train_seeds(
    spec: RunSpec, args: list[str], seeds: list[int], train: Callable[[list[str]], Any]
) -> SeedResults:
    """Train an experiment with each seed, and return the results.

    An error ends the run of its seed, and not the others. A signal ends all.

    spec: The record of the experiment. It has the name, and the settings that each run
        has to have.
    args: The arguments of train.py that describe the experiment.
    train: A function that trains a run by the arguments of train.py.
    Raise UserError if an earlier run of this name has other settings.
    """
    results = SeedResults(root_folder(spec.config) / spec.config.name)
    settings = flatten(as_values(spec))
    folders = {seed: results.folder / f"seed_{seed}" for seed in seeds}
    runs = {seed: newest_run(folder) for seed, folder in folders.items()}
    for run in runs.values():
        if run:
            check_settings(run, settings)
    for seed, folder in folders.items():
        run = runs[seed]
        if run is None or not (run / "metrics.json").is_file():
            place = ["--name", f"{spec.config.name}/{folder.name}"]
            words = [*args, f"--seed_everything={seed}", *place]
            if run:
                root = f"--trainer.default_root_dir={root_folder(spec.config)}"
                words = [*place, root, "--ckpt_path=last"]
            say(f"Seed {seed}, one of {len(seeds)}: {relative_to_cwd(folder)}")
            try:
                train(words)
            except Stopped as stopped:
                stopped.hint = "; the same command continues"
                raise
            except Exception as error:
                if not isinstance(error, UserError):
                    traceback.print_exc()
                results.failures[seed] = first_line(error)
                say(f"Seed {seed} failed: {error}")
                continue
        results.add(seed, newest_run(folder) or folder)
    return results


def newest_run(folder: Path) -> Path | None:
    """Return the newest run in ROOT/NAME/seed_N, or None if it has no config."""
    run = newest_version(folder)
    return run if (run / "config.yaml").is_file() else None


def check_settings(run: Path, settings: dict[str, Any]) -> None:
    """Raise UserError if a run has other settings than this command: its number does
    not belong into the same mean.

    settings: The settings of this command by the names of flags.
    """
    before = flatten(read_config(run / "config.yaml"))
    for key in before.keys() | settings.keys():
        if key not in NOT_COMPARED and before.get(key) != settings.get(key):
            raise UserError(
                f"--{key} {settings.get(key)}: {relative_to_cwd(run)} has "
                f"{before.get(key)}",
                "give the same, or another --name",
                2,
            )
