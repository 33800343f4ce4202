"""WandbRun against the real wandb in offline mode, without wandb, without a key, and with wandb's service killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from threed.monitor.wandb_log import WandbRun, redact

ROOT = Path(__file__).resolve().parents[2]
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
sys.meta_path.insert(0, Blocker())
"""
# By its metadata: importing wandb takes seconds, and a folder with wandb's runs could be imported too.
NEEDS_WANDB = pytest.mark.skipif(
    not any(metadata.distributions(name="wandb")), reason="wandb is not installed"
)


def _run(program: str, tmp_path: Path, **extra: str) -> list[str]:
    """Run `program` in a fresh process with no wandb settings of the user's; returns its lines of output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "PYTHONPATH": str(ROOT)}
    env = {**clean, **home, **extra}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _records(folder: Path) -> list[object]:
    """The protobuf records of an offline run, in LevelDB's log format: a header of 7 bytes, 32 KiB blocks of frames."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("run-*.wandb")
    data, at, records, pending = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's tail too short for a frame is padding
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(pb.Record.FromString(pending))
            pending = b""
    return records


def _history(records: list[object]) -> list[dict[str, str]]:
    rows = [record.history.item for record in records if record.HasField("history")]  # type: ignore[attr-defined]
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in row} for row in rows
    ]


@NEEDS_WANDB
def test_auto_without_a_key_is_offline_and_keeps_replayed_steps(tmp_path: Path) -> None:
    """Two sessions of one run; the second repeats steps 2 and 3: all rows are there, and step is the x axis."""
    program = """
import pathlib
from threed.monitor.wandb_log import WandbRun
def session(run_id, steps):
    run = WandbRun("auto", "threed", "demo", "out", {"model": {"layers": 2}, "api_key": "s3cr3t-value"}, run_id)
    for step in steps:
        run.log(step, {"train/loss": 1.0 / step, "val/loss": float("nan")})
    run.close(figures="figures")
    run.close()
    run.log(99, {"train/loss": 0.0})
    return run.run_id
pathlib.Path("figures").mkdir()
pathlib.Path("figures/loss.svg").write_text("<svg>picture</svg>")
first = session(None, [1, 2, 3])
assert first and session(first, [2, 3, 4]) == first
print(first)
"""
    *notes, run_id = _run(program, tmp_path)
    folders = sorted((tmp_path / "out" / "wandb").glob(f"offline-run-*-{run_id}*"))
    assert len(notes) == 2
    assert all("wandb sync" in note for note in notes)
    assert {tmp_path / note.split("wandb sync ")[1] for note in notes} == set(folders)
    sessions = [_records(folder) for folder in folders]
    rows = [row for session in sessions for row in _history(session) if "train/loss" in row]
    assert sorted(int(row["step"]) for row in rows) == [1, 2, 2, 3, 3, 4]
    assert all(float(row["train/loss"]) == 1.0 / int(row["step"]) for row in rows)
    for session in sessions:
        metrics = [record.metric for record in session if record.HasField("metric")]  # type: ignore[attr-defined]
        assert ("*", "step") in {(metric.glob_name, metric.step_metric) for metric in metrics}
    assert [page.read_text() for page in folders[0].rglob("*.html")] == ["<svg>picture</svg>"]
    content = b"".join(
        file.read_bytes() for folder in folders for file in folder.rglob("*") if file.is_file()
    )
    assert b"layers" in content
    assert b"s3cr3t-value" not in content


def _runs(records: list[object]) -> list[object]:
    return [record.run for record in records if record.HasField("run")]  # type: ignore[attr-defined]


def config_of_run(folder: Path) -> tuple[object, dict[str, object]]:
    """The run of an offline folder as wandb has it, and its configuration."""
    run = _runs(_records(folder))[0]
    return run, {item.key: json.loads(item.value_json) for item in run.config.update}  # type: ignore[attr-defined]


