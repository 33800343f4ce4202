"""Two kinds of attention in alternate blocks: a sliding window with rotary positions, and full attention with ALiBi.

python examples/sliding_window.py
torchrun --standalone --nproc-per-node 2 examples/sliding_window.py --parallel.tp 2

The window is from Mistral 7B (arXiv 2310.06825, section 2). The alternation of blocks with and without a window is from
Gemma 2 (arXiv 2408.00118, section 2), and ALiBi is from arXiv 2108.12409. docs/guide/own_models.md explains both kinds.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import threed
from threed import layers
from threed.config import ModelConfig


def look_back(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attends to the last `window` positions: q [s b a d], k and v [s b k d] -> [s b (a d)]."""
    at = torch.arange(len(q), device=q.device)
    behind = at.view(-1, 1) - at
    return layers.attend(q, k, v, (behind >= 0) & (behind < window))


class ALiBi(nn.Module):
    """Adds a bias to the scores that decreases with the distance of the key, with a fixed slope per head."""

    def __init__(self, heads: int, slicing: layers.Slicing) -> None:
        super().__init__()
        self.count, self.held = heads, slicing.core_heads(heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(len(q), device=q.device)
        behind = at.view(-1, 1) - at
        head = torch.arange(*self.held, device=q.device, dtype=torch.float64)
        slopes = torch.exp2(-8 * (head + 1) / self.count).to(q.dtype)
        bias = (-slopes.view(-1, 1, 1) * behind).masked_fill(behind < 0, -torch.inf)
        return layers.attend(q, k, v, bias)


class SlidingWindow:
    """A decoder with both kinds of attention and gated MLPs (GELU). The window is a quarter of the sequence."""

    def __init__(self, config: ModelConfig, slicing: layers.Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        c, slicing = self.config, self.slicing
        embedding = layers.Embedding("embedding", c.vocab or 0, c.hidden, slicing)
        norm = layers.RMSNorm("head.norm", c.hidden, slicing)
        head = layers.LanguageModelHead(
            "head", "embedding.word.weight", norm, c.vocab or 0, c.hidden, slicing
        )
        return [embedding, *(self.block(i) for i in range(c.layers)), head]

    def block(self, index: int) -> nn.Module:
        c, slicing, name = self.config, self.slicing, f"blocks.{index}"
        norms = tuple(
            layers.RMSNorm(f"{name}.{part}_norm", c.hidden, slicing)
            for part in ("attention", "mlp")
        )
        attention = functools.partial(
            layers.Attention,
            f"{name}.attention",
            c.hidden,
            c.heads,
            slicing,
            kv_heads=c.kv_heads,
            bias=False,
        )
        if index % 2 == 0:
            window = functools.partial(look_back, window=max(1, c.seq // 4))
            mixing = attention(rotary=c.rope_theta, core=window)
        else:
            mixing = attention(core=ALiBi(c.heads, slicing), qk_norm=True)
        mlp = layers.GatedMLP(
            f"{name}.mlp", c.hidden, 2 * c.hidden, slicing, activation=layers.gelu
        )
        return layers.Block(name, norms, mixing, mlp, slicing)


# Defaults of this program; flags override them.
DEFAULTS = {
    "model": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128},
    "train": {"steps": 20, "global_batch": 16},
    "optim": {"lr": 3e-3, "warmup": 5},
    "log": {"every": 1},
}

if __name__ == "__main__":
    threed.Trainer.from_command_line(SlidingWindow, DEFAULTS, about=__doc__).run()
