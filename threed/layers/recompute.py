"""Selective recompute: the backward recomputes named operations, whose results are not saved.

    class Mine(nn.Module):
        recompute = Recompute()                   # the default, which saves everything

        def forward(self, x):
            y = self.recompute.run("activation", torch.tanh, self.up(x))
            return self.down(y)

    selective = Selective(["activation"])
    selective.install(layer)
    with selective.watch():                       # around the layer's forward
        y = layer(x, micro)

Autograd saves no tensor inside a named operation. In the backward the operation is run again from
its inputs. This second run rebuilds all tensors that the backward of the operation needs; each
tensor is freed after use.

The next layer saves the operation's result as its input, so dropping only the tensors inside the
operation would free no memory. Therefore results are dropped too. A result is identified by its
storage: whenever autograd would save a tensor with this storage, it saves a placeholder instead
(Megatron-Core achieves the same by emptying the output's storage). Weights, often saved as
transposed views, have different storages and are not affected. A result that was changed in place,
or is viewed with a different dtype, cannot be rebuilt and is saved as usual. Saved tensors are
checked for in-place changes before the backward uses them, because autograd omits this check for
tensors that pass through saved-tensor hooks.

Names of operations:
    attention     norms of heads, rotary positions, scaled dot product; the projected queries, keys
                  and values are saved. If keys travel around a ring of context ranks, the output
                  and its log-sum-exp are saved too, so that they travel only once in the forward.
    activation    the activation of the MLP; its input is saved
    norm          the norms of a block; their inputs are saved. With sequence parallelism the
                  backward also gathers a norm's result again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from threed.core.device import rng_states, set_rng_states
from threed.layers.linear import Product
from threed.ops import attention


class RngState:
    """The state of torch's generators before a forward, so that a rerun draws the same numbers.

    The state is kept only if the forward used a generator. The layers of this package use no
    generator; custom layers may use one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: dict[str, Tensor] | None = rng_states(device)

    def drawn(self) -> None:
        """Marks the end of the forward. Drops the state if the forward used no generator."""
        before, now = self._before or {}, rng_states(self._device)
        if all(torch.equal(before[kind], now[kind]) for kind in before):
            self._before = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which the generators start from the recorded state.

        On exit the generators get back the state that they had on entry.
        """
        if self._before is None:
            yield
            return
        now = rng_states(self._device)
        set_rng_states(self._before, self._device)
        try:
            yield
        finally:
            set_rng_states(now, self._device)


class Recompute:
    """Runs the operations of a layer without recompute: everything is saved for the backward.

    This is the default. With `--recompute.mode selective`, the engine replaces this object by a
    `Selective`, which computes named operations again in the backward.
    """

    def run(self, name: str, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Returns f(*inputs).

        Args:
            name: name of the operation (see the module's docstring).
            f: function that depends on its inputs and on weights only.
            inputs: tensors that `f` is called with.
        """
        return f(*inputs)

    def run_as_one(self, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Returns f(*inputs); named operations inside f are not recomputed separately.

        Args:
            f: function to run.
            inputs: tensors that `f` is called with.
        """
        return f(*inputs)

    def keep(self, f: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns f(); the second run of the surrounding operation gets the results of the first.

        For results inside a named operation that take less memory than it takes time to compute
        them again.

        Args:
            f: computes tensors that need no gradient, as in the forward of an autograd function.
        """
        return f()

    def column(self, layer: Product, x: Tensor, **options: bool) -> Tensor:
        """Returns layer(x, **options).

        Args:
            layer: a column-parallel layer.
            x: its input, which may be the result of a named operation.
            options: further arguments of the layer.
        """
        return layer(x, **options)


# Layout of a view: (shape, strides, offset in the storage).
Layout = tuple[tuple[int, ...], tuple[int, ...], int]


class _SavedTensor:
    """A saved tensor, and the value of its version counter at the time of saving.

    The version of a weight is not checked, because ZeRO writes into the buffers of weights.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        base = tensor if tensor._base is None else tensor._base
        # The detached tensor shares the version counter, so `get` notices later in-place changes.
        self._tensor = tensor.detach()
        self._version = None if isinstance(base, nn.Parameter) else tensor._version

    def get(self, description: str) -> Tensor:
        """Returns the tensor. Raises RuntimeError if it was changed in place after it was saved."""
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                f"{description}, {self._tensor.dtype} {list(self._tensor.shape)}, was changed in place after it was saved: it"
                f" is at version {self._tensor._version}, and was at {self._version}; change a copy instead"
                " (x = x * 2, not x.mul_(2))"
            )
        return self._tensor


class _Placeholder:
    """An object that autograd saves in place of a tensor.

    `_Operation.rebuild` sets `value`, which is freed with the placeholder.
    """

    __slots__ = ("__weakref__", "operation", "value")

    def __init__(self, operation: _Operation) -> None:
        self.operation = operation
        self.value: _SavedTensor | None = None


Packed = _SavedTensor | _Placeholder


def unpack(packed: Packed, description: str = "a tensor that the backward needs") -> Tensor:
    """Returns a saved tensor, rebuilt if necessary.

    description: describes the tensor in an error message.
    """
    if isinstance(packed, _Placeholder):
        if packed.value is None:
            packed.operation.rebuild()
        assert packed.value is not None
        packed = packed.value
    return packed.get(description)


class _Kept:
    """Results inside a named operation that its second run does not compute again (`keep`)."""

    def __init__(self) -> None:
        self._results: list[list[_SavedTensor]] = []
        self._next: Iterator[list[_SavedTensor]] | None = None  # None: the first run

    def run(self, f: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns f() in the first run, and the same results in later runs."""
        if self._next is not None:
            description = "a kept result of a recomputed operation"
            return tuple(saved.get(description) for saved in next(self._next))
        found = f()
        self._results.append([_SavedTensor(x) for x in found])
        return found

    def rewind(self) -> None:
        """Marks the end of a run."""
        self._next = iter(self._results)


class _Operation:
    """One run of a named operation: its inputs, and placeholders of its saved tensors."""

    def __init__(
        self,
        name: str,
        f: Callable[..., Tensor],
        inputs: Sequence[Packed],
        requires_grad: Sequence[bool],
    ) -> None:
        self.name, self.f, self.inputs, self.requires_grad = name, f, inputs, requires_grad
        # placeholders of the tensors that autograd saves inside `f`, in the order of saving
        self._inside: list[weakref.ref[_Placeholder]] = []
        # placeholders of the result and of the result's views, each with its layout
        self._results: list[tuple[weakref.ref[_Placeholder], Layout]] = []
        self._rng: RngState | None = None
        # version counter and dtype of the result
        self._version: tuple[int, torch.dtype] | None = None

    def first(self, inputs: Sequence[Tensor]) -> Tensor:
        """Runs the operation for the first time, in the forward; returns its result."""
        self._rng = RngState(inputs[0].device)
        with saved_tensors_hooks(self._pack, unpack):
            y = self.f(*inputs)
        self._rng.drawn()
        self._version = y._version, y.dtype
        return y

    def can_rebuild(self, tensor: Tensor) -> bool:
        """Returns whether `rebuild` can restore `tensor`, which is the result or a view of it.

        Restoring is impossible after an in-place change of the result, and for a view with another
        dtype.
        """
        return self._version == (tensor._version, tensor.dtype) and not (
            tensor.is_conj() or tensor.is_neg()
        )

    def _pack(self, _: Tensor) -> _Placeholder:
        placeholder = _Placeholder(self)
        self._inside.append(weakref.ref(placeholder))
        return placeholder

    def result(self, view: Tensor) -> _Placeholder:
        """Returns a placeholder for the result or a view of it."""
        placeholder = _Placeholder(self)
        self._results.append((weakref.ref(placeholder), _layout(view)))
        return placeholder

    def rebuild(self) -> None:
        """Runs the operation again in the backward; fills the placeholders still in use."""
        recomputed: list[_SavedTensor] = []
        description = f"an input of the recomputed operation {self.name}"
        inputs = [
            unpack(x, description).detach().requires_grad_(w)
            for x, w in zip(self.inputs, self.requires_grad, strict=True)
        ]
        draws = self._rng.again() if self._rng else nullcontext()
        with (
            torch.enable_grad(),
            draws,
            saved_tensors_hooks(lambda t: recomputed.append(_SavedTensor(t)), _no_backward),
        ):
            y = self.f(*inputs).detach()
        if len(recomputed) != len(self._inside):
            raise RuntimeError(
                f"recompute of {self.name} saved {len(recomputed)} tensors where its forward saved {len(self._inside)}: it"
                " must be a function of its inputs and weights alone"
            )
        for ref, saved in zip(self._inside, recomputed, strict=True):
            if (placeholder := ref()) is not None:
                placeholder.value = saved
        for ref, layout in self._results:
            if (placeholder := ref()) is not None:
                placeholder.value = _SavedTensor(y.as_strided(*layout))


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _no_backward(_: Any) -> Tensor:
    raise AssertionError("backward through a graph that only rebuilds values")


_SAVED = frozenset(operator.default for operator in attention.FUSED)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.MUST_RECOMPUTE


def _contexts() -> Any:
    """Returns the policy for recompute under torch.compile: save only results of fused attention.

    Saving these results costs little: the next layer saves the attention output in any case, and
    the log-sum-exp is one number per query. Moreover, torch 2.13 cannot recompute fused attention
    in a graph with an `Opaque` input (`layers.compiled`): it mistakes the attention's random state
    for a saved tensor.
    """
    return create_selective_checkpoint_contexts(_policy)


class Selective(Recompute):
    """Recomputes the operations named `ops` in the backward; saves everything else.

    Args:
        ops: names of the operations to recompute (see the module's docstring).
    """

    def __init__(self, ops: Iterable[str]) -> None:
        self.ops = frozenset(ops)
        # Maps the storage address of a result to the operation that computed the result. While the
        # weak reference to the storage exists, torch does not reuse the address.
        self._results: dict[int, tuple[StorageWeakRef, _Operation]] = {}
        self._running = False
        self._kept: _Kept | None = None  # of the operation that is running

    def install(self, layer: nn.Module) -> None:
        """Makes a layer and its submodules run their operations through this object."""
        for module in layer.modules():
            if isinstance(getattr(module, "recompute", None), Recompute):
                module.recompute = self  # type: ignore[assignment]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context in which tensors that can be rebuilt are saved as placeholders."""
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self._results.clear()

    def run(self, name: str, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Returns f(*inputs); saves only the inputs if `name` is to be recomputed."""
        if name not in self.ops or self._running or not torch.is_grad_enabled():
            return f(*inputs)
        if torch.compiler.is_compiling():
            return checkpoint(f, *inputs, use_reentrant=False, context_fn=_contexts)
        as_one = functools.partial(self._run_keeping, _Kept(), f)
        operation = _Operation(
            name, as_one, [self._pack(x) for x in inputs], [x.requires_grad for x in inputs]
        )
        y = operation.first(inputs)
        storage = y.untyped_storage()
        self._results[storage._cdata] = StorageWeakRef(storage), operation
        return y

    def run_as_one(self, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        self._running = True
        try:
            return f(*inputs)
        finally:
            self._running = False

    def _run_keeping(self, kept: _Kept, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        self._kept = kept
        try:
            return self.run_as_one(f, *inputs)
        finally:
            self._kept = None
            kept.rewind()

    def keep(self, f: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return f() if self._kept is None else self._kept.run(f)

    def column(self, layer: Product, x: Tensor, **options: bool) -> Tensor:
        """Returns layer(x, **options).

        If the layer gathers x, and x is recomputed, the gathered x is not saved: the backward
        gathers it again.
        """
        again = not torch.compiler.is_compiling() and self._operation_of(x) is not None
        before = layer.set_regather(layer.regather or again)
        try:
            return super().column(layer, x, **options)
        finally:
            layer.set_regather(before)

    def _operation_of(self, tensor: Tensor) -> _Operation | None:
        found = self._results.get(tensor.untyped_storage()._cdata)
        return found[1] if found is not None and found[1].can_rebuild(tensor) else None

    def _pack(self, tensor: Tensor) -> Packed:
        operation = self._operation_of(tensor)
        return _SavedTensor(tensor) if operation is None else operation.result(tensor)
