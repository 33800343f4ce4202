"""Unmodified `transformers` models whose state lives on the host or on a drive, as a ds_config.json says it.

Offload changes the place of things and nothing else: on two ranks the same bits as without it, and the same numbers as
plain PyTorch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threed
from tests import hf_models
from tests.harness import run_ranks
from threed.deepspeed import DeepSpeedEngine

STEPS, ROWS = 3, 8
Result = tuple[list[float], list[float], dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model, where its state lives, and what is special about it."""

    model: str = "gpt2"
    stage: int = 3
    optimizer: str = "none"
    params: str = "none"
    dtype: str = "fp32"
    accumulation: int = 2
    bucket: int = 3000  # elements
    threshold: int = 40
    checkpointing: bool = False
    frozen: str = ""  # parameters whose name has this in it
    meta: bool = False
    groups: bool = False  # biases and norms without decay, in an optimizer that is passed

    def at(self, optimizer: str, params: str = "none") -> Case:
        return replace(self, optimizer=optimizer, params=params)


def ds_config(case: Case) -> dict[str, Any]:
    folder = tempfile.gettempdir()
    zero: dict[str, Any] = {"stage": case.stage, "reduce_bucket_size": case.bucket}
    zero["stage3_param_persistence_threshold"] = case.threshold
    for key, device in (("offload_optimizer", case.optimizer), ("offload_param", case.params)):
        zero[key] = {"device": device, "nvme_path": folder, "pin_memory": True, "buffer_count": 4}
    return {
        "train_batch_size": ROWS, "gradient_accumulation_steps": case.accumulation, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": EPS[case.dtype], "weight_decay": 0.1}},
        "zero_optimization": zero, "bf16": {"enabled": case.dtype == "bf16"}, "fp16": {"enabled": case.dtype == "fp16"},
        "aio": {"block_size": 1048576, "queue_depth": 8},
    }  # fmt: skip


EPS = {"fp64": 1e-8, "fp32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}


def prepared(case: Case) -> nn.Module:
    with torch.device("meta" if case.meta else "cpu"):
        model = hf_models.make(case.model)
    model = model if case.dtype == "fp64" else model.float()
    for name, param in model.named_parameters():
        if case.frozen and case.frozen in name:
            param.requires_grad_(False)
    if case.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def initialize(case: Case, model: nn.Module | None = None) -> DeepSpeedEngine:
    return threed.initialize(model=prepared(case) if model is None else model, config=ds_config(case))[0]


def loss_of(forward: Callable[..., Any], piece: dict[str, Tensor]) -> Tensor:
    """In the dtype of the logits: the one inside of transformers is in fp32."""
    labels = piece["labels"]
    logits = forward(input_ids=piece["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
                           labels[:, 1:].flatten(), ignore_index=-100)


def pieces(step: int, count: int) -> list[dict[str, Tensor]]:
    full = hf_models.batch(step, ROWS)
    return [{key: value.chunk(count)[i] for key, value in full.items()} for i in range(count)]


def train_step(engine: DeepSpeedEngine, step: int, own: bool) -> None:
    n = engine.gradient_accumulation_steps()
    for piece in pieces(step, engine.world_size * n)[engine.global_rank * n :][:n]:
        loss = loss_of(engine, piece) if own else engine(**piece).loss
        engine.backward(loss)
        engine.step()


def train(case: Case, own: bool) -> Result:
    engine = initialize(case)
    losses, norms = [], []
    for step in range(STEPS):
        train_step(engine, step, own)
        assert engine.metrics is not None
        losses.append(engine.metrics.loss)
        norms.append(engine.metrics.grad_norm)
    return losses, norms, engine.full_state_dict()


def train_all(cases: Iterable[Case], own: bool = False) -> list[Result]:
    return [train(case, own) for case in cases]


def difference(one: Result, other: Result) -> float:
    worst = max(abs(a - b) for a, b in zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True))
    assert one[2].keys() == other[2].keys()
    return max(worst, *(float((one[2][n] - t).abs().max()) for n, t in other[2].items()))
