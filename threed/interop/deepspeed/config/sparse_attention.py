"""Reads the key `sparse_attention` of a ds_config.

core = layers.SparseAttention(block_pattern("ds_config.json"), heads=slicing.core_heads(heads))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from threed.config import ConfigError
from threed.core import block_patterns
from threed.interop.deepspeed.config.keys import SparseAttention
from threed.interop.deepspeed.config.reader import Reader, read

GROUP = "sparse_attention"
MODES: Mapping[str, type[block_patterns.BlockPattern]] = {
    "dense": block_patterns.DensePattern,
    "fixed": block_patterns.FixedPattern,
    "variable": block_patterns.VariablePattern,
    "bigbird": block_patterns.BigBirdPattern,
    "bslongformer": block_patterns.LongformerPattern,
}


def block_pattern(config: str | Path | Mapping[str, Any]) -> block_patterns.BlockPattern:
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
    pattern = MODES[found.mode]
    own = {field.name for field in fields(pattern)}
    reader.refuse_keys(found, GROUP, SparseAttention.model_fields.keys() - own - {"mode"})
    if reader.problems:
        raise ConfigError([f"{key}: {text}" for key, text in reader.problems.items()])
    try:
        return pattern(**found.model_dump(include=own))
    except ValueError as error:
        raise ConfigError([f"{GROUP}: {error}"]) from None
