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

    device.order                         # of the last step: what waits for what on which stream

What it cannot see: how long anything takes, and what depends on values. What other ranks would say is what this one
says.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.backend_registration as registration
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.accelerator.watching import HOST_READ, NAME, AsOnCuda, Watching
from threed import models
from threed.config import Config
from threed.core import device as door
from threed.core import rng
from threed.distributed import collectives
from threed.distributed.topology import Axis, Topology
from threed.engine import Engine
from threed.layers import Slicing, dispatch
from threed.memory import pool
from threed.models import Model
from threed.models import check as model_check
from threed.ops import flex, launch
from threed.ops.precision import dtype
from threed.pipeline.boundary import Form
from threed.zero.offload import OffloadedOptimizer
from threed.zero.step_metrics import StepMetrics


@functools.cache
def device() -> torch.device:
    """Torch's device for backends made in Python, under our name; skips the test where this torch has none."""
    set_up = getattr(registration, "_setup_privateuseone_for_python_backend", None)
    if set_up is None:
        pytest.skip(
            f"torch {torch.__version__} has no backend made in Python: torch.utils.backend_registration"
        )
    if torch._C._get_privateuse1_backend_name() != NAME:
        there: dict[str, Any] = {"is_available": lambda _: _pretending}
        module = type("Module", (registration._DummyBackendModule,), there)()
        hook = type("Hook", (registration._DummyPrivateUse1Hook,), there)()
        set_up(NAME, backend_module=module, hook=hook)
    return torch.device(NAME, 0)


_pretending = False  # else there is no such device: other tests in this process would be run on it


@contextmanager
def there() -> Iterator[None]:
    """Has torch find the device."""
    global _pretending
    _pretending = True
    try:
        yield
    finally:
        _pretending = False


# --------------------------------------------------------------------------------------------------------------- doors


@contextmanager
def _doors(watch: Watching) -> Iterator[None]:
    """What threed asks of a device, of page-locked memory, and of other ranks, answered by the pretend one."""
    order = watch.order

    def exchange(value: Any, axis: Axis) -> list[Any]:
        if axis.group is not None:
            watch.fault(HOST_READ, "exchange")
        return [value] * axis.size

    def normal(seed: int, name: str, shape: Any, start: Any, size: Any) -> Tensor:
        return torch.empty(tuple(size))

    answers: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (door.count, lambda: 1),
        (door.current_stream, lambda *_: order.current),
        (door.copy_stream, lambda _, purpose: order.named(purpose)),
        (door.mark, lambda _: order.current.record_event()),
        (door.synchronize, lambda *_: watch.waits_for_device("device")),
        (door.shared_memory, lambda _: 227 << 10),
        (door.rng_states, lambda _: watch.forbid("the state of a generator is read") or {}),
        (door.set_rng_states, lambda *_: watch.forbid("the state of a generator is set")),
        (pool.host_buffer, lambda nbytes: watch.pin(torch.empty(nbytes, dtype=torch.uint8))),
        (door.can_capture, lambda where: where.type == NAME),
        (door.graph_pool, object),
        (door.DeviceGraph, graphs_of(watch)),
        (collectives.exchange, exchange),
        (rng.normal, normal),
        (launch.on_gpu, lambda x: x.device.type == NAME),
        (launch.available, lambda x: x.device.type == NAME),  # the kernels of csrc/cuda, as shapes
        (
            dispatch.start_reading,
            lambda sent, _, total, *__: (
                lambda: watch.fault(HOST_READ, "sizes") or dispatch.even_sizes(*sent.shape, total)
            ),
        ),
        (flex.problem, lambda _: ""),
        (flex.attend, lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        (
            flex.compute,
            lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ),
        (
            model_check.check,
            lambda *_: None,
        ),  # compares the tensor ranks' shares, and they all say what this one says
    ]
    form = patch.object(Form, "to_bytes", lambda form: torch.empty(64, dtype=torch.uint8))
    set_stream = patch.object(torch.accelerator, "set_stream", order.use)
    with numbers_begin_on_the_host(), form, set_stream, replaced(answers):
        yield


def graphs_of(watch: Watching) -> type:
    """The class of graphs in place of `DeviceGraph`: in a capture, what CUDA does not permit is a fault."""

    class Graph:
        def __init__(self, pool: Any, generators: Iterable[torch.Generator] = ()) -> None:
            self.generators = {id(generator) for generator in generators}

        @contextmanager
        def capture(self) -> Iterator[None]:
            """Watches the block."""
            before, watch.registered = watch.order.current, self.generators
            watch.order.use(watch.order.named("capture"))
            watch.capturing = True
            forbidden = lambda *_, **__: watch.forbid("a new process group")  # noqa: E731
            try:
                with patch.object(dist, "new_group", forbidden):
                    yield
            finally:
                watch.capturing = False
                watch.order.use(before)

        def replay(self) -> None:
            """Counts one launch."""
            watch.kernel("graph")

    return Graph


@contextmanager
def replaced(answers: Iterable[tuple[Callable[..., Any], Callable[..., Any]]]) -> Iterator[None]:
    """Puts other functions in the place of some, wherever threed has them."""
    new = {id(was): now for was, now in answers}
    ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "threed"]
    with ExitStack() as stack:
        for module in ours:
            for attribute in [key for key, value in vars(module).items() if id(value) in new]:
                now = new[id(getattr(module, attribute))]
                stack.enter_context(patch.object(module, attribute, now))
        yield


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given before it returns."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        """The result of work that is done."""
        future: Future[Any] = Future()
        future.set_result(work(*args, **keywords))
        return future


class Pretend(Watching):
    """A rank of a world on the pretend device: builds engines, and takes their steps."""

    def engine(self, config: Config, model: Callable[[Slicing], Model] | None = None) -> Engine:
        """The engine of a configuration, of one of threed's own models unless another is made of a slicing."""
        p = config.parallel
        topology = Topology(pp=p.pp, tp=p.tp, cp=p.cp, device=self.where)
        slicing = Slicing.of(topology, config)
        built = models.build(config.model, slicing) if model is None else model(slicing)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            engine = Engine(built, topology, config)
        if isinstance(engine.optimizer, OffloadedOptimizer) and engine.optimizer._thread:
            engine.optimizer._thread = AtOnce()  # another thread would not see these modes
        length = config.model.seq // slicing.sequence_parts
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
def numbers_begin_on_the_host() -> Iterator[None]:
    """Makes `torch.tensor(number, device=...)` begin on the host, as on any device, so that its copy is seen."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


# one for all: tables that are kept from run to run are its tensors
_FAKE: list[FakeTensorMode] = []


@contextmanager
def pretending(rank: int = 0, world: int = 1) -> Iterator[Pretend]:
    """Makes this process the given rank of a world on the pretend device."""
    where = device()
    if not _FAKE:
        _FAKE.append(FakeTensorMode())
    watch, hook = Pretend(where), sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with (
            there(),
            torch.autograd.set_multithreading_enabled(False),
            _FAKE[0],
            watch,
            AsOnCuda(watch),
            _doors(watch),
        ):
            yield watch
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # each process group wraps another around it


def ranks_to_try(world: int) -> list[int]:
    """The first, one in the middle, and the last."""
    return list(dict.fromkeys((0, world // 2 + 1 if world > 2 else 0, world - 1)))
