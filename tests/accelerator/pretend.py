"""A pretend accelerator: the real engine takes steps on a device that is not the CPU, in a world of any size, in one
process.

    with pretending(rank=513, world=1024) as device:
        engine = device.engine(config)
        device.step(engine)              # `engine.step`, on a batch in the host's memory
    device.faults                        # what would stall a GPU, or fail on it: each with the line that did it
    device.launches, device.traffic      # of the last step: kernels by operation, and bytes that they read and write
    device.memory.most                   # the most bytes of the device's tensors at once, since the beginning

Tensors have shapes, dtypes and devices, but no values (`FakeTensorMode`); the device is torch's backend for those made
in Python. Every operation of a step is looked at: no value may be read on the host, no operation may have tensors of
two places (a scalar tensor of the host would be a hidden dependence on it), no collective may get host memory, and
copies between host and device must not wait: `non_blocking`, from or into page-locked memory.

A kernel is counted for every operation that is no view and no allocation, as CUDA runs it: attention and RMSNorm are
one kernel forward and one backward. What it cannot see is order between streams: they are objects that do nothing.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.backend_registration as registration
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.fake_collectives import FakeWork
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from threed import device as door
from threed import models
from threed.config import Config
from threed.engine import Engine
from threed.layers import Slicing
from threed.memory import pool
from threed.metrics import StepMetrics
from threed.models import Model
from threed.models import check as model_check
from threed.pipeline.boundary import Form
from threed.pipeline.trace import Watch
from threed.precision import dtype
from threed.topology import Axis, Topology

NAME = "pretend"
HOST_READ, MIXED, BLOCKING = (
    "a value is read on the host",
    "tensors of host and device in one operation",
    "a copy waits",
)
TO_COLLECTIVE, WAIT = "host memory is given to a collective", "the host waits for the device"
ROOT = Path(__file__).parents[2]

aten, c10d = torch.ops.aten, torch.ops.c10d
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default}
COPIES = {aten.copy_.default, aten._to_copy.default}
# Operations that start no kernel, beside views.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "detach", "detach_", "alias", "lift_fresh", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory",
}  # fmt: skip
WITHOUT_SHAPES = {"record_stream", "_fused_adamw_", "_fused_sgd_"}  # on fake tensors torch cannot run them
IN_PLACE = {"add_", "copy_", "div_", "exp_", "fill_", "index_add_", "mul_", "scatter_add_", "sub_", "zero_"}
KERNELS: dict[str, int] = {}  # of an operation of torch.ops.threed that launches more than one


@dataclass(frozen=True)
class Fault:
    """What happened, by which operation, where: the innermost line that is not torch's."""

    kind: str
    operation: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.operation} at {self.place}"


def device() -> torch.device:
    """Torch's device for backends made in Python, under our name; skips the test where this torch has none."""
    set_up = getattr(registration, "_setup_privateuseone_for_python_backend", None)
    if set_up is None:
        pytest.skip(f"torch {torch.__version__} has no backend made in Python: torch.utils.backend_registration")
    if torch._C._get_privateuse1_backend_name() != NAME:
        set_up(NAME)
    return torch.device(NAME, 0)


def place() -> str:
    """The innermost line of the repository that runs, but for this file's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file != Path(__file__) and "site-packages" not in file.parts:
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
        self.traffic = self.copied = self.communicated = 0  # bytes: of kernels, between host and device, of collectives
        self.memory = Watch()
        self._pinned: dict[int, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def begin(self) -> None:
        """Counts anew."""
        self.faults, self.waits, self.launches = [], [], Counter()
        self.traffic = self.copied = self.communicated = 0

    # --------------------------------------------------------------------------------------------------------- faults

    def fault(self, kind: str, operation: str) -> None:
        """Writes one down, if a step runs."""
        if self.stepping:
            self.faults.append(Fault(kind, operation, place()))

    def waits_for_device(self, what: str) -> None:
        """Writes down that the host waits; where state is offloaded it has to."""
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
        out = self._run(func, name, args, kwargs)
        self._count(func, name, given, list(tensors_in(out)))
        return out

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in WITHOUT_SHAPES:
            return None
        if name in IN_PLACE:  # its shape is known, which torch takes a fifth of a millisecond to find out
            return args[0]
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name == "_pin_memory":
            return self.pin(torch.empty_like(args[0]))
        out = func(*args, **kwargs)
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
            target, waits = torch.device(kwargs.get("device") or source.device), not kwargs.get("non_blocking", False)
        if {target.type, source.device.type} != {"cpu", NAME}:
            return
        if isinstance(source, FakeTensor):
            source.constant = None  # else torch would make a real copy of a number
        self.copied += source.nbytes
        fresh = name == "_to_copy" and target.type == "cpu"  # torch makes that page-locked by itself
        if waits or not (fresh or self.is_pinned(host)):
            how = "blocking" if waits else "pageable memory"
            self.fault(BLOCKING, f"{name} from {source.device.type} to {target.type}, {how}, {source.nbytes} bytes")

    def _communicate(self, func: Any, name: str, args: Any, given: list[Tensor]) -> Any:
        """A collective of the fake process group: nothing is sent, and its results are there."""
        if host := [t for t in given if kind_of(t) == "cpu"]:
            self.fault(TO_COLLECTIVE, f"{name} of {list(host[0].shape)} {host[0].dtype}")
        self.launches[name] += name != "barrier"
        self.communicated += sum(t.nbytes for t in given)
        for t in given:
            self.memory.look_at(t)
        work, results = FakeWork().boxed(), [a.type.kind() for a in func._schema.returns]
        if len(results) == 1:
            return work
        return (args[0], work)

    def _count(self, func: Any, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        here = [t for t in (*given, *made) if kind_of(t) == NAME]
        for t in here:
            self.memory.look_at(t)
        outputs = made or given[:1]
        if not here or func.is_view or name in FREE or not any(t.numel() for t in outputs):
            return
        self.kernel(name, *here, count=KERNELS.get(name, 1) if func.namespace == "threed" else 1)

    def kernel(self, name: str, *tensors: Tensor, count: int = 1) -> None:
        """Counts a launch, and what it reads and writes."""
        self.launches[name] += count
        self.traffic += sum(t.nbytes for t in tensors)


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
            return _RmsNorm.apply(self.watch, args[0], args[2] if len(args) > 2 else kwargs["weight"])
        if func is F.silu:
            return _Silu.apply(self.watch, args[0])
        return func(*args, **kwargs)


# --------------------------------------------------------------------------------------------------------------- doors


class Event:
    """Something in a stream's order, which it has none of."""

    def __init__(self, watch: Watching) -> None:
        self.watch = watch

    def synchronize(self) -> None:
        """The host waits for it."""
        self.watch.waits_for_device("event")

    def query(self) -> bool:
        """It has come."""
        return True


