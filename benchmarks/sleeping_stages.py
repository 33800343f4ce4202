"""Compares the times of threed's executor, and torch's, with the simulation; stages sleep.

    python benchmarks/sleeping_stages.py --stages 4 8            # every schedule; torch's if it has the schedule
    python benchmarks/sleeping_stages.py --stages 4 --schedules zb-h1 --unit-ms 40

The real executor and gloo are used. In a stage, the forward, the backward for the input and the
backward for the weights sleep for given times (per micro-batch, on all chunks of a rank together),
and send tensors with `--elements` elements. So many ranks can run on few cores, and the measured
times show the executor's order, waits and messages. The span of a step is the longest time of one
rank from its first action to its last. Steps of both engines alternate; figures are medians over
`--rounds` steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from threed import schedules  # noqa: E402
from threed.distributed.topology import Topology  # noqa: E402
from threed.layers import MicroBatch  # noqa: E402
from threed.models.pipeline_layout import PipelineLayout  # noqa: E402
from threed.pipeline.executor import Executor  # noqa: E402
from threed.pipeline.overlap import Pass  # noqa: E402
from threed.pipeline.transport import Links  # noqa: E402
from threed.schedules import Costs, Plan, lower, registry, simulate  # noqa: E402
from threed.testing.ranks import run_ranks  # noqa: E402

TORCH = {
    "gpipe": (pipelining.ScheduleGPipe, 1, False),
    "1f1b": (pipelining.Schedule1F1B, 1, False),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, 2, True),
    "dualpipev": (torch_schedules.ScheduleDualPipeV, 2, True),
}
Step = Callable[[], tuple[float, float]]


# ------------------------------------------------------------------------------------------------------------- threed


class Sleeper:
    """A stage of the executor that sleeps, and returns `elements` numbers."""

    def __init__(self, costs: Costs, chunk: int, rank: int, plan: Plan, elements: int) -> None:
        of = {kind: schedules.Action(schedules.Kind(kind), 0, chunk) for kind in "FBI"}
        self.times = {kind: costs.duration(action, rank, plan) for kind, action in of.items()}
        self.elements, self.layers = elements, [self]

    def reset(self, ended: int | None = None) -> None:
        """Begins a step; there is no state to discard."""

    def forward_by_layer(
        self, microbatch: int, x: Tensor | None, micro: MicroBatch, keep: bool
    ) -> Pass[Tensor]:
        time.sleep(self.times["F"])
        yield
        return torch.zeros(self.elements, requires_grad=True)

    def backward_by_layer(
        self, microbatch: int, dy: Tensor | None, keep: bool, split: bool
    ) -> Pass[Tensor]:
        time.sleep(self.times["I" if split else "B"])
        yield
        return torch.zeros(self.elements)


class SleepingWeights:
    """The work of a W: it sleeps for the time of the weight gradients."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @contextmanager
    def defer(self) -> Iterator[list[Any]]:
        yield []

    def add_deferred(self, waiting: list[Any]) -> None:
        time.sleep(self.seconds)


def ours(name: str, microbatches: int, costs: Costs, elements: int) -> Step:
    """Returns a function that runs a step of threed's executor on this rank."""
    topology = Topology(pp=dist.get_world_size())
    rank, plan = topology.rank, schedules.build(name, topology.pp, microbatches)
    topology.prepare(
        links=PipelineLayout.of([range(n, n + 1) for n in range(plan.total_stages)], plan).links
    )
    stages: Any = [Sleeper(costs, chunk, rank, plan, elements) for chunk in range(plan.chunks)]
    weights = SleepingWeights(costs.duration(schedules.Action(schedules.Kind.W, 0, 0), rank, plan))
    executor = Executor(stages, Links(topology), rank, weight_gradients=weights)
    lowered, micros = lower(plan), [MicroBatch() for _ in range(microbatches)]

    def step() -> tuple[float, float]:
        executor.record()
        executor.run(lowered, micros)
        spans = [
            (s, e) for action, s, e in executor.spans if action.kind in schedules.action.COMPUTE
        ]
        return min(s for s, _ in spans), max(e for _, e in spans)

    return step


# -------------------------------------------------------------------------------------------------------------- torch


