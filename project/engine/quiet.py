"""What Lightning says of itself, and need not."""

import logging
import re
import warnings

# lines that advertise, say what our lines do, of devices first, or stand in the table of tune.py
CHATTER = (
    r"(\[rank: \d+\] )?(💡|-----|Initializing distributed|GPU available|TPU available|LOCAL_RANK|SLURM auto-requeueing|"
    r"Found current_model_state|Seed set|Restor|Loaded|`Trainer.fit` stopped|`weights_only` was not set|"
    r"LR finder stopped early|"
    r"Batch size |The batch size |Reached the maximum batch|Finished batch size)"
)
# warnings of what is meant to be: data in memory without workers, a single process on a machine of a cluster, a
# resumed run in its own folder and without a callback that it had, data without a test, and a call inside Lightning 2.6
MEANT = (
    r".*does not have many workers|The `srun` command is available|Checkpoint directory .* exists and is not|"
    r"Be aware that when using `ckpt_path`|Total length of `list` across ranks is zero|"
    r"`isinstance\(treespec, LeafSpec\)` is deprecated"
)


def quiet_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda line: not re.match(CHATTER, line.getMessage()))
    warnings.filterwarnings("ignore", message=MEANT)
