"""`train.py --seeds 5`: one experiment with several seeds, and the spread of its
numbers.

Read `repeat_with_seeds` first.

Train one experiment with several seeds. The run of seed 3 is NAME/seed_3.

Read `train_seeds` first. The same command continues what was interrupted: a run that
is complete is not trained again, and an incomplete one goes on from its newest state.
"""

import argparse
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightbase.commands.spread import spread
from lightbase.config.errors import UserError, first_line, say
from lightbase.config.files import relative_to_cwd, write_whole
from lightbase.config.names import SAME_TRAINING_KEYS, flatten
from lightbase.config.spec import RunSpec, as_values
from lightbase.config.yaml_files import read_config
from lightbase.run.devices import check_one_device
from lightbase.run.folder import check_same_settings, newest_version, root_folder
from lightbase.run.results import numbers_of, read_run
from lightbase.run.signals import Stopped


def repeat_with_seeds(
    args: Sequence[str], parse: Callable[..., Any], train: Callable[..., Any]
) -> dict[str, Any] | None:
    """Train with each seed of --seeds, and print the mean of each metric with its
    spread. Return {metric: {n, mean, deviation, low, high}}, or None without --seeds.
    All runs have the same split, or with --data.split_seed seed each has its own.

    args: The arguments of train.py.
    parse, train: The functions of lightbase/commands/train.py.
    Raise UserError for a value that names no seeds, and if a seed has failed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seeds", nargs="?", const="")
    parser.add_argument("--data.split_seed", dest="split_seed")
    options, others = parser.parse_known_args(args)
    if options.seeds is None:
        return None
    seeds = read_seeds(options.seeds)
    new_splits = options.split_seed == "seed"
    if options.split_seed is not None and not new_splits:
        others.append(f"--data.split_seed={options.split_seed}")
    spec, _, _ = parse(others)
    check_one_device(spec.config.trainer)
    if spec.config.trainer.fast_dev_run or spec.checkpoint:
        raise UserError(
            "--seeds trains new runs: not beside --trainer.fast_dev_run or --ckpt_path",
            "leave it out; the same command with --seeds continues",
            2,
        )
    failures = train_seeds(
        spec, others, seeds, lambda words: train(*parse(words)), new_splits
    )
    folder = root_folder(spec.config) / spec.config.name
    spreads = summarize(folder, seeds, failures)
    if failures:
        raise UserError(
            f"{len(failures)} of {len(seeds)} seeds failed: "
            f"{', '.join(map(str, failures))}",
            "the means are of the others only",
        )
    return spreads


def summarize(
    folder: Path, seeds: list[int], failures: dict[int, str]
) -> dict[str, Any]:
    """Print the mean and the spread of each metric, and write them to seeds.json in
    ROOT/NAME. Return {metric: {n, mean, deviation, low, high}}.

    folder: ROOT/NAME, which holds the runs.
    failures: {seed: the first line of the error}. The means are of the other seeds.
    """
    runs = {}
    for seed in seeds:
        if seed not in failures:
            runs[seed] = read_run(folder, newest_version(folder / f"seed_{seed}"))
    values = numbers_of(runs)
    spreads = {}
    for metric in values:
        total = spread([*values[metric].values()], metric)
        say(f"{metric} {total.text('seeds')}")
        spreads[metric] = asdict(total)
    content = {"metrics": spreads, "values": values, "failures": failures}
    folder.mkdir(parents=True, exist_ok=True)  # all runs may have failed
    file = folder / "seeds.json"
    write_whole(file, json.dumps(content, indent=2) + "\n")
    say(f"Results: {relative_to_cwd(file)}")
    return spreads


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
    return file.is_file() and (not with_test or "test/" in file.read_text())


def compared_settings(config: Any) -> dict[str, Any]:
    """Return the settings that all runs of a command have in common, by flag."""
    settings = flatten(config)
    return {key: settings[key] for key in settings if key not in NOT_COMPARED}
