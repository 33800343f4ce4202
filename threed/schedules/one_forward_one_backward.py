"""1F1B and interleaved 1F1B: after a warm-up every rank alternates one forward and one backward.

Use: `one_f_one_b(stages=4, microbatches=8)`, `interleaved(stages=4, microbatches=8, chunks=2)`.

1F1B: the bubble is as long as in GPipe, but stage s keeps the activations of at most (stages - s)
micro-batches instead of all. Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1
(PipeDream-Flush).

Interleaved 1F1B: every rank holds several chunks of the model, which divides the bubble by the
number of chunks. Rank r holds the stages r, r + stages, r + 2 * stages .. Micro-batches pass all
ranks once per chunk, in groups of consecutive micro-batches, called rounds: a rank runs a round on
its first chunk, then on the next chunk, and starts the next round after its last chunk.

With at least `stages` micro-batches the bubble is the time of (stages - 1) / chunks micro-batches.
With m < `stages` micro-batches it is longer by the time of (stages - m) (chunks - 1) / chunks
micro-batches. With rounds of at most g micro-batches the first rank keeps the activations of
((chunks - 1) g + 2 * stages - 1) / chunks micro-batches. Source: Narayanan et al. 2021, arXiv
2104.04473, section 2.2.2, in which a round has as many micro-batches as there are ranks.
"""

from __future__ import annotations

from itertools import chain

from threed.schedules.action import Action, Kind
from threed.schedules.plan import Plan


def one_f_one_b(stages: int, microbatches: int) -> Plan:
    """Returns the plan of 1F1B.

    Stage s runs (stages - s - 1) forwards, then alternates forwards and backwards, then runs the
    remaining backwards.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
    """
    return Plan(
        "1f1b",
        stages,
        microbatches,
        1,
        tuple(_rank(stage, stages, microbatches) for stage in range(stages)),
    )


def _rank(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(Kind.F, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(Kind.B, microbatch) for microbatch in range(microbatches)]
    warmup = min(stages - stage - 1, microbatches)
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *steady, *backwards[microbatches - warmup :])


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Plan:
    """Returns the plan of interleaved 1F1B.

    Every rank runs its warm-up forwards, then alternates forwards and backwards, then runs the
    remaining backwards. Any number of micro-batches is allowed, but with fewer micro-batches than
    stages, ranks are idle between their chunks. With one chunk this is 1F1B with a longer warm-up,
    so that every message has two slots of time to arrive.

    Args:
        stages: number of pipeline ranks.
        microbatches: number of micro-batches per step.
        chunks: number of model stages per rank.

    Raises:
        ValueError: chunks is below 1.
    """
    if chunks < 1:
        raise ValueError(f"schedule interleaved: chunks is {chunks}; it must be at least 1")
    sizes = rounds(stages, microbatches)
    forwards = _in_rounds(Kind.F, sizes, range(chunks))
    backwards = _in_rounds(Kind.B, sizes, range(chunks - 1, -1, -1))
    ranks = []
    for rank in range(stages):
        warmup = min(2 * (stages - rank - 1) + (chunks - 1) * sizes[0], len(forwards))
        steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        ranks.append((*forwards[:warmup], *steady, *backwards[len(backwards) - warmup :]))
    return Plan("interleaved", stages, microbatches, chunks, tuple(ranks))


def rounds(stages: int, microbatches: int) -> list[int]:
    """Returns the number of micro-batches of each round: at least `stages` if possible.

    A round is a group of micro-batches that a rank runs on one chunk before it runs them on the
    next chunk. There are as many rounds as possible. Their sizes are as equal as possible, since a
    smaller last round would leave ranks idle at every chunk. Larger rounds are first, since a plan
    with a smaller round before a larger one can deadlock.
    """
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def _in_rounds(kind: Kind, sizes: list[int], chunks: range) -> list[Action]:
    actions: list[Action] = []
    first = 0
    for size in sizes:
        actions += [
            Action(kind, microbatch, chunk)
            for chunk in chunks
            for microbatch in range(first, first + size)
        ]
        first += size
    return actions
