"""Context parallelism gives the losses, gradient norms and weights of one process.

A set of cases in which every value of every setting occurs always runs, also with models written as
users write them. `pytest -m grid` runs sets with every pair of values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests import users_cases
from tests.configs import MODELS, RECOMPUTE, Case
from tests.covering import Space, Values
from tests.harness import run_ranks
from tests.layers import test_users_models as users
from tests.test_equivalence import BOTH_WAYS, CHUNKS, RANKS, run_all, settled
from threed.config.resolution import context_fits
from threed.models.check import ModelError

SETTINGS: dict[str, list[object]] = {
    "cp": [2, 4],
    "cp_heads": [1, 2, 4],
    "pp": [1, 2],
    "dp": [1, 2],
    "tp": [1, 2],
    "model": list(MODELS),
    "sequence": [True, False],
    "zero": [0, 1, 2, 3],
    "schedule": ["1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe", "dualpipev"],
    "microbatches": [1, 3, 8],
    "dropout": [0.0, 0.1],
    "dtype": ["fp64", "fp32"],
    "recompute": list(RECOMPUTE),
    "offload_optimizer": ["none", "cpu", "nvme"],
    "offload_params": ["none", "cpu", "nvme"],
    "bucket_mib": [64.0, 0.03],
    "tile": [1, 3],
    "shard": ["all", 2],
}


def make(values: Values, both_ways: int = 8) -> Case | None:
    """Returns the case of some settings, or None if it needs too many ranks, or heads do not fit."""
    cp, u, pp, dp, tp = (int(str(values[name])) for name in ("cp", "cp_heads", "pp", "dp", "tp"))
    model = MODELS[str(values["model"])]
    heads, kv_heads = (model.get(name, model["heads"]) for name in ("heads", "kv_heads"))
    if pp * dp * tp * cp > RANKS or not context_fits(heads // tp, max(kv_heads // tp, 1), cp, u):
        return None
    v = settled(values, both_ways)
    few = pp == 1 and v["zero"] != 3 and v["model"] != "gemma3"
    chunks = v["schedule"] in (*CHUNKS, "dualpipev") or (pp > 2 and v["schedule"] in BOTH_WAYS)
    v["layers"] = pp + 2 if chunks else 2 if few else 3
    return Case(**v)


def cost(case: Case) -> float:
    """Returns the cost of a case: the work of all ranks, which share the processors."""
    split = {1: 0, 2: 2, 4: 3}
    tensor = split[case.tp] * (1 if case.recompute in ("none", "selective") else 1.5)
    tiles = 1.5 * case.tile * (1 + (case.offload_params == "nvme")) if case.zero == 3 else 0
    pass_of_layer = 1 + tensor + split[case.cp] + tiles
    drive = 12 if "nvme" in (case.offload_optimizer, case.offload_params) else 0
    step_of_layer = {1: 0, 2: 2, 4: 4}[case.dp]
    return case.world * (
        6 + drive + case.layers * (step_of_layer + case.microbatches * pass_of_layer)
    )


SPACE = Space(
    SETTINGS, make, cost=cost, shape=lambda case: (case.cp, case.cp_heads, case.tp, case.pp > 1)
)


# One schedule of each kind: the others differ in the order of passes only. Most have stages, so without `pp` in the
# shape there are stages with rings and with heads too.
DAILY: dict[str, list[object]] = {
    "schedule": ["1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipev"],
    "microbatches": [1, 3, 4],
}
EVERYDAY = replace(
    SPACE,
    settings=SETTINGS | DAILY,
    make=partial(make, both_ways=4),
    shape=lambda case: (case.cp, case.cp_heads),
)
CHEAPEST = 0  # the cheapest of the first seeds


def test_every_setting_equals_one_process() -> None:
    cases = EVERYDAY.touching(CHEAPEST)
    for name, options in EVERYDAY.settings.items():
        assert {getattr(case, name) for case in cases} == set(options)
    assert {case.cp_heads == 1 for case in cases if case.pp > 1} == {True, False}
    run_all(cases)


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(2))
def test_every_pair_of_settings_equals_one_process(seed: int) -> None:
    run_all(SPACE.covering(seed))


# The users' models that mix positions in other ways than by `layers.Attention`, with the layers that do.
MIXING = {
    "kernels": ("convolution (Convolution)",),
    "hourglass": ("blocks.2 (Before)", "head (Before)"),
    "latent": ("latent.0 (Latent)", "latent.1 (Latent)"),
    "two-tensors": ("value (ValueEmbedding)", "head (Join)"),
    "vision": (
        "patches (Patches)", "blocks.0 (Encoder)", "blocks.1 (Encoder)", "head (Classifier)"
    ),
}  # fmt: skip
USERS = replace(
    users.SPACE,
    settings=users.SETTINGS
    | {
        "model": [name for name in users.SETTINGS["model"] if name not in MIXING],
        "cp": [2],
        "cp_heads": [1, 2],
    },
    shape=lambda case: (case.pp > 1, case.cp_heads),
)


def test_every_users_model_equals_plain_pytorch() -> None:
    cases = USERS.touching(20)  # the cheapest of the first seeds
    for name, options in USERS.settings.items():
        assert {getattr(case, name) for case in cases} == set(options), name
    users.run_all(cases)


@pytest.mark.grid
@pytest.mark.timeout(7200)
def test_every_pair_of_a_users_model_and_a_setting_equals_plain_pytorch() -> None:
    users.run_all(USERS.covering(0))


def find_refusals() -> dict[str, str]:
    """Returns the errors of the engines of the models in MIXING, with two context ranks."""
    found = {}
    for name in MIXING:
        with pytest.raises(ModelError) as error:
            users_cases.engine_of(users_cases.Case(name, cp=2))
        found[name] = str(error.value)
    return found


def test_users_layers_that_mix_positions_otherwise_are_refused_by_name() -> None:
    for found in run_ranks(2, find_refusals):
        for model, layers in MIXING.items():
            message = "does not state that it supports context parallelism"
            assert found[model].count(message) == len(layers), found[model]
            assert all(f"{layer} {message}" in found[model] for layer in layers), found[model]
