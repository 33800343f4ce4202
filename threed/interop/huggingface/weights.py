"""Converts a Hugging Face folder to a native checkpoint, or loads its weights into an engine.

import_hf(HFFolder(src), dst)                         # for `threed convert`; no process group
load_hf(path, optimizer, topology, config, extras)    # for `--checkpoint.resume`; collective
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint import compatibility, finite
from threed.checkpoint.files import CheckpointError, plain, reading
from threed.checkpoint.finite import narrowed
from threed.checkpoint.lazy_tensors import read_box
from threed.checkpoint.run_folder import spelled_as
from threed.checkpoint.saving import Extras
from threed.config import Config, DataConfig, ModelConfig
from threed.config.resolution import resolve_model
from threed.data.tokenizer_files import folder_files
from threed.distributed import collectives
from threed.distributed.collectives import raise_together
from threed.distributed.topology import Axis, Topology
from threed.interop.huggingface.folder import HFFolder, read_object
from threed.interop.huggingface.folder_record import GENERATION, record_of
from threed.interop.huggingface.native_writer import FILE_BYTES, write_tensors
from threed.ops.precision import DTYPES
from threed.zero.optimizer import Optimizer
from threed.zero.state import WEIGHT, fill_states, records

# Model keys that a run may choose; the folder determines all other keys.
FREE = ("seq", "dropout", "mtp_loss")


def import_hf(
    folder: HFFolder, out: Path, dtype: str | None = None, tokenizer: str = "none",
    extra: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the weights of a folder as a native checkpoint without moments, atomically.

    Args:
        folder: the Hugging Face folder.
        out: path of the native checkpoint to write.
        dtype: dtype of all written weights; None keeps each weight's dtype.
        tokenizer: path of the tokenizer, which the manifest stores for a later export.
        extra: additional entries for the manifest: the hashes of the tokenizer's files, and the
            record of the folder (see `folder_record`).
        file_bytes: maximum size of a file, in bytes; a larger tensor has its own file.

    Returns:
        `out`.

    Raises:
        CheckpointError: if the tensors do not match the configuration, or values overflow `dtype`.
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
    """Loads the weights of a Hugging Face folder into the optimizer. Collective.

    Moments, counters and the loss scale are reset to their initial values. Rank 0 checks all
    tensors of the folder; other ranks only open the files that they need.

    Args:
        path: path of the Hugging Face folder.
        optimizer: the optimizer, whose master weights are overwritten.
        topology: the topology of the run.
        config: the configuration of the run, whose model must match the folder.
        extras: the model's buffers. They are not loaded, because a folder has no buffers.

    Returns:
        The counters of a run at step 0. The key "extra" has a dict, whose entry "hf" is the record
        of the folder (see `folder_record`).

    Raises:
        CheckpointError: on every rank if any rank finds a problem. Mismatches with the model and
            overflows are found before any weight is overwritten. Unreadable and non-finite values
            are found while weights are being overwritten.
    """
    everyone = topology.axis("world")
    folder, record, problems = _opened(path, config, everyone)
    raise_together(problems, everyone, CheckpointError)
    assert folder is not None
    record = collectives.exchange(record, everyone)[0]
    here = compatibility.expected(optimizer, extras.buffers, topology)
    unlike = list[str]()
    if everyone.index == 0:
        unlike = compatibility.differences(folder.shapes, here.weights, "weights")
    raise_together(unlike, everyone, CheckpointError)
    raise_together(_overflows(folder, optimizer, config), everyone, CheckpointError)

    restore = finite.Restore(folder, here.trained)
    with optimizer.consistency.changing():
        fill_states(optimizer, restore)
        problems = [f"{path}: {problem}" for problem in restore.problems]
        raise_together(problems, everyone, CheckpointError)
    optimizer.updates.zero_()
    optimizer.rates.restore({})
    optimizer.bad.restore({"skips": 0.0})
    optimizer.scaler.restore({})
    return {"steps": 0, "consumed": 0, "extra": {"hf": record}}


def _opened(
    path: Path, config: Config, everyone: Axis
) -> tuple[HFFolder | None, dict[str, Any], list[str]]:
    """Returns (folder, record of the folder, error texts).

    For a folder that cannot be read, None is returned as the folder. Only rank 0 reads the record
    and checks the tensors; on other ranks, the record is empty.
    """
    try:
        folder = HFFolder(path, multi_token=config.model.mtp_depth > 0)
        problems = model_differences(path, folder.model, config.model)
        if everyone.index:
            return folder, {}, problems
        return folder, record_of_folder(folder), problems or list(folder.problems())
    except CheckpointError as error:
        return None, {}, [str(error)]
    except Exception as error:  # not raised here, so that all ranks raise an error together
        return None, {}, [f"{path} cannot be read: {type(error).__name__}: {plain(error)}"]


def record_of_folder(folder: HFFolder) -> dict[str, Any]:
    """Returns the record of a folder (see `folder_record`).

    Raises CheckpointError if a file is malformed.
    """
    path = folder.path / GENERATION
    generation = None
    with reading(folder.path):
        if path.is_file():
            read_object(path)  # raises CheckpointError if the file is not a JSON object
            generation = path.read_bytes().decode("utf-8-sig")
        return record_of(folder.config, generation, folder_files(folder.path).hashes())


def model_differences(path: Path, saved: ModelConfig, model: ModelConfig) -> list[str]:
    """Returns one error text per model key whose value differs between a run and a folder.

    Args:
        path: path of the folder, for messages.
        saved: the model configuration of the folder.
        model: the model configuration of the run.
    """
    found, wanted = dict(spelled_as(saved, model)), dict(resolve_model(model))
    names = [name for name in found if name not in FREE and found[name] != wanted[name]]
    what = f"the model of {path} has"
    return [f"{what} {name} = {found[name]}, this run has {wanted[name]}" for name in names]


def _overflows(folder: HFFolder, optimizer: Optimizer, config: Config) -> list[str]:
    """Returns a list with an error text if a weight of this rank overflows the run's dtype.

    Weights are read only if the largest number of their dtype is more than twice the largest number
    of the run's dtype. So if a run in bf16 loads fp32 weights, this function does not read them,
    because both dtypes have almost the same range.
    """
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
