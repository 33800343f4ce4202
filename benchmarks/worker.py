"""One rank of a measurement; `benchmarks/run.py` starts it with torchrun.

    torchrun --nproc-per-node 2 -m benchmarks.worker --engines threed_tp              # one engine: memory and bytes
    torchrun --nproc-per-node 2 -m benchmarks.worker --engines ddp fsdp2 threed_zero3 # several engines in turn: time

Rank 0 prints one line of JSON. Several engines train in turn in one process group, a block of steps
each; every round begins with another engine. The time of a step is that of its slowest rank, and
its CPU time is that of all threads of all ranks. A step counts only if other processes used less
than `--quiet` cores during it. A block with too few such steps is repeated.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import host, memory, reference
from benchmarks.engines import ENGINES, Engine
from threed.ops import matmul

# (seconds, cores that other processes used, CPU seconds of all ranks, seconds after the last backward if --settle)
Step = tuple[float, float, float, float]
Batch = tuple[Tensor, Tensor]


def gather(value: Any) -> list[Any]:
    """Returns every rank's value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def load(name: str) -> None:
    """Imports the packages that an engine needs, so that they do not count as its memory."""
    getattr(ENGINES[name], "load", lambda: None)()


def warm(engine: Engine, batches: list[Batch]) -> list[float]:
    """Runs the batches; returns the loss of each, the mean over the ranks that have one."""
    losses = []
    for batch in batches:
        loss = engine.step(*batch)
        mine = float(loss) if loss is not None and dist.get_rank() in engine.loss_ranks else None
        losses.append(statistics.mean(value for value in gather(mine) if value is not None))
    engine.finish()
    return losses


def timed(engine: Engine, batches: list[Batch], settle: bool = False) -> list[Step]:
    """Runs the batches and returns the steps.

    Ranks start together, and then run without further waits, as in training. With `settle`, each
    step is finished before the next.
    """
    dist.barrier()
    updating, stamps = 0.0, [(*host.stamp(), 0.0)]
    for number, (x, y) in enumerate(batches, 1):
        engine.step(x, y)
        returned = time.perf_counter()
        if settle or number == len(batches):
            engine.finish()
        updating += getattr(engine, "update_s", 0.0) + time.perf_counter() - returned
        stamps.append((*host.stamp(), updating))
    spent = [
        [b - a for a, b in zip(old, new, strict=True)] for old, new in itertools.pairwise(stamps)
    ]
    steps = []
    for ranks in zip(*gather(spent), strict=True):
        walls, own, everybody, updates = zip(*ranks, strict=True)
        steps.append((max(walls), (everybody[0] - sum(own)) / walls[0], sum(own), max(updates)))
    return steps


def meet_when_quiet(cores: float, end: float) -> bool:
    """Waits on all ranks until the machine is idle.

    Returns:
        Whether this was before `end`, by rank 0's clock.
    """
    if dist.get_rank() == 0:
        host.wait_until_quiet(cores, end)
    return bool(gather(time.monotonic() < end)[0])


def median_ms(steps: list[Step], field: int = 0) -> float:
    """Returns the median of one field of the steps, in milliseconds."""
    return 1e3 * statistics.median(step[field] for step in steps)


