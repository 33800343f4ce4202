"""The schedules themselves, the registry, legality, lowering and deadlock."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threed import schedules
from threed.schedules import Action, Kind, Plan, build, lower, registry
from threed.schedules.action import COMPUTE, RECEIVES, SENDS
from threed.schedules.all_forward_all_backward import forward_only
from threed.schedules.deadlock_check import check_rendezvous
from threed.schedules.event_simulation import play
from threed.schedules.plan_checks import legal

BUILDERS: dict[str, Callable[[int, int], Plan]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "forward-only": forward_only,
}


def plan_of(
    *ranks: str, microbatches: int = 1, chunks: int = 1, placement: tuple[tuple[int, ...], ...] = ()
) -> Plan:
    actions = tuple(tuple(Action.parse(text) for text in rank.split()) for rank in ranks)
    return Plan("test", len(ranks), microbatches, chunks, actions, placement)


def test_no_function_has_the_name_of_a_module() -> None:
    """`import threed.schedules.X as m` must give the module."""
    for found in pkgutil.iter_modules(schedules.__path__, "threed.schedules."):
        module = importlib.import_module(found.name)
        assert getattr(schedules, found.name.rpartition(".")[2]) is module, found.name


# --- schedules -------------------------------------------------------------------------------------------------------


def test_1f1b_matches_figure_4_of_2104_04473() -> None:
    plan = build("1f1b", 4, 8)
    first = "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2 F0.6 B0.3 F0.7 B0.4 B0.5 B0.6 B0.7"
    assert " ".join(map(str, plan.ranks[0])) == first
    assert [str(action) for action in plan.ranks[3]] == [
        f"{kind}0.{mb}" for mb in range(8) for kind in "FB"
    ]


def test_1f1b_on_one_stage_is_gradient_accumulation() -> None:
    assert str(build("1f1b", 1, 3)) == "rank 0: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


def test_fewer_microbatches_than_stages() -> None:
    assert [" ".join(map(str, rank)) for rank in build("1f1b", 4, 2).ranks] == [
        "F0.0 F0.1 B0.0 B0.1"
    ] * 3 + ["F0.0 B0.0 F0.1 B0.1"]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_size_is_legal_and_lowers_without_deadlock(name: str) -> None:
    for stages in range(1, 9):
        for microbatches in range(1, 18):
            plan = BUILDERS[name](stages, microbatches)
            legal(plan)
            lowered = lower(plan)
            check_rendezvous(lowered)
            assert_messages_match(plan, lowered)
            if stages <= 4:
                assert_gathers_are_added(lowered, lower(plan, gathers=True))


def assert_messages_match(plan: Plan, lowered: Plan) -> None:
    """Compute is unchanged, every result crosses each boundary once, and what is sent is what is received."""
    sent, received = Counter[tuple[int, int, bool, int]](), Counter[tuple[int, int, bool, int]]()
    for rank, actions in enumerate(lowered.ranks):
        assert tuple(action for action in actions if action.kind in COMPUTE) == plan.ranks[rank]
        for action in actions:
            here = lowered.stage_of(rank, action.chunk)
            if action.kind in SENDS:
                there = lowered.stage_of(*(lowered.consumer(rank, action) or (-1, -1)))
                sent[here, there, action.kind is Kind.SEND_F, action.microbatch] += 1
            if action.kind in RECEIVES:
                there = lowered.stage_of(*(lowered.producer(rank, action) or (-1, -1)))
                received[there, here, action.kind is Kind.RECV_F, action.microbatch] += 1
    assert sent == received
    crossings = [
        (stage, stage + 1)
        for stage in range(plan.total_stages - 1)
        if plan.locate(stage)[0] != plan.locate(stage + 1)[0]
    ]
    expected = {(a, b, True, mb) for a, b in crossings for mb in range(plan.microbatches)}
    if not plan.forward_only:
        expected |= {(b, a, False, mb) for a, b in crossings for mb in range(plan.microbatches)}
    assert sent == Counter(expected)


def test_lowered_plan_in_full() -> None:
    assert str(lower(build("1f1b", 2, 2))) == (
        "rank 0: F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 B0.1 REDUCE0\n"
        "rank 1: RF0.0 F0.0 RF0.1 B0.0 SB0.0 F0.1 B0.1 SB0.1 REDUCE0"
    )


def assert_gathers_are_added(lowered: Plan, gathering: Plan) -> None:
    """One GATHER for each F, B and I, of its chunk, as soon as what computes before is over; else the same plan.

    So it comes before every message of that time or later: gathers go on while ranks wait for each other.
    """
    check_rendezvous(gathering)
    made = when_made(lowered)
    for rank, actions in enumerate(gathering.ranks):
        assert (
            tuple(action for action in actions if action.kind is not Kind.GATHER)
            == lowered.ranks[rank]
        )
        between, before = list[Action](), 0.0
        for action in actions:
            if action.kind not in COMPUTE:
                between.append(action)
                continue
            gathers = [at for at, other in enumerate(between) if other.kind is Kind.GATHER]
            assert [between[at].chunk for at in gathers] == [action.chunk] * (
                action.kind is not Kind.W
            )
            for at, other in enumerate(between if gathers else ()):
                if other.kind in RECEIVES:
                    assert (at < gathers[0]) == (made[rank, other] < before), (
                        f"rank {rank}: {other} before {action}"
                    )
                assert at >= gathers[0] or other.kind in RECEIVES, (
                    f"rank {rank}: {other} before the gather of {action}"
                )
            between, before = [], made[rank, action]
        assert Kind.GATHER not in {action.kind for action in between}


def when_made(plan: Plan) -> dict[tuple[int, Action], float]:
    """When each action of a rank is over, a backward taking twice as long as the rest; of a receive, when it comes."""
    spans = play(plan, lambda action, _: 2.0 if action.kind is Kind.B else 1.0)
    made = {(rank, action): end for rank, actions in enumerate(spans) for action, _, end in actions}
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            source = plan.producer(rank, action) if action.kind in RECEIVES else None
            if source is not None:
                kinds = (Kind.F,) if action.kind is Kind.RECV_F else (Kind.B, Kind.I)
                results = (
                    (source[0], Action(kind, action.microbatch, source[1])) for kind in kinds
                )
                made[rank, action] = next(made[result] for result in results if result in made)
    return made


def test_lowered_plans_with_gathers_in_full() -> None:
    assert str(lower(build("1f1b", 2, 2), gathers=True)) == (
        "rank 0: GATHER0 F0.0 GATHER0 SF0.0 F0.1 GATHER0 SF0.1 RB0.0 B0.0 GATHER0 RB0.1 B0.1 REDUCE0\n"
        "rank 1: GATHER0 RF0.0 F0.0 GATHER0 RF0.1 B0.0 GATHER0 SB0.0 F0.1 GATHER0 B0.1 SB0.1 REDUCE0"
    )
    split = plan_of("F0.0 F1.0 I1.0 W1.0 I0.0 W0.0", chunks=2)
    assert str(lower(split, gathers=True)) == (
        "rank 0: GATHER0 F0.0 GATHER1 F1.0 GATHER1 I1.0 W1.0 GATHER0 REDUCE1 I0.0 W0.0 REDUCE0"
    )
    assert str(lower(forward_only(1, 2), gathers=True)) == "rank 0: GATHER0 F0.0 GATHER0 F0.1"


def test_reduce_follows_the_last_backward_of_each_chunk() -> None:
    plan = plan_of("F0.0 F1.0 I1.0 W1.0 I0.0 W0.0", chunks=2)
    assert str(lower(plan)) == "rank 0: F0.0 F1.0 I1.0 W1.0 REDUCE1 I0.0 W0.0 REDUCE0"
    assert "REDUCE" not in str(lower(forward_only(3, 2)))


def test_a_lowered_plan_is_not_lowered_again() -> None:
    with pytest.raises(ValueError, match=r"rank 0: SF0\.0: only plans without communication"):
        lower(lower(build("1f1b", 2, 2)))


# --- any legal plan, not only ours -----------------------------------------------------------------------------------


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """Plans that a random but valid order of execution gives: any placement, chunks, full or split backward."""
    stages = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 4))
    total = stages * chunks
    order = draw(st.permutations(range(total)))
    placement = tuple(tuple(order[rank * chunks : (rank + 1) * chunks]) for rank in range(stages))
    split = draw(st.booleans())
    random = draw(st.randoms(use_true_random=False))
    rank_lists: list[list[Action]] = [[] for _ in range(stages)]
    where = {
        stage: (rank, chunk)
        for rank, held in enumerate(placement)
        for chunk, stage in enumerate(held)
    }
    ready = {("F", 0, mb) for mb in range(microbatches)}
    while ready:
        kind, stage, mb = random.choice(sorted(ready))
        ready.remove((kind, stage, mb))
        rank, chunk = where[stage]
        rank_lists[rank].append(Action(Kind(kind), mb, chunk))
        back = "I" if split else "B"
        if kind == "F":
            ready.add(("F", stage + 1, mb) if stage + 1 < total else (back, stage, mb))
        elif kind in "BI":
            ready |= {("W", stage, mb)} if split else set()
            ready |= {(back, stage - 1, mb)} if stage > 0 else set()
    return Plan("random", stages, microbatches, chunks, tuple(map(tuple, rank_lists)), placement)


@settings(max_examples=150, deadline=None)
@given(random_plans())
def test_lowering_any_legal_plan_cannot_deadlock(plan: Plan) -> None:
    legal(plan)
    lowered = lower(plan)
    check_rendezvous(lowered)
    assert_messages_match(plan, lowered)
    assert_gathers_are_added(lowered, lower(plan, gathers=True))


# --- the checker bites -----------------------------------------------------------------------------------------------


def lower_naively(plan: Plan) -> Plan:
    """Sends right after the result is made, receives just before its use: what looks natural, and is wrong."""
    ranks = []
    for rank, actions in enumerate(plan.ranks):
        out = []
        for action in actions:
            forward = action.kind is Kind.F
            if plan.producer(rank, action) is not None:
                out.append(action._replace(kind=Kind.RECV_F if forward else Kind.RECV_B))
            out.append(action)
            if plan.consumer(rank, action) is not None:
                out.append(action._replace(kind=Kind.SEND_F if forward else Kind.SEND_B))
        ranks.append(tuple(out))
    return dataclasses.replace(plan, ranks=tuple(ranks))


def test_receiving_just_before_use_deadlocks_1f1b() -> None:
    for stages in range(2, 9):
        for microbatches in range(2, 18):
            with pytest.raises(ValueError, match="deadlocks"):
                check_rendezvous(lower_naively(build("1f1b", stages, microbatches)))


def test_a_deadlock_names_ranks_and_actions() -> None:
    with pytest.raises(
        ValueError,
        match=r"1f1b deadlocks: rank 0 at SF0\.1 with rank 1; rank 1 at SB0\.0 with rank 0",
    ):
        check_rendezvous(lower_naively(build("1f1b", 2, 2)))


def test_exchanged_messages_are_reported() -> None:
    plan = plan_of("F0.0 SF0.0 F0.1 SF0.1", "RF0.1 RF0.0 F0.0 F0.1", microbatches=2)
    with pytest.raises(
        ValueError, match=r"rank 0 sends SF0\.0 where rank 1 receives RF0\.1, not RF0\.0"
    ):
        check_rendezvous(plan)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("F0.0 SF0.0", "F0.0 RF0.0"), r"rank 1: F0\.0 appears before RF0\.0"),
        (("SF0.0 F0.0", "RF0.0 F0.0"), r"rank 0: SF0\.0 appears before F0\.0"),
        (("F0.0 SF0.0", "RF0.0 F0.0 RF0.0"), r"rank 1: RF0\.0 appears twice"),
        (("F0.0 SF0.0 SF0.0", "RF0.0 F0.0"), r"rank 0: SF0\.0 appears twice"),
        (("F0.0 SF0.0 RF0.0", "RF0.0 F0.0"), r"rank 0: RF0\.0 has no other rank"),
    ],
)
def test_messages_missing_or_out_of_place_are_reported(
    ranks: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_rendezvous(plan_of(*ranks))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("F0.0 B0.0 F0.1", "F0.0 B0.0 F0.1 B0.1"), r"rank 0: B0\.1 is missing"),
        (("F0.0 B0.0", "F0.0 B0.0 F0.1 B0.1"), r"rank 0: F0\.1 is missing"),
        (("F0.0 B0.0 F0.0", "F0.0 B0.0"), r"rank 0: F0\.0 appears twice"),
        (("F0.0 B0.0 B0.1 F0.1", "F0.0 B0.0"), r"rank 0: B0\.1 appears before F0\.1"),
        (
            ("F0.0 B0.0 I0.0 W0.0", "F0.0 B0.0"),
            r"rank 0: I0\.0: this micro-batch already had its backward",
        ),
        (("F0.0 W0.0 I0.0", "F0.0 B0.0"), r"rank 0: W0\.0 appears before I0\.0"),
        (("F0.0 I0.0 F0.1 B0.1", "F0.0 B0.0 F0.1 B0.1"), r"rank 0: W0\.0 is missing"),
        (("F0.0 B0.0 F0.1 B0.1", "F0.0 F0.1"), r"rank 1: B0\.0 is missing"),
        (("F1.0 B1.0", "F0.0 B0.0"), r"rank 0: F1\.0: the plan has 1 chunk and 2 micro-batches"),
        (("F0.2 B0.2", "F0.0 B0.0"), r"rank 0: F0\.2: the plan has 1 chunk and 2 micro-batches"),
    ],
)
def test_illegal_plans_name_rank_and_action(ranks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        legal(plan_of(*ranks, microbatches=2))


def test_ranks_and_placement_are_checked() -> None:
    with pytest.raises(ValueError, match="2 lists of actions for 3 ranks"):
        legal(dataclasses.replace(build("gpipe", 2, 1), stages=3))
    for placement in (((0,), (0,)), ((0, 1), ()), ((0,), (2,))):
        with pytest.raises(ValueError, match="must give each of 2 ranks 1 of the stages"):
            legal(dataclasses.replace(build("gpipe", 2, 1), placement=placement))
    with pytest.raises(ValueError, match="at least 1"):
        legal(schedules.gpipe(2, 0))


def test_a_stalling_plan_names_who_waits_for_what() -> None:
    plan = plan_of("F0.0 B0.0 F0.1 B0.1", "F0.1 F0.0 B0.0 B0.1", microbatches=2)
    legal(plan)
    message = r"stalls: rank 0 waits at B0\.0 for B0\.0 of rank 1; rank 1 waits at F0\.1 for F0\.1 of rank 0"
    with pytest.raises(ValueError, match=message):
        lower(plan)


# --- registry --------------------------------------------------------------------------------------------------------


def test_build_gives_the_named_schedule() -> None:
    assert schedules.available()[:2] == ("gpipe", "1f1b")
    assert build("gpipe", stages=3, microbatches=5) == schedules.gpipe(3, 5)
    assert build("1f1b", stages=3, microbatches=5, chunks=1) == schedules.one_f_one_b(3, 5)


@pytest.mark.parametrize("name", schedules.available())
@pytest.mark.parametrize("stages", [2, 4])
def test_the_number_of_microbatches_that_a_refusal_names_is_accepted(
    name: str, stages: int
) -> None:
    for microbatches in range(1, 10):
        try:
            build(name, stages, microbatches)
        except ValueError as error:
            (number,) = set(re.findall(r"(?:use|at least) (\d+)", str(error)))
            build(name, stages, int(number))


def test_misspelled_schedules_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"no schedule '1f1': did you mean '1f1b'\?"):
        build("1f1", 2, 2)
    with pytest.raises(ValueError, match=r"no schedule 'qqqq': available: gpipe, 1f1b"):
        build("qqqq", 2, 2)


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 4)])
def test_sizes_below_one_are_refused(stages: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        build("1f1b", stages, microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_schedules_of_one_chunk_refuse_more(name: str) -> None:
    with pytest.raises(ValueError, match=f"schedule {name}: chunks is 2; this schedule has 1"):
        build(name, 2, 2, chunks=2)


def test_a_registered_schedule_is_built_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))

    def loop(stages: int, microbatches: int, chunks: int = 2) -> Plan:
        def rank() -> tuple[Action, ...]:
            forwards = [
                Action(Kind.F, mb, chunk) for chunk in range(chunks) for mb in range(microbatches)
            ]
            backwards = [
                Action(Kind.B, mb, chunk)
                for chunk in reversed(range(chunks))
                for mb in range(microbatches)
            ]
            return (*forwards, *backwards)

        return Plan("loop", stages, microbatches, chunks, tuple(rank() for _ in range(stages)))

    schedules.register("loop", loop, chunks=None)
    schedules.register(
        "broken",
        lambda stages, microbatches: Plan("broken", stages, microbatches, 1, ((),) * stages),
    )
    assert schedules.available()[:2] == ("gpipe", "1f1b")
    assert schedules.available()[-2:] == (
        "loop",
        "broken",
    )  # other tests of this process may have registered theirs
    assert build("loop", 2, 2).chunks == 2
    assert build("loop", 2, 2, chunks=3).total_stages == 6
    check_rendezvous(lower(build("loop", 3, 4)))
    with pytest.raises(ValueError, match=r"rank 0: F0\.0 is missing"):
        build("broken", 2, 1)
    with pytest.raises(ValueError, match="'1f1b' exists already"):
        schedules.register("1f1b", loop)
