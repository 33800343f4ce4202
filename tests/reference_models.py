"""GPT-2 and Llama/Qwen3 in plain PyTorch, without code of threed, for comparisons with the engine.

Weights have the engine's global names, so a state dict of one can be loaded into the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def turn(x: Tensor, theta: float) -> Tensor:
    """Applies rotary positions to x [b a s d], with fp32 angles, like Hugging Face."""
    d = x.shape[-1]
    frequency = 1.0 / theta ** (torch.arange(0, d, 2).float() / d)
    angle = torch.arange(x.shape[-2]).float()[:, None] * frequency[None, :]
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    def __init__(
        self,
        h: int,
        heads: int,
        kv: int,
        *,
        bias: bool,
        theta: float | None,
        qk_norm: bool,
        eps: float,
    ) -> None:
        super().__init__()
        self.heads, self.kv, self.d, self.theta = heads, kv, h // heads, theta
        self.query = nn.Linear(h, heads * self.d, bias=bias)
        self.key, self.value = (nn.Linear(h, kv * self.d, bias=bias) for _ in range(2))
        self.out = nn.Linear(heads * self.d, h, bias=bias)
        self.query_norm, self.key_norm = (
            RMSNorm(self.d, eps) if qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.query_norm(self.query(x).view(b, s, self.heads, self.d)).transpose(1, 2)
        k = self.key_norm(self.key(x).view(b, s, self.kv, self.d)).transpose(1, 2)
        v = self.value(x).view(b, s, self.kv, self.d).transpose(1, 2)
        if self.theta is not None:
            q, k = turn(q, self.theta), turn(k, self.theta)
        k, v = (part.repeat_interleave(self.heads // self.kv, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, h: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(h, ffn), nn.Linear(ffn, h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedMLP(nn.Module):
    def __init__(self, h: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(h, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(
        self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A decoder: tokens [b s] -> logits [b s v].

    Args:
        positions: number of learned positions, or None.
    """

    def __init__(
        self,
        vocab: int,
        h: int,
        blocks: list[Block],
        norm: nn.Module,
        positions: int | None,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word": nn.Embedding(vocab, h)})
        if positions is not None:
            self.embedding["position"] = nn.Embedding(positions, h)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.ModuleDict({"norm": norm})
        self.out = nn.Linear(h, vocab, bias=False)
        if tied:
            self.out.weight = self.embedding["word"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding["word"](tokens)
        if "position" in self.embedding:
            x = x + self.embedding["position"](torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(self.head["norm"](x))

    def take(self, weights: dict[str, Tensor]) -> None:
        """Loads weights by the engine's names; all names must match."""
        mine = self.named()
        assert mine.keys() == weights.keys(), mine.keys() ^ weights.keys()
        for name, param in mine.items():
            assert param.shape == weights[name].shape, name
            param.data = weights[name].clone()

    def named(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by the engine's names.

        A tied parameter has one entry; an untied output projection is named head.weight.
        """
        return {
            "head.weight" if name == "out.weight" else name: param
            for name, param in self.named_parameters()
        }


def gpt(*, vocab: int, h: int, layers: int, heads: int, seq: int, tied: bool) -> Decoder:
    """Returns a GPT-2."""
    blocks = [
        Block(
            (nn.LayerNorm(h), nn.LayerNorm(h)),
            Attention(h, heads, heads, bias=True, theta=None, qk_norm=False, eps=1e-5),
            MLP(h, 4 * h),
        )
        for _ in range(layers)
    ]
    return Decoder(vocab, h, blocks, nn.LayerNorm(h), seq, tied)


def llama(
    *,
    vocab: int,
    h: int,
    layers: int,
    heads: int,
    kv: int,
    ffn: int,
    tied: bool,
    qk_norm: bool,
    theta: float = 1e4,
) -> Decoder:
    """Returns a Llama, or a Qwen3 if `qk_norm`."""
    blocks = [
        Block(
            (RMSNorm(h, 1e-5), RMSNorm(h, 1e-5)),
            Attention(h, heads, kv, bias=False, theta=theta, qk_norm=qk_norm, eps=1e-5),
            GatedMLP(h, ffn),
        )
        for _ in range(layers)
    ]
    return Decoder(vocab, h, blocks, RMSNorm(h, 1e-5), None, tied)
