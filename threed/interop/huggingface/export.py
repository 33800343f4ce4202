"""Writes Hugging Face folders from native checkpoints or other tensor sources.

    export_hf(Path("runs/gpt/checkpoints/step-200"), out, tokenizer)     # from a native checkpoint
    write_folder(out, folder.table, folder, folder.config, "bf16")       # from an `HFFolder`

An export checks the checkpoint and the names and shapes of its tensors, and assigns tensors to
files by size. It streams the tensors into the files, a few rows at a time, and writes the
configuration and the tokenizer. Finally, it renames the temporary folder to its final name. The
module `layouts` defines the names and shapes of the tensors.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from threed.checkpoint import native
from threed.checkpoint.files import (
    CheckpointError,
    cut,
    new_folder,
    publish,
    stream_tensors,
    write_text,
)
from threed.checkpoint.finite import Tally, narrowed
from threed.checkpoint.lazy_tensors import LazyTensor, TensorSource, read_all, read_slabs
from threed.checkpoint.reading import Reader
from threed.config import ModelConfig
from threed.config.resolution import resolve_model
from threed.data.tokenizer import Tokenizer
from threed.interop.huggingface import folder_record
from threed.interop.huggingface.layouts import (
    Entry,
    check_names,
    config_of,
    entries,
    native_shapes,
    too_large,
)
from threed.ops.precision import DTYPES
from threed.zero.state import WEIGHT

SHARD_BYTES = 5_000_000_000


class SavesFiles(Protocol):
    """A tokenizer, or a tokenizer's files, that can be written to a folder."""

    def save_hf(self, folder: Path, model_type: str | None = None) -> None:
        """Writes the tokenizer's files to the folder of a model.

        Args:
            folder: the folder to write to.
            model_type: the `model_type` in the model's config.json; None if it is unknown.
        """


def export_hf(
    checkpoint: Path, out: Path, tokenizer: Tokenizer | None = None, dtype: str | None = None, *,
    files: SavesFiles | None = None, shard_bytes: int = SHARD_BYTES,
) -> Path:  # fmt: skip
    """Writes a native checkpoint, atomically, as a folder that `transformers` can load.

    No process group is required.

    If the run started from a Hugging Face folder and uses the tokenizer of that folder, special
    token ids and generation_config.json are taken from the checkpoint's record of that folder (see
    `folder_record`). Otherwise the ids are derived from the tokenizer. An earlier export at `out`
    is replaced.

    Args:
        checkpoint: the folder of the native checkpoint.
        out: the folder to write.
        tokenizer: the tokenizer to write; None for no tokenizer.
        dtype: dtype of the written weights: fp32, bf16, fp16 or fp64; None keeps the dtype of the
            master weights.
        files: tokenizer files to copy; used instead of `tokenizer` if given.
        shard_bytes: maximum size of a weight file, in bytes; a larger tensor has its own file.

    Returns:
        `out`.

    Raises:
        CheckpointError: if the checkpoint is damaged, its tensors do not match its model, or values
            overflow `dtype`.
    """
    manifest = native.verified(checkpoint)
    reader = Reader(checkpoint, manifest)
    model = _saved_model(manifest["config"]["model"], reader)
    table = entries(model)
    # No Hugging Face layout has buffers, so `check_names` reports buffers as unexpected.
    buffers = {name: shape for name, (*_, shape) in reader.buffers.items()}
    check_names({**reader.shapes, **buffers}, native_shapes(table), str(checkpoint))
    _check_tokenizer(tokenizer, model)
    record = folder_record.validated(manifest["state"]["extra"].get("hf"))
    extra_keys, json_files = folder_record.for_export(record, tokenizer)
    config = config_of(model) | {"vocab_size": model.vocab, "tie_word_embeddings": bool(model.tied)}
    del config["pad_token_id"]  # in `extra_keys`, unless the original folder has no such key
    return write_folder(
        out, table, reader, config | extra_keys, dtype, files or tokenizer, json_files, shard_bytes
    )


