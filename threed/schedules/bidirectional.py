"""Chimera, DualPipe and DualPipeV: a rank runs one of its two chunks in the bubbles of the other.

Use: `chimera(stages=4, microbatches=8)`, `dualpipe(stages=8, microbatches=20)`,
`dualpipev(stages=4, microbatches=10)`.

Chimera runs two pipelines through the same ranks in opposite directions. Rank r holds stage r of
the down direction and stage (stages - 1 - r) of the up direction. The first half of the
micro-batches uses the down direction, and the second half uses the up direction.

Micro-batches run in units of `stages` micro-batches, half of them in each direction. Let a forward
and a backward each take one slot of time. In the first unit, stage s of a direction runs the
forward of that direction's i-th micro-batch (from 0) in slot s + 2i, and the backward in slot
2 * stages - 1 - s + 2i. The slots of the two directions never collide on a rank. Each further unit
repeats the pattern 2 * stages slots later and fills the gaps of the previous unit. The paper calls
this repetition direct concatenation.

Let D be the number of stages, m the number of micro-batches, u the number of full units (of D
micro-batches each), f the time of a forward and b >= f the time of a backward. The idle time of a
rank is

    (D - 2) (b + (u - 1) (b - f))

If b = f, this is D - 2 slots for any u, and the idle share is the paper's (D - 2) / (2m + D - 2).
If b = 2f, the idle share of a single unit (m = D) is the paper's (D - 2) / (1.5m + D - 2). Each
further unit then adds idle time: use m = D, or another schedule. A last unit of n < D micro-batches
adds D - n slots of idle time. A rank keeps the activations of between D/2 + 1 (outer ranks) and D
micro-batches, and the weights of two stages. Source: Li and Hoefler 2021, arXiv 2107.06925,
section 3.

DualPipe and DualPipeV run forwards together with backwards. Every rank holds two chunks. DualPipe:
rank r holds stage r for one direction and stage (stages - 1 - r) for the other direction, so all
weights are stored twice. DualPipeV: all micro-batches run in one direction through a V of twice as
many stages, down on the first chunks and up on the second chunks, so each weight is stored once. In
both schedules a rank runs eight phases. `near` is the chunk of a rank whose stage has the lower
number, so it is nearer to the model's input, and `far` is the other chunk. A pair is a forward and
a backward that run together:

1. forwards of near
2. a forward of near, then a forward of far, repeatedly
3. the input gradient, then the weight gradient, then a forward, all of far, repeatedly
4. two pairs, repeatedly: forward of near with backward of far, forward of far with backward of near
5. a backward of far, then one pair, repeatedly: forward of far with backward of near
6. a backward of far, then a backward of near, repeatedly; in the second half of this phase
   backwards are split, and their weight gradients run later
7. a pending weight gradient, then a split backward of near, repeatedly
8. the remaining weight gradients

Let P be the number of model stages, F&B the time of a pair, B the time of a full backward and W the
time of a weight gradient. The largest idle time of a rank is (P/2 - 1) (F&B + B - 3W). This is
exact if a forward takes as long as an input gradient, and a weight gradient takes no longer. Every
rank keeps at most P + 1 activations, each of one micro-batch on one stage. In DualPipeV, P is
twice the number of ranks, so a stage has half of a rank's layers. Source: DeepSeek-AI 2024, arXiv
2412.19437, section 3.2.1. The actions of both schedules have the same order as in
github.com/deepseek-ai/DualPipe. DualPipeV is the schedule that Sea AI Lab calls "cut-in-half".
"""

from __future__ import annotations

from collections import deque

from threed.core.messages import counted
from threed.schedules.action import Action, Kind, together
from threed.schedules.plan import Plan, SizesError


