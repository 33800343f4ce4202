"""Loads the training state from the copies in the machines' memory.

    found = look(place, machines, epochs, everyone, device)     collective; the copies, newest first
    state = load_copy(found[0], place, machines, ...)

The first rank of each machine sends its machine's entries to rank 0, which combines them
(`assemble`). A copy is complete if the files of all machines together have each value once; then
all ranks get its manifest. Each rank computes which files it needs, and files that its machine
lacks are sent to it. With the manifest written next to its files, the copy is a checkpoint that
`native.load` reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from threed.checkpoint.files import CheckpointError, in_units
from threed.checkpoint.manifest import MANIFEST, check_structure, digest, joined
from threed.checkpoint.node_memory import Epochs, Machines, Place
from threed.checkpoint.reading import Reader
from threed.checkpoint.sending import receive_file, send_file
from threed.distributed import collectives
from threed.distributed.topology import Axis, Link, Topology
from threed.zero.records import Record


@dataclass(frozen=True)
class Found:
    """A copy of which the machines have files.

    Attributes:
        epoch: start of the run that made the copy, see `Epochs`.
        step: step of the copy.
        slot: slot in which the machines have it.
        manifest: manifest of the copy; empty if it is not complete.
        where: the machines that have each file, by file name.
        problem: reason why the copy is not complete, or "".
    """

    epoch: int
    step: int
    slot: int
    manifest: Mapping[str, Any]
    where: Mapping[str, Sequence[int]]
    problem: str

    @property
    def machines(self) -> int:
        """The number of machines that have files of the copy."""
        return len({number for some in self.where.values() for number in some})


def look(
    place: Place, machines: Machines, epochs: Epochs, everyone: Axis, device: torch.device
) -> list[Found]:
    """Returns the copies that a start may load, newest first; the same on all ranks. Collective.

    Args:
        place: this run's folder in memory.
        machines: ranks of each machine.
        epochs: record of the run folder.
        everyone: axis of all ranks.
        device: device of tensors in the group of `everyone`.
    """
    entries = list(place.entries()) if machines.first else []
    data = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8).to(device)
    gathered = collectives.gather_to_first(data, everyone)
    saves: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for machine, some in zip(machines.of, gathered, strict=False):
        for entry in json.loads(some.numpy().tobytes()):
            saves.setdefault(tuple(entry["save"]), []).append((machine, entry))
    keys = sorted((key for key in saves if epochs.counts(*key)), reverse=True)
    found = [[*key, *_try_assemble(saves[key])] for key in keys]
    return [Found(*one) for one in _broadcast_json(found, everyone, device)]


def _try_assemble(entries: Sequence[tuple[int, Any]]) -> list[Any]:
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
        entries: all entries of the copy, each with the index of the machine that has it.

    Returns:
        The manifest, and the machines that have each file, by file name.

    Raises:
        CheckpointError: if files are missing.
    """
    files: dict[str, dict[str, Any]] = {}
    where: dict[str, list[int]] = {}
    buffers = set[str]()  # each machine saves them, in files of different ranks
    for machine, entry in entries:
        for file in entry["files"]:
            name = file["file"]
            if Path(name).name != name:
                raise CheckpointError("it names a file outside its folder")
            if name not in files:
                own = [about for about in file.get("buffers", ()) if about[0] not in buffers]
                buffers |= {about[0] for about in own}
                files[name] = {**file, "buffers": own}
            if all(files[name][key] == file[key] for key in ("tree", "sum", "size")):
                where.setdefault(name, []).append(machine)  # otherwise its contents differ
    sections = [about for _, entry in entries for about in entry["sections"]]
    head = entries[0][1]["head"]
    body = {**head, **joined([{"sections": sections, "files": files.values()}])}
    check_structure(body)
    return {**body, "sha256": digest(body)}, where


