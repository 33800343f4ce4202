"""A pretend accelerator with values, whose streams run late and in a random order: a missing wait gives wrong numbers.

    with late(seed=3):
        results = configs.train(case)         # engines of `tests.configs` are on this device

Tensors have a shape and strides of their own, and values in a block of the host's memory. Views are made at once; every
other operation is put into the queue of the current stream, with aliases of the memory that it reads and writes. Queues
run when the host waits for something, one entry at a time: the first stream of an order that is drawn anew now and then
goes first, unless it has to wait for an event. So the device is always behind the host, and of two streams that nothing
orders now one is ahead and now the other.

As on CUDA, new memory is what was freed last on its stream, and has no values (NaN, -1) until something writes them;
copies between page-locked memory and the device run late when they are not to wait, and from other memory they read at
once; a value read on the host, and a copy that waits, run the current stream to its end. A collective has a stream for
each group, runs on the real process group when its turn comes, and its `wait` makes the current stream wait.

What it cannot see: how long anything takes, and what kernels do inside. Backward runs in the caller's thread, on the
stream that is current there.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import configs
from tests.accelerator import pretend
from tests.accelerator.watching import COPIES, NAME, READS, tensors_in
from threed import collectives
from threed import device as door
from threed.layers import attention
from threed.memory import pool
from threed.topology import Topology

aten, prim = torch.ops.aten, torch.ops.prim
THREED = str(Path(door.__file__).parent)
GRAIN = 512  # bytes: blocks of memory are multiples, as CUDA's are
_on_meta: Any = SimpleNamespace(in_kernel_invocation=False)


class LateError(RuntimeError):
    """What a real device would crash on, hang in, or compute garbage from."""


def place() -> str:
    """The innermost line of threed that runs."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(THREED):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "?"
    return f"threed{frame.f_code.co_filename.removeprefix(THREED)}:{frame.f_lineno} {frame.f_code.co_name}"


# ------------------------------------------------------------------------------------------------------------- streams


class Event:
    """A place in a stream's queue."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.position = stream, stream.issued

    @property
    def reached(self) -> bool:
        """Whether the stream is past it."""
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        """The host waits for it."""
        self.stream.owner.run_until(self)

    def query(self) -> bool:
        """Whether it has come; the device may get on meanwhile."""
        self.stream.owner.get_on()
        return self.reached

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds until another: none."""
        return 0.0


class Stream:
    """A queue of work, and the memory that was freed on it."""

    def __init__(self, owner: Device) -> None:
        self.owner, self.device = owner, owner.where
        self.queue: deque[tuple[Callable[[], Any], str]] = deque()
        self.issued = self.done = 0
        self.free: list[Block] = []
        self.leaving: list[tuple[list[Event], Block]] = []  # freed memory, until other streams have used it
        owner.order.append(self)

    def add(self, work: Callable[[], Any], what: str) -> None:
        """Adds work, which returns False when it cannot run yet."""
        self.queue.append((work, f"{what} of {place()}"))
        self.issued += 1

    def turn(self) -> bool:
        """Runs the next entry; returns whether that was possible."""
        if not self.queue:
            return False
        work, what = self.queue[0]
        try:
            if work() is False:
                return False
        except LateError:
            raise
        except Exception as error:
            raise LateError(f"{what} failed, on values that may not have been there yet: {error}") from error
        self.queue.popleft()
        self.done += 1
        return True

    def record_event(self, event: Any = None) -> Event:
        """An event after all that the stream has been told."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """What comes next waits for the event."""
        self.add(lambda: event.reached, "wait")

    def wait_stream(self, other: Stream) -> None:
        """What comes next waits for all that the other was told."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits for it."""
        self.record_event().synchronize()


# -------------------------------------------------------------------------------------------------------------- memory


