"""Partition by measured times: what is measured, cut by, and trained; `benchmarks/partition.py` has the speed.

Layers that sleep are the slow ones: their times hold on a busy machine, and their FLOPs say nothing of it.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import looping
from tests.configs import VOCAB, Case, batch, config_of, engine_of, share, topology_of
from tests.harness import run_ranks
from threed import models, schedules
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.grid import Grid
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import (
    Embedding,
    LanguageModelHead,
    LayerNorm,
    MicroBatch,
    ReplicatedLinear,
    Slicing,
)
from threed.models.measured_partition import (
    Division,
    LayerBytes,
    LayerTimes,
    divide,
    most_kept,
    stage_costs,
)
from threed.models.partition import balanced, uniform
from threed.planner.blueprint import step_plan
from threed.planner.forecast import Forecast
from threed.planner.layer_times import division, layer_times, trace_layer_bytes
from threed.schedules import simulation

NAP = 0.002  # seconds of a quick block's forward; its backward sleeps twice as long
SLOW_FIRST = (3, 1, 1, 1, 1, 1)
CPU = torch.device("cpu")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, naps: int) -> Tensor:
        ctx.naps = naps
        time.sleep(0 if x.is_meta else naps * NAP)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(0 if dy.is_meta else 2 * ctx.naps * NAP)
        return dy, None


class SleepyBlock(nn.Module):
    """x + W norm(x), and as many naps. Blocks have the same FLOPs however often they sleep."""

    def __init__(self, name: str, hidden: int, naps: int, slicing: Slicing) -> None:
        super().__init__()
        self.name, self.naps = name, naps
        self.norm = LayerNorm(f"{name}.norm", hidden, slicing)
        self.linear = ReplicatedLinear(f"{name}.linear", hidden, hidden, slicing, std=0.2)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        RUNS.append(self.name)
        return x + F.dropout(_Sleep.apply(self.linear(self.norm(x)), self.naps), 0.0, self.training)


RUNS: list[str] = []  # names of blocks, as they run


class Sleepers:
    """An embedding, blocks that sleep, and a head."""

    hidden = 16

    def __init__(self, slicing: Slicing, naps: Sequence[int] = SLOW_FIRST) -> None:
        self.slicing, self.naps = slicing, naps

    def layers(self) -> list[nn.Module]:
        blocks = [
            SleepyBlock(f"blocks.{n}", 16, naps, self.slicing) for n, naps in enumerate(self.naps)
        ]
        norm = LayerNorm("head.norm", 16, self.slicing)
        head = LanguageModelHead("head", "head.weight", norm, VOCAB, 16, self.slicing, std=0.2)
        return [Embedding("embedding", VOCAB, 16, self.slicing, std=0.2), *blocks, head]


def config(case: Case, **parallel: Any) -> Config:
    """The configuration of a case, cut by measured times."""
    found = config_of(case)
    changed = found.parallel.model_copy(update={"partition": "measured", **parallel})
    return found.model_copy(update={"parallel": changed})


@functools.cache
def alone() -> Topology:
    return Topology.on_meta(Grid(), 0)


def timed(settings: Config, naps: Sequence[int] = SLOW_FIRST) -> list[LayerTimes]:
    """The times of the sleeping model in this process; RUNS are the blocks that ran for them."""
    RUNS.clear()
    model = Sleepers(Slicing(alone().axis("tp")), naps)
    return layer_times(model, model.layers(), settings, alone(), CPU)


# ----------------------------------------------------------------------------------------------------------- measuring


def test_layers_are_timed_one_of_a_kind() -> None:
    settings, drawn = config(Case(dtype="fp32", pp=2)), torch.get_rng_state()
    times = timed(settings)
    # blocks draw, the training's numbers stay as they were
    assert torch.equal(torch.get_rng_state(), drawn)
    assert set(RUNS) == {"blocks.0", "blocks.1"}  # the other four are built as the second
    slow, quick = times[1], times[2]
    assert slow.forward >= 3 * NAP > quick.forward >= NAP
    assert slow.backward_input >= 6 * NAP > quick.backward_input >= 2 * NAP
    assert quick.backward_weight < 2 * NAP  # products alone
    assert times[2:7] == [quick] * 5


def test_what_is_computed_again_counts_with_the_backward() -> None:
    times = timed(config(Case(dtype="fp32", pp=2, recompute="full")), (1,))
    assert times[1].backward_input >= 3 * NAP
    assert times[1].forward < times[1].backward_input / 2  # and not with the forward as well


# ------------------------------------------------------------------------------------------------------------- cutting


def test_no_cut_is_faster_on_paper_and_all_bytes_fit() -> None:
    """Against all cuts there are, of random layers under several schedules, with a limit and without."""
    bound = 0
    for seed in range(24):
        draw = random.Random(seed)
        name, p = draw.choice([("1f1b", 3), ("gpipe", 2), ("1f1b", 4), ("vee", 2), ("looping", 2)])
        plan, n = schedules.build(name, p, draw.choice([2, 4, 6])), draw.choice([5, 7, 8])
        times = [LayerTimes(*(draw.choice([0.5, 1, 1, 1, 3]) for _ in range(3))) for _ in range(n)]
        held = [
            LayerBytes(draw.randint(1, 9), draw.randint(1, 5), draw.randint(0, 3)) for _ in range(n)
        ]
        costs = {cut: seconds(times, plan, cut) for cut in cuts(n, plan.total_stages)}
        free = divided(times, plan, {"uniform": uniform(n, plan.total_stages)})
        assert free.seconds == pytest.approx(min(costs.values()))
        assert free.gains["uniform"] >= 1
        limit = sorted(fullest(plan, held, cut) for cut in costs)[len(costs) // 3]
        best = min(cost for cut, cost in costs.items() if fullest(plan, held, cut) <= limit)
        found = divided(times, plan, {"uniform": uniform(n, plan.total_stages)}, held, limit)
        assert fullest(plan, held, found.ranges) <= limit
        assert found.seconds == pytest.approx(best, rel=0.15 if plan.chunks > 1 else 1e-9)
        bound += found.seconds > free.seconds
        least = min(fullest(plan, held, cut) for cut in costs)
        with pytest.raises(ValueError, match="no partition"):
            divided(times, plan, {}, held, least - 1)
    assert bound >= 5


def divided(
    times: Sequence[LayerTimes],
    plan: schedules.Plan,
    others: Mapping[str, Sequence[range]],
    held: Sequence[LayerBytes] | None = None,
    limit: float | None = None,
) -> Division:
    """A division under a plan that does not depend on times."""
    with_plan = {name: (cut, plan) for name, cut in others.items()}
    return divide(times, lambda costs, most: plan, with_plan, held, limit)


def cuts(n: int, stages: int) -> list[tuple[range, ...]]:
    """All there are."""
    inner = combinations(range(1, n), stages - 1)
    return [tuple(range(a, b) for a, b in pairwise((0, *stops, n))) for stops in inner]


def seconds(times: Sequence[LayerTimes], plan: schedules.Plan, cut: Sequence[range]) -> float:
    return schedules.simulate(plan, stage_costs(times, cut)).makespan


def fullest(plan: schedules.Plan, held: Sequence[LayerBytes], cut: Sequence[range]) -> int:
    """Bytes of the fullest rank, counted action by action."""
    most = 0
    for rank, actions in enumerate(plan.ranks):
        mine = [[held[n] for n in cut[plan.stage_of(rank, chunk)]] for chunk in range(plan.chunks)]
        states = sum(layer.states for chunk in mine for layer in chunk)
        alive, peak = 0, 0
        for action in actions:
            kept = sum(layer.kept for layer in mine[action.chunk])
            alive += kept if action.kind is schedules.Kind.F else -kept
            peak = max(peak, alive)
        most = max(most, states + peak + max(layer.workspace for chunk in mine for layer in chunk))
    return most


@pytest.mark.parametrize("name", ["1f1b", "gpipe", *looping.OWN])
def test_what_is_kept_is_what_the_simulator_says(name: str) -> None:
    plan = schedules.build(name, 4, 6)
    for rank in range(4):
        assert most_kept(
            plan, rank, [1] * plan.chunks
        ) / plan.chunks == simulation.peak_activations(plan, rank)


def test_a_limit_moves_layers_to_later_stages() -> None:
    """1F1B keeps more micro-batches on early stages; the forecast says what ranks hold, by its own counting."""
    sizes = {"layers": 10, "hidden": 64, "seq": 64}
    settings = Config.model_validate(
        {"model": sizes, "train": {"global_batch": 16, "micro_batch": 1}}
    )
    settings = resolve(settings, VOCAB, 1)

    def cut(pp: int, **parallel: Any) -> Forecast:
        changed = settings.parallel.model_copy(
            update={"pp": pp, "partition": "measured", **parallel}
        )
        given = settings.model_copy(update={"parallel": changed})
        topology = Topology.on_meta(Grid.of(pp, pp=pp), 0)
        model = models.build(given.model, Slicing(topology.axis("tp")))
        times, layers = [LayerTimes(1, 1, 1)] * 12, model.layers()
        held = functools.partial(trace_layer_bytes, model, layers, given, topology, CPU)
        cut_by = division(step_plan(given, 1), layers, times, None, held, given, CPU)
        return Forecast.of(given, pp, division=cut_by)

    free = [cut(pp) for pp in (2, 4)]
    assert [len(rank.layers[0]) for rank in free[1].ranks] == [3, 3, 3, 3]
    for pp, forecast in zip((2, 4), free, strict=True):
        peak = max(rank.bytes["peak"] for rank in forecast.ranks)
        tight = cut(pp, memory_limit_gib=0.97 * peak / 2**30)
        assert max(rank.bytes["peak"] for rank in tight.ranks) < 0.99 * peak
        assert [rank.layers for rank in tight.ranks] != [rank.layers for rank in forecast.ranks]
        with pytest.raises(
            ValueError,
            match=rf"--parallel.memory-limit-gib 1e-06: no partition of 12 layers into {pp}",
        ):
            cut(pp, memory_limit_gib=1e-6)


def test_a_plan_says_the_predicted_gain() -> None:
    settings = config(Case(dtype="fp32", pp=2, microbatches=8))
    found = Forecast.of(settings, 2, Sleepers)
    assert found.division is not None
    assert re.search(
        r"measured: 3,5 layers; slowest rank 1\.\d\dx the mean; predicted 1\.\d\dx f", found.text()
    )
    assert set(found.division.gains) == {"uniform", "balanced"}
    slower = dataclasses.replace(found.division, gains={"uniform": 0.6, "balanced": 1.0})
    assert slower.text().endswith(
        "predicted 0.60x the speed of uniform, 1.00x faster than balanced"
    )
    RUNS.clear()
    # one process has no other tensor ranks
    sliced = Forecast.of(config(Case(dtype="fp32", pp=2, tp=2, microbatches=8)), 4, Sleepers)
    assert "times of unsharded layers, not of 1/2 of each" in sliced.text()
    assert sliced.division is not None
    assert len(sliced.division.times) == len(found.division.times)


# ------------------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Run:
    ranges: list[tuple[int, int]]
    times: list[LayerTimes]
    gains: dict[str, float]
    weights: dict[str, Tensor]


def sleepers(cases: Sequence[Case]) -> list[Run]:
    """Trains the sleeping model in a world of one or two ranks, by each case's schedule and partition."""
    found = []
    for case in cases:
        settings = config(case, partition=case.partition)
        topology = topology_of(case.pp, case.tp)
        engine = Engine(Sleepers(Slicing(topology.axis("tp"))), topology, settings)
        for step in range(2):
            engine.step(share(batch(step, settings.train.global_batch), topology))
        cut, division = engine.blueprint.pipeline.layout.ranges, engine.blueprint.pipeline.division
        times, gains = (list(division.times), dict(division.gains)) if division else ([], {})
        found.append(
            Run([(part.start, part.stop) for part in cut], times, gains, engine.full_state_dict())
        )
    return found


