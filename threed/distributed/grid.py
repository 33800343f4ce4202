"""The grid of ranks: the coordinates of each rank, and which ranks are on the same axis.

    grid = Grid.of(16, pp=2, tp=4)              # dp: the remaining factor of the world size
    grid.coordinates(5)                         # {"pp": 0, "dp": 1, "cp": 0, "tp": 1}
    grid.ranks(5, "tp")                         # (4, 5, 6, 7)

An axis is "pp", "dp", "cp" or "tp", a product such as "dp*cp", or a block such as "tp/2". In rank
order tp is the fastest axis, then cp, dp and pp, so that tensor-parallel neighbors are on the same
node.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from threed.core.messages import counted

AXES = ("pp", "dp", "cp", "tp")
_NAME = re.compile(r"((?:pp|dp|cp|tp)(?:\*(?:pp|dp|cp|tp))*)(?:([/%])(\d+))?(?:@\w+)*")


@functools.cache
def parse(name: str) -> tuple[tuple[str, ...], str | None, int | None]:
    """Parses the name of an axis, such as "tp", "dp*cp" or "tp/2".

    Returns:
        (axes, kind, n): the names of the axes that are multiplied; the kind of subset, "/" for
        blocks, "%" for strides, None for all ranks; the number after "/" or "%", or None.

    Raises:
        ValueError: if the name is not valid.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"there is no axis {name!r}: axes are {', '.join(AXES)}, products (dp*cp) and blocks (tp/2)"
        )
    return tuple(match[1].split("*")), match[2], int(match[3]) if match[3] else None


def same_place(name: str | None, index: int, size: int) -> int:
    """Returns the number of the group of replicas to which a rank of an axis belongs.

    The ranks of one group hold replicas of the same values. With "tp/2", a group is 2 consecutive
    ranks; with "tp%2", there are 2 groups, each with every second rank; with "tp", there is one
    group with all ranks.

    Args:
        name: name of the division, such as "tp", "tp/2" or "tp%2"; None if each rank is a group
            by itself.
        index: index of the rank on the axis.
        size: number of ranks of the axis.
    """
    if name is None:
        return index
    _, kind, width = parse(name)
    n = width or size
    return index % n if kind == "%" else index // n


@dataclass(frozen=True)
class Grid:
    """The number of ranks per axis.

    Attributes:
        pp: number of pipeline ranks.
        dp: number of data-parallel ranks.
        cp: number of context-parallel ranks.
        tp: number of tensor-parallel ranks.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(
        cls, world: int, *, pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1
    ) -> Grid:
        """Returns the grid of `world` ranks; by default `dp` is derived from the other sizes.

        Raises:
            ValueError: if a size is not an integer of at least 1, or the product of the sizes is not
                `world`; the message names each size.
        """
        for name, size in {"pp": pp, "dp": dp, "cp": cp, "tp": tp}.items():
            if not (size is None and name == "dp") and not (isinstance(size, int) and size >= 1):
                raise ValueError(f"{name} {size!r}: pass an integer of at least 1")
        rest = pp * cp * tp
        if dp is None and world % rest == 0:
            dp = world // rest
        if dp is None or rest * dp != world:
            need = f"tp {tp} x pp {pp} x cp {cp}" + (
                f" x dp {dp} = {rest * dp}" if dp else f" = {rest}, times dp"
            )
            raise ValueError(
                f"world size {world} is not {need}: start {counted(rest * (dp or 1), 'rank')}, or change the sizes"
            )
        return cls(pp, dp, cp, tp)

    @property
    def world(self) -> int:
        """The total number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks per axis, by name."""
        return {name: getattr(self, name) for name in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank: name of each axis -> index on this axis."""
        place = {}
        for name in reversed(AXES):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def rank_of(self, place: dict[str, int]) -> int:
        """Returns the rank at given coordinates, the inverse of `coordinates`."""
        rank = 0
        for name in AXES:
            rank = rank * getattr(self, name) + place[name]
        return rank

    def label(self, rank: int) -> str:
        """Returns a rank's coordinates as text, such as 'pp0 dp1 tp0'.

        Axes of size 1 are left out; if all axes have size 1, the text is 'alone'.
        """
        place = self.coordinates(rank)
        return (
            " ".join(f"{name}{place[name]}" for name in AXES if getattr(self, name) > 1) or "alone"
        )

    def ranks(self, rank: int, name: str) -> tuple[int, ...]:
        """Returns the ranks of the axis `name` that contains a rank, including that rank.

        Args:
            rank: global rank.
            name: selects the ranks. A name in AXES, such as "tp", selects the ranks that differ
                from `rank` only in this coordinate. A product such as "dp*cp" selects the ranks
                that differ only in these coordinates, ordered with the last axis fastest. A suffix
                "/n" selects the block of n neighbors that contains `rank`; a suffix "%n" selects
                the ranks at a distance of a multiple of n from `rank`. A suffix "@word" is ignored,
                because it only selects another communicator of the same ranks.

        Raises:
            ValueError: if the name is not valid or n does not divide the number of ranks.
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
            raise ValueError(
                f"axis {name!r}: {counted(len(line), 'rank')}, not a multiple of {width}"
            )
        index = line.index(rank)
        return (
            line[index % width :: width] if kind == "%" else line[index // width * width :][:width]
        )

    def expert_axis(self, ep: int) -> str:
        """Returns the name of the axis of `ep` ranks that hold different experts.

        The ranks of one pipeline stage are divided into blocks of `ep` neighbors.

        Args:
            ep: number of expert-parallel ranks, a divisor of dp × cp × tp.
        """
        axes = [name for name in AXES if name != "pp" and self.sizes[name] > 1] or ["dp"]
        name = "*".join(axes)
        return name if ep == self.world // self.pp else f"{name}/{ep}"

    def stage_ranks(self, rank: int, stages: Sequence[int]) -> tuple[int, ...]:
        """Returns the ranks that are on given stages and otherwise have the coordinates of `rank`.

        Args:
            rank: global rank.
            stages: the pipeline stages; one rank is returned per stage.
        """
        place = self.coordinates(rank)
        return tuple(self.rank_of({**place, "pp": stage}) for stage in stages)
