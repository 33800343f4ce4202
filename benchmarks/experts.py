"""Compares a mixture of experts with that of transformers, on one process with the same weights.

    python benchmarks/experts.py                       # Qwen3's block, fp32, 1,024 tokens
    python benchmarks/experts.py --experts 64 --per-token 8 --dtype bf16
    python benchmarks/experts.py --ranks 2             # a model on 2 ranks: ep 2, ZeRO-3 and ZeRO-1

The implementations take turns, forward and backward together. The program prints median tokens per
second, and the ratio to the fastest implementation of transformers with its 95 % interval; with
`--ranks` that of a model's step to the step with ZeRO-3, and the bytes that a rank sends per step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.worker import bootstrap  # noqa: E402
from threed import models  # noqa: E402
from threed.config import Config  # noqa: E402
from threed.config.resolution import resolve  # noqa: E402
from threed.distributed.sharding import attach, spec_of  # noqa: E402
from threed.distributed.topology import Topology  # noqa: E402
from threed.engine import Engine  # noqa: E402
from threed.layers import MicroBatch, MixtureOfExperts, Slicing  # noqa: E402
from threed.testing.ranks import run_ranks  # noqa: E402


def theirs(args: argparse.Namespace, how: str) -> nn.Module:
    """Returns the block of transformers with one of its implementations of experts."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    config = modeling.Qwen3MoeConfig(
        hidden_size=args.hidden, moe_intermediate_size=args.ffn, num_experts=args.experts,
        num_experts_per_tok=args.per_token, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = how
    torch.manual_seed(0)
    block = modeling.Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(0.0, param.shape[-1] ** -0.5)
    return block.to(args.dtype)


def ours(args: argparse.Namespace, block: Any) -> MixtureOfExperts:
    """Returns the layer of threed with the weights of a block of transformers."""
    layer = MixtureOfExperts("mlp", args.hidden, args.ffn, args.experts, args.per_token, Slicing())
    values = {"gate_up": block.experts.gate_up_proj, "down": block.experts.down_proj}
    for name, value in values.items():
        param = getattr(layer, name)
        setattr(layer, name, attach(nn.Parameter(value.detach().clone()), spec_of(param)))
    weight = layer.router.weight
    layer.router.weight = attach(nn.Parameter(block.gate.weight.detach().clone()), spec_of(weight))
    return layer


def step(call: Callable[[Tensor], Tensor], params: list[Tensor], x: Tensor) -> Tensor:
    """Runs forward and backward; returns the output."""
    y = call(x)
    torch.autograd.grad(y, [x, *params], torch.ones_like(y))
    return y.detach()


def engine_of(args: argparse.Namespace, ranks: int, parallel: dict[str, int], zero: int) -> Any:
    """Returns an engine that trains a small Qwen3-MoE on this rank."""
    config = resolve(
        Config.model_validate({
            "parallel": parallel,
            "zero": {"stage": zero, "resident": 0},
            "model": {
                "arch": "qwen3_moe", "layers": 4, "hidden": args.hidden, "heads": 8, "kv_heads": 4,
                "ffn": args.ffn, "seq": 256, "vocab": 1024, "experts": args.experts,
                "experts_per_token": args.per_token, "expert_ffn": args.ffn,
            },
            "train": {"micro_batch": 2, "global_batch": 4 * ranks},
        }), 1024, ranks,
    )  # fmt: skip
    topology = Topology()
    slicing = Slicing.of(topology, config)
    return Engine(models.build(config.model, slicing), topology, config)


def steps_of_ranks(args: argparse.Namespace) -> dict[str, tuple[list[float], float]]:
    """Returns seconds of each step, and the GiB that this rank sends per step, by layout."""
    ranks = dist.get_world_size()
    layouts = {
        f"ep {ranks}, ZeRO-1": ({"ep": ranks}, 1), "ZeRO-3": ({}, 3), "ZeRO-1": ({}, 1)
    }  # fmt: skip
    engines = {name: engine_of(args, ranks, *layout) for name, layout in layouts.items()}
    found: dict[str, tuple[list[float], float]] = {name: ([], 0.0) for name in engines}
    for turn in range(args.rounds + 2):
        draw = torch.Generator().manual_seed(turn)
        tokens = torch.randint(1024, (4, 257), generator=draw)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            engine, before = engines[name], sum(engines[name].topology.traffic.values())
            dist.barrier()
            began = time.perf_counter()
            _ = engine.step(batch).loss
            seconds, _ = found[name]
            sent = sum(engine.topology.traffic.values()) - before
            if turn >= 2:
                seconds.append(time.perf_counter() - began)
            found[name] = (seconds, sent / 2**30)
    return found


def compare_layouts(args: argparse.Namespace) -> None:
    """Prints tokens per second of a model with expert ranks, with ZeRO-3, and with ZeRO-1."""
    found = run_ranks(args.ranks, steps_of_ranks, args)[0]
    base = found["ZeRO-3"][0]
    for name, (seconds, sent) in found.items():
        ratios = [a / b for a, b in zip(base, seconds, strict=True)]
        low, high = bootstrap(ratios)
        rate = 4 * 256 * args.ranks / statistics.median(seconds)
        print(
            f"{name:16} {rate:10,.0f} tokens/s   {statistics.median(ratios):.2f} of ZeRO-3, {low:.2f} to {high:.2f}"
            f"   {sent:.3f} GiB sent per step"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("hidden", 512), ("ffn", 256), ("experts", 32), ("per-token", 4), ("tokens", 1024), ("rounds", 15),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    if args.ranks > 1:
        compare_layouts(args)
        return
    args.dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    torch.set_num_threads(1)
    x = torch.randn(args.tokens, 1, args.hidden, dtype=args.dtype, requires_grad=True)
    blocks = {how: theirs(args, how) for how in ("eager", "grouped_mm")}
    layer, micro = ours(args, blocks["eager"]), MicroBatch(training=False)
    calls: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]] = {
        f"transformers {how}": (block, list(block.parameters())) for how, block in blocks.items()
    }
    calls["threed"] = (lambda x: layer(x, micro), list(layer.parameters()))
    wanted = step(*calls["transformers eager"], x)
    spent: dict[str, list[float]] = {}
    for turn in range(args.rounds + 2):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            y = step(*calls[name], x)
            if turn >= 2:
                spent.setdefault(name, []).append(time.perf_counter() - began)
            if args.dtype == torch.float32:  # in bf16, routers may choose differently
                torch.testing.assert_close(y, wanted, rtol=1e-3, atol=1e-3)
    best = min((n for n in spent if n != "threed"), key=lambda n: statistics.median(spent[n]))
    for name, seconds in spent.items():
        ratios = [a / b for a, b in zip(spent[best], seconds, strict=True)]
        low, high = bootstrap(ratios)
        rate = args.tokens / statistics.median(seconds)
        print(
            f"{name:24} {rate:10,.0f} tokens/s   {statistics.median(ratios):.2f} of {best}, {low:.2f} to {high:.2f}"
        )


if __name__ == "__main__":
    main()
