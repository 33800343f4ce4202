"""What a few steps gave, and where it differs from what the same steps gave on one process, element by element.

    truth = results_of(engine, metrics)                       # on one process
    found = differences(engine, metrics, truth, tolerance)    # on every rank of another topology

Every rank compares the boxes that it holds itself: nothing is collected, and a copy that drifts is seen on its rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from threed import collectives
from threed.checkpoint import native
from threed.engine import Engine, StepMetrics
from threed.sharding import slices
from threed.zero.records import PREVIOUS, WEIGHT, Record, read, records
from threed.zero.setup import state_names

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and size
KEPT = 2**16  # elements of a tensor that differs which a finding brings along


@dataclass
class Results:
    """What a few steps gave: losses, gradient norms, every weight, moment and persistent buffer by global name (on rank
    0). Under 2bw and delayed updates the moments include the parameters of the update before."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Weights and moments, by part."""
        return {WEIGHT: self.weights, **self.moments}


@dataclass(frozen=True, eq=False)
class Finding:
    """Something that differs. kind: loss, norm, cut (who holds what), buffer, or a part of the state: weight ...

    parameter: its global name, and the box of it. largest: the largest difference. values: this rank's, if not too
    many.
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
    """What an engine holds after these steps; ends the last one (`Engine.finish`). Collective."""
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
    """Where this rank's part of the results differs from the truth; ends the last step (`Engine.finish`). Collective.

    Losses and norms may differ by `tolerance` relative to the truth's, the rest by so much absolutely. Buffers are
    compared if the truth has some: their values may depend on how a batch is divided; so are the parameters of the
    update before. Raises ValueError where the optimizers keep other moments.
    """
    engine.finish()
    losses = scalars("loss", [m.loss for m in metrics], truth.losses, tolerance)
    norms = scalars("norm", [m.grad_norm for m in metrics], truth.norms, tolerance)
    names = state_names(engine.config.optim)
    if set(truth.moments) - {PREVIOUS} != set(names):
        raise ValueError(f"{list(names)} cannot be compared with {list(truth.moments)}")
    found = [*losses, *norms, *bad_cuts(engine, truth.weights)]
    found += unequal(engine, truth.parts, tolerance)
    return [*found, *unequal_buffers(engine, truth.buffers, tolerance)]


def scalars(
    kind: str, got: Sequence[float], want: Sequence[float], tolerance: float
) -> Iterator[Finding]:
    """The steps in which a number differs."""
    for step, (mine, right) in enumerate(zip(got, want, strict=True), start=1):
        if not abs(mine - right) <= tolerance * abs(right):
            what = f"{mine:.12g} in step {step}, {right:.12g} on one process"
            yield Finding(kind, what, abs(mine - right))


def unequal(
    engine: Engine, truth: Mapping[str, Mapping[str, Tensor]], tolerance: float
) -> Iterator[Finding]:
    """The boxes of weights and moments that this rank holds and that differ; `truth`: by part and global name."""
    for record, values in read(engine.optimizer, records(engine.optimizer)):
        if record.part == PREVIOUS and PREVIOUS not in truth:
            continue
        whole = truth.get(record.part, {}).get(record.piece.name)
        if whole is None or tuple(whole.shape) != record.piece.shape:
            yield _finding(record, values, "one process has no such tensor of this shape", math.nan)
            continue
        gap = farthest(values, whole[slices(record.piece.start, record.piece.size)])
        if not gap <= tolerance:
            yield _finding(record, values, "differs", gap)


def unequal_buffers(
    engine: Engine, truth: Mapping[str, Tensor], tolerance: float
) -> Iterator[Finding]:
    """This rank's persistent buffers that differ."""
    for name, place in engine.buffers.persistent().items() if truth else ():
        got, want = place.value, truth.get(name)
        if got is None or want is None or got.shape != want.shape:
            if got is not None or want is not None:
                what = "one process has no such buffer of this shape"
                yield Finding("buffer", what, parameter=name)
            continue
        values = got.detach().cpu().clone()
        same = agree(values, want)  # masks are infinite
        gap = farthest(values.masked_fill(same, 0), want.masked_fill(same, 0))
        if not gap <= tolerance:
            yield Finding("buffer", "differs", gap, name, values=values)


def agree(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one shape are the same, NaN too."""
    return (a == b) | (a.isnan() & b.isnan())


def farthest(got: Tensor, want: Tensor) -> float:
    """The largest difference of two tensors of one shape."""
    got = got.cpu()
    if want.dtype is torch.bool:
        return float((got ^ want).any())
    return float((got - want).abs().max()) if want.numel() else 0.0


def _finding(record: Record, values: Tensor, what: str, gap: float) -> Finding:
    box = (record.piece.start, record.piece.size)
    kept = values.detach().cpu().clone() if values.numel() <= KEPT else None
    return Finding(record.part, what, gap, record.piece.name, box, kept)


def bad_cuts(engine: Engine, weights: Mapping[str, Tensor]) -> Iterator[Finding]:
    """On rank 0: tensors of which elements are nobody's, or more than one rank's. Collective."""
    everyone, mine = engine.topology.axis("world"), records(engine.optimizer, (WEIGHT,))
    boxes = [[r.piece.name, r.piece.shape, r.piece.start, r.piece.size] for r in mine if r.owned]
    held: dict[str, Tensor] = {}
    every = [box for some in collectives.exchange(boxes, everyone) for box in some]
    if everyone.index > 0:
        return
    for name, shape, start, size in every:
        held.setdefault(name, torch.zeros(shape, dtype=torch.int16))[slices(start, size)] += 1
    for name in weights.keys() | held.keys():
        count = held.get(name)
        if count is None:
            yield Finding("cut", "no rank holds it", parameter=name)
        elif (most := int(count.max())) > 1:
            what = f"{most} ranks hold the same elements, and not as copies"
            yield Finding("cut", what, parameter=name)
        elif missing := int((count == 0).sum()):
            yield Finding("cut", f"{missing} of its elements are no rank's", parameter=name)
