"""`train.py --seeds 5`: one experiment with several seeds, and the spread of its
numbers.

Read `repeat_with_seeds` first. The runs are trained in lightbase/extras/seeds.py.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from lightbase.core.device_errors import short_device_errors
from lightbase.core.devices import check_one_device
from lightbase.core.errors import UserError, say
from lightbase.core.files import relative_to_cwd, write_whole
from lightbase.extras.seeds import SeedResults, read_seeds, train_seeds
from lightbase.extras.spread import spread


def repeat_with_seeds(
    args: Sequence[str], parse: Callable[..., Any], train: Callable[..., Any]
) -> dict[str, Any] | None:
    """Train with each seed of --seeds, and print the mean of each metric with its
    spread. Return {metric: {n, mean, deviation, low, high}}, or None without --seeds.

    args: The arguments of train.py.
    parse, train: The functions of lightbase/commands/train.py.
    Raise UserError for a value that names no seeds, and if a seed has failed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seeds", nargs="?", const="")
    options, others = parser.parse_known_args(args)
    if options.seeds is None:
        return None
    seeds = read_seeds(options.seeds)
    with short_device_errors():
        spec, _, _ = parse(others)
    check_one_device(spec.config.trainer)
    if spec.config.trainer.fast_dev_run or spec.checkpoint:
        raise UserError(
            "--seeds trains new runs: not beside --trainer.fast_dev_run or --ckpt_path",
            "leave it out; the same command with --seeds continues",
            2,
        )
    results = train_seeds(spec, others, seeds, lambda words: train(*parse(words)))
    spreads = summarize(results)
    if results.failures:
        raise UserError(
            f"{len(results.failures)} of {len(seeds)} seeds failed: "
            f"{', '.join(map(str, results.failures))}",
            "the means are of the others only",
        )
    return spreads


def summarize(results: SeedResults) -> dict[str, Any]:
    """Print the mean and the spread of each metric, and write them to seeds.json in
    ROOT/NAME. Return {metric: {n, mean, deviation, low, high}}."""
    spreads = {}
    for metric, values in results.values.items():
        total = spread([*values.values()])
        say(f"{metric} {total.text('seeds')}")
        spreads[metric] = asdict(total)
    content = {
        "metrics": spreads,
        "values": results.values,
        "failures": results.failures,
    }
    results.folder.mkdir(parents=True, exist_ok=True)  # all runs may have failed
    file = results.folder / "seeds.json"
    write_whole(file, json.dumps(content, indent=2) + "\n")
    say(f"Results: {relative_to_cwd(file)}")
    return spreads
