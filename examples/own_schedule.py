"""Two custom schedules, for training or drawing.

    torchrun --standalone --nproc-per-node 2 -m threed train gpt --preset tiny --parallel.pp 2 \\
        --parallel.schedule examples/own_schedule.py:gpipe_late
    threed schedule examples/own_schedule.py:gpipe_late --stages 4 --microbatches 8 --svg gpipe-late.svg
    python examples/own_schedule.py --stages 4 --microbatches 8        prints makespans and bubbles

A schedule is a function (stages, microbatches) -> Plan. A plan lists the compute actions of each rank in order.
threed adds the communication.
"""

from __future__ import annotations

import argparse

from threed import schedules
from threed.schedules import Action, Costs, Kind, Plan


@schedules.schedule("gpipe-late")
def gpipe_late(stages: int, microbatches: int) -> Plan:
    """GPipe with a split backward: all forwards, then all input gradients, then all weight gradients.

    With F, I and W the times of the three kinds of actions, a rank is idle for (stages - 1) (F + I). Under GPipe it is
    idle for (stages - 1) (F + I + W). Both need the same memory.
    """
    kinds = (Kind.F, Kind.I, Kind.W)
    actions = tuple(
        Action(kind, microbatch) for kind in kinds for microbatch in range(microbatches)
    )
    return Plan("gpipe-late", stages, microbatches, 1, (actions,) * stages)


@schedules.schedule("timed")
def timed(stages: int, microbatches: int) -> Plan:
    """zb-auto for given times of the actions, and memory for six micro-batches per rank."""
    return schedules.zb_auto(stages, microbatches, Costs(1.0, 1.2, 0.8, send=0.1), limit=6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", type=int, default=4, help="pipeline ranks (default %(default)s)"
    )
    parser.add_argument(
        "--microbatches", type=int, default=8, help="micro-batches per step (default %(default)s)"
    )
    arguments = parser.parse_args()
    for build in (gpipe_late, timed):
        plan = build(arguments.stages, arguments.microbatches)
        timeline = schedules.simulate(plan, Costs(1.0, 1.2, 0.8))
        print(f"{plan.name:<11} ends at {timeline.makespan:g}, bubble {timeline.bubble:.1%}")


if __name__ == "__main__":
    main()
