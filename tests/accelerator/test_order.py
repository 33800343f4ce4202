"""What a step of ZeRO waits for on an accelerator: reductions and gathers of Llama-8B layers on 8 ranks."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.accelerator.order import MAIN, Entry, Order
from tests.accelerator.pretend import Pretend, pretending, replaced
from tests.accelerator.pretend import device as pretend_device
from tests.accelerator.watching import summary
from threed.config import Config
from threed.config.resolution import resolve
from threed.core import device as door
from threed.distributed import collectives
from threed.distributed.topology import default_device
from threed.ops import launch
from threed.pipeline.stage import Stage
from threed.planner.forecast import Forecast
from threed.zero import reduction_stream, setup
from threed.zero.reduction_stream import ReductionStream

LAYERS, BLOCKS = 3, range(1, 4)  # layer 0 is the embedding
BUCKET = 2**26


def config_of(stage: int, layers: int = LAYERS, **groups: dict[str, Any]) -> Config:
    """Llama-3 8B with fewer layers, with 64 MiB buckets."""
    given: dict[str, dict[str, Any]] = {
        "precision": {"dtype": "bf16"},
        "zero": {"stage": stage, "bucket_mib": 64.0},
        "model": {
            "arch": "llama", "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq": 8192,
            "vocab": 128256, "layers": layers,
        },
        "train": {"micro_batch": 1, "global_batch": 8, "steps": 10},
    }  # fmt: skip
    for name, group in groups.items():
        given[name] = {**given.get(name, {}), **group}
    return resolve(Config.model_validate(given), given["model"]["vocab"], 8)


@contextmanager
def naming_layers(order: Order) -> Iterator[None]:
    """Has entries say in which layer's backward they were enqueued."""
    back = Stage._back

    def named(self: Stage, unit: int, *args: Any) -> Any:
        order.layer = unit
        try:
            return back(self, unit, *args)
        finally:
            order.layer = None

    with patch.object(Stage, "_back", named):
        yield


Plant = Callable[[ExitStack], None]


def nothing(stack: ExitStack) -> None:
    """Plants no fault."""


def on_the_compute_stream(stack: ExitStack) -> None:
    """Reductions are waited for as on a CPU: at most two buckets are in flight."""
    stack.enter_context(patch.object(reduction_stream, "is_accelerator", lambda device: False))


def with_a_limit_of_a_bucket(stack: ExitStack) -> None:
    """A launch waits for all reductions but the newest."""
    stack.enter_context(patch.object(reduction_stream, "limits", lambda layout: Counter({-1: 0})))


def without_a_limit(stack: ExitStack) -> None:
    """Windows are held until the end of the step."""
    stack.enter_context(patch.object(ReductionStream, "make_room", lambda self, bucket: None))


def on_one_communicator(stack: ExitStack) -> None:
    """Gathers of stage 3 have the communicator of reductions."""
    axes = setup.shard_axes

    def shared(*args: Any) -> tuple[str, str, str]:
        shard, replicas, _ = axes(*args)
        return shard, replicas, shard

    stack.enter_context(patch.object(setup, "shard_axes", shared))


def run(config: Config, plant: Plant = nothing) -> Pretend:
    """Two steps of a rank of 8; the device has the order and the peak of the second one."""
    with ExitStack() as stack, pretending(0, 8) as device:
        plant(stack)
        engine = device.engine(config)
        device.step(engine)
        device.memory.most = 0
        with naming_layers(device.order):
            device.step(engine)
    assert device.faults == device.waits == [], summary([*device.faults, *device.waits])
    return device


@functools.cache
def order_of(stage: int, plant: Plant = nothing, layers: int = LAYERS) -> Order:
    """The order of a step. Under stage 2, layers have backwards of their own only if they are recomputed."""
    mode = {"mode": "full" if stage == 2 else "none"}
    return run(config_of(stage, layers, recompute=mode), plant).order


def is_reduction(entry: Entry) -> bool:
    """Whether an entry is a reduce-scatter."""
    return "reduce_scatter" in entry.name


