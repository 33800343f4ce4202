"""Hugging Face layouts: one table an architecture maps their tensors to ours; and the export.

    export_hf(Path("runs/gpt/checkpoints/step-200"), Path("runs/gpt/hf"), tokenizer)     # from a native checkpoint
    state_dict_to_hf(engine.full_state_dict(), config.model)                             # and hf_to_state_dict back

A rule maps one tensor of theirs to tensors of ours, stacked along dimension 0, perhaps transposed. Names, shapes and
both directions follow from it. Rotary positions need no permutation: ours are half-split, as theirs are.

Export, in phases: check the checkpoint and every name and shape -> plan shards from shapes -> stream one tensor at a
time -> configuration and tokenizer -> rename the folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.atomic import building_place, publish, write_text
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError, begin, stream_tensors
from threed.checks import export_limits
from threed.config import Config, ModelConfig, resolve
from threed.data.tokenizer import Tokenizer
from threed.precision import DTYPES

SHARD_BYTES = 5_000_000_000
Shape = tuple[int, ...]

# ------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """One tensor of a Hugging Face layout: ours, as (name, shape) pairs, stacked along dimension 0.

    {i} in a name is the number of the block. A shape's words are dimensions, each a product of the legend's letters:
    "ad h" is [a·d h]. transposed: theirs is [in out]. needs: the property of the model without which we have no such
    tensor. zeros: without it their layout has the tensor, filled with zeros.
    """

    hf: str
    ours: tuple[tuple[str, str], ...]
    transposed: bool = False
    needs: str = ""
    zeros: bool = False


def _linear(hf: str, outputs: Mapping[str, str], inputs: str, *, conv1d: bool = False) -> tuple[Rule, Rule]:
    """Returns the rules of a linear layer; conv1d: GPT-2's, which is transposed and always has a bias."""
    weights = tuple((f"{name}.weight", f"{out} {inputs}") for name, out in outputs.items())
    biases = tuple((f"{name}.bias", out) for name, out in outputs.items())
    return Rule(f"{hf}.weight", weights, conv1d), Rule(f"{hf}.bias", biases, needs="bias", zeros=conv1d)


def _one(hf: str, ours: str, shape: str, needs: str = "") -> Rule:
    return Rule(hf, ((ours, shape),), needs=needs)


_H, _L, _B = "transformer.h.{i}", "model.layers.{i}", "blocks.{i}"
_A = f"{_B}.attention"

GPT2_RULES = (
    _one("transformer.wte.weight", "embedding.word.weight", "v h"),
    _one("transformer.wpe.weight", "embedding.position.weight", "s h"),
    _one(f"{_H}.ln_1.weight", f"{_B}.attention_norm.weight", "h"),
    _one(f"{_H}.ln_1.bias", f"{_B}.attention_norm.bias", "h"),
    *_linear(f"{_H}.attn.c_attn", {f"{_A}.query": "ad", f"{_A}.key": "kd", f"{_A}.value": "kd"}, "h", conv1d=True),
    *_linear(f"{_H}.attn.c_proj", {f"{_A}.out": "h"}, "ad", conv1d=True),
    _one(f"{_H}.ln_2.weight", f"{_B}.mlp_norm.weight", "h"),
    _one(f"{_H}.ln_2.bias", f"{_B}.mlp_norm.bias", "h"),
    *_linear(f"{_H}.mlp.c_fc", {f"{_B}.mlp.up": "f"}, "h", conv1d=True),
    *_linear(f"{_H}.mlp.c_proj", {f"{_B}.mlp.down": "h"}, "f", conv1d=True),
    _one("transformer.ln_f.weight", "head.norm.weight", "h"),
    _one("transformer.ln_f.bias", "head.norm.bias", "h"),
    _one("lm_head.weight", "head.weight", "v h", "untied"),
)

