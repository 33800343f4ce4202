"""Runs all measurements on a GPU, in about 20 minutes; every stage writes a file of figures.

    python benchmarks/gpu.py                           # all stages; without a CUDA device it prints this and exits with 0
    python benchmarks/gpu.py                           # again: continues after the finished stages
    python benchmarks/gpu.py --only kernels step       # some stages; --list prints their names
    python benchmarks/gpu.py --again kernels           # repeats a finished stage
    python benchmarks/gpu.py --only table              # the tables for docs/reference/performance.md, from the files
    python benchmarks/gpu.py --device cpu --small      # a rehearsal of every stage on a CPU, with tiny shapes

Every stage is a process with a time limit (`benchmarks/gpu_stages`). It writes its figures to
OUT/NAME.json as soon as it has them, and its output to OUT/NAME.log. If a stage fails, crashes or
hangs, its record contains this and the message, and the next stages still run. The folder OUT may
be copied: the tables need nothing else.

Exit codes: 0 if every stage of the call is done or had no time, 1 if a stage failed, 2 if the
command is invalid.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.gpu_stages import record  # noqa: E402
from benchmarks.gpu_stages.record import CorruptRecord  # noqa: E402

TOKEN = "THREED_GPU_STAGE"  # in the environment of every process of a stage, in any session
PATIENCE = 20.0  # seconds to wait until killed processes have ended


@dataclass(frozen=True)
class Planned:
    """A stage.

    Attributes:
        expected: estimated seconds; the stage does not start if less time is left.
        limit: seconds after which the stage is ended.
    """

    name: str
    what: str
    expected: float
    limit: float
    module: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", self.module or f"benchmarks.gpu_stages.{self.name}"]


# The most important stages come first. If --minutes is too short for all, the last ones are left out, except `table`.
STAGES = (
    Planned("build", "compiles the kernels; versions, clocks, power, ECC", 60, 300),
    Planned(
        "tests",
        "pytest -m gpu: the cases of the emulator, and all others that need a GPU",
        60,
        480,
    ),
    Planned("bandwidth", "copies on the device, and to and from the host", 30, 120),
    Planned("features", "features of training against the CPU; threed train", 60, 240),
    Planned("roof", "matrix products by shape, attention by backend", 40, 120),
    Planned("kernels", "every kernel beside eager, torch.compile and Liger", 100, 420),
    Planned("step", "a step of GPT 1.3B: ours, plain, compiled; kernel by kernel; gaps", 150, 530),
    Planned(
        "sanitizer",
        "compute-sanitizer over the kernels, and over kernels with planted faults",
        120,
        300,
    ),
    Planned("nccl", "every way of parallel training over NCCL, against one GPU's losses", 40, 240),
    Planned("sizes", "bf16 against fp32 on the CPU; tokens/s of three models", 60, 240),
    Planned(
        "largest", "the largest models: resident, offloaded to the host, to the drive", 160, 480
    ),
    Planned("table", "tables for docs/reference/performance.md", 0, 60),
)


class UsageError(ValueError):
    """Raised for an invalid command line."""


def chosen(names: Sequence[str] | None, stages: Sequence[Planned]) -> list[Planned]:
    """Returns the stages with these names, in their usual order; without names, all stages."""
    known = [stage.name for stage in stages]
    if unknown := [name for name in names or () if name not in known]:
        raise UsageError(f"no such stage: {', '.join(unknown)}; there are {', '.join(known)}")
    return [stage for stage in stages if names is None or stage.name in names]


def finished(folder: Path, stage: Planned) -> bool:
    """Returns whether a stage need not run again. A corrupt file is reported and moved aside."""
    try:
        found = record.read(folder, stage.name)
    except CorruptRecord as error:
        path = record.path_of(folder, stage.name)
        os.replace(path, path.with_suffix(".corrupt"))
        say(stage.name, f"{error}; set aside as {stage.name}.corrupt, the stage runs again")
        return False
    return found is not None and found["status"] == record.DONE and stage.name != "table"


def say(stage: str, text: str) -> None:
    print(f"{stage:<10} {text}", flush=True)


# -------------------------------------------------------------------------------------------------------- a stage's run


def run(stage: Planned, folder: Path, flags: Sequence[str], limit: float) -> str:
    """Runs a stage for at most `limit` seconds, completes its record, and returns its status."""
    token, log = uuid.uuid4().hex, folder / f"{stage.name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    began, before = time.monotonic(), _changed(folder, stage)
    interrupt: KeyboardInterrupt | None = None
    with log.open("w") as file:
        # The stage is in a separate session, so that only this process receives Ctrl-C. Its processes are ended below.
        process = subprocess.Popen(
            [*stage.command, "--out", str(folder), "--seconds", f"{max(limit - 10, limit / 2):.0f}", *flags], cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, TOKEN: token, "PYTHONPATH": _python_path()},
        )  # fmt: skip
        try:
            code = process.wait(limit)
            status, message = (
                (record.DONE, "") if code == 0 else (record.CRASHED, _reason(code, log))
            )
        except subprocess.TimeoutExpired:
            status, message = record.OUT_OF_TIME, f"ended after {limit:.0f} seconds"
        except KeyboardInterrupt as error:
            status, message, interrupt = record.INTERRUPTED, "interrupted", error
        finally:
            kill(token)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
    status = _end(
        stage, folder, status, message, time.monotonic() - began, before, "--small" in flags
    )
    if interrupt is not None:
        raise interrupt
    return status


def _python_path() -> str:
    return os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)


def _changed(folder: Path, stage: Planned) -> int:
    """Returns the time at which the stage's file was last written, in ns; 0 without a file."""
    with contextlib.suppress(FileNotFoundError):
        return record.path_of(folder, stage.name).stat().st_mtime_ns
    return 0


