"""Writes a native checkpoint that has weights and nothing else, without an engine or a process group.

    tensors = {"head.weight": (torch.bfloat16, (v, h)), ...}
    write_weights(path, config, tensors, slabs, tokenizer=hashes)

A run that resumes it begins at step 0, with fresh moments.
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

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
FILE_BYTES = 2**32


def write_weights(
    path: Path, config: Config, tensors: Tensors, slabs: Callable[[str], Iterable[Tensor]],
    extra: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the checkpoint folder `path`, whole or not at all: weights of these formats and shapes, by name.

    slabs: of a name, its rows in order, some at a time. extra: kept in the manifest. Raises CheckpointError.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    building = building_place(path)
    try:
        begin(path, MANIFEST, "checkpoint", sum(sizes.values()))
        sections = {name: _section(name, dtype, shape) for name, (dtype, shape) in tensors.items()}
        numbers = {name: number for number, name in enumerate(sections)}
        files = []
        for rank, names in enumerate(cut(sizes, file_bytes)):
            entry = _write(building / file_of(rank), [sections[name] for name in names], map(slabs, names))
            files.append({**entry, "holds": [[numbers[name], 0] for name in names]})
        state = {"steps": 0, "consumed": 0, "updates": 0.0, "skips": 0.0, "uses": {}, "extra": dict(extra or {})}
        body = {
            "format": FORMAT, "version": VERSION, "config": config.model_dump(mode="json"),
            "topology": {"pp": 1, "dp": 1, "cp": 1, "tp": 1}, "state": state,
            "shapes": {name: list(shape) for name, (_, shape) in tensors.items()},
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


def _section(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Section:
    """Returns the place of a tensor that one file has whole."""
    numel = math.prod(shape)
    line = {"length": numel, "step": numel, "pieces": [[name, [0] * len(shape), list(shape), 0]]}
    return Section({"parts": [WEIGHT], "dtype": NAMES[dtype], "portions": 1, "writers": 1, "lines": [line]})


def _write(file: Path, sections: Sequence[Section], slabs: Iterable[Iterable[Tensor]]) -> dict[str, Any]:
    """Writes a file of a tensor for each section, its rows some at a time; returns its entry of the manifest."""
    about = {str(key): (DTYPES[section.dtype], (section.numel(0),)) for key, section in enumerate(sections)}
    metadata = {str(key): f"{section.digest} 0" for key, section in enumerate(sections)}
    rows = (some.contiguous().view(-1) for tensor in slabs for some in tensor)
    tree = stream_tensors(file, about, rows, metadata)
    return {"file": file.name, "tree": tree, "size": file.stat().st_size}
