"""Gathers parameters before they are used, and releases them after.

    publish(bucket)   begins to gather new values, after the optimizer has updated this rank's slice
    complete()        the same for slices of which this rank updates a portion, after it has updated all of them
    start(unit)       begins to gather the parameters of a unit
    ready(unit)       waits until they are gathered
    release(unit)     frees their memory, unless another unit still needs it

Parameters that stay whole (stages 1 and 2, small ones under stage 3) are gathered once, when they are published; this
overlaps with the beginning of the next forward, and `ready` waits for it. Sliced parameters (stage 3) are gathered at
every use, into a new buffer. The parameters stay the same objects (`zero.access`). Autograd saves positions in the
buffer, not its memory; a backward reads them from the buffer of its own gather.

Slices may be offloaded (`threed.memory.tiers`). Then a gather has two phases, both overlapped with the unit before:
reading this rank's slices, and the all-gather, which begins when the next group is requested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from threed import collectives
from threed.collectives import EXACT, Codec, Pending
from threed.device import beside, copy_stream, current_stream
from threed.memory.tiers import InMemory, StagedBuffer
from threed.sharding import storage_of
from threed.topology import Axis
from threed.zero.access import Access, Holder
from threed.zero.layout import Bucket, Group, Layout, Slot
from threed.zero.modes import unseen, without_transforms


def _aside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Hides a gather of a wrapped module's parameters from selective activation checkpointing."""

    @functools.wraps(method)
    def run(self: Gatherer, *args: Any) -> Any:
        with unseen() if self.wrapped else nullcontext():
            return method(self, *args)

    return run


class SavedView:
    """A tensor that autograd saved as a position in a group's buffer.

    slot: None for a view of a gathered buffer; a parameter that was not gathered when it was saved.
    """

    def __init__(self, group: Group, slot: Slot | None, tensor: Tensor) -> None:
        self.group, self.slot, self.dtype = group, slot, tensor.dtype
        self.place = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self) -> Tensor:
        """Returns the tensor as a view of the group's current buffer."""
        buffer = self.group.params
        if self.slot is not None:
            return self.group.view(self.slot, buffer)
        return buffer.view(self.dtype).as_strided(*self.place)


class GatheredTile:
    """Gathers one tile of a linear layer while the layer uses it (`threed.layers.slicing.TileGatherer`)."""

    def __init__(self, gatherer: Gatherer, group: Group) -> None:
        self.gatherer, self.group = gatherer, group

    def ahead(self) -> None:
        """Begins to gather the tile."""
        self.gatherer.open(self.group, Holder.TILE)

    def open(self) -> None:
        """Waits until the tile is whole."""
        self.gatherer.open(self.group, Holder.TILE)
        self.gatherer.wait(self.group)

    def close(self) -> None:
        """Frees the tile."""
        self.gatherer.close(self.group, Holder.TILE)


