"""Every schedule trains: to the weights of one process, and with as many live activations as its plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.configs import Case, batch, config_of, engine_of, share
from tests.harness import run_ranks
from tests.test_equivalence import run_all
from threed import schedules
from threed.schedules import Plan
from threed.schedules.registry import ScheduleName
from threed.schedules.simulation import peak_activations

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1)]  # pp, dp, tp
TWO_STAGES = [shape for shape in SHAPES if shape[0] == 2]
SHIPPED = get_args(ScheduleName)  # not what tests register
# this follows a rule of its own
NAMES = [name for name in SHIPPED if name not in ("gpipe", "1f1b", "2bw")]
AGAIN = ["none", "full", "selective", "half", "cpu"]
MODELS = ["gpt", "qwen-tied", "llama"]


def cases(seed: int, shapes: int = 3) -> list[Case]:
    """Each schedule on some shapes, or on one, mostly of two stages.

    ZeRO's stage, recompute, model, dropout and places of state take turns.
    """
    found = []
    for turn, name in enumerate(NAMES):
        for number in range(shapes):
            some = SHAPES if shapes > 1 or turn < 5 else TWO_STAGES
            pp, dp, tp = some[(seed + turn + 2 * number) % len(some)]
            at = seed + turn + number
            zero = at % 4 if dp > 1 else 1
            found.append(
                Case(
                    pp, dp, tp, schedule=name, zero=zero, layers=pp + 2, microbatches=2 * pp, model=MODELS[at % 3],
                    recompute=AGAIN[(at + number) % 5], dropout=0.1 * (at % 2), sequence=tp > 1 and at % 2 == 0,
                    offload_optimizer=("none", "cpu", "nvme")[at % 3] if zero else "none",
                    offload_params=("none", "cpu")[at % 2] if zero == 3 else "none", bucket_mib=(64.0, 0.03)[at % 2],
                )
            )  # fmt: skip
    return found


def test_every_schedule_trains_to_the_weights_of_one_process() -> None:
    """On one shape each; `pytest -m grid` runs each on all of them."""
    some = cases(0, shapes=1)
    assert {case.recompute for case in some} == set(AGAIN)
    assert {case.model for case in some} == set(MODELS)
    assert {(case.pp, case.dp, case.tp) for case in some} == set(SHAPES)
    run_all(some)


PUBLISHED = {path.stem: path for path in (ROOT / "tests" / "data" / "schedules").glob("*.csv")}


@pytest.mark.parametrize(
    "names",
    [
        ("dualpipev_4rank_10mb", "zb1p_2rank_2stagep_comms"),
        pytest.param(
            ("torchtitan_custom_2rank", "zb1p_2rank_2stagep_compute"), marks=pytest.mark.grid
        ),
    ],
)
def test_plans_that_torch_publishes_train_here(names: tuple[str, ...]) -> None:
    """Of other people's hands (their source: tests/data/schedules), with split backwards and pairs."""
    assert len(PUBLISHED) == 4
    plans = {PUBLISHED[name]: schedules.read_csv(str(PUBLISHED[name])) for name in names}
    run_all([
        Case(plan.stages, schedule=str(path), microbatches=plan.microbatches, layers=6, model="qwen-tied", dropout=0.1)
        for path, plan in plans.items()
    ])  # fmt: skip


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(12))
def test_every_schedule_trains_in_other_combinations(seed: int) -> None:
    run_all(cases(seed))


class Counter:
    """How many inputs of a linear layer are alive, at most: what a weight's gradient is computed from."""

    def __init__(self, module: nn.Module) -> None:
        self.refs: list[StorageWeakRef] = []
        self.handle = module.register_forward_pre_hook(self.saw)

    def saw(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.refs.append(StorageWeakRef(given[0].untyped_storage()))

    def alive(self) -> int:
        return sum(not ref.expired() for ref in self.refs)


def peak_of(case: Case, plan: Plan) -> float:
    """The most micro-batches, over all chunks of this rank, whose activations were alive in a step."""
    engine, most = engine_of(config_of(case)), 0
    blocks = [
        layer for chunk in engine.executor.stages for layer in chunk.layers if hasattr(layer, "mlp")
    ]
    assert len(blocks) == plan.chunks
    counters = [Counter(block.mlp.down) for block in blocks]

    def look(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        nonlocal most
        most = max(most, sum(counter.alive() for counter in counters))

    for block in blocks:
        block.mlp.down.register_forward_pre_hook(look)
    engine.step(share(batch(0, case.rows), engine.topology))
    assert all(len(counter.refs) == plan.microbatches // plan.ways for counter in counters)
    assert not any(counter.alive() for counter in counters)
    return most * plan.ways / plan.chunks


def check_peaks(names: list[str]) -> list[str]:
    stages, rank, wrong = dist.get_world_size(), dist.get_rank(), list[str]()
    for name in names:
        plan = schedules.build(name, stages, 8)
        total = plan.total_stages
        case = Case(stages, schedule=name, layers=total, microbatches=8, model="llama")
        counts = (2, *[1] * (total - 2), 2)
        found = peak_of(replace(case, partition=counts), plan)
        if found != (planned := peak_activations(plan, rank)):
            wrong.append(f"{name}: rank {rank} of {stages}: {found} alive, {planned} planned")
    return wrong


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_live_activations_are_as_many_as_the_plan_says(stages: int) -> None:
    names = ["gpipe", "1f1b", *NAMES]
    wrong = run_ranks(stages, check_peaks, names)
    assert not any(wrong), wrong
