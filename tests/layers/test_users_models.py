"""Models as users write them give in every topology the losses, gradient norms and weights of plain PyTorch.

A set of cases in which every model and every value of every setting occurs runs always. `pytest -m grid` runs covering
sets: every pair of a model and a setting, and of two settings, occurs in some case.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from torch import Tensor

from tests.covering import Space, Values
from tests.harness import run_ranks
from tests.users_cases import BF16, BUFFERS, RECOMPUTE, Case, train, truth
from tests.users_models import MODELS
from tests.users_truths import Result

RANKS = 6
SETTINGS: dict[str, list[object]] = {
    "model": list(MODELS),
    "pp": [1, 2, 3],
    "dp": [1, 2],
    "tp": [1, 2],
    "sequence": [True, False],
    "zero": [0, 1, 2, 3],
    "offload": ["none", "cpu", "nvme"],
    "recompute": list(RECOMPUTE),
    "partition": ["balanced", "uniform", "explicit"],
    "microbatches": [1, 3],
    "schedule": ["1f1b", "gpipe", "zb-h1"],
    "bucket_mib": [64.0, 0.002],
}
# fp64: the order of sums is all that differs. bf16 has 8 bits: a rounding is up to 0.4 % of one number, and sums over
# tensor ranks are rounded once more. Losses and norms are means over many; a weight is compared by the way that its
# tensor has gone, and was seen to be off by 4 % of it.
TOLERANCE = 1e-9
BF16_LOSS, BF16_NORM, BF16_MOVED = 2e-3, 5e-3, 0.1


def make(values: Values) -> Case | None:
    """The case of some settings; None where that takes too many ranks."""
    v = dict(values)
    case = Case(**v)  # type: ignore[arg-type]
    if case.world > RANKS:
        return None
    v["sequence"] = case.sequence and case.tp > 1
    if case.pp == 1:
        v["schedule"], v["partition"] = "1f1b", "balanced"
    v["offload"] = case.offload if case.zero else "none"
    if case.dp == 1 and v["offload"] == "none":
        v["zero"] = 1  # nobody to share with, and no other place
    if case.recompute == "sliced" and (case.tp == 1 or v["sequence"]):
        v["recompute"] = "full"
    return Case(**v)  # type: ignore[arg-type]


SPACE = Space(
    SETTINGS,
    make,
    lambda case: case.world * (1 + case.microbatches),
    lambda case: (case.pp, case.dp, case.tp),
)


def check(result: Result, wanted: Result, initial: dict[str, Tensor], case: Case) -> None:
    """Raises AssertionError naming what differs."""
    low = case.model in BF16
    loss, norm = (BF16_LOSS, BF16_NORM) if low else (TOLERANCE, TOLERANCE)
    assert result.losses == pytest.approx(wanted.losses, rel=loss, abs=0), "losses"
    assert result.norms == pytest.approx(wanted.norms, rel=norm, abs=0), "norms"
    # else the mean is that of data rank 0's rows
    defined = case.model not in BUFFERS or case.dp == 1
    if defined:
        assert result.evaluation == pytest.approx(wanted.evaluation, rel=loss, abs=0), "evaluation"
    assert result.weights.keys() == wanted.weights.keys()
    for name, want in wanted.weights.items():
        if name.endswith(".mean") and not defined:
            continue
        difference = result.weights[name] - want
        allowed = BF16_MOVED * (want - initial[name]).norm() if low else TOLERANCE
        assert (difference.norm() if low else difference.abs().max()) <= allowed, (
            f"{name}: {difference.abs().max()}"
        )


Truths = dict[Case, tuple[Result, dict[str, Tensor]]]


def find_truths(cases: list[Case]) -> Truths:
    """What plain PyTorch gives for distinct cases."""
    return {case: truth(case) for case in cases}


def run_cases(cases: list[Case], truths: Truths) -> list[str]:
    """On every rank: trains each case; rank 0 says which differ."""
    wrong = []
    for case in cases:
        try:
            result = train(case)
        except Exception as error:
            raise RuntimeError(f"{case} failed") from error
        if result.weights:
            try:
                check(result, *truths[case.truth], case)
            except AssertionError as error:
                wrong.append(f"{case}\n{error}")
    return wrong


def run_all(cases: list[Case]) -> None:
    """One world for all cases of a shape."""
    (truths,) = run_ranks(
        1, find_truths, list(dict.fromkeys(case.truth for case in cases)), timeout=1200
    )
    worlds = defaultdict(list)
    for case in cases:
        worlds[case.world].append(case)
    wrong = []
    for world, mine in sorted(worlds.items()):
        needed = {case.truth: truths[case.truth] for case in mine}
        wrong += run_ranks(world, run_cases, mine, needed, timeout=3600)[0]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ:\n" + "\n\n".join(wrong[:20])


EVERYDAY = replace(SPACE, shape=lambda case: case.world)
CHEAPEST = 4  # the cheapest of the first seeds


def test_every_users_model_and_setting_equals_plain_pytorch() -> None:
    cases = EVERYDAY.touching(CHEAPEST)
    for name, options in SETTINGS.items():
        assert {getattr(case, name) for case in cases} == set(options), name
    run_all(cases)


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(7))
def test_a_covering_set_of_users_models_equals_plain_pytorch(seed: int) -> None:
    run_all(SPACE.covering(seed))


@pytest.mark.grid
def test_the_covering_set_covers_what_any_case_does() -> None:
    cases = SPACE.covering(seed=0)
    assert set().union(*map(SPACE.pairs, cases)) == set(SPACE.attained(random.Random(99), 30))
    assert all(
        {getattr(case, name) for case in cases} == set(options)
        for name, options in SETTINGS.items()
    )