LLAMA_RULES = (
    _one("model.embed_tokens.weight", "embedding.word.weight", "v h"),
    _one(f"{_L}.input_layernorm.weight", f"{_B}.attention_norm.weight", "h"),
    *_linear(f"{_L}.self_attn.q_proj", {f"{_A}.query": "ad"}, "h"),
    *_linear(f"{_L}.self_attn.k_proj", {f"{_A}.key": "kd"}, "h"),
    *_linear(f"{_L}.self_attn.v_proj", {f"{_A}.value": "kd"}, "h"),
    *_linear(f"{_L}.self_attn.o_proj", {f"{_A}.out": "h"}, "ad"),
    _one(f"{_L}.self_attn.q_norm.weight", f"{_A}.query_norm.weight", "d", "qk_norm"),
    _one(f"{_L}.self_attn.k_norm.weight", f"{_A}.key_norm.weight", "d", "qk_norm"),
    _one(f"{_L}.post_attention_layernorm.weight", f"{_B}.mlp_norm.weight", "h"),
    *_linear(f"{_L}.mlp.gate_proj", {f"{_B}.mlp.gate": "f"}, "h"),
    *_linear(f"{_L}.mlp.up_proj", {f"{_B}.mlp.up": "f"}, "h"),
    *_linear(f"{_L}.mlp.down_proj", {f"{_B}.mlp.down": "h"}, "f"),
    _one("model.norm.weight", "head.norm.weight", "h"),
    _one("lm_head.weight", "head.weight", "v h", "untied"),
)

# ---------------------------------------------------------------------------------------------------- configurations


def _gpt2_config(m: ModelConfig) -> dict[str, Any]:
    """Returns GPT-2's configuration; our dropout is on branches and embedding, not on attention probabilities."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": m.hidden, "n_layer": m.layers,
        "n_head": m.heads, "n_inner": m.ffn, "n_positions": m.seq, "activation_function": "gelu_new",
        "layer_norm_epsilon": m.norm_eps, "resid_pdrop": m.dropout, "embd_pdrop": m.dropout, "attn_pdrop": 0.0,
    }  # fmt: skip


def _llama_config(m: ModelConfig) -> dict[str, Any]:
    """Returns Llama's or Qwen3's configuration; the base of the rotary angles as transformers 4 and as 5 spells it."""
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": bool(m.bias)}
    if m.qk_norm:
        kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return kind | {
        "hidden_size": m.hidden, "intermediate_size": m.ffn, "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads, "num_key_value_heads": m.kv_heads, "head_dim": m.head_dim, "hidden_act": "silu",
        "max_position_embeddings": m.seq, "rms_norm_eps": m.norm_eps, "attention_bias": bool(m.bias),
        "attention_dropout": 0.0, "rope_theta": m.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},
    }  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A layout: its rules and its configuration."""

    name: str
    rules: tuple[Rule, ...]
    config: Callable[[ModelConfig], dict[str, Any]]


ARCHITECTURES = {
    "gpt": Architecture("GPT-2", GPT2_RULES, _gpt2_config),
    "llama": Architecture("Llama and Qwen3", LLAMA_RULES, _llama_config),
}


# ----------------------------------------------------------------------------------------------------------- mapping


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

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """Returns their tensor, from ours; fp32 zeros if we have none."""
        if not self.held:
            return torch.zeros(self.shape)
        parts = [read(name) for name, _ in self.ours]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.t() if self.rule.transposed else whole

    def split(self, theirs: Tensor) -> dict[str, Tensor]:
        """Returns ours, from their tensor; CheckpointError if our model has no tensor for its values."""
        if not self.held:
            if theirs.count_nonzero():
                raise CheckpointError(f"{self.name} is not zero, and the model has no {self.ours[0][0]}")
            return {}
        whole = theirs.t() if self.rule.transposed else theirs
        parts = whole.split([shape[0] for _, shape in self.ours])
        return {name: part.contiguous() for (name, _), part in zip(self.ours, parts, strict=True)}


