"""A model that cannot be right is refused before the first step, on every rank, by the names of layer and parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.configs import SEQ, Case, batch, config_of, engine_of, share, topology_of
from tests.harness import run_ranks
from threed import layers
from threed.config import ModelConfig
from threed.distributed.sharding import Init, ModelError, Piece, ShardSpec, parameter
from threed.engine import Engine
from threed.layers import MicroBatch, Slicing
from threed.zero.step_metrics import DataError


class Model:
    """An embedding, what `middle` makes, and a tied head."""

    middle: Callable[[ModelConfig, Slicing], Sequence[nn.Module]] = staticmethod(lambda c, s: ())
    std = 0.02

    def __init__(self, config: ModelConfig, slicing: Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        c, s = self.config, self.slicing
        norm = layers.RMSNorm("head.norm", c.hidden, s)
        return [
            layers.Embedding("embedding", c.vocab or 0, c.hidden, s),
            *self.middle(c, s),
            layers.LanguageModelHead(
                "head", "embedding.word.weight", norm, c.vocab or 0, c.hidden, s, std=self.std
            ),
        ]

    def costs(self, micro_batch: int) -> list[float]:
        return [1.0] * len(self.layers())


class Scale(nn.Module):
    """x * weight, with any record."""

    def __init__(self, name: str, spec: ShardSpec, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.name, self.weight = name, parameter(spec, shape)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x * self.weight


def vector(name: str, width: int, slicing: Slicing, **changes: Any) -> ShardSpec:
    piece = Piece(f"{name}.weight", (width,), (0,), (width,), init=Init(value=1.0))
    return replace(ShardSpec((piece,), slicing.replicated, slicing.partial, decay=False), **changes)


class TwoNorms(nn.Module):
    """Two norms that were given one name."""

    def __init__(self, width: int, s: Slicing) -> None:
        super().__init__()
        self.name = "block"
        self.first = layers.RMSNorm("block.norm", width, s)
        self.second = layers.RMSNorm("block.norm", width, s)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return self.second(self.first(x))


class Bare(nn.Module):
    name = "bare"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def frozen_embedding(model: Model) -> list[nn.Module]:
    found = Model.layers(model)
    found[0].requires_grad_(False)
    return found


def of_rank(c: ModelConfig, s: Slicing) -> list[nn.Module]:
    """The global shape of its weight depends on the rank."""
    width = c.hidden + s.tp.index
    piece = Piece("odd.weight", (width,), (0,), (width,))
    return [Scale("odd", ShardSpec((piece,), s.replicated, s.partial), (width,))]


def half(c: ModelConfig, s: Slicing) -> list[nn.Module]:
    """Its piece leaves out half of the global tensor."""
    piece = Piece("half.weight", (2 * c.hidden,), (0,), (c.hidden,))
    return [Scale("half", ShardSpec((piece,), s.replicated, s.partial), (c.hidden,))]


MODELS: dict[str, type[Model]] = {
    "other std": type("M", (Model,), {"std": 0.05}),
    "frozen in one place": type("M", (Model,), {"layers": frozen_embedding}),
    "no record": type("M", (Model,), {"middle": staticmethod(lambda c, s: [Bare()])}),
    "one name": type("M", (Model,), {"middle": staticmethod(lambda c, s: [TwoNorms(c.hidden, s)])}),
    "other decay": type("M", (Model,), {"middle": staticmethod(lambda c, s: [
        Scale("a", vector("shared", c.hidden, s), (c.hidden,)),
        Scale("b", vector("shared", c.hidden, s, decay=True), (c.hidden,)),
    ])}),
    "half": type("M", (Model,), {"middle": staticmethod(half)}),
    "of the rank": type("M", (Model,), {"middle": staticmethod(of_rank)}),
    "not replicated": type("M", (Model,), {"middle": staticmethod(
        lambda c, s: [Scale("scale", vector("scale", c.hidden, s, replicated=None), (c.hidden,))]
    )}),
    "says replicated": type("M", (Model,), {"middle": staticmethod(lambda c, s: [Scale("scale", ShardSpec(
        (Piece("scale.weight", (c.hidden,), (c.hidden // s.tp.size * s.tp.index,), (c.hidden // s.tp.size,)),),
        s.replicated), (c.hidden // s.tp.size,))])}),
}  # fmt: skip

MESSAGES = {
    "other std": r"embedding\.word\.weight is one weight of embedding \(Embedding\) word\.weight and head"
    r" \(LanguageModelHead\) weight, but they do not agree: initial values .*0\.02.*0\.05",
    "frozen in one place": "embedding.word.weight is one weight of .* requires_grad False and True",
    "no record": r"bare \(Bare\): parameter weight has no sharding record: make it by threed.layers",
    "one name": r"block \(TwoNorms\): parameters first\.weight and second\.weight have the same name block\.norm",
    "other decay": r"shared\.weight is one weight of a \(Scale\) weight and b \(Scale\) .* decay False and True",
    "half": r"half \(Scale\): half\.weight \[64\]: tensor ranks hold 32 of its 64 elements",
    "of the rank": r"odd \(Scale\): parameter weight is not the same on ranks 0 and 1: global shape .*32.* and .*33",
    "not replicated": r"scale \(Scale\): scale\.weight \[32\]: tensor ranks 0 and 1 hold the same elements",
    "says replicated": r"scale \(Scale\): .* marked as replicated over tp, but tensor ranks 0 and 1 hold differ",
}


def build(case: Case, model: type[Model], slicing: Slicing | None = None) -> Engine:
    config, topology = config_of(case), topology_of(case.pp, case.tp)
    slicing = slicing or Slicing(
        topology.axis("tp"), bool(config.parallel.sequence), config.train.seed
    )
    return Engine(model(config.model, slicing), topology, config)  # type: ignore[arg-type]


def refused(names: list[str], tp: int) -> None:
    for name in names:
        with pytest.raises(ModelError, match=f"(?s){MESSAGES[name]}"):
            build(Case(tp=tp), MODELS[name])
    if tp > 1:
        with pytest.raises(
            ModelError,
            match="the model's Slicing has 1 tensor rank, the topology has 2: build the mo",
        ):
            build(Case(tp=tp), Model, Slicing())


def test_records_that_cannot_be_right_are_refused_by_name() -> None:
    refused(["other std", "frozen in one place", "no record", "one name", "other decay", "half"], 1)


def test_records_that_tensor_ranks_cannot_share_are_refused_on_all_of_them() -> None:
    run_ranks(2, refused, list(MODELS), 2)


def test_a_good_model_is_not_refused() -> None:
    assert build(Case(), Model).layout.parameters == 53 * 32 + 32


# ------------------------------------------------------------------------------------------------- what depends on data


def wrong_ids(case: Case) -> None:
    engine, rows = build(case, Model), config_of(case).train.global_batch
    for key, what in (
        ("tokens", "token ids beyond the 53 of embedding.word"),
        ("labels", "labels beyond the 53 of head"),
    ):
        data = batch(0, rows)
        data[key] = data[key].clone()
        data[key][-1, 0] = 60  # the last data rank's
        metrics = engine.step(share(data, engine.topology))
        for name in ("loss", "grad_norm"):
            with pytest.raises(DataError, match=what):
                getattr(metrics, name)
        assert engine.evaluate(share(data, engine.topology)).isnan()
    good = share(batch(1, rows), engine.topology)
    assert engine.step(good).loss > 0  # what was wrong was told
    engine.step(share(data, engine.topology))  # nobody reads this step's metrics
    with pytest.raises(
        DataError, match="up to step 5, since metrics were last read: labels beyond the 53 of head"
    ):
        engine.step(good).loss  # noqa: B018  reading it is the test
    assert engine.step(good).loss > 0
    with torch.inference_mode():
        assert engine.evaluate(good).isfinite()
    assert engine.step(good).loss > 0


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_ids_beyond_the_vocabulary_are_told_on_every_rank(shape: tuple[int, int, int]) -> None:
    case = Case(*shape)
    run_ranks(case.world, wrong_ids, case)


def different_batches(case: Case) -> None:
    """Steps in which one rank of a stage has other tokens, labels or documents than the others."""
    engine = engine_of(config_of(case))
    rows, axes = config_of(case).train.global_batch, map(engine.topology.axis, ("cp", "tp"))
    last = all(axis.index == axis.size - 1 for axis in axes)
    before = engine.full_state_dict()
    same = batch(0, rows)
    documents = torch.arange(SEQ).expand(rows, -1) // 5
    for other in (
        {"tokens": same["tokens"].flip(0)},
        {"labels": same["labels"].roll(1, 1)},
        {"documents": documents},
    ):
        given = same | other if last else same
        data = share(given, engine.topology)
        metrics = engine.step(data)
        with pytest.raises(
            DataError, match=r"tensor or context ranks with different batches: pass the same batch"
        ):
            _ = metrics.loss
        assert engine.evaluate(data).isnan()
    for name, weight in engine.full_state_dict().items():
        assert torch.equal(weight, before[name])
    assert engine.step(share(same | {"documents": documents}, engine.topology)).loss > 0


@pytest.mark.seldom("cp2-tp1")
@pytest.mark.parametrize(
    "case",
    [Case(tp=2, microbatches=1), Case(cp=2, cp_heads=1, tp=2, dp=2, microbatches=1), Case(cp=2, cp_heads=2, pp=2)],
    ids=lambda case: f"cp{case.cp}-tp{case.tp}",
)  # fmt: skip
def test_different_batches_on_tensor_or_context_ranks_are_an_error(case: Case) -> None:
    run_ranks(case.world, different_batches, case)


class Values(Scale):
    """Reads the batch's 'values' [b s h]; returns them multiplied by a weight, [s b h]."""

    def forward(self, x: None, micro: MicroBatch) -> Tensor:  # type: ignore[override]
        assert micro.inputs is not None
        return micro.inputs["values"].transpose(0, 1) * self.weight


