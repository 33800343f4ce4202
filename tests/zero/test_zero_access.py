"""Sharded parameters of layers that the program wrote itself: their memory goes between uses, whatever autograd has
saved of them, and views that were kept are refused once they are out of date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.configs import Case, batch, config_of, share
from tests.harness import run_ranks
from threed import layers
from threed.config import Config, ModelConfig
from threed.config.resolution import resolve
from threed.distributed.sharding import Init, Piece, ShardSpec, parameter
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import MicroBatch, Slicing

WIDTH = 32


class Turned(nn.Module):
    """x + tanh(x w^T): autograd saves a view of w. `keep` keeps one, too, and uses it in the next step."""

    def __init__(self, name: str, keep: bool) -> None:
        super().__init__()
        self.name, self.keep = name, keep
        piece = Piece(f"{name}.weight", (WIDTH, WIDTH), (0, 0), (WIDTH, WIDTH), init=Init(std=0.1))
        self.weight = parameter(ShardSpec((piece,)), (WIDTH, WIDTH))
        self.kept: Tensor | None = None
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        self.seen.append(StorageWeakRef(self.weight.untyped_storage()))
        if self.keep:
            x = x if self.kept is None else x + 0 * self.kept.sum()
            self.kept = self.weight.detach()
        return x + (x @ self.weight.t()).tanh()


class Model:
    """Such layers between an embedding and a head."""

    def __init__(self, c: ModelConfig, slicing: Slicing, keep: bool) -> None:
        self.hidden, self.slicing, self.keep, self.c = WIDTH, slicing, keep, c

    def layers(self) -> list[nn.Module]:
        vocab = self.c.vocab or 0
        norm = layers.RMSNorm("norm", WIDTH, self.slicing)
        embedding = layers.Embedding("embedding", vocab, WIDTH, self.slicing)
        head = layers.LanguageModelHead("head", "head.weight", norm, vocab, WIDTH, self.slicing)
        return [embedding, *(Turned(f"blocks.{i}", self.keep) for i in range(3)), head]


def engine_of(stage: int, keep: bool) -> Engine:
    case = Case(dp=2, zero=stage, microbatches=1, bucket_mib=0.001)
    raw = config_of(case)
    sizes = {"hidden": WIDTH, "ffn": None, "head_dim": None}
    config = Config.model_validate(raw.model_dump() | {"model": raw.model.model_dump() | sizes})
    config, topology = resolve(config, raw.model.vocab or 0, 2), Topology()
    return Engine(Model(config.model, Slicing(topology.axis("tp")), keep), topology, config)


def blocks_of(engine: Engine) -> list[Any]:
    return [
        layer
        for stage in engine.executor.stages
        for layer in stage.layers
        if isinstance(layer, Turned)
    ]


def train(engine: Engine, steps: int) -> dict[str, Tensor]:
    for number in range(steps):
        engine.step(share(batch(number, engine.config.train.global_batch), engine.topology))
    return engine.full_state_dict()


def check_freed() -> None:
    """In the head, after all blocks, none of their weights is in memory, though autograd has saved views of them."""
    engine = engine_of(3, keep=False)
    blocks, alive = blocks_of(engine), []
    head = engine.executor.stages[0].layers[-1]
    head.register_forward_pre_hook(
        lambda *_: alive.append([ref.expired() for block in blocks for ref in block.seen])
    )
    got, want = train(engine, 3), train(engine_of(1, keep=False), 3)
    # the last block's, where the backward begins, may stay
    assert alive[0][:-1] == [True] * (len(alive[0]) - 1)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-9)


def test_weights_that_autograd_saves_views_of_are_freed() -> None:
    run_ranks(2, check_freed)


def check_kept() -> None:
    with pytest.raises(RuntimeError, match=r"shares memory with blocks\.0\.weight.*clone"):
        train(engine_of(3, keep=True), 2)
    engine = engine_of(3, keep=False)
    (weight, *_) = (block.weight for block in blocks_of(engine))
    with pytest.raises(RuntimeError, match=r"blocks\.0\.weight is sharded.*full_state_dict"):
        weight.sum()


def test_what_layers_keep_of_sharded_weights_is_refused() -> None:
    run_ranks(2, check_kept)
