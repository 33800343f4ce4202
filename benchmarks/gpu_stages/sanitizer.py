"""Runs compute-sanitizer on every kernel of csrc/cuda, and on kernels with deliberate faults.

The kernels of csrc/cuda run with small, unusual sizes, and no error may be reported. Of the kernels
with faults (tests/cuda/planted.cu), each must be reported by at least one of the tools memcheck,
racecheck, initcheck and synccheck. Faults that no tool can find are listed with the reason; the
emulator finds them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.stage import ROOT, Stage, main
from threed.core.native import build

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
NOT_AVAILABLE = "not available"
FOUND = 99  # exit code of the tool if it finds an error
REFUSED, ENDED = 3, 4  # exit codes of tests/cuda/planted_main.cu
# Deliberate faults that no tool can find.
BEYOND = {
    "unwritten_shared_memory": "initcheck knows global memory only",
    "shared_memory_of_the_last_block": "initcheck knows global memory only",
    "blocks_that_write": "racecheck knows shared memory only",
    "blocks_that_read": "racecheck knows shared memory only",
}


def tool() -> str | None:
    """Returns the path of compute-sanitizer, or None."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )


def built(folder: Path, architecture: str) -> Path:
    """Compiles the program that runs the faulty kernels; raises BuildError."""
    made, sources = folder / "planted", ROOT / "tests" / "cuda"
    command = [
        *build.find_compiler(build.CUDA), "-std=c++17", "-O1", "-lineinfo", f"-arch=sm_{architecture}",
        f"-I{build.source_root() / 'cuda'}", str(sources / "planted.cu"), str(sources / "planted_main.cu"),
        "-o", str(made),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise build.BuildError(build.first_errors(done.stderr or done.stdout))
    return made


def names_of(program: Path) -> list[str]:
    """Returns the names of the faulty kernels, in order."""
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()


def verdict(code: int) -> str:
    """Returns the meaning of the exit code of a faulty kernel's run.

    It is empty if no fault was found.
    """
    said = {
        FOUND: "reported",
        REFUSED: "launch refused",
        ENDED: "ended with an error",
        124: "hung",
        0: "",
    }
    return said.get(code, f"exit code {code}")


def judged(seen: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Returns the summary for the faulty kernels.

    Args:
        seen: kernel -> tool -> verdict.
    """
    found = {name: [f"{t}: {said}" for t, said in by.items() if said] for name, by in seen.items()}
    faulty = [name for name in seen if not name.startswith("right")]
    return {
        "planted": len(faulty),
        "found": {name: found[name] for name in faulty if found[name]},
        "missed": [name for name in faulty if not found[name] and name not in BEYOND],
        "not_looked_for": {
            name: BEYOND[name] for name in faulty if not found[name] and name in BEYOND
        },
        "false_alarms": [
            f"{name}: {what}" for name in seen if name.startswith("right") for what in found[name]
        ],
    }


def planted(stage: Stage, sanitizer: str, program: Path) -> dict[str, Any]:
    """Runs every faulty kernel under every tool, four at a time."""
    names = names_of(program)

    def one(number: int, name: str) -> str:
        command = [
            sanitizer,
            "--tool",
            name,
            "--error-exitcode",
            str(FOUND),
            str(program),
            str(number),
        ]
        return verdict(stage.run(command, 40).returncode)

    with ThreadPoolExecutor(4) as pool:
        jobs = {(n, t): pool.submit(one, n, t) for n in range(len(names)) for t in TOOLS}
        seen = {name: {t: jobs[n, t].result() for t in TOOLS} for n, name in enumerate(names)}
    return judged(seen)


def ours(stage: Stage, sanitizer: str, name: str) -> dict[str, Any]:
    """Runs threed's kernels once under a tool.

    Returns the number of reports, and the beginning of the output.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = [
            sys.executable,
            "-m",
            "benchmarks.gpu_stages.kernels",
            "--once",
            "--small",
            "--out",
            folder,
        ]
        command = [sanitizer, "--tool", name, "--error-exitcode", str(FOUND), *work]
        # Without torch's cache, each tensor is a separate allocation, so the tool finds accesses beyond its end.
        done = stage.run(command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    return {"exit": done.returncode, "cases": done.stdout.count("\nran ") + done.stdout.startswith("ran "),
            **reports(done.stdout + done.stderr)}  # fmt: skip


def reports(text: str) -> dict[str, Any]:
    """Returns the number of errors that a tool counted, and the first lines of its output."""
    summary = re.search(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    said = [line for line in text.splitlines() if line.startswith("=====")]
    return {
        "errors": int(summary[1] or summary[2]) if summary else None,
        "said": [line[:200] for line in said[:20]],
    }


def run(stage: Stage) -> None:
    sanitizer = tool()
    if not stage.cuda or sanitizer is None:
        what = (
            "compute-sanitizer is not installed" if sanitizer is None else "a rehearsal has no GPU"
        )
        stage.put(tools=NOT_AVAILABLE, why=what)
        return
    stage.put(tools=list(TOOLS), where=sanitizer)
    found: dict[str, Any] = {}
    for name in TOOLS:
        found[name] = (
            ours(stage, sanitizer, name)
            if stage.has_time(60)
            else {"note": "not measured: no time"}
        )
        stage.put(ours=found)
    with tempfile.TemporaryDirectory() as folder:
        architecture = "{}{}".format(*_capability(stage))
        faults = planted(stage, sanitizer, built(Path(folder), architecture))
    stage.put(planted=faults)
    bad = [
        f"{name} over our kernels: exit code {one['exit']} after {one['cases']} cases, {one['errors']} errors"
        for name, one in found.items() if "exit" in one and (one["exit"] or not one["cases"])
    ]  # fmt: skip
    bad += (
        [f"planted faults that no tool reported: {', '.join(faults['missed'])}"]
        if faults["missed"]
        else []
    )
    bad += (
        [f"reported without a fault: {', '.join(faults['false_alarms'])}"]
        if faults["false_alarms"]
        else []
    )
    if bad:
        raise AssertionError("; ".join(bad)[:450])


def _capability(stage: Stage) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(stage.device)


if __name__ == "__main__":
    main("sanitizer", run)
