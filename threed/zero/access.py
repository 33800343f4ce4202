"""Access to parameters whose values are not always in memory.

A parameter stays the same Python object all its life, whoever refers to it: modules, closures, lists, hooks. Its class
and its storage tell whether its values can be read:

    gathered    its own class, and a view of the group's buffer
    in flight   `AbsentParameter`: every function of torch that is called on it first waits
    sharded     the same, but gathers it, or raises an error that names it. Its storage is one NaN that cannot be
                written, so native code that does not ask gets NaN, never freed memory

Sharded parameters that other code than `threed.layers` uses stay guarded while they are gathered. So are views of them:
after an update they refuse to be read. Autograd saves their places in a buffer, not its memory. A buffer is never freed
while a tensor shares it: `Group.allocate` makes a new one, and Python frees the old one with its last view.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from threed.zero.layout import Group, Slot

UNTRACED = (
    "parameters of a threed engine are gathered here, which torch.compile cannot trace: compile without fullgraph=True"
    " (below ZeRO stage 3 it works outside of engine.gathered())"
)
PINNED = -5  # the holder of groups that stay gathered until the pass has ended


class Gatherer(Protocol):
    """What gathers the parameters: `threed.zero.gather.Gatherer`."""

    version: int  # of the sharded parameters' values
    saving: saved_tensors_hooks  # in which autograd saves their places

    def wait_for(self, slot: Slot) -> None: ...

    def require(self, group: Group, slot: Slot) -> None: ...

    def is_open(self, group: Group) -> bool: ...

    def open(self, group: Group, holder: int) -> None: ...


class Access:
    """The way to one parameter's values.

    wrapped: of a wrapped module, whose program may change its parameters. sheltered: whether the parameter is sharded
    between uses, and code that is not of `threed.layers` uses it, which may keep views. always: whether it is guarded
    even while its values can be read, so that views of it are. touched: whether memory was handed out that can be
    written without the parameter's version being incremented.
    """

    def __init__(self, gatherer: Gatherer, group: Group, slot: Slot, wrapped: bool) -> None:
        self.gatherer, self.group, self.slot = gatherer, group, slot
        self.own_class: type[nn.Parameter] = type(slot.param)
        if wrapped and self.own_class is nn.Parameter:
            self.own_class = WatchedParameter
        ours = all(type(owner).__module__.startswith("threed.layers.") for owner, _ in slot.places)
        self.sheltered = group.sliced and (wrapped or not ours)
        self.always = self.sheltered
        self.touched = False
        slot.param.access = self  # type: ignore[attr-defined]
        self.guard(group.sliced)

    def guard(self, on: bool) -> None:
        """Gives the parameter the class for values that are absent or in flight, or the one for values in memory."""
        self.absent = on
        kind = AbsentParameter if on else GuardedParameter if self.always else None
        self.slot.param.__class__ = self.own_class if kind is None else _combined(kind, self.own_class)

    def watch(self, on: bool) -> None:
        """Guards the parameter, and views that are taken of it, while its values can be read, or ends that."""
        self.always = on or self.sheltered
        self.guard(self.absent)

    def require(self) -> None:
        """Makes the values readable; RuntimeError naming the parameter if they are not in memory."""
        if self.group.sliced:
            self.gatherer.require(self.group, self.slot)
        else:
            self.gatherer.wait_for(self.slot)

    def require_view(self, view: GuardedView, changes: bool) -> None:
        """The same for a tensor that shares memory with the parameter."""
        if not self.group.sliced or view.buffer is self.group.params:
            self.require()
        elif changes or view.version != self.gatherer.version:
            raise RuntimeError(
                f"this tensor shares memory with {self.slot.spec.name}, which is sharded (ZeRO stage 3), and was kept"
                f" until {'it was released' if changes else 'its values changed'}: take it again, or clone() it where"
                " the parameter is gathered (in the forward, or inside `with engine.gathered():`)"
            )

    def share(self, out: Any) -> Any:
        """Guards a tensor if it shares memory with the parameter."""
        if self.always and type(out) is Tensor and storage_of(out) == storage_of(self.group.params):
            out.__class__ = GuardedView
            out.access, out.buffer, out.version = self, self.group.params, self.gatherer.version  # type: ignore[attr-defined]
        return out


def compiles() -> bool:
    """Returns whether the program has functions or modules that torch.compile compiles."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = {} if frames is None else vars(frames).get("cached_backends", {})
    return any(backend is not None for backend in backends.values())