def _broadcast_json(value: Any, everyone: Axis, device: torch.device) -> Any:
    """Returns rank 0's value on every rank. Collective.

    `collectives.exchange` is not used, because it would gather the values of all ranks, each padded
    to the longest.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = collectives.broadcast(torch.tensor([data.numel()], device=device), everyone, 0)
    data = data if everyone.index == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    return json.loads(collectives.broadcast(data, everyone, 0).cpu().numpy().tobytes())


# ---------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another, into the memory of the receiver's machine.

    Attributes:
        file: name of the file.
        source: rank that sends.
        target: rank that receives.
    """

    file: str
    source: int
    target: int


def transfers(
    needs: Sequence[Collection[str]], where: Mapping[str, Sequence[int]], machines: Machines
) -> list[Transfer]:
    """Returns the transfers after which each machine has the files that its ranks need.

    The order is the same on all ranks. Work is balanced over the machines that have a file, and
    their ranks.

    Args:
        needs: names of the files that each rank needs.
        where: the machines that have each file, by file name.
        machines: ranks of each machine.
    """
    found: list[Transfer] = []
    for number, ranks in enumerate(machines.ranks):
        wanted = {name: rank for rank in reversed(ranks) for name in needs[rank]}
        for name in sorted(wanted):
            holders = where[name]
            if number not in holders:
                source = machines.ranks[holders[number % len(holders)]]
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
        found: the copy.
        place: this run's folder in memory.
        machines: ranks of each machine.
        topology: ranks of the run.
        wanted: the records that this rank reads.
        buffers: names of the buffers that this rank reads.
        load: called as `load(folder, files)`, where this rank must check the hashes of `files`.

    Returns:
        The result of `load`.

    Raises:
        CheckpointError: on every rank if any rank fails.
    """
    everyone, folder = topology.axis("world"), place.slot(found.slot)
    sizes = {entry["file"]: int(entry["size"]) for entry in found.manifest["files"]}
    same = found.manifest["topology"] == topology.sizes
    with Reader(folder, found.manifest) as reader:
        needed = reader.files_of(wanted, buffers, topology.rank if same else None)
    names = list(sizes)
    numbers = [number for number, name in enumerate(names) if name in needed]
    needs = [[names[n] for n in some] for some in collectives.exchange(numbers, everyone)]
    moves = transfers(needs, found.where, machines)
    here = machines.ranks[machines.mine]
    try:
        incoming = sum(sizes[move.file] for move in moves if move.target in here)
        problem = _begin(place, folder, found.manifest, incoming) if machines.first else ""
        collectives.raise_together([problem], everyone, CheckpointError)
        problems = [_move(move, folder / move.file, sizes[move.file], topology) for move in moves]
        collectives.raise_together(problems, everyone, CheckpointError)
        local_needs = sorted({name for rank in here for name in needs[rank]})
        return load(folder, set(local_needs[here.index(topology.rank) :: len(here)]))
    except CheckpointError:  # raised on all ranks; frees memory that loading an older copy may need
        for move in moves:
            if move.target == topology.rank:
                (folder / move.file).unlink(missing_ok=True)
        raise


def _begin(place: Place, folder: Path, manifest: Mapping[str, Any], incoming: int) -> str:
    """Checks the free memory, and writes the manifest next to the files of the copy.

    Args:
        place: this run's folder in memory, which contains the slots.
        folder: the copy's slot, a subfolder of `place`.
        manifest: manifest of the copy.
        incoming: size of the files that this machine lacks, in bytes.

    Returns:
        An error text, or "".
    """
    if (free := shutil.disk_usage(place.home).free) < incoming:
        what = f"{in_units(incoming)} must be received from other machines"
        return f"{what}, but {in_units(free)} are free in {place.home}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).write_text(json.dumps(manifest))
    except OSError as error:
        return str(error)
    return ""


def _move(move: Transfer, path: Path, size: int, topology: Topology) -> str:
    """Sends or receives a file if this rank takes part; returns an error text, or ""."""
    everyone = topology.axis("world")
    if topology.rank == move.source:
        return send_file(path, size, Link(move.target, everyone), topology.device)
    if topology.rank == move.target:
        return receive_file(path, size, Link(move.source, everyone), topology.device)
    return ""
