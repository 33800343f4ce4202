"""Parameters that are changed by hand: teachers that follow a student, clipped weights, renormalised embeddings.

    changes = Changes(layout, optimizer, gatherer)      from now on every change is noticed
    changes.take_in()                                   before an update, and before anybody reads or writes states

A change in place counts the parameter's version up, and its class sees whoever asks for `.data`. So what was changed is
known without a look at the values: this rank's slice of it goes storage when its group is released, a `.data` that was
pointed elsewhere is copied into the flat buffer, and a master that is kept apart takes over what is no longer its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Group, Layout, Slot
from threed.zero.optimizer import Optimizer
from threed.zero.state import WEIGHT, State, store_all


class Watched(nn.Parameter):
    """A parameter that notices who asks for its `.data`, whose changes its version does not count."""

    touched = False

    @property
    def data(self) -> Any:
        """As of any tensor."""
        self.touched = True
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Tensor) -> None:
        self.touched = True
        Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


class Changes:
    """Notices changes of a wrapped module's parameters, and keeps them."""

    def __init__(self, layout: Layout, optimizer: Optimizer, gatherer: Gatherer) -> None:
        self.layout, self.optimizer, self.gatherer = layout, optimizer, gatherer
        self._versions: dict[Slot, int] = {}
        self._apart = {state.bucket: state for state in optimizer.states if not state.shared}
        self._to_masters: dict[State, Slot] = {}  # whose parameters are newer, and one of these
        for slot in layout.slots:
            if type(slot.param) is nn.Parameter:
                slot.param.__class__ = Watched
            self._note(slot)
        gatherer.leaving = self._leaving

    def _note(self, slot: Slot) -> None:
        self._versions[slot] = slot.param._version
        slot.param.touched = False  # type: ignore[attr-defined]

    def _changed(self, group: Group) -> list[Slot]:
        """The group's changed parameters, whose values are in its buffer now."""
        found = [s for s in group.slots if s.param.touched or s.param._version != self._versions[s]]  # type: ignore[attr-defined]
        for slot in found:
            self._settle(group, slot)
            self._note(slot)
        return found

    def _settle(self, group: Group, slot: Slot) -> None:
        """Copies values that lie elsewhere into the buffer, and points the parameter there again."""
        place, param = group.view(slot, group.params), slot.param
        if param.data_ptr() == place.data_ptr():
            return
        if param.shape != place.shape:
            raise RuntimeError(f"{slot.spec.name}: got values of shape {list(param.shape)}, it has {list(place.shape)}")
        self.gatherer.wait_for(slot)
        place.copy_(param.detach())
        param.data = place.data

    def _leaving(self, group: Group) -> None:
        """A sliced group is about to lose its memory: this rank's slices of what was changed go storage."""
        changed = self._changed(group)
        for bucket in group.buckets if changed else ():
            staged = bucket.storage.empty()
            staged.values.copy_(group.params[bucket.own_first : bucket.own_last])
            staged.store()
            self._masters_follow(bucket, changed[0])

    def _masters_follow(self, bucket: Bucket, slot: Slot) -> None:
        if bucket in self._apart:
            self._to_masters[self._apart[bucket]] = slot

    def take_in(self) -> None:
        """Makes all changes so far those of the states; RuntimeError naming what cannot be. Sliced groups must have
        been released."""
        for group in self.layout.groups:
            _check_places(group)
            if not group.sliced and (changed := self._changed(group)):
                for bucket in group.buckets:
                    self._masters_follow(bucket, changed[0])
        if self._to_masters:
            self._update_masters()

    def _update_masters(self) -> None:
        slot = next(iter(self._to_masters.values()))
        if self.optimizer.delayed is not None:
            raise RuntimeError(
                f"{slot.spec.name} was changed by hand, or its .data was asked for, while its next values were under"
                " way: set --zero.delayed-update false"
            )
        self.optimizer.flush()
        while self._to_masters:
            state, _ = self._to_masters.popitem()
            buffers, storage = state.fetch((WEIGHT,)), state.bucket.storage.fetch()
            master, param = buffers[WEIGHT].wait(), storage.wait().to(buffers[WEIGHT].values.device)
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
            storage.drop()
            store_all(buffers)


def _check_places(group: Group) -> None:
    for slot in group.slots:
        for owner, attribute in slot.places:
            if dict.get(owner._parameters, attribute) is not slot.param:
                raise RuntimeError(
                    f"{slot.spec.name} was replaced by another parameter, or removed, after the engine was made: change"
                    " its values in place (param.copy_) instead"
                )
