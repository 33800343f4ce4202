"""The optimizer's states: where they are stored, and how they are read and written.

    state = new_state(bucket, policy)                 the state of one bucket
    reads = ((state, state.fetch(parts)) for state in states)
    for state, buffers in fetched_in_turn(reads):     buffers: name of a part -> its staged buffer
        weight = buffers["weight"].wait()             [n]
    for record, values in read_records(optimizer, records(optimizer)):
        values                                        [*record.piece.size]

A state belongs to this rank's portion of a bucket. It has several parts: the weight, and the
tensors of the update rule (moments). Each part is a flat tensor [n], which contains pieces (boxes)
of several global tensors, one after the other (`Piece`). A `Record` is one piece in one part.

While the caller uses one state, the next state is read in the background.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from threed.distributed.sharding import Piece
from threed.memory.sizes import UPDATES_AHEAD
from threed.memory.tiers import Copied, InMemory, OnDrive, StagedBuffer, Storage, memory_tier
from threed.zero.layout import Bucket, Layout, Policy
from threed.zero.reductions import later_sums

WEIGHT = "weight"
Initial = Callable[[Piece], Tensor]
# Name of the part with parameters that are one update older than the weights (2BW, delayed updates)
PREVIOUS = "previous"
GRADIENT, PARAMETER = "gradient", "parameter"  # names of the other staged buffers of an update


@dataclass(eq=False)
class State:
    """The optimizer's state for this rank's portion of a bucket.

    It has several parts, each a flat tensor [n]: the weights, and the tensors of the update rule
    (moments). The weights are the parameters themselves if three conditions hold: the parameters
    are fp32 or fp64, they are on the optimizer's device, and updates are not delayed. Otherwise the
    weights are separate master weights. The state of a frozen bucket has only one part: the
    parameters, in their own dtype.

    Attributes:
        bucket: the bucket.
        storages: name of each part -> its storage. The names are "weight" and the names of the
            update rule's tensors. A state with parameters that are one update older than the
            weights has only the part "previous".
    """

    bucket: Bucket
    storages: dict[str, Storage]

    @property
    def weight(self) -> Storage:
        """The storage of the weights; trained weights are fp32 or fp64."""
        return self.storages[WEIGHT]

    @property
    def shared(self) -> bool:
        """Whether the weights are the parameters themselves, not separate master weights."""
        return self.weight is self.bucket.portion

    @property
    def changed(self) -> tuple[Storage, ...]:
        """The storages that an update writes: all parts, and the parameters if not `shared`."""
        return (*self.storages.values(), *(() if self.shared else (self.bucket.portion,)))

    def fetch(self, parts: Iterable[str]) -> dict[str, StagedBuffer]:
        """Begins to read some parts of the state.

        Returns:
            Name of each part -> its staged buffer.
        """
        return _fetch_all({part: self.storages[part] for part in parts})

    def fetch_for_update(self, gradient: Storage) -> dict[str, StagedBuffer]:
        """Begins to read all parts and the gradient, for an update on the weights' device.

        Args:
            gradient: storage of the gradient. If it is on another device, it is copied.

        Returns:
            Name of each part -> its staged buffer. The name of the gradient is "gradient".
        """
        found = _fetch_all({**self.storages, GRADIENT: gradient})
        if gradient.device != self.weight.device:
            found[GRADIENT] = Copied(found[GRADIENT], self.weight.device)
        return found

    def records(self, parts: Sequence[str] | None = None) -> Iterator[Record]:
        """Yields the records of the state, in buffer order: for each piece, one record per part.

        Args:
            parts: names of the parts to include; by default all parts.
        """
        wanted = [part for part in self.storages if parts is None or part in parts]
        for run in self.bucket.runs():
            for piece in run.pieces():
                yield from (Record(part, piece, self) for part in wanted)


@dataclass(frozen=True, eq=False)
class Record:
    """A piece of a global tensor in one part of a state.

    Attributes:
        part: name of the part: "weight", or the name of a tensor of the update rule.
        piece: the piece; `piece.offset` is its position in the part's flat tensor, in elements.
        state: the state that contains the part.
        owned: whether this rank saves the piece. If several ranks hold replicas of the piece, only
            one of them saves it.
        dtype: dtype of the part.
        nbytes: bytes of the piece.
    """

    part: str
    piece: Piece
    state: State

    @property
    def owned(self) -> bool:
        return self.state.bucket.group.owned

    @property
    def dtype(self) -> torch.dtype:
        return self.state.storages[self.part].dtype

    @property
    def nbytes(self) -> int:
        return self.piece.numel * self.dtype.itemsize

    def of(self, slice_: Tensor) -> Tensor:
        """Returns the values of the piece, [*piece.size], as a view of the part's tensor.

        Args:
            slice_: flat tensor of the part, [n].
        """
        piece = self.piece
        return slice_[piece.offset : piece.offset + piece.numel].view(piece.size)


class Consistency:
    """Tracks whether all states belong to the same step.

    Attributes:
        initial: function from a piece to its initial weights, so that they can be computed again.
            None if any value may differ from its initial value.
    """

    def __init__(self) -> None:
        self.initial: Initial | None = None
        self._inconsistent, self._depth = False, 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context manager that marks the states as inconsistent while the block changes them.

        If the block raises an error, the states stay inconsistent until a later `changing` block,
        such as the block of a load, ends without error.
        """
        self._inconsistent, self._depth, self.initial = True, self._depth + 1, None
        try:
            yield
        finally:
            self._depth -= 1
        self._inconsistent = self._depth > 0

    def invalidate(self) -> None:
        """Marks the states as inconsistent until a checkpoint is loaded."""
        self._inconsistent = True

    def mark_initialized(self, initial: Initial) -> None:
        """Records that all values are initial values, and that `initial` can compute them again."""
        self.initial = initial

    def mark_changed(self) -> None:
        """Records that some values are no longer initial values."""
        self.initial = None

    def check(self) -> None:
        """Checks that the states are consistent.

        Raises:
            RuntimeError: a change of the states was interrupted.
        """
        if self._inconsistent:
            raise RuntimeError(
                "an update or a load was interrupted (see the first error): some values are one step older than others,"
                " and training or saving would mix them; load a checkpoint"
            )


