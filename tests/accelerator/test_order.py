"""What a step of ZeRO waits for on an accelerator: reductions and gathers of Llama-8B layers on 8 ranks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.accelerator.order import MAIN, Entry, Order
from tests.accelerator.pretend import Pretend, pretending, replaced
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed import collectives
from threed.distributed.topology import default_device
from threed.ops import launch
from threed.pipeline.stage import Stage
from threed.planner.forecast import Forecast
from threed.zero import reduction_stream
from threed.zero.reduction_stream import ReductionStream

LAYERS, BLOCKS = 4, range(1, 5)  # layer 0 is the embedding


def config_of(stage: int, layers: int = LAYERS, **groups: dict[str, Any]) -> Config:
    """Llama-3 8B with fewer layers, with 64 MiB buckets."""
    given = {
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
    return resolve(Config.model_validate(given), 128256, 8)


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


@functools.cache
def step_of(stage: int, plant: Plant = nothing) -> Pretend:
    """The second step of a rank."""
    with ExitStack() as stack, pretending(0, 8) as device:
        plant(stack)
        engine = device.engine(config_of(stage))
        device.step(engine)
        with naming_layers(device.order):
            device.step(engine)
    assert device.faults == device.waits == []
    return device


def own_reductions_waited_for(order: Order) -> dict[int, int]:
    """How many of its own reductions each layer's kernels wait for on the compute stream."""
    found: dict[int, set[Entry]] = {}
    for entry in order.step:
        if entry.stream == MAIN and entry.layer is not None:
            own = {e for e in order.waits(entry) if is_reduction(e) and e.layer == entry.layer}
            found.setdefault(entry.layer, set()).update(own)
    return {layer: len(own) for layer, own in found.items()}


def is_reduction(entry: Entry) -> bool:
    """Whether an entry is a reduce-scatter."""
    return "reduce_scatter" in entry.name


@pytest.mark.parametrize("stage", [2, 3])
def test_no_layer_waits_for_a_reduction_of_its_own(stage: int) -> None:
    order = step_of(stage).order
    launched = Counter(entry.layer for entry in order.step if is_reduction(entry))
    assert all(launched[layer] >= 12 for layer in BLOCKS)
    assert not any(own_reductions_waited_for(order).values())


@pytest.mark.parametrize("plant", [on_the_compute_stream, with_a_limit_of_a_bucket])
def test_waits_for_reductions_of_the_same_layer_are_found(plant: Plant) -> None:
    waited = own_reductions_waited_for(step_of(3, plant).order)
    assert all(waited[layer] >= 7 for layer in BLOCKS)


def peak_of_forecast(config: Config) -> int:
    """The forecast of rank 0 on an accelerator with NCCL, and with the kernels of csrc/cuda."""
    with replaced([
        (default_device, lambda: Pretend),
        (launch.on_gpu, lambda x: x.is_meta),
        (launch.available, lambda x: x.is_meta),
        (collectives._gloo, lambda axis: False),
    ]):  # fmt: skip
        return Forecast.of(config, 8).ranks[0].bytes["peak"]


if __name__ == "__main__":
    import sys
    stage=int(sys.argv[1])
    for plant in (nothing, on_the_compute_stream, with_a_limit_of_a_bucket, without_a_limit):
        device=step_of(stage,plant); order=device.order
        print(plant.__name__, own_reductions_waited_for(order), device.memory.most/2**30)
        def seconds(e):
            if e.stream==MAIN or e.stream=="reduce":
                if "attention" in e.name:
                    return e.flops/2/(430e12 if "backward" in e.name else 520e12)
                return max(e.flops/660e12, e.nbytes/2.75e12)+1.5e-6
            return 25e-6+e.nbytes*7/9/340e9
        ends=order.ends(seconds)
        busy=sum(seconds(e) for e in order.step if e.stream==MAIN)
        main=[(e,ends[e]) for e in order.step if e.stream==MAIN]
        stall=Counter(); last=0
        for e,t in main:
            gap=t-seconds(e)-last; last=t
            stall[e.layer]+=gap
        print(f"step {max(ends.values())*1e3:.1f} ms busy {busy*1e3:.1f} exposed {(max(ends.values())-busy)*1e3:.2f}", {k:round(v*1e3,2) for k,v in stall.items()})
    print(Counter(e.name for e in order.step if e.stream not in (MAIN,"reduce")))
