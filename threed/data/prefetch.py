"""A background thread that computes the next steps' batches during the current step.

Use: `with Prefetcher(fetch, start=7) as batches: batches.get(7); batches.get(8); …`

The thread calls `fetch` for the steps start, start + 1, … and keeps at most `depth` results that
`get` has not returned yet. If `get` requests a step that is not the next one, the thread discards
its results and restarts at the requested step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Computes `fetch(step)` up to `depth` steps ahead in one background thread.

    If `fetch` raises an exception for a step, `get` of that step raises the same exception, with
    the original traceback.

    Args:
        fetch: function of the step that returns the step's batch. It must always return the same
            batch for a step.
        start: the first step.
        depth: maximum number of results that wait for `get`, at least 1.

    Raises:
        ValueError: if `depth` is below 1.
    """

    def __init__(self, fetch: Callable[[int], T], start: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"prefetch depth {depth}: must be at least 1")
        self._fetch, self._depth = fetch, depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="threed-prefetch")
        self._closed: Future[Any] = Future()
        self._stop = threading.Event()
        self._ahead: deque[Future[T]] = deque()
        self._wanted = start  # the step of the first future in `_ahead`
        self._restart(start)

    def get(self, step: int) -> T:
        """Returns `fetch(step)`; waits until its result is available, or raises its exception.

        Raises:
            RuntimeError: if the prefetcher is closed.
        """
        if step != self._wanted:
            self._restart(step)
        future = self._ahead.popleft()
        wait((future, self._closed), return_when=FIRST_COMPLETED)
        if self._closed.done():
            raise RuntimeError("the prefetcher is closed")
        self._wanted = step + 1
        self._submit()
        try:
            return future.result()
        except _Skipped:  # this step was not fetched, because the fetch of an earlier step failed
            return self.get(step)

    def close(self) -> None:
        """Waits for the running fetch and ends the thread. Further calls have no effect."""
        if not self._closed.done():
            self._closed.set_result(None)
        self._stop.set()
        self._thread.shutdown()

    def __enter__(self) -> Prefetcher[T]:
        """Returns the prefetcher itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Calls `close`."""
        self.close()

    def _restart(self, step: int) -> None:
        """Discards all results and restarts at `step`."""
        self._stop.set()
        self._stop = threading.Event()
        self._wanted = step
        self._ahead.clear()
        for _ in range(self._depth):
            self._submit()

    def _submit(self) -> None:
        step = self._wanted + len(self._ahead)
        self._ahead.append(self._thread.submit(self._run, step, self._stop))

    def _run(self, step: int, stop: threading.Event) -> T:
        """Returns `fetch(step)`; raises _Skipped if `stop` is set. A failed fetch sets `stop`."""
        if stop.is_set():
            raise _Skipped
        try:
            return self._fetch(step)
        except BaseException:
            stop.set()
            raise


class _Skipped(Exception):
    """Raised for a step that is not fetched, because a fetch failed or `_restart` was called."""
