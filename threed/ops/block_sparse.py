"""Block-sparse attention: only listed blocks of keys are computed.

    SparseAttention(FixedPattern(block=128))(q, k, v)

The patterns are in `core.block_patterns`. On GPUs FlexAttention (`ops.flex`) computes them from the
same lists. Otherwise one list is computed at a time: `SparseAttention` is the plan (`Plan`) of
`ops.attention.Blockwise`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from threed.core.block_patterns import BlockPattern, Layout, Range, layouts
from threed.ops import attention, attention_backends, attention_costs, flex
from threed.ops.attention import Blockwise, Causal, Step
from threed.ops.positions import Positions


@dataclass(frozen=True)
class SparseAttention:
    """Block-sparse attention, for the argument `core` of `layers.Attention`.

    Example:
        core = SparseAttention(FixedPattern(block=128, num_local_blocks=4))
        attention = layers.Attention(name, hidden, heads, slicing, core=core)

    Attributes:
        pattern: blocks of keys for each block of queries, and whether attention is causal.
        heads: global numbers of this rank's query heads, [first, last), as returned by
            `slicing.core_heads(heads)`. Only required if the pattern has `different_layout_per_head`.
        softcap: c in c tanh(score / c), which replaces each score (arXiv 2408.00118). 0: no cap.
        scale: factor of the scores. Default: 1 / sqrt(d).

    Raises:
        ValueError: if the pattern has `different_layout_per_head` and `heads` is missing.
    """

    pattern: BlockPattern
    heads: Range | None = None
    softcap: float = 0.0
    scale: float | None = None
    # represents the core in a graph of torch.compile (`layers.compiled`)
    opaque: Any = field(default=None, init=False, repr=False, compare=False)
    merges = False  # within one rank a query is in one step (`ops.attention.Plan`)

    def __post_init__(self) -> None:
        if self.heads is None and self.pattern.different_layout_per_head:
            raise ValueError(
                "SparseAttention: the pattern has different_layout_per_head, so the core needs the global numbers of this"
                " rank's heads: pass heads=slicing.core_heads(heads)"
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention [s b (a d)].

        Args:
            q: queries [s b a d].
            k: keys [s b k d].
            v: values [s b k d].

        Raises:
            ValueError: if `heads` is not the number of heads of q, or the pattern lists a block
                that does not exist.
        """
        s, _, a, _ = q.shape
        numbers = self._numbers(a)
        queries, keys, values = map(attention._batch_first, (q, k, v))
        if q.is_meta:
            return attention._seq_first(self._trace(queries, keys, values))
        fused = flex.fits(queries)
        kernel = "FlexAttention" if fused else "lists of blocks of threed"
        what = f"{type(self.pattern).__name__} of blocks of {self.pattern.block}"
        attention_backends.record(kernel, queries, keys, what)
        if fused:
            mask = self._mask(s, numbers, q)
            y = flex.compute(queries, keys, values, mask, self.softcap, self.scale)
            return attention._seq_first(y)
        if self.opaque is not None and torch.compiler.is_compiling():
            return cast(Tensor, torch.ops.threed.block_sparse(q, k, v, self.opaque)[0])
        return cast(Tensor, Blockwise.apply(q, k, v, None, self))

    def lists(self, seq: int, heads: int) -> tuple[Layout, ...]:
        """Returns the listed blocks of all positions.

        Args:
            seq: sequence length.
            heads: number of query heads of this rank.
        """
        return layouts(self.pattern, seq, self.heads or (0, heads))

    @property
    def causal(self) -> Causal:
        """Soft cap and scale, for `ops.attention`."""
        return Causal(0, self.softcap, self.scale)

    def steps(
        self, q: Tensor, k: Tensor, v: Tensor, sums: list[Tensor] | None = None
    ) -> Iterator[Step]:
        """Yields the steps in which `ops.attention.Blockwise` computes attention.

        Args:
            q: queries [b a s d].
            k: keys [b k s d].
            v: values [b k s d].
            sums: not used; in a backward, the sums of the gradients of keys and values.
        """
        every = Positions.all(q.shape[2])
        return self.between(every, every, q, k, v)

    def between(
        self, queries: Positions, keys: Positions, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[Step]:
        """Yields the steps of attention of the queries of one rank to the keys of another.

        Args:
            queries: positions of the queries.
            keys: positions of the keys.
            q: queries [b a n d].
            k: keys [b k m d].
            v: values [b k m d].
        """
        numbers = self._numbers(q.shape[1])
        for row, rows in queries.by_row():
            for column, columns in keys.by_row():
                lists = layouts(self.pattern, queries.length, numbers, rows, columns)
                if q.is_meta:  # cost traces: one step with as many pairs
                    count = rows[1] - rows[0]
                    each = -(-_pairs(lists) // (q.shape[1] * count))
                    at = slice(None), slice(None), slice(row, row + count)
                    of = slice(None), slice(None), slice(column, column + each)
                    yield Step(at, queries.length, k[of], v[of], (of,))
                else:
                    yield from steps(lists, self.causal, q, k, v, (row, column))

    def _numbers(self, heads: int) -> Range:
        """Returns the global numbers of the rank's heads, after a check of their number."""
        first, last = self.heads or (0, heads)
        if last - first != heads:
            raise ValueError(
                f"SparseAttention: heads {first} to {last - 1} for a rank with {heads} heads: pass"
                " heads=slicing.core_heads(heads)"
            )
        return first, last

    def _mask(self, seq: int, heads: Range, q: Tensor) -> Any:
        if self.opaque is None or not torch.compiler.is_compiling():
            return _cached_mask(self.pattern, seq, heads, q.device)
        count = len(self.pattern.distinct(heads))
        sizes = [count, -(-seq // self.pattern.block), -(-seq // flex.BLOCK)]
        lists = torch.ops.threed.flex_lists(q, sizes, self.opaque)
        return block_mask(lists, self.pattern, seq)

    def _trace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention of meta tensors [b a s d].

        A fused operator stands for the computation: it saves the same tensors. The keys are
        shortened so that the number of pairs is that of the listed blocks.
        """
        a, s = q.shape[1:3]
        each, rest = divmod(_pairs(self.lists(s, a)), a * s)
        if rest:
            with torch.no_grad():  # the remaining pairs: `rest` queries of one head and one key
                single = q[:, :1, :1].expand(-1, -1, rest, -1)
                attention_costs.on_meta(single, k[:, :1, :1], v[:, :1, :1])
        keys, values = (x[:, :, :each] for x in (k, v))
        return attention_costs.on_meta(q, keys, values, enable_gqa=a != k.shape[1])

    def flops(self, tokens: int, seq: int, heads: int, size: int) -> int:
        """Returns the FLOPs of a forward, counted for all pairs of positions in listed blocks.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
            heads: number of query heads of this rank.
            size: width of a head.
        """
        return 4 * tokens * _pairs(self.lists(seq, heads)) * size // seq


def _pairs(lists: Sequence[Layout]) -> int:
    """Returns the number of pairs of positions in the listed blocks, summed over the heads."""
    return sum(len(layout.heads) * part.pairs for layout in lists for part in layout.parts)


def steps(
    lists: Sequence[Layout], causal: Causal, q: Tensor, k: Tensor, v: Tensor, start: tuple[int, int]
) -> Iterator[Step]:  # fmt: skip
    """Yields the steps of attention of some queries to the listed blocks of some keys.

    Fused attention computes a full part at once. Otherwise the number of scores is bounded.

    Args:
        lists: the listed blocks, see `core.block_patterns.layouts`.
        causal: soft cap and scale.
        q: queries [b a n d].
        k: keys [b k m d].
        v: values [b k m d].
        start: indices of the first query and the first key of the lists, in q and in k.
    """
    fused = attention._is_flash(q, v, causal)
    most = attention.SCORES_ON_CPU if attention._on_cpu(q) else attention.SCORES
    for layout in lists:
        for heads, groups in _slices(layout.heads, q.shape[1], k.shape[1]):
            pair = [x[:, groups].permute(2, 0, 1, 3) for x in (k, v)]
            longest = max((part.key_count for part in layout.parts), default=0)
            # Memory is reused, because the first access to new memory takes longer than the copy.
            space = [x.new_empty(longest, *x.shape[1:]) for x in pair]
            for part in filter(lambda part: part.keys, layout.parts):
                spans = [slice(start[1] + begin, start[1] + end) for begin, end in part.keys]
                keys, values = map(functools.partial(_gathered, spans), pair, space)
                scores = q.shape[0] * len(range(q.shape[1])[heads]) * part.key_count
                first, last = part.queries
                step = last - first if fused else max(16, most // scores)
                of = tuple((slice(None), groups, span) for span in spans)
                for row in range(first, last, step):
                    rows = slice(start[0] + row, start[0] + min(row + step, last))
                    at = slice(None), heads, rows
                    yield Step(at, part.offset + row - first, keys, values, of)


def _gathered(spans: Sequence[slice], x: Tensor, space: Tensor) -> Tensor:
    """Returns the keys or values [b k m d] in ranges of x [m b k d]; a copy is in `space`."""
    found = [x[span] for span in spans]
    if len(found) > 1:
        found = [torch.cat(found, out=space[: sum(map(len, found))])]
    return attention._batch_first(found[0])


def _slices(heads: tuple[int, ...], a: int, k: int) -> Iterator[tuple[slice, slice]]:
    """Yields heads of a layout as slices: (query heads, their key heads)."""
    steps = {after - before for before, after in itertools.pairwise(heads)}
    if len(heads) == a:
        yield slice(None), slice(None)
    elif a == k and len(steps) == 1:
        both = slice(heads[0], heads[-1] + 1, *steps)
        yield both, both
    else:
        for head in heads:
            group = head * k // a
            yield slice(head, head + 1), slice(group, group + 1)


# ---------------------------------------------------------------------------------- FlexAttention


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # otherwise the cached tensors could not be saved for a backward
def flex_lists(
    pattern: BlockPattern, length: int, heads: Range, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns which blocks are listed [a n n], and the lists of FlexAttention's blocks.

    The lists are the numbers and the indices of the partial blocks, and those of the full blocks. A
    block of FlexAttention is in no list if no pair of its positions is in a listed block of the
    pattern. It is full if all of its pairs are, and the causal mask hides none of them. The first
    dimension is 1 if all heads have the same lists.

    Args:
        pattern: the pattern.
        length: length of the sequence.
        heads: global numbers of the heads.
        device: device of the results, which are cached.
    """
    listed = _listed_blocks(pattern, length, heads)
    some, full = _covered(listed, pattern.block, length)
    if pattern.causal:
        below = torch.ones_like(some[0, 0]).tril()
        some, full = some & below, full & below.tril(-1)
    tensors = (listed, *flex.listed(some & ~full), *flex.listed(full))
    return tuple(tensor.to(device) for tensor in tensors)


def block_mask(lists: Sequence[Tensor], pattern: BlockPattern, length: int) -> Any:
    """Returns the mask for `flex.compute`.

    Args:
        lists: the result of `flex_lists`.
        pattern: the pattern.
        length: length of the sequence.
    """
    from torch.nn.attention.flex_attention import BlockMask  # imports torch's compiler

    listed, count, indices, full_count, full_indices = lists
    visible = _visible(listed, pattern.block, pattern.causal)
    return BlockMask.from_kv_blocks(
        count, indices, full_count, full_indices, flex.BLOCK, visible, (length, length)
    )


@functools.lru_cache(maxsize=32)
def _cached_mask(pattern: BlockPattern, length: int, heads: Range, device: torch.device) -> Any:
    return block_mask(flex_lists(pattern, length, heads, device), pattern, length)


def _listed_blocks(pattern: BlockPattern, length: int, heads: Range) -> Tensor:
    """Returns whether a block is listed, [a n n]; [1 n n] if all heads have the same lists."""
    numbers, count = pattern.distinct(heads), -(-length // pattern.block)
    listed = torch.zeros(len(numbers), count, count, dtype=torch.bool, device="cpu")
    for layout, head in zip(listed, numbers, strict=True):
        for query, row in enumerate(layout):
            row[list(pattern.key_blocks(query, count, head))] = True
    return listed


def _covered(listed: Tensor, block: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns whether some pairs and all pairs of FlexAttention's blocks are listed, [1 a m m]."""
    first = torch.arange(0, length, flex.BLOCK, device=listed.device)
    begin = first // block
    end = (first + flex.BLOCK).clamp_max(length).sub(1) // block + 1
    # The number of listed blocks in any rectangle is computed from sums over rows and columns.
    sums = torch.nn.functional.pad(listed.to(torch.int32).cumsum(1).cumsum(2), (1, 0, 1, 0))
    rows = sums[:, end] - sums[:, begin]
    found = rows[:, :, end] - rows[:, :, begin]
    size = end - begin
    return (found > 0).unsqueeze(0), (found == size.unsqueeze(1) * size).unsqueeze(0)


def _visible(listed: Tensor, block: int, causal: bool) -> Callable[..., Tensor]:
    """Returns the `mask_mod` of FlexAttention."""
    by_head, of_all = len(listed) > 1, listed[0]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query // block, key // block
        inside = listed[h, *at] if by_head else of_all[at]
        return inside & (key <= query) if causal else inside

    return visible