class Readers:
    """The asynchronous saves that still read states.

    Before an update changes a state, it waits until no save needs the state's old values.
    """

    def __init__(self) -> None:
        self._waits: dict[str, Callable[[State], None]] = {}

    def add(self, purpose: str, wait: Callable[[State], None]) -> None:
        """Adds a save. It replaces the earlier save with the same purpose.

        Args:
            purpose: "disk" or "memory".
            wait: function of a state; it blocks until the save no longer needs the state's values.
        """
        self._waits[purpose] = wait

    def wait(self, state: State) -> None:
        """Waits until no save needs the current values of a state, so that they may change."""
        for wait in self._waits.values():
            wait(state)


def fetched_in_turn(
    wanted: Iterable[tuple[State, dict[str, StagedBuffer]]],
) -> Generator[tuple[State, dict[str, StagedBuffer]]]:
    """Yields (state, buffers) pairs in order, and reads the next pair while one pair is in use.

    Args:
        wanted: the pairs, created lazily. Taking a pair from this iterable starts the reads into
            the pair's buffers.
    """
    ahead: deque[tuple[State, dict[str, StagedBuffer]]] = deque()
    try:
        for pair in wanted:
            ahead.append(pair)
            if len(ahead) > UPDATES_AHEAD:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()
    finally:  # if the caller stops early, the buffers of the next states are released
        for _, buffers in ahead:
            drop_all(buffers)


class HoldsStates(Protocol):
    """The part of `Optimizer` that the functions below use."""

    layout: Layout
    states: list[State]
    frozen: list[State]
    earlier: list[State]
    consistency: Consistency

    def wait(self) -> None: ...

    def staged(
        self, state: State, parts: Iterable[str], write: bool = False, publish: bool = True
    ) -> AbstractContextManager[dict[str, Tensor]]: ...

    def overwriting(self, everything: bool) -> AbstractContextManager[None]: ...


def states_of(optimizer: HoldsStates) -> list[State]:
    """Returns all states of this rank: the optimizer's `states`, `frozen` and `earlier`."""
    return [*optimizer.states, *optimizer.frozen, *optimizer.earlier]


def records(optimizer: HoldsStates, parts: Sequence[str] | None = None) -> Iterator[Record]:
    """Yields the records of all states of this rank, in buffer order; see `State.records`."""
    for state in states_of(optimizer):
        yield from state.records(parts)


def read_records(
    optimizer: HoldsStates, wanted: Iterable[Record]
) -> Iterator[tuple[Record, Tensor]]:
    """Waits for the last update, and yields each record with the values of its piece, [*piece.size].

    The values are views of the states' buffers, and are only valid until the next iteration.

    Args:
        optimizer: the optimizer that holds the states.
        wanted: the records to read. Records of the same state must be consecutive.
    """
    optimizer.wait()
    by_state = [(state, list(some)) for state, some in groupby(wanted, key=lambda one: one.state)]
    fetched = (
        (state, state.fetch(dict.fromkeys(record.part for record in some)))
        for state, some in by_state
    )
    for (_, buffers), (_, some) in zip(fetched_in_turn(fetched), by_state, strict=True):
        try:
            for record in some:
                yield record, record.of(buffers[record.part].wait())
        finally:
            drop_all(buffers)


