"""`train.py --seeds 5`: one experiment with several seeds, and the spread of its
numbers.

Read `repeat_with_seeds` first. The runs are trained in lightbase/extras/seeds.py.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightbase.commands.runs import numbers_of, read_run
from lightbase.core.device_errors import short_device_errors
from lightbase.core.devices import check_one_device
from lightbase.core.errors import UserError, say
from lightbase.core.files import relative_to_cwd, write_whole
from lightbase.core.folder import newest_version, root_folder
from lightbase.extras.seeds import read_seeds, train_seeds
from lightbase.extras.spread import spread


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
    with short_device_errors():
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
