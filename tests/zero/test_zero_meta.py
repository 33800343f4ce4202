"""Modules built on the meta device: initialized by their own methods, unit by unit, alike whatever the topology."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import hf_models
from tests.harness import run_ranks
from tests.live import Live
from tests.zero.test_zero_wrapped import ROWS, Case, engine_of
from threed.distributed.topology import Topology
from threed.models.loss_items import count_items, shifts_labels
from threed.models.wrapped import loss_of

MODELS = ["gpt2", "llama", "qwen3", "bert", "t5"]


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return hf_models.make(name)


def built(name: str, stage: int) -> tuple[dict[str, Tensor], float]:
    """The weights an engine begins with, and its loss on one batch."""
    topology = Topology()
    engine = engine_of(Case(name, stage, microbatches=1), on_meta(name), topology)
    full = hf_models.batch(0, ROWS)
    loss = engine.evaluate(
        {key: value.chunk(topology.dp)[topology.rank] for key, value in full.items()}
    )
    return engine.full_state_dict(), float(loss)


def built_at(name: str, stages: tuple[int, ...]) -> list[tuple[dict[str, Tensor], float]]:
    return [built(name, stage) for stage in stages]


@pytest.mark.seldom("llama", "bert")
@pytest.mark.parametrize("name", MODELS)
def test_the_same_weights_whatever_the_stage_and_the_ranks(name: str) -> None:
    (first, loss), *others = built_at(name, (0,)) + run_ranks(2, built_at, name, (0, 1, 3))[0]
    for weights, other_loss in others:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[key], first[key]) for key in first)
    # The module's own initialization: about as large as that of one built the usual way, and no two alike.
    model = hf_models.make(name)
    usual = dict(model.named_parameters(remove_duplicate=False))
    assert first.keys() == usual.keys()
    for key, values in first.items():
        assert values.std(correction=0) == pytest.approx(
            float(usual[key].detach().std(correction=0)), rel=0.35, abs=1e-3
        ), key
    matrices = [first[key] for key, param in model.named_parameters() if param.dim() > 1]
    assert not any(
        torch.equal(a, b)
        for i, a in enumerate(matrices)
        for b in matrices[:i]
        if a.shape == b.shape
    )


@pytest.mark.parametrize("name", MODELS)
def test_buffers_get_their_values_too(name: str) -> None:
    """Rotary frequencies, position ids: the loss is that of a model built the usual way with the same weights."""
    weights, loss = built(name, 0)
    model = hf_models.make(name).eval()
    model.load_state_dict({**model.state_dict(), **weights})
    model.tie_weights()  # type: ignore[operator]
    parts = [{k: v[i : i + 1] for k, v in hf_models.batch(0, ROWS).items()} for i in range(ROWS)]
    counts = [float(count_items(part, shifts_labels(model))) for part in parts]
    with torch.no_grad():
        losses = [float(loss_of(model(**part))) for part in parts]
    assert loss == pytest.approx(
        sum(n * x for n, x in zip(counts, losses, strict=True)) / sum(counts), rel=1e-6
    )


class Deep(nn.Module):
    """Many blocks, so that one of them is small beside all."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, labels)


def peak_while_built(blocks: int) -> tuple[int, int]:
    """The most bytes that were alive at once while an engine was made, and those of the whole model."""
    with torch.device("meta"):
        model = Deep(blocks).double()
    live, peak, inner = Live(), 0, Live.__torch_dispatch__

    def watch(
        self: Live,
        func: Callable[..., object],
        types: object,
        args: object = (),
        kwargs: object = None,
    ) -> object:
        nonlocal peak
        out = inner(self, func, types, args, kwargs)
        peak = max(peak, live.bytes_now())
        return out

    Live.__torch_dispatch__ = watch  # type: ignore[method-assign,assignment]
    try:
        with live:
            engine = engine_of(Case("deep", 3, microbatches=1), model, Topology())
            rest = live.bytes()
    finally:
        Live.__torch_dispatch__ = inner  # type: ignore[method-assign]
    return peak - rest, engine.layout.parameters * 8


def test_no_rank_ever_holds_the_whole_model_under_stage_3() -> None:
    """Above its slices a rank holds a few units while it builds: as many for 8 blocks as for 40."""
    (few, _) = run_ranks(2, peak_while_built, 8)[0]
    (many, whole) = run_ranks(2, peak_while_built, 40)[0]
    assert many <= few + 4096  # a few scalars
    assert many < whole / 8
