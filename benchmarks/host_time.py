"""Measures the host's time per step: threed and plain PyTorch, ZeRO-3 and FSDP2.

    python benchmarks/host_time.py                     # four engines in turn, in one process
    python benchmarks/host_time.py --profile threed    # a profile of one engine

The tensors are so small that computing on them takes no time, and torch's fake process group makes
collectives return at once. So the measured time is that of Python and torch's dispatcher per layer
and micro-batch. On a GPU it must be less than the time of the kernels. A step has a forward and a
backward of each micro-batch, and an update. Blocks of steps alternate; the ratio is the median over
the rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import reference
from benchmarks.engines import make_trainer
from benchmarks.peers import optimizers
from benchmarks.reference import GPTConfig
from threed.distributed.topology import Topology
from threed.ops import matmul

Step = Callable[[], Any]
RANKS = 8


def batch(config: GPTConfig, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels, [rows s]."""
    ids = torch.randint(config.vocab, (rows, config.seq_len + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain(config: GPTConfig, micros: int, shard: bool = False) -> Step:
    """Returns the step of plain PyTorch, which accumulates the gradients of micro-batches.

    With `shard`, it uses FSDP2, which reduces the gradients in every micro-batch.
    """
    model: Any = reference.build(config)
    if shard:
        mesh = init_device_mesh("cpu", (RANKS,))
        for module in (*model.blocks.values(), model):
            fully_shard(module, mesh=mesh)
    updates = optimizers(model.parameters())
    tokens, labels = batch(config, micros)

    def step() -> None:
        for x, y in zip(tokens.split(1), labels.split(1), strict=True):
            (reference.loss_of(model(x), y) / micros).backward()
        for optimizer in updates:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not shard)

    return step


def threed(config: GPTConfig, micros: int, stage: int, **run: Any) -> Step:
    """Returns the step of threed's engine.

    At stage 0 it accumulates full gradients; at stage 3 it reduces them in every micro-batch.
    """
    settings = {
        "train": {"global_batch": micros * RANKS, "micro_batch": 1, "grad_clip": 0.0},
        "zero": {"stage": stage, "resident": 0},
        "run": run,
    }
    trainer = make_trainer(config, Topology(), settings)
    tokens, labels = batch(config, micros)
    return lambda: trainer.step({"tokens": tokens, "labels": labels})


MAKERS: dict[str, Callable[[GPTConfig, int], Step]] = {
    "plain": plain,
    "threed": lambda config, micros: threed(config, micros, 0),
    "threed_compiled": lambda config, micros: threed(config, micros, 0, compile=True),
    "fsdp2": lambda config, micros: plain(config, micros, shard=True),
    "threed_zero3": lambda config, micros: threed(config, micros, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", choices=MAKERS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # switches oneDNN off: its call takes 30 µs on a CPU, which pays off only for large products
    matmul._by_onednn = lambda *_: False
    config = GPTConfig(args.layers, 32, 2, 8, 128)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    steps = {
        name: MAKERS[name](config, args.micro_batches)
        for name in ([args.profile] if args.profile else MAKERS)
    }
    for step in steps.values():
        for _ in range(5):
            step()
    if args.profile:
        profiler = cProfile.Profile()
        profiler.runcall(lambda: [steps[args.profile]() for _ in range(10)])
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        return
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(3):
                step()
            rounds[name].append((time.perf_counter() - begin) / 3)
    each = {
        name: 1e6 * statistics.median(times) / args.layers / args.micro_batches
        for name, times in rounds.items()
    }
    ratios = {
        f"{ours} / {peer}": statistics.median(
            a / b for a, b in zip(rounds[ours], rounds[peer], strict=True)
        )
        for ours, peer in (
            ("threed", "plain"),
            ("threed_compiled", "plain"),
            ("threed_zero3", "fsdp2"),
        )
    }
    print(
        json.dumps(
            {"us_a_layer_and_micro_batch": each, "ratios": ratios, "torch": torch.__version__}
        )
    )


if __name__ == "__main__":
    main()
