"""Saves checkpoints of an engine, one at a time, directly or from a background thread.

    saver = Saver(optimizer, topology, config)
    save = saver.start(path, state, extras)      collective; returns once a snapshot has begun
    save.wait()                                  collective; CheckpointError if any rank failed

A save has three phases. Only the first phase uses collectives:

    prepare    creates the unfinished folder, and plans the file of each rank
    write      writes this rank's file, and then an entry file: the rank's part of the manifest, or
               its error
    commit     rank 0 waits for all entry files, writes the manifest, and publishes the folder: it
               renames the folder to its final name

During the other two phases, training uses the process groups, so the ranks of a save communicate
through the small entry files in the unfinished folder. This folder is named `step-N.tmp`, and loads
ignore it, so a run may be killed at any time. After its last step, a program must call `wait` or
let the thread finish; `give_up` stops a save early.
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
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from threed.checkpoint.compatibility import listed
from threed.checkpoint.files import CheckpointError, begin, building_place, plain
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, file_of, finish, write_entry
from threed.checkpoint.sections import Held, SavedFile, finite, held
from threed.config import Config
from threed.core.device import is_accelerator, rng_states, set_rng_states
from threed.core.disk import ELSEWHERE, why
from threed.distributed import collectives
from threed.distributed.topology import Axis, Topology
from threed.memory.pool import free_bytes
from threed.models.buffers import Buffers, bytes_of, dtype_name
from threed.zero.optimizer import Optimizer
from threed.zero.snapshot import Room, Snapshot, copy_bytes
from threed.zero.state import Record, read_records, states_of

ENTRIES_S = 600.0  # seconds that rank 0 waits for the entries of other ranks
FAILURE_S = 20.0  # seconds that a save in progress may still take after the run has failed
POLL_S = 0.02  # seconds between checks for an entry


def _reason(
    error: BaseException, what: str, folder: Path, needed: int | None = None,
    elsewhere: str = ELSEWHERE,
) -> str:  # fmt: skip
    """Returns an error as one line of text.

    The line is `what`, followed by the reason. The text of a CheckpointError is returned unchanged,
    because it is complete without `what`.

    Args:
        error: error of the save.
        what: what could not be done, such as "could not begin <path>".
        folder: folder that was written to.
        needed: bytes that were needed, if known.
        elsewhere: advice on how to choose another folder, for a full disk.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{what}: {why(error, folder, needed, elsewhere)}"
    return f"{what}: {type(error).__name__}: {plain(error)}"


