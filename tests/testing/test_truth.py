"""The single process against a plain PyTorch loop that uses none of threed: losses, gradient norms, every weight.

The equivalence tests compare every parallel run to one process; this one says that the one process is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import reference_models
from tests.configs import MODELS, SEQ, VOCAB, engine_of
from threed.config import Config
from threed.config.resolution import resolve

LAYERS, HIDDEN, STEPS, ROWS, MICRO = 3, 32, 4, 8, 2
LR, CLIP, DECAY, BETAS, EPS, WARMUP = 3e-3, 1.0, 0.1, (0.9, 0.95), 1e-8, 2

REFERENCES = {
    "gpt": lambda: reference_models.gpt(
        vocab=VOCAB, h=HIDDEN, layers=LAYERS, heads=4, seq=SEQ, tied=True
    ),
    "gpt-untied": lambda: reference_models.gpt(
        vocab=VOCAB, h=HIDDEN, layers=LAYERS, heads=4, seq=SEQ, tied=False
    ),
    "llama": lambda: reference_models.llama(
        vocab=VOCAB, h=HIDDEN, layers=LAYERS, heads=4, kv=2, ffn=72, tied=False, qk_norm=False
    ),
    "qwen-tied": lambda: reference_models.llama(
        vocab=VOCAB, h=HIDDEN, layers=LAYERS, heads=4, kv=1, ffn=70, tied=True, qk_norm=True
    ),
}
SCHEDULES = {"gpt": "cosine", "gpt-untied": "linear", "llama": "wsd", "qwen-tied": "constant"}


def configuration(model: str, dtype: str = "fp64") -> Config:
    config = Config.model_validate({
        "precision": {"dtype": dtype},
        "model": {"layers": LAYERS, "hidden": HIDDEN, "seq": SEQ, **MODELS[model]},
        "train": {"global_batch": ROWS, "micro_batch": MICRO, "steps": 5, "grad_clip": CLIP},
        "optim": {
            "warmup": WARMUP, "lr": LR, "eps": EPS, "betas": BETAS, "weight_decay": DECAY, "schedule": SCHEDULES[model],
        },
    })  # fmt: skip
    return resolve(config, VOCAB, 1)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches with very uneven numbers of counted labels; one has none at all."""
    draw = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=draw)
        labels = ids[:, 1:].clone()
        labels[0, : SEQ - 1] = -100
        labels[3, ::2] = -100
        labels[2 * (step % 4) : 2 * (step % 4) + 2] = -100
        yield ids[:, :-1].contiguous(), labels


