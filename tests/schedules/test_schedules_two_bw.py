"""PipeDream-2BW's plans, what is wrong with asynchronous ones, and what a configuration may not have beside them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.configs import VOCAB, Case, batch, config_of, engine_of, topology_of
from tests.harness import run_ranks
from tests.pipeline.test_step import with_
from threed import schedules
from threed.config import ConfigError
from threed.config.arguments import load
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.engine import Engine
from threed.planner.forecast import Forecast
from threed.schedules import Action, Costs, Plan, lower, registry, simulate, two_bw, validate
from threed.schedules.double_buffered import drain, first

# ------------------------------------------------------------------------------------------------------------ the plan


def renumbered(actions: Sequence[Action], by: int) -> list[Action]:
    return [action._replace(microbatch=action.microbatch + by) for action in actions]


def test_steps_one_after_the_other_are_1f1b_without_an_end() -> None:
    for p, m, steps in itertools.product(range(1, 6), range(1, 9), range(1, 4)):
        if m < p:
            continue
        plan, endless = two_bw(p, m), schedules.one_f_one_b(p, m * steps)
        parts = [first(plan), *[plan] * (steps - 1), drain(plan)]
        for rank in range(p):
            whole = [renumbered(part.ranks[rank], m * number) for number, part in enumerate(parts)]
            assert tuple(itertools.chain(*whole)) == endless.ranks[rank]


def test_a_step_waits_for_nothing_and_holds_what_1f1b_does() -> None:
    for p, m in itertools.product((1, 2, 3, 4, 8, 16), (1, 2, 3, 4, 8, 16, 32)):
        if m < p:
            with pytest.raises(
                ValueError, match=f"{m} micro-batch(es)?; {p} stages need at least {p}"
            ):
                schedules.build("2bw", p, m)
            continue
        plan = schedules.build("2bw", p, m)
        for part in (plan, first(plan), drain(plan)):
            validate(part)
            validate(lower(part))
        timeline = simulate(plan, Costs(1, 1.5, 0.5))
        assert timeline.bubble == 0
        assert timeline.span == m * 3
        assert timeline.peak_activations == tuple(range(p, 0, -1))
        assert timeline.messages == simulate(schedules.one_f_one_b(p, m), Costs(1, 1, 1)).messages


def test_a_lowered_step_in_full() -> None:
    plan = two_bw(2, 3)
    assert str(lower(plan)) == (
        "rank 0: F0.0 SF0.0 B0.-1 REDUCE0 NORM0 F0.1 SF0.1 RB0.0 B0.0 F0.2 SF0.2 RB0.1 B0.1 UPDATE0 RB0.2\n"
        "rank 1: RF0.0 F0.0 B0.0 NORM0 RF0.1 SB0.0 F0.1 B0.1 RF0.2 SB0.1 F0.2 UPDATE0 B0.2 SB0.2 REDUCE0"
    )
    assert str(lower(drain(plan))) == "rank 0: B0.-1 REDUCE0 NORM0 UPDATE0\nrank 1: NORM0 UPDATE0"


def moved(plan: Plan, rank: int, text: str, to: int) -> Plan:
    """The plan with an action of a rank at another place."""
    actions = list(plan.ranks[rank])
    actions.insert(to, actions.pop(actions.index(Action.parse(text))))
    return replace(
        plan, ranks=tuple(tuple(actions) if r == rank else own for r, own in enumerate(plan.ranks))
    )


def test_what_is_wrong_with_an_asynchronous_plan_is_said() -> None:
    bare = two_bw(2, 3)
    plan, start = lower(bare), lower(first(bare))
    wrong = {
        "rank 0: NORM0 appears before REDUCE0": moved(plan, 0, "NORM0", 0),
        "rank 0: UPDATE0 appears before NORM0": moved(plan, 0, "UPDATE0", 0),
        "rank 1: UPDATE0 appears after B0.2, which overwrites gradients": moved(
            plan, 1, "UPDATE0", 12
        ),
        "rank 0: B0.0 appears before REDUCE0 of the previous step": moved(plan, 0, "REDUCE0", 9),
        "rank 0: UPDATE0 is missing": replace(plan, ranks=(plan.ranks[0][:-2], plan.ranks[1])),
        "rank 0: NORM0 without a previous step": replace(
            start, ranks=(plan.ranks[0][4:5] + start.ranks[0], start.ranks[1])
        ),
        "deadlocks: rank 0 at UPDATE0 with all ranks; rank 1 at RF0.1 with rank 0": moved(
            moved(plan, 1, "NORM0", 10), 0, "UPDATE0", 5
        ),
        "begun is (0, 1): rank 0 runs B0.-1 one step before its producer, rank 1": replace(
            bare, begun=(0, 1)
        ),
        "rank 0: B0.-2 is missing": replace(bare, begun=(2, 0)),
        "rank 0: B0.1 belongs to the next plan": replace(bare, left=(2, 0)),
        "left is (4, 0): the plan has 3 micro-batches": replace(bare, left=(4, 0)),
    }
    for message, one in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            validate(one)
    with pytest.raises(ValueError, match="it cannot be written as CSV"):
        schedules.to_csv(bare)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--zero.stage 2", "gradients of the previous step; use --zero.stage 0 or 1"),
        ("--zero.offload-optimizer cpu", "on the device; use --zero.offload-optimizer none"),
        (
            "--zero.offload-optimizer cpu --zero.delayed-update true",
            "use --zero.delayed-update false",
        ),
        ("--parallel.optimistic-step true", "use --parallel.optimistic-step auto or false"),
        ("--precision.dtype fp16", "use --precision.dtype bf16"),
        ("--parallel.chunks 2", "--parallel.chunks 2 with --parallel.schedule 2bw: chunks is 2"),
        ("--parallel.chunks 2", "use --parallel.chunks 1, or leave it out"),
        (
            "--train.global-batch 8 --train.micro-batch 4",
            (
                "--parallel.schedule 2bw: 2 micro-batches; 4 stages need at least 4; "
                "use --train.global-batch 16 or --train.micro-batch 2, or another --parallel.schedule"
            ),
        ),
        (
            "--train.global-batch 3 --train.micro-batch 1",
            "; use --train.global-batch 4, or another",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_with_a_fix(flags: str, says: str) -> None:
    config, _ = load(["--parallel.schedule", "2bw", "--parallel.pp", "4", *flags.split()])
    assert says in "\n".join(find_problems(config, 4))


def test_the_forecast_counts_and_says_what_it_takes() -> None:
    ours, theirs = (
        resolve(with_(config_of(Case(2)), parallel={"schedule": s}), VOCAB, 2)
        for s in ("2bw", "1f1b")
    )
    forecast, plain = Forecast.of(ours, 2), Forecast.of(theirs, 2)
    assert "versions   two of the parameters" in forecast.text()
    assert forecast.bubble == 0
    for rank, other in zip(forecast.ranks, plain.ranks, strict=True):
        for part, times in {
            "parameters": 2,
            "gradients": 2,
            "optimizer": 1,
            "activations": 1,
        }.items():
            assert rank.bytes[part] == times * other.bytes[part], part


def test_a_step_has_the_rates_that_were_set_before_it() -> None:
    """Although its update runs in the next step, or in `finish`."""
    run_ranks(2, set_rates)


def set_rates() -> None:
    config = config_of(Case(pp=2, schedule="2bw", microbatches=2, dtype="fp64"))
    rates = (0.01, 0.002, 0.0, 0.03)
    table = torch.tensor((*rates, 0.0), dtype=torch.float64)
    found = []
    for way in ("schedule", "set", "set and finished"):
        schedule = (lambda updates: table[updates.long()]) if way == "schedule" else None
        engine = engine_of(config, learning_rate=schedule)
        for step, rate in enumerate(rates):
            if way != "schedule":
                engine.set_learning_rates([rate])
            engine.step(batch(step, config.train.global_batch))
            if way == "set and finished":
                engine.finish()
        found.append(engine.full_state_dict())
    for weights in found[1:]:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, found[0][name], rtol=0, atol=0)


def test_it_is_for_models_of_layers() -> None:
    run_ranks(1, wrap)


def wrap() -> None:
    config = with_(config_of(Case()), parallel={"schedule": "2bw"})
    fix = "use --parallel.schedule 1f1b or gpipe, or build it from threed.layers"
    with pytest.raises(ConfigError, match=f"2bw with a wrapped module: .*{re.escape(fix)}"):
        Engine(nn.Linear(2, 2), topology_of(1, 1), config)


def test_schedules_of_ones_own_end_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    schedules.register("mine", two_bw)
    with pytest.raises(
        ValueError, match="leaves micro-batches to the next step, which only 2bw may"
    ):
        schedules.build("mine", 2, 2)
