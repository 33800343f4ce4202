"""Saves of an engine, one at a time: written at once, or by a thread while training goes on.

    saver = Saver(optimizer, topology, config)
    save = saver.start(path, state, extras)      collective; returns once a snapshot has begun
    save.wait()                                  collective; CheckpointError on every rank if it failed

A save has three phases, of which only the first needs the ranks to communicate:

    prepare    makes the unfinished folder, and plans what each rank writes
    write      writes this rank's files, and an entry with its part of the manifest, or its error
    commit     rank 0 waits for the entries of all ranks, writes the manifest, and publishes the folder

Training uses the process groups meanwhile, so entries are small files in the unfinished folder. That
is `step-N.tmp` and does not count, so a run may end at any moment. A program that ends after its
last step calls `wait` first, or lets the thread end; `give_up` ends it at once.
"""

from __future__ import annotations

import copy
import json
import math
import os
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from threed import collectives
from threed.atomic import building_place
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import CheckpointError, begin, never, plain
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, file_of, finish, write_entry
from threed.checkpoint.sections import Held, SavedFile, finite, held
from threed.config import CheckpointConfig, Config
from threed.device import is_accelerator
from threed.disk import ELSEWHERE, why
from threed.memory.pool import free_bytes
from threed.topology import Axis, Topology
from threed.zero.layout import Layout
from threed.zero.optimizer import Optimizer
from threed.zero.records import Record, read, states
from threed.zero.snapshot import Room, Snapshot, copy_bytes
from threed.zero.state import PREVIOUS, WEIGHT, State

ENTRIES_S = 600.0  # how long rank 0 waits for the entries of the others
FAILURE_S = 20.0  # for a save that is written when a run fails
POLL_S = 0.02


