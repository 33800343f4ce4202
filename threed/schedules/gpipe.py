"""GPipe: all forwards, then all backwards; and its first half alone, for evaluation and sampling.

Use: `gpipe(stages=4, microbatches=8)`, `forward_only(stages=4, microbatches=8)`.

Every rank keeps the activations of all micro-batches, and waits (stages - 1) forwards and as many backwards.
Source: Huang et al. 2019, arXiv 1811.06965.
"""

from __future__ import annotations

from threed.schedules.action import Action, Kind, Plan


def gpipe(stages: int, microbatches: int) -> Plan:
    """Every rank runs all forwards and then all backwards, both in the order of the micro-batches."""
    forwards, backwards = _all(Kind.F, microbatches), _all(Kind.B, microbatches)
    return Plan("gpipe", stages, microbatches, 1, (forwards + backwards,) * stages)


def forward_only(stages: int, microbatches: int) -> Plan:
    """Every rank runs all forwards and no backward: no activation outlives its forward."""
    return Plan("forward-only", stages, microbatches, 1, (_all(Kind.F, microbatches),) * stages)


def _all(kind: Kind, microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(kind, microbatch) for microbatch in range(microbatches))
