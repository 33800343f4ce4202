"""Every parallel configuration gives the losses, gradient norms and weights of one process.

A covering set always runs: every value of every setting occurs in a case, and every pair of values
of two settings in PAIRED, which decide who communicates with whom and when. `pytest -m grid` runs sets
with every pair of values of any two settings, and every combination of the settings in PLAIN, on which
a plan depends.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.configs import MODELS, RECOMPUTE, Case, Result, trained
from tests.covering import Space, Values
from tests.harness import run_ranks
from threed.engine import Engine, StepMetrics
from threed.testing import differences, results_of

# fp64: only the order of sums differs. fp32: the same, with relative roundings of 1e-7 and two Adam steps.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
RANKS = 8
SIZES = (1, 2, 4)
SETTINGS: dict[str, list[object]] = {
    "pp": [*SIZES],
    "dp": [*SIZES],
    "tp": [*SIZES],
    "model": list(MODELS),
    "sequence": [True, False],
    "zero": [0, 1, 2, 3],
    "schedule": [
        "1f1b",
        "gpipe",
        "interleaved",
        "zb-v",
    ],  # tests/schedules/test_schedules_training.py has all schedules
    "microbatches": [1, 3, 8],
    "dropout": [0.0, 0.1],
    "dtype": ["fp64", "fp32"],
    "recompute": list(RECOMPUTE),
    "offload_optimizer": ["none", "cpu", "nvme"],
    "offload_params": ["none", "cpu", "nvme"],
    "bucket_mib": [64.0, 0.03],
    "prefetch": [1, 2],
    "tile": [1, 3],
    "shard": ["all", 2],
    "partition": ["balanced", "uniform"],
    "pad": [0, 8],
}
PLAIN = ("pp", "dp", "tp", "model", "sequence", "zero", "schedule", "microbatches", "dropout")
PAIRED = ("pp", "dp", "tp", "sequence", "zero", "schedule")
CHUNKS = ("interleaved", "zb-v")
BOTH_WAYS = ("chimera", "dualpipe", "dualpipev")  # need an even number of micro-batches
SHAPES = [shape for shape in itertools.product(SIZES, SIZES, SIZES) if math.prod(shape) <= RANKS]
Work = Callable[[Case], tuple[Engine, list[StepMetrics]]]


def settled(values: Values, both_ways: int = 8) -> dict[str, Any]:
    """Returns settings, with fixed values for those without effect, so that equal cases are recognized.

    Args:
        values: the settings.
        both_ways: number of micro-batches of the schedules in BOTH_WAYS.
    """
    v = dict(values)
    v["sequence"] = v["sequence"] and v["tp"] != 1
    v["schedule"] = v["schedule"] if v["pp"] != 1 else "1f1b"
    if v["schedule"] in BOTH_WAYS:
        v["microbatches"] = both_ways
    v["offload_params"] = v["offload_params"] if v["zero"] == 3 else "none"
    v["offload_optimizer"] = v["offload_optimizer"] if v["zero"] else "none"
    v["tile"] = v["tile"] if v["zero"] == 3 else 1
    v["shard"] = v["shard"] if v["zero"] else "all"
    if v["recompute"] == "sliced" and (v["tp"] == 1 or v["sequence"]):
        v["recompute"] = "half"
    return v


def make(values: Values) -> Case | None:
    """Returns the case of some settings, or None if it needs too many ranks."""
    pp, dp, tp = (int(str(values[name])) for name in ("pp", "dp", "tp"))
    if pp * dp * tp > RANKS:
        return None
    v = settled(values)
    v["partition"] = v["partition"] if pp > 1 else "balanced"
    if dp == 1 and v["offload_params"] == v["offload_optimizer"] == "none":
        v["zero"] = 1  # no other rank has slices, and nothing is offloaded
    v["tile"], v["prefetch"] = (v["tile"], v["prefetch"]) if v["zero"] == 3 else (1, 1)
    v["shard"] = v["shard"] if dp == 4 else "all"
    # With embedding and head, pp + 2 blocks are enough for two chunks per rank on up to four ranks. With three blocks,
    # one block has two neighbors, which ZeRO-3, pipelines and Gemma 3 need; otherwise two are enough.
    few = pp == 1 and v["zero"] != 3 and v["model"] != "gemma3"
    v["layers"] = pp + 2 if v["schedule"] in CHUNKS else 2 if few else 3
    return Case(**v)


def grid() -> list[Case]:
    """Returns every case of the settings in PLAIN, in fp64."""
    rest = {name: options[0] for name, options in SETTINGS.items()} | {"recompute": "none"}
    every = itertools.product(*(SETTINGS[name] for name in PLAIN))
    cases = (make(rest | dict(zip(PLAIN, values, strict=True))) for values in every)
    return list(dict.fromkeys(case for case in cases if case is not None))


def cost(case: Case) -> float:
    """Returns the CPU time of a case in units of 4 ms, fitted to measurements of 82 cases."""
    tensor = {1: 0, 2: 2, 4: 3}[case.tp] * (1 if case.recompute in ("none", "selective") else 1.5)
    pass_of_layer = 1 + tensor + (1.5 * case.tile if case.zero == 3 else 0)
    step_of_layer = {1: 0, 2: 2, 4: 4}[case.dp]
    drive = 12 if "nvme" in (case.offload_optimizer, case.offload_params) else 0
    return case.world * (
        6 + drive + case.layers * (step_of_layer + case.microbatches * pass_of_layer)
    )


SPACE = Space(
    SETTINGS,
    make,
    cost=cost,
    shape=lambda case: (case.pp, case.dp, case.tp),
)
EVERYDAY = replace(SPACE, paired=PAIRED)


def run_cases(cases: list[Case], folder: str, work: Work) -> list[str]:
    """Trains each case on every rank; returns this rank's differences from one process."""
    wrong = []
    for case in cases:
        try:
            engine, metrics = work(case)
        except Exception as error:
            raise RuntimeError(f"{case} failed") from error
        truth = torch.load(f"{folder}/{name_of(case.truth)}", mmap=True, weights_only=False)
        found = differences(engine, metrics, Result(**truth), TOLERANCE[case.dtype])
        wrong += [f"{case}\nrank {engine.topology.rank}: {finding}" for finding in found]
    return wrong


