"""The export of native checkpoints as Hugging Face folders; `layouts` has their tensors' names and shapes.

    export_hf(Path("runs/gpt/checkpoints/step-200"), Path("runs/gpt/hf"), tokenizer)     # from a native checkpoint

In phases: check the checkpoint and every name and shape -> plan shards from shapes -> stream one tensor at a
time -> configuration and tokenizer -> rename the folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.atomic import building_place, publish, write_text
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError, begin, stream_tensors
from threed.checkpoint.layouts import Entry, check_names, config_of, entries, our_shapes
from threed.checkpoint.reading import Reader
from threed.config import ModelConfig
from threed.data.tokenizer import Tokenizer
from threed.precision import DTYPES
from threed.resolution import resolve_model

SHARD_BYTES = 5_000_000_000


def export_hf(
    checkpoint: Path, out: Path, tokenizer: Tokenizer | None = None, dtype: str | None = None, *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:  # fmt: skip
    """Writes a native checkpoint as a folder that `transformers` loads, whole or not at all; no process group needed.

    dtype: fp32, bf16, fp16 or fp64; None: as the checkpoint has its weights (masters). An earlier export at `out` is
    replaced. Raises CheckpointError for damage, names or shapes that are not the model's, values that overflow.
    """
    manifest = native.read_manifest(checkpoint)
    problems = native.verify(checkpoint, manifest, thorough=True)
    if problems:
        raise CheckpointError("; ".join(problems))
    reader = Reader(checkpoint, manifest)
    model = _saved_model(manifest["config"]["model"], reader)
    table = entries(model)
    beside = {name: shape for name, (*_, shape) in reader.buffers.items()}  # the layouts have none
    check_names({**reader.shapes, **beside}, our_shapes(table), str(checkpoint))
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


def _saved_model(saved: Mapping[str, Any], reader: Reader) -> ModelConfig:
    """Returns the configuration of a checkpoint's model; CheckpointError where it cannot be that of its tensors."""
    try:
        model = ModelConfig.model_validate(saved)
        if model.layers <= len(reader.shapes):  # before a table is made of so many
            return resolve_model(model)
    except ValueError as error:
        raise CheckpointError(f"the model's configuration is not valid: {' '.join(str(error).split())}") from None
    raise CheckpointError(f"the model's configuration has {model.layers} layers, and there are fewer tensors")


def _check_tokenizer(tokenizer: Tokenizer | None, model: ModelConfig) -> None:
    if tokenizer is not None and tokenizer.vocab_size > (model.vocab or 0):
        raise CheckpointError(
            f"the model has {model.vocab} tokens and tokenizer {tokenizer.name} has {tokenizer.vocab_size}:"
            " give the tokenizer that the model was trained with"
        )


def _dtype(name: str | None, reader: Reader) -> torch.dtype:
    if name is None:
        return reader.dtype("weight", next(iter(reader.shapes)))
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _write_weights(folder: Path, table: Sequence[Entry], reader: Reader, dtype: torch.dtype, shard_bytes: int) -> None:
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
    config = config_of(model) | common | ids | {"use_cache": True}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(folder / "generation_config.json", json.dumps(ids, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_hf(folder)
