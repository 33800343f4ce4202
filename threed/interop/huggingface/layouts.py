"""Conversion between native and Hugging Face tensors and configurations of a model.

    for entry in entries(model):                        # one per Hugging Face tensor
        tensor = entry.to_hf(native_tensor_by_name)     # inverse: entry.native_part(name, tensor)
    state_dict_to_hf(engine.full_state_dict(), model)   # inverse: hf_to_state_dict
    model = model_of(json.loads(text))                  # from a config.json; inverse: config_of

Each architecture has a list of rules (`threed.config.architectures`). A rule describes one Hugging
Face tensor: which native tensors are concatenated along dimension 0, and whether the result is
transposed. Rules determine the names, the shapes and the conversions in both directions. The
weights of queries and keys need no permutation, because both layouts use the half-split form of
rotary positions.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import (
    EveryNth,
    Interleaved,
    LazyTensor,
    MemoryTensor,
    Shape,
    Slice,
    Stacked,
    Transposed,
    concatenate,
    read_all,
    rows,
)
from threed.config import ModelConfig, architectures
from threed.config.architectures import spelling
from threed.config.architectures.record import Architecture, Rule
from threed.config.checks import find_model_problems
from threed.config.resolution import resolve_model
from threed.config.schema import ValidationError, reason
from threed.core.messages import counted
from threed.core.parse import plain

HEAD = "lm_head.weight"
SEQ = 256  # default sequence length in tokens, for models with at least 256 positions


@dataclass(frozen=True)
class Entry:
    """A Hugging Face tensor of a model, and the native tensors that it consists of.

    An entry is the application of a rule to one block of the model, or to the tensors outside of
    the blocks.

    Attributes:
        rule: the rule of the architecture that describes the Hugging Face tensor.
        name: the name of the Hugging Face tensor.
        native: (name, shape) of each native tensor, in the order of their concatenation; if the
            Hugging Face tensor is a stack, expert by expert.
        in_model: whether the model has the native tensors. If not, the Hugging Face tensor is
            filled with zeros.
        live: the parameter of the model in memory that contains the tensor (see `Rule.live`).
    """

    rule: Rule
    name: str
    native: tuple[tuple[str, Shape], ...]
    in_model: bool
    live: str

    @property
    def shape(self) -> Shape:
        """The shape of the Hugging Face tensor."""
        shapes = [shape for _, shape in self.native[: self._each]]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        shape = shape[::-1] if self.rule.transposed else shape
        return (len(self.native) // self._each, *shape) if self.rule.stacked else shape

    @property
    def _each(self) -> int:
        """The number of native tensors that are concatenated."""
        return len(self.rule.native)

    def split(self, hf: Tensor) -> dict[str, Tensor]:
        """Splits a Hugging Face tensor `hf`, and returns the native tensors by name.

        If the model does not have the native tensors, all values of `hf` must be zero, and the
        result is an empty dict.

        Raises:
            CheckpointError: if the model does not have the native tensors, and a value of `hf` is
                not zero.
        """
        if not self.in_model:
            if hf.count_nonzero():
                raise CheckpointError(
                    f"{self.name} is not zero, but the model has no {self.native[0][0]}"
                )
            return {}
        lazy = MemoryTensor(hf)
        return {
            name: read_all(self.native_part(name, lazy)).to(hf.device) for name, _ in self.native
        }

    def to_hf(self, native: Callable[[str], LazyTensor]) -> LazyTensor:
        """Returns the Hugging Face tensor of this entry, composed of its native tensors.

        If the model does not have the native tensors, the result consists of fp32 zeros.

        Args:
            native: function that returns the native tensor of a given name.
        """
        if not self.in_model:
            return MemoryTensor(torch.zeros(()).expand(self.shape))
        parts = [native(name) for name, _ in self.native]
        join = Interleaved if self.rule.interleaved else concatenate
        experts = [
            self._transposed(join(parts[i : i + self._each]))
            for i in range(0, len(parts), self._each)
        ]
        return Stacked(experts) if self.rule.stacked else experts[0]

    def native_part(self, name: str, hf: LazyTensor) -> LazyTensor:
        """Returns the native tensor `name`, which is a part of the Hugging Face tensor `hf`.

        Raises KeyError if this Hugging Face tensor does not contain a native tensor of this name.
        """
        expert, part = divmod(self._numbers[name], self._each)
        if self.rule.stacked:
            zeros = (0,) * (len(self.shape) - 1)
            hf = Slice(hf, (expert, *zeros), self.shape[1:])
        hf = self._transposed(hf)
        if self.rule.interleaved:
            return EveryNth(hf, part, self._each)
        sizes = [shape[0] for _, shape in self.native[: part + 1]]
        return rows(hf, (sum(sizes[:-1]), sum(sizes)))

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        """The place of each native tensor in `native`, by name."""
        return {name: number for number, (name, _) in enumerate(self.native)}

    def _transposed(self, tensor: LazyTensor) -> LazyTensor:
        return Transposed(tensor) if self.rule.transposed else tensor


def entries(model: ModelConfig) -> list[Entry]:
    """Returns one entry per Hugging Face tensor of a model, block by block.

    Raises:
        CheckpointError: if the layout cannot express the model.
    """
    model = resolve_model(model)
    keys, record = dict(model), model.layout
    if limits := list(record.inexpressible(keys)):
        raise CheckpointError(
            f"the Hugging Face layout of {record.title} cannot express {'; nor '.join(limits)}"
        )
    letters, out = _letters(model), []
    for blocked, rules in groupby(record.rules, lambda rule: "{i}" in rule.hf):
        block = list(rules)
        for i in range(model.layers + model.mtp_depth if blocked else 1):
            has = record.properties(keys, i)
            out += [_at(rule, i, e, letters, has) for e, rule in _by_expert(block, model.experts)]
    return [entry for entry in out if entry.in_model or entry.rule.zeros]


def _by_expert(rules: Sequence[Rule], experts: int | None) -> Iterator[tuple[int, Rule]]:
    """Yields (number of the expert, rule): successive rules of experts, for one expert after another."""
    for repeated, group in groupby(rules, lambda rule: "{e}" in rule.hf):
        same = list(group)
        yield from ((e, rule) for e in range(experts or 0 if repeated else 1) for rule in same)


def _at(
    rule: Rule, block: int, expert: int, letters: Mapping[str, int], has: Mapping[str, bool]
) -> Entry:
    def name(pattern: str, number: int = expert) -> str:
        return pattern.replace("{i}", str(block)).replace("{e}", str(number))

    experts = range(letters["e"]) if rule.stacked else [expert]
    native = [
        (name(pattern, number), _shape(shape, letters))
        for number in experts
        for pattern, shape in rule.native
    ]
    hf, live = name(rule.hf), name(rule.live or rule.hf)
    return Entry(rule, hf, tuple(native), has[rule.needs], live)


def _letters(m: ModelConfig) -> dict[str, int]:
    heads, d = m.heads, m.head_dim or m.hidden // m.heads
    k, f, v, p = m.kv_heads or heads, m.ffn or 0, m.vocab or 0, m.positions or m.seq
    sizes = {"p": p, "h": m.hidden, "j": 2 * m.hidden, "a": heads, "k": k, "d": d, "f": f, "v": v}
    sizes |= {
        "e": m.experts or 0,
        "x": m.expert_ffn or 0,
        "s": m.shared_experts * (m.expert_ffn or 0),
    }
    nope, rope, value, rank = m.nope_dim or 0, m.rope_dim or 0, m.value_dim or 0, m.kv_rank or 0
    latent = {"q": nope + rope, "w": value, "u": nope + value, "r": m.query_rank or 0, "c": rank}
    return {**sizes, **latent, "g": rank + rope}


def _shape(words: str, letters: Mapping[str, int]) -> Shape:
    return tuple(math.prod(letters[letter] for letter in word) for word in words.split())


def too_large(model: ModelConfig, tensors: int) -> str:
    """Returns the size of a model if it has more layers or experts than tensors, else "".

    It is called before the table of all tensors of the model is built, because this table would
    fill the memory if a malformed configuration had a huge number of layers or experts.

    Args:
        model: the resolved model configuration.
        tensors: number of tensors in the files.
    """
    keys, blocks = dict(model), model.layers + model.mtp_depth
    few = range(min(blocks, tensors + 1))
    experts = (model.experts or 0) * sum(model.record.has_experts(keys, i) for i in few)
    if max(blocks, experts) <= tensors:
        return ""
    layers = counted(blocks, "layer")
    return f"{layers} with {counted(model.experts, 'expert')}" if model.experts else layers


def check_names(found: Mapping[str, Shape], wanted: Mapping[str, Shape], what: str) -> None:
    """Raises CheckpointError if tensors are missing, unexpected, or have wrong shapes.

    The message lists up to ten tensors of each kind.

    Args:
        found: the shapes of the existing tensors, by name.
        wanted: the required shapes, by name.
        what: the source of the tensors for the message, such as the path of a checkpoint.
    """
    if problems := name_problems(found, wanted):
        raise CheckpointError(
            f"{what} does not fit the model's configuration: {'; '.join(problems)}"
        )


def name_problems(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> list[str]:
    """Returns messages for tensors that are missing, unexpected, or of a wrong shape.

    There are up to ten messages of each kind. A further message has the number of omitted messages.

    Args:
        found: the shapes of the existing tensors, by name.
        wanted: the required shapes, by name.
    """
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


def native_shapes(table: Sequence[Entry]) -> dict[str, Shape]:
    """Returns the shapes of a model's native tensors, by name.

    Args:
        table: the result of `entries`. Entries whose native tensors the model lacks are skipped.
    """
    return dict(pair for entry in table if entry.in_model for pair in entry.native)


def state_dict_to_hf(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Converts a native state dict to Hugging Face's names and layout.

    Args:
        weights: full (unsharded) weights, by threed's global name.
        model: the model configuration.

    Raises:
        CheckpointError: if the names or shapes of `weights` do not match the model.
    """
    table = entries(model)
    check_names(
        {name: tuple(w.shape) for name, w in weights.items()},
        native_shapes(table),
        "the state dict",
    )
    device = next(iter(weights.values())).device
    native = {name: MemoryTensor(values) for name, values in weights.items()}
    return {entry.name: read_all(entry.to_hf(native.__getitem__)).to(device) for entry in table}


