"""Writes native checkpoints from any `TensorSource`, without an engine or a process group.

    write_tensors(path, config, HFFolder(folder), dtype="bf16", state={"extra": extra})
    write_native(source, path, dtype, tokenizer, extra)     # `source`: another program's checkpoint

If the written checkpoint has only weights, a run that resumes from it starts at step 0 with zero
moments.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from threed.checkpoint.files import NAMES, CheckpointError, cut, new_folder
from threed.checkpoint.finite import narrowed
from threed.checkpoint.lazy_tensors import TensorSource, read_slabs
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, file_of, finish
from threed.checkpoint.sections import Held, SavedFile, Section
from threed.config import Config, DataConfig, ModelConfig, OptimConfig
from threed.distributed.grid import Grid
from threed.interop.huggingface.export import dtype_of
from threed.zero.state import WEIGHT

Spec = tuple[torch.dtype, tuple[int, ...]]  # (dtype in the written file, shape) of a tensor
Part = tuple[str, str]  # ("weight", "exp_avg" or "exp_avg_sq"; name of the parameter)
FILE_BYTES = 2**32
FRESH = {"steps": 0, "consumed": 0, "updates": 0.0, "skips": 0.0, "uses": {}, "extra": {}}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SQUARES = "exp_avg_sq"


class Source(TensorSource, Protocol):
    """A checkpoint of another program.

    Attributes:
        title: name of the program and kind of the checkpoint, for messages and the manifest.
        model: the model configuration.
        state: training counters, with the keys of a native checkpoint; empty if a run that resumes
            starts at step 0.
        notes: texts of warnings about contents that are not imported.
    """

    title: str
    model: ModelConfig
    state: dict[str, float]
    notes: list[str]

    def problems(self) -> Iterator[str]:
        """Yields an error text for each mismatch between the tensors and `model`."""


def write_native(
    source: Source, out: Path, dtype: str | None, tokenizer: str, extra: Mapping[str, Any]
) -> Path:
    """Writes another program's checkpoint as a native checkpoint, atomically.

    Issues a warning for each text in `source.notes`.

    Args:
        source: the checkpoint to import.
        out: path of the native checkpoint to write.
        dtype: dtype of all written weights; None keeps each weight's dtype. Moments keep their
            dtype.
        tokenizer: path of the tokenizer, which the manifest stores for a later export.
        extra: additional values for the manifest (`state["extra"]`).

    Returns:
        The path `out`.

    Raises:
        CheckpointError: if the tensors do not match the model, a value is not finite, or a second
            moment is negative.
    """
    if problems := list(source.problems()):
        raise CheckpointError("; ".join(problems))
    optim, data = OptimConfig(name="adamw"), DataConfig(tokenizer=tokenizer)
    config = Config(model=source.model, data=data, optim=optim)
    state = {**source.state, "extra": {**extra, "imported": source.title}}
    write_tensors(out, config, source, dtype, _check, state)
    for note in source.notes:
        warnings.warn(f"{source.title}: {note}", stacklevel=2)
    return out


def _check(part: str, name: str, values: Tensor) -> None:
    if not values.isfinite().all():
        fix = "use an earlier checkpoint"
        raise CheckpointError(f"{part} of {name} has values that are not finite: {fix}")
    if part == SQUARES and (values < 0).any():
        what = "negative values, which a mean of squares cannot have"
        raise CheckpointError(f"{part} of {name} has {what}")


def write_tensors(
    path: Path, config: Config, source: TensorSource, dtype: str | None = None,
    check: Callable[[str, str, Tensor], None] = lambda part, name, values: None,
    state: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the tensors of `source` as a native checkpoint, atomically.

    Args:
        path: path of the native checkpoint to write.
        config: resolved configuration, which the manifest stores.
        source: the tensors. They are streamed, with a few rows in memory at a time.
        dtype: dtype of all written weights; None keeps each weight's dtype. Moments keep their
            dtype.
        check: called as `check(part, name, rows)` for each block of rows before it is written;
            raises CheckpointError for bad values.
        state: training counters and the key "extra" for the manifest. Missing counters are 0, as in
            a run that starts at step 0.
        file_bytes: maximum size of a file, in bytes; a larger tensor has its own file.

    Returns:
        `path`.

    Raises:
        CheckpointError: if the disk is full, values overflow `dtype`, or the source or `check`
            raises a CheckpointError.
        ValueError: if a tensor does not have the shape in `source.shapes`.
    """
    specs = {}
    for name, shape in source.shapes.items():
        for part in source.parts[name]:
            specs[part, name] = _dtype(source, part, name, dtype), shape

    def slabs(key: Part) -> Iterator[Tensor]:
        part, name = key
        for values in read_slabs(source.tensor(part, name), specs[key][0].itemsize):
            check(part, name, values)
            yield narrowed(name, values, specs[key][0])

    numels = {key: math.prod(shape) for key, (_, shape) in specs.items()}
    sizes = {key: numel * specs[key][0].itemsize for key, numel in numels.items() if numel}
    head = {
        "format": FORMAT, "version": VERSION, "config": config.model_dump(mode="json"),
        "topology": Grid().sizes, "state": {**FRESH, **(state or {})},
    }  # fmt: skip
    with new_folder(path, MANIFEST, "checkpoint", sum(sizes.values())) as building:
        files = enumerate(keys for keys in cut(sizes, file_bytes) if keys)
        entries = [_write(building / file_of(number), keys, specs, slabs) for number, keys in files]
        finish(path, head, entries)
    return path


def _dtype(source: TensorSource, part: str, name: str, dtype: str | None) -> torch.dtype:
    """Returns the dtype in which one part of a tensor is written.

    Raises CheckpointError if the part has a dtype in the source that is not in `FLOATS`.
    """
    found = source.tensor(part, name).dtype
    if found not in FLOATS:
        raise CheckpointError(f"{part} of {name} is {found}: that dtype is not supported")
    return dtype_of(dtype) if dtype is not None and part == WEIGHT else found


def _write(
    file: Path,
    keys: Sequence[Part],
    specs: Mapping[Part, Spec],
    slabs: Callable[[Part], Iterable[Tensor]],
) -> dict[str, Any]:
    """Writes one file of the checkpoint, with one section per tensor.

    Args:
        file: path of the file.
        keys: the tensors to write: the weight or a moment of a parameter (see `Part`).
        specs: dtype and shape of each tensor.
        slabs: function that yields the values of a tensor, in consecutive blocks of rows.

    Returns:
        The description of the file and its sections, as an entry for `manifest.joined`.
    """
    sections = [_section(part, *specs[part]) for part in keys]
    rows = (slab.reshape(-1) for slab in chain.from_iterable(map(slabs, keys)))
    entry = SavedFile(file.name, [(h, 0) for h in sections]).write(file.parent, rows)
    return {"sections": [[h.section.about, h.shapes] for h in sections], "files": [entry]}


def _section(part: Part, dtype: torch.dtype, shape: tuple[int, ...]) -> Held:
    """Returns a section (see `checkpoint.sections`) that consists of one unsharded tensor."""
    numel, (kind, name) = math.prod(shape), part
    line = {"length": numel, "step": numel, "pieces": [[name, [0] * len(shape), list(shape), 0]]}
    about = {"parts": [kind], "dtype": NAMES[dtype], "portions": 1, "writers": 1}
    return Held(Section({**about, "lines": [line]}), shapes={name: shape})
