"""Exports of any model as a folder of safetensors files, under the global names of its tensors.

    export_safetensors(Path("runs/mine/checkpoints/step-200"), Path("mine"))
    weights = SafetensorsFolder(Path("mine"))       # a mapping by name; tensors are read on demand

The weights and persistent buffers are in model.safetensors. If they exceed the size limit of a
file, they are instead in numbered shards with an index, as in Hugging Face folders. config.toml has
the configuration of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from threed.checkpoint import native
from threed.checkpoint.files import (
    EXPORTED,
    CheckpointError,
    new_folder,
    publish,
    reading,
    write_text,
)
from threed.checkpoint.finite import Tally
from threed.checkpoint.lazy_tensors import LazyTensor, MemoryTensor
from threed.checkpoint.reading import Reader
from threed.config import Config, ConfigError
from threed.config.arguments import to_toml
from threed.config.groups import python_name
from threed.core.parse import ParseError, read_json, read_toml
from threed.interop.huggingface.export import SHARD_BYTES, dtype_of, write_weights
from threed.interop.huggingface.folder import CONFIG, INDEX, SINGLE, has_weights
from threed.zero.state import WEIGHT

SETTINGS = "config.toml"


def export_safetensors(
    checkpoint: Path, out: Path, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Writes the weights and buffers of a native checkpoint as a folder of safetensors, atomically.

    No process group is required. The code of a custom model is not imported.

    Args:
        checkpoint: the folder of the native checkpoint.
        out: the folder to write.
        dtype: dtype of the written weights: fp32, bf16, fp16 or fp64; None keeps the dtype of the
            master weights. Buffers keep their dtypes.
        shard_bytes: maximum size of a safetensors file, in bytes; a larger tensor has its own file.

    Returns:
        `out`.

    Raises:
        CheckpointError: if the checkpoint is damaged, or values overflow `dtype`.
    """
    manifest = native.verified(checkpoint)
    settings, tally = _settings(checkpoint, manifest["config"]), Tally()
    with Reader(checkpoint, manifest) as reader:
        buffers = {name: reader.buffer(name) for name in reader.buffers}
        for name, values in buffers.items():
            if values.dtype not in EXPORTED:
                what = f"buffer {name} is {values.dtype}, which safetensors files of threed do not have"
                raise CheckpointError(f"{checkpoint}: {what}: register it with persistent=False")

        def tensor_of(name: str) -> LazyTensor:
            return MemoryTensor(buffers[name]) if name in buffers else reader.tensor(WEIGHT, name)

        about = {
            name: (dtype_of(dtype) if dtype else reader.tensor(WEIGHT, name).dtype, shape)
            for name, shape in sorted(reader.shapes.items())
        }
        about |= {name: (values.dtype, tuple(values.shape)) for name, values in buffers.items()}
        nbytes = sum(kind.itemsize * torch.Size(shape).numel() for kind, shape in about.values())
        with new_folder(out, SETTINGS, "safetensors folder", nbytes) as building:
            write_weights(building, about, tensor_of, tally, shard_bytes)
            write_text(building / SETTINGS, settings)
            publish(building, out)
    tally.tell(out)
    return out


def _settings(checkpoint: Path, config: Mapping[str, Any]) -> str:
    """Returns the configuration of a checkpoint as TOML."""
    # A checkpoint of a module without token ids has a vocabulary size of 0, which is not a valid
    # value of the key. It is replaced by None ("not set").
    model = {**config["model"], "vocab": config["model"].get("vocab") or None}
    try:
        return to_toml(Config.model_validate({**config, "model": model}))
    except ValueError as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{checkpoint}: its configuration is not valid: {text}") from None


def is_safetensors_folder(path: Path) -> bool:
    """Returns whether a folder has the files that `export_safetensors` writes."""
    return has_weights(path) and (path / SETTINGS).is_file() and not (path / CONFIG).exists()


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of an exported folder, by name. Each access reads the tensor from its file.

    Args:
        path: a folder that `export_safetensors` wrote.

    Raises:
        CheckpointError: if a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        names = {SINGLE}
        with reading(path, SafetensorError, ParseError, OSError, KeyError, AttributeError):
            if not (path / SINGLE).is_file():
                names = set(read_json(path / INDEX)["weight_map"].values())
            self._files = {
                key: file
                for name in sorted(names)
                for file in [safe_open(path / Path(name).name, framework="pt")]
                for key in file.keys()  # noqa: SIM118 (the object is not a mapping)
            }

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the configuration in an exported folder: values by group and key.

    Raises:
        ConfigError: if config.toml is not valid TOML.
    """
    try:
        tables = read_toml(path / SETTINGS)
    except ParseError as error:
        raise ConfigError([str(error)]) from None
    return {
        python_name(group): {python_name(key): value for key, value in keys.items()}
        for group, keys in tables.items()
        if isinstance(keys, dict)
    }
