"""Measures the gain of `--parallel.optimistic-step`, for a zero-bubble plan whose stages sleep.

    python benchmarks/optimistic.py                                   # 4 ranks on gloo, 10 steps with and without
    python benchmarks/optimistic.py --stages 2 --unit 0.05 --json

Every forward, input gradient and weight gradient of a tiny model sleeps for `unit` seconds, so the
times of the plan are these sleeps, even if four ranks share two cores. The plan is like ZB-H2
(arXiv 2401.10241, section 3.2): no rank waits within a step, and rank r ends r units of time later
than the first. The program also prints the simulated seconds per step, with a flush between steps
and without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# imported first, so that the known names do not include the schedule that is registered here
from threed import models, schedules
from threed.config import Config
from threed.config import checks as checks
from threed.config.resolution import resolve
from threed.distributed.collectives import barrier
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import Slicing
from threed.schedules import Action, Costs, Kind, Plan
from threed.testing import run_ranks

NAME, VOCAB, SEQ, ROWS = "filled", 61, 16, 2


def filled(stages: int, microbatches: int) -> Plan:
    """Returns a plan with split backwards and without a bubble if F, I and W take equally long.

    A rank runs a ready I first, else a ready F, else a W. It has at most 2 (stages - rank) - 1
    micro-batches between F and I, and at most 2 stages - 1 between F and W.
    """
    forwards, inputs, weights = ([0] * stages for _ in range(3))  # number of actions done so far
    ranks: list[list[Action]] = [[] for _ in range(stages)]
    while min(weights) < microbatches:
        before = list(forwards), list(inputs)
        for rank in range(stages):
            above = before[0][rank - 1] if rank else microbatches
            below = before[1][rank + 1] if rank + 1 < stages else forwards[rank]
            if inputs[rank] < min(below, forwards[rank]):
                ranks[rank].append(Action(Kind.I, inputs[rank]))
                inputs[rank] += 1
            elif forwards[rank] < above and forwards[rank] < min(
                inputs[rank] + 2 * (stages - rank) - 1, weights[rank] + 2 * stages - 1
            ):
                ranks[rank].append(Action(Kind.F, forwards[rank]))
                forwards[rank] += 1
            elif weights[rank] < inputs[rank]:
                ranks[rank].append(Action(Kind.W, weights[rank]))
                weights[rank] += 1
    return Plan(NAME, stages, microbatches, 1, tuple(map(tuple, ranks)))


schedules.register(NAME, filled)


def config_of(stages: int, microbatches: int, optimistic: bool) -> Config:
    """Returns the configuration of a tiny model with one block per stage."""
    config = Config.model_validate({
        "parallel": {"pp": stages, "optimistic_step": optimistic, "partition": "uniform"},
        "model": {"layers": 2 * stages, "hidden": 16, "heads": 2, "seq": SEQ, "tied": False},
        "train": {"global_batch": ROWS * microbatches, "micro_batch": ROWS, "grad_clip": 1e6},
    })  # fmt: skip
    # set afterwards, because the check of a configuration does not know this name
    parallel = config.parallel.model_copy(update={"schedule": NAME})
    return resolve(config.model_copy(update={"parallel": parallel}), VOCAB, stages)


def engine_of(config: Config, unit: float) -> Engine:
    """Returns an engine whose F, I and W each sleep for `unit` seconds."""
    topology = Topology(pp=config.parallel.pp)
    engine = Engine(models.build(config.model, Slicing(topology.axis("tp"))), topology, config)
    handlers = engine.executor._handlers

    def slowly(kind: Kind) -> None:
        inner = handlers[kind]

        def handler(action: Action) -> None:
            inner(action)
            time.sleep(unit)

        handlers[kind] = handler

    for kind in (Kind.F, Kind.I, Kind.W):
        slowly(kind)
    return engine


def seconds_of_steps(config: Config, unit: float, steps: int) -> float:
    """Returns the seconds from the start of all ranks until all have finished the steps."""
    engine, draw = engine_of(config, unit), torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (config.train.global_batch, SEQ + 1), generator=draw)
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    engine.step(batch)  # a first step, which exchanges shapes and creates buffers
    engine.optimizer.wait()
    barrier(engine.topology.axis("world"))
    began = time.perf_counter()
    for _ in range(steps):
        engine.step(batch)
    engine.optimizer.wait()
    barrier(engine.topology.axis("world"))
    return time.perf_counter() - began


def simulated(plan: Plan, unit: float, steps: int) -> tuple[float, float]:
    """Returns the seconds of the steps in a simulation, with a flush after each and without."""
    costs = Costs(unit, unit, unit)
    alone = schedules.simulate(plan, costs).makespan
    later = [
        [
            action._replace(microbatch=action.microbatch + n * plan.microbatches)
            for n in range(steps)
            for action in actions
        ]
        for actions in plan.ranks
    ]
    together = replace(plan, microbatches=steps * plan.microbatches, ranks=tuple(map(tuple, later)))
    return steps * alone, schedules.simulate(together, costs).makespan


def compare(stages: int, microbatches: int, unit: float, steps: int) -> dict[str, Any]:
    """Returns the seconds per step: measured both ways on the slowest rank, and simulated."""
    flushed, free = simulated(filled(stages, microbatches), unit, steps)
    measured = {
        optimistic: max(
            run_ranks(
                stages, seconds_of_steps, config_of(stages, microbatches, optimistic), unit, steps
            )
        )
        for optimistic in (False, True)
    }
    found = {"waiting": measured[False], "optimistic": measured[True], "simulated waiting": flushed,
             "simulated without a flush": free}  # fmt: skip
    return {"stages": stages, "microbatches": microbatches, "unit_s": unit} | {
        k: v / steps for k, v in found.items()
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=None, help="default: 2 for each stage")
    parser.add_argument(
        "--unit", type=float, default=0.02, help="seconds that an F, an I and a W sleep"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(words)
    found = compare(asked.stages, asked.microbatches or 2 * asked.stages, asked.unit, asked.steps)
    print(
        json.dumps(found)
        if asked.json
        else "\n".join(f"{name:26} {value:.4g}" for name, value in found.items())
    )


if __name__ == "__main__":
    main()