def name_of(case: Case) -> str:
    """Returns the name of the file with a case's results."""
    return f"{hashlib.sha256(repr(case).encode()).hexdigest()}.pt"


def write_truths(cases: list[Case], folder: str, work: Work = trained) -> None:
    """Writes the results of cases on one process."""
    for case in cases:
        torch.save(vars(results_of(*work(case))), f"{folder}/{name_of(case)}")


def run_all(cases: Sequence[Case], work: Work = trained, alone: Work = trained) -> None:
    """Runs the cases, in one world per shape.

    Args:
        cases: the cases.
        work: trains a case on its ranks.
        alone: trains a case on one process.
    """
    worlds, wrong = defaultdict(list), list[str]()
    for case in cases:
        worlds[case.pp, case.dp, case.cp, case.tp].append(case)
    with tempfile.TemporaryDirectory() as folder:
        truths = list(dict.fromkeys(case.truth for case in cases))
        run_ranks(1, write_truths, truths, folder, alone, timeout=1200)
        for mine in worlds.values():
            wrong += itertools.chain(
                *run_ranks(mine[0].world, run_cases, mine, folder, work, timeout=3600)
            )
    assert not wrong, f"{len(wrong)} differences in {len(cases)} cases:\n" + "\n\n".join(wrong[:20])


CHEAPEST = 3  # the cheapest of the first seeds


@pytest.fixture(scope="module")
def covering() -> list[Case]:
    return EVERYDAY.covering(CHEAPEST)


def test_a_covering_set_of_configurations_equals_one_process(covering: list[Case]) -> None:
    run_all(covering)


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(9))
def test_another_covering_set_of_configurations_equals_one_process(seed: int) -> None:
    run_all(SPACE.covering(seed))


def test_the_covering_set_covers_what_any_case_does(covering: list[Case]) -> None:
    attained = EVERYDAY.attained(random.Random(99), 12)
    assert set().union(*map(EVERYDAY.pairs, covering)) == set(attained)
    assert {(case.pp, case.dp, case.tp) for case in covering} == set(SHAPES)
    assert all(
        {getattr(case, name) for case in covering} == set(options)
        for name, options in SETTINGS.items()
    )


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "pp{}-dp{}-tp{}".format(*s))
def test_every_configuration_equals_one_process(shape: tuple[int, int, int]) -> None:
    """In fp64, which has the tighter tolerance.

    fp32, recompute and offload are in the covering sets.
    """
    run_all([case for case in grid() if (case.pp, case.dp, case.tp) == shape])
