"""Writes native checkpoints without an engine or a process group, from any `TensorSource`.

    write_tensors(path, config, HFFolder(folder), dtype="bf16", state={"extra": extra})
    write_native(source, path, dtype, tokenizer, extra)          # of another program's checkpoint, a `Source`

A run that resumes weights alone begins at step 0, with fresh moments.
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
from threed.interop.huggingface.export import dtype_of
from threed.planner.grid import Grid
from threed.zero.records import WEIGHT

About = tuple[torch.dtype, tuple[int, ...]]
Part = tuple[str, str]  # weight, exp_avg, ..., and a global name
FILE_BYTES = 2**32
FRESH = {"steps": 0, "consumed": 0, "updates": 0.0, "skips": 0.0, "uses": {}, "extra": {}}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SQUARES = "exp_avg_sq"


class Source(TensorSource, Protocol):
    """A checkpoint of another program.

    Attributes:
        title: the program and the kind of checkpoint.
        model: its model.
        state: counters of the training, as a native checkpoint has them; empty if a run begins at step 0.
        notes: what is left out.
    """

    title: str
    model: ModelConfig
    state: dict[str, float]
    notes: list[str]

    def problems(self) -> Iterator[str]:
        """Yields what of it does not fit its model."""


def write_native(
    source: Source, out: Path, dtype: str | None, tokenizer: str, extra: Mapping[str, Any]
) -> Path:
    """Writes the native checkpoint `out`, whole or not at all, and warns of what is left out.

    Args:
        dtype: of all weights; None: each as it is. Moments stay as they are.
        tokenizer: kept in the manifest, as is `extra`.

    Raises:
        CheckpointError: the source does not fit its model, or has values that no training has.
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
        fix = "take an earlier checkpoint"
        raise CheckpointError(f"{part} of {name} has values that are not finite: {fix}")
    if part == SQUARES and (values < 0).any():
        what = "values below zero, which no mean of squares has"
        raise CheckpointError(f"{part} of {name} has {what}")


def write_tensors(
    path: Path, config: Config, source: TensorSource, dtype: str | None = None,
    check: Callable[[str, str, Tensor], None] = lambda part, name, values: None,
    state: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the checkpoint folder `path`, whole or not at all.

    Args:
        config: resolved; kept in the manifest.
        source: the tensors. Some rows are in memory at a time.
        dtype: of the weights; None: each as it is. Moments stay as they are.
        check: called as `check(part, name, rows)` for everything that is written.
        state: counters of the run, if it goes on, and `extra`.
        file_bytes: the largest size of a file.

    Raises:
        CheckpointError: the disk is full, or the source or `check` raises it, or values overflow.
        ValueError: the source has other tensors than it says.
    """
    about = {}
    for name, shape in source.shapes.items():
        for part in source.parts[name]:
            about[part, name] = _format(source, part, name, dtype), shape

    def slabs(key: Part) -> Iterator[Tensor]:
        part, name = key
        for values in read_slabs(source.tensor(part, name), about[key][0].itemsize):
            check(part, name, values)
            yield narrowed(name, values, about[key][0])

    numels = {key: math.prod(shape) for key, (_, shape) in about.items()}
    sizes = {key: numel * about[key][0].itemsize for key, numel in numels.items() if numel}
    head = {
        "format": FORMAT, "version": VERSION, "config": config.model_dump(mode="json"),
        "topology": Grid().sizes, "state": {**FRESH, **(state or {})},
    }  # fmt: skip
    with new_folder(path, MANIFEST, "checkpoint", sum(sizes.values())) as building:
        files = enumerate(some for some in cut(sizes, file_bytes) if some)
        entries = [_write(building / file_of(number), some, about, slabs) for number, some in files]
        finish(path, head, entries)
    return path


def _format(source: TensorSource, part: str, name: str, dtype: str | None) -> torch.dtype:
    """Returns the format to write a part in."""
    found = source.tensor(part, name).dtype
    if found not in FLOATS:
        raise CheckpointError(f"{part} of {name} is {found}: weights of that format are not read")
    return dtype_of(dtype) if dtype is not None and part == WEIGHT else found


def _write(
    file: Path,
    some: Sequence[Part],
    about: Mapping[Part, About],
    slabs: Callable[[Part], Iterable[Tensor]],
) -> dict[str, Any]:
    """Writes a file, a section for each part; returns what a rank would leave for the first one."""
    held = [_held(part, *about[part]) for part in some]
    rows = (slab.reshape(-1) for slab in chain.from_iterable(map(slabs, some)))
    entry = SavedFile(file.name, [(h, 0) for h in held]).write(file.parent, rows)
    return {"sections": [[h.section.about, h.shapes] for h in held], "files": [entry]}


def _held(part: Part, dtype: torch.dtype, shape: tuple[int, ...]) -> Held:
    """Returns a section of one part, which one file has in full."""
    numel, (kind, name) = math.prod(shape), part
    line = {"length": numel, "step": numel, "pieces": [[name, [0] * len(shape), list(shape), 0]]}
    about = {"parts": [kind], "dtype": NAMES[dtype], "portions": 1, "writers": 1}
    return Held(Section({**about, "lines": [line]}), shapes={name: shape})
