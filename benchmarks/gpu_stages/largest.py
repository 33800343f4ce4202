"""Finds the largest models that train with states on the GPU, in host memory, and on a drive.

    python -m benchmarks.gpu_stages.largest --folder /nvme                            # all locations; FOLDER: on the drive
    python -m benchmarks.gpu_stages.largest --layers 8 --place cpu --trace trace.json # one model, and a trace of a step

The models have width 4096, ZeRO-3 and full recompute. The forecast gives the number of layers that
should just fit. From there, more or fewer layers are tried, each in a new process, until one model
trains and the next does not, or no time is left.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_stages.record import NOT_MEASURED
from benchmarks.gpu_stages.stage import Stage, main, parser
from benchmarks.reference import GPTConfig
from benchmarks.trainer import complete, make_trainer
from threed.distributed.grid import Grid
from threed.distributed.topology import Topology
from threed.planner.forecast import Forecast

PLACES = ("none", "cpu", "nvme")
BATCH, SHARE = 8, 0.92  # sequences per step; the share of free bytes that the forecast may use
LAST = "figures: "  # prefix of the line of JSON that a process prints


def shapes(layers: int, small: bool) -> GPTConfig:
    return GPTConfig(layers, 64, 4, 64, 512) if small else GPTConfig(layers, 4096, 32, 2048, 50304)


def settings_of(place: str, folder: str) -> dict[str, Any]:
    """Returns the settings of a run with its states in `place`.

    It trains in bf16 with bf16 gradients, ZeRO-3 and full recompute.
    """
    where = {
        "offload_optimizer": place,
        "offload_params": place,
        "nvme_path": folder if place == "nvme" else None,
    }
    return {
        "precision": {"dtype": "bf16", "grad_dtype": "bf16"}, "zero": {"stage": 3, **where},
        "recompute": {"mode": "full"}, "train": {"global_batch": BATCH, "micro_batch": BATCH, "grad_clip": 1.0},
    }  # fmt: skip


def trained(
    layers: int, place: str, folder: str, device: torch.device, small: bool, trace: str | None
) -> dict[str, Any]:
    """Trains one model; returns tokens/s, TFLOP/s and peak memory of two steps after the first."""
    config, cuda = shapes(layers, small), device.type == "cuda"
    engine = make_trainer(config, Topology(device=device), settings_of(place, folder))
    ids = torch.randint(config.vocab, (BATCH, config.seq_len + 1), device=device)
    data = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    wait = torch.cuda.synchronize if cuda else lambda: None
    engine.step(data)
    wait()
    begin = time.perf_counter()
    for _ in range(2):
        engine.step(data)
    wait()
    rate = 2 * data["tokens"].numel() / (time.perf_counter() - begin)
    if trace is not None:
        with torch.profiler.profile() as profiler:
            engine.step(data)
            wait()
        profiler.export_chrome_trace(trace)
    return {
        "layers": layers, "parameters": config.parameters, "tokens_per_s": rate,
        "tflops": rate * config.flops_per_token() / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else NOT_MEASURED,
    }  # fmt: skip


def planned(place: str, folder: str, stage: Stage) -> Callable[[int], tuple[float, float]]:
    """Returns the forecast as a function of the number of layers.

    Its results are the bytes needed on the device, and elsewhere.
    """
    topology = Topology.on_meta(Grid(), 0)

    def bytes_of(layers: int) -> tuple[float, float]:
        config = complete(shapes(layers, stage.small), topology, settings_of(place, folder))
        found = Forecast.of(config, 1).ranks[0].bytes
        return found["peak"], found.get("offloaded", 0)

    few, more = bytes_of(4), bytes_of(8)
    each = [(b - a) / 4 for a, b in zip(few, more, strict=True)]
    return lambda layers: (few[0] + (layers - 4) * each[0], few[1] + (layers - 4) * each[1])


def room(place: str, folder: str) -> float:
    """Returns the free bytes in the location of the states."""
    if place == "nvme":
        return shutil.disk_usage(folder).free
    with open("/proc/meminfo") as file:
        return next(
            1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable")
        )


def should_fit(place: str, folder: str, stage: Stage) -> int:
    """Returns the largest number of layers that fits according to the forecast, at least 1."""
    needed, device, elsewhere = planned(place, folder, stage), stage.memory(), room(place, folder)
    layers = 1
    while layers < 1000:
        here, there = needed(layers + 1)
        if here > SHARE * device or there > SHARE * elsewhere:
            break
        layers += 1
    return layers


def attempt(layers: int, place: str, folder: str, stage: Stage, seconds: float) -> dict[str, Any]:
    """Trains a model in a new process; returns its figures, or why it did not train."""
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--layers",
        str(layers),
        "--place",
        place,
        "--folder",
        folder,
    ]
    command += ["--device", stage.device.type, *(["--small"] if stage.small else [])]
    done = stage.run(command, seconds)
    lines = [line.removeprefix(LAST) for line in done.stdout.splitlines() if line.startswith(LAST)]
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    why = done.stderr.strip().splitlines()[-1:] or [f"ended by {done.returncode}"]
    return {"layers": layers, "failed": "no time" if done.returncode == 124 else why[0][:300]}


def search(
    first: int, work: Callable[[int], dict[str, Any] | None], tries: int = 8
) -> dict[str, Any]:
    """Returns the largest number of layers that trains, and the error of the next larger one.

    The search starts at `first` and changes the number by eighths of it. `work(layers)` returns
    None if no time is left.
    """
    step, best, failed, layers = max(1, first // 8), None, None, first
    for _ in range(tries):
        found = work(layers)
        if found is None or found.get("failed") == "no time":
            failed = failed or {"layers": layers, "failed": "no time"}
            if found is None or best is not None or layers < 4:
                break
            layers //= 4  # a much smaller model, so that there is any result
            continue
        if "failed" in found:
            failed, layers = found, layers - step
        else:
            best, layers = found, layers + step
        if (best and failed) or layers < 1:
            break
    return {
        "largest": best or {"note": NOT_MEASURED},
        "next": failed or {"note": f"{NOT_MEASURED}: tries ended"},
    }


def run(stage: Stage) -> None:
    folder = stage.args.folder
    stage.put(features=shapes(1, stage.small).d_model, memory_gib=stage.memory() / 2**30)
    found: dict[str, Any] = {}
    if stage.small:  # a rehearsal trains only one model, and forecasts others
        found |= {
            p: {"forecast": should_fit(p, folder, stage), "largest": {}, "next": {}}
            for p in PLACES[:-1]
        }
    for number, place in enumerate(PLACES):
        if place in found:
            continue
        budget = time.monotonic() + stage.time_left() / (len(PLACES) - number)

        def work(layers: int, place: str = place, budget: float = budget) -> dict[str, Any] | None:
            left = budget - time.monotonic()
            return (
                attempt(layers, place, folder, stage, 0.7 * left)
                if left > (3 if stage.small else 25)
                else None
            )

        guess = (
            min(2, should_fit(place, folder, stage))
            if stage.small
            else should_fit(place, folder, stage)
        )
        found[place] = {"forecast": guess, **search(guess, work, 1 if stage.small else 8)}
        stage.put(places=found)
    faults = [
        f"{place}: {one['next'].get('failed')}"
        for place, one in found.items()
        if "note" in one["largest"]
    ]
    if faults:
        raise AssertionError(f"nothing trained: {'; '.join(faults)}")


def options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--folder", default=tempfile.gettempdir(), help="on the drive that is swapped to"
    )
    made.add_argument(
        "--layers", type=int, help="one model of so many layers, with its states in --place"
    )
    made.add_argument("--place", choices=PLACES, default="none")
    made.add_argument("--trace", help="write a Chrome trace of a step there")


def one_model() -> None:
    """Trains one model and prints its figures, without a record."""
    made = parser("largest", __doc__)
    options(made)
    args = made.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    device = torch.device("cuda:0" if args.device == "cuda" else "cpu")
    print(
        LAST
        + json.dumps(trained(args.layers, args.place, args.folder, device, args.small, args.trace))
    )


if __name__ == "__main__":
    if "--layers" in sys.argv:
        one_model()
    else:
        main("largest", run, options)
