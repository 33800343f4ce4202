"""The optimizer's state of what a rank updates of each bucket: where it is stored, and how it is read and written.

state = new_state(bucket, policy)
for state, buffers in fetched_in_turn((state, state.fetch(parts)) for state in states):    reads ahead by one
    buffers["weight"].wait()                                                               [n]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.memory.tiers import Copied, InMemory, OnDrive, StagedBuffer, Storage, memory_tier
from threed.planner.memory import UPDATES_AHEAD
from threed.sharding import Piece
from threed.zero.layout import Bucket, Layout, Policy
from threed.zero.reductions import later_sums

WEIGHT = "weight"
Initial = Callable[[Piece], Tensor]
PREVIOUS = "previous"  # parameters one update older than the weights, under 2bw and delayed updates
GRADIENT, PARAMETER = "gradient", "parameter"  # what an update stages besides a bucket's state


@dataclass(eq=False)
class State:
    """The optimizer's state of a portion [n] of a bucket: the weights it updates, and the tensors of its rule (its
    moments).

    The weights are the parameters themselves unless parameters are narrower than fp32, or frozen, or the optimizer
    works on another device.
    """

    bucket: Bucket
    storages: dict[str, Storage]

    @property
    def weight(self) -> Storage:
        """The storage of the master weights, at least fp32."""
        return self.storages[WEIGHT]

    @property
    def shared(self) -> bool:
        """Whether the weights are the parameters themselves."""
        return self.weight is self.bucket.portion

    @property
    def changed(self) -> tuple[Storage, ...]:
        """What an update changes: the state, and the parameters where they are narrower."""
        return (*self.storages.values(), *(() if self.shared else (self.bucket.portion,)))

    def fetch(self, parts: Iterable[str]) -> dict[str, StagedBuffer]:
        """Begins to read some parts."""
        return _fetch_all({part: self.storages[part] for part in parts})

    def fetch_for_update(self, gradient: Storage) -> dict[str, StagedBuffer]:
        """Begins to read all parts, and a slice of gradients to the device of the weights."""
        found = _fetch_all({**self.storages, GRADIENT: gradient})
        if gradient.device != self.weight.device:
            found[GRADIENT] = Copied(found[GRADIENT], self.weight.device)
        return found


class Consistency:
    """Whether all states are of the same step.

    Attributes:
        initial: returns the initial weights of a piece, while all values are those of the
            initialisation; else None.
    """

    def __init__(self) -> None:
        self.initial: Initial | None = None
        self._broken, self._depth = False, 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Marks the states as inconsistent while the block changes them.

        If it raises they stay so, until a block that overwrites them has ended.
        """
        self._broken, self._depth, self.initial = True, self._depth + 1, None
        try:
            yield
        finally:
            self._depth -= 1
        self._broken = self._depth > 0

    def invalidate(self) -> None:
        """Marks the states as inconsistent, until a load."""
        self._broken = True

    def mark_initialised(self, initial: Initial) -> None:
        """Records that all values are those of the initialisation, which can be repeated."""
        self.initial = initial

    def mark_changed(self) -> None:
        """Records that some values are not those of the initialisation."""
        self.initial = None

    def check(self) -> None:
        """Raises RuntimeError if a change of the states was interrupted."""
        if self._broken:
            raise RuntimeError(
                "an update, or a load, broke off (see the first error): some values are a step older than others, and"
                " training on, or saving, would mix them; load a checkpoint"
            )


class Readers:
    """The asynchronous saves that still read states: an update waits for them, state by state."""

    def __init__(self) -> None:
        self._waits: dict[str, Callable[[State], None]] = {}

    def add(self, purpose: str, wait: Callable[[State], None]) -> None:
        """Adds a save, in place of the earlier one for the same purpose.

        Args:
            purpose: "disk" or "memory".
            wait: returns when a state may change.
        """
        self._waits[purpose] = wait

    def wait(self, state: State) -> None:
        """Waits until a state may change."""
        for wait in self._waits.values():
            wait(state)


def fetched_in_turn(
    wanted: Iterable[tuple[State, dict[str, StagedBuffer]]],
) -> Generator[tuple[State, dict[str, StagedBuffer]]]:
    """Yields each state with its buffers, in turn; the reads of the next one are in flight meanwhile."""
    ahead: deque[tuple[State, dict[str, StagedBuffer]]] = deque()
    try:
        for both in wanted:
            ahead.append(both)
            if len(ahead) > UPDATES_AHEAD:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()
    finally:  # also when the caller stops early: releases the buffers it did not get to
        for _, buffers in ahead:
            drop_all(buffers)


