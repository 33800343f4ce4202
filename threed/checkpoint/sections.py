"""Computes which file of a checkpoint contains each element, and at which offset.

The manifest describes the layout once, for all ranks:

- A line is the flat buffer of one group of parameters, before ZeRO shards it. It contains pieces,
  which are blocks of global tensors; there may be gaps between the pieces. The manifest lists each
  piece with its offset in the line.
- A section is a set of lines that are split in the same way. Each line is split into windows of
  `step` elements; only the last window may be shorter. Each window is split into `portions` equal
  portions; a rank holds the same portion of every window. Each portion is split into `writers`
  ranges; each range is saved by one of the ranks that hold the portion.
- A share is the part of a section that one rank saves to its file: one range of every window. The
  number of a share is portion × writers + writer. For every window of every line and every part of
  the state (weight, exp_avg, ...), a share contains the elements of its range that belong to
  pieces.

    section = Section(about)                                   about: the section in the manifest
    for number, first, last in section.between(line, 0, 100):  share `number` has [first, last)
        section.offset(number, line, "weight", first)          offset in the share, in elements

`held` returns the sections of which a rank holds a portion. If several ranks hold the same portion,
they write different shares of it. To limit the number of files that a load opens, a portion has at
most one writer per 64 MiB (rounded up). If more ranks hold the portion, the remaining ranks write
no share of it. A `SavedFile` is one file, which contains shares and other tensors.
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
from threed.distributed.topology import Axis
from threed.zero.layout import Group, Layout
from threed.zero.state import Record, State

LEAST_BYTES = 2**26  # bytes of a portion per writer (rounded up), if enough ranks hold the portion


class Line:
    """The flat buffer of a group of parameters, described by its pieces (blocks of global tensors).

    Args:
        length: number of elements of the line, with gaps and padding.
        step: number of elements per window.
        pieces: one tuple per piece, by ascending offset: (global name of the tensor, start of the
            block in the tensor, size of the block, offset of the piece in the line).
    """

    def __init__(self, length: int, step: int, pieces: Sequence[Sequence[Any]]) -> None:
        self.length, self.step, self.pieces = length, step, pieces
        self.windows = -(-length // step)
        self._firsts = [at for *_, at in pieces]
        self.numels = [math.prod(size) for _, _, size, _ in pieces]
        self._before = list(accumulate(self.numels, initial=0))

    def count(self, end: int) -> int:
        """Returns how many of the line's first `end` elements belong to pieces, not to gaps."""
        number = bisect_right(self._firsts, end) - 1
        if number < 0:
            return 0
        return self._before[number] + min(end - self._firsts[number], self.numels[number])


