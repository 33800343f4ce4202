"""Explains differences: the first layer and parameter that differ, and a likely cause.

A difference begins in the forward at the first layer whose output differs, and in the backward at
the last layer whose input gradient differs. Only losses, norms, weights and moments decide whether
the results differ: values between layers may legitimately differ, such as a partial sum that the
next layer reduces.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from threed.distributed.sharding import slices
from threed.layers import Slicing
from threed.testing.compare import KEPT, Finding, Results, max_difference
from threed.testing.ranks import RanksFailed
from threed.testing.watch import INPUT_GRADIENT, OUTPUT, Key
from threed.zero.state import WEIGHT

# The maximum number of parameters or buffers that are reported for one kind of difference.
MOST = 8
# The layers of a model: for each layer, its name and the names of its parameters.
Layers = Sequence[tuple[str, list[str]]]
# A difference: (layer or None, parameter or None, description, largest absolute difference or NaN).
About = tuple[str | None, str | None, str, float]
# Boundary -> rank -> difference. A boundary is the output or the input gradient of a layer, see
# `watch.Key`.
Between = Mapping[Key, Mapping[int, Finding]]

_MISSING = "is a partial sum on every tensor rank, because an all-reduce is missing: "
_SEQUENCES = "with sequence parallelism"
_NO_SUM = f"{_MISSING}end the sharded part with layers.reduce_from (or scatter_to, {_SEQUENCES})"
_NO_COPY = f"{_MISSING}begin the sharded part with layers.copy_to (or gather_from, {_SEQUENCES})"
_MARK = f"partial=slicing.partial ({_SEQUENCES}), or partial='tp' if each rank sees a part"
_PARTIAL = f"{_MISSING}give its record {_MARK}"
_TOO_MANY = (
    ": it is summed over ranks that each have the full value (an extra partial mark or all-reduce)"
)
_RANK_DEPENDENT = ", and differs between tensor ranks: it is computed from sharded values"
_OWNERSHIP = (
    ": mark replicas with replicated=slicing.replicated, shard others over the Slicing's tp axis, and make the pieces'"
    " start and size cover the full tensor"
)
_TWICE = (
    "differs: its forward runs twice, and changes its input in place, or some state that it reads"
)
_SHARD = "differs from one process: a wrong shard, or a missing or extra all-reduce"
_MISMATCH = "ranks send messages of other sizes than their peers expect"
_NOT_ALL = ": a collective that only some of them call, or a shape that depends on the rank"
_RANDOM = (
    "two trainings of one process differ: it uses torch's global random numbers, or state that the first training leaves"
    " behind; use layers.Dropout, which has the same mask in every topology"
)


@dataclass
class Seen:
    """The differences that a rank found.

    Attributes:
        first: differences after the first step.
        between: (boundary, difference) for the values that layers passed to each other in the first
            step.
        last: differences after the last step.
    """

    first: list[Finding] = field(default_factory=list)
    between: list[tuple[Key, Finding]] = field(default_factory=list)
    last: list[Finding] = field(default_factory=list)


def boundaries(
    seen: Mapping[Key, Tensor], truth: Mapping[Key, Tensor], slicing: Slicing, tolerance: float
) -> Iterator[tuple[Key, Finding]]:
    """Compares the values at this rank's boundaries in the first step with those in one process.

    Yields each boundary at which the values differ, with the difference.

    Args:
        seen: values on this rank, by boundary.
        truth: values in the single process, by boundary.
        slicing: parallel layout; values may be split over its ranks along the sequence.
        tolerance: largest difference relative to the largest value.
    """
    for key, got in seen.items():
        want = truth.get(key)
        if want is None:
            continue
        if want.dim() == 0 and slicing.context.size > 1:
            continue  # a loss: each context rank has the sum over its own positions
        if (
            want.dim()
            and want.shape != got.shape
            and len(want) == len(got) * slicing.sequence_parts
        ):
            want = slicing.positions(len(want)).rows(want)
        if want.shape == got.shape:
            gap = max_difference(got, want)
            if not gap <= tolerance * largest(want) + 1e-15:  # true also if `gap` is NaN
                values = got if got.numel() <= KEPT else None
                yield key, Finding(key[0], "differs", gap, values=values)


def largest(values: Tensor) -> float:
    """Returns the largest absolute value in a tensor; 0 for an empty tensor."""
    return float(values.abs().max()) if values.numel() else 0.0


class Explainer:
    """Explains how the results in one topology differ from the results of one process.

    Args:
        truth: results of one process.
        tensor: number of tensor ranks of the topology.
        words: words of the topology's name, such as "tp2" and "recompute".
    """

    def __init__(self, truth: Mapping[str, Any], tensor: int, words: Iterable[str]) -> None:
        self.truth, self.tensor, self.recompute = truth, tensor, "recompute" in set(words)
        self.layers: Layers = truth["layers"]
        self._layer_of: dict[str, int] = {}  # parameter -> number of the first layer that has it
        for number, (_, names) in enumerate(self.layers):
            for name in names:
                self._layer_of.setdefault(name, number)

    def explain(self, ranks: Sequence[Seen]) -> Iterator[About]:
        """Yields the differences, likely origins first.

        Args:
            ranks: differences that each rank found.
        """
        early = any(seen.first for seen in ranks)
        of_ranks = [seen.first if early else seen.last for seen in ranks]
        every = [(rank, f) for rank, found in enumerate(of_ranks) for f in found]
        shards, buffers = _by_parameter(every, "shards"), _by_parameter(every, "buffer")
        for name in sorted(shards, key=lambda name: self._layer_of.get(name, -1))[:MOST]:
            yield self._of(name, f"{shards[name][0].what}{_OWNERSHIP}", math.nan)
        found = [(rank, f) for rank, f in every if f.kind not in ("shards", "buffer")]
        losses = [f for _, f in found if f.kind == "loss"]
        if losses and early:
            yield self._forward(ranks, losses[0], [f.parameter for _, f in every])
        elif any(f.parameter for _, f in found):
            yield from self._backward(ranks if early else (), found, early)
        elif found and not shards:
            yield None, None, f"the {found[0][1]}; weights agree", found[0][1].largest
        for name, copies in [*buffers.items()][:MOST]:
            values = [f.values for f in copies if f.values is not None]
            equal = all(torch.equal(values[0], other) for other in values)
            what = "" if equal and len(values) % self.tensor == 0 else _RANK_DEPENDENT
            size = max(f.largest for f in copies)
            yield self._of(name, f"its buffer {copies[0].what}{what}", size)

    def _of(self, parameter: str, what: str, size: float) -> About:
        number = self._layer_of.get(parameter)
        return (None if number is None else self.layers[number][0]), parameter or None, what, size

    # -------------------------------------------------------------------------------- the origin

    def _forward(self, ranks: Sequence[Seen], loss: Finding, parameters: Sequence[str]) -> About:
        between = _between(ranks, OUTPUT)
        if not between:
            what = f"the loss differs ({loss.what}), though every layer's output agrees"
            return None, None, what, loss.largest
        number = min(key[1] for key in between)
        residual = (OUTPUT, number - 1)
        return self._boundary(between, number, parameters, "its output", _NO_SUM, residual)

    def _backward(
        self, ranks: Sequence[Seen], found: Sequence[tuple[int, Finding]], early: bool
    ) -> Iterator[About]:
        """Yields the differences that the backward shows.

        The backward begins to differ at its origin: the last layer whose input gradient differs.
        First come the parameters that differ in layers after the origin, and then the origin.
        """
        between = _between(ranks, INPUT_GRADIENT)
        number = max((key[1] for key in between), default=-1)
        gradient = next((part for part in self.truth["first"]["moments"] if part != WEIGHT), "")
        chosen = [(rank, f) for rank, f in found if f.kind == gradient]
        chosen = chosen or [(rank, f) for rank, f in found if f.parameter]
        names = list(dict.fromkeys(f.parameter for _, f in chosen))
        names.sort(key=lambda name: -self._layer_of.get(name, 0))
        for name in [name for name in names if self._layer_of.get(name, 0) > number][:MOST]:
            of_name = [(rank, f) for rank, f in chosen if f.parameter == name]
            kind = of_name[0][1].kind
            kind = f"its {'gradient' if kind == gradient else kind}"
            what = f"{'' if early else 'after the first step '}{kind} {self._cause_of(of_name)}"
            yield self._of(name, what, max(f.largest for _, f in of_name))
        if number >= 0:
            what, residual = "the gradient of its input", (INPUT_GRADIENT, number + 1)
            yield self._boundary(between, number, names, what, _NO_COPY, residual)

    def _boundary(
        self, between: Between, number: int, parameters: Iterable[str], what: str, partial: str,
        residual: tuple[str, int],
    ) -> About:  # fmt: skip
        """Explains a difference at a boundary of layer `number`.

        Args:
            between: differences at boundaries, by rank.
            number: index of the layer.
            parameters: names of parameters that differ.
            what: name of the value at the boundary.
            partial: the explanation to use if the tensor ranks have partial sums.
            residual: boundary whose value a residual connection adds to this boundary's value. With
                partial sums, every tensor rank has added this value, so their sum contains it once
                per tensor rank.
        """
        key, of_ranks = next((key, ranks) for key, ranks in between.items() if key[1] == number)
        name = self.layers[number][0] if number < len(self.layers) else None
        inside = next((p for p in parameters if self._layer_of.get(p) == number), None)
        cause = self._cause(key, of_ranks, partial, residual)
        return name, inside, f"{what} {cause}", max(f.largest for f in of_ranks.values())

    # ------------------------------------------------------------------------------- its cause

    def _cause(
        self, key: Key, of_ranks: Mapping[int, Finding], partial: str, residual: tuple[str, int]
    ) -> str:
        want = self.truth["seen"][key]
        values = [f.values for f in of_ranks.values() if f.values is not None]
        full = [v for v in values if v.shape == want.shape]
        if self.tensor > 1 and len(full) == self.tensor:
            total = torch.stack(full).sum(0)
            branch = self.truth["seen"].get((*residual, *key[2:]), torch.zeros_like(want))
            if _near(total, want) or _near(total - (self.tensor - 1) * branch, want):
                return partial
        return _TWICE if self.recompute else _SHARD if self.tensor > 1 else "differs"

    def _cause_of(self, found: Sequence[tuple[int, Finding]]) -> str:
        """Returns the likely cause of a parameter's difference, from its values on all ranks."""
        first = found[0][1]
        if first.values is None:
            return first.what
        want = Results(**self.truth["first"]).parts[first.kind][first.parameter][slices(*first.box)]
        copies: dict[int, Tensor] = {}
        for rank, f in found:
            if f.box == first.box and f.values is not None:
                copies.setdefault(rank % self.tensor, f.values)
        values = list(copies.values())
        if len(values) == self.tensor > 1 and _near(torch.stack(values).sum(0), want):
            return _PARTIAL
        ratio = float((values[0] * want).sum() / (want * want).sum().clamp(min=1e-300))
        if _near(values[0], ratio * want):
            more = _TOO_MANY if ratio > 1 and self.tensor > 1 else ""
            return f"is {ratio:.4g} times that of one process{more}"
        return "differs"


