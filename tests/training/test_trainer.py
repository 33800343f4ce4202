"""What the trainer logs is what was trained: against one process that is given the rows by hand."""

from __future__ import annotations

import itertools
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.configs import engine_of
from tests.harness import run_ranks
from tests.runs import SEQ, configuration, open_text, run
from threed import models
from threed.checkpoint import native
from threed.data import Samples
from threed.engine import Engine
from threed.layers import Slicing
from threed.models.pipeline_layout import partition
from threed.monitor import metrics
from threed.pipeline.trace import stated_flops
from threed.planner.forecast import Forecast
from threed.reliability.preemption import Preempted

GIB = 2**30
FIRST = {"train": {"steps": 5, "global_batch": 4, "stop_after": 2, "eval_samples": 7}}
SECOND = {"train": {"steps": 5, "global_batch": 8, "eval_every": 2, "eval_samples": 9}}
BATCHES = [
    range(4),
    range(4, 8),
    range(8, 16),
    range(16, 24),
    range(24, 32),
]  # 4 rows a step, then 8


def record_samples(into: dict[str, list[list[int]]], patch: pytest.MonkeyPatch) -> None:
    """Notes the sample numbers that this rank trains on and evaluates, a list a call."""
    for name in ("step", "evaluate"):
        original, seen = getattr(Engine, name), into.setdefault(name, [])

        def noted(
            engine: Engine, batch: Any, original: Any = original, seen: list[list[int]] = seen
        ) -> Any:
            seen.append(batch["samples"].tolist())
            return original(engine, batch)

        patch.setattr(Engine, name, noted)


