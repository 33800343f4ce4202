"""val/loss and val/bits_per_byte: over each label of the validation windows once, in every topology."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.configs import engine_of
from tests.covering import in_turns
from tests.harness import run_ranks
from tests.runs import SEQ, configuration, open_text, run
from threed.data import Data, open_data
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


def open_documents(folder: Path, packing: bool) -> Data:
    """The text of `open_text`; for packing, each line and some shorter texts are documents."""
    if not packing:
        return open_text(folder)
    lines = [f"line {n} has the square {n * n}"[: 5 + n % 40] for n in range(500)]
    text, mine = folder / "text.jsonl", folder / f"text-{os.getpid()}.tmp"
    mine.write_text("".join(f"{json.dumps({'text': line})}\n" for line in lines))
    mine.replace(text)
    return open_data(str(text), "bytes", 0.1, SEQ, 1, cache=folder / "cache", packing=True)


def losses_of(world: int, folder: str, packing: bool) -> list[list[float]]:
    """The validation loss of each topology, for each number of samples."""
    data, found = open_documents(Path(folder), packing), []
    for groups in TOPOLOGIES[world]:
        groups = {"model": {"layers": 4, "hidden": 16, "heads": 2, "seq": SEQ}, **groups}
        groups["data"] = {"packing": packing}
        engine = engine_of(configuration(Path(folder), data, world, **groups))
        several = []
        for asked in ASKED:
            train = engine.config.train.model_copy(update={"eval_samples": asked})
            engine.config = engine.config.model_copy(update={"train": train})
            several.append(Evaluation(engine, data).loss(lambda: False) or 0.0)
        found.append(several)
    return found


@pytest.mark.seldom("False-1")
@pytest.mark.parametrize(("packing", "world"), in_turns(2, (False, True), list(TOPOLOGIES)))
def test_each_label_counts_once_in_every_topology(
    packing: bool, world: int, tmp_path: Path
) -> None:
    """The data ranks, micro-batches and batches do not divide the number of windows."""
    [truth, *_] = run_ranks(1, one_by_one, str(tmp_path), packing)
    for found in run_ranks(world, losses_of, world, str(tmp_path), packing):
        for losses in found:
            assert losses == pytest.approx(truth, rel=1e-12)  # fp64, other orders of sums


def one_by_one(folder: str, packing: bool) -> list[float]:
    """The mean over the labels of the windows that there are, each window evaluated by itself."""
    data = open_documents(Path(folder), packing)
    groups = {
        "data": {"packing": packing},
        "model": {"layers": 4, "hidden": 16, "heads": 2, "seq": SEQ},
        "train": {"global_batch": 1, "micro_batch": 1},
    }
    engine = engine_of(configuration(Path(folder), data, 1, **groups))
    rows = [data.valid.batch(i, 1) for i in range(len(data.valid))]
    labels = [int((row["labels"] >= 0).sum()) for row in rows]
    losses = [n * float(engine.evaluate(row)) for row, n in zip(rows, labels, strict=True)]
    return [math.fsum(losses[:asked]) / sum(labels[:asked]) for asked in ASKED]


def trained(folder: str, asked: int, packing: bool) -> tuple[str, dict[str, float], float]:
    data = open_documents(Path(folder), packing)
    groups = {
        "data": {"packing": packing},
        "train": {
            "steps": 2,
            "global_batch": 4,
            "micro_batch": 2,
            "eval_samples": asked,
            "sample_tokens": 0,
            "eval_every": 1,
        },
    }
    said = run(Path(folder), data, optim={"warmup": 0}, **groups)
    rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return said, json.loads(rows[-1]), share_of_text(data, min(asked, len(data.valid)))


def share_of_text(data: Data, windows: int) -> float:
    """Bytes of text per label: all ids but the end of text are bytes."""
    labels = torch.cat([data.valid.batch(i, 1)["labels"].flatten() for i in range(windows)])
    return float((labels[labels >= 0] < 256).double().mean())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("asked", [5, 10_000])
def test_a_run_says_how_many_windows_there_are_and_counts_their_bytes(
    asked: int, packing: bool, tmp_path: Path
) -> None:
    [(said, row, bytes_per_label)] = run_ranks(1, trained, str(tmp_path), asked, packing)
    assert said.count("fewer than --train.eval-samples") == (asked == 10_000)
    assert row["val/bits_per_byte"] == pytest.approx(
        row["val/loss"] / math.log(2) / bytes_per_label, rel=1e-12
    )
