"""The longest sequence that fits: the search, and its forecasts against forecasts of the whole run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from threed import models
from threed.cli import commands
from threed.config import Config
from threed.config.arguments import load
from threed.config.resolution import resolve
from threed.layers import Slicing
from threed.models import Model
from threed.planner.forecast import Forecast
from threed.planner.longest import FORECASTS, Longest, longest, step_of

LIMIT, STEP = 10**6, 64
PEAKS: dict[str, Callable[[int], int]] = {
    "affine": lambda seq: 50_000 + 37 * seq,
    "steep": lambda seq: 10_000 + 5_000 * seq,
    "flat": lambda seq: 900_000 + seq // 2,
    "two slopes": lambda seq: 300_000 + max(10 * seq, 40 * seq - 90_000),
    "quadratic": lambda seq: 100_000 + seq + seq * seq // 900,
    "rounded": lambda seq: 50_000 + -(-37 * seq // 4096) * 4096,
}


@pytest.mark.parametrize("seq", [64, 100, 1024, 1 << 18])
@pytest.mark.parametrize("shape", PEAKS)
def test_the_search_finds_the_last_that_fits(shape: str, seq: int) -> None:
    calls: list[int] = []

    def peak_at(length: int) -> int:
        calls.append(length)
        return PEAKS[shape](length)

    found = longest(peak_at, seq, PEAKS[shape](seq), LIMIT, STEP)
    assert found is not None
    assert len(calls) <= FORECASTS
    assert not found.seq or PEAKS[shape](found.seq) <= LIMIT
    assert PEAKS[shape](found.seq + STEP) > LIMIT or not found.exact
    if shape in ("affine", "steep"):
        assert found.exact


def test_what_does_not_grow_has_no_longest() -> None:
    assert longest(lambda seq: 5, 64, 5, LIMIT, STEP) is None


def test_a_limit_of_the_model_is_said() -> None:
    def peak_at(length: int) -> int:
        if length > 1000:
            raise ValueError("too long for me")
        return 10 * length

    assert longest(peak_at, 512, 5120, LIMIT, STEP) == Longest(960, "too long for me")


@pytest.mark.parametrize(
    ("seq", "ranks", "step"), [(8192, 1, 1024), (1000, 8, 64), (7, 6, 6), (1536, 6, 384)]
)
def test_steps_are_powers_of_two_and_multiples_of_ranks(seq: int, ranks: int, step: int) -> None:
    assert step_of(seq, ranks) == step
    assert step % ranks == 0


RUNS = {
    "tensor ranks": ["--parallel.tp", "2", "--zero.stage", "2"],
    "stages": ["--parallel.pp", "2", "--parallel.schedule", "zb-h1"],
    "stage 3, recompute, chunks": [
        *("--zero.stage", "3", "--recompute.mode", "full"), *("--recompute.mlp-chunks", "4", "--recompute.loss-chunks", "8"),
    ],
}  # fmt: skip


def run(seq: int, words: list[str]) -> Config:
    model = [
        "--model.arch",
        "llama",
        "--model.hidden",
        "256",
        "--model.layers",
        "4",
        "--model.heads",
        "4",
    ]
    size = ["--model.seq", str(seq), "--model.positions", "1000000", "--train.micro-batch", "1"]
    config, _ = load([*model, *size, "--train.global-batch", "4", *words], world_size=2)
    return resolve(config, 5000, 2)


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_another_length_is_forecast_like_a_run_of_this_length(words: list[str]) -> None:
    planned = Forecast.of(run(512, words), 2, gpu="h100")
    whole = Forecast.of(run(2048, words), 2, gpu="h100")
    assert planned.peak_at(2048) == max(rank.bytes["peak"] for rank in whole.ranks)


def test_chunks_make_sequences_longer() -> None:
    """And the run of the longest sequence fits, but not that of the next."""
    words = ["--recompute.mode", "full"]
    found = []
    for more in ([], ["--recompute.mlp-chunks", "16", "--recompute.loss-chunks", "32"]):
        planned = Forecast.of(run(65536, [*words, *more]), 2, gpu="a100")
        assert planned.longest is not None
        assert planned.longest.exact
        found.append(planned.longest.seq)
        assert planned.peak_at(found[-1]) <= 79.3 * 2**30
        assert planned.peak_at(found[-1] + step_of(65536, 1)) > 79.3 * 2**30
    assert found[1] > 1.5 * found[0]


def test_without_a_gpu_it_is_not_known() -> None:
    assert Forecast.of(run(512, []), 2).longest_text() == ""


def test_of_a_model_with_batches_of_its_own_it_is_not_known() -> None:
    """Its sequences may have another length than `model.seq`."""
    config = run(512, [])

    def build(slicing: Slicing) -> Model:
        model = models.build(config.model, slicing)
        tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
        model.example = lambda rows: dict.fromkeys(("tokens", "labels"), tokens.expand(rows, -1))
        return model

    assert Forecast.of(config, 2, gpu="h100").longest is not None
    assert Forecast.of(config, 2, build, gpu="h100").longest is None


def test_plan_prints_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt", "--preset", "tiny", "--gpu", "h100", "--world-size", "2"]
    assert commands.main([*words, "--model.seq", "256"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("longest"))
    assert line == (
        "longest    a sequence of 256 tokens fits into 79.2 GiB; the model takes no longer one: position 287 is beyond"
        " the 256 learned positions"
    )
