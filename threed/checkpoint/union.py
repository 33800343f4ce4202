"""Loads the training state from the copies that the machines have in memory.

    found = look(place, machines, record, everyone, device)     the copies, newest first; collective
    state = Loading(place, machines, topology).load(found[0], ...)

The first rank of each machine reports its files. Rank 0 combines them (`assemble`): a copy is complete if the files of
all machines have each value once, and all ranks get its manifest. A rank computes which files it needs. Those that its
machine lacks are sent to its root, next to the other files of the copy. With a manifest there, the folder is a
checkpoint that `native.load` reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from threed import collectives
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import CheckpointError, in_units
from threed.checkpoint.manifest import MANIFEST, check_structure, digest, file_of
from threed.checkpoint.node_memory import Machines, Place, Record
from threed.checkpoint.reading import Reader
from threed.checkpoint.sending import receive_file, send_file
from threed.checkpoint.writing import joined
from threed.topology import Axis, Link, Topology
from threed.zero.optimizer import Optimizer
from threed.zero.records import records


@dataclass(frozen=True)
class Found:
    """A copy that the machines have files of.

    Attributes:
        where: The machines that have each file, by name.
        problem: Why the copy is not complete, "" if it is.
    """

    epoch: int
    step: int
    manifest: Mapping[str, Any]
    where: Mapping[str, Sequence[int]]
    problem: str

    @property
    def machines(self) -> int:
        """How many machines have files of it."""
        return len({number for some in self.where.values() for number in some})


def report(place: Place) -> list[dict[str, Any]]:
    """Returns the files of a machine: an entry for each copy, with head, sections and files."""
    saves: dict[tuple[int, ...], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
    for entry in place.entries():
        _, sections, files = saves.setdefault(tuple(entry["save"]), (entry, {}, {}))
        sections |= {json.dumps(about, sort_keys=True): about for about in entry["sections"]}
        files |= {file["file"]: file for file in entry["files"]}
    return [
        {**entry, "sections": list(sections.values()), "files": list(files.values())}
        for entry, sections, files in saves.values()
    ]


def assemble(
    reports: Sequence[Mapping[str, Any] | None],
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Combines the files of a copy.

    Args:
        reports: The entry of each machine, None if it has no files of this copy.

    Returns:
        The manifest, and the machines that have each file.

    Raises:
        CheckpointError: If files are missing.
    """
    files: dict[str, dict[str, Any]] = {}
    where: dict[str, list[int]] = {}
    found = [(machine, one) for machine, one in enumerate(reports) if one is not None]
    for machine, one in found:
        for file in one["files"]:
            if Path(file["file"]).name != file["file"]:
                raise CheckpointError("it names a file elsewhere")
            known = files.setdefault(file["file"], dict(file))
            if all(
                known[key] == file[key] for key in ("tree", "sum", "size")
            ):  # else a copy that differs
                where.setdefault(file["file"], []).append(machine)
    names = set[str]()
    for (
        file
    ) in files.values():  # machines have copies of the same buffers in files of different ranks
        if "buffers" in file:
            file["buffers"] = [about for about in file["buffers"] if about[0] not in names]
            names |= {about[0] for about in file["buffers"]}
    sections = [about for _, one in found for about in one["sections"]]
    body = {**found[0][1]["head"], **joined([{"sections": sections, "files": files.values()}])}
    check_structure(body)
    return {**body, "sha256": digest(body)}, where


def look(
    place: Place, machines: Machines, record: Record, everyone: Axis, device: torch.device
) -> list[Found]:
    """Returns the saves that count for a start, newest first, on every rank alike. Collective."""
    mine = report(place) if machines.first else []
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    gathered = collectives.gather_to_first(data, everyone)
    found: list[Any] = []
    if everyone.index == 0:
        reports = [json.loads(some.numpy().tobytes()) for some in gathered]
        found = _candidates([reports[ranks[0]] for ranks in machines.ranks], record)
    return [Found(*one) for one in _from_first(found, everyone, device)]


def _candidates(reports: Sequence[Sequence[Mapping[str, Any]]], record: Record) -> list[list[Any]]:
    keys = {tuple(save["save"]) for one in reports for save in one}
    found = []
    for epoch, step in sorted((key for key in keys if record.counts(*key)), reverse=True):
        of_it = [
            next((save for save in one if tuple(save["save"]) == (epoch, step)), None)
            for one in reports
        ]
        try:
            found.append([epoch, step, *assemble(of_it), ""])
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            found.append([epoch, step, {}, {}, str(error) or type(error).__name__])
    return found


