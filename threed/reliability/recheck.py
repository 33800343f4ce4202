"""Computes a skipped step a second time, to find out whether the data or a machine is faulty.

    recheck = Recheck(engine, note)
    metrics = recheck.step(batch)          # like `Engine.step`; for a bad step, the second result

A bad step (with gradients that are not finite, or a spike of their norm) is skipped: weights and
moments stay unchanged, so the same batch can run again. If the two computations agree, the data or
the weights are bad, and a note lists the samples. If they differ, a rank made an error in one of
the computations. A note then names the ranks that may have made the error, and training continues
with the second result. The idea is from Megatron-Core's rerun state machine
(`megatron/core/rerun_state_machine.py`).

For each rank, hashes of its outputs are compared between the two computations: activations for the
next stage, losses, and gradients before their reduction. An error on one rank changes the outputs
of later stages in the forward, of earlier stages in the backward, and of the other tensor ranks of
its stage at once. It does not change outputs of other data ranks, because gradients are hashed
before their reduction. So the note names the tensor ranks of one stage: of all stages that differ,
the one that comes first in the order of computation.

Two computations are equal only if every operation is deterministic. By default, the attention
backward on GPUs is not. So all steps run under `torch.use_deterministic_algorithms`: torch then
uses deterministic kernels (no cuDNN attention), and an operation without a deterministic kernel
raises NondeterministicError. torch cannot check custom kernels, which may be nondeterministic, for
example if they use atomics.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.engine import Engine, StepMetrics
from threed.layers import MicroBatch
from threed.pipeline.batches import Batch
from threed.zero.replicas import FACTOR, fingerprint

Place = Mapping[str, int]  # the coordinates of a rank: its index on each axis, by axis name


class NondeterministicError(RuntimeError):
    """Raised if an operation has no deterministic kernel.

    Without one, two computations of a step cannot be compared.
    """


def configure_cublas() -> None:
    """Makes cuBLAS deterministic, unless CUBLAS_WORKSPACE_CONFIG is set.

    Must be called before the process's first matrix product on a GPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic() -> Iterator[None]:
    """Context manager: torch uses only deterministic kernels inside the block.

    Raises:
        NondeterministicError: if an operation has no deterministic kernel.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # In deterministic mode, torch fills new buffers. This is not needed here, and would write every
    # buffer one more time.
    memory.fill_uninitialized_memory = False
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
    """Observes the executor and the gradient reducer, and hashes this rank's results in one step.

    Attributes:
        forward: hash of the activations for the next stage, and of the losses; int64 scalar.
        backward: hash of the gradients before their reduction; int64 scalar.
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
        """Returns both hashes as integers. Waits for the device."""
        return [int(self.forward), int(self.backward)]

    def bad_samples(self) -> list[int]:
        """Returns the sample numbers of the micro-batches with a loss that is not finite.

        The list is empty if this rank does not have the losses of all micro-batches, as in a
        bidirectional pipeline.
        """
        if len(self._losses) != len(self._micros):
            return []
        both = zip(self._micros, self._losses, strict=True)
        bad = [micro.samples for micro, loss in both if not bool(loss.isfinite().all())]
        return [number for samples in bad if samples is not None for number in samples.tolist()]


class Recheck:
    """Runs the steps of an engine, and a bad step twice. The host waits for every step.

    Args:
        engine: engine that runs the steps.
        note: function that prints a line.
    """

    def __init__(self, engine: Engine, note: Callable[[str], None]) -> None:
        self.engine, self.note = engine, note

    def step(self, batch: Batch) -> StepMetrics:
        """Runs one optimizer step, twice if it is bad. Collective.

        Returns:
            The metrics of the step; for a bad step, the metrics of the second computation.
        """
        engine = self.engine
        restore, before = self._remember(), engine.bad_steps()
        metrics, record = self._recorded(batch)
        # a second computation of a step for which a room was too small would be skipped, too
        if engine.lacked_room() or engine.bad_steps() <= before:
            return metrics
        restore()
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
        """Returns a function that restores the current state of the engine after a skipped step."""
        engine, optimizer = self.engine, self.engine.optimizer
        steps, consumed = engine.steps, engine.consumed
        tallies = (tally.rewinding() for tally in engine.blueprint.tallies)
        rewinds = [engine.extras.rewinding(), *tallies]
        bad = optimizer.bad
        counters = [bad.skips, bad.in_a_row, bad.mean, bad.norms, *optimizer.scaler.tensors]
        values = [counter.clone() for counter in counters]

        def restore() -> None:
            for rewind in rewinds:
                rewind()
            engine.steps, engine.consumed = steps, consumed
            for counter, value in zip(counters, values, strict=True):
                counter.copy_(value)

        return restore

    def _report(self, first: StepMetrics, one: Record, two: Record, skipped: bool) -> None:
        """Compares the two computations on all ranks and prints the conclusion. Collective."""
        differs = [a != b for a, b in zip(one.hashes(), two.hashes(), strict=True)]
        own = [differs, two.bad_samples(), socket.gethostname()]
        topology = self.engine.topology
        all_ranks = collectives.exchange(own, topology.axis("world"))
        places = [topology.grid.coordinates(rank) for rank in range(topology.world)]
        plan = self.engine.blueprint.pipeline.plan
        # Whether each pipeline rank s has stage s and no other stage.
        in_turn = plan.chunks == 1 and not plan.placement
        ranks = culprits([found for found, *_ in all_ranks], places, in_turn)
        head = f"step {first.step} was computed twice"
        end = "the second one was used"
        if skipped:
            end = "the second result is not finite or a spike, too, and was skipped"
        if ranks:
            named = ", ".join(f"{rank} ({all_ranks[rank][2]})" for rank in ranks)
            erred = f"rank {named} erred" if len(ranks) == 1 else f"one of the ranks {named} erred"
            self.note(f"{head}, with different results: {erred}; {end}")
        elif not skipped:
            where = "equal on every rank before the reductions but not after: the network erred"
            self.note(f"{head}, {where}; {end}")
        else:
            bad = sorted({number for _, samples, _ in all_ranks for number in samples})
            self.note(f"{head}, with equal results: no machine erred, {self._bad_data(bad)}")

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
    """Returns the ranks that may have made the error.

    Args:
        differs: for each rank, (whether its forward results differ, whether its gradients differ).
        places: coordinates of each rank.
        in_turn: whether each pipeline rank s has stage s and no other stage. If not, the order in
            which ranks compute is unknown, and all differing ranks are returned.
    """
    found: list[int] = []
    for data in sorted({place["dp"] for place in places}):
        ranks = [
            rank for rank, place in enumerate(places) if place["dp"] == data and any(differs[rank])
        ]
        forward = [rank for rank in ranks if differs[rank][0]]
        if in_turn and ranks:
            stage = (
                min(places[r]["pp"] for r in forward)
                if forward
                else max(places[r]["pp"] for r in ranks)
            )
            ranks = [rank for rank in forward or ranks if places[rank]["pp"] == stage]
        found += ranks
    return found
