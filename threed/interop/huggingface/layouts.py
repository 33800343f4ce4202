"""Tensors by Hugging Face's names and by ours: the rules of an architecture (`threed.architectures`) for one model.

    for entry in entries(model):                             one for each of their tensors, block by block
        theirs = entry.theirs(source_of_ours)                and back: entry.part(name, theirs)
    state_dict_to_hf(engine.full_state_dict(), config.model)                    and back: hf_to_state_dict
    model = model_of(json.loads(text))                       a config.json as keys of the model, and back: config_of

A rule maps one tensor of theirs to tensors of ours, stacked along dimension 0, perhaps transposed. Names, shapes, parts
and both directions follow from it. Rotary positions need no permutation: ours are half-split, as theirs are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from threed import architectures
from threed.architectures import spelling
from threed.architectures.record import Architecture, Rule
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import (
    LazyTensor,
    MemoryTensor,
    Shape,
    Transposed,
    concatenate,
    read_all,
    rows,
)
from threed.checks import find_model_problems
from threed.config import ModelConfig
from threed.parse import plain
from threed.resolution import resolve_model
from threed.schema import ValidationError, reason

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """A rule at one block of one model: their `name`, and ours as (name, shape) pairs; held: whether we have those."""

    rule: Rule
    name: str
    ours: tuple[tuple[str, Shape], ...]
    held: bool

    @property
    def shape(self) -> Shape:
        """The shape of their tensor."""
        first = self.ours[0][1]
        shape = (sum(shape[0] for _, shape in self.ours), *first[1:])
        return shape[::-1] if self.rule.transposed else shape

    def split(self, theirs: Tensor) -> dict[str, Tensor]:
        """Returns ours, from their tensor; CheckpointError if our model has no tensor for its values."""
        if not self.held:
            if theirs.count_nonzero():
                raise CheckpointError(
                    f"{self.name} is not zero, and the model has no {self.ours[0][0]}"
                )
            return {}
        whole = MemoryTensor(theirs)
        return {name: read_all(self.part(name, whole)).to(theirs.device) for name, _ in self.ours}

    def theirs(self, ours: Callable[[str], LazyTensor]) -> LazyTensor:
        """Returns their tensor, from ours by name; fp32 zeros if we have none."""
        if not self.held:
            return MemoryTensor(torch.zeros(()).expand(self.shape))
        return self._turned(concatenate([ours(name) for name, _ in self.ours]))

    def part(self, name: str, theirs: LazyTensor) -> LazyTensor:
        """Returns our tensor `name`, from theirs. Raises KeyError if it is no part of theirs."""
        firsts = accumulate((shape[0] for _, shape in self.ours), initial=0)
        at = {
            ours: (first, first + shape[0])
            for first, (ours, shape) in zip(firsts, self.ours, strict=False)
        }
        return rows(self._turned(theirs), at[name])

    def _turned(self, tensor: LazyTensor) -> LazyTensor:
        return Transposed(tensor) if self.rule.transposed else tensor


def entries(model: ModelConfig) -> list[Entry]:
    """Returns all tensors of a model's Hugging Face layout, block by block; CheckpointError if it has no layout."""
    model = resolve_model(model)
    keys, record = dict(model), model.layout
    if limits := list(record.limits(keys)):
        raise CheckpointError(
            f"the Hugging Face layout of {record.title} cannot express {'; nor '.join(limits)}"
        )
    has, letters = record.properties(keys), _letters(model)
    out = []
    for blocked, rules in groupby(record.rules, lambda rule: "{i}" in rule.hf):
        block = list(rules)
        out += [
            _at(rule, i, letters, has)
            for i in range(model.layers if blocked else 1)
            for rule in block
        ]
    return [entry for entry in out if entry.held or entry.rule.zeros]


def _at(rule: Rule, block: int, letters: Mapping[str, int], has: Mapping[str, bool]) -> Entry:
    ours = [(name.replace("{i}", str(block)), _shape(shape, letters)) for name, shape in rule.ours]
    return Entry(rule, rule.hf.replace("{i}", str(block)), tuple(ours), has[rule.needs])


