"""What a pipeline rank can do, and the plan that lists it: the data model of every schedule.

Use: `Action.parse("F0.3")` is the forward of micro-batch 3 on the rank's chunk 0; `Plan(...).ranks[r]` is what rank r
does, in order.

A rank holds one or more *chunks* of the model; all chunks of all ranks in model order are the *stages* 0 ..
total_stages - 1. Phases: the kinds of action and their text form, then the plan, with where each stage lives and who
a rank's peers are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action does; the value is its text form."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients
    I = "I"  # noqa: E741  backward for the input's gradient only
    W = "W"  # backward for the weights' gradient only, after I
    SEND_F = "SF"  # send an activation to the next stage
    RECV_F = "RF"  # receive it
    SEND_B = "SB"  # send a gradient to the previous stage
    RECV_B = "RB"  # receive it
    GATHER = "GATHER"  # start gathering a chunk's first parameters
    REDUCE = "REDUCE"  # a chunk's gradients are complete: sum those shared with other stages


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
PER_CHUNK = frozenset({Kind.GATHER, Kind.REDUCE})

_TEXT = re.compile(r"([A-Z]+)(\d+)(?:\.(\d+))?")
# How many stages further the result of an action is used, and where what it uses was made.
_CONSUMER = {Kind.F: 1, Kind.SEND_F: 1, Kind.B: -1, Kind.I: -1, Kind.SEND_B: -1}
_PRODUCER = {Kind.F: -1, Kind.RECV_F: -1, Kind.B: 1, Kind.I: 1, Kind.RECV_B: 1}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does, for one micro-batch of one of its chunks.

    `microbatch` counts from 0 and is global; it is -1 for the kinds that concern a whole chunk (GATHER, REDUCE).
    `chunk` is the acting rank's own chunk, also for sends and receives.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f"{self.kind.value}{self.chunk}"
        return chunk if self.kind in PER_CHUNK else f"{chunk}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form: kind, chunk, and after a point the micro-batch. Raises ValueError on anything else."""
        match = _TEXT.fullmatch(text)
        if match is None or match[1] not in set(Kind) or (match[3] is None) != (match[1] in PER_CHUNK):
            raise ValueError(f"no action is written {text!r}; examples: F0.3, B0.3, SF0.3, RB1.0, REDUCE0")
        return cls(Kind(match[1]), -1 if match[3] is None else int(match[3]), int(match[2]))


@dataclass(frozen=True)
class Plan:
    """What every pipeline rank does in one step, in order.

    `stages` is the number of pipeline ranks; each holds `chunks` stages of the model, and `placement[rank][chunk]`
    says which. An empty placement is the round-robin one, rank + chunk * stages.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[tuple[int, ...], ...] = ()

    @property
    def total_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.stages * self.chunks

    @property
    def forward_only(self) -> bool:
        """Whether the plan has no backward at all, as for evaluation."""
        return all(action.kind not in (Kind.B, Kind.I, Kind.W) for actions in self.ranks for action in actions)

    def stage_of(self, rank: int, chunk: int) -> int:
        """Which stage of the model a rank's chunk is."""
        return self.placement[rank][chunk] if self.placement else rank + chunk * self.stages

    def locate(self, stage: int) -> tuple[int, int]:
        """Which (rank, chunk) holds a stage of the model. Raises ValueError where none does."""
        if not self.placement and 0 <= stage < self.total_stages:
            return stage % self.stages, stage // self.stages
        for rank, held in enumerate(self.placement):
            if stage in held:
                return rank, held.index(stage)
        raise ValueError(f"plan {self.name}: no rank holds stage {stage}; it has {self.total_stages}")

    def consumer(self, rank: int, action: Action) -> tuple[int, int] | None:
        """The (rank, chunk) that uses the result of an F, B or I, or to which a send goes; None where nobody does."""
        return self._neighbour(rank, action, _CONSUMER)

    def producer(self, rank: int, action: Action) -> tuple[int, int] | None:
        """The (rank, chunk) that made what an F, B or I uses, or from which a receive comes; None where nobody does."""
        return self._neighbour(rank, action, _PRODUCER)

    def _neighbour(self, rank: int, action: Action, offsets: dict[Kind, int]) -> tuple[int, int] | None:
        if action.kind not in offsets:
            return None
        stage = self.stage_of(rank, action.chunk) + offsets[action.kind]
        return self.locate(stage) if 0 <= stage < self.total_stages else None

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks))
