"""Are copies still copies? Ranks that hold the same weights and moments compare hashes of the bits.

    check(optimizer, topology, step)    ReplicaError on every rank, naming the ranks that differ; collective
    compared(optimizer)       bytes that this rank holds copies of, and bytes that it holds alone

Copies are: under stage 0 everything on all data ranks; with `zero.shard-size` the slices of different groups (HSDP);
parameters that stay whole (stages 0 to 2) on all data ranks; weights that every tensor rank has, such as norms; weights
tied over pipeline stages. What only one rank holds has nothing to be compared with. Phases: a number for each group of
parameters and part of its state · an all-gather along each axis · where they differ, the same for each parameter of the
group. The hash is the sum of all bit patterns times odd numbers that differ by place, modulo 2^64: a change of one
element always changes it.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed import collectives
from threed.device import start_copy_in
from threed.topology import Axis, Topology
from threed.zero.layout import Group
from threed.zero.optimizer import Optimizer
from threed.zero.state import WEIGHT, State, drop_all, fetched_in_turn

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECE = 2**20  # elements at once
FACTOR = 6364136223846793005  # odd, so that nothing is lost modulo 2^64
PARAMETERS, BEFORE = "parameters", "parameters of the version before"


class ReplicaError(RuntimeError):
    """Ranks that should hold the same values do not; the same on every rank."""


# what it is of, the ranks in the minority, all that hold it
Difference = tuple[str, list[int], list[int]]


@dataclass(frozen=True)
class Copied:
    """Values of a group of parameters that this rank holds: a part of its state, or the parameters themselves.

    axes: along which other ranks hold copies. names, hashes: of its parameters, int64 [k].
    """

    group: Group
    part: str
    axes: tuple[Axis, ...]
    names: tuple[str, ...]
    hashes: Tensor
    nbytes: int


def fingerprint(values: Tensor) -> Tensor:
    """Returns the hash of a tensor's bits, an int64 scalar on its device; memory of 2^20 elements is taken."""
    bits = values.detach().reshape(-1)
    bits = bits.view(INTEGERS[bits.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    odd = 2 * torch.arange(min(PIECE, bits.numel()), dtype=torch.int64, device=bits.device) + 1
    for piece in bits.split(PIECE):
        total = total * FACTOR + (piece.to(torch.int64) * odd[: piece.numel()]).sum()
    return total


def check(optimizer: Optimizer, topology: Topology, step: int) -> None:
    """Compares all copies after a step. ReplicaError on every rank where any differ. Collective; the host waits for the
    device."""
    optimizer.wait()
    held = list(_held(optimizer))
    found = [
        text
        for axis in topology.shared_axes()
        for text in _differences(held, axis, topology.device)
    ]
    everyone = collectives.exchange([found, socket.gethostname()], topology.axis("world"))
    problems = [problem for some, _ in everyone for problem in some]
    if problems:
        raise ReplicaError(f"step {step}: {_told(problems, [host for _, host in everyone])}")


def compared(optimizer: Optimizer) -> tuple[int, int]:
    """Returns the bytes of weights and moments that this rank holds copies of, and of those that it alone holds."""
    optimizer.wait()
    sizes = Counter[bool]()
    for one in _held(optimizer):
        sizes[any(axis.size > 1 for axis in one.axes)] += one.nbytes
    return sizes[True], sizes[False]


# ---------------------------------------------------------------------------------------------------------- what it is


def _held(optimizer: Optimizer) -> Iterator[Copied]:
    """Yields what this rank holds, group by group, in an order that all ranks of an axis share."""
    # The optimizer's states are in the order of updates, which pipeline stages do not share.
    states = {state.bucket: state for state in (*optimizer.states, *optimizer.frozen)}
    for group in optimizer.layout.groups:
        if not group.sliced:
            yield _whole(group, PARAMETERS, group.params)
            if group.previous is not group.params:
                yield _whole(group, BEFORE, group.previous)
        yield from _slices(group, [states[bucket] for bucket in group.buckets if bucket in states])


def _whole(group: Group, part: str, buffer: Tensor) -> Copied:
    axes = (*group.copies, group.shard, group.holders)
    names = tuple(slot.spec.name for slot in group.slots)
    hashes = torch.stack([fingerprint(group.view(slot, buffer)) for slot in group.slots])
    return Copied(group, part, axes, names, hashes, buffer.nbytes)


def _slices(group: Group, states: Sequence[State]) -> Iterator[Copied]:
    """Yields the parts of the state of a group that are not its parameters themselves, or are sliced."""
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
            yield Copied(group, part, group.copies, names, torch.stack(hashes), sum(sizes))


# ----------------------------------------------------------------------------------------------------------- comparing


def _differences(held: Sequence[Copied], axis: Axis, device: torch.device) -> list[Difference]:
    """Returns what differs first along an axis, if anything does. Collective."""
    own = [one for one in held if any(other is axis for other in one.axes)]
    if not own or axis.size == 1:
        return []
    hashes = torch.cat([start_copy_in(one.hashes, device) for one in own])
    rows = collectives.all_gather(hashes, axis).view(axis.size, -1)
    columns = (rows != rows[0]).any(0).nonzero().flatten().tolist()
    names = [f"{name} ({one.part})" for one in own for name in one.names]
    return [
        (
            names[column],
            [axis.ranks[n] for n in _odd_ones(rows[:, column].tolist())],
            list(axis.ranks),
        )
        for column in columns[:1]
    ]


def _odd_ones(values: Sequence[int]) -> list[int]:
    """The places of what is not as the majority; all places where there is none."""
    (value, most), *_ = Counter(values).most_common(1)
    return [n for n, other in enumerate(values) if other != value or 2 * most <= len(values)]


def _told(problems: Sequence[Difference], hosts: Sequence[str]) -> str:
    """The message. Where a value has copies along several axes, the ranks that every one of them suspects."""
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
        text = f"ranks {named} hold different values, and two copies do not tell which is right"
    return f"copies of {what} differ: {text}; take the machine out, and go on from the newest checkpoint"
