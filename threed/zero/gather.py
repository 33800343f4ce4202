"""Gathers parameters before they are used and releases them afterwards.

    publish(bucket)   begins to gather new values, after the optimizer has updated this rank's slice
    complete()        if several pipeline ranks each update a portion of a slice: gathers these
                      portions, then begins to gather the full slices, as `publish` does
    start(unit)       begins to gather the parameters of a unit (a layer or module, see `layout`)
    ready(unit)       waits until the parameters of a unit are gathered
    release(unit)     frees the memory of the unit's parameters, unless another unit still uses them

Unsharded parameters (stages 1 and 2, small ones under stage 3) are gathered once per update, by
`publish`. The gather overlaps with the beginning of the next forward, and `ready` waits for it.
Sharded parameters (stage 3) are gathered at every use, into a new buffer. The parameters stay the
same Python objects (`parameter_access`). For the backward, autograd saves the shape of a sharded
parameter and its offset in the buffer, not its values (`SavedView`). The backward gathers the
parameters into another buffer and reads them there.

Slices may be offloaded (`threed.memory.tiers`). A gather then has two phases: first this rank's
slices are read, then the all-gather runs. The all-gather starts when the gather of another group
begins, or when a unit waits for the parameters. With prefetching, both phases overlap with the
computation of earlier units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from threed.core.device import copy_stream, current_stream, on_stream
from threed.distributed import collectives
from threed.distributed.codecs import EXACT, Codec
from threed.distributed.collectives import Pending
from threed.distributed.sharding import storage_of
from threed.distributed.topology import Axis
from threed.memory.tiers import InMemory, StagedBuffer
from threed.zero.layout import Bucket, Group, Layout, Slot
from threed.zero.parameter_access import Access, Holder
from threed.zero.torch_modes import hide_from_checkpointing, without_transforms


def _without_modes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: runs a method without the torch modes of the code that causes a gather.

    Suspends `torch.func` transforms. If the gatherer belongs to a wrapped module, also hides the
    gathers in the method from selective activation checkpointing.
    """

    @functools.wraps(method)
    def run(self: Gatherer, *args: Any) -> Any:
        hidden = hide_from_checkpointing() if self.wrapped else nullcontext()
        with hidden, without_transforms():
            return method(self, *args)

    return run


def _each(act: Callable[[Group], None], groups: Sequence[Group]) -> None:
    """Calls `act` for all groups, even if it raises RuntimeError; then raises the first error."""
    first: RuntimeError | None = None
    for group in groups:
        try:
            act(group)
        except RuntimeError as error:
            first = first or error
    if first is not None:
        raise first


