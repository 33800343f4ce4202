"""Keeps copies of the training state in the machines' memory, from which restarted ranks resume.

    plan = Plan.of(optimizer, topology, machines)    collective; the files that this rank writes
    copy = Copy(place.slot(0), everyone, "own", ...)
    copy.start(optimizer, room)                      a background thread writes the files

A copy is a `Save` into a folder in memory (tmpfs). Its files are not flushed, and it has no
manifest. The training state is divided into shares (see `sections`). Each share has its own file,
so that files from several machines can be combined after a machine is lost (`loading_copies`). Each
machine stores all states that its ranks hold. If several ranks of the machine hold the same states,
only one of these ranks writes each share. If `run.replicate` is "neighbor", a `Neighbor` then sends
the files that no other machine has to the next machine, over process groups of two ranks.

Two copies exist at a time: the newest complete copy, and the copy in progress, which overwrites the
files of an older copy. On a GPU, the values are first copied to host memory, so that updates do not
wait for the files. On a CPU, the thread writes the states directly, so an update of a state waits
until that state is written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from threed.checkpoint.file_transfer import receive_file, receive_json, send_file, send_json
from threed.checkpoint.manifest import file_of, write_entry
from threed.checkpoint.node_memory import COPIES, ELSEWHERE, Machines
from threed.checkpoint.saving import Extras, Save
from threed.checkpoint.sections import Held, SavedFile, held
from threed.config import Config
from threed.distributed import collectives
from threed.distributed.topology import Link, Topology
from threed.zero.layout import Layout
from threed.zero.optimizer import Optimizer
from threed.zero.snapshot import copy_bytes
from threed.zero.state import State, forecast_states, states_of


@dataclass(frozen=True)
class Plan:
    """The files that a rank writes for each copy.

    Attributes:
        files: one file per share that is assigned to this rank, and a file of buffers, if any.
        alone: names of the files in `files` whose contents no other machine has.
        described: sections whose descriptions this rank writes to its entry (the JSON file that
            lists its files). On each machine, one rank describes each section.
    """

    files: list[SavedFile]
    alone: set[str]
    described: list[Held]

    @classmethod
    def of(cls, optimizer: Optimizer, topology: Topology, machines: Machines) -> Plan:
        """Assigns each share that a machine holds to one of the machine's ranks. Collective.

        Returns:
            The plan of this rank, with the shares that are assigned to it.
        """
        everyone, sections = topology.axis("world"), held(optimizer.layout, states_of(optimizer))
        keys = [(h.section.digest[:16], h.portion) for h in sections]
        holders: dict[tuple[str, int], list[int]] = {}
        # For each (machine index, digest of a section), the machine's first rank that holds the
        # section.
        described: dict[tuple[int, str], int] = {}
        for rank, some in enumerate(collectives.exchange(keys, everyone)):
            for digest, portion in some:
                holders.setdefault((digest, portion), []).append(rank)
                described.setdefault((machines.of[rank], digest), rank)
        plan = cls([], set(), [])
        for h, key in zip(sections, keys, strict=True):
            if described[machines.mine, key[0]] == everyone.index:
                plan.described.append(h)
            local = [rank for rank in holders[key] if machines.of[rank] == machines.mine]
            for number in h.numbers[local.index(everyone.index) :: len(local)]:
                name = f"{key[0]}-{number:05d}.safetensors"
                plan.files.append(SavedFile(name, [(h, number)]))
                if len(local) == len(holders[key]):
                    plan.alone.add(name)
        return plan

    def with_extras(self, extras: Extras, machines: Machines) -> Plan:
        """Adds a file with the current buffers and generator states to the plan. Collective.

        On each machine, one rank per pipeline stage writes the buffers of the stage.

        Returns:
            The extended plan, or this plan if this rank has no buffers or generator states to
            write.
        """
        topology = extras.topology
        grid, stage = topology.grid, topology.coordinates["pp"]
        local = [(r, grid.coordinates(r)) for r in machines.ranks[machines.mine]]
        first = next((r for r, c in local if c["pp"] == stage and c["tp"] == 0), None)
        about, tensors = extras.copied(first == topology.rank)
        if not tensors:
            return self
        file = SavedFile(file_of(topology.rank), [], about, tensors)
        return replace(self, files=[*self.files, file], alone={*self.alone, file.name})


@dataclass(eq=False)
class Copy(Save):
    """One rank's part of a copy.

    Attributes:
        save: [epoch, step] of the copy. The epoch counts the starts of the run
            (`node_memory.Epochs`).
        alone: names of the files whose contents no other machine has.
        neighbor: exchange with neighboring machines; None if files are not sent to other machines.
        entry: description of the files that this rank has written.
    """

    save: list[int] = field(default_factory=list)
    alone: set[str] = field(default_factory=set)
    neighbor: Neighbor | None = None
    entry: dict[str, Any] = field(default_factory=dict)
    purpose: ClassVar[str] = "memory"
    durable: ClassVar[bool] = False
    elsewhere: ClassVar[str] = ELSEWHERE

    @property
    def building(self) -> Path:
        """The folder to which files are written."""
        return self.path

    def write(self, values: Iterable[Tensor]) -> None:
        """Writes this rank's files and entry. Not collective.

        An error is not raised, but its text is stored in `problem`.
        """
        # After an error, `commit` must still run, because ranks of other machines wait for its
        # messages.
        with suppress(Exception):
            super().write(values)

    def _write_files(self, values: Iterable[Tensor]) -> dict[str, Any]:
        self.path.mkdir(parents=True, exist_ok=True)
        # The files of the older copy in this slot are overwritten below. Its entries are removed
        # first, because every file that an entry lists counts as complete.
        self._entry_file(self.everyone.index).unlink(missing_ok=True)
        for source, _ in self.neighbor.sources if self.neighbor else ():
            _copied_entry(self.path, source).unlink(missing_ok=True)
        self.entry = {**super()._write_files(values), "head": self.head, "save": self.save}
        return self.entry

    def commit(self, patience: float = 0.0) -> None:
        """Exchanges files with the neighboring machines; has no effect if `neighbor` is None."""
        if self.neighbor is None:
            return
        entry = self.entry if self.problem is None else {"files": []}
        sent = {**entry, "files": [file for file in entry["files"] if file["file"] in self.alone]}
        problem = self.neighbor.exchange(self.path, sent)
        if problem and not self.problem:
            self.problem = f"rank {self.everyone.index} could not copy to its neighbor: {problem}"


def _copied_entry(folder: Path, source: int) -> Path:
    """Returns the path at which the neighbor machine of rank `source` stores this rank's entry."""
    return folder / f"entry-{source:05d}-copy.json"


