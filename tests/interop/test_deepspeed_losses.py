"""Losses of scripts for DeepSpeed: plain backwards, several losses per micro-batch, boundaries that the script sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import threed
from tests.harness import run_ranks
from tests.zero.test_plain_backward import RANKS, assert_same, net, rows, truth

ACCUMULATION = 2


def engine_at(stage: int) -> Any:
    ds = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {
            "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0,
        }},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    module = net()
    return threed.initialize(model=module, model_parameters=module.parameters(), config=ds)[0]


def plain(engine: Any, found: dict[str, Tensor]) -> None:
    found["out"].square().mean().backward(retain_graph=True)
    found["hidden"].abs().mean().backward()


def by_engine(engine: Any, found: dict[str, Tensor]) -> None:
    loss = found["out"].square().mean()
    returned = engine.backward(loss, retain_graph=True)
    assert returned == pytest.approx(float(loss) / ACCUMULATION)
    engine.backward(found["hidden"].abs().mean())


WAYS: dict[str, Callable[[Any, dict[str, Tensor]], None]] = {
    "plain": plain, "engine": by_engine, "boundary": by_engine, "plain, boundary": plain,
}  # fmt: skip


def train(way: str, stage: int) -> Any:
    engine, norms = engine_at(stage), []
    rank = engine.global_rank
    for step in range(3):
        for micro in range(ACCUMULATION):
            found = engine(rows(step, micro, rank))
            if "boundary" in way:
                engine.set_gradient_accumulation_boundary(micro == ACCUMULATION - 1)
            WAYS[way](engine, found)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert (engine.global_steps, engine.micro_steps) == (3, 3 * ACCUMULATION)
    return norms, engine.full_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_two_losses_a_micro_batch_train_as_plain_pytorch(stage: int) -> None:
    right = truth("two", ACCUMULATION, 0.05)
    for way in WAYS:
        assert_same(run_ranks(RANKS, train, way, stage)[0], right)


def interrupted() -> None:
    """After an error in a plain backward, the next micro-batch is the first of a new step."""
    engine = engine_at(1)

    def interrupt(grad: Tensor) -> None:
        raise KeyboardInterrupt

    for micro in range(2):
        out = engine(rows(0, micro, 0))["hidden"]
        if micro == 1:
            out.register_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.module.third(out).mean().backward()
            break
        out.mean().backward()
        engine.step()
    for step in range(2):
        for micro in range(2):
            plain(engine, engine(rows(step, micro, 0)))
            engine.step()
    assert (engine.global_steps, engine.micro_steps) == (2, 4)
    right = engine_at(1)
    for step in range(2):
        for micro in range(2):
            plain(right, right(rows(step, micro, 0)))
            right.step()
    found = engine.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in right.full_state_dict().items())


def interrupted_before_step() -> None:
    """A step whose second loss failed does not update."""
    engine = engine_at(1)
    before = engine.full_state_dict()
    found = engine(rows(0, 0, 0))
    found["hidden"].abs().mean().backward(retain_graph=True)

    def interrupt(grad: Tensor) -> None:
        raise KeyboardInterrupt

    engine.module.first.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        found["out"].square().mean().backward()
    with pytest.raises(RuntimeError, match="step without a backward"):
        engine.step()
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def gradients_of_another_loss(folder: Path) -> None:
    """A discriminator gets gradients of the generator's loss: they are dropped, and do not prevent a save."""
    engine = engine_at(1)
    x = rows(0, 0, 0)
    engine(x)["out"].mean().backward()
    engine.save_checkpoint(folder, tag=3, save_latest=False)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "zero_to_fp32.py"]
    engine.zero_grad()
    engine.backward(engine(x)["out"].square().mean())
    with pytest.raises(RuntimeError, match="zero_grad between backward and step"):
        engine.zero_grad()
    engine.step()
    with pytest.raises(RuntimeError, match="save_checkpoint in the middle of a step"):
        engine.save_checkpoint(folder)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(x)["out"].square().mean())
    engine.step()
    assert engine.global_steps == 1
    engine.load_checkpoint(folder, tag=3)
    assert engine.global_steps == 0
    engine.save_checkpoint(folder)
    assert set(threed.checkpoint.weights(folder)) == set(net().state_dict())


def test_a_step_after_an_interrupted_plain_backward(tmp_path: Path) -> None:
    run_ranks(1, interrupted)
    run_ranks(1, interrupted_before_step)
    run_ranks(1, gradients_of_another_loss, tmp_path)


def plain_at_stage_0() -> None:
    """The refused backward changes nothing: the steps are the same as without it."""
    found = []
    for refused in (False, True):
        engine = engine_at(0)
        rank = engine.global_rank
        for step, micro in itertools.product(range(2), range(ACCUMULATION)):
            if refused:
                with pytest.raises(
                    RuntimeError,
                    match=r"^Direct calls to tensor.backward\(\) .* call engine.backward",
                ):
                    plain(engine, engine(rows(step, micro, rank)))
                x = rows(step, micro, rank).requires_grad_()
                assert torch.autograd.grad(engine(x)["out"].mean(), x)[0].any()
            by_engine(engine, engine(rows(step, micro, rank)))
            engine.step()
        assert engine.global_steps == 2
        found.append((engine.get_global_grad_norm(), engine.full_state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], value) for name, value in found[0][1].items())


def test_a_plain_backward_at_stage_0_is_refused_as_in_deepspeed() -> None:
    run_ranks(RANKS, plain_at_stage_0)