class SavedView:
    """The position of a tensor in a group's buffer; autograd saves it instead of the tensor.

    Attributes:
        group: the group.
        slot: the parameter, if the tensor is the placeholder of a parameter that was not gathered;
            None if the tensor is a view of the gathered buffer.
        dtype: dtype of the tensor.
        place: (size, strides, offset in the buffer) of the tensor, in elements.
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
    """Gathers one tile of a linear layer's weight (`threed.layers.tiled`) while the layer uses it.

    Implements `threed.layers.slicing.TileGatherer`.
    """

    def __init__(self, gatherer: Gatherer, group: Group) -> None:
        self.gatherer, self.group = gatherer, group

    def ahead(self) -> None:
        """Begins to gather the tile, before the layer uses it."""
        self.gatherer.open(self.group, Holder.TILE)

    def open(self) -> None:
        """Waits until the tile is gathered; first begins the gather if `ahead` was not called."""
        self.gatherer.open(self.group, Holder.TILE)
        self.gatherer.wait(self.group)

    def close(self) -> None:
        """Frees the tile, unless another `Holder` keeps it gathered."""
        self.gatherer.close(self.group, Holder.TILE)


class Gatherer:
    """Gathers the parameters of a layout, one group (flat buffer) at a time.

    Args:
        layout: layout of the parameters.
        codec: encoding of sharded parameters when they are gathered for layers. Gathers for
            `Engine.gathered` are exact.

    Attributes:
        accesses: the `Access` of each parameter.
        by_storage: address of a storage (`storage_of`) -> its owner, for the memory of sharded
            parameters. The owner of a group's buffer is (group, None). The owner of a placeholder,
            to which a parameter points while it is not gathered, is (group, slot).
        version: counter that is incremented when the values of sharded parameters change.
        wrapped: whether the parameters belong to a wrapped module. If so, the user's program may
            read and change the parameters at any time.
        lent: the parameters of all `with gathered(...)` blocks that are still running.
        order: hash of the sequence of groups that were gathered so far. It must be equal on all
            ranks, because gathers are collective.
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
        self._published: dict[Bucket, Pending] = {}  # gathers in flight of unsharded parameters
        self._buckets_of_unit: dict[int, list[Bucket]] = {}
        self._buckets_of_slot: dict[Slot, list[Bucket]] = {}
        self._groups_of_unit: dict[int, list[Group]] = {}
        # groups whose slices are being read, in the order in which they were opened
        self._reading: dict[Group, list[tuple[Bucket, StagedBuffer]]] = {}
        self._gathering: dict[Group, list[Pending]] = {}
        self._exact: set[Group] = set()  # groups that are gathered without `codec`
        self._holders: dict[Group, set[int | Holder]] = {}
        self.lent: set[Slot] = set()
        for drive in layout.policy.drives:
            drive.on_full(self._finish_gathers)
        self._number = {group: number for number, group in enumerate(layout.groups)}
        buckets = [bucket for group in layout.groups for bucket in group.buckets]
        # buckets whose slices are updated in portions, by several pipeline ranks
        self._portioned = [b for b in reversed(buckets) if b.group.holders.size > 1]
        self._shows_newest = True  # False: layers read the previous version of the parameters
        self.order = 0
        for group in layout.groups:
            if group.key.tile is not None:
                group.slots[0].param.tile_gatherer = GatheredTile(self, group)  # type: ignore[attr-defined]
            for unit in (group.key.units or ()) if group.key.tile is None else ():
                self._groups_of_unit.setdefault(unit, []).append(group)
            for bucket in group.buckets if not group.sliced else ():
                for slot in bucket.slots:
                    self._buckets_of_slot.setdefault(slot, []).append(bucket)
                for unit in {unit for slot in bucket.slots for unit in slot.units}:
                    self._buckets_of_unit.setdefault(unit, []).append(bucket)

    # --------------------------------------------------------------------------------------- unsharded parameters

    def publish(self, bucket: Bucket) -> None:
        """Begins to gather new values of a bucket, if its parameters are unsharded.

        Sharded parameters are gathered at their next use, so for them this call only increments
        `version`. Buckets that several pipeline ranks update in portions are gathered by `complete`
        instead.
        """
        self.version += bucket.group.sliced
        if bucket.group.holders.size == 1:
            self._publish(bucket)

    def complete(self) -> None:
        """Gathers the portions that other pipeline ranks update, then publishes the full slices.

        Collective. Gathers start in reverse order of groups, because the last groups belong to the
        model's first layers, which are needed first. All ranks have the same order of groups.
        """
        gathers = [
            collectives.start_all_gather(b.portion.fetch().wait(), b.group.holders, out=b.own)
            for b in self._portioned
        ]
        for bucket, pending in zip(self._portioned, gathers, strict=True):
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
        """Waits until an unsharded parameter is gathered."""
        if self._published and self._shows_newest:
            self._wait_for(self._buckets_of_slot.get(slot, ()))

    def show(self, newest: bool) -> None:
        """Selects the version of unsharded parameters that layers read (`zero.versions`).

        Gathers in flight write to the newest version. While layers read the newest version, a
        parameter is therefore guarded until its gather ends: any use of it waits for the gather.
        While layers read the previous version, parameters are not guarded.

        Args:
            newest: True for the newest version, False for the previous version.
        """
        if newest != self._shows_newest:
            self._shows_newest = newest
            for bucket in self._published:
                self._guard(bucket)

    def _guard(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            self.accesses[slot].guard(self._shows_newest)

    def wait_all(self) -> None:
        """Waits until all unsharded parameters are gathered."""
        self._wait_for(list(self._published))

    def _wait_for(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket in self._published:
                self._published.pop(bucket).wait()
                for slot in bucket.slots:
                    if self._published.keys().isdisjoint(self._buckets_of_slot[slot]):
                        self.accesses[slot].guard(False)

    # ------------------------------------------------------------------------------------------------ sharded parameters

    def is_freed(self, unit: int) -> bool:
        """Returns whether a unit has sharded parameters, which are freed while they are unused."""
        return unit in self._groups_of_unit

    def start(self, unit: int) -> None:
        """Begins to gather the sharded parameters of a unit, if they are not gathered already."""
        for group in self._groups_of_unit.get(unit, ()):
            self.open(group, unit)

    def ready(self, unit: int) -> None:
        """Waits until all parameters of a unit are gathered; starts gathers not started yet."""
        if self._published and self._shows_newest:
            self._wait_for(self._buckets_of_unit.get(unit, ()))
        for group in self._groups_of_unit.get(unit, ()):
            self.open(group, unit)
            self.wait(group)

    def release(self, unit: int) -> None:
        """Ends a unit's use of its sharded groups, and frees those that no other holder uses.

        A holder is a unit or a purpose (see `Holder`).
        """
        for group in self._groups_of_unit.get(unit, ()):
            self.close(group, unit)

    def release_all(self) -> None:
        """Frees the memory of all gathered groups of sharded parameters, even if they are in use.

        Raises:
            RuntimeError: a group could not be freed, because the program has set a parameter to
                values of another shape or dtype. Raised after all other groups are freed.
        """
        if self._holders:
            _each(self._free, list(self._holders))

    def remove(self) -> None:
        """Removes the gatherer from all parameters; the object cannot be used afterwards."""
        for access in self.accesses.values():
            access.remove()

    def end_forwards(self) -> None:
        """Called before the engine's collectives outside of forwards; see `ModuleGatherer`."""

    def pass_ended(self) -> None:
        """Hook for subclasses: called after each backward."""

    def gradient_complete(self, slot: Slot) -> None:
        """Hook for subclasses: called in a backward when a parameter's gradient is complete."""

    # -------------------------------------------------------------------------------------------------------- groups

    def before_use(self, group: Group) -> None:
        """Hook for subclasses: called before a sharded parameter is used; may gather its group."""

    def before_free(self, group: Group) -> None:
        """Hook for subclasses: called before a group's memory is freed."""

    def groups_of(self, unit: int) -> list[Group]:
        """Returns the sharded groups that a unit uses."""
        return self._groups_of_unit.get(unit, [])

    def is_open(self, group: Group) -> bool:
        """Returns whether a sharded group is gathered, or its gather is in flight."""
        return group in self._holders

    def require(self, group: Group, slot: Slot) -> None:
        """Waits until a sharded group is gathered.

        Inside a forward or backward of a wrapped module, this call also starts the gather if the
        group is not gathered (`before_use`). Gathers are collective, so all ranks must then use the
        group.

        Args:
            group: the sharded group.
            slot: the parameter that is used, for the error message.

        Raises:
            RuntimeError: the group is not gathered and cannot be gathered here.
        """
        self.before_use(group)
        if not self.is_open(group):
            where = "in the layer that registers it"
            if self.wrapped:
                where = (
                    "in its module's forward, or inside `with engine.gathered():` (which a step, an"
                    " evaluation or a save in it ends)"
                )
            raise RuntimeError(
                f"{slot.spec.name} is sharded (ZeRO stage 3), and its values are not in memory here: read or change it"
                f" {where}; engine.full_state_dict() returns all values"
            )
        self.wait(group)

    @_without_modes
    def open(self, group: Group, holder: int | Holder) -> None:
        """Begins to gather a sharded group, and keeps it gathered until `holder` closes it.

        Args:
            group: the sharded group.
            holder: the user of the group: a member of `Holder`, the number of a unit, or the
                nesting depth of a module call. `close` must be called with the same value.
        """
        if group not in self._holders:
            self.order = hash((self.order, self._number[group]))
            self._start_gathers()
            if holder is Holder.GATHERED:
                self._exact.add(group)
            self._reading[group] = [(bucket, bucket.storage.fetch()) for bucket in group.buckets]
            if all(bucket.own is not None for bucket in group.buckets):
                self._start_gathers()
            self._holders[group] = set()
        self._holders[group].add(holder)

    @contextmanager
    def gathered(self, slots: Collection[Slot]) -> Iterator[None]:
        """Context manager that gathers parameters exactly, for code outside of the layers.

        In the block, the parameters and their views are guarded, so that the use of a stale view
        raises an error (`Access.guard_views`). Blocks can be nested.

        Args:
            slots: the parameters.
        """
        accesses = [self.accesses[slot] for slot in slots if slot not in self.lent]
        groups = {access.group for access in accesses if access.group.sliced}
        opened = [g for g in groups if Holder.GATHERED not in self._holders.get(g, ())]
        opened.sort(key=self._number.__getitem__)  # gathers need the same order on all ranks
        for group in opened:
            if self.is_open(group) and group not in self._exact and self.codec is not EXACT:
                self._free(group)  # a backward that needs it gathers it again
            self.open(group, Holder.GATHERED)
        for group in opened:
            self.wait(group)
        for access in accesses:
            access.guard_views(True)
            self.lent.add(access.slot)
        try:
            yield
        finally:
            for access in accesses:
                access.guard_views(False)
                self.lent.discard(access.slot)
            _each(lambda group: self.close(group, Holder.GATHERED), opened)

    @functools.cached_property
    def saving(self) -> saved_tensors_hooks:
        """Saved-tensor hooks: autograd saves sharded parameters and their views as `SavedView`s."""
        return saved_tensors_hooks(
            torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack)
        )

    def _pack(self, tensor: Tensor) -> Any:
        owner = self.by_storage.get(storage_of(tensor))
        return tensor if owner is None else SavedView(*owner, tensor)

    @_without_modes
    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.require(packed.group, packed.slot or packed.group.slots[0])
        return packed.tensor()

    @_without_modes
    def _finish_gathers(self) -> None:
        """Waits for all gathers, including prefetches, so that the gathers release drive buffers.

        A drive calls this method if all of its buffers are in use.
        """
        self._start_gathers()
        for group in list(self._gathering):
            self.wait(group)

    def _start_gathers(self) -> None:
        """Starts the all-gathers of all groups whose slices are being read.

        The all-gathers start in the order in which the groups were opened.
        """
        for group in list(self._reading):
            group.allocate()
            self.by_storage[storage_of(group.params)] = (group, None)
            self._gathering[group] = self._gather(group, self._reading.pop(group))

    def _gather(
        self, group: Group, reading: Sequence[tuple[Bucket, StagedBuffer]]
    ) -> list[Pending]:
        """Starts the all-gathers of a group, as one operation if the slices are on the device."""
        codec = EXACT if group in self._exact else self.codec
        # lazily, because the gather of a slice should start while later slices are still being read
        slices = (staged.wait() for _, staged in reading)
        windows = [group.params[bucket.first : bucket.last] for bucket, _ in reading]
        if reading[0][1].values.device != group.params.device:
            return [
                self._gather_from_host(group.gather, window, own, staged, codec)
                for window, own, (_, staged) in zip(windows, slices, reading, strict=True)
            ]
        pending = collectives.start_all_gathers(slices, group.gather, windows, codec=codec)

        def finish() -> Tensor:
            full = pending.wait()
            for _, staged in reading:
                staged.drop()
            return full

        return [Pending(finish)]

    def _gather_from_host(
        self, axis: Axis, window: Tensor, own: Tensor, staged: StagedBuffer, codec: Codec
    ) -> Pending:
        """Gathers a bucket from slices in page-locked host memory to the GPU.

        The copy to the GPU and the gather run on a separate stream.
        """
        stream = copy_stream(window.device, "in")
        with on_stream(stream):
            own = own.to(window.device, non_blocking=True)
            copied = stream.record_event()
            pending = collectives.start_all_gather(own, axis, out=window, codec=codec)
            gathered = stream.record_event()

        def finish() -> Tensor:
            current_stream(window.device).wait_event(gathered)
            full = pending.wait()
            if not isinstance(staged, InMemory):
                copied.synchronize()  # the drive may reuse the buffer after `drop`
            staged.drop()
            return full

        return Pending(finish)

    @_without_modes
    def wait(self, group: Group) -> None:
        """Waits until a group is gathered.

        If slices of the group are still being read, the all-gather is started first.
        """
        if group in self._reading:
            self._start_gathers()
        if group in self._gathering:
            for pending in self._gathering.pop(group):
                pending.wait()
            for slot in group.slots:
                self.accesses[slot].guard(False)

    def close(self, group: Group, holder: int | Holder) -> None:
        """Ends a holder's use of a sharded group. If it was the last holder, frees the group."""
        holders = self._holders.get(group)
        if holders is not None:
            holders.discard(holder)
            if not holders:
                self._free(group)

    @_without_modes
    def _free(self, group: Group) -> None:
        self.wait(group)  # a gather in flight still writes to the buffer
        del self._holders[group]
        self._exact.discard(group)
        try:
            self.before_free(group)
        finally:
            del self.by_storage[storage_of(group.params)]
            group.free()
            for slot in group.slots:
                self.accesses[slot].guard(True)
