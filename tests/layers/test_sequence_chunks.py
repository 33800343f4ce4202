"""Chunks of the sequence and gathered inputs: results equal those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests import configs
from tests.configs import Case, config_of, train, trained
from tests.harness import run_ranks
from threed.config import Config
from threed.distributed.topology import Axis, Topology
from threed.layers import ColumnLinear, Slicing, sequence_chunks
from threed.planner.forecast import Forecast
from threed.testing import differences

TOLERANCE = 1e-9  # fp64: only the order of sums differs


@contextmanager
def forced(chunks: int, gathered: bool) -> Iterator[None]:
    """Context with a number of chunks and a value of `recompute.gathered`."""
    config_of = configs.config_of

    def with_gathered(case: Case) -> Config:
        config = config_of(case)
        again = gathered and case.tp > 1
        recompute = config.recompute.model_copy(update={"gathered": again})
        return config.model_copy(update={"recompute": recompute})

    def count(rows: int, *_: object) -> int:
        return chunks if rows % chunks == 0 else 1

    with (
        patch.object(configs, "config_of", with_gathered),
        patch.object(sequence_chunks, "count", count),
    ):
        yield


KINDS = [(1, True), (2, False), (2, True), (4, True)]  # number of chunks; whether gathered again


def compare(cases: list[Case], truths: list[configs.Result], every: bool) -> list[str]:
    """Returns the differences from one process, for every kind or, in turn, every second one."""
    found = []
    for number, (case, truth) in enumerate(zip(cases, truths, strict=True)):
        found += compare_kinds(case, truth, KINDS if every else KINDS[number % 2 :: 2])
    return found


def compare_kinds(
    case: Case, truth: configs.Result, kinds: Sequence[tuple[int, bool]]
) -> list[str]:
    """Returns the differences of a case from one process, for some kinds."""
    found = []
    for chunks, gathered in kinds:
        with forced(chunks, gathered):
            wrong = differences(*trained(case), truth, TOLERANCE)
        found += [f"{case}, {chunks} chunks, gathered {gathered}: {text}" for text in wrong]
    return found


CASES = [
    Case(tp=2, sequence=True, dropout=0.1),
    Case(tp=2, sequence=True, model="llama", recompute="selective"),
    Case(tp=2, sequence=True, model="llama", recompute="full", dropout=0.1),
    Case(tp=4, sequence=True, dropout=0.1, recompute="selective", zero=3),
    Case(tp=4, sequence=True, model="qwen-tied"),
    Case(pp=2, tp=2, sequence=True, schedule="zb-v", model="llama", dropout=0.1, microbatches=3),
]  # fmt: skip


@pytest.mark.seldom("shape2-False")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.grid)])
@pytest.mark.parametrize("shape", [(1, 2), pytest.param((1, 4), marks=pytest.mark.grid), (2, 2)])
def test_chunks_and_gathered_inputs_equal_one_process(shape: tuple[int, int], every: bool) -> None:
    cases = [case for case in CASES if (case.pp, case.tp) == shape]
    truths = [train(case.truth) for case in cases]
    for wrong in run_ranks(cases[0].world, compare, cases, truths, every, timeout=600):
        assert not wrong, "\n".join(wrong)


def bits() -> dict[tuple[int, bool], list[Tensor]]:
    """Returns output and gradients of a column-parallel layer, per number of chunks and kind of gather."""
    tp = Topology(tp=2).axis("tp")
    up = ColumnLinear("m", 6, [("up", 16)], Slicing(tp, True)).to_empty(device="cpu")
    found = {}
    for chunks, again in itertools.product((1, 2), (False, True)):
        draw = torch.Generator().manual_seed(tp.index)
        for param in up.parameters():
            param.data, param.grad = torch.randn(param.shape, generator=draw), None
        x = torch.randn(4, 3, 6, generator=draw).requires_grad_()
        up.regather = again
        with patch.object(sequence_chunks, "count", lambda *_, n=chunks: n):
            y = up(x)
        y.square().sum().backward()
        found[chunks, again] = [y.detach(), *(t.grad for t in (x, up.weight, up.bias))]
    return found  # type: ignore[return-value]


def test_gathering_again_changes_no_bit() -> None:
    """Chunks without a second gather sum the weight's gradient in another order."""
    for found in run_ranks(2, bits):
        plain = found[1, False]
        assert all(map(torch.equal, plain, found[1, True]))
        for other in (found[2, False], found[2, True]):
            for a, b in zip(plain, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_chunk_order() -> None:
    """[t c n ...] -> [c t n ...]."""
    x = torch.arange(12).view(12, 1)
    order = sequence_chunks.Chunks(Axis("tp", (0, 1), 0), 3).gathered_order(x)
    assert order.flatten().tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_chunks_only_where_the_model_of_time_gains() -> None:
    axis = Axis("tp", tuple(range(8)), 0)
    llama = (1024, 1, 4096, 3584, 2)
    assert sequence_chunks.count(*llama, axis) == 1  # on a CPU, collectives use the processor
    with patch("threed.distributed.collectives._gloo", lambda axis: False):
        assert sequence_chunks.count(*llama, axis) > 1
        assert sequence_chunks.count(1023, 1, 4096, 3584, 2, axis) == 1
        assert sequence_chunks.count(8, 1, 256, 128, 2, axis) == 1


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_forecast_has_the_memory_of_gathered_inputs(model: str) -> None:
    """Each of 3 layers keeps two inputs [s b h], or a half of them; two micro-batches of 2 of 4 rows."""
    config = config_of(Case(tp=2, sequence=True, model=model, dp=1, microbatches=2))
    kept, again = (
        Forecast.of(
            config.model_copy(
                update={"recompute": config.recompute.model_copy(update={"gathered": value})}
            ),
            2,
        ).ranks[0].bytes["activations"]
        for value in (False, True)
    )  # fmt: skip
    rows, hidden = config.train.micro_batch, config.model.hidden
    part = configs.SEQ * rows * hidden * 8 // 2
    print(kept, again, (kept - again) / part)
    assert kept - again == 3 * 2 * part
