"""Compares the results of training steps with the results of the same steps on one process, element
by element.

    truth = results_of(engine, metrics)                       # on one process
    found = differences(engine, metrics, truth, tolerance)    # on every rank of another topology

Every rank compares its own shards, without gathering. So if one replica differs from the others,
the rank that has this replica finds the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from threed.checkpoint import native
from threed.distributed import collectives
from threed.distributed.sharding import slices
from threed.engine import Engine, StepMetrics
from threed.zero.setup import state_names
from threed.zero.state import PREVIOUS, WEIGHT, Record, read_records, records

# A box (block) of a tensor: (start per dimension, size per dimension).
Box = tuple[tuple[int, ...], tuple[int, ...]]
# The maximum number of elements in `Finding.values`.
KEPT = 2**16


@dataclass
class Results:
    """Results of some training steps, with full tensors on rank 0 only.

    Attributes:
        losses: loss per step.
        norms: gradient norm per step.
        weights: weights by global name.
        moments: for each optimizer state, its tensors by global name of the parameter. With 2BW or
            delayed updates, there is an additional state: the parameters before the last update.
        buffers: persistent buffers by global name.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by part and global name. A part is the weight, or one of the optimizer states."""
        return {WEIGHT: self.weights, **self.moments}


@dataclass(frozen=True, eq=False)
class Finding:
    """A difference from the results of one process.

    Attributes:
        kind: kind of the value that differs: "loss", "norm" or "buffer"; for a weight or an
            optimizer state, its key in `Results.parts`. "shards" means that some elements of a
            parameter belong to no rank, or to several ranks.
        what: description of the difference.
        largest: largest absolute difference of an element, or NaN.
        parameter: global name of the parameter or buffer, or "".
        box: start and size of this rank's shard in the full parameter.
        values: values of the shard on this rank; None if there are more than `KEPT` values.
    """

    kind: str
    what: str
    largest: float = math.nan
    parameter: str = ""
    box: Box = ((), ())
    values: Tensor | None = None

    def __str__(self) -> str:
        where = f" of {self.parameter} {list(self.box[0])}" if self.parameter else ""
        size = "" if math.isnan(self.largest) else f", by up to {self.largest:.3g}"
        return f"{self.kind}{where}: {self.what}{size}"


def results_of(engine: Engine, metrics: Sequence[StepMetrics]) -> Results:
    """Finishes the last step, and collects the results of all ranks. Collective.

    Args:
        engine: engine after the steps.
        metrics: metrics of all steps.

    Returns:
        The losses, gradient norms and full states; states are empty except on rank 0.
    """
    engine.finish()
    parts = [*state_names(engine.config.optim), *([PREVIOUS] if engine.optimizer.earlier else [])]
    moments = {part: native.collect(engine.optimizer, engine.topology, part) for part in parts}
    state, names = engine.full_state_dict(), engine.buffers.shapes()
    buffers = {name: state.pop(name) for name in names if name in state}
    losses, norms = [m.loss for m in metrics], [m.grad_norm for m in metrics]
    return Results(losses, norms, state, moments, buffers)


def differences(
    engine: Engine, metrics: Sequence[StepMetrics], truth: Results, tolerance: float
) -> list[Finding]:
    """Finishes the last step, and compares this rank's results with one process. Collective.

    Args:
        engine: engine after the steps.
        metrics: metrics of all steps.
        truth: results of one process. Buffers, and the parameters before the last update, are
            compared only if `truth` has them. The caller must remove from `truth` all
            buffers whose values depend on how a batch is divided over ranks and micro-batches.
        tolerance: largest difference; relative for losses and norms, absolute for all others.

    Returns:
        A finding per value that differs by more than the tolerance.

    Raises:
        ValueError: if the optimizers have different states.
    """
    engine.finish()
    losses = scalars("loss", [m.loss for m in metrics], truth.losses, tolerance)
    norms = scalars("norm", [m.grad_norm for m in metrics], truth.norms, tolerance)
    names = state_names(engine.config.optim)
    if set(truth.moments) - {PREVIOUS} != set(names):
        raise ValueError(f"{list(names)} cannot be compared with {list(truth.moments)}")
    found = [*losses, *norms, *ownership_problems(engine, truth.weights)]
    found += unequal(engine, truth.parts, tolerance)
    return [*found, *unequal_buffers(engine, truth.buffers, tolerance)]


def scalars(
    kind: str, got: Sequence[float], want: Sequence[float], tolerance: float
) -> Iterator[Finding]:
    """Yields a finding for each step in which a scalar differs by more than a relative tolerance.

    Args:
        kind: kind of the findings, "loss" or "norm".
        got: the scalar per step.
        want: the scalar per step in one process.
        tolerance: largest difference relative to `want`.
    """
    for step, (value, right) in enumerate(zip(got, want, strict=True), start=1):
        if not abs(value - right) <= tolerance * abs(right):
            what = f"{value:.12g} in step {step}, {right:.12g} on one process"
            yield Finding(kind, what, abs(value - right))


def unequal(
    engine: Engine, truth: Mapping[str, Mapping[str, Tensor]], tolerance: float
) -> Iterator[Finding]:
    """Yields a finding for each of this rank's shards of weights and moments that differs.

    The shards are compared with the full tensors in `truth`.
    """
    for record, values in read_records(engine.optimizer, records(engine.optimizer)):
        if record.part == PREVIOUS and PREVIOUS not in truth:
            continue
        full = truth.get(record.part, {}).get(record.piece.name)
        if full is None or tuple(full.shape) != record.piece.shape:
            yield _finding(record, values, "one process has no such tensor of this shape", math.nan)
            continue
        gap = max_difference(values, full[slices(record.piece.start, record.piece.size)])
        if not gap <= tolerance:
            yield _finding(record, values, "differs", gap)


def unequal_buffers(
    engine: Engine, truth: Mapping[str, Tensor], tolerance: float
) -> Iterator[Finding]:
    """Yields a finding for each of this rank's persistent buffers that differs from `truth`."""
    for name, place in engine.buffers.persistent().items() if truth else ():
        got, want = place.value, truth.get(name)
        if got is None or want is None or got.shape != want.shape:
            if got is not None or want is not None:
                what = "one process has no such buffer of this shape"
                yield Finding("buffer", what, parameter=name)
            continue
        values = got.detach().cpu().clone()
        # Equality is tested first, because masks contain infinities: the difference of two equal
        # infinities is NaN.
        same = agree(values, want)
        gap = max_difference(values.masked_fill(same, 0), want.masked_fill(same, 0))
        if not gap <= tolerance:
            yield Finding("buffer", "differs", gap, name, values=values)


