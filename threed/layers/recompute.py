"""Selective recompute: operations in a layer whose results are recomputed in the backward instead of saved.

    class Mine(nn.Module):
        recompute = Recompute()                              # saves everything, until a Selective is installed

        def forward(self, x):
            y = self.recompute.run("activation", torch.tanh, self.up(x))
            return self.down(y)

    selective = Selective(["activation"])
    selective.install(layer)
    with selective.watch():                                  # around the layer's forward
        y = layer(x, micro)

Nothing is saved inside a named operation; in the backward, what autograd needs is recomputed from the operation's
inputs, all at once, and freed as it is used. The operation's result is the input that the next layer saves, so dropping
only the inner tensors would gain nothing. Results are identified by their storage, and wherever one is saved it is
replaced by a placeholder from which it is rebuilt (Megatron-Core does the same by emptying the output's storage).
Weights are saved too, often as transposed views; their storage is none of those. A result that was changed in place, or
is viewed in another dtype, cannot be rebuilt: it is saved as any other tensor. A saved tensor that changes before the
backward is an error, as without hooks; autograd does not check this itself once hooks are set.

Names in use: attention (the core: norms of heads, rotary positions, scaled dot product; queries, keys and values are
saved as projected), activation (of the MLP; its input is saved), norm (its input is saved). Under sequence parallelism
a norm's gathered result is gathered again as well.
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

from threed import collectives
from threed.device import rng_states, set_rng_states
from threed.layers.linear import Product
from threed.ops import attention
from threed.sharding import storage_of


class RngState:
    """The state of torch's generators before a forward, so that it can be run again with the same random numbers.

    It is kept only if the forward drew from them: the layers of this package do not, those of users may.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: dict[str, Tensor] | None = rng_states(device)

    def drawn(self) -> None:
        """Ends the recording: drops the state if nothing was drawn."""
        before, now = self._before or {}, rng_states(self._device)
        if all(torch.equal(before[kind], now[kind]) for kind in before):
            self._before = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restores the recorded state in the block; afterwards the generators continue from where they were."""
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
    """The default for the operations of a layer: everything is saved."""

    def run(self, name: str, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Returns f(*inputs); f depends on its inputs and on weights only."""
        return f(*inputs)

    def column(self, layer: Product, x: Tensor) -> Tensor:
        """Returns layer(x), where x may be the result of an operation."""
        return layer(x)


Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset in the storage


class _SavedTensor:
    """A tensor that is saved as it is, with its version; not for weights, because ZeRO writes into their buffers."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        base = tensor if tensor._base is None else tensor._base
        self._tensor = tensor.detach()  # shares the version counter
        self._version = None if isinstance(base, nn.Parameter) else tensor._version

    def get(self, what: str) -> Tensor:
        """Returns the tensor; RuntimeError if it was changed in place."""
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                f"{what}, {self._tensor.dtype} {list(self._tensor.shape)}, was changed in place after it was saved: it"
                f" is at version {self._tensor._version}, and was at {self._version}; change a copy instead"
                " (x = x * 2, not x.mul_(2))"
            )
        return self._tensor


class _Placeholder:
    """A placeholder that autograd holds in place of a tensor; `value` is set when it is rebuilt, and freed with it."""

    __slots__ = ("__weakref__", "operation", "value")

    def __init__(self, operation: _Operation) -> None:
        self.operation = operation
        self.value: _SavedTensor | None = None


Packed = _SavedTensor | _Placeholder


def unpack(packed: Packed, what: str = "a tensor that the backward needs") -> Tensor:
    """Returns the tensor that was saved, rebuilt if need be."""
    if isinstance(packed, _Placeholder):
        if packed.value is None:
            packed.operation.rebuild()
        assert packed.value is not None
        packed = packed.value
    return packed.get(what)


class _Operation:
    """One run of a named operation: its inputs, and placeholders of what it saved and returned."""

    def __init__(
        self, name: str, f: Callable[..., Tensor], inputs: Sequence[Packed], wants: Sequence[bool]
    ) -> None:
        self.name, self.f, self.inputs, self.wants = name, f, inputs, wants
        self._inside: list[weakref.ref[_Placeholder]] = []  # in the order saved
        self._results: list[tuple[weakref.ref[_Placeholder], Layout]] = []
        self._draws: RngState | None = None
        self._made: tuple[int, torch.dtype] | None = None  # the result's version and dtype

    def first(self, inputs: Sequence[Tensor]) -> Tensor:
        """Runs the operation in the forward."""
        self._draws = RngState(inputs[0].device)
        with saved_tensors_hooks(self._pack, unpack):
            y = self.f(*inputs)
        self._draws.drawn()
        self._made = y._version, y.dtype
        return y

    def makes(self, tensor: Tensor) -> bool:
        """Returns whether a tensor in the result's storage is a view of what `rebuild` returns."""
        return self._made == (tensor._version, tensor.dtype) and not (
            tensor.is_conj() or tensor.is_neg()
        )

    def _pack(self, _: Tensor) -> _Placeholder:
        placeholder = _Placeholder(self)
        self._inside.append(weakref.ref(placeholder))
        return placeholder

    def result(self, view: Tensor) -> _Placeholder:
        """Returns a placeholder of the result, or of a view of it."""
        placeholder = _Placeholder(self)
        self._results.append((weakref.ref(placeholder), _layout(view)))
        return placeholder

    def rebuild(self) -> None:
        """Runs the operation in the backward, and fills the placeholders that are still alive."""
        again: list[_SavedTensor] = []
        what = f"an input of {self.name}, which is to be recomputed"
        inputs = [
            unpack(x, what).detach().requires_grad_(w)
            for x, w in zip(self.inputs, self.wants, strict=True)
        ]
        draws = self._draws.again() if self._draws else nullcontext()
        with (
            torch.enable_grad(),
            draws,
            saved_tensors_hooks(lambda t: again.append(_SavedTensor(t)), _never),
        ):
            y = self.f(*inputs).detach()
        if len(again) != len(self._inside):
            raise RuntimeError(
                f"recompute of {self.name} saved {len(again)} tensors where its forward saved {len(self._inside)}: it"
                " must be a function of its inputs and weights alone"
            )
        for ref, saved in zip(self._inside, again, strict=True):
            if (placeholder := ref()) is not None:
                placeholder.value = saved
        for ref, layout in self._results:
            if (placeholder := ref()) is not None:
                placeholder.value = _SavedTensor(y.as_strided(*layout))


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _never(_: Any) -> Tensor:
    raise AssertionError("a graph made to rebuild values has no backward")


