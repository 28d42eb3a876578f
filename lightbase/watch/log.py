"""log.txt in the folder of a run: what the terminal shows, with times."""

import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightbase.config.errors import UserError
from lightbase.config.known_errors import lines_of
from lightbase.run.folder import LockedFolder
from lightbase.run.signals import Stopped


@contextlib.contextmanager
def copied_output() -> Iterator["LogFile"]:
    """Within this context, add what this process prints to a LogFile, which begins when
    the run has a folder. The lines of an error that leaves the context are added, too:
    they are printed later."""
    log = LogFile()
    # Handlers of Lightning's log lines have the same streams, so these get another
    # `write`, and are not replaced.
    streams: set[Any] = {sys.stdout, sys.stderr} - {None}
    before = {stream: stream.write for stream in streams}
    for stream in streams:
        stream.write = functools.partial(log.copy, before[stream])
    try:
        yield log
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

    path: The file. None before `begin`.
    lines: Lines that are not in the file yet. None if no file gets them: in a process
        that writes nothing, and after the file could not be written.
    begun: The beginning of the next line.
    """

    path: Path | None = None
    lines: list[str] | None = field(default_factory=list)
    begun: str = ""

    def begin(self, run: LockedFolder | None) -> None:
        """Write the lines so far, and all others from now on. run: The run's folder, or
        None in a process that writes nothing."""
        if run is None:
            self.lines = None
        else:
            self.path = run.folder / "log.txt"

    def copy(self, write: Callable[[str], int], text: str) -> int:
        """Write a text to a stream, and add it, unless it draws a progress bar
        again."""
        if not text.startswith("\r"):
            self.add(text)
        return write(text)

    def add(self, text: str) -> None:
        *ended, self.begun = (self.begun + text).split("\n")
        if not ended or self.lines is None:
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self.lines += [f"{now} {line}\n" for line in ended]
        # a run that has made no step removes its folder
        if not self.path or not self.path.parent.is_dir():
            return
        try:
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.writelines(self.lines)
            self.lines.clear()
        except OSError as error:
            self.lines = None
            print(f"log.txt cannot be written: {error.strerror}")
