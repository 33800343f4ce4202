"""Keeps parameters that no rank has used yet unchanged, as torch's optimizers do without a gradient.

    unused = Unused(layout, updates)
    unused.agree(used)          at the end of every step, on all ranks that share the parameters
    unused.stretches            for buckets with such parameters: the parts that an update treats differently

A parameter that is used later counts its updates from then on (Adam's bias correction).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import Tensor

from threed import collectives
from threed.ops.update import StepScalars
from threed.zero.layout import Bucket, GroupOptions, Layout, Slot

# elements [first, last) of a slice; updates before first use
T = TypeVar("T", int, str)
Stretch = tuple[int, int, Tensor | None]


def warn_of_unused(layout: Layout, unused: Set[Slot], warns: bool) -> None:
    """Warns of the parameters that no rank used in the first step, if this rank `warns`. Collective."""
    groups = [group for group in layout.groups if not group.key.tied]
    names = {s.spec.name for group in groups for s in group.slots if s in unused}
    never = _on_all_ranks(layout, names)
    if warns:
        text = "no gradient came to {} in the first step: they change by weight decay only"
        _warn(layout, text, sorted(never))


def _on_all_ranks(layout: Layout, own: set[T]) -> set[T]:
    """Returns the entries that all data ranks have. Collective."""
    for axis in (layout.policy.data.shard, layout.policy.data.replicas):
        own = own.intersection(*collectives.exchange(sorted(own), axis))
    return own


def _warn(layout: Layout, text: str, names: Sequence[str]) -> None:
    """Warns of parameters, if there are any, on the first data rank."""
    if names and layout.policy.data.shard.index == layout.policy.data.replicas.index == 0:
        warnings.warn(text.format(", ".join(names)), stacklevel=4)


def update_stretches(
    options: GroupOptions, stretches: Sequence[Stretch], values: Sequence[Tensor], now: StepScalars,
    out: Tensor | None,
) -> None:  # fmt: skip
    """Updates a bucket part by part: unused parameters not at all, others by their own step number.

    Args:
        values: weights, gradient and moments, all [n].
        out: gets the new weights [n].
    """
    for first, last, since in stretches:
        weight, gradient, *moments = (tensor[first:last] for tensor in values)
        new = None if out is None else out[first:last]
        if since is not None:
            own = now._replace(step=(now.step - since.to(now.step.device)).clamp(min=1))
            options.rule.update(weight, gradient, moments, own, options.decay, new)
        elif new is not None:
            new.copy_(weight)


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
            for group in self.layout.groups:
                for slot in group.slots:
                    self._check_frozen(slot, group.key.trainable, never)

    def _check_frozen(self, slot: Slot, trained: bool, never: set[Slot]) -> None:
        if slot.param.requires_grad == trained or slot in never:
            return
        what = "frozen (requires_grad) after the engine was made, and its moments would move it"
        if not trained:
            what = "unfrozen (requires_grad) after the engine was made, and it would not be trained"
        raise RuntimeError(
            f"{slot.spec.name} was {what}: set requires_grad back before the update, or save, and load into a new engine"
        )

    def agree(self, used: Set[Slot]) -> None:
        """Updates the record from what this rank and the others have used so far. Collective while any parameter is
        unused."""
        self.check_frozen()
        if not self._never:
            return
        own = {number for number in self._never if self._slots[number] not in used}
        never = _on_all_ranks(self.layout, own)
        came, self._never = self._never - never, never
        if self._first:
            text = "not used in the first step, and left as they are until they are: {}"
            _warn(self.layout, text, [self._slots[n].spec.name for n in sorted(never)])
        self._since |= {} if self._first else {self._slots[n]: self.updates.clone() for n in came}
        if came or self._first:
            self._lay_out()
        self._first = False

    def _lay_out(self) -> None:
        never = {self._slots[number] for number in self._never}
        special = {
            b for b in self.layout.buckets if any(s in never or s in self._since for s in b.slots())
        }
        self.stretches = {bucket: self._stretches_of(bucket, never) for bucket in special}

    def _stretches_of(self, bucket: Bucket, never: set[Slot]) -> list[Stretch]:
        """Returns the parts of a slice, cut where parameters begin; padding belongs to the parameter before it."""
        first, last = bucket.own_first, bucket.own_last
        start = torch.zeros_like(self.updates)
        slots = [slot for slot in bucket.slots() if slot.last > first and slot.first < last]
        found: list[Stretch] = []
        for slot, end in zip(slots, [*(slot.first for slot in slots[1:]), last], strict=False):
            since = None if slot in never else self._since.get(slot, start)
            begin = found[-1][1] if found else 0
            if found and found[-1][2] is since:
                begin, *_ = found.pop()
            found.append((begin, end - first, since))
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
        self.stretches = {}
        if not self._first:
            self._lay_out()