def _by_parameter(found: Sequence[tuple[int, Finding]], kind: str) -> dict[str, list[Finding]]:
    names: dict[str, list[Finding]] = {}
    for _, finding in found:
        if finding.kind == kind:
            names.setdefault(finding.parameter, []).append(finding)
    return names


def _between(ranks: Sequence[Seen], kind: str) -> dict[Key, dict[int, Finding]]:
    """Returns the differences at layer boundaries, by boundary and rank.

    Args:
        ranks: the differences that each rank found.
        kind: the compared value, OUTPUT or INPUT_GRADIENT.
    """
    found: dict[Key, dict[int, Finding]] = {}
    for rank, seen in enumerate(ranks):
        for key, finding in seen.between:
            if key[0] == kind:
                found.setdefault(key, {})[rank] = finding
    return found


def _near(got: Tensor, want: Tensor) -> bool:
    return max_difference(got, want) <= 1e-6 * max(largest(want), 1e-300)


# --------------------------------------------------------------------------- trainings that failed


def named(text: str, layers: Layers) -> tuple[str | None, str | None]:
    """Returns (first layer, first parameter) that a text mentions; None for either if missing."""
    layer_of = {name: layer for layer, own in layers for name in own}
    layer = _first_named(text, [layer for layer, _ in layers])
    parameter = _first_named(text, layer_of)
    # The text may name the parameter by its path in the layer.
    if layer is not None and parameter is None:
        paths = {name.removeprefix(f"{layer}."): name for name in dict(layers)[layer]}
        parameter = paths.get(_first_named(text, paths) or "")
    return layer or layer_of.get(parameter or ""), parameter


