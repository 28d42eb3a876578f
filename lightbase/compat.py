"""What Lightning says and does of itself, and need not."""

import logging
import os
import re
import warnings

import torch

# lines that advertise, say what our lines do, of devices first, or stand in the table of tune.py;
# of Tensor Cores: fp32 stays as exact as torch has it, and our advice names bf16-mixed, which gains
# more
CHATTER = (
    r"(\[rank: \d+\] )?(💡|-----|Initializing distributed|GPU available|TPU "
    r"available|LOCAL_RANK|SLURM auto-requeueing|"
    r"Found current_model_state|Seed set|Restor|Loaded|`Trainer.fit` stopped|`weights_only` "
    r"was not set|"
    r"LR finder stopped early|Experiment with name|You are using a CUDA device .* that has "
    r"Tensor Cores|"
    r"Batch size |The batch size |Reached the maximum batch|Finished batch size)"
)
# warnings of what is meant to be: data in memory without workers, a single process on a machine of
# a cluster, a resumed run in its own folder and without a callback that it had, data without a
# test, a call inside Lightning 2.6; a CPU asked for beside a GPU, which our line of devices says,
# and Tensor Cores as above, in torch 2.11's inductor; with ddp on GPUs that Lightning 2.6 sets it
# up on another stream (its issue 21567), and convolutions of 1 x 1, whose layouts torch takes for
# different ones (pytorch issue 157862)
MEANT = (
    r".*does not have many workers|The `srun` command is available|Checkpoint directory .* "
    r"exists and is not|"
    r"Be aware that when using `ckpt_path`|Total length of `list` across ranks is zero|"
    r"`isinstance\(treespec, LeafSpec\)` is deprecated|GPU available but not "
    r"used|TensorFloat32 tensor cores|"
    r"The AccumulateGrad node's stream|Grad strides do not match(.|\n)*grad.sizes\(\) = "
    r"\[\d+, \d+, 1, 1\]"
)


def quiet_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda line: not re.match(CHATTER, line.getMessage()))
    warnings.filterwarnings("ignore", message=MEANT)
    if (
        not torch.cuda.is_available()
    ):  # with it torch looks for NVML's library in each step of Adam, which costs 0.1 ms
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
