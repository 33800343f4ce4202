"""Keeps parameters that no rank has used yet unchanged, as torch's optimizers do without a gradient.

    unused = Unused(layout, updates)
    unused.agree(used)          at the end of every step, on all ranks that share the parameters
    unused.stretches            for buckets with such parameters: the parts that an update treats differently

A parameter that is used later counts its updates from then on (Adam's bias correction).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.zero.layout import Bucket, Layout, Slot

FROZEN = (
    "{} {} (requires_grad) after the engine was made, and {}: set requires_grad back before the update, or save, and"
    " load into a new engine"
)
# elements [first, last) of a slice; updates before first use
Stretch = tuple[int, int, Tensor | None]


def warn_of_unused(layout: Layout, unused: Set[Slot], warns: bool) -> None:
    """Warns of the parameters that no rank used in the first step, if this rank `warns`. Collective."""
    data = layout.policy.data
    never = {
        s.spec.name
        for group in layout.groups
        if not group.key.tied
        for s in group.slots
        if s in unused
    }
    for axis in (data.shard, data.replicas):
        never.intersection_update(*collectives.exchange(sorted(never), axis))
    if never and warns and data.shard.index == data.replicas.index == 0:
        names = ", ".join(sorted(never))
        warnings.warn(
            f"no gradient came to {names} in the first step: they change by weight decay only",
            stacklevel=3,
        )


class Unused:
    """Tracks which trainable parameters were never used. updates: the number done so far, a scalar tensor."""

    def __init__(self, layout: Layout, updates: Tensor) -> None:
        self.layout, self.updates = layout, updates
        self.stretches: dict[Bucket, list[Stretch]] = {}
        self._slots = [
            slot for group in layout.groups if group.key.trainable for slot in group.slots
        ]
        self._never = set(range(len(self._slots)))  # the same on all ranks
        self._since: dict[Slot, Tensor] = {}  # for parameters first used after the first step
        self._first = True

    def check_frozen(self) -> None:
        """Raises RuntimeError naming a parameter that was frozen or unfrozen since the engine was made. One that was
        frozen before its first use stays as it is."""
        never = {self._slots[number] for number in self._never}
        with torch._C.DisableTorchFunctionSubclass():
            frozen = [s for s in self._slots if not s.param.requires_grad and s not in never]
            others = [
                s for group in self.layout.groups if not group.key.trainable for s in group.slots
            ]
            trained = [s for s in others if s.param.requires_grad]
        for slot in frozen:
            raise RuntimeError(
                FROZEN.format(slot.spec.name, "was frozen", "its moments would move it")
            )
        for slot in trained:
            raise RuntimeError(
                FROZEN.format(slot.spec.name, "was unfrozen", "it would not be trained")
            )

    def agree(self, used: Set[Slot]) -> None:
        """Updates the record from what this rank and the others have used so far. Collective while any parameter is
        unused."""
        self.check_frozen()
        if not self._never:
            return
        never = {number for number in self._never if self._slots[number] not in used}
        for axis in (self.layout.policy.data.shard, self.layout.policy.data.replicas):
            never.intersection_update(*collectives.exchange(sorted(never), axis))
        came, self._never = self._never - never, never
        if (
            self._first
            and never
            and self.layout.policy.data.shard.index == self.layout.policy.data.replicas.index == 0
        ):
            names = ", ".join(self._slots[number].spec.name for number in sorted(never))
            warnings.warn(
                f"not used in the first step, and left as they are until they are: {names}",
                stacklevel=2,
            )
        self._since |= {} if self._first else {self._slots[n]: self.updates.clone() for n in came}
        if came or self._first:
            self._lay_out()
        self._first = False

    def _lay_out(self) -> None:
        never = {self._slots[number] for number in self._never}
        special = {
            b for b in self.layout.buckets if any(s in never or s in self._since for s in b.slots())
        }
        self.stretches = {bucket: list(self._stretches_of(bucket, never)) for bucket in special}

    def _stretches_of(self, bucket: Bucket, never: set[Slot]) -> list[Stretch]:
        """Yields the parts of a slice, cut where parameters begin; padding belongs to the parameter before it."""
        first, last, ends = bucket.own_first, bucket.own_last, []
        start = torch.zeros_like(self.updates)
        slots = [slot for slot in bucket.slots() if slot.last > first and slot.first < last]
        for number, slot in enumerate(slots):
            end = slots[number + 1].first if number + 1 < len(slots) else last
            ends.append((end, None if slot in never else self._since.get(slot, start)))
        found, at = [], 0
        for _, some in groupby(ends, key=lambda both: id(both[1])):
            *_, (end, since) = some
            found.append((at, end - first, since))
            at = end - first
        return found

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: names of unused parameters; updates before the first use of others."""
        since = {slot.spec.name: float(updates) for slot, updates in self._since.items()}
        never = sorted(self._slots[number].spec.name for number in self._never)
        return {"never": never, "since": since, "first": self._first}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restores a checkpoint's state; in one without it, every parameter counts as used."""
        state = state or {"never": (), "since": {}, "first": False}
        never, since = set(state["never"]), state["since"]
        self._never = {number for number, slot in enumerate(self._slots) if slot.spec.name in never}
        named = {slot.spec.name: slot for slot in self._slots}
        self._since = {
            named[n]: torch.full_like(self.updates, u) for n, u in since.items() if n in named
        }
        self._first = bool(state["first"])
        if self._first:
            self.stretches = {}
        else:
            self._lay_out()
