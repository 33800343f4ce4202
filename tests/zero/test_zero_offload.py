"""Offload changes the place of things and nothing else: the same bits as without it, in memory and on a drive."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.configs import RECOMPUTE, Case, Result, batch, config_of, engine_of, share, train
from tests.harness import run_ranks
from threed.memory.tiers import InMemory
from threed.zero.reductions import Gradient


def difference(one: Result, other: Result) -> float:
    """The largest difference of two results in anything."""
    pairs = [
        (one.weights, other.weights),
        *((one.moments[part], other.moments[part]) for part in other.moments),
    ]
    worst = max(
        abs(a - b)
        for a, b in zip((*one.losses, *one.norms), (*other.losses, *other.norms), strict=True)
    )
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            worst = max(worst, float((mine[name] - tensor).abs().max()) if tensor.numel() else 0.0)
    return worst


Place = tuple[str, str]  # of the optimizer's state, of parameters


def at(case: Case, place: Place) -> Case:
    return replace(case, offload_optimizer=place[0], offload_params=place[1])


def check(case: Case, storage: Place, places: list[Place], tolerance: float) -> None:
    want = train(at(case, storage))
    for place in places:
        got = train(at(case, place))
        if want.weights:
            assert difference(got, want) <= tolerance, place


STATES = [("cpu", "none"), ("nvme", "none")]
PARAMS = [("none", "cpu"), ("none", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme")]
CASES = [
    (Case(dtype="fp32"), STATES),
    (Case(dtype="fp32", zero=2, microbatches=1), STATES),
    (Case(dp=2, dtype="fp32", zero=1), STATES),
    (Case(dp=2, dtype="fp32", zero=2, bucket_mib=0.03), STATES),
    (Case(dp=2, dtype="bf16", zero=3, microbatches=3, bucket_mib=0.03), [STATES[1], *PARAMS[1::2]]),
    (Case(dp=2, dtype="fp16", zero=3, prefetch=2), [("nvme", "nvme"), ("cpu", "cpu")]),
    (Case(pp=2, dp=2, dtype="fp32", zero=3, microbatches=3, model="llama"), [("nvme", "nvme")]),
    (Case(dp=2, tp=2, dtype="fp32", zero=3, sequence=True, dropout=0.1), [("cpu", "nvme")]),
    (Case(dp=4, shard=2, dtype="fp32", zero=3, microbatches=1), [("nvme", "nvme")]),
]
OTHER_CASES = [
    (
        Case(dp=2, dtype="bf16", zero=3, microbatches=3, bucket_mib=0.03),
        [STATES[0], *PARAMS[::2]],
    ),
    (Case(pp=2, dp=2, dtype="fp32", zero=3, microbatches=3), STATES + PARAMS),
    (Case(dp=2, tp=2, dtype="fp32", zero=3, sequence=True, dropout=0.1), [("nvme", "nvme")]),
    (
        Case(pp=2, dp=2, tp=2, dtype="fp32", zero=2, model="llama"),
        [("nvme", "none"), ("cpu", "none")],
    ),
]


@pytest.mark.seldom(
    "*pp=1, dp=1, tp=1, model='gpt', sequence=False, zero=1*",
    "*pp=1, dp=2, tp=1, model='gpt', sequence=False, zero=1*",
    "*pp=1, dp=2, tp=1, model='gpt', sequence=False, zero=3, schedule='1f1b', microbatches=3, dropout=0.0, dtype='bf16'*",
    "*pp=1, dp=4, tp=1*",
)
@pytest.mark.parametrize(
    ("case", "places"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.grid) for case in OTHER_CASES)],
    ids=str,
)
def test_the_place_changes_no_bit(case: Case, places: list[Place]) -> None:
    run_ranks(case.world, check, case, ("none", "none"), places, 0.0)


ALONE = [
    pytest.param(Case(dtype="fp32", zero=3), 1e-6, marks=pytest.mark.grid),
    (Case(dtype="fp64", zero=2), 1e-12),
    pytest.param(
        Case(pp=2, tp=2, dtype="fp64", zero=3, model="qwen-tied"), 1e-12, marks=pytest.mark.grid
    ),
    (Case(tp=2, dtype="fp32", zero=3, microbatches=1, sequence=True, bucket_mib=0.03), 1e-6),
]


@pytest.mark.parametrize(("case", "tolerance"), ALONE, ids=str)
def test_without_data_ranks_offload_is_what_makes_slices(case: Case, tolerance: float) -> None:
    """One rank alone has gradients and parameters in slices only with offload. Then each micro-batch's gradient is made
    by itself and added, where else the products are accumulated in place, and the norm is summed over other buckets:
    the same numbers but for rounding. From there on the place changes no bit again."""
    places = STATES[:1] if case.zero == 2 else [("cpu", "cpu")]
    run_ranks(case.world, check, case, ("none", "none"), places, tolerance)
    others = STATES[1:] if case.zero == 2 else [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme")]
    run_ranks(case.world, check, case, places[0], others, 0.0)


def train_one_bucket(microbatches: int, place: str, dp: int) -> list[float]:
    case = Case(
        dp=dp, zero=2, layers=1, dtype="fp32", microbatches=microbatches, offload_optimizer=place
    )
    config = config_of(case)
    config = config.model_copy(
        update={"optim": config.optim.model_copy(update={"weight_decay": 0.0})}
    )
    engine, rows = engine_of(config), config.train.global_batch
    assert len(engine.layout.buckets) == 1
    return [engine.step(share(batch(step, rows), engine.topology)).grad_norm for step in range(3)]


@pytest.mark.parametrize(
    ("dp", "microbatches"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.grid), (2, 4)]
)
def test_a_bucket_that_is_still_on_its_way_home_is_waited_for(dp: int, microbatches: int) -> None:
    """With one bucket, the next micro-batch's gradients leave right after, and are added to what comes from there."""
    memory, drive = (
        run_ranks(dp, train_one_bucket, microbatches, place, dp)[0] for place in ("cpu", "nvme")
    )
    assert drive == memory


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "shape", list(itertools.product((1, 2), repeat=3)), ids=lambda s: "pp{}-dp{}-tp{}".format(*s)
)
def test_no_place_and_no_recompute_changes_a_bit(shape: tuple[int, int, int], stage: int) -> None:
    """Every place of states and parameters with every recompute, clipped, with dropout, with and without accumulation;
    without data ranks slices come with offload (above)."""
    pp, dp, tp = shape
    plain = Case(pp, dp, tp, dtype="fp32", zero=stage, dropout=0.1, bucket_mib=0.03)
    places = STATES + (PARAMS if stage == 3 else [])
    for microbatches in (1, 3):
        case = replace(plain, microbatches=microbatches, sequence=tp > 1 and microbatches == 1)
        run_ranks(case.world, check_places, case, [("none", "none"), *places], timeout=3600)


