"""Writes a native checkpoint without an engine or a process group: of weights, or of moments too.

    tensors = {"head.weight": (torch.bfloat16, (v, h)), ...}
    write_weights(path, config, tensors, slabs, {"tokenizer": hashes})
    write_parts(path, config, {("head.weight", "exp_avg"): ..., ...}, slabs, {"steps": 40, ...})

A run that resumes weights alone begins at step 0, with fresh moments.
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

About = tuple[torch.dtype, tuple[int, ...]]
Part = tuple[str, str]  # a global name, and what of it: weight, exp_avg, ...
FILE_BYTES = 2**32
FRESH = {"steps": 0, "consumed": 0, "updates": 0.0, "skips": 0.0, "uses": {}, "extra": {}}


def write_weights(
    path: Path, config: Config, tensors: Mapping[str, About], slabs: Callable[[str], Iterable[Tensor]],
    extra: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the checkpoint folder `path`, whole or not at all: weights of these formats and shapes, by name.

    slabs: of a name, its rows in order, some at a time. extra: kept in the manifest. config: resolved. Raises
    CheckpointError, also where `slabs` does; ValueError for other tensors than announced.
    """
    parts = {(name, WEIGHT): about for name, about in tensors.items()}
    return write_parts(
        path, config, parts, lambda part: slabs(part[0]), {"extra": dict(extra or {})}, file_bytes
    )


def write_parts(
    path: Path, config: Config, parts: Mapping[Part, About], slabs: Callable[[Part], Iterable[Tensor]],
    state: Mapping[str, Any], file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the checkpoint folder `path`, whole or not at all; each part is one of a weight of the same shape.

    slabs: of a part, its rows in order, some at a time. state: counters of the run. Raises CheckpointError.
    """
    keys = {str(number): part for number, part in enumerate(parts)}
    sizes = {
        key: n * parts[part][0].itemsize
        for key, part in keys.items()
        if (n := math.prod(parts[part][1]))
    }
    building = building_place(path)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "config": config.model_dump(mode="json"),
        "topology": Grid().sizes,
    }
    try:
        begin(path, MANIFEST, "checkpoint", sum(sizes.values()))
        files = enumerate([keys[key] for key in some] for some in cut(sizes, file_bytes) if some)
        entries = [_write(building / file_of(number), some, parts, slabs) for number, some in files]
        finish(building, path, {**head, "state": {**FRESH, **state}}, entries)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return path


def _write(
    file: Path,
    some: Sequence[Part],
    parts: Mapping[Part, About],
    slabs: Callable[[Part], Iterable[Tensor]],
) -> dict[str, Any]:
    """Writes a file, a section for each part; returns what a rank would leave for the first one."""
    sections = [_section(part, *parts[part]) for part in some]
    about = {
        str(key): (parts[part][0], (math.prod(parts[part][1]),)) for key, part in enumerate(some)
    }
    metadata = {str(key): f"{section.digest} 0" for key, section in enumerate(sections)}
    rows = (slab.reshape(-1) for slab in chain.from_iterable(map(slabs, some)))
    hashes = stream_tensors(file, about, rows, metadata)
    shapes = [{part[0]: list(parts[part][1])} for part in some]
    holds = [[section.digest, 0] for section in sections]
    return {
        "sections": [
            [section.about, shape] for section, shape in zip(sections, shapes, strict=True)
        ],
        "files": [
            {
                "file": file.name,
                "size": file.stat().st_size,
                "holds": holds,
                **hashes._asdict(),
            }
        ],
    }


def _section(part: Part, dtype: torch.dtype, shape: tuple[int, ...]) -> Section:
    """Returns the place of a part that one file has whole."""
    numel, (name, kind) = math.prod(shape), part
    line = {"length": numel, "step": numel, "pieces": [[name, [0] * len(shape), list(shape), 0]]}
    return Section(
        {"parts": [kind], "dtype": NAMES[dtype], "portions": 1, "writers": 1, "lines": [line]}
    )
