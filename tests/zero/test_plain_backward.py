"""`loss.backward()` of a program in a step of an engine: several losses, several engines; as plain PyTorch."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.configs import topology_of
from tests.harness import run_ranks
from threed import Config, Engine

WIDTH, RANKS = 8, 2


class Net(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).tanh()
        middle = lambda h: self.second(h).tanh()  # noqa: E731
        hidden = (
            checkpoint(middle, hidden, use_reentrant=True) if self.reentrant else middle(hidden)
        )
        return {"out": self.third(hidden), "hidden": hidden}


def net(seed: int = 0, reentrant: bool = False) -> Net:
    torch.manual_seed(seed)
    return Net(reentrant).double()


def rows(step: int, micro: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(2, WIDTH, generator=draw, dtype=torch.float64, requires_grad=True)


def one(module: Net, x: Tensor) -> None:
    module(x)["out"].square().mean().backward()


def two(module: Net, x: Tensor) -> None:
    found = module(x)
    found["out"].square().mean().backward(retain_graph=True)
    found["hidden"].abs().mean().backward()


def regularized(module: Net, x: Tensor) -> None:
    """A term of the parameters alone, in the module's forward, where they are gathered."""
    handle = module.third.register_forward_hook(
        lambda m, args, out: out + 0.1 * m.weight.square().sum()
    )
    module(x)["out"].mean().backward()
    handle.remove()


def with_input_gradients(module: Net, x: Tensor) -> None:
    """Gradients of inputs have no factor, as in plain PyTorch."""
    out = module(x)["out"]
    (found,) = torch.autograd.grad(out.square().mean(), x, retain_graph=True)
    weight = float(found.abs().max())
    (weight * out.abs().mean()).backward()


def twice(module: Net, x: Tensor) -> None:
    """Two forwards and two backwards of one micro-batch."""
    one(module, x)
    module(x.detach() * 2)["hidden"].mean().backward()


def unused(module: Net, x: Tensor) -> None:
    module(x)["hidden"].square().mean().backward()


WAYS: dict[str, Callable[[Net, Tensor], None]] = {
    way.__name__: way for way in (one, two, regularized, with_input_gradients, twice, unused)
}


def engine_at(stage: int, module: nn.Module, clip: float, micros: int, **groups: Any) -> Engine:
    zero = {"stage": stage, "resident": 0, "bucket_mib": 1e-4, **groups.pop("zero", {})}
    settings: dict[str, Any] = {
        "zero": zero, "precision": {"dtype": "fp64"},
        "train": {"global_batch": 2 * RANKS * micros, "micro_batch": 2, "grad_clip": clip},
        "optim": {"lr": 0.01, "warmup": 0, "schedule": "constant", "weight_decay": 0.0, "eps": 1e-6},
        **groups,
    }  # fmt: skip
    return Engine(module, topology_of(1, 1), Config.model_validate(settings))


def train(way: str, stage: int, micros: int, clip: float, reentrant: bool) -> Any:
    engine: Any = engine_at(stage, net(0, reentrant), clip, micros)
    norms = []
    for step in range(3):
        engine.begin(micros)
        for micro in range(micros):
            WAYS[way](engine.module, rows(step, micro, engine.topology.rank))
        metrics = engine.update()
        assert not metrics.skipped
        norms.append(metrics.grad_norm)
    return norms, engine.full_state_dict()


def truth(way: str, micros: int, clip: float) -> Any:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)  # fmt: skip
    norms = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(micros):
            for rank in range(RANKS):
                WAYS[way](module, rows(step, micro, rank))
        for param in module.parameters():
            if param.grad is not None:
                param.grad /= RANKS * micros
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip or 1e9)))
        optimizer.step()
    return norms, module.state_dict()


def assert_same(got: Any, right: Any) -> None:
    assert got[0] == pytest.approx(right[0], rel=1e-12)
    for name, value in got[1].items():
        torch.testing.assert_close(value, right[1][name], rtol=1e-10, atol=1e-12)


def train_all(stage: int) -> list[Any]:
    return [train(way, stage, micros, clip, reentrant) for way, micros, clip, reentrant in CASES]


CASES = [
    *((way, micros, 0.05 if micros == 2 else 0.0, False) for way in WAYS for micros in (1, 2)),
    ("one", 2, 0.05, True), ("two", 1, 0.0, True),
]  # fmt: skip


@pytest.mark.seldom("2")
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.grid), 2, 3])
def test_plain_backwards_train_as_plain_pytorch(stage: int) -> None:
    found = run_ranks(RANKS, train_all, stage)[0]
    for case, got in zip(CASES, found, strict=True):
        assert_same(got, truth(*case[:3]))


