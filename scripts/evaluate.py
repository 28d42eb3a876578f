"""Test a checkpoint again, on the data and with the settings of its run.

python scripts/evaluate.py --ckpt_path logs/mnist_mlp/version_0/checkpoints/best.ckpt
python scripts/evaluate.py --ckpt_path ... --trainer.accelerator cpu --data.batch_size 1000

The last line on stdout is a JSON object with test/acc, test/loss and test/num_samples.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from project.cli import load_run
from project.devices import describe_devices
from project.errors import ScriptParser, UserError, short_errors
from project.training import quiet_lightning


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="a run's checkpoint, best.ckpt for instance")
    parser.epilog = "--data.* and --trainer.* flags replace those of the run."
    with short_errors():
        known, flags = parser.parse_known_args(args)
        for flag in flags:
            if flag.startswith("-") and not flag.startswith(("--data.", "--trainer.")):
                raise UserError(f"unknown flag {flag}; besides --ckpt_path there are --data.* and --trainer.* flags", 2)
        quiet_lightning()
        run = load_run(known.ckpt_path, flags)
        trainer = run.make_trainer(logger=False, enable_checkpointing=False)
        print(describe_devices(trainer), flush=True)
        results: dict[str, Any] = dict(trainer.test(run.model, run.datamodule, verbose=False)[0])
    results["test/num_samples"] = int(results["test/num_samples"])
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