def fill_states(
    optimizer: HoldsStates,
    write: Callable[[str, Piece, Tensor], None],
    parts: Sequence[str] | None = None,
) -> None:
    """Sets the values of this rank's pieces of all states, and gathers the parameters. Collective.

    If there are two versions of the parameters (2BW) and `parts` is given, the previous version
    becomes a copy of the newest version.

    Args:
        optimizer: the optimizer that holds the states.
        write: `write(part, piece, out)` is called for every piece of every part, and writes the
            values to `out` [*piece.size].
        parts: names of the parts to set; by default all parts.
    """
    late = parts is None and optimizer.layout.policy.delayed
    with optimizer.overwriting(everything=parts is None):
        for state in states_of(optimizer):
            wanted = [part for part in state.storages if parts is None or part in parts]
            publish = not (late and state.bucket.group.key.trainable)
            with optimizer.staged(state, wanted, write=True, publish=publish) as values:
                for record in state.records(parts):
                    write(record.part, record.piece, record.of(values[record.part]))


def initialize_states(
    optimizer: HoldsStates, initial: Initial, again: bool, everything: bool = False
) -> None:
    """Sets the weights to their initial values. Collective.

    Args:
        optimizer: the optimizer that holds the states.
        initial: function from a piece to its initial values.
        again: whether to keep `initial` after this call, so that it can compute the initial weights
            again after a failed load.
        everything: whether to set all parts other than weights to 0, as in a new optimizer. If
            False, these parts are left unchanged.
    """

    def write(part: str, piece: Piece, out: Tensor) -> None:
        out.copy_(initial(piece)) if part in (WEIGHT, PREVIOUS) else out.zero_()

    fill_states(optimizer, write, None if everything else (WEIGHT,))
    if again:
        optimizer.consistency.mark_initialized(initial)


def drop_all(buffers: dict[str, StagedBuffer]) -> None:
    """Releases the buffers without writing their values, and empties the dict."""
    while buffers:
        buffers.popitem()[1].drop()


def store_all(buffers: dict[str, StagedBuffer]) -> None:
    """Begins to write the buffers' values to their storages, and empties the dict."""
    while buffers:
        # removed from the dict before `store`, because `drop_all` must not drop the buffer again if
        # `store` fails
        buffers.popitem()[1].store()


def _fetch_all(storages: Mapping[str, Storage]) -> dict[str, StagedBuffer]:
    """Begins to read every storage; releases all buffers if an error is raised."""
    buffers: dict[str, StagedBuffer] = {}
    try:
        for part, storage in storages.items():
            buffers[part] = storage.fetch()
    except BaseException:
        drop_all(buffers)
        raise
    return buffers


def new_state(bucket: Bucket, policy: Policy) -> State:
    """Returns a new state of a bucket, stored on the policy's tier for optimizer states.

    Weights and parameters share memory (`State.shared`) if they are on the same device, parameters
    are fp32 or fp64, and updates are not delayed. With delayed updates they cannot share memory,
    because layers still use the old parameters while an update changes the weights.
    """
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


def forecast_states(layout: Layout, states: Sequence[State]) -> list[State]:
    """Returns all states that a rank will save, to forecast memory before training.

    These are `states`, the frozen parameters, and the previous weights if the run keeps previous
    weights (schedule 2bw, delayed updates).

    Args:
        layout: layout of this rank's parameters.
        states: optimizer states of this rank's trained parameters.
    """
    more = [State(bucket, {WEIGHT: bucket.storage}) for bucket in layout.frozen]
    if layout.policy.versions > 1 or layout.policy.delayed:
        more += [State(bucket, {PREVIOUS: bucket.storage}) for bucket in layout.buckets]
    return [*states, *more]


def early_storages(state: State) -> list[OnDrive]:
    """Returns the storages that an update during the backward writes.

    The list is empty if the bucket cannot be updated during the backward. Such an update requires
    that the bucket's parameters are sharded, that its gradient needs no sum at the end of the step
    (`later_sums`), and that all storages that the update writes are on a drive.
    """
    found = [storage for storage in state.changed if isinstance(storage, OnDrive)]
    complete_early = state.bucket.group.sliced and not later_sums(state.bucket)
    return found if complete_early and len(found) == len(state.changed) else []


def _places(layout: Layout, states: Sequence[State]) -> Iterator[tuple[str, Storage, bool]]:
    """Yields (category, storage, offloaded) for parameters, gradients and optimizer states.

    `offloaded` is whether the policy has an offload tier for values of this category.
    """
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
    """Returns the tensors of all parameters, gradients and optimizer states that are in memory."""
    return [s.tensor for _, s, _ in _places(layout, states) if isinstance(s, InMemory)]


def holdings(layout: Layout, states: Sequence[State], beside_gpu: bool) -> dict[str, int]:
    """Returns the bytes of parameters, gradients, optimizer states and offloaded values.

    Memory that several tensors share counts once. On a drive, all reserved bytes count.

    Args:
        layout: layout with the parameters and gradients.
        states: states of the optimizer.
        beside_gpu: whether layers run on a GPU. If so, values in host memory count as offloaded.

    Returns:
        Bytes by category: "parameters", "gradients" and "optimizer" for values on the device, and
        "offloaded" for all other values.
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
