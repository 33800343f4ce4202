"""Access to parameters whose values are not always in memory.

A parameter stays the same Python object for the lifetime of the engine, wherever it is referenced:
in modules, closures, lists, hooks. A group is a set of parameters that are gathered together
(`layout.Group`). Only the class and the storage of a parameter change with the state of its group:

    gathered    its original class; the storage is the group's buffer
    in flight   `AbsentParameter`: a torch function that is called on it waits for the gather first
    sharded     `AbsentParameter`: a torch function that is called on it gathers the group first, or
                raises an error that names the parameter. The storage is a single read-only NaN.
                Native code that bypasses `__torch_function__` therefore reads NaN; it cannot read
                freed memory

Sharded parameters that code outside `threed.layers` uses have the class `GuardedParameter` while
they are gathered. Views of such a parameter are `GuardedView`s. A view of a buffer that the group
has released can be read until values of sharded parameters change. Afterwards a read of the view
raises an error.

A guarded tensor is an `AbsentParameter`, a `GuardedParameter` or a `GuardedView`. Any torch
function that is called on it first gathers its values, or checks that they are still valid. If the
parameter is sharded, autograd then saves the tensor's shape and its offset in the group's buffer
(`gather.SavedView`), not the tensor itself. So the buffer can be freed before the backward.

A view of a released buffer never reads other data, because `Group.allocate` makes a new buffer for
each gather, and Python frees the memory of the old buffer only when its last view is freed.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from threed.distributed.sharding import storage_of
from threed.zero.layout import Group, Slot
from threed.zero.torch_modes import without_transforms

TRACERS = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses")
# torch's own `.grad`, for use by the engine; the user's program accesses `_Managed.grad` instead
GRAD: Any = Tensor.grad
UNTRACED = (
    "parameters of a threed engine are gathered here, and torch.compile cannot trace it: compile without fullgraph=True"
    " (below ZeRO stage 3 it works outside of engine.gathered())"
)


class Holder(enum.Enum):
    """Users of a gathered group, as passed to `Gatherer.open`.

    A group stays gathered until all its holders have closed it. A holder is a member of this class,
    or an integer: the number of a unit, or in a wrapped module the nesting depth of a module call.
    """

    TILE = enum.auto()  # a layer uses the group, which is one tile of its weight
    GATHERED = enum.auto()  # a block of `Engine.gathered` uses all groups
    BACKWARD = enum.auto()  # the backward of a wrapped module uses the group
    AHEAD = enum.auto()  # the group is prefetched before its use
    FUNC_TRANSFORM = enum.auto()  # a `torch.func` transform uses the group until backward ends


class Gatherer(Protocol):
    """The part of `threed.zero.gather.Gatherer` that `Access` uses."""

    version: int  # incremented when the values of sharded parameters change
    wrapped: ClassVar[bool]

    @property
    def saving(self) -> saved_tensors_hooks: ...

    def wait_for(self, slot: Slot) -> None: ...

    def require(self, group: Group, slot: Slot) -> None: ...

    def before_use(self, group: Group) -> None: ...

    def is_open(self, group: Group) -> bool: ...

    def open(self, group: Group, holder: int | Holder) -> None: ...


class Access:
    """Controls access to the values of one parameter.

    Args:
        gatherer: gathers the parameter.
        group: the parameter's group.
        slot: the parameter and its position in the group.
        wrapped: whether the parameter belongs to a wrapped module. If so, the user's program may
            change it at any time.

    Attributes:
        exposed: whether the parameter is sharded and used by code outside `threed.layers`, which
            may keep views of it.
        guards_views: whether the parameter is a `GuardedParameter` while it is gathered, so that
            views created from it are `GuardedView`s.
        touched: whether the user's program obtained the parameter's memory (through `.data`, NumPy,
            DLPack, ...). The program can write to this memory without incrementing the parameter's
            version counter, so the values may have changed.
        absent: whether the values are not in memory, because they are sharded or in flight.
    """

    def __init__(self, gatherer: Gatherer, group: Group, slot: Slot, wrapped: bool) -> None:
        self.gatherer, self.group, self.slot = gatherer, group, slot
        self._given_class: type[nn.Parameter] = type(slot.param)
        self.own_class = self._given_class
        if wrapped and self.own_class is nn.Parameter:
            self.own_class = WatchedParameter
        only_threed = all(
            type(owner).__module__.startswith("threed.layers.") for owner, _ in slot.places
        )
        self.exposed = group.sliced and (wrapped or not only_threed)
        self.guards_views = self.exposed
        self.touched = False
        slot.param.access = self  # type: ignore[attr-defined]
        self.guard(group.sliced)

    def guard(self, on: bool) -> None:
        """Sets the parameter's class, which depends on whether its values are in memory.

        Args:
            on: True if the values are sharded or in flight; False if they are in memory.
        """
        self.absent = on
        kind = AbsentParameter if on else GuardedParameter if self.guards_views else None
        self.slot.param.__class__ = (
            self.own_class if kind is None else _guarded_class(kind, self.own_class)
        )

    def remove(self) -> None:
        """Gives the parameter its original class back, and removes this object from it."""
        self.slot.param.__class__ = self._given_class
        del self.slot.param.access  # type: ignore[attr-defined]

    def guard_views(self, on: bool) -> None:
        """Sets whether the parameter and views created from it are guarded while it is gathered.

        Args:
            on: whether they are guarded. False has no effect on parameters that are always guarded
                (`exposed`).
        """
        self.guards_views = on or self.exposed
        self.guard(self.absent)

    def mark_touched(self, touched: bool = True) -> None:
        """Sets the attribute `touched`.

        Args:
            touched: True if the user's program obtained the parameter's memory; False once the
                program's changes have been copied to the optimizer.
        """
        self.touched = touched

    def require(self) -> None:
        """Gathers the parameter, or waits for its gather.

        Raises:
            RuntimeError: the values are not in memory, and cannot be gathered at this point (for
                example, between two steps, outside `engine.gathered()`); the message names the
                parameter.
        """
        if self.group.sliced:
            self.gatherer.require(self.group, self.slot)
        else:
            self.gatherer.wait_for(self.slot)

    def can_require(self) -> bool:
        """Returns whether `require` succeeds at this point; begins the gather if it does.

        True for models of `threed.layers`: their parameters raise errors in every use.
        """
        if not (self.absent and self.group.sliced and self.gatherer.wrapped):
            return True
        self.gatherer.before_use(self.group)
        return self.gatherer.is_open(self.group)

    def require_view(self, view: GuardedView, changes: bool) -> None:
        """Gathers the parameter if the view is of the current buffer; else checks the view.

        A view of an earlier buffer, which the group has released, can be read until the values of
        sharded parameters change. It must not be written to, because the change would be lost.

        Args:
            view: the view.
            changes: whether the caller writes to the view.

        Raises:
            RuntimeError: the parameter was sharded when the view was created; or the view is of an
                earlier buffer, and either `changes` is True, or values have changed since the view
                was created.
        """
        if view.buffer is None:
            raise RuntimeError(
                f"{self.slot.spec.name} is sharded (ZeRO stage 3), and its values were not in memory when this tensor"
                " was created: create it inside `with engine.gathered():`; engine.full_state_dict() returns all values"
            )
        if not self.group.sliced or view.buffer is self.group.params:
            self.require()
        elif changes or view.version != self.gatherer.version:
            raise RuntimeError(
                f"this tensor shares memory with {self.slot.spec.name}, which is sharded (ZeRO stage 3), and was kept"
                f" until {'it was released' if changes else 'its values changed'}: create the view again, or clone() it"
                " while the parameter is gathered (in the forward, or inside `with engine.gathered():`)"
            )

    def share(self, out: Any) -> Any:
        """Returns `out`; makes it a `GuardedView` first if it shares the parameter's memory."""
        if (
            self.guards_views
            and type(out) is Tensor
            and storage_of(out) == storage_of(self.group.params)
        ):
            out.__class__ = GuardedView
            out.access, out.buffer, out.version = self, self.group.params, self.gatherer.version  # type: ignore[attr-defined]
        return out

    def detached(self) -> Any:
        """Returns a detached `GuardedView` on the meta device: it has the parameter's shape, but no values.

        The state dict of a submodule thus has its names, which peft needs to save an adapter.
        """
        view: Any = plain(self.slot.param).detach().to("meta").as_subclass(GuardedView)
        view.access, view.buffer, view.version = self, None, self.gatherer.version
        return view


