"""A PyTorch Lightning project template. Start reading at classifier.py, then data/datamodule.py, then cli.py."""

import os
import sys
from pathlib import Path
from typing import Any

from project.base.rank import say
from project.base.versions import versions

# noted at once: when torch has been imported, seconds later, the process that started this one may be gone
STARTED_BY = os.getppid()


def _end_quietly(kind: type[BaseException], *details: Any) -> None:
    """At Ctrl-C during these seconds, in place of a traceback through the imports."""
    if kind is KeyboardInterrupt:
        say("Stopped by Ctrl-C")
    else:
        _excepthook(kind, *details)


_excepthook, sys.excepthook = sys.excepthook, _end_quietly

if sys.argv[1:] == ["--version"] and Path(sys.argv[0]).resolve().parent == Path(__file__).parents[1] / "scripts":
    print(versions())
    sys.exit()
