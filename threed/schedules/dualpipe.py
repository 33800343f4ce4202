"""DualPipe and DualPipeV: micro-batches from both ends, forwards run together with backwards, few bubbles.

Use: `dualpipe(stages=8, microbatches=20)` or `dualpipev(stages=4, microbatches=10)`.

Every rank holds two chunks. DualPipe: rank r holds the stage r, and for micro-batches of the other direction the stage
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
from threed.schedules.chimera import both_ways, check_enough
from threed.schedules.plan import Plan


def dualpipe(stages: int, microbatches: int) -> Plan:
    """Both directions at once, half of the micro-batches each.

    Raises ValueError where stages or micro-batches are odd, or with fewer than 2 stages micro-batches.
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

    Raises ValueError with fewer than 2 stages micro-batches.
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
