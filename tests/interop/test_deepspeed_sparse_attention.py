"""The key `sparse_attention` of a ds_config. tests/core/test_block_patterns.py compares the layouts with DeepSpeed's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from threed.config import ConfigError
from threed.core.block_patterns import (
    BigBirdPattern,
    BlockPattern,
    DensePattern,
    FixedPattern,
    LongformerPattern,
    VariablePattern,
)
from threed.interop import block_pattern
from threed.interop.deepspeed.config.sparse_attention import MODES
from threed.interop.deepspeed.config.translate import translate

BOTH: dict[str, Any] = {"block": 16, "attention": "bidirectional"}
ALL: dict[str, dict[str, Any]] = {
    "dense": {"attention": "unidirectional"},
    "fixed": {
        "different_layout_per_head": True, "num_local_blocks": 8, "num_global_blocks": 2,
        "attention": "bidirectional", "horizontal_global_attention": True, "num_different_global_patterns": 4,
    },
    "variable": {
        "different_layout_per_head": True, "num_random_blocks": 2, "local_window_blocks": [1, 4],
        "global_block_indices": [0, 5], "global_block_end_indices": [1, 7], "attention": "bidirectional",
        "horizontal_global_attention": True,
    },
    "bigbird": {
        "different_layout_per_head": True, "num_random_blocks": 2, "num_sliding_window_blocks": 5,
        "num_global_blocks": 2, "attention": "unidirectional",
    },
    "bslongformer": {
        "num_sliding_window_blocks": 5, "global_block_indices": [0, 5], "global_block_end_indices": [1, 7],
        "attention": "unidirectional",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "pattern"),
    [
        ("dense", DensePattern(**BOTH)),
        ("fixed", FixedPattern(**BOTH)),
        ("variable", VariablePattern(**BOTH)),
        ("bigbird", BigBirdPattern(**BOTH, num_random_blocks=0)),
        ("bslongformer", LongformerPattern(**BOTH)),
    ],
)
def test_defaults_are_those_of_deepspeed(mode: str, pattern: BlockPattern) -> None:
    assert block_pattern({"sparse_attention": {"mode": mode}}) == pattern


def own_keys(mode: str) -> set[str]:
    return {field.name for field in dataclasses.fields(MODES[mode])}


@pytest.mark.parametrize("mode", ALL)
def test_every_key_of_a_mode_is_read(mode: str, tmp_path: Path) -> None:
    keys = ALL[mode]
    assert {*keys} >= own_keys(mode) - {"block", "seed", "different_layout_per_head"}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"sparse_attention": {"mode": mode, "block": 32, **keys}}))
    pattern = block_pattern(path)
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in keys.items()}
    assert pattern == MODES[mode](block=32, **values)
    assert mode == "dense" or pattern != MODES[mode](block=32)


def test_no_mode_is_fixed() -> None:
    assert block_pattern({"sparse_attention": {}}) == FixedPattern(**BOTH)


@pytest.mark.parametrize("mode", ALL)
def test_keys_of_other_modes_are_refused(mode: str) -> None:
    own = own_keys(mode)
    others = {key: value for keys in ALL.values() for key, value in keys.items() if key not in own}
    with pytest.raises(ConfigError) as error:
        block_pattern({"sparse_attention": {"mode": mode, **others}})
    for key in others:
        assert f"sparse_attention.{key}: no such key" in str(error.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, 'sparse_attention: not given: set it to an object such as {"mode": "fixed"}'),
        ({"mode": "sparse"}, 'mode: "sparse" is not known: use dense, fixed'),
        ({"blok": 3}, r"blok: no such key \(did you mean sparse_attention.block\?\)"),
        ({"block": 0}, "block: 0 must be"),
        ({"attention": "causal"}, "use unidirectional or bidirectional"),
        ({"num_global_blocks": 3}, "3 does not divide num_local_blocks 4"),
        ({"mode": "variable", "local_window_blocks": 4}, "local_window_blocks: 4 must be"),
        ({"mode": "variable", "local_window_blocks": []}, "local_window_blocks"),
    ],
)
def test_a_wrong_group_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        block_pattern({"sparse_attention": config} if config else {})


def test_a_wrapped_module_refuses_the_key_and_names_the_way() -> None:
    keys = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    translate(keys, 1)
    translate({**keys, "sparse_attention": None}, 1)
    with pytest.raises(ConfigError) as error:
        translate({**keys, "sparse_attention": {"mode": "fixed"}}, 1)
    assert "attention of a wrapped module cannot be replaced" in str(error.value)
    assert "layers.SparseAttention(threed.interop.block_pattern(ds_config))" in str(error.value)