def chimera(stages: int, microbatches: int) -> Plan:
    """Returns the plan of Chimera: the actions of both directions, in the order of their slots.

    If the last unit has fewer than `stages` micro-batches, some slots are idle (see the module's
    docstring).

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.

    Raises:
        SizesError: the number of stages or micro-batches is odd.
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
    """Returns the placement of a bidirectional plan: rank r holds stages r and stages - 1 - r.

    Args:
        name: name of the schedule, for error messages.
        stages: number of pipeline ranks.
        microbatches: number of micro-batches.
        least: minimum number of micro-batches.

    Raises:
        SizesError: an odd number of stages or micro-batches, or fewer micro-batches than `least`.
    """
    both = "it runs in both directions, so their number must be even"
    if stages % 2:
        raise SizesError(f"schedule {name}: {counted(stages, 'stage')}; {both}", stages=stages + 1)
    check_enough(name, stages, microbatches, least)
    if microbatches % 2:
        problem = f"schedule {name}: {counted(microbatches, 'micro-batch')}; {both}"
        raise SizesError(problem, microbatches=microbatches + 1)
    return tuple((rank, stages - 1 - rank) for rank in range(stages))


def check_enough(name: str, stages: int, microbatches: int, least: int) -> None:
    """Raises SizesError if there are fewer micro-batches than `least`."""
    if microbatches < least:
        needs = "1 stage needs" if stages == 1 else f"{stages} stages need"
        problem = f"{counted(microbatches, 'micro-batch')}; {needs} at least {least}"
        raise SizesError(f"schedule {name}: {problem}", microbatches=least)


def _slots(way: int, rank: int, stages: int, microbatches: int) -> list[tuple[int, Action]]:
    stage, half = (stages - 1 - rank if way else rank), microbatches // 2
    slots = []
    for number in range(half):
        unit, within = divmod(number, stages // 2)
        slot, microbatch = 2 * (stages * unit + within), way * half + number
        slots.append((slot + stage, Action(Kind.F, microbatch, way)))
        slots.append((slot + 2 * stages - 1 - stage, Action(Kind.B, microbatch, way)))
    return slots


# -------------------- DualPipe


def dualpipe(stages: int, microbatches: int) -> Plan:
    """Returns the plan of DualPipe. Each direction has half of the micro-batches.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.

    Raises:
        SizesError: the number of stages or micro-batches is odd, or there are fewer than 2 * stages
            micro-batches.
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
    """Returns the plan of DualPipeV. Micro-batches run through a V of 2 * stages model stages.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.

    Raises:
        SizesError: there are fewer than 2 * stages micro-batches.
    """
    check_enough("dualpipev", stages, microbatches, 2 * stages)
    placement = tuple((rank, 2 * stages - 1 - rank) for rank in range(stages))
    ranks = tuple(_Rank(rank, stages, microbatches, 0, (0, 0)).actions() for rank in range(stages))
    return Plan("dualpipev", stages, microbatches, 2, ranks, placement)


class _Rank:
    """Builds the list of actions of one rank in DualPipe or DualPipeV.

    On each rank, near is the chunk whose stage has the lower number, and far is the other chunk. So
    a micro-batch first runs on near chunks, and then on far chunks.

    Args:
        depth: number of ranks that a micro-batch passes before it reaches the near chunk of this
            rank.
        ranks: number of near chunks that a micro-batch passes: half the number of ranks in
            DualPipe, the number of ranks in DualPipeV.
        count: number of micro-batches that run on each chunk.
        near: index of the near chunk, 0 or 1.
        first: for each of the two chunks, the index of the first micro-batch that runs on it.
    """

    def __init__(
        self, depth: int, ranks: int, count: int, near: int, first: tuple[int, int]
    ) -> None:
        self.depth, self.ranks, self.count = depth, ranks, count
        self.near, self.far = near, 1 - near
        self._next = {kind: list(first) for kind in (Kind.F, Kind.B)}
        self._owed: deque[Action] = deque()  # pending weight gradients of split backwards
        self._done: list[Action] = []

    def actions(self) -> tuple[Action, ...]:
        """Returns the actions of all phases, in order."""
        self._fill()
        self._steady()
        self._drain()
        return tuple(self._done)

    def _fill(self) -> None:
        """Appends the actions of phases 1 to 3 (see the module's docstring)."""
        ahead = self.ranks - self.depth - 1
        for _ in range(2 * ahead):
            self._run(self._forward(self.near))
        for _ in range(self.depth + 1):
            self._run(self._forward(self.near), self._forward(self.far))
        for _ in range(ahead):
            self._split_backward(self.far)
            self._run(self._owed.popleft(), self._forward(self.far))

    def _steady(self) -> None:
        """Appends the actions of phases 4 and 5.

        On the last rank whose near chunk a micro-batch passes, the first forward of near and the
        first backward of far run in sequence, not as a pair, so that the result of the forward is
        ready earlier.
        """
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
        """Appends the actions of phases 6 to 8."""
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
