"""Puts a run's state together from what its machines have in memory, and loads it.

    found = look(place, machines, record, everyone, device)     what could be loaded, newest first; collective
    state = Union(place, machines, topology).load(found[0], engine.load, ...)

Each machine's first rank says what is there; rank 0 finds which saves are whole if all files are put together
(`assemble`), and every rank gets the manifest of those. A rank then knows by arithmetic which files it needs; those
that its machine lacks come from one that has them, in pieces, into its memory. What the reader gets is a folder with a
manifest and the files that this machine's ranks need.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.checkpoint.copies import Chunk, chunks
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import CheckpointError, in_units
from threed.checkpoint.manifest import MANIFEST, check_structure, digest, file_of
from threed.checkpoint.node_memory import Machines, Place, Record
from threed.checkpoint.reading import Reader
from threed.checkpoint.writing import joined
from threed.topology import Axis, Link, Topology
from threed.zero.optimizer import Optimizer
from threed.zero.records import records


@dataclass(frozen=True)
class Found:
    """A save of which the machines have files. where: the machines that have each file, by name. problem: why it is
    not whole, if it is not."""

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
    """Returns what a machine has, a record of each save: its head, sections and files."""
    saves: dict[tuple[int, int], dict[str, Any]] = {}
    for _, entry in place.entries():
        key = (int(entry["epoch"]), int(entry["step"]))
        save = saves.setdefault(
            key, {"save": list(key), "head": entry["head"], "sections": {}, "files": {}}
        )
        for file in entry["files"]:
            for about, shapes in file["sections"]:
                save["sections"].setdefault(json.dumps(about, sort_keys=True), [about, shapes])
            save["files"][file["entry"]["file"]] = file["entry"]
    return [
        {**save, "sections": list(save["sections"].values()), "files": list(save["files"].values())}
        for save in saves.values()
    ]


def assemble(
    reports: Sequence[Mapping[str, Any] | None],
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Returns the manifest of a save, and which machines have each file. reports: each machine's, None where it has
    nothing. CheckpointError where files are missing."""
    files: dict[str, dict[str, Any]] = {}
    where: dict[str, list[int]] = {}
    entries: list[dict[str, Any]] = []
    for machine, one in enumerate(reports):
        if one is None:
            continue
        entries.append({"sections": one["sections"]})
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
    head = next(one["head"] for one in reports if one is not None)
    body = json.loads(
        json.dumps(
            {**head, **joined([*entries, *({"sections": [], "entry": f} for f in files.values())])}
        )
    )
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
        names = {
            name
            for r in records(optimizer)
            for name in reader.files_of(r.part, r.piece.name, r.piece.start, r.piece.size)
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
    """Loads a save that is whole."""

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
        folder = self.place.folder / "load" / f"step-{found.step}"
        self._clear(folder)
        try:
            hashed = self._bring(
                found, folder, needed(found.manifest, optimizer, extras, self.topology)
            )
            result = load(folder, hashed)
        except (
            CheckpointError
        ):  # which all ranks raise; after another error they do not meet any more
            self._clear(folder)
            raise
        self._clear(folder)
        return result

    def _clear(self, folder: Path) -> None:
        """Removes the folder, once no rank reads it."""
        collectives.barrier(self.everyone)
        if self.machines.first:
            shutil.rmtree(folder.parent, ignore_errors=True)
        collectives.barrier(self.everyone)

    def _bring(self, found: Found, folder: Path, mine: set[str]) -> set[str]:
        """Makes the folder; returns this rank's share of the files that its machine's ranks need."""
        sizes = {entry["file"]: int(entry["size"]) for entry in found.manifest["files"]}
        names = list(sizes)
        numbers = {name: number for number, name in enumerate(names)}
        needs = [
            [names[number] for number in some]
            for some in collectives.exchange(sorted(numbers[name] for name in mine), self.everyone)
        ]
        here = self.machines.ranks[self.machines.mine]
        together = sorted({name for rank in here for name in needs[rank]})
        moves, slots, problem = transfers(needs, found.where, self.machines), self._slots(found), ""
        coming = sum(sizes[move.file] for move in moves if move.target in here)
        if self.machines.first:
            try:
                problem = self._begin(found, folder, slots, coming, together)
            except OSError as error:
                problem = str(error)
        collectives.raise_together([problem], self.everyone, CheckpointError)
        for move in moves:
            path = slots.get(move.file, folder / move.file)
            problem = self._move(move, path, folder / move.file, sizes[move.file]) or problem
        collectives.raise_together([problem], self.everyone, CheckpointError)
        return set(together[here.index(self.topology.rank) :: len(here)])

    def _begin(
        self,
        found: Found,
        folder: Path,
        slots: Mapping[str, Path],
        coming: int,
        wanted: Sequence[str],
    ) -> str:
        """Makes the folder with the manifest and the files that are here; for one rank of the machine. Returns why it
        cannot. coming: bytes of other files that will be written there."""
        if (free := shutil.disk_usage(self.place.home).free) < coming:
            what = f"{in_units(coming)} have to come from other machines"
            return f"{what}, and {in_units(free)} are free in {self.place.home}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(json.dumps(found.manifest))
        for name in wanted:
            if self.machines.mine in found.where[name]:
                if name not in slots:
                    return f"{name} of step {found.step} is gone from {self.place.folder}"
                os.link(slots[name], folder / name)
        return ""

    def _slots(self, found: Found) -> dict[str, Path]:
        """Returns where this machine has the files of a save."""
        return {
            file["entry"]["file"]: slot / file["entry"]["file"]
            for slot, entry in self.place.entries()
            if (entry["epoch"], entry["step"]) == (found.epoch, found.step)
            for file in entry["files"]
        }

    def _move(self, move: Transfer, there: Path, here: Path, size: int) -> str:
        """Sends a file that is `there`, or writes what comes `here`, if this rank does; returns what went wrong."""
        rank, problem = self.topology.rank, ""
        if rank not in (move.source, move.target):
            return ""
        link = Link(move.target if rank == move.source else move.source, self.everyone)
        for chunk in chunks(there if rank == move.source else here, size):
            values = torch.zeros(chunk.count, dtype=torch.uint8)
            if rank == move.source:
                with suppress(OSError):  # zeros are found by their hash
                    values = chunk.read()
                collectives.send([self._there(values)], link)[0].wait()
            else:
                got = collectives.receive([self._there(values)], link)[0].wait()
                problem = _attempt(chunk, got.cpu()) or problem
        return problem

    def _there(self, values: Tensor) -> Tensor:
        """Where this topology's groups send from."""
        return values.to(self.topology.device)


def _attempt(chunk: Chunk, values: Tensor) -> str:
    try:
        chunk.write(values)
    except OSError as error:
        return str(error)
    return ""
