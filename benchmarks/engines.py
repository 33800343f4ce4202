"""threed as a benchmarked engine, and every engine by its name.

    engine = ENGINES["threed_tp"](GPTConfig(), args)        # args: .batch, .microbatches
    loss = engine.step(x, y)                                 # one optimizer step on the global batch [b s]

Same model, initial weights, data and AdamW as the peers, no clipping. Each class takes `(config, args)` and nothing
else, so that another harness can use it as FILE.py:Class.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:  # loaded by path, from elsewhere
    sys.path.insert(0, ROOT)

from benchmarks import reference  # noqa: E402
from benchmarks.peers import PEERS  # noqa: E402
from benchmarks.reference import ADAM, GPTConfig  # noqa: E402
from threed import models  # noqa: E402
from threed.config import Config, resolve  # noqa: E402
from threed.engine import Engine as Trainer  # noqa: E402
from threed.layers import Slicing  # noqa: E402
from threed.topology import Topology  # noqa: E402


class Engine(Protocol):
    """What is timed. loss_ranks: the ranks whose mean loss is the global batch's."""

    loss_ranks: list[int]

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """One optimizer step on the global batch [b s], of which each rank takes its share; this rank's loss if any."""

    def finish(self) -> None:
        """Waits for what the last step left under way; inside the timed region, at the end of a block of steps."""


class ThreeD:
    """threed in one configuration; dp is what pp and tp leave of the world.

    microbatches: for pipelines, `args.microbatches`; without one a rank takes its share in one piece, as peers do.
    """

    pp, tp, sequence, schedule, zero = 1, 1, False, "1f1b", 1

    def __init__(self, config: GPTConfig, args: Any) -> None:
        topology = Topology(pp=self.pp, tp=self.tp)
        self.trainer = make_trainer(config, topology, self._settings(args, topology.dp))
        for group in self.trainer.layout.groups:  # the peers decay every parameter, norms and biases too
            group.kind = dataclasses.replace(group.kind, decay=True)
        self.trainer.load_full_state_dict(renamed(reference.initial_weights(config), config.n_head))
        self.share, self.loss_ranks = topology.axis("dp").index, [0]

    def _settings(self, args: Any, dp: int) -> dict[str, Any]:
        count = args.microbatches if self.pp > 1 else 1
        return {
            "parallel": {"pp": self.pp, "tp": self.tp, "sequence": self.sequence, "schedule": self.schedule},
            "zero": {"stage": self.zero},
            "train": {"global_batch": args.batch, "micro_batch": args.batch // dp // count, "grad_clip": 0.0},
        }

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        dp = self.trainer.topology.dp
        share = {"tokens": x.chunk(dp)[self.share], "labels": y.chunk(dp)[self.share]}
        return torch.tensor(self.trainer.step(share).loss)

    def finish(self) -> None:
        self.trainer.optimizer.settle()

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes this rank has sent so far, by axis, as threed counts them."""
        return dict(self.trainer.topology.traffic)


def make_trainer(config: GPTConfig, topology: Topology, settings: dict[str, Any]) -> Trainer:
    """threed's engine on the reference model's shapes, with the peers' AdamW at a constant learning rate."""
    adam = {key: ADAM[key] for key in ("lr", "betas", "eps", "weight_decay")}
    shapes = {"layers": config.n_layer, "hidden": config.d_model, "heads": config.n_head, "seq": config.seq_len}
    optim = {**adam, "warmup": 0, "schedule": "constant"}
    full = Config.model_validate({**settings, "model": {"arch": "gpt", **shapes}, "optim": optim})
    full = resolve(full, config.vocab, topology.world)
    slicing = Slicing(topology.axis("tp"), bool(full.parallel.sequence), full.train.seed)
    return Trainer(models.build(full.model, slicing), topology, full)


NAMES = {
    "wte": "embedding.word", "wpe": "embedding.position", "ln1": "attention_norm", "attn.proj": "attention.out",
    "ln2": "mlp_norm", "mlp.up": "mlp.up", "mlp.down": "mlp.down", "ln_f": "head.norm",
}  # fmt: skip


def renamed(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The reference model's weights by threed's global names; packed (head, {q,k,v}, head size) rows taken apart."""
    found = {}
    for name, value in weights.items():
        *path, module, kind = name.split(".")
        prefix = ".".join(path[:2]) + "." if path else ""
        key = ".".join([*path[2:], module])
        if key == "attn.qkv":
            parts = value.unflatten(0, (heads, 3, -1)).unbind(1)
            for part, rows in zip(("query", "key", "value"), parts, strict=True):
                found[f"{prefix}attention.{part}.{kind}"] = rows.flatten(0, 1)
        elif key != "head":  # tied to the word table
            found[f"{prefix}{NAMES[key]}.{kind}"] = value
    return found


class DP(ThreeD):
    """ZeRO-1 over all ranks."""


class DP0(ThreeD):
    """Plain data parallelism: ZeRO-0."""

    zero = 0


class TP2(ThreeD):
    """Tensor parallelism over two ranks."""

    tp = 2


class TP2Sequence(TP2):
    """The same with sequence parallelism."""

    sequence = True


class PP2(ThreeD):
    """1F1B over two stages."""

    pp = 2


class PP2GPipe(PP2):
    """GPipe over two stages."""

    schedule = "gpipe"


class ThreeD222(ThreeD):
    """1F1B x ZeRO-1 x tensor parallelism, two of each."""

    pp = tp = 2


class ThreeD222Sequence(ThreeD222):
    """The same with sequence parallelism."""

    sequence = True


ENGINES: dict[str, Callable[[GPTConfig, Any], Engine]] = {
    **PEERS,
    "threed": DP, "threed_zero0": DP0, "threed_tp": TP2, "threed_tp_sp": TP2Sequence, "threed_1f1b": PP2,
    "threed_gpipe": PP2GPipe, "threed_3d": ThreeD222, "threed_3d_sp": ThreeD222Sequence,
}  # fmt: skip
