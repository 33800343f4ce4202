"""Block-sparse attention in training: schedules, shared key heads, torch.compile, and layouts torn by tensor parallelism.

The model is examples/sparse_attention.py, which `test_own_models.py` compares with plain PyTorch over the axes. fp64 to
1e-9: the order of sums is all that differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.configs import share, topology_of
from tests.harness import run_ranks
from tests.layers.test_own_models import (
    Result,
    alone,
    batch,
    compare,
    configuration,
    engine_of,
    example,
    train,
)
from threed.config import Config
from threed.core import block_patterns
from threed.engine import Engine
from threed.layers import FixedPattern, Slicing, SparseAttention

NAME = "sparse_attention:SparseModel"
ZERO_BUBBLE = {"pp": 2, "schedule": "zb-h1"}
WORLDS: list[dict[str, dict[str, Any]]] = [
    {"parallel": ZERO_BUBBLE},
    {"parallel": ZERO_BUBBLE, "recompute": {"mode": "full"}},
    {"parallel": {"dp": 2}, "zero": {"stage": 2, "resident": 0}},
]
CONTEXTS: list[dict[str, dict[str, Any]]] = [
    {"parallel": {"cp": 2, "cp_heads": 1, "tp": 2, "sequence": False}},
    {"parallel": {"cp": 2, "cp_heads": 2, "pp": 2}, "recompute": {"mode": "full"}},
    {
        "parallel": {"cp": 2, "cp_heads": 1, "pp": 2, "schedule": "zb-h1"},
        "recompute": {"mode": "selective"},
    },
    {"parallel": {"cp": 2, "cp_heads": 1}, "zero": {"stage": 3, "resident": 0}},
]
ONE_KEY_HEAD = {"model": {"kv_heads": 1}}


def train_everywhere(truth: Result, shared: Result) -> None:
    for groups in WORLDS:
        got = train(NAME, configuration(2, **groups))
        if got[2]:
            compare(got, truth, str(groups))
    got = train(
        NAME, configuration(2, **ONE_KEY_HEAD, parallel={"tp": 2, "sequence": True})
    )  # both ranks have the key head
    if got[2]:
        compare(got, shared, "shared key heads")
    _find_torn_layouts(truth)
    _refuse_heads_of_all_ranks()


def train_on_four_ranks(truth: Result, contexts: list[dict[str, dict[str, Any]]]) -> None:
    """The ranks' chunks of three or two positions cut blocks of two positions."""
    for groups in contexts:
        got = train(NAME, configuration(4, **groups))
        if got[2]:
            compare(got, truth, str(groups))


@pytest.mark.parametrize(
    "contexts",
    [CONTEXTS[:3], pytest.param(CONTEXTS[3:], marks=pytest.mark.grid)],
    ids=["some", "others"],
)
def test_context_parallelism(contexts: list[dict[str, dict[str, Any]]]) -> None:
    run_ranks(4, train_on_four_ranks, alone(NAME), contexts)


def _with_heads(heads: Any) -> Engine:
    """An engine at tp 2 whose cores have other heads than the rank."""
    config: Config = configuration(2, parallel={"tp": 2})
    topology = topology_of(1, 2)
    model = example(NAME)(config.model, Slicing(topology.axis("tp"), seed=config.train.seed))
    model.cores = (replace(model.cores[0], heads=heads), model.cores[1])
    return Engine(model, topology, config)


def _find_torn_layouts(truth: Result) -> None:
    """A planted fault: every rank uses the layouts of the first heads. The loss differs."""
    engine = _with_heads((0, 3))
    loss = engine.step(share(batch(0), engine.topology)).loss
    assert loss != pytest.approx(truth[0][0], rel=1e-9, abs=0)


def _refuse_heads_of_all_ranks() -> None:
    engine = _with_heads((0, 6))
    rows = share(batch(0), engine.topology)
    with pytest.raises(ValueError, match=r"heads 0 to 5 for a rank with 3 heads: pass heads=slic"):
        engine.step(rows)


def test_schedules_shared_heads_and_torn_layouts() -> None:
    run_ranks(2, train_everywhere, alone(NAME), train(NAME, configuration(1, **ONE_KEY_HEAD)))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, pytest.param(3, marks=pytest.mark.grid)])
def test_compiled_layers_give_the_same(blocks: int) -> None:
    """Through the backend without code generation: the graph, its operators and their backward."""
    model, run = {"layers": blocks}, {"compile": True, "compile_backend": "aot_eager"}
    want = train(NAME, configuration(model=model))
    compare(train(NAME, configuration(model=model, run=run)), want, "compiled")


def test_logits_do_not_depend_on_later_tokens() -> None:
    engine = engine_of(NAME, configuration())
    tokens = batch(0)["tokens"]
    changed = tokens.clone()
    changed[:, 7:] = 1
    assert not (engine.logits(tokens) - engine.logits(changed))[:, :7].any()


def test_one_core_is_cached_for_all_layers() -> None:
    """Equal patterns of different layers share their lists."""
    block_patterns.layouts.cache_clear()
    parts = mock.Mock(side_effect=block_patterns._parts)
    with mock.patch.object(block_patterns, "_parts", parts):
        for _ in range(3):
            SparseAttention(FixedPattern(block=2)).lists(12, 4)
    assert parts.call_count == 6
