"""Reads the key `sparse_attention` of a ds_config.

core = layers.SparseAttention(block_pattern("ds_config.json"), heads=slicing.heads(heads))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.config import ConfigError
from threed.core.block_patterns import (
    BigBirdPattern,
    BlockPattern,
    DensePattern,
    FixedPattern,
    LongformerPattern,
    VariablePattern,
)
from threed.interop.deepspeed.config.keys import SparseAttention
from threed.interop.deepspeed.config.reader import Reader, read

GROUP = "sparse_attention"
GLOBALS = "global_block_indices global_block_end_indices"
# mode -> its pattern, and its keys in addition to `COMMON`
MODES: Mapping[str, tuple[type[BlockPattern], str]] = {
    "dense": (DensePattern, ""),
    "fixed": (
        FixedPattern,
        "num_local_blocks num_global_blocks horizontal_global_attention num_different_global_patterns",
    ),
    "variable": (
        VariablePattern,
        f"num_random_blocks local_window_blocks {GLOBALS} horizontal_global_attention",
    ),
    "bigbird": (BigBirdPattern, "num_random_blocks num_sliding_window_blocks num_global_blocks"),
    "bslongformer": (LongformerPattern, f"num_sliding_window_blocks {GLOBALS}"),
}
COMMON = {"mode", "block", "attention", "different_layout_per_head"}


def block_pattern(config: str | Path | Mapping[str, Any]) -> BlockPattern:
    """Returns the pattern of a ds_config's key `sparse_attention`, for `layers.SparseAttention`.

    Keys and defaults are those of DeepSpeed. In particular, attention is bidirectional unless the
    key `attention` is "unidirectional". DeepSpeed draws other random blocks in every run; here they
    depend only on the pattern.

    Args:
        config: a ds_config, or the path of a ds_config.json.

    Raises:
        ConfigError: if the key is missing or invalid; the message lists all problems.
    """
    section = read(config).get(GROUP)
    if section is None:
        raise ConfigError([f'{GROUP}: not given: set it to an object such as {{"mode": "fixed"}}'])
    reader = Reader({}, {})
    found = reader.read({GROUP: section}).sparse_attention
    kind, names = MODES[found.mode]
    own = names.split()
    reader.refuse_keys(found, GROUP, SparseAttention.model_fields.keys() - COMMON - set(own))
    if reader.problems:
        raise ConfigError([f"{key}: {text}" for key, text in reader.problems.items()])
    # The other patterns have the same blocks for all heads, in DeepSpeed too.
    per_head = {"different_layout_per_head"} if found.mode not in ("dense", "bslongformer") else ()
    values = found.model_dump(include={"block", "attention", *per_head, *own})
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError([f"{GROUP}: {error}"]) from None
