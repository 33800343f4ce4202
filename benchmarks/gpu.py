"""threed on one GPU in bf16: right to bf16's precision, tokens/s and model FLOPs utilisation for a few sizes.

    python benchmarks/gpu.py                   # needs one CUDA device; without one it says so and exits 0
    python benchmarks/gpu.py --sizes small     # one size
    python benchmarks/gpu.py --largest /nvme   # the largest model that trains resident, with host and with NVMe offload
    python benchmarks/gpu.py --layers 8 --place cpu --trace trace.json     # one of those, with a trace of its overlap

Written without a GPU at hand: no figure of it has been measured yet. The check compares losses of a small model with
the same training on the CPU in fp32; the timing feeds random tokens, which cost what real ones do.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
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


def offloaded(layers: int, place: str, folder: str, trace: str | None) -> dict[str, Any]:
    """A model of 4096 features and so many layers under ZeRO-3 with its states in a place: tokens/s, TFLOP/s, peak."""
    config = GPTConfig(layers, 4096, 32, 2048, 50304)
    where = {"offload_optimizer": place, "offload_params": place, "nvme_path": folder if place == "nvme" else None}
    settings = {
        "precision": {"dtype": "bf16", "grad_dtype": "bf16"}, "zero": {"stage": 3, **where},
        "recompute": {"mode": "full"}, "train": {"global_batch": 8, "micro_batch": 8, "grad_clip": 1.0},
    }  # fmt: skip
    engine = make_trainer(config, Topology(device=torch.device("cuda:0")), settings)
    ids = torch.randint(config.vocab, (8, config.seq_len + 1), device="cuda")
    data = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    engine.step(data)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(2):
        engine.step(data)
    torch.cuda.synchronize()
    rate = 2 * data["tokens"].numel() / (time.perf_counter() - begin)
    if trace is not None:
        with torch.profiler.profile() as profiler:
            engine.step(data)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(trace)
    return {
        "place": place, "layers": layers, "parameters": config.parameters, "tokens_per_s": rate,
        "tflops": rate * config.flops_per_token() / 1e12, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def largest(folder: str) -> None:
    """For each place, models of more and more layers, each in a process of its own, until one does not train."""
    for place in ("none", "cpu", "nvme"):
        for layers in (4, 8, 16, 24, 32, 40, 48, 64, 80):
            command = [sys.executable, __file__, "--layers", str(layers), "--place", place, "--largest", folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                why = done.stderr.strip().splitlines()[-1:] or [f"ended by {done.returncode}"]
                print(json.dumps({"place": place, "layers": layers, "failed": why[0][:300]}), flush=True)
                break
            print(done.stdout.strip().splitlines()[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--largest", metavar="FOLDER", help="find the largest models; FOLDER: on the drive")
    parser.add_argument("--layers", type=int, help="one model of so many layers, with its states in --place")
    parser.add_argument("--place", choices=["none", "cpu", "nvme"], default="none")
    parser.add_argument("--trace", help="write a Chrome trace of a step there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return
    if args.layers is not None:
        folder = args.largest or tempfile.gettempdir()
        print(json.dumps(offloaded(args.layers, args.place, folder, args.trace)))
        return
    if args.largest is not None:
        largest(args.largest)
        return
    print(json.dumps(check()))
    for name in args.sizes:
        gc.collect()  # an engine and its parameters refer to each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps(measure(name, args.steps)), flush=True)


if __name__ == "__main__":
    main()
