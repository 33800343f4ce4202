"""Compares a mixture of experts with that of transformers, on one process with the same weights.

    python benchmarks/experts.py                       # Qwen3's block, fp32, 1,024 tokens
    python benchmarks/experts.py --experts 64 --per-token 8 --dtype bf16

The implementations take turns, forward and backward together. The program prints median tokens per
second, and the ratio to the fastest implementation of transformers with its 95 % interval.
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
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.worker import bootstrap  # noqa: E402
from threed.distributed.sharding import attach, spec_of  # noqa: E402
from threed.layers import MicroBatch, MixtureOfExperts, Slicing  # noqa: E402


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("hidden", 512), ("ffn", 256), ("experts", 32), ("per-token", 4), ("tokens", 1024), ("rounds", 15),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    args = parser.parse_args()
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