def digest(about: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON object as hexadecimal text; its key `sha256` is left out."""
    body = {key: value for key, value in about.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Section:
    """A set of lines (flat buffers of parameter groups) that are split in the same way.

    The module's docstring explains windows, portions and writers.

    Attributes:
        about: the section's entry in the manifest, a JSON object.
        parts: names of the saved parts of the state: weight, exp_avg, ...
        dtype: dtype of the values, as in safetensors ("F32").
        portions: number of portions into which each window is split.
        writers: number of ranks that write each portion.
        lines: lines of the section, in the order of the manifest.
        digest: hash of `about`; files refer to the section by this hash.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.about = about
        self.parts: list[str] = list(about["parts"])
        self.dtype: str = about["dtype"]
        self.portions: int = about["portions"]
        self.writers: int = about["writers"]
        self.lines = [Line(line["length"], line["step"], line["pieces"]) for line in about["lines"]]
        self.digest = digest(about)
        # For each line, the number of windows of all lines before it.
        self._earlier = list(accumulate((line.windows for line in self.lines), initial=0))
        self._starts: dict[int, array[int]] = {}

    def window(self, number: int, line: Line, index: int) -> tuple[int, int]:
        """Returns the range of elements that a share contains in one window of a line.

        Args:
            number: number of the share.
            line: a line of this section.
            index: index of the window in the line.

        Returns:
            (first, last): the range [first, last) of offsets in the line.
        """
        begin = index * line.step
        share = (min(begin + line.step, line.length) - begin) // self.portions
        portion, writer = divmod(number, self.writers)
        begin += portion * share
        return begin + share * writer // self.writers, begin + share * (writer + 1) // self.writers

    def between(self, line: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yields the shares that contain a range of elements of a line, in the order of elements.

        Args:
            line: index of the line in the section.
            first: offset of the first element of the range in the line.
            last: end of the range, exclusive.

        Yields:
            (number of a share, first, last): the share contains the elements [first, last) of the
            line.
        """
        here = self.lines[line]
        while first < last:
            index = first // here.step
            begin = index * here.step
            share = (min(begin + here.step, here.length) - begin) // self.portions
            portion, inside = divmod(first - begin, share)
            # The portion has `share` elements in this window. The range of writer w begins at
            # offset share * w // writers in the portion. The element at offset `inside` belongs to
            # the last range that begins at or before `inside`.
            number = portion * self.writers + ((inside + 1) * self.writers - 1) // share
            end = self.window(number, here, index)[1]
            yield number, first, min(end, last)
            first = end

    def offset(self, number: int, line: int, part: str, element: int) -> int:
        """Returns the offset of an element in a share, in elements from the start of the share.

        Args:
            number: number of the share; the share must contain the element.
            line: index of the line in the section.
            part: name of the element's part of the state: weight, exp_avg, ...
            element: offset of the element in the line. The element must belong to a piece.
        """
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
        """Returns the number of elements of share `number`, over all parts."""
        return len(self.parts) * sum(self._counts(number))

    def _counts(self, number: int) -> Iterator[int]:
        """Yields, for each window, the number of its elements in a share.

        The order is: all windows of the first line, all windows of the second line, and so on. Only
        one part of the state is counted, because the number is the same for all parts (weight,
        exp_avg, ...).

        Args:
            number: number of the share.
        """
        for line in self.lines:
            for index in range(line.windows):
                first, last = self.window(number, line, index)
                yield line.count(last) - line.count(first)

    def _window_starts(self, number: int) -> array[int]:
        """Returns the offset of each window in a share, divided by the number of parts.

        In a share, a window has the same number of elements of every part of the state (weight,
        exp_avg, ...). So the offsets are computed for one part: the true offset of a window is the
        returned offset times the number of parts.

        Args:
            number: number of the share.

        Returns:
            One offset per window, in elements, in the order of `_counts`. The last entry belongs to
            no window: it is the number of elements that the share has of one part.
        """
        if number not in self._starts:
            self._starts[number] = array("q", accumulate(self._counts(number), initial=0))
        return self._starts[number]


# ------------------------------------------------------------------------------------------------- what a rank holds


@dataclass(frozen=True, eq=False)
class Held:
    """A section, and the portion of it that this rank holds.

    Attributes:
        section: description of how the lines are split.
        portion: index of this rank's portion, from 0 to `section.portions` - 1.
        copies: number of ranks that hold the portion.
        copy: index of this rank among the ranks that hold the portion.
        states: one list per line, with the optimizer state of each window of the line.
        shapes: shapes of the global tensors that have pieces in the section, by name.
    """

    section: Section
    portion: int = 0
    copies: int = 1
    copy: int = 0
    states: list[list[State]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def numbers(self) -> range:
        """The numbers of all shares of the portion."""
        return range(self.portion * self.section.writers, (self.portion + 1) * self.section.writers)

    @property
    def number(self) -> int | None:
        """The number of the share that this rank writes, or None if it writes no share."""
        writers = self.section.writers
        # `turn` differs between portions and between sections, so that their shares are written by
        # different ranks. This balances the number of bytes that each rank writes.
        turn = zlib.crc32(self.section.digest.encode()) + self.portion
        for writer, number in enumerate(self.numbers):
            if (writer * self.copies // writers + turn) % self.copies == self.copy:
                return number
        return None

    def extents(self, number: int) -> Iterator[Record]:
        """Yields the records of a share in file order.

        A record is a piece of a tensor in one part of an optimizer state.

        Args:
            number: number of a share of this rank's portion.
        """
        for line, states in zip(self.section.lines, self.states, strict=True):
            for index, state in enumerate(states):
                runs = list(state.bucket.runs(*self.section.window(number, line, index)))
                for part in self.section.parts:
                    for run in runs:
                        yield from (Record(part, piece, state) for piece in run.pieces())


def held(layout: Layout, states: Iterable[State]) -> list[Held]:
    """Groups optimizer states into sections, and returns this rank's portion of each section.

    Two states are in the same section if they have the same parts (weight, exp_avg, ...) and dtype,
    and if their groups of parameters are sharded and replicated over the same numbers of ranks. If
    the parts of a state have several dtypes, the parts of each dtype are in a separate section. All
    ranks that hold portions of a section compute the same description of the section.

    Args:
        layout: layout of the parameters on this rank.
        states: optimizer states of this rank.
    """
    lines: dict[tuple[Group, torch.dtype, tuple[str, ...]], list[State]] = {}
    order = {group: number for number, group in enumerate(layout.groups)}
    for state in sorted(states, key=lambda one: (order[one.bucket.group], one.bucket.first)):
        dtypes = {part: storage.dtype for part, storage in state.storages.items()}
        for dtype in dict.fromkeys(dtypes.values()):
            parts = tuple(part for part, other in dtypes.items() if other == dtype)
            lines.setdefault((state.bucket.group, dtype, parts), []).append(state)
    kinds: dict[tuple[Any, ...], list[tuple[Group, list[State]]]] = {}
    for (group, dtype, parts), group_states in lines.items():
        if any(slot.spec.numel for slot in group.slots):
            sizes = tuple(axis.size for axis in (group.shard, group.holders, *group.copies))
            kind = parts, dtype, sizes, group.key.replicated, group.key.tied
            kinds.setdefault(kind, []).append((group, group_states))
    return [_build_section(parts, dtype, members) for (parts, dtype, *_), members in kinds.items()]


def _build_section(
    parts: tuple[str, ...], dtype: torch.dtype, members: list[tuple[Group, list[State]]]
) -> Held:
    first = members[0][0]
    portions, portion = _flat_rank((first.shard, first.holders))
    copies, copy = _flat_rank(first.copies)
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


def _flat_rank(axes: Iterable[Axis]) -> tuple[int, int]:
    """Returns (product of the sizes of some axes, row-major index of this rank over these axes)."""
    size, index = 1, 0
    for axis in axes:
        size, index = size * axis.size, index * axis.size + axis.index
    return size, index


# ------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class SavedFile:
    """A file of a save: shares of sections, and other tensors (buffers, generator states).

    Attributes:
        name: name of the file.
        held: shares in the file, each as (its section, number of the share).
        about: description of `tensors` for the manifest.
        tensors: the other tensors, on the CPU, by the name under which the file stores them.
    """

    name: str
    held: Sequence[tuple[Held, int]]
    about: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors in the file."""
        return sum(r.nbytes for r in self.records) + sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def records(self) -> list[Record]:
        """The records (pieces of optimizer states) in the file, in file order."""
        return [record for h, number in self.held for record in h.extents(number)]

    def write(self, folder: Path, values: Iterable[Tensor], **how: Any) -> dict[str, Any]:
        """Writes the file, and returns its entry in the manifest.

        Args:
            folder: folder to write to.
            values: values of `records` in order. The values of a record may be split into several
                consecutive tensors [n].
            how: arguments `limit`, `hurries` and `durable` of `files.write_hashed`.
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
    """Yields the values of records as flat tensors [n], after checking that they are finite.

    Args:
        records: pieces of optimizer states.
        values: one tensor per record, in the same order.

    Raises:
        NotFiniteError: if a trained tensor has NaN or infinite values.
    """
    for tensor, record in zip(values, records, strict=True):
        if record.state.bucket.group.key.trainable and not is_finite(tensor):
            what = "has values that are not finite (NaN or infinite), and is not saved"
            raise NotFiniteError(f"{record.part} of {record.piece.name} {what}")
        yield tensor.view(-1)
