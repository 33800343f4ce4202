"""Hugging Face's Trainer with `threed.install_as_deepspeed`: the numbers of one plain process.

Both sides start from the same weights and train on the same global batches in fp32, so that they
differ only by the order of sums: 1e-6 relative is ten times the largest difference found.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from tests.interop.huggingface_runs import (
    AUTO,
    FAMILIES,
    compare_logits,
    compare_numbers,
    run,
    run_in_turn,
    save_models,
)
from tests.interop.trainer_runs import CASES

# every family, every stage at least twice, and each further way to train; "epochs" accumulates, and trains Mistral
EVERYDAY = (
    "gpt2-0", "qwen2-0", "opt-1", "gemma2-3", "saves-3", "resumed-3", "offload", "checkpointing",
    "config-optimizer", "bf16", "best", "epochs", "again-3", "peft-whole-3", "reentrant-3",
    "prompt-3", "fp16", "evaluated-3", "classifier-3", "sequences-3",
)  # fmt: skip
ON_ONE_RANK = ("resumed-3", "search-3")
# loss and norm: rounding to bf16 in both programs, by autocast and by threed; and to fp16 in threed
ROUGH = {"bf16": (1e-3, 1e-2), "fp16": (1e-3, 2e-3)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings: by plain PyTorch on one process, by threed on two ranks, and some on one rank."""
    out = tmp_path_factory.mktemp("trainer")
    save_models(out)
    one = out / "on-one-rank"
    (one / "threed").mkdir(parents=True)
    for name in ("models", "plain", "threed/saves-3"):
        (one / name).symlink_to(out / name)
    run_in_turn(
        "trainer_runs",
        (out, "plain", (*EVERYDAY, *ON_ONE_RANK[1:]), 1),
        (out, "threed", EVERYDAY, 2),
        (one, "threed", ON_ONE_RANK, 1),
    )
    return out


def train(out: Path, names: tuple[str, ...]) -> None:
    for mode in ("plain", "threed"):
        run("trainer_runs", out, mode, names)


def compare(out: Path, name: str) -> None:
    loss, norm = ROUGH.get(name, (1e-6, 1e-6))
    limits = {
        "loss": loss,
        "eval_loss": loss,
        "grad_norm": norm,
        "learning_rate": 0.0,
        "step": 0.0,
        "total": 1e-5,
    }
    # With an optimizer of the configuration, the Trainer logs the rate of the next update.
    compare_numbers(out, name, limits, ["learning_rate"] if "optimizer" in CASES[name].ds else ())
    if name not in ROUGH:
        case = CASES[name]
        if case.family not in FAMILIES:
            return  # `final_numbers` compares predictions
        compare_logits(out, name, out / "models" / case.family if case.peft else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_training_has_the_numbers_of_one_process(runs: Path, name: str) -> None:
    compare(runs, name)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_continues_on_one(runs: Path) -> None:
    on_one_rank = runs / "on-one-rank"
    two, one = (
        json.loads((out / "threed" / "resumed-3.json").read_text()) for out in (runs, on_one_rank)
    )
    assert len(one) == len(two)
    compare(on_one_rank, "resumed-3")


@pytest.mark.slow
def test_a_search_on_one_rank(runs: Path) -> None:
    compare(runs / "on-one-rank", "search-3")


@pytest.mark.grid
def test_every_case(tmp_path: Path) -> None:
    save_models(tmp_path)
    names = tuple(name for name in CASES if name not in EVERYDAY and not CASES[name].searches)
    train(tmp_path, ("saves-2", *(name for name in names if name != "saves-2")))
    for name in names:
        compare(tmp_path, name)


def test_the_everyday_cases_cover_families_and_stages() -> None:
    cases = [CASES[name] for name in EVERYDAY]
    assert {case.family for case in cases} == {*AUTO}
    for stage in range(4):
        assert sum(case.stage == stage for case in cases) >= 2, stage