def storage_of(tensor: Tensor | None) -> int:
    """Returns what identifies a tensor's storage; 0 if it has none."""
    if tensor is None:
        return 0
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers of torch.func
        return 0


def undisturbed() -> AbstractContextManager[Any]:
    """Returns a context in which tensors are plain, although the caller is inside inference mode or a transform of
    `torch.func`."""
    transformed, inferring = torch._C._functorch.peek_interpreter_stack() is not None, torch.is_inference_mode_enabled()
    if not (transformed or inferring):
        return nullcontext()
    stack = ExitStack()
    if transformed:
        stack.enter_context(torch._C._DisableFuncTorch())
    if inferring:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
    return stack


def unseen() -> AbstractContextManager[Any]:
    """Returns a context in which the program's dispatch modes see nothing: selective checkpointing expects of a
    recomputation the operations of the forward, and no gathers."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _methods(names: str) -> set[Any]:
    return {getattr(Tensor, name) for name in names.split()}


def _accessors(names: str, method: str) -> set[Any]:
    return {getattr(getattr(Tensor, name), method) for name in names.split()}


# What a parameter can tell without its values.
_METADATA: set[Any] = {
    *_accessors("shape dtype device layout ndim is_leaf grad_fn requires_grad grad name is_cpu is_cuda", "__get__"),
    *_accessors("is_meta is_sparse is_quantized is_mkldnn is_nested retains_grad output_nr _version", "__get__"),
    *_accessors("itemsize nbytes _backward_hooks _post_accumulate_grad_hooks", "__get__"),
    *_accessors("requires_grad grad _backward_hooks _post_accumulate_grad_hooks", "__set__"),
    *_accessors("grad", "__delete__"),
    *_methods("size dim ndimension numel nelement element_size is_floating_point is_complex is_signed get_device"),
    *_methods("requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __hash__ __len__"),
    *_methods("is_same_size is_shared is_inference new_empty new_zeros new_ones new_full new_tensor"),
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, torch.is_same_size,
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
}  # fmt: skip
# Functions that hand out memory, which may then be written without the parameter's version being incremented.
_EXPORTS: set[Any] = {
    Tensor.data.__get__, Tensor.data.__set__, Tensor.numpy, Tensor.__array__, Tensor.data_ptr,  # type: ignore[attr-defined]
    Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__, Tensor.share_memory_, Tensor.as_subclass,
}  # fmt: skip
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


def _changes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether a function of torch changes a tensor."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in (*_IN_PLACE, "__setitem__", "__set__") or kwargs.get("out") is not None


def _parts(args: Iterable[Any]) -> Iterator[Any]:
    """Yields the guarded tensors among the arguments of a function of torch."""
    for arg in args:
        if isinstance(arg, (GuardedParameter, GuardedView)):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _parts(arg)
        elif isinstance(arg, dict):
            yield from _parts(arg.values())


def _call(run: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Makes the values of the guarded tensors among the arguments readable, and calls a function of torch on them."""
    used = list(_parts((*args, *kwargs.values())))
    changes, exports = _changes(func, kwargs), func in _EXPORTS
    for tensor in used:
        if isinstance(tensor, GuardedView):
            tensor.access.require_view(tensor, changes)
        else:
            tensor.access.require()
        tensor.access.touched |= exports or (changes and isinstance(tensor, GuardedView))
    accesses = {id(tensor.access): tensor.access for tensor in used}.values()
    with _saving(accesses):
        out = run(*args, **kwargs)
    for access in accesses:
        for part in out if isinstance(out, (list, tuple)) else (out,):
            access.share(part)
    return out


