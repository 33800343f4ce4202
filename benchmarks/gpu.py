"""threed on one GPU in bf16: right to bf16's precision, tokens/s and model FLOPs utilisation for a few sizes.

    python benchmarks/gpu.py                   # needs one CUDA device; without one it says so and exits 0
    python benchmarks/gpu.py --sizes small     # one size

Written without a GPU at hand: no figure of it has been measured yet. The check compares losses of a small model with
the same training on the CPU in fp32; the timing feeds random tokens, which cost what real ones do.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import reference
from benchmarks.engines import make_trainer, renamed
from benchmarks.reference import GPTConfig
from threed.engine import Engine
from threed.topology import Topology

# name: shapes, sequences in a step, sequences in a micro-batch
SIZES = {
    "small": (GPTConfig(12, 768, 12, 1024, 50304), 32, 16),
    "medium": (GPTConfig(24, 1024, 16, 1024, 50304), 16, 8),
    "xl": (GPTConfig(48, 1600, 25, 1024, 50304), 8, 4),
}
# Dense bf16 tensor-core peaks in TFLOP/s, from the vendor's data sheets.
PEAK = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10G": 70.0, "4090": 165.0}
TOLERANCE = 0.02  # relative, on the loss of 5 steps: bf16 keeps 8 bits


def trainer(config: GPTConfig, device: str, dtype: str, batch: int, micro: int) -> Engine:
    """threed alone on a device."""
    settings = {
        "precision": {"dtype": dtype},
        "train": {"global_batch": batch, "micro_batch": micro, "grad_clip": 1.0},
    }
    return make_trainer(config, Topology(device=torch.device(device)), settings)


def check() -> dict[str, Any]:
    """The largest relative difference of the losses of 5 steps, GPU bf16 against CPU fp32; fails above TOLERANCE."""
    config = GPTConfig(4, 256, 4, 128, 1024)
    losses = []
    for device, dtype in (("cpu", "fp32"), ("cuda:0", "bf16")):
        engine = trainer(config, device, dtype, batch=8, micro=4)
        engine.load_full_state_dict(renamed(reference.initial_weights(config), config.n_head))
        steps = [engine.step({"tokens": x, "labels": y}) for x, y in reference.batches(config, 5, 8)]
        losses.append([metrics.loss for metrics in steps])
    difference = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    if difference > TOLERANCE:
        raise SystemExit(f"bf16 on the GPU differs from fp32 on the CPU by {difference:.3f}: {losses}")
    return {"check": "losses against CPU fp32", "largest_difference": difference}


def measure(name: str, steps: int) -> dict[str, Any]:
    """Tokens/s, MFU and peak memory of one size."""
    config, batch, micro = SIZES[name]
    engine = trainer(config, "cuda:0", "bf16", batch, micro)
    ids = torch.randint(config.vocab, (batch, config.seq_len + 1), device="cuda")
    data = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    seconds = []
    for number in range(steps + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.step(data)
        torch.cuda.synchronize()
        if number >= 3:
            seconds.append(time.perf_counter() - begin)
    rate = batch * config.seq_len / statistics.median(seconds)
    gpu = torch.cuda.get_device_name()
    peak = next((tflops for key, tflops in PEAK.items() if key in gpu), None)
    return {
        "size": name, "gpu": gpu, "parameters": config.parameters, "tokens_per_s": rate,
        "tflops": rate * config.flops_per_token() / 1e12,
        "mfu": rate * config.flops_per_token() / 1e12 / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return
    print(json.dumps(check()))
    for name in args.sizes:
        gc.collect()  # an engine and its parameters refer to each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps(measure(name, args.steps)), flush=True)


if __name__ == "__main__":
    main()
