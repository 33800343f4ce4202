"""Provenance of a run, for dashboards: code, machines, versions and model size."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from threed.config import Config
from threed.core.device import processor
from threed.distributed.topology import Topology


def provenance(topology: Topology, parameters: int) -> dict[str, Any]:
    """Returns facts about a run that are not in its configuration, as JSON values.

    Args:
        topology: topology of the run.
        parameters: total number of elements of all parameters.
    """
    versions = {
        "threed": version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return {
        "world_size": topology.world,
        "device": processor(topology.device),
        "parameters": parameters,
        "git_commit": git_commit(Path.cwd()) or git_commit(Path(__file__).parent),
        "versions": {**versions, "cuda": torch.version.cuda},
    }


def version(package: str = "threed") -> str:
    """Returns the version of a package, or "not installed".

    A source checkout that is only on the import path also counts as not installed.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def git_commit(folder: Path) -> str | None:
    """Returns the commit checked out in a folder, or None without a repository or git."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def tags(config: Config, topology: Topology) -> list[str]:
    """Returns tags to filter runs by: architecture, axes, ZeRO stage, dtype, schedule."""
    axes = [f"{axis}{size}" for axis, size in topology.sizes.items() if size > 1]
    schedule = [Path(config.parallel.schedule).name] if topology.pp > 1 else []
    return [
        config.model.arch.rpartition(":")[2],
        *axes,
        f"zero{config.zero.stage}",
        config.precision.dtype,
        *schedule,
    ]