def entries(model: ModelConfig) -> list[Entry]:
    """Returns all tensors of a model's Hugging Face layout, block by block; CheckpointError if it has no layout."""
    model = _resolved(model)
    kind = ARCHITECTURES[model.arch]
    if limits := list(export_limits(model)):
        raise CheckpointError(f"the Hugging Face layout of {kind.name} cannot express {'; nor '.join(limits)}")
    has = {"": True, "bias": bool(model.bias), "untied": not model.tied, "qk_norm": model.qk_norm}
    letters = _letters(model)
    out = []
    for blocked, rules in groupby(kind.rules, lambda rule: "{i}" in rule.hf):
        block = list(rules)
        out += [_at(rule, i, letters, has) for i in range(model.layers if blocked else 1) for rule in block]
    return [entry for entry in out if entry.held or entry.rule.zeros]


def _at(rule: Rule, block: int, letters: Mapping[str, int], has: Mapping[str, bool]) -> Entry:
    ours = [(name.replace("{i}", str(block)), _shape(shape, letters)) for name, shape in rule.ours]
    return Entry(rule, rule.hf.replace("{i}", str(block)), tuple(ours), has[rule.needs])


def _letters(m: ModelConfig) -> dict[str, int]:
    heads, d = m.heads, m.head_dim or m.hidden // m.heads
    k, f, v = m.kv_heads or heads, m.ffn or 0, m.vocab or 0
    return {"s": m.seq, "h": m.hidden, "a": heads, "k": k, "d": d, "f": f, "v": v}


def _shape(words: str, letters: Mapping[str, int]) -> Shape:
    return tuple(math.prod(letters[letter] for letter in word) for word in words.split())


def _resolved(model: ModelConfig) -> ModelConfig:
    return resolve(Config(model=model), vocab=model.vocab or 0).model


def _check_names(found: Mapping[str, Shape], wanted: Mapping[str, Shape], what: str) -> None:
    """Raises CheckpointError for missing, unexpected and misshaped tensors, ten of them by name."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in wanted]
    both = [name for name in wanted if name in found and tuple(found[name]) != wanted[name]]
    problems += [f"{name} is {list(found[name])}, not {list(wanted[name])}" for name in both]
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{what} does not fit the model's configuration: {'; '.join(problems[:10])}{more}")


def our_shapes(table: Sequence[Entry]) -> dict[str, Shape]:
    """Returns the names and shapes of all our tensors in a table."""
    return dict(pair for entry in table if entry.held for pair in entry.ours)


def state_dict_to_hf(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Maps weights by our global names to Hugging Face's. CheckpointError if names or shapes are not the model's."""
    table = entries(model)
    _check_names({name: tuple(w.shape) for name, w in weights.items()}, our_shapes(table), "the state dict")
    device = next(iter(weights.values())).device
    return {entry.name: entry.join(weights.__getitem__).to(device).contiguous() for entry in table}


