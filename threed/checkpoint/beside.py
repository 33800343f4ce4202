"""Asynchronous saves: the call returns once a snapshot has begun; a thread writes and publishes.

    saver = Saver(optimizer, topology, config)
    save = saver.start(path, state, extras)      collective; waits for the save before
    save.done                                    this rank's part is written; on the first rank: published, or failed
    save.wait()                                  collective; CheckpointError on every rank alike where it failed

The first rank publishes when every rank's file is there (`writing`), without a collective, because training uses the
groups meanwhile. Until then the folder is `step-N.tmp` and does not count, so a run may end at any moment. A program
that ends after its last step waits first, or lets its thread end; `give_up` ends it at once.

A saver of another root (`copies`) makes its own part of a save and hands it to `run`.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from threed import collectives
from threed.checkpoint import writing
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import never
from threed.checkpoint.sections import Held, held
from threed.config import CheckpointConfig, Config
from threed.device import is_accelerator
from threed.memory.pool import free_bytes
from threed.topology import Topology
from threed.zero.layout import Layout
from threed.zero.optimizer import Optimizer
from threed.zero.records import read, states
from threed.zero.snapshot import Room, Snapshot, copy_bytes
from threed.zero.state import PREVIOUS, WEIGHT, State

PATIENCE_S = 20.0  # for a save that is written when a run fails


class Save:
    """A checkpoint that is written while training goes on.

    called_s: seconds of the call that began it. before, published: called on the first rank, in the thread, before it
    is published and once it is whole.
    """

    def __init__(
        self, saving: writing.Saving, snapshot: Snapshot, called_s: float, published: Callable[[], None] | None,
        before: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.called_s = saving.path, called_s
        self._saving = saving
        self._snapshot = snapshot
        self._published = published
        self._before = before
        self._asked = False
        self._written, self._done = threading.Event(), threading.Event()
        root = saving.root
        self._thread = threading.Thread(target=self._write, name=root.name, daemon=not root.durable)
        self._thread.start()

    def _write(self) -> None:
        try:
            self._saving.write(self._snapshot.values())
            self._snapshot.end()
            self._written.set()
            if self._before is not None and self._saving.everyone.index == 0:
                self._before()
            if (
                self._saving.commit() is None
                and self._saving.everyone.index == 0
                and self._published is not None
            ):
                self._published()
        except Exception as error:
            self._saving.note(f"{type(error).__name__}: {error}")
        finally:
            self._snapshot.end()
            self._written.set()
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether this rank's part has ended, well or not; on the first rank the whole save."""
        return self._done.is_set()

    @property
    def problem(self) -> str | None:
        """What went wrong on this rank, as far as it is known; on the first rank, once it is done, with any."""
        return self._saving.problem

    @property
    def blocked_s(self) -> float:
        """Seconds for which training stood still for it on this rank: the call, and updates that waited."""
        return self.called_s + self._snapshot.waited_s

    def wait(self) -> Path:
        """Waits until the checkpoint is whole; returns its path. Collective; CheckpointError on every rank alike."""
        self._meet()
        self._asked = True
        self._saving.agree()
        return self.path

    def _meet(self) -> None:
        """Waits until every rank's part has ended, well or not. Collective.

        Where the disk refuses everything, a rank that failed cannot leave word of it there: the first rank, which waits
        for its part, hears of it here.
        """
        if not self._asked:
            if not self.done:
                self._snapshot.copy_rest()  # of a GPU's slices, which this thread has to
            self._written.wait()
            everyone = self._saving.everyone
            self._saving.give_up(collectives.problems_of_all([self.problem], everyone))
        self._thread.join()

    def join(self, patience: float | None = None) -> None:
        """Waits until this rank's part has ended, or some seconds; then updates wait no more."""
        if not self.done:
            self._snapshot.copy_rest()  # of a GPU's slices, which this thread has to
        self._thread.join(patience)
        self._snapshot.end()

    def give_up(self, patience: float = 0.0) -> None:
        """Ends it: at once, or after some seconds in which it may still become whole."""
        self._done.wait(patience)
        self._saving.given_up.set()
        self._snapshot.end()
        self._thread.join()

    def end(self) -> None:
        """Waits until it has ended everywhere; warns of an error that nobody has asked for. Collective."""
        if self._asked:
            return
        self._meet()
        self._asked = True
        if self.problem is not None and self._saving.everyone.index == 0:
            warnings.warn(f"no checkpoint {self.path}: {self.problem}", stacklevel=4)
        collectives.barrier(self._saving.everyone)