def _saving(accesses: Iterable[Access]) -> AbstractContextManager[Any]:
    """Returns the context in which autograd saves places of sharded parameters, unless the program has hooks of its own
    for what is saved. Transforms of `torch.func` allow no hooks: then the parameters stay gathered until the backward
    has ended."""
    sharded = [access for access in accesses if access.group.sliced]
    if not (sharded and torch.is_grad_enabled()):
        return nullcontext()
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        for access in sharded:
            access.gatherer.open(access.group, PINNED)
        return nullcontext()
    others = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return nullcontext() if others else sharded[0].gatherer.saving


class _Managed(nn.Parameter):
    """A parameter that an engine manages. Copies and pickles of it are plain parameters."""

    access: Access

    def __getattr__(self, name: str) -> Any:
        if name == "access":
            raise RuntimeError(
                f"a parameter of shape {list(self.size())} was exchanged with another one (torch.utils.swap_tensors)"
                " after the engine was made: change its values in place (param.copy_) instead"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(plain(self.detach()).clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(plain(self.detach()), self.requires_grad).__reduce_ex__(protocol)


class WatchedParameter(_Managed):
    """A parameter that records accesses to `.data`, because changes through it do not increment the version."""

    @property
    def data(self) -> Any:
        """The tensor's data, as of any tensor; reading or setting it marks the parameter as touched."""
        self.access.touched = True
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Tensor) -> None:
        self.access.touched = True
        Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


class _Guarded(Tensor):
    """The methods of tensors that do not call `__torch_function__`."""

    def as_subclass(self, cls: Any) -> Any:
        return _call(Tensor.as_subclass, Tensor.as_subclass, (self, cls), {})

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        return _call(Tensor.set_, Tensor.set_, (self, *args), kwargs)


class GuardedParameter(_Guarded, _Managed):
    """A parameter whose values are made readable when a function of torch is called on it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=UNTRACED)
        if func is torch.autograd.grad:
            return func(args[0], [_edge(part) for part in args[1]], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _OF_A_SHARDED:
                return _OF_A_SHARDED[func](*args, **kwargs)
            own = super().__torch_function__
            return _call(lambda *a, **k: own(func, types, a, k), func, args, kwargs)


def _edge(tensor: Any) -> Any:
    """Returns where the gradient of a guarded parameter arrives in the graph; other tensors as they are."""
    if not (isinstance(tensor, GuardedParameter) and tensor.requires_grad):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(tensor)


def plain(view: Tensor) -> Tensor:
    """Returns a tensor without its guard."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(view, Tensor)


def _strides(param: Tensor) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides = [1]
    for size in reversed(param.shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides))[: param.dim()] if param.dim() else ()


def _describe(param: Any, **_: Any) -> str:
    access: Access = param.access
    if not access.group.sliced or access.gatherer.is_open(access.group):
        access.require()
        return Tensor.__repr__(plain(param.detach()))
    return f"{access.slot.spec.name}: sharded parameter of shape {list(param.shape)}, {param.dtype}"


_OF_A_SHARDED: dict[Any, Callable[..., Any]] = {
    Tensor.stride: lambda param, dim=None: _strides(param) if dim is None else _strides(param)[dim],
    Tensor.is_contiguous: lambda param, *_, **__: True,
    Tensor.__repr__: _describe,
}


class AbsentParameter(GuardedParameter):
    """A guarded parameter whose values are not in memory, or not yet."""


@functools.cache
def _combined(kind: type[GuardedParameter], own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Returns the guarded class for parameters of a class.

    `torch.func` hands parameters to native code that does not ask: as nodes of its trees absent ones are asked here.
    """
    made = type(kind.__name__, (kind, own), {"__module__": __name__})
    if kind is AbsentParameter:
        pytree.register_pytree_node(made, _opened, lambda parts, _: next(iter(parts)))
    return made


def _opened(param: Any) -> tuple[list[Any], None]:
    param.access.require()
    return [param], None


class GuardedView(_Guarded):
    """A tensor that shares memory with a guarded parameter."""

    access: Access
    buffer: Tensor
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
