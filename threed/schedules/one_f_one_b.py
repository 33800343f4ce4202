"""1F1B: after a short warm-up every rank alternates one forward and one backward.

Use: `one_f_one_b(stages=4, microbatches=8)`.

The bubble is GPipe's, but stage s keeps the activations of at most (stages - s) micro-batches instead of all of them.
Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1 (PipeDream-Flush).
"""

from __future__ import annotations

from itertools import chain

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan


def one_f_one_b(stages: int, microbatches: int) -> Plan:
    """Stage s runs (stages - s - 1) forwards, then forward and backward in turn, then the backwards that are left."""
    return Plan(
        "1f1b",
        stages,
        microbatches,
        1,
        tuple(_rank(stage, stages, microbatches) for stage in range(stages)),
    )


def _rank(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(Kind.F, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(Kind.B, microbatch) for microbatch in range(microbatches)]
    warmup = min(stages - stage - 1, microbatches)
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *steady, *backwards[microbatches - warmup :])
