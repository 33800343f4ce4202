"""Loads the training state from the copies that the machines have in memory.

    found = look(place, machines, epochs, everyone, device)     the copies, newest first; collective
    state = load_copy(found[0], place, machines, ...)

The first rank of each machine sends the entries that are there to rank 0, which combines them (`assemble`): a copy is
complete if the files of all machines have each value once, and all ranks get its manifest. A rank computes which files
it needs. Those that its machine lacks are sent to its root, next to the other files of the copy. With a manifest there,
the folder is a checkpoint that `native.load` reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from threed import collectives
from threed.checkpoint.files import CheckpointError, in_units
from threed.checkpoint.manifest import MANIFEST, check_structure, digest, joined
from threed.checkpoint.node_memory import Epochs, Machines, Place
from threed.checkpoint.reading import Reader
from threed.checkpoint.sending import receive_file, send_file
from threed.topology import Axis, Link, Topology
from threed.zero.records import Record


@dataclass(frozen=True)
class Found:
    """A copy that the machines have files of.

    Attributes:
        slot: Where the machines have it.
        where: The machines that have each file, by name.
        problem: Why the copy is not complete, "" if it is.
    """

    epoch: int
    step: int
    slot: int
    manifest: Mapping[str, Any]
    where: Mapping[str, Sequence[int]]
    problem: str

    @property
    def machines(self) -> int:
        """How many machines have files of it."""
        return len({number for some in self.where.values() for number in some})


def look(
    place: Place, machines: Machines, epochs: Epochs, everyone: Axis, device: torch.device
) -> list[Found]:
    """Returns the copies that a start may take, newest first, on all ranks alike. Collective."""
    mine = list(place.entries()) if machines.first else []
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    gathered = collectives.gather_to_first(data, everyone)
    saves: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for machine, some in zip(machines.of, gathered, strict=False):
        for entry in json.loads(some.numpy().tobytes()):
            saves.setdefault(tuple(entry["save"]), []).append((machine, entry))
    keys = sorted((key for key in saves if epochs.counts(*key)), reverse=True)
    found = [[*key, *_assembled(saves[key])] for key in keys]
    return [Found(*one) for one in _from_first(found, everyone, device)]


def _assembled(entries: Sequence[tuple[int, Any]]) -> list[Any]:
    """Returns slot, manifest, machines and problem of a copy, see `Found`."""
    slot = int(Path(entries[0][1]["path"]).parent.name)
    try:
        return [slot, *assemble(entries), ""]
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        return [slot, {}, {}, str(error) or type(error).__name__]


def assemble(
    entries: Sequence[tuple[int, Mapping[str, Any]]],
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Combines the files of a copy.

    Args:
        entries: All entries of the copy, each with the machine that has it.

    Returns:
        The manifest, and the machines that have each file.

    Raises:
        CheckpointError: If files are missing.
    """
    files: dict[str, dict[str, Any]] = {}
    where: dict[str, list[int]] = {}
    buffers = set[str]()  # machines have the same ones in files of different ranks
    for machine, entry in entries:
        for file in entry["files"]:
            name = file["file"]
            if Path(name).name != name:
                raise CheckpointError("it names a file elsewhere")
            if name not in files:
                own = [about for about in file.get("buffers", ()) if about[0] not in buffers]
                buffers |= {about[0] for about in own}
                files[name] = {**file, "buffers": own}
            if all(files[name][key] == file[key] for key in ("tree", "sum", "size")):
                where.setdefault(name, []).append(machine)  # else its contents differ
    sections = [about for _, entry in entries for about in entry["sections"]]
    head = entries[0][1]["head"]
    body = {**head, **joined([{"sections": sections, "files": files.values()}])}
    check_structure(body)
    return {**body, "sha256": digest(body)}, where


def _from_first(value: Any, everyone: Axis, device: torch.device) -> Any:
    """Returns the first rank's value on every rank. Collective. (`exchange` would bring every rank's, padded.)"""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = collectives.broadcast(torch.tensor([data.numel()], device=device), everyone, 0)
    data = data if everyone.index == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    return json.loads(collectives.broadcast(data, everyone, 0).cpu().numpy().tobytes())


# ---------------------------------------------------------------------------------------------------------- loading


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


def load_copy(
    found: Found,
    place: Place,
    machines: Machines,
    topology: Topology,
    wanted: Iterable[Record],
    buffers: Iterable[str],
    load: Callable[[Path, Collection[str]], dict[str, Any]],
) -> dict[str, Any]:
    """Sends files to the machines that lack them, and loads a complete copy. Collective.

    Args:
        wanted: What this rank reads of the states.
        buffers: What it reads of the buffers.
        load: Called as `load(folder, files to be hashed here)`; what it does is returned.

    Raises:
        CheckpointError: On every rank.
    """
    everyone, folder = topology.axis("world"), place.slot(found.slot)
    sizes = {entry["file"]: int(entry["size"]) for entry in found.manifest["files"]}
    same = found.manifest["topology"] == topology.sizes
    with Reader(folder, found.manifest) as reader:
        mine = reader.files_of(wanted, buffers, topology.rank if same else None)
    names = list(sizes)
    numbers = [number for number, name in enumerate(names) if name in mine]
    needs = [[names[n] for n in some] for some in collectives.exchange(numbers, everyone)]
    moves = transfers(needs, found.where, machines)
    here = machines.ranks[machines.mine]
    try:
        coming = sum(sizes[move.file] for move in moves if move.target in here)
        problem = _begin(place, folder, found.manifest, coming) if machines.first else ""
        collectives.raise_together([problem], everyone, CheckpointError)
        problems = [_move(move, folder / move.file, sizes[move.file], topology) for move in moves]
        collectives.raise_together(problems, everyone, CheckpointError)
        together = sorted({name for rank in here for name in needs[rank]})
        return load(folder, set(together[here.index(topology.rank) :: len(here)]))
    except CheckpointError:  # on all ranks: an older copy may need the memory
        for move in moves:
            if move.target == topology.rank:
                (folder / move.file).unlink(missing_ok=True)
        raise


def _begin(place: Place, folder: Path, manifest: Mapping[str, Any], coming: int) -> str:
    """Writes the manifest next to the files of the copy; returns why it cannot.

    Args:
        coming: Bytes of the files that this machine lacks.
    """
    if (free := shutil.disk_usage(place.home).free) < coming:
        what = f"{in_units(coming)} have to come from other machines"
        return f"{what}, and {in_units(free)} are free in {place.home}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).write_text(json.dumps(manifest))
    except OSError as error:
        return str(error)
    return ""


def _move(move: Transfer, path: Path, size: int, topology: Topology) -> str:
    """Sends or receives a file if it is this rank's turn; returns what went wrong."""
    everyone = topology.axis("world")
    if topology.rank == move.source:
        return send_file(path, size, Link(move.target, everyone), topology.device)
    if topology.rank == move.target:
        return receive_file(path, size, Link(move.source, everyone), topology.device)
    return ""