def hf_to_state_dict(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Converts a Hugging Face state dict to threed's names and layout.

    This is the inverse of `state_dict_to_hf`.
    """
    table = entries(model)
    embedding, head = weights.get(table[0].name), weights.get(HEAD)
    if model.tied and head is not None and embedding is not None and torch.equal(head, embedding):
        weights = {name: w for name, w in weights.items() if name != HEAD}
    table = [entry for entry in table if entry.name in weights or not entry.rule.copy]
    wanted = {entry.name: entry.shape for entry in table}
    check_names(
        {name: tuple(w.shape) for name, w in weights.items()}, wanted, "the Hugging Face state dict"
    )
    found: dict[str, Tensor] = {}
    for entry in sorted(table, key=lambda entry: entry.rule.copy):
        for name, part in entry.split(weights[entry.name]).items():
            first = found.setdefault(name, part)
            if entry.rule.copy and not torch.equal(first, part):
                raise CheckpointError(unequal(entry, table))
    return found


def unequal(entry: Entry, table: Sequence[Entry]) -> str:
    """Returns the message for a copy (`Rule.copy`) with other values than the original."""
    originals = (other for other in table if not other.rule.copy)
    first = next(other for other in originals if other.native == entry.native)
    return f"{entry.name} differs from {first.name}, but the model shares one weight for both"


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the model configuration that a Hugging Face configuration describes.

    The sequence length `seq` is set to the number of positions of the model.

    Args:
        config: the parsed content of config.json.

    Raises:
        CheckpointError: if a key is missing, unknown or has an unsupported value; the message lists
            all such keys.
    """
    try:
        record = architectures.of_type(config.get("model_type"))
        model = resolve_model(_validated(record, spelling.read(record, config)))
        if limits := list(model.layout.inexpressible(dict(model))):
            raise ValueError(f"a {record.model_type} model cannot have {'; nor '.join(limits)}")
        if problems := list(find_model_problems(model)):
            raise ValueError("; ".join(problems))
        return model
    except ValueError as error:
        text = plain(" ".join(str(error).split()), 4000)
        raise CheckpointError(f"the Hugging Face configuration: {text}") from None


def _validated(record: Architecture, keys: Mapping[str, Any]) -> ModelConfig:
    """Returns the model configuration with the values in `keys`.

    Raises ValueError if values are invalid. The message lists all invalid values under the names of
    Hugging Face's keys.
    """
    try:
        return ModelConfig.model_validate(keys)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            native = str((*detail["loc"], "model")[0])
            hf = spelling.hf_key(record, native)
            suffix = f" ({native})" if hf != native and native != "seq" else ""
            value = json.dumps(detail["input"], default=str)
            short = value if len(value) <= 60 else f"{value[:57]}..."
            lines.append(f"{hf} {short}{suffix}: {reason(detail)}")
        raise ValueError("; ".join(dict.fromkeys(lines))) from None


def config_of(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of config.json for a model, without special token ids and dtype."""
    model = resolve_model(model)
    return spelling.write(model.layout, dict(model))


def default_seq(model: ModelConfig) -> int:
    """Returns the default sequence length, in tokens, for a pretrained model.

    The default is 256, or the model's number of positions if that is smaller.
    """
    return min(SEQ, model.positions or model.seq)
