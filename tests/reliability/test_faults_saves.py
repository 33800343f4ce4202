"""Kills and signals at every point of a save, of a load, and where native code is compiled, under torchrun.

python -m pytest tests/reliability/test_faults_saves.py [-m grid]       # rows and repeats: tests/fault_runs.py

A save that was killed leaves the checkpoint before it, or is whole; the next start goes on with the same losses.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fault_runs import (
    BESIDE,
    FLAGS,
    SCRIPT,
    Case,
    Truth,
    again,
    environment,
    launched,
    line_of,
    losses,
    params,
    prepare,
    repeat,
    row,
    run,
    saved,
    torchrun,
    uninterrupted,
)

PREEMPTED = r"preempted by SIGTERM.* after step \d+, which is saved; the same command resumes from \S+/step-\d+"
BEFORE, AFTER, EITHER = (
    (4, 4),
    (8, 8),
    (4, 8),
)  # the newest checkpoint, when the save of step 8 was killed


def killed(at: str, rank: int, saved: tuple[int, int], beside: bool = False, **more: Any) -> Case:
    when = r"step \d+, phase \w+" if beside else "step 8, phase save"
    says = rf"rank {rank} on \S+ \(stage {rank}, dp 0, tp 0\) was killed: process \d+ has ended in {when}"
    flags = (BESIDE if beside else ()) + (("--checkpoint.keep", "1") if at == "prune" else ())
    name = f"killed-{at}-{rank}" + "-beside" * beside + "-restarted" * bool(more.get("restarts"))
    return Case(
        name, f"rank={rank} step=8 at={at} do=SIGKILL", says, saved=saved, flags=flags, **more
    )


def asked(do: str, at: str, step: int, **more: Any) -> Case:
    """A signal while a save is written; training goes on when it has come, or its last step might be done before."""
    about = {"saved": (8, 11), "rank_code": 75, "preempted": True, **more}
    fault = f"rank=1 step={step} at={at} do={do};rank=0 step={step + 1} at=step do=hold-fired-1"
    return Case(f"{do}-{at}-beside", fault, PREEMPTED, flags=BESIDE, **about)


LOADED = ("--train.stop-after", "6")
CASES = [
    # Ten points of a save that training waits for; rank 0 publishes.
    killed("prepare", 0, BEFORE),
    killed("prepare", 1, BEFORE),
    killed("write", 0, BEFORE),
    killed("write", 1, BEFORE),
    killed("block", 0, BEFORE),
    killed("block", 1, BEFORE),
    killed("flush", 0, BEFORE),
    killed("flush", 1, BEFORE),
    killed("entry", 0, BEFORE),
    killed("entry", 1, BEFORE),
    killed("commit", 0, BEFORE),
    killed("commit", 1, EITHER),
    killed("manifest", 0, BEFORE),
    killed("publish", 0, BEFORE),
    killed("published", 0, AFTER),
    killed("prune", 0, AFTER),
    killed("block", 1, (12, 12), restarts=1, code=0),
    killed("publish", 0, (12, 12), restarts=1, code=0),
    # Seven of one that is written beside training.
    killed("copy", 1, BEFORE, beside=True),
    killed("block", 0, BEFORE, beside=True),
    killed("block", 1, BEFORE, beside=True),
    killed("entry", 1, BEFORE, beside=True),
    killed("commit", 0, BEFORE, beside=True),
    killed("commit", 1, EITHER, beside=True),
    killed("publish", 0, BEFORE, beside=True),
    killed("published", 0, AFTER, beside=True),
    killed("prune", 0, AFTER, beside=True),
    killed("publish", 0, (12, 12), beside=True, restarts=1, code=0),
    # A rank dies while the first one publishes.
    Case("killed-while-the-first-commits", "rank=0 step=8 at=publish do=wait;rank=1 step=8 at=commit do=SIGKILL",
         r"rank 1 on \S+ \(stage 1, dp 0, tp 0\) was killed", saved=EITHER),
    Case("killed-while-the-first-commits-beside",
         "rank=0 step=8 at=publish do=wait;rank=1 step=8 at=commit do=SIGKILL",
         r"rank 1 on \S+ \(stage 1, dp 0, tp 0\) was killed", saved=EITHER, flags=BESIDE),
    # Saves that fail, and the next one works.
    Case("ENOSPC-beside", "rank=1 step=8 at=block do=ENOSPC", r"no checkpoint of step 8: rank 1 could not write \S+: "
         r"No space left on device: needs .* training goes on", 0, (12, 12), flags=BESIDE),
    Case("EIO-beside", "rank=0 step=8 at=block do=EIO", r"no checkpoint of step 8: rank 0 could not write \S+: "
         r".*Input/output error.*training goes on", 0, (12, 12), flags=BESIDE),
    Case("EIO-in-a-save", "rank=1 step=8 at=flush do=EIO", r"no checkpoint of step 8: rank 1 could not write \S+: "
         r".*Input/output error.*training goes on", 0, (12, 12)),
    # Signals while a save is written beside training, and while a checkpoint is loaded.
    asked("SIGTERM", "block", 8),
    asked("launcher-SIGTERM", "block", 8),
    asked("SIGTERM", "commit", 8),
    Case("SIGTERM-load", "rank=1 step=0 at=load do=SIGTERM", PREEMPTED, saved=(6, 6), first=LOADED, rank_code=75,
         preempted=True),
    Case("launcher-SIGTERM-load", "rank=1 step=0 at=load do=launcher-SIGTERM", PREEMPTED, saved=(6, 6), first=LOADED,
         preempted=True),
    Case("killed-load", "rank=1 step=0 at=load do=SIGKILL", r"rank 1 on \S+ \(stage 1, dp 0, tp 0\) was killed: "
         r"process \d+ has ended in step 0, phase start", saved=(6, 6), first=LOADED),
]  # fmt: skip


@pytest.mark.parametrize("case", params(CASES))
def test_a_save(case: Case, tmp_path: Path, truth: Truth) -> None:
    repeat(case.name, tmp_path, lambda folder: run(case, folder, truth))


def compiling(do: str, folder: Path, truth: Truth) -> dict[str, Any]:
    """A signal where a rank compiles native code, into an empty cache, whichever is first; then the same command."""
    case = Case(f"{do}-build", f"rank=all step=0 at=build do={do}", "")
    expected, began = uninterrupted(truth, case, folder / "straight"), time.monotonic()
    place = prepare(folder / "run")
    known = environment(place, case.fault) | {"XDG_CACHE_HOME": str(folder / "native")}
    line = torchrun(2, SCRIPT, *FLAGS, *case.topology)
    done = subprocess.run(line, cwd=place, env=known, capture_output=True, text=True, timeout=200)
    seconds, said = time.monotonic() - began, done.stdout + done.stderr
    assert done.returncode == 1, said
    number = {"SIGTERM": 15, "SIGKILL": 9}[do]
    says = next(line.strip() for line in said.splitlines() if f"exitcode  : -{number} " in line)
    assert not (place / "runs" / "tiny" / "checkpoints").exists()
    assert list((folder / "native").rglob("*.so")) == []
    known.pop("FAULT")
    done = subprocess.run(line, cwd=place, env=known, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((folder / "native").rglob("*.so"))) == 1
    assert losses(place) == expected
    return row(1, says, seconds, saved(place)[:0])


@pytest.mark.grid
@pytest.mark.parametrize("do", ["SIGTERM", "SIGKILL"])
def test_compiling(do: str, tmp_path: Path, truth: Truth) -> None:
    repeat(f"{do}-build", tmp_path, lambda folder: compiling(do, folder, truth))


def looping(do: str, folder: Path, truth: Truth) -> dict[str, Any]:
    """A run that fails in the same step after each restart; then the same command without the fault."""
    case = Case(f"crash-loop-{do}", f"rank=1 step=6 at=forward do={do} always=yes", "", restarts=2)
    expected, began = uninterrupted(truth, case, folder / "straight"), time.monotonic()
    done = launched(case, prepare(folder / "run"))
    seconds, said = time.monotonic() - began, done.stdout + done.stderr
    assert done.returncode == 1, said
    what = (
        "failed in step 6, phase step: RuntimeError: planted"
        if do == "raise"
        else "was killed: process"
    )
    for attempt in range(3):
        says = line_of(
            said,
            rf"^threed: rank 1 on \S+ \(stage 1, dp 0, tp 0\) {what}.*; attempt {attempt + 1} of 3",
        )
    assert says.endswith("attempt 3 of 3")
    assert saved(folder / "run") == [4]
    assert os.listdir(folder / "run" / "runs" / "tiny" / "checkpoints") == ["step-4"]
    again(case, folder / "run")
    assert losses(folder / "run") == expected
    return row(done.returncode, says, seconds, [4])


@pytest.mark.grid
@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
def test_a_crash_loop(do: str, tmp_path: Path, truth: Truth) -> None:
    repeat(f"crash-loop-{do}", tmp_path, lambda folder: looping(do, folder, truth))
