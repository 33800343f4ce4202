"""Mixtures of experts give the losses, gradient norms and weights of one process, with all experts.

A set of cases in which every value of every setting occurs always runs. `pytest -m grid` runs sets
with every pair of values. All are in fp64: in fp32 a topology may choose another expert for a token
whose scores are within rounding. `GAP` is asserted for the scores of every case on one process.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.configs import EXPERT_MODELS, RECOMPUTE, Case, trained
from tests.covering import Space, Values
from tests.test_context_parallel import DAILY, cost
from tests.test_equivalence import CHUNKS, RANKS, run_all, settled
from threed.engine import Engine, StepMetrics
from threed.layers import Routing

SETTINGS: dict[str, list[object]] = {
    "ep": [1, 2, 4],
    "room": [0.0, 4.0],  # so large that no step is skipped
    "capacity": [0.0, 0.75],
    "pp": [1, 2],
    "dp": [1, 2, 4],
    "tp": [1, 2],
    "cp": [1, 2],
    "cp_heads": [1, 2],
    "model": list(EXPERT_MODELS),
    "sequence": [True, False],
    "zero": [0, 1, 2, 3],
    "schedule": [
        "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "zb-auto", "chimera",
        "dualpipe", "dualpipev",
    ],
    "microbatches": [1, 3, 8],
    "dropout": [0.0, 0.1],
    "dtype": ["fp64"],
    "recompute": list(RECOMPUTE),
    "offload_optimizer": ["none", "cpu", "nvme"],
    "offload_params": ["none", "cpu", "nvme"],
    "bucket_mib": [64.0, 0.03],
    "tile": [1, 3],
    "shard": ["all", 2],
}  # fmt: skip
GAP = 1e-9  # smallest difference between the scores of the last chosen expert and of the next one


def make(values: Values, both_ways: int = 8) -> Case | None:
    """Returns the case of some settings; None if it needs too many ranks, or ep does not divide them."""
    ep, pp, dp, tp, cp = (int(str(values[name])) for name in ("ep", "pp", "dp", "tp", "cp"))
    if pp * dp * tp * cp > RANKS or dp * tp * cp % ep:
        return None
    v = settled(values, both_ways)
    v["room"] = v["room"] if ep > 1 else 0.0
    v["cp_heads"] = v["cp_heads"] if cp > 1 else "auto"
    v["shard"] = v["shard"] if dp * cp % 2 == 0 else "all"
    several = v["schedule"] in (*CHUNKS, "v-half", "v-min", "dualpipev")
    v["layers"] = 6 if several else 2
    return Case(**v)


SPACE = Space(
    SETTINGS, make, cost=cost, shape=lambda case: (case.ep, case.cp, case.tp, case.pp > 1)
)
EVERYDAY = replace(
    SPACE,
    settings=SETTINGS | DAILY,
    make=partial(make, both_ways=4),
    shape=lambda case: (case.ep, case.cp > 1 and case.ep > 1),
)
CHEAPEST = 3  # one of the cheapest of the first seeds


def trained_apart(case: Case) -> tuple[Engine, list[StepMetrics]]:
    """Trains a case on one process, and checks that no scores are too close."""
    gaps, real = [1.0], Routing.choose

    def choose(self: Routing, scores: Tensor, bias: Tensor | None, count: int) -> Tensor:
        if count < scores.shape[-1]:
            shifted = scores if bias is None else scores + bias
            best = shifted.detach().sort(dim=-1, descending=True).values
            gaps.append(float((best[..., count - 1] - best[..., count]).min()))
        return real(self, scores, bias, count)

    with patch.object(Routing, "choose", choose):
        results = trained(case)
    assert min(gaps) > GAP, f"smallest gap of scores: {min(gaps):.1e}"
    return results


def compare(cases: list[Case]) -> None:
    run_all(cases, alone=trained_apart)


def test_every_setting_equals_one_process() -> None:
    cases = EVERYDAY.touching(CHEAPEST)
    for name, options in EVERYDAY.settings.items():
        assert {getattr(case, name) for case in cases} >= set(options)
    assert {case.cp > 1 for case in cases if case.ep > 1} == {True, False}
    compare(cases)


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(2))
def test_every_pair_of_settings_equals_one_process(seed: int) -> None:
    compare(SPACE.covering(seed))


EIGHT = Case(model="Softmax", ep=8, layers=2, dtype="fp64")


@pytest.mark.grid
def test_eight_expert_ranks() -> None:
    cases = [
        replace(EIGHT, dp=8, zero=1),
        replace(EIGHT, dp=2, cp=2, tp=2, sequence=True, zero=3, room=8.0),
        replace(EIGHT, dp=4, tp=2, zero=2, model="Biased", recompute="full", capacity=0.75),
        replace(EIGHT, dp=8, zero=3, ep=4, shard=2),
    ]
    compare(cases)
