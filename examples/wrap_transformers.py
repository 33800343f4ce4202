"""Trains an unmodified `transformers` model, GPT-2 built from its configuration, under any ZeRO stage.

python examples/wrap_transformers.py
torchrun --standalone --nproc-per-node 2 examples/wrap_transformers.py
torchrun --standalone --nproc-per-node 4 examples/wrap_transformers.py --zero.stage 2 --zero.shard-size 2

By default, the model is built on the meta device and trained under ZeRO-3, so that no rank ever holds all parameters.
Losses are the same for every ZeRO stage and number of ranks. The program downloads no files.
"""

from __future__ import annotations

import sys

import torch

import threed
from threed.config import ModelConfig

try:
    import transformers
except ImportError:
    sys.exit("this example needs the package transformers: pip install transformers")

# Defaults of this program; flags override them. zero.resident is lower than usual: with its usual default, all
# parameters of this small model would stay unsharded.
DEFAULTS = {
    "model": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128},
    "zero": {"stage": 3, "resident": 1000},
    "train": {"steps": 20, "global_batch": 16},
    "optim": {"lr": 1e-3, "warmup": 5},
    "log": {"every": 1},
    "run": {"name": "wrap_transformers"},
}


def build_model(c: ModelConfig) -> torch.nn.Module:
    """Returns a GPT-2 on the meta device, where the engine initializes its parameters slice by slice.

    Dropout is disabled, because its masks would depend on the number of ranks.
    """
    shapes = {
        "vocab_size": c.vocab,
        "n_positions": c.seq,
        "n_embd": c.hidden,
        "n_layer": c.layers,
        "n_head": c.heads,
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    rest = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shapes, **no_dropout, **rest))


if __name__ == "__main__":
    threed.Trainer.from_command_line(build_model, DEFAULTS, about=__doc__).run()
