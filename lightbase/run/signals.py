"""Ctrl-C, SIGTERM and SIGHUP end a script with one line. A training saves its state
before it ends.

Read the class `StopSignals` first. `SIGNALS` is its only object.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from lightbase.config.errors import rank

NAMES = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP"}

# Windows has no SIGHUP
NUMBERS = [number for number in signal.Signals if number.name in NAMES]


SAVING = b"Stopping when the state is saved; a second Ctrl-C ends at once\n"

PR_SET_PDEATHSIG = 1  # see prctl(2)


class Stopped(SystemExit):
    """A signal ends this process. `code` is its exit status: 128 plus the number of the
    signal, as in a shell.

    text: The cause, for the line that short_errors prints.
    hint: How to continue, for the same line.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.text = f"Stopped by {NAMES[signal.Signals(number).name]}"
        self.hint = ""

    def __str__(self) -> str:
        return self.text + self.hint


class StopSignals:
    """Handles the signals that stop a process. A signal raises Stopped. If `waits` is
    true, it is only kept in `received`, and the training stops when its state can be
    saved. A second Ctrl-C ends the process at once; in a notebook it raises
    KeyboardInterrupt.

    Python runs a handler between two of its instructions, in the main thread. While the
    main thread waits in another library, such as for a process that has ended, no
    signal but SIGQUIT (Ctrl-Backslash) and SIGKILL has an effect.

    received: The number of the first signal, 0 before it.
    waits: Whether a signal is only kept.
    pid: The process whose signals are handled. A forked one, such as a worker of a
        loader, ignores the Ctrl-C of a terminal.
    """

    received = 0
    waits = False
    is_handling = False
    pid = 0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals. A context within another one only restores `waits` at its
        end: a signal that is kept stays."""
        if self.is_handling:
            waits = self.waits
            try:
                yield
            finally:
                self.waits = waits
            return
        handlers: dict[int, Any] = {x: signal.getsignal(x) for x in NUMBERS}
        self.received = 0
        self.is_handling = True
        self.install()
        try:
            yield
        finally:
            self.is_handling = self.waits = False
            set_handlers(handlers)

    def install(self) -> None:
        """Set the handler. Call this again in a process that was forked to train.

        A signal that this process ignores stays ignored: Ctrl-C and SIGHUP under nohup
        and in the background of a script.
        """
        self.pid = os.getpid()
        for number in NUMBERS:
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                set_handlers({number: self._handle})

    def _handle(self, number: int, frame: Any) -> None:
        """Handle a signal. Only the first signal counts. In a forked process, SIGTERM
        ends the process, and other signals are ignored."""
        if os.getpid() != self.pid:
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGINT:
            self._expect_another()
        if self.received:
            return
        self.received = number
        if not self.waits:
            raise Stopped(number)

    def _expect_another(self) -> None:
        """Let a second Ctrl-C end this process, or raise KeyboardInterrupt in a
        notebook, whose kernel it would end."""
        again: Any = signal.SIG_DFL
        if hasattr(sys, "ps1"):
            again = signal.default_int_handler
        signal.signal(signal.SIGINT, again)
        if rank() == 0 and self.waits:
            os.write(2, SAVING)


def set_handlers(handlers: Mapping[int, Any]) -> None:
    """Set handlers of signals. In another thread than the main thread nothing happens:
    Python allows no handler there."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Let Linux kill this process when the process that started it has ended, even by
    kill -9. On other systems a process ends when it exchanges something with a process
    that has gone.

    This holds for a process with a rank above 0, and for any process of torchrun. Other
    processes are not watched: a script may outlive the shell that has started it.
    """
    is_started = rank() > 0 or "TORCHELASTIC_RUN_ID" in os.environ
    if is_started and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


SIGNALS = StopSignals()
