"""Numbers that are not finite, bits that flip, and two runs in one folder: in real runs under torchrun.

python -m pytest tests/reliability/test_faults_numbers.py [-m grid]       # rows and repeats: tests/fault_runs.py

`test_bad_numbers.py` and `test_run_folder.py` test what each of these does to every kind of run.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fault_runs import (
    COPIES,
    FLAGS,
    SCRIPT,
    Case,
    Truth,
    again,
    check,
    check_nothing_lives,
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

THREE, RECHECK = ("--train.max-bad-steps", "3"), ("--run.recheck-bad-steps", "true")
ROW = r"^threed: 3 steps in a row up to step \d+ were skipped \(loss .*, gradient norm .*\).*resumes from \S+/step-4$"
PAIR = ("--parallel.dp", "2", "--zero.stage", "0")


def damaged(
    name: str, do: str, says: str, *flags: str, step: int = 6, more: str = "", **about: Any
) -> Case:
    fault = f"rank=all step={step} at=step do={do}{more}"
    return Case(name, fault, says, flags=flags, **{"rank_code": 2, **about})


CASES = [
    damaged("nan-weight", "nan-weight", ROW, *THREE),
    damaged("nan-gradient", "nan-gradient", ROW, *THREE, more=" each=yes"),
    damaged("nan-gradient-once", "nan-gradient", r"step 6 was computed twice, with different results: rank 1 \(\S+\) "
            "erred; the second one was used", *RECHECK, code=0, saved=(12, 12), rank_code=None),
    Case("lr-1e38", "", ROW, flags=("--optim.lr", "1e38", *THREE), first=("--train.stop-after", "4"), rank_code=2),
    damaged("flip-in-a-replica", "flip-parameter", r"^threed: step 6: replicas of .* differ: rank 1 \(\S+\) has other "
            "values than ranks 0, 2, 3", "--run.check-replicas", "3", topology=COPIES),
    damaged("flip-in-one-of-two", "flip-parameter", r"^threed: step 8: replicas of .* differ: ranks 0 \(\S+\), 1 \(\S+\) "
            "hold different values", "--run.check-replicas", "100", topology=PAIR),
    damaged("flip-in-memory", "flip-exponent", ROW, *THREE),
]  # fmt: skip


@pytest.mark.parametrize("case", params(CASES))
def test_numbers(case: Case, tmp_path: Path, truth: Truth) -> None:
    repeat(case.name, tmp_path, lambda folder: run(case, folder, truth))


FILES = {"flip-in-a-file": "rank-00001.safetensors", "flip-in-a-manifest": "manifest.json"}


def flipped(name: str, folder: Path, truth: Truth) -> dict[str, Any]:
    """A bit flips in a file of the newest of two checkpoints; the next start passes it over."""
    case = Case(name, "", r"skipped a checkpoint: .*step-8", 0, (12, 12))
    expected, place = uninterrupted(truth, case, folder / "straight"), prepare(folder / "run")
    again(case, place, "--train.stop-after", "8")
    file = place / "runs" / "tiny" / "checkpoints" / "step-8" / FILES[name]
    content = bytearray(file.read_bytes())
    content[-len(content) // 3] ^= 1
    file.write_bytes(content)
    began = time.monotonic()
    done = launched(case, place)
    seconds, said = time.monotonic() - began, done.stdout + done.stderr
    line = check(case, place, done)
    assert line_of(said, "resumed ").endswith("step-4")
    assert saved(place) == [4, 8, 12]
    assert losses(place) == expected
    return row(done.returncode, line, seconds, [4, 8, 12])


@pytest.mark.grid
@pytest.mark.parametrize("name", FILES)
def test_a_bit_flips_in_a_file(name: str, tmp_path: Path, truth: Truth) -> None:
    repeat(name, tmp_path, lambda folder: flipped(name, folder, truth))


def second(folder: Path, truth: Truth) -> dict[str, Any]:
    """A run starts in the folder of another one, which goes on."""
    case = Case("two-runs", "rank=all step=5 at=step do=hold-refused", "")
    expected, place = uninterrupted(truth, case, folder / "straight"), prepare(folder / "run")
    line = torchrun(2, SCRIPT, *FLAGS, *case.topology)
    with subprocess.Popen(
        line,
        cwd=place,
        env=environment(place, case.fault),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as first:
        end = time.monotonic() + 120
        while not (place / "fired-0").exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        began = time.monotonic()
        done = subprocess.run(
            line, cwd=place, env=environment(place), capture_output=True, text=True, timeout=200
        )
        seconds = time.monotonic() - began
        (place / "refused").touch()
        said, _ = first.communicate(timeout=200)
    assert first.returncode == 0, said
    assert done.returncode == 1, done.stdout + done.stderr
    says = line_of(
        done.stdout + done.stderr,
        r"^threed: runs/tiny is in use by another run: process \d+ on \S+; end that run",
    )
    assert "exitcode  : 2 " in done.stdout + done.stderr
    assert losses(place) == expected
    check_nothing_lives(place)
    return row(done.returncode, says, seconds, saved(place))


@pytest.mark.grid
def test_two_runs_in_one_folder(tmp_path: Path, truth: Truth) -> None:
    repeat("two-runs", tmp_path, lambda folder: second(folder, truth))
