"""Patterns of block-sparse attention: which blocks of keys each block of queries attends to.

    pattern = FixedPattern(block=128, num_local_blocks=4)
    pattern.key_blocks(5, 8)                 # (3, 4, 5): key blocks of query block 5 out of 8
    layouts(pattern, 1024, heads=(0, 16))    # the same as ranges of positions, for `ops.block_sparse`

The patterns and the names of their arguments are those of DeepSpeed's SparsityConfig classes
(DeepSpeed 0.18, deepspeed/ops/sparse_attention/sparsity_config.py). There is one difference: with
unidirectional attention no pattern lists a block after the block of queries. In DeepSpeed some
patterns list such blocks, and the attention mask hides them.

This module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

Range = tuple[int, int]  # (first, last): first .. last - 1


@dataclass(frozen=True, kw_only=True)
class BlockPattern:
    """Base class of the patterns of `layers.SparseAttention`.

    A subclass defines `listed`. It is a frozen dataclass, because lists of blocks are cached per
    pattern.

    Attributes:
        block: number of positions per block. The last block of a sequence may have fewer. On GPUs
            blocks that are not multiples of 128 positions save little time (`ops.flex`).
        different_layout_per_head: whether each head has its own list of blocks.
        attention: "unidirectional" (causal) or "bidirectional".
    """

    block: int = 128
    different_layout_per_head: bool = False
    attention: Literal["unidirectional", "bidirectional"] = "unidirectional"

    def __post_init__(self) -> None:
        for field in fields(self):  # lists become tuples, so that the pattern is hashable
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))
        self._check(self.block >= 1, f"block {self.block}: use 1 or more positions")
        known = self.attention in ("unidirectional", "bidirectional")
        self._check(known, f"attention {self.attention!r}: use unidirectional or bidirectional")

    def _check(self, fits: bool, problem: str) -> None:
        if not fits:
            raise ValueError(f"{type(self).__name__}: {problem}")

    def _check_horizontal(self, horizontal: bool) -> None:
        fits = self.attention == "bidirectional" or not horizontal
        self._check(fits, "horizontal_global_attention needs bidirectional attention")

    @property
    def causal(self) -> bool:
        """Whether queries attend only to their own position and earlier ones."""
        return self.attention == "unidirectional"

    def distinct(self, heads: Range) -> Sequence[int]:
        """Returns the heads that may have different lists; the first head if all lists are equal.

        Args:
            heads: global numbers of the heads.
        """
        return range(*heads) if self.different_layout_per_head else heads[:1]

    def listed(self, query: int, count: int, head: int) -> Iterable[int]:
        """Returns the key blocks of a query block, in any order, with or without repetitions.

        With unidirectional attention, blocks after the query block are removed by the caller.

        Args:
            query: number of the query block.
            count: number of blocks of the sequence.
            head: global number of the head; 0 without `different_layout_per_head`.
        """
        raise NotImplementedError

    def key_blocks(self, query: int, count: int, head: int = 0) -> tuple[int, ...]:
        """Returns the key blocks that a query block attends to, in ascending order.

        Args:
            query: number of the query block.
            count: number of blocks of the sequence.
            head: global number of the head.

        Raises:
            ValueError: if the pattern lists a block that does not exist.
        """
        head = head if self.different_layout_per_head else 0
        found = sorted(set(self.listed(query, count, head)))
        wrong = [block for block in found if not 0 <= block < count]
        text = f"query block {query} of {count} lists key blocks {wrong}: use 0 to {count - 1}"
        self._check(not wrong, text)
        return tuple(block for block in found if block <= query or not self.causal)


@dataclass(frozen=True, kw_only=True)
class DensePattern(BlockPattern):
    """All blocks.

    Attributes:
        block: number of positions per block. The last block of a sequence may have fewer.
        different_layout_per_head: whether each head has its own list of blocks. All lists are equal.
        attention: "unidirectional" (causal) or "bidirectional".
    """

    def listed(self, query: int, count: int, head: int) -> Iterable[int]:
        return range(count)


@dataclass(frozen=True, kw_only=True)
class FunctionPattern(BlockPattern):
    """Blocks from a custom function.

    Attributes:
        function: called with the number of a query block and the number of blocks of the sequence;
            returns key blocks. If `different_layout_per_head` is set, the global number of the head
            is its third argument. With unidirectional attention, blocks after the query block are
            removed from the result. Results are cached, and must be the same on all ranks.
        block: number of positions per block. The last block of a sequence may have fewer.
        different_layout_per_head: whether each head has its own list of blocks.
        attention: "unidirectional" (causal) or "bidirectional".
    """

    function: Callable[..., Iterable[int]]

    def listed(self, query: int, count: int, head: int) -> Iterable[int]:
        return self.function(query, count, *((head,) if self.different_layout_per_head else ()))


@dataclass(frozen=True, kw_only=True)
class FixedPattern(BlockPattern):
    """Local windows, and global blocks at fixed places in each window (arXiv 1904.10509).

    Attributes:
        block: number of positions per block. The last block of a sequence may have fewer.
        different_layout_per_head: whether each head has its own list of blocks.
        attention: "unidirectional" (causal) or "bidirectional".
        num_local_blocks: number of blocks per local window.
        num_global_blocks: number of consecutive blocks of each window that all queries attend to.
        horizontal_global_attention: whether the global blocks also attend to all blocks.
        num_different_global_patterns: number of places of the global blocks in a window, over which
            the heads take turns.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        size, width = self.num_local_blocks, self.num_global_blocks
        text = f"num_global_blocks {width} does not divide num_local_blocks {size}"
        self._check(1 <= width <= size and size % width == 0, text)
        self._check_horizontal(self.horizontal_global_attention)
        count, places = self.num_different_global_patterns, size // width
        text = f"num_different_global_patterns {count}: a window has {places} places"
        self._check(1 <= count <= places, text)
        per_head = self.different_layout_per_head or count == 1
        self._check(per_head, f"{count} global patterns need different_layout_per_head=True")

    def listed(self, query: int, count: int, head: int) -> Iterable[int]:
        size, width = self.num_local_blocks, self.num_global_blocks
        window = query - query % size
        first = size - (1 + head % self.num_different_global_patterns) * width
        # the last window may be shorter
        starts = (max(0, min(at + first, count - width)) for at in range(0, count, size))
        spans = [(start, start + width) for start in starts]
        yield from range(window, min(window + size, count))
        yield from _global(spans, query, count, self.horizontal_global_attention)


