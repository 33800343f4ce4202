"""Reads boxes of a native checkpoint's tensors, whatever boxes they were saved in.

reader = Reader(path, read_manifest(path))
reader.full("weight", "embedding.weight")
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from threed.buffers import of_bytes
from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.manifest import file_of
from threed.sharding import intersect, slices
from threed.zero.records import PREVIOUS, WEIGHT

FLOATS = ("F64", "F32", "BF16", "F16")  # of weights and moments
Part = tuple[tuple[int, ...], tuple[int, ...]]  # start and size of a box


class Reader:
    """Reads boxes of a checkpoint's tensors, independent of the boxes it was saved in.

    Raises CheckpointError for a file that is no safetensors, or has other tensors than the manifest says.
    shapes: of the weights. parts: those saved of each (weight, exp_avg, ...). buffers: (file, dtype, shape) of each.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self._handles = {entry["file"]: _open(path / entry["file"]) for entry in manifest["files"]}
        self._index: dict[tuple[str, str], list[tuple[str, str, list[int], list[int]]]] = {}
        self._generators = {entry["file"]: entry.get("generators", ()) for entry in manifest["files"]}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parts: dict[str, set[str]] = {}
        self.buffers: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        for entry in manifest["files"]:
            for number, (part, name, shape, start, size) in enumerate(entry["boxes"]):
                self._index.setdefault((part, name), []).append((entry["file"], str(number), start, size))
                self.shapes[name] = tuple(shape)
                self.parts.setdefault(name, set()).add(part)
            for name, dtype, shape in entry.get("buffers", ()):
                self.buffers[name] = entry["file"], dtype, tuple(shape)
        for problem in self._problems(manifest["files"]):
            raise CheckpointError(f"{path}: {problem}")

    def _problems(self, files: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yields what of the files' tensors is not as the manifest says: a header says it too, and both must agree."""
        dtypes: dict[tuple[str, str], str] = {}
        for entry in files:
            inside = _contents(self._handles[entry["file"]])
            for number, (part, name, _, _, size) in enumerate(entry["boxes"]):
                dtype, shape = inside.get(str(number), ("", None))
                if shape != size or dtype not in FLOATS or dtypes.setdefault((part, name), dtype) != dtype:
                    yield f"box {number} of {entry['file']} is not the {part} of {name} that the manifest says"
            for name, named, shape in entry.get("buffers", ()):
                known = getattr(torch, named, None)
                nbytes = math.prod(shape) * known.itemsize if isinstance(known, torch.dtype) else -1
                if inside.get(f"buffer/{name}") != ("U8", [nbytes]):
                    yield f"buffer {name} in {entry['file']} is not the {named} {shape} that the manifest says"
            for name in entry.get("generators", ()):
                if inside.get(f"generator/{name}", ("", []))[0] != "U8":
                    yield f"generator {name} is not in {entry['file']}"

    def box(self, part: str, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """Returns the values [*size] of the box at `start`; CheckpointError if some were not saved."""
        problem = self.gap(part, name, start, size)
        if problem:
            raise CheckpointError(problem)
        out = None
        for file, key, saved_start, common in self._meeting(part, name, start, size):
            values = self._handles[file].get_slice(key)[slices(*common, saved_start)]
            out = values.new_empty(size) if out is None else out
            out[slices(*common, start)] = values
        return cast(Tensor, out)

    def stands_for(self, part: str, name: str) -> str:
        """Returns the part that a tensor has for this one: weights of the version before, if not saved, are the same
        as the newest."""
        return WEIGHT if part == PREVIOUS and PREVIOUS not in self.parts[name] else part

    def gap(self, part: str, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> str | None:
        """Returns what is missing of a box, as text; None if it is complete."""
        found = sum(math.prod(common[1]) for *_, common in self._meeting(part, name, start, size))
        wanted = math.prod(size)
        return None if found == wanted else f"the checkpoint has {found} of {wanted} values of {part} of {name}"

    def _meeting(
        self, part: str, name: str, start: tuple[int, ...], size: tuple[int, ...]
    ) -> Iterator[tuple[str, str, list[int], Part]]:
        """Yields the saved boxes that intersect this one: file, key, start of the saved box, and the intersection."""
        for file, key, saved_start, saved_size in self._index.get((part, name), ()):
            common = intersect(start, size, saved_start, saved_size)
            if common is not None:
                yield file, key, saved_start, common

    def full(self, part: str, name: str) -> Tensor:
        """Returns a whole tensor."""
        shape = self.shapes[name]
        return self.box(part, name, (0,) * len(shape), shape)

    def buffer(self, name: str) -> Tensor:
        """Returns a persistent buffer."""
        file, dtype, shape = self.buffers[name]
        return of_bytes(self._handles[file].get_tensor(f"buffer/{name}"), dtype, shape)

    def generators(self, rank: int) -> dict[str, Tensor]:
        """Returns the saved states of a rank's generators, uint8 [n]."""
        file = file_of(rank)
        return {n: self._handles[file].get_tensor(f"generator/{n}").clone() for n in self._generators.get(file, ())}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {plain(error)}") from None


def _contents(handle: Any) -> dict[str, tuple[str, list[int]]]:
    """Returns dtype and shape of every tensor of an open file, by key."""
    found = ((key, handle.get_slice(key)) for key in list(handle.keys()))
    return {key: (values.get_dtype(), list(values.get_shape())) for key, values in found}
