"""The computations of the benchmarks, and that the engines of the ZeRO suites train the same."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks import compare, host, memory, run
from benchmarks.engines import ENGINES
from benchmarks.reference import PRESETS
from benchmarks.suites import OFFLOADS, STAGES, SUITES, Suite, wire_mib
from tests import programs
from tests.harness import run_script

ROOT = Path(__file__).resolve().parents[1]
PSI = PRESETS["base"].parameters


def test_every_suite_names_engines_that_exist() -> None:
    for name, suite in SUITES.items():
        assert set(suite.engines) <= set(ENGINES), name
        if name.startswith(("zero", "offload")):
            assert set(suite.engines) <= set(STAGES), name


def test_parameters_are_counted_with_the_tied_table_once() -> None:
    assert PSI == 42_155_008
    assert PRESETS["200m"].parameters > 200e6


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_wire_bytes_follow_the_formula(stage: int, volumes: int, ranks: int) -> None:
    per_rank = volumes * PSI * 4 * (ranks - 1) / ranks
    assert wire_mib(stage, PSI, ranks) == pytest.approx(ranks * per_rank / 2**20)


def test_live_and_peak_count_storages_once() -> None:
    gc.collect()  # objects of earlier tests in reference cycles must not be freed between the two measurements
    before = memory.live_mib()
    with FakeTensorMode():
        fakes = [
            torch.zeros(2**20)
        ]  # like those that torch.compile leaves behind, which have no memory
    kept = torch.zeros(3 * 2**18)  # 3 MiB
    views = [kept[:5], kept.view(3, -1)]
    kept.requires_grad_().grad = torch.zeros(3 * 2**18)
    assert memory.live_mib() - before == pytest.approx(6, abs=0.01)
    # at most 4 + 4 MiB at once
    peak = memory.peak_mib(lambda: torch.zeros(2**20).add(torch.zeros(2**19).sum()))
    assert peak - before == pytest.approx(14, abs=0.1)
    assert memory.live_mib() - before == pytest.approx(6, abs=0.01)
    assert len(views) + len(fakes) == 3


def test_bytes_of_a_drive_are_counted(tmp_path: Path) -> None:
    size, before = 1 << 20, host.drive_bytes()
    with open(tmp_path / "swap", "wb", buffering=0) as file:
        file.write(bytes(size))
        os.fsync(file.fileno())
    read, written = (now - then for then, now in zip(before, host.drive_bytes(), strict=True))
    assert read >= 0
    assert written == 0 or written >= size  # 0 where the folder is in memory


def test_a_name_stands_for_all_suites_that_begin_so() -> None:
    assert run.named("zero") == ["zero"]
    assert run.named("offload-nvme-3-all-bf16") == [
        f"offload-nvme-3-all-bf16-dp{ranks}" for ranks in (1, 2)
    ]
    assert len(run.named("offload")) == 2 * len(OFFLOADS)
    with pytest.raises(argparse.ArgumentTypeError, match="the suites are dp2,"):
        run.named("off")


def test_updates_are_compared_where_every_step_is_finished() -> None:
    result = {
        "tokens_per_s": 1.0, "speed": 1.0, "speed_interval": (1, 1), "cpu_s_per_token": 1.0, "cpu": 1.0,
        "cpu_interval": (1, 1), "loss_difference": 0.0, "step_ms": 2000.0,
    }  # fmt: skip
    update = {"update_ms": 1234.0, "update": 1.5, "update_interval": (1.25, 1.75)}
    records = [
        {"suite": "zero", "world": 2, "rounds": 3, "results": {"ddp": result}},
        {
            "suite": "offload",
            "world": 1,
            "rounds": 3,
            "settle": True,
            "results": {"threed_zero2_cpu": result | update},
        },
    ]
    lines = run.tables(records).splitlines()
    # it is in the table of speeds and in the table of updates
    assert [line.count("threed_zero2_cpu") for line in lines].count(1) == 2
    assert (
        lines[-1]
        == "| offload | 1 | threed_zero2_cpu | 2 | 1.234 | **1.50** | 1.25–1.75 | 2.000 | 3 |"
    )


def options(**changed: object) -> argparse.Namespace:
    plain = {
        "only": None,
        "quiet": 99.0,
        "patience": 60.0,
        "torch_matmul": False,
        "preset": "tiny",
        "rounds": 1,
    }
    plain["folder"] = None
    return argparse.Namespace(**{**plain, "memory_only": False, "quick": True, **changed})


def test_missing_deepspeed_leaves_its_engines_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run.chosen(Suite(2, ("ddp", "deepspeed2")), options()) == ["ddp"]
    assert "deepspeed2" in capsys.readouterr().err
    with pytest.raises(ImportError, match="not installed"):
        ENGINES["deepspeed2"].load()  # type: ignore[attr-defined]


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs workers on forked ranks, which need not import torch."""
    monkeypatch.setattr(
        run, "launched", lambda ranks, words, env: run_script(ranks, words, ROOT, env)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_engines_of_the_zero_suite_train_the_same_thing(every: bool) -> None:
    left_out = () if every else ("ddp_again", "fsdp2_keep", "threed_zero2", "wrapped_zero2")
    names = [
        name
        for name in SUITES["zero"].engines
        if not name.startswith("deepspeed") and name not in left_out
    ]
    (record,) = run.run_suite("zero", options(only=names))
    assert list(record["results"]) == names
    for name, found in record["results"].items():
        assert found["loss_difference"] <= SUITES["zero"].parity, name
        assert found["cpu_s_per_token"] > 0
        assert found["tokens_per_s"] > 0
    lines = run.tables([record]).splitlines()
    assert len(lines) == 2 + len(names)
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "name",
    ["offload-cpu-2-dp2", pytest.param("offload-nvme-3-all-bf16-dp1", marks=pytest.mark.grid)],
)
def test_engines_of_the_offload_suites_train_the_same_thing(name: str) -> None:
    names = [engine for engine in SUITES[name].engines if not engine.startswith("deepspeed")]
    (record,) = run.run_suite(name, options(only=names))
    for engine, found in record["results"].items():
        assert found["loss_difference"] <= SUITES[name].parity, engine
        assert 0 < found["update_ms"] < found["step_ms"], engine


