"""Chimera, DualPipe and DualPipeV: micro-batches enter the ranks from both ends, and fill each other's bubbles.

Use: `chimera(stages=4, microbatches=8)`, `dualpipe(stages=8, microbatches=20)`, `dualpipev(stages=4,
microbatches=10)`.

Chimera runs two pipelines through the same ranks in opposite directions. Every rank holds two stages: rank r the stage
r of the way down, and stage (stages - 1 - r) of the way up. The first
half of the micro-batches goes down, the second half up. With forwards and backwards of one slot each, stage s of a way
runs the forward of its i-th micro-batch in slot s + 2i and the backward in slot 2 stages - 1 - s + 2i; on a rank the
slots of the two ways never meet. After `stages` micro-batches (a unit) the same starts again in the slot
2 stages later, where it fills the holes that the unit before left: the paper's direct concatenation.

Waiting in u whole units of D = stages micro-batches, with forwards of time f and backwards of time b >= f:
(D - 2) (b + (u - 1) (b - f)). So D - 2 slots for any number of units where both take equally long, the paper's
(D - 2) / (2m + D - 2) of the whole; with b = 2f its (D - 2) / (1.5m + D - 2) in a single unit, and more with each
further one: take m = D then, or another schedule. A last unit of r < D micro-batches waits D - r slots more.
Between D/2 + 1 (outer ranks) and D micro-batches are held. Each rank has the weights of two stages.
Source: Li and Hoefler 2021, arXiv 2107.06925, section 3.

DualPipe and DualPipeV run forwards together with backwards. Every rank holds two chunks. DualPipe: rank r holds the
stage r, and for micro-batches of the other direction the stage
of the opposite rank, so all weights are there twice. DualPipeV: one direction through a V of twice as many stages, down
on the first chunks and up on the second ones, so each weight is there once. Both follow one program in eight phases.
With `near` the chunk that a rank's micro-batches reach first, and `far` the other one:
1. forwards of near, 2. of near and far in turn, 3. backwards of far (split) each with a forward of far,
4. pairs: forward of near with backward of far, then forward of far with backward of near, 5. the same without forwards
of near, 6. backwards of far and near, from the middle on split, 7. weight gradients and backwards of near, 8. the
weight gradients that are left.

With P stages of the model, F&B the time of a pair and B that of a full backward, the rank that waits longest waits
(P/2 - 1) (F&B + B - 3W), exactly so where a forward takes as long as an input gradient and the weight gradient no
longer. Every rank holds at most P + 1 activations of a stage, which in DualPipeV is half a rank.
Source: DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, and the order in github.com/deepseek-ai/DualPipe, of which
both are the same action by action; the V is Sea AI Lab's "cut-in-half" as built there.
"""

from __future__ import annotations

from collections import deque

from threed.schedules.action import Action, Kind, together
from threed.schedules.plan import Plan, SizesError


def chimera(stages: int, microbatches: int) -> Plan:
    """Both ways in their slots, in the order of the slots; a last unit that is not full leaves some empty.

    Raises SizesError where stages or micro-batches are odd.
    """
    placement = both_ways("chimera", stages, microbatches)
    ranks = []
    for rank in range(stages):
        slots = {
            slot: action
            for way in (0, 1)
            for slot, action in _slots(way, rank, stages, microbatches)
        }
        ranks.append(tuple(slots[slot] for slot in sorted(slots)))
    return Plan("chimera", stages, microbatches, 2, tuple(ranks), placement, ways=2)


def both_ways(
    name: str, stages: int, microbatches: int, least: int = 1
) -> tuple[tuple[int, int], ...]:
    """The placement of a bidirectional plan: rank r holds stage r, and that of the opposite rank for the other way.

    Raises SizesError where stages or micro-batches are odd, or the latter fewer than `least`.
    """
    both = "it goes both ways, so their number must be even"
    if stages % 2:
        raise SizesError(f"schedule {name}: {stages} stages; {both}", stages=stages + 1)
    check_enough(name, stages, microbatches, least)
    if microbatches % 2:
        problem = f"schedule {name}: {microbatches} micro-batches; {both}"
        raise SizesError(problem, microbatches=microbatches + 1)
    return tuple((rank, stages - 1 - rank) for rank in range(stages))


def check_enough(name: str, stages: int, microbatches: int, least: int) -> None:
    """Raises SizesError for fewer micro-batches than `least`."""
    if microbatches < least:
        problem = f"{microbatches} micro-batches; {stages} stages need at least {least}"
        raise SizesError(f"schedule {name}: {problem}", microbatches=least)


