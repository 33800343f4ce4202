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

from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.data.tokenizer import Tokenizer, TokenizerJson, load_tokenizer
from threed.data.tokenizer_files import TokenizerFiles, find_files, folder_files
from threed.interop.deepspeed.checkpoint import DeepSpeedCheckpoint, step_folder
from threed.interop.huggingface import folder_record
from threed.interop.huggingface.export import export_hf, write_folder
from threed.interop.huggingface.folder import CONFIG, HFFolder, has_weights, is_hf_folder
from threed.interop.huggingface.weights import import_hf, record_of_folder
from threed.interop.megatron.checkpoint import MegatronCheckpoint, is_dist, is_legacy
from threed.interop.native_writer import write_native


def convert(
    src: str | Path, dst: str | Path, *, dtype: str | None = None, tokenizer: str | None = None, to: str | None = None,
    allow_pickle: bool = False, config: str | Path | None = None,
) -> Path:  # fmt: skip
    """Converts the checkpoint folder `src` into the new folder `dst`, and returns that.

    Args:
        dtype: of the weights; None: as they are.
        tokenizer: "bytes", a folder, the path of a tokenizer.json, or "none"; None: that of the folder or of the run.
        to: "native" or "hf"; None: the other one than `src` is.
        allow_pickle: read checkpoints of other programs too.
        config: of their model, if it is elsewhere.

    Raises:
        CheckpointError: with the fix.
    """
    src, dst = Path(src), Path(dst)
    kind = kind_of(src, allow_pickle)
    to = to or ("hf" if kind == "native" else "native")
    if dst.is_file() or (dst.is_dir() and any(dst.iterdir())):
        fix = "give DST a name that is free, or an empty folder"
        raise CheckpointError(f"{dst} exists already: {fix}")
    if kind == "hf":
        return _from_hf(HFFolder(src), dst, to, dtype, tokenizer)
    if kind == to:
        why = "it loads in any topology as it is"
        raise CheckpointError(f"{src} is a native checkpoint already: {why}")
    if kind == "native":
        return _from_native(src, dst, dtype, tokenizer)
    if to != "native":
        fix = "make a native one of it first, and of that one of hf"
        raise CheckpointError(f"{src} is a checkpoint of {kind}'s: {fix}")
    path, hashes = _named(tokenizer or "none")
    if kind == "Megatron-LM":
        extra = {"tokenizer": hashes, "hf": None}
        return write_native(MegatronCheckpoint(src), dst, dtype, path, extra)
    found = DeepSpeedCheckpoint(src, _config_of(src, config))
    record = folder_record.record_of(found.config, None, hashes or {})
    return write_native(found, dst, dtype, path, {"tokenizer": hashes, "hf": record})


def _config_of(path: Path, given: str | Path | None) -> Path:
    """Returns the configuration of a model of DeepSpeed's: given, in the folder, or above it."""
    places = [path / CONFIG, path.absolute().parent / CONFIG]
    where = f"there is none in {path}, nor above it"
    if given is not None:
        places, where = [Path(given), Path(given) / CONFIG], f"--config {given} is none"
    for place in places:
        if place.is_file():
            return place
    raise CheckpointError(
        f"DeepSpeed does not save what the model is, and a {CONFIG} of transformers is needed: {where}; give --config FILE"
    )


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


def _from_hf(folder: HFFolder, dst: Path, to: str, dtype: str | None, spec: str | None) -> Path:
    own = folder_files(folder.path)
    record = record_of_folder(folder)
    if to == "native":
        path, hashes = _named(spec or "none")
        if not spec and own.files:
            path, hashes = own.spec, own.hashes()
        return import_hf(folder, dst, dtype, path, {"tokenizer": hashes, "hf": record})
    if problems := list(folder.problems()):
        raise CheckpointError("; ".join(problems))
    tokenizer = _tokenizer(spec) if spec else None
    more, files = folder_record.written(record, tokenizer)
    hf_class = folder.model.layout.hf_class
    config = {**folder.config, "architectures": [hf_class], **more}
    return write_folder(dst, folder.table, folder, config, dtype, tokenizer if spec else own, files)


def _named(spec: str) -> tuple[str, dict[str, str] | None]:
    """Returns the name of a tokenizer in a checkpoint, and the hashes of its files."""
    tokenizer = _tokenizer(spec)
    if tokenizer is None or spec == "bytes":
        return spec, tokenizer.files if tokenizer else None
    return find_files(spec).spec, tokenizer.files


def kind_of(path: Path, allow_pickle: bool = False) -> str:
    """Returns "native", "hf", "DeepSpeed" or "Megatron-LM", by the files of a folder.

    Args:
        allow_pickle: a folder that is both of Hugging Face's and another program's is the other's.

    Raises:
        CheckpointError: it is none of these, or is made of pickles and these are not allowed.
    """
    if (path / native.MANIFEST).is_file():
        return "native"
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        fix = native.did_you_mean(path) or "give that"
        raise CheckpointError(f"{path} is a file: a checkpoint is a folder, {fix}")
    other = _other_program(path)
    if other is not None and allow_pickle:
        return other
    if is_hf_folder(path) and (other is None or has_weights(path)):
        return "hf"
    if other is not None:
        raise CheckpointError(
            f"{path} is a checkpoint of {other}'s, which is made of pickles: --allow-pickle reads it, and"
            " executes nothing in them"
        )
    hint = native.did_you_mean(path) or "give a step-N folder, or one with a config.json"
    what = f"it has neither {native.MANIFEST} nor config.json"
    raise CheckpointError(f"{path} is no checkpoint: {what}; {hint}")


def _other_program(path: Path) -> str | None:
    """Returns which other program wrote a folder, by its files."""
    if step_folder(path) is not None:
        return "DeepSpeed"
    if is_legacy(path):
        raise CheckpointError(
            f"{path} has Megatron-LM's legacy layout (mp_rank_* folders), which is not read: run Megatron-LM's"
            " training script with --ckpt-convert-format torch_dist --ckpt-convert-save DIR, and convert DIR"
        )
    return "Megatron-LM" if is_dist(path) else None


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
        fix = "convert takes --tokenizer bytes, a path, or none"
        raise CheckpointError(f"{error} ({fix})") from None
