"""deepspeed.utils.zero_to_fp32: the full weights of a checkpoint, read in one process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from threed.checkpoint.files import cut
from threed.interop.deepspeed.checkpoint_reader import step_folder
from threed.interop.loading import LATEST
from threed.interop.weights import weights


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | int | None = None,
    exclude_frozen_parameters: bool = False, lazy_mode: bool = False,
) -> Mapping[str, Tensor]:  # fmt: skip
    """Returns the full weights and persistent buffers of a checkpoint of `engine.save_checkpoint`.

    Args:
        checkpoint_dir: the folder of checkpoints.
        tag: the name of the checkpoint; None means the tag in the file `latest`.
        exclude_frozen_parameters: must be False.
        lazy_mode: whether each tensor is read when it is accessed.

    Returns:
        name -> full tensor on the CPU: weights are fp32, or fp64 if the model uses fp64. A tied
        weight has all its names. With `lazy_mode`, a mapping that reads a tensor at every access.

    Raises:
        ValueError: without `tag`, if the file `latest` is missing.
        CheckpointError: if the checkpoint is missing or damaged.
        NotImplementedError: for `exclude_frozen_parameters`, and for a checkpoint that DeepSpeed
            itself has written.
    """
    if exclude_frozen_parameters:
        raise NotImplementedError(
            "threed does not offer exclude_frozen_parameters here: use"
            " engine.save_16bit_model(exclude_frozen_parameters=True), or delete the names"
        )
    found = weights(_folder(Path(checkpoint_dir), tag))
    return found if lazy_mode else dict(found)


def _folder(parent: Path, tag: str | int | None) -> Path:
    if tag is None:
        if not (parent / LATEST).is_file():
            raise ValueError(f"{parent} has no file {LATEST}: pass a tag, or another folder")
        tag = (parent / LATEST).read_text(encoding="utf-8").strip()
    folder = parent / str(tag)
    if step_folder(folder) is not None:
        raise NotImplementedError(
            f"threed does not offer zero_to_fp32 of {folder}, which DeepSpeed has written: use the"
            f" zero_to_fp32.py in {parent}, or `threed convert`"
        )
    return folder


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, dtype: torch.dtype | None = None,
    max_shard_size: str | int | None = "5GB", safe_serialization: bool = False,
    tag: str | int | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Writes the full weights of a checkpoint to files.

    Args:
        checkpoint_dir: the folder of checkpoints.
        output_dir: the folder of the files; it is created if necessary.
        dtype: dtype of the floating-point tensors; None means the dtype of the checkpoint.
        max_shard_size: the largest size of a file, such as "5GB"; None means one file. If there are
            several files, an index file lists their tensors.
        safe_serialization: whether to write model.safetensors instead of pytorch_model.bin.
        tag: see `get_fp32_state_dict_from_zero_checkpoint`.
        exclude_frozen_parameters: must be False.
    """
    source = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True
    )
    limit = _bytes_of(max_shard_size)
    parts = cut({name: _converted(source[name], dtype).nbytes for name in source}, limit)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    files = [f"{stem}-{n + 1:05d}-of-{len(parts):05d}.{suffix}" for n in range(len(parts))]
    files = files if len(files) > 1 else [f"{stem}.{suffix}"]
    out = Path(output_dir)
    out.mkdir(parents=True, exist_ok=True)
    for file, names in zip(files, parts, strict=True):
        tensors = {name: _converted(source[name], dtype) for name in names}
        if safe_serialization:
            save_file(tensors, out / file, {"format": "pt"})
        else:
            torch.save(tensors, out / file)
    if len(files) > 1:
        where = {name: file for file, names in zip(files, parts, strict=True) for name in names}
        index = json.dumps({"metadata": {}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
        (out / f"{stem}.{suffix}.index.json").write_text(index, encoding="utf-8")


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def _bytes_of(size: str | int | None) -> int:
    """Returns a size such as "5GB" in bytes; for None, a size that no file has."""
    if size is None:
        return 2**63
    found = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(i?)B?", str(size).strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"max_shard_size {size!r}: give a number of bytes, or a size such as 5GB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False, tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Writes the full weights of a checkpoint to files, in fp32.

    Args:
        checkpoint_dir: see `convert_zero_checkpoint_to_state_dict`.
        output_dir: see there.
        max_shard_size: see there.
        safe_serialization: see there.
        tag: see there.
        exclude_frozen_parameters: must be False.
    """
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag,
        exclude_frozen_parameters,
    )  # fmt: skip


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | int | None = None
) -> nn.Module:
    """Loads the full weights of a checkpoint into a module on the CPU, and returns the module.

    Args:
        model: the module. It must not belong to an engine (call `engine.destroy()` first). It is
            moved to the CPU.
        checkpoint_dir: the folder of checkpoints.
        tag: see `get_fp32_state_dict_from_zero_checkpoint`.
    """
    model = model.cpu()
    found = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(dict(found), strict=False)
    return model
