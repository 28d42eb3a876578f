"""Which of the processes of a run this one is: the first one speaks and writes."""

import os

# as torchrun, SLURM, LSF and Lightning tell a process its place, before there is a Trainer to ask
VARIABLES = ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")


def rank() -> int:
    """0 in the first process, and where there is only one; above 0 in the others."""
    return next((int(os.environ[name]) for name in VARIABLES if os.environ.get(name, "0") != "0"), 0)


def say(text: str) -> None:
    """Print lines, once for all processes."""
    if rank() == 0:
        print(text, flush=True)
