"""Conversion between checkpoint formats; implements `threed convert SRC DST`.

    convert("runs/gpt/checkpoints/step-200", "gpt", dtype="bf16")  # native -> Hugging Face
    convert("runs/mine", "mine")                                   # a custom model -> safetensors
    convert("Llama-3.1-8B", "llama")                               # Hugging Face -> native, weights
    convert("Llama-3.1-8B", "llama-fp16", dtype="fp16", to="hf")   # new dtype, files up to 5 GB
    convert("zero/global_step100", "llama", allow_pickle=True)     # DeepSpeed -> native

The format of the source folder is detected from its files. No process group is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.run_folder import candidates
from threed.core.source import names_model
from threed.data.tokenizer import Tokenizer, TokenizerJson, load_tokenizer
from threed.data.tokenizer_files import TokenizerFiles, find_files, folder_files
from threed.interop.deepspeed.checkpoint_reader import DeepSpeedCheckpoint, step_folder
from threed.interop.huggingface import folder_record
from threed.interop.huggingface.export import export_hf, write_folder
from threed.interop.huggingface.folder import CONFIG, HFFolder, has_weights, is_hf_folder
from threed.interop.huggingface.native_writer import write_native
from threed.interop.huggingface.weights import import_hf, record_of_folder
from threed.interop.megatron.checkpoint import MegatronCheckpoint, is_dist, is_legacy
from threed.interop.safetensors_folder import export_safetensors, is_safetensors_folder


def convert(
    src: str | Path, dst: str | Path, *, dtype: str | None = None, tokenizer: str | None = None, to: str | None = None,
    allow_pickle: bool = False, config: str | Path | None = None,
) -> Path:  # fmt: skip
    """Converts the checkpoint folder `src` into the new folder `dst`.

    Args:
        src: the folder of a native, Hugging Face, DeepSpeed or Megatron-LM checkpoint, or a run
            folder, whose newest checkpoint is converted.
        dst: the folder to write; it must be empty or not exist.
        dtype: dtype of the written weights, a key of `precision.DTYPES`; None keeps the source's
            dtypes.
        tokenizer: "bytes", a folder, the path of a tokenizer.json, or "none". None means the
            tokenizer of the Hugging Face folder, or of the run that wrote the native checkpoint.
            For DeepSpeed and Megatron-LM checkpoints, None means "none".
        to: format to write: "native", "hf" or "safetensors" (weights under threed's names, and
            config.toml). None means "safetensors" for a native checkpoint of a custom model or
            module, "hf" for any other native checkpoint, and "native" for all other formats.
        allow_pickle: whether to read the pickle-based checkpoints of DeepSpeed and Megatron-LM.
        config: for a DeepSpeed checkpoint, the path of the model's transformers config.json, or of
            the folder that contains this file. None searches the checkpoint folder and its parent.

    Returns:
        The path of the written folder.

    Raises:
        CheckpointError: if the checkpoint cannot be converted; the message contains a fix.
    """
    src, dst = _newest(Path(src)), Path(dst)
    kind = kind_of(src, allow_pickle)
    to = to or (_default_format(src) if kind == "native" else "native")
    if dst.is_file() or (dst.is_dir() and any(dst.iterdir())):
        fix = "give DST an unused name, or an empty folder"
        raise CheckpointError(f"{dst} exists already: {fix}")
    if to == "safetensors":
        if kind != "native":
            fix = "convert it to a native checkpoint first, and that one to safetensors"
            raise CheckpointError(f"{src} is a {kind} checkpoint: {fix}")
        if tokenizer is not None:
            fix = "leave it out; config.toml names the tokenizer of the run"
            raise CheckpointError(f"--tokenizer {tokenizer}: a safetensors folder has none: {fix}")
        return export_safetensors(src, dst, dtype)
    if kind == "hf":
        return _from_hf(HFFolder(src), dst, to, dtype, tokenizer)
    if kind == to:
        why = "it loads in any topology as it is"
        raise CheckpointError(f"{src} is a native checkpoint already: {why}")
    if kind == "native":
        return _from_native(src, dst, dtype, tokenizer)
    if to != "native":
        fix = "convert it to a native checkpoint first, and that one to hf"
        raise CheckpointError(f"{src} is a {kind} checkpoint: {fix}")
    path, hashes = _path_and_hashes(tokenizer or "none")
    if kind == "Megatron-LM":
        extra = {"tokenizer": hashes, "hf": None}
        return write_native(MegatronCheckpoint(src), dst, dtype, path, extra)
    found = DeepSpeedCheckpoint(src, _config_of(src, config))
    record = folder_record.record_of(found.config, None, hashes or {})
    return write_native(found, dst, dtype, path, {"tokenizer": hashes, "hf": record})


def _newest(src: Path) -> Path:
    """Returns the newest checkpoint of a run folder; any other path is returned unchanged."""
    return src if (src / native.MANIFEST).exists() else next(candidates(src, "auto"), src)


def _default_format(src: Path) -> str:
    """Returns the format to which the native checkpoint `src` is converted by default.

    The format is "hf" (Hugging Face). For custom models and plain modules it is "safetensors",
    because they have no Hugging Face layout in threed.
    """
    model = native.read_manifest(src)["config"]["model"]
    # A checkpoint of a plain module without token ids has a vocabulary size of 0.
    return "safetensors" if names_model(str(model["arch"])) or model.get("vocab") == 0 else "hf"


def _config_of(path: Path, given: str | Path | None) -> Path:
    """Returns the path of the config.json of a DeepSpeed checkpoint's model.

    Args:
        path: the checkpoint folder.
        given: the file, or the folder that contains the file. With None, the file is searched in
            `path` and in the parent folder of `path`.

    Raises:
        CheckpointError: if the file is not found.
    """
    places = [path / CONFIG, path.absolute().parent / CONFIG]
    where = f"neither {path} nor its parent folder has one"
    if given is not None:
        places = [Path(given), Path(given) / CONFIG]
        where = f"--config {given} is neither a file nor a folder with config.json"
    for place in places:
        if place.is_file():
            return place
    raise CheckpointError(
        f"DeepSpeed does not save the model's configuration, so its transformers {CONFIG} is required: {where};"
        " give --config FILE"
    )


def _from_native(src: Path, dst: Path, dtype: str | None, spec: str | None) -> Path:
    manifest = native.read_manifest(src)
    arch = str(manifest["config"]["model"]["arch"])
    if names_model(arch):
        why = f"its model is the code {arch}, for which Hugging Face has no layout"
        fix = "--to safetensors writes its weights under their own names"
        raise CheckpointError(f"{src}: {why}: {fix}")
    if spec is not None:
        return export_hf(src, dst, _tokenizer(spec), dtype)
    extra = manifest["state"]["extra"]
    spec, files = _run_tokenizer(manifest)
    record = folder_record.validated(extra.get("hf"))
    if files is not None and record is not None and record["tokenizer"] == extra["tokenizer"]:
        # The files of the tokenizer are copied unchanged, without parsing them.
        return export_hf(src, dst, None, dtype, files=files)
    return export_hf(src, dst, _tokenizer(spec if files is None else files), dtype)


def _from_hf(folder: HFFolder, dst: Path, to: str, dtype: str | None, spec: str | None) -> Path:
    own = folder_files(folder.path)
    record = record_of_folder(folder)
    if to == "native":
        path, hashes = _path_and_hashes(spec or "none")
        if not spec and own.files:
            path, hashes = own.spec, own.hashes()
        return import_hf(folder, dst, dtype, path, {"tokenizer": hashes, "hf": record})
    if problems := list(folder.problems()):
        raise CheckpointError("; ".join(problems))
    tokenizer = _tokenizer(spec) if spec else None
    extra_keys, files = folder_record.for_export(record, tokenizer)
    hf_class = folder.model.layout.hf_class
    config = {**folder.config, "architectures": [hf_class], **extra_keys}
    return write_folder(dst, folder.table, folder, config, dtype, tokenizer if spec else own, files)


def _path_and_hashes(spec: str) -> tuple[str, dict[str, str] | None]:
    """Returns the path of a tokenizer as a checkpoint stores it, and the hashes of its files.

    Args:
        spec: the tokenizer: "bytes", "none", a folder, or the path of a tokenizer.json.

    Returns:
        (path, hashes). For the tokenizer "none", None instead of hashes.
    """
    tokenizer = _tokenizer(spec)
    if tokenizer is None or spec == "bytes":
        return spec, tokenizer.files if tokenizer else None
    return find_files(spec).spec, tokenizer.files


def kind_of(path: Path, allow_pickle: bool = False) -> str:
    """Returns the format of a checkpoint folder: "native", "hf", "DeepSpeed" or "Megatron-LM".

    Args:
        path: the folder; the format is detected from its files.
        allow_pickle: whether the pickle-based checkpoints of DeepSpeed and Megatron-LM are
            accepted. If so, a folder that has both such files and Hugging Face's files counts as
            "DeepSpeed" or "Megatron-LM".

    Raises:
        CheckpointError: if the format is not recognized, or is pickle-based and `allow_pickle` is
            False.
    """
    if (path / native.MANIFEST).is_file():
        return "native"
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        fix = native.did_you_mean(path) or "give that"
        raise CheckpointError(f"{path} is a file: a checkpoint is a folder, {fix}")
    if is_safetensors_folder(path):
        fix = "threed.load(PATH, build=MODEL) loads its weights; convert the checkpoint of the run"
        raise CheckpointError(
            f"{path} is a safetensors folder of threed, which is not converted: {fix}"
        )
    other = _other_program(path)
    if other is not None and allow_pickle:
        return other
    if is_hf_folder(path) and (other is None or has_weights(path)):
        return "hf"
    if other is not None:
        raise CheckpointError(
            f"{path} is a {other} checkpoint, which consists of pickles: --allow-pickle reads it without"
            " executing anything in them"
        )
    hint = native.did_you_mean(path) or "give a step-N folder, or one with a config.json"
    what = f"it has neither {native.MANIFEST} nor config.json"
    raise CheckpointError(f"{path} is not a checkpoint: {what}; {hint}")


def _other_program(path: Path) -> str | None:
    """Returns "DeepSpeed" or "Megatron-LM" if the folder has the files of that program, else None.

    Raises CheckpointError if the folder has Megatron-LM's legacy layout (mp_rank_* folders).
    """
    if step_folder(path) is not None:
        return "DeepSpeed"
    if is_legacy(path):
        raise CheckpointError(
            f"{path} has Megatron-LM's legacy layout (mp_rank_* folders), which is not supported: run Megatron-LM's"
            " training script with --ckpt-convert-format torch_dist --ckpt-convert-save DIR, and convert DIR"
        )
    return "Megatron-LM" if is_dist(path) else None


def _run_tokenizer(manifest: Mapping[str, Any]) -> tuple[str, TokenizerFiles | None]:
    """Returns the tokenizer of the run that wrote a native checkpoint, and the tokenizer's files.

    An export copies these files. If the checkpoint is from another machine, the path of the
    tokenizer may contain different files on this machine, so the hashes of the files are compared
    with the hashes in the checkpoint.

    Returns:
        (tokenizer, files). For the tokenizers "bytes" and "none", None instead of files.

    Raises:
        CheckpointError: if the files do not match the hashes in the checkpoint.
    """
    spec = str(manifest["config"]["data"]["tokenizer"])
    saved = manifest["state"]["extra"].get("tokenizer")
    if spec == "bytes" or (spec == "none" and saved is None):
        return spec, None
    files = saved_files(spec, manifest)
    if files is None:
        why = "is missing, has other files now, or has no hashes in the checkpoint"
        raise CheckpointError(
            f"the tokenizer it was trained with, {spec}, {why}: give --tokenizer bytes, a path, or none"
        )
    return spec, files


def saved_files(spec: str, manifest: Mapping[str, Any]) -> TokenizerFiles | None:
    """Returns the files of a tokenizer; None if files are missing or differ from the manifest's.

    Args:
        spec: the folder of the tokenizer, or the path of a tokenizer.json.
        manifest: manifest of a native checkpoint, which has the hashes of the tokenizer's files.
    """
    saved = manifest["state"]["extra"].get("tokenizer")
    try:
        found = folder_files(Path(spec)) if Path(spec).is_dir() else find_files(spec)
        return found if found.files and found.hashes() == saved else None
    except (ValueError, OSError, RuntimeError):  # RuntimeError: no home folder for `~`
        return None


def _tokenizer(spec: str | TokenizerFiles) -> Tokenizer | None:
    try:
        if isinstance(spec, TokenizerFiles):
            return TokenizerJson(spec)
        return None if spec == "none" else load_tokenizer(spec)
    except ValueError as error:
        fix = "convert takes --tokenizer bytes, a path, or none"
        raise CheckpointError(f"{error} ({fix})") from None