def two_data_ranks(folder: Path) -> dict[str, list[list[int]]]:
    """Two steps of four rows, then a resume with eight: the samples of this rank."""
    data, seen = open_text(folder), {}
    with pytest.MonkeyPatch.context() as patch:
        record_samples(seen, patch)
        for flags in (FIRST, SECOND):
            run(folder, data, 2, **flags)
    return seen


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[dict[str, list[list[int]]]]]:
    """The folder of that run, and every rank's samples."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run_ranks(2, two_data_ranks, folder)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return metrics.read(folder / "run" / "metrics.jsonl")


Trained = tuple[Path, list[dict[str, list[list[int]]]]]


def test_data_ranks_share_the_samples_of_every_step_also_after_another_batch_size(
    trained: Trained,
) -> None:
    steps, evaluated = (
        [
            sorted(itertools.chain(*both))
            for both in zip(*(seen[name] for seen in trained[1]), strict=True)
        ]
        for name in ("step", "evaluate")
    )
    assert steps == [list(batch) for batch in BATCHES]
    # 7 validation samples are in 2 batches of 4, after step 2; 9 in 2 batches of 8, after steps 4 and 5.
    assert evaluated == [[*range(4)], [*range(4, 8)], *[[*range(8)], [*range(8, 16)]] * 2]


def first_windows(samples: Samples, count: int) -> dict[str, torch.Tensor]:
    """Some windows, and labels that do not count in the rest of the last micro-batch."""
    batch = hand_cut(samples, range(count + count % 2))
    batch["labels"] = batch["labels"].clone()
    batch["labels"][count:] = -100
    return batch


def test_what_two_data_ranks_log_is_what_one_process_computes(trained: Trained) -> None:
    """fp64: the order of sums is all that differs, which is why 1e-9 is far more than needed."""
    folder, logged = trained[0], rows_of(trained[0])
    data = open_text(folder)
    alone = engine_of(configuration(folder, data, 1, **SECOND))
    evaluated = {2: 7, 4: 9, 5: 9}
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5]
    for row, batch in zip(logged, BATCHES, strict=True):
        wanted = alone.step(hand_cut(data.train, batch))
        assert row["train/loss"] == pytest.approx(wanted.loss, rel=1e-9)
        assert row["train/grad_norm"] == pytest.approx(wanted.grad_norm, rel=1e-9)
        assert row["train/lr"] == pytest.approx(wanted.lr, rel=1e-12)
        assert row["train/tokens"] == batch.stop * SEQ
        assert ("val/loss" in row) == (row["step"] in evaluated)
        if "val/loss" in row:
            loss = float(alone.evaluate(first_windows(data.valid, evaluated[row["step"]])))
            assert row["val/loss"] == pytest.approx(loss, rel=1e-9)
            per_byte = loss / math.log(2) / data.bytes_per_label(evaluated[row["step"]])
            assert row["val/bits_per_byte"] == pytest.approx(per_byte, rel=1e-9)
    state = native.read_manifest(folder / "run" / "checkpoints" / "step-5")["state"]
    assert (state["steps"], state["consumed"]) == (5, 32)


def hand_cut(samples: Samples, numbers: range) -> dict[str, Any]:
    """A batch put together sample by sample."""
    windows = [samples.order(number) * SEQ for number in numbers]
    ids = torch.stack([torch.tensor(samples.tokens[at : at + SEQ + 1].tolist()) for at in windows])
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def test_traffic_is_the_sum_over_the_ranks(trained: Trained) -> None:
    """Under ZeRO 1 each of two ranks sends half the gradients and half the parameters. 3 %: padding, and a few numbers
    of loss and norm. Steps 1 and 3 are the first of a run."""
    folder, logged = trained[0], rows_of(trained[0])
    parameters = Forecast.of(configuration(folder, open_text(folder), 2), 2).parameters
    for row in logged:
        assert row["comm/dp_gib"] * GIB == pytest.approx(2 * parameters * 8, rel=0.03)
        assert row["comm/tp_gib"] == row["comm/pp_gib"] == 0


def logged_every(folder: Path) -> None:
    data = open_text(folder)
    for every in (1, 3):
        train = {"steps": 6, "global_batch": 4, "eval_every": 2}
        place = {"dir": str(folder / str(every)), "name": "run"}
        run(folder, data, 2, train=train, run=place, log={"every": every}, checkpoint={"every": 2})


def test_traffic_is_of_one_step_however_often_it_is_logged(tmp_path: Path) -> None:
    """Evaluation and saves between two steps do not count. The tenth: of few numbers of when what ran."""
    run_ranks(2, logged_every, tmp_path)
    rows = {every: metrics.read(tmp_path / str(every) / "metrics.jsonl") for every in (1, 3)}
    sent = {
        every: [row["comm/dp_gib"] for row in rows[every] if "comm/dp_gib" in row] for every in rows
    }
    assert [len(sent[every]) for every in (1, 3)] == [6, 3]
    for value in (*sent[1], *sent[3]):
        assert value == pytest.approx(sent[1][2], rel=0.01)


def asked_to_stop(folder: Path) -> str:
    """Returns the error of a run that gets a signal in its second step."""
    data, real, calls = open_text(folder), Engine.step, itertools.count(1)

    def step(engine: Engine, batch: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(engine, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", step)
        with pytest.raises(Preempted) as error:
            run(folder, data, 1, train={"steps": 12}, checkpoint={"every": 99}, log={"every": 99})
    return str(error.value)


def test_a_run_stops_between_logged_steps_and_saves(tmp_path: Path) -> None:
    (said,) = run_ranks(1, asked_to_stop, tmp_path)
    assert said == "preempted by SIGTERM (rank 0) after step 3, which is saved"


def two_stages(folder: Path) -> None:
    run(folder, open_text(folder), 2, **PIPELINE)


PIPELINE = {
    "parallel": {"pp": 2},
    "train": {"steps": 3, "micro_batch": 4},
    "model": {"tied": False},
}


def test_what_a_pipeline_logs(tmp_path: Path) -> None:
    """With one micro-batch the first stage waits exactly while the second one works."""
    run_ranks(2, two_stages, tmp_path)
    config = configuration(tmp_path, open_text(tmp_path), 2, **PIPELINE)
    layers = models.build(config.model, Slicing()).layers()
    flops = stated_flops(layers, 4 * SEQ, SEQ) or []
    first, second = (
        sum(flops[i] for i in stage)
        for stage in partition("balanced", len(flops), 2, lambda: flops)
    )
    # bytes of [s b h], once forward by the first rank, once back by the second
    boundary = 4 * SEQ * 16 * 8
    # 5 %: half a thousand bytes of when what ran.
    for row in rows_of(tmp_path)[1:]:
        assert row["pp/bubble_ideal"] == pytest.approx(second / (first + second))
        assert row["pp/bubble_predicted"] == pytest.approx(0.5)  # one of the two always waits
        assert 0 < row["pp/bubble_measured"] < 1
        assert row["pp/slowest_stage"] in (0, 1)
        assert row["comm/pp_gib"] * GIB == pytest.approx(2 * boundary, rel=0.05)
        assert row["comm/dp_gib"] == 0