class Squares(nn.Module):
    """The mean square as the loss."""

    name = "squares"

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        loss = x.square().mean()
        return loss if micro.weight is None else loss * micro.weight


class OfValues(Model):
    """A model whose batches have no tokens."""

    def layers(self) -> list[nn.Module]:
        spec = vector("values", self.hidden, self.slicing)
        return [Values("values", spec, (self.hidden,)), Squares()]


def different_lengths(case: Case) -> list[dict[str, str]]:
    """Returns the errors of a step and of an evaluation in which the last rank has short sequences.

    The last rank gets them in the first step, and after all ranks have had long and short ones. A
    batch has no tokens if the model has 2 layers.
    """
    engine = build(case, OfValues) if case.layers == 2 else engine_of(config_of(case))
    long, world = share(batch(0, case.rows), engine.topology), engine.topology.axis("world")
    if case.layers == 2:
        long = {"values": torch.ones(len(long["tokens"]), 16, engine.model.hidden).double()}
    short = {name: value[:, :8].contiguous() for name, value in long.items()}
    found = []
    for before in ((), (long, short)):
        for same in before:
            assert engine.step(same).loss > 0
            assert engine.evaluate(same) > 0
        errors = {}
        for name, work in (("step", engine.step), ("evaluate", engine.evaluate)):
            try:
                work(short if world.index == world.size - 1 else long)
            except ValueError as error:
                errors[name] = str(error)
        found.append(errors)
    return found