class Block:
    """Memory of the device, uint8 [n]. users: streams that `record_stream` named."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.stream, self.users = stream, set[Stream]()
        self.release: Any = None

    def free(self) -> None:
        """Gives the memory back to its stream, once the streams that use it have come here."""
        events = [user.record_event() for user in self.users if user is not self.stream]
        self.users.clear()
        if events:
            self.stream.leaving.append((events, self))
        else:
            self.stream.free.append(self)


class Late(Tensor):
    """A tensor of the device. Its own storage is that of a meta tensor, which carries the block."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Tensor) -> Late:
        return Tensor._make_subclass(cls, elem, False, dispatch_device=True, device_for_backend_keys=pretend.device())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is prim.device.default:
            return torch.device("meta") if _on_meta.in_kernel_invocation else pretend.device()
        raise LateError(f"{func} of the late device outside of it")

    def data_ptr(self) -> int:
        """The address of the values."""
        block = block_of(self)
        return 0 if block is None else block.bytes.data_ptr() + self.storage_offset() * self.element_size()

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


def twin(tensor: Late) -> Tensor:
    """The values of a tensor, on the CPU: another view of the same memory."""
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype)
    block = block_of(tensor)
    if block is None:
        raise LateError(f"{place()} uses memory that was freed: {tensor.dtype} {list(shape)}")
    return block.bytes.view(tensor.dtype).as_strided(shape, strides, tensor.storage_offset())


def no_values(tensor: Tensor) -> Tensor:
    """Fills a tensor with what nobody wrote: NaN, or -1."""
    if tensor.numel():
        tensor.view(torch.uint8).fill_(255)
    return tensor


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dicts, with other things in them."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, item) for item in value])
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return change(value)


# -------------------------------------------------------------------------------------------------------------- device


