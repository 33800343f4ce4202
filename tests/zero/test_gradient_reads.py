"""Reads of `.grad` between a backward and the end of its step raise an error instead of finding None."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from threed import Config, Engine, Topology
from threed.engine import ModuleEngine


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def engine_of(stage: int, module: nn.Module) -> ModuleEngine:
    config = Config.model_validate(
        {"zero": {"stage": stage}, "train": {"micro_batch": 2, "global_batch": 2}}
    )
    engine = Engine(module, Topology(), config)
    assert isinstance(engine, ModuleEngine)
    return engine


READS: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "clip_grad_value_": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1.0),
    "an optimizer": lambda module: torch.optim.SGD(module.parameters()).step(),
    "a new gradient": lambda module: setattr(module.first.weight, "grad", torch.ones(4, 3)),
    "no gradient": lambda module: setattr(module.first.weight, "grad", None),
    "zero_grad": lambda module: module.zero_grad(),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", READS)
def test_reads_of_gradients_within_a_step_are_refused(stage: int, name: str) -> None:
    module = Small()
    engine = engine_of(stage, module)
    module.zero_grad()  # no gradients yet: nothing is lost
    engine.begin(2)
    engine.backward(module(torch.ones(2, 3)))
    with pytest.raises(
        RuntimeError, match=r"first.weight: .grad was (read|set).* before .* train.grad_clip"
    ):
        READS[name](module)
    engine.backward(module(torch.ones(2, 3)))
    metrics = engine.update()
    assert metrics.grad_norm > 0
    module.zero_grad()
    assert all(param.grad is None for param in module.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_is_compiled_within_a_step(stage: int) -> None:
    """torch.compile reads `.grad` when it compiles, again for each new shape."""
    torch.manual_seed(0)
    module, found = Small(), list[float]()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    for compiles in (False, True):
        module = Small()
        module.load_state_dict(start)
        engine = engine_of(stage, module)
        run = torch.compile(module, backend="aot_eager", dynamic=False) if compiles else module
        engine.begin(3)
        for size in (2, 4, 3):
            engine.backward(run(torch.ones(size, 3)))
        found.append(engine.update().grad_norm)
    assert found[0] == found[1] > 0


def test_a_discarded_step_has_no_gradients() -> None:
    module = Small()
    engine = engine_of(1, module)
    engine.begin(1)
    engine.backward(module(torch.ones(2, 3)))
    engine.discard()
    module.zero_grad()


def double(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = 2 * param.grad


def steps_of(engine: ModuleEngine, name: str) -> None:
    engine.begin(2)
    for part in torch.ones(2, 1, 3):
        loss = engine.module(part)
        loss.backward() if name == "loss.backward" else engine.backward(loss)
    engine.update()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["loss.backward", "engine.backward"])
def test_a_gradient_that_the_program_has_set_is_refused(stage: int, name: str) -> None:
    """In DDP, the gradient of the step would be the mean of `g` over the ranks plus that of the losses."""
    module = Small()
    g = torch.ones(4, 3)
    module.first.weight.grad = g  # before the engine is built
    engine = engine_of(stage, module)
    refused = pytest.raises(RuntimeError, match=r"\.grad of first\.weight was set .* to the loss")
    with refused:
        steps_of(engine, name)
    engine.zero_grad()
    steps_of(engine, name)
    module.first.weight.grad = g
    with refused:
        steps_of(engine, name)
    module.zero_grad()
    engine.begin(1)
    loss = module(torch.ones(2, 3))
    module.first.weight.grad = g  # after the forward
    with refused:
        loss.backward() if name == "loss.backward" else engine.backward(loss)
    del module.first.weight.grad
    for _ in range(2):
        steps_of(engine, name)
    for param in module.parameters():  # a hook of the program may change the value
        param.register_post_accumulate_grad_hook(double)
    engine.begin(1)
    loss = module(torch.ones(2, 3))
    loss.backward() if name == "loss.backward" else engine.backward(loss)
    assert engine.update().grad_norm > 0
