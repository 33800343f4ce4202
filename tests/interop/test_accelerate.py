"""Accelerate with `threed.install_as_deepspeed`: the numbers of one plain process.

Both sides start from the same weights and train on the same global batches in fp32, so that they
differ only by the order of sums: 1e-6 relative is five times the largest difference found.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from tests.interop.accelerate_runs import CASES
from tests.interop.huggingface_runs import (
    compare_logits,
    compare_numbers,
    run,
    run_in_turn,
    save_models,
)

EVERYDAY = (
    "script-1-2", "script-3-2", "resumed-3", "dummies-3", "boundaries-3", "freed-3", "two-models",
)  # fmt: skip
# rounding to bf16 in both programs, by autocast and by threed: loss and norm
ROUGH = {"bf16-2": (1e-3, 1e-2)}


def train(out: Path, names: Iterable[str]) -> None:
    save_models(out)
    run_in_turn("accelerate_runs", (out, "plain", names, 1), (out, "threed", names, 2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings: by one process without a plugin, and by threed on two ranks."""
    out = tmp_path_factory.mktemp("accelerate")
    train(out, EVERYDAY)
    return out


def compare(out: Path, name: str) -> None:
    loss, norm = ROUGH.get(name, (1e-6, 1e-6))
    limits = {"loss": loss, "eval_loss": loss, "grad_norm": norm, "learning_rate": 1e-12}
    compare_numbers(out, name, limits)
    if name not in ROUGH:
        compare_logits(out, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_script_has_the_numbers_of_one_process(runs: Path, name: str) -> None:
    compare(runs, name)


@pytest.mark.grid
def test_every_case(tmp_path: Path) -> None:
    names = [name for name in CASES if name not in EVERYDAY]
    train(tmp_path, [*(case.resume for name in names if (case := CASES[name]).resume), *names])
    for name in names:
        compare(tmp_path, name)
    # A state of two ranks continues on one.
    (tmp_path / "threed" / "resumed-2.json").unlink()
    run("accelerate_runs", tmp_path, "threed", ["resumed-2"], ranks=1)
    compare(tmp_path, "resumed-2")