def drop_all(buffers: dict[str, StagedBuffer]) -> None:
    """Releases the buffers without writing them, and empties the dict."""
    while buffers:
        buffers.popitem()[1].drop()


def store_all(buffers: dict[str, StagedBuffer]) -> None:
    """Begins to write the buffers to their storages, and empties the dict."""
    while buffers:  # a buffer is removed even if it cannot be stored: an error must not lead to a second attempt
        buffers.popitem()[1].store()


def _fetch_all(storages: Mapping[str, Storage]) -> dict[str, StagedBuffer]:
    """Fetches every storage; on an error it releases all buffers."""
    buffers: dict[str, StagedBuffer] = {}
    try:
        for part, storage in storages.items():
            buffers[part] = storage.fetch()
    except BaseException:
        drop_all(buffers)
        raise
    return buffers


def new_state(bucket: Bucket, policy: Policy) -> State:
    """Returns a bucket's state, on the tier that the policy names. On one device weights and parameters share memory,
    unless parameters are narrower than fp32, or in use while the weights are updated."""
    device = bucket.group.params.device
    tier = policy.optimizer_tier or memory_tier(device)
    params, n = bucket.portion, bucket.updates
    full_precision = params.dtype in (torch.float32, torch.float64)
    same_device = params.device == (policy.host if policy.optimizer_tier else device)
    dtype = params.dtype if full_precision else torch.float32
    weight = params if full_precision and same_device and not policy.delayed else tier(n, dtype)
    parts = bucket.group.key.options.rule.state_names
    state = State(bucket, {WEIGHT: weight, **{part: tier(n, dtype) for part in parts}})
    for storage in early_storages(state) if policy.early else ():
        storage.double()
    return state


def early_storages(state: State) -> list[OnDrive]:
    """What an update in the backward changes of a bucket; nothing where it cannot begin there: its parameters stay
    whole, its gradient is summed at the end of a step, or not all of this is on a drive."""
    found = [storage for storage in state.changed if isinstance(storage, OnDrive)]
    whole_sum = state.bucket.group.sliced and not later_sums(state.bucket)
    return found if whole_sum and len(found) == len(state.changed) else []


def _places(layout: Layout, states: Sequence[State]) -> Iterator[tuple[str, Storage, bool]]:
    """Yields what holds parameters, gradients and optimizer states, with what it is of, and whether it is in a tier."""
    params, optimizer = layout.policy.params_tier, layout.policy.optimizer_tier
    for group in layout.groups:
        yield "parameters", InMemory(group.params), False
        yield "parameters", InMemory(group.previous), False
        yield "gradients", InMemory(group.grads), False
        for bucket in group.buckets:
            yield "parameters", bucket.storage, params is not None
            yield "gradients", bucket.grad, optimizer is not None
    for state in states:
        for storage in state.storages.values():
            yield "optimizer", storage, optimizer is not None


def storages(layout: Layout, states: Sequence[State]) -> list[Tensor]:
    """Returns a tensor of every storage that parameters, gradients and optimizer states have in memory."""
    return [s.tensor for _, s, _ in _places(layout, states) if isinstance(s, InMemory)]


def holdings(layout: Layout, states: Sequence[State], beside_gpu: bool) -> dict[str, int]:
    """Returns the bytes of parameters, gradients and optimizer states on the device, and of those elsewhere
    (`offloaded`): every storage, and every region of a drive, once.

    Args:
        beside_gpu: the host's memory is elsewhere.
    """
    seen: set[int] = set()
    held = {"parameters": 0, "gradients": 0, "optimizer": 0, "offloaded": 0}
    for what, storage, in_tier in _places(layout, states):
        if isinstance(storage, InMemory):
            memory = storage.tensor.untyped_storage()
            key, nbytes, away = memory._cdata, memory.nbytes(), in_tier and beside_gpu
        else:
            assert isinstance(storage, OnDrive)
            key, nbytes, away = id(storage), storage.reserved, True
        if key not in seen:
            held["offloaded" if away else what] += nbytes
        seen.add(key)
    return held
