"""How a run begins from a Hugging Face folder, or what was converted from one: `--checkpoint.resume FOLDER`.

    load(argv, begin=find)

The model is the folder's: its keys override those of a preset or file, and a flag with another value is refused. Only
the sequence's length and the dropout are the run's own. The run uses the folder's tokenizer unless `--data.tokenizer`
names another, which is required if the folder has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError, plain
from threed.config import Config, ConfigError, ModelConfig
from threed.data.tokenizer_files import VOCABULARY_NAMES, folder_files
from threed.interop.convert import saved_files
from threed.interop.huggingface.folder import HFFolder, is_hf_folder
from threed.resolution import resolve_model, spelt_as

SEQ = 256  # default sequence length, if the model has as many positions
FIX = "give the model's tokenizer with --data.tokenizer FOLDER (or bytes, if the model was trained on bytes)"


def find(config: Config, check: bool = True) -> dict[str, dict[str, Any]]:
    """Returns the values that the folder `checkpoint.resume` gives, by group and key; none if no run begins from it.

    Args:
        check: check all of its tensors, too.

    Raises:
        ConfigError: the folder cannot be used.
    """
    path = Path(config.checkpoint.resume)
    if config.checkpoint.resume in ("auto", "none"):
        return {}
    try:
        opened = _open(path, check, "tokenizer" in config.data.model_fields_set)
    except (CheckpointError, OSError) as error:
        raise ConfigError([f"--checkpoint.resume {path}: {error}"]) from None
    if opened is None:
        return {}
    model, tokenizer = resolve_model(spelt_as(opened[0], config.model)), opened[1]
    values = {"model": {**dict(model), "seq": default_seq(model)}}
    return values | ({} if tokenizer is None else {"data": {"tokenizer": tokenizer}})


def default_seq(model: ModelConfig) -> int:
    """Returns the sequence length of a pretrained model that nothing else sets."""
    return min(SEQ, model.positions or model.seq)


def _open(path: Path, check: bool, named: bool) -> tuple[ModelConfig, str | None] | None:
    """Returns the model of a Hugging Face folder, or of a native checkpoint without any step, and its tokenizer if it
    has one. None for another thing: a run that goes on says itself what its model is, and is told where that differs.
    named: the run names a tokenizer.
    """
    if is_hf_folder(path):
        folder = HFFolder(path)
        if problems := list(folder.problems()) if check else []:
            raise CheckpointError("; ".join(problems))
        files = folder_files(path)
        if named:
            return folder.model, None
        if not files.vocabulary:
            raise CheckpointError(f"the folder has no tokenizer ({VOCABULARY_NAMES}): {FIX}")
        return folder.model, str(path.absolute())
    if not (path / native.MANIFEST).is_file():
        return None
    manifest = native.read_manifest(path)
    name = str(manifest["config"]["data"]["tokenizer"])
    if name == "none" and not named:
        raise CheckpointError(f"the checkpoint does not name the tokenizer of its model: {FIX}")
    if manifest["state"]["steps"]:
        return None
    try:
        model = ModelConfig.model_validate(manifest["config"]["model"])
    except ValueError:
        return None
    if named or name == "bytes":
        return model, None
    if saved_files(name, manifest) is None:  # a checkpoint from elsewhere may name any path
        what = f"its tokenizer, {plain(name)}, is not here or has other files now"
        raise CheckpointError(f"{what}: {FIX}")
    return model, name
