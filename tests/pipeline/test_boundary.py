"""What passes between stages has any form, and layers run as often as they like: the same numbers, or a clear error."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.configs import SEQ, VOCAB, Case, batch, config_of, share, topology_of
from tests.harness import run_ranks
from threed import layers
from threed.config import ModelConfig
from threed.engine import Engine
from threed.layers import MicroBatch, Slicing
from threed.pipeline.activation_checkpointing import ActivationStore, Recomputed
from threed.pipeline.boundary import Form, gradients_of, like, tensors
from threed.pipeline.stage import AlwaysGathered, Stage

Losses = list[float]


class Twice(nn.Module):
    """A linear layer and a norm that run `runs` times in a micro-batch, or a number that depends on the data."""

    def __init__(
        self, name: str, c: ModelConfig, s: Slicing, runs: int = 2, by_data: bool = False
    ) -> None:
        super().__init__()
        self.name, self.runs, self.by_data = name, runs, by_data
        self.norm = nn.Identity() if by_data else layers.RMSNorm(f"{name}.norm", c.hidden, s)
        self.mlp = layers.MLP(f"{name}.mlp", c.hidden, 2 * c.hidden, s, bias=not by_data)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        assert micro.tokens is not None
        for _ in range(1 + int(micro.step) if self.by_data else self.runs):
            x = x + self.mlp(self.norm(x))
        return x


class Declared(Twice):
    runs_vary = True


class Pair(nn.Module):
    """x -> (x, a second stream, ids), as a dict or a tuple."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__()
        self.name, self.how = name, how

    def forward(self, x: Tensor, micro: MicroBatch) -> Any:
        ids = torch.arange(x.shape[0])
        return (
            {"x": x, "wide": torch.cat((x, -x), -1), "ids": ids}
            if self.how == "dict"
            else (x, x.float(), ids)
        )


class Join(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Any, micro: MicroBatch) -> Tensor:
        one, other, ids = x.values() if isinstance(x, dict) else x
        assert ids.dtype == torch.int64
        return one + 0.5 * other[..., : one.shape[-1]].to(one.dtype) * (1 + ids.view(-1, 1, 1))


class Cut(nn.Module):
    """Hands on a part of the sequence, whose length depends on the data."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        assert micro.tokens is not None
        return x[: SEQ // 2 + int(micro.tokens[0, 0]) % 2]


class Pad(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, 0, 0, SEQ - x.shape[0]))


class Model:
    """An embedding, some layers and a head."""

    def __init__(self, config: ModelConfig, slicing: Slicing, kind: str) -> None:
        self.config, self.slicing, self.kind = config, slicing, kind
        self.boundaries_vary = kind == "cut, declared"

    def middle(self) -> Sequence[nn.Module]:
        c, s = self.config, self.slicing
        if self.kind in ("dict", "tuple"):
            return [Pair("pair", self.kind), Join("join")]
        if self.kind.startswith("cut"):
            return [Cut("cut"), Pad("pad")]
        kind = Declared if self.kind == "by data, declared" else Twice
        return [
            kind(f"blocks.{i}", c, s, by_data=self.kind.startswith("by data")) for i in range(2)
        ]

    def layers(self) -> list[nn.Module]:
        c, s = self.config, self.slicing
        norm = layers.RMSNorm("head.norm", c.hidden, s)
        head = layers.LanguageModelHead("head", "embedding.word.weight", norm, VOCAB, c.hidden, s)
        return [layers.Embedding("embedding", VOCAB, c.hidden, s), *self.middle(), head]

    def costs(self, micro_batch: int) -> list[float]:
        return [1.0] * len(self.layers())


def train(case: Case, kind: str) -> tuple[Losses, Losses, dict[str, Tensor]]:
    config, topology = config_of(case), topology_of(case.pp, case.tp)
    slicing = Slicing(topology.axis("tp"), bool(config.parallel.sequence), config.train.seed)
    engine = Engine(Model(config.model, slicing, kind), topology, config)  # type: ignore[arg-type]
    rows = config.train.global_batch
    metrics = [engine.step(share(batch(n, rows), topology)) for n in range(3)]
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], engine.full_state_dict()


@functools.cache
def alone(case: Case, kind: str) -> tuple[Losses, Losses, dict[str, Tensor]]:
    return run_ranks(1, train, case, kind)[0]  # type: ignore[no-any-return]


def check(cases: list[Case], kind: str) -> None:
    for case in cases:
        losses, norms, weights = run_ranks(case.world, train, case, kind)[0]
        truth = alone(
            replace(case.truth, microbatches=case.microbatches)
            if kind.startswith("cut")
            else case.truth,
            kind,
        )
        assert losses == pytest.approx(truth[0], rel=1e-9)
        assert norms == pytest.approx(truth[1], rel=1e-9)
        for name, weight in truth[2].items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-9, msg=name)


CASES = [
    Case(pp=2, zero=0), Case(pp=2, dp=2, zero=3, bucket_mib=0.001), Case(dp=2, zero=2, bucket_mib=0.001),
    Case(dp=2, zero=1, bucket_mib=0.001, recompute="full"), Case(tp=2, sequence=True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("twice", CASES),
        ("by data, declared", CASES[1::2]),
        pytest.param("by data, declared", CASES[::2], marks=pytest.mark.grid),
    ],
    ids=["twice", "by data, declared", "by data, declared, others"],
)
def test_layers_that_run_more_than_once(kind: str, cases: list[Case]) -> None:
    check(cases, kind)


def resume_bits(case: Case, folder: str) -> None:
    """What the first step learnt is in the checkpoint, so sums are made in the same order after it."""
    config, topology = config_of(case), topology_of(case.pp, case.tp)
    rows = config.train.global_batch

    def made() -> Engine:
        return Engine(Model(config.model, Slicing(topology.axis("tp")), "twice"), topology, config)  # type: ignore[arg-type]

    engine, other = made(), made()
    for step in range(2):
        engine.step(share(batch(step, rows), topology))
    engine.save(f"{folder}/step-2")
    other.load(f"{folder}/step-2")
    for one in (engine, other):
        one.step(share(batch(2, rows), topology))
    want, got = engine.full_state_dict(), other.full_state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
def test_a_resumed_run_sums_as_one_that_goes_on(shape: tuple[int, int], tmp_path: Path) -> None:
    case = Case(*shape, zero=2, dtype="fp32", bucket_mib=0.01)
    run_ranks(case.world, resume_bits, case, str(tmp_path))


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_several_tensors_pass_a_boundary(kind: str) -> None:
    check(
        [Case(pp=2), Case(pp=2, dp=2, zero=3, recompute="full"), Case(pp=4, recompute="nvme")], kind
    )


def test_forms_that_depend_on_the_data_are_declared() -> None:
    """What is cut off depends on a micro-batch's first token, so the truth has the same micro-batches."""
    check(
        [Case(pp=2, partition=(2, 2), microbatches=8), Case(pp=4, microbatches=3)], "cut, declared"
    )  # type: ignore[arg-type]
    with pytest.raises(
        AssertionError, match=r"cut \(Cut\) returned .* before, for micro-batches of the same shape"
    ):
        run_ranks(2, train, Case(pp=2, partition=(2, 2), microbatches=8), "cut", timeout=60)  # type: ignore[arg-type]


