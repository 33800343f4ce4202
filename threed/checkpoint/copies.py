"""Copies of a run's state in its machines' memory, made beside training, for the ranks that are started after these.

    copies = Copies(optimizer, topology, config, extras, place, machines, epoch)     collective
    copies.save(state)             collective; waits for the one before, which then is whole on all machines
    copies.finish(seconds)         not collective, in any thread: lets the one that is written end

What is written is a native checkpoint in parts (`sections`): a file of its own for each number of a section, so that
the files of all machines can be put together whatever is missing (`union`). Of what several ranks of a machine hold
alike one writes each number; every machine has all that its ranks hold. With `neighbour`, files that are on one machine
only are also sent to a rank of the next one, over groups of two, in the thread that writes them.

There are two slots, written in turn: a rank begins one when the other is whole on every rank. No copy of the state is
made in between: the thread reads it where it is, and an update waits for what is not written yet.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.checkpoint.beside import on_paper
from threed.checkpoint.checksum import Hashes, checksum, tree_hash
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import DTYPES, parts, plain
from threed.checkpoint.manifest import file_of
from threed.checkpoint.node_memory import SLOTS, Machines, Place, write_entry
from threed.checkpoint.sections import Held, held
from threed.checkpoint.writing import head
from threed.config import Config
from threed.topology import Link, Topology
from threed.zero.layout import Layout
from threed.zero.optimizer import Optimizer
from threed.zero.records import states
from threed.zero.snapshot import Room, Snapshot
from threed.zero.state import State

MESSAGE = 2**24  # bytes sent to a neighbour at a time


@dataclass(frozen=True)
class _File:
    """A file that this rank writes: a number of a section. alone: no other machine has it."""

    name: str
    held: Held
    alone: bool


class Copies:
    """Writes copies of the state, one at a time. problem: what went wrong on some rank with the newest one that ended.

    saved: the newest step that is whole on all machines. neighbour: a rank of the next machine keeps copies as well.
    """

    def __init__(
        self, optimizer: Optimizer, topology: Topology, config: Config, extras: Extras, place: Place,
        machines: Machines, epoch: int, neighbour: bool = False,
    ) -> None:  # fmt: skip
        self.optimizer, self.topology, self.config, self.extras = (
            optimizer,
            topology,
            config,
            extras,
        )
        self.place, self.machines, self.epoch = place, machines, epoch
        self.everyone = topology.axis("world")
        self.files = _files(held(optimizer.layout, states(optimizer)), topology, machines)
        self.saved, self.problem = -1, ""
        self.neighbour = Neighbour(topology, machines) if neighbour and machines.count > 1 else None
        self._room = Room(whole=False)
        self._whole = SLOTS - 1  # the slot that is not written next
        self._writing: _Writing | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes of the optimizer's state, and bytes of those that it sends."""
        return sum(file.held.nbytes for file in self.files)

    @property
    def sent(self) -> int:
        """Bytes of those that it sends to its neighbour."""
        return sum(file.held.nbytes for file in self.files if file.alone) if self.neighbour else 0

    def save(self, state: Mapping[str, Any]) -> None:
        """Begins to write the state as it is now; waits for the save before. Collective. state: a run's counters."""
        self.end()
        self.optimizer.wait()
        self.extras.ready()
        said, values = self.extras.entries(_writes_buffers(self.topology, self.machines))
        beside = {key: value.to("cpu", copy=True) for key, value in values.items()}
        about = head(self.optimizer, self.topology, self.config, state)
        slot = 1 - self._whole
        self.optimizer.wait()
        snapshot = Snapshot(
            [e for file in self.files for e in file.held.extents()], self.optimizer, self._room
        )
        self.optimizer.readers.add("memory", snapshot.release)
        rank = self.everyone.index
        base = {
            "epoch": self.epoch,
            "step": state["steps"],
            "rank": rank,
            "world": self.everyone.size,
            "head": about,
        }
        write = _Writing(
            self.place.slot(self.epoch, slot),
            base,
            self.files,
            said,
            beside,
            snapshot,
            self.neighbour,
        )
        self._writing = write
        if self.extras.generators:  # of a wrapped module, whose parameters anybody may change
            snapshot.release_all()

    def end(self) -> None:
        """Waits until the newest save has ended on all ranks. Collective."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join()
        failed = torch.tensor([float(bool(writing.problem))], device=self.topology.device)
        if not float(collectives.sum_of_scalars(failed, self.everyone)):
            first = self.saved < 0
            self.saved, self.problem, self._whole = writing.step, "", 1 - self._whole
            if first and self.machines.first:
                self.place.remove(but=self.epoch)
            return
        found = collectives.exchange(writing.problem, self.everyone)
        self.problem = next(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)

    def finish(self, patience: float) -> None:
        """Lets the save that is written end, for so many seconds at most; updates wait no more."""
        if (writing := self._writing) is not None:
            writing.join(patience)


class _Writing:
    """A save under way, in a thread of its own. A daemon: nothing is lost that a later start could not do without."""

    def __init__(
        self, slot: Path, entry: Mapping[str, Any], files: Sequence[_File], said: Mapping[str, Any],
        beside: Mapping[str, Tensor], snapshot: Snapshot, neighbour: Neighbour | None,
    ) -> None:  # fmt: skip
        self.slot, self.entry, self.files, self.said, self.beside = slot, entry, files, said, beside
        self.snapshot, self.neighbour = snapshot, neighbour
        self.step, self.problem = int(entry["step"]), ""
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def join(self, patience: float | None = None) -> None:
        """Waits until it has ended, or some seconds; then the snapshot is over."""
        if self._thread.is_alive():
            self.snapshot.copy_rest()
        self._thread.join(patience)
        self.snapshot.end()

    def _run(self) -> None:
        alone: list[dict[str, Any]] = []
        try:
            alone = self._write()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {plain(error)}"
        finally:
            self.snapshot.end()
        try:
            if (
                self.neighbour is not None
            ):  # also after an error: others wait for what comes from here
                self.neighbour.exchange(self.slot, {**self.entry, "files": alone})
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {plain(error)}"

    def _write(self) -> list[dict[str, Any]]:
        """Writes this rank's files; returns the entries of those that a neighbour keeps."""
        rank = int(self.entry["rank"])
        mine = self.slot / f"entry-{rank:05d}.json"
        self.slot.mkdir(parents=True, exist_ok=True)
        mine.unlink(missing_ok=True)
        values = self.snapshot.values()
        for file in self.files:
            self._file(file, values)
        next(values, None)  # there is none: the last one's state may change
        written = [(file.alone, self._entry(file)) for file in self.files]
        if self.beside:
            written.append((True, self._beside(rank)))
        write_entry(mine, {**self.entry, "files": [entry for _, entry in written]})
        return [entry for alone, entry in written if alone]

    def _file(self, file: _File, values: Iterator[Tensor]) -> None:
        """Writes a number of a section."""
        section, number = file.held.section, file.held.number
        about = {"0": (DTYPES[section.dtype], (file.held.numel,))}
        some: Iterable[Tensor] = islice(values, sum(1 for _ in file.held.extents()))
        if not file.held.numel:
            some = [torch.empty(0, dtype=DTYPES[section.dtype])]
        write_in_place(
            self.slot / file.name, parts(about, some, {"0": f"{section.digest} {number}"})
        )

    def _entry(self, file: _File) -> dict[str, Any]:
        """Returns what `writing.joined` takes of a file."""
        section, number = file.held.section, file.held.number
        about = _described(self.slot / file.name)
        return {
            "sections": [[section.about, file.held.shapes]],
            "entry": {**about, "holds": [[section.digest, number]]},
        }

    def _beside(self, rank: int) -> dict[str, Any]:
        """Writes buffers and generators."""
        place = self.slot / file_of(rank)
        about = {key: (value.dtype, tuple(value.shape)) for key, value in self.beside.items()}
        write_in_place(place, parts(about, self.beside.values(), {}))
        return {"sections": [], "entry": {**_described(place), "holds": [], **self.said}}


