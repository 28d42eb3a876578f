"""Ctrl-C, SIGTERM and SIGHUP end a script in one line, and a training where its state can be
saved."""

import contextlib
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from lightbase.ranks import rank

NAMES = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP"}
NUMBERS = [number for number in signal.Signals if number.name in NAMES]  # Windows has no SIGHUP
CHECK_S = 2
STUCK_S = 20


class Stopped(SystemExit):
    """A signal ends this process. code: its exit status. hint: how to go on, for the line that
    short_errors prints."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.text, self.hint = f"Stopped by {NAMES[signal.Signals(number).name]}", ""


class StopSignals:
    """What a signal does here: it raises Stopped, or is only remembered, in `asked`, while `waits`.

    A second Ctrl-C ends the process at once. So does any signal while a call does not come back, as
    of an exchange with a process that is elsewhere: after CHECK_S, or STUCK_S where there may be a
    state to save. Those forked from this one, such as a loader's workers, get a terminal's Ctrl-C
    as well, and leave it to this one.
    """

    asked = 0
    waits = False
    exchanges = False
    pid = 0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in NUMBERS}
        is_inner = self.pid == os.getpid()  # benchmark.py calls train.py's main
        self.asked, self.exchanges = 0, False
        self.install()
        try:
            yield
        finally:
            self.waits = False
            if self.pid == os.getpid() and not is_inner:
                signal.set_wakeup_fd(-1)
                self.sender.close()
                del self.sender  # and the call after a fork
                self.pid = 0
                for number, handler in before.items():
                    signal.signal(number, handler)

    def wait(self, exchanges: bool) -> None:
        """Remember signals from now on. exchanges: in such a call this process may wait for others
        for ever."""
        self.waits, self.exchanges = True, exchanges
        self.install()

    def install(self) -> None:
        """Be the handler (again: Lightning has its own), also in a process that is forked to
        train."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in NUMBERS:
            # ignored: under nohup, or in a script's background
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        if self.pid != os.getpid():
            self.pid = os.getpid()
            receiver, self.sender = socket.socketpair()
            self.sender.setblocking(False)
            signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
            # a worker's signals are not this process's
            multiprocessing.util.register_after_fork(
                self.sender, lambda _: signal.set_wakeup_fd(-1)
            )
            threading.Thread(target=self._watch, args=(receiver,), daemon=True).start()

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() == self.pid:
            is_first, self.asked = not self.asked, self.asked or number
            if is_first and not self.waits:
                raise Stopped(number)
        elif number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _watch(self, receiver: socket.socket) -> None:
        """In a thread of its own, which runs on while the main one is in a call that does not come
        back."""
        numbers: list[int] = []
        seconds = 0
        with receiver:
            while True:
                try:
                    found = receiver.recv(1)
                except TimeoutError:
                    seconds += CHECK_S
                    if (
                        seconds == CHECK_S
                        and self.asked == signal.SIGINT
                        and self.waits
                        and rank() == 0
                    ):
                        tell(
                            "Stopping as soon as the state can be saved; a second Ctrl-C ends "
                            "at once"
                        )
                    is_stuck = not self.asked and (
                        seconds >= STUCK_S if self.exchanges else not self.waits
                    )
                    if is_stuck:
                        missing = (
                            f" after {STUCK_S} s: a rank is missing in a collective; go "
                            "on with --ckpt_path last"
                        )
                        if rank() == 0:
                            tell(Stopped(numbers[0]).text + missing * self.exchanges)
                        os._exit(128 + numbers[0])
                    continue
                if not found:
                    return
                if found[0] in NUMBERS:
                    numbers.append(found[0])
                    if numbers.count(signal.SIGINT) > 1:
                        os._exit(128 + signal.SIGINT)
                    receiver.settimeout(CHECK_S)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


SIGNALS = StopSignals()