class Saver:
    """Begins saves, one at a time.

    Args:
        room: The memory for copies; None to choose it when it is needed, see `has_room`.

    Attributes:
        last: The newest save.
    """

    def __init__(
        self, optimizer: Optimizer, topology: Topology, config: Config, room: Room | None = None
    ) -> None:
        self.optimizer, self.topology, self.config, self.room = optimizer, topology, config, room
        self.last: Save | None = None

    def end(self) -> None:
        """Waits for the newest save, if it is still written. Collective."""
        if self.last is not None:
            self.last.end()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Where the block ends by an error, the save that is written has some seconds to end well; by an interrupt,
        none."""
        try:
            yield
        except BaseException as error:
            if self.last is not None:
                self.last.give_up(PATIENCE_S if isinstance(error, Exception) else 0.0)
            raise

    def has_room(self) -> bool:
        """Whether every rank has memory for a copy of what it saves. Collective."""
        everyone = self.topology.axis("world")
        if self.room is None:
            mine_of_all = (h.extents() for h in held(self.optimizer.layout, states(self.optimizer)))
            gpu = is_accelerator(self.topology.device)
            needed = copy_bytes(chain.from_iterable(mine_of_all), self.optimizer.layout.policy, gpu)
            mine = needed * _ranks_here(everyone.size) <= free_bytes() // 2
            self.room = Room(whole=all(collectives.exchange(mine, everyone)))
        return self.room.whole

    def save(
        self, path: Path, state: Mapping[str, Any], extras: Extras, hurries: Callable[[], bool]
    ) -> Path:
        """Writes the folder `path`, whole or not at all. Collective; CheckpointError on every rank alike."""
        saving = self._prepare(path, state, extras, hurries)
        saving.write(values for _, values in read(self.optimizer, saving.records))
        saving.agree()  # here, a rank that has died is noticed at once
        saving.commit()
        saving.agree()
        return path

    def _prepare(
        self, path: Path, state: Mapping[str, Any], extras: Extras, hurries: Callable[[], bool]
    ) -> writing.Saving:
        return writing.prepare(
            path, self.optimizer, self.topology, self.config, state, extras, hurries
        )

    def make_room(self) -> None:
        """Takes the memory for copies now, where there is enough: a save would take it while an update waits.
        Collective."""
        if self.has_room() and self.room is not None:
            mine = (h.extents() for h in held(self.optimizer.layout, states(self.optimizer)))
            self.room.make(
                chain.from_iterable(mine),
                self.optimizer.layout.policy,
                is_accelerator(self.topology.device),
            )

    def start(
        self, path: Path, state: Mapping[str, Any], extras: Extras, *, now: bool = False,
        published: Callable[[], None] | None = None, before: Callable[[], None] | None = None,
        hurries: Callable[[], bool] = never,
    ) -> Save:  # fmt: skip
        """Begins to save. Collective; CheckpointError on every rank alike, where that is known at once.

        Args:
            now: Wait until all of it was copied, for states that may change in other ways than by updates.
            published, before: See `Save`.
            hurries: See `writing.prepare`.
        """
        self.end()
        began = time.perf_counter()
        kept = copy.deepcopy(dict(state))  # the caller may change its own
        saving = self._prepare(path, kept, extras, hurries)
        return self.run(saving, began, now=now, published=published, before=before)

    def run(
        self, saving: writing.Saving, began: float, *, now: bool = False,
        published: Callable[[], None] | None = None, before: Callable[[], None] | None = None,
    ) -> Save:  # fmt: skip
        """Takes a snapshot and starts the thread that writes it. Collective, once the save before has ended.

        Args:
            saving: This rank's part of the save.
            began: The time at which the call for it began, by `time.perf_counter`.
            now, published, before: See `start`.
        """
        self.has_room()
        assert self.room is not None
        self.optimizer.wait()
        snapshot = Snapshot(saving.records, self.optimizer, self.room)
        self.optimizer.readers.add(saving.root.name, snapshot.release)
        self.last = Save(saving, snapshot, time.perf_counter() - began, published, before)
        if now:  # with the thread under way, for only what it has written makes room in a window
            snapshot.release_all()
        return self.last


def save_bytes(asked: CheckpointConfig, layout: Layout, states: Sequence[State], gpu: bool) -> int:
    """The host's memory that saves take of a rank which writes the most of what it holds: as a forecast, of the states
    of a layout; none where training waits for saves."""
    if not asked.every or asked.async_ is False:
        return 0
    writing = (_first_writer(h).extents() for h in held(layout, on_paper(layout, states)))
    return copy_bytes(chain.from_iterable(writing), layout.policy, gpu)


def on_paper(layout: Layout, states: Sequence[State]) -> list[State]:
    """Returns all states that a rank will have, as a forecast: those of a layout, of frozen parameters, and of the
    version before."""
    others = [State(bucket, {WEIGHT: bucket.storage}) for bucket in layout.frozen]
    if layout.policy.versions > 1 or layout.policy.delayed:
        others += [State(bucket, {PREVIOUS: bucket.storage}) for bucket in layout.buckets]
    return [*states, *others]


def _first_writer(held: Held) -> Held:
    """Returns a section as a rank holds it that writes of it; each of these writes about as much."""
    copies = (replace(held, copy=copy) for copy in range(held.copies))
    return next(one for one in copies if one.number is not None)


def _ranks_here(world: int) -> int:
    """The ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))