def _share(limit_mib: float | None, sizes: Sequence[int], rank: int) -> float | None:
    """Returns this rank's share of its node's write limit, in bytes per second; None for no limit.

    The share is proportional to the bytes that the rank writes.

    Args:
        limit_mib: limit per node, in MiB per second; None for no limit.
        sizes: bytes that each rank writes.
        rank: this rank.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", len(sizes)))
    node = sum(sizes[rank // here * here :][:here])
    return None if limit_mib is None or not sizes[rank] else limit_mib * 2**20 * sizes[rank] / node


@dataclass(eq=False)
class Save:
    """One rank's part of a save.

    Attributes:
        path: final path of the checkpoint.
        everyone: axis of all ranks.
        token: random text in the names of entry files; distinguishes this save from earlier saves
            to the same folder.
        files: the files that this rank writes.
        described: the sections whose descriptions this rank provides for the manifest. One rank
            provides them for all ranks that hold portions of the section.
        head: the manifest's format, version, configuration, topology and state.
        began: value of `time.perf_counter` at the start of the call that began the save.
        limit: maximum rate of this rank's writes in bytes per second; None for no limit.
        hurries: callback that returns True once `limit` no longer applies. Without a callback
            (None), `limit` always applies.
        before_publishing: function that rank 0 calls after the files of all ranks are written and
            before the folder is renamed; or None.
        purpose: name of the thread; also the key under which the snapshot is registered in
            `optimizer.readers`, so that updates wait for it.
        durable: whether files are flushed to disk, and whether process exit waits for the thread.
        elsewhere: advice on how to choose another folder, for messages.
        problem: error text of this rank, or None. On rank 0, once the save is `done`, this may be
            the error text of another rank.
        reported: whether a call of `wait` has already returned or raised the result of the save.
    """

    path: Path
    everyone: Axis
    token: str
    files: list[SavedFile]
    described: list[Held]
    head: dict[str, Any]
    began: float
    limit: float | None = None
    hurries: Callable[[], bool] | None = None
    before_publishing: Callable[[], None] | None = None
    purpose: ClassVar[str] = "checkpoint"
    durable: ClassVar[bool] = True
    elsewhere: ClassVar[str] = ELSEWHERE

    def __post_init__(self) -> None:
        self.problem: str | None = None
        self._file = self.building  # the file that is being written
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        # Set when the thread ends. An event is used, because `Thread.is_alive` may return False
        # after an interrupted `join` although the thread still runs.
        self._ended = threading.Event()
        self._start_s = 0.0  # duration of the call that began the save, in seconds
        self.reported = False
        self._deadline = math.inf  # `time.monotonic()` at which rank 0 stops waiting for entries
        self._has_exited: Callable[[int], bool] = lambda rank: False

    @property
    def records(self) -> list[Record]:
        """The records of the optimizer's state that this rank writes, in order."""
        return [record for file in self.files for record in file.records]

    @property
    def building(self) -> Path:
        """The unfinished folder, to which files are written."""
        return building_place(self.path)

    # -------------------------------------------------------------------------------------------------------- running

    def run(self, optimizer: Optimizer) -> None:
        """Writes and publishes the checkpoint before it returns. Collective.

        Raises:
            CheckpointError: on every rank if any rank fails.
        """
        self.write(values for _, values in read_records(optimizer, self.records))
        self.wait()

    def start(self, optimizer: Optimizer, room: Room, now: bool = False) -> None:
        """Takes a snapshot of the states, and starts a thread that writes and publishes it.

        Call `optimizer.wait()` first, because all updates must have finished.

        Args:
            optimizer: the optimizer, whose states are saved.
            room: host memory for the snapshot.
            now: whether to return only after the values of all states are copied or written. Use
                True if code other than the optimizer changes the states after this call, because
                only the optimizer's updates wait for the snapshot.
        """
        snapshot = self._snapshot = Snapshot(self.records, optimizer, room)
        optimizer.readers.add(self.purpose, snapshot.release)
        self._thread = threading.Thread(
            target=self._run, args=(snapshot,), name=self.purpose, daemon=not self.durable
        )
        self._start_s = time.perf_counter() - self.began
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
        """Whether this rank's part (on rank 0, the entire save) has ended, successfully or not."""
        return self._thread is None or self._ended.is_set()

    @property
    def blocked_s(self) -> float:
        """Seconds that training on this rank has waited for the save.

        This is the duration of the call of `Saver.start`, plus the time for which updates have
        waited for the snapshot.
        """
        return self._start_s + (self._snapshot.waited_s if self._snapshot else 0.0)

    def wait(self) -> Path:
        """Waits until the checkpoint is complete, and returns its path. Collective.

        Raises:
            CheckpointError: on every rank if any rank fails.
        """
        first = self.everyone.index == 0
        if not self.reported:
            if self._thread is not None and not first:
                self._ended.wait()
            # This collective finds the problems of ranks that could not even write an entry file.
            # It raises an error if the process of a rank has died.
            known = collectives.problems_of_all([self.problem], self.everyone)
            if known and first:
                self.problem, self._deadline = self.problem or "; ".join(known), 0.0
            self.commit() if self._thread is None else self._ended.wait()
            self.reported = True
        self.agree()
        return self.path

    def give_up(
        self, patience: float | None = 0.0, is_gone: Callable[[int], bool] = lambda rank: False
    ) -> None:
        """Stops the save, after a grace period in which it may still complete. Not collective.

        Args:
            patience: grace period in seconds; None to wait until this rank's part has ended.
            is_gone: called with a rank; returns whether the rank's process has exited. If so, the
                rank's entry will never be written, and is not waited for.
        """
        if self._snapshot is None or self._thread is None or self._thread.ident is None:
            return
        self._has_exited = is_gone
        self._ended.wait(patience)
        self._deadline = 0.0
        self._snapshot.close()
        # The thread of a copy in memory exchanges files with other machines, so it may hang.
        if self.durable:
            self._ended.wait()

    # -------------------------------------------------------------------------------------------------------- writing

    def write(self, values: Iterable[Tensor]) -> None:
        """Writes this rank's files and its entry; sets `problem` on failure. Not collective.

        Args:
            values: the values of `records`, in order.

        Raises:
            Exception: any exception other than OSError and CheckpointError, for example from the
                iterator `values`.
        """
        try:
            self._write_own_entry(self._write_files(values))
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, (OSError, CheckpointError)):
                raise

    def _write_files(self, values: Iterable[Tensor]) -> dict[str, Any]:
        """Writes the files, and returns this rank's entry, which lists its sections and files."""
        how = {"limit": self.limit, "hurries": self.hurries, "durable": self.durable}
        stream, files = finite(self.records, values), []
        for file in self.files:
            self._file = self.building / file.name
            # The write of the last file reads `stream` to its end, which ends the snapshot. So
            # updates do not wait until this file is flushed to disk.
            some = stream if file is self.files[-1] else islice(stream, len(file.records))
            files.append(file.write(self.building, some, **how))
        return {"sections": [[h.section.about, h.shapes] for h in self.described], "files": files}

    def _fail(self, error: BaseException) -> None:
        """Sets `problem`, and writes it into this rank's entry for rank 0.

        This rank's files are removed first, so that there is space for the entry on a full disk.
        """
        nbytes = sum(file.nbytes for file in self.files)
        for file in self.files:
            with suppress(OSError):
                (self.building / file.name).unlink(missing_ok=True)
        rank = f"rank {self.everyone.index}"
        what, folder = f"{rank} could not write {self._file}", self.path.parent
        reason = _reason(error, what, folder, nbytes, self.elsewhere)
        self.problem = f"{rank}: {reason}" if isinstance(error, CheckpointError) else reason
        with suppress(OSError):
            self._write_own_entry({"error": self.problem})

    def _write_own_entry(self, entry: Mapping[str, Any]) -> None:
        write_entry(self._entry_file(self.everyone.index), entry)

    def _entry_file(self, rank: int) -> Path:
        return self.building / f"entry-{rank:05d}-{self.token}.json"

    # ------------------------------------------------------------------------------------------------------ publishing

    def commit(self, patience: float = ENTRIES_S) -> None:
        """Publishes the folder once every rank has written its entry. Not collective.

        Only rank 0 publishes the folder; on other ranks, this method has no effect.

        Args:
            patience: seconds to wait for the entries of other ranks.
        """
        if self.everyone.index > 0:
            return
        with self.step("finish"):
            entries = self._entries(time.monotonic() + patience)
            if self.before_publishing is not None:
                self.before_publishing()
            finish(self.path, self.head, entries)

    @contextmanager
    def step(self, name: str, needed: int | None = None) -> Iterator[None]:
        """Context manager for a phase of the save.

        If the code in the `with` statement raises an error, `problem` is set and the unfinished
        folder is removed.

        Args:
            name: verb for the message "could not <verb> <path>".
            needed: disk space that the files need, in bytes.
        """
        try:
            yield
        except Exception as error:  # for example, JSON cannot represent the caller's state
            what = f"could not {name} {self.path}"
            self.problem = _reason(error, what, self.path.parent, needed)
            shutil.rmtree(self.building, ignore_errors=True)

    def _entries(self, end: float) -> list[dict[str, Any]]:
        """Waits for the entries of all ranks and returns them.

        Raises:
            CheckpointError: if an entry has an error, or is not written before `end`.
        """
        found: list[dict[str, Any]] = []
        for rank in range(self.everyone.size):
            file = self._entry_file(rank)
            # If rank 0 has an error, it still waits for the entries of the other ranks. The caller
            # then removes the folder, and no rank may still be writing to the folder at that time.
            while not (file.exists() or (rank == 0 and self.problem)):
                late = self._has_exited(rank) or time.monotonic() > min(end, self._deadline)
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
        """Raises CheckpointError on every rank if any rank has a problem. Collective."""
        if found := collectives.problems_of_all([self.problem], self.everyone):
            raise CheckpointError("; ".join(found) + " (earlier checkpoints are intact)")


