"""The two ceilings of a training step, by shape: matrix products as threed calls them, and attention by backend.

Uses torch alone. Products are those of the linear layers of GPT 1.3B and Llama-3 8B on 8,192 tokens in bf16: the
forward, the input's gradient, and the weight's gradient, in bf16 and added to an fp32 buffer. Attention is causal, on
views of packed queries, keys and values [s b (a+2k) d].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_stages.record import NOT_MEASURED
from benchmarks.gpu_stages.stage import Stage, main
from benchmarks.gpu_stages.timing import interleaved

TOKENS = 8192
# layer -> number of inputs and outputs
SHAPES = {
    "GPT 1.3B, qkv": (2048, 6144), "GPT 1.3B, out": (2048, 2048), "GPT 1.3B, up": (2048, 8192),
    "GPT 1.3B, down": (8192, 2048), "GPT 1.3B, head": (2048, 50304), "Llama-3 8B, qkv": (4096, 6144),
    "Llama-3 8B, out": (4096, 4096), "Llama-3 8B, gate and up": (4096, 28672), "Llama-3 8B, down": (14336, 4096),
    "Llama-3 8B, head": (4096, 128256),
}  # fmt: skip
# model -> b, s, a, k, d
ATTENTION = {"GPT 1.3B": (4, 2048, 16, 16, 128), "Llama-3 8B": (1, 8192, 32, 8, 128)}
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHOICES = {1: "flash", 2: "memory-efficient", 3: "cuDNN", 0: "math"}  # of torch._fused_sdp_choice


def rate(flops: float, times: dict[str, Any]) -> dict[str, float]:
    """TFLOP/s, with quartiles."""
    ends = {"tflops": "median_ms", "low": "high_ms", "high": "low_ms"}
    return {name: flops / times[key] / 1e9 for name, key in ends.items()}


def products(
    tokens: int, inputs: int, outputs: int, stage: Stage
) -> dict[str, Callable[[], Tensor]]:
    """The products of a linear layer [tokens inputs] -> [tokens outputs] by name."""
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": stage.device}
    x, dy = torch.randn(tokens, inputs, **like), torch.randn(tokens, outputs, **like)
    w = torch.randn(outputs, inputs, **like) * 0.02
    found: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: F.linear(x, w),
        "input gradient": lambda: torch.mm(dy, w),
        "weight gradient, bf16": lambda: torch.mm(dy.t(), x),
    }
    if stage.cuda:  # the CPU has no product of bf16 matrices with an fp32 result
        total = torch.zeros(outputs, inputs, dtype=torch.float32, device=stage.device)
        found["weight gradient, added in fp32"] = lambda: torch.addmm(
            total, dy.t(), x, out_dtype=torch.float32, out=total
        )
    return found


def product(work: Callable[[], Tensor], flops: float, stage: Stage) -> dict[str, float]:
    """TFLOP/s of a product."""
    return rate(flops, interleaved({"it": work}, stage.device, 3 if stage.small else 15)["it"])


def attention(shape: tuple[int, ...], backend: SDPBackend, stage: Stage) -> dict[str, Any]:
    """TFLOP/s of forward, and of forward and backward together, of one backend."""
    b, s, a, k, d = shape
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": stage.device}
    qkv = torch.randn(s, b, (a + 2 * k) * d, **like).requires_grad_()

    def forward() -> Tensor:
        parts = [part.view(s, b, -1, d).permute(1, 2, 0, 3) for part in qkv.split([a * d, k * d, k * d], -1)]  # fmt: skip
        return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=a != k)

    with sdpa_kernel(backend):
        y = forward()
        dy = torch.randn_like(y)
        works = {
            "forward": forward,
            "both": lambda: torch.autograd.grad(forward(), qkv, dy),
        }
        times = interleaved(works, stage.device, 3 if stage.small else 15)
    flops = 4 * b * a * s * s * d / 2  # causal: half of the scores
    return {
        "forward": rate(flops, times["forward"]), "forward and backward": rate(3.5 * flops, times["both"]),
        "output needs no copy": y.permute(2, 0, 1, 3).flatten(2).is_contiguous(),
    }  # fmt: skip


def chosen(shape: tuple[int, ...], stage: Stage) -> str:
    """The backend that torch selects."""
    b, s, a, k, d = shape
    q, key = (
        torch.empty(b, n, s, d, dtype=torch.bfloat16, device=stage.device, requires_grad=True)
        for n in (a, k)
    )
    return CHOICES[torch._fused_sdp_choice(q, key, key, None, 0.0, True, enable_gqa=a != k)]


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What work finds, or why torch cannot do it on this machine."""
    try:
        return work()
    except (RuntimeError, TypeError) as error:  # no such kernel, or an older torch
        return {"note": f"{NOT_MEASURED}: {str(error)[:200]}"}


def run(stage: Stage) -> None:
    by = 128 if stage.small else 1
    cudnn = torch.backends.cudnn.version() if stage.cuda else None
    stage.put(cudnn=cudnn, tokens=TOKENS // by)
    found: dict[str, Any] = {}
    for name, (inputs, outputs) in SHAPES.items():
        if not stage.has_time(15):
            found[name] = {"note": f"{NOT_MEASURED}: no time"}
            continue
        works = products(TOKENS // by, inputs // by, outputs // by, stage)
        flops = 2.0 * (TOKENS // by) * (inputs // by) * (outputs // by)
        found[name] = {
            way: attempt(partial(product, work, flops, stage)) for way, work in works.items()
        }
        stage.put(products=found)
    heads: dict[str, Any] = {}
    for name, (b, s, a, k, d) in ATTENTION.items():
        shape = (b, s // by, a, k, d)
        backends = BACKENDS if stage.cuda else {"flash": SDPBackend.FLASH_ATTENTION}
        heads[name] = {"chosen": chosen(shape, stage)} | {
            label: attempt(partial(attention, shape, backend, stage))
            for label, backend in backends.items()
        }
        stage.put(attention=heads)


if __name__ == "__main__":
    main("roof", run)
