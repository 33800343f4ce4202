"""Compiles the kernels, and records the versions, the GPU and its state."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stages.stage import Stage, main
from threed.core import native
from threed.core.native import build

# Some have other names in other driver versions, so each is queried separately.
STATE = (
    "name", "driver_version", "memory.total", "pstate", "temperature.gpu", "power.draw", "power.limit", "clocks.sm",
    "clocks.mem", "clocks.max.sm", "clocks.max.mem", "ecc.mode.current", "persistence_mode",
    "clocks_throttle_reasons.active", "clocks_event_reasons.active",
)  # fmt: skip
NOT_AVAILABLE = "not available"


def versions() -> dict[str, str]:
    """Returns the versions of all software that affects the figures."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    for package in ("triton", "liger-kernel"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = NOT_AVAILABLE
    try:
        command = [*build.find_compiler(build.CUDA), "--version"]
        lines = (
            subprocess.run(command, capture_output=True, text=True, check=False)
            .stdout.strip()
            .splitlines()
        )
        found["nvcc"] = next((line for line in lines if "release" in line), NOT_AVAILABLE)
    except build.BuildError as error:
        found["nvcc"] = f"{NOT_AVAILABLE}: {error}"
    return found


def gpu(device: torch.device) -> dict[str, Any]:
    """Returns torch's description of the GPU."""
    of = torch.cuda.get_device_properties(device)
    return {
        "name": of.name, "capability": f"{of.major}.{of.minor}", "memory_gib": of.total_memory / 2**30,
        "multiprocessors": of.multi_processor_count, "l2_mib": getattr(of, "L2_cache_size", 0) / 2**20,
        "count": torch.cuda.device_count(),
    }  # fmt: skip


def state() -> dict[str, str]:
    """Returns nvidia-smi's state of the first GPU: clocks, power, ECC, reasons for lower clocks."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"nvidia-smi": NOT_AVAILABLE}
    found = {}
    for field in STATE:
        try:
            done = subprocess.run(
                [tool, f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20,
                check=False,
            )  # fmt: skip
            found[field] = (
                done.stdout.strip().splitlines()[0]
                if done.returncode == 0 and done.stdout.strip()
                else ""
            )
        except (OSError, subprocess.TimeoutExpired):
            found[field] = ""
    return {field: value or NOT_AVAILABLE for field, value in found.items()}


def compiled(library: build.Library) -> dict[str, Any]:
    """Compiles a library from its sources, and returns the seconds.

    The result is stored in the cache, which the other stages use.
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        try:
            path = build.ensure(library, Path(folder))
        except build.Unavailable as error:
            return {"left_out": str(error)}
        seconds = time.perf_counter() - began
        kept = build.cache() / path.name
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            beside = kept.with_suffix(".copied")
            shutil.copy2(path, beside)
            beside.replace(kept)
        return {"seconds": seconds, "mib": path.stat().st_size / 2**20}


def run(stage: Stage) -> None:
    stage.put(versions=versions(), state=state())
    if stage.cuda:
        stage.put(gpu=gpu(stage.device))
    if stage.small:  # a rehearsal uses an already compiled library
        stage.put(native={"cpu": build.load(build.CPU)[1]})
    else:
        for name, library in build.LIBRARIES.items():
            stage.put(**{f"build_{name}": compiled(library)})
        stage.put(native=native.status())
    if stage.cuda and native.library("cuda") is None:
        raise RuntimeError(f"no kernels for GPUs: {native.status()['cuda']}")


if __name__ == "__main__":
    main("build", run)
