"""What Lightning says of itself, and need not."""

import logging
import re
import warnings

# beginnings of Lightning's lines that advertise, or say what we say ourselves
CHATTER = (
    "Initializing distributed",
    "-----",
    "💡",
    "GPU available",
    "TPU available",
    "LOCAL_RANK",
    "Seed set",
    "Restor",
    "Loaded",
    "`Trainer.fit` stopped",
    "SLURM auto-requeueing",
    # its finders of learning rate and batch size
    "`weights_only` was not set",
    "LR finder stopped early",
    "Batch size ",
    "The batch size ",
    "Reached the maximum batch size",
    "Finished batch size finder",
)


def is_wanted(record: logging.LogRecord) -> bool:
    text = re.sub(r"^\[rank: \d+\] ", "", record.getMessage())
    return not text.startswith(CHATTER)


def quiet_lightning() -> None:
    """Leave out what Lightning says of itself."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(is_wanted)
    # data in memory needs no workers
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # on the machines of a cluster a single process needs none
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
    # a resumed run goes on in its own folder
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    # a run may go on without --patience or --keep_every_epoch
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks used to create")
    # torch 2.15 on a call inside Lightning 2.6
    warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)` is deprecated")
