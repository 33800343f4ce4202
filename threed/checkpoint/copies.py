"""Copies of the training state in the memory of the machines, for the ranks that a restart begins.

    plan = Plan.of(optimizer, topology, machines)              the files that this rank writes; collective
    copy = Copy(place.slot(0), everyone, "own", ...)
    copy.start(optimizer, room)

A copy is a save whose root is the memory of a machine: `Save` writes it as it writes a checkpoint,
without flushes and without a manifest. Each number of a section has a file of its own, so that the files of several
machines can be combined, whichever are missing (`union`). Every machine has all that its ranks hold; if several of
them hold the same, each number is written by one. With a `Neighbour`, files that no other machine has are then copied
to the root of the next machine, over groups of two ranks.

Two copies exist at a time: the newest complete one, and the one that is written, over the files of the one before.
The thread reads the states where they are: an update waits for what is not written yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from threed import collectives
from threed.checkpoint.extras import Extras
from threed.checkpoint.manifest import file_of, write_entry
from threed.checkpoint.node_memory import COPIES, ELSEWHERE, Machines
from threed.checkpoint.saving import Save, on_paper
from threed.checkpoint.sections import Held, SavedFile, held
from threed.checkpoint.sending import receive_file, receive_json, send_file, send_json
from threed.config import Config
from threed.topology import Link, Topology
from threed.zero.layout import Layout
from threed.zero.optimizer import Optimizer
from threed.zero.records import states
from threed.zero.snapshot import copy_bytes
from threed.zero.state import State


@dataclass(frozen=True)
class Plan:
    """What a rank writes for each copy.

    Attributes:
        alone: The names of files that no other machine has.
        described: The sections that the rank describes for its machine.
    """

    files: list[SavedFile]
    alone: set[str]
    described: list[Held]

    @classmethod
    def of(cls, optimizer: Optimizer, topology: Topology, machines: Machines) -> Plan:
        """Divides what the ranks of a machine hold between them. Collective."""
        everyone, mine = topology.axis("world"), held(optimizer.layout, states(optimizer))
        keys = [(h.section.digest[:16], h.portion) for h in mine]
        found: dict[tuple[str, int], list[int]] = {}
        described: dict[tuple[int, str], int] = {}  # by machine and section: its first rank
        for rank, some in enumerate(collectives.exchange(keys, everyone)):
            for digest, portion in some:
                found.setdefault((digest, portion), []).append(rank)
                described.setdefault((machines.of[rank], digest), rank)
        plan = cls([], set(), [])
        for h, key in zip(mine, keys, strict=True):
            if described[machines.mine, key[0]] == everyone.index:
                plan.described.append(h)
            here = [rank for rank in found[key] if machines.of[rank] == machines.mine]
            for number in h.numbers[here.index(everyone.index) :: len(here)]:
                name = f"{key[0]}-{number:05d}.safetensors"
                plan.files.append(SavedFile(name, [(h, number)]))
                if len(here) == len(found[key]):
                    plan.alone.add(name)
        return plan

    def with_extras(self, extras: Extras, machines: Machines) -> Plan:
        """Returns the plan with a file of the current buffers and generators. Collective.

        One rank of each machine writes the buffers of a stage.
        """
        topology = extras.topology
        grid, stage = topology.grid, topology.coordinates["pp"]
        here = [(r, grid.coordinates(r)) for r in machines.ranks[machines.mine]]
        first = next((r for r, c in here if c["pp"] == stage and c["tp"] == 0), None)
        about, tensors = extras.copied(first == topology.rank)
        if not tensors:
            return self
        file = SavedFile(file_of(topology.rank), [], about, tensors)
        return replace(self, files=[*self.files, file], alone={*self.alone, file.name})


@dataclass(eq=False)
class Copy(Save):
    """One rank's part of a copy.

    Attributes:
        save: Epoch and step.
        alone: The names of files that no other machine has.
        entry: What this rank has written.
    """

    save: list[int] = field(default_factory=list)
    alone: set[str] = field(default_factory=set)
    neighbour: Neighbour | None = None
    entry: dict[str, Any] = field(default_factory=dict)
    purpose: ClassVar[str] = "memory"
    durable: ClassVar[bool] = False
    elsewhere: ClassVar[str] = ELSEWHERE

    @property
    def building(self) -> Path:
        """The folder that files are written to."""
        return self.path

    def write(self, values: Iterable[Tensor]) -> None:
        """Writes this rank's files and its entry, and sets `problem` if it cannot. No collective."""
        with suppress(Exception):  # kept in `problem`: the neighbours wait for `commit`
            super().write(values)

    def _entry(self, values: Iterable[Tensor]) -> dict[str, Any]:
        self.path.mkdir(parents=True, exist_ok=True)
        # of an older copy, whose files are overwritten
        self._entry_file(self.everyone.index).unlink(missing_ok=True)
        for source, _ in self.neighbour.sources if self.neighbour else ():
            _copied_entry(self.path, source).unlink(missing_ok=True)
        self.entry = {**super()._entry(values), "head": self.head, "save": self.save}
        return self.entry

    def commit(self, patience: float = 0.0) -> None:
        """Copies files to the neighbour's root, and keeps those that other ranks send."""
        if self.neighbour is None:
            return
        entry = self.entry if self.problem is None else {"files": []}
        sent = {**entry, "files": [file for file in entry["files"] if file["file"] in self.alone]}
        problem = self.neighbour.exchange(self.path, sent)
        if problem and not self.problem:
            self.problem = f"rank {self.everyone.index} could not copy to its neighbour: {problem}"