def _reason(code: int, log: Path) -> str:
    """Returns the last message of a failed process."""
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1][:400] if lines else '(it said nothing)'}"


def _end(
    stage: Planned, folder: Path, status: str, message: str, seconds: float, before: int, rehearsal: bool
) -> str:  # fmt: skip
    """Completes the record of a stage that has ended, and keeps its figures."""
    found: dict[str, Any] | None = None
    if _changed(folder, stage) != before:  # otherwise the file is from an earlier run
        with contextlib.suppress(CorruptRecord):
            found = record.read(folder, stage.name)
    if (
        found is not None
        and status in (record.DONE, record.CRASHED)
        and found["status"] in (record.DONE, record.FAILED)
    ):
        return str(found["status"])
    if status == record.DONE:
        status, message = record.CRASHED, "it ended without a finished record"
    found = found or {
        "stage": stage.name,
        "rehearsal": rehearsal,
        "device": "unknown",
        "figures": {},
    }
    record.write(
        folder, {**found, "status": status, "message": message, "seconds": round(seconds, 1)}
    )
    return status


def kill(token: str) -> None:
    """Kills every process whose environment contains the token, and the processes that they start.

    Processes that do not end are ignored after a while: a process that waits in a driver cannot be
    killed.
    """
    wanted, end = f"{TOKEN}={token}".encode(), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        pids = [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, wanted)
        ]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _has(pid: int, wanted: bytes) -> bool:
    """Returns whether a living process has this in its environment."""
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------- all stages


def conduct(args: argparse.Namespace, stages: Sequence[Planned] = STAGES) -> int:
    """Runs the requested stages that are not finished; returns the exit code."""
    again = _again(args, stages)
    wanted = [stage for stage in stages if stage in again or stage in chosen(args.only, stages)]
    if any(stage.name != "table" for stage in wanted):
        _check_folder(args.out, args.small, stages)
    end, failed = time.monotonic() + 60 * args.minutes, []
    for stage in wanted:
        if stage not in again and finished(args.out, stage):
            say(stage.name, f"finished already ({record.path_of(args.out, stage.name)})")
            continue
        left, measures = end - time.monotonic(), stage.name != "table"
        if measures and left < (min(stage.expected, 1) if args.small else stage.expected):
            _leave_out(stage, args, left)
            continue
        limit = min(stage.limit, left) if measures else stage.limit
        say(stage.name, f"{stage.what} (at most {limit:.0f} s) ...")
        status = run(stage, args.out, _flags(stage, args), limit)
        found = record.read(args.out, stage.name) or {}
        say(
            stage.name,
            f"{status} after {found.get('seconds', 0):.0f} s {found.get('message', '')}".rstrip(),
        )
        if status != record.DONE:
            failed.append(stage.name)
    if failed:
        print(
            f"not done: {', '.join(failed)}; why is in {args.out}/NAME.log. The same command runs them again."
        )
    return int(bool(failed))


