"""Which folders are checkpoints of DeepSpeed or Megatron-LM, and how they are opened.

kind_of(folder)                       "DeepSpeed", "Megatron-LM" or None
open_source(folder, kind, config)     a `Source`; config: a config.json of transformers, or a folder that has one
"""

from __future__ import annotations

from pathlib import Path

from threed.checkpoint.files import CheckpointError
from threed.interop.deepspeed.checkpoint import DeepSpeedCheckpoint, step_folder
from threed.interop.deepspeed.universal import UniversalCheckpoint, is_universal
from threed.interop.huggingface.folder import CONFIG
from threed.interop.megatron.checkpoint import is_dist, open_dist
from threed.interop.megatron.weights import is_legacy
from threed.interop.source import Source


def kind_of(path: Path) -> str | None:
    """Returns which program wrote a folder, by its files; None if none of these.

    Raises:
        CheckpointError: the folder has Megatron's legacy layout, which is not read.
    """
    if path.is_dir() and step_folder(path) is not None:
        return "DeepSpeed"
    if is_legacy(path):
        raise CheckpointError(
            f"{path} has Megatron-LM's legacy layout (mp_rank_* folders), which is not read: run Megatron-LM's"
            " training script with --ckpt-convert-format torch_dist --ckpt-convert-save DIR, and convert DIR"
        )
    return "Megatron-LM" if is_dist(path) else None


def refusal(path: Path, kind: str) -> str:
    """Returns why a folder is not read unless somebody says so."""
    return (
        f"{path} is a checkpoint of {kind}'s, which is made of pickles: --allow-pickle reads it, and"
        " executes nothing in them"
    )


def open_source(path: Path, kind: str, config: Path | None) -> Source:
    """Returns what is in a folder. Raises CheckpointError for what is not read, by name."""
    if kind == "Megatron-LM":
        return open_dist(path)
    reader = UniversalCheckpoint if is_universal(path) else DeepSpeedCheckpoint
    return reader(path, _config_of(path, kind, config))


def _config_of(path: Path, kind: str, given: Path | None) -> Path:
    """Returns the configuration of the model, given or beside."""
    places = [given, given / CONFIG] if given else [path / CONFIG, path.absolute().parent / CONFIG]
    for place in places:
        if place is not None and place.is_file():
            return place
    where = f"--config {given} is none" if given else f"there is none in {path}, nor above it"
    raise CheckpointError(
        f"{kind} does not save what the model is, and a {CONFIG} of transformers is needed: {where}; give --config FILE"
    )
