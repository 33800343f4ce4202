"""Schedules that hold every stage twice keep its optimizer states once: each of the two ranks updates a portion."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests import users_cases
from tests.configs import Case, batch, config_of, engine_of, share
from tests.harness import run_ranks
from tests.layers.test_users_models import run_all as run_users
from tests.test_equivalence import run_all
from threed.distributed.sharding import slices
from threed.engine import Engine
from threed.planner.forecast import Forecast
from threed.zero.state import holdings, records

BASE = Case(pp=2, layers=4, microbatches=4)
# a slice: the parameters of its bucket, where that begins, and the slice
Place = tuple[tuple[str, ...], int, int]


TRAINED = [
    replace(BASE, schedule="chimera", dp=2, zero=3, model="qwen-tied", bucket_mib=0.02),
    replace(BASE, schedule="dualpipe", tp=2, sequence=True, recompute="full", dropout=0.1),
    replace(BASE, schedule="dualpipe", dp=2, zero=2, model="gpt-untied"),
    replace(BASE, schedule="chimera", tp=2, model="llama", bucket_mib=0.02),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TRAINED[:2], id="some"),
        pytest.param(TRAINED[2:], id="others", marks=pytest.mark.grid),
    ],
)
def test_training_equals_that_of_one_process(cases: list[Case]) -> None:
    """More shapes, with recompute and offload: tests/schedules/test_schedules_training.py."""
    run_all(cases)


def test_ties_of_more_stages_and_frozen_layers() -> None:
    """A table of three stages is on four ranks, each of which updates a quarter of it."""
    run_users([
        users_cases.Case("three-way-tie", pp=4, schedule="chimera", microbatches=2),
        users_cases.Case("frozen-middle", pp=2, schedule="chimera", microbatches=2, bucket_mib=0.002),
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------- what each rank keeps

KEPT = [
    replace(BASE, schedule="chimera", dtype="bf16", model="qwen-tied", bucket_mib=0.02),
    replace(BASE, schedule="dualpipe", dtype="fp32", model="gpt-untied"),
    replace(BASE, schedule="dualpipe", dp=2, zero=0, dtype="bf16"),
    replace(BASE, schedule="chimera", dp=2, zero=1, dtype="fp32", model="llama", bucket_mib=0.02),
    replace(BASE, schedule="chimera", dp=2, zero=2, dtype="bf16", model="gpt-untied"),
    replace(
        BASE, schedule="dualpipe", dp=2, zero=3, dtype="bf16", model="qwen-tied", bucket_mib=0.02
    ),
]
OFFLOADED = replace(BASE, schedule="chimera", dtype="bf16", offload_optimizer="cpu")


@dataclass(frozen=True)
class Kept:
    """What a rank keeps after some steps. counts: of each parameter's elements that its moments are for. params: its
    slices. rounded: whether the parameters that it updates are its masters, rounded. bytes: see `holdings`."""

    counts: dict[str, Tensor]
    params: dict[Place, Tensor]
    rounded: bool
    bytes: dict[str, int]


def keep(case: Case) -> Kept:
    """Trains a case for two steps."""
    engine = engine_of(config_of(case))
    held = holdings(engine.layout, engine.optimizer.states, beside_gpu=False)
    for step in range(2):
        engine.step(share(batch(step, case.rows), engine.topology))
    engine.optimizer.wait()
    counts: dict[str, Tensor] = {}
    for record in records(engine.optimizer, ("exp_avg",)):
        found = counts.setdefault(
            record.piece.name, torch.zeros(record.piece.shape, dtype=torch.int32)
        )
        found[slices(record.piece.start, record.piece.size)] += 1
    return Kept(counts, params_of(engine), rounded(engine), held)


def params_of(engine: Engine) -> dict[Place, Tensor]:
    """This rank's slices of parameters."""
    found = {}
    for bucket in engine.layout.buckets:
        names = tuple(slot.spec.name for slot in bucket.slots)
        found[names, bucket.first, bucket.own_first] = bucket.storage.fetch().wait().clone()
    return found


def rounded(engine: Engine) -> bool:
    """Whether what this rank updates are its masters in the parameters' format."""
    both = [
        (s.bucket.portion.fetch().wait(), s.weight.fetch().wait()) for s in engine.optimizer.states
    ]
    return all(torch.equal(param, master.to(param.dtype)) for param, master in both)


def keep_all(cases: list[Case]) -> list[Kept]:
    """The same of several."""
    return [keep(case) for case in cases]


@functools.cache
def kept(world: int) -> list[tuple[Case, list[Kept]]]:
    """The cases of a world, and what its ranks keep."""
    cases = [case for case in KEPT if case.world == world]
    return [
        (case, list(ranks))
        for case, *ranks in zip(cases, *run_ranks(world, keep_all, cases), strict=True)
    ]


@pytest.mark.seldom("2")
@pytest.mark.parametrize("world", [2, 4])
def test_states_are_there_once_and_parameters_twice(world: int) -> None:
    """Each element has its moments on one rank (on every data rank under ZeRO 0), and both ranks of a pair have the
    same bits of it, whoever made the update."""
    for case, ranks in kept(world):
        assert all(rank.rounded for rank in ranks), case
        names = {name for rank in ranks for name in rank.counts}
        for name in names:
            count = sum(rank.counts[name] for rank in ranks if name in rank.counts)
            assert torch.equal(count, torch.full_like(count, case.dp if case.zero == 0 else 1)), (
                case,
                name,
            )
        for place in {place for rank in ranks for place in rank.params}:
            copies = [rank.params[place] for rank in ranks if place in rank.params]
            assert len(copies) == (4 if case.zero == 0 and case.dp == 2 else 2), (case, place)
            assert all(torch.equal(copies[0], copy) for copy in copies), (case, place)


@pytest.mark.parametrize("world", [2, 4])
def test_the_forecast_knows_it_to_the_byte(world: int) -> None:
    for case, ranks in kept(world):
        said = Forecast.of(config_of(case), world).ranks
        parts = ("parameters", "gradients", "optimizer")
        assert [{part: rank.bytes[part] for part in parts} for rank in said] == [
            {part: rank.bytes[part] for part in parts} for rank in ranks
        ], case


def test_a_rank_of_a_pair_keeps_half() -> None:
    """Beside one-way training in the same cut, whose ranks hold each stage once, and beside offloaded states, which
    both ranks of a pair keep."""

    def states(case: Case) -> list[int]:
        return [rank.bytes["optimizer"] for rank in Forecast.of(config_of(case), case.world).ranks]

    for case in (replace(KEPT[1], dtype="bf16"), replace(KEPT[4], zero=1)):
        once, twice = states(replace(case, schedule="1f1b")), states(case)
        assert twice[0] == twice[-1]
        assert sum(twice) == pytest.approx(sum(once), rel=0.02)  # padding
    away = states(OFFLOADED)
    assert away == pytest.approx(
        [2 * half for half in states(replace(OFFLOADED, offload_optimizer="none"))], rel=0.02
    )
