"""The whole engine on the emulator: what layers and optimizer give to the kernels, and what they make of the results.

One process trains a small model in bf16, once with every kernel of csrc/cuda emulated and once in plain operations.
Both round to bf16 at other places, so losses agree to bf16's precision; the bits of dropout's masks are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.configs import Case, config_of, engine_of, padded_to
from tests.cuda.emulator import COMPILER, emulated
from tests.harness import run_ranks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FORWARDS = {"norm", "cross_entropy"}
BACKWARDS = {"norm_backward", "add_parts", "scale", "square_sum", "adamw"}
GPT, LLAMA = (
    {"gelu", "gelu_backward", "column_sums"},
    {"swiglu", "swiglu_backward", "rotary", "rotary_backward"},
)
ROUTER, GATED = {"router", "sort_choices", "router_backward"}, {"swiglu", "swiglu_backward"}
CASES = {
    "gpt": ({"model": "gpt"}, GPT),
    "llama": ({"model": "llama"}, LLAMA),
    "dropout": ({"model": "gpt", "dropout": 0.25}, GPT | {"dropout"}),
    "zero 3, full recompute": ({"model": "llama", "zero": 3, "recompute": "full"}, LLAMA),
    "odd places": (
        {"model": "qwen-tied"},
        set(),
    ),  # a width of 70, which lies before norms; norms of heads
    "norms of heads": ({"model": "qwen-tied"}, {"head_norm", "head_norm_backward"}),
    "norms of heads, recomputed": (
        {"model": "qwen-tied", "recompute": "selective"},
        {"head_norm", "head_norm_backward"},
    ),
    "selective recompute": ({"model": "gpt", "recompute": "selective"}, GPT),
    "experts": ({"model": "mixtral"}, LLAMA | ROUTER),
    "experts, recomputed": ({"model": "mixtral", "recompute": "full"}, LLAMA | ROUTER),
    "groups of experts": ({"model": "deepseek_v3"}, ROUTER | GATED),
}


def losses_of(case: Case, steps: int = 2, head_dim: int = 16) -> tuple[list[float], list[float]]:
    """Losses, and gradient norms."""
    torch.manual_seed(0)
    config = config_of(case)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"vocab": 61, "hidden": 64, "head_dim": head_dim}
            )
        }
    )
    with padded_to(8):  # logits of a multiple of 8
        engine = engine_of(config)
    rows = torch.randint(61, (case.rows, 17), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
    batch["labels"][0, :5] = -100
    metrics = [engine.step(batch) for _ in range(steps)]
    return [float(m.loss) for m in metrics], [float(m.grad_norm) for m in metrics]


def on_a_rank(case: Case) -> tuple[list[float], set[str]]:
    with emulated(torch_writes=True) as machine:
        return losses_of(case)[0], {ran.name for ran in machine.launches}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.grid),
        {"sequence": True, "zero": 3},
        pytest.param({"dropout": 0.25, "sequence": True}, marks=pytest.mark.grid),
    ],
)
def test_two_tensor_ranks_train_as_one(changes: dict[str, Any]) -> None:
    case = Case(dtype="bf16", layers=1, **changes)
    alone, _ = on_a_rank(replace(case, sequence=False))
    for losses, ran in run_ranks(2, on_a_rank, replace(case, tp=2)):
        assert {"cross_entropy_stats", "cross_entropy_gradient"} <= ran
        assert losses == pytest.approx(alone, rel=5e-3)


# Only with the grid: the same kernels also run in the same case with recomputation, or with dropout. Kernels of groups of
# experts also run in tests/cuda/test_router.py and tests/accelerator/test_pretend.py.
OCCUR_IN_OTHERS = {
    "gpt",
    "llama",
    "norms of heads",
    "selective recompute",
    "experts",
    "groups of experts",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.grid if name in OCCUR_IN_OTHERS else ())
        for name in CASES
    ],
)
def test_an_engine_trains_the_same_on_emulated_kernels(name: str) -> None:
    changes, also = CASES[name]
    case = Case(dtype="bf16", layers=2, **changes)  # type: ignore[arg-type]
    head_dim = 64 if "head_norm" in also else 16
    plain, plain_norms = losses_of(case, head_dim=head_dim)
    with emulated(torch_writes=True) as machine:
        fused, norms = losses_of(case, head_dim=head_dim)
    assert {ran.name for ran in machine.launches} == FORWARDS | BACKWARDS | also
    assert fused == pytest.approx(plain, rel=5e-3)
    assert norms == pytest.approx(plain_norms, rel=3e-2)
    assert fused[1] < fused[0]
