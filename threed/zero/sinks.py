"""Sinks: where gradients of parameters go, from layers of `threed.layers` and from autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from threed.distributed.sharding import is_managed
from threed.layers.slicing import ForwardScope
from threed.ops import grouped
from threed.ops.grouped import Groups
from threed.ops.matmul import NATIVE, Matmul
from threed.zero.contributions import Contributions, Deferral, LaunchQueue, is_own
from threed.zero.gather import Gatherer
from threed.zero.layout import Slot
from threed.zero.parameter_access import GRAD
from threed.zero.plain_backwards import PlainBackwards
from threed.zero.reductions import Gradients


class Owner(Protocol):
    """The part of `threed.zero.reducer.Reducer` that its sinks use; see there."""

    dynamic: bool
    plain: PlainBackwards | None
    gatherer: Gatherer | None
    deferral: Deferral
    scope: ForwardScope
    memory: Gradients
    recording: list[Sink] | None

    @property
    def in_step(self) -> bool: ...

    def add_late(self, sink: Sink, grad: Tensor) -> None: ...

    def mark_complete(self, sink: Sink) -> None: ...


class Sink:
    """Accumulates the gradient of one parameter.

    The first contribution of a round (a micro-batch or a step, see the module's docstring)
    overwrites the gradient's memory; later contributions are added to it.

    Layers of `threed.layers` call the `add` methods of `param.sink`. For all other modules,
    autograd calls `take` when it has computed a gradient of the parameter.

    Args:
        reducer: the reducer that owns the sink.
        slot: the parameter.
        counts: counts the expected and the added contributions to the gradient.
        queue: launch queue of the parameter's buckets.

    Attributes:
        given: whether `param.grad` is a gradient that the program has set, or that was there before
            the engine was built.
    """

    def __init__(
        self, reducer: Owner, slot: Slot, counts: Contributions, queue: LaunchQueue
    ) -> None:
        self.reducer, self.slot, self.counts, self.queue = reducer, slot, counts, queue
        slot.param.sink = self  # type: ignore[attr-defined]
        hook = _grad_hook(weakref.ref(self))
        self._hook = slot.param.register_post_accumulate_grad_hook(hook)
        self.given = GRAD.__get__(slot.param) is not None

    def mark_given(self, given: bool) -> None:
        """Sets the attribute `given`."""
        self.given = given

    def remove(self) -> None:
        """Removes the sink and its hook from the parameter."""
        self._hook.remove()
        del self.slot.param.sink  # type: ignore[attr-defined]

    @property
    def has_user_hooks(self) -> bool:
        """Whether the user has registered post-accumulate hooks for the parameter."""
        hooks = self.slot.param._post_accumulate_grad_hooks
        return hooks is not None and len(hooks) > 1

    def run_last(self, microbatches: int) -> None:
        """Moves the sink's hook behind the user's post-accumulate hooks.

        The user's hooks read `param.grad`, which the sink's hook sets to None.

        Args:
            microbatches: number of micro-batches of the next step.

        Raises:
            RuntimeError: the step has several micro-batches. The user's hooks would expect the sum
                over micro-batches in `param.grad`, which contains only the gradient of one
                micro-batch.
        """
        if microbatches > 1:
            raise RuntimeError(
                f"{self.slot.spec.name}: register_post_accumulate_grad_hook with {microbatches}"
                " micro-batches per step: .grad holds the gradient of one micro-batch, not the sum"
                " so far; use register_hook, which gets the gradient of one micro-batch in plain"
                " PyTorch too"
            )
        hooks = self.slot.param._post_accumulate_grad_hooks
        assert hooks is not None
        hooks[self._hook.id] = hooks.pop(self._hook.id)

    def add(self, grad: Tensor) -> None:
        """Adds a contribution with the full shape of the parameter."""
        if self._try_defer(self.add, grad):
            return
        if self.is_late():
            self.reducer.add_late(self, grad)
            return
        target = self._target()
        if self.counts.added:
            target.add_(grad)
        else:
            target.copy_(grad)
        self.mark_added()

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        """Adds the matrix product `a @ b` as a contribution.

        The product is accumulated directly into the gradient's memory, unless it arrives late.

        Args:
            a: left factor [m k], where the parameter's shape is [m n].
            b: right factor [k n].
            by: implementation of the matrix product.
        """
        self._check_loss()
        if self._try_defer(self.add_product, a, b, by):
            return None
        if self.is_late():
            return self.add(by.product(a, b))
        by.add_product_(self._target(), a, b, fresh=not self.counts.added)
        return self.mark_added()

    def _check_loss(self) -> None:
        """Raises RuntimeError if the gradient was computed during a layer's forward."""
        if self.reducer.scope.active:
            raise RuntimeError(
                f"{self.slot.spec.name}: a gradient was computed during a layer's forward:"
                " torch.autograd.grad in a forward must not differentiate a layer of threed.layers,"
                " which adds to the gradient of the loss; use torch's own modules"
            )

    def _try_defer(self, add: Callable[..., None], *arguments: Any) -> bool:
        """Defers a contribution if this is the input-gradient pass of a split backward.

        Args:
            add: function that adds the contribution.
            arguments: the arguments of `add`.

        Returns:
            Whether the contribution was deferred.
        """
        waiting = self.reducer.deferral.waiting
        if waiting is None:
            return False
        waiting.append((add, arguments))
        return True

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds row i of `rows` [n h] to row `index[i]` of the gradient, for all i; `index`: [n]."""
        self._check_loss()
        if self._try_defer(self.add_rows, index, rows):
            return None
        if self.is_late():
            full = rows.new_zeros(self.slot.param.shape)
            return self.add(full.index_add_(0, index, rows) if len(full) else full)
        target = self._target()
        if not self.counts.added:
            target.zero_()
        if target.shape[0]:
            target.index_add_(0, index, rows.to(target.dtype))
        return self.mark_added()

    def add_groups(self, dy: Tensor, x: Tensor, groups: Groups) -> None:
        """Adds the product dy^T x of each group of rows; see `layers.slicing.GradSink`."""
        self._check_loss()
        if self._try_defer(self.add_groups, dy, x, groups):
            return None
        if self.is_late():
            full = dy.new_empty(self.slot.param.shape)
            grouped.add_products_(full, dy, x, groups, fresh=True)
            return self.add(full)
        grouped.add_products_(self._target(), dy, x, groups, fresh=not self.counts.added)
        return self.mark_added()

    def memory(self) -> tuple[Tensor, bool] | None:
        """Returns the gradient's memory, for a caller that writes its contribution there.

        Returns:
            (memory, accumulate): the gradient's memory, with the parameter's shape, and whether
            the caller must add its contribution to the values there (True) or overwrite them
            (False). After writing, the caller must call `mark_added`. None if the memory must not
            be written now; the caller must then call `Sink.add` instead.
        """
        self._check_loss()
        if self.defers() or self.is_late():
            return None
        return self._target(), self.counts.added > 0

    def mark_added(self) -> None:
        """Counts a contribution that was written to the gradient's memory."""
        complete, recording = self.counts.add(), self.reducer.recording
        if recording is not None:
            recording.append(self)
        elif complete:
            self.reducer.mark_complete(self)

    def is_late(self) -> bool:
        """Returns whether a contribution would be late.

        It would be late if a part of the gradient is already being reduced in this round (a
        micro-batch or a step).
        """
        return self.queue.is_late(self.counts)

    def in_forward(self) -> bool:
        """Returns whether a layer's forward is running; the sink then accepts no gradients."""
        return self.reducer.scope.active

    def defers(self) -> bool:
        """Returns whether contributions are deferred to the weight pass (W) of a split backward."""
        return self.reducer.deferral.waiting is not None

    def take(self, param: Tensor) -> None:
        """Moves `param.grad` into the sink; called by autograd's post-accumulate hook.

        A gradient that another engine's backward computes stays in `.grad` and accumulates there.
        It is added when a step of this engine ends, unless `Reducer.drop` discards it first.
        """
        if self.reducer.dynamic and not is_own(self.reducer, self.slot, self.reducer.plain):
            if self.reducer.gatherer is not None:
                self.reducer.gatherer.gradient_complete(self.slot)
            return
        if (grad := GRAD.__get__(param)) is not None:
            GRAD.__set__(param, None)
            grad = grad.detach()  # with create_graph=True it is part of a graph
            self.add(grad.to_dense() if grad.is_sparse else grad)

    def _target(self) -> Tensor:
        return self.reducer.memory.view(self.slot)


def _grad_hook(sink: weakref.ref[Sink]) -> Callable[[Tensor], None]:
    """Returns a post-accumulate hook for autograd that calls `sink.take`.

    The hook holds a weak reference to the sink. Python's garbage collector cannot traverse
    autograd's hooks, so a strong reference would keep the engine and its swap file alive forever.
    """

    def hook(param: Tensor) -> None:
        if (alive := sink()) is not None:
            alive.take(param)

    return hook


def refuse_torch_steps() -> RemovableHandle:
    """Registers a hook that raises RuntimeError if a torch optimizer steps an engine's parameters.

    Such a step changes nothing, because the gradients are in the engine's buffers. The hook accepts
    a step for which the program has set `.grad` itself.
    """
    return register_optimizer_step_post_hook(_refuse_step)


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    managed = [param for param in params if is_managed(param)]
    if managed and all(GRAD.__get__(param) is None for param in managed):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() has no effect: its parameters belong to a threed engine, which keeps"
            " their gradients and updates them in engine.step() or engine.update(). Remove this call, and set the"
            " optimizer by the section optim of the Config, or pass it to threed.initialize"
        )


def refuse_gradients(slot: Slot) -> RemovableHandle:
    """Registers a hook that raises RuntimeError if a gradient of a parameter is computed.

    Args:
        slot: the parameter. It may be frozen; the hook then takes effect if it is unfrozen.
    """
    name, param, trainable = slot.spec.name, slot.param, slot.param.requires_grad

    def refuse(grad: Tensor) -> None:
        raise RuntimeError(
            f"a gradient of {name}, whose engine only evaluates (trains=False): run the module under torch.no_grad()"
            " or in engine.inference(), or freeze its parameters to get gradients of inputs only"
        )

    with torch._C.DisableTorchFunctionSubclass():
        handle: RemovableHandle = param.requires_grad_(True).register_hook(refuse)
        param.requires_grad_(trainable)
    return handle
