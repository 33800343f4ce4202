"""threed's engine with the model, the weights and the AdamW of `benchmarks.reference`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.reference import ADAM, GPTConfig
from threed import models
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import Slicing


def make_trainer(config: GPTConfig, topology: Topology, settings: dict[str, Any]) -> Engine:
    """Returns threed's engine, for a model of its own layers with the reference model's shapes."""
    full = complete(config, topology, settings)
    slicing = Slicing(
        topology.axis("tp"), bool(full.parallel.sequence), full.train.seed, full.zero.tile
    )
    return Engine(models.build(full.model, slicing), topology, full)


def complete(config: GPTConfig, topology: Topology, settings: dict[str, Any]) -> Config:
    """Returns the resolved configuration for the reference model and the peers' AdamW.

    The learning rate is constant. Values of `optim` in the settings override these values.
    """
    shapes = {
        "layers": config.n_layer,
        "hidden": config.d_model,
        "heads": config.n_head,
        "seq": config.seq_len,
    }
    everything = {
        "match": "*",
        "weight_decay": ADAM["weight_decay"],
    }  # like the peers, which also decay norms and biases
    optim = {
        **ADAM,
        "warmup": 0,
        "schedule": "constant",
        "groups": [everything],
        **settings.get("optim", {}),
    }
    full = Config.model_validate({**settings, "model": {"arch": "gpt", **shapes}, "optim": optim})
    return resolve(full, config.vocab, topology.world)


NAMES = {
    "wte": "embedding.word", "wpe": "embedding.position", "ln1": "attention_norm", "attn.proj": "attention.out",
    "ln2": "mlp_norm", "mlp.up": "mlp.up", "mlp.down": "mlp.down", "ln_f": "head.norm",
}  # fmt: skip


def renamed(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Returns the reference model's weights under threed's names.

    The packed rows (head, {q,k,v}, head size) are separated.
    """
    found = {}
    for name, value in weights.items():
        *path, module, kind = name.split(".")
        prefix = ".".join(path[:2]) + "." if path else ""
        key = ".".join([*path[2:], module])
        if key == "attn.qkv":
            parts = value.unflatten(0, (heads, 3, -1)).unbind(1)
            for part, rows in zip(("query", "key", "value"), parts, strict=True):
                found[f"{prefix}attention.{part}.{kind}"] = rows.flatten(0, 1)
        elif key != "head":  # tied to the token embedding
            found[f"{prefix}{NAMES[key]}.{kind}"] = value
    return found
