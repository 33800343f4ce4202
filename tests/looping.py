"""Schedules with several chunks per rank, for tests: a simple 1F1B over two chunks.

    looping   rank r holds the stages r and r + p of the model; the last stage is on the last rank
    vee       rank r holds the stages r and 2p - 1 - r; the first and the last stage are on rank 0

split-vee and split-1f1b split every backward, and compute the gradients of weights later.
"""

from __future__ import annotations

from dataclasses import replace

import threed.config.checks  # noqa: F401  before `register` below, so that the known names do not depend on the order of tests
from threed import schedules
from threed.schedules import Action, Kind, Plan

Placement = tuple[tuple[int, ...], ...]
CHUNKS = 2


def looping(stages: int, microbatches: int) -> Plan:
    """A plan with two chunks per rank: micro-batches pass the ranks twice, in the same order."""
    return plan_of("looping", tuple((rank, rank + stages) for rank in range(stages)), microbatches)


def vee(stages: int, microbatches: int) -> Plan:
    """A plan with two chunks per rank: micro-batches pass down the ranks and up again."""
    return plan_of(
        "vee", tuple((rank, CHUNKS * stages - 1 - rank) for rank in range(stages)), microbatches
    )


def plan_of(name: str, placement: Placement, microbatches: int) -> Plan:
    """Returns a plan for any placement.

    A rank runs a backward if one is ready. Otherwise it runs a forward, unless the number of its
    micro-batches in progress has reached a limit, which grows with the rank's distance from the
    last rank. Of several forwards it runs those of the first `stages` micro-batches first, chunk by
    chunk.
    """
    p, total = len(placement), CHUNKS * len(placement)
    home = {
        stage: (rank, chunk)
        for rank, held in enumerate(placement)
        for chunk, stage in enumerate(held)
    }
    forwards = {(stage, m) for stage in range(total) for m in range(microbatches)}
    backwards, made, back = set(forwards), set[tuple[int, int]](), set[tuple[int, int]]()
    open_, ranks = [0] * p, [list[Action]() for _ in placement]
    while backwards:
        ran = []
        for rank, held in enumerate(placement):
            last = total - 1
            ready = [
                (m, -s)
                for s, m in backwards
                if s in held and (s, m) in made and (s == last or (s + 1, m) in back)
            ]
            coming = [
                (m // p, s, m) for s, m in forwards if s in held and (s == 0 or (s - 1, m) in made)
            ]
            if ready:
                m, s = min(ready)
                ran.append((rank, Kind.B, -s, m))
            elif coming and open_[rank] <= CHUNKS * (p - rank - 1) + (CHUNKS - 1) * p:
                _, s, m = min(coming)
                ran.append((rank, Kind.F, s, m))
        if (
            not ran
        ):  # all ranks have reached their limits: the first possible forward runs all the same
            rank, s, m = min(
                (home[s][0], s, m) for s, m in forwards if s == 0 or (s - 1, m) in made
            )
            ran.append((rank, Kind.F, s, m))
        for rank, kind, s, m in ran:
            ranks[rank].append(Action(kind, m, home[s][1]))
            open_[rank] += 1 if kind is Kind.F else -1
            (forwards if kind is Kind.F else backwards).remove((s, m))
            (made if kind is Kind.F else back).add((s, m))
    return Plan(name, p, microbatches, CHUNKS, tuple(map(tuple, ranks)), placement)


def split(plan: Plan, name: str, late: int) -> Plan:
    """Returns a plan with split backwards.

    Args:
        plan: a plan with full backwards.
        name: name of the new plan.
        late: number of backwards by which each computation of weight gradients is delayed.
    """
    ranks = []
    for actions in plan.ranks:
        order, waiting = list[Action](), list[Action]()
        for action in actions:
            whole = action.kind is Kind.B
            order.append(action._replace(kind=Kind.I) if whole else action)
            waiting += [action._replace(kind=Kind.W)] if whole else []
            if len(waiting) > late:
                order.append(waiting.pop(0))
        ranks.append((*order, *waiting))
    return replace(plan, name=name, ranks=tuple(ranks))


def split_vee(stages: int, microbatches: int) -> Plan:
    """The plan `vee` with split backwards."""
    return split(vee(stages, microbatches), "split-vee", 2)


def split_1f1b(stages: int, microbatches: int) -> Plan:
    """1F1B with split backwards."""
    return split(schedules.one_f_one_b(stages, microbatches), "split-1f1b", 1)


OWN = {"looping": looping, "vee": vee, "split-vee": split_vee, "split-1f1b": split_1f1b}
for _name, _plan in OWN.items():
    schedules.register(_name, _plan, chunks=1 if _name == "split-1f1b" else CHUNKS)