def test_a_layer_slower_than_its_flops_moves_the_cut_and_changes_no_weight() -> None:
    case = Case(pp=2, microbatches=8, partition="measured")
    cases = [case, replace(case, partition="uniform"), replace(case, schedule="vee")]
    truth = sleepers([case.truth])[0].weights
    ranks = run_ranks(2, sleepers, cases, timeout=120)
    for mine, other in zip(*ranks, strict=True):
        assert (mine.ranges, mine.times) == (
            other.ranges,
            other.times,
        )  # each measured its own, all took the median
    measured, plain, vee = ranks[0]
    assert plain.ranges == [(0, 4), (4, 8)]
    assert measured.ranges == [(0, 3), (3, 8)]
    assert measured.times[1].forward >= 3 * NAP
    by_flops = balanced([0, *[16 * 16] * 6, 16 * VOCAB], 2)
    others = {"uniform": uniform(8, 2), "balanced": by_flops}
    assert measured.gains == divided(measured.times, schedules.build("1f1b", 2, 8), others).gains
    # by which 1.15 and 1.56 are to be gained
    naps = [LayerTimes(n, 2 * n, 0) for n in (0, *SLOW_FIRST, 0)]
    assert divided(naps, schedules.build("1f1b", 2, 8), others).gains == pytest.approx(
        {"uniform": 31 / 27, "balanced": 42 / 27}
    )
    assert min(measured.gains.values()) > 1
    assert len(vee.ranges) == 4
    assert vee.times[1].forward >= 3 * NAP
    for run in ranks[0]:
        for name, value in truth.items():
            torch.testing.assert_close(
                run.weights[name], value, rtol=0, atol=1e-9, msg=f"{name} of {run.ranges}"
            )


def sliced(case: Case) -> tuple[list[range], list[LayerTimes], int]:
    """An engine of a model cut over tensor ranks, whose layers talk while they are timed."""
    engine = engine_of(config(case))
    division = engine.blueprint.pipeline.division
    assert division is not None
    return list(division.ranges), list(division.times), sum(engine.topology.traffic.values())


def test_tensor_ranks_measure_together_and_agree() -> None:
    ranks = run_ranks(
        4,
        sliced,
        Case(pp=2, tp=2, sequence=True, recompute="selective"),
        timeout=120,
    )
    assert all(found[:2] == ranks[0][:2] for found in ranks)
    assert all(min(layer[:2]) > 0 for layer in ranks[0][1])


def test_one_stage_has_nothing_to_divide() -> None:
    engine = engine_of(config(Case(dtype="fp32")))
    assert engine.blueprint.pipeline.division is None
    assert engine.blueprint.pipeline.layout.ranges == (range(5),)
    assert balanced([1, 1, 1], 1) == uniform(3, 1)