@dataclass
class Extras:
    """The buffers and random generators of an engine, as saved in checkpoints.

    Attributes:
        buffers: the buffers of the model.
        topology: the parallel axes of the run, and this rank's position on them.
        generators: whether the states of torch's generators are saved and restored, too.
    """

    buffers: Buffers
    topology: Topology
    generators: bool
    _warned: set[str] = field(default_factory=set)

    def rewinding(self) -> Callable[[], None]:
        """Returns a function that restores the buffers and generators to their current state.

        Use this method if the same forward runs twice and must have the same results: call
        `rewinding` before the first run, and the returned function before the second run. Only
        buffers that forwards change are restored.
        """
        states, values = rng_states(self.topology.device), self.buffers.changing()

        def rewind() -> None:
            set_rng_states(states, self.topology.device)
            for place, value in values:
                place.store(value)

        return rewind

    def _synchronize(self) -> None:
        """Broadcasts the buffers that change in training from data rank 0. Collective.

        Warns, once per name, of buffers that differ between tensor ranks, and of modules with a
        state that is not saved.
        """
        self.buffers.agree()
        fix = (
            "make them equal, or register buffers that each rank can compute with persistent=False"
        )
        what = "buffers differ between tensor ranks, and the first one's are saved"
        self._warn(what, self.buffers.different(), fix)
        what = "the results of get_extra_state are not saved"
        fix = "keep the values in buffers, or save them with the argument extra"
        self._warn(what, self.buffers.extra_states(), fix)

    def _warn(self, what: str, names: Sequence[str], fix: str) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned.update(new)
        if new and self.topology.data.index == self.topology.axis("tp").index == 0:
            warnings.warn(f"{what}: {listed(new)}; {fix}", stacklevel=6)

    def copied(self, any_copy: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the buffers and generator states that this rank saves. Collective.

        Args:
            any_copy: whether ranks other than data rank 0 save their replicas of buffers, too.

        Returns:
            (about, copies). `about` describes the buffers and generators for the manifest. `copies`
            has a copy of each buffer and generator state, as a uint8 tensor [bytes] on the CPU, by
            the name under which the file stores it.
        """
        self._synchronize()
        owned = self.buffers.owned(any_copy)
        states = rng_states(self.topology.device) if self.generators else {}
        about = [[name, dtype_name(value), list(value.shape)] for name, value in owned.items()]
        tensors = {f"buffer/{name}": bytes_of(value) for name, value in owned.items()}
        tensors |= {f"generator/{name}": state for name, state in states.items()}
        copies = {key: value.to("cpu", copy=True) for key, value in tensors.items()}
        return {"buffers": about, "generators": list(states)}, copies


class Saver:
    """Begins saves of an engine, one at a time.

    Attributes:
        room: host memory for snapshots; each save reuses it.
        last: the newest save with a background thread; None before the first such save.
    """

    def __init__(self, optimizer: Optimizer, topology: Topology, config: Config) -> None:
        self.optimizer, self.topology, self.config = optimizer, topology, config
        self.room, self.gpu = Room(), is_accelerator(topology.device)
        self.last: Save | None = None
        self._has_room: bool | None = None

    def end(self) -> None:
        """Waits for the newest background save; issues a warning if it failed. Collective.

        Has no effect if the result of this save was reported before (`Save.reported`).
        """
        if self.last is None or self.last.reported:
            return
        try:
            self.last.wait()
        except CheckpointError as error:
            if self.topology.rank == 0:
                warnings.warn(f"checkpoint {self.last.path} was not saved: {error}", stacklevel=4)

    @contextmanager
    def ending(self, is_gone: Callable[[int], bool] = lambda rank: False) -> Iterator[None]:
        """Context manager that stops the save in progress after an error in the `with` statement.

        After an exception, the save first gets `FAILURE_S` seconds to complete. After an interrupt
        (KeyboardInterrupt or exit), it is stopped at once.

        Args:
            is_gone: called with a rank; returns whether the rank's process has exited.
        """
        try:
            yield
        except BaseException as error:
            if self.last is not None:
                self.last.give_up(FAILURE_S if isinstance(error, Exception) else 0.0, is_gone)
            raise

    def has_room(self) -> bool:
        """Returns whether every rank has host memory for a snapshot. Collective.

        Together, the snapshots of a machine's ranks may use half of the machine's free memory, or
        all of it if `checkpoint.async` is True.
        """
        if self._has_room is None:
            everyone = self.topology.axis("world")
            needed = copy_bytes(self._plan()[1].records, self.optimizer.layout.policy, self.gpu)
            needed *= int(os.environ.get("LOCAL_WORLD_SIZE", everyone.size))
            free = free_bytes() // (1 if self.config.checkpoint.async_ is True else 2)
            self._has_room = all(collectives.exchange(needed <= free, everyone))
        return self._has_room

    def make_room(self) -> None:
        """Allocates the host memory for snapshots in advance.

        Without this call, the first save allocates the memory, and the next update must wait for
        it.
        """
        self.room.make(self._plan()[1].records, self.optimizer.layout.policy, self.gpu)

    def _plan(self, *extras: Mapping[str, Any]) -> tuple[list[Held], SavedFile]:
        """Returns the sections of which this rank holds portions, and the file that it writes."""
        sections = held(self.optimizer.layout, states_of(self.optimizer))
        numbers = [(h, number) for h in sections if (number := h.number) is not None]
        return sections, SavedFile(file_of(self.topology.rank), numbers, *extras)

    def start(
        self, path: Path, state: Mapping[str, Any], extras: Extras, *,
        background: bool = True, now: bool = False, hurries: Callable[[], bool] | None = None,
        before_publishing: Callable[[], None] | None = None,
    ) -> Save:  # fmt: skip
        """Begins to save a checkpoint, which is published complete or not at all. Collective.

        If there is too little memory for a snapshot, the call issues a warning and saves in the
        foreground: it returns after the save has ended.

        Args:
            path: final path of the checkpoint.
            state: counters of the run, for the manifest.
            extras: buffers and random generators to save.
            background: whether to write in a thread while training continues.
            now: whether a call with `background` returns only after the values of all states are
                copied or written, so that the caller may change the states. See `Save.start`.
            hurries: callback that returns True once `checkpoint.write-limit-mib` no longer applies;
                must be thread-safe. None: the limit always applies.
            before_publishing: function that rank 0 calls after the files of all ranks are written
                and before the folder is renamed; or None.

        Raises:
            CheckpointError: on every rank, if a rank finds a problem before this call returns.
                Later problems are raised by `Save.wait`.
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
        hurries: Callable[[], bool] | None = None, before_publishing: Callable[[], None] | None = None,
    ) -> Save:  # fmt: skip
        """Creates the unfinished folder, and returns this rank's part of the save. Collective.

        See `start` for the arguments.

        Raises:
            CheckpointError: on every rank if any rank fails.
        """
        began, everyone = time.perf_counter(), self.topology.axis("world")
        path = path if path.name else path.resolve()  # "." has no name
        self.optimizer.wait()
        sections, file = self._plan(*extras.copied())
        gathered = collectives.exchange([file.nbytes, secrets.token_hex(8)], everyone)
        sizes, token = [nbytes for nbytes, _ in gathered], gathered[0][1]
        limit = _share(self.config.checkpoint.write_limit_mib, sizes, everyone.index)
        files = [file] if file.held or file.tensors else []
        described = [h for h in sections if h.portion == h.copy == 0]
        save = Save(
            path, everyone, token, files, described, {}, began, limit, hurries, before_publishing,
        )  # fmt: skip
        with save.step("begin", sum(sizes)):
            save.head = self.head(state)
            if path.resolve() == Path.cwd():
                raise CheckpointError(f"{path} is the working directory: choose another name")
            if everyone.index == 0:
                begin(path, MANIFEST, "checkpoint", sum(sizes))
        save.agree()
        return save

    def head(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the manifest's format, version, configuration, topology and state.

        The host waits for the device, because the optimizer's counters are tensors on the device.
        """
        optimizer = self.optimizer
        kept = copy.deepcopy(dict(state))  # a copy, because the caller may change `state` later
        updates = {"updates": float(optimizer.updates), "skips": float(optimizer.bad.skips)}
        counters = {**kept, **updates, **optimizer.rates.state()}
        counters |= {**optimizer.scaler.state(), **optimizer.bad.state()}
        about = {"config": self.config.model_dump(mode="json"), "topology": self.topology.sizes}
        return {"format": FORMAT, "version": VERSION, **about, "state": counters}