def check_places(case: Case, places: list[Place]) -> None:
    """Each place against the first, to rounding where one rank alone has slices; each recompute against its place."""
    plain = train(at(case, places[0]))
    for place in places:
        want = train(at(case, place))
        if plain.weights:
            assert difference(want, plain) <= (0.0 if case.dp > 1 else 1e-6), place
        for recompute in RECOMPUTE:
            if recompute == "sliced" and (case.tp == 1 or case.sequence):
                continue  # refused: nobody to slice over, or sliced already
            got = train(replace(at(case, place), recompute=recompute))
            if want.weights:
                assert difference(got, want) == 0.0, (place, recompute)


# ------------------------------------------------------------------------------------------------------ delayed update


def delayed_truth(case: Case, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Gradients of step k are made with the weights after update k - 2, and applied to those after update k - 1."""
    config = config_of(replace(case.truth, dtype=case.dtype))
    stale, fresh = engine_of(config), engine_of(config)
    losses: list[float] = []
    for step in range(steps):
        before = fresh.full_state_dict()  # after update k - 1
        inner, full = stale.reducer.finish, batch(step, config.train.global_batch)
        kept: list[Gradient] = []

        def finish(
            inner: Callable[[], list[Gradient]] = inner, kept: list[Gradient] = kept
        ) -> list[Gradient]:
            gradients = inner()
            kept.extend(
                Gradient(InMemory(g.storage.fetch().wait().clone()), g.squares) for g in gradients
            )
            return gradients

        stale.reducer.finish = finish  # type: ignore[method-assign]
        losses.append(stale.step(full).loss)
        stale.reducer.finish = inner  # type: ignore[method-assign]
        fresh.optimizer.step(kept, torch.zeros(1, dtype=torch.float64))
        stale.load_full_state_dict(before)
    return losses, fresh.full_state_dict()


def check_delayed(case: Case, truth: tuple[list[float], dict[str, Tensor]]) -> None:
    config = config_of(case)
    config = config.model_copy(
        update={"zero": config.zero.model_copy(update={"delayed_update": True})}
    )
    engine, rows = engine_of(config), config.train.global_batch
    losses = [
        engine.step(share(batch(step, rows), engine.topology)).loss for step in range(len(truth[0]))
    ]
    weights = engine.full_state_dict()
    assert losses == pytest.approx(truth[0], abs=1e-9)
    assert not weights or weights.keys() == truth[1].keys()
    for name, tensor in weights.items():
        assert (tensor - truth[1][name]).abs().max() <= 1e-9, name


DELAYED = [
    Case(offload_optimizer="cpu"),
    Case(dp=2, zero=2, offload_optimizer="cpu", bucket_mib=0.03),
]
DELAYED += [Case(pp=2, dp=2, zero=3, offload_optimizer="cpu", offload_params="cpu", microbatches=1)]


@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_a_delayed_update_is_one_step_late(case: Case) -> None:
    (truth,) = run_ranks(1, delayed_truth, case, 5)
    run_ranks(case.world, check_delayed, case, truth)


# ------------------------------------------------------------------------------------------------------- beside a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("place", [*STATES, ("cpu", "cpu"), *PARAMS], ids=str)
def test_offload_from_a_gpu_trains_what_the_gpu_does(place: Place) -> None:
    """The host's Adam and the GPU's round differently, a few ulp a step."""
    case = Case(dtype="fp32", zero=3, microbatches=3)
    assert difference(train(at(case, place)), train(case)) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [DELAYED[0], Case(zero=3, offload_optimizer="cpu", offload_params="cpu")], ids=str
)
def test_a_delayed_update_beside_a_gpu_is_one_step_late(case: Case) -> None:
    (truth,) = run_ranks(1, delayed_truth, case, 5)
    check_delayed(case, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "sliced"])
def test_recompute_on_a_gpu_trains_the_same(recompute: str) -> None:
    """fp64, 1e-9: a GPU sums the rows of an embedding's gradient in any order."""
    assert difference(train(Case(recompute=recompute)), train(Case())) <= 1e-9
