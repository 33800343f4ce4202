"""Small configurations for equivalence tests, their batches, and functions that train them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests import looping
from tests.harness import run_ranks
from threed import models
from threed.config import Config
from threed.config.resolution import resolve
from threed.distributed.topology import Topology
from threed.engine import Engine, StepMetrics
from threed.layers import Slicing, embedding
from threed.testing import Results as Result
from threed.testing import results_of as result_of

VOCAB = 53  # a prime number, so no tensor-parallel size divides it
SEQ = 16
STEPS = 2  # the second step uses the weights and moments that the first has written


@dataclass(frozen=True)
class Case:
    """One configuration of a training run.

    `microbatches` is the number of micro-batches per step and data rank. Most other fields have the
    names and values of keys of the configuration.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    model: str = "gpt"
    sequence: bool = False
    zero: int = 1
    schedule: str = "1f1b"
    microbatches: int = 2
    dropout: float = 0.0
    dtype: str = "fp64"
    bucket_mib: float = 64.0
    shard: int | str = "all"
    prefetch: int = 1
    tile: int = 1
    offload_optimizer: str = "none"
    offload_params: str = "none"
    recompute: str = "none"  # a key of RECOMPUTE
    layers: int = 3
    partition: str | tuple[int, ...] = "balanced"
    order: str = "micro"
    cp: int = 1
    cp_heads: int | str = "auto"
    ep: int = 1
    room: float = 0.0
    capacity: float = 0.0
    pad: int = 0  # vocabulary tables are padded to a multiple of this; 0: usual padding

    @property
    def rows(self) -> int:
        """The number of sequences in the global batch."""
        return self.dp * {3: 6, 10: 10}.get(self.microbatches, 8)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def truth(self) -> Case:
        """The case with the expected results: the same training on one process.

        It has one micro-batch per step.
        """
        single = replace(
            self,
            pp=1,
            dp=1,
            tp=1,
            cp=1,
            cp_heads="auto",
            ep=1,
            room=0.0,
            sequence=False,
            zero=0,
            schedule="1f1b",
            microbatches=1,
        )
        home = replace(
            single, offload_optimizer="none", offload_params="none", tile=1, recompute="none"
        )
        return replace(home, microbatches=-self.rows, bucket_mib=64.0, partition="balanced", shard="all", prefetch=1,
                       order="micro", pad=0)  # fmt: skip


RECOMPUTE = {
    "none": {},
    "full": {"mode": "full"},
    "half": {"mode": "full", "every": 2, "arena": True},
    "sliced": {"mode": "full", "partition": True, "arena": True},
    "cpu": {"mode": "full", "offload": "cpu"},
    "nvme": {"mode": "full", "offload": "nvme"},
    "selective": {"mode": "selective", "ops": ("attention", "activation", "norm")},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"arch": "gpt", "heads": 4},
    "gpt-untied": {"arch": "gpt", "heads": 4, "tied": False},
    "llama": {"arch": "llama", "heads": 4, "kv_heads": 2, "ffn": 72},
    "qwen-tied": {
        "arch": "llama",
        "heads": 4,
        "kv_heads": 1,
        "ffn": 70,
        "qk_norm": True,
        "tied": True,
    },
    "llama-mtp": {"arch": "llama", "heads": 4, "kv_heads": 2, "tied": True, "mtp_depth": 2},
    "mistral": {
        "arch": "mistral",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "ffn": 70,
        "window": 5,
    },
    "qwen2": {
        "arch": "qwen2",
        "heads": 4,
        "kv_heads": 1,
        "ffn": 72,
        "window": 5,
        "layer_pattern": "fs",
    },
    "phi3": {
        "arch": "phi3",
        "heads": 4,
        "ffn": 72,
        "window": 9,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 8.0],
            "original_max_position_embeddings": 8,
        },
    },
    "gemma2": {
        "arch": "gemma2",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "ffn": 70,
        "window": 5,
        "attention_softcap": 0.5,
        "logit_softcap": 1.0,
        "query_pre_attn_scalar": 9,
    },
    "gemma3": {
        "arch": "gemma3",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 10,
        "ffn": 72,
        "window": 5,
        "layer_pattern": "ssf",
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}


