"""val/loss and val/bits_per_byte: over each validation window once, in every topology."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.configs import engine_of
from tests.harness import run_ranks
from tests.runs import SEQ, configuration, open_text, run
from threed.data import Data
from threed.training.evaluation import Evaluation

ASKED = (5, 16, 64, 10_000)  # validation windows; open_text has some hundred
TOPOLOGIES: dict[int, list[dict[str, dict[str, Any]]]] = {
    1: [
        {"train": {"global_batch": 4, "micro_batch": 2}},
        {"train": {"global_batch": 6, "micro_batch": 3}, "zero": {"stage": 3}},
        {"train": {"global_batch": 1024, "micro_batch": 64}},
    ],
    2: [
        {"train": {"global_batch": 14, "micro_batch": 7}},
        {"train": {"global_batch": 8, "micro_batch": 1}, "parallel": {"tp": 2}},
        {"train": {"global_batch": 8, "micro_batch": 2}, "parallel": {"pp": 2}},
        {"train": {"global_batch": 12, "micro_batch": 3}, "parallel": {"pp": 2, "schedule": "interleaved"}},
    ],
    4: [{"train": {"global_batch": 20, "micro_batch": 5}, "parallel": {"pp": 2}}],
}  # fmt: skip


def losses_of(world: int, folder: str) -> list[list[float]]:
    """The validation loss of each topology, for each number of samples."""
    data, found = open_text(Path(folder)), []
    for groups in TOPOLOGIES[world]:
        groups = {"model": {"layers": 4, "hidden": 16, "heads": 2, "seq": SEQ}, **groups}
        engine = engine_of(configuration(Path(folder), data, world, **groups))
        several = []
        for asked in ASKED:
            train = engine.config.train.model_copy(update={"eval_samples": asked})
            engine.config = engine.config.model_copy(update={"train": train})
            several.append(Evaluation(engine, data).loss(lambda: False) or 0.0)
        found.append(several)
    return found


@pytest.mark.parametrize("world", TOPOLOGIES)
def test_each_window_counts_once_in_every_topology(world: int, tmp_path: Path) -> None:
    """The data ranks, micro-batches and batches do not divide the number of windows."""
    [truth, *_] = run_ranks(1, one_by_one, str(tmp_path))
    for found in run_ranks(world, losses_of, world, str(tmp_path)):
        for losses in found:
            assert losses == pytest.approx(truth, rel=1e-12)  # fp64, other orders of sums


def one_by_one(folder: str) -> list[float]:
    """The mean over the windows that there are, each evaluated by itself."""
    data = open_text(Path(folder))
    groups = {
        "model": {"layers": 4, "hidden": 16, "heads": 2, "seq": SEQ},
        "train": {"global_batch": 1, "micro_batch": 1},
    }
    engine = engine_of(configuration(Path(folder), data, 1, **groups))
    losses = torch.stack(
        [engine.evaluate(data.valid.batch(i, 1)) for i in range(len(data.valid))]
    ).tolist()
    return [math.fsum(losses[:asked]) / len(losses[:asked]) for asked in ASKED]


def trained(folder: str, asked: int) -> tuple[str, dict[str, float], float]:
    data = open_text(Path(folder))
    groups = {
        "train": {
            "steps": 2,
            "global_batch": 4,
            "micro_batch": 2,
            "eval_samples": asked,
            "sample_tokens": 0,
            "eval_every": 1,
        }
    }
    said = run(Path(folder), data, optim={"warmup": 0}, **groups)
    rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return said, json.loads(rows[-1]), share_of_text(data, min(asked, len(data.valid)))


def share_of_text(data: Data, windows: int) -> float:
    """Bytes of text per label: all ids but the end of text are bytes."""
    labels = torch.cat([data.valid.batch(i, 1)["labels"].flatten() for i in range(windows)])
    return float((labels < 256).double().mean())


@pytest.mark.parametrize("asked", [5, 10_000])
def test_a_run_says_how_many_windows_there_are_and_counts_their_bytes(
    asked: int, tmp_path: Path
) -> None:
    [(said, row, bytes_per_label)] = run_ranks(1, trained, str(tmp_path), asked)
    assert said.count("fewer than --train.eval-samples") == (asked == 10_000)
    assert row["val/bits_per_byte"] == pytest.approx(
        row["val/loss"] / math.log(2) / bytes_per_label, rel=1e-12
    )
