"""Calls a function if a block of code takes long, without interrupting the block.

reminder = Reminder(60.0, partial(warnings.warn, "… has waited for 60 s"))
with reminder:
    work.wait()
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

PARTS = 10  # the block is checked at intervals of 1/10 of its limit


class Reminder:
    """Context manager that calls a function once if its block takes longer than a limit.

    One background thread checks all blocks of a Reminder, because starting a thread per block would
    take longer than short blocks themselves. The thread starts with the first block, and ends after
    the Reminder is freed.

    Args:
        seconds: the limit. The call may come up to 10 % later.
        action: the function, without arguments; it runs in the background thread.
    """

    def __init__(self, seconds: float, action: Callable[[], object]) -> None:
        self._seconds, self._action = seconds, action
        self._due: float | None = None  # `time.monotonic` of the call; None outside of blocks
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._due = time.monotonic() + self._seconds
        if self._thread is None or not self._thread.is_alive():  # not alive: after a fork
            about = weakref.ref(self), self._seconds / PARTS
            self._thread = threading.Thread(
                target=_watch, args=about, daemon=True, name="threed-reminder"
            )
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._due = None

    def check(self) -> None:
        """Calls the function if the block in progress has reached the limit."""
        due = self._due
        if due is not None and time.monotonic() >= due:
            self._due = None
            self._action()


def _watch(reminder: weakref.ref[Reminder], interval: float) -> None:
    while (alive := reminder()) is not None:
        alive.check()
        del alive
        time.sleep(interval)
