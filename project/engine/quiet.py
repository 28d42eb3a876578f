"""What Lightning says of itself, and need not."""

import logging
import re
import warnings

# beginnings of Lightning's lines that
CHATTER = (
    # advertise
    "💡",
    # our line "Device: ..." says
    *("Initializing distributed", "-----", "GPU available", "TPU available", "LOCAL_RANK", "SLURM auto-requeueing"),
    # our other lines, at the start and at the end of a run, say
    *("Seed set", "Restor", "Loaded", "`Trainer.fit` stopped", "`weights_only` was not set"),
    # tune.py says in its table
    *("LR finder stopped early", "Batch size ", "The batch size ", "Reached the maximum batch", "Finished batch size"),
)
# beginnings of warnings of what is meant to be: data in memory without workers, a single process on a machine of a
# cluster, a resumed run in its own folder and without a callback that it had, and a call inside Lightning 2.6
MEANT = (
    *(".*does not have many workers", "The `srun` command is available", "Checkpoint directory .* exists and is not"),
    *("Be aware that when using `ckpt_path`", r"`isinstance\(treespec, LeafSpec\)` is deprecated"),
)


def quiet_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(
                lambda record: not re.sub(r"^\[rank: \d+\] ", "", record.getMessage()).startswith(CHATTER)
            )
    for message in MEANT:
        warnings.filterwarnings("ignore", message=message)