def run_one(args: argparse.Namespace, config: reference.GPTConfig) -> dict[str, Any]:
    """Returns the memory and the bytes of one engine."""
    (name,) = args.engines
    load(name)
    gc.collect()
    base = host.resident_mib()
    host.reset_peak()
    engine = ENGINES[name](config, args)
    built = host.peak_mib() - base
    batches = reference.batches(config, args.warmup + args.steps, args.batch)
    losses = warm(engine, batches[: args.warmup])
    gc.collect()
    host.reset_peak()
    meet_when_quiet(args.quiet, time.monotonic() + args.patience)
    counted, sent, moved = getattr(engine, "traffic", {}), host.loopback_bytes(), host.drive_bytes()
    steps = timed(engine, batches[args.warmup :], args.settle)
    swapped = [
        (now - before) / len(steps) / 2**20
        for before, now in zip(moved, host.drive_bytes(), strict=True)
    ]
    dist.barrier()
    per_step = (host.loopback_bytes() - sent) / len(steps)
    mine = {
        axis: (now - counted.get(axis, 0)) / len(steps)
        for axis, now in getattr(engine, "traffic", {}).items()
    }
    peak, traffic = host.peak_mib() - base, gather(mine)
    live = memory.live_mib()
    live_peak = memory.peak_mib(lambda: (engine.step(*batches[-1]), engine.finish()))
    return {
        "losses": losses, "step_ms": median_ms(steps), "cpu_ms": median_ms(steps, 2), "loopback_mib": per_step / 2**20,
        "counted_mib": {axis: sum(row.get(axis, 0) for row in traffic) / 2**20 for axis in traffic[0]},
        "base_rss_mib": gather(base), "build_mib": gather(built), "peak_mib": gather(peak),
        "live_mib": gather(live), "live_peak_mib": gather(live_peak),
        "drive_mib": [sum(ranks) for ranks in zip(*gather(swapped), strict=True)],  # [read, written]
    }  # fmt: skip


def block(
    engine: Engine, batches: list[Batch], args: argparse.Namespace, end: float
) -> list[Step] | None:
    """Returns the undisturbed steps of a block, in which at least half are undisturbed.

    Returns None if there is no such block before `end`.
    """
    while True:
        steps = [step for step in timed(engine, batches, args.settle) if step[1] <= args.quiet]
        if len(steps) >= (len(batches) + 1) // 2:
            return steps
        if not meet_when_quiet(args.quiet, end):
            return None