def _first_named(text: str, names: Iterable[str]) -> str | None:
    matches = ((re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text), name) for name in names)
    return min(((at.start(), name) for at, name in matches if at), default=(0, None))[1]


def report_of(error: RanksFailed) -> dict[str, Any] | None:
    """Returns the report of the rank that failed first. If other ranks report the same error,
    returns the report about the earliest layer.

    Returns None if all reports are consequences of another failure: the loss of a peer, or an
    unexpected message from a peer.

    Args:
        error: error of `run_ranks`.
    """
    gone = re.compile(r"gloo|[Cc]onnection (closed|reset)")
    reports = [r for r in error.reports.values() if r and not gone.search(r["text"])]
    if not reports:
        return None
    places = {name: number for number, (name, _) in enumerate(reports[0]["layers"])}
    same = [r for r in reports if r["text"] == reports[0]["text"]]
    return min(same, key=lambda r: places.get(r["layer"], len(places)))


def explain_lost_ranks(error: RanksFailed, timeout: float) -> tuple[str | None, str]:
    """Explains why ranks died or hang.

    Args:
        error: error of `run_ranks`.
        timeout: timeout in seconds.

    Returns:
        The layer that the slowest of these ranks was running, if known, and an explanation.
    """
    # If the messages of two ranks do not match, gloo aborts a process (SIGABRT). Any other exit code
    # is caused by the model's code.
    ended = {rank: code for rank, code in error.died.items() if code not in (-signal.SIGABRT, None)}
    if ended:
        what = ", ".join(f"rank {rank} ended with exit code {code}" for rank, code in ended.items())
    elif error.failures:
        what = _MISMATCH + _NOT_ALL
    else:
        what = f"the ranks still wait for each other after {timeout:g} seconds{_NOT_ALL}"
    seen = "; ".join(f"rank {rank} in {text}" for rank, text in sorted(error.notes.items()))
    notes = [text for rank, text in error.notes.items() if not ended or rank in ended]
    calls = [re.fullmatch(r"call (\d+), the \w+ of (.*)", text) for text in notes]
    last = min(((int(call[1]), call[2]) for call in calls if call), default=(0, None))
    return last[1], f"{what} (last seen: {seen or 'nowhere'})"


def repeated(found: Seen, layers: Layers) -> Iterator[About]:
    """Explains the differences between two trainings of one process with different random numbers.

    Yields one difference, the first layer and parameter that differ, unless the trainings agree.

    Args:
        found: differences between the two trainings.
        layers: names of the layers and their parameters.
    """
    if not (found.first or found.last):
        return
    outputs = sorted((key[1], f.largest) for key, f in found.between if key[0] == OUTPUT)
    number, size = outputs[0] if outputs else (-1, math.nan)
    inside = [f.parameter for f in (*found.first, *found.last) if f.parameter]
    own = next((name for name in inside if number < 0 or name in layers[number][1]), None)
    yield layers[number][0] if outputs else None, own, _RANDOM, size
