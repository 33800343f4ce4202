"""Faults in real runs under torchrun: exit code, message, what is on disk, and the same losses after a recovery.

python -m pytest tests/reliability/test_faults.py                   # one case of each kind
python -m pytest tests/reliability/test_faults.py -m grid           # every case
FAULT_REPEATS=20 FAULT_RESULTS=results.jsonl python -m pytest tests/reliability/test_faults.py -m grid

What a row of the results has is said in `tests/fault_runs.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault_runs import FOUR, SLICED, STEPS, TWO, Case, Truth, params, repeat, run

ASYNCHRONOUS = (*TWO, "--parallel.schedule", "2bw")
HANG_S = 4
PREEMPTED = r"preempted by {} after step \d+, which is saved; the same command resumes from runs/tiny/checkpoints/step-\d+"


def killed(at: str, rank: int, restarts: int = 1, always: bool = False) -> Case:
    says = rf"rank {rank} on \S+ \(stage {rank}, dp 0, tp 0\) was killed: process \d+ has ended in step 6, phase step"
    name = f"killed-{at}-{rank}" + "-for-good" * (not restarts)
    fault = f"rank={rank} step=6 at={at} do=SIGKILL"
    if restarts:
        return Case(name, fault, says, 0, (12, 12), restarts)
    return Case(name, fault, says, always=always)


def beside_one_that_waits(do: str, says: str, always: bool = False) -> Case:
    """A rank fails while the other one sits where it notices nothing, as in NCCL: torchrun's SIGTERM must end it."""
    fault = f"rank=1 step=6 at=forward do={do};rank=0 step=6 at=step do=sleep"
    return Case(
        f"{do}-beside-sleep",
        fault,
        rf"rank 1 on \S+ \(stage 1, dp 0, tp 0\) {says}",
        rank_code=143,
        always=always,
    )


def killed_while_others_wait() -> Case:
    """torchrun ends the other three ranks one by one; exactly one line reports the killed rank, and none the others."""
    fault = "rank=3 step=6 at=step do=SIGKILL;rank=0,1,2 step=6 at=step do=sleep"
    says = r"rank \d on \S+ \(stage \d, dp 0, tp \d\) was killed: process \d+ has ended in step"
    return Case("SIGKILL-beside-three-that-sleep", fault, says, topology=FOUR, rank_code=143)


def stopped(rank: int, topology: tuple[str, ...] = FOUR, always: bool = False) -> Case:
    stage, tp = (rank // 2, rank % 2) if topology == FOUR else (rank, 0)
    says = (
        rf"hang: no progress for .* rank {rank} on \S+ \(stage {stage}, dp 0, tp {tp}\) is stopped"
    )
    flags = ("--run.hang-timeout", f"{HANG_S}s")
    name = f"stopped-{rank}" + "-of-2" * (topology == TWO)
    fault = f"rank={rank} step=6 at=forward do=SIGSTOP"
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


def planted(at: str, rank: int) -> Case:
    says = rf"rank {rank} on \S+ \(stage {rank}, dp 0, tp 0\) failed in step 6, phase step: RuntimeError: planted"
    return Case(f"exception-{at}-{rank}", f"rank={rank} step=6 at={at} do=raise", says, rank_code=1)


def disk(what: str, step: int) -> Case:
    text = {"ENOSPC": "No space left on device", "EROFS": "Read-only file system"}[what]
    fault = f"rank=1 step={step} at=fsync do={what}"
    says = rf"rank 1 could not write .*{text}.*earlier checkpoints are intact"
    last = step == STEPS
    return Case(
        f"{what}-{step}", fault, says, int(last), (8, 8) if last else (12, 12), rank_code=2 if last else None,
    )  # fmt: skip


KILLED = [(at, rank) for at in ("forward", "collective", "update") for rank in (0, 1)]
CASES = [
    *(killed(at, rank) for at, rank in KILLED),
    killed("collective", 0, restarts=0, always=True),
    beside_one_that_waits("SIGKILL", r"was killed: process \d+ has ended in step 6"),
    killed_while_others_wait(),
    beside_one_that_waits("raise", "failed in step 6, phase step: RuntimeError: planted"),
    *(stopped(rank) for rank in range(4)),
    stopped(0, TWO, always=True),
    hangs("data", "sleep", r"waits for no other rank: step 6, phase data, in act at tests/faulty.py"),
    hangs("update", "spin", "does not answer"),
    asked("launcher-SIGTERM", 0, always=True),
    asked("launcher-SIGHUP", 0),
    asked("launcher-SIGUSR1", 1, launcher=("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1")),
    asked("SIGTERM", 0),
    asked("SIGUSR1", 1),
    asked("SIGHUP", 1),
    asked("SIGUSR1", 1, topology=ASYNCHRONOUS),
    asked("SIGUSR1", 3, topology=SLICED),
    asked("launcher-SIGTERM", 0, at="evaluate"),
    asked("SIGUSR1", 1, at="evaluate"),
    asked("SIGUSR1", 0, at="save", step=4),
    asked("launcher-SIGTERM", 1, at="save", step=8),
    Case(
        "time-limit", "rank=all step=1 at=step do=slow each=yes", PREEMPTED.format("train.time-limit 3 s"),
        saved=(0, 11),
        flags=("--train.time-limit", "0:00:03"), rank_code=75, preempted=True, always=True,
    ),
    Case(
        "SIGTERM-twice", "rank=all step=6 at=forward do=SIGTERM-twice", "exitcode  : 143", rank_code=143,
    ),
    Case("launcher-SIGKILL", "rank=1 step=6 at=forward do=launcher-SIGKILL", "step     4/12", code=-9),
    Case("SIGTERM-at-the-end", "rank=1 step=12 at=sample do=SIGTERM", "resume     torchrun", 0, (12, 12)),
    planted("forward", 1),
    planted("update", 0),
    disk("ENOSPC", 8),
    disk("ENOSPC", 12),
    disk("EROFS", 12),
]  # fmt: skip


@pytest.mark.parametrize("case", params(CASES))
def test_a_fault(case: Case, tmp_path: Path, truth: Truth) -> None:
    repeat(case.name, tmp_path, lambda folder: run(case, folder, truth))
