"""Checks that replicated weights and optimizer states are bit-identical across ranks.

    check(optimizer, topology, step)    raises ReplicaError on every rank if replicas differ, naming
                                        the ranks that deviate; collective
    compared(optimizer)                 returns the number of bytes of this rank's values that have
                                        replicas on other ranks, and the number of all other bytes

The following values are replicated:

- under stage 0: everything, on all data ranks;
- with `zero.shard-size`: slices, on the ranks with the same index in each shard group (HSDP);
- parameters that are not sharded (stages 0 to 2): on all data ranks;
- weights that every tensor rank has, such as weights of norms: on all tensor ranks;
- weights tied over pipeline stages: on these stages.

Values that only one rank holds cannot be checked.

A check computes a hash of each parameter, and of each part of its optimizer state. Ranks all-gather
the hashes along each axis and compare them. The hash multiplies each element's bit pattern by an
odd number that depends on the element's position, and sums the products modulo 2^64. So changing
one element always changes the hash.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.core.device import start_copy_in
from threed.distributed import collectives
from threed.distributed.topology import Axis, Topology
from threed.zero.layout import Group
from threed.zero.optimizer import Optimizer
from threed.zero.state import WEIGHT, State, drop_all, fetched_in_turn

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECE = 2**20  # number of elements that are hashed at a time, to limit temporary memory
FACTOR = 6364136223846793005  # odd, so that multiplication modulo 2^64 is invertible
PARAMETERS, BEFORE = "parameters", "parameters of the version before"


class ReplicaError(RuntimeError):
    """Replicas differ between ranks. The message is the same on every rank."""


# (name of the value, ranks that deviate from the majority, all ranks that hold a replica)
Difference = tuple[str, list[int], list[int]]


@dataclass(frozen=True)
class GroupHashes:
    """Hashes of a group's parameters, or of one part of its optimizer state, on this rank.

    Attributes:
        group: the group.
        part: `PARAMETERS`, `BEFORE` (previous values of the parameters, if the run keeps them), or
            the name of a part of the optimizer state.
        axes: axes over which the values are replicated.
        names: names of the k values that are hashed: parameters or pieces of parameters.
        hashes: one hash per name, int64 [k].
        nbytes: bytes of all hashed values.
    """

    group: Group
    part: str
    axes: tuple[Axis, ...]
    names: tuple[str, ...]
    hashes: Tensor
    nbytes: int


def fingerprint(values: Tensor) -> Tensor:
    """Returns the hash of a tensor's bits, an int64 scalar on the tensor's device.

    The values are hashed in pieces of 2^20 elements, to limit temporary memory.
    """
    bits = values.detach().reshape(-1)
    bits = bits.view(INTEGERS[bits.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    odd = 2 * torch.arange(min(PIECE, bits.numel()), dtype=torch.int64, device=bits.device) + 1
    for piece in bits.split(PIECE):
        total = total * FACTOR + (piece.to(torch.int64) * odd[: piece.numel()]).sum()
    return total


def check(optimizer: Optimizer, topology: Topology, step: int) -> None:
    """Compares all replicas after a step. Collective.

    The host waits for the device, which computes the hashes.

    Args:
        optimizer: the optimizer that holds the states.
        topology: the process topology.
        step: number of the step, for the error message.

    Raises:
        ReplicaError: replicas differ; raised on every rank.
    """
    optimizer.wait()
    hashed = list(_group_hashes(optimizer))
    found = [
        text
        for axis in topology.shared_axes()
        for text in _differences(hashed, axis, topology.device)
    ]
    everyone = collectives.exchange([found, socket.gethostname()], topology.axis("world"))
    problems = [problem for some, _ in everyone for problem in some]
    if problems:
        raise ReplicaError(f"step {step}: {_message(problems, [host for _, host in everyone])}")


def compared(optimizer: Optimizer) -> tuple[int, int]:
    """Counts the bytes of this rank's values, with and without replicas on other ranks.

    Returns:
        (replicated, unique): bytes of the values that have replicas on other ranks, and bytes of
        the values that only this rank holds.
    """
    optimizer.wait()
    sizes = Counter[bool]()
    for entry in _group_hashes(optimizer):
        sizes[any(axis.size > 1 for axis in entry.axes)] += entry.nbytes
    return sizes[True], sizes[False]


# ---------------------------------------------------------------------------------------------------------- hashing


def _group_hashes(optimizer: Optimizer) -> Iterator[GroupHashes]:
    """Yields the hashes of all values, in an order that is the same on all ranks of an axis."""
    # The order of groups is the same on all ranks. `optimizer.states` is in the order in which the
    # backward completes buckets, which differs between pipeline stages.
    states = {state.bucket: state for state in (*optimizer.states, *optimizer.frozen)}
    for group in optimizer.layout.groups:
        if not group.sliced:
            yield _full_parameters(group, PARAMETERS, group.params)
            if group.previous is not group.params:
                yield _full_parameters(group, BEFORE, group.previous)
        yield from _slices(group, [states[bucket] for bucket in group.buckets if bucket in states])


def _full_parameters(group: Group, part: str, buffer: Tensor) -> GroupHashes:
    axes = (*group.copies, group.shard, group.holders)
    names = tuple(slot.spec.name for slot in group.slots)
    hashes = torch.stack([fingerprint(group.view(slot, buffer)) for slot in group.slots])
    return GroupHashes(group, part, axes, names, hashes, buffer.nbytes)


def _slices(group: Group, states: Sequence[State]) -> Iterator[GroupHashes]:
    """Yields hashes of a group's states, except weights that `_full_parameters` has hashed."""
    parts = list(states[0].storages) if states else []
    found: dict[str, list[tuple[str, Tensor, int]]] = {part: [] for part in parts}
    fetched = ((state, state.fetch(parts)) for state in states)
    for state, buffers in fetched_in_turn(fetched):
        for part in parts:
            values = buffers[part].wait()
            for run in state.bucket.runs():
                own = values[run.offset : run.offset + run.last - run.first]
                found[part].append((run.piece.name, fingerprint(own), own.nbytes))
        drop_all(buffers)
    for part, runs in found.items():
        if runs and not (part == WEIGHT and states[0].shared and not group.sliced):
            names, hashes, sizes = zip(*runs, strict=True)
            yield GroupHashes(group, part, group.copies, names, torch.stack(hashes), sum(sizes))