def own_reductions_waited_for(order: Order) -> dict[int, int]:
    """How many of its own reductions each layer's kernels wait for on the compute stream."""
    found = defaultdict[int, set[Entry]](set)
    for entry in order.step:
        if entry.stream == MAIN and entry.layer is not None:
            own = {e for e in order.waits(entry) if is_reduction(e) and e.layer == entry.layer}
            found[entry.layer] |= own
    return {layer: len(own) for layer, own in found.items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_no_layer_waits_for_a_reduction_of_its_own(stage: int) -> None:
    order = order_of(stage)
    launched = Counter(entry.layer for entry in order.step if is_reduction(entry))
    assert all(launched[layer] >= 5 for layer in BLOCKS)
    assert not any(own_reductions_waited_for(order).values())


@pytest.mark.parametrize(
    ("stage", "plant"),
    [
        (3, on_the_compute_stream),
        (2, with_a_limit_of_a_bucket),
        pytest.param(2, on_the_compute_stream, marks=pytest.mark.grid),
        pytest.param(3, with_a_limit_of_a_bucket, marks=pytest.mark.grid),
    ],
)
def test_waits_for_reductions_of_the_same_layer_are_found(stage: int, plant: Plant) -> None:
    waited = own_reductions_waited_for(order_of(stage, plant))
    assert all(waited[layer] >= 7 for layer in BLOCKS)


# ------------------------------------------------------------------------------------------------------------- gathers


def test_a_unit_is_gathered_by_one_call() -> None:
    """Small parameters, which stay unsharded, by one more call a step."""
    gathers = Counter(e.name for e in order_of(3).step if "gather" in e.name)
    assert gathers.pop("_allgather_base_") == 1
    assert sum(gathers.values()) == 2 * LAYERS + 2  # embedding and head once


def gathers_behind_reductions(order: Order) -> list[Entry]:
    """Gathers that were enqueued behind a reduction on their communicator, before the compute stream waited for it."""
    found = []
    for number, entry in enumerate(order.step):
        if "gather" in entry.name:
            waited = set[Entry]().union(*(order.waits(e) for e in entry.after if e.stream == MAIN))
            before = {e for e in order.step[:number] if e.stream == entry.stream} - waited
            found += [entry] * any(is_reduction(e) for e in before)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_no_gather_is_behind_a_reduction(stage: int) -> None:
    assert not gathers_behind_reductions(order_of(stage))


def test_gathers_behind_reductions_are_found() -> None:
    assert len(gathers_behind_reductions(order_of(3, on_one_communicator))) >= LAYERS - 1


# -------------------------------------------------------------------------------------------------------------- memory


def peak_of_forecast(config: Config, plant: Plant = nothing) -> int:
    """The forecast of rank 0 on an accelerator with NCCL, and with the kernels of csrc/cuda."""
    accelerator = pretend_device()
    answers: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (default_device, lambda: accelerator),
        (door.shared_memory, lambda _: 227 << 10),
        (launch.on_gpu, lambda x: x.is_meta),
        (launch.available, lambda x: x.is_meta),
        (collectives._gloo, lambda axis: False),
    ]
    with ExitStack() as stack, replaced(answers):
        plant(stack)
        return Forecast.of(config, 8).ranks[0].bytes["peak"]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.grid), 3])
def test_the_forecast_has_the_memory_of_reductions_in_flight(stage: int) -> None:
    """It grows by as much as the peak does; and it is below the peak without a limit."""
    config = config_of(
        stage, model={"vocab": 1024}, recompute={"mode": "full"}, train={"global_batch": 16}
    )
    now, before = (peak_of_forecast(config, plant) for plant in (nothing, on_the_compute_stream))
    peak, peak_before, unlimited = (
        run(config, plant).memory.most
        for plant in (nothing, on_the_compute_stream, without_a_limit)
    )
    assert abs((now - before) - (peak - peak_before)) < BUCKET
    assert now - before > 12 * BUCKET
    assert 0.88 * now < peak <= now < unlimited


# ---------------------------------------------------------------------------------------------------------------- time


def seconds(entry: Entry) -> float:
    """A model of an H100 with NVLink: 660 TFLOP/s, attention at 520 and 430, 2.75 TB/s, 340 GB/s between GPUs."""
    if entry.stream not in (MAIN, "reduce"):
        return 25e-6 + entry.nbytes * 7 / 9 / 340e9  # of 9 eighths, input and output, 7 are sent
    if "attention" in entry.name:  # half of the formula's FLOPs are masked
        return entry.flops / 2 / (430e12 if "backward" in entry.name else 520e12)
    return 1.5e-6 + max(entry.flops / 660e12, entry.nbytes / 2.75e12)


def modelled(plant: Plant) -> tuple[float, float]:
    """Seconds of a step of all 32 layers, and seconds in which its compute stream waits."""
    found = []
    for layers in (LAYERS - 1, LAYERS):
        order = order_of(3, plant, layers)
        step = max(order.ends(seconds).values())
        found.append((step, step - sum(seconds(e) for e in order.step if e.stream == MAIN)))
    step, exposed = (
        (last + (32 - LAYERS) * (last - first)) for first, last in zip(*found, strict=True)
    )
    return step, exposed


def test_a_modelled_step_has_less_exposed_communication() -> None:
    step, exposed = modelled(nothing)
    step_before, exposed_before = modelled(on_the_compute_stream)
    print(
        f"a step: {step_before * 1e3:.0f} ms, of these {exposed_before * 1e3:.0f} exposed; now {step * 1e3:.0f} ms,"
        f" {exposed * 1e3:.0f} exposed"
    )
    assert (exposed_before - exposed) / step_before >= 0.04
    assert step < 0.96 * step_before
