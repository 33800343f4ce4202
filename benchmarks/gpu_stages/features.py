"""Features of training on this GPU, one after another: losses against the same training in fp32 on the CPU.

Precisions, ZeRO-3, offload to the host and to a drive, recomputation, and every architecture; then a checkpoint that
is loaded again, and `threed train` as a user starts it, interrupted and resumed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stages.record import NOT_MEASURED
from benchmarks.gpu_stages.stage import Stage, main
from benchmarks.gpu_stages.step import free
from threed import models
from threed.config import Config, ConfigError
from threed.config.resolution import resolve
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import Slicing

SHAPES = {"layers": 4, "hidden": 256, "heads": 8, "seq": 128}
SMALL_SHAPES = {"layers": 2, "hidden": 64, "heads": 4, "seq": 32}
VOCAB, BATCH, MICRO, STEPS = 1024, 8, 2, 4
# Relative, of losses. fp32: sums in another order, and what Adam makes of them where gradients are nearly 0, hence its
# larger eps. bf16 keeps 8 bits, fp16 11.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.01}
EPS = 1e-5
DRIVE = "<drive>"  # replaced by a folder

# name -> settings, beside those of `settings_of`
FEATURES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": {"dtype": "fp32"}},
    "fp16": {"precision": {"dtype": "fp16"}},
    "bf16": {},
    "gradients in bf16": {"precision": {"grad_dtype": "bf16"}},
    "Lion": {"optim": {"name": "lion", "lr": 1e-4}},
    "SGD": {"optim": {"name": "sgd", "lr": 1e-2}},
    "ZeRO-0": {"zero": {"stage": 0}},
    "ZeRO-2": {"zero": {"stage": 2}},
    "ZeRO-3": {"zero": {"stage": 3}},
    "ZeRO-3, fp32": {"zero": {"stage": 3}, "precision": {"dtype": "fp32"}},
    "ZeRO-3, tiles": {"zero": {"stage": 3, "tile": 4}},
    "optimizer in host memory": {"zero": {"offload_optimizer": "cpu"}},
    "ZeRO-3 in host memory": {"zero": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}},
    "ZeRO-3 in host memory, fp32": {
        "zero": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
        "precision": {"dtype": "fp32"},
    },
    "ZeRO-3 in host memory, layer by layer": {
        "zero": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu", "order": "layer"},
    },
    "optimizer on the drive": {"zero": {"offload_optimizer": "nvme", "nvme_path": DRIVE}},
    "ZeRO-3 on the drive": {
        "zero": {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": DRIVE},
    },
    "selective recomputation": {"recompute": {"mode": "selective", "ops": ["attention", "activation", "norm"]}},
    "full recomputation": {"recompute": {"mode": "full"}},
    "inputs in host memory": {"recompute": {"mode": "full", "offload": "cpu"}},
    "inputs on the drive": {"recompute": {"mode": "full", "offload": "nvme"}, "zero": {"nvme_path": DRIVE}},
    "arena, chunks of the loss": {"recompute": {"mode": "full", "arena": True, "loss_chunks": 4}},
    "early updates": {
        "zero": {
            "stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": DRIVE, "order": "layer",
            "early_update": "true",
        },
        "train": {"grad_clip": 0.0},
    },
    "compiled": {"run": {"compile": True}},
}  # fmt: skip
SMALL_RUN = """--model.layers 2 --model.hidden 64 --model.heads 4 --model.seq 64 --train.steps 20 --checkpoint.every 10
    --log.every 5 --log.wandb off --train.sample-tokens 8"""
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")


def settings_of(more: dict[str, Any], drive: str, small: bool) -> dict[str, Any]:
    """Settings of a feature's training; `small` is for rehearsals."""
    found: dict[str, dict[str, Any]] = {
        "model": {"arch": "gpt", **(SMALL_SHAPES if small else SHAPES)}, "precision": {"dtype": "bf16"}, "zero": {"stage": 1},
        "optim": {"lr": 1e-3, "eps": EPS, "warmup": 0, "schedule": "constant"},
        "train": {"global_batch": BATCH, "micro_batch": MICRO, "grad_clip": 1.0},
    }  # fmt: skip
    for group, values in more.items():
        given = {key: drive if value == DRIVE else value for key, value in values.items()}
        found[group] = {**found.get(group, {}), **given}
    return found


def made(settings: dict[str, Any], device: torch.device) -> Engine:
    """An engine alone on a device; its initial weights depend on the seed only."""
    topology = Topology(device=device)
    full = resolve(Config.model_validate(settings), VOCAB, topology.world)
    slicing = Slicing(topology.axis("tp"), False, full.train.seed, full.zero.tile)
    return Engine(models.build(full.model, slicing), topology, full)


