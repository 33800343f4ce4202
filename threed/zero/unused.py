"""Keeps parameters without gradient unchanged until a rank uses them, as torch's optimizers do.

    unused = Unused(layout, updates)
    unused.synchronize(used)    call it at the end of every step, on all ranks that share parameters
    unused.stretches            bucket -> ranges of this rank's slice that must be updated
                                separately; only for buckets that contain parameters which were not
                                used in the first step

If a parameter is first used after the first step, its updates are counted from its first use,
because the bias correction of Adam depends on the number of updates.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.ops.update import StepScalars
from threed.zero.layout import Bucket, GroupOptions, Layout, Slot

T = TypeVar("T", int, str)
# A range of elements in a slice: (first, last, since). It contains the elements [first, last);
# `since` is the number of updates before their first use, or None if they are still unused.
Stretch = tuple[int, int, Tensor | None]


def warn_of_unused(layout: Layout, unused: Set[Slot], warns: bool) -> None:
    """Warns of parameters that no data rank used in the first step. Collective.

    Args:
        layout: layout of the parameters.
        unused: parameters that this rank has not used. Tied parameters of this set are ignored,
            because another pipeline rank may have used them.
        warns: whether this rank may emit the warning.
    """
    groups = [group for group in layout.groups if not group.key.tied]
    names = {s.spec.name for group in groups for s in group.slots if s in unused}
    never = _on_all_ranks(layout, names)
    if warns:
        text = "{} received no gradient in the first step: only weight decay changes them"
        _warn(layout, text, sorted(never))


def _on_all_ranks(layout: Layout, own: set[T]) -> set[T]:
    """Returns the entries that are in the argument `own` of every data rank. Collective."""
    for axis in (layout.policy.data.shard, layout.policy.data.replicas):
        own = own.intersection(*collectives.exchange(sorted(own), axis))
    return own


def _warn(layout: Layout, text: str, names: Sequence[str]) -> None:
    """On the first data rank, emits a warning that lists `names`, unless `names` is empty."""
    if names and layout.policy.data.shard.index == layout.policy.data.replicas.index == 0:
        warnings.warn(text.format(", ".join(names)), stacklevel=4)


def update_stretches(
    options: GroupOptions, stretches: Sequence[Stretch], values: Sequence[Tensor], now: StepScalars,
    out: Tensor | None,
) -> None:  # fmt: skip
    """Updates the ranges of a bucket's slice one after the other.

    Ranges of unused parameters are not updated. For every other range, the step number passed to
    the update rule is the number of updates since the first use of the range's parameters.

    Args:
        options: options of the parameter group, with the update rule.
        stretches: the ranges; see `Stretch`.
        values: weights, gradient and moments of the bucket's slice, each [n].
        now: scalars of the update.
        out: tensor [n] that receives a copy of the new weights, rounded to its dtype; None for no
            copy.
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
    """Tracks which trainable parameters have not been used yet.

    Args:
        layout: layout of the parameters.
        updates: number of updates applied so far, a scalar tensor that the optimizer updates.

    Attributes:
        stretches: bucket -> ranges of this rank's slice, for each bucket with parameters that are
            unused, or that were first used after the first step. All elements of a range were
            updated the same number of times.
    """

    def __init__(self, layout: Layout, updates: Tensor) -> None:
        self.layout, self.updates = layout, updates
        self.stretches: dict[Bucket, list[Stretch]] = {}
        self._slots = [
            slot for group in layout.groups if group.key.trainable for slot in group.slots
        ]
        # indices of unused parameters in `_slots`, the same on all ranks
        self._never = set(range(len(self._slots)))
        # parameter that was first used after the first step -> number of updates before that use
        self._updates_before_use: dict[Slot, Tensor] = {}
        self._first = True

    def check_frozen(self) -> None:
        """Checks that no parameter was frozen or unfrozen after the engine was built.

        A parameter may be frozen before its first use, because until then it is not updated anyway.

        Raises:
            RuntimeError: a parameter was frozen or unfrozen; the message names it.
        """
        never = {self._slots[number] for number in self._never}
        with torch._C.DisableTorchFunctionSubclass():
            for group in self.layout.groups:
                for slot in group.slots:
                    self._check_frozen(slot, group.key.trainable, never)

    def _check_frozen(self, slot: Slot, trained: bool, never: set[Slot]) -> None:
        if slot.param.requires_grad == trained or slot in never:
            return
        what = "frozen (requires_grad) after the engine was built, but its moments would still change it"
        if not trained:
            what = (
                "unfrozen (requires_grad) after the engine was built, but it would not be trained"
            )
        raise RuntimeError(
            f"{slot.spec.name} was {what}: set requires_grad back before the update, or save and load into a new engine"
        )

    def synchronize(self, used: Set[Slot]) -> None:
        """Exchanges between data ranks which parameters were used. Collective over the data ranks.

        Call it at the end of every step. A parameter counts as used once any data rank has used it.
        If a parameter was used for the first time in this step, or if this is the first step,
        `stretches` (the ranges that must be updated separately) is computed again. Once all
        parameters have been used, later calls return without communication between ranks.

        Args:
            used: trainable parameters that this rank has used since the engine was built or a
                checkpoint was loaded.

        Raises:
            RuntimeError: a parameter was frozen or unfrozen; see `check_frozen`.
        """
        self.check_frozen()
        if not self._never:
            return
        own = {number for number in self._never if self._slots[number] not in used}
        never = _on_all_ranks(self.layout, own)
        newly_used, self._never = self._never - never, never
        if self._first:
            text = "not used in the first step, and unchanged until they are used: {}"
            _warn(self.layout, text, [self._slots[n].spec.name for n in sorted(never)])
        self._updates_before_use |= (
            {} if self._first else {self._slots[n]: self.updates.clone() for n in newly_used}
        )
        if newly_used or self._first:
            self._set_stretches()
        self._first = False

    def _set_stretches(self) -> None:
        never = {self._slots[number] for number in self._never}
        affected = {
            b
            for b in self.layout.buckets
            if any(s in never or s in self._updates_before_use for s in b.slots)
        }
        self.stretches = {bucket: self._stretches_of(bucket, never) for bucket in affected}

    def _stretches_of(self, bucket: Bucket, never: set[Slot]) -> list[Stretch]:
        """Returns the ranges of this rank's slice of a bucket (`Stretch`), which cover the slice.

        Padding belongs to the range of the parameter before it.
        """
        first, last = bucket.own_first, bucket.own_last
        start = torch.zeros_like(self.updates)
        slots = [slot for slot in bucket.slots if slot.last > first and slot.first < last]
        found: list[Stretch] = []
        for slot, end in zip(slots, [*(slot.first for slot in slots[1:]), last], strict=False):
            since = None if slot in never else self._updates_before_use.get(slot, start)
            begin = found[-1][1] if found else 0
            if found and found[-1][2] is since:
                begin, *_ = found.pop()
            found.append((begin, end - first, since))
        return found

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint.

        Returns:
            A dict with three entries. "never": names of unused parameters. "since": name -> number
            of updates before the first use, for parameters first used after the first step.
            "first": whether no step has ended yet.
        """
        since = {
            slot.spec.name: float(updates) for slot, updates in self._updates_before_use.items()
        }
        never = sorted(self._slots[number].spec.name for number in self._never)
        return {"never": never, "since": since, "first": self._first}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restores the state of a checkpoint.

        Args:
            state: the dict that `state()` returned. If None, all parameters count as used since the
                first step.
        """
        state = state or {"never": (), "since": {}, "first": False}
        never, since = set(state["never"]), state["since"]
        self._never = {number for number, slot in enumerate(self._slots) if slot.spec.name in never}
        named = {slot.spec.name: slot for slot in self._slots}
        self._updates_before_use = {
            named[n]: torch.full_like(self.updates, u) for n, u in since.items() if n in named
        }
        self._first = bool(state["first"])
        self.stretches = {}
        if not self._first:
            self._set_stretches()
