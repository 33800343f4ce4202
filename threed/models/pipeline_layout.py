"""The layers on each pipeline rank: ranges of layers (stages), placed on ranks as chunks.

layout = PipelineLayout.of(ranges, plan)  # one range per stage of the model, in order
layout.chunks(0)                          # the ranges on pipeline rank 0
layout.ends                               # the pipeline ranks that hold the last stage
layout.ties(names)                        # the parameters that several ranks hold
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from threed.core.messages import counted
from threed.models.partition import balanced, explicit, uniform
from threed.schedules.plan import Plan


@dataclass(frozen=True)
class Tie:
    """A parameter that several pipeline ranks hold (a tied weight). All ranks have equal `Tie`s.

    Attributes:
        number: index of this tie among the ties of the model.
        stages: pipeline ranks that hold the parameter.
        layers: indices of the layers that use the parameter.
        chunks: for each rank in `stages`, the indices of its chunks that use the parameter.
    """

    number: int
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PipelineLayout:
    """A partition of a model into stages, with their placement on pipeline ranks.

    Attributes:
        ranges: layers of each stage, in order.
        placement: per pipeline rank, the stage of each chunk.
        ways: number of directions: 2 if every stage is on two ranks, one per direction
            (bidirectional schedules), else 1. If 2, the first half of a rank's chunks belongs to
            the first direction (way), the second half to the second one, as in `Plan`.
    """

    ranges: tuple[range, ...]
    placement: tuple[tuple[int, ...], ...]
    ways: int = 1

    @classmethod
    def of(cls, ranges: Sequence[range], plan: Plan) -> PipelineLayout:
        """Returns the layout in which `ranges` are the stages, placed on ranks as in a plan.

        Args:
            ranges: layers of each stage, in order.
            plan: the plan that assigns stages to ranks and chunks.

        Raises:
            ValueError: if the number of ranges is not the plan's number of stages.
        """
        if len(ranges) != plan.total_stages:
            raise ValueError(
                f"{counted(len(ranges), 'range')} of layers for the {plan.total_stages} stages of plan {plan.name}"
            )
        placement = [
            tuple(plan.stage_of(rank, chunk) for chunk in range(plan.chunks))
            for rank in range(plan.stages)
        ]
        return cls(tuple(ranges), tuple(placement), plan.ways)

    def chunks(self, rank: int) -> tuple[range, ...]:
        """Returns the layers of a pipeline rank, per chunk."""
        return tuple(self.ranges[stage] for stage in self.placement[rank])

    @property
    def one_way(self) -> tuple[tuple[int, ...], ...]:
        """The placement for the first direction (way) only, so that every stage is on one rank."""
        return tuple(stages[: len(stages) // self.ways] for stages in self.placement)

    def holders(self, stage: int) -> list[int]:
        """Returns the pipeline ranks that hold a stage of the model, one per direction (way)."""
        width = len(self.placement[0]) // self.ways
        return [
            rank
            for way in range(self.ways)
            for rank, stages in enumerate(self.placement)
            if stage in stages[way * width : (way + 1) * width]
        ]

    @property
    def ends(self) -> list[int]:
        """The pipeline ranks that hold the last stage."""
        return self.holders(len(self.ranges) - 1)

    @property
    def links(self) -> list[tuple[int, int, bool]]:
        """The channels between pipeline ranks: (source, target, whether it is for gradients)."""
        pairs = pairwise(self.holders(stage) for stage in range(len(self.ranges)))
        passes = [
            (a, b) for stage, next_stage in pairs for a, b in zip(stage, next_stage, strict=True)
        ]
        apart = [(a, b) for a, b in passes if a != b]
        return sorted({(a, b, False) for a, b in apart} | {(b, a, True) for a, b in apart})

    def ties(self, names: Sequence[Sequence[str]]) -> dict[str, Tie]:
        """Returns, by name, the parameters that several pipeline ranks hold.

        Parameters that occur in earlier layers come first.

        Args:
            names: per layer of the model, the names of its parameters; the same on all ranks.
        """
        users: dict[str, list[int]] = {}
        for number, layer_names in enumerate(names):
            for name in dict.fromkeys(layer_names):
                users.setdefault(name, []).append(number)
        stage_of = {layer: stage for stage, layers in enumerate(self.ranges) for layer in layers}
        ties: dict[str, Tie] = {}
        for name, used in users.items():
            stages = {stage_of[number] for number in used}
            chunks = [
                tuple(c for c, stage in enumerate(rank_stages) if stage in stages)
                for rank_stages in self.placement
            ]
            ranks = tuple(rank for rank, rank_chunks in enumerate(chunks) if rank_chunks)
            if len(ranks) > 1:
                ties[name] = Tie(len(ties), ranks, tuple(used), tuple(filter(None, chunks)))
        return ties


def partition(
    how: str | tuple[int, ...], layers: int, stages: int, costs: Callable[[], Sequence[float]]
) -> list[range]:
    """Returns the layers of every stage, balanced by cost, with equal counts, or with given counts.

    A partition by measured times is made by `models.measured_partition.divide` instead. Callers
    pass 'measured' to this function only for a single pipeline rank; it is treated as 'uniform'.

    Args:
        how: 'balanced', 'uniform', 'measured', or the number of layers per stage.
        layers: number of layers.
        stages: number of stages.
        costs: returns the cost of every layer; called only to balance several stages.
    """
    if isinstance(how, tuple):
        return explicit(how, layers, stages)
    return (
        balanced(costs(), stages) if how == "balanced" and stages > 1 else uniform(layers, stages)
    )
