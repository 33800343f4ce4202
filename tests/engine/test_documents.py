"""Rows of several documents: no document depends on another, and training equals one document at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import configs
from tests.configs import SEQ, VOCAB, Case, config_of, engine_of, share
from tests.harness import run_ranks
from threed import layers, models
from threed.config import Config, ConfigError
from threed.distributed.topology import Topology
from threed.engine import Engine, LayeredEngine
from threed.layers import Causal, MicroBatch, Slicing, embedding
from threed.ops import attention, rotary
from threed.ops.positions import in_documents
from threed.pipeline.batches import Batches
from threed.testing import Results, differences, results_of

TOLERANCE = 1e-9  # fp64: only the order of sums differs
CASES = [
    Case(model="llama", tp=2, recompute="selective"),
    Case(model="gpt", tp=2, sequence=True, recompute="full"),
    Case(model="gemma2", tp=2, sequence=True),
    Case(model="mistral", tp=2),
    Case(model="gpt", pp=2, schedule="zb-h1", microbatches=4),
    Case(model="llama", pp=2, recompute="full"),
    Case(model="mistral", pp=2, schedule="zb-h1", recompute="selective", microbatches=4),
    Case(model="gemma2", pp=2),
    Case(model="gpt", dp=2, zero=3, recompute="selective"),
    Case(model="llama", dp=2, zero=2),
    Case(model="gemma2", dp=2, zero=3, recompute="full"),
    Case(model="phi3", dp=2, zero=3),
    Case(model="mistral", tp=2, pp=2, dp=2, sequence=True, zero=3, schedule="zb-v", layers=6),
]  # fmt: skip


def documents(step: int, rows: int) -> Tensor:
    """Documents [b s] of 1 to 16 tokens; the first row is one document."""
    draw = torch.Generator().manual_seed(77 * rows + step)
    begins = torch.rand(rows, SEQ, generator=draw) < torch.linspace(0, 0.6, rows).view(-1, 1)
    begins[0] = False
    return begins.cumsum(1) + 5


def batch(step: int, rows: int) -> dict[str, Tensor]:
    return {**configs.batch(step, rows), "documents": documents(step, rows)}


def parts(numbers: Tensor) -> Iterator[tuple[int, slice]]:
    """The documents [b s], as (row, positions)."""
    for row, of_row in enumerate(numbers):
        for number in of_row.unique():
            at = (of_row == number).nonzero().flatten()
            yield row, slice(int(at[0]), int(at[-1]) + 1)


def one_by_one(full: dict[str, Tensor]) -> list[MicroBatch]:
    """A micro-batch per document, without padding.

    The last token of a document has a label only at the end of a row, where the batch gives the
    next token.
    """
    alone = []
    for row, at in parts(full["documents"]):
        tokens, labels = (full[name][row : row + 1, at].clone() for name in ("tokens", "labels"))
        if at.stop < SEQ:
            labels[:, -1] = -1
        alone.append((tokens, labels))
    weight = 1 / torch.cat([labels.flatten() for _, labels in alone]).ge(0).sum().double()
    return [MicroBatch(*pair, torch.arange(1), weight) for pair in alone]


def trained_alone(case: Case) -> Results:
    """Trains one document at a time, in one process."""
    engine, metrics = engine_of(config_of(case.truth)), []
    for step in range(configs.STEPS):
        full = batch(step, case.rows)
        micros = one_by_one(full)
        with mock.patch.object(engine.batches, "micro_batches", lambda *_, m=micros: m):
            metrics.append(engine.step(full))
    return results_of(engine, metrics)


def write_truths(cases: Sequence[Case], folder: str) -> None:
    for case in cases:
        torch.save(vars(trained_alone(case)), f"{folder}/{_name(case)}")


def _name(case: Case) -> str:
    return f"{case.model}-{case.rows}-{case.layers}.pt"


def compare(cases: Sequence[Case], folder: str, fault: str = "none") -> list[str]:
    """The differences of this rank's results from documents that are trained alone."""
    wrong = []
    for case in cases:
        with FAULTS[fault]():
            config = config_of(case)
            engine, rows = engine_of(config), config.train.global_batch
            metrics = [
                engine.step(share(batch(step, rows), engine.topology))
                for step in range(configs.STEPS)
            ]
            truth = torch.load(f"{folder}/{_name(case)}", mmap=True, weights_only=False)
            found = differences(engine, metrics, Results(**truth), TOLERANCE)
        wrong += [f"{case}\nrank {engine.topology.rank}: {finding}" for finding in found]
    return wrong