def _letters(m: ModelConfig) -> dict[str, int]:
    heads, d = m.heads, m.head_dim or m.hidden // m.heads
    k, f, v, p = m.kv_heads or heads, m.ffn or 0, m.vocab or 0, m.positions or m.seq
    return {"p": p, "h": m.hidden, "a": heads, "k": k, "d": d, "f": f, "v": v}


def _shape(words: str, letters: Mapping[str, int]) -> Shape:
    return tuple(math.prod(letters[letter] for letter in word) for word in words.split())


def check_names(found: Mapping[str, Shape], wanted: Mapping[str, Shape], what: str) -> None:
    """Raises CheckpointError for missing, unexpected and misshaped tensors, ten of each by name."""
    if problems := name_problems(found, wanted):
        raise CheckpointError(
            f"{what} does not fit the model's configuration: {'; '.join(problems)}"
        )


def name_problems(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[str]:
    """Returns which tensors are missing, unexpected and misshaped, ten of each by name."""
    both = [name for name in wanted if name in found and tuple(found[name]) != wanted[name]]
    kinds = (
        [f"{name} is missing" for name in wanted if name not in found],
        [f"{name} is unexpected" for name in found if name not in wanted],
        [f"{name} is {list(found[name])}, not {list(wanted[name])}" for name in both],
    )
    return [
        text
        for kind in kinds
        for text in [*kind[:10], *([f"and {len(kind) - 10} more"] if kind[10:] else [])]
    ]


def our_shapes(table: Sequence[Entry]) -> dict[str, Shape]:
    """Returns the names and shapes of all our tensors in a table."""
    return dict(pair for entry in table if entry.held for pair in entry.ours)


def state_dict_to_hf(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Maps weights by our global names to Hugging Face's. CheckpointError if names or shapes are not the model's."""
    table = entries(model)
    check_names(
        {name: tuple(w.shape) for name, w in weights.items()}, our_shapes(table), "the state dict"
    )
    device = next(iter(weights.values())).device
    ours = {name: MemoryTensor(values) for name, values in weights.items()}
    return {entry.name: read_all(entry.theirs(ours.__getitem__)).to(device) for entry in table}


def hf_to_state_dict(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Maps weights by Hugging Face's names to ours: the inverse of `state_dict_to_hf`."""
    table = entries(model)
    embedding, head = weights.get(table[0].name), weights.get(HEAD)
    if model.tied and head is not None and embedding is not None and torch.equal(head, embedding):
        weights = {name: w for name, w in weights.items() if name != HEAD}
    wanted = {entry.name: entry.shape for entry in table}
    check_names(
        {name: tuple(w.shape) for name, w in weights.items()}, wanted, "the Hugging Face state dict"
    )
    return {
        name: part for entry in table for name, part in entry.split(weights[entry.name]).items()
    }


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the model of a Hugging Face configuration; its `seq` is the longest that it names.

    Raises CheckpointError with every key that is missing, unknown, or says what cannot be expressed here.
    """
    try:
        record = architectures.of_type(config.get("model_type"))
        model = resolve_model(_validated(record, spelling.read(record, config)))
        if limits := list(model.layout.limits(dict(model))):
            raise ValueError(f"no {record.model_type} has {'; nor '.join(limits)}")
        if problems := list(find_model_problems(model)):
            raise ValueError("; ".join(problems))
        return model
    except ValueError as error:
        said = plain(" ".join(str(error).split()), 4000)
        raise CheckpointError(f"the Hugging Face configuration: {said}") from None


def _validated(record: Architecture, keys: Mapping[str, Any]) -> ModelConfig:
    """Returns the model of these keys; ValueError with every value that is none of its key, by their name of it."""
    try:
        return ModelConfig.model_validate(keys)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            ours = str((*detail["loc"], "model")[0])
            theirs = spelling.named(record, ours)
            beside = f" ({ours})" if theirs != ours and ours != "seq" else ""
            value = json.dumps(detail["input"], default=str)
            short = value if len(value) <= 60 else f"{value[:57]}..."
            lines.append(f"{theirs} {short}{beside}: {reason(detail)}")
        raise ValueError("; ".join(dict.fromkeys(lines))) from None


def config_of(model: ModelConfig) -> dict[str, Any]:
    """Returns the Hugging Face configuration of a model, without ids of tokens and dtype."""
    model = resolve_model(model)
    return spelling.write(model.layout, dict(model))
