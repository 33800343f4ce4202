"""One rank of a measurement; `benchmarks/run.py` starts it under torchrun. Rank 0 prints one line of JSON.

    torchrun --nproc-per-node 2 -m benchmarks.worker --engine threed_tp                  # one engine: memory, bytes
    torchrun --nproc-per-node 2 -m benchmarks.worker --engine dtensor_tp --vs threed_tp  # two: time, A B B A A B ...

A step's time is that of its slowest rank. It counts only if processes other than ours used less than `--quiet` cores
meanwhile; a round with too few such steps is repeated.
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

from benchmarks import host, reference
from benchmarks.engines import ENGINES, Engine
from threed.ops import matmul

Step = tuple[float, float, float]  # seconds, cores that other processes used, CPU seconds of all ranks


def gather(value: Any) -> list[Any]:
    """Every rank's value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def global_loss(engine: Engine, loss: Tensor | None) -> float:
    """The mean over the ranks that hold a loss."""
    mine = float(loss) if loss is not None and dist.get_rank() in engine.loss_ranks else None
    return statistics.mean(value for value in gather(mine) if value is not None)


def timed(engine: Engine, batches: list[tuple[Tensor, Tensor]]) -> list[Step]:
    """Runs the batches. Ranks start together and then run free, as in training."""
    dist.barrier()
    stamps = [host.stamp()]
    for number, (x, y) in enumerate(batches, 1):
        engine.step(x, y)
        if number == len(batches):
            engine.finish()
        stamps.append(host.stamp())
    spent = [[b - a for a, b in zip(old, new, strict=True)] for old, new in itertools.pairwise(stamps)]
    steps = []
    for ranks in zip(*gather(spent), strict=True):
        own = sum(cpu for _, cpu, _ in ranks)
        steps.append((max(wall for wall, _, _ in ranks), (ranks[0][2] - own) / ranks[0][0], own))
    return steps


def meet_when_quiet(cores: float, end: float) -> None:
    """All ranks go on together once nobody uses the cores."""
    if dist.get_rank() == 0:
        host.wait_until_quiet(cores, end)
    dist.barrier()


def quiet(steps: list[Step], limit: float) -> list[Step]:
    """The steps during which others kept quiet."""
    return [step for step in steps if step[1] <= limit]


def median_ms(steps: list[Step], field: int = 0) -> float:
    """The median of one field of the steps, in milliseconds."""
    return 1e3 * statistics.median(step[field] for step in steps)


def run_one(args: argparse.Namespace, config: reference.GPTConfig) -> dict[str, Any]:
    """Memory, bytes and losses of one engine."""
    engine = ENGINES[args.engine](config, args)
    batches = reference.batches(config, args.warmup + args.steps, args.batch)
    losses = [global_loss(engine, engine.step(*batch)) for batch in batches[: args.warmup]]
    engine.finish()
    gc.collect()
    host.reset_peak()
    meet_when_quiet(args.quiet, time.monotonic() + args.patience)
    counted, sent = getattr(engine, "traffic", {}), host.loopback_bytes()
    steps = timed(engine, batches[args.warmup :])
    dist.barrier()
    per_step = (host.loopback_bytes() - sent) / len(steps)
    mine = {axis: (now - counted.get(axis, 0)) / len(steps) for axis, now in getattr(engine, "traffic", {}).items()}
    rows = gather(mine)
    good = quiet(steps, args.quiet)
    return {
        "losses": losses,
        "step_ms": median_ms(good or steps),
        "cpu_ms": median_ms(good or steps, 2),
        "kept": f"{len(good)}/{len(steps)}",
        "loopback_mib": per_step / 2**20,
        "counted_mib": {axis: sum(row.get(axis, 0) for row in rows) / 2**20 for axis in rows[0]},
        "peak_rss_mib": [round(peak) for peak in gather(host.peak_mib())],
    }


def run_pair(args: argparse.Namespace, config: reference.GPTConfig) -> dict[str, Any]:
    """Two engines in turn in one process group; the ratio of their times by round."""
    names = [args.engine, args.vs]
    engines = [ENGINES[name](config, args) for name in names]
    batches = reference.batches(config, args.warmup + args.steps, args.batch)
    losses = [[global_loss(e, e.step(*batch)) for batch in batches[: args.warmup]] for e in engines]
    kept: list[list[Step]] = [[], []]
    ratios: list[float] = []
    ran, end = 0, time.monotonic() + args.patience
    while len(ratios) < args.rounds and (ran < args.rounds or time.monotonic() < end):
        meet_when_quiet(args.quiet, end)
        got: dict[int, list[Step]] = {}
        for k in (0, 1) if ran % 2 == 0 else (1, 0):
            got[k] = quiet(timed(engines[k], batches[args.warmup :]), args.quiet)
        ran += 1
        if min(map(len, got.values())) < (args.steps + 1) // 2:
            continue
        for k in got:
            kept[k] += got[k]
        ratios.append(median_ms(got[0]) / median_ms(got[1]))
    if not ratios:
        raise RuntimeError(f"{ran} rounds, all disturbed: other processes use the cores; wait, or raise --quiet")
    tokens = args.batch * config.seq_len
    return {
        "a": names[0], "b": names[1], "rounds": f"{len(ratios)}/{ran}", "ratios": ratios,
        "tokens_per_s": [1e3 * tokens / median_ms(steps) for steps in kept],
        "step_ms": [median_ms(steps) for steps in kept], "cpu_ms": [median_ms(steps, 2) for steps in kept],
        "b_over_a": statistics.median(ratios), "interval": bootstrap(ratios),
        "losses": [row[-1] for row in losses], "loss_difference": largest_difference(*losses),
    }  # fmt: skip


def bootstrap(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median."""
    draw = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (draws, len(values)), generator=draw)
    medians = sorted(statistics.median(values[i] for i in row) for row in picks.tolist())
    return medians[draws * 25 // 1000], medians[draws * 975 // 1000 - 1]


def largest_difference(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two loss curves."""
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def parse() -> argparse.Namespace:
    """The worker's own flags; `run.py` passes them on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, choices=sorted(ENGINES))
    parser.add_argument("--vs", choices=sorted(ENGINES), help="interleave with this engine")
    parser.add_argument("--batch", type=int, default=8, help="global batch in sequences")
    parser.add_argument("--microbatches", type=int, default=4, help="of a pipeline")
    parser.add_argument("--warmup", type=int, default=6, help="steps before timing, whose losses are compared")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--patience", type=float, default=600, help="seconds that may go into waiting and repeating")
    parser.add_argument("--quiet", type=float, default=0.12, help="cores that other processes may use during a step")
    parser.add_argument("--torch-matmul", action="store_true", help="threed multiplies as peers do, never by oneDNN")
    return parser.parse_args()


def main() -> None:
    args = parse()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.torch_matmul:
        matmul._onednn_is_faster = lambda: False  # type: ignore[assignment]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        result = (run_pair if args.vs else run_one)(args, reference.GPTConfig())
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        os._exit(1)
    if dist.get_rank() == 0:
        run = {"engine": args.engine, "world": dist.get_world_size(), "torch_matmul": args.torch_matmul}
        print(json.dumps({**run, "torch": torch.__version__, **result}))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # engines differ in how they leave; nothing is left to wait for


if __name__ == "__main__":
    main()
