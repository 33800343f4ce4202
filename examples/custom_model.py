"""A custom model built from `threed.layers`, which trains in any topology. The program has all training flags.

python examples/custom_model.py
torchrun --standalone --nproc-per-node 2 examples/custom_model.py --parallel.tp 2
torchrun --standalone --nproc-per-node 8 examples/custom_model.py --parallel.tp 2 --parallel.pp 2

The blocks compute attention and MLP in parallel after a single norm (PaLM, arXiv 2204.02311, section 2), with squared
ReLU (arXiv 2109.08668). Losses are the same in every topology. The run folder is runs/ParallelModel: if the program is
started again, it resumes (`--checkpoint.resume none` starts over).
"""

from __future__ import annotations

from torch import Tensor, nn

import threed
from threed import layers
from threed.config import ModelConfig

# Defaults of this program; flags override them.
DEFAULTS = {
    "model": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128},
    "train": {"steps": 20, "global_batch": 16},
    "optim": {"lr": 3e-3, "warmup": 5},
    "log": {"every": 1},
}


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)): [s b h] -> [s b h] (or [s/t b h] if sequences are split)."""

    context = True  # supports context parallelism: only `layers.Attention` mixes positions

    def __init__(self, name: str, c: ModelConfig, slicing: layers.Slicing) -> None:
        super().__init__()
        self.name = name
        self.norm = layers.RMSNorm(f"{name}.norm", c.hidden, slicing)
        self.attention = layers.Attention(
            f"{name}.attention", c.hidden, c.heads, slicing, rotary=c.rope_theta
        )
        self.up = layers.ColumnLinear(f"{name}.mlp", c.hidden, [("up", 4 * c.hidden)], slicing)
        self.down = layers.RowLinear(f"{name}.mlp.down", 4 * c.hidden, c.hidden, slicing)

    def forward(self, x: Tensor, micro: layers.MicroBatch) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.down(self.up(y).relu().square())


class ParallelModel:
    """A model as a list of pipeline layers, which is all that an engine needs."""

    def __init__(self, config: ModelConfig, slicing: layers.Slicing) -> None:
        self.config, self.slicing, self.hidden = config, slicing, config.hidden

    def layers(self) -> list[nn.Module]:
        c, slicing = self.config, self.slicing
        embedding = layers.Embedding("embedding", c.vocab or 0, c.hidden, slicing)
        blocks = [ParallelBlock(f"blocks.{i}", c, slicing) for i in range(c.layers)]
        norm = layers.RMSNorm("head.norm", c.hidden, slicing)
        # The head is tied: its weight has the name of the embedding's table. Head and embedding may be on
        # different stages.
        head = layers.LanguageModelHead(
            "head", "embedding.word.weight", norm, c.vocab or 0, c.hidden, slicing
        )
        return [embedding, *blocks, head]


if __name__ == "__main__":
    threed.Trainer.from_command_line(ParallelModel, DEFAULTS, about=__doc__).run()
