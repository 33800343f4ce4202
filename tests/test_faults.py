"""Faults in real runs under torchrun: exit code, message, what is on disk, and the same losses after a recovery.

python -m pytest tests/test_faults.py                   # one case of each kind
python -m pytest tests/test_faults.py -m grid           # every case
FAULT_REPEATS=20 FAULT_RESULTS=results.jsonl python -m pytest tests/test_faults.py -m grid

Repeats that the file of results has are not run again, so that many can be spread over several sessions. A row has
case, repeat, exit code, seconds of the run, seconds from a fault to the message that names a rank that hangs, and the
steps of the checkpoints that were there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_script
from threed.checkpoint import native
from threed.monitor import heartbeat, metrics

ROOT = Path(__file__).parent.parent
SCRIPT = str(Path(__file__).with_name("faulty.py"))
STEPS = 12
FLAGS = [
    "--preset", "tiny", "--model.layers", "2", "--model.hidden", "32", "--model.seq", "32", "--train.global-batch", "4",
    "--log.every", "1", "--train.eval-samples", "4", "--data.path", "text.txt", "--optim.warmup", "2",
    "--checkpoint.async", "false",  # else a save may still be written; kills of those: tests/test_checkpoint_beside.py
    "--checkpoint.every", "4", "--checkpoint.keep", "9", "--train.eval-every", "6", "--log.wandb", "off",
    "--checkpoint.export-hf", "false", "--train.sample-tokens", "2", "--train.steps", str(STEPS),
]  # fmt: skip
TWO, FOUR = ("--parallel.pp", "2"), ("--parallel.pp", "2", "--parallel.tp", "2")
ASYNCHRONOUS = (*TWO, "--parallel.schedule", "2bw")
SLICED = ("--parallel.tp", "2", "--parallel.dp", "2", "--zero.stage", "3")
HANG_S = 6
PREEMPTED = (
    r"preempted by {} after step \d+, which is saved; the same command resumes from runs/tiny/checkpoints/step-\d+"
)


@dataclass(frozen=True)
class Case:
    """A fault, as `tests/faulty.py` reads it, and what must come of it.

    code: torchrun's; -9: it was killed. says: a pattern of exactly one line. saved: the newest checkpoint's step right
    after; a later one may have come where it is a range. restarts: torchrun's, which then recovers by itself.
    """

    name: str
    fault: str
    says: str
    code: int = 1
    saved: tuple[int, int] = (4, 4)
    restarts: int = 0
    topology: tuple[str, ...] = TWO
    flags: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    rank_code: int | None = None
    preempted: bool = False
    always: bool = False

    @property
    def world(self) -> int:
        return 4 if self.topology in (FOUR, SLICED) else 2


def killed(at: str, rank: int, restarts: int = 1, always: bool = False) -> Case:
    says = rf"rank {rank} on \S+ \(stage {rank}, dp 0, tp 0\) was killed: process \d+ has ended in step 6, phase step"
    name, fault = f"killed-{at}-{rank}" + "-for-good" * (not restarts), f"rank={rank} step=6 at={at} do=SIGKILL"
    if restarts:
        return Case(name, fault, says, 0, (12, 12), restarts)
    return Case(name, fault, says, always=always)


def beside_one_that_waits(do: str, says: str, always: bool = False) -> Case:
    """A rank fails while the other one sits where it notices nothing, as in NCCL: torchrun's SIGTERM must end it."""
    fault = f"rank=1 step=6 at=forward do={do};rank=0 step=6 at=step do=sleep"
    return Case(
        f"{do}-beside-sleep", fault, rf"rank 1 on \S+ \(stage 1, dp 0, tp 0\) {says}", rank_code=143, always=always
    )