class Sleep(torch.autograd.Function):
    """Sleeps in forward and backward, and calls `awake` at the end of the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: float, backward: float, awake: Callable[[], None]
    ) -> Tensor:
        ctx.backward_s, ctx.awake = backward, awake
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(ctx.backward_s)
        ctx.awake()
        return dy, None, None, None


class SleepingModule(nn.Module):
    """x * w.

    The path of x sleeps for the forward and for the input gradient, the path of w for the weight
    gradient.
    """

    def __init__(self, forward: float, backward_input: float, backward_weight: float) -> None:
        super().__init__()
        self.times = forward, backward_input, backward_weight
        self.weight = nn.Parameter(torch.ones(()))
        self.began, self.ended = float("inf"), 0.0

    def _awake(self) -> None:
        self.ended = time.perf_counter()

    def forward(self, x: Tensor) -> Tensor:
        self.began = min(self.began, time.perf_counter())
        x = x if x.requires_grad else x.detach().requires_grad_()
        forward, backward_input, backward_weight = self.times
        weight = Sleep.apply(self.weight, 0.0, backward_weight, self._awake)
        y: Tensor = Sleep.apply(x, forward, backward_input, self._awake) * weight
        return y


def torchs(name: str, microbatches: int, costs: Costs, elements: int) -> Step:
    """Returns a function that runs a step of torch's schedule on this rank."""
    kind, chunks, vee = TORCH[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = (
        [rank, 2 * ranks - 1 - rank] if vee else [rank + chunk * ranks for chunk in range(chunks)]
    )
    each = [
        float(cost) / chunks
        for cost in (costs.forward, costs.backward_input, costs.backward_weight)
    ]  # type: ignore[arg-type]
    modules, total = [SleepingModule(*each) for _ in numbers], ranks * chunks
    stages = [
        pipelining.PipelineStage(m, n, total, torch.device("cpu"))
        for m, n in zip(modules, numbers, strict=True)
    ]
    plan: Any = kind(
        stages if chunks > 1 else stages[0], microbatches, loss_fn=lambda y, target: y.sum()
    )
    x = torch.zeros(microbatches, elements)

    def step() -> tuple[float, float]:
        for module in modules:
            module.began, module.ended = float("inf"), 0.0
        target = {"target": x} if total - 1 in numbers else {}
        plan.step(*((x,) if 0 in numbers else ()), **target)
        return min(module.began for module in modules), max(module.ended for module in modules)

    return step


# -------------------------------------------------------------------------------------------------------------- times


def span_of(step: Step) -> float:
    """Returns the span of a step on the rank with the longest span, in seconds."""
    dist.barrier()
    began, ended = step()
    longest = torch.tensor([ended - began], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def measure(
    name: str, microbatches: int, costs: Costs, elements: int, rounds: int
) -> list[list[float]]:
    """Returns the spans of threed's executor, and of torch's if it has the schedule, in turn."""
    steps = [ours(name, microbatches, costs, elements)]
    if name in TORCH:
        steps.append(torchs(name, microbatches, costs, elements))
    for step in steps:
        span_of(step)  # a first step, which creates connections and exchanges shapes of messages
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, mine in zip(steps, found, strict=True):
            mine.append(span_of(step))
    return found


def main() -> None:
    """Prints a row for each schedule and number of stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    parser.add_argument(
        "--microbatches", type=int, default=None, help="by default three times the stages"
    )
    names = [name for name in schedules.available() if not registry.is_asynchronous(name)]
    parser.add_argument("--schedules", nargs="+", default=names)
    parser.add_argument(
        "--unit-ms", type=float, default=30.0, help="of a forward over all chunks of a rank"
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs=2,
        default=(1.0, 1.0),
        help="of the two backwards to a forward",
    )
    parser.add_argument("--elements", type=int, default=4096, help="numbers in a message")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    unit = args.unit_ms / 1e3
    costs = Costs(unit, unit * args.ratios[0], unit * args.ratios[1])
    print(
        "| schedule | stages | micro-batches | simulated ms | threed ms | over | torch ms | over |\n"
        + "|---" * 8
        + "|"
    )
    for stages in args.stages:
        count = args.microbatches or 3 * stages
        for name in args.schedules:
            span = simulate(schedules.build(name, stages, count), costs).span
            rows = run_ranks(
                stages, measure, name, count, costs, args.elements, args.rounds, timeout=600
            )[0]
            cells = [
                f"{1e3 * (m := statistics.median(row)):.1f} | {m / span - 1:+.1%}" for row in rows
            ]
            cells += ["not there | "] * (2 - len(cells))
            print(
                f"| {name} | {stages} | {count} | {1e3 * span:.1f} | {' | '.join(cells)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
