"""Reads boxes of the tensors of a native checkpoint, however the saving run split the tensors.

    with TensorFile(path) as file: file.read("weight", 0, out)
    with Reader(path, read_manifest(path)) as reader:
        read_all(reader.tensor("weight", "embedding.weight"))
        reader.tensor("weight", name).read(start, out)      directly into the destination

Files are read with plain read calls, directly into the destination tensor. A failed read raises an
exception; with a memory map, it would kill the process.

A box is a block of a tensor, see `lazy_tensors`. The first read from a file opens the file and
compares its header with the manifest.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.files import BLOCK, DTYPES, CheckpointError, fill, plain, reading, threads
from threed.checkpoint.lazy_tensors import Boxed, Shape, read_strided, saved_part
from threed.checkpoint.manifest import file_of
from threed.checkpoint.sections import Section
from threed.models.buffers import of_bytes
from threed.zero.state import Record

MOST_OPEN = 64  # maximum number of files that are open at the same time
MOST_HEADER = 10**8  # maximum bytes of a file's header, as in the safetensors library


class TensorFile:
    """An open safetensors file.

    Attributes:
        tensors: (dtype, shape, offset) by tensor name. The dtype has the spelling of the header
            ("F32"). The offset is the position of the tensor's first byte in the file.
        metadata: texts of the header's `__metadata__`, by name.

    Raises:
        CheckpointError: if the file is not a valid safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._handle = path, -1
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            size = os.fstat(self._handle).st_size
            length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER):
                raise ValueError("its header is longer than it")
            header = json.loads(os.pread(self._handle, length, 8).decode())
            self.metadata, self.tensors = _parse_header(header, 8 + length, size)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            self.close()
            raise CheckpointError(f"{path} cannot be read: {plain(error)}") from None

    def read(self, name: str, first: int, out: Tensor) -> None:
        """Fills `out` with n consecutive elements of a tensor, starting at element `first`.

        Args:
            name: name of the tensor.
            first: index of the first element, in row-major order.
            out: contiguous tensor [n] on the CPU, of the dtype of the tensor in the file.

        Raises:
            CheckpointError: if the file cannot be read.
        """
        dtype, _, begin = self.tensors[name]
        at, rest = begin + first * DTYPES[dtype].itemsize, out.view(torch.uint8).numpy().data
        starts = range(0, len(rest), BLOCK)
        with reading(self.path):
            if len(starts) > 1:
                blocks = [(rest[start : start + BLOCK], at + start) for start in starts]
                work = [threads().submit(fill, self._handle, *block) for block in blocks]
                # Waits for all blocks even if one has failed, because no thread may write to `out`
                # after `read` has returned.
                wait(work)
                for one in work:
                    one.result()
            else:
                fill(self._handle, rest, at)

    def tensor(self, name: str) -> Tensor:
        """Reads the full tensor `name`, and returns it."""
        dtype, shape, _ = self.tensors[name]
        out = torch.empty(shape, dtype=DTYPES[dtype])
        self.read(name, 0, out.view(-1))
        return out

    def close(self) -> None:
        """Closes the file."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _parse_header(
    header: Any, begin: int, size: int
) -> tuple[dict[str, str], dict[str, tuple[str, list[int], int]]]:
    """Returns the attributes `metadata` and `tensors` of a `TensorFile`, parsed from a header.

    Args:
        header: the JSON header.
        begin: offset in the file of the first byte after the header.
        size: size of the file in bytes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: if the header is not valid, or the tensors
            do not fill the file exactly.
    """
    metadata, found = dict(header.pop("__metadata__", {})), {}
    for name, about in header.items():
        (first, last), shape = about["data_offsets"], list(about["shape"])
        if not all(type(n) is int and n >= 0 for n in (first, last, *shape)) or len(shape) > 64:
            raise ValueError(f"{name} has no valid place or shape")
        if last - first != math.prod(shape) * DTYPES[about["dtype"]].itemsize:
            raise ValueError(f"{name} has {last - first} bytes, which is not its size")
        found[name] = (about["dtype"], shape, begin + first, begin + last)
    end = begin
    for _, _, first, last in sorted(found.values(), key=lambda place: place[2:]):
        if first != end:
            raise ValueError("its tensors overlap, or leave a gap")
        end = last
    if end != size:
        raise ValueError(f"its tensors end at {end}, and it has {size} bytes")
    return metadata, {
        name: (dtype, shape, first) for name, (dtype, shape, first, _) in found.items()
    }


@dataclass(frozen=True, eq=False)
class SavedBox:
    """A block of a tensor, as the checkpoint stores it for one part of the state.

    Such a block is a piece of a line. The module `sections` defines pieces, lines, sections and
    shares.

    Attributes:
        reader: the open checkpoint.
        part: part of the state: weight, exp_avg, ...
        shape: shape of the block.
        section: the section that contains the line.
        line: index of the line in the section.
        at: offset of the block in the line, in elements.
        holders: one tuple per share of the section, by the number of the share: (name of the file
            that contains the share, name of the share's tensor in this file).
    """

    reader: Reader
    part: str
    shape: Shape
    section: Section
    line: int
    at: int
    holders: Mapping[int, tuple[str, str]]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the section."""
        return DTYPES[self.section.dtype]

    def read(self, start: Shape, out: Tensor) -> None:
        """Copies the block of shape `out.shape` that begins at `start` in this box to `out`."""
        read_strided(self.shape, self.dtype, self._elements, start, out)

    def _elements(self, first: int, values: Tensor) -> None:
        done = 0
        for number, lo, hi in self._between(first, first + values.numel()):
            name, key = self.holders[number]
            # `Reader.file` compares the header with the manifest, so the offset below is valid.
            file = self.reader.file(name)
            offset = self.section.offset(number, self.line, self.part, lo)
            file.read(key, offset, values[done : done + hi - lo])
            done += hi - lo

    def _between(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        return self.section.between(self.line, self.at + first, self.at + last)

    def files(self, start: Shape, size: Shape) -> set[str]:
        """Returns the names of the files that contain values of a region of this box.

        The names are computed from the manifest; no file is opened.

        Args:
            start: index of the region's first element in this box, per dimension.
            size: size of the region, per dimension.
        """
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        first = sum(a * stride for a, stride in zip(start, strides, strict=True))
        last = first + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        return {self.holders[number][0] for number, *_ in self._between(first, last + 1)}


class Reader:
    """Reads boxes of a checkpoint's tensors; implements `TensorSource`.

    The constructor opens no files. The first read from a file raises CheckpointError if the file
    differs from the manifest.

    Args:
        path: folder of the checkpoint.
        manifest: manifest of the checkpoint.

    Attributes:
        shapes: shape of each tensor, by name; all parts of a tensor have this shape.
        parts: names of the saved parts of each tensor (weight, exp_avg, ...), by tensor name.
        buffers: (name of the file, dtype, shape) of each buffer, by name.
        opens: number of times that this reader has opened a file.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.opens = path, 0
        self._open: dict[str, TensorFile] = {}
        self._entries = {entry["file"]: entry for entry in manifest["files"]}
        self._sections = [Section(about) for about in manifest.get("sections", ())]
        self.buffers: dict[str, tuple[str, str, Shape]] = {
            name: (entry["file"], dtype, tuple(shape))
            for entry in manifest["files"]
            for name, dtype, shape in entry.get("buffers", ())
        }
        self.shapes = {name: tuple(shape) for name, shape in manifest["shapes"].items()}
        self._tensors = self._index_sections(manifest["files"])
        self.parts: dict[str, set[str]] = {}
        for part, name in self._tensors:
            self.parts.setdefault(name, set()).add(part)

    def _index_sections(
        self, files: Sequence[Mapping[str, Any]]
    ) -> dict[tuple[str, str], Boxed[SavedBox]]:
        """Returns the saved tensors by (part of the state, name of the tensor)."""
        found: dict[tuple[str, str], list[tuple[Shape, SavedBox]]] = {}
        holders: list[dict[int, tuple[str, str]]] = [{} for _ in self._sections]
        for entry in files:
            for key, (section, number) in enumerate(entry["holds"]):
                holders[section][number] = entry["file"], str(key)
        for section, some in zip(self._sections, holders, strict=True):
            for number, line in enumerate(section.lines):
                for name, start, size, at in line.pieces:
                    for part in section.parts:
                        box = SavedBox(self, part, tuple(size), section, number, at, some)
                        found.setdefault((part, name), []).append((tuple(start), box))
        return {key: Boxed(self.shapes[key[1]], boxes) for key, boxes in found.items()}

    # --------------------------------------------------------------------------------------------------------- files

    def file(self, name: str) -> TensorFile:
        """Returns an open file; its header is compared with the manifest when it is opened."""
        if name not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = TensorFile(self.path / name)
            self.opens += 1
            self._check_file(file, self._entries[name])
            self._open[name] = file
        return self._open[name]

    def _check_file(self, file: TensorFile, entry: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the header of a file differs from the manifest."""
        inside = {key: (dtype, shape) for key, (dtype, shape, _) in file.tensors.items()}
        name = entry["file"]
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
        """Closes the files. A later read opens them again."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- tensors

    def tensor(self, part: str, name: str) -> Boxed[SavedBox]:
        """Returns one part of a tensor, whose values can be read on demand.

        Args:
            part: part of the state: weight, exp_avg, ...
            name: global name of the tensor.

        Raises:
            CheckpointError: if the part was not saved.
        """
        if (part, name) not in self._tensors:
            raise CheckpointError(f"{self.path} has no {part} of {name}")
        return self._tensors[part, name]

    def saved_part(self, part: str, name: str) -> str | None:
        """Returns the name of the saved part from which to load a part of a tensor, or None.

        See `lazy_tensors.saved_part`.
        """
        return saved_part(part, self.parts.get(name, ()))

    def files_of(
        self, wanted: Iterable[Record], buffers: Iterable[str], rank: int | None
    ) -> set[str]:
        """Returns the names of the files that contain the given records, buffers and generators.

        Args:
            wanted: records (pieces of optimizer states). Records whose part was not saved are
                ignored.
            buffers: names of buffers. Buffers that were not saved are ignored.
            rank: rank whose generator states are needed; None for no generator states.
        """
        names = {self.buffers[name][0] for name in buffers if name in self.buffers}
        if rank is not None and file_of(rank) in self._entries:
            names.add(file_of(rank))
        for record in wanted:
            piece = record.piece
            if (part := self.saved_part(record.part, piece.name)) is not None:
                boxes = self._tensors[part, piece.name].meeting(piece.start, piece.size)
                names.update(*(box.files(inside, common) for box, inside, _, common in boxes))
        return names

    # -------------------------------------------------------------------------------------------------------- extras

    def buffer(self, name: str) -> Tensor:
        """Reads the persistent buffer `name`, and returns it."""
        file, dtype, shape = self.buffers[name]
        return of_bytes(self.file(file).tensor(f"buffer/{name}"), dtype, shape)

    def generators(self, rank: int) -> dict[str, Tensor]:
        """Returns the saved states (uint8 [bytes]) of a rank's random generators, by name."""
        file = file_of(rank)
        names = self._entries.get(file, {}).get("generators", ())
        return {name: self.file(file).tensor(f"generator/{name}") for name in names}
