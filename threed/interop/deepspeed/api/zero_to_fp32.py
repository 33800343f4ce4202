"""deepspeed.utils.zero_to_fp32: the full weights of a checkpoint, read in one process.

`engine.save_checkpoint` writes `SCRIPT` to the folder of checkpoints, as DeepSpeed copies its own:

    python zero_to_fp32.py . OUT --safe_serialization
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.native import read_manifest
from threed.interop.deepspeed.checkpoint_reader import step_folder
from threed.interop.deepspeed.names import not_offered
from threed.interop.deepspeed.ownership import owner
from threed.interop.loading import LATEST, latest_tag, weights

NAME = "zero_to_fp32.py"
SCRIPT = '''#!/usr/bin/env python
"""Writes the full fp32 weights of a checkpoint: python zero_to_fp32.py . OUT [--tag TAG]"""

from threed.interop.deepspeed.api.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line of DeepSpeed's zero_to_fp32.py.

    Args:
        argv: the arguments; by default the arguments of this process.
    """
    parser = argparse.ArgumentParser(description="Writes the full fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder of checkpoints, with the file `latest`")
    parser.add_argument("output_dir", help="the folder to write")
    parser.add_argument(
        "--max_shard_size", default="5GB", help="largest size of a file (default 5GB)"
    )
    text = "write model.safetensors instead of pytorch_model.bin"
    parser.add_argument("--safe_serialization", action="store_true", help=text)
    parser.add_argument("-t", "--tag", help="name of the checkpoint (default: the tag in `latest`)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="refused")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    given = vars(parser.parse_args(argv))
    del given["debug"]
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**given)
    except (ValueError, OSError, NotImplementedError, CheckpointError) as error:
        raise SystemExit(f"{NAME}: {error}") from None


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
        weight has all its names, which share one tensor. With `lazy_mode`, a mapping that reads a tensor at every access.

    Raises:
        ValueError: without `tag`, if the file `latest` is missing.
        CheckpointError: if the checkpoint is missing or damaged.
        NotImplementedError: for `exclude_frozen_parameters`, and for a checkpoint that DeepSpeed
            itself has written.
    """
    if exclude_frozen_parameters:
        instead = "use engine.save_16bit_model(exclude_frozen_parameters=True), or delete the names"
        raise NotImplementedError(not_offered("exclude_frozen_parameters here", instead))
    folder = _folder(Path(checkpoint_dir), tag)
    found = weights(folder)
    if lazy_mode:
        return found
    first = _aliases(folder)
    full = {name: found[name] for name in found if name not in first}
    return {name: full[first.get(name, name)] for name in found}


def _aliases(folder: Path) -> Mapping[str, str]:
    """Returns the further names of tied weights: name -> the weight's first name."""
    return read_manifest(folder)["state"].get("aliases", {})


def _folder(parent: Path, tag: str | int | None) -> Path:
    tag = latest_tag(parent) if tag is None else tag
    if tag is None:
        raise ValueError(f"{parent} has no file {LATEST}: pass a tag, or another folder")
    folder = parent / str(tag)
    if step_folder(folder) is not None:
        instead = f"use the zero_to_fp32.py in {parent}, or `threed convert`"
        raise NotImplementedError(
            not_offered(f"zero_to_fp32 of {folder}, which DeepSpeed has written", instead)
        )
    return folder


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, dtype: torch.dtype | None = None,
    max_shard_size: str | int | None = "5GB", safe_serialization: bool = False,
    tag: str | int | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Writes the full weights of a checkpoint to files.

    Several ranks may write the same files at the same time.

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
    first = _aliases(_folder(Path(checkpoint_dir), tag))
    out = Path(output_dir)
    out.mkdir(parents=True, exist_ok=True)
    limit = _bytes_of(max_shard_size)
    files: list[list[str]] = []  # for each file, the names of its tensors
    part: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(prefix=".parts-", dir=out) as folder:
        parts = Path(folder)
        for name in source:
            tied = part.get(first.get(name, name))
            if tied is not None and not safe_serialization:
                part[name] = tied
                continue
            tensor = source[name]
            tensor = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
            if part and _nbytes(part) + tensor.nbytes > limit:
                files.append(_write(part, parts / f"part{len(files)}", safe_serialization))
                part = {}
            part[name] = tensor
        files.append(_write(part, parts / f"part{len(files)}", safe_serialization))
        final = "model.safetensors" if safe_serialization else "pytorch_model.bin"
        _publish(parts, out, files, final)


def _bytes_of(size: str | int | None) -> float:
    """Returns a size such as "5GB" in bytes; infinity for None."""
    if size is None:
        return math.inf
    found = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(i?)B?", str(size).strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"max_shard_size {size!r}: give a number of bytes, or a size such as 5GB")
    base = 1024 if found[3] else 1000
    return float(found[1]) * base ** " KMGT".index(found[2].upper() or " ")


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Returns the size of different tensors; tied weights count once."""
    return sum(tensor.nbytes for tensor in {id(t): t for t in tensors.values()}.values())


def _write(tensors: dict[str, Tensor], path: Path, safe: bool) -> list[str]:
    """Writes tensors to a file, and returns their names."""
    if safe:
        # a copy of each tensor, because tensors in a safetensors file must not share memory
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, path, {"format": "pt"})
    else:
        torch.save(tensors, path)
    return list(tensors)


def _publish(parts: Path, out: Path, files: list[list[str]], name: str) -> None:
    """Moves the files to their final names, and writes the index if there are several."""
    if len(files) == 1:
        (parts / "part0").replace(out / name)
        return
    stem, _, suffix = name.partition(".")
    where: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"{stem}-{number + 1:05d}-of-{len(files):05d}.{suffix}"
        (parts / f"part{number}").replace(out / file)
        where |= dict.fromkeys(names, file)
    index = json.dumps({"metadata": {}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
    (parts / "index").write_text(index, encoding="utf-8")
    (parts / "index").replace(out / f"{name}.index.json")


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

    Raises:
        RuntimeError: if the module belongs to an engine.
    """
    if owner(model) is not None:
        raise RuntimeError(
            f"this {type(model).__name__} belongs to an engine: call engine.destroy() on all ranks first"
            " (trainer.model_wrapped.destroy() after a training with the Trainer)"
        )
    model = model.cpu()
    found = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(dict(found), strict=False)
    return model
