"""What a pipeline rank can do: the words that every plan is written in.

Use: `Action.parse("F0.3")` is the forward of micro-batch 3 on the rank's chunk 0; `Action.parse("F0.3+B1.2")` runs it
together with the backward of micro-batch 2 on chunk 1.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does; the value is its text form."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients
    I = "I"  # noqa: E741  backward for the input's gradient only
    W = "W"  # backward for the weights' gradient only, after I
    FB = "FB"  # a forward together with the backward (B or I) `beside` it
    SEND_F = "SF"  # send an activation to the next stage
    RECV_F = "RF"  # receive it
    SEND_B = "SB"  # send a gradient to the previous stage
    RECV_B = "RB"  # receive it
    GATHER = "GATHER"  # start gathering a chunk's first parameters
    REDUCE = "REDUCE"  # a chunk's gradients are complete: sum those shared with other stages
    VALIDATE = "VALIDATE"  # was the update before this step right? if not, the step begins again
    NORM = "NORM"  # the gradients of the step before are complete on all ranks: begin to sum their norm
    UPDATE = "UPDATE"  # update the weights by them


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.FB})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
PER_CHUNK = frozenset({Kind.GATHER, Kind.REDUCE, Kind.VALIDATE, Kind.NORM, Kind.UPDATE})

_TEXT = re.compile(r"([A-Z]+)(\d+)(?:\.(-?\d+))?")


class Action(NamedTuple):
    """One thing a rank does, for one micro-batch of one of its chunks.

    `microbatch` counts from 0 and is global; below 0 are those of the step before, -1 the last of them. It is -1 for
    the kinds that concern a whole chunk (GATHER, REDUCE), or the whole rank (VALIDATE, NORM, UPDATE: of chunk 0).
    `chunk` is the acting rank's own chunk, also for sends and receives. `beside`, of an FB only: the backward that runs
    together with this forward.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    beside: Action | None = None

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself; of an FB its forward and its backward."""
        if self.beside is None:
            return (self,)
        return Action(Kind.F, self.microbatch, self.chunk), self.beside

    def __str__(self) -> str:
        if self.beside is not None:
            return "+".join(map(str, self.parts))
        chunk = f"{self.kind.value}{self.chunk}"
        return chunk if self.kind in PER_CHUNK else f"{chunk}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads the text form: kind, chunk, and after a point the micro-batch. Raises ValueError on anything else."""
        first, plus, second = text.partition("+")
        if plus:
            forward, backward = cls.parse(first), cls.parse(second)
            if forward.kind is Kind.F and backward.kind in (Kind.B, Kind.I):
                return together(forward, backward)
        match = _TEXT.fullmatch(first)
        known = match is not None and match[1] in set(Kind) and match[1] != Kind.FB
        if plus or match is None or not known or (match[3] is None) != (match[1] in PER_CHUNK):
            raise ValueError(
                f"no action is written {text!r}; examples: F0.3, B0.3, SF0.3, RB1.0, REDUCE0, F0.3+B1.2"
            )
        return cls(Kind(match[1]), -1 if match[3] is None else int(match[3]), int(match[2]))


def together(forward: Action, backward: Action) -> Action:
    """The action that runs a forward and a backward (B or I) together."""
    return Action(Kind.FB, forward.microbatch, forward.chunk, backward)
