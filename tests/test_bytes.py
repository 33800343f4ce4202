"""Bytes sent: threed's counters, formulas, the planner's forecast, and the kernel's counter.

The formulas are per rank and step, with e bytes per element:

tp  8 b s h (t-1)/t e per block and micro-batch (arXiv 2205.05198: the same with sequence
    parallelism), 2 b s h (t-1)/t e for the embedding and for the head, three numbers per token for
    cross entropy; once per step, the gradients that are partial sums
cp  for M = b s/c d elements per head, and a query and k key/value heads per tensor rank, per block
    and micro-batch: 4 (a + max(k, u)) M (u-1)/u e for the exchange of positions and heads over u
    ranks (arXiv 2309.14509), plus 2 max(k, u) M (2 (r-1) e + r w) for the ring of r = c/u ranks
    (arXiv 2310.01889), where w is the width of a gradient, at least 4
pp  b s h e / t per boundary, direction and micro-batch; once per step, the sums of tied weights.
    Without sequence parallelism, the received slices are gathered over tp: b s h (t-1)/t e. If
    every stage is on two ranks: P/2 elements of gradients and P/2 of parameters
dp  for P parameters (with padding) and m micro-batches, in elements: 2 P (N-1)/N under ZeRO 0 and
    1, (m + 1) P (N-1)/N under 2, 3 m P (N-1)/N under 3 (arXiv 1910.02054, section 7). Subtract the
    parameters that are not gathered again: those of the last layer between a forward and a
    backward, those of the first layer between a backward and a forward, the embedding in
    backwards, and small parameters. With R copies of the slices, add 2 P/N (R-1)/R. Layer by
    layer, all m micro-batches are one pass: 3 P (N-1)/N under 3, 2 P (N-1)/N under 2
    (arXiv 2512.17570)
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.host import loopback_bytes
from tests.configs import topology_of
from tests.harness import run_ranks
from threed import models
from threed.config import Config
from threed.config.resolution import resolve
from threed.engine import Engine
from threed.layers import Slicing
from threed.ops.precision import dtype
from threed.planner.forecast import Forecast
from threed.zero.layout import Group


@dataclass(frozen=True)
class Case:
    """A topology, and the settings of model and training that differ from the defaults."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    sequence: bool = False
    zero: int = 1
    dtype: str = "fp32"
    micro: int = 2
    microbatches: int = 3
    model: tuple[tuple[str, object], ...] = ()
    bucket_mib: float = 64.0
    schedule: str = "1f1b"
    reduce: str | None = None
    shard: int | str = "all"
    resident: int = 0
    prefetch: int = 1
    order: str = "micro"
    cp: int = 1
    heads: int = 1  # context ranks that exchange positions for heads
    int8: tuple[str, ...] = ()  # which tensors are compressed: weights, gradients

    @property
    def passes(self) -> int:
        """The number of passes of a step.

        In each pass, parameters are gathered for a forward, and sliced gradients are reduced.
        """
        return 1 if self.order == "layer" else self.microbatches

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def data(self) -> int:
        """The number of ranks with the same parameters."""
        return self.dp * self.cp


LLAMA = (("arch", "llama"), ("kv_heads", 2), ("ffn", 96))
QWEN = (("arch", "llama"), ("kv_heads", 1), ("ffn", 70), ("qk_norm", True), ("tied", True))
UNTIED = (("tied", False),)
WIDE = (("hidden", 128), ("layers", 2))
# Sizes that are multiples of 32, so that there is no padding, and the planner can be exact.
BASE = {"layers": 3, "hidden": 64, "heads": 4, "seq": 16, "vocab": 53}


def config_of(case: Case) -> Config:
    config = Config.model_validate({
        "parallel": {
            "tp": case.tp, "pp": case.pp, "cp": case.cp, "cp_heads": case.heads if case.cp > 1 else "auto",
            "sequence": case.sequence, "schedule": case.schedule,
        },
        "zero": {
            "stage": case.zero, "bucket_mib": case.bucket_mib, "shard_size": case.shard, "resident": case.resident,
            "prefetch": case.prefetch, "order": case.order,
            **{f"compress_{name}": "int8" for name in case.int8},
        },
        "precision": {"dtype": case.dtype, "reduce_dtype": case.reduce},
        "model": {**BASE, **dict(case.model)},
        "train": {"global_batch": case.dp * case.micro * case.microbatches, "micro_batch": case.micro, "steps": 10},
    })  # fmt: skip
    return resolve(config, 53, case.world)


