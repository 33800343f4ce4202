"""Looks at every operation of a step on a device, and counts what it does: faults, waits, launches, bytes.

    with FakeTensorMode(), Watching(device) as watch, AsOnCuda(watch):
        watch.stepping = True
        ...
    watch.faults · watch.waits · watch.launches · watch.traffic · watch.copied · watch.communicated · watch.memory.most

`pretend` is what makes a device, and the rest of a rank, around it. A kernel is counted for every operation that is no
view and no allocation, as CUDA runs it: attention, RMSNorm and SiLU are one kernel forward and one backward.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.accelerator import shapes
from tests.accelerator.order import Order
from threed.ops import launch
from threed.pipeline import graphs
from threed.pipeline.trace import Watch, formula_of

NAME = "pretend"
HOST_READ = "a value is read on the host"
MIXED = "tensors of host and device in one operation"
BLOCKING = "a copy waits"
IN_CAPTURE = "not permitted in a capture"
TO_COLLECTIVE, WAIT = "host memory is given to a collective", "the host waits for the device"
ROOT = Path(__file__).parents[2]
OURS = (Path(__file__), Path(__file__).with_name("pretend.py"), Path(graphs.__file__))

aten, c10d = torch.ops.aten, torch.ops.c10d
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
}
COPIES = {aten.copy_.default, aten._to_copy.default}
# Operations that start no kernel, beside views.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "detach", "detach_", "alias", "lift_fresh", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory",
}  # fmt: skip
WITHOUT_SHAPES = {
    "record_stream",
    "_fused_adamw_",
    "_fused_sgd_",
}  # on fake tensors torch cannot run them
IN_PLACE = {
    "add_",
    "copy_",
    "div_",
    "exp_",
    "fill_",
    "index_add_",
    "mul_",
    "scatter_add_",
    "sub_",
    "zero_",
}


@dataclass(frozen=True)
class Fault:
    """What happened, by which operation, where: the innermost line that is not torch's."""

    kind: str
    operation: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.operation} at {self.place}"


def place() -> str:
    """The innermost line of the repository that runs, but for these files, and those that look at operations, too."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file not in OURS and "site-packages" not in file.parts:
            return f"{file.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def kind_of(tensor: Tensor) -> str:
    """The type of a tensor's device; of a fake one without asking its mode."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