class Device(TorchDispatchMode):
    """Queues every operation on tensors of the device, and runs the queues in an order of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.where, self.random, self.lock = pretend.device(), random.Random(seed), threading.RLock()
        self.order: list[Stream] = []
        self.current = Stream(self)
        self.streams: dict[Any, Stream] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def stream(self, *key: Any) -> Stream:
        """The stream of a name."""
        if key not in self.streams:
            self.streams[key] = Stream(self)
        return self.streams[key]

    # -------------------------------------------------------------------------------------------------------- running

    def turn(self) -> bool:
        """Runs an entry of the first stream that can run; returns whether there was one."""
        if self.random.random() < 1 / 16:
            self.random.shuffle(self.order)
        return any(stream.turn() for stream in self.order)

    def run_until(self, event: Event) -> None:
        """Runs the queues until an event comes."""
        with self.lock, torch._C._DisableTorchDispatch(), torch.no_grad():
            while not event.reached:
                if not self.turn():
                    if not Work.under_way:
                        heads = "; ".join(stream.queue[0][1] for stream in self.order if stream.queue)
                        raise LateError(f"streams wait for one another: {heads}")
                    time.sleep(1e-4)

    def get_on(self) -> None:
        """Lets the device run a little, or not."""
        with self.lock, torch._C._DisableTorchDispatch(), torch.no_grad():
            for _ in range(self.random.choice((0, 0, 5, 50, 500))):
                self.turn()

    def drain(self) -> None:
        """Runs everything."""
        for stream in list(self.order):
            stream.synchronize()

    # --------------------------------------------------------------------------------------------------------- memory

    def allocate(self, storage: Any, nbytes: int) -> None:
        """Gives a storage memory, without values."""
        need, stream = -(-nbytes // GRAIN) * GRAIN, self.current
        for entry in [entry for entry in stream.leaving if all(event.reached for event in entry[0])]:
            stream.leaving.remove(entry)
            stream.free.append(entry[1])
        fitting = (n for n in reversed(range(len(stream.free))) if need <= len(stream.free[n].bytes) <= 16 * need)
        at = next(fitting, None)
        block = Block(need, stream) if at is None else stream.free.pop(at)
        stream.add(lambda: no_values(block.bytes), "a first use of memory")
        storage.block, block.release = block, weakref.finalize(storage, block.free)
        block.release.atexit = False

    def resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What `UntypedStorage.resize_` does where the storage is the device's."""

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

    # ----------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is prim.device.default:
            return self.where
        given = list(tensors_in(*args, *kwargs.values()))
        here = [t for t in given if isinstance(t, Late)]
        target = kwargs.get("device")
        if not here and (target is None or target.type != NAME):
            return self._on_host(func, args, kwargs)
        if func in READS:
            return self._read(func, args, kwargs)
        if func in COPIES and (out := self._copied(func, args, kwargs)) is not None:
            return out
        for t in given:
            if t.dim() and not isinstance(t, Late):
                raise LateError(f"{place()}: {func} mixes a tensor {list(t.shape)} of the host with the device's")
        return self.operate(func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, pinned = func._opname, kwargs.pop("pin_memory", False)
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_pin_memory":
            return self.pin(args[0].clone())
        out = func(*args, **kwargs)
        if pinned:
            self.pin(out)
            if name.startswith(("empty", "new_empty")):
                no_values(out)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation whose result the host has to know."""
        args = mapped(_as_given, args)
        self.current.synchronize()
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
            if isinstance(source, Late) is (target.type == NAME):
                return None
            dtype = kwargs.get("dtype") or source.dtype
            if isinstance(source, Late):
                out = torch.empty_like(twin(source), dtype=dtype)
                if late:  # as on CUDA
                    self.pin(no_values(out))
            else:
                out = self._like(torch.empty_like(source, dtype=dtype, device="meta"))
        self._copy(out, source, late)
        return out

    def _copy(self, out: Tensor, source: Tensor, late: bool) -> None:
        to_host = isinstance(source, Late)
        pinned = self.is_pinned(out if to_host else source)
        if to_host:
            source = twin(source)
        else:
            out, source = twin(out), source if pinned else source.clone()
        self.current.add(lambda: out.copy_(source), f"a copy {'to' if to_host else 'from'} the host")
        if not late or (to_host and not pinned):
            self.current.synchronize()

    def _like(self, value: Any) -> Any:
        """A tensor of the device, without values yet, of the form of one of the host."""
        if not isinstance(value, Tensor):
            return value
        elem = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        storage = elem.untyped_storage()
        if storage.nbytes():
            self.allocate(storage, storage.nbytes())
        return Late(elem)

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Makes the results, and queues what writes their values."""
        if func.is_view or func._opname == "_unsafe_view":
            with in_kernel_invocation_manager(_on_meta):
                out = func(*args, **kwargs)
            return mapped(lambda value: Late(value) if isinstance(value, Tensor) else value, out)
        written, targets = _written(func, args, kwargs), list[Tensor]()
        if written is not None:
            out = written[0] if len(written) == 1 else tuple(written) if written else None
        else:  # in the form of what the CPU makes of zeros
            out = mapped(self._like, func(*mapped(_zeros, args), **mapped(_zeros, kwargs)))
            targets = [twin(t) for t in tensors_in(out)]
        if func._opname.startswith(("empty", "new_empty")):
            return out
        on_cpu, kw = mapped(_value, args), mapped(_value, kwargs)

        def run() -> None:
            results = func(*on_cpu, **kw)
            if written is None:
                for target, result in zip(targets, tensors_in(results), strict=True):
                    target.copy_(result)

        self.current.add(run, str(func))
        return out


def _as_given(value: Any) -> Any:
    """An argument, or its values on the CPU where it is a tensor of the device."""
    return twin(value) if isinstance(value, Late) else value


def _value(value: Any) -> Any:
    """An argument of an operation, as it is given to the CPU's."""
    if isinstance(value, Late):
        return twin(value)
    if isinstance(value, Tensor):
        return value.clone()  # a number, which a kernel gets when it is started
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _zeros(value: Any) -> Any:
    """Zeros in the form of an argument."""
    if not isinstance(value, Late):
        return _value(value)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()


def _written(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """What an operation that writes to its arguments returns; None for one that does not."""
    schema = func._schema
    if not schema.is_mutable:
        return None
    found = []
    for result in schema.returns:
        for n, argument in enumerate(schema.arguments):
            same = argument.alias_info is not None and result.alias_info is not None
            if same and argument.alias_info.before_set == result.alias_info.before_set:
                found.append(args[n] if n < len(args) else kwargs[argument.name])
    return found


# --------------------------------------------------------------------------------------------------------- collectives


class Work:
    """A collective that was queued. kept: what it reads and writes."""

    under_way = 0  # collectives that run now

    def __init__(self, event: Event, kept: Any) -> None:
        self.event, self.kept = event, kept

    def wait(self) -> None:
        """Makes the current stream wait; the host too, if the tensors are the host's. They may be freed then."""
        self.event.stream.owner.current.wait_event(self.event)
        if not any(isinstance(t, Late) for t in tensors_in(*self.kept)):
            self.event.synchronize()
        self.kept = None


class Communication:
    """`torch.distributed`, whose collectives run when the stream of their group comes to them."""

    def __init__(self, owner: Device) -> None:
        self.owner, self.threads = owner, ThreadPoolExecutor(32)

    def __getattr__(self, name: str) -> Any:
        if name in ("send", "recv", "isend", "irecv"):
            begin = getattr(dist, "i" + name.removeprefix("i"))
            return functools.partial(self.late, begin, async_op=name.startswith("i"))
        function = getattr(dist, name)
        collective = name in ("all_to_all_single", "all_reduce", "broadcast", "barrier")
        return functools.partial(self.late, functools.partial(function, async_op=True)) if collective else function

    def late(
        self, begin: Callable[..., dist.Work], *args: Any, group: Any = None, async_op: bool = False, **keywords: Any
    ) -> Work | None:
        """Queues a collective."""
        given, stream = mapped(_as_given, args), self.owner.stream("collectives", group or dist.group.WORLD)
        running: list[Future[Any]] = []

        def start() -> None:
            running.append(self.threads.submit(begin(*given, group=group, **keywords).wait))
            Work.under_way += 1

        def end() -> bool:
            if not running[0].done():
                return False
            Work.under_way -= 1
            running[0].result()
            return True

        stream.wait_event(self.owner.current.record_event())
        stream.add(start, "a collective")
        stream.add(end, "the end of a collective")
        work = Work(stream.record_event(), args)
        if async_op:
            return work
        work.wait()
        return None


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
            return aten._scaled_dot_product_flash_attention_for_cpu(*args[:3], 0.0, causal, scale=scale)[0]
        if func is F.silu and isinstance(args[0], Late):
            return _Silu.apply(self.device, args[0])
        return func(*args, **kwargs)


@contextmanager
def late(seed: int = 0) -> Iterator[Device]:
    """Gives this process a late device, whose streams run in an order of this seed."""
    device = Device(seed)
    talk = Communication(device)

    def set_stream(stream: Stream) -> None:
        device.current = stream

    def topology_of(pp: int, tp: int) -> Topology:
        return Topology(pp=pp, tp=tp, device=device.where)

    original = pool.host_buffer

    def host_buffer(nbytes: int) -> Tensor:
        with patch.object(door, "count", lambda: 0):  # no CUDA locks it
            return device.pin(original(nbytes))

    answers: Iterable[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (door.count, lambda: 1),
        (door.current_stream, lambda *_: device.current),
        (door.copy_stream, lambda _, direction: device.stream("copies", direction)),
        (door.mark, lambda _: device.current.record_event()),
        (door.synchronize, lambda *_: device.drain()),
        (pool.host_buffer, host_buffer),
        (
            collectives._all_gather_single,
            functools.partial(talk.late, functools.partial(collectives._all_gather_single, async_op=True)),
        ),
    ]
    attention.rotary_table.cache_clear()  # of another device with this name
    with (
        pretend.there(),
        pretend.replaced(answers),
        patch.object(torch.accelerator, "set_stream", set_stream),
        patch.object(torch.UntypedStorage, "resize_", device.resize(torch.UntypedStorage.resize_)),
        patch.object(collectives, "dist", talk),
        patch.object(configs, "topology_of", topology_of),
        torch.autograd.set_multithreading_enabled(False),
        pretend.numbers_begin_on_the_host(),
        AsOnCpu(device),
        device,
    ):
        try:
            yield device
            device.drain()
        finally:
            attention.rotary_table.cache_clear()
