"""log.txt in the folder of a run: what the terminal shows, with times."""

import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightbase.config.errors import UserError
from lightbase.config.known_errors import lines_of
from lightbase.run.folder import LockedFolder
from lightbase.run.signals import Stopped


@contextlib.contextmanager
def copied_output(run: LockedFolder | None) -> Iterator[None]:
    """Within this context, add what this process prints to log.txt. The lines of an
    error that leaves the context are added, too: they are printed later.

    run: The run's folder, or None in a process that writes nothing.
    """
    log = LogFile(None)
    if run:
        log.path = run.folder / "log.txt"
    # Handlers of Lightning's log lines have the same streams, so these get another
    # `write`, and are not replaced.
    streams: set[Any] = {sys.stdout, sys.stderr} - {None}
    before = {stream: stream.write for stream in streams}
    for stream in streams:
        stream.write = functools.partial(log.copy, before[stream])
    try:
        yield
    except (UserError, Stopped) as error:
        log.add(f"{error}\n")
        raise
    except Exception as error:
        lines = lines_of(error)[0] or traceback.format_exception(error)
        log.add("".join(f"{line.rstrip()}\n" for line in lines))
        raise
    finally:
        for stream in streams:
            stream.write = before[stream]


@dataclass
class LogFile:
    """Adds lines to a file, each with the time. The file is closed in between.

    path: None for no file, and after it could not be written, as on a full disk.
    begun: The beginning of the next line.
    """

    path: Path | None
    begun: str = ""

    def copy(self, write: Callable[[str], int], text: str) -> int:
        """Write a text to a stream, and add it, unless it draws a progress bar
        again."""
        if not text.startswith("\r"):
            self.add(text)
        return write(text)

    def add(self, text: str) -> None:
        *lines, self.begun = (self.begun + text).split("\n")
        if not lines or not self.path:
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.writelines(f"{now} {line}\n" for line in lines)
        except OSError as error:
            self.path = None
            print(f"log.txt cannot be written: {error.strerror}")