def engine_of(config: Config) -> Engine:
    topology = topology_of(config.parallel.pp, config.parallel.tp, config.parallel.cp)
    return Engine(models.build(config.model, Slicing.of(topology, config)), topology, config)


def data(config: Config, engine: Engine) -> dict[str, torch.Tensor]:
    rows = config.train.global_batch // engine.topology.dp
    ids = torch.randint(
        0, 53, (2, rows, config.model.seq), generator=torch.Generator().manual_seed(0)
    )
    return {"tokens": ids[0], "labels": ids[1]}


# -------------------------------------------------------------------------------------------------------- formulas


@dataclass
class Sent:
    """The bytes that a rank sent in a step, by label, and the exact results of the formulas.

    Attributes:
        messages: the part of `exact` for messages of a few numbers, which the planner does not
            count.
    """

    counted: dict[str, int]
    exact: dict[str, int]
    messages: dict[str, int]
    parameters: int
    padding: int
    buckets: int


def encoded(elements: int, width: int, int8: bool) -> int:
    """Returns the bytes of a message; with int8, each 256 elements have an fp32 scale.

    The last block is padded.
    """
    return 260 * -(-elements // 256) if int8 else elements * width


def ring(elements: int, ranks: int) -> int:
    """Returns the elements that a rank sends in an all-reduce.

    Over more than two ranks, the number of elements is padded to a multiple of the ranks.
    """
    padded = elements if ranks == 2 else -(-elements // ranks) * ranks
    assert 2 * padded * (ranks - 1) % ranks == 0
    return 2 * padded * (ranks - 1) // ranks


def activations(case: Case, config: Config, stage: range, microbatches: int) -> dict[str, int]:
    """Returns the bytes over tp and pp per step for a stage's activations, by the formulas."""
    m, t, e = config.model, case.tp, 2 if case.dtype == "bf16" else 8 if case.dtype == "fp64" else 4
    tokens, last = case.micro * m.seq // case.cp, m.layers + 1
    whole = tokens * m.hidden * e
    tp = 0
    for layer in stage:
        reductions = 1 if layer in (0, last) else 4
        tp += reductions * 2 * whole * (t - 1) // t
        tp += 3 * tokens * max(e, 4) * (t - 1) if layer == last else 0
    inner = 2 - (0 in stage) - (last in stage)
    tp += 0 if case.sequence else inner * whole * (t - 1) // t  # the received slices are gathered
    blocks = len(set(stage) - {0, last})
    cp = attention(case, config) * blocks
    return {
        "tp": tp * microbatches, "pp": inner * whole // t * microbatches, "cp": cp * microbatches,
    }  # fmt: skip


def attention(case: Case, config: Config) -> int:
    """Returns the bytes over cp per block and micro-batch."""
    m, e, u = config.model, dtype(case.dtype).itemsize, case.heads
    a, k = m.heads // case.tp, max((m.kv_heads or m.heads) // case.tp, 1)
    head = case.micro * m.seq // case.cp * (m.head_dim or m.hidden // m.heads)
    full, r = max(k, u), case.cp // u
    exchange = 4 * (a + full) * head * (u - 1) // u * e
    return exchange + (2 * full * head * (2 * (r - 1) * e + r * max(e, 4)) if r > 1 else 0)


def gradients(engine: Engine, case: Case) -> dict[str, int]:
    """Returns the bytes per step of gradient sums and parameter gathers.

    They are computed from the actual layout of this rank's parameters.
    """
    sent = {"tp": 0, "pp": 0, "dp": 0, "cp": 0}
    wire, width = (
        dtype(name or "fp32").itemsize
        for name in (engine.config.precision.reduce_dtype, case.dtype)
    )
    each = case.passes // engine.blueprint.pipeline.layout.ways
    for bucket in engine.layout.buckets:
        group, window = bucket.group, bucket.last - bucket.first
        sums = each * len(group.key.chunks) if case.zero >= 2 else 1
        if group.shard.size > 1:
            n = group.shard.size
            summed = encoded(window // n, wire, "gradients" in case.int8)
            gathered = encoded(window // n, width, "weights" in case.int8 and group.sliced)
            sent["dp"] += (n - 1) * (sums * summed + times_gathered(group, engine, case) * gathered)
        for axis in group.sums:
            own = bucket.own_last - bucket.own_first
            if (
                axis is group.holders
            ):  # each rank sums its portion; the updated portions are gathered
                sent[axis.label] += own // axis.size * (axis.size - 1) * (wire + width)
            elif axis.label == "dp" and "gradients" in case.int8:
                part = encoded(-(-own // axis.size), wire, True)
                sent["dp"] += 2 * (axis.size - 1) * part
            else:
                sent[axis.label] += wire * (ring(own, axis.size) if axis.size > 1 else 0)
    return sent


def times_gathered(group: Group, engine: Engine, case: Case) -> int:
    """Returns how often a group is gathered per step.

    Full parameters are gathered once, after the update. Others are gathered for each forward and
    each backward, except if a forward and a backward follow each other directly. A rank of 1F1B
    first runs several forwards, and one of GPipe all but one; then each forward is followed by a
    backward, and each backward except the last ones by a forward.
    """
    if case.zero < 3 or all(slot.param.numel() < case.resident for slot in group.slots):
        return 1
    m, stage = case.passes, engine.blueprint.chunks[0]
    first = m - 1 if case.schedule == "gpipe" else min(case.pp - engine.executor.rank - 1, m - 1)
    times = 0
    for layer in {stage.start + unit for slot in group.slots for unit in slot.units}:
        times += m
        if layer > 0:  # the backward of the embedding does not read the weights
            times += m - (m - first) * (layer == stage[-1]) - (m - first - 1) * (layer == stage[0])
    return times


def messages(engine: Engine, case: Case) -> dict[str, int]:
    """Returns the bytes of the small messages of a step.

    Over data ranks: the number of valid tokens. Over all ranks: the squared norm, whether it is
    finite, the loss, whether token ids and labels are in the vocabulary, whether there are no valid
    labels, whether documents decrease, and whether ranks have different batches.
    """
    n, world = case.dp, case.world  # 8 bytes per number, sent to every other rank
    return {"tp": 0, "pp": 0, "cp": 0, "dp": 8 * (n - 1), "world": 8 * 8 * (world - 1)}


def measure(case: Case) -> Sent:
    config = config_of(case)
    engine = engine_of(config)
    engine.step(data(config, engine))
    before = dict(engine.topology.traffic)
    engine.step(data(config, engine))
    counted = {k: v - before.get(k, 0) for k, v in engine.topology.traffic.items()}
    engine.optimizer.wait()
    few, each = messages(engine, case), case.microbatches // engine.blueprint.pipeline.layout.ways
    passing = [activations(case, config, stage, each) for stage in engine.blueprint.chunks]
    parts = *passing, gradients(engine, case), few
    exact = {label: sum(part.get(label, 0) for part in parts) for label in few}
    layout = engine.layout
    padding = sum(group.numel for group in layout.groups) - layout.parameters
    return Sent(counted, exact, few, layout.parameters, padding, len(layout.buckets))


def measure_all(cases: list[Case]) -> list[Sent]:
    return [measure(case) for case in cases]


@functools.cache
def results(cases: tuple[Case, ...]) -> dict[Case, list[Sent]]:
    """Returns the bytes that every rank sent, for the cases of one world."""
    return dict(
        zip(
            cases,
            zip(*run_ranks(cases[0].world, measure_all, list(cases)), strict=True),
            strict=True,
        )
    )


CASES = {
    "tp2": Case(tp=2),
    "tp2 sequence": Case(tp=2, sequence=True),
    "tp4 sequence fp64": Case(tp=4, sequence=True, dtype="fp64"),
    "tp4 bf16": Case(tp=4, sequence=True, dtype="bf16"),
    "tp4, one shared kv head": Case(tp=4, sequence=True, model=QWEN),
    "tp4, two shared kv heads, whole sequences": Case(tp=4, model=LLAMA),
    "tp2, heads normed, whole sequences": Case(tp=2, model=(*QWEN, ("kv_heads", 4))),
    "pp2": Case(pp=2),
    "pp2 untied": Case(pp=2, model=UNTIED, schedule="gpipe"),
    "pp4 bf16": Case(pp=4, dtype="bf16", microbatches=8, micro=1),
    "dp2": Case(dp=2),
    "dp2 zero 0": Case(dp=2, zero=0),
    "dp3": Case(dp=3),
    "dp3 zero 0": Case(dp=3, zero=0),
    "dp2 bf16, small buckets": Case(dp=2, dtype="bf16", bucket_mib=0.03),
    "pp2 both ways": Case(pp=2, microbatches=4, schedule="chimera"),
    "pp2 dp2 both ways, zero 2, bf16": Case(
        pp=2, dp=2, zero=2, microbatches=6, schedule="dualpipe", dtype="bf16", model=WIDE
    ),
    "pp2 tp2": Case(pp=2, tp=2, sequence=True),
    "2x2x2": Case(pp=2, dp=2, tp=2, sequence=True),
    "2x2x2 zero 0, whole sequences": Case(pp=2, dp=2, tp=2, zero=0),
    "2x2x2 llama bf16": Case(pp=2, dp=2, tp=2, sequence=True, model=LLAMA, dtype="bf16"),
    "dp2 zero 2": Case(dp=2, zero=2),
    "dp2 zero 2, sums in bf16, small buckets": Case(
        dp=2, zero=2, reduce="bf16", bucket_mib=0.03, microbatches=1
    ),
    "dp3 zero 2": Case(dp=3, zero=2),
    "dp4 zero 2 in pairs, bf16": Case(dp=4, zero=2, shard=2, dtype="bf16", reduce="bf16"),
    "dp2 zero 3": Case(dp=2, zero=3),
    "dp2 zero 3, one micro-batch, 3 ahead": Case(dp=2, zero=3, microbatches=1, prefetch=3),
    "dp2 zero 3, small ones whole": Case(dp=2, zero=3, model=WIDE, resident=65536),
    "dp2 zero 3 bf16, sums in bf16, small buckets": Case(
        dp=2, zero=3, dtype="bf16", reduce="bf16", bucket_mib=0.03
    ),
    "dp2 zero 3 llama fp64": Case(dp=2, zero=3, model=LLAMA, dtype="fp64"),
    "dp2 zero 3 by layer": Case(dp=2, zero=3, order="layer"),
    "dp2 zero 3 by layer, bf16, small ones whole, small buckets": Case(
        dp=2,
        zero=3,
        dtype="bf16",
        model=WIDE,
        resident=65536,
        order="layer",
        bucket_mib=0.03,
        microbatches=8,
    ),
    "dp2 zero 2 by layer, small buckets": Case(dp=2, zero=2, order="layer", bucket_mib=0.03),
    "dp3 zero 3": Case(dp=3, zero=3, microbatches=1),
    "dp4 zero 3": Case(dp=4, zero=3, model=WIDE),
    "dp4 zero 3 in pairs": Case(dp=4, zero=3, shard=2),
    "dp4 zero 3 in ones": Case(dp=4, zero=3, shard=1),
    "dp4 zero 3 by layer in pairs": Case(dp=4, zero=3, shard=2, order="layer", microbatches=4),
    "tp2 dp2 zero 3 by layer": Case(tp=2, dp=2, zero=3, sequence=True, model=WIDE, order="layer"),
    "tp2 dp2 zero 3": Case(tp=2, dp=2, zero=3, sequence=True, model=WIDE),
    "tp2 dp2 zero 2": Case(tp=2, dp=2, zero=2, microbatches=1, model=WIDE),
    "pp2 dp2 zero 3": Case(pp=2, dp=2, zero=3),
    "pp2 dp2 zero 3 untied, gpipe": Case(pp=2, dp=2, zero=3, model=UNTIED, schedule="gpipe"),
    "pp3 dp2 zero 3": Case(pp=3, dp=2, zero=3, microbatches=4),
    "pp3 dp2 zero 3, fewer micro-batches than stages": Case(pp=3, dp=2, zero=3, microbatches=2),
    "2x2x2 zero 2": Case(pp=2, dp=2, tp=2, zero=2, sequence=True, model=WIDE),
    "2x2x2 zero 3 sums in bf16": Case(
        pp=2, dp=2, tp=2, zero=3, sequence=True, reduce="bf16", model=WIDE
    ),
    "dp2 int8 gradients": Case(dp=2, int8=("gradients",)),
    "dp3 zero 0, int8 gradients": Case(dp=3, zero=0, int8=("gradients",)),
    "dp4 zero 2 in pairs, int8 gradients, bf16": Case(
        dp=4, zero=2, shard=2, dtype="bf16", int8=("gradients",)
    ),
    "dp2 zero 3, int8": Case(dp=2, zero=3, int8=("weights", "gradients")),
    "dp2 zero 3 by layer, int8, some whole": Case(
        dp=2, zero=3, order="layer", model=WIDE, resident=65536, int8=("weights", "gradients")
    ),
    "tp2 dp2 zero 3, int8 weights, small buckets": Case(
        tp=2, dp=2, zero=3, model=WIDE, bucket_mib=0.03, microbatches=2, int8=("weights",)
    ),
    "pp2 dp2 zero 3, int8": Case(pp=2, dp=2, zero=3, int8=("weights", "gradients")),
    "cp2 ring": Case(cp=2),
    "cp2 heads": Case(cp=2, heads=2, zero=0),
    "cp4 ring, bf16": Case(cp=4, dtype="bf16", model=WIDE),
    "cp4 2 x 2, llama": Case(cp=4, heads=2, model=LLAMA),
    "cp4 heads, fewer kv heads, bf16": Case(cp=4, heads=4, model=LLAMA, dtype="bf16"),
    "cp2 ring tp2, fp64": Case(cp=2, tp=2, sequence=True, dtype="fp64", model=WIDE),
    "cp2 heads pp2": Case(cp=2, heads=2, pp=2),
    "cp2 ring dp2 zero 3": Case(cp=2, dp=2, zero=3, microbatches=2, model=WIDE),
    "cp2 ring dp2 zero 2 in pairs": Case(cp=2, dp=2, zero=2, shard=2),
    "pp2 dp4 zero 3 in pairs, llama": Case(pp=2, dp=4, zero=3, shard=2, model=LLAMA),
}


# Their settings, and each pair of settings that are not the defaults, occur in other cases too; these run only with
# `-m grid`.
GRID = {
    "2x2x2", "tp4 bf16", "pp2 tp2", "dp4 zero 3 in pairs", "dp3", "dp3 zero 0", "tp2 sequence", "pp2 untied",
    "dp2 zero 3 by layer, bf16, small ones whole, small buckets", "dp2 bf16, small buckets", "dp2 zero 2",
    "dp2 zero 3 by layer", "dp2 zero 3, int8", "cp2 ring", "dp2 zero 3, small ones whole",
    "tp4 sequence fp64", "tp4, two shared kv heads, whole sequences", "dp3 zero 2", "2x2x2 zero 0, whole sequences",
    "2x2x2 llama bf16", "2x2x2 zero 3 sums in bf16", "dp4 zero 2 in pairs, bf16", "dp4 zero 3 by layer in pairs",
    "tp2 dp2 zero 3 by layer", "tp2 dp2 zero 2", "pp2 dp2 zero 3", "pp3 dp2 zero 3", "cp2 ring tp2, fp64",
    "cp2 ring dp2 zero 2 in pairs", "dp4 zero 3", "tp2 dp2 zero 3", "pp2 dp2 zero 3, int8", "cp2 heads pp2",
    "cp4 ring, bf16", "dp2 zero 0",
}  # fmt: skip


def marked(names: Iterable[str]) -> list[Any]:
    """Returns parameters of a test; those in GRID have the mark."""
    return [pytest.param(name, marks=pytest.mark.grid if name in GRID else ()) for name in names]


def sent_in(name: str) -> list[Sent]:
    """Returns the bytes that every rank sent in a case.

    All cases of a world run together, except that those in GRID run separately.
    """
    case = CASES[name]
    together = (n for n in CASES if (n in GRID) == (name in GRID))
    return results(tuple(CASES[n] for n in together if CASES[n].world == case.world))[case]


@functools.cache
def planned_in(name: str) -> list[dict[str, int]]:
    """Returns the planner's forecast of the bytes that every rank sends."""
    return [rank.sends for rank in Forecast.of(config_of(CASES[name]), CASES[name].world).ranks]


@pytest.mark.seldom("tp2", "pp3 dp2 zero 3, fewer*")
@pytest.mark.parametrize("name", marked(CASES))
def test_counted_bytes_are_the_formulas(name: str) -> None:
    """They are equal on every rank and axis.

    The planner's numbers are equal too, except for padding that the planner does not know.
    """
    case = CASES[name]
    for rank, (sent, planned) in enumerate(zip(sent_in(name), planned_in(name), strict=True)):
        for label, exact in sent.exact.items():
            assert sent.counted.get(label, 0) == exact, f"rank {rank}: {label}"
        for label in ("tp", "pp", "dp", "cp"):
            extra = exact_without_messages(sent, label) - planned[label]
            # An all-reduce over three ranks pads each bucket to a multiple of three.
            most = (
                8
                * (3 * case.microbatches + 4)
                * (sent.padding + 2 * sent.buckets * (case.data > 2))
            )
            assert 0 <= extra <= most, (
                f"rank {rank}: {label}: planned {planned[label]}, {extra} off"
            )


def test_every_setting_is_in_a_case_that_runs_always() -> None:
    everyday = [case for name, case in CASES.items() if name not in GRID]
    for field in fields(Case):
        values = [
            {getattr(case, field.name) for case in some} for some in (everyday, CASES.values())
        ]
        assert values[0] == values[1], field.name


def exact_without_messages(sent: Sent, label: str) -> int:
    return sent.exact[label] - sent.messages[label]


# Sizes whose parts over tp are multiples of the padding over dp.
UNPADDED = {
    n: c for n, c in CASES.items() if c.model in ((), UNTIED, WIDE) and c.tp < 4 and c.data != 3
}
UNPADDED = {n: c for n, c in UNPADDED.items() if c.model == WIDE or c.tp == 1 or c.data == 1}


@pytest.mark.parametrize("name", marked(UNPADDED))
def test_the_planner_is_exact_where_nothing_is_padded(name: str) -> None:
    for sent, planned in zip(sent_in(name), planned_in(name), strict=True):
        assert sent.padding == 0
        for label in ("tp", "pp", "dp", "cp"):
            assert planned[label] == exact_without_messages(sent, label)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_a_parameter_moves_twice_and_under_zero_3_three_times(ranks: int) -> None:
    """Stages 0 to 3 send 2, 2, 2 and 3 Psi (N-1)/N elements with one micro-batch.

    With m micro-batches, stages 2 and 3 send (m + 1) Psi and 3 m Psi; layer by layer, as much as
    with one.
    """
    kinds = [(zero, m, "micro") for zero in range(4) for m in (1, 3)] + [
        (2, 4, "layer"),
        (3, 4, "layer"),
    ]
    shapes = tuple(
        Case(dp=ranks, zero=zero, microbatches=m, order=order, model=(("hidden", 128), ("layers", layers)))
        for zero, m, order in kinds for layers in (2, 3)
    )  # fmt: skip
    found, h = results(shapes), 128
    block, ends, unread = 12 * h * h + 13 * h, (53 + 16 + 2) * h, (16 + 2) * h
    elements = {}
    for case, sents in found.items():
        m, psi = case.passes, ends + dict(case.model)["layers"] * block  # type: ignore[operator]
        times = (2, 2, m + 1, 3 * m)[case.zero]
        # Positions are read only in forwards. The head stays gathered for its backward, so its norm is gathered once, and
        # the tied table twice: for the embedding and for the head.
        expected = times * psi - (m * unread if case.zero == 3 else 0)
        for sent in sents:
            assert (sent.parameters, sent.padding) == (psi, 0)
            assert (
                sent.counted["dp"] - sent.messages["dp"] == 4 * expected * (ranks - 1) // ranks
            ), case
        elements[case.zero, m, psi, case.order] = (
            (sents[0].counted["dp"] - sents[0].messages["dp"]) * ranks // (ranks - 1) // 4
        )
    for (zero, m, psi, order), count in elements.items():
        # the third block adds exactly this multiple of its parameters
        if psi == ends + 3 * block:
            assert (
                count - elements[zero, m, psi - block, order] == (2, 2, m + 1, 3 * m)[zero] * block
            )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_sequence_parallelism_moves_the_same_bytes(ranks: int) -> None:
    """An all-gather and a reduce-scatter are the halves of an all-reduce (arXiv 2205.05198).

    The sums of partial gradients are additional.
    """
    whole = run_ranks(ranks, measure, Case(tp=ranks))[0]
    parts = run_ranks(ranks, measure, Case(tp=ranks, sequence=True))[0]
    norms = (
        2 * 3 * 2 * 64 + 2 * 64 + 2 * 3 * 64 + 16 * 64
    )  # LayerNorms, biases of row layers, positions
    assert parts.counted["tp"] - whole.counted["tp"] == 4 * 2 * norms * (ranks - 1) // ranks


# ------------------------------------------------------------------------------------------------ the kernel's counter

BIG = (("hidden", 256), ("seq", 128), ("layers", 2), ("vocab", 53), ("heads", 4))
KERNEL = {
    "tp2": Case(tp=2, sequence=True, micro=4, microbatches=2, model=BIG),
    "pp2": Case(pp=2, micro=4, microbatches=2, model=BIG),
    "dp2": Case(dp=2, micro=4, microbatches=1, model=BIG),
    "dp2 zero 2": Case(dp=2, zero=2, micro=1, microbatches=2, model=BIG),
    "dp2 zero 3": Case(dp=2, zero=3, micro=1, microbatches=2, model=BIG),
    "dp2 zero 3 by layer": Case(dp=2, zero=3, micro=1, microbatches=4, model=BIG, order="layer"),
    "cp2 ring": Case(cp=2, micro=4, microbatches=2, model=BIG),
    "cp4 2 x 2": Case(cp=4, heads=2, micro=4, microbatches=1, model=BIG),
    "dp4 zero 3 in pairs": Case(dp=4, zero=3, shard=2, micro=1, microbatches=1, model=BIG),
    "dp4 zero 3": Case(dp=4, zero=3, micro=1, microbatches=1, model=BIG),
    "2x2x2": Case(pp=2, dp=2, tp=2, sequence=True, micro=4, microbatches=1, model=BIG),
}


def loopback_up() -> None:
    """Switches the loopback of this network namespace on.

    It does the same as ifconfig lo up, by ioctl (netdevice(7)).
    """
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket() as any_socket:
        flags = struct.unpack(
            "16sH14s", fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14s", b"lo", 0, b""))
        )[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14s", b"lo", flags | up, b""))


def enter_own_network() -> None:
    """Moves the ranks into a separate network namespace, if that is permitted.

    No other process uses its loopback. Groups that are created afterwards communicate there. Rank 0
    creates the namespace, the others join it (unshare(2), setns(2)).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    new_network = 0x40000000
    pid = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0 and libc.unshare(new_network) == 0:
        loopback_up()
        pid += os.getpid()
    dist.broadcast(pid, 0)
    if pid.item() and dist.get_rank():
        folder = os.open(f"/proc/{pid.item()}/ns/net", os.O_RDONLY)
        assert libc.setns(folder, new_network) == 0, os.strerror(ctypes.get_errno())
        os.close(folder)
    dist.barrier()


def on_the_wire(case: Case, windows: int = 6) -> list[float]:
    """Returns the kernel's bytes on the loopback divided by the bytes that all ranks counted.

    There is one ratio per window of some steps, until one is close to 1. If the loopback is shared,
    other traffic adds to the kernel's bytes, so several windows are tried.
    """
    enter_own_network()
    config = config_of(case)
    engine = engine_of(config)
    batch = data(config, engine)
    ratios: list[float] = []
    while len(ratios) < windows and not (ratios and ratios[-1] < 1.05):
        before = look(engine)
        for _ in range(2):
            engine.step(batch)
        counted, seen = (look(engine) - before).tolist()
        ratios.append(seen / counted)
    return ratios


def look(engine: Engine) -> torch.Tensor:
    """Returns the bytes counted by all ranks and by the kernel, once all of them were sent."""
    engine.optimizer.wait()
    dist.barrier()
    kernel = loopback_bytes() if engine.topology.rank == 0 else 0
    mine = [sum(engine.topology.traffic.values()), kernel]
    both = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(both)
    dist.barrier()
    return both


@pytest.mark.alone
@pytest.mark.skipif(
    not Path("/proc/net/dev").exists(), reason="needs Linux: /proc/net/dev counts loopback bytes"
)
@pytest.mark.parametrize("name", KERNEL)
def test_the_kernel_counts_the_bytes_we_count(name: str) -> None:
    """The counters agree within 5 %; headers and acknowledgements are additional.

    So threed's counter is compared with an independent one.
    """
    case = KERNEL[name]
    ratios = run_ranks(case.world, on_the_wire, case)[0]
    assert 0.99 < min(ratios) < 1.05, f"kernel / counted: {ratios}"
