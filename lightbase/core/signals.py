"""Ctrl-C, SIGTERM and SIGHUP end a script in one line, and a training after its state
is saved."""

import contextlib
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from lightbase.core.errors import rank

NAMES = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP"}
NUMBERS = [
    number for number in signal.Signals if number.name in NAMES
]  # Windows has no SIGHUP
CHECK_S = 2
STUCK_S = 20


class Stopped(SystemExit):
    """A signal ends this process. code: its exit status. hint: how to continue, for the
    line that short_errors prints."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.text, self.hint = f"Stopped by {NAMES[signal.Signals(number).name]}", ""


class StopSignals:
    """What a signal does: it raises Stopped; or, if `waits`, it is only kept in
    `received`.

    Python runs a signal's handler between two of its instructions. While the main
    thread is in a call that does not return, such as an exchange with a process that is
    elsewhere, a thread ends
    the process instead: after CHECK_S, or after STUCK_S if there may be a state to
    save. A second Ctrl-C ends it at once. A forked process, such as a loader's worker,
    ignores a terminal's Ctrl-C.
    """

    received = 0  # number of the first signal
    waits = False
    exchanges = False  # whether the process may wait for others
    pid = 0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals within this context."""
        handlers = {number: signal.getsignal(number) for number in NUMBERS}
        is_inner = self.pid == os.getpid()  # benchmark.py calls train.py's main
        self.received, self.exchanges = 0, False
        self.install()
        try:
            yield
        finally:
            self.waits = False
            if self.pid == os.getpid() and not is_inner:
                signal.set_wakeup_fd(-1)
                self.sender.close()
                del self.sender  # and with it what register_after_fork would call
                self.pid = 0
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    def wait(self, exchanges: bool) -> None:
        """From now on keep signals in `received`. exchanges: this process may wait for
        others."""
        self.waits, self.exchanges = True, exchanges
        self.install()

    def install(self) -> None:
        """Set the handler; again after Lightning sets its own, and in a process forked
        to train."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in NUMBERS:
            # Ctrl-C and SIGHUP are ignored under nohup and in the background of a
            # script
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        if self.pid == os.getpid():
            return
        self.pid = os.getpid()
        receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        # a signal to a worker is not for this process
        multiprocessing.util.register_after_fork(
            self.sender, lambda _: signal.set_wakeup_fd(-1)
        )
        threading.Thread(target=self._watch, args=(receiver,), daemon=True).start()

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() == self.pid:
            is_first = not self.received
            self.received = self.received or number
            if is_first and number == signal.SIGINT and rank() == 0 and os.isatty(2):
                os.write(2, b"\n")  # a terminal has written ^C behind the progress bar
            if is_first and not self.waits:
                raise Stopped(number)
        elif number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _watch(self, receiver: socket.socket) -> None:
        """In a thread: receive the number of each signal, also while the main thread is
        stuck."""
        numbers: list[int] = []
        seconds = 0  # since the newest signal
        with receiver:
            while True:
                try:
                    received = receiver.recv(1)
                except TimeoutError:
                    seconds += CHECK_S
                    self._check(numbers[0], seconds)
                    continue
                if not received:
                    return
                if received[0] in NUMBERS:
                    numbers.append(received[0])
                    receiver.settimeout(CHECK_S)
                if numbers.count(signal.SIGINT) > 1:
                    tell("Ended by a second Ctrl-C, maybe before the state was saved")
                    os._exit(128 + signal.SIGINT)

    def _check(self, number: int, seconds: int) -> None:
        """End a process whose main thread has not handled this signal. seconds: since
        it came."""
        if self.received:
            if seconds == CHECK_S and self.received == signal.SIGINT and self.waits:
                tell(
                    "Stopping as soon as the state can be saved; a second Ctrl-C ends at once"
                )
        elif seconds >= STUCK_S if self.exchanges else not self.waits:
            hint = f" after {STUCK_S} s: a rank is missing in a collective"
            hint += "; go on with --ckpt_path last"
            tell(Stopped(number).text + hint * self.exchanges)
            os._exit(128 + number)


def tell(text: str) -> None:
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)


SIGNALS = StopSignals()
