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
from threed.checkpoint.files import CheckpointError, begin, cut, stream_tensors
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, check_structure, digest, file_of
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
        files = [_write(building, number, names, tensors, slabs) for number, names in enumerate(cut(sizes, file_bytes))]
        state = {"steps": 0, "consumed": 0, "updates": 0.0, "skips": 0.0, "uses": {}, "extra": dict(extra or {})}
        body = {
            "format": FORMAT, "version": VERSION, "config": config.model_dump(mode="json"),
            "topology": {"pp": 1, "dp": 1, "cp": 1, "tp": 1}, "state": state, "files": files,
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


def _write(
    folder: Path, number: int, names: Sequence[str], tensors: Tensors, slabs: Callable[[str], Iterable[Tensor]]
) -> dict[str, Any]:
    """Writes a file; returns its entry of the manifest."""
    file = folder / file_of(number)
    about = {str(box): tensors[name] for box, name in enumerate(names)}
    hashed = stream_tensors(file, about, map(slabs, names))
    shapes = [(name, list(tensors[name][1])) for name in names]
    boxes = [[WEIGHT, name, shape, [0] * len(shape), shape] for name, shape in shapes]
    return {"file": file.name, "sha256": hashed, "size": file.stat().st_size, "boxes": boxes}
