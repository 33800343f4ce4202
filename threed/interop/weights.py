"""Weights of a checkpoint, read on demand, in one process; implements `threed.checkpoint.weights`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from threed.checkpoint import native
from threed.checkpoint.lazy_tensors import read_all
from threed.checkpoint.reading import Reader
from threed.interop.huggingface.folder import HFFolder, is_hf_folder
from threed.interop.loading import newest_checkpoint
from threed.interop.safetensors_folder import SafetensorsFolder, is_safetensors_folder
from threed.zero.records import WEIGHT


def weights(path: str | Path, *, check: bool = True) -> Mapping[str, Tensor]:
    """Returns the weights and persistent buffers of a checkpoint by name, read on demand.

    Needs no process group and no code of the model, whatever the number of ranks that saved the
    checkpoint. Every access reads the full tensor from the files. For a native checkpoint, the
    values are the master weights (fp32, or fp64 for a model in fp64); a tied weight has all its
    names.

    Args:
        path: a run folder (its newest checkpoint is read), a checkpoint, a safetensors folder of
            `threed convert`, or a Hugging Face folder.
        check: whether to check the hashes of all files of a native checkpoint first.

    Returns:
        A mapping from global name to full tensor, on the CPU. The names are the same as in
        `Engine.full_state_dict`, also for a Hugging Face folder.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged.

    Example:

        module.load_state_dict(dict(threed.checkpoint.weights("runs/mine")))
    """
    source = newest_checkpoint(Path(path))
    if is_safetensors_folder(source):
        return SafetensorsFolder(source)
    if is_hf_folder(source):
        return _Weights(HFFolder(source), {})
    manifest = native.verified(source) if check else native.read_manifest(source)
    return _Weights(Reader(source, manifest), manifest["state"].get("aliases", {}))


class _Weights(Mapping[str, Tensor]):
    def __init__(self, source: Any, aliases: Mapping[str, str]) -> None:
        self._source = source
        self._names = {name: name for name in (*source.shapes, *getattr(source, "buffers", ()))}
        self._names |= aliases

    def __getitem__(self, name: str) -> Tensor:
        first = self._names[name]
        if first in self._source.shapes:
            return read_all(self._source.tensor(WEIGHT, first))
        values: Tensor = self._source.buffer(first)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