def stopped(rank: int, topology: tuple[str, ...] = FOUR, always: bool = False) -> Case:
    stage, tp = (rank // 2, rank % 2) if topology == FOUR else (rank, 0)
    says = rf"hang: no progress for .* rank {rank} on \S+ \(stage {stage}, dp 0, tp {tp}\) is stopped"
    flags = ("--run.hang-timeout", f"{HANG_S}s")
    name, fault = f"stopped-{rank}" + "-of-2" * (topology == TWO), f"rank={rank} step=6 at=forward do=SIGSTOP"
    return Case(name, fault, says, 0, (12, 12), 1, topology, flags, always=always)


def hangs(at: str, do: str, says: str) -> Case:
    text = rf"hang: no progress for .* rank 1 on \S+ \(stage 1, dp 0, tp 0\) {says}"
    flags = ("--run.hang-timeout", f"{HANG_S}s")
    return Case(f"{do}-{at}", f"rank=1 step=6 at={at} do={do}", text, 0, (12, 12), 1, TWO, flags)


def asked(do: str, rank: int, at: str = "forward", step: int = 6, **more: Any) -> Case:
    """A signal that preempts; of the ranks that torchrun hands it to, one may have met the others first."""
    name = do.removeprefix("launcher-")
    who = rf"{name}( \(rank \d\))?" if do != name else rf"{name} \(rank {rank}\)"
    fault = f"rank={rank} step={step} at={at} do={do}"
    suffix = "".join(f"-{word}" for word in more.get("topology", TWO)[-1:] if word != "2")
    about = {"saved": (step, step + 2), "rank_code": 75, "preempted": True, **more}
    return Case(f"{do}-{at}-{rank}{suffix}", fault, PREEMPTED.format(who), **about)


def planted(at: str, rank: int, always: bool = False) -> Case:
    says = rf"rank {rank} on \S+ \(stage {rank}, dp 0, tp 0\) failed in step 6, phase step: RuntimeError: planted"
    return Case(f"exception-{at}-{rank}", f"rank={rank} step=6 at={at} do=raise", says, rank_code=1, always=always)


def disk(what: str, step: int, always: bool = False) -> Case:
    text = {"ENOSPC": "No space left on device", "EROFS": "Read-only file system"}[what]
    fault = f"rank=1 step={step} at=fsync do={what}"
    says = rf"rank 1 could not write .*{text}.*earlier checkpoints are intact"
    last = step == STEPS
    return Case(
        f"{what}-{step}", fault, says, int(last), (8, 8) if last else (12, 12), rank_code=2 if last else None,
        always=always,
    )  # fmt: skip


KILLED = [(at, rank) for at in ("forward", "collective", "update") for rank in (0, 1)]
CASES = [
    *(killed(at, rank) for at, rank in KILLED),
    killed("collective", 0, restarts=0, always=True),
    beside_one_that_waits("SIGKILL", r"was killed: process \d+ has ended in step 6", always=True),
    beside_one_that_waits("raise", "failed in step 6, phase step: RuntimeError: planted"),
    *(stopped(rank) for rank in range(4)),
    stopped(0, TWO, always=True),
    hangs("data", "sleep", r"waits for no other rank: step 6, phase data, in act at tests/faulty.py"),
    hangs("update", "spin", "does not answer"),
    asked("launcher-SIGTERM", 0, always=True),
    asked("launcher-SIGHUP", 0),
    asked("launcher-SIGUSR1", 1, launcher=("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1")),
    asked("SIGTERM", 0),
    asked("SIGUSR1", 1, always=True),
    asked("SIGHUP", 1),
    asked("SIGUSR1", 1, topology=ASYNCHRONOUS),
    asked("SIGUSR1", 3, topology=SLICED),
    asked("launcher-SIGTERM", 0, at="evaluate"),
    asked("SIGUSR1", 1, at="evaluate"),
    asked("SIGUSR1", 0, at="save", step=4),
    asked("launcher-SIGTERM", 1, at="save", step=8),
    Case(
        "time-limit", "rank=all step=1 at=step do=slow", PREEMPTED.format("train.time-limit 10 s"), saved=(0, 11),
        flags=("--train.time-limit", "0:00:10"), rank_code=75, preempted=True, always=True,
    ),
    Case(
        "SIGTERM-twice", "rank=all step=6 at=forward do=SIGTERM-twice", "exitcode  : 143", rank_code=143,
    ),
    Case("launcher-SIGKILL", "rank=1 step=6 at=forward do=launcher-SIGKILL", "step     5/12", code=-9),
    Case("SIGTERM-at-the-end", "rank=1 step=12 at=sample do=SIGTERM", "resume     torchrun", 0, (12, 12)),
    planted("forward", 1, always=True),
    planted("update", 0),
    disk("ENOSPC", 8),
    disk("ENOSPC", 12, always=True),
    disk("EROFS", 12),
]  # fmt: skip


def environment(folder: Path, fault: str = "") -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "THREED", "TORCHELASTIC"))}
    kept |= {"OMP_NUM_THREADS": "1", "THREED_CACHE": str(folder.parent / "cache"), "PYTHONPATH": str(ROOT)}
    return kept | ({"FAULT": fault} if fault else {})