def losses(engine: Engine, device: torch.device, steps: int = STEPS) -> list[float]:
    """Losses of the first steps, on the same batches on every device."""
    draw, found = torch.Generator().manual_seed(7), []
    for _ in range(steps):
        ids = torch.randint(VOCAB, (BATCH, engine.config.model.seq + 1), generator=draw).to(device)
        batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        found.append(engine.step(batch).loss)
    return found


def truth_of(settings: dict[str, Any]) -> list[float]:
    """Losses of the same training in fp32 on the CPU, without memory features."""
    cpu = torch.device("cpu")
    plain = {key: settings[key] for key in ("model", "optim", "train")}
    return losses(made({**plain, "precision": {"dtype": "fp32"}}, cpu), cpu)


def compared(
    settings: dict[str, Any], stage: Stage, truths: dict[str, list[float]]
) -> dict[str, Any]:
    """The largest relative difference of a feature's losses from the CPU's, and whether it is small enough."""
    key = json.dumps([settings[name] for name in ("model", "optim", "train")], sort_keys=True)
    if key not in truths:
        truths[key] = truth_of(settings)
    free()
    got = losses(made(settings, stage.device), stage.device)
    off = max(abs(a - b) / abs(b) for a, b in zip(got, truths[key], strict=True))
    dtype = settings["precision"]["dtype"]
    return {"dtype": dtype, "difference": off, "same": off <= TOLERANCE[dtype], "losses": got}


def reloaded(stage: Stage, folder: str) -> dict[str, Any]:
    """Whether training goes on with the same losses after a checkpoint is saved and loaded by another engine."""
    settings = settings_of({}, folder, stage.small)
    engine = made(settings, stage.device)
    losses(engine, stage.device, 2)
    engine.save(Path(folder) / "saved")
    further = losses(engine, stage.device, 2)
    other = made(settings, stage.device)
    other.load(Path(folder) / "saved")
    again = losses(other, stage.device, 2)
    return {"dtype": "bf16", "difference": max(abs(a - b) for a, b in zip(further, again, strict=True)),
            "same": further == again, "losses": again}  # fmt: skip


def command(stage: Stage, folder: str) -> dict[str, Any]:
    """`threed train` with a checkpoint, and the same command again to more steps, which resumes."""
    run = str(Path(folder) / "run")
    flags = ["gpt", "--run.dir", run, *SMALL_RUN.split()]
    if stage.cuda:
        flags += ["--precision.dtype", "bf16"]
    seconds = []
    for more in (["--train.stop-after", "10"], []):
        began = time.monotonic()
        done = stage.run([sys.executable, "-m", "threed", "train", *flags, *more], 90)
        seconds.append(time.monotonic() - began)
        print(done.stdout[-4000:], done.stderr[-4000:], flush=True)
        if done.returncode:
            raise RuntimeError(
                f"exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
            )
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "train/loss" in line or "loss" in line]
    return {"dtype": "bf16", "difference": 0.0, "same": max(steps) == 20, "seconds": seconds}


def run(stage: Stage) -> None:
    found: dict[str, Any] = {}
    truths: dict[str, list[float]] = {}
    cases = [(name, {**more}) for name, more in FEATURES.items()]
    cases += [(arch, {"model": {"arch": arch}}) for arch in ARCHITECTURES]
    with tempfile.TemporaryDirectory(dir=stage.args.folder) as folder:
        works = [
            (
                name,
                lambda more=more: compared(settings_of(more, folder, stage.small), stage, truths),
            )
            for name, more in cases
        ]
        works += [
            ("checkpoint", lambda: reloaded(stage, folder)),
            ("threed train", lambda: command(stage, folder)),
        ]
        for name, work in works[:-2:8] + works[-2:] if stage.small else works:
            began = time.monotonic()
            found[name] = attempt(work, stage)
            found[name]["took_s"] = time.monotonic() - began
            print(name, found[name], flush=True)
            stage.put(features=found)
    wrong = [f"{name}: {one.get('wrong', one.get('difference'))}" for name, one in found.items()
             if "wrong" in one or not one.get("same", True)]  # fmt: skip
    if wrong:
        raise AssertionError("; ".join(wrong))


def attempt(work: Any, stage: Stage) -> dict[str, Any]:
    """What work finds; if it fails, why. The features after it go on."""
    if not stage.has_time(10):
        return {"note": f"{NOT_MEASURED}: no time"}
    try:
        return dict(work())
    except ConfigError as error:  # such as run.compile with an older torch
        return {"note": f"{NOT_MEASURED}: {str(error)[:300]}"}
    except Exception as error:
        traceback.print_exc()
        return {"wrong": f"{type(error).__name__}: {str(error)[:300]}"}


if __name__ == "__main__":
    main("features", run, lambda p: p.add_argument("--folder", help="for what goes to a drive"))
