"""Signals that ask a run to save and end: SIGTERM, SIGUSR1 and SIGHUP.

    signals = Signals()
    with signals:                     # in the main thread
        signals.listen(0.5)           # in another thread: waits up to half a second
        signals.asked                 # "SIGTERM", or "" while nobody asked

A handler of Python's runs only when the main thread comes back from C++, which it does not while a collective waits for
a rank that is gone. So nothing is done there: the interpreter writes the number of each signal into a socket at once
(`signal.set_wakeup_fd`), and another thread reads it.

A second SIGTERM ends the process at once. Those that come within three seconds count as one: a batch system sends to
all processes, and torchrun hands its own on to the ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_S = 3.0
# the exit code of a process that ended by SIGTERM, as shells have it
TERMINATED = 128 + signal.SIGTERM


class Signals:
    """Hears signals while entered, if that is in the main thread; handlers that ignore them are left in place."""

    def __init__(self) -> None:
        self.asked = ""
        self.terminated = 0.0  # when the first SIGTERM came, of the monotonic clock
        self._before: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._wakeup = -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in ASKING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, lambda *_: None)
                signal.siginterrupt(number, False)  # libraries need not begin calls anew
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, ignore: bool = False) -> None:
        """Puts the handlers back that were there before, or ignores what comes from here on; again does nothing."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignore else before)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        self._before = {}
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """Ends a `listen` at once."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def listen(self, seconds: float) -> None:
        """Waits so long for signals, and takes note of those that come."""
        with contextlib.suppress(OSError, ValueError):
            if select.select([self._reader], [], [], seconds)[0]:
                for number in self._reader.recv(64):
                    self.hear(number)

    def hear(self, number: int) -> None:
        """Takes note of a signal; ends the process on a second SIGTERM."""
        if number not in ASKING:
            return
        self.asked = self.asked or signal.Signals(number).name
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self.terminated and now - self.terminated > SAME_S:
                os._exit(TERMINATED)
            self.terminated = self.terminated or now
