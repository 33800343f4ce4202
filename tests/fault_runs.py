"""Runs with a fault under torchrun, for tests: how they are started, what must come of them, and a row for each.

    seen = run(Case("killed", "rank=1 step=6 at=forward do=SIGKILL", says="rank 1 .* was killed"), folder, truth)
    repeat("killed", tmp_path, lambda folder: run(case, folder, truth))

FAULT_REPEATS says how often a case is run, FAULT_RESULTS names a file of results. Repeats that the file has are not run
again, so that many can be spread over several sessions: tests/data/faults.jsonl has those so far. A row has case,
repeat, date, exit code, the line that says what happened, seconds of the run, seconds from a fault to the message that
names a rank that hangs, and the steps of the checkpoints that were there.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_script
from threed.checkpoint import native
from threed.monitor import metrics
from threed.reliability import heartbeat

ROOT = Path(__file__).parent.parent
SCRIPT = str(Path(__file__).with_name("faulty.py"))
STEPS = 12
FLAGS = [
    "--preset", "tiny", "--model.layers", "2", "--model.hidden", "32", "--model.seq", "32", "--train.global-batch", "4",
    "--log.every", "1", "--train.eval-samples", "4", "--data.path", "text.txt", "--optim.warmup", "2",
    "--checkpoint.async", "false",  # else a save may still be written; those with it say so
    "--checkpoint.every", "4", "--checkpoint.keep", "9", "--train.eval-every", "6", "--log.wandb", "off",
    "--checkpoint.export-hf", "false", "--train.sample-tokens", "2", "--train.steps", str(STEPS),
]  # fmt: skip
TWO, FOUR = ("--parallel.pp", "2"), ("--parallel.pp", "2", "--parallel.tp", "2")
COPIES = ("--parallel.dp", "4", "--zero.stage", "0", "--train.micro-batch", "1")
SLICED = ("--parallel.tp", "2", "--parallel.dp", "2", "--zero.stage", "3")
BESIDE = ("--checkpoint.async", "true")
# losses of runs that nothing happened to, by topology
Truth = dict[tuple[str, ...], list[tuple[int, float]]]


@dataclass(frozen=True)
class Case:
    """A fault, as `tests/faulty.py` reads it, and what must come of it.

    code: torchrun's; -9: it was killed. says: a pattern of exactly one line. saved: the newest checkpoint's step right
    after; a later one may have come where it is a range. restarts: torchrun's, which then recovers by itself. first:
    flags of a run without the fault that comes before.
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
    first: tuple[str, ...] = ()
    rank_code: int | None = None
    preempted: bool = False
    always: bool = False

    @property
    def world(self) -> int:
        words = zip(self.topology, self.topology[1:], strict=False)
        return math.prod(
            int(size)
            for key, size in words
            if key in ("--parallel.pp", "--parallel.tp", "--parallel.dp")
        )


def params(cases: Sequence[Any]) -> list[Any]:
    """The parameters of a test of each case, by its `name`: CI runs those of `always`, the grid the others."""
    return [
        pytest.param(case, id=case.name, marks=() if case.always else pytest.mark.grid)
        for case in cases
    ]


def environment(folder: Path, fault: str = "") -> dict[str, str]:
    """What a run knows; figures take seconds, and only faults after the last step are about them."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("WANDB", "THREED", "TORCHELASTIC"))
    }
    kept |= {
        "OMP_NUM_THREADS": "1",
        "THREED_CACHE": str(folder.parent / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    if "at=end" not in fault:
        kept["FAULT_NO_FIGURES"] = "1"
    return kept | ({"FAULT": fault} if fault else {})


def prepare(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(
        "".join(f"line {n} has the square {n * n}\n" for n in range(2000))
    )
    return folder


def torchrun(world: int, *words: str) -> list[str]:
    """The command line that starts this many ranks with `words`, as a user does."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        *words,
    ]


