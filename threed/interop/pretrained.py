"""How a run begins from a Hugging Face folder, or what was converted from one: `--checkpoint.resume FOLDER`.

    load(argv, begin=find)

The folder determines the model: it overrides the keys of a preset or file, and a flag with another
value is refused. Only `seq` and `dropout` are the run's own. The run uses the folder's tokenizer
unless `--data.tokenizer` names another, which is required if the folder has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.manifest import MANIFEST, read_manifest
from threed.config import Config, ConfigError, ModelConfig
from threed.interop.convert import saved_files
from threed.interop.huggingface.folder import HFFolder, is_hf_folder
from threed.resolution import spelt_as

SEQ = 256  # default sequence length, if the model has as many positions
FIX = "give the model's tokenizer with --data.tokenizer FOLDER (or bytes, if the model was trained on bytes)"


def find(config: Config, check: bool = True) -> dict[str, dict[str, Any]]:
    """Returns the values that the folder `checkpoint.resume` gives, by group and key.

    Empty if no run begins from it: it is no such folder, or a checkpoint with steps, whose run
    states its own model.

    Args:
        check: also check all tensors.

    Raises:
        ConfigError: the folder cannot be used.
    """
    path = Path(config.checkpoint.resume)
    if config.checkpoint.resume in ("auto", "none"):
        return {}
    values: dict[str, dict[str, Any]] = {}
    try:
        if (saved := _open(path)) is None:
            return {}
        if check and (problems := list(saved.problems())):
            raise CheckpointError("; ".join(problems))
        if "tokenizer" not in config.data.model_fields_set:
            values["data"] = {"tokenizer": saved.tokenizer(FIX)}
    except (CheckpointError, OSError) as error:
        raise ConfigError([f"--checkpoint.resume {path}: {error}"]) from None
    if saved.steps:
        return {}
    seq = {"seq": default_seq(saved.model)}
    return {**values, "model": dict(spelt_as(saved.model, config.model)) | seq}


def default_seq(model: ModelConfig) -> int:
    """Returns the sequence length of a pretrained model that nothing else sets."""
    return min(SEQ, model.positions or model.seq)


@dataclass(frozen=True)
class NativeFolder:
    """A native checkpoint that a run begins from. Its tensors are checked when they are loaded."""

    manifest: Mapping[str, Any]
    model: ModelConfig
    steps: int

    def problems(self) -> Iterable[str]:
        """Returns nothing; see `HFFolder.problems`."""
        return ()

    def tokenizer(self, fix: str) -> str:
        """Returns its tokenizer, as `--data.tokenizer`.

        Raises:
            CheckpointError: it is unknown or has changed; the message ends with `fix`.
        """
        spec = str(self.manifest["config"]["data"]["tokenizer"])
        if spec == "none":
            raise CheckpointError(f"the checkpoint does not name the tokenizer of its model: {fix}")
        # A checkpoint from elsewhere may name any path. A resumed run compares tokenizers itself.
        if spec != "bytes" and not self.steps and saved_files(spec, self.manifest) is None:
            what = f"its tokenizer, {plain(spec)}, is not here or has other files now"
            raise CheckpointError(f"{what}: {fix}")
        return spec


def _open(path: Path) -> HFFolder | NativeFolder | None:
    """Opens a folder to begin from; None for other paths, or if a checkpoint's model is invalid.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if is_hf_folder(path):
        return HFFolder(path)
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_manifest(path)
    try:
        model = ModelConfig.model_validate(manifest["config"]["model"])
    except ValueError:
        return None
    return NativeFolder(manifest, model, manifest["state"]["steps"])
