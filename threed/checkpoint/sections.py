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
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.files import DTYPES, NAMES, NotFiniteError, is_finite, stream_tensors
from threed.sharding import Piece, split
from threed.zero.layout import Group, Layout
from threed.zero.records import Record
from threed.zero.state import State

LEAST_BYTES = 2**26  # of a part, where several ranks could write it


class Line:
    """A flat order of pieces: rows (global name, start, size, first element), by rising first element."""

    def __init__(self, length: int, step: int, pieces: Sequence[Sequence[Any]]) -> None:
        self.length, self.step, self.pieces = length, step, pieces
        self._firsts = [at for *_, at in pieces]
        self.numels = [math.prod(size) for _, _, size, _ in pieces]
        self._before = list(accumulate(self.numels, initial=0))

    def count(self, end: int) -> int:
        """Returns how many elements of pieces lie below `end`."""
        number = bisect_right(self._firsts, end) - 1
        if number < 0:
            return 0
        return self._before[number] + min(end - self._firsts[number], self.numels[number])

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yields the pieces, by number, that meet [first, last), each with the range that they have in common."""
        number = max(bisect_right(self._firsts, first) - 1, 0)
        while number < len(self.pieces) and (at := self._firsts[number]) < last:
            lo, hi = max(first, at), min(last, at + self.numels[number])
            if lo < hi:
                yield number, lo, hi
            number += 1


class Section:
    """Lines that are cut alike. about: what a manifest says of it. digest: of that, so that a file can name it."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.about = about
        self.parts: list[str] = list(about["parts"])
        self.dtype: str = about["dtype"]
        self.portions: int = about["portions"]
        self.writers: int = about["writers"]
        self.lines = [Line(line["length"], line["step"], line["pieces"]) for line in about["lines"]]
        self.digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self._bases: dict[int, list[array[int]]] = {}

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
        first, last = self.window(number, here, element // here.step)
        before = here.count(first)
        base = self._base(number)[line][element // here.step]
        return (
            base
            + self.parts.index(part) * (here.count(last) - before)
            + here.count(element)
            - before
        )

    def numel(self, number: int) -> int:
        """Returns how many elements file `number` has, of all parts."""
        base = self._base(number)
        return base[-1][-1]

    def _base(self, number: int) -> list[array[int]]:
        """Returns where each window of each line begins in file `number`, and at last where the file ends."""
        if number not in self._bases:
            end, found = 0, []
            for line in self.lines:
                starts = array("q")
                for index in range(-(-line.length // line.step)):
                    starts.append(end)
                    first, last = self.window(number, line, index)
                    end += (line.count(last) - line.count(first)) * len(self.parts)
                found.append(starts)
            found[-1].append(end)
            self._bases[number] = found
        return self._bases[number]


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
    portion: int
    copies: int
    copy: int
    states: list[list[State]]
    shapes: dict[str, tuple[int, ...]]

    @property
    def numbers(self) -> range:
        """All numbers of the portion."""
        writers = self.section.writers
        return range(self.portion * writers, (self.portion + 1) * writers)

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

    def nbytes(self, number: int) -> int:
        """Returns the bytes of a number."""
        return self.section.numel(number) * DTYPES[self.section.dtype].itemsize

    def extents(self, number: int) -> Iterator[Record]:
        """Yields what a number consists of, in order."""
        for line, states in zip(self.section.lines, self.states, strict=True):
            for index, state in enumerate(states):
                runs = list(line.runs(*self.section.window(number, line, index)))
                origin = state.bucket.portion_first
                for part in self.section.parts:
                    for piece, lo, hi in runs:
                        name, start, size, at = line.pieces[piece]
                        whole = Piece(name, self.shapes[name], tuple(start), tuple(size))
                        for one in split(whole, lo - at, hi - at, lo - origin):
                            yield Record(part, one, state)


def held(layout: Layout, states: Iterable[State]) -> list[Held]:
    """Returns the sections of some states that this rank holds portions of, alike on all that hold them."""
    by_group: dict[Group, dict[tuple[str, ...], list[State]]] = {
        group: {} for group in layout.groups
    }
    for state in states:
        by_group[state.bucket.group].setdefault(tuple(state.storages), []).append(state)
    kinds: dict[tuple[Any, ...], list[tuple[Group, list[State]]]] = {}
    for group, some in by_group.items():
        for mine in some.values() if any(True for _ in _pieces(group)) else ():
            mine.sort(key=lambda state: state.bucket.first)
            for dtype, parts in _by_dtype(mine[0]).items():
                sizes = (
                    group.shard.size,
                    group.holders.size,
                    *(axis.size for axis in group.copies),
                )
                kind = (parts, dtype, sizes, group.key.replicated, group.key.tied)
                kinds.setdefault(kind, []).append((group, mine))
    return [_held(parts, dtype, members) for (parts, dtype, *_), members in kinds.items()]


def _by_dtype(state: State) -> dict[torch.dtype, tuple[str, ...]]:
    dtypes = {part: storage.dtype for part, storage in state.storages.items()}
    return {dtype: tuple(p for p, d in dtypes.items() if d == dtype) for dtype in dtypes.values()}


def _held(
    parts: tuple[str, ...], dtype: torch.dtype, members: list[tuple[Group, list[State]]]
) -> Held:
    first = members[0][0]
    portions, copies = first.shard.size * first.holders.size, 1
    portion, copy = first.shard.index * first.holders.size + first.holders.index, 0
    for axis in first.copies:
        copies, copy = copies * axis.size, copy * axis.size + axis.index
    nbytes = sum(group.numel for group, _ in members) // portions * len(parts) * dtype.itemsize
    lines = [
        {
            "length": group.numel,
            "step": states[0].bucket.last - states[0].bucket.first,
            "pieces": [[p.name, list(p.start), list(p.size), at] for p, at in _pieces(group)],
        }
        for group, states in members
    ]
    writers = min(copies, max(1, -(-nbytes // LEAST_BYTES)))
    about = {
        "parts": list(parts),
        "dtype": NAMES[dtype],
        "portions": portions,
        "writers": writers,
        "lines": lines,
    }
    shapes = {piece.name: piece.shape for group, _ in members for piece, _ in _pieces(group)}
    return Held(Section(about), portion, copies, copy, [states for _, states in members], shapes)


def _pieces(group: Group) -> Iterator[tuple[Piece, int]]:
    """Yields the pieces of a group that have elements, and where they begin."""
    for slot in group.slots:
        for piece in slot.spec.pieces:
            if piece.numel:
                yield piece, slot.first + piece.offset


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
        held = sum(h.nbytes(number) for h, number in self.held)
        return held + sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def records(self) -> list[Record]:
        """The records of the optimizer's states in the file, in order."""
        return [record for h, number in self.held for record in h.extents(number)]

    def write(self, folder: Path, values: Iterable[Tensor], **how: Any) -> dict[str, Any]:
        """Writes the file; returns its entry of the manifest.

        Args:
            folder: Where to write it.
            values: The values of `records`, in order.
            how: The limit and durability, as for `stream_tensors`.
        """
        holds = [(h.section, number) for h, number in self.held]
        path, checked = folder / self.name, self._checked(values)
        return {**write_file(path, holds, checked, self.tensors, **how), **self.about}

    def _checked(self, values: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the values of `records`; NotFiniteError if those of a trained tensor are not finite."""
        left = iter(self.records)
        for tensor in values:  # to their end
            if (record := next(left, None)) is None:
                raise ValueError("more tensors than announced")
            if record.state.bucket.group.key.trainable and not is_finite(tensor):
                what = "has values that are not finite (NaN or infinite), and is not saved"
                raise NotFiniteError(f"{record.part} of {record.piece.name} {what}")
            yield tensor.view(-1)


def write_file(
    path: Path,
    holds: Sequence[tuple[Section, int]],
    values: Iterable[Tensor],
    extra: Mapping[str, Tensor] = MappingProxyType({}),
    **how: Any,
) -> dict[str, Any]:
    """Writes a file; returns its entry of the manifest.

    Args:
        holds: The sections in the file, and the number of each.
        values: The values of the sections, in order, each in one or several parts [n].
        extra: Other tensors, by name.
        how: The limit and durability, as for `stream_tensors`.
    """
    about: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        str(key): (DTYPES[section.dtype], (section.numel(number),))
        for key, (section, number) in enumerate(holds)
    }
    about |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in extra.items()}
    named = [[section.digest, number] for section, number in holds]
    metadata = {str(key): f"{digest} {number}" for key, (digest, number) in enumerate(named)}
    hashes = stream_tensors(path, about, chain(values, extra.values()), metadata, **how)
    return {"file": path.name, **hashes._asdict(), "size": path.stat().st_size, "holds": named}