def launched(
    case: Case, folder: Path, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a case by torchrun; `before`: words before the command, such as `unshare -m`."""
    line = torchrun(case.world, "--max-restarts", str(case.restarts), *case.launcher, SCRIPT)
    line = [*before, *line, *FLAGS, *case.topology, *case.flags]
    return subprocess.run(
        line,
        cwd=folder,
        env=environment(folder, case.fault),
        capture_output=True,
        text=True,
        timeout=200,
    )


def again(case: Case, folder: Path, *flags: str) -> str:
    """Runs a case's command once more, without its fault; what was said."""
    done = run_script(
        case.world, [SCRIPT, *FLAGS, *case.topology, *flags], folder, environment(folder)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(folder: Path) -> list[tuple[int, float]]:
    return [
        (row["step"], row["train/loss"])
        for row in metrics.read(folder / "runs" / "tiny" / "metrics.jsonl")
    ]


def uninterrupted(truth: Truth, case: Case, folder: Path) -> list[tuple[int, float]]:
    if case.topology not in truth:
        again(case, prepare(folder))
        truth[case.topology] = losses(folder)
    return truth[case.topology]


def saved(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run folder, each of which is whole."""
    paths = sorted(
        (folder / "runs" / "tiny" / "checkpoints").glob("step-*"), key=lambda path: path.name
    )
    assert all(path.name[5:].isdecimal() for path in paths if not path.name.endswith(".tmp")), paths
    whole = [path for path in paths if path.name[5:].isdecimal()]
    for path in whole:
        assert native.verify(path, native.read_manifest(path)) == []
    return sorted(int(path.name[5:]) for path in whole)


def line_of(said: str, pattern: str) -> str:
    """The one line that a pattern fits."""
    # torchrun repeats in its report what ranks leave for it, after "traceback : "
    lines = [
        line for line in said.splitlines() if re.search(pattern, line) and "traceback :" not in line
    ]
    assert len(lines) == 1, said
    return lines[0].strip()


def check(case: Case, folder: Path, done: subprocess.CompletedProcess[str]) -> str:
    """Exit codes, the message, and what is on disk; returns the line that says what happened."""
    said = done.stdout + done.stderr
    assert done.returncode == case.code or (
        case.code == 1 and launcher_aborted(case, done.returncode, said)
    ), said
    if case.says.startswith("exitcode"):
        assert re.search(case.says, said), said
        line = case.says
    else:
        line = line_of(said, case.says)
    assert "behind" not in said, said
    if case.rank_code is not None and "launcher" not in case.fault:
        assert f"exitcode  : {case.rank_code} " in said, said
    steps = saved(folder)
    assert case.saved[0] <= steps[-1] <= case.saved[1], (steps, said)
    mark = folder / "runs" / "tiny" / "preempted.json"
    assert mark.exists() == case.preempted, said
    if case.preempted:
        assert json.loads(mark.read_text())["step"] == steps[-1]
    return line


def launcher_aborted(case: Case, code: int, said: str) -> bool:
    """Whether torchrun got a signal, ended its ranks as it should, and then was aborted by a thread of its store while
    its interpreter ended: seen rarely (torch 2.13). Ranks leave by another way."""
    end = said.partition("SignalException: Process")[2]
    return (
        "do=launcher-" in case.fault
        and code == -6
        and "terminate called without an active exception" in end
    )


def check_nothing_lives(folder: Path) -> None:
    end = time.monotonic() + 60
    for beat in heartbeat.read_all(folder / "runs" / "tiny" / "heartbeat"):
        while heartbeat.process_state(beat) != "ended":
            assert time.monotonic() < end, f"rank {beat['rank']} outlived its launcher"
            time.sleep(0.1)


def named_after(folder: Path) -> float | None:
    """Seconds from a fault to the report of a hang."""
    report, fired = folder / "runs" / "tiny" / "hang.txt", list(folder.glob("fired-*"))
    return (
        round(report.stat().st_mtime - fired[0].stat().st_mtime, 1)
        if report.exists() and fired
        else None
    )


def run(case: Case, folder: Path, truth: Truth) -> dict[str, Any]:
    """One run of a case, and its recovery; what was seen."""
    expected, began = uninterrupted(truth, case, folder / "straight"), time.monotonic()
    prepare(folder / "run")
    if case.first:
        again(case, folder / "run", *case.first)
    done = launched(case, folder / "run")
    seconds = time.monotonic() - began
    line = check(case, folder / "run", done)
    check_nothing_lives(folder / "run")
    steps = saved(folder / "run")
    if case.restarts:
        rows = metrics.read(folder / "run" / "runs" / "tiny" / "metrics.jsonl")
        assert (rows[0]["run/restarts"], rows[-1]["run/restarts"]) == (0, 1), rows
    if losses(folder / "run") != expected:
        assert not case.restarts
        again(case, folder / "run")
    assert losses(folder / "run") == expected  # exactly
    assert not (folder / "run" / "runs" / "tiny" / "preempted.json").exists()
    return row(done.returncode, line, seconds, steps, named_after(folder / "run"))


def row(
    code: int, says: str, seconds: float, steps: Sequence[int], named_s: float | None = None
) -> dict[str, Any]:
    """What the results say of a run."""
    return {
        "exit": code,
        "seconds": round(seconds, 1),
        "named_s": named_s,
        "steps": list(steps),
        "says": says[:300],
    }


def done_before(file: Path | None) -> dict[str, int]:
    rows = (
        [json.loads(line) for line in file.read_text().splitlines()]
        if file is not None and file.exists()
        else []
    )
    return {
        name: sum(row["case"] == name for row in rows) for name in {row["case"] for row in rows}
    }


def repeat(name: str, place: Path, once: Callable[[Path], dict[str, Any]]) -> None:
    """Does a case as often as is asked for, each time in a folder of its own, and keeps what was seen."""
    file = Path(os.environ["FAULT_RESULTS"]) if "FAULT_RESULTS" in os.environ else None
    for number in range(done_before(file).get(name, 0), int(os.environ.get("FAULT_REPEATS", "1"))):
        seen = once(place / str(number))
        if file is not None:
            with file.open("a") as rows:
                about = {"case": name, "repeat": number, "date": time.strftime("%Y-%m-%d")}
                rows.write(
                    json.dumps({**about, **seen}).replace(f"{place / str(number)}/", "") + "\n"
                )
        shutil.rmtree(place / str(number))
