"""Two machines that share no folder, or whose clocks are hours apart: two launchers of torchrun, one in namespaces.

python -m pytest tests/reliability/test_faults_machines.py [-m grid]       # rows and repeats: tests/fault_runs.py

The second machine has a name of its own, its monotonic clock counts from another moment (a time namespace), and
`CLOCK` of `tests/faulty.py` has the hour of its rank wrong. Where such namespaces are not allowed, the cases skip
themselves; `tests/distributed/test_clocks.py` and `tests/reliability/test_run_folder.py` have the same in one process each.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fault_runs import (
    FLAGS,
    SCRIPT,
    TWO,
    Case,
    Truth,
    again,
    environment,
    line_of,
    losses,
    prepare,
    repeat,
    row,
    run,
    saved,
    uninterrupted,
)
from threed.monitor import metrics
from threed.reliability import heartbeat

HANG_S = 6
OTHER = [
    "unshare",
    "--uts",
    "--mount",
    "--time",
    "--monotonic",
    "7200",
    "--boottime",
    "7200",
    "--fork",
]


def machine(
    number: int, port: int, folder: Path, fault: str, flags: Sequence[str], prelude: str = ""
) -> Any:
    """A launcher with one rank, on this machine or on the other one. prelude: of the shell there, before it starts."""
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--node-rank",
        str(number),
    ]
    line += [
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
        SCRIPT,
    ]
    line += [*FLAGS, *TWO, *flags]
    if number:
        line = [
            *OTHER,
            "sh",
            "-c",
            f'hostname node-b && {prelude or "true"} && exec "$@"',
            "sh",
            *line,
        ]
    known = environment(folder, fault) | {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    known |= {"VISIBLE_S": "2"}
    known |= {"CLOCK": f"1:{-7200 if number and 'back' in folder.parts[-2] else 7200}"}
    return subprocess.Popen(
        line,
        cwd=folder,
        env=known,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def allowed() -> str:
    """Why there can be no second machine here, or nothing."""
    try:
        done = subprocess.run([*OTHER, "hostname", "node-b"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip()


def together(
    folder: Path, fault: str, flags: Sequence[str] = (), prelude: str = ""
) -> tuple[list[int], list[str]]:
    """Runs both; exit codes and what they said. The second is ended when the first has: nobody else is there to."""
    port = random.SystemRandom().randrange(10_000, 30_000)
    both = [machine(number, port, folder, fault, flags, prelude) for number in range(2)]
    said = ["", ""]
    try:
        said[0], _ = both[0].communicate(timeout=200)
        with contextlib.suppress(subprocess.TimeoutExpired):
            both[1].wait(20)
    finally:
        for one in both:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
        # one that is stopped
        for beat in heartbeat.read_all(folder / "runs" / "tiny" / "heartbeat"):
            if heartbeat.process_state({**beat, "host": os.uname().nodename}) != "ended":
                os.kill(beat["pid"], signal.SIGKILL)
    said[1], _ = both[1].communicate(timeout=60)
    return [one.returncode for one in both], said


@pytest.fixture(autouse=True)
def two_machines() -> None:
    if reason := allowed():
        pytest.skip(f"no second machine can be pretended here: {reason}")


def apart(folder: Path) -> dict[str, Any]:
    """The second machine has another disk where the first has the run folder."""
    place = prepare(folder / "run")
    (place / "runs").mkdir()
    began = time.monotonic()
    codes, said = together(place, "", prelude=f"mount -t tmpfs tmpfs {place / 'runs'}")
    seconds = time.monotonic() - began
    assert codes == [1, 1], said
    pattern = r"^threed: rank 0 on \S+ does not see in runs/tiny what rank 1 wrote there .*rank 1 on node-b does not see "
    says = line_of(
        said[0],
        pattern + r"in runs/tiny what rank 0 wrote there .*all machines must share the folder",
    )
    assert "exitcode  : 2 " in said[0], said
    assert saved(place) == []
    assert not list((place / "runs" / "tiny").glob(".probe-*"))
    return row(codes[0], says, seconds, [])


@pytest.mark.grid  # tests/reliability/test_run_folder.py tests always that ranks name a folder that is not shared
def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    repeat("folder-not-shared", tmp_path, apart)


def clocks(name: str, folder: Path, truth: Truth) -> dict[str, Any]:
    """Nothing happens but that the clocks are apart."""
    case = Case(name, "", "")
    expected = uninterrupted(truth, case, folder / "straight")
    place = prepare(folder / name / "run")
    began = time.monotonic()
    codes, said = together(place, "", ("--train.time-limit", "30m", "--run.hang-timeout", "1m"))
    seconds = time.monotonic() - began
    assert codes == [0, 0], said
    assert losses(place) == expected
    rows = metrics.read(place / "runs" / "tiny" / "metrics.jsonl")
    assert all(0 <= row["pp/bubble_measured"] < 1 and row["perf/step_s"] < 60 for row in rows), rows
    beats = heartbeat.read_all(place / "runs" / "tiny" / "heartbeat")
    assert abs(beats[0]["time"] - beats[1]["time"]) > 3600
    return row(0, line_of(said[0], "resume     torchrun"), seconds, saved(place))


@pytest.mark.grid
@pytest.mark.parametrize("name", ["clocks-ahead", "clocks-back"])
def test_clocks_that_are_apart(name: str, tmp_path: Path, truth: Truth) -> None:
    repeat(name, tmp_path, lambda folder: clocks(name, folder, truth))


SAYS = {
    "SIGSTOP": r"^threed: hang: no progress for .* rank 1 on node-b \(stage 1, dp 0, tp 0\) does not answer: "
    r"process \d+, last seen in step 6, phase step",
    "SIGKILL": r"^threed: a connection was lost and no rank is known to have failed: a machine or the network\? "
    r"Earliest: rank 1 on node-b \(stage 1, dp 0, tp 0\) in step 6, phase step$",
    "raise": r"rank 1 on node-b \(stage 1, dp 0, tp 0\) failed in step 6, phase step: RuntimeError: planted",
    "SIGTERM": r"^threed: preempted by SIGTERM \(rank 1\) after step \d+, which is saved",
}


def elsewhere(do: str, folder: Path, truth: Truth) -> dict[str, Any]:
    """Something happens to the rank on the other machine, whose clocks are others."""
    case = Case(do, "", "")
    expected, place = uninterrupted(truth, case, folder / "straight"), prepare(folder / "run")
    began = time.monotonic()
    codes, said = together(
        place, f"rank=1 step=6 at=forward do={do}", ("--run.hang-timeout", f"{HANG_S}s")
    )
    seconds = time.monotonic() - began
    assert codes[0] == 1, said
    says = line_of(said[1] if do == "raise" else said[0], SAYS[do])
    steps, named, report = saved(place), None, place / "runs" / "tiny" / "hang.txt"
    assert steps[-1] in ((6, 7, 8) if do == "SIGTERM" else (4,))
    if do == "SIGSTOP":
        named = round(report.stat().st_mtime - (place / "fired-1").stat().st_mtime, 1)
        assert "exitcode  : 124 " in said[0], said
    again(case, place)
    assert losses(place) == expected
    return row(codes[0], says, seconds, steps, named)


@pytest.mark.grid
@pytest.mark.parametrize("do", SAYS)
def test_a_fault_on_a_machine_with_another_clock(do: str, tmp_path: Path, truth: Truth) -> None:
    repeat(f"clocks-apart-{do}", tmp_path, lambda folder: elsewhere(do, folder, truth))


def taken(folder: Path) -> dict[str, Any]:
    """A run on the other machine starts in the folder of one that lives."""
    case = Case("taken", "rank=all step=5 at=step do=slow each=yes", "")
    place = prepare(folder / "run")
    alone = [sys.executable, SCRIPT, *FLAGS, "--model.layers", "1"]
    with subprocess.Popen(
        alone, cwd=place, env=environment(place, case.fault), stdout=subprocess.DEVNULL
    ) as first:
        try:
            end = time.monotonic() + 120
            while not (place / "fired-0").exists():
                assert time.monotonic() < end
                time.sleep(0.1)
            began = time.monotonic()
            known = environment(place) | {"CLOCK": "0:7200"}
            line = [*OTHER, "sh", "-c", 'hostname node-b && exec "$@"', "sh", *alone]
            done = subprocess.run(
                line, cwd=place, env=known, capture_output=True, text=True, timeout=200
            )
            seconds = time.monotonic() - began
        finally:
            first.kill()
    says = line_of(
        done.stdout + done.stderr,
        r"^threed: runs/tiny is in use by another run: process \d+ on \S+; end that run",
    )
    assert done.returncode == 2
    return row(done.returncode, says, seconds, saved(place))


@pytest.mark.grid
def test_a_run_on_another_machine_keeps_its_folder(tmp_path: Path) -> None:
    repeat("two-runs-two-machines", tmp_path, taken)


# The hour is set while a run goes on: a time limit counts from the start all the same.
SET = [
    Case("clock-set-ahead", "rank=all step=5 at=step do=clock-ahead", "resume     torchrun", 0, (12, 12),
         flags=("--train.time-limit", "30m", "--run.hang-timeout", "1m")),
    Case("clock-set-back", "rank=all step=1 at=step do=slow each=yes;rank=all step=2 at=forward do=clock-back",
         r"preempted by train.time-limit 10 s after step \d+", saved=(0, 11), flags=("--train.time-limit", "10"),
         rank_code=75, preempted=True),
]  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("case", SET, ids=lambda case: case.name)
def test_a_clock_that_is_set(case: Case, tmp_path: Path, truth: Truth) -> None:
    repeat(case.name, tmp_path, lambda folder: run(case, folder, truth))