@dataclass(frozen=True, kw_only=True)
class _GlobalBlocks(BlockPattern):
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        starts, ends = self.global_block_indices, self.global_block_end_indices
        fits = ends is None or len(ends) == len(starts)
        fits = fits and all(0 <= first < last for first, last in self._spans())
        text = f"global_block_indices {starts} with global_block_end_indices {ends}"
        self._check(fits, f"{text}: use one end above each index")

    def _spans(self) -> list[Range]:
        """Returns the ranges of global blocks."""
        starts, ends = self.global_block_indices, self.global_block_end_indices
        return list(zip(starts, [i + 1 for i in starts] if ends is None else ends, strict=False))


@dataclass(frozen=True, kw_only=True)
class VariablePattern(_GlobalBlocks):
    """Local windows of different sizes, global blocks, and random blocks.

    Attributes:
        block: number of positions per block. The last block of a sequence may have fewer.
        different_layout_per_head: whether each head has its own list of blocks.
        attention: "unidirectional" (causal) or "bidirectional".
        num_random_blocks: number of random blocks per query block.
        seed: seed of the random blocks.
        local_window_blocks: numbers of blocks of the local windows; the last number is repeated.
        global_block_indices: blocks that all queries attend to.
        global_block_end_indices: None, or the end of a range for each of `global_block_indices`,
            which is its first block. The end is not part of the range.
        horizontal_global_attention: whether the global blocks also attend to all blocks.
    """

    num_random_blocks: int = 0
    seed: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    horizontal_global_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.local_window_blocks
        self._check(min(sizes, default=0) >= 1, f"local_window_blocks {sizes}: use sizes from 1")
        self._check_horizontal(self.horizontal_global_attention)

    def listed(self, query: int, count: int, head: int) -> Iterable[int]:
        start, size = 0, self.local_window_blocks[-1]
        for size in self.local_window_blocks:
            if query < start + size:
                break
            start += size
        start += (query - start) // size * size
        yield from range(start, min(start + size, count))
        yield from _global(self._spans(), query, count, self.horizontal_global_attention)
        yield from _drawn(self, query, count, head)


