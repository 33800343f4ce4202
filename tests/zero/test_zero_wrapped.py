"""Unmodified `transformers` models under every stage: the losses, norms and weights of plain PyTorch on one process."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests import hf_models
from tests.configs import topology_of
from tests.covering import some_always
from tests.harness import run_ranks
from threed.config import Config
from threed.distributed.topology import Topology
from threed.engine import Engine

ROWS = 8
MODELS = ["gpt2", "llama", pytest.param("qwen3", marks=pytest.mark.grid), "bert", "t5"]


@dataclass(frozen=True)
class Case:
    """A model, how it is sliced, and what is special about it."""

    model: str
    stage: int
    microbatches: int = 2
    resident: int = 0
    bucket_mib: float = 0.03  # every block in several, a weight over two
    frozen: str = ""  # parameters whose name has this in it
    checkpointing: str = ""  # reentrant | non-reentrant
    meta: bool = False
    shard: int | str = "all"

    @property
    def steps(self) -> int:
        """Odd modules use a block in every second step only."""
        return 3 if self.model.startswith("odd") else 2


def prepared(case: Case) -> nn.Module:
    """The model with what is special about it."""
    model = hf_models.make(case.model)
    for name, param in model.named_parameters():
        if case.frozen and case.frozen in name:
            param.requires_grad_(False)
    if case.checkpointing:
        reentrant = {"use_reentrant": case.checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)  # type: ignore[operator]
    return model


def engine_of(case: Case, model: nn.Module, topology: Topology) -> Engine:
    config = Config.model_validate({
        "zero": {
            "stage": case.stage, "resident": case.resident, "bucket_mib": case.bucket_mib, "shard_size": case.shard,
        },
        "precision": {"dtype": "fp64"},
        "train": {
            "global_batch": ROWS, "micro_batch": ROWS // topology.dp // case.microbatches, "grad_clip": 0.5, "steps": 9,
        },
        "optim": {"lr": 3e-3, "warmup": 0, "schedule": "constant", "betas": (0.9, 0.95), "weight_decay": 0.1},
    })  # fmt: skip
    return Engine(model, topology, config)


def train(case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    topology = topology_of(1, 1)
    engine = engine_of(case, prepared(case), topology)
    losses, norms = [], []
    for step in range(case.steps):
        full = hf_models.batch(step, ROWS)
        mine = {key: value.chunk(topology.dp)[topology.rank] for key, value in full.items()}
        metrics = engine.step(mine)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    return losses, norms, engine.full_state_dict()


@functools.cache
def plainly(
    model: str, frozen: str, pieces: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Plain PyTorch's training, which knows nothing of slices; checkpointing changes no number of it."""
    case = Case(model, 0, frozen=frozen)
    return hf_models.train_plainly(prepared(case), case.steps, ROWS, pieces)


def check(cases: list[Case], world: int) -> None:
    for case, got in zip(cases, run_ranks(world, run, cases)[0], strict=True):
        losses, norms, weights = plainly(case.model, case.frozen, world * case.microbatches)
        # transformers computes the loss of causal models in fp32; its gradient is the same on both sides.
        assert got[0] == pytest.approx(losses, rel=1e-6), case
        assert got[1] == pytest.approx(norms, rel=1e-9), case
        assert got[2].keys() == weights.keys()
        for name, want in weights.items():
            torch.testing.assert_close(
                got[2][name], want, rtol=0, atol=1e-9, msg=lambda m, n=name, c=case: f"{c} {n} {m}"
            )


def run(cases: list[Case]) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    return [train(case) for case in cases]


@pytest.mark.seldom("llama")
@pytest.mark.parametrize("model", MODELS)
def test_a_transformers_model_trains_as_in_plain_pytorch(model: str) -> None:
    check([Case(model, stage) for stage in (0, 1, 2, 3)], 2)


@pytest.mark.parametrize(
    "model",
    ["gpt2", "t5", *(pytest.param(m, marks=pytest.mark.grid) for m in ("llama", "qwen3", "bert"))],
)
def test_gradient_checkpointing(model: str) -> None:
    kinds = ("reentrant", "non-reentrant")
    check([Case(model, stage, checkpointing=kind) for stage in (2, 3) for kind in kinds], 2)


FROZEN = [
    ("gpt2", "attn"),
    pytest.param("llama", "layers.1", marks=pytest.mark.grid),  # daily in test_what_modules_may_do
    pytest.param("qwen3", "embed_tokens", marks=pytest.mark.grid),
    pytest.param("bert", "embeddings", marks=pytest.mark.grid),
    ("t5", "shared"),
]


@pytest.mark.seldom("gpt2-attn")
@pytest.mark.parametrize(("model", "frozen"), FROZEN)
def test_frozen_parameters(model: str, frozen: str) -> None:
    plain = [Case(model, stage, frozen=frozen) for stage in (0, 2, 3)]
    check([*plain, Case(model, 3, frozen=frozen, checkpointing="non-reentrant")], 2)


@pytest.mark.seldom("odd-embed")
@pytest.mark.parametrize(
    ("model", "frozen"),
    some_always(
        list(itertools.product(["odd", "odd-span"], ["", "blocks.1", "blocks.0.0", "embed"])), 3
    ),
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_modules_may_do(model: str, frozen: str) -> None:
    """Called twice, used elsewhere, unused, used now and then, recomputed in one piece; frozen in parts."""
    check([Case(model, stage, frozen=frozen) for stage in (0, 1, 2, 3)], 2)


def test_ranks_may_use_different_parameters() -> None:
    """Under stages 0 to 2; under stage 3 all ranks must gather the same."""
    check([Case("odd-whim", stage) for stage in (0, 1, 2)], 2)
    check([Case("odd-whim", stage, microbatches=1, shard=2) for stage in (1, 2)], 4)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("gpt2", 1), ("gpt2", 2), ("t5", 3)], id="some"),
        pytest.param([("t5", 1), ("t5", 2), ("gpt2", 3)], id="others", marks=pytest.mark.grid),
    ],
)
def test_slices_over_a_part_of_the_ranks(cases: list[tuple[str, int]]) -> None:
    check([Case(model, stage, microbatches=1, shard=2) for model, stage in cases], 4)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(100, 1e-3), (10**6, 64.0)], id="some"),
        pytest.param([(100, 64.0), (10**6, 1e-3)], id="others", marks=pytest.mark.grid),
    ],
)
def test_small_parameters_may_stay_whole(cases: list[tuple[int, float]]) -> None:
    check([Case("llama", 3, resident=size, bucket_mib=mib) for size, mib in cases], 2)
