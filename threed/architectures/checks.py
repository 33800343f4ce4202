"""What a model cannot be, by its architecture: keys that it does not have, sizes that do not fit, and exports."""

from __future__ import annotations

from collections.abc import Iterator

from threed import architectures
from threed.config import ModelConfig, key_name
from threed.schema import written


def find_model_problems(model: ModelConfig) -> Iterator[str]:
    """What of a model, as it was said or resolved, its architecture does not have, or cannot be: each with its fix."""
    yield from _check_pairs(model)
    yield from _check_keys(model)
    yield from _check_positions(model)


def _check_pairs(model: ModelConfig) -> Iterator[str]:
    share = model.partial_rotary_factor
    turned = int((model.head_dim or model.hidden // model.heads) * share)
    known = model.head_dim or model.hidden % model.heads == 0
    if architectures.find(model.arch).learned_positions or not known or turned % 2 == 0:
        return
    if share == 1.0:
        yield f"heads of size {turned}: rotary positions turn pairs; use --model.head-dim {turned + 1}"
    else:
        given = f"--model.partial-rotary-factor {share:g} turns {turned} numbers of a head"
        yield f"{given}: rotary positions turn pairs; use another share"


def _check_keys(model: ModelConfig) -> Iterator[str]:
    """Keys that were said and that the architecture does not have."""
    record, records = architectures.find(model.arch), architectures.REGISTERED.values()
    for key in sorted(frozenset[str]().union(*(other.takes for other in records)) - record.takes):
        value, own = getattr(model, key), record.resolved(dict(model) | {key: None}).get(key)
        if value not in (ModelConfig.model_fields[key].default, own):
            having = " or ".join(other.name for other in records if key in other.takes)
            yield f"--model.{key_name(key)} {written(value)} is for --model.arch {having}: leave it out with {model.arch}"


def _check_positions(model: ModelConfig) -> Iterator[str]:
    positions, d = model.positions or model.seq, model.head_dim or model.hidden // model.heads
    if positions < model.seq:
        yield f"--model.positions {positions} is less than --model.seq {model.seq}: use {model.seq} or more"
    if (scaling := model.rope_scaling) is None:
        return
    pairs = int(d * model.partial_rotary_factor) // 2
    for name in ("short_factor", "long_factor"):
        if (numbers := getattr(scaling, name)) is not None and len(numbers) != pairs:
            given = f"--model.rope-scaling with {len(numbers)} numbers of {key_name(name)}"
            yield f"{given}: a head turns {pairs} pairs; give {pairs} numbers"


def export_limits(model: ModelConfig) -> Iterator[str]:
    """What of a model, resolved or not, the Hugging Face layout of its architecture cannot express."""
    keys = dict(model)
    yield from architectures.layout_of(keys).limits(keys)