def _copied_entry(folder: Path, source: int) -> Path:
    """Returns the path of the entry of a rank on its neighbour's machine."""
    return folder / f"entry-{source:05d}-copy.json"


def memory_bytes(config: Config, layout: Layout, states: Sequence[State], gpu: bool) -> int:
    """Returns a forecast of the memory that copies take per rank.

    That is its slices in each copy, and as much of a neighbour's. Ranks of a machine that hold the same take less. A
    GPU's slices pass through page-locked memory.
    """
    if not config.checkpoint.memory_every:
        return 0
    mine = [(h, n) for h in held(layout, on_paper(layout, states)) for n in h.numbers]
    file = SavedFile("", mine)
    staged = copy_bytes(file.records, layout.policy, gpu) if gpu else 0
    return staged + COPIES * file.nbytes * (2 if config.run.replicate == "neighbour" else 1)


# --------------------------------------------------------------------------------------------------------- neighbour


class Neighbour:
    """The ranks that this one exchanges copies with: it sends to one of the next machine, and keeps what some of the
    previous machine send. Collective to make; then used in one thread at a time."""

    def __init__(self, topology: Topology, machines: Machines) -> None:
        pairs = [(rank, machines.neighbour(rank)) for rank in range(topology.world)]
        links, me = topology.host_links(pairs), topology.rank
        self.to = links[me, machines.neighbour(me)]
        self.sources = [(source, links[source, me]) for source, target in pairs if target == me]

    def exchange(self, folder: Path, entry: Mapping[str, Any]) -> str:
        """Sends the files of an entry, which are in `folder`, and keeps those that other ranks send, in the same
        folder; returns what went wrong."""
        problems: list[str] = []

        def send() -> None:
            try:
                send_json(entry, self.to)
                for file in entry["files"]:
                    problems.append(send_file(folder / file["file"], file["size"], self.to))
            except Exception as error:  # the connection was lost
                problems.append(str(error))

        sending = threading.Thread(target=send, name="memory", daemon=True)
        sending.start()
        for source, link in self.sources:
            problems += self._receive(folder, source, link)
        sending.join()
        return next(filter(None, problems), "")

    def _receive(self, folder: Path, source: int, link: Link) -> list[str]:
        """Keeps the files of one rank, and then its entry."""
        entry, problems = receive_json(link), []
        for file in entry["files"]:
            path = folder / Path(file["file"]).name
            problems.append(receive_file(path, int(file["size"]), link))
        if entry["files"] and not any(problems):
            write_entry(_copied_entry(folder, source), entry)
        return problems
