"""Measures threed on one GPU in bf16: losses, tokens/s and utilization of three models.

    python -m benchmarks.gpu_stages.sizes --sizes small     # one of them

The losses of a small model are compared with the same training in fp32 on the CPU. The timed models
train on random tokens, which take as long as real ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks import reference
from benchmarks.gpu_stages.record import NOT_MEASURED
from benchmarks.gpu_stages.stage import Stage, main
from benchmarks.gpu_stages.step import free, peak_of
from benchmarks.reference import GPTConfig
from benchmarks.trainer import make_trainer, renamed
from threed.distributed.topology import Topology
from threed.engine import Engine

# name -> (shapes, sequences per step, sequences per micro-batch)
SIZES = {
    "small": (GPTConfig(12, 768, 12, 1024, 50304), 32, 16),
    "medium": (GPTConfig(24, 1024, 16, 1024, 50304), 16, 8),
    "xl": (GPTConfig(48, 1600, 25, 1024, 50304), 8, 4),
}
TINY = (GPTConfig(2, 64, 4, 64, 512), 4, 2)
TOLERANCE = 0.02  # relative, for the losses of 5 steps: bf16 has 8 bits


def trainer(config: GPTConfig, device: torch.device, dtype: str, batch: int, micro: int) -> Engine:
    """Returns threed's engine on one device."""
    settings = {
        "precision": {"dtype": dtype},
        "train": {"global_batch": batch, "micro_batch": micro, "grad_clip": 1.0},
    }
    return make_trainer(config, Topology(device=device), settings)


def check(stage: Stage) -> float:
    """Returns the largest relative difference of the losses of 5 steps.

    The device trains in bf16, the CPU in fp32.
    """
    config = TINY[0] if stage.small else GPTConfig(4, 256, 4, 128, 1024)
    losses = []
    for device, dtype in ((torch.device("cpu"), "fp32"), (stage.device, "bf16")):
        engine = trainer(config, device, dtype, batch=8, micro=4)
        engine.load_full_state_dict(renamed(reference.initial_weights(config), config.n_head))
        steps = [
            engine.step({"tokens": x, "labels": y}) for x, y in reference.batches(config, 5, 8)
        ]
        losses.append([metrics.loss for metrics in steps])
    difference = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    if not difference <= TOLERANCE:
        raise AssertionError(
            f"bf16 on the device differs from fp32 on the CPU by {difference:.3f}: {losses}"
        )
    return difference


def measure(stage: Stage, config: GPTConfig, batch: int, micro: int) -> dict[str, Any]:
    """Returns the tokens/s, utilization and peak memory of one model."""
    free()
    if stage.cuda:
        torch.cuda.reset_peak_memory_stats()
    engine = trainer(config, stage.device, "bf16", batch, micro)
    ids = torch.randint(config.vocab, (batch, config.seq_len + 1), device=stage.device)
    data = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    seconds = []
    warm_up, timed = (1, 2) if stage.small else (3, 10)
    for number in range(warm_up + timed):
        wait(stage)
        begin = time.perf_counter()
        engine.step(data)
        wait(stage)
        if number >= warm_up:
            seconds.append(time.perf_counter() - begin)
    rate, peak = batch * config.seq_len / statistics.median(seconds), peak_of(stage)
    tflops = rate * config.flops_per_token() / 1e12
    return {
        "parameters": config.parameters, "tokens_per_s": rate, "low_s": min(seconds), "high_s": max(seconds),
        "tflops": tflops, "mfu": tflops / peak if peak else NOT_MEASURED,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if stage.cuda else NOT_MEASURED,
    }  # fmt: skip


def wait(stage: Stage) -> None:
    """Waits until the device has finished its work."""
    if stage.cuda:
        torch.cuda.synchronize()


def run(stage: Stage) -> None:
    stage.put(difference_from_fp32=check(stage))
    found: dict[str, Any] = {}
    for name in ("small",) if stage.small else stage.args.sizes:
        if stage.has_time(30):
            found[name] = measure(stage, *(TINY if stage.small else SIZES[name]))
        else:
            found[name] = {"note": f"{NOT_MEASURED}: no time"}
        stage.put(sizes=found)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))


if __name__ == "__main__":
    main("sizes", run, options)
