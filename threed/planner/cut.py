"""Which layers of a model every pipeline rank holds: ranges of layers, placed on ranks as chunks.

cut = Cut.of(ranges, plan)          # one range a stage of the model, in order
cut.chunks(0)                       # the ranges that pipeline rank 0 holds
cut.ends                            # the ranks that end the model
cut.ties(names)                     # the parameters that several ranks hold
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from threed.planner.partition import balanced, explicit, uniform
from threed.schedules.plan import Plan


@dataclass(frozen=True)
class Tie:
    """A parameter that several pipeline ranks hold: its number among those of the model, the ranks, all layers of the
    model that use it, and for each of the ranks the chunks that use it. The same on every rank."""

    number: int
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cut:
    """ranges: the layers of each stage of the model, in order. placement: the stages that each pipeline rank holds, by
    chunk. ways: 2 where every stage is held twice; each half of a rank's chunks is of one way, as in `Plan`."""

    ranges: tuple[range, ...]
    placement: tuple[tuple[int, ...], ...]
    ways: int = 1

    @classmethod
    def of(cls, ranges: Sequence[range], plan: Plan) -> Cut:
        """The ranges placed as a plan places its stages; ValueError where there are not as many."""
        if len(ranges) != plan.total_stages:
            raise ValueError(
                f"{len(ranges)} ranges of layers for the {plan.total_stages} stages of plan {plan.name}"
            )
        placement = [
            tuple(plan.stage_of(rank, chunk) for chunk in range(plan.chunks))
            for rank in range(plan.stages)
        ]
        return cls(tuple(ranges), tuple(placement), plan.ways)

    def chunks(self, rank: int) -> tuple[range, ...]:
        """The layers that a pipeline rank holds, chunk by chunk."""
        return tuple(self.ranges[stage] for stage in self.placement[rank])

    @property
    def one_way(self) -> tuple[tuple[int, ...], ...]:
        """The placement of the first way alone, on which every stage is once."""
        return tuple(stages[: len(stages) // self.ways] for stages in self.placement)

    def holders(self, stage: int) -> list[int]:
        """The pipeline ranks that hold a stage of the model, way by way."""
        width = len(self.placement[0]) // self.ways
        return [
            rank
            for way in range(self.ways)
            for rank, stages in enumerate(self.placement)
            if stage in stages[way * width : (way + 1) * width]
        ]

    @property
    def ends(self) -> list[int]:
        """The pipeline ranks that end the model."""
        return self.holders(len(self.ranges) - 1)

    @property
    def links(self) -> list[tuple[int, int]]:
        """The pairs of pipeline ranks that hold neighbouring stages: what passes between them goes both ways."""
        pairs = pairwise(self.holders(stage) for stage in range(len(self.ranges)))
        passes = [(a, b) for here, there in pairs for a, b in zip(here, there, strict=True)]
        return sorted({(min(a, b), max(a, b)) for a, b in passes if a != b})

    def ties(self, names: Sequence[Sequence[str]]) -> dict[str, Tie]:
        """Parameter name -> where it is used, for those that several ranks hold, in the order of first use.

        names: of the parameters of every layer. Every rank has all of them, and so gets the same ties.
        """
        users: dict[str, list[int]] = {}
        for number, held in enumerate(names):
            for name in dict.fromkeys(held):
                users.setdefault(name, []).append(number)
        stage_of = {layer: stage for stage, held in enumerate(self.ranges) for layer in held}
        ties: dict[str, Tie] = {}
        for name, used in users.items():
            stages = {stage_of[number] for number in used}
            chunks = [
                tuple(c for c, stage in enumerate(held) if stage in stages)
                for held in self.placement
            ]
            ranks = tuple(rank for rank, some in enumerate(chunks) if some)
            if len(ranks) > 1:
                ties[name] = Tie(len(ties), ranks, tuple(used), tuple(filter(None, chunks)))
        return ties


def partition(
    how: str | tuple[int, ...], layers: int, stages: int, costs: Callable[[], Sequence[float]]
) -> list[range]:
    """The layers of every stage: balanced by what `costs` gives, uniform by count, or the counts given.

    By measured times it is `planner.measured.divide` that cuts; one rank alone has nothing to divide.
    """
    if isinstance(how, tuple):
        return explicit(how, layers, stages)
    return (
        balanced(costs(), stages) if how == "balanced" and stages > 1 else uniform(layers, stages)
    )
