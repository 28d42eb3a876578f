"""Ctrl-C, SIGTERM and SIGHUP end a script with one line. A training saves its state
before it ends.

Read the class `StopSignals` first. `SIGNALS` is its only object.
"""

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
# Windows has no SIGHUP
NUMBERS = [number for number in signal.Signals if number.name in NAMES]
CHECK_S = 2
"""Seconds between two looks of the second thread whether the main thread has handled a
signal. See StopSignals."""
STUCK_S = 20
"""Seconds after which a process that waits for other processes counts as stuck."""
ERASE_LINE = b"\r\x1b[J"
"""Lets a terminal erase the line of the cursor, and what is below."""


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


class StopSignals:
    """Handles the signals that stop a process. A signal raises Stopped. If `waits` is
    true, it is only kept in `received`, and the training stops when its state can be
    saved.

    Python runs a handler between two of its instructions, in the main thread. If the
    main thread is in a call that does not return, such as an exchange with a process
    that has ended, the handler never runs. Then a second thread ends the process:

    - after STUCK_S if `exchanges` is true
    - never if only `waits` is true: the main thread may still save the state
    - after CHECK_S otherwise

    A second Ctrl-C ends the process at once. A forked process, such as a worker of a
    loader, ignores the Ctrl-C of a terminal.

    received: The number of the first signal, 0 before it.
    waits: Whether a signal is only kept.
    exchanges: Whether the process may wait for other processes.
    ends_at_once: Whether a signal ends the process without an exception. In an import
        of torch, an exception may be caught, or cause other errors.
    pid: The process whose signals are handled, 0 for none.
    """

    received = 0
    waits = False
    exchanges = False
    ends_at_once = False
    pid = 0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals within this context. Afterwards the earlier handlers are back,
        unless this context is inside another one."""
        handlers = {number: signal.getsignal(number) for number in NUMBERS}
        is_inner = self.pid == os.getpid()  # benchmark.py calls train.py's main
        self.received = 0
        self.exchanges = False
        self.install()
        try:
            yield
        finally:
            self.waits = False
            if self.pid == os.getpid() and not is_inner:
                signal.set_wakeup_fd(-1)
                # close alone does not end the thread if a forked worker has the socket
                self.sender.shutdown(socket.SHUT_RDWR)
                self.sender.close()
                # what `install` has registered for forked processes ends with it
                del self.sender
                self.pid = 0
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    def wait(self, exchanges: bool) -> None:
        """From now on only keep signals in `received`.

        exchanges: Whether this process may wait for other processes.
        """
        self.waits = True
        self.exchanges = exchanges
        self.install()

    def install(self) -> None:
        """Set the handler. Call this again after Lightning has set its handlers, and in
        a process that was forked to train.

        A signal that this process ignores stays ignored: Ctrl-C and SIGHUP under nohup
        and in the background of a script. In another thread than the main thread
        nothing happens, because Python allows no handler there.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in NUMBERS:
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        if self.pid == os.getpid():
            return
        self.pid = os.getpid()
        # Python writes the number of a signal to a socket as soon as it comes, even
        # while the main thread is stuck. The second thread gets it from there.
        receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        # a forked worker has the same socket: it must not write its signals there
        multiprocessing.util.register_after_fork(
            self.sender, lambda _: signal.set_wakeup_fd(-1)
        )
        threading.Thread(target=self._watch, args=(receiver,), daemon=True).start()

    def _handle(self, number: int, frame: Any) -> None:
        """Handle a signal in the main thread. Only the first signal counts. In a forked
        process, SIGTERM ends the process, and other signals are ignored."""
        if os.getpid() != self.pid:  # a forked process
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if number == signal.SIGINT and rank() == 0 and os.isatty(2):
            # a terminal has written ^C, maybe behind the progress bar
            os.write(2, ERASE_LINE + b"^C\n")
        if self.received:
            return
        self.received = number
        if self.ends_at_once:
            tell(Stopped(number).text)
            os._exit(128 + number)
        if not self.waits:
            raise Stopped(number)

    def _watch(self, receiver: socket.socket) -> None:
        """In the second thread: receive the number of each signal, and look every
        CHECK_S whether the main thread has handled it."""
        numbers: list[int] = []
        seconds = 0  # without a new signal, since the first one
        with receiver:
            while True:
                try:
                    message = receiver.recv(1)
                except TimeoutError:
                    seconds += CHECK_S
                    self._check(numbers[0], seconds)
                    continue
                if not message:  # the sender is closed
                    return
                if message[0] in NUMBERS:
                    numbers.append(message[0])
                    receiver.settimeout(CHECK_S)
                if numbers.count(signal.SIGINT) > 1:
                    tell("Ended by a second Ctrl-C, maybe before the state was saved")
                    os._exit(128 + signal.SIGINT)

    def _check(self, number: int, seconds: int) -> None:
        """End the process if its main thread has not handled the signal. If the signal
        is handled and the state has to be saved first, tell the user once.

        number: The first signal.
        seconds: About how long ago it came. Only times of CHECK_S without a signal are
            counted.
        """
        text = Stopped(number).text
        limit_s = CHECK_S
        if self.exchanges:
            limit_s = STUCK_S
            text += (
                f" after {STUCK_S} s: a rank is missing in a collective; "
                "go on with --ckpt_path last"
            )
        if self.received:
            if seconds == CHECK_S and number == signal.SIGINT and self.waits:
                tell(
                    "Stopping as soon as the state can be saved; a second Ctrl-C ends "
                    "at once"
                )
        elif seconds >= limit_s and (self.exchanges or not self.waits):
            tell(text)
            os._exit(128 + number)


def tell(text: str) -> None:
    """Print a line to stderr, in the first process only."""
    if rank() == 0:
        print(text, file=sys.stderr)


SIGNALS = StopSignals()
