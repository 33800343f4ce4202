"""Reads boxes of a native checkpoint's tensors, whatever boxes they were saved in.

    with Reader(path, read_manifest(path)) as reader:
        reader.full("weight", "embedding.weight")
        reader.check("weight", name, start, size)         before anything is overwritten: the files are as they should
        reader.into("weight", name, start, size, out)     straight to where the values belong

A file is opened, and compared with the manifest, when something in it is first read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threed.buffers import of_bytes
from threed.checkpoint.files import DTYPES, CheckpointError, TensorFile
from threed.checkpoint.manifest import file_of
from threed.checkpoint.sections import Section
from threed.sharding import intersect, slices
from threed.zero.records import PREVIOUS, WEIGHT

MOST_OPEN = 64  # files at a time
MOST_BYTES = 2**25  # read at a time
SHORT_BYTES = (
    2**12
)  # rows shorter than that are read with what lies between them, unless that is much more
Shape = tuple[int, ...]


class Range(NamedTuple):
    """Elements [first, first + numel) of the tensor `key` of a file."""

    file: str
    key: str
    first: int
    numel: int


@dataclass(frozen=True)
class Stored:
    """A saved box of a tensor: a piece of line number `line` of a section, from element `at` of the line on.

    holders: the file and the tensor in it, by the numbers of the section.
    """

    start: Sequence[int]
    size: Sequence[int]
    section: Section
    line: int
    at: int
    holders: Mapping[int, tuple[str, str]]

    def files(self, first: int, last: int) -> set[str]:
        """Returns the names of the files with these elements; the files need not exist."""
        between = self.section.between(self.line, self.at + first, self.at + last)
        return {self.holders[number][0] for number, *_ in between}


class Reader:
    """Reads boxes of a checkpoint's tensors, independent of the boxes it was saved in.

    Raises CheckpointError for a file that is no safetensors, or has other tensors than the manifest says.
    shapes: of the weights. parts: those saved of each (weight, exp_avg, ...). buffers: (file, dtype, shape) of each.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.opens = path, 0
        self._open: dict[str, TensorFile] = {}
        self._entries = {entry["file"]: entry for entry in manifest["files"]}
        self._index: dict[tuple[str, str], list[Stored]] = {}
        self._sections = [Section(about) for about in manifest.get("sections", ())]
        self._dtypes: dict[tuple[str, str], str] = {}
        self.parts: dict[str, set[str]] = {}
        self.buffers: dict[str, tuple[str, str, Shape]] = {
            name: (entry["file"], dtype, tuple(shape))
            for entry in manifest["files"]
            for name, dtype, shape in entry.get("buffers", ())
        }
        self.shapes = {name: tuple(shape) for name, shape in manifest["shapes"].items()}
        self._index_sections(manifest["files"])

    def _index_sections(self, files: Sequence[Mapping[str, Any]]) -> None:
        holders: list[dict[int, tuple[str, str]]] = [{} for _ in self._sections]
        for entry in files:
            for key, (section, number) in enumerate(entry["holds"]):
                holders[section][number] = entry["file"], str(key)
        for section, some in zip(self._sections, holders, strict=True):
            for number, line in enumerate(section.lines):
                for name, start, size, at in line.pieces:
                    stored = Stored(start, size, section, number, at, some)
                    for part in section.parts:
                        self._add(part, name, stored)
                        if self._dtypes.setdefault((part, name), section.dtype) != section.dtype:
                            raise CheckpointError(
                                f"{self.path}: {part} of {name} has several dtypes"
                            )

    def _add(self, part: str, name: str, stored: Stored) -> None:
        self._index.setdefault((part, name), []).append(stored)
        self.parts.setdefault(name, set()).add(part)

    # --------------------------------------------------------------------------------------------------------- files

    def _file(self, name: str) -> TensorFile:
        """Returns a file, open and as the manifest says."""
        if name not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = TensorFile(self.path / name)
            self.opens += 1
            self._check_file(file, self._entries[name])
            self._open[name] = file
        return self._open[name]

    def _check_file(self, file: TensorFile, entry: Mapping[str, Any]) -> None:
        """Raises CheckpointError if a file's header says other than the manifest does."""
        inside, name = (
            {key: (dtype, shape) for key, (dtype, shape, _) in file.tensors.items()},
            entry["file"],
        )
        for key, (number, holds) in enumerate(entry.get("holds", ())):
            section = self._sections[number]
            named = file.metadata.get(str(key)) == f"{section.digest} {holds}"
            if not named or inside.get(str(key)) != (section.dtype, [section.numel(holds)]):
                raise CheckpointError(
                    f"{self.path}: section {number} is not in {name} as the manifest says"
                )
        for buffer, named, shape in entry.get("buffers", ()):
            known = getattr(torch, named, None)
            nbytes = math.prod(shape) * known.itemsize if isinstance(known, torch.dtype) else -1
            if inside.get(f"buffer/{buffer}") != ("U8", [nbytes]):
                raise CheckpointError(
                    f"{self.path}: buffer {buffer} in {name} is not the {named} {shape} that the manifest says"
                )
        for generator in entry.get("generators", ()):
            if inside.get(f"generator/{generator}", ("", []))[0] != "U8":
                raise CheckpointError(f"{self.path}: generator {generator} is not in {name}")

    def close(self) -> None:
        """Closes the files; reading opens them again."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------------- boxes

    def stands_for(self, part: str, name: str) -> str:
        """Returns the part that a tensor has for this one: weights of the version before, if not saved, are the same
        as the newest."""
        return WEIGHT if part == PREVIOUS and PREVIOUS not in self.parts[name] else part

    def gap(self, part: str, name: str, start: Sequence[int], size: Sequence[int]) -> str | None:
        """Returns what is missing of a box, as text; None if it is complete."""
        found = sum(math.prod(common[1]) for _, common in self._meeting(part, name, start, size))
        wanted = math.prod(size)
        return (
            None
            if found == wanted
            else f"the checkpoint has {found} of {wanted} values of {part} of {name}"
        )

    def _meeting(
        self, part: str, name: str, start: Sequence[int], size: Sequence[int]
    ) -> Iterator[tuple[Stored, tuple[Shape, Shape]]]:
        """Yields the saved boxes that intersect this one, each with the intersection (start, size)."""
        for stored in self._index.get((part, name), ()):
            common = intersect(start, size, stored.start, stored.size)
            if common is not None:
                yield stored, common

    def check(self, part: str, name: str, start: Sequence[int], size: Sequence[int]) -> None:
        """Raises CheckpointError unless a box is complete, and the files that it is in are as the manifest says."""
        if problem := self.gap(part, name, start, size):
            raise CheckpointError(problem)
        for stored, common in self._meeting(part, name, start, size):
            for _ in self._ranges(stored, part, *_elements(stored, *common)):
                pass

    def files_of(self, part: str, name: str, start: Sequence[int], size: Sequence[int]) -> set[str]:
        """Returns the names of the files that a box is in; they need not be there."""
        meeting = self._meeting(part, name, start, size)
        return {
            file for stored, common in meeting for file in stored.files(*_elements(stored, *common))
        }

    def dtype(self, part: str, name: str) -> torch.dtype:
        """Returns the dtype that a part of a tensor was saved in."""
        return DTYPES[self._dtypes[part, name]]

    def into(
        self, part: str, name: str, start: Sequence[int], size: Sequence[int], out: Tensor
    ) -> None:
        """Sets `out` [*size], of any dtype and device, to the box at `start`, which must be complete (`check`)."""
        for stored, common in self._meeting(part, name, start, size):
            self._copy(stored, part, common, out[slices(*common, start)], self.dtype(part, name))

    def _ranges(self, stored: Stored, part: str, first: int, last: int) -> Iterator[Range]:
        """Yields the locations of elements [first, last) of a saved box, in row-major order."""
        section, line, at = stored.section, stored.line, stored.at
        for number, lo, hi in section.between(line, at + first, at + last):
            file, key = stored.holders[number]
            self._file(
                file
            )  # checks the file before it is read at offsets computed from the section
            yield Range(file, key, section.offset(number, line, part, lo), hi - lo)

    def _copy(
        self,
        stored: Stored,
        part: str,
        common: tuple[Shape, Shape],
        out: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Copies the box `common` of a stored one: rows along one dimension, as many at a time as are read at once."""
        if not stored.size:
            self._fetch(self._ranges(stored, part, 0, 1), out.view(1))
            return
        inside = [a - o for a, o in zip(common[0], stored.start, strict=True)]
        size, strides = common[1], _strides(stored.size)
        along = max(
            (d for d, n in enumerate(size) if n < stored.size[d]), default=0
        )  # what follows lies in one piece
        run, between = (
            n * dtype.itemsize for n in (size[along] * strides[along], strides[max(0, along - 1)])
        )
        if along and run < SHORT_BYTES and between < 16 * SHORT_BYTES:
            along -= 1
        rows = max(1, MOST_BYTES // (strides[along] * dtype.itemsize))
        for before in itertools.product(*map(range, size[:along])):
            for first in range(0, size[along], rows):
                count = min(rows, size[along] - first)
                target = out[before][first : first + count]
                at = [a + b for a, b in zip(inside, (*before, first), strict=False)] + inside[
                    along + 1 :
                ]
                lo = _flat(at, stored.size)
                n = _span(target.shape, stored.size[along:])
                if (
                    n == target.numel()
                    and target.is_contiguous()
                    and target.dtype == dtype
                    and target.is_cpu
                ):
                    self._fetch(self._ranges(stored, part, lo, lo + n), target.view(-1))
                    continue
                read = torch.empty(n, dtype=dtype)
                self._fetch(self._ranges(stored, part, lo, lo + n), read)
                target.copy_(read.as_strided(target.shape, strides[along:]))

    def _fetch(self, ranges: Iterator[Range], out: Tensor) -> None:
        """Reads ranges, one after the other, into `out` [n]."""
        at = 0
        for file, key, first, count in ranges:
            self._file(file).read(key, first, out[at : at + count])
            at += count

    def box(self, part: str, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Returns the values [*size] of the box at `start`; CheckpointError if some were not saved."""
        self.check(part, name, start, size)
        out = torch.empty(tuple(size), dtype=self.dtype(part, name))
        self.into(part, name, start, size, out)
        return out

    def full(self, part: str, name: str) -> Tensor:
        """Returns a whole tensor."""
        shape = self.shapes[name]
        return self.box(part, name, (0,) * len(shape), shape)

    # -------------------------------------------------------------------------------------------------------- extras

    def check_buffers(self, names: Collection[str]) -> None:
        """Raises CheckpointError unless the files of the saved ones among some buffers are as the manifest says."""
        for file in {self.buffers[name][0] for name in names if name in self.buffers}:
            self._file(file)

    def buffer(self, name: str) -> Tensor:
        """Returns a persistent buffer."""
        file, dtype, shape = self.buffers[name]
        return of_bytes(self._file(file).tensor(f"buffer/{name}"), dtype, shape)

    def generators(self, rank: int) -> dict[str, Tensor]:
        """Returns the saved states of a rank's generators, uint8 [n]."""
        file = file_of(rank)
        names = self._entries.get(file, {}).get("generators", ())
        return {name: self._file(file).tensor(f"generator/{name}") for name in names}


def _elements(stored: Stored, start: Shape, size: Shape) -> tuple[int, int]:
    """Returns the elements [first, last) of a stored box that a part of it spans."""
    inside = [a - o for a, o in zip(start, stored.start, strict=True)]
    end = [a + n - 1 for a, n in zip(inside, size, strict=True)]
    return _flat(inside, stored.size), _flat(end, stored.size) + 1


def _strides(size: Sequence[int]) -> list[int]:
    return [math.prod(size[d + 1 :]) for d in range(len(size))]


def _span(extent: Sequence[int], size: Sequence[int]) -> int:
    """Returns how many elements of a box, in row-major order, lie from the first to the last of a smaller one."""
    return 1 + sum((n - 1) * stride for n, stride in zip(extent, _strides(size), strict=True))


def _flat(at: Sequence[int], size: Sequence[int]) -> int:
    """Returns the number of an element in row-major order."""
    return sum(a * stride for a, stride in zip(at, _strides(size), strict=True))
