"""How a run begins from a Hugging Face folder: `--checkpoint.resume FOLDER`.

    start = find(argv, defaults)            # None where the run begins from none; ConfigError for a folder that is none
    load([*start.flags, *argv], start.defaults)

The folder says what the model is: its keys count more than those of a preset or file, and a flag that says another
thing is refused. Only the sequence's length and the dropout are the run's own. Its tokenizer is the run's where no
other is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threed.arguments import load, written
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.hf_folder import HFFolder, is_hf_folder
from threed.checkpoint.hf_import import model_differences
from threed.config import ConfigError, ModelConfig, key_name

Groups = Mapping[str, Mapping[str, Any]]
SEQ = 256  # as long as nobody says how long


@dataclass(frozen=True)
class Pretrained:
    """The folder of a run; flags: those that say what its model is. defaults: of the program, with the folder's."""

    folder: HFFolder
    flags: list[str]
    defaults: Groups

    def problems(self) -> list[str]:
        """Returns what of the folder's tensors does not fit its configuration."""
        try:
            return list(self.folder.problems())
        except CheckpointError as error:
            return [str(error)]


def find(argv: list[str], defaults: Groups) -> Pretrained | None:
    """Returns the folder that a command line begins from, if it does. ConfigError with what is wrong."""
    try:
        config, options = load(argv, defaults=defaults)
    except ConfigError:
        return None  # its problems are told where all are
    path = Path(config.checkpoint.resume)
    if options.help or config.checkpoint.resume in ("auto", "none") or not is_hf_folder(path):
        return None
    try:
        folder = HFFolder(path)
    except CheckpointError as error:
        raise ConfigError([f"--checkpoint.resume {path}: {error}"]) from None
    found = Pretrained(folder, _flags(folder.model), _with(defaults, folder))
    model = load([*found.flags, *argv], defaults=found.defaults)[0].model
    if differences := model_differences(folder, model):
        raise ConfigError([f"{text}: leave the flag out, the folder says what its model is" for text in differences])
    return found


def _flags(model: ModelConfig) -> list[str]:
    said = {name: value for name, value in model if name != "seq"}
    return [word for name, value in said.items() for word in (f"--model.{key_name(name)}", written(name, value))]


def _with(defaults: Groups, folder: HFFolder) -> Groups:
    own = {name: dict(group) for name, group in defaults.items()}
    own.setdefault("model", {})["seq"] = min(SEQ, folder.model.seq)
    if (folder.path / "tokenizer.json").is_file():
        own.setdefault("data", {})["tokenizer"] = str(folder.path)
    return own
