"""The metrics of experts are the same in every topology."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.runs import open_text, run
from threed.monitor import loads, metrics

MODEL = {
    "arch": "deepseek_v3", "layers": 3, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 40, "experts": 8,
    "experts_per_token": 3, "expert_ffn": 12, "shared_experts": 1, "dense_layers": 1, "kv_rank": 10, "nope_dim": 6,
    "rope_dim": 4, "value_dim": 5,
}  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    "alone": {}, "ep": {"dp": 2, "ep": 2}, "tp": {"tp": 2}, "cp": {"cp": 2, "ep": 2}, "pp": {"pp": 2},
    "chunks": {"pp": 2, "schedule": "zb-v"}, "ZeRO-3": {"dp": 2}, "both ways": {"pp": 2, "schedule": "chimera"},
}  # fmt: skip


ZERO = {"stage": 3, "resident": 0, "offload_params": "cpu"}


def train(folder: Path, names: Sequence[str]) -> None:
    data = open_text(folder)
    for name in names:
        sizes = PLACES[name]
        world = 2 if sizes else 1
        run(
            folder, data, world, model=MODEL, parallel=sizes, zero=ZERO if name == "ZeRO-3" else {},
            train={"steps": 4, "global_batch": 8, "micro_batch": 4, "eval_every": 0},
            run={"dir": str(folder / name), "name": "run"}, log={"every": 2}, experts={"aux_loss": 0.02, "z_loss": 0.01},
        )  # fmt: skip


@pytest.mark.parametrize(
    "places",
    [
        ("ep", "tp", "cp", "chunks", "ZeRO-3"),
        pytest.param(("pp", "both ways"), marks=pytest.mark.grid),
    ],
)
def test_metrics_of_experts_are_those_of_one_process(
    places: tuple[str, ...], tmp_path: Path
) -> None:
    run_ranks(1, train, tmp_path, ["alone"])
    run_ranks(2, train, tmp_path, places)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in ("alone", *places):
        found = metrics.read(tmp_path / name / "metrics.jsonl")
        rows[name] = [row for row in found if "moe/load_max" in row]
    assert [row["step"] for row in rows["alone"]] == [1, 2, 4]
    recorded = {name: loads.read(tmp_path / name) for name in rows}
    assert [row["step"] for row in recorded["alone"]] == [1, 2, 4]
    assert recorded["alone"][0]["layers"] == [2, 3]  # 0: the embedding; 1: a dense layer
    for row, want in zip(recorded["alone"], rows["alone"], strict=True):
        assert sum(map(sum, row["loads"])) == pytest.approx(
            2 * 8 * 100, abs=8
        )  # percent of the mean
        assert max(map(max, row["loads"])) == round(100 * want["moe/load_max"])
    for name, found in rows.items():
        assert recorded[name] == recorded["alone"], name
        for row, want in zip(found, rows["alone"], strict=True):
            for key in ("load_max", "load_min", "bias_max", "aux_loss", "z_loss"):
                assert row[f"moe/{key}"] == pytest.approx(want[f"moe/{key}"], rel=1e-9), (name, key)
            assert row["moe/load_max"] > 1 > row["moe/load_min"]
            assert row["moe/aux_loss"] > 0
            assert (row["comm/ep_gib"] > 0) == ("ep" in PLACES[name])
        # each step moves a bias by the rate, or not at all
        assert found[-1]["moe/bias_max"] in (
            pytest.approx(0.004),
            pytest.approx(0.003),
            pytest.approx(0.002),
        )
