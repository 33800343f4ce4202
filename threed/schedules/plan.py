"""What every pipeline rank does in one step: the data model of every schedule.

Use: `Plan(...).ranks[r]` is what rank r does, in order.

A rank holds one or more *chunks* of the model; the chunks of all ranks in model order are the *stages* 0 ..
total_stages - 1. In a bidirectional plan every stage is there twice: micro-batches take one of two ways through the
ranks, and each way has chunks of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from threed.schedules.action import Action, Kind

# How many stages further the result of an action is used, and where what it uses was made.
_CONSUMER = {Kind.F: 1, Kind.SEND_F: 1, Kind.B: -1, Kind.I: -1, Kind.SEND_B: -1}
_PRODUCER = {Kind.F: -1, Kind.RECV_F: -1, Kind.B: 1, Kind.I: 1, Kind.RECV_B: 1}
Place = tuple[int, int]  # (rank, chunk)


class SizesError(ValueError):
    """A schedule has no plan for these sizes.

    Attributes:
        problem: what is wrong.
        needs: sizes that there is a plan for, by `stages`, `microbatches` and `chunks`.
    """

    def __init__(self, problem: str, **needs: int) -> None:
        fix = " and ".join(f"{n} {name}" for name, n in needs.items())
        super().__init__(f"{problem}: use {fix}".replace("microbatches", "micro-batches"))
        self.problem, self.needs = problem, needs


@dataclass(frozen=True)
class Plan:
    """What every pipeline rank does in one step, in order.

    `stages` is the number of pipeline ranks; each holds `chunks` stages of the model, and `placement[rank][chunk]`
    says which. An empty placement is the round-robin one, rank + chunk * stages. ways: 2 where every stage is held
    twice; the first half of every rank's chunks are then those of one way, the second half of the other, and a
    micro-batch takes one of them from end to end.

    An asynchronous plan is a step that overlaps with those before and after it. begun: of every rank, how many of the
    micro-batches before have their backward in this plan, and their forward behind them; they are -1, -2 ...; empty
    where there is no step before. left: of every rank, how many of its own have their backward in the next plan.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[tuple[int, ...], ...] = ()
    ways: int = 1
    begun: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ranks", "placement"):  # a plan is hashed: of lists it makes tuples
            rows = getattr(self, name)
            if isinstance(rows, list | tuple):
                object.__setattr__(
                    self, name, tuple(tuple(row) if isinstance(row, list) else row for row in rows)
                )

    @property
    def total_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.stages * self.chunks // self.ways

    @property
    def asynchronous(self) -> bool:
        """Whether the step overlaps with those before and after it."""
        return bool(self.begun or self.left)

    @property
    def before(self) -> int:
        """How many micro-batches of the step before there are in the plan."""
        return max(self.begun, default=0)

    def is_open(self, rank: int, microbatch: int) -> bool:
        """Whether a rank has the forward of a micro-batch of the step before behind it, and its backward not."""
        return bool(self.begun) and -self.begun[rank] <= microbatch < 0

    def is_left(self, rank: int, microbatch: int) -> bool:
        """Whether a rank leaves the backward of one of its micro-batches to the next plan."""
        return bool(self.left) and microbatch >= self.microbatches - self.left[rank]

    @cached_property
    def forward_only(self) -> bool:
        """Whether the plan has no backward at all, as for evaluation."""
        backward = (Kind.B, Kind.I, Kind.W, Kind.FB)
        return all(action.kind not in backward for actions in self.ranks for action in actions)

    @cached_property
    def pairs(self) -> bool:
        """Whether some forward runs together with a backward of another micro-batch."""
        return any(action.kind is Kind.FB for actions in self.ranks for action in actions)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is in two: an I and a W."""
        return any(action.kind is Kind.W for actions in self.ranks for action in actions)

    def stage_of(self, rank: int, chunk: int) -> int:
        """Returns which stage of the model a rank's chunk is."""
        return self.placement[rank][chunk] if self.placement else rank + chunk * self.stages

    def way_of(self, chunk: int) -> int:
        """Returns the way that a chunk belongs to: 0, or 1 in the second half of a bidirectional plan's chunks."""
        return chunk * self.ways // self.chunks

    def locate(self, stage: int, way: int = 0) -> Place:
        """Returns the (rank, chunk) that holds a stage of the model. Raises ValueError where none does."""
        place = self._places.get((stage, way))
        if place is None:
            raise ValueError(
                f"plan {self.name}: no rank holds stage {stage}; it has {self.total_stages}"
            )
        return place

    def consumer(self, rank: int, action: Action) -> Place | None:
        """The (rank, chunk) that uses the result of an F, B or I, or to which a send goes; None where nobody does."""
        return self._neighbours.get((rank, action.chunk, _CONSUMER.get(action.kind, 0)))

    def producer(self, rank: int, action: Action) -> Place | None:
        """The (rank, chunk) that made what an F, B or I uses, or from which a receive comes; None where nobody does."""
        return self._neighbours.get((rank, action.chunk, _PRODUCER.get(action.kind, 0)))

    @cached_property
    def _places(self) -> dict[tuple[int, int], Place]:
        return {
            (self.stage_of(rank, chunk), self.way_of(chunk)): (rank, chunk)
            for rank in range(self.stages)
            for chunk in range(self.chunks)
        }

    @cached_property
    def _neighbours(self) -> dict[tuple[int, int, int], Place]:
        """(rank, chunk, +1 or -1) -> the place of the next or previous stage on the same way."""
        return {
            (rank, chunk, step): self._places[stage + step, way]
            for (stage, way), (rank, chunk) in self._places.items()
            for step in (1, -1)
            if (stage + step, way) in self._places
        }

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks)
        )
