"""Conversion between checkpoint formats, told apart by their files: what `threed convert SRC DST` does.

    convert("runs/gpt/checkpoints/step-200", "gpt-hf", dtype="bf16")      # native -> Hugging Face
    convert("Llama-3.1-8B", "llama")                                      # and back: weights, without moments
    convert("Llama-3.1-8B", "llama-fp16", dtype="fp16", to="hf")          # in another format, in files of 5 GB at most
    convert("zero/global_step100", "llama", allow_pickle=True)            # DeepSpeed's, with moments

Needs no process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed import architectures
from threed.checkpoint import hf, native
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.hf_folder import HFFolder, has_weights, is_hf_folder, read_object
from threed.checkpoint.hf_import import import_hf
from threed.data.tokenizer import Tokenizer, file_hashes, load_tokenizer, tokenizer_file
from threed.foreign import folders, source


def convert(
    src: str | Path, dst: str | Path, *, dtype: str | None = None, tokenizer: str | None = None, to: str | None = None,
    allow_pickle: bool = False, config: str | Path | None = None,
) -> Path:  # fmt: skip
    """Converts the checkpoint folder `src` into the new folder `dst`, and returns that.

    to: "native" or "hf"; None: the other one than `src` is. dtype: of the weights; None: as they are. tokenizer:
    "bytes" or the path of a tokenizer.json, "none" for none; None: the folder's own, or the one that the run was
    trained with. allow_pickle: read other programs' checkpoints too. config: of their model, where it is not beside.
    Raises CheckpointError, saying what to do.
    """
    src, dst = Path(src), Path(dst)
    kind = kind_of(src, allow_pickle)
    to = to or ("hf" if kind == "native" else "native")
    if dst.is_file() or (dst.is_dir() and any(dst.iterdir())):
        raise CheckpointError(f"{dst} exists already: give DST a name that is free, or an empty folder")
    if kind == "native":
        if to == "native":
            raise CheckpointError(f"{src} is a native checkpoint already: it loads in any topology as it is")
        spec = tokenizer or _trained_with(native.read_manifest(src))
        return hf.export_hf(src, dst, _tokenizer(spec), dtype)
    if kind != "hf":
        return _from_others(src, dst, kind, to, dtype, tokenizer, Path(config) if config else None)
    return _from_hf(HFFolder(src), dst, to, dtype, tokenizer)


def _from_others(
    src: Path, dst: Path, kind: str, to: str, dtype: str | None, spec: str | None, config: Path | None
) -> Path:
    if to != "native":
        raise CheckpointError(
            f"{src} is a checkpoint of {kind}'s: make a native one of it first, and of that one of hf"
        )
    found = folders.open_source(src, kind, config)
    tokenizer = _tokenizer(spec or "none")
    path = "none" if tokenizer is None else spec if spec == "bytes" else str(tokenizer_file(spec or "").absolute())
    return source.write_native(found, dst, dtype, path or "none", tokenizer.files if tokenizer else None)


def _from_hf(folder: HFFolder, dst: Path, to: str, dtype: str | None, spec: str | None) -> Path:
    own = folder.path / "tokenizer.json"
    spec = spec or (str(own.absolute()) if own.is_file() else "none")
    tokenizer = _tokenizer(spec)
    if to == "native":
        path = spec if tokenizer is None or spec == "bytes" else str(tokenizer_file(spec).absolute())
        return import_hf(folder, dst, dtype, path, tokenizer.files if tokenizer else None)
    if problems := list(folder.problems()):
        raise CheckpointError("; ".join(problems))
    record = architectures.layout_of(dict(folder.model))
    config = folder.config | {"architectures": [record.hf_class]}
    generation = folder.path / "generation_config.json"
    files = {generation.name: read_object(generation)} if generation.is_file() else {}
    return hf.write_folder(dst, folder.table, folder, config, dtype, tokenizer, files)


def kind_of(path: Path, allow_pickle: bool = False) -> str:
    """Returns "native", "hf" or another program's name, by the files of a folder; CheckpointError, with a hint if there
    is one, if none of them. A folder that is both of Hugging Face's and another's is the other's where that may be."""
    if (path / native.MANIFEST).is_file():
        return "native"
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: a checkpoint is a folder, {native.did_you_mean(path) or 'give that'}")
    others = folders.kind_of(path)
    if others is not None and allow_pickle:
        return others
    if is_hf_folder(path) and (others is None or has_weights(path)):
        return "hf"
    if others is not None:
        raise CheckpointError(folders.refusal(path, others))
    hint = native.did_you_mean(path) or "give a step-N folder, or one with a config.json"
    raise CheckpointError(f"{path} is no checkpoint: it has neither {native.MANIFEST} nor config.json; {hint}")


def _trained_with(manifest: Mapping[str, Any]) -> str:
    """Returns the tokenizer that a checkpoint names; CheckpointError unless its files have the saved hashes.

    An export copies them, and whoever wrote the checkpoint may have named any path of this machine.
    """
    spec = str(manifest["config"]["data"]["tokenizer"])
    if spec == "bytes" or (spec == "none" and manifest["state"]["extra"].get("tokenizer") is None):
        return spec
    if not is_saved_tokenizer(spec, manifest):
        why = "is not here, has other files now, or the checkpoint does not say which"
        raise CheckpointError(
            f"the tokenizer it was trained with, {spec}, {why}: give --tokenizer bytes, a path, or none"
        )
    return spec


def is_saved_tokenizer(spec: str, manifest: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer's files have the hashes that a checkpoint says."""
    try:
        return file_hashes(tokenizer_file(spec)) == manifest["state"]["extra"].get("tokenizer")
    except (ValueError, OSError, RuntimeError):  # RuntimeError: no home folder to expand ~ to
        return False


def _tokenizer(spec: str) -> Tokenizer | None:
    try:
        return None if spec == "none" else load_tokenizer(spec)
    except ValueError as error:
        raise CheckpointError(f"{error} (convert takes --tokenizer bytes, a path, or none)") from None