def _again(args: argparse.Namespace, stages: Sequence[Planned]) -> list[Planned]:
    """Returns the stages to repeat: those of `--again`, or without names all requested stages."""
    if args.again is None:
        return []
    return chosen(args.again, stages) if args.again else chosen(args.only, stages)


def _check_folder(folder: Path, small: bool, stages: Sequence[Planned]) -> None:
    """Raises UsageError if figures of a rehearsal and of a real run would be in one folder."""
    for stage in stages:
        with contextlib.suppress(CorruptRecord):
            found = record.read(folder, stage.name)
            if (
                found is not None
                and bool(found.get("rehearsal")) != small
                and stage.name != "table"
            ):
                what = "a rehearsal" if found.get("rehearsal") else "a GPU"
                raise UsageError(f"{folder} holds figures of {what}: choose another --out")


def _leave_out(stage: Planned, args: argparse.Namespace, left: float) -> None:
    """Records that there was no time for a stage; figures of an earlier run remain."""
    say(stage.name, f"not run: no time ({max(left, 0):.0f} s left, {stage.expected:.0f} expected)")
    found: dict[str, Any] | None = None
    with contextlib.suppress(CorruptRecord):
        found = record.read(args.out, stage.name)
    if found is None or not found["figures"]:
        empty = {
            "stage": stage.name,
            "rehearsal": args.small,
            "device": "unknown",
            "figures": {},
            "seconds": 0.0,
        }
        record.write(args.out, {**empty, "status": record.NOT_RUN, "message": "no time"})


def _flags(stage: Planned, args: argparse.Namespace) -> list[str]:
    flags = ["--device", args.device, *(["--small"] if args.small else [])]
    if stage.name == "largest" and args.drive is not None:
        flags += ["--folder", args.drive]
    return flags


def default_folder(small: bool) -> Path:
    return ROOT / "benchmarks" / "results" / ("gpu-rehearsal" if small else "gpu")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages")
    parser.add_argument(
        "--again", nargs="*", metavar="STAGE", help="also where finished: these, or all of the call"
    )
    parser.add_argument(
        "--list", action="store_true", help="name the stages and what is known of each"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="for all; what does not fit any more is left out",
    )
    parser.add_argument("--out", type=Path, help="folder of the files (benchmarks/results/gpu)")
    parser.add_argument("--drive", metavar="FOLDER", help="on the drive that `largest` swaps to")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="a rehearsal: tiny shapes, figures that mean nothing"
    )
    args = parser.parse_args(argv)
    args.out = (args.out or default_folder(args.small)).resolve()
    return args


def show(folder: Path) -> None:
    """Prints the stages and their states."""
    for stage in STAGES:
        try:
            found = record.read(folder, stage.name)
            status = "" if found is None else f" [{found['status']}]"
        except CorruptRecord:
            status = " [corrupt]"
        print(
            f"{stage.name:<10} {stage.what} (about {stage.expected:.0f} s, at most {stage.limit:.0f}){status}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        show(args.out)
        return 0
    try:
        chosen(args.only, STAGES), chosen(args.again, STAGES)
        if args.device == "cpu" and not args.small and args.only != ["table"]:
            raise UsageError("--device cpu is for a rehearsal: add --small")
        if args.device == "cuda" and args.only != ["table"] and not _has_gpu():
            print("no CUDA device (a rehearsal: --device cpu --small)")
            return 0
        # a missing package is reported here once, instead of by every stage
        from threed.config import schema as schema

        return conduct(args)
    except (UsageError, ImportError) as error:
        print(f"benchmarks/gpu.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _has_gpu() -> bool:
    import torch  # imported here because the tables and --list work without torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that SIGTERM also ends the running stage
    sys.exit(main())
