"""Configuration of a run that starts from pretrained weights: `--checkpoint.resume FOLDER`.

    threed.config.arguments.load(argv, begin=find)

FOLDER is a Hugging Face folder, or a native checkpoint that was converted from a Hugging Face
folder. The model configuration in FOLDER overrides the preset and the configuration file. A
command-line flag with a different value for a model key raises an error, except for the keys `seq`
and `dropout`, which the run may choose.

The run uses the tokenizer in FOLDER, unless `--data.tokenizer` names a different tokenizer. If
FOLDER has no tokenizer, `--data.tokenizer` is required.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.manifest import MANIFEST, read_manifest
from threed.checkpoint.run_folder import spelled_as
from threed.config import Config, ConfigError, ModelConfig
from threed.interop.convert import saved_files
from threed.interop.huggingface.folder import HFFolder, is_hf_folder
from threed.interop.huggingface.layouts import default_seq
from threed.interop.safetensors_folder import is_safetensors_folder

FIX = "give the model's tokenizer with --data.tokenizer FOLDER (or bytes, if the model was trained on bytes)"


def find(config: Config, check: bool = True) -> dict[str, dict[str, Any]]:
    """Returns the configuration values from the folder `checkpoint.resume`, by group and key.

    Returns an empty dict if `checkpoint.resume` is "auto", "none" or a folder without pretrained
    weights. A native checkpoint with completed steps does not count as pretrained weights: a run
    that resumes from such a checkpoint must define the model in its own configuration.

    Args:
        config: the configuration of the run.
        check: whether to check names, shapes and dtypes of all tensors of a Hugging Face folder.

    Raises:
        ConfigError: if the folder is damaged or not supported, or `data.tokenizer` is not set and
            the folder's tokenizer is missing.
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
    return {**values, "model": dict(spelled_as(saved.model, config.model)) | seq}


@dataclass(frozen=True)
class NativeFolder:
    """A native checkpoint from which a run starts.

    The tensors are not checked here, but when the checkpoint is loaded.

    Attributes:
        manifest: the content of the checkpoint's manifest.
        model: the model configuration in the manifest.
        steps: number of completed training steps.
    """

    manifest: Mapping[str, Any]
    model: ModelConfig
    steps: int

    def problems(self) -> Iterable[str]:
        """Returns an empty tuple, because the tensors are checked when the checkpoint is loaded."""
        return ()

    def tokenizer(self, fix: str) -> str:
        """Returns the checkpoint's tokenizer, as a value for `--data.tokenizer`.

        Args:
            fix: the suggested fix; appended to the error message.

        Raises:
            CheckpointError: if the checkpoint does not name its tokenizer, or the tokenizer's files
                are missing or have changed.
        """
        spec = str(self.manifest["config"]["data"]["tokenizer"])
        if spec == "none":
            raise CheckpointError(f"the checkpoint does not name the tokenizer of its model: {fix}")
        # The checkpoint may be from another machine: the tokenizer's path may not exist on this
        # machine, or may contain different files. If the checkpoint has completed steps, this is
        # not checked here, because the resume compares the tokenizers later.
        if spec != "bytes" and not self.steps and saved_files(spec, self.manifest) is None:
            what = f"its tokenizer, {plain(spec)}, is missing or has other files now"
            raise CheckpointError(f"{what}: {fix}")
        return spec


def _open(path: Path) -> HFFolder | NativeFolder | None:
    """Opens a Hugging Face folder or a native checkpoint.

    Returns None if `path` is neither of them, or if the manifest's model is invalid.

    Raises:
        CheckpointError: if the folder cannot be read.
    """
    if is_safetensors_folder(path):
        fix = "resume from the checkpoints of the run that it was converted from"
        raise CheckpointError(
            f"it is a safetensors folder of threed, from which no run starts: {fix}"
        )
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