@dataclass(frozen=True, kw_only=True)
class BigBirdPattern(BlockPattern):
    """A sliding window, global blocks at the start, and random blocks (arXiv 2007.14062).

    Attributes:
        block: number of positions per block. The last block of a sequence may have fewer.
        different_layout_per_head: whether each head has its own list of blocks.
        attention: "unidirectional" (causal) or "bidirectional".
        num_random_blocks: number of random blocks per query block.
        seed: seed of the random blocks. Layers with different seeds have different random blocks.
        num_sliding_window_blocks: number of blocks of the window around a query block, odd.
        num_global_blocks: number of first blocks that attend to all blocks, and that all queries
            attend to.
    """

    num_random_blocks: int = 1
    seed: int = 0
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1

    def listed(self, query: int, count: int, head: int) -> Iterable[int]:
        yield from _sliding(query, count, self.num_sliding_window_blocks)
        yield from _global([(0, self.num_global_blocks)], query, count, True)
        yield from _drawn(self, query, count, head)


@dataclass(frozen=True, kw_only=True)
class LongformerPattern(_GlobalBlocks):
    """A sliding window and global blocks (arXiv 2004.05150); "bslongformer" in DeepSpeed.

    Attributes:
        block: number of positions per block. The last block of a sequence may have fewer.
        different_layout_per_head: whether each head has its own list of blocks. All lists are equal.
        attention: "unidirectional" (causal) or "bidirectional".
        num_sliding_window_blocks: number of blocks of the window around a query block, odd.
        global_block_indices: blocks that attend to all blocks, and that all queries attend to.
        global_block_end_indices: None, or the end of a range for each of `global_block_indices`,
            which is its first block. The end is not part of the range.
    """

    num_sliding_window_blocks: int = 3

    def listed(self, query: int, count: int, head: int) -> Iterable[int]:
        yield from _sliding(query, count, self.num_sliding_window_blocks)
        yield from _global(self._spans(), query, count, True)


