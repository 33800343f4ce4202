"""Reminders: one call for a block that takes long, none for short ones, and no thread that stays."""

from __future__ import annotations

import threading
import time

from threed.core.reminder import Reminder


def reminders() -> int:
    return sum(thread.name == "threed-reminder" for thread in threading.enumerate())


def until(reached: object) -> None:
    end = time.monotonic() + 30
    while not reached() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.01)


def test_a_long_block_is_mentioned_once_and_short_ones_never() -> None:
    calls: list[str] = []
    reminder = Reminder(0.2, lambda: calls.append(threading.current_thread().name))
    assert reminders() == 0
    for _ in range(100):
        with reminder:
            pass
    assert reminders() == 1
    time.sleep(0.5)
    assert calls == []
    for count in (1, 2):
        with reminder:
            until(lambda count=count: len(calls) == count)
            time.sleep(0.3)
        assert calls == ["threed-reminder"] * count
    del reminder
    until(lambda: reminders() == 0)
    assert reminders() == 0
