"""TRL with `threed.install_as_deepspeed`: the numbers of one plain process.

Both sides start from the same weights and train on the same global batches in fp32, so that they
differ only by the order of sums: 1e-6 relative is five times the largest difference found. By
default, SFTTrainer computes the loss in chunks, without the full logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("trl")

from tests.interop.huggingface_runs import compare_logits, compare_numbers, run_in_turn
from tests.interop.trl_runs import CASES, save_model

EVERYDAY = (
    "sft-lora-2", "sft-packing-3", "sft-assistant-3", "dpo-lora-3", "dpo-reference-3",
)  # fmt: skip


def train(out: Path, names: Iterable[str]) -> None:
    save_model(out)
    run_in_turn("trl_runs", (out, "plain", names, 1), (out, "threed", names, 2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings: by one process without DeepSpeed, and by threed on two ranks."""
    out = tmp_path_factory.mktemp("trl")
    train(out, EVERYDAY)
    return out


def compare(out: Path, name: str) -> None:
    compare_numbers(out, name, dict.fromkeys(("loss", "grad_norm", "mean_token_accuracy"), 1e-6))
    compare_logits(out, name, out / "models" / "llama" if CASES[name].lora else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_training_has_the_numbers_of_one_process(runs: Path, name: str) -> None:
    compare(runs, name)


@pytest.mark.grid
def test_every_case(tmp_path: Path) -> None:
    names = [name for name in CASES if name not in EVERYDAY]
    train(tmp_path, names)
    for name in names:
        compare(tmp_path, name)
