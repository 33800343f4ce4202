"""ZB-H1 and ZB-H2: 1F1B with split backwards, so that weight gradients fill the bubble.

Use: `zb_h1(stages=4, microbatches=8)`.

Let f, b and w be the times of F, I and W. In ZB-H1 the idle time per rank is
(stages - 1)(f + b - w), and a rank keeps as many activations as the first rank of 1F1B. In ZB-H2
the idle time per rank is (stages - 1)(f + b - 2w), and a rank keeps the activations of
2 * stages - 1 micro-batches. Source: Qi et al. 2024, arXiv 2401.10241, sections 2.2 and 2.3.
"""

from __future__ import annotations

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan


def zb_h1(stages: int, microbatches: int) -> Plan:
    """Returns the plan of ZB-H1.

    Stage s starts with (stages - s - 1) forwards as in 1F1B. The W of micro-batch m runs after the
    I of micro-batch m + s.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
    """
    ranks = tuple(_rank(microbatches, stages - s - 1, s) for s in range(stages))
    return Plan("zb-h1", stages, microbatches, 1, ranks)


def zb_h2(stages: int, microbatches: int) -> Plan:
    """Returns the plan of ZB-H2.

    Stage s starts with 2 * (stages - s - 1) forwards. The W of micro-batch m runs after the I of
    micro-batch m + 2 * s.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
    """
    ranks = tuple(_rank(microbatches, 2 * (stages - s - 1), 2 * s) for s in range(stages))
    return Plan("zb-h2", stages, microbatches, 1, ranks)


def _rank(microbatches: int, warmup: int, delay: int) -> tuple[Action, ...]:
    """Returns `warmup` forwards, then F, I and W in turn; W is `delay` micro-batches behind I."""
    actions = [Action(Kind.F, microbatch) for microbatch in range(min(warmup, microbatches))]
    for microbatch in range(microbatches):
        if warmup + microbatch < microbatches:
            actions.append(Action(Kind.F, warmup + microbatch))
        actions.append(Action(Kind.I, microbatch))
        if microbatch >= delay:
            actions.append(Action(Kind.W, microbatch - delay))
    actions += [
        Action(Kind.W, microbatch)
        for microbatch in range(max(0, microbatches - delay), microbatches)
    ]
    return tuple(actions)
