"""Writes a native checkpoint without an engine or a process group: of weights, or of moments too.

    tensors = {"head.weight": (torch.bfloat16, (v, h)), ...}
    write_weights(path, config, tensors, slabs, {"tokenizer": hashes})
    write_parts(path, config, {("head.weight", "exp_avg"): ..., ...}, slabs, {"steps": 40, ...})

A run that resumes weights alone begins at step 0, with fresh moments.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.atomic import building_place, publish, write_text
from threed.checkpoint.files import DTYPES, NAMES, CheckpointError, begin, cut, stream_tensors
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, check_structure, digest, file_of
from threed.checkpoint.sections import Section
from threed.config import Config
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

    slabs: of a name, its rows in order, some at a time. extra: kept in the manifest. Raises CheckpointError.
    """
    parts = {(name, WEIGHT): about for name, about in tensors.items()}
    return write_parts(path, config, parts, lambda part: slabs(part[0]), {"extra": dict(extra or {})}, file_bytes)


def write_parts(
    path: Path, config: Config, parts: Mapping[Part, About], slabs: Callable[[Part], Iterable[Tensor]],
    state: Mapping[str, Any], file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the checkpoint folder `path`, whole or not at all; each part is one of a weight of the same shape.

    slabs: of a part, its rows in order, some at a time. state: counters of the run. Raises CheckpointError.
    """
    keys = {str(number): part for number, part in enumerate(parts)}
    sizes = {key: math.prod(parts[part][1]) * parts[part][0].itemsize for key, part in keys.items()}
    building = building_place(path)
    try:
        begin(path, MANIFEST, "checkpoint", sum(sizes.values()))
        sections = {key: _section(part, *parts[part]) for key, part in keys.items()}
        files = []
        for rank, some in enumerate(cut(sizes, file_bytes)):
            tensors = (slabs(keys[key]) for key in some)
            entry = _write(building / file_of(rank), [sections[key] for key in some], tensors)
            files.append({**entry, "holds": [[int(key), 0] for key in some]})
        body = {
            "format": FORMAT, "version": VERSION, "config": config.model_dump(mode="json"),
            "topology": {"pp": 1, "dp": 1, "cp": 1, "tp": 1}, "state": {**FRESH, **state},
            "shapes": {name: list(shape) for (name, _), (_, shape) in parts.items()},
            "sections": [section.about for section in sections.values()], "files": files,
        }  # fmt: skip
        body = json.loads(json.dumps(body))
        check_structure(body)
        write_text(building / MANIFEST, json.dumps({**body, "sha256": digest(body)}))
        publish(building, path)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return path


def _section(part: Part, dtype: torch.dtype, shape: tuple[int, ...]) -> Section:
    """Returns the place of a part that one file has whole."""
    numel, (name, kind) = math.prod(shape), part
    line = {"length": numel, "step": numel, "pieces": [[name, [0] * len(shape), list(shape), 0]]}
    return Section({"parts": [kind], "dtype": NAMES[dtype], "portions": 1, "writers": 1, "lines": [line]})


def _write(file: Path, sections: Sequence[Section], slabs: Iterable[Iterable[Tensor]]) -> dict[str, Any]:
    """Writes a file of a tensor for each section, its rows some at a time; returns its entry of the manifest."""
    about = {str(key): (DTYPES[section.dtype], (section.numel(0),)) for key, section in enumerate(sections)}
    metadata = {str(key): f"{section.digest} 0" for key, section in enumerate(sections)}
    rows = (some.contiguous().view(-1) for tensor in slabs for some in tensor)
    tree = stream_tensors(file, about, rows, metadata)
    return {"file": file.name, "tree": tree, "size": file.stat().st_size}