def _slots(way: int, rank: int, stages: int, microbatches: int) -> list[tuple[int, Action]]:
    stage, half = (stages - 1 - rank if way else rank), microbatches // 2
    found = []
    for number in range(half):
        unit, within = divmod(number, stages // 2)
        slot, microbatch = 2 * (stages * unit + within), way * half + number
        found.append((slot + stage, Action(Kind.F, microbatch, way)))
        found.append((slot + 2 * stages - 1 - stage, Action(Kind.B, microbatch, way)))
    return found


# -------------------- DualPipe


def dualpipe(stages: int, microbatches: int) -> Plan:
    """Both directions at once, half of the micro-batches each.

    Raises SizesError where stages or micro-batches are odd, or with fewer than 2 stages micro-batches.
    """
    placement = both_ways("dualpipe", stages, microbatches, least=2 * stages)
    half = microbatches // 2
    ranks = []
    for rank in range(stages):
        near = int(rank >= stages // 2)
        program = _Rank(min(rank, stages - 1 - rank), stages // 2, half, near, (0, half))
        ranks.append(program.actions())
    return Plan("dualpipe", stages, microbatches, 2, tuple(ranks), placement, ways=2)


def dualpipev(stages: int, microbatches: int) -> Plan:
    """All micro-batches down and up a V of twice as many stages.

    Raises SizesError with fewer than 2 stages micro-batches.
    """
    check_enough("dualpipev", stages, microbatches, 2 * stages)
    placement = tuple((rank, 2 * stages - 1 - rank) for rank in range(stages))
    ranks = tuple(_Rank(rank, stages, microbatches, 0, (0, 0)).actions() for rank in range(stages))
    return Plan("dualpipev", stages, microbatches, 2, ranks, placement)


class _Rank:
    """What one rank does. `depth` is its distance from the end where its near micro-batches enter, `ranks` how many
    there are up to the turn, `count` how many micro-batches each of its chunks has; those of chunk c start at first[c].
    """

    def __init__(
        self, depth: int, ranks: int, count: int, near: int, first: tuple[int, int]
    ) -> None:
        self.depth, self.ranks, self.count = depth, ranks, count
        self.near, self.far = near, 1 - near
        self._next = {kind: list(first) for kind in (Kind.F, Kind.B)}
        self._owed: deque[Action] = deque()  # weight gradients of split backwards
        self._done: list[Action] = []

    def actions(self) -> tuple[Action, ...]:
        """All phases, in order."""
        self._fill()
        self._steady()
        self._drain()
        return tuple(self._done)

    def _fill(self) -> None:
        """Phases 1 to 3."""
        ahead = self.ranks - self.depth - 1
        for _ in range(2 * ahead):
            self._run(self._forward(self.near))
        for _ in range(self.depth + 1):
            self._run(self._forward(self.near), self._forward(self.far))
        for _ in range(ahead):
            self._split_backward(self.far)
            self._run(self._owed.popleft(), self._forward(self.far))

    def _steady(self) -> None:
        """Phases 4 and 5. At the turn the first forward is not paired: the backward does not wait for it then."""
        for number in range(self.count - 2 * self.ranks + self.depth + 1):
            first = self._forward(self.near), self._backward(self.far)
            if number == 0 and self.depth == self.ranks - 1:
                self._run(*first)
            else:
                self._run(together(*first))
            self._run(together(self._forward(self.far), self._backward(self.near)))
        for _ in range(self.ranks - self.depth - 1):
            self._run(
                self._backward(self.far),
                together(self._forward(self.far), self._backward(self.near)),
            )

    def _drain(self) -> None:
        """Phases 6 to 8."""
        backwards = [self.far, self.near] * (self.depth + 1)
        for number, chunk in enumerate(backwards):
            if number > self.depth:
                self._split_backward(chunk)
            else:
                self._run(self._backward(chunk))
        for _ in range(self.ranks - self.depth - 1):
            self._run(self._owed.popleft())
            self._split_backward(self.near)
        self._run(*self._owed)

    def _forward(self, chunk: int) -> Action:
        return self._take(Kind.F, chunk)

    def _backward(self, chunk: int) -> Action:
        return self._take(Kind.B, chunk)

    def _take(self, kind: Kind, chunk: int) -> Action:
        microbatch = self._next[kind][chunk]
        self._next[kind][chunk] += 1
        return Action(kind, microbatch, chunk)

    def _split_backward(self, chunk: int) -> None:
        full = self._backward(chunk)
        self._run(full._replace(kind=Kind.I))
        self._owed.append(full._replace(kind=Kind.W))

    def _run(self, *actions: Action) -> None:
        self._done += actions