_SAVED = frozenset(operator.default for operator in attention.FUSED)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.MUST_RECOMPUTE


def _contexts() -> Any:
    """What torch.compile keeps of an operation that is recomputed: what fused attention returns, which the next layer
    saves in any case, beside a number for each query. (torch 2.13 mistakes its random state for a saved tensor, where
    it is recomputed in a graph with opaque objects.)"""
    return create_selective_checkpoint_contexts(_policy)


class Selective(Recompute):
    """Recomputes the operations named `ops` in the backward; everything else is saved."""

    def __init__(self, ops: Iterable[str]) -> None:
        self.ops = frozenset(ops)
        # By storage. While the table has the weak reference, the storage's address is not reused.
        self._results: dict[int, tuple[StorageWeakRef, _Operation]] = {}
        self._running = False

    def install(self, layer: nn.Module) -> None:
        """Makes a layer and its parts run their operations through this object."""
        for module in layer.modules():
            if isinstance(getattr(module, "recompute", None), Recompute):
                module.recompute = self  # type: ignore[assignment]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Replaces what autograd saves in the block by placeholders, if it can be rebuilt."""
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self._results.clear()

    def run(self, name: str, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Returns f(*inputs); saves nothing of it if `name` is one of the operations to recompute."""
        if name not in self.ops or self._running or not torch.is_grad_enabled():
            return f(*inputs)
        if torch.compiler.is_compiling():
            again: Tensor = checkpoint(f, *inputs, use_reentrant=False, context_fn=_contexts)
            return again
        alone = functools.partial(self._alone, f)
        operation = _Operation(
            name, alone, [self._pack(x) for x in inputs], [x.requires_grad for x in inputs]
        )
        y = operation.first(inputs)
        storage = y.untyped_storage()
        self._results[storage._cdata] = StorageWeakRef(storage), operation
        return y

    def _alone(self, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Returns f(*inputs); named operations inside are part of this one."""
        self._running = True
        try:
            return f(*inputs)
        finally:
            self._running = False

    def column(self, layer: Product, x: Tensor) -> Tensor:
        """Returns layer(x); if the layer gathers an x that is to be rebuilt, the backward gathers it again as well."""
        source = None if torch.compiler.is_compiling() else self._made(x)
        if not layer.gather or source is None:
            return layer(x)
        placeholder = source.result(x)  # a hook that refers to x itself would keep it alive
        gathered = (layer.axis.size * x.shape[0], *x.shape[1:])

        def pack(tensor: Tensor) -> Packed:
            weights = (
                {storage_of(p) for p in layer.parameters()} if tensor.shape == gathered else set()
            )
            if tensor.shape != gathered or storage_of(tensor) in weights:
                return self._pack(tensor)
            again = functools.partial(collectives.all_gather, axis=layer.axis)
            return _Operation("a gathered input", again, [placeholder], [False]).result(tensor)

        with saved_tensors_hooks(pack, unpack):
            return layer(x)

    def _made(self, tensor: Tensor) -> _Operation | None:
        found = self._results.get(tensor.untyped_storage()._cdata)
        return found[1] if found is not None and found[1].makes(tensor) else None

    def _pack(self, tensor: Tensor) -> Packed:
        operation = self._made(tensor)
        return _SavedTensor(tensor) if operation is None else operation.result(tensor)
