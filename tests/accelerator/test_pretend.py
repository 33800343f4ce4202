"""The engine on a device that is not the CPU: nothing is read in a step, nothing is mixed, no copy waits.

Every case is one rank of a world of up to 1,024, with the real engine, in this process; see `pretend`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests import test_equivalence as equivalence
from tests.accelerator import faults, launches
from tests.accelerator.pretend import Pretend, pretending, ranks_to_try
from tests.accelerator.watching import BLOCKING, HOST_READ, MIXED, TO_COLLECTIVE, summary
from tests.configs import Case, config_of
from tests.covering import Space, Values, in_turns
from tests.layers.test_own_models import example
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed import collectives
from threed.distributed.sharding import spec_of
from threed.layers import MixtureOfExperts
from threed.ops import flex
from threed.planner.forecast import Forecast

ROOT = Path(__file__).resolve().parents[2]

# ----------------------------------------------------------------------------------------------------- configurations

# Drives are left out: their transfers need real memory (tests/zero/test_zero_offload.py).
SETTINGS: dict[str, list[object]] = equivalence.SETTINGS | {
    "schedule": ["1f1b", "zb-v"],
    "microbatches": [1, 2],
    "dtype": ["bf16", "fp32"],
    "recompute": ["none", "full", "sliced", "cpu", "selective"],
    "offload_optimizer": ["none", "cpu"],
    "offload_params": ["none", "cpu"],
    "bucket_mib": [0.03],
    "prefetch": [1],
    "partition": ["balanced"],
}
LARGE_DP = 512  # in place of 4: worlds of 512 and 1,024
# Ranks agree once, as JSON, on what the step has shown; tensor ranks compare the inputs that they may slice.
FIRST_STEP = (
    "_on_all_ranks",
    "_agree_on_buckets",
    "_search",
    "_changed",
    "_compare",
    "_compare_shapes",
)


def make(values: Values) -> Case | None:
    """A case of the equivalence tests, with many data ranks in place of four."""
    case = equivalence.make(values)
    return case and replace(case, dp=LARGE_DP if case.dp == 4 else case.dp)


SPACE = Space(
    SETTINGS,
    make,
    cost=lambda case: case.microbatches * case.layers / case.pp * (1 + 9 * (case.dropout > 0)),
)
# Every value of every setting; `pytest -m grid` runs sets with every pair of values.
CASES = SPACE.touching(0)


def name_of(case: Case) -> str:
    """A case in a line."""
    usual = Case()
    return (
        " ".join(
            f"{name}={value}" for name, value in vars(case).items() if value != getattr(usual, name)
        )
        or "plain"
    )


def check(config: Config, world: int, rank: int, waits: bool) -> None:
    """Two steps of a rank without a fault; waits: whether the host may wait for the device."""
    with pretending(rank, world) as device:
        engine = device.engine(config)
        device.step(engine)
        unexpected = [fault for fault in device.faults if not fault.place.endswith(FIRST_STEP)]
        assert unexpected == [], "in the first step\n" + summary(unexpected)
        device.step(engine)
        assert device.faults == [], summary(device.faults)
        assert device.launches
        assert device.memory.most
        if not waits:
            assert device.waits == [], summary(device.waits)


def check_case(case: Case, number: int) -> None:
    """The same of a case, on one of its ranks; the host updates what is offloaded, and has to wait for it."""
    some = ranks_to_try(case.world)
    offloaded = not case.offload_optimizer == case.offload_params == "none"
    check(config_of(case), case.world, some[number % len(some)], offloaded)


@pytest.mark.seldom("pp=4 model=llama zero=3*", "dp=2 tp=4 model=phi3*")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_a_step_neither_reads_nor_mixes_nor_waits(number: int) -> None:
    check_case(CASES[number], number)


def test_neither_does_a_step_whose_spans_are_recorded() -> None:
    case = Case(pp=4, dtype="bf16", microbatches=2)
    with pretending(1, case.world) as device:
        engine = device.engine(config_of(case))
        engine.record()
        device.step(engine)
        device.step(engine)
        assert device.faults == device.waits == [], summary([*device.faults, *device.waits])
        assert len(engine.record(False)) == 2 * len(engine.executor._plan.ranks[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimistic_update_waits_for_one_number_and_reads_none_of_the_device(stage: int) -> None:
    """In the next step, for what was sent to the host when the sum was there; also where the update is undone."""
    case = Case(pp=4, dp=2, zero=stage, dtype="bf16", microbatches=2)
    config = config_of(case)
    parallel = config.parallel.model_copy(update={"optimistic_step": True})
    with pretending(2, case.world) as device:
        engine = device.engine(config.model_copy(update={"parallel": parallel}))
        optimistic, restarts = engine.optimizer.optimistic, []
        for undone in (False, False, True):
            if undone:
                optimistic._attempt = replace(
                    optimistic._attempt, wrong=SimpleNamespace(wait=lambda: True)
                )
            device.step(engine)
            restarts.append(optimistic.restarts)
            if len(restarts) > 1:
                assert device.faults == [], summary(device.faults)
                assert len(device.waits) == (not undone), summary(device.waits)
        assert restarts == [0, 0, 1]


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(5))
def test_neither_does_a_step_in_a_covering_set(seed: int) -> None:
    for number, case in enumerate(SPACE.covering(seed)):
        check_case(case, number + seed)


@pytest.mark.seldom("*'grad_dtype': 'bf16'*", "*'schedule': 'gpipe'*")
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": {"dtype": "fp16"}},
        {"precision": {"dtype": "bf16", "grad_dtype": "bf16"}, "zero": {"stage": 2}},
        pytest.param(
            {"precision": {"dtype": "bf16", "reduce_dtype": "bf16"}, "zero": {"stage": 3}},
            marks=pytest.mark.grid,
        ),
        pytest.param(
            {"optim": {"name": "sgd"}, "train": {"grad_clip": 0.0}}, marks=pytest.mark.grid
        ),
        {"optim": {"name": "lion", "groups": "*norm*: lr=0.001"}},
        {"zero": {"stage": 2, "offload_optimizer": "cpu", "delayed_update": True}},
        {"recompute": {"mode": "full", "arena": True, "offload": "cpu"}},
        {
            "parallel": {"pp": 4, "tp": 2, "schedule": "gpipe"},
            "train": {"global_batch": 4},  # as many micro-batches as stages
        },
        {"parallel": {"tp": 2}, "recompute": {"loss_chunks": 3}, "train": {"global_batch": 8}},
    ],
    ids=str,
)
def test_other_ways_to_train_have_no_fault(changes: dict[str, dict[str, object]]) -> None:
    small = {"layers": 3, "hidden": 64, "heads": 4, "seq": 32}
    groups = {"precision": {"dtype": "bf16"}, "model": small, **changes}
    groups["train"] = {"global_batch": 16, "micro_batch": 1, "steps": 10, **groups.get("train", {})}
    config = resolve(Config.model_validate(groups), 256, 8)
    check(config, 8, 5, waits="offload_optimizer" in changes.get("zero", {}))


# ------------------------------------------------------------------------------------------------------ planted faults


def run_planted(wrong: Callable[[Tensor], Tensor], world: int = 1) -> Pretend:
    """The second step of a small GPT with something wrong."""
    with pretending(0, world) as device:
        case = Case(dtype="bf16", dp=world, microbatches=1)
        config = config_of(case)
        engine = device.engine(config, lambda slicing: faults.PlantedModel(config, slicing, wrong))
        for _ in range(2):
            device.step(engine)
        return device


@pytest.mark.parametrize(
    ("wrong", "kind", "operation"),
    [
        (faults.reads_an_item, HOST_READ, "_local_scalar_dense"),
        (faults.asks_whether, HOST_READ, "_local_scalar_dense"),
        (faults.makes_a_list, HOST_READ, "_local_scalar_dense"),
        (faults.selects, HOST_READ, "nonzero"),
        (faults.takes_a_scalar_of_the_host, MIXED, "mul"),
        (faults.takes_a_tensor_of_the_host, MIXED, "add"),
        (faults.copies_to_the_host, BLOCKING, "_to_copy from pretend to cpu"),
        (faults.makes_a_tensor_of_a_number, BLOCKING, "_to_copy from cpu to pretend"),
        (faults.copies_from_pageable_memory, BLOCKING, "pageable"),
    ],
)
def test_a_planted_fault_is_found_where_it_is(
    wrong: Callable[[Tensor], Tensor], kind: str, operation: str
) -> None:
    # its backward may have more, in the line that runs the layer's backward
    first = run_planted(wrong).faults[0]
    assert first.kind == kind
    assert operation in first.operation
    assert first.place.startswith("tests/accelerator/faults.py:")
    assert first.place.endswith(wrong.__name__)


def test_host_memory_in_a_collective_is_found() -> None:
    def sends_host_memory(y: Tensor) -> Tensor:
        collectives.all_reduce(torch.zeros(4), world[0])
        return y

    world: list[Any] = []
    with pretending(0, 8) as device:
        config = config_of(Case(dtype="bf16", dp=8, microbatches=1))
        engine = device.engine(
            config, lambda slicing: faults.PlantedModel(config, slicing, sends_host_memory)
        )
        world.append(engine.topology.axis("world"))
        device.step(engine)
        device.step(engine)
    assert [fault.kind for fault in device.faults] == [TO_COLLECTIVE]
    assert "threed/distributed/collectives.py" in device.faults[0].place


def test_a_step_without_a_planted_fault_has_none() -> None:
    device = run_planted(lambda y: y, world=8)
    assert device.faults == device.waits == []


@pytest.mark.seldom("0-llama-1")
@pytest.mark.parametrize(
    ("rank", "model", "heads"), in_turns(4, [0, 5], ["llama", "gemma2"], [1, 2, 4])
)
def test_context_parallelism_reads_and_mixes_nothing(rank: int, model: str, heads: int) -> None:
    """On the ring, with heads, and with both; gemma2 has a window and a soft cap."""
    case = Case(
        cp=4, cp_heads=heads, dp=2, model=model, dtype="bf16", zero=3, bucket_mib=0.03, layers=2,
        microbatches=1, recompute="selective",
    )  # fmt: skip
    check(config_of(case), case.world, rank, waits=False)


@pytest.mark.seldom("False")
@pytest.mark.parametrize("flexible", [True, False])
def test_block_sparse_attention_reads_nothing_once_its_lists_are_made(flexible: bool) -> None:
    """With FlexAttention, whose lists are copied to the device in the first step, and without it."""
    fits = patch.object(flex, "fits", return_value=flexible)
    with fits, pretending() as device:
        config = config_of(Case(dtype="bf16", microbatches=1, layers=1))
        engine = device.engine(
            config, lambda s: example("sparse_attention:SparseModel")(config.model, s)
        )
        device.step(engine)
        device.faults.clear()
        device.waits.clear()
        device.step(engine)
    assert device.faults == device.waits == []


@pytest.mark.seldom("none-Biased")
@pytest.mark.parametrize(
    ("recompute", "model"), in_turns(3, ["none", "full"], ["Biased", "Chosen"])
)
def test_the_sizes_of_experts_are_read_once_per_layer_and_forward(
    recompute: str, model: str
) -> None:
    """With ep > 1. Otherwise nothing is read, if a kernel computes all groups. Chosen has biases."""
    case = Case(model=model, dtype="bf16", microbatches=2, layers=3, recompute=recompute)
    reads = []
    for ep in (1, 2):
        config = config_of(replace(case, dp=ep, ep=ep))
        with pretending(0, ep) as device:
            engine = device.engine(config)
            device.step(engine)
            device.faults.clear()
            device.step(engine)
        assert {fault.kind for fault in device.faults} <= {HOST_READ}, summary(device.faults)
        assert device.waits == []
        reads.append(len(device.faults))
    assert reads == [0, 2 * 2]  # two micro-batches, two layers with experts


@pytest.mark.seldom("0.0")
@pytest.mark.parametrize("capacity", [0.0, 1.5])
def test_with_a_room_nothing_is_read(capacity: float) -> None:
    """The room grows by what is read once per step, of the step before the last one."""
    case = Case(model="Biased", dtype="bf16", layers=3, dp=2, ep=2, room=1.25, capacity=capacity)
    with pretending(0, 2) as device:
        engine = device.engine(config_of(case))
        for _ in range(3):
            device.faults.clear()
            device.step(engine)
        assert device.faults == []
        assert len(device.waits) == 1


KERNELS_OF_EXPERTS = [
    ("Mixtral", {}, 31, 45),
    ("DeepSeek", {"aux_loss": 1e-3, "z_loss": 1e-3}, 45, 59),
]


@pytest.mark.parametrize(
    ("ep", "model", "experts", "alone", "divided"),
    [
        pytest.param(ep, *row, marks=() if (ep, number) == (2, 1) else pytest.mark.grid)
        for ep in (1, 2)
        for number, row in enumerate(KERNELS_OF_EXPERTS)
    ],
)
@pytest.mark.filterwarnings("ignore:.*received no gradient")
def test_kernels_of_a_mixture_of_experts(
    model: str, experts: dict[str, float], alone: int, divided: int, ep: int
) -> None:
    """Forward and backward of one layer and micro-batch; collectives are not counted."""
    changes = {"dp": ep, "parallel": {"ep": ep}, "experts": experts}
    found = launches.of_a_layer(model, changes)
    with patch.object(MixtureOfExperts, "forward", lambda self, x, micro: x):
        found.subtract(launches.of_a_layer(model, changes))
    kernels = {name: count for name, count in found.items() if "alltoall" not in name}
    print(f"{model}, ep {ep}: {sum(kernels.values())} kernels: {kernels}")
    assert sum(kernels.values()) <= (alone if ep == 1 else divided)


def test_metrics_may_be_read_after_the_step() -> None:
    with pretending() as device:
        metrics = device.step(device.engine(config_of(Case(dtype="bf16"))))
        before = list(device.faults)
        assert (metrics.loss, metrics.skipped) == (0.0, 0)  # made up: there are no values
        assert device.faults == before


# ------------------------------------------------------------------------------------------------------- large models


GRID = pytest.mark.grid
# architecture, layers, width, rank, micro-batches; the time depends on the layers of a rank, so the everyday model is wide
LARGE = [
    ("gpt", 24, 20480, 513, 4),
    pytest.param("gpt", 80, 10240, 513, 8, marks=GRID),
    pytest.param("llama", 80, 10240, 0, 8, marks=GRID),
    pytest.param("llama", 80, 10240, 1023, 32, marks=GRID),
]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("arch", "layers", "hidden", "rank", "microbatches"), LARGE)
def test_a_rank_of_1024_trains_a_hundred_billion_parameters(
    arch: str, layers: int, hidden: int, rank: int, microbatches: int
) -> None:
    """Its peak is the forecast's, which takes the kernels of csrc/cuda as the step does."""
    given = Config.model_validate({
        "parallel": {"pp": 8, "tp": 8},
        "precision": {"dtype": "bf16"},
        "model": {
            "arch": arch, "layers": layers, "hidden": hidden, "heads": 80, "seq": 4096, "vocab": 128_000,
            **({"kv_heads": 8, "ffn": 32_768} if arch == "llama" else {}),
        },
        "recompute": {"mode": "selective"},
        "train": {"micro_batch": 1, "global_batch": 16 * microbatches, "steps": 10},
    })  # fmt: skip
    config = resolve(given, 128_000, 1024)
    forecast = Forecast.of(config, 1024, gpu="h100").ranks[rank].bytes["peak"]
    began = time.perf_counter()
    with pretending(rank, 1024) as device:
        engine = device.engine(config)
        built = time.perf_counter()
        device.step(engine)
        assert [fault for fault in device.faults if not fault.place.endswith(FIRST_STEP)] == []
    seconds, gib = time.perf_counter() - began, device.memory.most / 2**30
    held = [spec_of(p) for layer in engine.blueprint.layers for p in layer.parameters()]
    whole = sum(math.prod(piece.shape) for spec in held for piece in spec.pieces)
    print(
        f"{arch}, rank {rank} of 1,024, {whole / 1e9:.0f} billion parameters: built in {built - began:.1f} s, step in"
        f" {seconds - built + began:.1f} s, {sum(device.launches.values())} kernels, {gib:.1f} GiB at most"
        f" (forecast {forecast / 2**30:.1f}), {device.communicated / 2**30:.1f} GiB to collectives"
    )
    assert whole > 95e9
    assert 0.98 <= device.memory.most / forecast <= 1.01


def test_kernels_a_layer_launches_for_a_micro_batch() -> None:
    """With the kernels of csrc/cuda. A number may only fall, and kernels.md states it."""
    gpt, llama = (sum(launches.of_a_layer(model).values()) for model in ("GPT", "Llama"))
    assert gpt <= 31
    assert llama <= 25
    page = " ".join((ROOT / "docs/internals/kernels.md").read_text(encoding="utf-8").split())
    assert f"launch {gpt} kernels per micro-batch for GPT, and {llama} for Llama" in page


def test_windows_keep_no_mask_and_repeat_no_keys() -> None:
    """A window changes neither the kernels of a layer nor the most bytes of a step."""
    most = []
    for window in (0, 256):
        model = {"arch": "mistral", "kv_heads": 4, "ffn": 2816, "window": window}
        config, world = launches.config_of("Llama", 2, 1, {"model": model})
        with pretending(0, world) as device:
            engine = device.engine(config)
            device.step(engine)
            most.append((device.memory.most, device.launches))
    assert most[0] == most[1]
