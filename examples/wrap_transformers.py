"""Trains an unmodified `transformers` model, GPT-2 built from its configuration, under any ZeRO stage.

python examples/wrap_transformers.py
torchrun --standalone --nproc-per-node 2 examples/wrap_transformers.py
torchrun --standalone --nproc-per-node 4 examples/wrap_transformers.py --zero.stage 2 --zero.shard-size 2

The model is built on the meta device and trained under ZeRO-3 by default, so that no rank ever holds all of it. Losses
are the same for every stage and number of ranks. The program downloads no files.
"""

from __future__ import annotations

import sys

import torch

import threed
from threed.cli import launch
from threed.config import ConfigError, ModelConfig
from threed.config.arguments import format_problems
from threed.config.program import program_config
from threed.config.resolution import resolve
from threed.core.packages import needed
from threed.data import open_data
from threed.distributed.launcher import world_size
from threed.memory.io import SwapError

transformers = needed("transformers", "this example")

# Defaults of this program; flags override them. The default of zero.resident would keep all these parameters full.
DEFAULTS = {
    "model": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128},
    "zero": {"stage": 3, "resident": 1000},
    "train": {"steps": 20, "global_batch": 16},
    "optim": {"lr": 1e-3, "warmup": 5},
}


def build_model(c: ModelConfig) -> torch.nn.Module:
    """Returns the model on the meta device. The engine initializes its parameters slice by slice.

    Dropout is disabled, since its masks would depend on the rank.
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


def main() -> None:
    world = world_size()
    config = program_config(
        sys.argv[1:], prog=sys.argv[0], about=__doc__, defaults=DEFAULTS, world_size=world
    )
    if config.parallel.pp * config.parallel.tp > 1:
        raise ConfigError(["a wrapped module is not cut: use --parallel.pp 1 and --parallel.tp 1"])
    d, train = config.data, config.train
    spelling = {"bos": d.bos, "special_tokens": d.special_tokens}
    data = open_data(d.path, d.tokenizer, d.split, config.model.seq, train.seed, **spelling)
    config = resolve(config, data.vocab, world)
    model = build_model(config.model)
    topology = threed.Topology()
    engine = threed.Engine(model, topology, config)
    share = train.global_batch // topology.dp  # sequences per step on this rank
    for step in range(train.steps):
        tokens = data.train.batch(step * train.global_batch + topology.rank * share, share)[
            "tokens"
        ]
        # the model shifts the labels itself
        metrics = engine.step({"input_ids": tokens, "labels": tokens})
        if topology.rank == 0:
            print(
                f"step {metrics.step} loss {metrics.loss:.5f} norm {metrics.grad_norm:.5f}",
                flush=True,
            )
    weights = engine.full_state_dict()  # the module's own names -> full tensors, on rank 0
    if topology.rank == 0:
        print(f"{sum(w.numel() for w in weights.values()):,} parameters in {len(weights)} tensors")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(launch.refuse(format_problems(error.problems)))
    except SwapError as error:  # an error of the drive
        sys.exit(str(error))
