"""The prefetcher gives the right step, works ahead, hands errors on and ends."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

import pytest

from threed.data.prefetch import Prefetcher


def explode(step: int) -> int:
    if step == 3:
        raise KeyError("no sample three")
    return step * step


def noting(seen: list[int]) -> Callable[[int], int]:
    """Give a fetch that notes each step it is asked for, and returns it."""

    def fetch(step: int) -> int:
        seen.append(step)
        return step

    return fetch


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_steps_come_in_order() -> None:
    with Prefetcher(lambda step: step * step, start=5) as batches:
        assert [batches.get(step) for step in range(5, 50)] == [
            step * step for step in range(5, 50)
        ]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_works_ahead_to_its_depth_and_no_further(depth: int) -> None:
    seen: list[int] = []
    with Prefetcher(noting(seen), start=0, depth=depth) as batches:
        wait_until(lambda: len(seen) == depth)
        time.sleep(0.05)
        assert seen == list(range(depth))
        assert batches.get(0) == 0
        wait_until(lambda: len(seen) == depth + 1)
        time.sleep(0.05)
        assert seen == list(range(depth + 1))


def test_fetches_in_another_thread() -> None:
    with Prefetcher(lambda step: threading.get_ident(), start=0) as batches:
        assert batches.get(0) != threading.get_ident()


def test_none_is_a_result() -> None:
    with Prefetcher(lambda step: None, start=0) as batches:
        assert batches.get(0) is None


def test_seeking_restarts_forwards_and_backwards() -> None:
    seen: list[int] = []
    with Prefetcher(noting(seen), start=0, depth=2) as batches:
        assert [batches.get(step) for step in (0, 1, 100, 101, 7, 8, 7, 0)] == [
            0,
            1,
            100,
            101,
            7,
            8,
            7,
            0,
        ]
    assert {100, 101, 7, 8} <= set(seen)
    assert not {50, 90, 60} & set(seen)


def test_a_fetch_under_way_is_not_taken_for_another_step() -> None:
    gate, started = threading.Event(), threading.Event()

    def fetch(step: int) -> int:
        if step == 0:
            started.set()
            gate.wait()
        return step

    with Prefetcher(fetch, start=0) as batches:
        started.wait()
        threading.Timer(0.05, gate.set).start()
        assert batches.get(10) == 10
        assert batches.get(11) == 11


def test_errors_come_at_their_step_with_their_traceback() -> None:
    with Prefetcher(explode, start=0) as batches:
        assert [batches.get(step) for step in range(3)] == [0, 1, 4]
        with pytest.raises(KeyError, match="no sample three") as caught:
            batches.get(3)
        assert "explode" in [
            frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
        ]


def test_goes_on_after_an_error() -> None:
    with Prefetcher(explode, start=2) as batches:
        batches.get(2)
        for _ in range(2):
            with pytest.raises(KeyError):
                batches.get(3)
        assert batches.get(4) == 16
        assert batches.get(5) == 25


def test_stops_fetching_after_an_error() -> None:
    seen: list[int] = []

    def fetch(step: int) -> int:
        seen.append(step)
        raise OSError("disk gone")

    with Prefetcher(fetch, start=0, depth=4):
        wait_until(lambda: bool(seen))
        time.sleep(0.05)
        assert seen == [0]


def test_system_exit_reaches_the_caller() -> None:
    def fetch(step: int) -> int:
        raise SystemExit(3)

    with Prefetcher(fetch, start=0) as batches, pytest.raises(SystemExit):
        batches.get(0)


def test_close_ends_the_thread_and_may_be_repeated() -> None:
    before = threading.active_count()
    batches = Prefetcher(lambda step: step, start=0)
    batches.get(0)
    assert threading.active_count() == before + 1
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        batches.get(1)


def test_close_wakes_a_waiting_get() -> None:
    gate = threading.Event()
    batches = Prefetcher(lambda step: gate.wait(), start=0)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            batches.get(0)
        except RuntimeError as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.05)
    closing = threading.Thread(target=batches.close)
    closing.start()
    asking.join(timeout=60)
    assert not asking.is_alive()
    assert len(raised) == 1
    gate.set()
    closing.join(timeout=60)
    assert not closing.is_alive()


def test_waiting_costs_no_processor_time() -> None:
    with Prefetcher(lambda step: step, start=0):
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth 0"):
        Prefetcher(lambda step: step, start=0, depth=0)