def agree(a: Tensor, b: Tensor) -> Tensor:
    """Returns a mask of the elements in which two tensors are equal. NaN equals NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def max_difference(got: Tensor, want: Tensor) -> float:
    """Returns the largest absolute difference of two tensors of equal shape."""
    got = got.cpu()
    if want.dtype is torch.bool:
        return float((got ^ want).any())
    return float((got - want).abs().max()) if want.numel() else 0.0


def _finding(record: Record, values: Tensor, what: str, gap: float) -> Finding:
    box = (record.piece.start, record.piece.size)
    kept = values.detach().cpu().clone() if values.numel() <= KEPT else None
    return Finding(record.part, what, gap, record.piece.name, box, kept)


def ownership_problems(engine: Engine, weights: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Checks that exactly one rank owns each element of each weight. Collective.

    Yields a finding per weight that fails, on rank 0 only.
    """
    everyone, own = engine.topology.axis("world"), records(engine.optimizer, (WEIGHT,))
    boxes = [[r.piece.name, r.piece.shape, r.piece.start, r.piece.size] for r in own if r.owned]
    owners: dict[str, Tensor] = {}  # for each weight, the number of ranks that own each element
    every = [box for some in collectives.exchange(boxes, everyone) for box in some]
    if everyone.index > 0:
        return
    for name, shape, start, size in every:
        owners.setdefault(name, torch.zeros(shape, dtype=torch.int16))[slices(start, size)] += 1
    for name in weights.keys() | owners.keys():
        count = owners.get(name)
        if count is None:
            yield Finding("shards", "no rank holds it", parameter=name)
        elif (most := int(count.max())) > 1:
            what = f"{most} ranks hold the same elements, but not as replicas"
            yield Finding("shards", what, parameter=name)
        elif missing := int((count == 0).sum()):
            yield Finding(
                "shards", f"{missing} of its elements are held by no rank", parameter=name
            )
