"""Turns a Hugging Face folder into a native checkpoint, or loads its weights into an engine.

import_hf(HFFolder(src), dst)                               # `threed convert`; no process group
load_hf(path, optimizer, topology, config, extras)          # `--checkpoint.resume`; every rank reads its slices
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.checkpoint import finite, fit
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.finite import narrowed
from threed.checkpoint.lazy_tensors import read_box
from threed.collectives import raise_together
from threed.config import Config, DataConfig, ModelConfig
from threed.data.tokenizer_files import folder_files
from threed.interop.huggingface.folder import HFFolder, read_object
from threed.interop.huggingface.folder_record import GENERATION, record_of
from threed.interop.native_writer import FILE_BYTES, write_tensors
from threed.precision import DTYPES
from threed.resolution import resolve_model, spelt_as
from threed.topology import Axis, Topology
from threed.zero.optimizer import Optimizer
from threed.zero.records import WEIGHT, fill_in_place, records

FREE = ("seq", "dropout")  # what a run may say of a model that comes from a folder


def import_hf(
    folder: HFFolder, out: Path, dtype: str | None = None, tokenizer: str = "none",
    extra: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes a folder's weights as the native checkpoint `out`, whole or not at all; moments are left out.

    dtype: of all weights; None: each as it is. tokenizer: the one that an export uses. extra: kept in the manifest,
    such as the hashes of the tokenizer's files and the folder's record. Raises CheckpointError with all that does not
    fit, and for values that overflow.
    """
    if problems := list(folder.problems()):
        raise CheckpointError("; ".join(problems))
    config = Config(model=folder.model, data=DataConfig(tokenizer=tokenizer))
    state, tally = {"extra": {"tokenizer": None, **(extra or {})}}, finite.Tally()

    def check(part: str, name: str, values: Tensor) -> None:
        tally.passed(name, values)

    write_tensors(out, config, folder, dtype, check, state, file_bytes)
    tally.tell(out)
    return out


def load_hf(
    path: Path, optimizer: Optimizer, topology: Topology, config: Config, extras: Extras
) -> dict[str, Any]:
    """Fills the optimizer with a folder's weights, moments of zero and the initial loss scale; returns the counters of
    a run's begin.

    Collective. The first rank checks the whole folder, all others open the files that they need. CheckpointError on
    every rank where something does not fit, before anything is overwritten.
    """
    everyone = topology.axis("world")
    folder, record, problems = _opened(path, config, everyone)
    raise_together(problems, everyone, CheckpointError)
    assert folder is not None
    record = collectives.exchange(record, everyone)[0]
    here = fit.expected(optimizer, extras.buffers, topology)
    unlike = fit.differences(folder.shapes, here.weights, "weights") if everyone.index == 0 else []
    raise_together(unlike, everyone, CheckpointError)
    raise_together(_overflows(folder, optimizer, config), everyone, CheckpointError)

    restore = finite.Restore(folder, here.trained)
    with optimizer.consistency.changing():
        fill_in_place(optimizer, restore)
        problems = [f"{path}: {problem}" for problem in restore.problems]
        raise_together(problems, everyone, CheckpointError)
    optimizer.updates.zero_()
    optimizer.bad.restore({"skips": 0.0})
    optimizer.scaler.restore({})
    return {"steps": 0, "consumed": 0, "extra": {"hf": record}}


def _opened(
    path: Path, config: Config, everyone: Axis
) -> tuple[HFFolder | None, dict[str, Any], list[str]]:
    """Returns a folder, its record on the first rank, and problems."""
    try:
        folder = HFFolder(path)
        problems = model_differences(path, folder.model, config.model)
        if everyone.index:
            return folder, {}, problems
        return folder, record_of_folder(folder), problems or list(folder.problems())
    except CheckpointError as error:
        return None, {}, [str(error)]
    except Exception as error:  # so that every rank refuses
        return None, {}, [f"{path} cannot be read: {type(error).__name__}: {plain(error)}"]


def record_of_folder(folder: HFFolder) -> dict[str, Any]:
    """Returns the record of a folder (`folder_record`). Raises CheckpointError if a file is malformed."""
    path = folder.path / GENERATION
    try:
        generation = None
        if path.is_file():
            read_object(path)  # CheckpointError if it is not an object
            generation = path.read_bytes().decode("utf-8-sig")
        return record_of(folder.config, generation, folder_files(folder.path).hashes())
    except OSError as error:
        raise CheckpointError(f"{folder.path} cannot be read: {plain(error)}") from None


def model_differences(path: Path, saved: ModelConfig, model: ModelConfig) -> list[str]:
    """Returns what of a run's model is another than that of the folder `path`, one line each."""
    found, wanted = dict(spelt_as(saved, model)), dict(resolve_model(model))
    names = [name for name in found if name not in FREE and found[name] != wanted[name]]
    what = f"the model of {path} has"
    return [f"{what} {name} = {found[name]}, this run has {wanted[name]}" for name in names]


def _overflows(folder: HFFolder, optimizer: Optimizer, config: Config) -> list[str]:
    """Returns which of this rank's weights are beyond the run's format; fp32's and bf16's ranges count as one."""
    dtype = DTYPES[config.precision.dtype]
    try:
        for record in records(optimizer, (WEIGHT,)):
            piece = record.piece
            tensor = folder.tensor(WEIGHT, piece.name)
            if torch.finfo(tensor.dtype).max > 2 * torch.finfo(dtype).max:
                narrowed(piece.name, read_box(tensor, piece.start, piece.size), dtype)
    except CheckpointError as error:
        return [f"{folder.path}: {error}"]
    return []