# ----------------------------------------------------------------------------------------------------------- comparison


def _differences(
    hashed: Sequence[GroupHashes], axis: Axis, device: torch.device
) -> list[Difference]:
    """Compares the hashes of the ranks of an axis. Collective.

    Returns:
        A list with the first difference, or an empty list.
    """
    own = [entry for entry in hashed if any(other is axis for other in entry.axes)]
    if not own or axis.size == 1:
        return []
    hashes = torch.cat([start_copy_in(entry.hashes, device) for entry in own])
    rows = collectives.all_gather(hashes, axis).view(axis.size, -1)
    columns = (rows != rows[0]).any(0).nonzero().flatten().tolist()
    names = [f"{name} ({entry.part})" for entry in own for name in entry.names]
    return [
        (
            names[column],
            [axis.ranks[n] for n in _minority(rows[:, column].tolist())],
            list(axis.ranks),
        )
        for column in columns[:1]
    ]


def _minority(values: Sequence[int]) -> list[int]:
    """Returns the indices of values that deviate from the majority; all if there is no majority."""
    (value, most), *_ = Counter(values).most_common(1)
    return [n for n, other in enumerate(values) if other != value or 2 * most <= len(values)]


def _message(problems: Sequence[Difference], hosts: Sequence[str]) -> str:
    """Returns the error message.

    The message names the first value that differs, and the ranks that deviate. If the value differs
    along several axes, these are the ranks that deviate along all of the axes.
    """
    what = problems[0][0]
    same = [(set(odd), set(ranks)) for name, odd, ranks in problems if name == what]
    suspects = set.intersection(*(odd for odd, _ in same))
    ranks = set.union(*(ranks for _, ranks in same))
    suspects = suspects or set.union(*(odd for odd, _ in same))
    others = ", ".join(str(rank) for rank in sorted(ranks - suspects))
    named = ", ".join(f"{rank} ({hosts[rank]})" for rank in sorted(suspects))
    one = len(suspects) == 1
    if others:
        text = f"rank{'' if one else 's'} {named} ha{'s' if one else 've'} other values than ranks {others}"
    else:
        text = f"ranks {named} hold different values, and two replicas cannot show which is right"
    return f"replicas of {what} differ: {text}; remove the machine and resume from the newest checkpoint"
