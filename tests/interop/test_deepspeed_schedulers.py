"""DeepSpeed's learning-rate schedules: its own numbers, update by update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.interop.test_deepspeed_config import config, notes, problem
from threed.interop.deepspeed.config.translate import translate

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 3e-3, "warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 20,
            "warmup_num_steps": 6,
            "warmup_min_lr": 1e-4,
            "warmup_max_lr": 2e-3,
        },
    ),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 6, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 6}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 6, "warmup_min_ratio": 0.1}),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 20,
            "warmup_num_steps": 4,
            "cos_min_ratio": 0.2,
            "warmup_type": "linear",
        },
    ),
    ("WarmupCosineLR", {"total_num_steps": 3, "warmup_num_steps": 6}),
]


def ours(name: str, params: dict[str, Any], updates: int, lr: float = 1.5e-3) -> list[float]:
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    t = translate(config(optimizer=optimizer, scheduler={"type": name, "params": params}), 4)
    assert t.learning_rate is not None
    return [
        float(t.learning_rate(torch.tensor(float(n), dtype=torch.float64))) for n in range(updates)
    ]


@pytest.mark.parametrize(("name", "params"), SCHEDULES)
def test_learning_rates_are_those_of_deepspeed(name: str, params: dict[str, Any]) -> None:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.5e-3)
    scheduler, theirs = getattr(schedules, name)(optimizer, **params), []
    for _ in range(30):  # the engine steps the scheduler after the optimizer
        theirs.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    assert ours(name, params, 30) == pytest.approx(theirs, rel=1e-12, abs=1e-18)


def test_learning_rates_by_the_formula() -> None:
    log = ours("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 8}, 10)
    assert (log[:3], log[4]) == (pytest.approx([0, 0, 1 / 3]), pytest.approx(2 / 3))
    assert log[8:] == [1.0, 1.0]
    params = {
        "warmup_max_lr": 1.0,
        "warmup_num_steps": 4,
        "warmup_type": "linear",
        "total_num_steps": 8,
    }
    want = [0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0, 0]
    assert ours("WarmupDecayLR", params, 11) == pytest.approx(want)
    params = {
        "warmup_num_steps": 2,
        "warmup_type": "linear",
        "total_num_steps": 4,
        "cos_min_ratio": 0.5,
    }
    assert ours("WarmupCosineLR", params, 6, lr=1.0) == pytest.approx([0, 0, 0.5, 0.75, 0.5, 0.5])


@pytest.mark.parametrize(
    ("scheduler", "text"),
    [
        (
            {"type": "OneCycle"},
            'scheduler.type: "OneCycle" is not supported: use WarmupLR, WarmupDecayLR or WarmupCosineLR',
        ),
        ({"type": "LRRangeTest"}, 'scheduler.type: "LRRangeTest" is not supported'),
        ({"type": "Cosine"}, 'scheduler.type: "Cosine" is not known'),
        ({"params": {}}, "scheduler.type: not given"),
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps: not given"),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
            "warmup_num_steps: 0 must be greater than or equal to 1",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "set it to the number of optimizer steps",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "cos"}},
            'warmup_type: "cos" is not known: use log or linear',
        ),
        ({"type": "WarmupLR", "params": {"total_num_steps": 9}}, "total_num_steps: no such key"),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}},
            "warmup_max_lr: [1, 2] must be a number",
        ),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
            'total_num_steps: "auto" needs',
        ),
        (
            {"type": "WarmupLR", "params": {"last_batch_iteration": 9}},
            "engine.load_checkpoint() restores the step",
        ),
    ],
)
def test_schedulers_that_are_refused(scheduler: dict[str, Any], text: str) -> None:
    assert text in problem(scheduler=scheduler)


def test_auto_in_a_scheduler() -> None:
    params = {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": 2,
        "total_num_steps": 9,
    }
    t = translate(config(scheduler={"type": "WarmupDecayLR", "params": params}), 4)
    assert t.learning_rate is not None
    assert (t.learning_rate.low, t.learning_rate.high) == (0.0, 1e-3)
    assert notes(t, "scheduler.params.warmup_max_lr") == [
        '"auto": 0.001, the optimizer\'s lr, as in Hugging Face'
    ]
