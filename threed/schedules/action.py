"""The actions of a pipeline rank; a plan has one list of actions per rank.

Use: `Action.parse("F0.3")` returns the forward of micro-batch 3 on the rank's chunk 0.
`Action.parse("F0.3+B1.2")` returns an action that runs this forward together with the backward of
micro-batch 2 on chunk 1.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of an action. Its value is its text in a plan, such as "SF" for SEND_F."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients
    I = "I"  # noqa: E741  backward for the input's gradient only
    W = "W"  # backward for the weights' gradient only, after I
    FB = "FB"  # a forward together with a backward (B or I)
    SEND_F = "SF"  # send an activation to the next stage
    RECV_F = "RF"  # receive an activation
    SEND_B = "SB"  # send a gradient to the previous stage
    RECV_B = "RB"  # receive a gradient
    GATHER = "GATHER"  # start to gather the first layers that the chunk's next compute action runs
    REDUCE = "REDUCE"  # after a chunk's last backward: reduce the chunk's remaining gradients
    VALIDATE = "VALIDATE"  # check the previous update; if invalid, undo it and restart the step
    NORM = "NORM"  # once all ranks have reduced the previous step's gradients: start their norm
    UPDATE = "UPDATE"  # update the weights with the previous step's gradients


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.FB})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
PER_CHUNK = frozenset({Kind.GATHER, Kind.REDUCE, Kind.VALIDATE, Kind.NORM, Kind.UPDATE})

_TEXT = re.compile(r"([A-Z]+)(\d+)(?:\.(-?\d+))?")


class Action(NamedTuple):
    """One action of a rank, usually for one micro-batch on one of the rank's chunks.

    Attributes:
        kind: the kind of the action.
        microbatch: the index of the micro-batch in the step, from 0. A negative index is a
            micro-batch of the previous step: -1 is the last one. GATHER, REDUCE, VALIDATE, NORM and
            UPDATE belong to no micro-batch, and also have the index -1.
        chunk: the index of the chunk on the rank that runs the action, even for a send or receive:
            the peer may use another index. 0 for VALIDATE, NORM and UPDATE, which concern all
            chunks.

    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    beside: Action | None = None  # for an FB: the backward that runs together with this forward

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward and the backward of an FB; the action itself otherwise."""
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
        """Returns the action that a text describes.

        Args:
            text: kind, chunk, a dot and micro-batch, such as F0.3. Actions without a micro-batch
                have no dot, such as REDUCE0. An FB is its forward and its backward, joined by "+",
                such as F0.3+B1.2.

        Raises:
            ValueError: the text is malformed.
        """
        first, plus, second = text.partition("+")
        if plus:
            forward, backward = cls.parse(first), cls.parse(second)
            if forward.kind is Kind.F and backward.kind in (Kind.B, Kind.I):
                return together(forward, backward)
        match = _TEXT.fullmatch(first)
        known = match is not None and match[1] in set(Kind) and match[1] != Kind.FB
        if plus or match is None or not known or (match[3] is None) != (match[1] in PER_CHUNK):
            raise ValueError(
                f"invalid action {text!r}; examples: F0.3, B0.3, SF0.3, RB1.0, REDUCE0, F0.3+B1.2"
            )
        return cls(Kind(match[1]), -1 if match[3] is None else int(match[3]), int(match[2]))


def together(forward: Action, backward: Action) -> Action:
    """Returns the action (FB) that runs a forward and a backward together.

    Args:
        forward: the forward (F).
        backward: the backward (B or I).
    """
    return Action(Kind.FB, forward.microbatch, forward.chunk, backward)
