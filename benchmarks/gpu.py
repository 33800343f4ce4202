"""Everything that is to be known of a GPU, in one command of about 20 minutes; a file of figures a stage.

    python benchmarks/gpu.py                           # all stages; without a CUDA device it says so and exits 0
    python benchmarks/gpu.py                           # again: goes on where it was stopped, a finished stage stays
    python benchmarks/gpu.py --only kernels step       # some; --list names them
    python benchmarks/gpu.py --again kernels           # measures a finished stage anew
    python benchmarks/gpu.py --only table              # the tables for docs/reference/performance.md, from the files alone
    python benchmarks/gpu.py --device cpu --small      # a rehearsal of every stage, on a CPU, in tiny shapes

Every stage is a process of its own with a time limit (`benchmarks/gpu_stages`), which writes OUT/NAME.json as it has
figures and OUT/NAME.log. One that fails, crashes or hangs is recorded so, with its message, and the others go on. The
folder may be copied anywhere: the tables need nothing else. Exit code 0 where every stage of the call is done or had no
time, 1 where one failed, 2 for a call that cannot be.

Written without a GPU at hand: how long stages take is a guess, their limits are not.
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

TOKEN = "THREED_GPU_STAGE"  # every process of a stage has it in its environment, whatever session it moves to
PATIENCE = 20.0  # seconds for killed processes to end


@dataclass(frozen=True)
class Planned:
    """A stage. expected: seconds that it is guessed to take, without which it is not begun; limit: it is ended then."""

    name: str
    what: str
    expected: float
    limit: float
    module: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", self.module or f"benchmarks.gpu_stages.{self.name}"]


# The most important first: where --minutes is short, the last ones are left out. The tables always have time.
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
    """A call that cannot be."""


def chosen(names: Sequence[str] | None, stages: Sequence[Planned]) -> list[Planned]:
    """The stages of these names, in their own order; all without names."""
    known = [stage.name for stage in stages]
    if unknown := [name for name in names or () if name not in known]:
        raise UsageError(f"no such stage: {', '.join(unknown)}; there are {', '.join(known)}")
    return [stage for stage in stages if names is None or stage.name in names]


def finished(folder: Path, stage: Planned) -> bool:
    """Whether a stage need not run; a corrupt file is told of, and set aside."""
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
    """Runs a stage for at most `limit` seconds, with an end of its record in every case; its status."""
    token, log = uuid.uuid4().hex, folder / f"{stage.name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    began, before = time.monotonic(), _changed(folder, stage)
    interrupt: KeyboardInterrupt | None = None
    with log.open("w") as file:
        # A session of its own: Ctrl-C comes here alone, and what is left of the stage is ended below.
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
    """When the stage's file was last written."""
    with contextlib.suppress(FileNotFoundError):
        return record.path_of(folder, stage.name).stat().st_mtime_ns
    return 0


def _reason(code: int, log: Path) -> str:
    """What a process that failed said last."""
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1][:400] if lines else '(it said nothing)'}"


def _end(
    stage: Planned, folder: Path, status: str, message: str, seconds: float, before: int, rehearsal: bool
) -> str:  # fmt: skip
    """Sets right what the record of a stage that ended says; keeps its figures."""
    found: dict[str, Any] | None = None
    if _changed(folder, stage) != before:  # else the file is an earlier run's
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
    """Ends every process whose environment has this token, and those that they start meanwhile; gives up on what does
    not end, as a process may not that waits inside a driver."""
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
    """Whether a living process has this in its environment; a dead one that waits for its parent has none."""
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------- all stages


def conduct(args: argparse.Namespace, stages: Sequence[Planned] = STAGES) -> int:
    """Runs the stages that are asked for and not finished; the exit code."""
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
    """The stages to be measured anew: those named, or without names all that are asked for."""
    if args.again is None:
        return []
    return chosen(args.again, stages) if args.again else chosen(args.only, stages)


def _check_folder(folder: Path, small: bool, stages: Sequence[Planned]) -> None:
    """Refuses to mix a rehearsal's figures with others."""
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
    """Records that a stage had no time; figures of an earlier run stay."""
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
    """Names the stages, and how far each is."""
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
        # a missing package is named once here, not by every stage
        from threed.config import schema as schema

        return conduct(args)
    except (UsageError, ImportError) as error:
        print(f"benchmarks/gpu.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _has_gpu() -> bool:
    import torch  # not above: the tables and --list need none

    return torch.cuda.is_available()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stage that runs, too
    sys.exit(main())
