"""One rank of 16,384, with torch's fake process group: its memory does not grow with the world.

Topology, engine, step and forecast are those of a real run. The answers of other ranks are replaced
by this rank's answer.
"""

from __future__ import annotations

import gc
import time
import tracemalloc

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import run_ranks
from tests.live import Live
from threed import models
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import Slicing
from threed.planner.forecast import Forecast

PP, TP = 4, 1
SMALL = 64


def config_of(world: int, zero: int) -> Config:
    """Returns a configuration with two micro-batches per data rank."""
    rows = 2 * world // (PP * TP)
    config = Config.model_validate({
        "parallel": {"pp": PP, "tp": TP},
        "zero": {"stage": zero, "bucket_mib": 0.05},
        "model": {"layers": 6, "hidden": 64, "heads": 4, "seq": 32, "vocab": 256},
        "train": {"global_batch": rows, "micro_batch": 1, "steps": 10},
    })  # fmt: skip
    return resolve(config, 256, world)


def one_of(world: int, zero: int) -> dict[str, float]:
    """Returns the bytes and seconds of a rank on the first stage.

    It waits for no shapes of another stage.
    """
    found: dict[str, float] = {}
    began = time.perf_counter()
    gc.collect()
    tracemalloc.start()
    dist.init_process_group("fake", rank=world // PP - TP, world_size=world, store=FakeStore())
    config = config_of(world, zero)
    with Live() as live:
        topology = Topology(pp=PP, tp=TP)
        assert (topology.world, topology.coordinates["pp"]) == (world, 0)
        engine = Engine(
            models.build(config.model, Slicing(topology.axis("tp"), True)), topology, config
        )
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        for _ in range(2):
            engine.step({"tokens": tokens, "labels": tokens})
        found["tensors"] = live.bytes_now()
    found["python"] = tracemalloc.get_traced_memory()[1]
    found["engine_s"] = time.perf_counter() - began
    tracemalloc.reset_peak()
    began, before = time.perf_counter(), tracemalloc.get_traced_memory()[0]
    forecast = Forecast.of(config, world)
    found["forecast_python"] = tracemalloc.get_traced_memory()[1] - before
    found["forecast_s"] = time.perf_counter() - began
    assert len(forecast.ranks) == world
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("world", "zero"),
    [
        (4096, 3),
        *(pytest.param(16_384, zero, marks=pytest.mark.grid) for zero in (1, 3)),
    ],
)
def test_a_rank_of_thousands_takes_what_a_rank_of_64_takes(world: int, zero: int) -> None:
    """Tensors take no more memory, except for the padding of slices.

    Python objects take two kilobytes per rank of the world: lists of ranks, the answers of an
    exchange of configurations, and the forecast's row of each rank.
    """
    small, large = (run_ranks(1, one_of, ranks, zero)[0] for ranks in (SMALL, world))
    print(small, large)
    more = world - SMALL
    assert large["tensors"] <= small["tensors"] + 1024 * more
    assert large["python"] <= small["python"] + 2048 * more
    assert large["forecast_python"] <= small["forecast_python"] + 2048 * more
