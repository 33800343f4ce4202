"""Writes the table of docs/guide/recipes.md: the forecasts of the presets of published models.

python -m tests.recipes                         # after a topology of a preset or the forecast has changed; some minutes
python -m tests.recipes search deepseek-v3 512  # prints the fastest topologies that fit, for a number of H100s
python -m tests.recipes search deepseek-v3 512 "pp (8|16) .* ep 64"      # the same, only of some topologies
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator

from tests.test_floors import ROOT
from threed.config import Config
from threed.config.arguments import load
from threed.config.resolution import resolve
from threed.planner.forecast import Forecast

PRESETS = ("llama3-8b", "mistral-7b", "qwen3-8b", "gemma3-12b", "qwen3-32b", "llama3-70b")
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
RUNS = [(name, world) for name in PRESETS for world in (8, 64, 512)]
RUNS += [(name, world) for name in EXPERTS for world in (64, 512)] + [("deepseek-v3", 256)]
RUNS.sort(key=lambda run: ([*PRESETS, *EXPERTS].index(run[0]), run[1]))
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
    axes = [(axis, getattr(p, axis)) for axis in ("pp", "dp", "cp", "tp")]
    parts = [" × ".join(f"{axis} {size}" for axis, size in axes if size > 1)]
    parts += [f"ep {p.ep}"] if p.ep > 1 else []
    parts += [f"{p.schedule} {p.chunks}"] if p.schedule != "1f1b" else []
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


def candidates(preset: Config, world: int) -> Iterator[list[str]]:
    """Yields the flags of topologies: every axis up to a machine or 16 stages, and how stages are scheduled.

    Context ranks are candidates for sequences of 32,768 tokens and more.
    """
    m, rows = preset.model, preset.train.global_batch
    powers = [1, 2, 4, 8, 16, 32, 64]
    context = powers[:5] if m.seq >= 32768 else [1]
    sizes = itertools.product(
        powers[:5], powers[:4], context, powers if m.experts else [1], (1, 2, 4)
    )
    for pp, tp, cp, ep, micro in sizes:
        data = world // (pp * tp * cp)
        if data * pp * tp * cp != world or (data * cp * tp) % ep or rows % (data * micro):
            continue
        schedules = (
            [["1f1b"]]
            if pp == 1
            else [["1f1b"], ["interleaved", "2"], ["interleaved", "4"], ["dualpipev", "2"]]
        )
        for (schedule, *chunks), stage in itertools.product(
            schedules, (1, 2, 3) if pp == 1 else (1,)
        ):
            flags = {
                "parallel.pp": pp, "parallel.tp": tp, "parallel.cp": cp, "parallel.ep": ep, "train.micro-batch": micro,
                "parallel.schedule": schedule, "zero.stage": stage, "parallel.chunks": (chunks or ["1"])[0],
                "zero.offload-optimizer": "none",
            }  # fmt: skip
            yield [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def search(name: str, world: int, limit: float, only: str = "") -> list[tuple[float, float, str]]:
    """Returns (seconds, peak in GB, flags) of the topologies that fit, the fastest first.

    Each one has the least recomputation with which it fits, also if the busiest expert rank has 1.25 times
    the mean of tokens.

    Args:
        name: name of the preset.
        world: number of GPUs.
        limit: largest peak, in GB.
        only: regular expression for the flags of a topology.
    """
    recompute = [
        ["none"],
        ["selective", "activation,norm"],
        ["selective", "attention,activation,norm"],
        ["full"],
    ]
    first, found = ["--preset", name, "--world-size", str(world), "--gpu", "h100", "--dry-run"], []
    for flags in candidates(load(first)[0], world):
        if not re.search(only, " ".join(flags)):
            continue
        for mode, *ops in recompute:
            words = [*flags, "--recompute.mode", mode, *(["--recompute.ops", *ops] if ops else [])]
            try:
                config, options = load([*first, *words])
                made = Forecast.of(resolve(config, 257, world), world, gpu=options.gpu)
            except ValueError:  # such as more stages than layers
                break
            states = ("parameters", "gradients", "optimizer")
            if min(sum(one.bytes[part] for part in states) for one in made.ranks) / 1e9 > limit:
                break
            busy = made.with_imbalance(1.25) if peak(made) <= limit else None
            most = peak(made) if busy is None else busy.peak / 1e9
            if most <= limit and made.time is not None:
                found.append((made.time.total, most, " ".join(words)))
                print(f"{found[-1][0]:9.3f} s {found[-1][1]:6.1f} GB {found[-1][2]}", flush=True)
                break
    return sorted(found)


def main() -> None:
    """Writes the table, or searches topologies."""
    if sys.argv[1:2] == ["search"]:
        found = search(sys.argv[2], int(sys.argv[3]), 76.0, *sys.argv[4:])
        print(
            "fastest:",
            *(f"{s:9.3f} s {gb:6.1f} GB {flags}" for s, gb, flags in found[:8]),
            sep="\n",
        )
        return
    rows = [row(name, plan(name, world)) for name, world in RUNS]
    (page,) = ROOT.glob("docs/**/recipes.md")
    text = re.sub(rf"(?<={re.escape(HEAD)})(\|.*\n)*", "\n".join(rows) + "\n", page.read_text())
    page.write_text(text)


if __name__ == "__main__":
    main()
