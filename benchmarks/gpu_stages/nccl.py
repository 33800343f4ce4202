"""Compares the losses of every kind of parallel training over NCCL with those of one GPU.

The kinds are tensor parallelism, data parallelism with ZeRO-0 to 3, pipelines, and with eight GPUs
all of them together. With one GPU the process group has one rank, and collectives still run. A
rehearsal uses gloo and two ranks on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import reference
from benchmarks.gpu_stages.stage import ROOT, Stage, main
from benchmarks.reference import GPTConfig
from benchmarks.trainer import make_trainer, renamed
from threed.distributed.topology import Topology

MODEL, BATCH, STEPS = GPTConfig(4, 256, 8, 128, 1024), 8, 5
TINY = GPTConfig(2, 64, 4, 64, 512)
# Relative tolerances of losses. In fp32, sums have another order, which Adam amplifies if gradients are nearly zero (hence
# its larger eps). bf16 has 8 bits.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}
EPS = 1e-5
REHEARSED = ("dp1 zero1", "dp2 zero3", "tp2")


def ways(world: int) -> dict[str, dict[str, int]]:
    """Returns the kinds of training on `world` ranks, by name.

    A kind consists of the sizes of the axes and the ZeRO stage.
    """
    alone = {"pp": 1, "tp": 1, "zero": 1}
    found = {f"dp{world} zero{stage}": {**alone, "zero": stage} for stage in range(4)}
    if world > 1:
        found[f"tp{world}"] = {**alone, "tp": world}
        found[f"pp{min(world, 4)}"] = {**alone, "pp": min(world, 4)}
    if world == 4:
        found["tp2 dp2 zero3"] = {**alone, "tp": 2, "zero": 3}
        found["pp2 tp2"] = {**alone, "tp": 2, "pp": 2}
    if world == 8:
        found["pp2 tp2 dp2 zero3"] = {"pp": 2, "tp": 2, "zero": 3}
    return found


def losses(config: GPTConfig, way: dict[str, int], dtype: str) -> list[float]:
    """Returns the losses of the first steps on the ranks of this world."""
    topology = Topology(pp=way["pp"], tp=way["tp"])
    settings = {
        "parallel": {"pp": way["pp"], "tp": way["tp"]}, "zero": {"stage": way["zero"]},
        "precision": {"dtype": dtype}, "optim": {"eps": EPS},
        "train": {"global_batch": BATCH, "micro_batch": 1, "grad_clip": 1.0},
    }  # fmt: skip
    engine = make_trainer(config, topology, settings)
    engine.load_full_state_dict(renamed(reference.initial_weights(config), config.n_head))
    share, found = topology.axis("dp").index, []
    for x, y in reference.batches(config, STEPS, BATCH):
        part = {"tokens": x.chunk(topology.dp)[share], "labels": y.chunk(topology.dp)[share]}
        found.append(engine.step(part).loss)
    return found


def collectives(device: torch.device) -> str:
    """Tests all-reduce, all-gather and reduce-scatter; returns "right" or an error message."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.full((world * 4,), float(rank + 1), device=device)
    total = float(world * (world + 1) // 2)
    summed, gathered, part = mine.clone(), mine.new_empty(world * 4 * world), mine.new_empty(4)
    dist.all_reduce(summed)
    dist.all_gather_into_tensor(gathered, mine)
    dist.reduce_scatter_tensor(part, mine)
    right = bool((summed == total).all()) and bool((part == total).all())
    right = right and gathered.view(world, -1)[:, 0].tolist() == [
        float(n + 1) for n in range(world)
    ]
    return (
        "right"
        if right
        else f"wrong: {summed.tolist()}, {part.tolist()}, {gathered.tolist()}"[:300]
    )


def rank(args: argparse.Namespace) -> None:
    """Runs one rank of a world; rank 0 writes the results of all kinds of training."""
    cuda = args.device == "cuda"
    number = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(args.meet, world), rank=number, world_size=world, timeout=timedelta(minutes=2),
        device_id=device if cuda else None,
    )  # fmt: skip
    found: dict[str, Any] = {"collectives": collectives(device), "backend": backend}
    config = TINY if args.small else MODEL
    for dtype in ("fp32",) if args.small else TOLERANCE:
        for name, way in ways(world).items():
            if not args.small or name in REHEARSED:
                found[f"{name} {dtype}"] = losses(config, way, dtype)
    if number == 0:
        Path(args.answer).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def world_of(stage: Stage, size: int) -> dict[str, Any]:
    """Returns the results of a world of `size` ranks on this machine."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        own = [
            "--answer",
            f"{folder}/answer",
            "--meet",
            f"{folder}/meet",
            "--device",
            stage.device.type,
        ]
        command = [sys.executable, "-m", __spec__.name, *own, *(["--small"] if stage.small else [])]
        known = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size)}
        logs = [files.enter_context(open(f"{folder}/{n}.log", "w+")) for n in range(size)]
        ranks = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**known, "RANK": str(n), "LOCAL_RANK": str(n)},
                stdout=log,
                stderr=log,
            )
            for n, log in enumerate(logs)
        ]
        end = time.monotonic() + stage.time_left() - 5
        while (
            time.monotonic() < end
            and any(r.poll() is None for r in ranks)
            and not any(r.poll() for r in ranks)
        ):
            time.sleep(0.1)
        codes = [process.poll() for process in ranks]
        for process in ranks:
            process.kill()
            process.wait()
        if any(codes) or None in codes:
            texts = [Path(f"{folder}/{n}.log").read_text()[-6000:] for n in range(size)]
            print("\n".join(texts))
            said = next(
                (first_error(text) for code, text in zip(codes, texts, strict=True) if code),
                "no time left",
            )
            raise RuntimeError(f"ranks of {size} ended with {codes}: {said}")
        found: dict[str, Any] = json.loads(Path(f"{folder}/answer").read_text())
        return found


def first_error(text: str) -> str:
    """Returns the first line that names an exception."""
    lines = [line for line in text.splitlines() if "Error" in line]
    return (lines or text.strip().splitlines()[-1:] or [""])[0][-300:]


def run(stage: Stage) -> None:
    count = torch.cuda.device_count() if stage.cuda else 2
    size = max(n for n in (1, 2, 4, 8) if n <= count)
    stage.put(gpus=count if stage.cuda else 0, ranks=size)
    alone = world_of(stage, 1)
    truth = {dtype: alone.get(f"dp1 zero1 {dtype}", []) for dtype in TOLERANCE}
    worlds = {1: alone}
    stage.put(note="one GPU only" if size == 1 else "")
    if size > 1:
        worlds[size] = world_of(stage, size)
    table, faults = {}, []
    for ranks, found in worlds.items():
        backend, said = found.pop("backend"), found.pop("collectives")
        stage.put(**{f"collectives_of_{ranks}": f"{backend}: {said}"})
        faults += [f"collectives of {ranks}: {said}"] if said != "right" else []
        for name, got in found.items():
            dtype = name.split()[-1]
            off = max(abs(a - b) / abs(b) for a, b in zip(got, truth[dtype], strict=True))
            table[name] = {
                "ranks": ranks,
                "losses": got,
                "difference": off,
                "same": off <= TOLERANCE[dtype],
            }
            faults += (
                [] if off <= TOLERANCE[dtype] else [f"{name} differs from one GPU by {off:.2e}"]
            )
    stage.put(ways=table)
    if faults:
        raise AssertionError("; ".join(faults))


def rank_options() -> argparse.Namespace:
    """Parses the options that `world_of` passes to its ranks."""
    parser = argparse.ArgumentParser()
    for name in ("--answer", "--meet", "--device"):
        parser.add_argument(name)
    parser.add_argument("--small", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    if "--answer" in sys.argv:
        rank(rank_options())
    else:
        main("nccl", run)
