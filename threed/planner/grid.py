"""The grid of ranks on paper: who stands where, and which ranks an axis, a block of one, or a product joins.

    grid = Grid.of(16, pp=2, tp=4)              # dp is what is left of the world
    grid.coordinates(5)                         # {"pp": 0, "dp": 1, "cp": 0, "tp": 1}
    grid.ranks(5, "tp")                         # (4, 5, 6, 7)

Rank order is tp fastest, then cp, dp and pp, so that tensor-parallel neighbours share a node.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
_NAME = re.compile(r"((?:pp|dp|cp|tp)(?:\*(?:pp|dp|cp|tp))*)(?:([/%])(\d+))?(?:@\w+)?")


@functools.cache
def parse(name: str) -> tuple[tuple[str, ...], str | None, int | None]:
    """The axes that a derived axis is made of, how it is cut ("/" or "%", or None), and into how many.

    Raises ValueError for what is no name of an axis.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"there is no axis {name!r}: axes are {', '.join(AXES)}, products (dp*cp) and blocks (tp/2)"
        )
    return tuple(match[1].split("*")), match[2], int(match[3]) if match[3] else None


def same_place(name: str | None, index: int, size: int) -> int:
    """A number that those indices of an axis of `size` ranks have in common between which the derived axis `name`
    ("tp", "tp/2", "tp%2") runs; without a name each has its own."""
    if name is None:
        return index
    _, kind, width = parse(name)
    n = width or size
    return index % n if kind == "%" else index // n


@dataclass(frozen=True)
class Grid:
    """The number of ranks along every axis."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(
        cls, world: int, *, pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1
    ) -> Grid:
        """The grid of `world` ranks, dp derived when None; ValueError naming each factor when they do not make it."""
        rest = pp * cp * tp
        if dp is None and world % rest == 0:
            dp = world // rest
        if dp is None or rest * dp != world:
            need = f"tp {tp} x pp {pp} x cp {cp}" + (
                f" x dp {dp} = {rest * dp}" if dp else f" = {rest}, times dp"
            )
            raise ValueError(
                f"world size {world} is not {need}: start {rest * (dp or 1)} ranks, or change the sizes"
            )
        return cls(pp, dp, cp, tp)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along every axis, by name."""
        return {name: getattr(self, name) for name in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on every axis."""
        place = {}
        for name in reversed(AXES):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def rank_of(self, place: dict[str, int]) -> int:
        """The rank at a place: the inverse of `coordinates`."""
        rank = 0
        for name in AXES:
            rank = rank * getattr(self, name) + place[name]
        return rank

    def label(self, rank: int) -> str:
        """A rank's place as text, such as 'pp0 dp1 tp0'; axes of size 1 are left out."""
        place = self.coordinates(rank)
        return (
            " ".join(f"{name}{place[name]}" for name in AXES if getattr(self, name) > 1) or "alone"
        )

    def ranks(self, rank: int, name: str) -> tuple[int, ...]:
        """The ranks that the axis `name` joins with this one, itself among them.

        name: an axis, or a product such as "dp*cp" (ranks that differ in these coordinates only, the last one varying
        fastest); with "/n" the block of n neighbours that this rank is in; with "%n" every n-th, from this rank's block
        on; with "@word" the same ranks again.
        """
        axes, kind, width = parse(name)
        place = self.coordinates(rank)
        spans = [range(getattr(self, axis)) for axis in axes]
        line = tuple(
            self.rank_of({**place, **dict(zip(axes, at, strict=True))}) for at in itertools.product(*spans)
        )  # fmt: skip
        if width is None:
            return line
        if len(line) % width:
            raise ValueError(f"axis {name!r}: {len(line)} ranks are no multiple of {width}")
        index = line.index(rank)
        return (
            line[index % width :: width] if kind == "%" else line[index // width * width :][:width]
        )

    def stage_ranks(self, rank: int, stages: Sequence[int]) -> tuple[int, ...]:
        """The ranks at some places of the pipeline, in this rank's column of the grid."""
        place = self.coordinates(rank)
        return tuple(self.rank_of({**place, "pp": stage}) for stage in stages)