# ------------------------------------------------------------------------------ planted faults


def _go_on(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that do not begin again."""
    return in_documents(numbers * 0)


@contextmanager
def _positions() -> Iterator[None]:
    with mock.patch.object(rotary, "in_documents", _go_on):
        with mock.patch.object(embedding, "in_documents", _go_on):
            yield


def _joined(numbers: Tensor) -> Iterator[tuple[int, int, int]]:
    """The last two documents of each row as one."""
    last = numbers.amax(1, keepdim=True)
    return _borders(torch.where(numbers == last, last - 1, numbers))


_borders = attention._borders
FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "positions that go on": _positions,
    "labels across borders": lambda: mock.patch.object(Batches, "_end_documents", lambda *_: None),
    "a mask that leaks": lambda: mock.patch.object(attention, "_borders", _joined),
}


# --------------------------------------------------------------------------------- equivalence


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("truths"))
    run_ranks(1, write_truths, list({_name(case): case for case in CASES}.values()), folder)
    return folder


def test_packed_documents_train_as_if_alone(truths: str) -> None:
    wrong = list[str]()
    for shape in sorted({(case.pp, case.dp, case.tp) for case in CASES}):
        mine = [case for case in CASES if (case.pp, case.dp, case.tp) == shape]
        for found in run_ranks(mine[0].world, compare, mine, truths, timeout=600):
            wrong += found
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("fault", list(FAULTS)[1:])
def test_a_planted_fault_is_found(fault: str, model: str, truths: str) -> None:
    case = next(case for case in CASES if case.model == model and case.world == 2)
    alone = replace(case, pp=1, dp=1, tp=1, sequence=False, schedule="1f1b", recompute="none")
    [found] = run_ranks(1, compare, [alone], truths, fault)
    assert any("loss" in line for line in found)
    assert not run_ranks(1, compare, [alone], truths)[0]


# ------------------------------------------------------------------------------------ every bit


def bits(model: str, tp: int, sequence: bool, dtype: str) -> list[str]:
    """Documents whose outputs or gradients change with a token of another document."""
    case = Case(model=model, tp=tp, sequence=sequence, dtype=dtype)
    engine, full = engine_of(config_of(case)), batch(0, case.rows)
    wrong = []
    row, at = list(parts(full["documents"]))[len(full["documents"])]
    before = _passes(engine, full)
    full["tokens"][row, at.start] = (full["tokens"][row, at.start] + 1) % VOCAB
    positions = engine.batches.slicing.positions(SEQ)
    for (name, old), (_, new) in zip(before, _passes(engine, full), strict=True):
        changed = {
            (int(b), positions.indices(torch.device("cpu"))[int(s)].item())
            for s, b in (old != new).any(-1).nonzero()
        }
        outside = [(b, s) for b, s in changed if b != row or not at.start <= s < at.stop]
        wrong += [f"{case}: {name} of other documents: {outside}"] * bool(outside)
    inside = any((old != new).any() for _, old in before for _, new in _passes(engine, full))
    return wrong if inside else [f"{case}: the token changed nothing"]


def _passes(engine: Engine, full: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The output of the last block, and the gradient of the first block's input, both [s/t b h]."""
    [stage] = engine.executor.stages
    micro = MicroBatch(full["tokens"], documents=full["documents"])
    first, *blocks, _ = stage.layers
    x = first(None, micro).detach().requires_grad_()
    y = x
    for block in blocks:
        y = block(y, micro)
    draw = torch.Generator().manual_seed(3)
    (dx,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=draw).to(y.dtype))
    return [("outputs", y.detach()), ("gradients", dx)]


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("model", ["gpt", "llama", "gemma2", "mistral"])
def test_a_token_changes_no_bit_of_other_documents(model: str, dtype: str) -> None:
    for tp, sequence in [(1, False), (2, True)]:
        for found in run_ranks(tp, bits, model, tp, sequence, dtype):
            assert not found, found
