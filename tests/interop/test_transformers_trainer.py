"""Hugging Face's Trainer with `threed.install_as_deepspeed`: the numbers of one plain process.

Both sides start from the same weights and train on the same global batches in fp32, so that they
differ only by the order of sums: 1e-6 relative is ten times the largest difference found.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.interop.trainer_runs import CASES, FAMILIES, VOCAB, save_models

ROOT = Path(__file__).resolve().parents[2]
# every family, every stage at least twice, and each further way to train
EVERYDAY = (
    "gpt2-0", "qwen2-0", "opt-1", "llama-2", "mistral-3", "gemma2-3", "saves-3", "resumed-3", "accumulation",
    "offload", "checkpointing", "config-optimizer", "config-scheduler", "bf16", "best", "epochs", "sgd", "twice",
    "peft-3",
)  # fmt: skip
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
# rounding to bf16 in both programs, by autocast and by threed: loss and norm
ROUGH = {"bf16": (1e-3, 1e-2)}


def run(*args: str) -> None:
    """Runs Python with the modules of this repository."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=800
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings: by plain PyTorch on one process, and by threed on two ranks."""
    out = tmp_path_factory.mktemp("trainer")
    save_models(out)
    train(out, EVERYDAY)
    return out


def train(out: Path, names: tuple[str, ...]) -> None:
    for mode in ("plain", "threed"):
        (out / mode).mkdir(exist_ok=True)
    module = ["-m", "tests.interop.trainer_runs", str(out)]
    run(*module, "plain", *names)
    run(*RANKS, "2", *module, "threed", *names)


def logits(out: Path, mode: str, name: str) -> torch.Tensor:
    """Returns the logits of the model that a training has saved."""
    final, base = out / mode / name / "final", out / "models" / CASES[name].family
    model = AutoModelForCausalLM.from_pretrained(base if CASES[name].peft else final)
    if CASES[name].peft:
        model = PeftModel.from_pretrained(model, final)
    tokens = torch.arange(3, 3 + 24).reshape(2, 12) % VOCAB
    with torch.no_grad():
        return model(input_ids=tokens).logits


def compare(out: Path, name: str) -> None:
    loss, norm = ROUGH.get(name, (1e-6, 1e-6))
    limits = {"loss": loss, "eval_loss": loss, "grad_norm": norm, "learning_rate": 0.0, "step": 0.0}
    want, got = (
        json.loads((out / mode / f"{name}.json").read_text()) for mode in ("plain", "threed")
    )
    assert len(want) == len(got) >= 2
    for number, (plain, ours) in enumerate(zip(want, got, strict=True)):
        assert plain.keys() == ours.keys()
        for key, value in plain.items():
            # With an optimizer of the configuration, the Trainer logs the rate of the next update.
            if key == "learning_rate" and CASES[name].ds:
                continue
            close = math.isclose(ours[key], value, rel_tol=limits[key], abs_tol=0.0)
            assert close, (name, number, key, ours[key], value)
    if name not in ROUGH:
        torch.testing.assert_close(
            logits(out, "threed", name), logits(out, "plain", name), rtol=0, atol=2e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_training_has_the_numbers_of_one_process(runs: Path, name: str) -> None:
    compare(runs, name)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_continues_on_one(runs: Path, tmp_path: Path) -> None:
    for name in ("models", "threed", "plain"):
        (tmp_path / name).symlink_to(runs / name)
    moved = json.loads((runs / "threed" / "resumed-3.json").read_text())
    (runs / "threed" / "resumed-3.json").unlink()
    run(*RANKS, "1", "-m", "tests.interop.trainer_runs", str(tmp_path), "threed", "resumed-3")
    again = json.loads((runs / "threed" / "resumed-3.json").read_text())
    assert len(again) == len(moved)
    compare(tmp_path, "resumed-3")


@pytest.mark.grid
def test_every_case(tmp_path: Path) -> None:
    save_models(tmp_path)
    names = tuple(name for name in CASES if name not in EVERYDAY)
    train(tmp_path, ("saves-2", *(name for name in names if name != "saves-2")))
    for name in names:
        compare(tmp_path, name)


def test_the_everyday_cases_cover_families_and_stages() -> None:
    cases = [CASES[name] for name in EVERYDAY]
    assert {case.family for case in cases} == {*FAMILIES}
    for stage in range(4):
        assert sum(case.stage == stage for case in cases) >= 2, stage
