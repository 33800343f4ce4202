"""Computes a skipped step a second time: is it the data, or a machine?

    recheck = Recheck(engine, note)
    metrics = recheck.step(batch)          # as `Engine.step`; of a bad step the second result

A skipped step leaves weights and moments unchanged, so the same batch can run again. If both
computations agree, the data (or the weights) are bad: a note lists the samples. If they differ, some
rank made an error in one of them: a note names it, and training goes on with the second result. The
idea is that of Megatron-Core's rerun state machine (`megatron/core/rerun_state_machine.py`).

The results of a rank are compared by hashes of what it passes on: activations to the next stage,
losses, gradients before they are summed. An error spreads: forward to later stages, backward to
earlier ones, at once to the tensor ranks, but to no other data rank before gradients are summed. So
the first rank on that way that differs is named; tensor ranks are named together.

Two computations are equal only if every operation is deterministic, which the attention backward of
GPUs is not by default. So all steps run under `torch.use_deterministic_algorithms`: torch uses
deterministic kernels (no cuDNN attention), and an operation without one raises
NondeterministicError. torch cannot check custom kernels, for example with atomics.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.batches import Batch
from threed.engine import Engine, StepMetrics
from threed.layers import MicroBatch
from threed.zero.replicas import FACTOR, fingerprint

Place = Mapping[str, int]  # a rank's coordinates


class NondeterministicError(RuntimeError):
    """Raised for an operation without a deterministic kernel: two computations of a step could not be compared."""


def configure_cublas() -> None:
    """Makes cuBLAS deterministic, unless CUBLAS_WORKSPACE_CONFIG is set.

    It has an effect only before the process's first matrix product on a GPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes torch use deterministic kernels only, inside the block.

    Raises:
        NondeterministicError: for an operation without one.
    """
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


class Record:
    """What a rank computes in a step: an observer of executor and reducer.

    Attributes:
        forward: hash of the activations for the next stage, and of the losses.
        backward: hash of the gradients before they are summed.
    """

    def __init__(self, device: torch.device) -> None:
        self.forward, self.backward = torch.zeros(2, dtype=torch.int64, device=device).unbind()
        self._micros: Sequence[MicroBatch] = ()
        self._losses: Sequence[Tensor] = ()

    def sent(self, activations: Sequence[Tensor]) -> None:
        for values in activations:
            self.forward = self.forward * FACTOR + fingerprint(values)

    def reduced(self, gradients: Tensor) -> None:
        self.backward = self.backward * FACTOR + fingerprint(gradients)

    def ended(self, micros: Sequence[MicroBatch], losses: Sequence[Tensor]) -> None:
        self._micros, self._losses = micros, [loss.detach() for loss in losses]
        self.sent(self._losses)

    def hashes(self) -> list[int]:
        """Returns both hashes, on the host."""
        return [int(self.forward), int(self.backward)]

    def bad_samples(self) -> list[int]:
        """Returns the samples of micro-batches whose loss is not finite, if all losses are here."""
        if len(self._losses) != len(self._micros):  # two directions through the pipeline
            return []
        both = zip(self._micros, self._losses, strict=True)
        bad = [micro.samples for micro, loss in both if not bool(loss.isfinite().all())]
        return [number for samples in bad if samples is not None for number in samples.tolist()]


class Recheck:
    """Runs an engine's steps, and bad ones twice. The host waits for every step.

    Args:
        note: prints a line.
    """

    def __init__(self, engine: Engine, note: Callable[[str], None]) -> None:
        self.engine, self.note = engine, note

    def step(self, batch: Batch) -> StepMetrics:
        """Runs one optimizer step, twice if it is bad. Collective."""
        engine = self.engine
        back, before = self._remember(), engine.bad_steps()
        metrics, record = self._recorded(batch)
        if engine.bad_steps() <= before:
            return metrics
        back()
        again, second = self._recorded(batch)
        self._report(metrics, record, second, skipped=engine.bad_steps() > before)
        return again

    def _recorded(self, batch: Batch) -> tuple[StepMetrics, Record]:
        engine, record = self.engine, Record(self.engine.topology.device)
        with (
            deterministic(),
            engine.executor.observed(record),
            engine.reducer.observed(record.reduced),
        ):
            return engine.step(batch), record

    def _remember(self) -> Callable[[], None]:
        """Returns a function that brings the engine back to the state before a skipped step."""
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

    def _report(self, first: StepMetrics, one: Record, two: Record, skipped: bool) -> None:
        """Compares the computations of all ranks, and prints the conclusion. Collective."""
        differs = [a != b for a, b in zip(one.hashes(), two.hashes(), strict=True)]
        mine = [differs, two.bad_samples(), socket.gethostname()]
        topology = self.engine.topology
        everyone = collectives.exchange(mine, topology.axis("world"))
        places = [topology.grid.coordinates(rank) for rank in range(topology.world)]
        plan = self.engine.blueprint.pipeline.plan
        in_turn = plan.chunks == 1 and not plan.placement  # pipeline rank s has stage s alone
        ranks = culprits([found for found, *_ in everyone], places, in_turn)
        head = f"step {first.step} was computed twice"
        end = "the second one was used"
        if skipped:
            end = "the second result is not finite, or a spike, too, and was skipped"
        if ranks:
            named = ", ".join(f"{rank} ({everyone[rank][2]})" for rank in ranks)
            erred = f"rank {named} erred" if len(ranks) == 1 else f"one of the ranks {named} erred"
            self.note(f"{head}, with different results: {erred}; {end}")
        elif not skipped:
            where = "alike on every rank before sums over ranks and not after: the network erred"
            self.note(f"{head}, {where}; {end}")
        else:
            bad = sorted({number for _, samples, _ in everyone for number in samples})
            self.note(f"{head}, alike: no machine erred, {self._bad_data(bad)}")

    def _bad_data(self, bad: Sequence[int]) -> str:
        size, last = self.engine.config.train.global_batch, self.engine.consumed - 1
        samples = f"samples {last - size + 1} to {last}"
        if len(bad) == size:
            return f"the weights are bad, or all data ({samples})"
        if bad:
            return f"the data are bad (samples {', '.join(map(str, bad))})"
        return f"the data are bad (among {samples}), or the weights"


def culprits(
    differs: Sequence[Sequence[bool]], places: Sequence[Place], in_turn: bool
) -> list[int]:
    """Returns the ranks one of which made the error.

    Args:
        differs: per rank, whether its forward results differ, and whether its gradients do.
        places: per rank, its coordinates.
        in_turn: whether pipeline rank s has stage s alone; if not, all ranks that differ are named.
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
