"""Measures the gain of a partition by measured times, for a model with one slow layer.

    python benchmarks/partition.py                        # 2 ranks, two minutes on an idle machine
    python benchmarks/partition.py --blocks 10 --slow 7   # another model
    python benchmarks/partition.py --nap 20 --quiet 2     # on a busy machine: blocks sleep instead of computing

One block takes three times as long as its FLOPs suggest: it does its work three times, which the
count of FLOPs does not see. Engines with the partitions uniform, balanced and measured train in
turn in one process group, in rounds of blocks of steps as in `benchmarks/worker.py`. A gain is the
median over the rounds, and is printed next to the predicted one. The prediction is for forwards and
backwards, so these are timed as well as full steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.worker import block, bootstrap, gather, median_ms, meet_when_quiet  # noqa: E402
from threed.config import Config  # noqa: E402
from threed.config.resolution import resolve  # noqa: E402
from threed.core.device import processor  # noqa: E402
from threed.distributed.topology import Topology  # noqa: E402
from threed.engine import Engine as Trainer  # noqa: E402
from threed.layers import MicroBatch, Slicing  # noqa: E402
from threed.models import Decoder  # noqa: E402

CUTS = ("uniform", "balanced", "measured")
COLUMNS = (
    "cut", "layers", "step ms", "passes ms", "predicted gain", "measured, passes", "95 %", "off by, points",
    "measured, steps", "95 %",
)  # fmt: skip
TIMES = 3  # factor by which the slow block is slower than its FLOPs suggest
VOCAB, SEQ, WIDTH = 1024, 256, (256, 32)  # width of a model that computes, and of one that sleeps


class Nap(torch.autograd.Function):
    """The identity; it sleeps in the forward, and twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(0 if x.is_meta else seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(0 if dy.is_meta else 2 * ctx.seconds)
        return dy, None


class Repeated(nn.Module):
    """A block that does its work several times.

    Its output is the mean of the equal results, so the model does not change.
    """

    def __init__(self, block: nn.Module, times: int, nap: float) -> None:
        super().__init__()
        self.block, self.name, self.times, self.nap = block, block.name, times, nap

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        outputs = [self.once(x, micro) for _ in range(1 if x.is_meta else self.times)]
        return sum(outputs[1:], outputs[0]) / len(outputs)

    def once(self, x: Tensor, micro: MicroBatch) -> Tensor:
        y: Tensor = self.block(x, micro)
        return Nap.apply(y, self.nap) if self.nap else y


class OneSlow(Decoder):
    """A decoder with one slow block.

    Args:
        nap: seconds that every block sleeps.
    """

    slow, nap = 0, 0.0

    def layers(self) -> list[nn.Module]:
        first, *blocks, last = super().layers()
        times = [TIMES if number == self.slow else 1 for number in range(len(blocks))]
        return [
            first,
            *(Repeated(block, n, self.nap) for block, n in zip(blocks, times, strict=True)),
            last,
        ]


class Engine:
    """An engine with one partition, for `benchmarks.worker`.

    `update_s` is the part of a step that is neither forward nor backward.
    """

    def __init__(self, cut: str, args: argparse.Namespace, topology: Topology) -> None:
        config = Config.model_validate({
            "parallel": {"pp": 2, "partition": cut},
            "model": {"layers": args.blocks, "hidden": WIDTH[bool(args.nap)], "heads": 8, "seq": SEQ, "tied": False},
            "train": {"global_batch": args.microbatches, "micro_batch": 1},
        })  # fmt: skip
        config = resolve(config, VOCAB, topology.world)
        model = OneSlow(config.model, Slicing(topology.axis("tp")))
        model.slow, model.nap = args.slow, args.nap / 1e3
        self.trainer = Trainer(model, topology, config)
        self.loss_ranks, self.passes_s = [1], list[float]()

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        metrics = self.trainer.step({"tokens": x, "labels": y})
        self.passes_s.append(metrics.seconds["fwd_bwd_s"])
        return None

    def finish(self) -> None:
        self.trainer.optimizer.wait()


def work(args: argparse.Namespace) -> dict[str, Any] | None:
    """Runs on every rank: trains the three engines in turn; returns the record on rank 0."""
    torch.set_num_threads(1)
    # the timeout includes the time for which rank 0 waits for an idle machine
    dist.init_process_group("gloo", timeout=timedelta(minutes=5, seconds=args.patience))
    topology = Topology(pp=2)
    engines = {cut: Engine(cut, args, topology) for cut in CUTS}
    draw = torch.Generator().manual_seed(0)
    batches = [
        tuple(torch.randint(VOCAB, (2, args.microbatches, SEQ), generator=draw))
        for _ in range(args.steps)
    ]
    for engine in engines.values():
        for x, y in batches:
            engine.step(x, y)
    end, rounds = time.monotonic() + args.patience, list[dict[str, Any]]()
    meet_when_quiet(args.quiet, end)
    while len(rounds) < args.rounds:
        order = CUTS[len(rounds) % 3 :] + CUTS[: len(rounds) % 3]
        found = {cut: measured(engines[cut], batches, args, end) for cut in order}
        if None in found.values():
            break
        rounds.append(found)
    if not rounds:
        raise RuntimeError(
            "disturbed: other processes use the cores; wait, or raise --quiet or --patience"
        )
    division = engines["measured"].trainer.blueprint.pipeline.division
    if dist.get_rank() > 0 or division is None:
        return None
    summaries = {cut: summary(cut, rounds, division.gains) for cut in CUTS}
    counts = {
        cut: [len(part) for part in engines[cut].trainer.blueprint.pipeline.layout.ranges]
        for cut in CUTS
    }
    machine = {
        "processor": processor(topology.device),
        "torch": torch.__version__,
        "rounds": len(rounds),
    }
    return {
        **machine,
        "text": division.text(),
        "seconds": division.seconds,
        "layers": counts,
        "cuts": summaries,
    }


def measured(
    engine: Engine, batches: Any, args: argparse.Namespace, end: float
) -> tuple[float, float] | None:
    """Runs a block of steps; returns median milliseconds of a step, and of forwards and backwards.

    Returns None if the machine was not idle before `end`.
    """
    steps = block(engine, batches, args, end)
    if steps is None:
        return None
    passes = [max(ranks) for ranks in zip(*gather(engine.passes_s[-len(batches) :]), strict=True)]
    return median_ms(steps), 1e3 * statistics.median(passes)


def summary(cut: str, rounds: list[dict[str, Any]], predicted: Any) -> dict[str, Any]:
    """Returns the speed of the measured partition divided by that of another one.

    There is a ratio for full steps and one for forwards and backwards, each with a 95 % interval.
    """
    ratios = [[found[cut][part] / found["measured"][part] for found in rounds] for part in range(2)]
    return {
        "step_ms": statistics.median(found[cut][0] for found in rounds),
        "passes_ms": statistics.median(found[cut][1] for found in rounds),
        "predicted": predicted.get(cut, 1.0),
        "passes": statistics.median(ratios[1]), "passes_interval": bootstrap(ratios[1]),
        "step": statistics.median(ratios[0]), "step_interval": bootstrap(ratios[0]),
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """Returns the record as Markdown."""
    lines = [
        f"{record['processor']}, torch {record['torch']}, {record['rounds']} rounds; {record['text']}", "",
        f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|",
    ]  # fmt: skip
    for cut, found in record["cuts"].items():
        ranges = ["{:.3f}–{:.3f}".format(*found[f"{part}_interval"]) for part in ("passes", "step")]
        lines.append(
            f"| {cut} | {record['layers'][cut]} | {found['step_ms']:.0f} | {found['passes_ms']:.0f} "
            f"| {found['predicted']:.3f} | **{found['passes']:.3f}** | {ranges[0]} "
            f"| {100 * (found['passes'] - found['predicted']):+.1f} | {found['step']:.3f} | {ranges[1]} |"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--slow", type=int, default=0, help="the number of the slow block")
    parser.add_argument(
        "--nap", type=float, default=0.0, help="milliseconds that a block's forward sleeps"
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a block")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--quiet", type=float, default=0.12, help="cores that other processes may use during a step"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=900,
        help="seconds after which nothing disturbed is repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.set_defaults(settle=True)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        record = work(args)
        if record is not None:
            print(json.dumps(record), flush=True)
        dist.barrier()
        os._exit(0)
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, __file__, *sys.argv[1:]]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    records = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not records:
        sys.exit("the ranks said nothing")
    print(records[-1] if args.json else table(json.loads(records[-1])))


if __name__ == "__main__":
    main()
