"""Receives the signals that ask a run to save and stop: SIGTERM, SIGUSR1 and SIGHUP.

    signals = Signals()
    with signals:                     # in the main thread
        signals.listen(0.5)           # in another thread: waits up to half a second
        signals.asked                 # "SIGTERM", or "" before any signal

A Python signal handler runs in the main thread, and only after this thread has returned from C++.
While a collective waits for a dead rank, the main thread does not return. So the interpreter also
writes the number of each signal into a socket immediately (`signal.set_wakeup_fd`), and another
thread reads the socket. The handler only sets `asked`: the main thread sees a signal at once, even
if the other thread does not run for a while on a busy machine.

A second SIGTERM ends the process at once. SIGTERMs within three seconds of the first one count as
the same signal: a batch system sends SIGTERM to all processes, and torchrun then forwards the one
that it received, so a rank gets two.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_S = 3.0  # seconds after the first SIGTERM in which further SIGTERMs count as the same signal
# Exit code of a process that was ended by SIGTERM, as shells report it.
TERMINATED = 128 + signal.SIGTERM


class Signals:
    """Receives signals inside its `with` block.

    Outside the main thread, the block has no effect, because only the main thread can set signal
    handlers. A signal that the process ignores stays ignored.

    Args:
        end: function that ends the process at a second SIGTERM; by default, it exits at once.

    Attributes:
        asked: name of the first signal; "" before any signal.
        terminated: time of the first SIGTERM, by `time.monotonic`; 0 before it.
    """

    def __init__(self, end: Callable[[], None] = lambda: os._exit(TERMINATED)) -> None:
        self._end_process = end
        self.asked = ""
        self.terminated = 0.0  # `time.monotonic()` at the first SIGTERM; 0 before it
        self._before: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        for side in (self._reader, self._writer):
            side.setblocking(False)
        self._wakeup = -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # An ignored signal stays ignored; for example, `nohup` ignores SIGHUP.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
                signal.siginterrupt(number, False)  # system calls continue after the signal
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, ignore: bool = False) -> None:
        """Restores the previous handlers; may be called repeatedly.

        Args:
            ignore: whether to ignore further signals instead of restoring the handlers.
        """
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignore else before)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        self._before = {}
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """Makes a waiting `listen` return."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def listen(self, seconds: float) -> None:
        """Waits up to `seconds` for signals, and records them."""
        with contextlib.suppress(OSError, ValueError):
            if select.select([self._reader], [], [], seconds)[0]:
                for number in self._reader.recv(64):
                    self.hear(number)

    def _ask(self, number: int, _: object = None) -> None:
        self.asked = self.asked or signal.Signals(number).name

    def hear(self, number: int) -> None:
        """Records a signal; calls `end` at a second SIGTERM."""
        if number not in STOP_SIGNALS:
            return
        self._ask(number)
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self.terminated and now - self.terminated > SAME_S:
                self._end_process()
            self.terminated = self.terminated or now
