"""What a training asks of a GPU, counted on a simulated one with SIMGPU_TRACE=1.

`python gpu_counts.py CONFIG DATA_DIR FOLDER` trains the network of a config in small
batches, on whose size the counts do not depend. Its last line is JSON: what each step
and the writing of last.ckpt have asked for, {"operation aten::mm": 3, "copy device to
pinned": 1, ...}.
"""

import json
import sys
from pathlib import Path
from typing import Any

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "train.py")
EVERY = 20  # steps from log step to log step, and batches that are fetched at once
FLAGS = (
    f"--trainer.accelerator gpu --trainer.devices 1 --trainer.log_every_n_steps {EVERY} "
    "--trainer.max_epochs 1 --trainer.limit_test_batches 0 --figures_every_n_epochs 0 "
    "--cuda_graphs false "  # a replay launches one graph
    "--data.batch_size 4 --config {} --data.data_dir {} --trainer.default_root_dir {}"
)


def main() -> None:
    sys.argv = [SCRIPT, *FLAGS.format(*sys.argv[1:]).split()]

    import simgpu
    from lightning import Callback
    from torchvision.datasets import CIFAR10

    from lightbase.commands import train
    from lightbase.run import fit
    from lightbase.run.checkpoint import AtomicCheckpointIO

    # the images are made by the test
    CIFAR10._check_integrity = lambda self: True
    CIFAR10.meta["md5"] = None
    steps: list[dict[str, int]] = []
    checkpoint: dict[str, int] = {}

    def newest() -> dict[str, int]:
        counts: dict[str, int] = simgpu.counts()
        simgpu.reset_counts()
        return counts

    class Count(Callback):
        """Counts from the beginning of each `training_step` to that of the next one."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            step = pl_module.training_step

            def training_step(*args: Any) -> Any:
                steps.append(newest())
                return step(*args)

            pl_module.training_step = training_step

    class CountedIO(AtomicCheckpointIO):
        def save_checkpoint(self, *args: Any, **options: Any) -> None:
            newest()
            super().save_checkpoint(*args, **options)
            checkpoint.clear()
            checkpoint.update(newest())

    make = train.make_callbacks
    train.make_callbacks = lambda *args: [*make(*args), Count()]
    fit.AtomicCheckpointIO = CountedIO  # type: ignore[misc]
    train.main()
    print(json.dumps({"steps": steps[1:], "checkpoint": checkpoint}))


if __name__ == "__main__":
    main()