def _described(place: Path) -> dict[str, Any]:
    """Returns what a manifest says of any file: of hashes a sum alone, if there can be one."""
    found = checksum(place)
    hashes = Hashes(tree_hash(place) if found is None else None, found)
    return {"file": place.name, **hashes._asdict(), "size": place.stat().st_size}


def write_in_place(path: Path, some: Iterable[bytes | Tensor]) -> None:
    """Writes a file over the one that is there, whose memory it takes. OSError where there is not enough memory.
    Nothing is flushed."""
    fd, at = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), 0
    try:
        for part in some:
            data = memoryview(part) if isinstance(part, bytes) else part.numpy().data
            while len(data):
                count = os.pwrite(fd, data, at)
                data, at = data[count:], at + count
        os.ftruncate(fd, at)
    finally:
        os.close(fd)


def memory_bytes(config: Config, layout: Layout, states: Sequence[State]) -> int:
    """The memory that copies take of a rank, as a forecast: of its slices in every slot, and as much of a neighbour's.
    Ranks of a machine that hold the same share it, and take less."""
    if not config.checkpoint.memory_every:
        return 0
    some = held(layout, on_paper(layout, states))
    numbers = (
        (h, h.portion * h.section.writers + writer)
        for h in some
        for writer in range(h.section.writers)
    )
    mine = sum(replace(h, chosen=number).nbytes for h, number in numbers)
    return SLOTS * mine * (2 if config.run.replicate == "neighbour" else 1)


# ------------------------------------------------------------------------------------------------------ who has what


