"""ZeRO-3 for wrapped modules: hooks that gather the parameters of any nn.Module when they are used.

    gatherer = ModuleGatherer(layout, model, prefetch)
    gatherer.gradient_complete(slot)    call it when the gradient of a parameter is complete
    gatherer.pass_ended()               call it after each backward

Parameters are gathered and released in groups (flat buffers). A unit (a module, see
`Wrapped.units`) gathers the groups of its parameters when its forward is called, and releases them
when the forward returns. Any other use of a parameter also gathers the parameter's group
(`parameter_access`). A backward gathers a group when it reads a parameter, or a view of one, that
autograd has saved. The backward releases the group as soon as one of the following holds:

- the gradients of all parameters of the group have been added;
- `RECENT` other groups were used after the group;
- the backward has ended.

Groups are prefetched in the order in which the previous pass used them. If a pass uses different
groups, prefetching wastes bandwidth and memory, but the results are correct.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from threed.distributed.codecs import Codec
from threed.distributed.sharding import storage_of
from threed.distributed.topology import Axis
from threed.models.wrapped import Wrapped
from threed.zero.agreement import Forwards
from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Group, Layout, Slot
from threed.zero.manual_edits import Changes
from threed.zero.parameter_access import UNTRACED, AbsentParameter, Holder
from threed.zero.torch_modes import compiles, hide_from_checkpointing, without_transforms

# number of most recently used groups that stay gathered in a backward
RECENT = 3


class Trace:
    """Records in which order a pass (forward or backward) uses groups of parameters.

    The recorded order serves as a prediction for the next pass, so that groups can be prefetched.
    """

    def __init__(self) -> None:
        self._used: list[Group] = []
        self._predicted: list[Group] = []
        self._at = 0

    @property
    def last(self) -> Group | None:
        """The group that the previous pass used last; None if there was no previous pass."""
        return self._predicted[-1] if self._predicted else None

    def record(self, group: Group, ahead: int) -> list[Group]:
        """Records a use of a group.

        Args:
            group: the group.
            ahead: number of groups to predict.

        Returns:
            The groups that the previous pass used directly after `group`, at most `ahead` of them.
            Empty if the previous pass did not use `group`, or if the last call recorded the same
            group.
        """
        if self._used and self._used[-1] is group:
            return []
        self._used.append(group)
        if group not in self._predicted[self._at :]:
            return []
        self._at = self._predicted.index(group, self._at) + 1
        return self._predicted[self._at : self._at + ahead]

    def end(self) -> None:
        """Ends the pass. The groups that were used become the prediction for the next pass."""
        if self._used:
            self._predicted, self._used, self._at = self._used, [], 0


class _Hook:
    """The forward hooks of a module.

    The hooks must do nothing for a copied or unpickled module, because such a module belongs to no
    engine. A copy of the module shares this object, so the hooks compare the calling module with
    `module`. Unpickling creates a `_Hook` without instance attributes, so `module` has its default,
    None.
    """

    module: nn.Module | None = None

    def __init__(self, gatherer: ModuleGatherer, module: nn.Module, unit: int | None) -> None:
        self.gatherer, self.module, self.unit = gatherer, module, unit
        # saved-tensor hooks of the calls in progress, innermost last
        self.saving: list[saved_tensors_hooks] = []
        # `torch.compiler.disable` imports torch's compiler. As a decorator it would do so whenever
        # this module is imported; called here, it does so only in programs that use these hooks.
        self._begin = torch.compiler.disable(self._enter, reason=UNTRACED)
        self._end = torch.compiler.disable(self._leave, reason=UNTRACED)
        self._handles = (
            module.register_forward_pre_hook(self.before, prepend=True),
            module.register_forward_hook(self.after, always_call=True),
        )
        self.after_id = self._handles[1].id

    def remove(self) -> None:
        """Removes the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def before(self, module: nn.Module, args: Any) -> None:
        if module is self.module:
            self._begin(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.module:
            self._end(output)

    def _enter(self, module: nn.Module) -> None:
        hooks: Any = module._forward_hooks
        # `after` must run after the user's hooks, which may use parameters
        hooks.move_to_end(self.after_id)
        self.gatherer.enter(self.unit)
        if self.gatherer.runs_compiled(module):
            # saved-tensor hooks are needed, because compiled code bypasses `__torch_function__`
            self.saving.append(self.gatherer.saving)
            self.saving[-1].__enter__()

    def _leave(self, output: Any) -> None:
        if self.saving:
            self.saving.pop().__exit__()
        self.gatherer.leave(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}


def _require_all(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """State dict pre-hook: raises an error if parameters are sharded, before the user saves them.

    A function, so that it does nothing for a copy of the module, whose parameters are plain.
    """
    for param in () if keep_vars else module.parameters():
        if isinstance(param, AbsentParameter):
            param.access.require()


class ModuleGatherer(Gatherer):
    """Gathers the parameters of a wrapped module, which user code may use and change anywhere.

    Args:
        layout: layout of the parameters.
        model: the module and its units; the gatherer registers forward hooks on all of them.
        prefetch: number of groups to gather ahead of their use.
        codec: see `Gatherer`.
        everyone: the ranks that run the module.

    Attributes:
        changes: tracks parameters that user code changes.
        forwards: records the order in which forwards use groups.
        backwards: records the order in which backwards use groups.
        unpaired: compares the forwards outside of training steps between ranks.
    """

    wrapped = True

    def __init__(
        self, layout: Layout, model: Wrapped, prefetch: int, codec: Codec, everyone: Axis
    ) -> None:
        super().__init__(layout, codec)
        self._in_step = False
        self._trains = False  # whether the running module call is part of a training step
        self._is_compared = False  # whether the ranks need not compare the running module call
        self.changes = Changes(model.module, layout, self)
        self.prefetch = prefetch
        self.forwards, self.backwards = Trace(), Trace()
        # the groups that each module call in progress uses, innermost call last
        self._calls: list[list[Group]] = []
        self._recent: list[Group] = []
        self._node: Any = None  # the running autograd node
        self._in_use: set[Group] = set()  # groups that `_node` has used
        sliced = [group for group in layout.groups if group.sliced]
        # ranks that gather parameters together; over all ranks, gathers have a separate communicator
        together = max((g.gather for g in sliced), key=lambda axis: axis.size, default=everyone)
        self.unpaired = Forwards(everyone if together.size == everyone.size else together)
        self._group_of_slot = {slot: group for group in sliced for slot in group.slots}
        self._due: dict[Group, int] = {}
        self._compiles = False
        units = model.units if sliced else ()
        self._hooks = [_Hook(self, unit.module, number) for number, unit in enumerate(units)]
        if sliced and all(unit.module is not model.module for unit in model.units):
            self._hooks.append(_Hook(self, model.module, None))
        self._state_dict_hook = model.module.register_state_dict_pre_hook(_require_all)

    def remove(self) -> None:
        """Removes the gatherer from all parameters, and its hooks from all modules."""
        super().remove()
        for hook in (*self._hooks, self._state_dict_hook):
            hook.remove()

    def before_free(self, group: Group) -> None:
        """Stores the changes that user code made to the group's parameters; see `Changes.store`."""
        self.version += self.changes.store(group)

    # -------------------------------------------------------------------------------------------------------- forward

    def enter(self, unit: int | None) -> None:
        """Begins a module call and gathers the groups of its unit.

        Args:
            unit: number of the module's unit; None if the module is not a unit.
        """
        if not self._calls:
            self._trains = in_backward() or (self._in_step and torch.is_grad_enabled())
            self._is_compared = self._trains
        self._calls.append([])
        for group in self.groups_of(unit) if unit is not None else ():
            self.before_use(group)

    def runs_compiled(self, module: nn.Module) -> bool:
        """Returns whether the module, or a submodule, is compiled."""
        # `_compiles` stays True once it is True, because after `torch._dynamo.reset` `compiles()`
        # returns False although modules are still compiled
        self._compiles = self._compiles or compiles()
        return self._compiles and any(
            part._compiled_call_impl or "_orig_mod" in part._modules for part in module.modules()
        )

    def before_use(self, group: Group) -> None:
        """Gathers a group if a forward or backward of the wrapped module is running.

        At other times it does nothing.
        """
        if self._calls:
            if group not in self._calls[-1]:
                if not self.is_open(group):
                    self._compare_forwards()
                self._calls[-1].append(group)
                self._hold(group, len(self._calls))
        elif in_backward():
            self._use(group)

    def end_forwards(self) -> None:
        """Checks that no rank begins another forward outside of a step. See `Forwards.ended`."""
        self.unpaired.ended()

    def set_in_step(self, on: bool) -> None:
        """Sets whether a training step is in progress, in which forwards are not compared."""
        self._in_step = on

    def _compare_forwards(self) -> None:
        """Checks that all ranks run this forward, before its first gather; see `Forwards`."""
        with without_transforms(), hide_from_checkpointing():
            if not self._is_compared:
                self._is_compared = True
                self.unpaired.begin()
            elif self._trains:
                self.unpaired.ended()

    def leave(self, output: Any) -> None:
        """Ends a module call and its use of groups.

        Args:
            output: the value that the module returns.
        """
        if not self._calls:
            return
        depth, groups = len(self._calls), self._calls.pop()
        returned = self._groups_in(output)
        for group in groups:
            keep = in_backward() or (torch.is_grad_enabled() and group is self.forwards.last)
            if group in returned and self._calls:  # from now on the calling module holds the group
                if group not in self._calls[-1]:
                    self._calls[-1].append(group)
                    self.open(group, depth - 1)
            elif keep or group in returned:
                # keep the group for the backward, for one of three reasons: this call is a
                # recomputation, and its backward is next; the forward uses the group last, so the
                # backward uses it first; or the output contains the group's parameters
                self.open(group, Holder.BACKWARD)
            self.close(group, depth)
        if not self._calls and not in_backward():
            self.forwards.end()

    def _groups_in(self, output: Any) -> set[Group]:
        """Returns the groups whose parameters share memory with a tensor in a module's output."""
        owners = (
            self.by_storage.get(storage_of(leaf))
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor)
        )
        return {owner[0] for owner in owners if owner is not None}

    def _hold(self, group: Group, holder: int | Holder) -> None:
        """Waits until a group is gathered; prefetches the groups that the pass will use next."""
        self.open(group, holder)
        following = (self.backwards if in_backward() else self.forwards).record(
            group, self.prefetch
        )
        self.wait(group)
        self.close(group, Holder.AHEAD)
        for other in following:
            if self._calls and not self.is_open(other):
                self._compare_forwards()
            self.open(other, Holder.AHEAD)

    # ------------------------------------------------------------------------------------------------------- backward

    def _use(self, group: Group) -> None:
        """Gathers a group in a backward, and releases groups that were used less recently.

        The `RECENT` most recently used groups stay gathered, and so do all groups that the running
        autograd node uses.
        """
        if not self.is_open(group):
            self.unpaired.ended()
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._in_use = node, set()
        self._in_use.add(group)
        if not (self._recent and self._recent[-1] is group and self.is_open(group)):
            self._hold(group, Holder.BACKWARD)
            recent = [*(other for other in self._recent if other is not group), group]
            old = [other for other in recent[:-RECENT] if other not in self._in_use]
            for other in old:
                self.close(other, Holder.BACKWARD)
            self._recent = [other for other in recent if other not in old]

    def _publish(self, bucket: Bucket) -> None:
        super()._publish(bucket)
        if compiles():  # wait here, because torch.compile cannot trace a wait at the first use
            self._wait_for((bucket,))

    def gradient_complete(self, slot: Slot) -> None:
        """Releases a parameter's group once the gradients of all parameters in it are complete."""
        group = self._group_of_slot.get(slot)
        if group is None:
            return
        self._due.setdefault(group, len(group.slots))
        self._due[group] -= 1
        if self._due[group] == 0:
            self._recent = [other for other in self._recent if other is not group]
            self.close(group, Holder.BACKWARD)

    def pass_ended(self) -> None:
        """Releases all groups at the end of a backward."""
        self.release_all()

    def release_all(self) -> None:
        """Releases all groups, and ends the forward or backward that was in progress."""
        self.backwards.end()
        self._calls.clear()  # not empty if an error interrupted a forward
        self._recent.clear()
        self._due.clear()
        self._node, self._in_use = None, set()
        super().release_all()


def in_backward() -> bool:
    """Returns whether autograd's engine is running a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