class Gatherer:
    """Gathers the groups of a layout.

    Args:
        layout: of the parameters.
        codec: encodes sharded parameters in gathers for layers; gathers for the program are exact.

    Attributes:
        accesses: the access to each parameter.
        by_storage: the group (and, for the placeholder of a sharded parameter, the slot) that a storage belongs to; the
            keys are those of `storage_of`.
        version: incremented when the values of sharded parameters change.
        wrapped: whether the parameters are those of a wrapped module, which the program may read
            and change.
        order: a hash of the groups that were gathered, in order; the same on all ranks.
    """

    wrapped: ClassVar[bool] = False

    def __init__(self, layout: Layout, codec: Codec = EXACT) -> None:
        self.layout, self.codec = layout, codec
        self.accesses = {
            slot: Access(self, group, slot, self.wrapped)
            for group in layout.groups
            for slot in group.slots
        }
        self.by_storage: dict[int, tuple[Group, Slot | None]] = {}
        for group in layout.groups:
            for slot in group.slots if group.sliced else ():
                self.by_storage[storage_of(slot.placeholder)] = (group, slot)
        self.version = 0
        self._published: dict[Bucket, Pending] = {}  # gathers of what stays whole
        self._buckets_of_unit: dict[int, list[Bucket]] = {}
        self._buckets_of_slot: dict[Slot, list[Bucket]] = {}
        self._groups_of_unit: dict[int, list[Group]] = {}
        # slices being read, in the order requested
        self._reading: dict[Group, list[tuple[Bucket, StagedBuffer]]] = {}
        self._gathering: dict[Group, list[Pending]] = {}
        self._exact: set[Group] = set()  # groups whose gather in progress is not encoded
        self._holders: dict[Group, set[int | Holder]] = {}
        for drive in layout.policy.drives:
            drive.on_full(self._end_gathers)
        self._number = {group: number for number, group in enumerate(layout.groups)}
        buckets = [bucket for group in layout.groups for bucket in group.buckets]
        self._held_twice = [b for b in reversed(buckets) if b.group.holders.size > 1]
        self._shows_newest = True  # else passes read the version before the gathered one
        self.order = 0
        for group in layout.groups:
            if group.key.tile is not None:
                group.slots[0].param.tile_gatherer = GatheredTile(self, group)  # type: ignore[attr-defined]
            for unit in (group.key.units or ()) if group.key.tile is None else ():
                self._groups_of_unit.setdefault(unit, []).append(group)
            for bucket in group.buckets if not group.sliced else ():
                for slot in bucket.slots():
                    self._buckets_of_slot.setdefault(slot, []).append(bucket)
                for unit in {unit for slot in bucket.slots() for unit in slot.units}:
                    self._buckets_of_unit.setdefault(unit, []).append(bucket)

    # --------------------------------------------------------------------------------------- parameters that stay whole

    def publish(self, bucket: Bucket) -> None:
        """Begins to gather the other ranks' slices of a bucket, if its parameters stay whole, and this rank's slice is:
        else `complete` does it."""
        self.version += bucket.group.sliced
        if bucket.group.holders.size == 1:
            self._publish(bucket)

    def complete(self) -> None:
        """Gathers the other pipeline ranks' portions of this rank's slices, then publishes these. Collective.

        The order is that of groups, which ranks share, from its end: what the model begins with is needed first.
        """
        begun = [
            collectives.start_all_gather(b.portion.fetch().wait(), b.group.holders, out=b.own)
            for b in self._held_twice
        ]
        for bucket, pending in zip(self._held_twice, begun, strict=True):
            pending.wait()
            self._publish(bucket)

    def _publish(self, bucket: Bucket) -> None:
        group = bucket.group
        if not group.sliced and group.shard.size > 1 and bucket.own is not None:
            window = group.params[bucket.first : bucket.last]
            self._published[bucket] = collectives.start_all_gather(
                bucket.own, group.gather, out=window
            )
            self._guard(bucket)

    def wait_for(self, slot: Slot) -> None:
        """Waits until one parameter that stays whole is gathered."""
        if self._published and self._shows_newest:
            self._wait_for(self._buckets_of_slot.get(slot, ()))

    def show(self, newest: bool) -> None:
        """Sets which version of the parameters passes read. Only the newest has gathers to wait for: parameters that
        show the version before are not guarded."""
        if newest != self._shows_newest:
            self._shows_newest = newest
            for bucket in self._published:
                self._guard(bucket)

    def _guard(self, bucket: Bucket) -> None:
        for slot in bucket.slots():
            self.accesses[slot].guard(self._shows_newest)

    def wait_all(self) -> None:
        """Waits until all parameters that stay whole are gathered."""
        self._wait_for(list(self._published))

    def _wait_for(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket in self._published:
                self._published.pop(bucket).wait()
                for slot in bucket.slots():
                    if self._published.keys().isdisjoint(self._buckets_of_slot[slot]):
                        self.accesses[slot].guard(False)

    # ------------------------------------------------------------------------------------------------ sliced parameters

    def comes_and_goes(self, unit: int) -> bool:
        """Returns whether a unit has sliced parameters."""
        return unit in self._groups_of_unit

    def start(self, unit: int) -> None:
        """Begins to gather the sliced parameters of a unit, unless they are whole or in flight."""
        for group in self._groups_of_unit.get(unit, ()):
            self.open(group, unit)

    def ready(self, unit: int) -> None:
        """Waits until all parameters of a unit are whole; first begins to gather them if `start` has not."""
        if self._published and self._shows_newest:
            self._wait_for(self._buckets_of_unit.get(unit, ()))
        for group in self._groups_of_unit.get(unit, ()):
            self.open(group, unit)
            self.wait(group)

    def release(self, unit: int) -> None:
        """Frees the sliced parameters that only this unit held."""
        for group in self._groups_of_unit.get(unit, ()):
            self.close(group, unit)

    def release_all(self) -> None:
        """Frees all sliced parameters; raises the first error of these after all are freed."""
        first: RuntimeError | None = None
        for group in list(self._holders):
            try:
                self._free(group)
            except RuntimeError as error:  # values of another shape or dtype were set
                first = first or error
        if first is not None:
            raise first

    def pass_ended(self) -> None:
        """Called after each backward."""

    def gradient_complete(self, slot: Slot) -> None:
        """Called with each parameter whose gradient is complete, in a backward."""

    # -------------------------------------------------------------------------------------------------------- one group

    def before_use(self, group: Group) -> None:
        """Called with a sharded group when one of its parameters is used; may open the group."""

    def before_free(self, group: Group) -> None:
        """Called with a group before its memory is freed."""

    def groups_of(self, unit: int) -> list[Group]:
        """Returns the sliced groups that a unit uses."""
        return self._groups_of_unit.get(unit, [])

    def is_open(self, group: Group) -> bool:
        """Returns whether a sliced group is whole, or in flight."""
        return group in self._holders

    def is_held(self, holder: int | Holder) -> bool:
        """Returns whether some sliced group is kept whole for `holder`."""
        return any(holder in holders for holders in self._holders.values())

    def require(self, group: Group, slot: Slot) -> None:
        """Waits until a sliced group is gathered. Gathers it first inside a forward or backward, where all ranks do.

        Raises:
            RuntimeError: the group is not gathered, elsewhere; the message names the parameter of `slot`.
        """
        self.before_use(group)
        if not self.is_open(group):
            where = "in the layer that registers it"
            if self.wrapped:
                where = (
                    "in its module's forward, or between steps inside `with engine.gathered():` (which a step, an"
                    " evaluation or a save in it ends)"
                )
            raise RuntimeError(
                f"{slot.spec.name} is sharded (ZeRO stage 3), and its values are not in memory here: read or change it"
                f" {where}; engine.full_state_dict() returns all values"
            )
        self.wait(group)

    @_aside
    def open(self, group: Group, holder: int | Holder) -> None:
        """Begins to gather a sliced group, and keeps it whole for `holder`."""
        if group not in self._holders:
            self.order = hash((self.order, self._number[group]))
            self._exchange()
            if holder is Holder.GATHERED:
                self._exact.add(group)
            self._reading[group] = [(bucket, bucket.storage.fetch()) for bucket in group.buckets]
            if all(bucket.own is not None for bucket in group.buckets):
                self._exchange()
            self._holders[group] = set()
        self._holders[group].add(holder)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers all sliced groups, and guards all parameters and their views, inside the block."""
        sliced = [group for group in self.layout.groups if group.sliced]
        for group in sliced:
            self.open(group, Holder.GATHERED)
        for group in sliced:
            self.wait(group)
        for access in self.accesses.values():
            access.guard_views(True)
        try:
            yield
        finally:
            for access in self.accesses.values():
                access.guard_views(False)

    @functools.cached_property
    def saving(self) -> saved_tensors_hooks:
        """The hooks with which autograd saves positions in buffers."""
        return saved_tensors_hooks(
            torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack)
        )

    def _pack(self, tensor: Tensor) -> Any:
        owner = self.by_storage.get(storage_of(tensor))
        return tensor if owner is None else SavedView(*owner, tensor)

    @_aside
    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.require(packed.group, packed.slot or packed.group.slots[0])
        return packed.tensor()

    def _end_gathers(self) -> None:
        """Waits for all gathers, also of groups not used yet, so that the buffers of their slices are released."""
        self._exchange()
        for group in list(self._gathering):
            self.wait(group)

    def _exchange(self) -> None:
        """Begins the all-gather of every group whose slices are being read: in the same order on all ranks."""
        for group in list(self._reading):
            with without_transforms():
                group.allocate()
                self.by_storage[storage_of(group.params)] = (group, None)
                self._gathering[group] = [
                    self._gather(bucket, staged) for bucket, staged in self._reading.pop(group)
                ]

    def _gather(self, bucket: Bucket, staged: StagedBuffer) -> Pending:
        group, own = bucket.group, staged.wait()
        window = group.params[bucket.first : bucket.last]
        codec = EXACT if group in self._exact else self.codec
        if own.device != window.device:
            return self._gather_from_host(group.gather, window, own, staged, codec)
        pending = collectives.start_all_gather(own, group.gather, out=window, codec=codec)

        def finish() -> Tensor:
            whole = pending.wait()
            staged.drop()
            return whole

        return Pending(finish)

    def _gather_from_host(
        self, axis: Axis, window: Tensor, own: Tensor, staged: StagedBuffer, codec: Codec
    ) -> Pending:
        """Does the same from page-locked memory to a GPU, on a stream of its own."""
        stream = copy_stream(window.device, "in")
        with beside(stream):
            own = own.to(window.device, non_blocking=True)
            copied = stream.record_event()
            pending = collectives.start_all_gather(own, axis, out=window, codec=codec)
            gathered = stream.record_event()

        def finish() -> Tensor:
            current_stream(window.device).wait_event(gathered)
            whole = pending.wait()
            if not isinstance(staged, InMemory):
                copied.synchronize()  # a drive's buffer is reused
            staged.drop()
            return whole

        return Pending(finish)

    @_aside
    def wait(self, group: Group) -> None:
        """Waits for the gather of a group."""
        if group in self._reading:
            self._exchange()
        if group in self._gathering:
            with without_transforms():
                for pending in self._gathering.pop(group):
                    pending.wait()
            for slot in group.slots:
                self.accesses[slot].guard(False)

    def close(self, group: Group, holder: int | Holder) -> None:
        """Frees a sliced group if `holder` was the last one."""
        holders = self._holders.get(group)
        if holders is not None:
            holders.discard(holder)
            if not holders:
                self._free(group)

    @_aside
    def _free(self, group: Group) -> None:
        self.wait(group)  # a gather in flight still writes into it
        del self._holders[group]
        self._exact.discard(group)
        try:
            self.before_free(group)
        finally:
            del self.by_storage[storage_of(group.params)]
            group.free()
            for slot in group.slots:
                self.accesses[slot].guard(True)