def prepare(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("".join(f"line {n} has the square {n * n}\n" for n in range(2000)))
    return folder


def launched(case: Case, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a case by torchrun, as a user does."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.world)]
    line += ["--max-restarts", str(case.restarts), *case.launcher, SCRIPT, *FLAGS, *case.topology, *case.flags]
    return subprocess.run(
        line, cwd=folder, env=environment(folder, case.fault), capture_output=True, text=True, timeout=300
    )


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for row in metrics.read(folder / "runs" / "tiny" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def truth() -> dict[tuple[str, ...], list[tuple[int, float]]]:
    """The losses of runs that nothing happened to, by the flags of their topology, once they were asked for."""
    return {}


def uninterrupted(truth: dict[Any, Any], case: Case, folder: Path) -> list[tuple[int, float]]:
    if case.topology not in truth:
        done = run_script(case.world, [SCRIPT, *FLAGS, *case.topology], prepare(folder), environment(folder))
        assert done.returncode == 0, done.stdout + done.stderr
        truth[case.topology] = losses(folder)
    return truth[case.topology]  # type: ignore[no-any-return]


def saved(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run folder, each of which is whole."""
    paths = sorted((folder / "runs" / "tiny" / "checkpoints").glob("step-*"), key=lambda path: path.name)
    assert all(path.name[5:].isdecimal() for path in paths if not path.name.endswith(".tmp")), paths
    whole = [path for path in paths if path.name[5:].isdecimal()]
    for path in whole:
        assert native.verify(path, native.read_manifest(path)) == []
    return sorted(int(path.name[5:]) for path in whole)


def check(case: Case, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Exit codes, the message, and what is on disk."""
    said = done.stdout + done.stderr
    assert done.returncode == case.code, said
    # torchrun repeats in its report what ranks leave for it, after "traceback : "
    lines = [line for line in said.splitlines() if re.search(case.says, line) and "traceback :" not in line]
    assert len(lines) == 1 or case.says.startswith("exitcode"), said
    assert "behind" not in said, said
    if case.rank_code is not None and "launcher" not in case.fault:
        assert f"exitcode  : {case.rank_code} " in said, said
    steps = saved(folder)
    assert case.saved[0] <= steps[-1] <= case.saved[1], (steps, said)
    mark = folder / "runs" / "tiny" / "preempted.json"
    assert mark.exists() == case.preempted
    if case.preempted:
        assert json.loads(mark.read_text())["step"] == steps[-1]


def check_nothing_lives(folder: Path) -> None:
    end = time.monotonic() + 60
    for beat in heartbeat.read_all(folder / "runs" / "tiny" / "heartbeat"):
        while heartbeat.process_state(beat) != "ended":
            assert time.monotonic() < end, f"rank {beat['rank']} outlived its launcher"
            time.sleep(0.1)


def named_after(folder: Path) -> float | None:
    """Seconds from a fault to the report of a hang."""
    report, fired = folder / "runs" / "tiny" / "hang.txt", list(folder.glob("fired-*"))
    return report.stat().st_mtime - float(fired[0].read_text()) if report.exists() and fired else None


def run(case: Case, folder: Path, truth: dict[Any, Any]) -> dict[str, Any]:
    """One run of a case, and its recovery; what was seen."""
    expected, began = uninterrupted(truth, case, folder / "straight"), time.monotonic()
    done = launched(case, prepare(folder / "run"))
    seconds = time.monotonic() - began
    check(case, folder / "run", done)
    check_nothing_lives(folder / "run")
    steps = saved(folder / "run")
    if losses(folder / "run") != expected:
        assert not case.restarts
        again = run_script(case.world, [SCRIPT, *FLAGS, *case.topology], folder / "run", environment(folder))
        assert again.returncode == 0, again.stdout + again.stderr
    assert losses(folder / "run") == expected  # exactly
    assert not (folder / "run" / "runs" / "tiny" / "preempted.json").exists()
    named = named_after(folder / "run")
    return {"exit": done.returncode, "seconds": round(seconds, 1), "named_s": named and round(named, 1), "steps": steps}


def done_before(file: Path | None) -> dict[str, int]:
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.exists() else []
    return {name: sum(row["case"] == name for row in rows) for name in {row["case"] for row in rows}}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case.always else pytest.mark.grid) for case in CASES]
)
def test_a_fault(case: Case, tmp_path: Path, truth: dict[Any, Any]) -> None:
    file = Path(os.environ["FAULT_RESULTS"]) if "FAULT_RESULTS" in os.environ else None
    for number in range(done_before(file).get(case.name, 0), int(os.environ.get("FAULT_REPEATS", "1"))):
        seen = run(case, tmp_path / str(number), truth)
        if file is not None:
            with file.open("a") as rows:
                rows.write(json.dumps({"case": case.name, "repeat": number, **seen}) + "\n")
        shutil.rmtree(tmp_path / str(number))