def test_more_runs_than_the_first_step_had_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        AssertionError,
        match=r"blocks\..*a data-dependent number of times; .*runs_vary",
    ):
        run_ranks(2, train, Case(dp=2, zero=2, bucket_mib=0.001), "by data")


def test_values_and_their_forms() -> None:
    x, ids = torch.ones(2, 3, requires_grad=True), torch.arange(4)
    for value in (x, (x, ids), {"a": x, "b": ids, "c": x.detach().half()}):
        form = Form.of(value)
        assert Form.from_bytes(form.to_bytes()) == form
        assert [t.shape for t in form.empty(torch.device("cpu"))] == [
            t.shape for t in tensors(value)
        ]
        again = form.value([t.detach().clone() for t in tensors(value)])
        assert Form.of(again) == form
        grads = form.gradients_to_send(
            like(value, [None] * len(tensors(value))), torch.device("cpu")
        )
        assert [g.shape for g in grads] == [x.shape]
        # nothing had a part in it
        assert all(not g.any() for g in form.gradients_to_send(None, torch.device("cpu")))
        assert gradients_of(form.gradients(grads), len(tensors(value)))[0] is grads[0]
    assert Form.of(ids).gradients([]) == (None,)  # not None, which is a loss's


@pytest.mark.parametrize(
    "value", [3, [], (), {"a": 1}, {1: torch.ones(1)}, (torch.ones(1), (torch.ones(1),))], ids=repr
)
def test_what_cannot_be_handed_on_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="where a layer must return a tensor, or a tuple or dict"):
        tensors(value)


class GivesTwo(nn.Module):
    """Gives a tuple."""

    name = "two"

    def forward(self, x: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return x, x * 2


class TakesOne(nn.Module):
    """Takes a tensor."""

    name = "single"

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x.relu()


AGAIN = Recomputed(frozenset({1}), ActivationStore(None, None, torch.device("cpu")))


@pytest.mark.parametrize("recomputed", [Recomputed(), AGAIN], ids=["kept", "recomputed"])
def test_a_layer_that_gets_a_tuple_in_place_of_a_tensor_is_named(recomputed: Recomputed) -> None:
    stage = Stage([GivesTwo(), TakesOne()], AlwaysGathered(), recomputed=recomputed)
    with pytest.raises(
        TypeError,
        match=r"single \(TakesOne\) was given a tuple of 2 tensors, .* no attribute 'relu'",
    ):
        stage.forward(0, torch.ones(2, requires_grad=True), MicroBatch())
