"""Positions of a rank's tokens in their sequence, as ranges.

Positions.all(8)                        ranges ((0, 8),): a rank with the full sequence
Positions(((0, 2), (6, 8)), 8)          a rank whose rows 0 ... 3 are positions 0, 1, 6 and 7
Positions.zigzag(8, 2, 0)               the same: rank 0 of a ring of 2 ranks
in_documents(documents)                 positions that begin at 0 in every document of a sequence

`blocks` lists the parts of causal attention between the queries of one rank and the keys of another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Label of a token without a loss, as in torch's cross_entropy; all labels below 0 have this meaning.
IGNORED = -100
Range = tuple[int, int]  # (first, last): the positions first .. last - 1
# Smallest and largest number of queries per block under a window. A mask has one element per query
# and key of a block, so with the upper limit its size does not grow with the square of the window.
QUERIES = (64, 512)


class Positions(NamedTuple):
    """Positions of the rows of activations [s b h] in their sequences.

    The class is hashable, so that positions can be keys of cached tables.

    Attributes:
        ranges: ranges of positions, in the order of the rows.
        length: full length of the sequence.
    """

    ranges: tuple[Range, ...]
    length: int

    @classmethod
    def all(cls, length: int) -> Positions:
        """Returns all positions of a sequence."""
        return cls(((0, length),), length)

    @classmethod
    def zigzag(cls, length: int, parts: int, index: int) -> Positions:
        """Returns the positions of a ring rank: chunks `index` and 2·parts - 1 - index of 2·parts.

        With these positions every rank of a ring has the same number of pairs of a query and a key
        that it attends to (Llama 3, arXiv 2407.21783, section 3.3.2).

        Args:
            length: full length of the sequence, a multiple of 2·parts unless `parts` is 1.
            parts: number of ranks of the ring. 1: all positions.
            index: index of the rank in the ring.
        """
        if parts == 1:
            return cls.all(length)
        size = length // (2 * parts)
        first, second = index * size, (2 * parts - 1 - index) * size
        if first + size == second:
            return cls(((first, second + size),), length)
        return cls(((first, first + size), (second, second + size)), length)

    @property
    def total(self) -> int:
        """Number of positions."""
        return sum(last - first for first, last in self.ranges)

    def by_row(self) -> Iterator[tuple[int, Range]]:
        """Yields (first row, range) of each range."""
        row = 0
        for first, last in self.ranges:
            yield row, (first, last)
            row += last - first

    def part(self, parts: int, index: int) -> Positions:
        """Returns one of several equal parts of these positions, in their order.

        Args:
            parts: number of parts, a divisor of the number of positions.
            index: index of the part.
        """
        size = self.total // parts
        begin, end = index * size, (index + 1) * size
        inside = [
            (first + max(begin - row, 0), min(first + end - row, last))
            for row, (first, last) in self.by_row()
        ]
        return Positions(tuple((low, high) for low, high in inside if low < high), self.length)

    def columns(self, full: Tensor) -> Tensor:
        """Returns the columns of `full` [b length ...] at these positions, contiguous."""
        return torch.cat([full[:, first:last] for first, last in self.ranges], 1)

    def rows(self, full: Tensor) -> Tensor:
        """Returns the rows of `full` [length ...] at these positions.

        The result is a view if the positions are a single range, else a copy.
        """
        parts = [full[first:last] for first, last in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def indices(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        """Returns the positions as a tensor [s].

        Args:
            device: device of the result.
            dtype: dtype of the result.
        """
        return torch.cat([torch.arange(*part, dtype=dtype, device=device) for part in self.ranges])


def in_documents(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the position of each token in its document, and the length of this document.

    Both are int64 [s b].

    Args:
        documents: number of each token's document, int64 [b s], not decreasing along s.
    """
    documents = documents.contiguous()
    begins = torch.searchsorted(documents, documents)
    ends = torch.searchsorted(documents, documents, right=True)
    index = torch.arange(documents.shape[1], device=documents.device)
    # If numbers decrease, which is reported as an error in the data, no position may be negative.
    return (index - begins).clamp_min(0).t(), (ends - begins).t()


class Block(NamedTuple):
    """Queries of one rank and keys of another that causal attention computes at once.

    Attributes:
        rows: range of rows among the queries.
        keys: range of rows among the keys.
        offset: position of the first query minus position of the first key, for
            `ops.attention.forward`. If every query attends to every key, the length of the sequence.
    """

    rows: Range
    keys: Range
    offset: int


@functools.lru_cache(maxsize=512)
def blocks(
    queries: Positions, keys: Positions, window: int = 0, inside: Range | None = None
) -> tuple[Block, ...]:
    """Returns the blocks of causal attention between two sets of positions.

    A pair of a query and a key that it attends to is in exactly one block. Without a window each
    block is complete (every query attends to every key), or causal and square, but for the blocks
    at the ends of a document.

    Args:
        queries: positions of the queries.
        keys: positions of the keys.
        window: number of positions that a query attends to, including its own, below the length of
            the sequence. 0: no limit.
        inside: positions of a document, to which queries and keys are restricted. Default: all.
    """
    if queries == keys and not window and inside is None:
        # Rows are in ascending order, so attention among them is causal by row number.
        return (Block((0, queries.total), (0, keys.total), 0),)
    length, inside = queries.length, inside or (0, queries.length)
    size = min(max(window, QUERIES[0]), QUERIES[1]) if window else length
    found = list[Block]()
    for row, first, last in _rows(queries, size, inside):
        for key, low, high in _rows(keys, length, inside):
            # leave out keys that no query sees, and queries that see none
            begin, end = max(low, first - window + 1) if window else low, min(high, last)
            start = max(first, begin)
            stop = min(last, end + window - 1) if window else last
            if begin < end and start < stop:
                at, to = row + start - first, key + begin - low
                complete = start >= end - 1 and not window
                block = (at, at + stop - start), (to, to + end - begin)
                found.append(Block(*block, length if complete else start - begin))
    return tuple(_merged(found, length))


def _rows(positions: Positions, size: int, inside: Range) -> Iterator[tuple[int, int, int]]:
    """Yields (first row, first position, end) of ranges of up to `size` positions in `inside`."""
    for row, (first, last) in positions.by_row():
        low, high = max(first, inside[0]), min(last, inside[1])
        for at in range(low, high, size):
            yield row + at - first, at, min(at + size, high)


def _merged(found: list[Block], length: int) -> list[Block]:
    """Returns the blocks, with complete blocks of adjacent keys or adjacent queries merged."""
    out = list[Block]()
    for rows, keys, offset in found:
        before = out[-1] if out and out[-1].offset == offset == length else None
        if before and before.rows == rows and before.keys[1] == keys[0]:
            out[-1] = Block(rows, (before.keys[0], keys[1]), length)
        elif before and before.keys == keys and before.rows[1] == rows[0]:
            out[-1] = Block((before.rows[0], rows[1]), keys, length)
        else:
            out.append(Block(rows, keys, offset))
    return out