def _reason(
    error: BaseException, what: str, folder: Path, needed: int | None = None,
    elsewhere: str = ELSEWHERE,
) -> str:  # fmt: skip
    """Returns a line on an error; a CheckpointError says itself what failed."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{what}: {why(error, folder, needed, elsewhere)}"
    return f"{what}: {type(error).__name__}: {plain(error)}"


def _share(limit_mib: float | None, sizes: Sequence[int], rank: int) -> float | None:
    """Returns a rank's share of its node's bytes per second: in proportion to what it writes."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", len(sizes)))
    node = sum(sizes[rank // here * here :][:here])
    return None if limit_mib is None or not sizes[rank] else limit_mib * 2**20 * sizes[rank] / node


@dataclass(eq=False)
class Save:
    """One rank's part of a save.

    Attributes:
        token: Distinguishes this save from earlier ones of the folder.
        files: What this rank writes.
        described: The sections that this rank describes, for all ranks that hold them.
        head: The manifest without sections and files.
        began: When the call for it began, by `time.perf_counter`.
        limit: Bytes per second that this rank writes, at most.
        hurries: Returns whether the limit has ended.
        before_publishing: Called on rank 0 in the thread, once all files are written.
        purpose: What the thread is called, and updates that wait for it.
        durable: Whether files are flushed, and whether a program that ends waits for the thread.
        elsewhere: How a user chooses another place.
        problem: What went wrong on this rank so far; on rank 0, once it is done, anywhere.
        asked: Whether the program has asked how it ended.
    """

    path: Path
    everyone: Axis
    token: str
    files: list[SavedFile]
    described: list[Held]
    head: dict[str, Any]
    began: float
    limit: float | None = None
    hurries: Callable[[], bool] = never
    before_publishing: Callable[[], None] = lambda: None
    purpose: ClassVar[str] = "checkpoint"
    durable: ClassVar[bool] = True
    elsewhere: ClassVar[str] = ELSEWHERE

    def __post_init__(self) -> None:
        self.problem: str | None = None
        self._file = self.building  # the file that is written
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        # an event, as a join that a signal interrupts may let a thread appear to have ended
        self._ended = threading.Event()
        self._called_s = 0.0  # of the call that began it
        self.asked = False
        self._end = math.inf  # when rank 0 stops to wait for entries
        self._is_gone: Callable[[int], bool] = lambda rank: False

    @property
    def records(self) -> list[Record]:
        """What this rank writes of the optimizer's state, in order."""
        return [record for file in self.files for record in file.records]

    @property
    def building(self) -> Path:
        """The folder that files are written to."""
        return building_place(self.path)

    # -------------------------------------------------------------------------------------------------------- running

    def run(self, optimizer: Optimizer) -> None:
        """Writes and publishes, while training waits. Collective; CheckpointError on every rank."""
        self.write(values for _, values in read(optimizer, self.records))
        self.wait()

    def start(self, optimizer: Optimizer, room: Room, now: bool = False) -> None:
        """Takes a snapshot, and starts a thread that writes and publishes. Updates must be done.

        Args:
            now: Wait until all of it was copied, for states that change in other ways than by updates.
        """
        snapshot = self._snapshot = Snapshot(self.records, optimizer, room)
        optimizer.readers.add(self.purpose, snapshot.release)
        self._thread = threading.Thread(
            target=self._run, args=(snapshot,), name=self.purpose, daemon=not self.durable
        )
        self._called_s = time.perf_counter() - self.began
        self._thread.start()
        if now:
            snapshot.release_all()

    def _run(self, snapshot: Snapshot) -> None:
        try:
            with closing(snapshot):
                self.write(snapshot.values())
            self.commit()
        except Exception as error:
            what = f"rank {self.everyone.index}: {type(error).__name__}: {error}"
            self.problem = self.problem or what
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether this rank's part has ended, well or not; on rank 0 the whole save."""
        return self._thread is None or self._ended.is_set()

    @property
    def blocked_s(self) -> float:
        """Seconds that training waited on this rank: for the call, and in updates."""
        return self._called_s + (self._snapshot.waited_s if self._snapshot else 0.0)

    def wait(self) -> Path:
        """Waits until the checkpoint is complete; returns its path. Collective.

        Raises:
            CheckpointError: On every rank.
        """
        first = self.everyone.index == 0
        if not self.asked:
            if self._thread is not None and not first:
                self._ended.wait()
            # of ranks that could not leave an entry, too; and a rank that has died is noticed here
            known = collectives.problems_of_all([self.problem], self.everyone)
            if known and first:
                self.problem, self._end = self.problem or "; ".join(known), 0.0
            self.commit() if self._thread is None else self._ended.wait()
            self.asked = True
        self.agree()
        return self.path

    def give_up(
        self, patience: float | None = 0.0, is_gone: Callable[[int], bool] = lambda rank: False
    ) -> None:
        """Ends it: at once, or after some seconds in which it may still complete. No collective.

        Args:
            patience: The seconds; None waits until this rank's part has ended.
            is_gone: Returns whether the process of a rank has ended: its entry will not come.
        """
        if self._snapshot is None or self._thread is None or self._thread.ident is None:
            return
        self._is_gone = is_gone
        self._ended.wait(patience)
        self._end = 0.0
        self._snapshot.close()
        if self.durable:  # others may never answer a copy in memory
            self._ended.wait()

    # -------------------------------------------------------------------------------------------------------- writing

    def write(self, values: Iterable[Tensor]) -> None:
        """Writes this rank's files and its entry, and sets `problem` if it cannot. No collective.

        Args:
            values: The values of `records`, in order. Exceptions that they raise are raised here,
                except OSError and CheckpointError.
        """
        try:
            self._leave(self._entry(values))
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, (OSError, CheckpointError)):
                raise

    def _entry(self, values: Iterable[Tensor]) -> dict[str, Any]:
        """Writes the files; returns this rank's part of the manifest: sections and files."""
        how = {"limit": self.limit, "hurries": self.hurries, "durable": self.durable}
        stream, files = finite(self.records, values), []
        for file in self.files:
            self._file = self.building / file.name
            # the last one ends the stream before its flush, so that updates may change the last state
            some = stream if file is self.files[-1] else islice(stream, len(file.records))
            files.append(file.write(self.building, some, **how))
        return {"sections": [[h.section.about, h.shapes] for h in self.described], "files": files}

    def _fail(self, error: BaseException) -> None:
        """Sets the problem, and leaves it for rank 0; removes this rank's files to have space for that."""
        nbytes = sum(file.nbytes for file in self.files)
        for file in self.files:
            with suppress(OSError):
                (self.building / file.name).unlink(missing_ok=True)
        rank = f"rank {self.everyone.index}"
        what, folder = f"{rank} could not write {self._file}", self.path.parent
        reason = _reason(error, what, folder, nbytes, self.elsewhere)
        self.problem = f"{rank}: {reason}" if isinstance(error, CheckpointError) else reason
        with suppress(OSError):
            self._leave({"error": self.problem})

    def _leave(self, entry: Mapping[str, Any]) -> None:
        """Writes this rank's entry."""
        write_entry(self._entry_file(self.everyone.index), entry)

    def _entry_file(self, rank: int) -> Path:
        return self.building / f"entry-{rank:05d}-{self.token}.json"

    # ------------------------------------------------------------------------------------------------------ publishing

    def commit(self, patience: float = ENTRIES_S) -> None:
        """Publishes the folder once every rank has left its entry, on rank 0. No collective.

        Args:
            patience: Seconds to wait for the others.
        """
        if self.everyone.index > 0:
            return
        with self.step("finish"):
            entries = self._entries(time.monotonic() + patience)
            self.before_publishing()
            finish(self.path, self.head, entries)

    @contextmanager
    def step(self, name: str, needed: int | None = None) -> Iterator[None]:
        """Sets `problem` and removes the unfinished folder if the block raises an exception.

        Args:
            needed: The bytes of the files.
        """
        try:
            yield
        except Exception as error:  # also of what the caller saves, which JSON cannot represent
            what = f"could not {name} {self.path}"
            self.problem = _reason(error, what, self.path.parent, needed)
            shutil.rmtree(self.building, ignore_errors=True)

    def _entries(self, end: float) -> list[dict[str, Any]]:
        """Returns the entries of all ranks; CheckpointError if one is missing or has an error."""
        found: list[dict[str, Any]] = []
        for rank in range(self.everyone.size):
            file = self._entry_file(rank)
            # others may still write into the folder, so this rank's own error has to wait
            while not (file.exists() or (rank == 0 and self.problem)):
                late = self._is_gone(rank) or time.monotonic() > min(end, self._end)
                if late and not file.exists():
                    what = f"rank {rank} has not written its part of {self.path} in time"
                    raise CheckpointError(self.problem or what)
                time.sleep(POLL_S)
            found.append(json.loads(file.read_text()) if file.exists() else {"error": self.problem})
            file.unlink(missing_ok=True)
        if problems := [entry["error"] for entry in found if "error" in entry]:
            raise CheckpointError("; ".join(problems))
        return found

    def agree(self) -> None:
        """Raises CheckpointError on every rank if any has a problem. Collective."""
        if found := collectives.problems_of_all([self.problem], self.everyone):
            raise CheckpointError("; ".join(found) + " (earlier checkpoints are intact)")


class Saver:
    """Begins saves, one at a time.

    Attributes:
        room: The memory for copies.
        last: The newest save that a thread writes.
    """

    def __init__(self, optimizer: Optimizer, topology: Topology, config: Config) -> None:
        self.optimizer, self.topology, self.config = optimizer, topology, config
        self.room, self.gpu = Room(), is_accelerator(topology.device)
        self.last: Save | None = None
        self._has_room: bool | None = None

    def end(self) -> None:
        """Waits until the newest save has ended; warns of an unreported error. Collective."""
        if self.last is None or self.last.asked:
            return
        try:
            self.last.wait()
        except CheckpointError as error:
            if self.topology.rank == 0:
                warnings.warn(f"no checkpoint {self.last.path}: {error}", stacklevel=4)

    @contextmanager
    def ending(self, is_gone: Callable[[int], bool] = lambda rank: False) -> Iterator[None]:
        """If the block raises an error, the save in progress gets some seconds to end; none after an interrupt.

        Args:
            is_gone: Returns whether the process of a rank has ended.
        """
        try:
            yield
        except BaseException as error:
            if self.last is not None:
                self.last.give_up(FAILURE_S if isinstance(error, Exception) else 0.0, is_gone)
            raise

    def has_room(self) -> bool:
        """Returns whether every rank has memory for a copy of what it saves. Collective.

        The copies of a machine may take half of its free memory, or all if `checkpoint.async` is true.
        """
        if self._has_room is None:
            everyone = self.topology.axis("world")
            needed = copy_bytes(self._plan()[1].records, self.optimizer.layout.policy, self.gpu)
            needed *= int(os.environ.get("LOCAL_WORLD_SIZE", everyone.size))
            free = free_bytes() // (1 if self.config.checkpoint.async_ is True else 2)
            self._has_room = all(collectives.exchange(needed <= free, everyone))
        return self._has_room

    def make_room(self) -> None:
        """Allocates the memory for copies, which a save would do while an update waits."""
        self.room.make(self._plan()[1].records, self.optimizer.layout.policy, self.gpu)

    def _plan(self, *extras: Mapping[str, Any]) -> tuple[list[Held], SavedFile]:
        """Returns the sections that this rank holds portions of, and its file of a checkpoint."""
        sections = held(self.optimizer.layout, states(self.optimizer))
        numbers = [(h, number) for h in sections if (number := h.number) is not None]
        return sections, SavedFile(file_of(self.topology.rank), numbers, *extras)

    def start(
        self, path: Path, state: Mapping[str, Any], extras: Extras, *,
        background: bool = True, now: bool = False, hurries: Callable[[], bool] = never,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> Save:  # fmt: skip
        """Begins to save the folder `path`, complete or not at all. Collective.

        Without memory for a copy, it warns and returns when the save has ended.

        Args:
            background: Write in a thread, while training continues.
            now: See `Save.start`.
            hurries: Returns whether `checkpoint.write-limit-mib` has ended; called by any thread.
            before_publishing: See `Save`.

        Raises:
            CheckpointError: On every rank, for problems known at once.
        """
        self.end()
        if background and not (background := self.has_room()) and self.topology.rank == 0:
            warnings.warn("no memory for a copy: training waits for the checkpoint", stacklevel=3)
        save = self.prepare(path, state, extras, hurries, before_publishing)
        if background:
            self.last = save
            save.start(self.optimizer, self.room, now)
        else:
            save.run(self.optimizer)
        return save

    def prepare(
        self, path: Path, state: Mapping[str, Any], extras: Extras,
        hurries: Callable[[], bool] = never, before_publishing: Callable[[], None] = lambda: None,
    ) -> Save:  # fmt: skip
        """Makes the unfinished folder, and returns what this rank is to write. Collective.

        Raises:
            CheckpointError: On every rank.
        """
        began, everyone = time.perf_counter(), self.topology.axis("world")
        self.optimizer.wait()
        sections, file = self._plan(*extras.copied())
        others = collectives.exchange([file.nbytes, secrets.token_hex(8)], everyone)
        sizes, token = [nbytes for nbytes, _ in others], others[0][1]
        limit = _share(self.config.checkpoint.write_limit_mib, sizes, everyone.index)
        files = [file] if file.held or file.tensors else []
        described = [h for h in sections if h.portion == h.copy == 0]
        save = Save(
            path, everyone, token, files, described, {}, began, limit, hurries, before_publishing,
        )  # fmt: skip
        with save.step("begin", sum(sizes)):
            save.head = self.head(state)
            if everyone.index == 0:
                begin(path, MANIFEST, "checkpoint", sum(sizes))
        save.agree()
        return save

    def head(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a manifest without sections and files. The host waits for the counters."""
        optimizer = self.optimizer
        kept = copy.deepcopy(dict(state))  # the caller may change its own
        updates = {"updates": float(optimizer.updates), "skips": float(optimizer.bad.skips)}
        counters = {**kept, **updates, **optimizer.scaler.state(), **optimizer.bad.state()}
        about = {"config": self.config.model_dump(mode="json"), "topology": self.topology.sizes}
        return {"format": FORMAT, "version": VERSION, **about, "state": counters}


def save_bytes(asked: CheckpointConfig, layout: Layout, states: Sequence[State], gpu: bool) -> int:
    """Returns a forecast of the host memory that asynchronous saves take of a rank, at most."""
    if not asked.every or asked.async_ is False:
        return 0
    written = (h.extents(h.numbers[0]) for h in held(layout, on_paper(layout, states)))
    return copy_bytes(chain.from_iterable(written), layout.policy, gpu)


def on_paper(layout: Layout, states: Sequence[State]) -> list[State]:
    """Returns a forecast of a rank's states: with frozen parameters and the previous version."""
    others = [State(bucket, {WEIGHT: bucket.storage}) for bucket in layout.frozen]
    if layout.policy.versions > 1 or layout.policy.delayed:
        others += [State(bucket, {PREVIOUS: bucket.storage}) for bucket in layout.buckets]
    return [*states, *others]