def write_folder(
    out: Path, table: Sequence[Entry], source: TensorSource, config: Mapping[str, Any], dtype: str | None = None,
    tokenizer: SavesFiles | None = None, files: Mapping[str, Any] = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
) -> Path:  # fmt: skip
    """Writes a Hugging Face folder, atomically.

    Args:
        out: the folder to write.
        table: one entry per Hugging Face tensor to write (see `layouts.entries`).
        source: the native tensors, from which the Hugging Face tensors are built.
        config: the content of config.json, without the dtype.
        dtype: dtype of all written tensors; None keeps each tensor's dtype.
        tokenizer: the tokenizer to write; None for no tokenizer.
        files: contents of additional JSON files by file name. A content is an object or a text.
        shard_bytes: maximum size of a weight file, in bytes; a larger tensor has its own file.

    Returns:
        `out`.

    Raises:
        CheckpointError: if tensors cannot be read, values overflow `dtype`, or the disk is full.
    """
    to = {entry.name: _dtype(dtype, entry, source) for entry in table}
    nbytes, tally = sum(_nbytes(entry, to[entry.name]) for entry in table), Tally()
    with new_folder(out, "config.json", "Hugging Face folder", nbytes) as building:
        by_name = {entry.name: entry for entry in table}
        about = {name: (to[name], entry.shape) for name, entry in by_name.items()}
        write_weights(
            building, about,
            lambda name: by_name[name].to_hf(lambda weight: source.tensor(WEIGHT, weight)),
            tally, shard_bytes,
        )  # fmt: skip
        name = str(to[table[0].name]).removeprefix("torch.")
        texts = {"config.json": {**config, "dtype": name, "torch_dtype": name}, **files}
        for file, content in texts.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            write_text(building / file, text)
        if tokenizer is not None:
            tokenizer.save_hf(building, config["model_type"])
        publish(building, out)
    tally.tell(out)
    return out


def _saved_model(saved: Mapping[str, Any], reader: Reader) -> ModelConfig:
    """Returns the model configuration of a checkpoint.

    Raises CheckpointError if the configuration is invalid, or the model has more layers than the
    checkpoint has tensors.
    """
    try:
        model = resolve_model(ModelConfig.model_validate(saved))
    except ValueError as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"the model's configuration is not valid: {text}") from None
    if what := too_large(model, len(reader.shapes)):
        raise CheckpointError(f"the model's configuration has {what}, but there are fewer tensors")
    return model


def _check_tokenizer(tokenizer: Tokenizer | None, model: ModelConfig) -> None:
    if tokenizer is not None and tokenizer.text_vocab_size > (model.vocab or 0):
        raise CheckpointError(
            f"the model has {model.vocab} tokens and tokenizer {tokenizer.name} has {tokenizer.text_vocab_size}:"
            " use the tokenizer that the model was trained with"
        )


def dtype_of(name: str) -> torch.dtype:
    """Returns the torch dtype with a name such as "bf16".

    Raises CheckpointError if the name is unknown.
    """
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _dtype(name: str | None, entry: Entry, source: TensorSource) -> torch.dtype:
    """Returns the dtype named `name`; without a name, the widest dtype of the entry's weights."""
    if name is not None:
        return dtype_of(name)
    dtypes = [source.tensor(WEIGHT, weight).dtype for weight, _ in entry.native if entry.in_model]
    return functools.reduce(torch.promote_types, dtypes or [torch.float32])


def _nbytes(entry: Entry, dtype: torch.dtype) -> int:
    return math.prod(entry.shape) * dtype.itemsize


def write_weights(
    folder: Path,
    about: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensor_of: Callable[[str], LazyTensor],
    tally: Tally,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes tensors as model.safetensors, or as numbered shards with an index.

    Args:
        folder: the folder in which the files are written.
        about: (dtype to write, shape) of each tensor, by name.
        tensor_of: function from the name of a tensor to the tensor, which may have any dtype.
        tally: records which tensors have values that are not finite.
        shard_bytes: maximum size of a file, in bytes; a larger tensor has its own file.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in about.items()}
    shards = cut(sizes, shard_bytes)
    files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    files = files if len(files) > 1 else ["model.safetensors"]

    def rows(name: str) -> Iterator[Tensor]:
        (to, shape), tensor = about[name], tensor_of(name)
        slabs = read_slabs(tensor, to.itemsize) if shape else iter([read_all(tensor)])
        for values in slabs:
            kept = values if values.dtype == to else narrowed(name, values, to)
            yield tally.passed(name, kept)

    for file, names in zip(files, shards, strict=True):
        slabs = chain.from_iterable(map(rows, names))
        stream_tensors(
            folder / file, {name: about[name] for name in names}, slabs, {"format": "pt"}
        )
    if len(files) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