EXPERT_MODELS: dict[str, dict[str, Any]] = {
    name: {"arch": f"{Path(__file__).parent}/expert_models.py:{name}", "heads": 4}
    for name in ("Softmax", "Biased", "Chosen", "Single", "Lopsided")
} | {
    "mixtral": {"arch": "mixtral", "heads": 4, "kv_heads": 2, "ffn": 24, "experts": 4, "window": 5},
    "qwen3_moe": {
        "arch": "qwen3_moe",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 6,
        "ffn": 40,
        "experts": 8,
        "experts_per_token": 3,
        "expert_ffn": 12,
        "shared_experts": 2,
        "dense_layers": 1,
        "normalize_experts": False,
    },
    "gpt_oss": {
        "arch": "gpt_oss",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "ffn": 20,
        "experts": 4,
        "window": 5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
    "deepseek_v2": {
        "arch": "deepseek_v2",
        "heads": 4,
        "ffn": 40,
        "experts": 8,
        "experts_per_token": 3,
        "expert_ffn": 12,
        "shared_experts": 2,
        "expert_groups": 4,
        "groups_per_token": 2,
        "expert_scale": 1.5,
        "dense_layers": 1,
        "kv_rank": 10,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
    },
    "deepseek_v3": {
        "arch": "deepseek_v3",
        "heads": 4,
        "ffn": 40,
        "experts": 8,
        "experts_per_token": 3,
        "expert_ffn": 12,
        "shared_experts": 1,
        "expert_groups": 4,
        "groups_per_token": 2,
        "expert_scale": 2.5,
        "dense_layers": 1,
        "query_rank": 12,
        "kv_rank": 10,
        "nope_dim": 6,
        "rope_dim": 4,
        "value_dim": 5,
        "mtp_depth": 2,
    },
}


def config_of(case: Case) -> Config:
    """Returns the resolved configuration of a case."""
    rows = -case.microbatches if case.microbatches < 0 else case.rows
    count = 1 if case.microbatches < 0 else case.microbatches
    places = (case.offload_optimizer, case.offload_params, case.recompute)
    config = Config.model_validate({
        "parallel": {
            "tp": case.tp, "pp": case.pp, "cp": case.cp, "cp_heads": case.cp_heads, "ep": case.ep, "sequence": case.sequence,
            "schedule": "1f1b" if case.schedule in looping.OWN else case.schedule,
            "partition": case.partition,
        },
        "zero": {
            "stage": case.zero, "bucket_mib": case.bucket_mib, "shard_size": case.shard, "prefetch": case.prefetch,
            "tile": case.tile, "order": case.order,
            "offload_optimizer": case.offload_optimizer, "offload_params": case.offload_params,
            "nvme_path": tempfile.gettempdir() if "nvme" in places else None,
            "resident": 0,  # shard all parameters: with the default, such small ones would stay full
        },
        "precision": {"dtype": case.dtype},
        "recompute": RECOMPUTE[case.recompute],
        "experts": {"room": case.room, "capacity": case.capacity},
        "model": {
            "layers": case.layers, "hidden": 32, "seq": SEQ, "dropout": case.dropout,
            **(MODELS | EXPERT_MODELS)[case.model],
        },
        "train": {"global_batch": rows, "micro_batch": rows // case.dp // count, "steps": 10, "grad_clip": 0.5},
        # Adam amplifies rounding errors if a gradient is near zero: in fp32 with eps 1e-8, two valid orders of summation
        # differ by 7e-5 in a weight. Hence the larger eps in fp32.
        "optim": {"warmup": 2, "lr": 3e-3, "eps": 1e-8 if case.dtype == "fp64" else 1e-5},
    })  # fmt: skip
    if case.schedule in looping.OWN:  # the check of a configuration rejects these
        parallel = config.parallel.model_copy(update={"schedule": case.schedule})
        config = config.model_copy(update={"parallel": parallel})
    return resolve(config, VOCAB, case.world)


def batch(step: int, rows: int) -> dict[str, Tensor]:
    """Returns the global batch of a step.

    About a tenth of the labels is negative, so not counted, with a different share in each row.
    """
    draw = torch.Generator().manual_seed(1000 * rows + step)
    ids = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=draw)
    labels = ids[:, 1:].masked_fill(
        torch.rand(rows, SEQ, generator=draw) < torch.linspace(0, 0.2, rows).view(-1, 1), -100
    )
    return {"tokens": ids[:, :-1].contiguous(), "labels": labels}


def documents(step: int, rows: int) -> Tensor:
    """Returns the documents [b s] of a step's rows; each has 1 to 16 tokens. The first row is one document."""
    draw = torch.Generator().manual_seed(77 * rows + step)
    begins = torch.rand(rows, SEQ, generator=draw) < torch.linspace(0, 0.6, rows).view(-1, 1)
    begins[0] = False
    return begins.cumsum(1) + 5


def share(full: dict[str, Tensor], topology: Topology) -> dict[str, Tensor]:
    """Returns this data rank's rows of a global batch."""
    index = topology.axis("dp").index
    return {key: value.chunk(topology.dp)[index] for key, value in full.items()}


@functools.cache
def topology_of(pp: int, tp: int, cp: int = 1) -> Topology:
    """Returns the topology of a shape. It is created once per world, because it creates groups."""
    return Topology(pp=pp, tp=tp, cp=cp)


def engine_of(config: Config, **keywords: object) -> Engine:
    """Returns the engine of a configuration on this rank."""
    p = config.parallel
    topology = topology_of(p.pp, p.tp, p.cp)
    return Engine(
        models.build(config.model, Slicing.of(topology, config)), topology, config, **keywords
    )  # type: ignore[arg-type]


@contextmanager
def padded_to(rows: int) -> Iterator[None]:
    """Context manager: vocabulary tables built inside are padded to a multiple of `rows` rows.

    This includes tables that are too small for the usual padding. 0 means the usual padding.
    """
    if not rows:
        yield
        return
    with mock.patch.object(embedding, "PAD_FROM", 1), mock.patch.object(embedding, "PAD_TO", rows):
        yield


def compare_in_worlds(
    cases: Sequence[Case], compare: Callable[[Sequence[Case]], list[str]]
) -> None:
    """Runs `compare` on every rank of one world per shape of the cases.

    Raises:
        AssertionError: with all differences that `compare` returned.
    """
    wrong: list[str] = []
    for shape in sorted({(case.pp, case.dp, case.cp, case.tp) for case in cases}):
        mine = [case for case in cases if (case.pp, case.dp, case.cp, case.tp) == shape]
        for found in run_ranks(mine[0].world, compare, mine, timeout=1200):
            wrong += found
    assert not wrong, "\n".join(wrong)


def trained(case: Case, **keywords: object) -> tuple[Engine, list[StepMetrics]]:
    """Trains a case, and returns its engine and the metrics of its steps."""
    config = config_of(case)
    with padded_to(case.pad):
        engine = engine_of(config, **keywords)
    rows = config.train.global_batch
    return engine, [engine.step(share(batch(step, rows), engine.topology)) for step in range(STEPS)]


def train(case: Case, **keywords: object) -> Result:
    """Trains a case, and returns its results."""
    return result_of(*trained(case, **keywords))
