"""Selective recompute: operations inside a layer whose results are computed again in the backward, not kept.

    class Mine(nn.Module):
        recompute = Recompute()                              # keeps everything, until somebody installs a Selective

        def forward(self, x):
            y = self.recompute.run("activation", torch.tanh, self.up(x))
            return self.down(y)

    selective = Selective(["activation"])
    selective.install(layer)
    with selective.watch():                                  # around the layer's forward
        y = layer(x, micro)

Nothing is saved inside of a named operation; what autograd asks for is rebuilt from its inputs, all at once, and freed
as it is used. The operation's result is what the next layer saves as its input, so dropping only what is inside would
save nothing: tensors are known by the storage they lie in, and a result is packed as a promise to rebuild it wherever
it is saved (Megatron-Core does the same by emptying the output's storage). Weights are saved too, often as transposed
views; their storage is none of those. A result that was changed in place since, or is seen in another dtype, is nothing
that could be rebuilt: it is kept as any other tensor. Kept tensors that change before the backward are an error, as
they are without hooks; autograd itself looks no more once there are hooks.

Names in use: attention (the core: norms of heads, rotary positions, scaled dot product; queries, keys and values are
kept as projected), activation (of the MLP; its input is kept), norm (its input is kept). Under sequence parallelism a
norm's result is gathered anew as well.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from threed import collectives
from threed.device import rng_states, set_rng_states
from threed.topology import Axis


class RngState:
    """What torch's generators were before some work, so that the work can be done again with the same numbers.

    SavedInput only if the work drew from them: the layers of this package do not, those of users may.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: dict[str, Tensor] | None = rng_states(device)

    def drawn(self) -> None:
        """The work is over."""
        before, now = self._before or {}, rng_states(self._device)
        if all(torch.equal(before[kind], now[kind]) for kind in before):
            self._before = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Work in here draws what the first one drew; afterwards the generators go on from where they were."""
        if self._before is None:
            yield
            return
        now = rng_states(self._device)
        set_rng_states(self._before, self._device)
        try:
            yield
        finally:
            set_rng_states(now, self._device)


class Column(Protocol):
    """A column-parallel layer, which gathers its input over `axis` when `gather`."""

    axis: Axis
    gather: bool

    def __call__(self, x: Tensor) -> Tensor: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


class Recompute:
    """What the operations of a layer keep: everything."""

    def run(self, name: str, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """f(*inputs), a function of nothing else but weights."""
        return f(*inputs)

    def column(self, layer: Column, x: Tensor) -> Tensor:
        """layer(x), where x may be the result of an operation."""
        return layer(x)


Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset in the storage


class _Kept:
    """A tensor that was saved as it is, at some version. That of weights says nothing: ZeRO writes their buffers."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        base = tensor if tensor._base is None else tensor._base
        self._tensor = tensor.detach()  # counts versions with the original
        self._version = None if isinstance(base, nn.Parameter) else tensor._version

    def get(self, what: str) -> Tensor:
        """The tensor; RuntimeError if it is not what it was."""
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                f"{what}, {self._tensor.dtype} {list(self._tensor.shape)}, was changed in place after it was saved: it"
                f" is at version {self._tensor._version}, and was at {self._version}; change a copy instead"
                " (x = x * 2, not x.mul_(2))"
            )
        return self._tensor


class _Saved:
    """A tensor that autograd thinks it has saved. It has this; `value` once it is rebuilt, freed with it."""

    __slots__ = ("__weakref__", "operation", "value")

    def __init__(self, operation: _Operation) -> None:
        self.operation = operation
        self.value: _Kept | None = None


Packed = _Kept | _Saved


def unpack(packed: Packed, what: str = "a tensor that the backward needs") -> Tensor:
    """The tensor that was saved."""
    if isinstance(packed, _Saved):
        if packed.value is None:
            packed.operation.rebuild()
        assert packed.value is not None
        packed = packed.value
    return packed.get(what)