SHORT_LAST = [
    (Case(tp=2, cp=2, sequence=True), "'tokens' are [8, 16] on ranks 0, 1, 2, [8, 8] on rank 3: pipeline, tensor and"),
    (Case(cp=2, cp_heads=1), "'tokens' are [8, 16] on rank 0, [8, 8] on rank 1: pipeline, tensor and context ranks"),
    (Case(pp=2), "'tokens' are [8, 16] on rank 0, [8, 8] on rank 1: pipeline, tensor and context ranks"),
    (Case(dp=2, ep=2, room=4.0, model="Softmax"), "'tokens' are [8, 16] on rank 0, [8, 8] on rank 1: with --exp"),
    (Case(pp=2, layers=2), "'values' are [8, 16, 32] on rank 0, [8, 8, 32] on rank 1: pipeline, tensor and"),
]  # fmt: skip


# without the comparison, gloo aborts the process: "Received data size doesn't match expected size"
@pytest.mark.parametrize(
    ("case", "message"), SHORT_LAST, ids=["tp-cp", "cp", "pp", "ep", "no-tokens"]
)
def test_different_lengths_are_an_error_that_names_the_ranks(case: Case, message: str) -> None:
    expected = {"step"} if case.room else {"step", "evaluate"}
    for of_rank in run_ranks(case.world, different_lengths, case):
        for found in of_rank:
            assert found.keys() == expected
            assert all(f"the batch's {message}" in text for text in found.values()), found


def unequal_rows(stage: int) -> None:
    engine = build(Case(dp=2, zero=stage, microbatches=3), Model)
    index, data = engine.topology.axis("dp").index, batch(0, 12)
    mine = {key: value[:8] if index == 0 else value[8:] for key, value in data.items()}
    with pytest.raises(
        ValueError,
        match=f"data rank {index} got a batch of {(8, 4)[index]} rows; each of the 2 data",
    ):
        engine.step(mine)
    with pytest.raises(
        ValueError, match=r"data ranks evaluate different numbers of rows, \[\[8\], \[4\]\]"
    ):
        engine.evaluate(mine)
    with pytest.raises(ValueError, match=r"(\[\[8\], \[7\]\]|different numbers of rows)"):
        # 7 is no multiple either
        engine.evaluate({key: value[: 8 - index] for key, value in data.items()})
    assert engine.step(share(data, engine.topology)).loss > 0


@pytest.mark.parametrize("stage", [1, 2])
def test_data_ranks_with_different_numbers_of_rows_are_refused(stage: int) -> None:
    run_ranks(2, unequal_rows, stage)
