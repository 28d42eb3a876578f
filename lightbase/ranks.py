"""The rank of this process, and lines that only the first process prints."""

import functools
import os

# where torchrun, SLURM, LSF and Lightning put the rank; there is no Trainer yet
# Noted before torch is imported, which takes seconds: the parent process may have ended by then.
STARTED_BY = os.getppid()
VARIABLES = ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")


def rank() -> int:
    """0 in the first process, above 0 in the others."""
    ranks = [os.environ.get(name, "0") for name in VARIABLES]
    return next((int(rank) for rank in ranks if rank != "0"), 0)


def say(text: str) -> None:
    """Print lines, in the first process only."""
    if rank() == 0:
        print(printable_lines(text), flush=True)


@functools.cache
def say_once(text: str) -> None:
    say(text)


def printable_lines(text: str) -> str:
    """Lines without control characters, which become escapes such as \\x1b."""
    return "\n".join(map(printable, text.replace("\t", " ").split("\n")))


def printable(text: str) -> str:
    """One line without control characters: a line break becomes \\n."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
