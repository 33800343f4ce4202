"""Steps that are given up because a backward, or a forward, raised: as plain PyTorch that drops the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threed
from tests.configs import topology_of
from tests.harness import run_ranks
from threed.config import Config
from threed.engine import Engine
from threed.interop.deepspeed.engine import DeepSpeedEngine

ROWS, STEPS, LR = 8, 3, 1e-2
Weights = dict[str, Tensor]


class Fails(torch.autograd.Function):
    """The identity; its forward or backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: str) -> Tensor:
        ctx.fails = fails
        if fails == "forward":
            raise RuntimeError("made-up trouble")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if ctx.fails == "backward":
            raise RuntimeError("made-up trouble")
        return dy, None


class Net(nn.Module):
    """Three layers; `fails` raises behind the layer of that number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
        ).double()
        self.fails: dict[int, str] = {}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = Fails.apply(block(x).tanh(), self.fails.get(number, ""))  # type: ignore[no-untyped-call]
        return F.mse_loss(x, y)


def batch(step: int, parts: int = 1, index: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    full = {
        key: torch.randn(ROWS, n, generator=draw, dtype=torch.float64)
        for key, n in (("x", 6), ("y", 4))
    }
    return {key: value.chunk(parts)[index] for key, value in full.items()}


def plain() -> Weights:
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(**batch(step)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def engine_of(stage: int, accumulation: int) -> DeepSpeedEngine:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 60}
    ds = {
        "train_batch_size": ROWS, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95]}}, "zero_optimization": zero,
    }  # fmt: skip
    engine, *_ = threed.initialize(model=Net(), config=ds)
    return engine


def micros(step: int, accumulation: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of a step."""
    topology = topology_of(1, 1)
    parts = topology.dp * accumulation
    return [
        batch(step, parts, topology.rank * accumulation + number) for number in range(accumulation)
    ]


def by_hand(stage: int, accumulation: int, how: str, deep: dict[int, str]) -> Weights:
    """The second step fails in its last micro-batch, and is done again. deep: where it fails."""
    engine = engine_of(stage, accumulation)
    for step in range(STEPS):
        if step == 1:
            fail(engine, micros(step, accumulation), deep)
            if how == "zero_grad":
                engine.zero_grad()
        for part in micros(step, accumulation):
            engine.backward(engine(**part))
            engine.step()
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * accumulation)
    return engine.full_state_dict()


def fail(engine: DeepSpeedEngine, parts: list[dict[str, Tensor]], deep: dict[int, str]) -> None:
    *done, last = parts
    for part in done:
        engine.backward(engine(**part))
        engine.step()
    engine.module.fails = deep
    with pytest.raises(RuntimeError, match="made-up trouble") as caught:
        engine.backward(engine(**last))
    engine.module.fails = {}
    lost = [
        note
        for note in getattr(caught.value, "__notes__", ())
        if "1 earlier micro-batch of 2" in note
    ]
    assert len(lost) == len(done)


def by_train_batch(stage: int, accumulation: int, where: str) -> Weights:
    engine = engine_of(stage, accumulation)
    for step in range(STEPS):
        if step == 1:
            engine.module.fails = {1: where}
            with pytest.raises(RuntimeError, match="made-up"):
                engine.train_batch(iter(micros(step, accumulation)))
            engine.module.fails = {}
            with pytest.raises(StopIteration):
                engine.train_batch(iter(micros(step, accumulation)[1:]))
        engine.train_batch(iter(micros(step, accumulation)))
    return engine.full_state_dict()


def by_step(stage: int, accumulation: int, deep: dict[int, str]) -> Weights:
    topology, module = topology_of(1, 1), Net()
    engine = Engine(module, topology, Config.model_validate({
        "precision": {"dtype": "fp64"}, "zero": {"stage": stage, "resident": 0, "bucket_mib": 1e-3},
        "train": {"global_batch": ROWS, "micro_batch": ROWS // topology.dp // accumulation, "grad_clip": 0.0},
        "optim": {"lr": LR, "weight_decay": 0.0, "warmup": 0, "schedule": "constant"},
    }))  # fmt: skip
    for step in range(STEPS):
        share = batch(step, topology.dp, topology.rank)
        if step == 1:
            module.fails = deep
            with pytest.raises(RuntimeError, match="made-up"):
                engine.step({key: value * 3 for key, value in share.items()})
            module.fails = {}
        engine.step(share)
    return engine.full_state_dict()


def all_of_a_stage(stage: int) -> dict[str, Weights]:
    rank = topology_of(1, 1).rank
    # Gathers under stage 3 are in the order of use, so there all ranks must fail at the same place.
    deep = {1 if stage == 3 else rank: "backward"}
    results = {
        f"{how}, accumulation {count}": by_hand(stage, count, how, deep)
        for how in ("zero_grad", "nothing")
        for count in (1, 2)
    }
    results |= {
        f"train_batch, {where}": by_train_batch(stage, 2, where)
        for where in ("forward", "backward")
    }
    return results | {
        f"Engine.step, accumulation {count}": by_step(stage, count, deep) for count in (1, 2)
    }


@pytest.mark.seldom("0", "1")
@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_is_given_up_leaves_nothing_behind(stage: int) -> None:
    want = plain()
    for name, got in run_ranks(2, all_of_a_stage, stage, timeout=240)[0].items():
        for key, value in want.items():
            torch.testing.assert_close(
                got[key], value, rtol=0, atol=1e-12, msg=lambda m, n=f"{name}, {key}": f"{n} {m}"
            )
