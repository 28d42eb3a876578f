"""Which of the processes of a run this one is: the first one speaks and writes."""

import os

# as torchrun, SLURM, LSF and Lightning tell a process its place, before there is a Trainer to ask
VARIABLES = ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")


def rank() -> int:
    """0 in the first process, and where there is only one; above 0 in the others."""
    return next(
        (int(os.environ[name]) for name in VARIABLES if os.environ.get(name, "0") != "0"), 0
    )


def say(text: str) -> None:
    """Print lines, once for all processes."""
    if rank() == 0:
        print(printable_lines(text), flush=True)


def printable_lines(text: str) -> str:
    """Lines that a terminal shows as they are: a character that would control it becomes an escape
    such as \\x1b."""
    return "\n".join(map(printable, text.replace("\t", " ").split("\n")))


def printable(text: str) -> str:
    """One line that a terminal shows as it is: a line break is \\n."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
