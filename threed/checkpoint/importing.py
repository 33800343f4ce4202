"""Native checkpoints of weights that come from elsewhere, tensor by tensor: without ranks, moments or a process group.

    write_weights(path, config, {"embedding.weight": (torch.float32, (50_257, 768)), ...}, tensors)

A run resumes from it as from any other, at step 0: moments begin at zero.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.atomic import building_place
from threed.checkpoint.files import NAMES, CheckpointError, begin, stream_tensors
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, file_of
from threed.checkpoint.sections import Section
from threed.checkpoint.writing import finish
from threed.config import Config
from threed.planner.grid import Grid
from threed.zero.records import WEIGHT

FILE_BYTES = 5 * 10**9
Announced = tuple[torch.dtype, tuple[int, ...]]


def write_weights(
    path: Path, config: Config, weights: Mapping[str, Announced], tensors: Iterable[Tensor],
    extra: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes a checkpoint folder of weights alone, whole or not at all, with one of them in memory at a time.

    weights: dtype and shape of each full tensor, by global name; `tensors` come in that order. config: resolved, of the
    model that they are. extra: kept in the manifest. Raises CheckpointError, also where `tensors` do; ValueError for
    other tensors than announced.
    """
    building, some = building_place(path), {name: about for name, about in weights.items() if math.prod(about[1])}
    counters = {"steps": 0, "consumed": 0, "updates": 0.0, "skips": 0.0, "extra": dict(extra or {})}
    head = {"format": FORMAT, "version": VERSION, "config": config.model_dump(mode="json"), "topology": Grid().sizes}
    given = (tensor.reshape(-1) for tensor in tensors if tensor.numel())
    try:
        begin(path, MANIFEST, "checkpoint", sum(math.prod(shape) * dtype.itemsize for dtype, shape in some.values()))
        entries = [
            _write_file(building, number, names, weights, given)
            for number, names in enumerate(_files(some, file_bytes))
        ]
        if next(given, None) is not None:
            raise ValueError("more tensors than announced")
        finish(building, path, {**head, "state": counters}, entries)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return path


def _files(weights: Mapping[str, Announced], limit: int) -> Iterator[list[str]]:
    """Yields the names of each file's tensors: in order, of one dtype, and no more than `limit` bytes but for one."""
    names: list[str] = []
    used = 0
    for name, (dtype, shape) in weights.items():
        size = math.prod(shape) * dtype.itemsize
        if names and (used + size > limit or dtype != weights[names[0]][0]):
            yield names
            names, used = [], 0
        names, used = [*names, name], used + size
    if names:
        yield names


def _write_file(
    building: Path, number: int, names: list[str], weights: Mapping[str, Announced], given: Iterator[Tensor]
) -> dict[str, Any]:
    """Writes a file; returns what a rank would leave for the first one."""
    dtype, shapes = weights[names[0]][0], {name: weights[name][1] for name in names}
    lines = [
        {"length": n, "step": n, "pieces": [[name, [0] * len(shape), list(shape), 0]]}
        for name, shape in shapes.items()
        for n in [math.prod(shape)]
    ]
    about = {"parts": [WEIGHT], "dtype": NAMES[dtype], "portions": 1, "writers": 1, "lines": lines}
    section, file = Section(about), building / file_of(number)
    metadata, numel = {"0": f"{section.digest} 0"}, section.numel(0)
    hashes = stream_tensors(file, {"0": (dtype, (numel,))}, _counted(shapes, given), metadata)._asdict()
    entry = {"file": file.name, **hashes, "size": file.stat().st_size, "holds": [[section.digest, 0]]}
    return {"sections": [[about, shapes]], "entry": {**entry, "buffers": [], "generators": []}}


def _counted(shapes: Mapping[str, tuple[int, ...]], given: Iterator[Tensor]) -> Iterator[Tensor]:
    for name, shape in shapes.items():
        tensor = next(given, None)
        if tensor is None or tensor.numel() != math.prod(shape):
            what = "missing" if tensor is None else f"{tensor.numel()} values"
            raise ValueError(f"{name} is announced as {list(shape)} and is {what}")
        yield tensor
