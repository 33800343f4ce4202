"""Two kinds of block-sparse attention in alternate blocks: a fixed pattern that differs between heads, and a function.

python examples/sparse_attention.py
torchrun --standalone --nproc-per-node 2 examples/sparse_attention.py --parallel.tp 2

The fixed pattern is from Sparse Transformers (arXiv 1904.10509). The function is from LogSparse Transformers (arXiv
1907.00235): distances to the key blocks are powers of two. docs/guide/own_models.md explains both.
"""

from __future__ import annotations

from torch import nn

import threed
from threed import layers
from threed.config import ModelConfig


def log_sparse(query: int, count: int) -> list[int]:
    """Returns the query's own block, and the blocks 1, 2, 4, 8, ... before it."""
    return [query, *(query - 2**i for i in range(query.bit_length()))]


class SparseModel:
    """A decoder with block-sparse attention and gated MLPs (GELU). A sequence has eight blocks."""

    def __init__(self, config: ModelConfig, slicing: layers.Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden
        block = max(2, config.seq // 8)
        fixed = layers.FixedPattern(
            block=block,
            num_local_blocks=4,
            num_different_global_patterns=4,
            different_layout_per_head=True,
        )
        function = layers.FunctionPattern(function=log_sparse, block=block)
        self.cores = (
            layers.SparseAttention(fixed, heads=slicing.core_heads(config.heads)),
            layers.SparseAttention(function),
        )

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
        attention = layers.Attention(
            f"{name}.attention",
            c.hidden,
            c.heads,
            slicing,
            kv_heads=c.kv_heads,
            bias=False,
            rotary=c.rope_theta,
            core=self.cores[index % 2],
        )
        mlp = layers.GatedMLP(
            f"{name}.mlp", c.hidden, 2 * c.hidden, slicing, activation=layers.gelu
        )
        return layers.Block(name, norms, attention, mlp, slicing)


# Defaults of this program; flags override them.
DEFAULTS = {
    "model": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128},
    "train": {"steps": 20, "global_batch": 16},
    "optim": {"lr": 3e-3, "warmup": 5},
    "log": {"every": 1},
}

if __name__ == "__main__":
    threed.Trainer.from_command_line(SparseModel, DEFAULTS, about=__doc__).run()
