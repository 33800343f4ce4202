"""Which layers of a model every pipeline rank holds: ranges of layers, placed on ranks as chunks.

cut = Cut.of(ranges, plan)          # one range a stage of the model, in order
cut.chunks(0)                       # the ranges that pipeline rank 0 holds
cut.last                            # (rank, chunk) of the stage that ends the model
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
    """A parameter that several pipeline ranks hold: its number among those of the model, the ranks, and all layers of
    the model that use it. The same on every rank."""

    number: int
    stages: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """ranges: the layers of each stage of the model, in order. placement: the stages that each pipeline rank holds, by
    chunk."""

    ranges: tuple[range, ...]
    placement: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, ranges: Sequence[range], plan: Plan) -> Cut:
        """The ranges placed as a plan places its stages; ValueError where there are not as many."""
        if len(ranges) != plan.total_stages:
            raise ValueError(f"{len(ranges)} ranges of layers for the {plan.total_stages} stages of plan {plan.name}")
        placement = [tuple(plan.stage_of(rank, chunk) for chunk in range(plan.chunks)) for rank in range(plan.stages)]
        return cls(tuple(ranges), tuple(placement))

    def chunks(self, rank: int) -> tuple[range, ...]:
        """The layers that a pipeline rank holds, chunk by chunk."""
        return tuple(self.ranges[stage] for stage in self.placement[rank])

    def locate(self, stage: int) -> tuple[int, int]:
        """The (rank, chunk) of a stage of the model."""
        for rank, stages in enumerate(self.placement):
            if stage in stages:
                return rank, stages.index(stage)
        raise ValueError(f"no rank holds stage {stage}; there are {len(self.ranges)}")

    @property
    def first(self) -> tuple[int, int]:
        """The (rank, chunk) that begins the model."""
        return self.locate(0)

    @property
    def last(self) -> tuple[int, int]:
        """The (rank, chunk) that ends it."""
        return self.locate(len(self.ranges) - 1)

    @property
    def links(self) -> list[tuple[int, int]]:
        """The pairs of pipeline ranks that hold neighbouring stages: what passes between them goes both ways."""
        ranks = [self.locate(stage)[0] for stage in range(len(self.ranges))]
        return sorted({(min(a, b), max(a, b)) for a, b in pairwise(ranks) if a != b})

    def ties(self, names: Sequence[Sequence[str]]) -> dict[str, Tie]:
        """Parameter name -> where it is used, for those that several ranks hold, in the order of first use.

        names: of the parameters of every layer. Every rank has all of them, and so gets the same ties.
        """
        users: dict[str, list[int]] = {}
        for number, held in enumerate(names):
            for name in dict.fromkeys(held):
                users.setdefault(name, []).append(number)
        rank_of = {layer: self.locate(s)[0] for s, held in enumerate(self.ranges) for layer in held}
        ties: dict[str, Tie] = {}
        for name, used in users.items():
            ranks = tuple(sorted({rank_of[number] for number in used}))
            if len(ranks) > 1:
                ties[name] = Tie(len(ties), ranks, tuple(used))
        return ties


def partition(
    how: str | tuple[int, ...], layers: int, stages: int, costs: Callable[[], Sequence[float]]
) -> list[range]:
    """The layers of every stage: balanced by what `costs` gives, uniform by count, or the counts given.

    By measured times it is `planner.measured.divide` that cuts; one rank alone has nothing to divide.
    """
    if isinstance(how, tuple):
        return explicit(how, layers, stages)
    return balanced(costs(), stages) if how == "balanced" and stages > 1 else uniform(layers, stages)