class Watching(TorchDispatchMode):
    """Looks at every operation; see the head of this file."""

    def __init__(self, where: torch.device) -> None:
        super().__init__()
        self.where = where
        self.stepping = False
        self.faults: list[Fault] = []
        self.waits: list[Fault] = []  # of the host for the device
        self.launches: Counter[str] = Counter()
        # bytes: of kernels, between host and device, of collectives
        self.traffic = self.copied = self.communicated = 0
        self.memory = Watch()
        self.order = Order(where, self.waits_for_device, self.forbid)
        self._pinned: dict[int, StorageWeakRef] = {}
        self.capturing = False  # what CUDA does not permit in the capture of a graph is a fault
        self.captured: Counter[str] = Counter()  # kernels in captures
        self.registered: set[int] = set()  # generators of the graph

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def begin(self) -> None:
        """Counts anew."""
        self.faults, self.waits, self.launches = [], [], Counter()
        self.order.begin()
        self.traffic = self.copied = self.communicated = 0

    # --------------------------------------------------------------------------------------------------------- faults

    def fault(self, kind: str, operation: str) -> None:
        """Writes one down, if a step runs."""
        if self.stepping:
            self.faults.append(Fault(kind, operation, place()))

    def forbid(self, operation: str) -> None:
        """Writes down what a capture does not permit, if there is one."""
        if self.capturing:
            self.faults.append(Fault(IN_CAPTURE, operation, place()))

    def waits_for_device(self, what: str) -> None:
        """Writes down that the host waits; where state is offloaded it has to."""
        self.forbid(f"the host waits for the {what}")
        if self.stepping:
            self.waits.append(Fault(WAIT, what, place()))

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the host is page-locked."""
        ref = self._pinned.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    def pin(self, tensor: Tensor) -> Tensor:
        """Marks a tensor's memory as page-locked."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    # ----------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # the most frequent of all
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        name = func._opname
        given = list(tensors_in(*args, *kwargs.values()))
        self._check_capture(func, name, kwargs)
        if func.namespace == "c10d":
            return self._communicate(func, name, args, given)
        if func in READS:
            return self._read(func, name, given)
        if func in COPIES:
            self._check_copy(name, args, kwargs)
        elif len({kind_of(t) for t in given} & {"cpu", NAME}) > 1:
            cpu = next(t for t in given if kind_of(t) == "cpu")
            self.fault(MIXED, f"{name} of a tensor {list(cpu.shape)} of the host")
            args, kwargs = (self._moved(args), self._moved(kwargs))
        out = self._run(func, name, args, kwargs, given)
        self._count(func, name, args, given, list(tensors_in(out)))
        return out

    def _check_capture(self, func: Any, name: str, kwargs: Any) -> None:
        generator, target = kwargs.get("generator"), kwargs.get("device")
        if func.namespace == "c10d":
            self.forbid(f"a collective: {name}")
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            self.forbid("page-locked memory is allocated")
        if generator is not None and id(generator) not in self.registered:
            self.forbid(f"{name} draws from a generator that is not registered")
        elsewhere = self.order.current is not self.order.named("capture")
        if elsewhere and name.startswith("empty") and target is not None and target.type == NAME:
            self.forbid("an allocation outside of the pool")

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        if name in WITHOUT_SHAPES:
            return None
        if name in IN_PLACE:
            return args[0]
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_pin_memory":
            return self.pin(torch.empty_like(args[0]))
        out = shapes.result(func, args, kwargs, given, self.where)
        to_host = name == "_to_copy" and kwargs.get("non_blocking") and kind_of(args[0]) == NAME
        if (kwargs.get("pin_memory") or to_host) and kind_of(out) == "cpu":
            self.pin(out)
        return out

    def _moved(self, values: Any) -> Any:
        """Arguments with the host's tensors on the device, so that the step goes on."""
        if isinstance(values, dict):
            return {key: self._moved(value) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return type(values)(self._moved(value) for value in values)
        cpu = isinstance(values, Tensor) and kind_of(values) == "cpu"
        return torch.empty(values.shape, dtype=values.dtype, device=self.where) if cpu else values

    def _read(self, func: Any, name: str, given: list[Tensor]) -> Any:
        """Says that a value was read, and makes one up."""
        if any(kind_of(t) == NAME for t in given):
            self.fault(HOST_READ, name)
            self.forbid(f"{HOST_READ}: {name}")
        x = given[0]
        if name == "equal":
            return True
        if name == "nonzero":
            return x.new_empty(x.numel(), x.dim(), dtype=torch.int64)
        if name == "masked_select":
            return x.new_empty(x.numel())
        return False if x.dtype == torch.bool else 0.0 if x.is_floating_point() else 0

    def _check_copy(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "copy_":
            target, source = args[0].device, args[1]
            host = args[0] if target.type == "cpu" else source
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source = host = args[0]
            target = torch.device(kwargs.get("device") or source.device)
            waits = not kwargs.get("non_blocking", False)
        if {target.type, source.device.type} != {"cpu", NAME}:
            return
        if isinstance(source, FakeTensor):
            source.constant = None  # else torch would make a real copy of a number
        self.forbid(f"a copy from {source.device.type} to {target.type}")
        self.copied += source.nbytes
        # torch makes that page-locked by itself
        fresh = name == "_to_copy" and target.type == "cpu"
        if waits or not (fresh or self.is_pinned(host)):
            how = "blocking" if waits else "pageable memory"
            self.fault(
                BLOCKING,
                f"{name} from {source.device.type} to {target.type}, {how}, {source.nbytes} bytes",
            )

    def _communicate(self, func: Any, name: str, args: Any, given: list[Tensor]) -> Any:
        """A collective of the fake process group: nothing is sent, and its results are there."""
        if host := [t for t in given if kind_of(t) == "cpu"]:
            self.fault(TO_COLLECTIVE, f"{name} of {list(host[0].shape)} {host[0].dtype}")
        self.launches[name] += name != "barrier"
        self.communicated += sum(t.nbytes for t in given)
        for t in given:
            self.memory.look_at(t)
        group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        work = self.order.collective(name, group.group_name, sum(t.nbytes for t in given)).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _count(
        self, func: Any, name: str, args: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        here = [t for t in (*given, *made) if kind_of(t) == NAME]
        for t in here:
            self.memory.look_at(t)
        outputs = made or given[:1]
        if not here or func.is_view or name in FREE or not any(t.numel() for t in outputs):
            return
        ours = launch.OPERATORS.get(f"{func.namespace}::{name}")
        flops = _flops(func, args, made)
        self.kernel(name, *here, count=1 if ours is None else ours.launches(*args), flops=flops)

    def kernel(self, name: str, *tensors: Tensor, count: int = 1, flops: int = 0) -> None:
        """Counts a launch, and what it reads and writes."""
        nbytes = sum(t.nbytes for t in tensors)
        if self.capturing:
            self.captured[name] += count
            return
        self.launches[name] += count
        self.traffic += nbytes
        self.order.add(name, flops, nbytes)


def _flops(func: Any, args: Any, made: list[Tensor]) -> int:
    """The FLOPs of an operation that torch has a formula for."""
    formula = formula_of(func._overloadpacket)
    factors = [arg for arg in args if not isinstance(arg, torch.dtype)]  # some products take one
    return 0 if formula is None else int(formula(*factors, out_val=made[0]))


class _RmsNorm(torch.autograd.Function):
    """RMSNorm in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, watch: Watching, x: Tensor, weight: Tensor) -> Tensor:
        y, scales = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.watch = watch
        ctx.save_for_backward(x, weight, scales)
        watch.kernel("rms_norm", x, weight, y, scales)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight, scales = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        ctx.watch.kernel("rms_norm_backward", dy, x, weight, scales, dx, dweight)
        return None, dx, dweight


class _Silu(torch.autograd.Function):
    """SiLU in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, watch: Watching, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctx.watch = watch
        ctx.save_for_backward(x)
        watch.kernel("silu", x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        ctx.watch.kernel("silu_backward", dy, x, dx)
        return None, dx


class AsOnCuda(TorchFunctionMode):
    """Attention, RMSNorm and SiLU in the kernels that CUDA has for them; elsewhere torch runs them in pieces."""

    def __init__(self, watch: Watching) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
            return aten._scaled_dot_product_flash_attention(*args[:3], 0.0, causal, scale=scale)[0]
        if func is F.rms_norm:
            return _RmsNorm.apply(
                self.watch, args[0], args[2] if len(args) > 2 else kwargs["weight"]
            )
        if func is F.silu:
            return _Silu.apply(self.watch, args[0])
        return func(*args, **kwargs)


def summary(faults: list[Fault]) -> str:
    """Each once, with how often it came."""
    counted = Counter(map(str, faults))
    return "\n".join(f"{n} times {text}" for text, n in itertools.islice(counted.most_common(), 40))
