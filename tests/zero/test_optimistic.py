"""Updates that do not wait for the global norm give the bits of those that do; what undoes them forgets nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from benchmarks import optimistic as benchmark
from tests.configs import VOCAB, Case, config_of, topology_of
from tests.configs import engine_of as engine_of_config
from tests.harness import run_ranks
from tests.pipeline.test_step import data, poison_sink, state, with_
from tests.schedules.test_schedules_plans import random_plans
from threed import models
from threed.config import Config
from threed.config.checks import find_problems
from threed.engine import Engine, StepMetrics
from threed.layers import MicroBatch, Slicing
from threed.ops.precision import LossScale
from threed.planner.forecast import Forecast
from threed.schedules import Action, Costs, Kind, Plan, build, lower
from threed.schedules.deadlock_check import check_rendezvous
from threed.schedules.post_update_validation import time_between_steps
from threed.zero import setup
from threed.zero.optimistic import Optimistic
from threed.zero.step_metrics import DataError

STEPS, SAVED_AT = 6, 4
NUMBERS = ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped")
NEVER, SOMETIMES, ALWAYS = 1e9, 0.7, 1e-4  # norms that no step, some steps, and every step exceeds
SCALE = LossScale(initial=2.0**22, hysteresis=1, window=2)  # fp16 overflows in the first steps

WORLDS: dict[int, list[Case]] = {
    2: [
        Case(pp=2, layers=2, schedule="split-1f1b", recompute="full", dropout=0.1),
        Case(pp=2, layers=2, schedule="gpipe", zero=0, model="llama", dtype="fp32"),
        Case(pp=2, layers=2, schedule="1f1b", dtype="fp16"),
        Case(pp=2, layers=4, schedule="dualpipe", microbatches=4, dtype="bf16"),
    ],
    4: [
        Case(pp=2, dp=2, layers=2, schedule="split-vee", model="qwen-tied", bucket_mib=0.02),
        Case(pp=2, dp=2, layers=2, zero=2, dtype="bf16", microbatches=4),
        Case(pp=2, dp=2, layers=2, zero=3, schedule="split-1f1b", recompute="half", dtype="fp16", bucket_mib=0.02),
        Case(pp=2, tp=2, layers=2, sequence=True, zero=0, dropout=0.1, recompute="sliced"),
        Case(pp=4, layers=4, zero=3, model="gpt-untied", microbatches=4),
    ],
}  # fmt: skip


def engine_of(
    case: Case, optimistic: bool, clip: float, build: Callable[..., Engine] = engine_of_config
) -> Engine:
    config = with_(
        config_of(case), parallel={"optimistic_step": optimistic}, train={"grad_clip": clip}
    )
    if case.dtype == "fp16":  # SGD uses gradients up where they have a loss scale
        config = with_(config, optim={"name": "sgd"})
    return build(config, loss_scale=SCALE if case.dtype == "fp16" else None)


def told(metrics: Sequence[StepMetrics]) -> list[str]:
    """The numbers of steps, in full; NaN is NaN."""
    return [repr([getattr(one, name) for name in NUMBERS]) for one in metrics]


def bits(engine: Engine) -> tuple[list[Tensor], str]:
    """Everything that steps change."""
    engine.optimizer.wait()  # validates
    scaler = engine.optimizer.scaler.state()
    return state(engine), repr(
        [float(engine.optimizer.bad.skips), engine.steps, engine.consumed, scaler]
    )


def differ(a: tuple[list[Tensor], str], b: tuple[list[Tensor], str]) -> bool:
    return a[1] != b[1] or not all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


def guessing(engine: Engine) -> Engine:
    """The engine, which guesses in every step now, also after one that guessed wrong."""
    optimistic = engine.optimizer.optimistic
    assert optimistic is not None
    inner = optimistic.validate

    def validate() -> bool:
        right = inner()
        optimistic._last_guess_right = True
        return right

    optimistic.validate = validate  # type: ignore[method-assign]
    return engine


def walk(engine: Engine, steps: Sequence[int], poisoned: Sequence[int] = ()) -> list[StepMetrics]:
    """Steps; `poisoned` ones have a gradient that is not finite on one rank, each another."""
    made = []
    for step in steps:
        if step in poisoned and engine.topology.rank == step % engine.topology.world:
            poison_sink(engine, float("nan"))
        made.append(engine.step(data(engine, step)))
    return made


# -------------------------------------------------------------------------------------------------------- the same bits


def compare(
    case: Case, clip: float, poisoned: Sequence[int], always: bool, folder: str | None
) -> list[Any]:
    """What is wrong; and how often an update was undone. With a folder: saves on the way, and resumes from there."""
    waiting, hoping = engine_of(case, False, clip), engine_of(case, True, clip)
    hoping = guessing(hoping) if always else hoping
    want = walk(waiting, range(SAVED_AT), poisoned)
    found = walk(hoping, range(SAVED_AT), poisoned)
    wrong = []
    if folder is not None:
        hoping.save(f"{folder}/{case.world}")
    elif repr(float(hoping.evaluate(data(hoping)))) != repr(float(waiting.evaluate(data(waiting)))):
        wrong.append(f"{case} {clip}: another loss in an evaluation")
    want += walk(waiting, range(SAVED_AT, STEPS), poisoned)
    found += walk(hoping, range(SAVED_AT, STEPS), poisoned)
    if told(found) != told(want):
        wrong.append(f"{case} {clip}: {told(found)} instead of {told(want)}")
    if differ(bits(hoping), bits(waiting)):
        wrong.append(f"{case} {clip}: other weights or states")
    if folder is not None:
        resumed = [engine_of(case, optimistic, clip) for optimistic in (False, True)]
        for engine in resumed:
            engine.load(f"{folder}/{case.world}")
        numbers = [told(walk(engine, range(SAVED_AT, STEPS), poisoned)) for engine in resumed]
        if numbers[0] != numbers[1] or differ(bits(resumed[0]), bits(resumed[1])):
            wrong.append(f"{case} {clip}: other numbers, weights or states after a resume")
    assert hoping.optimizer.optimistic is not None
    return [wrong, hoping.optimizer.optimistic.restarts]


SOME_SKIPPED = (1, 4)
SPECIAL = {  # of the first case: clip norm, steps that are skipped, whether every step guesses
    "never": (NEVER, (), False),
    "always": (ALWAYS, (), False),
    "always, and guessing": (ALWAYS, (2,), True),
    "no clipping": (0.0, SOME_SKIPPED, False),
}


def compare_all(cases: Sequence[Case], folder: str) -> tuple[list[str], list[int], dict[str, int]]:
    """What is wrong, and how often an update was undone: in every case, where some steps are clipped and some skipped,
    and in the special runs of two ranks."""
    wrong: list[str] = []
    restarts, special = [], {}

    def look(case: Case, *about: Any) -> int:
        found, count = compare(case, *about)
        wrong.extend(found)
        return int(count)

    for number, case in enumerate(cases):
        restarts.append(look(case, SOMETIMES, SOME_SKIPPED, False, folder if number == 0 else None))
        if case.dtype == "fp16":
            restarts.append(look(case, ALWAYS, (), True, None))
    for name, about in SPECIAL.items() if cases[0].world == 2 else ():
        special[name] = look(cases[0], *about, None)
    return wrong, restarts, special


OFTEN = {2: [WORLDS[2][n] for n in (0, 2)], 4: [WORLDS[4][2]]}


@pytest.mark.seldom("2-cases0")
@pytest.mark.parametrize(
    ("world", "cases"),
    [*OFTEN.items(), *(pytest.param(*world, marks=pytest.mark.grid) for world in WORLDS.items())],
)
def test_what_did_not_wait_has_the_bits_of_what_did(
    world: int, cases: list[Case], tmp_path: Path
) -> None:
    """Losses, norms, rates, scales, counters, weights and moments, where none, some and all steps are clipped, and some
    skipped; with an evaluation or a checkpoint on the way, and after a resume."""
    found = run_ranks(world, compare_all, cases, str(tmp_path))
    assert not any(wrong for wrong, *_ in found), "\n".join(
        itertools.chain(*(wrong for wrong, *_ in found))
    )
    assert all(one[1:] == found[0][1:] for one in found)
    _, restarts, special = found[0]
    assert min(restarts) >= 1
    assert max(restarts) >= 2
    if world == 2:
        assert special == {"never": 0, "always": 1, "always, and guessing": STEPS, "no clipping": 2}


def told_of_bad_data(case: Case) -> list[str]:
    """What the metrics of the step after one with an unknown word say, when they are read first; waiting, and not."""
    said = []
    for optimistic in (False, True):
        engine, metrics = engine_of(case, optimistic, NEVER), []
        for step in range(3):
            batch = data(engine, step)
            batch["tokens"][0, 0] += VOCAB * (step == 1)
            metrics.append(engine.step(batch))
        with pytest.raises(DataError) as error:
            metrics[2].loss  # noqa: B018  reading it is the test
        said.append(str(error.value))
    return said


def test_faults_of_the_data_are_told_in_the_order_of_steps() -> None:
    for waiting, hoping in run_ranks(2, told_of_bad_data, Case(pp=2, layers=2)):
        assert hoping == waiting
        assert "up to step 3" in hoping


class Drawing(nn.Module):
    """A layer that counts its forwards, keeps a running mean, and draws from torch's own generator."""

    def __init__(self, name: str, hidden: int) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("mean", torch.zeros(hidden, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if micro.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean((0, 1))
            self.seen.add_(1)
            x = x * torch.bernoulli(torch.full_like(x, 0.9))
        return x - self.mean


class Drawn(models.Decoder):
    """A GPT with such a layer in front of its head."""

    def layers(self) -> list[nn.Module]:
        found = super().layers()
        return [
            found[0],
            Drawing("first", self.config.hidden),
            *found[1:-1],
            Drawing("last", self.config.hidden),
            found[-1],
        ]


def engine_that_draws(config: Config, **keywords: Any) -> Engine:
    topology = topology_of(config.parallel.pp, config.parallel.tp)
    return Engine(Drawn(config.model, Slicing(topology.axis("tp"))), topology, config, **keywords)


def drawn_and_counted(case: Case) -> bool:
    """Whether what forwards change beside gradients is as without a second attempt."""
    found = []
    for optimistic in (False, True):
        engine = engine_of(case, optimistic, ALWAYS, engine_that_draws)
        torch.manual_seed(engine.topology.rank)
        metrics = walk(guessing(engine) if optimistic else engine, range(4))
        values = [b.tolist() for layer in engine.executor.stages[0].layers for b in layer.buffers()]
        found.append(
            (told(metrics), repr(bits(engine)), repr(values), repr(torch.get_rng_state().tolist()))
        )
    return found[0] == found[1]


def test_buffers_and_generators_are_as_if_the_first_attempt_had_not_been() -> None:
    assert all(run_ranks(2, drawn_and_counted, Case(pp=2, layers=2)))


def steps_of_a_filled_plan(folder: str) -> tuple[bool, bool, bool]:
    """Whether `auto` makes the updates of a plan optimistic; whether the first rank has done its step before the last
    one has: that waits for a word of it; whether the bits are those of updates that wait."""
    waiting, hoping = (benchmark.config_of(2, 4, optimistic) for optimistic in (False, True))
    engines = [
        benchmark.engine_of(config, unit=0.0)
        for config in (waiting, with_(hoping, parallel={"optimistic_step": "auto"}))
    ]
    told_of, engine = Path(folder) / "done", engines[1]
    walk(engine, range(1))
    inner = engine.reducer.finish

    def finish() -> list[Any]:
        deadline = time.monotonic() + 60
        while engine.topology.rank == 1 and not told_of.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return inner()

    engine.reducer.finish = finish  # type: ignore[method-assign]
    walk(engine, range(1, 2))
    before = told_of.exists() or engine.topology.rank == 0
    told_of.touch()
    walk(engine, range(2, 4))
    walk(engines[0], range(4))
    return (
        engine.optimizer.optimistic is not None,
        before,
        not differ(bits(engine), bits(engines[0])),
    )


def test_a_rank_that_is_done_waits_for_nobody(tmp_path: Path) -> None:
    """Where it waits, the last rank waits a minute in vain."""
    assert run_ranks(2, steps_of_a_filled_plan, str(tmp_path)) == [(True, True, True)] * 2


# ------------------------------------------------------------------------------------------------------- planted faults


def forgotten(case: Case) -> list[str]:
    """What of all that an update changes may be forgotten when it is undone, without a difference in the result."""
    right, unnoticed, count = bits_after(case), [], 0
    for number in itertools.count():
        inner = Optimistic._changed

        def without(self: Optimistic, inner: Any = inner, number: int = number) -> list[Tensor]:
            nonlocal count
            found: list[Tensor] = inner(self)
            count = len(found)
            return [tensor.clone() if n == number else tensor for n, tensor in enumerate(found)]

        with mock.patch.object(Optimistic, "_changed", without):
            if not differ(bits_after(case), right):
                unnoticed.append(f"{number} of {count}")
        if number + 1 == count:
            return unnoticed
    raise AssertionError


def bits_after(case: Case) -> tuple[list[Tensor], str]:
    engine = engine_of(case, True, ALWAYS)
    walk(engine, range(2))
    return bits(engine)


def test_a_restore_that_forgets_anything_is_found() -> None:
    """One bucket's weights or moments, or the counter of updates. A step that is not skipped changes nothing else: not
    the number of skips, nor a loss scale that is constant (three numbers)."""
    for unnoticed in run_ranks(2, forgotten, Case(pp=2, layers=2, bucket_mib=0.02)):
        assert [text.split(" of ")[0] for text in unnoticed] == ["1", "2", "3", "4"]
        assert int(unnoticed[0].split(" of ")[1]) > 5 + 3 * 2


# -------------------------------------------------------------------------------------------------------------- the cut


def sent_and_received(plan: Plan, before: bool) -> tuple[list[Any], list[Any]]:
    """The messages that ranks send, and receive, before VALIDATE or behind it: from rank to rank, what."""
    sent, received = [], []
    for rank, actions in enumerate(plan.ranks):
        place = actions.index(Action(Kind.VALIDATE, -1))
        for action in actions[:place] if before else actions[place:]:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                to = plan.consumer(rank, action)
                sent.append(
                    (
                        rank,
                        to and to[0],
                        action.kind is Kind.SEND_F,
                        action.microbatch,
                        to and to[1],
                    )
                )
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                source = plan.producer(rank, action)
                received.append(
                    (
                        source and source[0],
                        rank,
                        action.kind is Kind.RECV_F,
                        action.microbatch,
                        action.chunk,
                    )
                )
    return sorted(sent), sorted(received)


def with_validation_at(plan: Plan, rank: int, place: int) -> Plan:
    actions = [action for action in plan.ranks[rank] if action.kind is not Kind.VALIDATE]
    actions.insert(place, Action(Kind.VALIDATE, -1))
    return replace(plan, ranks=(*plan.ranks[:rank], tuple(actions), *plan.ranks[rank + 1 :]))


def assert_cut(plan: Plan) -> None:
    """The cut of a plan is consistent, before any gradient; none is later on any rank alone; a moved one is refused."""
    plain, cut = lower(plan), lower(plan, validates=True)
    check_rendezvous(cut)
    assert (
        replace(
            cut, ranks=tuple(tuple(a for a in r if a.kind is not Kind.VALIDATE) for r in cut.ranks)
        )
        == plain
    )
    for before in (True, False):
        sent, received = sent_and_received(cut, before)
        assert sent == received
    for rank, actions in enumerate(cut.ranks):
        place = actions.index(Action(Kind.VALIDATE, -1))
        assert {part.kind for action in actions[:place] for part in action.parts} <= {
            Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.GATHER,
        }  # fmt: skip
        if place + 1 < len(actions):
            with pytest.raises(ValueError, match=r"is in flight|appears after"):
                check_rendezvous(with_validation_at(cut, rank, place + 1))


@settings(max_examples=60, deadline=None)
@given(random_plans())
def test_the_cut_of_any_plan_is_consistent(plan: Plan) -> None:
    assert_cut(plan)


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "dualpipev", "dualpipe", "chimera", benchmark.NAME]
)
def test_so_are_those_of_plans_with_names(name: str) -> None:
    for stages, microbatches in ((2, 4), (4, 8), (4, 16)):
        assert_cut(build(name, stages, microbatches))


