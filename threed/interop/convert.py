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
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.data.tokenizer import Tokenizer, TokenizerJson, load_tokenizer
from threed.data.tokenizer_files import TokenizerFiles, find_files, folder_files
from threed.interop import formats, source
from threed.interop.huggingface import folder_record
from threed.interop.huggingface.export import export_hf, write_folder
from threed.interop.huggingface.folder import HFFolder, HFTensors, has_weights, is_hf_folder
from threed.interop.huggingface.weights import import_hf, record_of_folder


def convert(
    src: str | Path, dst: str | Path, *, dtype: str | None = None, tokenizer: str | None = None, to: str | None = None,
    allow_pickle: bool = False, config: str | Path | None = None,
) -> Path:  # fmt: skip
    """Converts the checkpoint folder `src` into the new folder `dst`, and returns that.

    to: "native" or "hf"; None: the other one than `src` is. dtype: of the weights; None: as they are. tokenizer:
    "bytes", a folder, the path of a tokenizer.json, or "none"; None: that of the folder or of the run.
    allow_pickle: read other programs' checkpoints too. config: of their model, if it is elsewhere. Raises
    CheckpointError with the fix.
    """
    src, dst = Path(src), Path(dst)
    kind = kind_of(src, allow_pickle)
    to = to or ("hf" if kind == "native" else "native")
    if dst.is_file() or (dst.is_dir() and any(dst.iterdir())):
        raise CheckpointError(
            f"{dst} exists already: give DST a name that is free, or an empty folder"
        )
    if kind == "native":
        if to == "native":
            raise CheckpointError(
                f"{src} is a native checkpoint already: it loads in any topology as it is"
            )
        return _from_native(src, dst, dtype, tokenizer)
    if kind != "hf":
        return _from_others(src, dst, kind, to, dtype, tokenizer, Path(config) if config else None)
    return _from_hf(HFFolder(src), dst, to, dtype, tokenizer)


def _from_native(src: Path, dst: Path, dtype: str | None, spec: str | None) -> Path:
    if spec is not None:
        return export_hf(src, dst, _tokenizer(spec), dtype)
    manifest = native.read_manifest(src)
    extra = manifest["state"]["extra"]
    spec, files = _trained_with(manifest)
    record = folder_record.checked(extra.get("hf"))
    if files is not None and record is not None and record["tokenizer"] == extra["tokenizer"]:
        return export_hf(src, dst, None, dtype, files=files)  # copied without reading them
    return export_hf(src, dst, _tokenizer(spec if files is None else files), dtype)


def _from_others(
    src: Path,
    dst: Path,
    kind: str,
    to: str,
    dtype: str | None,
    spec: str | None,
    config: Path | None,
) -> Path:
    if to != "native":
        raise CheckpointError(
            f"{src} is a checkpoint of {kind}'s: make a native one of it first, and of that one of hf"
        )
    found = formats.open_source(src, kind, config)
    path, hashes = _named(spec or "none")
    record = (
        folder_record.record_of(found.config, None, hashes or {})
        if isinstance(found, HFTensors)
        else None
    )
    return source.write_native(found, dst, dtype, path, {"tokenizer": hashes, "hf": record})


def _from_hf(folder: HFFolder, dst: Path, to: str, dtype: str | None, spec: str | None) -> Path:
    own = folder_files(folder.path)
    record = record_of_folder(folder)
    if to == "native":
        path, hashes = (
            _named(spec) if spec else (own.spec, own.hashes()) if own.files else ("none", None)
        )
        return import_hf(folder, dst, dtype, path, {"tokenizer": hashes, "hf": record})
    if problems := list(folder.problems()):
        raise CheckpointError("; ".join(problems))
    tokenizer = _tokenizer(spec) if spec else None
    more, files = folder_record.written(record, tokenizer)
    config = (
        folder.config
        | {"architectures": [architectures.layout_of(dict(folder.model)).hf_class]}
        | more
    )
    return write_folder(dst, folder.table, folder, config, dtype, tokenizer if spec else own, files)


def _named(spec: str) -> tuple[str, dict[str, str] | None]:
    """Returns the name of a tokenizer in a checkpoint, and the hashes of its files."""
    tokenizer = _tokenizer(spec)
    if tokenizer is None or spec == "bytes":
        return spec, tokenizer.files if tokenizer else None
    return find_files(spec).spec, tokenizer.files


def kind_of(path: Path, allow_pickle: bool = False) -> str:
    """Returns "native", "hf" or another program's name, by the files of a folder; CheckpointError, with a hint if there
    is one, if none of them. A folder that is both of Hugging Face's and another's is the other's where that may be."""
    if (path / native.MANIFEST).is_file():
        return "native"
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is a file: a checkpoint is a folder, {native.did_you_mean(path) or 'give that'}"
        )
    others = formats.kind_of(path)
    if others is not None and allow_pickle:
        return others
    if is_hf_folder(path) and (others is None or has_weights(path)):
        return "hf"
    if others is not None:
        raise CheckpointError(formats.refusal(path, others))
    hint = native.did_you_mean(path) or "give a step-N folder, or one with a config.json"
    raise CheckpointError(
        f"{path} is no checkpoint: it has neither {native.MANIFEST} nor config.json; {hint}"
    )


def _trained_with(manifest: Mapping[str, Any]) -> tuple[str, TokenizerFiles | None]:
    """Returns the tokenizer that a checkpoint names, and its files.

    An export copies the files, and a checkpoint from elsewhere may name any path of this machine.

    Raises:
        CheckpointError: the files do not have the hashes in the checkpoint.
    """
    spec = str(manifest["config"]["data"]["tokenizer"])
    saved = manifest["state"]["extra"].get("tokenizer")
    if spec == "bytes" or (spec == "none" and saved is None):
        return spec, None
    files = saved_files(spec, manifest)
    if files is None:
        why = "is not here, has other files now, or the checkpoint does not say which"
        raise CheckpointError(
            f"the tokenizer it was trained with, {spec}, {why}: give --tokenizer bytes, a path, or none"
        )
    return spec, files


def saved_files(spec: str, manifest: Mapping[str, Any]) -> TokenizerFiles | None:
    """Returns the files of a tokenizer; None if one is missing or does not have the hash in the checkpoint."""
    saved = manifest["state"]["extra"].get("tokenizer")
    try:
        found = folder_files(Path(spec)) if Path(spec).is_dir() else find_files(spec)
        return found if found.files and found.hashes() == saved else None
    except (ValueError, OSError, RuntimeError):  # RuntimeError: no home folder to expand ~ to
        return None


def _tokenizer(spec: str | TokenizerFiles) -> Tokenizer | None:
    try:
        if isinstance(spec, TokenizerFiles):
            return TokenizerJson(spec)
        return None if spec == "none" else load_tokenizer(spec)
    except ValueError as error:
        raise CheckpointError(
            f"{error} (convert takes --tokenizer bytes, a path, or none)"
        ) from None
