"""Writes the table of docs/guide/recipes.md: the forecasts of the presets of published models.

python -m tests.recipes      # after a topology of a preset or the forecast has changed; some minutes
"""

from __future__ import annotations

import re

from tests.test_floors import ROOT
from threed.config import Config
from threed.config.arguments import load
from threed.config.resolution import resolve
from threed.planner.forecast import Forecast

PRESETS = ("llama3-8b", "mistral-7b", "qwen3-8b", "gemma3-12b", "qwen3-32b", "llama3-70b")
WORLDS = (8, 64, 512)
HEAD = """| preset | GPUs | topology | peak, GB | on the host, GB | s per step | MFU |
|---|---|---|---|---|---|---|
"""


def plan(name: str, world: int) -> Forecast:
    """Returns the forecast of a preset with its topology for a number of H100s.

    It is the one of `threed plan --preset NAME --world-size WORLD --gpu h100`.
    """
    config, options = load(
        ["--preset", name, "--world-size", str(world), "--gpu", "h100", "--dry-run"]
    )
    return Forecast.of(resolve(config, 257, world), world, gpu=options.gpu)


def peak(made: Forecast) -> float:
    """Returns the highest peak of a rank, in GB."""
    return max(rank.bytes["peak"] for rank in made.ranks) / 1e9


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
    host = max(rank.bytes.get("offloaded", 0) for rank in made.ranks) / 1e9
    figures = f"{peak(made):.1f} | {host:.1f} | {times(made)}"
    return f"| `{name}` | {len(made.ranks)} | {topology(made.config)} | {figures} |"


def times(made: Forecast) -> str:
    """Returns the time of a step and the MFU; dashes if the time is not modelled (offload)."""
    if made.time is None:
        assert made.unmodelled
        return "– | –"
    return f"{made.time.total:.3g} | {made.time.mfu:.0%}".replace("%", " %")


def main() -> None:
    """Writes the table."""
    rows = [row(name, plan(name, world)) for name in PRESETS for world in WORLDS]
    (page,) = ROOT.glob("docs/**/recipes.md")
    text = re.sub(rf"(?<={re.escape(HEAD)})(\|.*\n)*", "\n".join(rows) + "\n", page.read_text())
    page.write_text(text)


if __name__ == "__main__":
    main()
