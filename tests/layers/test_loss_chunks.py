"""Logits made for some positions at a time: the numbers of all at once, and their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import test_equivalence as equivalence
from tests.configs import SEQ, Case, batch, config_of, engine_of, padded_to, share
from tests.covering import Space, Values
from tests.harness import run_ranks
from tests.live import Live
from threed.config import Config
from threed.layers import LayerNorm, MicroBatch, Slicing
from threed.layers.loss import LanguageModelHead

SETTINGS: dict[str, list[object]] = {
    name: options[:1] for name, options in equivalence.SETTINGS.items()
} | {
    "pp": [1, 2],
    "dp": [1, 2],
    "tp": [1, 2],
    "model": ["gpt", "gpt-untied", "gemma2"],
    "sequence": [True, False],
    "zero": [0, 1, 2, 3],
    "microbatches": [1, 3],
    "dtype": ["fp64", "bf16"],
    "recompute": ["none", "full"],
    "pad": [0, 8],
}


def make(values: Values) -> Case | None:
    """A case of the equivalence tests on at most two ranks."""
    case = equivalence.make(values)
    return case if case is not None and case.world <= 2 else None


SPACE = Space(SETTINGS, make, cost=lambda case: case.world, shape=lambda c: (c.pp, c.dp, c.tp))


def in_chunks(config: Config, chunks: int) -> Config:
    """The same with so many."""
    return config.model_copy(
        update={"recompute": config.recompute.model_copy(update={"loss_chunks": chunks})}
    )


def steps(case: Case, chunks: int) -> tuple[list[float], list[float]]:
    """Losses and norms of two steps, and the loss of an evaluation."""
    config = in_chunks(config_of(case), chunks)
    with padded_to(case.pad):
        engine = engine_of(config)
    rows = config.train.global_batch
    done = [engine.step(share(batch(step, rows), engine.topology)) for step in range(2)]
    return [
        *(m.loss for m in done),
        float(engine.evaluate(share(batch(2, rows), engine.topology))),
    ], [m.grad_norm for m in done]


def compare(cases: list[Case], numbers: tuple[int, ...] = (3, 1000)) -> None:
    """On every rank. Sums over chunks are in another order; in bf16 a weight's gradient is added up in fp32."""
    for case in cases:
        want, want_norms = steps(case, 1)
        for chunks in numbers:  # from SEQ on: one position at a time
            losses, norms = steps(case, chunks)
            tolerance = 1e-9 if case.dtype == "fp64" else 2e-3
            assert losses == pytest.approx(want, rel=tolerance), case
            assert norms == pytest.approx(want_norms, rel=10 * tolerance), case


def test_every_setting_gives_the_same() -> None:
    cases = SPACE.touching(0)
    for name, options in SETTINGS.items():
        assert {getattr(case, name) for case in cases} == set(options), name
    compare_all(cases, (3,))
    compare_all(cases[:1], (1000,))


@pytest.mark.grid
def test_a_covering_set_gives_the_same() -> None:
    """With every pair of values of two settings."""
    compare_all(SPACE.covering(0), (3, SEQ, 1000))


def compare_all(cases: list[Case], *numbers: tuple[int, ...]) -> None:
    """On the ranks of one world per shape."""
    for shape in sorted({(c.pp, c.dp, c.tp) for c in cases}):
        mine = [case for case in cases if (case.pp, case.dp, case.tp) == shape]
        run_ranks(mine[0].world, compare, mine, *numbers, timeout=900)


def head(vocab: int, trained: bool = True) -> LanguageModelHead:
    """A head by itself, whose gradients autograd gets."""
    slicing = Slicing()
    made = LanguageModelHead(
        "head", "table", LayerNorm("head.norm", 16, slicing), vocab, 16, slicing
    )
    made.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(0)
    for p in made.parameters():
        p.data.copy_(torch.randn(p.shape, generator=draw))
    made.weight.requires_grad_(trained)
    return made


def loss_of(
    made: LanguageModelHead, s: int, chunks: int, given: bool = True
) -> tuple[Tensor, Tensor]:
    """The loss of a micro-batch of two, and the input."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(s, 2, 16, generator=draw).requires_grad_(given)
    labels = torch.randint(-1, 50, (2, s), generator=draw)
    micro = MicroBatch(labels=labels, weight=torch.tensor(0.25), loss_chunks=chunks)
    return made(x, micro), x


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("s", [1, 5, 12])
def test_a_head_without_an_engine_gives_its_gradients(s: int, trained: bool, given: bool) -> None:
    results = []
    for chunks in (1, 4):
        made = head(50, trained)
        loss, x = loss_of(made, s, chunks, given)
        (loss * 3).backward()
        results.append([loss.detach(), x.grad, *(p.grad for p in made.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Peak(Live):
    """Also remembers the most bytes at once."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, sum(self.sizes()))
        return out


def test_memory_is_that_of_a_chunk() -> None:
    peaks = []
    for chunks in (1, 8):
        made = head(5000)
        with Peak() as live:
            loss_of(made, 64, chunks)[0].backward()
        peaks.append(live.most)
    logits, table = 64 * 2 * 5000 * 4, 5000 * 16 * 4
    assert peaks[0] > logits
    assert peaks[1] < logits / 8 * 3 + 2 * table + 200_000
