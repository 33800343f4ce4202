"""Writes a native checkpoint without an engine or a process group, from any `TensorSource`.

    write_tensors(path, config, HFFolder(folder), dtype="bf16", state={"extra": extra})

A run that resumes weights alone begins at step 0, with fresh moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.files import NAMES, CheckpointError, cut, new_folder
from threed.checkpoint.finite import narrowed
from threed.checkpoint.lazy_tensors import TensorSource, read_slabs
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, file_of, finish
from threed.checkpoint.sections import Section, write_file
from threed.config import Config
from threed.interop.huggingface.export import dtype_of
from threed.planner.grid import Grid
from threed.zero.records import WEIGHT

About = tuple[torch.dtype, tuple[int, ...]]
Part = tuple[str, str]  # weight, exp_avg, ..., and a global name
FILE_BYTES = 2**32
FRESH = {"steps": 0, "consumed": 0, "updates": 0.0, "skips": 0.0, "uses": {}, "extra": {}}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    about = {
        (part, name): (_format(source, part, name, dtype), shape)
        for name, shape in source.shapes.items()
        for part in source.parts[name]
    }

    def slabs(key: Part) -> Iterator[Tensor]:
        part, name = key
        for values in read_slabs(source.tensor(part, name), about[key][0].itemsize):
            check(part, name, values)
            yield narrowed(name, values, about[key][0])

    keys = {str(number): key for number, key in enumerate(about)}
    sizes = {n: size for n, key in keys.items() if (size := _nbytes(*about[key]))}
    head = {
        "format": FORMAT,
        "version": VERSION,
        "config": config.model_dump(mode="json"),
        "topology": Grid().sizes,
    }
    with new_folder(path, MANIFEST, "checkpoint", sum(sizes.values())) as building:
        files = enumerate([keys[n] for n in some] for some in cut(sizes, file_bytes) if some)
        entries = [_write(building / file_of(number), some, about, slabs) for number, some in files]
        finish(building, path, {**head, "state": {**FRESH, **(state or {})}}, entries)
    return path


def _format(source: TensorSource, part: str, name: str, dtype: str | None) -> torch.dtype:
    """Returns the format to write a part in."""
    found = source.tensor(part, name).dtype
    if found not in FLOATS:
        raise CheckpointError(f"{part} of {name} is {found}: weights of that format are not read")
    return dtype_of(dtype) if dtype is not None and part == WEIGHT else found


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _write(
    file: Path,
    some: Sequence[Part],
    about: Mapping[Part, About],
    slabs: Callable[[Part], Iterable[Tensor]],
) -> dict[str, Any]:
    """Writes a file, a section for each part; returns what a rank would leave for the first one."""
    sections = [_section(part, *about[part]) for part in some]
    rows = (slab.reshape(-1) for slab in chain.from_iterable(map(slabs, some)))
    entry = write_file(file, [(section, 0) for section in sections], rows)
    shapes = [{name: list(about[part, name][1])} for part, name in some]
    pairs = zip(sections, shapes, strict=True)
    return {"sections": [[section.about, shape] for section, shape in pairs], "files": [entry]}


def _section(part: Part, dtype: torch.dtype, shape: tuple[int, ...]) -> Section:
    """Returns the place of a part that one file has whole."""
    numel, (kind, name) = math.prod(shape), part
    line = {"length": numel, "step": numel, "pieces": [[name, [0] * len(shape), list(shape), 0]]}
    return Section(
        {"parts": [kind], "dtype": NAMES[dtype], "portions": 1, "writers": 1, "lines": [line]}
    )
