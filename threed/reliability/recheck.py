"""A step that was skipped is computed a second time: is it the data, or a machine?

    recheck = Recheck(engine, note)
    metrics = recheck.step(batch)          as `Engine.step`; of a bad step the second result, and a line about it

A skipped step leaves weights and moments as they were, so the same batch can go through them again. Computed alike
twice, it is the data (or the weights): the line names the samples. Computed differently, some rank erred in one of the
two: the line names it, and training goes on with the second result. The idea is that of Megatron-Core's rerun state
machine (`megatron/core/rerun_state_machine.py`: a result that is suspect is computed again in place, and a transient
error told from what is reproducible).

What a rank computes is compared by hashes of what it hands on: activations to the next stage, losses, gradients before
they are summed. One rank's error spreads: forward to later stages, backward to earlier ones, at once to its tensor
ranks, but not to other data ranks before gradients are summed. So blame is for the first that differs on that way;
tensor ranks are named together.

Two computations are equal only if every operation is deterministic, which the attention backward of GPUs is not by
default. So all steps run under `torch.use_deterministic_algorithms`: torch uses deterministic kernels (no cuDNN
attention), and an operation without one raises NondeterministicError. torch cannot check custom kernels, for example
with atomics; these must be deterministic themselves.

Phases of a step: remember · step, recorded · not bad: done · go back, step again · compare, say.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.batches import Batch
from threed.collectives import Pending
from threed.engine import Engine, StepMetrics
from threed.layers import MicroBatch
from threed.pipeline.transport import Transport
from threed.schedules import Plan
from threed.zero.gradients import Gradients
from threed.zero.layout import Bucket
from threed.zero.replicas import FACTOR, fingerprint

Place = Mapping[str, int]  # a rank's coordinates


class NondeterministicError(RuntimeError):
    """Raised for an operation without a deterministic kernel: two computations of a step could not be compared."""


def configure_cublas() -> None:
    """Makes cuBLAS deterministic, unless CUBLAS_WORKSPACE_CONFIG is set. Call it before the process's first matrix
    product on a GPU; later it has no effect."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes torch use deterministic kernels only, inside the block. Raises NondeterministicError for an operation
    without one."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it would cost a write of every buffer
    try:
        yield
    except RuntimeError as error:
        if "use_deterministic_algorithms" not in str(error):
            raise
        what = "--run.recheck-bad-steps compares two computations of a step, and one operation is not deterministic"
        raise NondeterministicError(
            f"{what}: {error} Leave --run.recheck-bad-steps off for this model."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill


Run = Callable[[Plan, Sequence[MicroBatch]], list[Tensor]]


@dataclass
class Record:
    """What a rank computed in a step: hashes of activations and of gradients, losses by micro-batch, and these."""

    device: torch.device
    micros: Sequence[MicroBatch] = ()
    losses: list[Tensor] = field(default_factory=list)
    forward: Tensor = field(init=False)
    backward: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.forward, self.backward = torch.zeros(2, dtype=torch.int64, device=self.device).unbind()

    def add(self, which: str, values: Tensor) -> None:
        """Adds values to a hash."""
        setattr(self, which, getattr(self, which) * FACTOR + fingerprint(values))

    def numbers(self) -> list[int]:
        """The hashes, on the host: of what came out of forwards, and of gradients."""
        for loss in self.losses:
            self.add("forward", loss)
        return [int(self.forward), int(self.backward)]

    def bad_samples(self) -> list[int]:
        """The samples of micro-batches whose loss is not finite, where this rank has losses."""
        if len(self.losses) != len(
            self.micros
        ):  # of two ways through the pipeline each has its own
            return []
        bad = [
            micro
            for micro, loss in zip(self.micros, self.losses, strict=True)
            if not bool(loss.isfinite().all())
        ]
        return [
            number
            for micro in bad
            if micro.samples is not None
            for number in micro.samples.tolist()
        ]


class _Sending:
    """A transport that records what goes to a later stage."""

    def __init__(self, transport: Transport, recheck: Recheck) -> None:
        self.inner, self.recheck, self.posts_ahead = transport, recheck, transport.posts_ahead

    def send(self, tensors: Sequence[Tensor], source: int, target: int) -> list[Pending]:
        for tensor in tensors if target > source else ():
            self.recheck.record.add("forward", tensor)
        return self.inner.send(tensors, source, target)

    def receive(self, outs: Sequence[Tensor], source: int, target: int) -> list[Pending]:
        return self.inner.receive(outs, source, target)


class _Windows:
    """The memory of gradients, which records the windows that are reduced."""

    def __init__(self, memory: Gradients, recheck: Recheck) -> None:
        self.inner, self.recheck = memory, recheck

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def take_window(self, bucket: Bucket) -> Tensor:
        """See `Gradients`."""
        window = self.inner.take_window(bucket)
        self.recheck.record.add("backward", window)
        return window


class Recheck:
    """Makes an engine's steps, and bad ones twice. note: takes a line for people. The host waits for every step."""

    def __init__(self, engine: Engine, note: Callable[[str], None]) -> None:
        self.engine, self.note = engine, note
        self.record = Record(engine.topology.device)
        executor, reducer, inner = engine.executor, engine.reducer, engine.executor.run
        executor.transport = _Sending(executor.transport, self)
        reducer.memory = _Windows(reducer.memory, self)
        executor.run = self._running(inner)  # type: ignore[method-assign, assignment]
        plan = engine.blueprint.plan
        self._in_turn = plan.chunks == 1 and not plan.placement  # rank s has stage s alone
        grid = engine.topology.grid
        self._places = [grid.coordinates(rank) for rank in range(engine.topology.world)]

    def _running(self, inner: Run) -> Run:
        def run(plan: Plan, micros: Sequence[MicroBatch]) -> list[Tensor]:
            losses = inner(plan, micros)
            self.record.micros, self.record.losses = micros, [loss.detach() for loss in losses]
            return losses

        return run

    def step(self, batch: Batch) -> StepMetrics:
        """One optimizer step, computed twice if it is bad. Collective."""
        back, before = self._remember(), self.engine.bad_steps()
        metrics, record, row = self._recorded(batch)
        if row <= before:
            return metrics
        back()
        again, second, row = self._recorded(batch)
        self._tell(metrics, record, second, skipped=row > before)
        return again

    def _recorded(self, batch: Batch) -> tuple[StepMetrics, Record, int]:
        self.record = Record(self.engine.topology.device)
        with deterministic():
            metrics = self.engine.step(batch)
        record, row = self.record, self.engine.bad_steps()
        return metrics, record, row

    def _remember(self) -> Callable[[], None]:
        """Returns what brings the engine back to before a step that is then skipped."""
        engine, optimizer = self.engine, self.engine.optimizer
        rewind, steps, consumed = engine.extras.rewinding(), engine.steps, engine.consumed
        bad = optimizer.bad
        counters = [bad.skips, bad.in_a_row, bad.mean, bad.norms, *optimizer.scaler.tensors]
        values = [counter.clone() for counter in counters]

        def back() -> None:
            rewind()
            engine.steps, engine.consumed = steps, consumed
            for counter, value in zip(counters, values, strict=True):
                counter.copy_(value)

        return back

    def _tell(self, first: StepMetrics, one: Record, two: Record, skipped: bool) -> None:
        """Compares what all ranks computed, and says what follows. Collective."""
        differs = [a != b for a, b in zip(one.numbers(), two.numbers(), strict=True)]
        mine = [differs, two.bad_samples(), socket.gethostname()]
        everyone = collectives.exchange(mine, self.engine.topology.axis("world"))
        ranks = culprits([found for found, *_ in everyone], self._places, self._in_turn)
        head = f"step {first.step} was computed twice"
        end = (
            "the second result is not finite, or a spike, too, and was skipped"
            if skipped
            else "the second one was used"
        )
        if ranks:
            named = ", ".join(f"{rank} ({everyone[rank][2]})" for rank in ranks)
            erred = f"rank {named} erred" if len(ranks) == 1 else f"one of the ranks {named} erred"
            self.note(f"{head}, with different results: {erred}; {end}")
        elif not skipped:
            self.note(
                f"{head}, alike on every rank before sums over ranks and not after: the network erred; {end}"
            )
        else:
            bad = sorted({number for _, samples, _ in everyone for number in samples})
            self.note(f"{head}, alike: {self._what(bad)}")

    def _what(self, bad: Sequence[int]) -> str:
        size, last = self.engine.config.train.global_batch, self.engine.consumed - 1
        if len(bad) == size:
            return f"no machine erred, the weights are bad, or all data (samples {last - size + 1} to {last})"
        if bad:
            return f"no machine erred, the data are bad (samples {', '.join(map(str, bad))})"
        return f"no machine erred, the data are bad (among samples {last - size + 1} to {last}), or the weights"


def culprits(
    differs: Sequence[Sequence[bool]], places: Sequence[Place], in_turn: bool
) -> list[int]:
    """Returns the ranks one of which erred.

    differs: of each rank, whether what came out of its forwards differs, and its gradients. in_turn: whether pipeline
    rank s has stage s alone; else all ranks of a data rank whose results differ are named.
    """
    found: list[int] = []
    for data in sorted({place["dp"] for place in places}):
        ranks = [
            rank for rank, place in enumerate(places) if place["dp"] == data and any(differs[rank])
        ]
        forward = [rank for rank in ranks if differs[rank][0]]
        if in_turn and ranks:
            blamed = (
                min(places[r]["pp"] for r in forward)
                if forward
                else max(places[r]["pp"] for r in ranks)
            )
            ranks = [rank for rank in forward or ranks if places[rank]["pp"] == blamed]
        found += ranks
    return found
