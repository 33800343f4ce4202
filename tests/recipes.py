"""Writes the table of docs/guide/recipes.md: the forecasts of the presets of published models.

python -m tests.recipes      # after a topology of a preset or the forecast has changed; about a minute
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist

from tests.test_floors import ROOT
from threed.config import Config
from threed.config.arguments import load
from threed.config.resolution import resolve
from threed.core import device as gpu
from threed.ops import launch
from threed.planner import forecast
from threed.planner.forecast import Forecast

PRESETS = ("llama3-8b", "mistral-7b", "qwen3-8b", "gemma3-12b", "qwen3-32b", "llama3-70b")
WORLDS = (8, 64, 512)
# H100 SXM: FLOP/s in bf16, and assumed bytes per second over NVLink (a machine with 8 GPUs)
# and over a network of 400 Gbit/s per GPU, two thirds and four fifths of the nominal speeds.
PEAK, NVLINK, NETWORK = 989e12, 300e9, 40e9
HEAD = """| preset | GPUs | topology | peak, GB | on the host, GB | s per step | MFU |
|---|---|---|---|---|---|---|
"""


@contextmanager
def on_h100() -> Iterator[None]:
    """Context manager: forecasts inside are for a GPU, even on a machine without one.

    They are for torch's operations, which take more memory than the kernels of `csrc/cuda`.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(gpu, "count", lambda: 8))
        stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))
        stack.enter_context(patch.object(launch, "available", lambda x: False))
        stack.enter_context(patch.object(forecast, "device_name", lambda device: "H100"))
        yield


def plan(name: str, world: int) -> Forecast:
    """Returns the forecast of a preset with its topology for a number of ranks."""
    config, _ = load(["--preset", name], world_size=world)
    return Forecast.of(resolve(config, 257, world), world)


def peak(made: Forecast) -> float:
    """Returns the highest peak of a rank, in GB."""
    return max(rank.bytes["peak"] for rank in made.ranks) / 1e9


def seconds(made: Forecast) -> float:
    """Returns the time of a step in seconds, without the update of the weights.

    It is the time of compute at `EFFICIENCY` of the peak, including the pipeline's bubble, plus the
    time of messages. Under ZeRO-3, gathers and reductions overlap with compute.
    """
    sends = {axis: max(rank.sends[axis] for rank in made.ranks) for axis in ("tp", "pp", "dp")}
    across = NVLINK if len(made.ranks) <= 8 else NETWORK
    compute = made.step_seconds(PEAK / 1e12) + sends["tp"] / NVLINK + sends["pp"] / across
    data = sends["dp"] / across
    return max(compute, data) if made.config.zero.stage == 3 else compute + data


def topology(config: Config) -> str:
    """Returns the description of a topology, such as `tp 2 × dp 4, ZeRO-1`."""
    p, zero, r = config.parallel, config.zero, config.recompute
    axes = [(axis, getattr(p, axis)) for axis in ("pp", "dp", "tp")]
    parts = [" × ".join(f"{axis} {size}" for axis, size in axes if size > 1)]
    parts += [f"ZeRO-{zero.stage}"]
    parts += ["optimizer on the host"] if zero.offload_optimizer == "cpu" else []
    recomputed = {"full": "blocks", "selective": " + ".join(r.ops)}
    parts += [f"recomputes {recomputed[r.mode]}"] if r.mode in recomputed else []
    return ", ".join(parts)


def row(name: str, made: Forecast) -> str:
    """Returns the row of a forecast in the table."""
    world, taken = len(made.ranks), seconds(made)
    tokens = made.config.train.global_batch * made.config.model.seq
    mfu = made.flops_per_token * tokens / (taken * world * PEAK)
    host = max(rank.bytes.get("offloaded", 0) for rank in made.ranks) / 1e9
    figures = f"{peak(made):.1f} | {host:.1f} | {taken:.3g} | {mfu:.0%}".replace("%", " %")
    return f"| `{name}` | {world} | {topology(made.config)} | {figures} |"


def main() -> None:
    """Writes the table."""
    with on_h100():
        rows = [row(name, plan(name, world)) for name in PRESETS for world in WORLDS]
    (page,) = ROOT.glob("docs/**/recipes.md")
    text = re.sub(rf"(?<={re.escape(HEAD)})(\|.*\n)*", "\n".join(rows) + "\n", page.read_text())
    page.write_text(text)


if __name__ == "__main__":
    main()
