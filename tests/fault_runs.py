"""Runs with an injected fault under torchrun, for tests: how to start, check and repeat them.

    seen = run(Case("killed", "rank=1 step=6 at=forward do=SIGKILL", says="rank 1 .* was killed"), folder, truth)
    repeat("killed", tmp_path, lambda folder: run(case, folder, truth))

The environment variable FAULT_REPEATS is the number of repeats of a case. FAULT_RESULTS is the path
of a file with results. Repeats that the file already contains are not run again, so they can be
spread over several sessions; tests/data/faults.jsonl has the results so far.

A row of results has the case, the number of the repeat, the date, the exit code, the message about
the fault, the seconds of the run, the seconds from the fault to the message that names a hanging
rank, and the steps of the remaining checkpoints.
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

from tests import programs
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
    "--checkpoint.async", "false",  # the default of these tests; some cases set it to true
    "--checkpoint.every", "4", "--checkpoint.keep", "9", "--train.eval-every", "6", "--log.wandb", "off",
    "--checkpoint.export-hf", "false", "--train.sample-tokens", "2", "--train.steps", str(STEPS),
]  # fmt: skip
TWO, FOUR = ("--parallel.pp", "2"), ("--parallel.pp", "2", "--parallel.tp", "2")
COPIES = ("--parallel.dp", "4", "--zero.stage", "0", "--train.micro-batch", "1")
SLICED = ("--parallel.tp", "2", "--parallel.dp", "2", "--zero.stage", "3")
BESIDE = ("--checkpoint.async", "true")
# (step, loss) of runs without a fault, by the flags of their topology
Truth = dict[tuple[str, ...], list[tuple[int, float]]]


@dataclass(frozen=True)
class Case:
    """A fault and the expected outcome of the run.

    Attributes:
        name: name of the case.
        fault: value of FAULT (`tests/faulty.py`).
        says: pattern that exactly one line of the output matches.
        code: expected exit code of torchrun; -9 if torchrun is killed.
        saved: lowest and highest possible step of the newest checkpoint right after the fault.
        restarts: value of torchrun's `--max-restarts`; the job then recovers by itself.
        topology: flags of the topology.
        flags: further flags of the run.
        launcher: further options of torchrun.
        first: flags of a run without the fault that is started before; none if empty.
        rank_code: exit code of a rank that torchrun's report must contain; None if not checked.
        preempted: whether `preempted.json` is expected.
        always: whether the case also runs outside of the grid.
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
    """Returns pytest parameters for cases, with their names as ids.

    Cases with `always` run in every test run, the others only with the grid.
    """
    return [
        pytest.param(case, id=case.name, marks=() if case.always else pytest.mark.grid)
        for case in cases
    ]


def environment(folder: Path, fault: str = "") -> dict[str, str]:
    """Returns the environment variables of a run.

    Figures are switched off unless the fault is after the last step, because they take seconds.
    """
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
    """Returns the command that starts `world` ranks with torchrun."""
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
    """Runs a case with torchrun.

    Args:
        case: the case.
        folder: working folder of the run.
        before: words in front of the command, such as `unshare -m`.
    """
    line = torchrun(case.world, "--max-restarts", str(case.restarts), *case.launcher, SCRIPT)
    line += [*FLAGS, *case.topology, *case.flags]
    if not before:
        return programs.run(line[1:], folder, environment(folder, case.fault), timeout=200)
    return subprocess.run(
        [*before, *line],
        cwd=folder,
        env=environment(folder, case.fault),
        capture_output=True,
        text=True,
        timeout=200,
    )


def again(case: Case, folder: Path, *flags: str) -> str:
    """Runs the command of a case again, without the fault, and returns its output."""
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
    """Returns the steps of the checkpoints in a run folder; fails if one of them is incomplete."""
    paths = sorted(
        (folder / "runs" / "tiny" / "checkpoints").glob("step-*"), key=lambda path: path.name
    )
    assert all(path.name[5:].isdecimal() for path in paths if not path.name.endswith(".tmp")), paths
    whole = [path for path in paths if path.name[5:].isdecimal()]
    for path in whole:
        assert native.verify(path, native.read_manifest(path)) == []
    return sorted(int(path.name[5:]) for path in whole)


def line_of(said: str, pattern: str) -> str:
    """Returns the only line that matches a pattern; fails if there is another number of them."""
    # torchrun's report repeats the messages of ranks after "traceback : "; these lines are not counted.
    lines = [
        line for line in said.splitlines() if re.search(pattern, line) and "traceback :" not in line
    ]
    assert len(lines) == 1, said
    return lines[0].strip()


def check(case: Case, folder: Path, done: subprocess.CompletedProcess[str]) -> str:
    """Checks exit codes, message and files of a run, and returns the message about the fault."""
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
    """Returns whether torchrun was aborted by a thread of its store while its interpreter ended.

    This happens rarely (torch 2.13), after torchrun has received a signal and ended its ranks
    correctly. Ranks do not exit in this way.
    """
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
    """Returns the seconds from a fault to the report of the hang; None without a report."""
    report, fired = folder / "runs" / "tiny" / "hang.txt", list(folder.glob("fired-*"))
    return (
        round(report.stat().st_mtime - fired[0].stat().st_mtime, 1)
        if report.exists() and fired
        else None
    )


def run(case: Case, folder: Path, truth: Truth) -> dict[str, Any]:
    """Runs a case and its recovery, checks both, and returns the row of results."""
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
    assert losses(folder / "run") == expected  # bit for bit
    assert not (folder / "run" / "runs" / "tiny" / "preempted.json").exists()
    return row(done.returncode, line, seconds, steps, named_after(folder / "run"))


def row(
    code: int, says: str, seconds: float, steps: Sequence[int], named_s: float | None = None
) -> dict[str, Any]:
    """Returns the row of results of a run."""
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
    """Runs a case FAULT_REPEATS times, each in a new folder, and stores the results."""
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
