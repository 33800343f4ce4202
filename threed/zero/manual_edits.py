"""Changes that user code makes to parameters, such as an EMA, clipping or renormalization.

    changes = Changes(module, layout, gatherer)
    changes.begin()                    tracks every change from now on
    changes.absorb_edits(optimizer)    copies changes to the optimizer's states; call it before
                                       updates, and before states are read or written

Changes are detected without reading values: a change in place increments the parameter's version
counter, and the parameter's class records accesses to `.data`. A changed parameter is treated as
follows:

- If its `.data` was replaced, the new values are copied into the group's flat buffer.
- If it is sharded, this rank's slice is stored when the group is released.
- If it has a separate master weight, the master weight is rounded to the parameter's dtype and
  compared with the parameter. Elements that differ are copied from the parameter to the master
  weight. All other elements of the master weight keep their full precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from threed.distributed import collectives
from threed.distributed.sharding import point
from threed.distributed.topology import Axis
from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Group, Layout, Slot
from threed.zero.optimizer import Optimizer
from threed.zero.state import WEIGHT, State, store_all


class Changes:
    """Tracks changes that user code makes to the parameters of a wrapped module.

    Changed values are copied to this rank's slices and to master weights.

    Args:
        module: the wrapped module.
        layout: layout of the module's parameters.
        gatherer: gathers the parameters.
    """

    def __init__(self, module: nn.Module, layout: Layout, gatherer: Gatherer) -> None:
        self.module, self.layout, self.gatherer = module, layout, gatherer
        self._versions: dict[Slot, int] = {}
        # bucket with changes that are not yet in the optimizer's states -> one of the changed
        # parameters, for error messages
        self._newer: dict[Bucket, Slot] = {}

    def begin(self) -> None:
        """Begins to track changes."""
        for slot in self.layout.slots:
            self._mark_unchanged(slot)

    def _mark_unchanged(self, slot: Slot) -> None:
        self._versions[slot] = slot.param._version
        self.gatherer.accesses[slot].mark_touched(False)

    def _changed(self, group: Group) -> list[Slot]:
        """Returns the group's changed parameters; first copies their values into the buffer."""
        with torch._C.DisableTorchFunctionSubclass():
            accesses = self.gatherer.accesses
            found = [
                s
                for s in group.slots
                if accesses[s].touched or s.param._version != self._versions[s]
            ]
            for slot in found:
                self._copy_into_buffer(group, slot)
                self._mark_unchanged(slot)
        return found

    def _copy_into_buffer(self, group: Group, slot: Slot) -> None:
        """If a parameter's `.data` was replaced, copies the new values into the group's buffer.

        Afterwards `.data` is a view of the buffer again.

        Raises:
            RuntimeError: the new values have another shape or dtype.
        """
        param = slot.param
        got, has = ([*param.shape], param.dtype), ([*slot.shape], group.params.dtype)
        if got != has:
            raise RuntimeError(
                f"{slot.spec.name} was set to values of shape {got[0]} and {got[1]}, but has shape {has[0]} and"
                f" {has[1]}: build a new engine to change the shape or dtype of a parameter"
            )
        view = group.view(slot, group.params)
        if param.data_ptr() == view.data_ptr():
            return
        self.gatherer.wait_for(slot)
        view.copy_(param.detach())
        point(param, view)

    def broadcast(self, slots: Sequence[Slot], axis: Axis, source: int) -> None:
        """Copies one rank's values of gathered parameters to all other ranks. Collective.

        Args:
            slots: the parameters.
            axis: the ranks.
            source: index in `axis` of the rank whose values are copied.

        Raises:
            RuntimeError: on every rank, if that rank changed the shape or dtype of a parameter.
        """
        accesses = [self.gatherer.accesses[slot] for slot in slots]
        for access in accesses:
            access.require()

        def into_buffers() -> None:
            for access in accesses if axis.index == source else ():
                self._copy_into_buffer(access.group, access.slot)

        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            collectives.attempt_together(into_buffers, axis, RuntimeError, str)
            for access in accesses:
                values = access.group.view(access.slot, access.group.params)
                collectives.broadcast(values, axis, source)
                point(access.slot.param, values)
                access.mark_touched()

    def store(self, group: Group) -> bool:
        """Stores this rank's slices of a group if a parameter of the group was changed.

        Call it before the group is freed, because freeing the group discards its buffer, and the
        changes are only in that buffer.

        Args:
            group: a sharded group.

        Returns:
            Whether any parameter was changed.
        """
        changed = self._changed(group)
        for bucket in group.buckets if changed else ():
            staged = bucket.storage.empty()
            staged.values.copy_(group.params[bucket.own_first : bucket.own_last])
            staged.store()
            self._newer[bucket] = changed[0]
        return bool(changed)

    def check_structure(self) -> None:
        """Raises RuntimeError if the module lost or gained a parameter since `begin`."""
        _check_structure(self.module, self.layout)

    def absorb_edits(self, optimizer: Optimizer) -> None:
        """Copies all changes so far to the optimizer's states.

        Release all sharded groups before this call, because changes of sharded parameters are
        copied from the slices, and the release stores these changes in the slices (`store`).

        Args:
            optimizer: the optimizer that holds the states.

        Raises:
            RuntimeError: a change cannot be copied; the message names the parameter.
        """
        for group in self.layout.groups:
            if not group.sliced and (changed := self._changed(group)):
                self._newer |= dict.fromkeys(group.buckets, changed[0])
        separate = [s for s in optimizer.states if s.bucket in self._newer and not s.shared]
        if separate:
            self._update_masters(optimizer, separate)
        self._newer.clear()

    def _update_masters(self, optimizer: Optimizer, states: Sequence[State]) -> None:
        slot = self._newer[states[0].bucket]
        if self.layout.policy.delayed:
            raise RuntimeError(
                f"{slot.spec.name} was changed by the program, or its .data was accessed, while a delayed update"
                " of it was running: set --zero.delayed-update false"
            )
        optimizer.wait()
        for state in states:
            buffers, storage = state.fetch((WEIGHT,)), state.bucket.storage.fetch()
            master, param = buffers[WEIGHT].wait(), storage.wait().to(buffers[WEIGHT].values.device)
            master.copy_(
                torch.where(master.to(param.dtype) == param, master, param.to(master.dtype))
            )
            storage.drop()
            store_all(buffers)


def _check_structure(module: nn.Module, layout: Layout) -> None:
    """Raises RuntimeError if the module lost or gained a parameter since the engine was built."""
    managed = {
        id(slot.param): slot.spec.name for slot in layout.slots if "access" in vars(slot.param)
    }
    found = {id(param) for param in _parameters(module)}
    if found == managed.keys():
        return
    for key, name in managed.items():
        if key not in found:
            raise RuntimeError(
                f"{name} was replaced by another parameter, or removed, after the engine was built: change"
                " its values in place (param.copy_) instead"
            )
    for name, param in module.named_parameters():
        if id(param) not in managed:
            raise RuntimeError(
                f"{name} was added to the module after the engine was built, which would neither train nor save it:"
                " add it before, build a new engine, or keep it outside the module"
            )


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields a module's parameters in arbitrary order; faster than `module.parameters()`."""
    stack, seen = [module], {module}
    while stack:
        module = stack.pop()
        yield from (param for param in module._parameters.values() if param is not None)
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
