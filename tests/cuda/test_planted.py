"""A fault planted into each kernel of csrc/cuda, which the emulator or the comparison must find.

Each is a change of one place in the source; the changed file alone is compiled, and the kernel runs as it does in the
kernel's own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda import emulator
from tests.cuda.cases import bf16, normal
from tests.cuda.emulator import COMPILER, ORDERS, SOURCES, Fault, Order, emulated
from threed.layers.routing import LossFactors, Routing, rule_of
from threed.ops import (
    activation,
    adam,
    cross_entropy,
    dropout,
    head_norm,
    lion,
    norm,
    quantize,
    rotary,
    router,
    sums,
)  # fmt: skip
from threed.ops.positions import Positions

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def whole_rows() -> Tensor:
    x = bf16(3, 5000)
    return torch.cat(
        (cross_entropy.whole(x, torch.tensor([1, 4999, 7]), torch.ones(()), 4999), x.float().sum(1))
    )


def long_rows() -> Tensor:
    """Shared memory holds 116,160 columns."""
    x = bf16(2, 117_000)
    return cross_entropy.whole(x, torch.tensor([1, 116_999]), torch.ones(()), 117_000)


def shards() -> Tensor:
    x, targets = bf16(3, 5000), torch.tensor([1, 4999, 7])
    numbers = cross_entropy.shard_numbers(x, targets, 5000, 0)
    return cross_entropy.from_numbers(
        x, targets, torch.ones(()), numbers.unsqueeze(0), 5000, 0, 5000
    )


def norms(h: int = 2048) -> Tensor:
    x, weight, dweight = bf16(13, h), bf16(h), torch.zeros(h)
    done = norm.forward(x, weight, None, 1e-5, False, residual=bf16(13, h, seed=1))
    return torch.cat(
        (norm.backward(x, done, weight, dweight, None, add=True).float().sum(0), dweight)
    )


def geglu() -> Tensor:
    x, dbias = bf16(300, 264), torch.zeros(264)
    return torch.cat((activation.gelu_backward(x, x, None, dbias).float().sum(0), dbias))


def squares() -> Tensor:
    x = bf16(33, 264)
    return activation.squared_relu_backward(activation.squared_relu(x), x)


def gates() -> Tensor:
    x = bf16(33, 528)
    return activation.swiglu_backward(activation.swiglu(x), x)


def heads() -> Tensor:
    x = bf16(10, 5 * 32)
    rotary.rotate_(x, Positions.all(5), 3, 32, 1e4)
    return x


def heads_back() -> Tensor:
    given = [bf16(5, 2, n, 32, seed=n) for n in (3, 2, 2)]
    return rotary.pack_back(tuple(given), Positions.all(5), 1e4)


def heads_normed() -> Tensor:
    x, weights = bf16(9, 2, 7 * 64), (bf16(64, seed=1), bf16(64, seed=2))
    by = head_norm.HeadNorm((3, 2), 64, 1e4, Positions.all(9), 0.0, 1e-5)
    y = head_norm.forward(x, weights, by)
    given = [bf16(9, 2, n, 64, seed=n) for n in (3, 2, 2)]
    outs = torch.zeros(64), torch.ones(64)
    dx = head_norm.backward(tuple(given), x, weights, by, outs, (False, True))
    return torch.cat([y.flatten(), dx.flatten(), *outs])


def routed() -> Tensor:
    """Choices, weights, losses, rows, and the gradient of the logits; 12 of 80 experts."""
    logits, dy, weight = normal(19, 2, 80), bf16(19, 2, 12), torch.tensor(0.5, dtype=torch.float64)
    logits[:3] = 0.5  # ties
    how = Routing("sigmoid", groups=5, groups_per_token=3, epsilon=1e-20)
    rule = rule_of(how, 12, LossFactors(0.3, 0.2))
    assert rule is not None
    experts, weights, counts, parts = router.route(logits, None, None, True, *rule)
    rows = router.sort(experts, counts)
    losses = router.losses(parts, rows.chosen, 1.0)
    dx = router.backward(
        dy, logits, experts, rows.chosen, weight, rule.flags, rule.scale, rule.epsilon, 0.3, 0.4
    )
    return torch.cat([t.flatten().double() for t in (experts, weights, losses, dx, *rows)])


def many_choices() -> Tensor:
    """More choices in a block than it reads at a time."""
    experts = torch.arange(32).expand(9, 4, 32).contiguous()
    counts = torch.tensor([5, 4], dtype=torch.int32).view(2, 1, 1).repeat(1, 4, 32)
    return torch.cat([t.double().flatten() for t in router.sort(experts, counts)])


def dropped() -> Tensor:
    what = dropout.Draw(1, "a", 2, torch.tensor([5, 6]), Positions.all(9), 0.5)
    return dropout.dropout(bf16(9, 2, 264), what)


def updated() -> Tensor:
    p, m, v, g = (torch.ones(5000) * k for k in (1.0, 0.1, 0.2, 0.3))
    scalars = (torch.tensor(x, dtype=torch.float64) for x in (1e-3, 3.0, 1.0, 0.0))
    adam.call_cuda(p, m, v, g, None, *scalars, 0.9, 0.95, 1e-8, 0.1)
    return p


def moved() -> Tensor:
    """By Lion, also where no gradient and no momentum is."""
    p, m, g = torch.ones(5000), torch.zeros(5000), torch.zeros(5000)
    g[::2] = -0.3
    scalars = (torch.tensor(x, dtype=torch.float64) for x in (0.1, 1.0, 0.0))
    lion.call_cuda(p, m, g, None, *scalars, 0.9, 0.99, 0.1)
    return p


def quantized() -> Tensor:
    """To 8 and 4 bits and back, a sum over nine ranks."""
    x, out = bf16(9 * 256), []
    for bits in (8, 4):
        q, scales = quantize.quantize(x, bits)
        both = torch.stack([scales * (1 + rank) for rank in range(9)])
        out.append(
            quantize.dequantize(torch.stack([q.roll(rank, 0) for rank in range(9)]), both, bits)
        )
    return torch.cat(out)


def summed() -> Tensor:
    out = torch.zeros(264)
    sums.column_sums(bf16(300, 264), out, add=True)
    return torch.cat((out.double(), sums.square_sum(torch.ones(50_000)).view(1)))


@dataclass(frozen=True)
class Planted:
    """`new` in place of `old` wherever it comes in a source. found: what the emulator says; None where only the numbers
    are wrong. users: of a header, the sources that the work runs; only these are compiled."""

    source: str
    old: str
    new: str
    work: Callable[[], Tensor]
    found: str | None
    users: tuple[str, ...] = ()


BEYOND = "out of bounds|race|unwritten"  # of a tensor: what lies there may be another one
FAULTS = {
    "no barrier before the warps' numbers": Planted(
        "cross_entropy.cu", "__syncthreads();", "", whole_rows, "race|unwritten"
    ),
    "padding is read": Planted(
        "cross_entropy.cu", "k < columns ? x[k]", "k <= columns ? x[k]", whole_rows, None
    ),
    "a pack too many is written": Planted(
        "cross_entropy.cu", "rest < width / PACK", "rest <= width / PACK", whole_rows, BEYOND
    ),
    "the end of a long row from shared memory": Planted(
        "cross_entropy.cu", "keep == BEGIN ? packs : used", "keep == BEGIN ? packs + 1 : used", long_rows, BEYOND
    ),
    "a logit after its gradient": Planted(
        "cross_entropy.cu", "if (here) hit", "if (!here) hit = bf16_at(logits_of_row + target);\nif (here) hit",
        long_rows, "race",
    ),
    "a row's numbers for the next": Planted(
        "cross_entropy.cu", "out + 3 * int64_t(blockIdx.x)", "out + 3 * int64_t(blockIdx.x / 2)", shards,
        "race|unwritten",
    ),
    "one scratch for two sums": Planted("norm.cu", "turn ^= 1;", "", lambda: norms(4096), "race"),
    "a row is left out": Planted(
        "norm.cu", "step = int64_t(gridDim.x) * ROWS", "step = int64_t(gridDim.x) * ROWS + 1", norms, "unwritten|wrong"
    ),
    "the same row again": Planted("norm.cu", "next = load(row + step)", "next = load(row)", norms, None),
    "no barrier between the rows' parts": Planted(
        "norm.cu", "if (ROWS > 1) __syncthreads();", "", lambda: norms(512), "race|unwritten"
    ),
    "a lane leaves before a shuffle": Planted(
        "common.cuh", "const bool odd = threadIdx.x % 2;",
        "if (at >= packs) return;\n  const bool odd = threadIdx.x % 2;", lambda: norms(8), "lanes that never come",
        ("norm.cu", "sums.cu"),
    ),
    "a bias gradient without a barrier": Planted(
        "common.cuh", "__syncthreads();\n  if (warp != 0)", "if (warp != 0)", geglu, "race|unwritten",
        ("activation.cu", "sums.cu"),
    ),
    "rows beyond the last": Planted("activation.cu", "if (row + u >= rows) continue;", "", gates, BEYOND),
    "a wrong derivative": Planted("activation.cu", "s + y * (1.f - s)", "s + y * (1.f + s)", gates, None),
    "another activation": Planted("activation.cu", "GELU ? Gelu::at(x) : Silu", "!GELU ? Gelu::at(x) : Silu", gates, None),
    "half a slope": Planted("activation.cu", "2.f * r", "r", squares, None),
    "a sign that is never 0": Planted("adam.cu", "mean > 0.f ? 1.f", "mean >= 0.f ? 1.f", moved, None),
    "a head too many": Planted("rotary.cu", "i < pairs", "i <= pairs", heads, None),
    "a turned number turned again": Planted(
        "rotary.cu", "right[k] * c[k] + old", "right[k] * c[k] + left[k]", heads, None
    ),
    "values are turned": Planted("rotary.cu", "if (head < turned)", "if (head <= turned)", heads_back, None),
    "keys of queries": Planted("rotary.cu", "head - queries", "head - keys", heads_back, "out of bounds|wrong"),
    "the weight of queries for keys": Planted("head_norm.cu", "head < queries ?", "head <= queries ?", heads_normed, None),
    "a mean over half a head": Planted(
        "head_norm.cu", "int step = HALF / 2; step;", "int step = HALF / 4; step;", heads_normed, None
    ),
    "lanes that are left out of a sum": Planted("head_norm.cu", "step = HALF;", "step = 2 * HALF;", heads_normed, None),
    "parts without a barrier": Planted(
        "head_norm.cu", "__syncthreads();  // both sums", "// both sums", heads_normed, "race|unwritten|wrong"
    ),
    "ties to the last expert of a lane": Planted(
        "router.cu", "&& key > best)", "&& order[i] && order[i] >= unsigned(best >> 32))", routed, None
    ),
    "experts of any group": Planted("router.cu", "if (how.groups > 1)", "if (how.groups > 9)", routed, None),
    "a counter of two lanes": Planted("router.cu", "lane == best % WARP", "lane == j", routed, "race"),
    "one expert of each group": Planted("router.cu", "how.two && size > 1", "how.two && size > 32", routed, None),
    "a wrong slope of sigmoids": Planted("router.cu", "s * (1.f - s)", "s * (1.f + s)", routed, None),
    "sums of warps without a barrier": Planted(
        "router.cu", "__syncthreads();\n  for (unsigned e", "for (unsigned e", routed, "race|unwritten|wrong"
    ),
    "choices of later blocks": Planted("choices.cu", "c < chunk ?", "c <= chunk ?", routed, "out of bounds|race|wrong"),
    "choices of the next tile": Planted(
        "choices.cu", "place++;\n      }\n    __syncthreads();", "place++;\n      }", many_choices, "race"
    ),
    "another counter": Planted(
        "dropout.cu", "2 * (position * packs + at) + half", "position * packs + at", dropped, None
    ),
    "a round of Philox too few": Planted("philox.cuh", "round < 10", "round < 9", dropped, None, ("dropout.cu",)),
    "constants before they are found": Planted("adam.cu", "__syncthreads();", "", updated, "race|unwritten"),
    "some are updated twice": Planted(
        "adam.cu", "i += int64_t(gridDim.x) * THREADS", "i += int64_t(gridDim.x - 1) * THREADS", updated, "race"
    ),
    "a lane's share for another's": Planted(
        "quantize.cu", "out += lane % LANES * PACKS<BITS>", "out += lane % LANES / 2 * PACKS<BITS>",
        quantized, "race",
    ),
    "the sign of a number": Planted("quantize.cu", "SIGNS = 0x80808080u", "SIGNS = 0x00808080u", quantized, None),
    "the place of a number": Planted("quantize.cu", "0x5140u", "0x5041u", quantized, None),
    "all but eight ranks": Planted("quantize.cu", "rank < ranks; rank", "rank < min(ranks, 8); rank", quantized, None),
    "an offset left out": Planted("quantize.cu", "MINUS_EIGHTS = 0xf8f8u", "MINUS_EIGHTS = 0u", quantized, None),
    "another rank's scale": Planted("quantize.cu", "0x7632u", "0x3276u", quantized, None),
    "a part is left out": Planted("sums.cu", "part = threadIdx.x / LANES;", "part = threadIdx.x / LANES + 1;", summed, None),
    "columns beyond the last": Planted("sums.cu", "row < rows && at < packs", "row < rows", summed, BEYOND),
}  # fmt: skip


def test_every_source_has_one() -> None:
    sources = {path.name for path in SOURCES.iterdir()}
    assert {planted.source for planted in FAULTS.values()} == sources


def one_order_always() -> list[Any]:
    """Parameters: every fault always runs in one order of the threads, in turn, and in the others with the grid."""
    return [
        pytest.param(name, order, marks=() if number % 3 == place else pytest.mark.grid)
        for number, name in enumerate(FAULTS)
        for place, order in enumerate(ORDERS)
    ]


@pytest.mark.parametrize(("name", "order"), one_order_always())
def test_a_planted_fault_is_found(name: str, order: Order) -> None:
    planted = FAULTS[name]
    text = (SOURCES / planted.source).read_text()
    parts = text.split(planted.old)
    assert len(parts) > 1, f"{planted.old!r} is no longer in {planted.source}"
    library = emulator.build({planted.source: planted.new.join(parts)}, only=planted.users)
    fault, wrong = _run(planted, order, library)
    if planted.found is None or not fault:
        assert not fault, fault
        assert planted.found is None or "wrong" in planted.found, f"{order}: no fault"
        with emulated():
            right = planted.work()
        assert not torch.allclose(right.double(), wrong.double(), rtol=1e-3, equal_nan=True)
    else:
        assert any(word in fault for word in planted.found.split("|")), fault


def _run(planted: Planted, order: Order, library: Path) -> tuple[str, Tensor]:
    """What the emulator says, or nothing; and the result."""
    try:
        with emulated(order, library=library):
            return "", planted.work()
    except Fault as fault:
        return str(fault), torch.empty(0)
