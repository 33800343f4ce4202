"""Loads the training state from the copies in the machines' memory.

    found = look(place, machines, epochs, everyone, device)     collective; the copies, newest first
    state = load_copy(found[0], place, machines, ...)           collective

The first rank of each machine sends its machine's entries (see `node_memory`) to rank 0. Rank 0
combines the entries of each copy into a manifest (`assemble`). A copy is complete if the files of
all machines together contain every value of the training state. All ranks receive the manifests of
the complete copies. Each rank then computes which files of a copy it needs. If the rank's machine
does not have a file, a rank of another machine sends the file. Each machine writes the manifest
next to the files of the copy, so that `native.load` can read the copy like a checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from threed.checkpoint.file_transfer import receive_file, send_file
from threed.checkpoint.files import CheckpointError, in_units
from threed.checkpoint.manifest import MANIFEST, check_structure, digest, joined
from threed.checkpoint.node_memory import Epochs, Machines, Place
from threed.checkpoint.reading import Reader
from threed.distributed import collectives
from threed.distributed.topology import Axis, Link, Topology
from threed.zero.state import Record


@dataclass(frozen=True)
class Found:
    """A copy that was found in memory; it may be incomplete.

    Attributes:
        epoch: number of the start of the run after which the copy was made; 1 for the first start
            (see `Epochs`).
        step: training step after which the copy was made.
        slot: number of the slot that contains the copy on every machine (`Place.slot`), 0 or 1.
        manifest: manifest of the copy; empty if the copy is not complete.
        where: by file name, the indices of the machines that have the file.
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
    """Returns the copies in memory that are not obsolete, newest first. Collective.

    The result is the same on all ranks. It includes incomplete copies, which cannot be loaded:
    their `problem` is not empty.

    Args:
        place: this run's folder in memory.
        machines: ranks of each machine.
        epochs: the run folder's record, which determines which copies are obsolete.
        everyone: axis of all ranks.
        device: device of the tensors that are exchanged; the process group must support it.
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
    """Combines the entries of a copy; returns [slot, manifest, where, problem] for its `Found`."""
    slot = int(Path(entries[0][1]["path"]).parent.name)
    try:
        return [slot, *assemble(entries), ""]
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        return [slot, {}, {}, str(error) or type(error).__name__]


def assemble(
    entries: Sequence[tuple[int, Mapping[str, Any]]],
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Combines the entries of a copy into its manifest.

    Args:
        entries: all entries of the copy, each as (index of the machine that has the entry, entry).

    Returns:
        (manifest, where): the manifest; and by file name, the indices of the machines that have the
        file.

    Raises:
        CheckpointError: if files are missing, or an entry is not valid.
    """
    files: dict[str, dict[str, Any]] = {}
    where: dict[str, list[int]] = {}
    # Names of the buffers found so far. Several machines may have saved the same buffer, but the
    # manifest must list each buffer only once.
    buffers = set[str]()
    for machine, entry in entries:
        for file in entry["files"]:
            name = file["file"]
            if Path(name).name != name:
                raise CheckpointError("it names a file outside its folder")
            if name not in files:
                own = [about for about in file.get("buffers", ()) if about[0] not in buffers]
                buffers |= {about[0] for about in own}
                files[name] = {**file, "buffers": own}
            # A machine whose file of this name has different contents cannot provide the file.
            if all(files[name][key] == file[key] for key in ("tree", "sum", "size")):
                where.setdefault(name, []).append(machine)
    sections = [about for _, entry in entries for about in entry["sections"]]
    head = entries[0][1]["head"]
    body = {**head, **joined([{"sections": sections, "files": files.values()}])}
    check_structure(body)
    return {**body, "sha256": digest(body)}, where


def _broadcast_json(value: Any, everyone: Axis, device: torch.device) -> Any:
    """Returns rank 0's value on every rank. Collective.

    `collectives.exchange` would send far more bytes, because it gathers a value from every rank and
    pads all values to the length of the longest.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = collectives.broadcast(torch.tensor([data.numel()], device=device), everyone, 0)
    data = data if everyone.index == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    return json.loads(collectives.broadcast(data, everyone, 0).cpu().numpy().tobytes())


# ---------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Transfer:
    """A file that a rank sends to a rank of a machine that does not have the file.

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
    """Returns the transfers that give each machine the files that its ranks need.

    All ranks compute the same transfers in the same order. If several machines have a file, the
    receivers get it from different machines and ranks, to balance the load.

    Args:
        needs: for each rank, the names of the files that the rank needs.
        where: by file name, the indices of the machines that have the file.
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
    """Loads a complete copy, after each machine has received the files that it lacks. Collective.

    Args:
        found: a copy whose `problem` is "".
        place: this run's folder in memory.
        machines: ranks of each machine.
        topology: the parallel axes of the run, and this rank's position on them.
        wanted: the records (pieces of optimizer states) that this rank reads.
        buffers: names of the buffers that this rank reads.
        load: function that loads the checkpoint in a folder. It is called as `load(folder, files)`,
            where `files` are the names of the files whose hashes this rank must check.

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
    # The error is raised on all ranks. Each rank deletes the files that it has received, because a
    # later load of an older copy may need this memory.
    except CheckpointError:
        for move in moves:
            if move.target == topology.rank:
                (folder / move.file).unlink(missing_ok=True)
        raise


def _begin(place: Place, folder: Path, manifest: Mapping[str, Any], incoming: int) -> str:
    """Checks that there is memory for the files to receive, and writes the manifest of the copy.

    Args:
        place: this run's folder in memory, which contains the slots.
        folder: the copy's slot, a subfolder of `place`.
        manifest: manifest of the copy.
        incoming: total size of the files that this machine will receive, in bytes.

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
    """Sends or receives a file if this rank takes part in the transfer.

    Args:
        move: the transfer.
        path: path of the file; the same on the sending and on the receiving machine.
        size: size of the file in bytes.
        topology: the parallel axes of the run, and this rank's position on them.

    Returns:
        An error text, or "".
    """
    everyone = topology.axis("world")
    if topology.rank == move.source:
        return send_file(path, size, Link(move.target, everyone), topology.device)
    if topology.rank == move.target:
        return receive_file(path, size, Link(move.source, everyone), topology.device)
    return ""