def _files(mine: Sequence[Held], topology: Topology, machines: Machines) -> list[_File]:
    """Returns the files that this rank writes of the sections that it holds. Collective."""
    everyone = topology.axis("world")
    keys = [f"{h.section.digest[:16]}/{h.portion}" for h in mine]
    found: dict[str, list[int]] = {}
    for rank, some in enumerate(collectives.exchange(keys, everyone)):
        for key in some:
            found.setdefault(key, []).append(rank)
    files = []
    for h, key in zip(mine, keys, strict=True):
        here = [rank for rank in found[key] if machines.of[rank] == machines.mine]
        alone = len({machines.of[rank] for rank in found[key]}) == 1
        writers = h.section.writers
        for writer in range(here.index(everyone.index), writers, len(here)):
            number = h.portion * writers + writer
            name = f"{h.section.digest[:16]}-{number:05d}.safetensors"
            files.append(_File(name, replace(h, chosen=number), alone))
    return files


def _writes_buffers(topology: Topology, machines: Machines) -> bool:
    """Whether this rank is the one of its machine that writes the buffers of its stage."""
    grid, mine = topology.grid, topology.coordinates
    here = machines.ranks[machines.mine]
    alike = (r for r in here if (c := grid.coordinates(r))["pp"] == mine["pp"] and c["tp"] == 0)
    return next(alike, None) == topology.rank


# --------------------------------------------------------------------------------------------------------- neighbour


class Neighbour:
    """The ranks with which this one exchanges copies: it sends to one of the next machine, and keeps what some of the
    machine before send. Made by all ranks together; then used in one thread only."""

    def __init__(self, topology: Topology, machines: Machines) -> None:
        pairs = [(rank, machines.neighbour(rank)) for rank in range(topology.world)]
        links = topology.host_links(pairs)
        me = topology.rank
        self.to = links[me, machines.neighbour(me)]
        self.sources = [(source, links[source, me]) for source, target in pairs if target == me]

    def exchange(self, slot: Path, entry: Mapping[str, Any]) -> None:
        """Sends the files of an entry, which lie in `slot`, and keeps those that come, in the same slot. OSError once
        all is sent and received."""
        failed: list[OSError] = []
        for source, _ in self.sources:
            _attempted(partial((slot / f"copy-{source:05d}.json").unlink, missing_ok=True), failed)
        text = _bytes_of(entry)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in self.sources]
        self._wait(
            [(torch.tensor([text.numel()]), self.to)], list(zip(lengths, self._links, strict=True))
        )
        texts = [torch.empty(int(n), dtype=torch.uint8) for n in lengths]
        self._wait([(text, self.to)], list(zip(texts, self._links, strict=True)))
        entries = [_of_bytes(text) for text in texts]
        sending, *keeping = (_chunks(slot, one) for one in (entry, *entries))
        for out, *ins in zip_longest(sending, *keeping):
            sent = [] if out is None else [(_attempted(out.read, failed, out.count), self.to)]
            kept = [
                (torch.empty(i.count, dtype=torch.uint8), link, i)
                for i, link in zip(ins, self._links, strict=True)
                if i
            ]
            self._wait(sent, [(values, link) for values, link, _ in kept])
            for values, _, chunk in kept:
                _attempted(partial(chunk.write, values), failed)
        if failed:
            raise failed[0]
        for (source, _), other in zip(self.sources, entries, strict=True):
            write_entry(slot / f"copy-{source:05d}.json", other)

    @property
    def _links(self) -> list[Link]:
        return [link for _, link in self.sources]

    def _wait(
        self, sent: Sequence[tuple[Tensor, Link]], received: Sequence[tuple[Tensor, Link]]
    ) -> None:
        pending = [p for tensor, link in received for p in collectives.receive([tensor], link)]
        pending += [p for tensor, link in sent for p in collectives.send([tensor], link)]
        for one in pending:
            one.wait()


def _attempted(act: Callable[[], Any], failed: list[OSError], count: int = 0) -> Any:
    """Returns what an action does; after an OSError, which it notes, as many zeros."""
    try:
        return act()
    except OSError as error:
        failed.append(error)
        return torch.zeros(count, dtype=torch.uint8)


@dataclass(frozen=True)
class Chunk:
    """Bytes [at, at + count) of a file of `size`."""

    path: Path
    at: int
    count: int
    size: int

    def read(self) -> Tensor:
        """Returns them, uint8 [count]. OSError where they are not there."""
        out = torch.empty(self.count, dtype=torch.uint8)
        with self.path.open("rb") as file:
            if os.preadv(file.fileno(), [out.numpy().data], self.at) != self.count:
                raise OSError(f"{self.path} ends too early")
        return out

    def write(self, values: Tensor) -> None:
        """Writes them; the file has its size after the last."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            data, at = values.numpy().data, self.at
            while len(data):
                count = os.pwrite(fd, data, at)
                data, at = data[count:], at + count
            if at == self.size:
                os.ftruncate(fd, at)
        finally:
            os.close(fd)


def chunks(path: Path, size: int) -> Iterator[Chunk]:
    """Yields a file in pieces that are sent at a time."""
    for at in range(0, size, MESSAGE):
        yield Chunk(path, at, min(MESSAGE, size - at), size)


def _chunks(slot: Path, entry: Mapping[str, Any]) -> Iterator[Chunk]:
    for file in entry["files"]:
        yield from chunks(slot / Path(file["entry"]["file"]).name, int(file["entry"]["size"]))


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _of_bytes(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