# --------------------------------------------------------------------------------------------------------- several losses


def train_with_losses(stage: int, micros: int) -> Any:
    """Two losses of one graph, each by `engine.backward`."""
    engine: Any = engine_at(stage, net(), 0.05, micros)
    norms, losses = [], []
    for step in range(3):
        engine.begin(micros)
        for micro in range(micros):
            found = engine.module(rows(step, micro, engine.topology.rank))
            engine.backward(found["out"].square().mean(), retain_graph=True)
            engine.backward(found["hidden"].abs().mean())
        metrics = engine.update()
        norms.append(metrics.grad_norm)
        losses.append(metrics.loss)
    assert all(loss > 0 for loss in losses)
    return norms, engine.full_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_two_losses_of_a_graph_train_as_their_sum(stage: int) -> None:
    for micros in (1, 2):
        got = run_ranks(RANKS, train_with_losses, stage, micros)[0]
        assert_same(got, truth("two", micros, 0.05))


def train_two_engines(stage: int) -> Any:
    """One loss of the outputs of two engines."""
    first: Any = engine_at(stage, net(0), 0.0, 1)
    second: Any = engine_at(stage, net(1), 0.0, 1)
    for step in range(3):
        x = rows(step, 0, first.topology.rank)
        first.begin(1)
        second.begin(1)
        (first.module(x)["out"] * second.module(x)["hidden"]).square().mean().backward()
        metrics = first.update(), second.update()
        assert all(m.loss != m.loss and not m.skipped for m in metrics)  # NaN
    return first.full_state_dict(), second.full_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_two_engines_train_by_one_loss(stage: int) -> None:
    modules = [net(0), net(1)]
    params = [p for m in modules for p in m.parameters()]
    optimizer = torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(RANKS):
            x = rows(step, 0, rank)
            product = modules[0](x)["out"] * modules[1](x)["hidden"]
            (product.square().mean() / RANKS).backward()
        optimizer.step()
    for got, module in zip(run_ranks(RANKS, train_two_engines, stage)[0], modules, strict=True):
        for name, value in got.items():
            torch.testing.assert_close(value, module.state_dict()[name], rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- edges and refusals


class Interruption(Exception):
    pass


def at_the_edges() -> None:
    engine: Any = engine_at(1, net(), 0.0, 1)
    x = rows(0, 0, 0)

    def loss() -> Tensor:
        value: Tensor = engine.module(x)["out"].square().mean()
        return value

    with pytest.raises(RuntimeError, match=r"outside any step of this parameter's engine: before"):
        loss().backward()
    engine.begin(1)
    engine.backward(loss())
    with pytest.raises(RuntimeError, match=r"in a step after engine\.backward\(loss\): use one of"):
        loss().backward()
    # The refused backward has computed a gradient, which no update may contain.
    with pytest.raises(RuntimeError, match="no step is in progress"):
        engine.update()

    def interrupt(grad: Tensor) -> None:
        raise Interruption

    before = engine.full_state_dict()
    engine.begin(1)
    out = engine.module(x)["hidden"]
    out.register_hook(interrupt)
    with pytest.raises(Interruption):
        engine.module.third(out).mean().backward()
    with pytest.raises(RuntimeError, match="no step is in progress"):
        engine.update()
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    engine.begin(1)
    loss().backward()
    assert not engine.update().skipped
    engine.begin(None)  # the program divides the loss by the number of micro-batches itself
    for _ in range(2):
        (loss() / 2).backward()
    one = engine.update().grad_norm
    engine.zero_grad()
    right = torch.autograd.grad(loss(), engine.module.third.weight)[0]
    assert one > float(right.norm()) > 0


def in_fp16() -> None:
    # Updates are too small to change a weight, so that both steps have the same gradients to the bit.
    still = {"lr": 1e-30, "warmup": 0, "schedule": "constant", "weight_decay": 0.0}
    engine: Any = engine_at(1, Net(), 0.0, 1, precision={"dtype": "fp16"}, optim=still)
    engine.begin(1)
    loss = engine.module(rows(0, 0, 0).half().detach())["out"].square().mean()
    with pytest.raises(RuntimeError, match=r"loss\.backward\(\) under fp16: call engine\.backward"):
        loss.backward()
    norms = []
    for _ in range(2):
        engine.begin(1)
        engine.backward(engine.module(rows(0, 0, 0).half().detach())["out"].square().mean(), 1e-9)
        norms.append(engine.update().grad_norm)
    assert norms[0] == norms[1]


@pytest.mark.parametrize("what", [at_the_edges, in_fp16])
def test_edges_of_plain_backwards(what: Any) -> None:
    run_ranks(1, what)


def gradients_of_inputs() -> None:
    """`torch.autograd.grad` through an output is no backward of the step."""
    engine: Any = engine_at(1, net(), 0.0, 1)
    x = rows(0, 0, 0)
    for _ in range(2):
        engine.begin(1)
        out = engine.module(x)["out"]
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        engine.backward(out.square().mean() + grad.square().mean())
        torch.autograd.grad(engine.module(x)["out"].sum(), x)
        metrics = engine.update()
        assert metrics.loss > 0
    engine.begin(1)
    engine.module(x)["out"].square().mean().backward(create_graph=True)
    engine.zero_grad()  # after it, the step may use engine.backward
    loss = engine.module(x)["out"].square().mean()
    engine.backward(loss)
    assert engine.update().loss == pytest.approx(float(loss))


def freed() -> None:
    """Neither the module, nor a copy of it, nor an output keeps the engine alive."""
    engine: Any = engine_at(1, net(), 0.0, 1)
    module = engine.module
    engine.begin(1)
    found = module(rows(0, 0, 0))
    found["out"].square().mean().backward(retain_graph=True)
    with engine.gathered():
        copied = copy.deepcopy(module)
    engine.update()
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None
    copied(rows(0, 0, 0))["out"].square().mean().backward()
    assert found["out"].requires_grad


def with_a_loss_of_the_head(stage: int) -> int:
    """A second loss that uses only some parameters does not make the gradients of the others late."""
    engine: Any = engine_at(stage, net(), 0.0, 1)
    late = []
    add = engine.reducer.late.add
    with mock.patch.object(engine.reducer.late, "add", lambda *a: (late.append(a), add(*a))):
        for step in range(3):
            engine.begin(1)
            found = engine.module(rows(step, 0, engine.topology.rank))
            found["out"].square().mean().backward(retain_graph=True)
            engine.module.third(found["hidden"].detach()).mean().backward()
            engine.update()
    return len(late)


@pytest.mark.parametrize("what", [gradients_of_inputs, freed])
def test_what_plain_backwards_leave_alone(what: Any) -> None:
    run_ranks(1, what)


def test_losses_of_different_parameters_are_not_late() -> None:
    assert run_ranks(RANKS, with_a_loss_of_the_head, 3) == [0, 0]


def of_chosen_parameters(stage: int) -> float:
    """`backward(inputs=...)` computes the gradients of some parameters, sharded or not."""
    engine: Any = engine_at(stage, net(), 0.0, 1)
    module = engine.module
    engine.begin(1)
    loss = module(rows(0, 0, engine.topology.rank))["out"].square().mean()
    handle = module.first.bias.register_hook(lambda grad: time.sleep(0.2))
    loss.backward(inputs=[module.second.weight, module.first.bias])
    handle.remove()
    metrics = engine.update()
    assert metrics.seconds["fwd_bwd_s"] >= 0.2
    engine.begin(1)
    loss = module(rows(1, 0, engine.topology.rank))["out"].square().mean()
    torch.autograd.backward(loss, inputs=module.third.bias)  # one parameter, without a list
    following = engine.update()
    assert following.grad_norm > 0
    assert following.seconds["fwd_bwd_s"] < metrics.seconds["fwd_bwd_s"]  # of this step only
    return float(metrics.grad_norm)


def test_backwards_of_chosen_parameters() -> None:
    module = net()
    losses = [module(rows(0, 0, rank))["out"].square().mean() for rank in range(RANKS)]
    grads = torch.autograd.grad(sum(losses) / RANKS, [module.second.weight, module.first.bias])
    right = float(torch.cat([grad.flatten() for grad in grads]).norm())
    for stage in (0, 3):
        found = run_ranks(RANKS, of_chosen_parameters, stage)
        assert found == pytest.approx([right] * RANKS, rel=1e-12)


def counts_of_backwards() -> None:
    engine: Any = engine_at(1, net(), 0.0, 1)
    x = rows(0, 0, 0)
    loss = lambda: engine.module(x)["out"].square().mean()  # noqa: E731
    for count in (0, -1, 2.5):
        with pytest.raises(ValueError, match="pass an integer of at least 1, or None"):
            engine.begin(count)
    engine.begin(2)
    engine.backward(loss())
    with pytest.raises(RuntimeError, match="a step with 1 backward is in progress: call update"):
        engine.begin(2)
    with pytest.warns(UserWarning, match=r"update after 1 backward, but begin\(2\)"):
        engine.update()
    engine.begin(2)
    engine.backward(loss())
    engine.discard()
    engine.begin(np.int64(2))
    for _ in range(2):
        loss().backward()
    assert engine.update().loss_scale == 1.0


def test_counts_of_backwards() -> None:
    run_ranks(1, counts_of_backwards)
