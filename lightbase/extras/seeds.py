"""Train one experiment with several seeds. The run of seed 3 is NAME/seed_3.

Read `train_seeds` first. The same command continues what was interrupted: a run that
is complete is not trained again, and an incomplete one goes on from its newest state.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightbase.core.config_files import read_config
from lightbase.core.errors import UserError, first_line, say
from lightbase.core.files import read_text
from lightbase.core.folder import check_same_settings, newest_version, root_folder
from lightbase.core.names import SAME_TRAINING_KEYS, flatten
from lightbase.core.signals import Stopped
from lightbase.core.spec import RunSpec, as_values

NOT_COMPARED = (*SAME_TRAINING_KEYS, "seed_everything")
"""Settings in which the runs of one command differ."""


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
    spec: RunSpec,
    args: list[str],
    seeds: list[int],
    train: Callable[[list[str]], Any],
    new_splits: bool = False,
) -> dict[int, str]:
    """Train an experiment with each seed, as ROOT/NAME/seed_N. Return the first line of
    the error of each seed that has failed.

    An error ends the run of its seed, and not the others. A signal ends all.

    spec: The record of the experiment. It has the name, and the settings that each run
        has to have.
    args: The arguments of train.py that describe the experiment.
    train: A function that trains a run by the arguments of train.py.
    new_splits: Whether data.split_seed is the seed of each run.
    Raise UserError if an earlier run of this name has other settings.
    """
    root = root_folder(spec.config)
    settings = compared_settings(as_values(spec))
    commands = {}
    for seed in seeds:
        name = f"{spec.config.name}/seed_{seed}"
        words = [*args, f"--seed_everything={seed}"]
        if new_splits:
            words.append(f"--data.split_seed={seed}")
            settings["data.split_seed"] = seed
        run = newest_version(root / name)
        if (run / "config.yaml").is_file():
            before = compared_settings(read_config(run / "config.yaml"))
            check_same_settings(run, before, settings)
            if is_complete(run, spec.config.test):
                continue
            words = [f"--trainer.default_root_dir={root}", "--ckpt_path=last"]
            words.append(f"--test={spec.config.test}")
        commands[seed] = [*words, f"--name={name}"]
    failures = {}
    for seed, words in commands.items():
        say(f"Seed {seed}, one of {len(seeds)}: {spec.config.name}/seed_{seed}")
        try:
            train(words)
        except Stopped as stopped:
            stopped.hint = "; the same command continues"
            raise
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exc()
            failures[seed] = first_line(error)
            say(f"Seed {seed} failed: {error}")
    return failures


def is_complete(run: Path, with_test: bool) -> bool:
    """Return whether a run has ended, and with `with_test` whether it has been tested:
    an earlier command may have had --test false."""
    file = run / "metrics.json"
    return file.is_file() and (not with_test or "test/" in read_text(file))


def compared_settings(config: Any) -> dict[str, Any]:
    """Return the settings that all runs of a command have in common, by flag."""
    settings = flatten(config)
    return {key: settings[key] for key in settings if key not in NOT_COMPARED}
