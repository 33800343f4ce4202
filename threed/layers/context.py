"""Context parallelism: every sequence is split over ranks, and attention communicates.

    context = Context.of(topology, heads=2)      # cp 4: 2 x 2
    y = context.attend(core, q, k, v)            # [s/c b a d] and [s/c b k d] -> [s/c b a d]

cp = u · r. Groups of u neighboring ranks exchange positions for heads before attention, and back
after it (DeepSpeed-Ulysses, arXiv 2309.14509). The r ranks at a distance of u form a ring: in each of
r hops a rank computes attention of its queries to the keys of one rank, while these keys travel to
the next rank (ring attention, arXiv 2310.01889). Ring rank i holds the chunks i and 2r-1-i of 2r
chunks of the sequence (`Positions.zigzag`), so in each hop all ranks compute equally many pairs.

Numbers that a rank sends per layer and micro-batch, forward and backward, for M = b·s/c·d numbers per
head, and a query and k key/value heads per tensor rank:

    heads (u = c)   4 (a + max(k, c)) M (c-1)/c
    ring (r = c)    2 k M (3c-2); c of these 3c-2 parts are gradients in fp32
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from threed.config.resolution import context_chunks
from threed.distributed import collectives, conjugate
from threed.distributed.topology import Axis, Topology, alone
from threed.ops import attention
from threed.ops.attention import Causal
from threed.ops.positions import Block, Positions, blocks

Core = Callable[..., Tensor]
NEEDS_HEADS = (
    "a custom core sees full sequences, so context parallelism can only divide its heads: use"
    " --parallel.cp-heads {cp}"
)
Pieces = Iterator[tuple[slice, Block]]  # (rows of the batch, block of attention)


@dataclass(frozen=True, eq=False)
class Context:
    """The ranks over which sequences are split, and attention over them.

    Attributes:
        heads: axis of the u neighboring ranks that exchange positions for heads.
        ring: axis of the r ranks between which keys and values travel.
        axis: axis of all u · r ranks.
    """

    heads: Axis = field(default_factory=lambda: alone("cp"))
    ring: Axis = field(default_factory=lambda: alone("cp"))
    axis: Axis = field(default_factory=lambda: alone("cp"))

    @classmethod
    def of(cls, topology: Topology, heads: int = 1) -> Context:
        """Returns the context of this rank. Collective over the world.

        Args:
            topology: the process topology.
            heads: number u of ranks that exchange positions for heads, a divisor of cp.
        """
        names = cls.names(topology.cp, heads)
        topology.prepare(filter(None, names))
        ranks, ring = (topology.axis(name) if name else alone("cp") for name in names)
        return cls(ranks, ring, topology.axis("cp"))

    @staticmethod
    def names(cp: int, heads: int) -> tuple[str, str]:
        """Returns the names of the axes `heads` and `ring`; "" for an axis of one rank.

        Args:
            cp: number of context ranks.
            heads: number of ranks that exchange positions for heads.
        """
        if cp == 1:
            return "", ""
        if heads in (1, cp):
            return ("", "cp") if heads == 1 else ("cp", "")
        return f"cp/{heads}", f"cp%{heads}"

    @property
    def size(self) -> int:
        """Number of ranks over which a sequence is split, cp."""
        return self.axis.size

    @property
    def multiple(self) -> int:
        """The number of which the length of every sequence must be a multiple."""
        return context_chunks(self.size, self.heads.size)

    def positions(self, length: int) -> Positions:
        """Returns the positions of a sequence of `length` that this rank holds."""
        if self.size == 1:
            return Positions.all(length)
        ring, heads = self.ring, self.heads
        return _positions(length, ring.size, ring.index, heads.size, heads.index)

    def gather(self, x: Tensor) -> Tensor:
        """Returns all positions of sequences, in order; the backward sums gradients. Collective.

        Args:
            x: this rank's positions, [s/c ...].

        Returns:
            [s ...].
        """
        if self.size == 1:
            return x
        full, ring, heads = conjugate.gather_from(x, self.axis), self.ring.size, self.heads.size
        return full[_order(len(full), ring, heads, x.device)]

    def own(self, x: Tensor) -> Tensor:
        """Returns this rank's positions of full sequences; the inverse of `gather`.

        Args:
            x: all positions, [s ...].

        Returns:
            [s/c ...].
        """
        return x if self.size == 1 else self.positions(len(x)).rows(x)

    def attend(
        self, core: Core, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Returns the attention of a core that sees full sequences. Collective over cp.

        Args:
            core: the core. If the ring has several ranks, a `Causal`.
            q: queries at this rank's positions, [s/c b a d].
            k: keys at this rank's positions, [s/c b k d].
            v: values at this rank's positions, [s/c b k d]; their heads may have another size.
            documents: number of each token's document in the full sequences, int64 [b s], for a
                core with this parameter. Default: each sequence is one document.

        Returns:
            The output at this rank's positions, [s/c b a d] or [s/c b (a d)].

        Raises:
            ValueError: if the ring has several ranks, and the core is not a `Causal`.
        """
        given = {} if documents is None else {"documents": documents}
        if self.size == 1:
            return core(q, k, v, **given)
        u = self.heads.size
        if k.shape[2] < u:  # fewer key/value heads than ranks: each rank needs one
            k, v = (x.repeat_interleave(u // x.shape[2], 2) for x in (k, v))
        q, k, v = conjugate.to_heads(self.heads, q, k, v)
        if self.ring.size == 1:
            y = core(q, k, v, **given)
        else:
            if not isinstance(core, Causal):
                raise ValueError(NEEDS_HEADS.format(cp=self.size))
            y = ring_attention(q, k, v, core, self.ring, documents)
        y = y if y.dim() == 4 else y.unflatten(2, (q.shape[2], -1))
        return conjugate.to_positions(self.heads, y)


@functools.lru_cache(maxsize=256)
def _positions(length: int, ring: int, place: int, heads: int, index: int) -> Positions:
    return Positions.zigzag(length, ring, place).part(heads, index)


@functools.lru_cache(maxsize=16)
def _order(length: int, ring: int, heads: int, device: torch.device) -> Tensor:
    """Returns the row of each position among the positions of all ranks, in rank order."""
    places = ((i, j) for i in range(ring) for j in range(heads))
    held = [_positions(length, ring, i, heads, j).indices(device) for i, j in places]
    return torch.cat(held).argsort()


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, ring: Axis, documents: Tensor | None = None
) -> Tensor:
    """Returns causal attention over sequences that are split over a ring. Collective over the ring.

    Args:
        q: queries at this rank's positions (`Positions.zigzag`), [s/r b a d].
        k: keys at the same positions, [s/r b k d].
        v: values at the same positions, [s/r b k d].
        causal: window, soft cap and scale.
        ring: the r ranks.
        documents: number of each token's document in the full sequences, int64 [b s], not
            decreasing along s. Default: each sequence is one document.

    Returns:
        The output at this rank's positions, [s/r b (a d)].
    """
    if causal.window >= len(q) * ring.size:
        causal = replace(causal, window=0)
    found = None if documents is None else attention.borders(documents)
    y: Tensor = _Ring.apply(q, k, v, causal, ring, found)
    return y


class _Ring(torch.autograd.Function):
    """Ring attention. The forward saves its inputs, its output and the log-sum-exp per query.

    In the backward the gradients of keys and values, in fp32 or wider, travel one hop behind the
    keys and values, so that after r hops they are back at their rank.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: Causal, ring: Axis,
        borders: attention.Borders | None,
    ) -> Tensor:  # fmt: skip
        s, b, a, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        total = q.new_zeros(s, b, a, v.shape[-1], dtype=wide)
        y, queries = (x.permute(1, 2, 0, 3) for x in (total, _for_blocks(q)))
        lse = q.new_full((b, a, s), -torch.inf, dtype=wide)
        moving = _Moving(ring, k, v)
        for keys, values, pieces in moving.hops(s, causal.window, borders):
            for row, (rows, columns, offset) in pieces:
                at, of = (row, slice(None), slice(*rows)), (row, slice(None), slice(*columns))
                part = attention.forward(offset, causal, queries[at], keys[of], values[of])
                attention.merge_(y[at], lse[at], *part)
        # not a view, because autograd forbids in-place changes of a view that was made in a Function
        out: Tensor = torch.ops.aten._unsafe_view(total.to(q.dtype), (s, b, -1))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = causal, ring, borders
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        causal, ring, borders = ctx.arguments
        given = (q, out.view(*q.shape[:3], -1), dy.reshape(*q.shape[:3], -1))
        queries, y, dy = (_for_blocks(x).permute(1, 2, 0, 3) for x in given)
        dq = q.new_zeros(q.shape, dtype=lse.dtype)
        grad = dq.permute(1, 2, 0, 3)
        moving, home = _Moving(ring, k, v), None
        for keys, values, pieces in moving.hops(q.shape[0], causal.window, borders):
            part = torch.zeros_like(moving.flat, dtype=lse.dtype)
            dk, dv = moving.split(part)
            for row, (rows, columns, offset) in pieces:
                at, of = (row, slice(None), slice(*rows)), (row, slice(None), slice(*columns))
                more = attention.backward(
                    offset, causal, dy[at], queries[at], keys[of], values[of], y[at], lse[at]
                )
                grad[at] += more[0]
                dk[of] += more[1]
                dv[of] += more[2]
            home = collectives.start_shift(part if home is None else part.add_(home.wait()), ring)
        assert home is not None
        dk, dv = (x.permute(2, 0, 1, 3).to(k.dtype) for x in moving.split(home.wait()))
        return dq.to(q.dtype), dk, dv, None, None, None


def _pieces(
    own: Positions, source: Positions, window: int, borders: attention.Borders | None
) -> Pieces:
    """Yields the blocks between the queries of this rank and the keys of another."""
    if borders is None:
        yield from ((slice(None), block) for block in blocks(own, source, window))
        return
    for row, documents in enumerate(borders):
        for inside in documents:
            for block in blocks(own, source, window, inside):
                yield slice(row, row + 1), block


def _for_blocks(x: Tensor) -> Tensor:
    """Returns x in the dtype in which blocks are computed.

    On CPUs it is fp32 or wider. There the operations for blocks in 16 bits would round each block's
    probabilities and output, and flash attention in fp32 is available.
    """
    return x if attention.on_gpu(x) else x.to(torch.promote_types(x.dtype, torch.float32))


class _Moving:
    """Keys and values that travel around a ring in one message.

    Args:
        ring: the ranks of the ring.
        k: this rank's keys, [s b k d].
        v: this rank's values, [s b k d].

    Attributes:
        flat: keys and values that are at this rank now.
    """

    def __init__(self, ring: Axis, k: Tensor, v: Tensor) -> None:
        self._ring = ring
        self._shapes = [(b, n, s, d) for s, b, n, d in (k.shape, v.shape)]
        self.flat = torch.cat([x.permute(1, 2, 0, 3).reshape(-1) for x in (k, v)])

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the parts of a message for keys and values, views [b k s d]."""
        k, v = self._shapes
        first = flat[: -(flat.numel() * v[3] // (k[3] + v[3]))]
        return first.view(k), flat[first.numel() :].view(v)

    def hops(
        self, rows: int, window: int, borders: attention.Borders | None
    ) -> Iterator[tuple[Tensor, Tensor, Pieces]]:
        """Yields (keys, values, pieces) of each hop; starts each transfer before the blocks.

        Args:
            rows: number of this rank's positions.
            window: window of attention.
            borders: the documents of each row of the batch; None if each row is one document.
        """
        ring, length = self._ring, rows * self._ring.size
        own = Positions.zigzag(length, ring.size, ring.index)
        for hop in range(ring.size):
            coming = collectives.start_shift(self.flat, ring) if hop < ring.size - 1 else None
            source = Positions.zigzag(length, ring.size, (ring.index - hop) % ring.size)
            keys, values = self.split(_for_blocks(self.flat))
            if self.flat.is_meta:  # cost traces count all pairs of positions
                pieces: Pieces = iter([(slice(None), Block((0, rows), (0, rows), length))])
            else:
                pieces = _pieces(own, source, window, borders)
            yield keys, values, pieces
            if coming is not None:
                self.flat = coming.wait()
