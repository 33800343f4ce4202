"""What differs, in words: the first layer and parameter, and what the evidence says of the cause.

Values between layers say where a difference began: forwards the first layer whose output differs, backwards the last
whose input's gradient does. Whether something differs at all, only losses, norms, weights and moments say: layers may
hand on what they like, such as a part of a sum that the next layer makes.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from threed.sharding import slices
from threed.testing.compare import KEPT, Finding, Results, farthest
from threed.testing.ranks import RanksFailed
from threed.testing.watch import INPUT_GRADIENT, OUTPUT, Key
from threed.topology import Axis
from threed.zero.records import WEIGHT

MOST = 8  # parameters that are named
Layers = Sequence[tuple[str, list[str]]]  # of every layer: its name, and those of its parameters
About = tuple[
    str | None, str | None, str, float
]  # layer, parameter, what, largest difference or NaN


@dataclass
class Seen:
    """What a rank found: after the first step, between layers in it, and in the end."""

    first: list[Finding] = field(default_factory=list)
    between: list[tuple[Key, Finding]] = field(default_factory=list)
    last: list[Finding] = field(default_factory=list)


def boundaries(
    seen: Mapping[Key, Tensor], truth: Mapping[Key, Tensor], tensor: Axis, tolerance: float
) -> Iterator[tuple[Key, Finding]]:
    """On a rank: what differs between layers, relative to its largest value."""
    for key, got in seen.items():
        want = truth.get(key)
        if want is None:
            continue
        if want.dim() and want.shape != got.shape and want.shape[0] == got.shape[0] * tensor.size:
            want = want.narrow(
                0, tensor.index * got.shape[0], got.shape[0]
            )  # a part of the sequence
        if (
            want.shape == got.shape
            and not (gap := farthest(got, want)) <= tolerance * largest(want) + 1e-15
        ):
            yield key, Finding(key[0], "differs", gap, values=got if got.numel() <= KEPT else None)


def largest(values: Tensor) -> float:
    """The largest absolute value."""
    return float(values.abs().max()) if values.numel() else 0.0


class Judge:
    """Says what differs in one topology. truth: as one process wrote it; tensor: the number of tensor ranks."""

    def __init__(self, truth: Mapping[str, Any], tensor: int, said: Iterable[str]) -> None:
        self.truth, self.tensor, self.said = truth, tensor, set(said)
        self.layers: Layers = truth["layers"]
        self._layer_of = {
            name: n for n, (_, names) in reversed([*enumerate(self.layers)]) for name in names
        }

    def explain(self, ranks: Sequence[Seen]) -> Iterator[About]:
        """What differs, the likely beginnings first; nothing where nothing does."""
        early = any(seen.first for seen in ranks)
        every = [
            (rank, f)
            for rank, seen in enumerate(ranks)
            for f in (seen.first if early else seen.last)
        ]
        found = [(rank, f) for rank, f in every if f.kind != "buffer"]
        cuts = sorted(
            (f for _, f in found if f.kind == "cut"),
            key=lambda f: self._layer_of.get(f.parameter, -1),
        )
        for _, of_layer in groupby(cuts, key=lambda f: self._layer_of.get(f.parameter, -1)):
            first, *others = of_layer
            more = f" (so it is with {len(others)} more of its parameters)" if others else ""
            yield self._of(first.parameter, f"{first.what}{more}{_CUT}", math.nan)
        losses = [f for _, f in found if f.kind == "loss"]
        if losses and early:
            yield self._forward(ranks, losses[0], found)
        elif any(f.kind not in ("loss", "norm", "cut") for _, f in found):
            yield from self._backward(
                ranks if early else (), found, "" if early else "after the first step "
            )
        elif (rest := [f for _, f in found if f.kind != "cut"]) and not cuts:
            cause = (
                "some gradient is counted more often, or less, than once"
                if rest[0].kind == "norm"
                else ""
            )
            yield (
                None,
                None,
                f"the {rest[0]}; weights agree: {cause}".removesuffix(": "),
                rest[0].largest,
            )
        yield from self._buffers([f for _, f in every if f.kind == "buffer"])

    def _buffers(self, found: Sequence[Finding]) -> Iterator[About]:
        """The buffers that differ, and whether they do so on all tensor ranks alike."""
        for name in list(dict.fromkeys(f.parameter for f in found))[:MOST]:
            mine = [f for f in found if f.parameter == name]
            values = [f.values for f in mine if f.values is not None]
            alike = len(values) % self.tensor == 0 and all(
                torch.equal(values[0], other) for other in values[1:]
            )
            what = f"its buffer {mine[0].what}{'' if alike else _NOT_ALIKE}"
            yield self._of(name, what, max(f.largest for f in mine))

    def _of(self, parameter: str, what: str, size: float) -> About:
        number = self._layer_of.get(parameter)
        return (None if number is None else self.layers[number][0]), parameter or None, what, size

    # ---------------------------------------------------------------------------------------------------- where first

    def _forward(
        self, ranks: Sequence[Seen], loss: Finding, found: Sequence[tuple[int, Finding]]
    ) -> About:
        between = _between(ranks, OUTPUT)
        if not between:
            return (
                None,
                None,
                f"the loss differs ({loss.what}), though every layer's output agrees",
                loss.largest,
            )
        number = min(key[1] for key in between)
        key, of_ranks = next((key, values) for key, values in between.items() if key[1] == number)
        inside = [f.parameter for _, f in found if self._layer_of.get(f.parameter) == number]
        name = self.layers[number][0] if number < len(self.layers) else None
        cause = self._cause(key, of_ranks, (OUTPUT, number - 1), _NO_SUM)
        return (
            name,
            inside[0] if inside else None,
            f"its output {cause}",
            max(f.largest for f in of_ranks.values()),
        )

    def _backward(
        self, ranks: Sequence[Seen], found: Sequence[tuple[int, Finding]], when: str
    ) -> Iterator[About]:
        """The parameters whose gradient differs and that lie behind the first layer, in the order of the backward,
        which hands on a wrong gradient; then that layer."""
        between = _between(ranks, INPUT_GRADIENT)
        number = max((key[1] for key in between), default=-1)
        kinds = [part for part in self.truth["first"]["moments"] if part != WEIGHT][:1]
        chosen = [(rank, f) for rank, f in found if f.kind in kinds] or [
            (rank, f) for rank, f in found if f.parameter and f.kind != "cut"
        ]
        names = dict.fromkeys(f.parameter for _, f in chosen)
        behind = [name for name in names if self._layer_of.get(name, 0) > number]
        for name in sorted(behind, key=lambda name: -self._layer_of.get(name, 0))[:MOST]:
            mine = [(rank, f) for rank, f in chosen if f.parameter == name]
            kind = (
                f"{when}its gradient"
                if mine[0][1].kind in kinds
                else f"{when}its {mine[0][1].kind}"
            )
            yield self._of(name, f"{kind} {self._cause_of(mine)}", max(f.largest for _, f in mine))
        if number >= 0:
            key, of_ranks = next(
                (key, values) for key, values in between.items() if key[1] == number
            )
            cause = self._cause(key, of_ranks, (INPUT_GRADIENT, number + 1), _NO_COPY)
            inside = next((name for name in names if self._layer_of.get(name) == number), None)
            size = max(f.largest for f in of_ranks.values())
            yield self.layers[number][0], inside, f"the gradient of its input {cause}", size

    # ------------------------------------------------------------------------------------------------------- causes

    def _cause(
        self, key: Key, of_ranks: Mapping[int, Finding], beside: tuple[str, int], partial: str
    ) -> str:
        """What the values of the tensor ranks say of a difference between layers. beside: what a residual branch adds
        to it on every rank."""
        want, values = self.truth["seen"][key], [f.values for f in of_ranks.values()]
        whole = [v for v in values if v is not None and v.shape == want.shape]
        if self.tensor > 1 and len(whole) == self.tensor:
            total = torch.stack(whole).sum(0)
            branch = self.truth["seen"].get((beside[0], beside[1], *key[2:]))
            if _near(total, want) or (
                branch is not None and _near(total - (self.tensor - 1) * branch, want)
            ):
                return partial
            if all(torch.equal(whole[0], other) for other in whole[1:]):
                again = (
                    ", or its forward, which runs twice, changes its input"
                    if "recompute" in self.said
                    else ""
                )
                alike = "is the same on all tensor ranks, and not that of one process"
                return f"{alike}: a sum too many, or a wrong slice{again}"
            return "is not the same on all tensor ranks: a sum that was not made, or a slice that the rank has no part in"
        if "recompute" in self.said:
            return "differs: its forward runs twice, and changes its input in place, or something that it reads"
        slices = (
            ": a slice that is not the rank's own, or a sum that was not made"
            if self.tensor > 1
            else ""
        )
        return f"differs, though what it is made from does not{slices}"

    def _cause_of(self, found: Sequence[tuple[int, Finding]]) -> str:
        """What the values of the ranks say of a parameter that differs."""
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
            return f"is a part of a sum on every tensor rank, and the sum is missing: {_PARTIAL}"
        if self.tensor > 1 and any(not _near(values[0], other) for other in values[1:]):
            return "is not the same on all tensor ranks, so its copies drift apart"
        ratio = float((values[0] * want).sum() / (want * want).sum().clamp(min=1e-300))
        if _near(values[0], ratio * want):
            return f"is {ratio:.4g} times that of one process{_TOO_MANY if ratio > 1 and self.tensor > 1 else ''}"
        return "differs"


_NO_SUM = (
    "is a part of a sum on every tensor rank, and the sum is missing: end what is cut by collectives.reduce_from (or"
    " scatter_to, where sequences are cut)"
)
_NO_COPY = (
    "is a part of a sum on every tensor rank, and the sum is missing: begin what is cut by collectives.copy_to (or"
    " gather_from, where sequences are cut)"
)
_PARTIAL = "give its record partial=slicing.partial (where sequences are cut), or partial='tp' if each rank sees a part"
_TOO_MANY = (
    ": it is summed over ranks that each have all of it (a partial mark, or a sum, too many)"
)
_NOT_ALIKE = ", and not on all tensor ranks alike: it is made from what each rank has a part of"
_CUT = (
    ": mark copies replicated=slicing.replicated, cut others by the Slicing's tp axis, and let start and size of the"
    " pieces make up the whole"
)


def _between(ranks: Sequence[Seen], kind: str) -> dict[Key, dict[int, Finding]]:
    """What differs between layers, by place and rank."""
    found: dict[Key, dict[int, Finding]] = {}
    for rank, seen in enumerate(ranks):
        for key, finding in seen.between:
            if key[0] == kind:
                found.setdefault(key, {})[rank] = finding
    return found


def _near(got: Tensor, want: Tensor) -> bool:
    return farthest(got, want) <= 1e-6 * max(largest(want), 1e-300)


# ------------------------------------------------------------------------------------------------- trainings that ended


def named(text: str, layers: Layers) -> tuple[str | None, str | None]:
    """The layer and the parameter that a text speaks of first."""
    layer_of = {name: layer for layer, own in layers for name in own}
    layer, parameter = (
        _first_named(text, [layer for layer, _ in layers]),
        _first_named(text, layer_of),
    )
    if layer is not None and parameter is None:  # by its path in the layer, perhaps
        paths = {
            name.removeprefix(f"{layer}."): name for name, own in layer_of.items() if own == layer
        }
        parameter = paths.get(_first_named(text, paths) or "")
    return layer or layer_of.get(parameter or ""), parameter


def _first_named(text: str, names: Iterable[str]) -> str | None:
    found = [
        (at.start(), name)
        for name in names
        if (at := re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text))
    ]
    return min(found)[1] if found else None


def report_of(error: RanksFailed) -> dict[str, Any] | None:
    """What the rank that failed first said of it, or one that says the same of an earlier layer; None where all that is
    said is that another rank is gone, or sends other messages than are awaited."""
    reports = [
        r
        for r in error.reports.values()
        if r and not re.search(r"gloo|[Cc]onnection (closed|reset)", r["text"])
    ]
    if not reports:
        return None
    places = {name: number for number, (name, _) in enumerate(reports[0]["layers"])}
    same = [r for r in reports if r["text"] == reports[0]["text"]]
    return min(same, key=lambda r: places.get(r["layer"], len(places)))


def silence(error: RanksFailed, timeout: float) -> tuple[str | None, str]:
    """Of ranks that died or hang: the layer where the one that is least far was last seen, and what happened."""
    calls = {
        rank: re.fullmatch(r"call (\d+), the \w+ of (.*)", text)
        for rank, text in error.notes.items()
    }
    seen = "; ".join(f"rank {rank} in {text}" for rank, text in sorted(error.notes.items()))
    # gloo aborts where messages do not fit each other; what ends in another way does so by itself
    ended = {rank: code for rank, code in error.died.items() if code not in (-signal.SIGABRT, None)}
    if ended:
        codes = [
            f"rank {n} {f'was killed by signal {-code}' if code < 0 else f'ended with exit code {code}'}"
            for n, code in ended.items()
        ]
        what, calls = ", ".join(codes), {rank: calls.get(rank) for rank in ended}
    else:
        what = (
            _MISMATCH
            if error.failures
            else f"the ranks still wait for each other after {timeout:g} seconds"
        )
        what += _NOT_ALL
    last = sorted((int(call[1]), call[2]) for call in calls.values() if call)
    return (last[0][1] if last else None), f"{what} (last seen: {seen or 'nowhere'})"


def repeated(found: Seen, layers: Layers) -> Iterator[About]:
    """What differs between two trainings of one process that had other random numbers."""
    if not (found.first or found.last):
        return
    outputs = sorted((key[1], f.largest) for key, f in found.between if key[0] == OUTPUT)
    number, size = outputs[0] if outputs else (-1, math.nan)
    inside = [f.parameter for f in (*found.first, *found.last) if f.parameter]
    own = next((name for name in inside if number < 0 or name in layers[number][1]), None)
    yield layers[number][0] if outputs else None, own, _RANDOM, size


_MISMATCH = "ranks send each other messages of other sizes than are awaited"
_NOT_ALL = ": a collective that only some of them call, or a shape that depends on the rank"
_RANDOM = (
    "two trainings of one process differ: it reads random numbers of torch's own, or something that one training leaves"
    " to the next; dropout is layers.Dropout, the same mask in every topology"
)
