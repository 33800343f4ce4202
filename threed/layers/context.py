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

import torch
from torch import Tensor

from threed.config.resolution import context_chunks
from threed.distributed import collectives, conjugate
from threed.distributed.topology import Axis, Topology, alone
from threed.ops import attention
from threed.ops.attention import Blockwise, Causal, Keep, Step
from threed.ops.block_sparse import SparseAttention
from threed.ops.positions import Positions, blocks

Core = Callable[..., Tensor]
RingCore = Causal | SparseAttention  # cores that a ring can compute
NEEDS_HEADS = (
    "a custom core sees full sequences, so context parallelism can only divide its heads: use"
    " --parallel.cp-heads {cp}"
)


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
        self, core: Core, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
        sinks: Tensor | None = None, keep: Keep | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the attention of a core that sees full sequences. Collective over cp.

        Args:
            core: the core. If the ring has several ranks, a `Causal` or a `SparseAttention`.
            q: queries at this rank's positions, [s/c b a d].
            k: keys at this rank's positions, [s/c b k d].
            v: values at this rank's positions, [s/c b k d]; their heads may have another size.
            documents: number of each token's document in the full sequences, int64 [b s], for a
                core with this parameter. Default: each sequence is one document.
            sinks: attention sinks [a], for a core with this parameter. Default: none.
            keep: `Recompute.keep` of the layer, if attention is a part of a named operation of it.
                A ring then runs once in the forward, and not again if the operation is recomputed.

        Returns:
            The output at this rank's positions, [s/c b a d] or [s/c b (a d)].

        Raises:
            ValueError: if the ring has several ranks, and the core is not one that it can compute.
        """
        u = self.heads.size
        if sinks is not None and u > 1:
            sinks = sinks.chunk(u)[self.heads.index]
        named = {"documents": documents, "sinks": sinks}
        given = {name: value for name, value in named.items() if value is not None}
        if self.size == 1:
            return core(q, k, v, **given)
        if k.shape[2] < u:  # fewer key/value heads than ranks: each rank needs one
            k, v = (x.repeat_interleave(u // x.shape[2], 2) for x in (k, v))
        q, k, v = conjugate.to_heads(self.heads, q, k, v)
        if self.ring.size == 1:
            y = core(q, k, v, **given)
        else:
            if not isinstance(core, RingCore):
                raise ValueError(NEEDS_HEADS.format(cp=self.size))
            y = ring_attention(q, k, v, core, self.ring, **given, keep=keep)
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
    q: Tensor, k: Tensor, v: Tensor, core: RingCore, ring: Axis, documents: Tensor | None = None,
    sinks: Tensor | None = None, keep: Keep | None = None,
) -> Tensor:  # fmt: skip
    """Returns attention over sequences that are split over a ring. Collective over the ring.

    Args:
        q: queries at this rank's positions (`Positions.zigzag`), [s/r b a d].
        k: keys at the same positions, [s/r b k d].
        v: values at the same positions, [s/r b k d].
        core: window, soft cap and scale of causal attention, or the lists of blocks.
        ring: the r ranks.
        documents: number of each token's document in the full sequences, int64 [b s], not
            decreasing along s; only for a `Causal`. Default: each sequence is one document.
        sinks: attention sinks [a]. Default: none.
        keep: see `Context.attend`.

    Returns:
        The output at this rank's positions, [s/r b (a d)].
    """
    causal = core if isinstance(core, Causal) else core.causal
    if causal.window >= len(q) * ring.size:
        causal = replace(causal, window=0)
    found = None if documents is None else attention.borders(documents)
    return Blockwise.apply(q, k, v, sinks, _Ring(core, causal, ring, found), keep)


@dataclass(frozen=True, eq=False)
class _Ring:
    """The plan of ring attention (`ops.attention.Plan`).

    In the backward the gradients of keys and values, in fp32 or wider, travel one hop behind the
    keys and values, so that after r hops they are back at their rank.

    Attributes:
        core: the core.
        causal: window, soft cap and scale of every step.
        ring: the ranks of the ring.
        borders: the documents of each row of the batch; None if each row is one document.
    """

    core: RingCore
    causal: Causal
    ring: Axis
    borders: attention.Borders | None
    merges = True

    def steps(
        self, q: Tensor, k: Tensor, v: Tensor, sums: list[Tensor] | None = None
    ) -> Iterator[Step]:
        """Yields the steps of all hops, see `Plan.steps`."""
        moving, home = _Moving(self.ring, k, v), None
        length = q.shape[2] * self.ring.size
        own = Positions.zigzag(length, self.ring.size, self.ring.index)
        for keys, values, index in moving.hops():
            if sums is not None:
                part = torch.zeros_like(moving.flat, dtype=attention._wide(k))
                sums[:] = moving.split(part)
            source = Positions.zigzag(length, self.ring.size, index)
            if isinstance(self.core, SparseAttention):
                yield from self.core.between(own, source, q, keys, values)
            else:
                yield from self._causal_steps(own, source, keys, values)
            if sums is not None:
                part = part if home is None else part.add_(home.wait())
                home = collectives.start_shift(part, self.ring)
        if sums is not None and home is not None:
            sums[:] = moving.split(home.wait())

    def _causal_steps(
        self, own: Positions, source: Positions, keys: Tensor, values: Tensor
    ) -> Iterator[Step]:
        """Yields the steps of causal attention to the keys of another rank."""
        if keys.is_meta:  # cost traces count all pairs of positions
            every = slice(None), slice(None), slice(0, own.total)
            yield Step(every, own.length, keys, values, (every,))
            return
        rows = ((None, None),) if self.borders is None else enumerate(self.borders)
        for number, documents in rows:
            row = slice(None) if number is None else slice(number, number + 1)
            for inside in documents or (None,):
                for at, of, offset in blocks(own, source, self.causal.window, inside):
                    queries = row, slice(None), slice(*at)
                    columns = row, slice(None), slice(*of)
                    yield Step(queries, offset, keys[columns], values[columns], (columns,))


class _Moving:
    """Keys and values that travel around a ring in one message.

    Args:
        ring: the ranks of the ring.
        k: this rank's keys, [b k s d].
        v: this rank's values, [b k s d].

    Attributes:
        flat: keys and values that are at this rank now.
    """

    def __init__(self, ring: Axis, k: Tensor, v: Tensor) -> None:
        self._ring = ring
        self._shapes = [k.shape, v.shape]
        self.flat = torch.cat([x.reshape(-1) for x in (k, v)])

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the parts of a message for keys and values, views [b k s d]."""
        k, v = self._shapes
        first = flat[: -(flat.numel() * v[3] // (k[3] + v[3]))]
        return first.view(k), flat[first.numel() :].view(v)

    def hops(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yields (keys, values, their rank in the ring) of each hop.

        The transfer of the next keys and values starts before a hop, so it overlaps with its steps.
        """
        ring = self._ring
        for hop in range(ring.size):
            coming = collectives.start_shift(self.flat, ring) if hop < ring.size - 1 else None
            keys, values = self.split(attention.for_steps(self.flat, True))
            yield keys, values, (ring.index - hop) % ring.size
            if coming is not None:
                self.flat = coming.wait()