def test_a_cut_leaves_time_where_ranks_end_at_different_times() -> None:
    """In a plan without a bubble every rank has all its forwards of the warm-up before it."""
    plan = lower(benchmark.filled(4, 8), validates=True)
    forwards = [
        [a.kind for a in actions[: actions.index(Action(Kind.VALIDATE, -1))]]
        for actions in plan.ranks
    ]
    assert [kinds.count(Kind.F) for kinds in forwards] == [7, 5, 3, 1]
    unit = Costs(1.0, 1.0, 1.0)
    assert time_between_steps(benchmark.filled(4, 8), unit) == 3
    assert (
        time_between_steps(build("1f1b", 4, 8), unit)
        == time_between_steps(build("gpipe", 4, 8), unit)
        == 0
    )


def test_ranks_without_a_cut_or_with_two_are_refused() -> None:
    plan = lower(build("1f1b", 2, 2), validates=True)
    none = replace(plan, ranks=(plan.ranks[0], lower(build("1f1b", 2, 2)).ranks[1]))
    with pytest.raises(ValueError, match="rank 1: VALIDATE0 is missing"):
        check_rendezvous(none)
    two = replace(plan, ranks=((Action(Kind.VALIDATE, -1), *plan.ranks[0]), plan.ranks[1]))
    with pytest.raises(ValueError, match="VALIDATE0 appears twice"):
        check_rendezvous(two)


