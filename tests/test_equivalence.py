"""Every parallel configuration gives the losses, gradient norms and weights of one process.

A covering set runs always: every pair of settings occurs together in some case. `pytest -m grid` runs all of them.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import fields

import pytest
import torch

from tests.configs import MODELS, Case, Result, train
from tests.harness import run_ranks

# fp64: the order of sums is all that differs. fp32: the same relative to 1e-7 rounding and three Adam steps.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
SHAPES = [s for s in itertools.product((1, 2, 4), repeat=3) if s[0] * s[1] * s[2] <= 8]
SETTINGS = {
    "shape": SHAPES,
    "model": list(MODELS),
    "sequence": [True, False],
    "zero": [0, 1, 2, 3],
    "schedule": ["1f1b", "gpipe"],
    "microbatches": [1, 3, 8],
    "dropout": [0.0, 0.1],
    "dtype": ["fp64", "fp32"],
    "recompute": ["none", "full", "selective"],
}


def make(values: dict[str, object]) -> Case:
    """The case of some settings; what has no meaning at its shape is set to one value, so that duplicates are seen."""
    pp, dp, tp = values["shape"]  # type: ignore[misc]
    rest = {key: value for key, value in values.items() if key != "shape"}
    rest["sequence"] = rest["sequence"] and tp > 1
    rest["zero"] = rest["zero"] if dp > 1 else 1
    rest["schedule"] = rest["schedule"] if pp > 1 else "1f1b"
    return Case(pp, dp, tp, **rest)  # type: ignore[arg-type]


def grid() -> list[Case]:
    """Every case."""
    return list(dict.fromkeys(make(dict(zip(SETTINGS, v, strict=True))) for v in itertools.product(*SETTINGS.values())))


def pairs(case: Case) -> set[tuple[str, object, str, object]]:
    """The pairs of settings that a case covers, and its shape."""
    names = ("pp", "dp", "tp", *SETTINGS)
    items = [(f.name, getattr(case, f.name)) for f in fields(case) if f.name in names]
    shape = ("shape", (case.pp, case.dp, case.tp), "", None)
    return {shape, *((*a, *b) for a, b in itertools.combinations(items, 2))}


def covering(cases: list[Case], seed: int = 0) -> list[Case]:
    """Few cases that cover every pair that any case does: greedily the one with most new pairs, of a random sample."""
    draw = random.Random(seed)
    missing = set().union(*(pairs(case) for case in cases))
    chosen: list[Case] = []
    while missing:
        some = pairs_target(draw, missing, cases)
        best = max(some, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs_target(draw: random.Random, missing: set[tuple[str, object, str, object]], cases: list[Case]) -> list[Case]:
    """A sample of cases that cover one missing pair."""
    wanted = min(missing, key=repr)
    able = [case for case in cases if wanted in pairs(case)]
    return draw.sample(able, min(len(able), 60))


def check(result: Result, truth: Result, case: Case) -> None:
    """Raises AssertionError naming what differs."""
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(truth.losses), rtol=tolerance, atol=0.0)
    torch.testing.assert_close(torch.tensor(result.norms), torch.tensor(truth.norms), rtol=tolerance, atol=0.0)
    assert result.weights.keys() == truth.weights.keys()
    assert result.moments.keys() == truth.moments.keys()
    for part, tensors in {"weight": truth.weights, **truth.moments}.items():
        got = {"weight": result.weights, **result.moments}[part]
        for name, want in tensors.items():
            torch.testing.assert_close(
                got[name], want, rtol=0.0, atol=tolerance, msg=lambda m, n=name, p=part: f"{p} of {n}: {m}"
            )


def run_cases(cases: list[Case], truths: dict[Case, Result]) -> list[str]:
    """On every rank: trains each case; rank 0 says which differ."""
    wrong = []
    for case in cases:
        try:
            result = train(case)
        except Exception as error:
            raise RuntimeError(f"{case} failed") from error
        if result.weights:
            try:
                check(result, truths[case.truth], case)
            except AssertionError as error:
                wrong.append(f"{case}\n{error}")
    return wrong


def find_truths(cases: list[Case]) -> dict[Case, Result]:
    """The single-process results of distinct cases."""
    return {case: train(case) for case in cases}


def run_all(cases: list[Case]) -> None:
    """One world a shape, all its cases in it."""
    (truths,) = run_ranks(1, find_truths, list(dict.fromkeys(case.truth for case in cases)), timeout=1200)
    worlds = defaultdict(list)
    for case in cases:
        worlds[case.pp, case.dp, case.tp].append(case)
    wrong = []
    for (pp, dp, tp), mine in worlds.items():
        needed = {case.truth: truths[case.truth] for case in mine}
        wrong += run_ranks(pp * dp * tp, run_cases, mine, needed, timeout=3600)[0]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ:\n" + "\n\n".join(wrong[:20])


def test_a_covering_set_of_configurations_equals_one_process() -> None:
    cases = list(dict.fromkeys(covering(grid(), seed=0) + covering(grid(), seed=1)))
    assert set().union(*map(pairs, cases)) == set().union(*map(pairs, grid()))
    run_all(cases)


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "pp{}-dp{}-tp{}".format(*s))
def test_every_configuration_equals_one_process(shape: tuple[int, int, int]) -> None:
    """In fp64, which bears the tighter bound; fp32 and recompute run in the covering set."""
    plain = [case for case in grid() if case.dtype == "fp64" and case.recompute == "none"]
    run_all([case for case in plain if (case.pp, case.dp, case.tp) == shape])