def hf_to_state_dict(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Maps weights by Hugging Face's names to ours: the inverse of `state_dict_to_hf`."""
    table = entries(model)
    wanted = {entry.name: entry.shape for entry in table}
    _check_names({name: tuple(w.shape) for name, w in weights.items()}, wanted, "the Hugging Face state dict")
    return {name: part for entry in table for name, part in entry.split(weights[entry.name]).items()}


# ------------------------------------------------------------------------------------------------------------ export


def export_hf(
    checkpoint: Path, out: Path, tokenizer: Tokenizer | None = None, dtype: str | None = None, *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:  # fmt: skip
    """Writes a native checkpoint as a folder that `transformers` loads, whole or not at all; no process group needed.

    dtype: fp32, bf16, fp16 or fp64; None: as the checkpoint has its weights (masters). An earlier export at `out` is
    replaced. Raises CheckpointError for damage, names or shapes that are not the model's, values that overflow.
    """
    manifest = native.read_manifest(checkpoint)
    problems = native.verify(checkpoint, manifest)
    if problems:
        raise CheckpointError("; ".join(problems))
    reader = native.Reader(checkpoint, manifest)
    model = _saved_model(manifest["config"]["model"], reader)
    table = entries(model)
    beside = {name: shape for name, (*_, shape) in reader.buffers.items()}  # the layouts have none
    _check_names({**reader.shapes, **beside}, our_shapes(table), str(checkpoint))
    _check_tokenizer(tokenizer, model)
    to = _dtype(dtype, reader)
    building, nbytes = building_place(out), sum(math.prod(entry.shape) for entry in table) * to.itemsize
    try:
        begin(out, "config.json", "Hugging Face folder", nbytes)
        _write_weights(building, table, reader, to, shard_bytes)
        _write_configs(building, model, to, tokenizer)
        publish(building, out)
    except OSError as error:
        raise CheckpointError(f"could not write {out}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return out


def _saved_model(saved: Mapping[str, Any], reader: native.Reader) -> ModelConfig:
    """Returns the configuration of a checkpoint's model; CheckpointError where it cannot be that of its tensors."""
    try:
        model = ModelConfig.model_validate(saved)
        if model.layers <= len(reader.shapes):  # before a table is made of so many
            return _resolved(model)
    except ValueError as error:
        raise CheckpointError(f"the model's configuration is not valid: {' '.join(str(error).split())}") from None
    raise CheckpointError(f"the model's configuration has {model.layers} layers, and there are fewer tensors")


def _check_tokenizer(tokenizer: Tokenizer | None, model: ModelConfig) -> None:
    if tokenizer is not None and tokenizer.vocab_size > (model.vocab or 0):
        raise CheckpointError(
            f"the model has {model.vocab} tokens and tokenizer {tokenizer.name} has {tokenizer.vocab_size}:"
            " give the tokenizer that the model was trained with"
        )


def _dtype(name: str | None, reader: native.Reader) -> torch.dtype:
    if name is None:
        some, shape = next(iter(reader.shapes.items()))
        return reader.box("weight", some, (0,) * len(shape), (1,) * len(shape)).dtype
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _write_weights(
    folder: Path, table: Sequence[Entry], reader: native.Reader, dtype: torch.dtype, shard_bytes: int
) -> None:
    """Writes one file, or numbered shards and their index."""
    shards = _shards(table, dtype.itemsize, shard_bytes)
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    names = names if len(names) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        about = {entry.name: (dtype, entry.shape) for entry in shard}
        tensors = (_cast(entry, entry.join(lambda ours: reader.full("weight", ours)), dtype) for entry in shard)
        stream_tensors(folder / name, about, tensors, {"format": "pt"})
    if len(names) > 1:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(math.prod(entry.shape) for entry in table) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _shards(table: Sequence[Entry], itemsize: int, limit: int) -> list[list[Entry]]:
    """Returns the tensors in order, cut into files of at most `limit` bytes; a larger tensor has a file of its own."""
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in table:
        size = math.prod(entry.shape) * itemsize
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += size
    return shards


def _cast(entry: Entry, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    out = tensor.to(dtype)
    if out.isinf().sum() > tensor.isinf().sum():
        largest = torch.finfo(dtype).max
        raise CheckpointError(
            f"{entry.name} has values beyond {largest:.5g}, the largest of {dtype}: use another dtype"
        )
    return out


def _write_configs(folder: Path, model: ModelConfig, dtype: torch.dtype, tokenizer: Tokenizer | None) -> None:
    name, eot = str(dtype).removeprefix("torch."), None if tokenizer is None else tokenizer.eot
    ids = {"bos_token_id": eot, "eos_token_id": eot}  # a document begins where another ends, as in training
    common = {"vocab_size": model.vocab, "tie_word_embeddings": bool(model.tied), "dtype": name, "torch_dtype": name}
    config = ARCHITECTURES[model.arch].config(model) | common | ids | {"use_cache": True}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(folder / "generation_config.json", json.dumps(ids, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_hf(folder)