class Stream(torch.Stream):
    """A stream that does nothing, but says when the host waits for it."""

    watch: Watching

    @classmethod
    def of(cls, watch: Watching) -> Stream:
        """A stream of the device."""
        stream = cls(watch.where)
        stream.watch = watch
        return stream

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        """An event."""
        return Event(self.watch)

    def synchronize(self) -> None:
        """The host waits for it."""
        self.watch.waits_for_device("stream")


@contextmanager
def _doors(watch: Watching) -> Iterator[None]:
    """What threed asks of a device, of page-locked memory, and of other ranks, answered by the pretend one."""
    stream = Stream.of(watch)

    @contextmanager
    def beside(_: Any) -> Iterator[None]:
        yield

    def exchange(value: Any, axis: Axis) -> list[Any]:
        if axis.group is not None:
            watch.fault(HOST_READ, "exchange")
        return [value] * axis.size

    def normal(seed: int, name: str, shape: Any, start: Any, size: Any) -> Tensor:
        return torch.empty(tuple(size))

    answers: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (door.count, lambda: 1),
        (door.beside, beside),
        (door.current_stream, lambda *_: stream),
        (door.copy_stream, lambda *_: stream),
        (door.synchronize, lambda *_: watch.waits_for_device("device")),
        (door.rng_states, lambda _: {}),
        (pool.host_buffer, lambda nbytes: watch.pin(torch.empty(nbytes, dtype=torch.uint8))),
        (sys.modules["threed.collectives"].exchange, exchange),
        (sys.modules["threed.rng"].normal, normal),
        (model_check.check, lambda *_: None),  # compares the tensor ranks' shares, and they all say what this one says
    ]
    with ExitStack() as stack:
        stack.enter_context(_numbers_begin_on_the_host())
        stack.enter_context(patch.object(Form, "to_bytes", lambda form: torch.empty(64, dtype=torch.uint8)))
        for was, now in answers:
            for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "threed"]:
                for attribute in [key for key, value in vars(module).items() if value is was]:
                    stack.enter_context(patch.object(module, attribute, now))
        yield


class Pretend(Watching):
    """A rank of a world on the pretend device: builds engines, and takes their steps."""

    def engine(self, config: Config, model: Callable[[Slicing], Model] | None = None) -> Engine:
        """The engine of a configuration, of one of threed's own models unless another is made of a slicing."""
        p = config.parallel
        topology = Topology(pp=p.pp, tp=p.tp, device=self.where)
        slicing = Slicing(topology.axis("tp"), bool(p.sequence), config.train.seed, config.zero.tile)
        built = models.build(config.model, slicing) if model is None else model(slicing)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            engine = Engine(built, topology, config)
        length = config.model.seq // (topology.tp if slicing.sequence_parallel else 1)
        shape = (length, config.train.micro_batch, config.model.hidden)
        form = Form(None, (shape,), (dtype(config.precision.dtype),), (True,))
        engine.executor._receive_form = lambda source: form  # type: ignore[method-assign]  # no other stage tells it
        return engine

    def step(self, engine: Engine) -> StepMetrics:
        """A step on tokens in the host's memory."""
        config, self.stepping = engine.config, False
        rows = config.train.global_batch // engine.topology.dp
        tokens = torch.zeros(rows, config.model.seq, dtype=torch.int64)
        batch = {"tokens": tokens, "labels": tokens.clone()}
        self.begin()
        self.stepping = True
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                return engine.step(batch)
        finally:
            self.stepping = False


@contextmanager
def _numbers_begin_on_the_host() -> Iterator[None]:
    """Makes `torch.tensor(number, device=...)` begin on the host, as on any device, so that its copy is seen."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


_FAKE: list[FakeTensorMode] = []  # one for all: tables that are kept from run to run are its tensors


@contextmanager
def pretending(rank: int = 0, world: int = 1) -> Iterator[Pretend]:
    """Makes this process the given rank of a world on the pretend device."""
    where = device()
    if not _FAKE:
        _FAKE.append(FakeTensorMode())
    watch, hook = Pretend(where), sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with torch.autograd.set_multithreading_enabled(False), _FAKE[0], watch, AsOnCuda(watch), _doors(watch):
            yield watch
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # each process group wraps another around it


def ranks_to_try(world: int) -> list[int]:
    """The first, one in the middle, and the last."""
    return list(dict.fromkeys((0, world // 2 + 1 if world > 2 else 0, world - 1)))


def summary(faults: list[Fault]) -> str:
    """Each once, with how often it came."""
    counted = Counter(map(str, faults))
    return "\n".join(f"{n} times {text}" for text, n in itertools.islice(counted.most_common(), 40))