@NEEDS_WANDB
def test_runs_of_one_folder_name_are_told_apart_and_a_resumed_one_keeps_its_name(
    tmp_path: Path,
) -> None:
    program = """
from threed.monitor import Monitor
def session(run_id):
    about = {"wandb": "offline", "run_id": run_id, "tags": ["gpt", "tp2"], "config": {"world_size": 2}}
    with Monitor("demo", 9, 0, True, **about) as monitor:
        monitor.log(1, {"train/loss": 1.0})
    return monitor.run_id
first, second = session(None), session(None)
print(first, second, session(first))
"""
    first, second, again = _run(program, tmp_path)[-1].split()
    assert first == again != second
    folders = sorted((tmp_path / "demo" / "wandb").glob("offline-run-*"))
    found = [config_of_run(folder) for folder in folders]
    assert sorted((run.run_id, run.display_name) for run, _ in found) == sorted(  # type: ignore[attr-defined]
        (run_id, f"demo-{run_id}") for run_id in (first, first, second)
    )
    for run, config in found:
        assert (run.run_group, run.job_type, list(run.tags)) == ("demo", "train", ["gpt", "tp2"])  # type: ignore[attr-defined]
        assert config["world_size"] == 2


@NEEDS_WANDB
def test_a_killed_wandb_service_costs_one_message(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("finds the service process through /proc")
    program = """
import os, pathlib, signal, time
from threed.monitor.wandb_log import WandbRun
run = WandbRun("offline", "threed", "demo", "out", {})
for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
        pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        continue
    if parent == os.getpid():
        os.kill(pid, signal.SIGKILL)
for step in range(1, 6):
    run.log(step, {"train/loss": 1.0})
    time.sleep(0.1)
run.close()
"""
    notes = _run(program, tmp_path)
    assert len(notes) == 2
    assert "failed" in notes[1]
    assert "Training goes on" in notes[1]


@NEEDS_WANDB
def test_online_without_a_key_says_so_instead_of_asking(tmp_path: Path) -> None:
    program = """
from threed.monitor.wandb_log import WandbRun
run = WandbRun("online", "threed", "demo", "out", {}, "kept")
run.log(1, {"train/loss": 1.0})
run.close()
print(run.run_id)
"""
    note, run_id = _run(program, tmp_path)
    assert "no API key" in note
    assert "wandb login" in note
    assert run_id == "kept"


@NEEDS_WANDB
def test_auto_follows_wandb_mode(tmp_path: Path) -> None:
    program = """
import wandb
from threed.monitor.wandb_log import _choose
print(_choose("auto", wandb))
"""
    assert _run(program, tmp_path, WANDB_MODE="disabled") == ["disabled"]


def test_a_missing_package_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    program = (
        BLOCK
        + """
from threed.monitor import Monitor
from threed.monitor.metrics import read
with Monitor("out", total_steps=3, start_step=0, main=True, wandb="auto", run_id="kept") as monitor:
    for step in (1, 2, 3):
        monitor.log(step, {"train/loss": 1.0})
print(len(read("out/metrics.jsonl")), monitor.run_id)
"""
    )
    lines = _run(program, tmp_path)
    assert [line for line in lines if "wandb" in line] == lines[:1]
    assert "not installed" in lines[0]
    assert "pip install wandb" in lines[0]
    assert lines[-1] == "3 kept"


def test_a_folder_called_wandb_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    program = """
import sys
sys.path[:] = ["", *(p for p in sys.path if "site-packages" not in p and "dist-packages" not in p)]
from threed.monitor.wandb_log import WandbRun
WandbRun("auto", "threed", "demo", "out", {})
"""
    (note,) = _run(program, tmp_path)
    assert "not installed" in note


def test_off_leaves_no_trace(tmp_path: Path) -> None:
    run = WandbRun("off", "threed", "demo", tmp_path / "none", {}, "kept")
    run.log(1, {"train/loss": 1.0})
    run.close()
    assert run.run_id == "kept"
    assert not (tmp_path / "none").exists()


def test_redact_goes_by_whole_words() -> None:
    harmless = {"tokenizer": "bytes", "tokens": 7, "kv-heads": 2, "monkeys": 1, "password": None}
    secret = {"hf_token": "x", "API-KEY": "x", "secret": 3}
    assert redact({"data": {**harmless, **secret}}) == {
        "data": {**harmless, **dict.fromkeys(secret, "<redacted>")}
    }
    # a group of settings is looked into, not replaced
    assert redact({"key": {"steps": 3}}) == {"key": {"steps": 3}}
