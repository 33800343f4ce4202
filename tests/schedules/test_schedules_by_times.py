"""A schedule that plans by times: what it plans by, that its plan fits in memory, and that a run trains by it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.configs import Case, batch, share, topology_of
from tests.harness import run_ranks
from tests.models.test_partition_measured import Sleepers, config
from threed import schedules
from threed.cli import commands
from threed.config import Config
from threed.engine import Engine
from threed.layers import Slicing
from threed.models.measured_partition import Division, LayerBytes, LayerTimes, divide
from threed.models.partition import uniform
from threed.planner.forecast import Forecast
from threed.schedules import Costs, Kind, Plan, build, registry, simulate
from threed.schedules.action import COMPUTE


def divided(
    draw: random.Random, held: Sequence[LayerBytes] | None = None, limit: float | None = None
) -> tuple[Division, Plan]:
    """A division of seven random layers for zb-auto, and the plan for equal times."""
    p, m, chunks = draw.choice([(2, 6, 1), (3, 5, 1), (2, 4, 2)])
    times = [LayerTimes(*(draw.choice([0.5, 1, 1, 2, 4]) for _ in range(3))) for _ in range(7)]
    equal = build("zb-auto", p, m, chunks)

    def planner(costs: Costs | None, most: float | None) -> Plan:
        return build("zb-auto", p, m, chunks, costs, most)

    others = {"uniform": (uniform(7, p * chunks), equal)}
    return divide(times, planner, others, held, limit), equal


def most_bytes(division: Division, held: Sequence[LayerBytes]) -> int:
    """Of the fullest rank, counted action by action."""
    most, plan = 0, division.plan
    for rank, actions in enumerate(plan.ranks):
        mine = [
            [held[n] for n in division.ranges[plan.stage_of(rank, chunk)]]
            for chunk in range(plan.chunks)
        ]
        layers, now, peak = [layer for chunk in mine for layer in chunk], 0, 0
        for action in actions:
            kept = sum(layer.kept for layer in mine[action.chunk])
            now += {Kind.F: kept, Kind.W: -kept, Kind.B: -kept}.get(action.kind, 0)
            peak = max(peak, now)
        most = max(
            most,
            peak + sum(layer.states for layer in layers) + max(layer.workspace for layer in layers),
        )
    return most


def test_a_plan_for_the_cuts_times_is_never_slower_and_fits() -> None:
    faster = tight = 0
    for seed in range(12):
        held = [LayerBytes(random.Random(seed + n).randint(1, 9), 4, 2) for n in range(7)]
        free, equal = divided(random.Random(seed))
        for_equal_times = simulate(equal, free.costs).makespan
        assert free.seconds == simulate(free.plan, free.costs).makespan
        assert free.seconds <= for_equal_times * (1 + 1e-9)
        assert free.gains["uniform"] >= 1 - 1e-9
        assert free.limit is None
        faster += free.seconds < 0.999 * for_equal_times
        limit = 0.75 * most_bytes(free, held)
        found, _ = divided(random.Random(seed), held, limit)
        assert most_bytes(found, held) <= limit
        assert found.seconds == simulate(found.plan, found.costs).makespan
        tight += found.limit is not None
    assert faster >= 4
    assert tight >= 4
    with pytest.raises(ValueError, match="no partition "):
        divided(random.Random(0), held, 10)


def test_only_schedules_that_plan_by_times_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert [name for name in schedules.available() if registry.plans_by_times(name)] == ["zb-auto"]
    with pytest.raises(
        ValueError, match="schedule 1f1b: it does not plan by times: leave costs and limit out"
    ):
        build("1f1b", 2, 4, costs=Costs(1, 1, 1))
    costs = Costs(1, 1.5, 0.5, send=0.4)
    # no more than by itself
    assert max(simulate(build("zb-auto", 3, 6, 1, None, 99), costs).peak_activations) <= 5
    assert max(simulate(build("zb-auto", 3, 6, 1, costs, 2), costs).peak_activations) == 2
    flags = [
        "--forward",
        "1",
        "--backward-input",
        "1.5",
        "--backward-weight",
        "0.5",
        "--send",
        "0.4",
        "--json",
    ]
    commands.main(
        ["schedule", "zb-auto", "--stages", "4", "--microbatches", "8", "--chunks", "2", *flags]
    )
    planned, equal = build("zb-auto", 4, 8, 2, costs), build("zb-auto", 4, 8, 2)
    assert json.loads(capsys.readouterr().out)["makespan"] == simulate(planned, costs).makespan
    assert simulate(planned, costs).makespan < simulate(equal, costs).makespan


# ------------------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Run:
    plan: Plan
    costs: Costs | None
    ran: list[str]  # compute actions of this rank in the last step
    bubble: float  # forecast for this engine
    weights: dict[str, Tensor]


def config_of_run(case: Case) -> Config:
    """With two chunks on each of several ranks."""
    return config(case, partition=case.partition, chunks=min(case.pp, 2))


def trained(cases: Sequence[Case]) -> list[Run]:
    """Trains the model whose first block sleeps three times as long as the others, by each case's partition."""
    found = []
    for case in cases:
        settings, topology = config_of_run(case), topology_of(case.pp, 1)
        engine = Engine(Sleepers(Slicing(topology.axis("tp"))), topology, settings)
        engine.executor.record()
        for step in range(2):
            engine.step(share(batch(step, settings.train.global_batch), topology))
        actions = [str(action) for action, _, _ in engine.executor.spans if action.kind in COMPUTE]
        pipeline = engine.blueprint.pipeline
        forecast = Forecast.of(settings, topology.world, Sleepers, pipeline.division)
        fewer = engine.blueprint.lowered(2)  # of another number of micro-batches than a step has
        assert (fewer.microbatches, fewer.placement) == (2, pipeline.plan.placement)
        weights = engine.full_state_dict()
        found.append(Run(pipeline.plan, pipeline.costs, actions, forecast.bubble, weights))
    return found


def test_a_run_trains_by_the_plan_for_its_own_times() -> None:
    measured = Case(pp=2, microbatches=8, schedule="zb-auto", partition="measured")
    cases = [
        measured,
        replace(measured, partition="balanced"),
        replace(measured, partition="uniform"),
    ]
    truth = trained([measured.truth])[0].weights
    ranks = run_ranks(2, trained, cases, timeout=120)
    equal = build("zb-auto", 2, 8, 2)
    for rank, runs in enumerate(ranks):
        for run in runs:
            planned = [str(action) for action in run.plan.ranks[rank]]
            # the second step may begin twice
            assert run.ran[: len(planned)] == run.ran[-len(planned) :] == planned
    for mine, other, case in zip(*ranks, cases, strict=True):
        assert (mine.plan, mine.costs) == (other.plan, other.costs), case.partition
        assert mine.plan == (equal if mine.costs is None else build("zb-auto", 2, 8, 2, mine.costs))
        if mine.costs is not None:
            assert mine.bubble == pytest.approx(simulate(mine.plan, mine.costs).bubble)
        for name, value in truth.items():
            torch.testing.assert_close(
                mine.weights[name], value, rtol=0, atol=1e-9, msg=f"{name} {case.partition}"
            )
    assert ranks[0][0].plan != equal
    assert ranks[0][2].costs is None