def _sliding(query: int, count: int, blocks: int) -> range:
    return range(max(0, query - blocks // 2), min(query + blocks // 2 + 1, count))


def _global(spans: Iterable[Range], query: int, count: int, horizontal: bool) -> Iterator[int]:
    """Yields the global blocks; all blocks if `query` is a global block and `horizontal` is set."""
    for first, last in spans:
        yield from range(min(first, count), min(last, count))
        if horizontal and first <= query < last:
            yield from range(count)


def _drawn(
    pattern: VariablePattern | BigBirdPattern, query: int, count: int, head: int
) -> set[int]:
    """Returns the random blocks of a query block, by Floyd's algorithm (CACM 30, 1987).

    Draw n is computed from SHA-256 of seed, head, query block and n. So the blocks are the same on
    all ranks and in every topology.
    """
    found: set[int] = set()
    population = query + 1 if pattern.causal else count
    for last in range(max(0, population - pattern.num_random_blocks), population):
        text = f"{pattern.seed}\0{head}\0{query}\0{last}"
        word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        drawn = word % (last + 1)
        found.add(last if drawn in found else drawn)
    return found


# --------------------------------------------------------------------------- ranges of positions


class Part(NamedTuple):
    """Queries that attend to the same keys, except for the causal mask.

    Query i attends to key j of the concatenated `keys` if j <= i + offset.

    Attributes:
        queries: range within the queries.
        keys: ranges within the keys, in ascending order; adjacent blocks form one range.
        offset: the argument `offset` of `ops.attention.forward`.
    """

    queries: Range
    keys: tuple[Range, ...]
    offset: int

    @property
    def key_count(self) -> int:
        """Number of keys."""
        return sum(last - first for first, last in self.keys)

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key, including pairs that the causal mask hides."""
        return (self.queries[1] - self.queries[0]) * self.key_count


class Layout(NamedTuple):
    """The listed blocks of heads that have the same lists.

    Attributes:
        heads: numbers of the heads, from 0 for the first head of the rank.
        parts: the lists.
    """

    heads: tuple[int, ...]
    parts: tuple[Part, ...]


@functools.lru_cache(maxsize=256)
def layouts(
    pattern: BlockPattern, length: int, heads: Range,
    queries: Range | None = None, keys: Range | None = None,
) -> tuple[Layout, ...]:  # fmt: skip
    """Returns the listed blocks between some queries and some keys.

    Positions in the result are relative to the first query and to the first key.

    Args:
        pattern: the pattern.
        length: full length of the sequence.
        heads: global numbers of the heads.
        queries: positions of the queries. Default: all positions.
        keys: positions of the keys. Default: all positions.

    Raises:
        ValueError: if the pattern lists a block that does not exist.
    """
    queries, keys, count = queries or (0, length), keys or (0, length), -(-length // pattern.block)
    rows = range(queries[0] // pattern.block, -(-queries[1] // pattern.block))
    of_lists: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for head in pattern.distinct(heads):
        lists = tuple(pattern.key_blocks(row, count, head) for row in rows)
        of_lists.setdefault(lists, []).append(head - heads[0])
    found = list[Layout]()
    for lists, of in of_lists.items():
        pairs = zip(rows, lists, strict=True)
        parts = [p for row, some in pairs for p in _parts(pattern, row, some, queries, keys)]
        same = range(heads[1] - heads[0])
        found.append(
            Layout(tuple(of if pattern.different_layout_per_head else same), _merged(parts))
        )
    return tuple(found)


def _parts(
    pattern: BlockPattern, row: int, listed: tuple[int, ...], queries: Range, keys: Range
) -> Iterator[Part]:
    """Yields the parts of one block of queries."""
    first, last = _overlap(row, pattern.block, queries)
    found = [_overlap(block, pattern.block, keys) for block in listed]
    spans = [(a, b) for a, b in found if a < b]
    if not (pattern.causal and spans and spans[-1][1] > first + 1):
        yield _part((first, last), spans, queries, keys)
        return
    # The keys of the last span are in the block of the queries, so the causal mask hides some.
    start = spans[-1][0]
    if first < start:
        yield _part((first, min(last, start)), spans[:-1], queries, keys)
    if start < last:
        first = max(first, start)
        earlier = sum(b - a for a, b in spans[:-1])
        part = _part((first, last), spans, queries, keys)
        yield part._replace(offset=earlier + first - start)


def _part(rows: Range, spans: list[Range], queries: Range, keys: Range) -> Part:
    """Returns a part in which every query attends to all keys."""
    joined: list[Range] = []
    for first, last in spans:
        begin, end = first - keys[0], last - keys[0]
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    count = sum(last - first for first, last in joined)
    return Part((rows[0] - queries[0], rows[1] - queries[0]), tuple(joined), count)


def _merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Merges successive parts without masked pairs that have the same keys."""
    merged: list[Part] = []
    for part in parts:
        before = merged[-1] if merged and merged[-1].keys == part.keys else None
        if before and min(before.offset, part.offset) >= part.key_count:
            merged[-1] = before._replace(queries=(before.queries[0], part.queries[1]))
        else:
            merged.append(part)
    return tuple(merged)


def _overlap(block: int, size: int, positions: Range) -> Range:
    return max(block * size, positions[0]), min((block + 1) * size, positions[1])
