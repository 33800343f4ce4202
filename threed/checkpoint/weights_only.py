"""Writes a native checkpoint that has weights and nothing else, without an engine or a process group.

    tensors = {"head.weight": (torch.bfloat16, (v, h)), ...}
    write_weights(path, config, tensors, slabs, {"tokenizer": hashes})

A run that resumes it begins at step 0, with fresh moments.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.atomic import building_place
from threed.checkpoint.files import NAMES, CheckpointError, begin, cut, stream_tensors
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, file_of
from threed.checkpoint.sections import Section
from threed.checkpoint.writing import finish
from threed.config import Config
from threed.planner.grid import Grid
from threed.zero.records import WEIGHT

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
FILE_BYTES = 2**32


def write_weights(
    path: Path, config: Config, tensors: Tensors, slabs: Callable[[str], Iterable[Tensor]],
    extra: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the checkpoint folder `path`, whole or not at all: weights of these formats and shapes, by name.

    slabs: of a name, its rows in order, some at a time. extra: kept in the manifest. config: resolved. Raises
    CheckpointError, also where `slabs` does; ValueError for other tensors than announced.
    """
    sizes = {name: n * dtype.itemsize for name, (dtype, shape) in tensors.items() if (n := math.prod(shape))}
    building = building_place(path)
    state = {"steps": 0, "consumed": 0, "updates": 0.0, "skips": 0.0, "extra": dict(extra or {})}
    head = {"format": FORMAT, "version": VERSION, "config": config.model_dump(mode="json"), "topology": Grid().sizes}
    try:
        begin(path, MANIFEST, "checkpoint", sum(sizes.values()))
        files = enumerate(names for names in cut(sizes, file_bytes) if names)
        entries = [_write(building / file_of(number), names, tensors, slabs) for number, names in files]
        finish(building, path, {**head, "state": state}, entries)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return path


def _write(
    file: Path, names: Sequence[str], tensors: Tensors, slabs: Callable[[str], Iterable[Tensor]]
) -> dict[str, Any]:
    """Writes a file, a section for each tensor; returns what a rank would leave for the first one."""
    sections = [_section(name, *tensors[name]) for name in names]
    about = {str(key): (tensors[name][0], (math.prod(tensors[name][1]),)) for key, name in enumerate(names)}
    metadata = {str(key): f"{section.digest} 0" for key, section in enumerate(sections)}
    rows = (some.reshape(-1) for some in chain.from_iterable(map(slabs, names)))
    hashes = stream_tensors(file, about, rows, metadata)
    shapes = [{name: list(tensors[name][1])} for name in names]
    holds = [[section.digest, 0] for section in sections]
    return {
        "sections": [[section.about, shape] for section, shape in zip(sections, shapes, strict=True)],
        "entry": {"file": file.name, "size": file.stat().st_size, "holds": holds, **hashes._asdict()},
    }


def _section(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Section:
    """Returns the place of a tensor that one file has whole."""
    numel = math.prod(shape)
    line = {"length": numel, "step": numel, "pieces": [[name, [0] * len(shape), list(shape), 0]]}
    return Section({"parts": [WEIGHT], "dtype": NAMES[dtype], "portions": 1, "writers": 1, "lines": [line]})
