"""The model of all benchmarked engines: a GPT-2 in plain PyTorch, its weights and its data.

    python -m benchmarks.reference        # trains it on one process: the reference for loss and tokens/s

The model has norms before attention and MLP, learned positions, a tied embedding, tanh GELU and
causal attention. The rows of the packed QKV projection are ordered as (head, {q,k,v}, head size),
so that a contiguous split is a split by heads, as DTensor needs it. A `GPT` can be any contiguous
range of blocks, with or without embedding and head, so the same class is also a pipeline stage.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class GPTConfig:
    """The shapes of the model; the defaults are the model in `docs/reference/performance.md`."""

    n_layer: int = 8
    d_model: int = 256
    n_head: int = 8
    seq_len: int = 256
    vocab: int = 8192

    @property
    def parameters(self) -> int:
        """The number of parameters; the tied table counts once."""
        c = self.d_model
        return self.n_layer * (12 * c * c + 13 * c) + (self.vocab + self.seq_len + 2) * c

    def flops_per_token(self) -> float:
        """Matrix-product FLOPs per token in forward and backward; causal attention counts half."""
        c = self.d_model
        return (
            6 * (self.n_layer * 12 * c * c + self.vocab * c) + 6 * self.n_layer * self.seq_len * c
        )


PRESETS = {
    "tiny": GPTConfig(2, 64, 4, 64, 512),  # for tests of the benchmarks
    "small": GPTConfig(),
    "base": GPTConfig(
        12, 512
    ),  # 42 M parameters: with one sequence per rank, communication is a large part
    "200m": GPTConfig(
        16, 1024, 16, 128
    ),  # 210 M parameters: with one short sequence per rank, the update is a large part
}


class Attention(nn.Module):
    """x [b s h] -> [b s h]; the size of `qkv` determines the number of heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.d_model // config.n_head
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        b, s, _ = qkv.shape
        q, k, v = qkv.view(b, s, -1, 3, self.head_dim).unbind(3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """x [b s h] -> [b s h]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, 4 * config.d_model)
        self.down = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Blocks [lo, hi) of the model.

    Args:
        first: whether it has the embedding, so that its input is tokens [b s].
        last: whether it has the head, so that its output is logits [b s v].
    """

    def __init__(
        self,
        config: GPTConfig,
        lo: int = 0,
        hi: int | None = None,
        first: bool = True,
        last: bool = True,
    ):
        super().__init__()
        self.first, self.last = first, last
        if first:
            self.wte = nn.Embedding(config.vocab, config.d_model)
            self.wpe = nn.Embedding(config.seq_len, config.d_model)
        blocks = range(lo, config.n_layer if hi is None else hi)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in blocks})
        if last:
            self.ln_f = nn.LayerNorm(config.d_model)
            self.head = nn.Linear(config.d_model, config.vocab, bias=False)
        self.tie()

    def tie(self) -> None:
        """Makes head and embedding one parameter, if this part has both."""
        if self.first and self.last:
            self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.ln_f(x)) if self.last else x


def initial_weights(config: GPTConfig, seed: int = 0) -> dict[str, Tensor]:
    """Returns the full model's weights by the names of `GPT`, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in GPT(config).named_parameters()}
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith("bias"):
            weights[name] = torch.zeros(shape)
        elif ".ln" in f".{name}":
            weights[name] = torch.ones(shape)
        else:
            residual = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / (2 * config.n_layer) ** 0.5 if residual else 0.02
            weights[name] = torch.empty(shape).normal_(0.0, std, generator=draw)
    weights["head.weight"] = weights["wte.weight"]
    return weights


def build(
    config: GPTConfig, lo: int = 0, hi: int | None = None, first: bool = True, last: bool = True
) -> GPT:
    """Returns the model or a part of it, with the initial weights."""
    model, weights = GPT(config, lo, hi, first, last), initial_weights(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    return model


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean token loss of logits [b s v]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batches(config: GPTConfig, count: int, rows: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Returns tokens and targets [rows s] that can be learned.

    Half of the targets follow a fixed table of successors, half are random with a Zipf
    distribution.
    """
    draw = torch.Generator().manual_seed(seed)
    successor = torch.randperm(config.vocab, generator=draw)
    frequency = 1.0 / torch.arange(1, config.vocab + 1, dtype=torch.float64)
    cumulative = torch.cumsum(frequency / frequency.sum(), 0)
    made = []
    for _ in range(count):
        uniform = torch.rand(rows, config.seq_len + 1, generator=draw, dtype=torch.float64)
        ids = torch.searchsorted(cumulative, uniform).clamp_(max=config.vocab - 1)
        follow = torch.rand(ids.shape, generator=draw) < 0.5
        for t in range(1, ids.shape[1]):
            ids[:, t] = torch.where(follow[:, t], successor[ids[:, t - 1]], ids[:, t])
        made.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return made


def main() -> None:
    """Trains on one process, and prints the loss and the speed of every step."""
    config = GPTConfig()
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    for number, (x, y) in enumerate(batches(config, 8, 8)):
        begin = time.perf_counter()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        gflops = config.flops_per_token() * x.numel() / seconds / 1e9
        print(
            f"step {number} loss {loss.item():.6f} {x.numel() / seconds:.0f} tokens/s {gflops:.1f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