def learning_rate(schedule: str, step: int, total: int = 5) -> float:
    """The rate of update `step` (from 0), worked out by hand: rise over WARMUP, then from LR down to LR / 10."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    part = (step - WARMUP) / (total - WARMUP)
    share = {
        "cosine": (1 + math.cos(math.pi * part)) / 2,
        "linear": 1 - part,
        "constant": 1.0,
        "wsd": 1.0 if part <= 0.8 else (1 - part) * 5,
    }[schedule]
    return LR / 10 + (LR - LR / 10) * share


def decays(name: str, param: nn.Parameter) -> bool:
    return "norm" not in name and not name.endswith("bias")


def plain_loop(
    model: reference_models.Decoder, schedule: str
) -> tuple[list[float], list[float], list[float]]:
    """Losses, gradient norms and learning rates of a few steps."""
    named = model.named()
    groups = [
        {"params": [p for n, p in named.items() if decays(n, p)], "weight_decay": DECAY},
        {"params": [p for n, p in named.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms, rates = [], [], []
    for step, (tokens, labels) in enumerate(batches()):
        counted, total = int((labels != -100).sum()), 0.0
        optimizer.zero_grad()
        for x, y in zip(tokens.split(MICRO), labels.split(MICRO), strict=True):
            logits = model(x)
            loss = (
                F.cross_entropy(
                    logits.flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100
                )
                / counted
            )
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step)
        optimizer.step()
        losses.append(total)
        rates.append(learning_rate(schedule, step))
    return losses, norms, rates


@pytest.mark.parametrize("name", REFERENCES)
def test_one_process_trains_as_a_plain_pytorch_loop(name: str) -> None:
    """fp64: the order of sums is all that differs, which is why 1e-9 is far more than needed."""
    engine = engine_of(configuration(name))
    model = REFERENCES[name]().double()
    model.take(engine.full_state_dict())
    metrics = [engine.step({"tokens": tokens, "labels": labels}) for tokens, labels in batches()]
    losses, norms, rates = plain_loop(model, SCHEDULES[name])
    assert min(norms) < CLIP < max(norms), (
        "some steps must be clipped and some not, or this tests little"
    )
    assert [m.loss for m in metrics] == pytest.approx(losses, rel=1e-9, abs=0)
    assert [m.grad_norm for m in metrics] == pytest.approx(norms, rel=1e-9, abs=0)
    assert [m.lr for m in metrics] == pytest.approx(rates, rel=1e-12, abs=0)
    assert [m.step for m in metrics] == [1, 2, 3, 4]
    weights = engine.full_state_dict()
    assert len(weights) == len(model.named())
    for key, param in model.named().items():
        torch.testing.assert_close(
            weights[key], param.detach(), rtol=0, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_and_evaluation_are_the_plain_models(name: str) -> None:
    engine = engine_of(configuration(name))
    model = REFERENCES[name]().double()
    model.take(engine.full_state_dict())
    tokens, labels = next(batches())
    logits = engine.logits(tokens)
    assert logits is not None
    torch.testing.assert_close(logits, model(tokens).detach(), rtol=0, atol=1e-12)
    want = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert float(engine.evaluate({"tokens": tokens, "labels": labels})) == pytest.approx(
        want.item(), rel=1e-12
    )


@pytest.mark.parametrize("name", REFERENCES)
def test_initial_values_are_gpt2s(name: str) -> None:
    """Normal with 0.02, outputs onto the residual stream smaller by sqrt(2 l), norms 1, biases 0 (GPT-2, section 2.3).

    Standard deviations at 4.5 sigma of the number of values.
    """
    weights = engine_of(configuration(name, "fp32")).full_state_dict()
    seen: list[Tensor] = []
    for key, value in weights.items():
        if value.dim() == 1:
            assert torch.equal(value, torch.full_like(value, float("norm.weight" in key))), key
            continue
        std = (
            0.02 / math.sqrt(2 * LAYERS)
            if key.endswith(("attention.out.weight", "mlp.down.weight"))
            else 0.02
        )
        n = value.numel()
        assert abs(value.mean()) < 4.5 * std / math.sqrt(n), key
        assert abs(value.std() / std - 1) < 4.5 / math.sqrt(2 * n), key
        assert value.abs().max() > 2 * std
        seen.append(value.flatten()[: 32 * 32])
    stacked = torch.stack([s for s in seen if len(s) == 32 * 32])
    # 1 of 50 pairs: 5.5 sigma
    assert (torch.corrcoef(stacked) - torch.eye(len(stacked))).abs().max() < 5.5 / 32


def test_initial_values_depend_on_the_seed_and_the_global_number_of_layers_alone() -> None:
    small, seeded = configuration("gpt"), configuration("gpt")
    seeded = seeded.model_copy(update={"train": seeded.train.model_copy(update={"seed": 7})})
    deep = small.model_copy(update={"model": small.model.model_copy(update={"layers": 12})})
    first, other, more = (engine_of(config).full_state_dict() for config in (small, seeded, deep))
    assert not torch.equal(first["embedding.word.weight"], other["embedding.word.weight"])
    assert torch.equal(first["blocks.1.mlp.up.weight"], more["blocks.1.mlp.up.weight"])
    ratio = more["blocks.1.mlp.down.weight"] / first["blocks.1.mlp.down.weight"]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5), rtol=1e-6, atol=0)
