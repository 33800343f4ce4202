"""Multi-token prediction: plain PyTorch as reference in every topology, planted faults, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import threed
from tests.configs import topology_of
from tests.harness import run_ranks
from tests.hf_decoders import LENGTH, ROWS, STEPS, VOCAB, Trained, casts, difference
from tests.mtp_reference import FACTOR, inputs, losses, reference, train_plainly, weights
from threed import models
from threed.config import Config, ModelConfig
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.distributed import collectives
from threed.engine import Engine
from threed.interop.huggingface.layouts import hf_to_state_dict, model_of, state_dict_to_hf
from threed.layers import MicroBatch, MultiTokenPrediction, Slicing

SMALL = {"bucket_mib": 0.03}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {}, "full": {"mode": "full"}, "selective": {"mode": "selective"}, "chunks": {"loss_chunks": 3},
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A topology, with the settings of a run there."""

    parallel: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    micro_batch: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        sizes = [self.parallel.get(axis, 1) for axis in ("pp", "dp", "tp", "cp")]
        return int(torch.tensor(sizes).prod())


PLACES = {
    "alone": Place(micro_batch=2),
    "full": Place(recompute="full"),
    "selective": Place(recompute="selective"),
    "chunks": Place(recompute="chunks"),
    "layer by layer": Place(zero={"stage": 3, "order": "layer"}),
    "tp": Place({"tp": 2, "sequence": False}, {"stage": 3, "tile": 2}),
    "sequence": Place({"tp": 2, "sequence": True}),
    "sequence full": Place({"tp": 2, "sequence": True}, recompute="full"),
    "pp": Place({"pp": 2}),
    "pp full": Place({"pp": 2}, recompute="full"),
    "pp zb-v": Place({"pp": 2, "schedule": "zb-v"}),
    "pp dualpipev": Place({"pp": 2, "schedule": "dualpipev"}),
    "pp chimera": Place({"pp": 2, "schedule": "chimera"}),
    "pp apart": Place({"pp": 2, "partition": (4, 2)}),
    "zero0": Place({"dp": 2}, {"stage": 0}),
    "zero1": Place({"dp": 2}, {"stage": 1, **SMALL}),
    "zero2": Place({"dp": 2}, {"stage": 2, **SMALL}),
    "zero3": Place({"dp": 2}, {"stage": 3, **SMALL}, "full"),
    "ep": Place({"dp": 2, "ep": 2}, {"stage": 3}),
    "ring": Place({"cp": 2, "cp_heads": 1}),
    "ulysses": Place({"cp": 2, "cp_heads": 2}, {"stage": 2}),
    "pp tp zero3": Place({"pp": 2, "tp": 2, "sequence": True}, {"stage": 3}),
    "pp dp ep": Place({"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-v"}, {"stage": 2, **SMALL}),
    "dp cp": Place({"dp": 2, "cp": 2, "ep": 4, "cp_heads": 1}, {"stage": 3}, "selective"),
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model, and whether its batches have packed documents."""

    depths: int = 2
    tied: bool = False
    packed: bool = False

    @property
    def module(self) -> Any:
        """The model of the reference; the same weights in each call."""
        return reference(self.depths, tie_word_embeddings=self.tied)


KINDS = [Kind(), Kind(1, packed=True), Kind(2, tied=True, packed=True)]


@dataclass(frozen=True)
class Start:
    """The model and its first weights, by native name."""

    model: ModelConfig
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, kind: Kind) -> Start:
        module = kind.module
        model = model_of(json.loads(module.config.to_json_string()))
        assert (model.mtp_layers, model.mtp_loss) == (kind.depths, FACTOR)
        return cls(model, hf_to_state_dict(weights(module), model))


def config_of(model: ModelConfig, place: Place) -> Config:
    return resolve(Config.model_validate({
        "model": {**dict(model), "seq": LENGTH, "vocab": VOCAB}, "parallel": place.parallel,
        "zero": {"resident": 0, **place.zero}, "recompute": RECOMPUTE[place.recompute],
        "precision": {"dtype": "fp64"}, "experts": {"bias_rate": 1e-30},
        "train": {"global_batch": ROWS, "micro_batch": place.micro_batch, "steps": STEPS, "grad_clip": 0.5},
        "optim": {"lr": 3e-3, "warmup": 0, "schedule": "constant", "eps": 1e-8},
    }), VOCAB, place.world)  # fmt: skip


def engine_of(start: Start, place: Place) -> Engine:
    config, p = config_of(start.model, place), place.parallel
    topology = topology_of(p.get("pp", 1), p.get("tp", 1), p.get("cp", 1))
    engine = Engine(models.build(config.model, Slicing.of(topology, config)), topology, config)
    engine.load_full_state_dict(start.weights)
    return engine


def share(engine: Engine, kind: Kind, step: int) -> dict[str, Tensor]:
    """Returns this data rank's rows of a batch."""
    data, numbers = inputs(step, kind.packed)
    data |= {"documents": numbers} if kind.packed else {}
    index, dp = engine.topology.axis("dp").index, engine.topology.dp
    return {name: value.chunk(dp)[index] for name, value in data.items()}


def mean_loss(engine: Engine) -> float:
    """Returns the mean loss of all depths since the last call. Collective."""
    topology = engine.topology
    own = torch.zeros(2, dtype=torch.float64)
    for number in dict.fromkeys(engine.blueprint.held):
        layer = engine.blueprint.layers[number]
        if isinstance(layer, MultiTokenPrediction) and (sums := layer.take_sums()) is not None:
            own += sums
    for axis in (topology.data, topology.axis("pp")):
        own = collectives.sum_of_scalars(own, axis)
    return float(own[0] / own[1])


def train(start: Start, kind: Kind, place: Place) -> tuple[Trained, list[float]]:
    """Trains, and returns what `mtp_reference.train_plainly` does. Collective."""
    engine, main, norms, further = engine_of(start, place), [], [], []
    for step in range(STEPS):
        with casts(torch.float64):  # the rotary tables of both are in fp64
            metrics = engine.step(share(engine, kind, step))
        main.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
        further.append(mean_loss(engine))
    full = engine.full_state_dict()
    found = state_dict_to_hf(full, start.model) if full else {}
    return Trained(main, norms, found), further


Truth = tuple[Start, Trained, list[float]]


def truth_of(kind: Kind) -> Truth:
    return Start.of(kind), *train_plainly(kind.module, kind.packed)


def error(found: tuple[Trained, list[float]], truth: Truth) -> float:
    """Returns the largest difference of losses, norms and weights."""
    (mine, further), (_, want, want_further) = found, truth
    kept = {name: value for name, value in mine.weights.items() if name in want.weights}
    gaps = [abs(a - b) for a, b in zip(further, want_further, strict=True)]
    return max(difference(replace(mine, weights=kept), want), *gaps)


def compare(names: list[str], truths: dict[Kind, Truth]) -> dict[str, float]:
    return {
        f"{name} {kind}": error(train(truths[kind][0], kind, PLACES[name]), truths[kind])
        for name in names
        for kind in truths
    }


@pytest.fixture(scope="module")
def truths() -> dict[Kind, Truth]:
    return {kind: truth_of(kind) for kind in KINDS}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_equals_plain_pytorch(world: int, truths: dict[Kind, Truth]) -> None:
    names = [name for name, place in PLACES.items() if place.world == world]
    for found in run_ranks(world, compare, names, truths, timeout=600):
        assert max(found.values()) < 1e-9, {name: gap for name, gap in found.items() if gap >= 1e-9}
