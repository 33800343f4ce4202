"""Common parts of the stages: options, device, time and record.

def run(stage: Stage) -> None:
    stage.put(copy_gb_per_s=...)            # written to the stage's file at once
if __name__ == "__main__":
    main("bandwidth", run)
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stages import record
from benchmarks.gpu_stages.record import CorruptRecord, Record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
STAGES = (
    "build",
    "tests",
    "bandwidth",
    "features",
    "roof",
    "kernels",
    "step",
    "sanitizer",
    "nccl",
    "sizes",
    "largest",
    "table",
)


class NotHere(RuntimeError):
    """Raised if this machine lacks something that a stage needs."""


class Stage:
    """A running stage.

    Attributes:
        small: whether it is a rehearsal with tiny shapes, whose figures have no meaning.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.args, self.out, self.small = args, args.out, args.small
        self.device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        self._end = time.monotonic() + args.seconds
        about = {"rehearsal": self.small, "device": device_name(self.device)}
        _check_same(self.out, name, about)
        self._record = Record(self.out, name, **about, commit=commit(), torch=torch.__version__)
        self.end = self._record.end

    @property
    def cuda(self) -> bool:
        """Whether the stage runs on a GPU."""
        return self.device.type == "cuda"

    def put(self, **found: Any) -> None:
        """Adds figures to the stage's file."""
        self._record.put(**found)

    def time_left(self) -> float:
        """Returns the seconds until this stage is ended."""
        return self._end - time.monotonic()

    def has_time(self, seconds: float = 20.0) -> bool:
        """Returns whether at least this many seconds are left."""
        return self.time_left() > (0 if self.small else seconds)

    def memory(self) -> int:
        """Returns the bytes of the GPU's memory; 64 MiB in a rehearsal."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.cuda else 64 << 20

    def run(
        self, command: list[str], seconds: float | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a process in the repository.

        It is killed after `seconds`, or when the stage's time is over; the exit code is then 124.
        """
        limit = max(1.0, min(self.time_left(), seconds or self.time_left()) - 2)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, **pipes, **more
        ) as process:
            try:
                out, said = process.communicate(timeout=limit)
                return subprocess.CompletedProcess(command, process.returncode, out, said)
            except subprocess.TimeoutExpired:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # together with the processes that it has started
                out, said = process.communicate()
                return subprocess.CompletedProcess(
                    command, 124, out, f"{said}\nkilled after {limit:.0f} seconds"
                )


def device_name(device: torch.device) -> str:
    """Returns the name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def commit() -> str:
    """Returns the commit of this checkout, or "unknown" without git.

    A plus follows if files were changed.
    """
    done = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        for words in (
            ["rev-parse", "--short", "HEAD"],
            ["status", "--porcelain", "--untracked-files=no"],
        )
    ]
    return (
        "unknown"
        if done[0].returncode
        else done[0].stdout.strip() + "+" * bool(done[1].stdout.strip())
    )


def _check_same(folder: Path, name: str, about: dict[str, Any]) -> None:
    """Raises an error if figures of two devices, or of a rehearsal, would be in one folder."""
    for other in STAGES:
        try:
            found = record.read(folder, other) if other not in (name, "table") else None
        except CorruptRecord:
            continue
        if (
            found
            and found["device"] != "unknown"
            and any(found.get(key) != value for key, value in about.items())
        ):
            what = f"{found['device']}{', a rehearsal' if found['rehearsal'] else ''}"
            raise NotHere(
                f"{folder} holds figures of another device ({what}): choose another --out"
            )


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of every stage."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.gpu_stages.{name}", description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument(
        "--small", action="store_true", help="a rehearsal: tiny shapes, figures that mean nothing"
    )
    made.add_argument(
        "--seconds", type=float, default=530.0, help="leave out what would take longer"
    )
    return made


def main(
    name: str,
    run: Callable[[Stage], None],
    options: Callable[[argparse.ArgumentParser], Any] | None = None,
) -> None:
    """Runs a stage from the command line.

    If it fails, the exit code is 1 and the record contains the message.
    """
    made = parser(name, inspect.getmodule(run).__doc__)
    if options is not None:
        options(made)
    args = made.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device")
        return
    try:
        stage = Stage(name, args)
    except NotHere as error:
        raise SystemExit(f"{name}: {error}") from None
    try:
        run(stage)
    except Exception as error:
        traceback.print_exc()
        stage.end(record.FAILED, f"{type(error).__name__}: {error}"[:500])
        sys.exit(1)
    stage.end(record.DONE)