def _from_first(value: Any, everyone: Axis, device: torch.device) -> Any:
    """Returns the first rank's value on every rank. Collective. (`exchange` would bring every rank's, padded.)"""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = collectives.broadcast(torch.tensor([data.numel()], device=device), everyone, 0)
    data = data if everyone.index == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    return json.loads(collectives.broadcast(data, everyone, 0).cpu().numpy().tobytes())


# ---------------------------------------------------------------------------------------------------------- loading


def needed(
    manifest: Mapping[str, Any], optimizer: Optimizer, extras: Extras, topology: Topology
) -> set[str]:
    """Returns the files that this rank reads of a checkpoint."""
    with Reader(Path(), manifest) as reader:
        boxes = (
            (reader.stands_for(r.part, r.piece.name), r)
            for r in records(optimizer)
            if r.piece.name in reader.parts
        )
        names = {
            name
            for part, r in boxes
            for name in reader.files_of(part, r.piece.name, r.box.start, r.box.size)
        }
        names |= {
            reader.buffers[name][0]
            for name in extras.buffers.persistent()
            if name in reader.buffers
        }
    mine = file_of(topology.rank)
    same = manifest["topology"] == topology.sizes and any(
        e["file"] == mine for e in manifest["files"]
    )
    return names | ({mine} if same else set())


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends another, to the memory of its machine."""

    file: str
    source: int
    target: int


def transfers(
    needs: Sequence[Collection[str]], where: Mapping[str, Sequence[int]], machines: Machines
) -> list[Transfer]:
    """Returns what has to be sent so that each machine has what its ranks need, in one order for all ranks. Work is
    shared between the machines that have a file, and their ranks."""
    found: list[Transfer] = []
    for number, ranks in enumerate(machines.ranks):
        wanted = {name: rank for rank in reversed(ranks) for name in needs[rank]}
        for name in sorted(wanted):
            having = where[name]
            if number not in having:
                source = machines.ranks[having[number % len(having)]]
                found.append(Transfer(name, source[len(found) % len(source)], wanted[name]))
    return found


class Loading:
    """Loads a complete copy."""

    def __init__(self, place: Place, machines: Machines, topology: Topology) -> None:
        self.place, self.machines, self.topology = place, machines, topology
        self.everyone = topology.axis("world")

    def load(
        self,
        found: Found,
        optimizer: Optimizer,
        extras: Extras,
        load: Callable[[Path, Collection[str]], dict[str, Any]],
    ) -> dict[str, Any]:
        """Returns what `load(folder, files to be hashed here)` does. Collective; CheckpointError on every rank."""
        folder = self.place.copy(found.epoch, found.step)
        sizes = {entry["file"]: int(entry["size"]) for entry in found.manifest["files"]}
        needs = self._needs(list(sizes), needed(found.manifest, optimizer, extras, self.topology))
        moves = transfers(needs, found.where, self.machines)
        here = self.machines.ranks[self.machines.mine]
        try:
            coming = sum(sizes[move.file] for move in moves if move.target in here)
            problem = self._begin(folder, found.manifest, coming) if self.machines.first else ""
            collectives.raise_together([problem], self.everyone, CheckpointError)
            problems = [self._move(move, folder / move.file, sizes[move.file]) for move in moves]
            collectives.raise_together(problems, self.everyone, CheckpointError)
            together = sorted({name for rank in here for name in needs[rank]})
            return load(folder, set(together[here.index(self.topology.rank) :: len(here)]))
        except CheckpointError:  # on all ranks: an older copy may need the memory
            for move in moves:
                if move.target == self.topology.rank:
                    (folder / move.file).unlink(missing_ok=True)
            raise

    def _needs(self, names: Sequence[str], mine: Collection[str]) -> list[list[str]]:
        """Returns the files that each rank needs. Collective."""
        numbers = sorted(number for number, name in enumerate(names) if name in mine)
        everyone = collectives.exchange(numbers, self.everyone)
        return [[names[number] for number in some] for some in everyone]

    def _begin(self, folder: Path, manifest: Mapping[str, Any], coming: int) -> str:
        """Writes the manifest next to the files of the copy; returns why it cannot.

        Args:
            coming: Bytes of the files that this machine lacks.
        """
        if (free := shutil.disk_usage(self.place.home).free) < coming:
            what = f"{in_units(coming)} have to come from other machines"
            return f"{what}, and {in_units(free)} are free in {self.place.home}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MANIFEST).write_text(json.dumps(manifest))
        except OSError as error:
            return str(error)
        return ""

    def _move(self, move: Transfer, path: Path, size: int) -> str:
        """Sends or receives a file if it is this rank's turn; returns what went wrong."""
        if self.topology.rank == move.source:
            return send_file(path, size, Link(move.target, self.everyone), self.topology.device)
        if self.topology.rank == move.target:
            return receive_file(path, size, Link(move.source, self.everyone), self.topology.device)
        return ""
