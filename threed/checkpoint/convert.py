"""Conversion between checkpoint formats, told apart by their files: what `threed convert SRC DST` does.

    convert("runs/gpt/checkpoints/step-200", "gpt-hf", dtype="bf16")      # native -> Hugging Face

Needs no process group. Importing Hugging Face folders is not supported, and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.checkpoint import hf, native
from threed.checkpoint.files import CheckpointError
from threed.data.tokenizer import Tokenizer, file_hashes, load_tokenizer, tokenizer_file


def convert(src: str | Path, dst: str | Path, *, dtype: str | None = None, tokenizer: str | None = None) -> Path:
    """Converts the checkpoint folder `src` into the new folder `dst`, and returns that.

    dtype: of the weights, see `hf.export_hf`. tokenizer: "bytes" or the path of a tokenizer.json, "none" for an export
    without one; None: the one that the run was trained with. Raises CheckpointError, saying what to do.
    """
    src, dst = Path(src), Path(dst)
    if kind_of(src) == "hf":
        raise CheckpointError(
            f"{src} is a Hugging Face folder: importing Hugging Face checkpoints is not in this version;"
            " SRC can be a native checkpoint (checkpoints/step-N of a run)"
        )
    if dst.is_file() or (dst.is_dir() and any(dst.iterdir())):
        raise CheckpointError(f"{dst} exists already: give DST a name that is free, or an empty folder")
    spec = tokenizer or _trained_with(native.read_manifest(src))
    return hf.export_hf(src, dst, _tokenizer(spec), dtype)


def kind_of(path: Path) -> str:
    """Returns "native" or "hf", by the files of a folder; CheckpointError, with a hint if there is one, if neither."""
    if (path / native.MANIFEST).is_file():
        return "native"
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: a checkpoint is a folder, give that")
    if (path / "config.json").is_file() or any(path.glob("*.safetensors.index.json")):
        return "hf"
    inside = [file.parent for place in ("", "checkpoints/") for file in path.glob(f"{place}step-*/{native.MANIFEST}")]
    hint = (
        f"did you mean {max(inside, key=lambda step: step.stat().st_mtime)}?"
        if inside
        else "give a step-N folder, or one with a config.json"
    )
    raise CheckpointError(f"{path} is no checkpoint: it has neither {native.MANIFEST} nor config.json; {hint}")


def _trained_with(manifest: Mapping[str, Any]) -> str:
    """Returns the tokenizer that a checkpoint names; CheckpointError unless its files have the saved hashes.

    An export copies them, and whoever wrote the checkpoint may have named any path of this machine.
    """
    spec = str(manifest["config"]["data"]["tokenizer"])
    if spec == "bytes":
        return spec
    try:
        same = file_hashes(tokenizer_file(spec)) == manifest["state"]["extra"].get("tokenizer")
    except (ValueError, OSError, RuntimeError):  # RuntimeError: no home folder to expand ~ to
        same = False
    if not same:
        why = "is not here, has other files now, or the checkpoint does not say which"
        raise CheckpointError(
            f"the tokenizer it was trained with, {spec}, {why}: give --tokenizer bytes, a path, or none"
        )
    return spec


def _tokenizer(spec: str) -> Tokenizer | None:
    try:
        return None if spec == "none" else load_tokenizer(spec)
    except ValueError as error:
        raise CheckpointError(f"{error} (convert takes --tokenizer bytes, a path, or none)") from None
