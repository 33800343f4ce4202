"""Masters and moments of Megatron's optimizers come in bit for bit, and the next update is the one that they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import megatron_checkpoints as written
from tests.megatron_checkpoints import GPT, LLAMA
from tests.megatron_optimizers import STEP, Distributed, Whole
from tests.test_foreign_megatron import EVEN
from threed.checkpoint import native
from threed.checkpoint.convert import convert
from threed.checkpoint.reading import Reader

TIED = LLAMA | {"untie_embeddings_and_output_weights": False}
FOUR = [[0], [1], [2], [3]]
LEGACY: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "one bucket": (LLAMA, {}, Distributed),
    "buckets": (LLAMA, {"tp": 2, "layers": EVEN}, lambda states: Distributed(states, 700)),
    "small buckets": (GPT, {"tp": 2}, lambda states: Distributed(states, 1)),
    "tied, buckets": (TIED, {"tp": 2, "layers": EVEN}, lambda states: Distributed(states, 1000)),
    "virtual stages": (LLAMA, {"tp": 2, "layers": FOUR, "virtual": 2}, lambda states: Distributed(states, 500)),
    "not Transformer Engine": (GPT, {"tp": 2, "layers": EVEN, "engine": False}, Distributed),
    "not distributed": (LLAMA, {"tp": 2, "layers": EVEN}, Whole),
    "not distributed, tied": (GPT, {"tp": 2, "layers": EVEN}, Whole),
    "not distributed, virtual": (LLAMA, {"layers": FOUR, "virtual": 2}, Whole),
    "fp32": (GPT, {"tp": 2, "layers": EVEN}, lambda states: Whole(states, masters=False)),
}


def check(out: Path, states: dict[str, dict[str, Tensor]], scale: bool = True) -> None:
    manifest = native.read_manifest(out)
    assert native.verify(out, manifest) == []
    state = manifest["state"]
    assert [state[key] for key in ("steps", "consumed", "updates", "skips")] == [100, 3200, STEP, 100 - STEP]
    assert (state.get("loss_scale"), state.get("good_steps"), state.get("hysteresis_left")) == (
        (2.0**14, 7.0, 1.0) if scale else (None, None, None)
    )
    with Reader(out, manifest) as reader:
        for part, tensors in states.items():
            for name, want in tensors.items():
                assert torch.equal(reader.full(part, name), want), f"{part} of {name}"


@pytest.mark.parametrize("case", LEGACY)
def test_legacy_states_are_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    args, layout, optimizer = LEGACY[case]
    states = written.states_of(written.model_of(args))
    fp32 = case == "fp32"
    weights = {name: tensor if fp32 else tensor.bfloat16() for name, tensor in states["weight"].items()}
    folder = written.write_legacy(tmp_path / "theirs", args, weights, **layout, optimizer=optimizer(states))
    check(convert(folder, tmp_path / "native", allow_pickle=True), states, scale=not fp32)