@pytest.mark.grid
@pytest.mark.usefixtures("warm")
def test_what_swaps_reads_and_writes_the_state(tmp_path: Path) -> None:
    chosen = options(only=["wrapped_zero3_nvme"], quick=False, folder=tmp_path, preset="small")
    chosen.steps = 4
    (record,) = run.run_suite("offload-nvme-3-dp1", chosen)
    slices = record["parameters"] * 4 / 2**20
    moved = 3 * slices  # gradients and two moments; in fp32 the parameters are the masters
    read, written = record["drive_mib"]
    assert read == pytest.approx(moved, rel=0.1) or read == 0  # 0 where the folder is in memory
    assert written == pytest.approx(moved, rel=0.1) or written == 0
    assert not list(tmp_path.iterdir())


def records(script: str, *options: str) -> list[dict[str, Any]]:
    """Returns the JSON lines of a benchmark script with small sizes."""
    done = run_script(1, [f"{ROOT}/benchmarks/{script}", *options], ROOT, os.environ)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_the_pipelined_update_is_measured_beside_its_parts(tmp_path: Path) -> None:
    sizes = ("--layers", "1", "--rounds", "2", "--bucket-mib", "4")
    (record,) = records("swap.py", *sizes, "--folder", str(tmp_path))
    assert set(record["seconds"]) == {"pipelined", "io", "compute"}
    assert record["parameters"] > 12e6
    assert record["overlap"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_drive_and_adam_are_measured(tmp_path: Path) -> None:
    sizes = ("--rounds", "2", "--tensors", "2", "--mib", "1")
    drive = records("nvme.py", *sizes, "--only", "threed", "o_direct", "--dir", str(tmp_path))
    assert len(drive) > 1
    assert not list(tmp_path.iterdir())
    (adam, *_) = records(
        "adam.py", "--numel", "100000", "--rounds", "2", "--only", "threed", "--quiet", "99"
    )
    assert adam["impl"] == "threed"
    assert adam["full"]["best_ms"] > 0


@pytest.mark.slow
def test_checkpoints_are_measured_beside_the_peers(tmp_path: Path) -> None:
    sizes = ("--layers", "2", "--hidden", "64", "--seq", "16", "--rounds", "1")
    found = {
        record["way"]: record
        for record in records("checkpoint.py", *sizes, "--folder", str(tmp_path))
    }
    assert {
        "memcpy",
        "steps",
        "threed save",
        "threed start_save",
        "dcp.async_save",
        "torch.save",
    } <= set(found)
    assert found["threed start_save"]["durable_s"] > found["threed start_save"]["blocked_s"] > 0
    assert found["steps"]["steps_beside"] >= 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_pipelines_are_measured_beside_what_their_plans_promise() -> None:
    (record,) = run.run_suite("pp2_zb-v", options(only=["torch_zb-v", "threed_zb-v"]))
    found = record["results"]["threed_zb-v"]
    assert found["loss_difference"] <= SUITES["pp2_zb-v"].parity
    assert 0 <= found["bubble_expected"] < 1  # 0 if the rank with the longest span never waits
    assert 0 < found["bubble"] < 1
    assert found["bound_s"] > 0
    assert run.tables([record]).splitlines()[-1].count("threed_zb-v") == 1


@pytest.mark.slow
def test_stages_that_sleep_are_timed_beside_the_peers() -> None:
    sizes = ("--stages", "2", "--schedules", "1f1b", "zb-v", "--unit-ms", "2", "--rounds", "1")
    done = programs.run([f"{ROOT}/benchmarks/sleeping_stages.py", *sizes], ROOT, os.environ)
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]
    ]
    assert [row[0] for row in rows] == ["1f1b", "zb-v"]
    # all sleeps are counted
    assert all(float(time) >= float(row[3]) for row in rows for time in (row[4], row[6]))


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("how", ["warm", pytest.param("by torchrun", marks=pytest.mark.grid)])
def test_memory_and_bytes_of_one_engine(how: str, request: pytest.FixtureRequest) -> None:
    if how == "warm":
        request.getfixturevalue("warm")
    (record,) = run.run_suite("zero", options(only=["threed_zero1"], quick=False))
    formula = wire_mib(1, record["parameters"], 2)
    assert record["counted_mib"]["dp"] == pytest.approx(formula, rel=0.02)
    # at this size, barriers and other traffic on the loopback are a visible part
    assert record["loopback_mib"] > 0.99 * formula
    # parameters, gradients, half of two moments
    states = record["parameters"] * 4 * (1 + 1 + 2 / 2) / 2**20
    assert min(record["live_mib"]) >= states
    assert min(record["live_peak_mib"]) > max(record["live_mib"])
    assert len({line.count("|") for line in run.tables([record]).splitlines() if line}) == 1


@pytest.mark.grid
def test_a_comparison_does_not_wait_for_ranks_that_have_died(tmp_path: Path) -> None:
    """They die because there is no such preset."""
    args = argparse.Namespace(preset="none", batch=2, microbatches=1, steps=1, settle=False)
    with pytest.raises(
        SystemExit, match=f"threed_zero1 of {ROOT}, on 2 ranks, failed with exit code 1"
    ):
        compare.World(ROOT, "threed_zero1", 2, args, str(tmp_path))
