"""Disks that really fill up, or refuse to be written, under real runs: in a save, in the metrics, at the start and end.

python -m pytest tests/reliability/test_faults_disks.py [-m grid]       # rows and repeats: tests/fault_runs.py

The disks are small ones that are mounted for the test, which root may; elsewhere the cases skip themselves, and
`tests/reliability/test_faults.py` has the same by errors that are injected.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.disks import ext4, tmpfs
from tests.fault_runs import (
    BESIDE,
    Case,
    Truth,
    again,
    check,
    check_nothing_lives,
    launched,
    line_of,
    losses,
    params,
    prepare,
    repeat,
    row,
    saved,
    uninterrupted,
)

Disk = Callable[[Path], AbstractContextManager[Path]]
BYTES = r"needs [\d.]+ [KM]iB, [\d.]+ (bytes|[KM]iB) are free at \S+: free some space"
# Rank 1 fills the disk; where rank 0 is the first to fail, what it gives back may be enough for rank 1.
FULL = (
    r"rank (?P<who>[01]) could not write \S+/rank-0000(?P=who).safetensors: No space left on device: "
    rf"{BYTES}, or point --run.dir"
)
# By the look before a save, or, where ext4 has not counted all that it took by then, by the save itself.
STAYS_FULL = (
    rf"threed: (disk full: a checkpoint {BYTES}, lower --checkpoint.keep|could not begin \S+step-12: "
    rf"No space left on device: {BYTES}, or point --run.dir).*earlier checkpoints are intact"
)
READ_ONLY = (
    r"Read-only file system: the file system is mounted read-only, or stopped after an error"
)
GOES_ON = r".*\(earlier checkpoints are intact\); training goes on"
EXPORT = ("--checkpoint.export-hf", "true")
FREED = "rank=1 step=11 at=step do=free"


def memory(place: Path) -> AbstractContextManager[Path]:
    return tmpfs(place, "4m")


def drive(place: Path) -> AbstractContextManager[Path]:
    return ext4(place, 8)


@dataclass(frozen=True)
class OnDisk:
    """A case on a disk. before: what is done to the disk before the run; `steps`: of the checkpoints after it. said:
    patterns of other lines. rows: of the metrics that are there."""

    case: Case
    disk: Disk
    steps: list[int]
    said: tuple[str, ...] = ()
    before: Callable[[Path], None] | None = None
    always: bool = False

    @property
    def name(self) -> str:
        return self.case.name


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass


def refuse(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def on(
    disk: Disk, name: str, fault: str, says: str, code: int, steps: list[int], said: tuple[str, ...] = (),
    before: Callable[[Path], None] | None = None, always: bool = False, **more: Any,
) -> OnDisk:  # fmt: skip
    saved = (steps[-1], steps[-1]) if steps else (0, 0)
    return OnDisk(Case(name, fault, says, code, saved, **more), disk, steps, said, before, always)


CASES = [
    on(memory, "full-in-a-save", f"rank=1 step=8 at=block do=fill;{FREED}", FULL + GOES_ON, 0, [4, 12]),
    on(drive, "full-in-a-save-ext4", f"rank=1 step=8 at=block do=fill;{FREED}", FULL + GOES_ON, 0, [4, 12]),
    on(drive, "full-beside-training", f"rank=1 step=8 at=block do=fill;{FREED}", FULL + GOES_ON, 0, [4, 12],
       flags=BESIDE, always=True),
    on(memory, "full-beside-training-tmpfs", f"rank=1 step=8 at=block do=fill;{FREED}", FULL + GOES_ON, 0, [4, 12],
       flags=BESIDE),
    on(memory, "full-from-a-save-on", "rank=1 step=8 at=block do=fill", FULL + GOES_ON, 1, [4],
       (STAYS_FULL,),
       rank_code=2),
    on(drive, "full-from-a-save-beside-on", "rank=1 step=8 at=block do=fill", FULL + GOES_ON, 1, [4],
       (STAYS_FULL,),
       flags=BESIDE, rank_code=2),
    on(drive, "full-at-the-manifest", f"rank=0 step=8 at=manifest do=fill;{FREED}",
       r"could not finish \S+step-8: No space left on device: [\d.]+ (bytes|KiB) are free" + GOES_ON, 0, [4, 12]),
    # seven rows: more than the last page of the file may have left
    on(memory, "full-at-the-metrics", "rank=0 step=5 at=metrics do=fill;rank=0 step=12 at=step do=free",
       r"metrics: \S+ cannot be written: No space left on device: 0 bytes are free at \S+: free some space.*rows are k",
       0, [4, 12], (rf"no checkpoint of step 8: disk full: a checkpoint {BYTES}.*goes on",
                    r"metrics: \S+ is written again, with the \d kept rows?")),
    on(memory, "full-at-the-figures", "rank=0 step=12 at=end do=fill",
       r"no figures: No space left on device: 0 bytes are free at \S+: free some space", 0, [4, 8, 12]),
    on(memory, "full-at-the-export", "rank=0 step=12 at=export do=fill",
       rf"threed: disk full: a Hugging Face folder {BYTES}", 1, [4, 8, 12], flags=EXPORT, rank_code=2),
    on(memory, "full-in-the-export", "rank=0 step=12 at=file do=fill",
       rf"threed: could not write \S+/hf: No space left on device: {BYTES}", 1, [4, 8, 12], flags=EXPORT, rank_code=2),
    on(memory, "full-at-the-start", "", rf"disk full: a checkpoint {BYTES}", 1, [], before=fill, rank_code=2),
    on(drive, "read-only-in-a-save", "rank=1 step=8 at=block do=break", rf"no checkpoint of step 8: .*{READ_ONLY}"
       + GOES_ON, 1, [4], (rf"threed: could not begin \S+step-12: {READ_ONLY}.*earlier checkpoints are intact",),
       rank_code=2),
    on(drive, "read-only-beside-training", "rank=1 step=8 at=block do=break", rf"no checkpoint of step 8: .*{READ_ONLY}"
       + GOES_ON, 1, [4], (rf"threed: could not begin \S+step-12: {READ_ONLY}.*earlier checkpoints are intact",),
       flags=BESIDE, rank_code=2),
    on(drive, "read-only-and-SIGTERM", "rank=1 step=6 at=forward do=break;rank=1 step=7 at=forward do=SIGTERM",
       rf"threed: could not begin \S+step-\d: {READ_ONLY}.*earlier checkpoints are intact", 1, [4], rank_code=2),
    on(memory, "read-only-at-the-start", "", r"run folder runs/tiny cannot be created: \S+ is read-only", 1, [],
       before=refuse, rank_code=2, always=True),
]  # fmt: skip


def run(one: OnDisk, folder: Path, truth: Truth) -> dict[str, Any]:
    """A run on a disk of its own, with what it leaves; then the same command on the disk when it works again."""
    case, place = one.case, folder / "run" / "runs"
    expected = uninterrupted(truth, case, folder / "straight")
    prepare(folder / "run")
    with one.disk(place):
        if one.before is not None:
            one.before(place)
        began = time.monotonic()
        done = launched(case, folder / "run")
        seconds, said = time.monotonic() - began, done.stdout + done.stderr
        if one.steps:
            line = check(case, folder / "run", done)
        else:
            line = line_of(said, case.says)
            assert (done.returncode, "nothing was started" in said) == (case.code, True), said
        for pattern in one.said:
            line_of(said, pattern)
        assert not re.search(r"rank\d\]: Traceback", said), said  # of a healthy rank
        check_nothing_lives(folder / "run")
        steps = saved(folder / "run")
        assert steps == one.steps, said
        if one.before is not refuse and "break" not in case.fault:
            (place / "ballast").unlink(missing_ok=True)
            go_on(one, folder, expected)
    if one.before is refuse:
        place.rmdir()
        go_on(one, folder, expected)
    elif "break" in case.fault:
        with ext4(place, 8, made=True):
            go_on(one, folder, expected)
    return row(done.returncode, line, seconds, steps)


def go_on(one: OnDisk, folder: Path, expected: list[tuple[int, float]]) -> None:
    """The same command, and its losses."""
    again(one.case, folder / "run", *(EXPORT if "export" in one.case.name else ()))
    assert losses(folder / "run") == expected  # exactly
    assert saved(folder / "run")[-1] == 12
    assert ("export" in one.case.name) == (
        folder / "run" / "runs" / "tiny" / "hf" / "config.json"
    ).exists()


@pytest.mark.parametrize("one", params(CASES))
def test_a_disk(one: OnDisk, tmp_path: Path, truth: Truth) -> None:
    repeat(one.name, tmp_path, lambda folder: run(one, folder, truth))
