"""The benchmarks' own arithmetic, and that the engines of the ZeRO suites train the same thing."""

from __future__ import annotations

import argparse
import importlib.util

import pytest
import torch

from benchmarks import memory, run
from benchmarks.engines import ENGINES
from benchmarks.reference import PRESETS
from benchmarks.suites import STAGES, SUITES, Suite, wire_mib

PSI = PRESETS["base"].parameters


def test_every_suite_names_engines_that_exist() -> None:
    for name, suite in SUITES.items():
        assert set(suite.engines) <= set(ENGINES), name
    assert {engine for name in SUITES if name.startswith("zero") for engine in SUITES[name].engines} <= set(STAGES)


def test_parameters_are_counted_with_the_tied_table_once() -> None:
    assert PSI == 42_155_008


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_wire_bytes_follow_the_formula(stage: int, volumes: int, ranks: int) -> None:
    per_rank = volumes * PSI * 4 * (ranks - 1) / ranks
    assert wire_mib(stage, PSI, ranks) == pytest.approx(ranks * per_rank / 2**20)


def test_live_and_peak_count_storages_once() -> None:
    before = memory.live_mib()
    kept = torch.zeros(3 * 2**18)  # 3 MiB
    views = [kept[:5], kept.view(3, -1)]
    kept.requires_grad_().grad = torch.zeros(3 * 2**18)
    assert memory.live_mib() - before == pytest.approx(6, abs=0.01)
    peak = memory.peak_mib(lambda: torch.zeros(2**20).add(torch.zeros(2**19).sum()))  # at most 4 + 4 MiB at once
    assert peak - before == pytest.approx(14, abs=0.1)
    assert memory.live_mib() - before == pytest.approx(6, abs=0.01)
    assert len(views) == 2


def options(**changed: object) -> argparse.Namespace:
    plain = {"only": None, "quiet": 99.0, "patience": 60.0, "torch_matmul": False, "preset": "tiny", "rounds": 1}
    return argparse.Namespace(**{**plain, "memory_only": False, "quick": True, **changed})


def test_missing_deepspeed_leaves_its_engines_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run.chosen(Suite(2, ("ddp", "deepspeed2")), options()) == ["ddp"]
    assert "deepspeed2" in capsys.readouterr().err
    with pytest.raises(ImportError, match="not installed"):
        ENGINES["deepspeed2"].load()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_engines_of_the_zero_suite_train_the_same_thing() -> None:
    names = [name for name in SUITES["zero"].engines if not name.startswith("deepspeed")]
    (record,) = run.run_suite("zero", options(only=names))
    assert list(record["results"]) == names
    for name, found in record["results"].items():
        assert found["loss_difference"] <= run.PARITY, name
        assert found["cpu_s_per_token"] > 0
        assert found["tokens_per_s"] > 0
    lines = run.tables([record]).splitlines()
    assert len(lines) == 2 + len(names)
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.slow
def test_memory_and_bytes_of_one_engine() -> None:
    (record,) = run.run_suite("zero", options(only=["threed_zero1"], quick=False))
    formula = wire_mib(1, record["parameters"], 2)
    assert record["counted_mib"]["dp"] == pytest.approx(formula, rel=0.02)
    assert record["loopback_mib"] > 0.99 * formula  # at this size also barriers, and whatever else uses the loopback
    states = record["parameters"] * 4 * (1 + 1 + 2 / 2) / 2**20  # parameters, gradients, half of two moments
    assert min(record["live_mib"]) >= states
    assert min(record["live_peak_mib"]) > max(record["live_mib"])
    assert len({line.count("|") for line in run.tables([record]).splitlines() if line}) == 1