class _Operation:
    """One run of a named operation: its inputs, and who waits for what it saved and made."""

    def __init__(self, name: str, f: Callable[..., Tensor], inputs: Sequence[Packed], wants: Sequence[bool]) -> None:
        self.name, self.f, self.inputs, self.wants = name, f, inputs, wants
        self._inside: list[weakref.ref[_Saved]] = []  # in the order saved
        self._results: list[tuple[weakref.ref[_Saved], Layout]] = []
        self._draws: RngState | None = None
        self._made: tuple[int, torch.dtype] | None = None  # the result's version and dtype

    def first(self, inputs: Sequence[Tensor]) -> Tensor:
        """The run in the forward."""
        self._draws = RngState(inputs[0].device)
        with saved_tensors_hooks(self._pack, unpack):
            y = self.f(*inputs)
        self._draws.drawn()
        self._made = y._version, y.dtype
        return y

    def makes(self, tensor: Tensor) -> bool:
        """Whether a tensor in the result's storage is a view of what `rebuild` makes."""
        return self._made == (tensor._version, tensor.dtype) and not (tensor.is_conj() or tensor.is_neg())

    def _pack(self, _: Tensor) -> _Saved:
        saved = _Saved(self)
        self._inside.append(weakref.ref(saved))
        return saved

    def result(self, view: Tensor) -> _Saved:
        """Stands for the result, or a view of it."""
        saved = _Saved(self)
        self._results.append((weakref.ref(saved), _layout(view)))
        return saved

    def rebuild(self) -> None:
        """The run in the backward: gives everybody who still waits what they wait for."""
        again: list[_Kept] = []
        what = f"an input of {self.name}, which is to be computed again"
        inputs = [unpack(x, what).detach().requires_grad_(w) for x, w in zip(self.inputs, self.wants, strict=True)]
        draws = self._draws.again() if self._draws else nullcontext()
        with torch.enable_grad(), draws, saved_tensors_hooks(lambda t: again.append(_Kept(t)), _never):
            y = self.f(*inputs).detach()
        if len(again) != len(self._inside):
            raise RuntimeError(
                f"recompute of {self.name} saved {len(again)} tensors where its forward saved {len(self._inside)}: it"
                " must be a function of its inputs and weights alone"
            )
        for ref, kept in zip(self._inside, again, strict=True):
            if (saved := ref()) is not None:
                saved.value = kept
        for ref, layout in self._results:
            if (saved := ref()) is not None:
                saved.value = _Kept(y.as_strided(*layout))


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _never(_: Any) -> Tensor:
    raise AssertionError("a graph made to rebuild values has no backward")


class Selective(Recompute):
    """Computes the operations named `ops` again in the backward; everything else is kept."""

    def __init__(self, ops: Iterable[str]) -> None:
        self.ops = frozenset(ops)
        # By storage. The weak reference keeps the address from being used again while the table has it.
        self._results: dict[int, tuple[StorageWeakRef, _Operation]] = {}
        self._running = False

    def install(self, layer: nn.Module) -> None:
        """Makes the operations of a layer and its parts this object's."""
        for module in layer.modules():
            if isinstance(getattr(module, "recompute", None), Recompute):
                module.recompute = self  # type: ignore[assignment]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """What autograd saves in here is kept, or is a promise to rebuild it."""
        try:
            with saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            self._results.clear()

    def run(self, name: str, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """f(*inputs); nothing of it is kept where `name` is among the operations to compute again."""
        if name not in self.ops or self._running or not torch.is_grad_enabled():
            return f(*inputs)
        alone = functools.partial(self._alone, f)
        operation = _Operation(name, alone, [self._pack(x) for x in inputs], [x.requires_grad for x in inputs])
        y = operation.first(inputs)
        storage = y.untyped_storage()
        self._results[storage._cdata] = StorageWeakRef(storage), operation
        return y

    def _alone(self, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """f(*inputs), in which other named operations are nothing special: they are part of this one."""
        self._running = True
        try:
            return f(*inputs)
        finally:
            self._running = False

    def column(self, layer: Column, x: Tensor) -> Tensor:
        """layer(x); where the layer gathers an x that is to be rebuilt, it is gathered again as well."""
        source = self._made(x)
        if not layer.gather or source is None:
            return layer(x)
        promise = source.result(x)  # autograd keeps hooks with what they packed: with x in one, x itself would stay
        gathered = (layer.axis.size * x.shape[0], *x.shape[1:])

        def pack(tensor: Tensor) -> Packed:
            weights = {p.untyped_storage()._cdata for p in layer.parameters()} if tensor.shape == gathered else set()
            if tensor.shape != gathered or tensor.untyped_storage()._cdata in weights:
                return self._pack(tensor)
            again = functools.partial(collectives.all_gather, axis=layer.axis)
            return _Operation("a gathered input", again, [promise], [False]).result(tensor)

        with saved_tensors_hooks(pack, unpack):
            return layer(x)

    def _made(self, tensor: Tensor) -> _Operation | None:
        found = self._results.get(tensor.untyped_storage()._cdata)
        return found[1] if found is not None and found[1].makes(tensor) else None

    def _pack(self, tensor: Tensor) -> Packed:
        operation = self._made(tensor)
        return _Kept(tensor) if operation is None else operation.result(tensor)