# ----------------------------------------------------------------------------------------------------- where it is used


def test_auto_is_on_where_it_saves_time_and_goes_with_the_rest() -> None:
    config, plan = benchmark.config_of(4, 8, True), benchmark.filled(4, 8)
    auto = with_(config, parallel={"optimistic_step": "auto"})
    assert setup.is_optimistic(auto, plan)
    assert not setup.is_optimistic(auto, build("1f1b", 4, 8))
    assert not setup.is_optimistic(with_(auto, zero={"offload_optimizer": "cpu"}), plan)
    assert not setup.is_optimistic(with_(config, parallel={"optimistic_step": False}), plan)


@pytest.mark.parametrize(
    ("groups", "fixes"),
    [
        ({"parallel": {"optimistic_step": True}}, ["--parallel.pp 2 or more"]),
        (
            {"parallel": {"pp": 2, "optimistic_step": True}, "zero": {"offload_optimizer": "cpu"}},
            ["--zero.offload-optimizer none"],
        ),
        (
            {
                "parallel": {"pp": 2, "optimistic_step": True},
                "zero": {"offload_optimizer": "cpu", "delayed_update": True},
            },
            ["--zero.delayed-update false", "--zero.offload-optimizer none"],
        ),
        (
            {
                "parallel": {"pp": 2, "optimistic_step": True},
                "zero": {"stage": 3, "offload_params": "cpu"},
            },
            ["--zero.offload-params none"],
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    groups: dict[str, Any], fixes: list[str]
) -> None:
    problems = find_problems(Config.model_validate(groups), 2 if "pp" in groups["parallel"] else 1)
    for problem, fix in zip(problems, fixes, strict=True):
        assert problem.startswith("--parallel.optimistic-step true with --")
        assert problem.endswith(f"use {fix}, or --parallel.optimistic-step auto")


def copied(case: Case) -> int:
    """Bytes of the copies that an engine keeps of what updates change, but for five numbers."""
    engine = engine_of(case, True, NEVER)
    walk(engine, range(1))
    assert engine.optimizer.optimistic is not None
    return sum(copy.nbytes for copy in engine.optimizer.optimistic._copies[5:])


@pytest.mark.parametrize(
    ("dtype", "schedule"), [("fp32", "1f1b"), ("bf16", "1f1b"), ("bf16", "chimera")]
)
def test_the_forecast_knows_the_copies(dtype: str, schedule: str) -> None:
    case = Case(pp=2, dp=2, layers=2, zero=3, dtype=dtype, schedule=schedule)
    config = config_of(case)
    held = [
        [
            rank.bytes["optimizer"]
            for rank in Forecast.of(with_(config, parallel={"optimistic_step": on}), 4).ranks
        ]
        for on in (False, True)
    ]
    assert run_ranks(4, copied, case) == [
        after - before for before, after in zip(*held, strict=True)
    ]
