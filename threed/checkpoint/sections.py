"""The place of every value in a checkpoint's files, by arithmetic: a manifest says it once, not for each rank.

A line is the flat order of a group of parameters: where each piece of a global tensor lies in it, with gaps between
them. A section is some lines that are cut in one way: each into windows of `step` elements, each window into
`portions`, each portion into `writers` parts. So a number of [0, portions x writers) names what one file has of it: of
every window of every line the elements of the pieces in its part, once for each of the optimizer's parts (weight,
exp_avg, ...). Only the last window of a line may be shorter.

    section = Section(about)                                   about: as a manifest has it
    for number, first, last in section.between(line, 0, 100):  which files have what of a line
        section.offset(number, line, "weight", first)          and where, in elements

`held` returns the sections that a rank holds portions of, with what it writes of each: of slices that several ranks
hold, each writes a part, but no part smaller than 64 MiB, since a load opens all of them. A `SavedFile` writes such
numbers, and other tensors, to one file.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.files import DTYPES, NAMES, NotFiniteError, is_finite, stream_tensors
from threed.topology import Axis
from threed.zero.layout import Group, Layout
from threed.zero.records import Record
from threed.zero.state import State

LEAST_BYTES = 2**26  # of a part, where several ranks could write it


class Line:
    """A flat order of pieces: rows (global name, start, size, first element), by rising first element."""

    def __init__(self, length: int, step: int, pieces: Sequence[Sequence[Any]]) -> None:
        self.length, self.step, self.pieces = length, step, pieces
        self.windows = -(-length // step)
        self._firsts = [at for *_, at in pieces]
        self.numels = [math.prod(size) for _, _, size, _ in pieces]
        self._before = list(accumulate(self.numels, initial=0))

    def count(self, end: int) -> int:
        """Returns how many elements of pieces lie below `end`."""
        number = bisect_right(self._firsts, end) - 1
        if number < 0:
            return 0
        return self._before[number] + min(end - self._firsts[number], self.numels[number])


def digest(about: Mapping[str, Any]) -> str:
    """Returns the hash of a JSON object without its own `sha256`, so that damage anywhere in it is detected."""
    body = {key: value for key, value in about.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Section:
    """Lines that are cut alike. about: what a manifest says of it. digest: of that, so that a file can name it."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.about = about
        self.parts: list[str] = list(about["parts"])
        self.dtype: str = about["dtype"]
        self.portions: int = about["portions"]
        self.writers: int = about["writers"]
        self.lines = [Line(line["length"], line["step"], line["pieces"]) for line in about["lines"]]
        self.digest = digest(about)
        # windows of the lines before each
        self._earlier = list(accumulate((line.windows for line in self.lines), initial=0))
        self._starts: dict[int, array[int]] = {}

    def window(self, number: int, line: Line, index: int) -> tuple[int, int]:
        """Returns the range [first, last) of a line's window that file `number` has."""
        begin = index * line.step
        share = (min(begin + line.step, line.length) - begin) // self.portions
        portion, writer = divmod(number, self.writers)
        begin += portion * share
        return begin + share * writer // self.writers, begin + share * (writer + 1) // self.writers

    def between(self, line: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yields the numbers that have the elements [first, last) of a line, each with its range of them, in order."""
        here = self.lines[line]
        while first < last:
            index = first // here.step
            begin = index * here.step
            share = (min(begin + here.step, here.length) - begin) // self.portions
            portion, inside = divmod(first - begin, share)
            # the last writer w with share * w // writers <= inside
            number = portion * self.writers + ((inside + 1) * self.writers - 1) // share
            end = self.window(number, here, index)[1]
            yield number, first, min(end, last)
            first = end

    def offset(self, number: int, line: int, part: str, element: int) -> int:
        """Returns where, in elements, file `number` has an element of a line, which lies in a piece."""
        here = self.lines[line]
        index = element // here.step
        first, last = self.window(number, here, index)
        before = here.count(first)
        start = len(self.parts) * self._window_starts(number)[self._earlier[line] + index]
        return (
            start
            + self.parts.index(part) * (here.count(last) - before)
            + here.count(element)
            - before
        )

    def numel(self, number: int) -> int:
        """Returns how many elements file `number` has, of all parts."""
        return len(self.parts) * sum(self._counts(number))

    def _counts(self, number: int) -> Iterator[int]:
        """Yields how many elements of one part file `number` has of each window."""
        for line in self.lines:
            for index in range(line.windows):
                first, last = self.window(number, line, index)
                yield line.count(last) - line.count(first)

    def _window_starts(self, number: int) -> array[int]:
        """Returns how many elements of one part file `number` has before each window."""
        if number not in self._starts:
            self._starts[number] = array("q", accumulate(self._counts(number), initial=0))
        return self._starts[number]


# ------------------------------------------------------------------------------------------------- what a rank holds


@dataclass(frozen=True, eq=False)
class Held:
    """A section that a rank holds a portion of.

    Attributes:
        copies: How many ranks hold the portion; this one is number `copy` of them.
        states: Those of every line, in the order of its windows.
        shapes: Those of the global tensors, by name.
    """

    section: Section
    portion: int = 0
    copies: int = 1
    copy: int = 0
    states: list[list[State]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def numbers(self) -> range:
        """All numbers of the portion."""
        return range(self.portion * self.section.writers, (self.portion + 1) * self.section.writers)

    @property
    def number(self) -> int | None:
        """The number that this rank writes to a checkpoint; None if others write the portion."""
        writers = self.section.writers
        # Not always the first copies, nor the same ones: by the portion, and by what the section is.
        turn = zlib.crc32(self.section.digest.encode()) + self.portion
        for writer, number in enumerate(self.numbers):
            if (writer * self.copies // writers + turn) % self.copies == self.copy:
                return number
        return None

    def extents(self, number: int) -> Iterator[Record]:
        """Yields what a number consists of, in order."""
        for line, states in zip(self.section.lines, self.states, strict=True):
            for index, state in enumerate(states):
                runs = list(state.bucket.runs(*self.section.window(number, line, index)))
                for part in self.section.parts:
                    for run in runs:
                        yield from (Record(part, piece, state) for piece in run.pieces())


def held(layout: Layout, states: Iterable[State]) -> list[Held]:
    """Returns the sections of some states that this rank holds portions of, alike on all that hold them."""
    lines: dict[tuple[Group, torch.dtype, tuple[str, ...]], list[State]] = {}
    order = {group: number for number, group in enumerate(layout.groups)}
    for state in sorted(states, key=lambda one: (order[one.bucket.group], one.bucket.first)):
        dtypes = {part: storage.dtype for part, storage in state.storages.items()}
        for dtype in dict.fromkeys(dtypes.values()):
            parts = tuple(part for part, other in dtypes.items() if other == dtype)
            lines.setdefault((state.bucket.group, dtype, parts), []).append(state)
    kinds: dict[tuple[Any, ...], list[tuple[Group, list[State]]]] = {}
    for (group, dtype, parts), mine in lines.items():
        if any(slot.spec.numel for slot in group.slots):
            sizes = tuple(axis.size for axis in (group.shard, group.holders, *group.copies))
            kind = parts, dtype, sizes, group.key.replicated, group.key.tied
            kinds.setdefault(kind, []).append((group, mine))
    return [_held(parts, dtype, members) for (parts, dtype, *_), members in kinds.items()]


def _held(
    parts: tuple[str, ...], dtype: torch.dtype, members: list[tuple[Group, list[State]]]
) -> Held:
    first = members[0][0]
    portions, portion = _place((first.shard, first.holders))
    copies, copy = _place(first.copies)
    nbytes = sum(group.numel for group, _ in members) // portions * len(parts) * dtype.itemsize
    lines, shapes = [], dict[str, tuple[int, ...]]()
    for group, states in members:
        rows = []
        for slot in group.slots:
            for piece in (piece for piece in slot.spec.pieces if piece.numel):
                at = slot.first + piece.offset
                rows.append([piece.name, list(piece.start), list(piece.size), at])
                shapes[piece.name] = piece.shape
        step = states[0].bucket.last - states[0].bucket.first
        lines.append({"length": group.numel, "step": step, "pieces": rows})
    writers = min(copies, max(1, -(-nbytes // LEAST_BYTES)))
    about = {"parts": list(parts), "dtype": NAMES[dtype], "portions": portions}
    section = Section({**about, "writers": writers, "lines": lines})
    return Held(section, portion, copies, copy, [states for _, states in members], shapes)


def _place(axes: Iterable[Axis]) -> tuple[int, int]:
    """Returns how many ranks some axes have together, and the number of this one among them."""
    size, index = 1, 0
    for axis in axes:
        size, index = size * axis.size, index * axis.size + axis.index
    return size, index


# ------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class SavedFile:
    """A file of a save: numbers of sections, and other tensors (buffers, generators).

    Attributes:
        held: Sections, each with the number that the file has.
        about: The manifest's description of `tensors`.
        tensors: On the CPU, by the key in the file.
    """

    name: str
    held: Sequence[tuple[Held, int]]
    about: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(r.nbytes for r in self.records) + sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def records(self) -> list[Record]:
        """The records of the optimizer's states in the file, in order."""
        return [record for h, number in self.held for record in h.extents(number)]

    def write(self, folder: Path, values: Iterable[Tensor], **how: Any) -> dict[str, Any]:
        """Writes the file; returns its entry of the manifest.

        Args:
            folder: Where to write it.
            values: The values of the numbers, in order, each in one or several parts [n].
            how: The limit and durability, as for `stream_tensors`.
        """
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        metadata, holds = {}, []
        for key, (h, number) in enumerate(self.held):
            tensors[str(key)] = DTYPES[h.section.dtype], (h.section.numel(number),)
            metadata[str(key)] = f"{h.section.digest} {number}"
            holds.append([h.section.digest, number])
        tensors |= {key: (one.dtype, tuple(one.shape)) for key, one in self.tensors.items()}
        path, stream = folder / self.name, chain(values, self.tensors.values())
        hashes = stream_tensors(path, tensors, stream, metadata, **how)._asdict()
        size = path.stat().st_size
        return {"file": self.name, **hashes, "size": size, "holds": holds, **self.about}


def finite(records: Iterable[Record], values: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the values of records, [n]; NotFiniteError if those of a trained tensor are not finite."""
    for tensor, record in zip(values, records, strict=True):
        if record.state.bucket.group.key.trainable and not is_finite(tensor):
            what = "has values that are not finite (NaN or infinite), and is not saved"
            raise NotFiniteError(f"{record.part} of {record.piece.name} {what}")
        yield tensor.view(-1)