def _methods(names: str) -> set[Any]:
    return {getattr(Tensor, name) for name in names.split()}


def _accessors(names: str, method: str) -> set[Any]:
    return {getattr(getattr(Tensor, name), method) for name in names.split()}


# Functions that do not read a parameter's values, and so need no gather.
_METADATA: set[Any] = {
    *_accessors("shape dtype device layout ndim is_leaf grad_fn requires_grad grad name is_cpu is_cuda", "__get__"),
    *_accessors("is_meta is_sparse is_quantized is_mkldnn is_nested retains_grad output_nr _version", "__get__"),
    *_accessors("itemsize nbytes _backward_hooks _post_accumulate_grad_hooks", "__get__"),
    *_accessors("requires_grad grad _backward_hooks _post_accumulate_grad_hooks", "__set__"),
    *_accessors("grad", "__delete__"),
    *_methods("size dim ndimension numel nelement element_size is_floating_point is_complex is_signed get_device"),
    *_methods("requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __hash__ __len__"),
    *_methods("is_same_size is_shared is_inference"),
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, torch.is_same_size,
}  # fmt: skip
# Functions that return a parameter's memory. Writes to this memory do not increment the parameter's
# version counter.
_EXPORTS: set[Any] = {
    Tensor.data.__get__, Tensor.data.__set__, Tensor.numpy, Tensor.__array__, Tensor.data_ptr,  # type: ignore[attr-defined]
    Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__, Tensor.share_memory_, Tensor.as_subclass,
}  # fmt: skip
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITES = {"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)}


def _changes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether a torch function writes to a tensor."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITES or kwargs.get("out") is not None


def _guarded_in(args: Iterable[Any]) -> Iterator[Any]:
    """Yields the guarded tensors among the arguments of a torch function."""
    for arg in args:
        if isinstance(arg, (GuardedParameter, GuardedView)):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _guarded_in(arg)
        elif isinstance(arg, dict):
            yield from _guarded_in(arg.values())


def _call(run: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Gathers the guarded arguments of a torch function, and calls the function.

    Views of guarded parameters among the results become `GuardedView`s.

    Args:
        run: function that makes the call, with `args` and `kwargs`.
        func: the torch function.
        args: positional arguments of `func`.
        kwargs: keyword arguments of `func`.

    Returns:
        The result of `func`.
    """
    used = list(_guarded_in((*args, *kwargs.values())))
    changes, exports = _changes(func, kwargs), func in _EXPORTS
    for tensor in used:
        if isinstance(tensor, GuardedView):
            tensor.access.require_view(tensor, changes)
        else:
            tensor.access.require()
        if exports or (changes and isinstance(tensor, GuardedView)):
            tensor.access.mark_touched()
    accesses = {id(tensor.access): tensor.access for tensor in used}.values()
    with _saving(accesses):
        out = run(*args, **kwargs)
    for access in accesses:
        for part in out if isinstance(out, (list, tuple)) else (out,):
            access.share(part)
    return out


def _saving(accesses: Iterable[Access]) -> AbstractContextManager[Any]:
    """Returns a context in which autograd saves sharded parameters as positions in their buffers.

    If the user's program has installed saved-tensor hooks, only the user's hooks are used.
    Transforms of `torch.func` forbid saved-tensor hooks. Under a transform, the parameters
    therefore stay gathered until the backward has ended.
    """
    sharded = [access for access in accesses if access.group.sliced]
    if not (sharded and torch.is_grad_enabled()):
        return nullcontext()
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        for access in sharded:
            access.gatherer.open(access.group, Holder.FUNC_TRANSFORM)
        return nullcontext()
    user_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return nullcontext() if user_hooks else sharded[0].gatherer.saving


def _read_by_tracer() -> bool:
    """Returns whether code of torch.compile (`TRACERS`) called the caller of this function."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith(TRACERS)


class _Managed(nn.Parameter):
    """A parameter of an engine. Copying or pickling it gives a plain `nn.Parameter`."""

    access: Access

    def __getattr__(self, name: str) -> Any:
        if name == "access":
            raise RuntimeError(
                f"a parameter of shape {list(self.size())} was exchanged with another one (torch.utils.swap_tensors)"
                " after the engine was built: change its values in place (param.copy_) instead"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def grad(self) -> Tensor | None:
        """The gradient. Usually None, because the engine moves gradients to its own buffers.

        Raises:
            RuntimeError: the attribute is read after a backward, before the end of the step.
                Functions such as torch's `clip_grad_norm_` would find no gradients at that time,
                and do nothing. `torch.compile` gets None and no error, because it reads `.grad` of
                every parameter in the code that it compiles.
        """
        grad: Tensor | None = GRAD.__get__(self)
        if grad is None and not _read_by_tracer():
            self._check_step("read (zero_grad, clip_grad_norm_ and torch's optimizers read it)")
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        before = GRAD.__get__(self)
        if before is None:
            self._check_step("set")
        GRAD.__set__(self, value)
        sink = self.__dict__.get("sink")
        # a gradient that a hook replaces is still the engine's
        if sink is not None and (before is None or value is None):
            sink.mark_given(value is not None)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _check_step(self, what: str) -> None:
        """Raises RuntimeError if the engine's buffers contain gradients of a step in progress."""
        sink = self.__dict__.get("sink")
        if sink is not None and sink.reducer.in_step:
            raise RuntimeError(
                f"{self.access.slot.spec.name}: .grad was {what} before the step ended: the engine sums gradients over"
                " micro-batches and ranks in its own buffers. Clip by train.grad_clip (gradient_clipping of a"
                " ds_config), read the norm from the step's metrics, and change gradients by register_hook"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self._plain().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self._plain(), self.requires_grad).__reduce_ex__(protocol)

    def _plain(self) -> Tensor:
        """Returns the values; raises RuntimeError if they are not in memory."""
        if isinstance(self, GuardedParameter):
            self.access.require()
        return plain(self).detach()


class WatchedParameter(_Managed):
    """A parameter that records accesses to `.data`.

    Changes through `.data` do not increment the parameter's version counter, so such changes can
    only be detected by recording the accesses.
    """

    @property
    def data(self) -> Any:
        """Same as `torch.Tensor.data`; reading or setting it marks the parameter as touched."""
        self.access.mark_touched()
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Tensor) -> None:
        self.access.mark_touched()
        Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


class _Guarded(Tensor):
    """Base class that overrides the tensor methods which do not call `__torch_function__`."""

    def as_subclass(self, cls: Any) -> Any:
        return _call(Tensor.as_subclass, Tensor.as_subclass, (self, cls), {})

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        return _call(Tensor.set_, Tensor.set_, (self, *args), kwargs)


class GuardedParameter(_Guarded, _Managed):
    """A parameter that gathers its values, or waits for them, before a torch function reads it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=UNTRACED)
        if func is torch.autograd.grad:
            return func(args[0], [_gradient_edge(part) for part in args[1]], **kwargs)
        if func is torch.autograd.backward and kwargs.get("inputs"):  # a tuple
            edges = [_gradient_edge(part) for part in kwargs["inputs"]]
            return func(*args, **{**kwargs, "inputs": edges})
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _METADATA_OF_SHARDED:
                return _METADATA_OF_SHARDED[func](*args, **kwargs)
            if func is Tensor.detach and not args[0].access.can_require():
                return args[0].access.detached()
            default = super().__torch_function__
            return _call(lambda *a, **k: default(func, types, a, k), func, args, kwargs)


def _gradient_edge(tensor: Any) -> Any:
    """Returns the gradient edge of a guarded parameter (`torch.autograd.graph`).

    Returns any other value unchanged.
    """
    if not (isinstance(tensor, GuardedParameter) and tensor.requires_grad):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(tensor)


def plain(view: Tensor) -> Tensor:
    """Returns a plain `torch.Tensor` that shares the memory of a guarded tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(view, Tensor)


def _strides(param: Tensor) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor with the parameter's shape."""
    return torch.empty(param.shape, device="meta").stride()


def _repr(param: Any, **_: Any) -> str:
    access: Access = param.access
    if not access.group.sliced or access.gatherer.is_open(access.group):
        access.require()
        return Tensor.__repr__(plain(param.detach()))
    return f"{access.slot.spec.name}: sharded parameter of shape {list(param.shape)}, {param.dtype}"


def _from_placeholder(func: Any) -> Callable[..., Any]:
    """Returns a variant of `func` (e.g. `zeros_like`) that does not gather a sharded argument."""
    formats = {"memory_format": torch.contiguous_format} if func in _LIKE else {}

    def make(param: Any, *args: Any, **kwargs: Any) -> Any:
        placeholder = param.access.slot.placeholder
        if placeholder is None:
            param.access.require()
        return func(param if placeholder is None else placeholder, *args, **{**formats, **kwargs})

    return make


_LIKE = [
    getattr(torch, f"{name}_like")
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
]
_NEW = [getattr(Tensor, f"new_{name}") for name in ("empty", "zeros", "ones", "full", "tensor")]
_METADATA_OF_SHARDED: dict[Any, Callable[..., Any]] = {
    Tensor.stride: lambda param, dim=None: _strides(param) if dim is None else _strides(param)[dim],
    Tensor.is_contiguous: lambda param, *_, **__: True,
    Tensor.__repr__: _repr,
    **{func: _from_placeholder(func) for func in (*_LIKE, *_NEW)},
}


class AbsentParameter(GuardedParameter):
    """A guarded parameter that is sharded, or whose gather is in flight."""


@functools.cache
def _guarded_class(kind: type[GuardedParameter], own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Returns a class derived from `kind` and `own`.

    `torch.func` passes parameters to native code without calling `__torch_function__`. But first it
    flattens all arguments as pytrees. Subclasses of `AbsentParameter` are therefore registered as
    pytree nodes, so that flattening such a parameter gathers it.

    Args:
        kind: `GuardedParameter` or `AbsentParameter`.
        own: the parameter's class before it was guarded.
    """
    guarded = type(kind.__name__, (kind, own), {"__module__": __name__})
    if kind is AbsentParameter:
        pytree.register_pytree_node(guarded, _flatten_absent, lambda parts, _: next(iter(parts)))
    return guarded


def _flatten_absent(param: Any) -> tuple[list[Any], None]:
    param.access.require()
    return [param], None


class GuardedView(_Guarded):
    """A tensor that shares memory with a guarded parameter.

    Attributes:
        access: the parameter's `Access`.
        buffer: the group's buffer at the time when the view was created; None if the parameter was
            sharded, so that the view has no values, and reading it raises an error.
        version: `Gatherer.version` at the time when the view was created.
    """

    access: Access
    buffer: Tensor | None
    version: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA or func in (Tensor.stride, Tensor.is_contiguous):
                return func(*args, **(kwargs or {}))
            return _call(func, func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.access.require_view(self, changes=False)
        return plain(self).__reduce_ex__(protocol)


def _flatten_view(view: Any) -> tuple[list[Any], tuple[Any, Tensor]]:
    view.access.require_view(view, changes=False)
    with without_transforms():
        unguarded = plain(view)
    return [unguarded], (view, unguarded)


def _unflatten_view(parts: Iterable[Any], pair: tuple[Any, Tensor]) -> Any:
    part = next(iter(parts))
    view, unguarded = pair
    return view if part is unguarded else part


# `torch.func` passes views, too, to native code without calling `__torch_function__` (`_guarded_class`).
pytree.register_pytree_node(GuardedView, _flatten_view, _unflatten_view)
