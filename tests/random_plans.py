"""Random legal schedules: forwards and backwards in any order that does not stall.

    --parallel.schedule tests/random_plans.py:first

A plan has one or two chunks per rank, with any placement of the stages. Its backwards are full, or
split, or some of each.
"""

from __future__ import annotations

import random

from threed import schedules
from threed.schedules import Action, Kind, Plan
from threed.schedules.deadlock_check import validate

TRIES = 400
# (stage, micro-batch) -> 0 at first, 1 after F, 2 after I, 3 after B or W
Progress = dict[tuple[int, int], int]


def random_plan(seed: int, stages: int, microbatches: int) -> Plan:
    """Returns the first of a seed's random plans that can run."""
    for turn in range(TRIES):
        plan = _drawn(random.Random(f"{seed} {stages} {microbatches} {turn}"), stages, microbatches)
        try:
            validate(schedules.lower(plan, gathers=True))
        except ValueError:
            continue
        return plan
    raise ValueError(
        f"no random plan of {TRIES} for {stages} stages and {microbatches} micro-batches can run"
    )


def _drawn(draw: random.Random, stages: int, microbatches: int) -> Plan:
    chunks = draw.choice([1, 1, 2])
    placement = _placement(draw, stages, chunks)
    home = {
        stage: (rank, chunk)
        for rank, held in enumerate(placement)
        for chunk, stage in enumerate(held)
    }
    split, eager = draw.choice([0.0, 0.5, 1.0]), draw.random()
    progress: Progress = {(stage, m): 0 for stage in range(len(home)) for m in range(microbatches)}
    ranks: list[list[Action]] = [[] for _ in range(stages)]
    while options := [key for key in progress if _is_ready(progress, key, len(home))]:
        backwards = [key for key in options if progress[key]]
        stage, m = draw.choice(backwards if backwards and draw.random() < eager else options)
        rank, chunk = home[stage]
        kind, progress[stage, m] = _next(progress[stage, m], draw.random() < split)
        ranks[rank].append(Action(kind, m, chunk))
    return Plan("random", stages, microbatches, chunks, tuple(map(tuple, ranks)), placement)


def _placement(draw: random.Random, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the stages of each rank: round-robin, or in a random order."""
    numbers = list(range(chunks * stages))
    if draw.random() < 0.4:
        return tuple(tuple(numbers[rank::stages]) for rank in range(stages))
    draw.shuffle(numbers)
    return tuple(
        tuple(sorted(numbers[rank * chunks : (rank + 1) * chunks])) for rank in range(stages)
    )


def _is_ready(progress: Progress, key: tuple[int, int], total: int) -> bool:
    (stage, m), now = key, progress[key]
    if now == 0:
        return stage == 0 or progress[stage - 1, m] >= 1
    return now == 2 or (now == 1 and (stage == total - 1 or progress[stage + 1, m] >= 2))


def _next(now: int, split: bool) -> tuple[Kind, int]:
    if now == 0:
        return Kind.F, 1
    if now == 2:
        return Kind.W, 3
    return (Kind.I, 2) if split else (Kind.B, 3)


def first(stages: int, microbatches: int) -> Plan:
    return random_plan(0, stages, microbatches)


def second(stages: int, microbatches: int) -> Plan:
    return random_plan(1, stages, microbatches)


def third(stages: int, microbatches: int) -> Plan:
    return random_plan(2, stages, microbatches)


def fourth(stages: int, microbatches: int) -> Plan:
    return random_plan(3, stages, microbatches)
