"""Values on their way from a checkpoint's files to this rank's memory: by threads, and with one read where that may be.

    placing = Placing(reader, trained, is_fresh)
    placing.add(state, records)          plans a state; CheckpointError where some of it cannot be read
    placing.begin()                      once memory may change
    verify(..., look=placing.look)       sets what belongs here of files while their bytes are hashed
    placing.finish()                     sets the rest, from files whose hashes are known; returns what is wrong
    placing.states                       the states that are set by this; all others are to be read by boxes

A state is set by this if it is in the host's memory and each of its boxes lies in the files as it does there: in one
piece, in the same dtype. So it is wherever tensors are cut over tensor ranks as they were when they were saved. Memory:
4 MiB a thread.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from threed.checkpoint import finite
from threed.checkpoint.checksum import BLOCK, PIECE, threads
from threed.checkpoint.files import fill, plain
from threed.checkpoint.reading import Reader
from threed.memory.tiers import InMemory
from threed.zero.records import Record
from threed.zero.state import State

Bytes = NDArray[np.uint8]


class _Segment(NamedTuple):
    """Bytes of a file, from `at` on, that are elements [first, first + numel) of a storage. what: the name of what must
    be finite, else ""."""

    at: int
    storage: InMemory
    first: int
    numel: int
    what: str


class _Part(NamedTuple):
    """Bytes of a file, from `at` on, and where they belong."""

    at: int
    out: Bytes
    dtype: torch.dtype
    what: str


@dataclass(frozen=True)
class _File:
    """The parts of a file, by rising first byte. longest: the bytes of the longest one."""

    firsts: list[int]
    parts: list[_Part]
    longest: int


class Placing:
    """Sets states from a checkpoint's files. trained: names whose values must be finite. is_fresh: whether the
    checkpoint has no such part of a name, which is then set to zero."""

    def __init__(
        self, reader: Reader, trained: Collection[str], is_fresh: Callable[[str, str], bool]
    ) -> None:
        self.reader, self.trained, self.is_fresh = reader, trained, is_fresh
        self.states: list[State] = []
        self.by_boxes = False  # some states are to be read so
        self._zeros: list[Record] = []
        self._segments: dict[str, list[_Segment]] = {}
        self._files: dict[str, _File] = {}
        self._seen: set[str] = set()  # files that were looked at
        self._wrong: list[tuple[str, int, str]] = []  # file, first byte, problem

    # ------------------------------------------------------------------------------------------------------------ plan

    def add(self, state: State, records: Sequence[Record]) -> None:
        """Plans a state with its boxes. CheckpointError where some are not there, or a file is not as the manifest
        says."""
        zeros = [record for record in records if self.is_fresh(record.part, record.piece.name)]
        whole = all(
            isinstance(s, InMemory) and s.device.type == "cpu" for s in state.storages.values()
        )
        segments: list[tuple[str, _Segment]] = []
        for record in records:
            if not self.is_fresh(record.part, record.piece.name):
                found = self._segments_of(record) if whole else None
                whole = found is not None
                segments += found or ()
                if found is None:
                    part = self.reader.stands_for(record.part, record.piece.name)
                    self.reader.check(part, record.piece.name, record.box.start, record.box.size)
        self.by_boxes |= not whole
        if whole:
            self.states.append(state)
            self._zeros += zeros
            for file, segment in segments:
                self._segments.setdefault(file, []).append(segment)

    def _segments_of(self, record: Record) -> list[tuple[str, _Segment]] | None:
        """Returns the segments of a box, by file; None unless they lie there as in memory."""
        storage, name, box = record.state.storages[record.part], record.piece.name, record.box
        part = self.reader.stands_for(record.part, name)
        places = self.reader.places(part, name, box.start, box.size)
        size, what = (
            record.dtype.itemsize,
            f"{record.part} of {name}" if name in self.trained else "",
        )
        if (
            places is None
            or self.reader.dtype(part, name) != record.dtype
            or any(p.at % size for p in places)
        ):
            return None
        assert isinstance(storage, InMemory)
        return [
            (p.file, _Segment(p.at, storage, record.offset + p.first, p.numel, what))
            for p in places
        ]

    def reads_only(self, files: Collection[str]) -> bool:
        """Whether all states are set by this, from some files."""
        return not self.by_boxes and self._segments.keys() <= set(files)

    # ----------------------------------------------------------------------------------------------------------- place

    def begin(self) -> None:
        """Finds the memory of what was planned, which may change from now on."""
        for file, segments in self._segments.items():
            parts = [_part(segment) for segment in sorted(segments, key=attrgetter("at"))]
            longest = max(part.out.nbytes for part in parts)
            self._files[file] = _File([part.at for part in parts], parts, longest)
        for record in self._zeros:
            record.of(record.state.storages[record.part].fetch().wait()).zero_()

    def look(self, file: str, at: int, piece: memoryview) -> None:
        """Sets what belongs here of a file's bytes from `at` on. For several threads."""
        self._seen.add(file)
        if (target := self._files.get(file)) is None:
            return
        data, end = np.frombuffer(piece, np.uint8), at + len(piece)
        for number in range(bisect_left(target.firsts, at - target.longest), len(target.parts)):
            part = target.parts[number]
            if part.at >= end:
                break
            lo, hi = max(part.at, at), min(part.at + part.out.nbytes, end)
            if lo < hi:
                part.out[lo - part.at : hi - part.at] = data[lo - at : hi - at]
                self._check(file, part, data[lo - at : hi - at])

    def finish(self) -> list[str]:
        """Sets all that `look` did not see; returns what is wrong with values, or with files: the first of it."""
        for file in self._files.keys() - self._seen:
            handle = -1
            try:
                handle = os.open(self.reader.path / file, os.O_RDONLY | os.O_CLOEXEC)
                work = [
                    threads().submit(self._fill, handle, file, some)
                    for some in _shares(self._files[file])
                ]
                wait(
                    work
                )  # all, also after an error: nobody may write into the states after this has returned
                for one in work:
                    one.result()
            except OSError as error:
                return [f"{self.reader.path / file} cannot be read: {plain(error)}"]
            finally:
                if handle >= 0:
                    os.close(handle)
        return [problem for *_, problem in sorted(self._wrong)[:1]]

    def _fill(self, handle: int, file: str, some: list[_Part]) -> None:
        for part in some:
            fill(handle, part.out.data, part.at)
            self._check(file, part, part.out)

    def _check(self, file: str, part: _Part, data: Bytes) -> None:
        if part.what and not finite.are_finite(data, part.dtype):
            self._wrong.append(
                (file, part.at, f"{part.what} has values that are not finite (NaN or infinite)")
            )


def _part(segment: _Segment) -> _Part:
    values = segment.storage.tensor[segment.first : segment.first + segment.numel]
    return _Part(segment.at, values.view(torch.uint8).numpy(), segment.storage.dtype, segment.what)


def _shares(file: _File) -> Iterator[list[_Part]]:
    """Yields the parts of a file in shares of about 8 MiB, cut so that what a thread has read is still in a cache."""
    share, nbytes = list[_Part](), 0
    for part in file.parts:
        for first in range(0, part.out.nbytes, PIECE):
            share.append(part._replace(at=part.at + first, out=part.out[first : first + PIECE]))
            nbytes += share[-1].out.nbytes
            if nbytes >= BLOCK:
                yield share
                share, nbytes = [], 0
    if share:
        yield share
