"""Parameters whole when they are used: gathered before, released after.

    publish(bucket)   the optimizer has new values in this rank's slice
    start(unit)       begins to gather what a unit needs
    ready(unit)       waits until it is whole
    release(unit)     gives the memory back, unless another unit needs it still

Parameters that stay whole (stages 1 and 2, small ones under stage 3) are gathered once, when they are published; that
runs on while the next forward begins, and `ready` waits for it. Sliced parameters (stage 3) are gathered at every use.
A group's buffer is freed and given memory again, while the tensors that look into it stay: parameters, and what
autograd has saved of them.

Slices may live elsewhere (`threed.memory.tiers`). Then a gather has two halves: what a group's slices take to come is
overlapped with the unit before, and so is the exchange between ranks, which begins when the next group is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from threed import collectives
from threed.collectives import Pending
from threed.device import beside, copy_stream, current_stream
from threed.memory.tiers import InMemory, StagedBuffer
from threed.topology import Axis
from threed.zero.layout import Bucket, Group, Layout, Slot

TILE, BY_HAND = -3, -4  # who holds a tile: its layer; and a group that is whole between steps. Units are numbers


class GatheredTile:
    """Gathers one tile of a linear layer while the layer uses it (`threed.layers.slicing.TileGatherer`)."""

    def __init__(self, gatherer: Gatherer, group: Group) -> None:
        self.gatherer, self.group = gatherer, group

    def ahead(self) -> None:
        """Begins to gather the tile."""
        self.gatherer.open(self.group, TILE)

    def open(self) -> None:
        """Waits until the tile is whole."""
        self.gatherer.open(self.group, TILE)
        self.gatherer.wait(self.group)

    def close(self) -> None:
        """Frees the tile."""
        self.gatherer.close(self.group, TILE)


class Gatherer:
    """Gathers the groups of a layout.

    axis: the shard group again, with a communicator of its own: gathers and reductions need not keep one order.
    """

    def __init__(self, layout: Layout, axis: Axis) -> None:
        self.layout, self.axis = layout, axis
        self._published: dict[Bucket, Pending] = {}  # gathers of what stays whole
        self._buckets_of_unit: dict[int, list[Bucket]] = {}
        self._buckets_of_slot: dict[Slot, list[Bucket]] = {}
        self._groups_of_unit: dict[int, list[Group]] = {}
        self._coming: dict[Group, list[tuple[Bucket, StagedBuffer]]] = {}  # slices on their way, in the order of asking
        self._gathering: dict[Group, list[Pending]] = {}
        self._holders: dict[Group, set[int]] = {}
        for drive in layout.policy.drives:
            drive.make_room = self._end_gathers
        self._number = {group: number for number, group in enumerate(layout.groups)}
        self.leaving: Callable[[Group], None] = lambda group: None  # told before a group's memory goes
        self.order = 0  # a hash of which groups were gathered, in which order: all ranks must have the same
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

    # ------------------------------------------------------------------------------------------------- what stays whole

    def publish(self, bucket: Bucket) -> None:
        """Begins to gather the other ranks' slices of a bucket, if its parameters stay whole."""
        group = bucket.group
        if not group.sliced and group.shard.size > 1 and bucket.own is not None:
            window = group.params[bucket.first : bucket.last]
            self._published[bucket] = collectives.start_all_gather(bucket.own, self.axis, out=window)

    def wait_for(self, slot: Slot) -> None:
        """Waits until one parameter that stays whole is."""
        if self._published:
            self._wait_for(self._buckets_of_slot.get(slot, ()))

    def settle(self) -> None:
        """Waits until all parameters that stay whole are."""
        self._wait_for(list(self._published))

    def _wait_for(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket in self._published:
                self._published.pop(bucket).wait()

    # ---------------------------------------------------------------------------------------------------- what does not

    def start(self, unit: int) -> None:
        """Begins to gather the sliced parameters of a unit, unless they are whole or on their way."""
        for group in self._groups_of_unit.get(unit, ()):
            self.open(group, unit)

    def ready(self, unit: int) -> None:
        """Waits until all parameters of a unit are whole; begins to gather them if nobody has."""
        if self._published:
            self._wait_for(self._buckets_of_unit.get(unit, ()))
        for group in self._groups_of_unit.get(unit, ()):
            self.open(group, unit)
            self.wait(group)

    def release(self, unit: int) -> None:
        """Frees the sliced parameters that only this unit held."""
        for group in self._groups_of_unit.get(unit, ()):
            self.close(group, unit)

    def release_all(self) -> None:
        """Frees all sliced parameters."""
        for group in list(self._holders):
            self._holders[group].clear()
            self._free(group)

    # ------------------------------------------------------------------------------------------------------ one group

    def groups_of(self, unit: int) -> list[Group]:
        """The sliced groups that a unit uses."""
        return self._groups_of_unit.get(unit, [])

    def is_open(self, group: Group) -> bool:
        """Whether a sliced group is whole, or on its way."""
        return group in self._holders

    def open(self, group: Group, holder: int) -> None:
        """Begins to gather a sliced group, and keeps it whole for `holder`."""
        if group not in self._holders:
            self.order = hash((self.order, self._number[group]))
            self._exchange()
            self._coming[group] = [(bucket, bucket.storage.fetch()) for bucket in group.buckets]
            if all(bucket.own is not None for bucket in group.buckets):
                self._exchange()
            self._holders[group] = set()
        self._holders[group].add(holder)

    def open_all(self, holder: int) -> None:
        """Begins to gather all sliced groups, and keeps them whole for `holder`."""
        for group in self.layout.groups:
            if group.sliced:
                self.open(group, holder)

    def _end_gathers(self) -> None:
        """Waits for all gathers, also of what nobody has used yet: their slices go back."""
        self._exchange()
        for group in list(self._gathering):
            self.wait(group)

    def _exchange(self) -> None:
        """Begins the exchange of every group whose slices were asked for: on all ranks in the same order."""
        for group in list(self._coming):
            group.allocate()
            self._gathering[group] = [self._gather(bucket, staged) for bucket, staged in self._coming.pop(group)]

    def _gather(self, bucket: Bucket, staged: StagedBuffer) -> Pending:
        window, own = bucket.group.params[bucket.first : bucket.last], staged.wait()
        if own.device != window.device:
            return self._gather_from_host(window, own, staged)
        pending = collectives.start_all_gather(own, self.axis, out=window)

        def finish() -> Tensor:
            whole = pending.wait()
            staged.drop()
            return whole

        return Pending(finish)

    def _gather_from_host(self, window: Tensor, own: Tensor, staged: StagedBuffer) -> Pending:
        """The same from page-locked memory to a GPU, beside what it computes."""
        stream = copy_stream(window.device, "in")
        with beside(stream):
            own = own.to(window.device, non_blocking=True)
            copied = stream.record_event()
            pending = collectives.start_all_gather(own, self.axis, out=window)
            gathered = stream.record_event()

        def finish() -> Tensor:
            whole = pending.wait()
            current_stream(window.device).wait_event(gathered)
            if not isinstance(staged, InMemory):
                copied.synchronize()  # a drive's buffer is used again
            staged.drop()
            return whole

        return Pending(finish)

    def wait(self, group: Group) -> None:
        """Waits for the gather of a group."""
        if group in self._coming:
            self._exchange()
        for pending in self._gathering.pop(group, ()):
            pending.wait()

    def close(self, group: Group, holder: int) -> None:
        """Frees a sliced group if `holder` was the last that kept it."""
        holders = self._holders.get(group)
        if holders is not None:
            holders.discard(holder)
            if not holders:
                self._free(group)

    def _free(self, group: Group) -> None:
        self.wait(group)  # a gather under way still writes
        del self._holders[group]
        self.leaving(group)
        group.free()