def memory_bytes(config: Config, layout: Layout, states: Sequence[State], gpu: bool) -> int:
    """Returns a forecast of the host memory that copies use per rank, in bytes.

    For each of the two copies, the forecast counts this rank's slices of the states once, or twice
    if `run.replicate` is "neighbor". On a GPU, it adds the page-locked staging memory. If several
    ranks of a machine hold the same slices, the forecast is too high, because the machine stores
    these slices only once.

    Args:
        config: configuration of the run.
        layout: layout of this rank's parameters.
        states: optimizer states of this rank.
        gpu: whether the rank uses a GPU.
    """
    if not config.checkpoint.memory_every:
        return 0
    numbers = [(h, n) for h in held(layout, forecast_states(layout, states)) for n in h.numbers]
    file = SavedFile("", numbers)
    staged = copy_bytes(file.records, layout.policy, gpu) if gpu else 0
    return staged + COPIES * file.nbytes * (2 if config.run.replicate == "neighbor" else 1)


# --------------------------------------------------------------------------------------------------------- neighbor


class Neighbor:
    """The exchange of copies between a rank and ranks of the neighboring machines.

    Each rank sends files to one rank of the next machine, and stores the files that zero or more
    ranks of the previous machine send to it. The constructor is collective. Call `exchange` from
    one thread at a time.
    """

    def __init__(self, topology: Topology, machines: Machines) -> None:
        pairs = [(rank, machines.neighbor(rank)) for rank in range(topology.world)]
        links, me = topology.host_links(pairs), topology.rank
        self.to = links[me, machines.neighbor(me)]
        self.sources = [(source, links[source, me]) for source, target in pairs if target == me]

    def exchange(self, folder: Path, entry: Mapping[str, Any]) -> str:
        """Sends the files of an entry, and stores the files that other ranks send to this one.

        Args:
            folder: folder of the copy. It contains the files to send. Received files are stored in
                the same folder.
            entry: description of the files to send, under the key "files".

        Returns:
            The text of the first error, or "".
        """
        problems: list[str] = []

        def send() -> None:
            try:
                send_json(entry, self.to)
                for file in entry["files"]:
                    problems.append(send_file(folder / file["file"], file["size"], self.to))
            except Exception as error:  # the connection to the other rank was lost
                problems.append(str(error))

        sending = threading.Thread(target=send, name="memory", daemon=True)
        sending.start()
        for source, link in self.sources:
            problems += self._receive(folder, source, link)
        sending.join()
        return next(filter(None, problems), "")

    def _receive(self, folder: Path, source: int, link: Link) -> list[str]:
        """Receives and stores rank `source`'s files, and then its entry; returns error texts."""
        entry, problems = receive_json(link), []
        for file in entry["files"]:
            path = folder / Path(file["file"]).name
            problems.append(receive_file(path, int(file["size"]), link))
        if entry["files"] and not any(problems):
            write_entry(_copied_entry(folder, source), entry)
        return problems
