"""Measures the CPU time of building, simulating and lowering plans; the best of several runs.

    python benchmarks/plans.py                              # 16 stages and 64 micro-batches, 64 and 512
    python benchmarks/plans.py --sizes 8,32 --schedules v-min

"build and simulate" is the cost of trying a schedule; for zb-auto it is the slowest of three sets
of random times of the stages. "lower" adds the communication.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from threed.schedules import Costs, Plan, available, build, lower, simulate  # noqa: E402
from threed.schedules.registry import plans_by_times  # noqa: E402


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Returns the least CPU time of several calls, in seconds."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def random_costs(stages: int, seed: int) -> Costs:
    """Returns random times of stages."""
    draw = random.Random(seed)
    forward, back, weight = (tuple(draw.uniform(0.5, 1.5) for _ in range(stages)) for _ in range(3))
    return Costs(forward, back, weight, send=0.1)


def row(name: str, stages: int, microbatches: int, repeats: int) -> str:
    """Returns a row of the table."""
    draws = [random_costs(stages, seed) for seed in range(3)] if plans_by_times(name) else [None]

    def plan(costs: Costs | None) -> Plan:
        return build(name, stages, microbatches, None, costs)

    built = plan(draws[0])
    times = (
        max(seconds_of(lambda: plan(costs), repeats) for costs in draws),  # noqa: B023
        max(
            seconds_of(lambda: simulate(plan(costs), costs or Costs(1, 1, 1)), repeats)  # noqa: B023
            for costs in draws
        ),
        seconds_of(lambda: lower(built), repeats),
    )
    return f"| {name} | {stages} | {microbatches} | {' | '.join(f'{1e3 * taken:.0f}' for taken in times)} |"


def main() -> None:
    """Prints a row for each schedule and size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["16,64", "64,512"], help="STAGES,MICROBATCHES"
    )
    parser.add_argument("--schedules", nargs="+", default=list(available()))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(
        "| schedule | stages | micro-batches | build ms | build and simulate ms | lower ms |\n"
        + "|---" * 6
        + "|"
    )
    for size in args.sizes:
        stages, microbatches = map(int, size.split(","))
        for name in args.schedules:
            print(row(name, stages, microbatches, args.repeats), flush=True)


if __name__ == "__main__":
    main()
