"""Padded tables of words are no part of the model. That they train as others do, tests/test_equivalence.py shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.configs import Case, config_of, padded_to, topology_of, trained
from tests.harness import run_ranks
from threed import models
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.sharding import spec_of
from threed.distributed.topology import Axis
from threed.engine import Engine
from threed.layers import Slicing, embedding

VOCABULARY = 50257


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 128_000, 32_003])
def test_large_tables_have_rows_of_a_multiple_of_128(vocabulary: int, ranks: int) -> None:
    held = 0
    shapes = set()
    for rank in range(ranks):
        table = embedding.vocab_table(
            "word", vocabulary, 16, Slicing(Axis("tp", tuple(range(ranks)), rank))
        )
        spec = spec_of(table)
        shapes.add(tuple(table.shape))
        assert table.numel() == spec.numel + spec.padding
        held += spec.numel // 16
    ((rows, _),) = shapes
    assert rows % 128 == 0
    assert rows * ranks < 1.13 * vocabulary
    assert held == vocabulary


def config(tp: int) -> Config:
    """A model of one layer with the vocabulary of GPT-2."""
    plain = config_of(Case(tp=tp, layers=1, model="gpt"))
    small = plain.model.model_copy(
        update={"vocab": VOCABULARY, "heads": 6, "kv_heads": 6, "hidden": 24, "head_dim": 4}
    )
    return resolve(plain.model_copy(update={"model": small}), VOCABULARY, tp)


def losses(tp: int) -> tuple[list[float], list[float], int, Tensor]:
    """Losses, norms, rows of the head, and what is in their padding after two steps."""
    settings, topology = config(tp), topology_of(1, tp)
    model = models.build(settings.model, Slicing(topology.axis("tp"), False, settings.train.seed))
    engine = Engine(model, topology, settings)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (settings.train.global_batch, 17), generator=draw)
    metrics = [
        engine.step({"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
        for _ in range(2)
    ]
    slots = [slot for group in engine.optimizer.layout.groups for slot in group.slots]
    (table,) = [slot.param for slot in slots if slot.spec.padding]
    padding = table.detach().flatten()[spec_of(table).numel :].clone()
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], len(table), padding


def test_the_loss_of_50257_words_does_not_depend_on_tensor_ranks() -> None:
    alone, norms, rows, padding = run_ranks(1, losses, 1)[0]
    assert rows == 50304
    for tp in (2, 3):
        for found, found_norms, rows, padding in run_ranks(tp, losses, tp):
            assert found == pytest.approx(alone, rel=1e-9)
            assert found_norms == pytest.approx(norms, rel=1e-9)
            assert rows % 128 == 0
            assert padding.numel()
            assert not padding.any()


def save(folder: Path, case: Case) -> dict[str, Tensor]:
    engine, _ = trained(case)
    engine.save(folder)
    return engine.full_state_dict()


def load(folder: Path, case: Case) -> dict[str, Tensor]:
    engine, _ = trained(case)
    with padded_to(case.pad):
        engine.load(folder)
    return engine.full_state_dict()


@pytest.mark.seldom("saved0*", "saved2*")
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 8), (1, 0)), ((1, 0), (4, 8)), ((2, 8), (4, 16)), ((4, 8), (2, 0))]
)
def test_a_checkpoint_has_no_padding(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    """(tensor ranks, rows of padding)"""
    first, second = (Case(tp=tp, pad=pad, zero=1) for tp, pad in (saved, loaded))
    before = run_ranks(first.tp, save, tmp_path / "step", first)[0]
    after = run_ranks(second.tp, load, tmp_path / "step", second)[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
