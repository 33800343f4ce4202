"""The data model of all schedules: the actions of every pipeline rank in one step.

Use: `Plan(...).ranks[r]` is the list of actions of rank r, in order.

A rank holds one or more *chunks* of the model. The chunks of all ranks in model order are the
*stages* 0 .. total_stages - 1. In a bidirectional plan two ranks hold each stage: a micro-batch
passes the ranks in one of two directions (*ways*), and each direction has separate chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from threed.core.errors import PicklableError
from threed.core.messages import counted
from threed.schedules.action import Action, Kind

# Offsets in stages, by kind of action: to the stage that uses or receives its result (_CONSUMER),
# and to the stage that computes or sends its input (_PRODUCER). 1 is the next stage, -1 the
# previous one.
_CONSUMER = {Kind.F: 1, Kind.SEND_F: 1, Kind.B: -1, Kind.I: -1, Kind.SEND_B: -1}
_PRODUCER = {Kind.F: -1, Kind.RECV_F: -1, Kind.B: 1, Kind.I: 1, Kind.RECV_B: 1}
Place = tuple[int, int]  # (rank, chunk)


class SizesError(PicklableError, ValueError):
    """Raised if a schedule has no plan for the requested sizes.

    Attributes:
        problem: description of the problem.
        needs: sizes for which a plan exists, with one or more of the keys `stages`,
            `microbatches` and `chunks`.
    """

    def __init__(self, problem: str, **needs: int) -> None:
        nouns = {"stages": "stage", "microbatches": "micro-batch", "chunks": "chunk"}
        fix = " and ".join(counted(n, nouns[name]) for name, n in needs.items())
        super().__init__(f"{problem}: use {fix}")
        self.problem, self.needs = problem, needs


@dataclass(frozen=True)
class Plan:
    """The actions of every pipeline rank in one step, in order.

    The steps of an asynchronous schedule overlap: its plan contains backwards of the previous step
    and leaves some backwards to the next step.

    Attributes:
        name: the name of the schedule.
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
        chunks: model stages per rank.
        ranks: the actions per rank.
        placement: `placement[rank][chunk]` is the stage of that chunk. Empty means round-robin:
            the chunk is stage rank + chunk * stages.
        ways: number of directions: 2 in a bidirectional plan, which holds every stage twice. The
            first half of a rank's chunks then belongs to the first direction and the second half
            to the second one. A micro-batch uses the chunks of one direction only.
        begun: per rank, how many micro-batches of the previous step have their forward in the
            previous plan and their backward in this plan. Their indices are -1, -2 .. Empty
            without a previous step.
        left: per rank, how many micro-batches of this step have their backward in the next plan.
            Empty if all backwards are in this plan.
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
        for name in ("ranks", "placement"):  # lists become tuples, since a plan is hashed
            rows = getattr(self, name)
            if isinstance(rows, list | tuple):
                object.__setattr__(
                    self, name, tuple(tuple(row) if isinstance(row, list) else row for row in rows)
                )

    @property
    def total_stages(self) -> int:
        """Number of stages of the model."""
        return self.stages * self.chunks // self.ways

    @property
    def asynchronous(self) -> bool:
        """Whether the step overlaps with the previous or next one."""
        return bool(self.begun or self.left)

    @property
    def before(self) -> int:
        """Number of micro-batches of the previous step that appear in the plan."""
        return max(self.begun, default=0)

    def is_open(self, rank: int, microbatch: int) -> bool:
        """Returns whether the previous plan left a rank's backward of a micro-batch to this plan.

        Args:
            rank: pipeline rank.
            microbatch: index of the micro-batch, below 0 for the previous step.
        """
        return bool(self.begun) and -self.begun[rank] <= microbatch < 0

    def is_left(self, rank: int, microbatch: int) -> bool:
        """Returns whether a rank leaves the backward of a micro-batch to the next plan.

        Args:
            rank: pipeline rank.
            microbatch: index of the micro-batch.
        """
        return bool(self.left) and microbatch >= self.microbatches - self.left[rank]

    @cached_property
    def forward_only(self) -> bool:
        """Whether the plan has no backward at all, as for evaluation."""
        backward = (Kind.B, Kind.I, Kind.W, Kind.FB)
        return all(action.kind not in backward for actions in self.ranks for action in actions)

    @cached_property
    def pairs(self) -> bool:
        """Whether any forward runs together with a backward of another micro-batch."""
        return any(action.kind is Kind.FB for actions in self.ranks for action in actions)

    @cached_property
    def splits(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(action.kind is Kind.W for actions in self.ranks for action in actions)

    def stage_of(self, rank: int, chunk: int) -> int:
        """Returns the stage index of a rank's chunk.

        Args:
            rank: pipeline rank.
            chunk: index of the chunk on the rank.
        """
        return self.placement[rank][chunk] if self.placement else rank + chunk * self.stages

    def way_of(self, chunk: int) -> int:
        """Returns the direction of a chunk: 0 or 1.

        It is 1 for the second half of the chunks of a bidirectional plan, otherwise 0.
        """
        return chunk * self.ways // self.chunks

    def locate(self, stage: int, way: int = 0) -> Place:
        """Returns the (rank, chunk) that holds a stage.

        Args:
            stage: index of the stage in the model.
            way: direction of the micro-batches: 0, or in a bidirectional plan 0 or 1.

        Raises:
            ValueError: if no rank holds the stage.
        """
        place = self._places.get((stage, way))
        if place is None:
            raise ValueError(
                f"plan {self.name}: no rank holds stage {stage}; it has {self.total_stages}"
            )
        return place

    def consumer(self, rank: int, action: Action) -> Place | None:
        """Returns the (rank, chunk) that uses the result of an F, B or I, or that receives a send.

        Returns None if the action has no consumer.

        Args:
            rank: pipeline rank of the action.
            action: an F, B, I or send.
        """
        return self._neighbors.get((rank, action.chunk, _CONSUMER.get(action.kind, 0)))

    def producer(self, rank: int, action: Action) -> Place | None:
        """Returns the (rank, chunk) that computes the input of an F, B or I, or sends to a receive.

        Returns None if the action has no producer.

        Args:
            rank: pipeline rank of the action.
            action: an F, B, I or receive.
        """
        return self._neighbors.get((rank, action.chunk, _PRODUCER.get(action.kind, 0)))

    @cached_property
    def _places(self) -> dict[tuple[int, int], Place]:
        return {
            (self.stage_of(rank, chunk), self.way_of(chunk)): (rank, chunk)
            for rank in range(self.stages)
            for chunk in range(self.chunks)
        }

    @cached_property
    def _neighbors(self) -> dict[tuple[int, int, int], Place]:
        """The (rank, chunk) of the next or previous stage in the same direction.

        The key is (rank, chunk, +1 for the next stage or -1 for the previous stage).
        """
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
