"""A pretend accelerator with values, whose streams run late and in a random order: a missing wait gives wrong numbers.

    with late(seed=3):
        results = configs.train(case)         # engines of `tests.configs` are on this device

Tensors have a shape and strides of their own, and values in blocks of the host's memory. Views are made at once; every
other operation is put into the queue of the current stream (`late_streams`), with views of the memory that it reads and
writes. Queues run when the host waits for something, so the device is always behind the host.

As on CUDA, new memory is what was freed last on its stream, and has no values (NaN, -1) until something writes them;
copies between page-locked memory and the device run late where they need not wait, and from other memory they read at
once; a value read on the host, and a copy that waits, run the current stream to its end. A collective has a stream for
each group (`late_collectives`), and its `wait` makes the current stream wait.

Operations are the CPU's own, so that a training gives the bits that it gives on a CPU. What this cannot see: how long
anything takes, and what kernels do inside. Backward runs in the caller's thread, on the stream that is current there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import configs
from tests.accelerator import pretend
from tests.accelerator.late_collectives import communicating
from tests.accelerator.late_graphs import Capture, graphs_of, is_capturing
from tests.accelerator.late_streams import Block, LateError, Stream, Streams, no_values, place
from tests.accelerator.watching import COPIES, NAME, READS, tensors_in
from threed.core import device as door
from threed.distributed.topology import Topology
from threed.memory import pool
from threed.ops import attention, rotary

aten, prim = torch.ops.aten, torch.ops.prim
_on_meta: Any = SimpleNamespace(in_kernel_invocation=False)


def where() -> torch.device:
    """The device; skips the test where this torch has not what it is made of."""
    for module, name in (
        (fake_tensor, "in_kernel_invocation_manager"),
        (torch._C, "_DisableTorchDispatch"),
    ):
        if not hasattr(module, name):
            pytest.skip(
                f"torch {torch.__version__} has no {module.__name__}.{name}, which the late device uses"
            )
    return pretend.device()


# ------------------------------------------------------------------------------------------------------------- tensors


class Late(Tensor):
    """A tensor of the device. It is a meta tensor, but for its device; the values are in its storage's `block`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Tensor) -> Late:
        return Tensor._make_subclass(
            cls, elem, False, dispatch_device=True, device_for_backend_keys=pretend.device()
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is prim.device.default:
            return args[0].device
        raise LateError(
            f"{place()}: {func} in a thread that does not know the device, or after it has gone"
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device, without a dispatch."""
        return torch.device("meta") if _on_meta.in_kernel_invocation else pretend.device()

    def data_ptr(self) -> int:
        """The address of the values."""
        block = block_of(self)
        return (
            0
            if block is None
            else block.bytes.data_ptr() + self.storage_offset() * self.element_size()
        )

    def tolist(self) -> Any:
        """The values as numbers, which the host waits for."""
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        """Keeps the memory, once it is free, until this stream has come to that point."""
        if (block := block_of(self)) is not None:
            block.users.add(stream)


def block_of(tensor: Tensor) -> Block | None:
    """The memory of a tensor; None where it was freed, or never was."""
    return getattr(tensor.untyped_storage(), "block", None)


def values_of(tensor: Late) -> Tensor:
    """The values of a tensor, on the CPU: another view of the same memory."""
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype)
    block = block_of(tensor)
    if block is None:
        raise LateError(f"{place()} uses memory that was freed: {tensor.dtype} {list(shape)}")
    return block.bytes.view(tensor.dtype).as_strided(shape, strides, tensor.storage_offset())


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dicts, with other things in them."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, item) for item in value])
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return change(value)


def on_cpu(value: Any) -> Any:
    """An argument of an operation, as the CPU's gets it: a number of the host is what it is now."""
    if isinstance(value, Tensor):
        return values_of(value) if isinstance(value, Late) else value.clone()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def zeros(value: Any) -> Any:
    """Zeros in the form of an argument."""
    if isinstance(value, Late):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
    return on_cpu(value)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What an operation returns that writes to its arguments: some of these."""
    found = []
    for result in func._schema.returns:
        for n, argument in enumerate(func._schema.arguments):
            same = argument.alias_info is not None and result.alias_info is not None
            if same and argument.alias_info.before_set == result.alias_info.before_set:
                found.append(args[n] if n < len(args) else kwargs[argument.name])
    return found


# -------------------------------------------------------------------------------------------------------------- device


class Device(TorchDispatchMode):
    """Queues every operation on tensors of the device."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.where = where()
        self.streams = Streams(self.where, seed)
        self.graph: Any = graphs_of(self.streams)  # captured: all graphs; replays: of which

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Makes a stream the current one."""
        before, self.streams.current = self.streams.current, stream
        try:
            yield
        finally:
            self.streams.current = before

    def allocate(self, storage: Any, nbytes: int) -> None:
        """Gives a storage memory, until it dies."""
        storage.block = block = self.streams.current.allocate(nbytes)
        block.release = weakref.finalize(storage, block.free)
        block.release.atexit = False

    def resizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What `UntypedStorage.resize_` does, also where the storage is the device's."""

        def resize_(storage: Any, nbytes: int) -> Any:
            if hasattr(storage, "block"):
                if storage.block is not None:
                    storage.block.release()
                storage.block = None
                if nbytes:
                    self.allocate(storage, nbytes)
            return original(storage, nbytes)

        return resize_

    def pin(self, tensor: Tensor) -> Tensor:
        """Page-locks a tensor's memory."""
        tensor.untyped_storage().pinned = True
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the host is page-locked."""
        return getattr(tensor.untyped_storage(), "pinned", False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is prim.device.default:
            return self.where
        with torch._C.DisableTorchFunction():  # the backward calls this with the modes of functions
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        given, target = list(tensors_in(*args, *kwargs.values())), kwargs.get("device")
        if not any(isinstance(t, Late) for t in given) and (target is None or target.type != NAME):
            return self._on_host(func, args, kwargs)
        if func in READS:
            return self._read(func, args, kwargs)
        if func in COPIES and (out := self._copied(func, args, kwargs)) is not None:
            return out
        for t in given:
            if t.dim() and not isinstance(t, Late):
                raise LateError(
                    f"{place()}: {func} mixes a tensor {list(t.shape)} of the host with the device's"
                )
        return self.operate(func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, pinned = func._opname, kwargs.pop("pin_memory", False)
        if (pinned or name == "_pin_memory") and is_capturing(self.streams):
            raise LateError(f"{place()}: memory is page-locked in a capture")
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_pin_memory":
            return self.pin(args[0].clone())
        out = func(*args, **kwargs)
        if pinned:
            self.pin(no_values(out) if name.startswith(("empty", "new_empty")) else out)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation whose result the host has to know."""
        args = mapped(on_cpu, args)
        self.streams.current.synchronize()
        out = func(*args, **kwargs)
        return out.to(self.where) if isinstance(out, Tensor) else out

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A copy between the host and the device; None for any other."""
        if func is aten.copy_.default:
            out, source = args[:2]
            late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if isinstance(out, Late) is isinstance(source, Late):
                return None
        else:
            source, late = args[0], kwargs.get("non_blocking", False)
            target = kwargs.get("device") or source.device
            dtype = kwargs.get("dtype") or source.dtype
            if isinstance(source, Late) is (target.type == NAME):
                return None
            out = torch.empty_like(zeros(source), dtype=dtype)
            if not isinstance(source, Late):
                out = self._like(out)
            elif late:  # as on CUDA
                out = self.pin(no_values(out))
        self._copy(out, source, late)
        return out

    def _copy(self, out: Tensor, source: Tensor, late: bool) -> None:
        if is_capturing(self.streams):
            raise LateError(f"{place()}: a copy between host and device in a capture")
        to_host = isinstance(source, Late)
        pinned = self.is_pinned(out if to_host else source)
        if isinstance(out, Late):
            out, source = values_of(out), source if pinned else source.clone()
        else:
            source = values_of(source)
        self.streams.current.add(
            lambda: out.copy_(source), f"a copy {'to' if to_host else 'from'} the host"
        )
        if not late or (to_host and not pinned):
            self.streams.current.synchronize()

    def _like(self, value: Any) -> Any:
        """A tensor of the device, without values yet, in the form of one of the host."""
        if not isinstance(value, Tensor):
            return value
        elem = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if nbytes := elem.untyped_storage().nbytes():
            self.allocate(elem.untyped_storage(), nbytes)
        return Late(elem)

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Makes the results of an operation, and queues what writes their values."""
        if func.is_view or func._opname == "_unsafe_view":
            with fake_tensor.in_kernel_invocation_manager(_on_meta):
                out = func(*args, **kwargs)
            return mapped(lambda value: Late(value) if isinstance(value, Tensor) else value, out)
        targets: list[Tensor] = []
        if func._schema.is_mutable:
            written = written_by(func, args, kwargs)
            out = written[0] if len(written) == 1 else tuple(written) or None
        else:  # in the form of what the CPU makes of zeros
            out = mapped(self._like, func(*mapped(zeros, args), **mapped(zeros, kwargs)))
            targets = [values_of(t) for t in tensors_in(out)]
            if func._opname.startswith(("empty", "new_empty")):
                return out
        drawn, current = kwargs.get("generator"), self.streams.current
        registered = not isinstance(current, Capture) or id(drawn) in current.generators
        if drawn is not None and not registered:
            raise LateError(f"{place()}: a generator that is not registered with the graph")
        given, by_name = mapped(on_cpu, args), mapped(on_cpu, kwargs)

        def run() -> None:
            results = func(*given, **by_name)
            for target, result in zip(targets, tensors_in(results), strict=bool(targets)):
                target.copy_(result)

        self.streams.current.add(run, func)
        return out


# --------------------------------------------------------------------------------------------------------------- doors


class _Silu(torch.autograd.Function):
    """SiLU, whose backward torch would run in pieces."""

    @staticmethod
    def forward(ctx: Any, device: Device, x: Tensor) -> Tensor:
        ctx.device = device
        ctx.save_for_backward(x)
        return aten.silu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, ctx.device.operate(aten.silu_backward.default, (dy, *ctx.saved_tensors), {})


class AsOnCpu(TorchFunctionMode):
    """Attention and SiLU by the CPU's kernels, which torch would not choose for another device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and isinstance(args[0], Late):
            causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
            return aten._scaled_dot_product_flash_attention_for_cpu(
                *args[:3], 0.0, causal, scale=scale
            )[0]
        if func is F.silu and isinstance(args[0], Late):
            return _Silu.apply(self.device, args[0])
        return func(*args, **kwargs)


@contextmanager
def _doors(device: Device) -> Iterator[None]:
    """What threed asks of a device and of page-locked memory, answered by the late one."""
    streams, host_buffer = device.streams, pool.host_buffer

    def pinned_buffer(nbytes: int) -> Tensor:
        with patch.object(door, "count", lambda: 0):  # there is no CUDA to lock it
            return device.pin(host_buffer(nbytes))

    def topology_of(pp: int, tp: int, cp: int = 1) -> Topology:
        return Topology(pp=pp, tp=tp, cp=cp, device=device.where)

    def set_stream(stream: Stream) -> None:
        streams.current = stream

    answers: Iterable[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (door.count, lambda: 1),
        (door.current_stream, lambda *_: streams.current),
        (door.copy_stream, lambda _, direction: streams.named("copies", direction)),
        (door.mark, lambda _: streams.current.record_event()),
        (door.synchronize, lambda *_: streams.synchronize()),
        (pool.host_buffer, pinned_buffer),
        (door.can_capture, lambda _: True),
        (door.graph_pool, lambda: Capture(streams)),
        (door.DeviceGraph, device.graph),
    ]
    with (
        pretend.replaced(answers),
        patch.object(torch.accelerator, "set_stream", set_stream),
        patch.object(
            torch.UntypedStorage, "resize_", device.resizing(torch.UntypedStorage.resize_)
        ),
        patch.object(configs, "topology_of", topology_of),
        communicating(
            streams,
            lambda given: mapped(lambda t: values_of(t) if isinstance(t, Late) else t, given),
        ),
    ):
        yield


def _clear_tables() -> None:
    rotary.plain_table.cache_clear()
    attention._cached_mask.cache_clear()


@contextmanager
def late(seed: int = 0) -> Iterator[Device]:
    """Gives this process a late device, whose streams run in an order of this seed."""
    device = Device(seed)
    _clear_tables()  # which may be of another device with this name
    try:
        with (
            pretend.there(),
            _doors(device),
            torch.autograd.set_multithreading_enabled(False),
            pretend.numbers_begin_on_the_host(),
            AsOnCpu(device),
            device,
        ):
            yield device
            device.streams.synchronize()
    finally:
        _clear_tables()
