"""A background thread that computes the next steps' batches while the current one trains.

Use: `with Prefetcher(fetch, start=7) as batches: batches.get(7); batches.get(8); …`

The thread calls `fetch(step)` for step, step + 1, … and keeps at most `depth` results. A request for any other step
discards the results and restarts there. Both sides sleep on one condition variable.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Computes `fetch(step)` for rising steps, up to `depth` steps ahead in one background thread.

    `fetch` must be a pure function of the step. What it raises is raised by `get` of that step, with the original
    traceback. `close` (or leaving the `with` block) waits for the running fetch and ends the thread.
    """

    def __init__(self, fetch: Callable[[int], T], start: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"prefetch depth {depth}: must be at least 1")
        self._fetch = fetch
        self._depth = depth
        self._changed = threading.Condition()
        # All below is read and written only under the condition's lock.
        self._ready: deque[T | _Failure] = deque()
        self._wanted = start  # the step that get() expects next
        # the step to fetch next; None after a failure, until a restart
        self._upcoming: int | None = start
        self._restarts = 0  # tells results requested before a restart from later ones
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="threed-prefetch", daemon=True)
        self._thread.start()

    def get(self, step: int) -> T:
        """Returns `fetch(step)`, waiting for it if needed; raises what `fetch(step)` raised."""
        with self._changed:
            failed = self._upcoming is None and not self._ready
            if step != self._wanted or failed:
                self._restart(step)
            self._changed.wait_for(lambda: self._ready or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            outcome = self._ready.popleft()
            self._wanted = step + 1
            self._changed.notify_all()
        if isinstance(outcome, _Failure):
            raise outcome.error
        return outcome

    def close(self) -> None:
        """Ends the thread, after the running fetch; harmless when called again."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        """Returns the prefetcher itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Calls `close`."""
        self.close()

    def _restart(self, step: int) -> None:
        self._ready.clear()
        self._wanted = self._upcoming = step
        self._restarts += 1
        self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            step, restarts = job
            outcome: T | _Failure
            try:
                outcome = self._fetch(step)
            except (
                BaseException
            ) as error:  # even SystemExit belongs to the caller, not to this thread
                outcome = _Failure(error)
            self._deliver(outcome, restarts)
            del outcome  # while asleep, hold no batch that the caller has dropped

    def _next_job(self) -> tuple[int, int] | None:
        """Sleeps until there is a step to fetch: (step, restarts); None once closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or (self._upcoming is not None and len(self._ready) < self._depth)
                )
            )
            if self._closed or self._upcoming is None:
                return None
            step = self._upcoming
            self._upcoming = step + 1
            return step, self._restarts

    def _deliver(self, outcome: T | _Failure, restarts: int) -> None:
        with self._changed:
            if restarts != self._restarts or self._closed:
                return
            if isinstance(outcome, _Failure):
                self._upcoming = None
            self._ready.append(outcome)
            self._changed.notify_all()


class _Failure:
    """What a fetch raised, told apart from any result a fetch could return."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
