"""The whole engine on the emulator: what layers and optimizer give to the kernels, and what they make of the results.

One process trains a small model in bf16, once with every kernel of csrc/cuda emulated and once in plain operations.
Both round to bf16 at other places, so losses agree to bf16's precision; the bits of dropout's masks are the same.
"""

from __future__ import annotations

import pytest
import torch

from tests.configs import Case, config_of, engine_of
from tests.cuda.emulator import COMPILER, emulated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FORWARDS = {"norm", "cross_entropy"}
BACKWARDS = {"norm_backward", "add_parts", "scale", "adamw"}
CASES = {
    "gpt": ({"model": "gpt"}, {"gelu", "gelu_backward"}),
    "llama": ({"model": "llama"}, {"swiglu", "swiglu_backward"}),
    "dropout": ({"model": "gpt", "dropout": 0.25}, {"gelu", "gelu_backward", "dropout"}),
    "zero 3, full recompute": ({"model": "llama", "zero": 3, "recompute": "full"}, {"swiglu", "swiglu_backward"}),
    "selective recompute": ({"model": "gpt", "recompute": "selective"}, {"gelu", "gelu_backward"}),
}


def losses_of(case: Case, steps: int = 2) -> tuple[list[float], list[float]]:
    """Losses, and gradient norms."""
    torch.manual_seed(0)
    config = config_of(case)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab": 56, "hidden": 64})})
    engine = engine_of(config)
    rows = torch.randint(56, (case.rows, 17), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
    batch["labels"][0, :5] = -100
    metrics = [engine.step(batch) for _ in range(steps)]
    return [float(m.loss) for m in metrics], [float(m.grad_norm) for m in metrics]


@pytest.mark.parametrize("name", CASES)
def test_an_engine_trains_the_same_on_emulated_kernels(name: str) -> None:
    changes, also = CASES[name]
    case = Case(dtype="bf16", layers=2, **changes)  # type: ignore[arg-type]
    plain, plain_norms = losses_of(case)
    with emulated() as machine:
        fused, norms = losses_of(case)
    assert {ran.name for ran in machine.launches} == FORWARDS | BACKWARDS | also
    assert fused == pytest.approx(plain, rel=5e-3)
    assert norms == pytest.approx(plain_norms, rel=3e-2)
    assert fused[1] < fused[0]