def run_rounds(
    engines: dict[str, Engine], batches: list[Batch], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns each engine's steps in each round, by name.

    Raises:
        RuntimeError: if the time is over before the first round is complete.
    """
    names, end = list(engines), time.monotonic() + args.patience
    rounds: list[dict[str, Any]] = []
    meet_when_quiet(args.quiet, end)
    while len(rounds) < args.rounds:
        first = len(rounds) % len(names)
        order = names[first:] + names[:first]
        found: dict[str, Any] = {}
        for name in order:
            found[name] = block(engines[name], batches, args, end)
            if found[name] is None:
                if not rounds:
                    raise RuntimeError(
                        "disturbed: other processes use the cores; wait, or raise --quiet or --patience"
                    )
                return rounds
        rounds.append(found)
    return rounds


def run_several(args: argparse.Namespace, config: reference.GPTConfig) -> dict[str, Any]:
    """Runs engines in turn in one process group.

    Returns each engine's speed and CPU time, and their ratios to those of the first, by round.
    """
    engines: dict[str, Engine] = {}
    for name in args.engines:
        load(name)
        engines[name] = ENGINES[name](config, args)
    batches = reference.batches(config, args.warmup + args.steps, args.batch)
    losses = {name: warm(engine, batches[: args.warmup]) for name, engine in engines.items()}
    gc.collect()
    gc.freeze()  # so that garbage collections of the running engine do not visit objects of other engines
    rounds = run_rounds(engines, batches[args.warmup :], args)
    results = {name: summary(name, args, config, rounds, losses) for name in args.engines}
    tokens = args.batch * config.seq_len
    for name, engine in engines.items():
        if (expected := getattr(engine, "expected", None)) is not None:
            results[name] |= expected()
            results[name]["bound_tokens_per_s"] = tokens / results[name]["bound_s"]
    return {"rounds": len(rounds), "results": results}


def summary(
    name: str,
    args: argparse.Namespace,
    config: reference.GPTConfig,
    rounds: list[dict[str, Any]],
    losses: Any,
) -> dict[str, Any]:
    """Returns one engine's figures, and its ratios to the first engine.

    There are ratios of speeds and of CPU times.
    """
    first, tokens = args.engines[0], args.batch * config.seq_len
    mine = [step for found in rounds for step in found[name]]
    speed = [median_ms(found[first]) / median_ms(found[name]) for found in rounds]
    cpu = [median_ms(found[name], 2) / median_ms(found[first], 2) for found in rounds]
    return {
        **(update_of(name, first, rounds) if args.settle else {}),
        "step_ms": median_ms(mine), "tokens_per_s": 1e3 * tokens / median_ms(mine),
        "cpu_s_per_token": median_ms(mine, 2) / 1e3 / tokens,
        "round_ms": [median_ms(found[name]) for found in rounds],
        "round_cpu_ms": [median_ms(found[name], 2) for found in rounds],
        "speed": statistics.median(speed), "speed_interval": bootstrap(speed),
        "cpu": statistics.median(cpu), "cpu_interval": bootstrap(cpu),
        "losses": losses[name], "loss_difference": largest_difference(losses[first], losses[name]),
    }  # fmt: skip


def update_of(name: str, first: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the seconds of a step after its last backward.

    Also returns how many times as fast this part is as the first engine's.
    """
    faster = [median_ms(found[first], 3) / median_ms(found[name], 3) for found in rounds]
    return {
        "update_ms": median_ms([step for found in rounds for step in found[name]], 3),
        "round_update_ms": [median_ms(found[name], 3) for found in rounds],
        "update": statistics.median(faster), "update_interval": bootstrap(faster),
    }  # fmt: skip


def bootstrap(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of the median."""
    draw = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (draws, len(values)), generator=draw)
    medians = sorted(statistics.median(values[i] for i in row) for row in picks.tolist())
    return medians[draws * 25 // 1000], medians[draws * 975 // 1000 - 1]


def largest_difference(a: list[float], b: list[float]) -> float:
    """Returns the largest relative difference between two lists of losses."""
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def parse() -> argparse.Namespace:
    """Parses the worker's flags; `run.py` passes them on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", required=True, choices=sorted(ENGINES), metavar="ENGINE"
    )
    parser.add_argument(
        "--preset", choices=reference.PRESETS, default="small", help="shapes of the model"
    )
    parser.add_argument("--batch", type=int, default=8, help="global batch in sequences")
    parser.add_argument("--microbatches", type=int, default=4, help="of a pipeline")
    parser.add_argument(
        "--warmup", type=int, default=6, help="steps before timing, whose losses are compared"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps a block")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--patience",
        type=float,
        default=900,
        help="seconds after which no disturbed block is repeated",
    )
    parser.add_argument(
        "--quiet", type=float, default=0.12, help="cores that other processes may use during a step"
    )
    parser.add_argument(
        "--torch-matmul", action="store_true", help="threed multiplies as peers do, never by oneDNN"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument(
        "--settle",
        action="store_true",
        help="each step waits for all that it began, also gathers and writes",
    )
    parser.add_argument("--folder", help="where engines swap to, on a drive")
    return parser.parse_args()


def main() -> None:
    args = parse()
    answer = os.dup(1)
    os.dup2(2, 1)  # some engines print to stdout, which must contain only the record
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    if args.torch_matmul:
        matmul._onednn_is_faster = lambda: False  # type: ignore[assignment]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # the timeout includes the time for which rank 0 waits for an idle machine
    dist.init_process_group("gloo", timeout=timedelta(minutes=5, seconds=args.patience))
    config = reference.PRESETS[args.preset]
    try:
        found = (run_several if len(args.engines) > 1 else run_one)(args, config)
    except Exception as error:
        traceback.print_exc()
        os.write(
            answer, (json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n").encode()
        )
        os._exit(1)
    run = {
        "world": dist.get_world_size(),
        "parameters": config.parameters,
        "torch": torch.__version__,
    }
    if dist.get_rank() == 0:
        os.write(answer, (json.dumps({**vars(args), **run, **found}) + "\n").encode())
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # without the exit handlers of engines, because no work is left


if __name__ == "__main__":
    main()
