"""`engine.gathered(params)`: some parameters, nested, within a step, edited by one rank; as plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.configs import topology_of
from tests.harness import run_ranks
from threed import Config, Engine
from threed.zero.parameter_access import AbsentParameter

WIDTH, RANKS = 8, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).tanh()).tanh()
        out: Tensor = self.third(hidden).square().mean()
        return out


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def engine_at(stage: int, **zero: Any) -> Engine:
    settings: dict[str, Any] = {
        "zero": {"stage": stage, "resident": 0, "bucket_mib": 1e-4, **zero}, "precision": {"dtype": "fp64"},
        "train": {"global_batch": 2 * RANKS, "micro_batch": 1, "grad_clip": 0.0},
        "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "warmup": 0, "schedule": "constant", "weight_decay": 0.0},
    }  # fmt: skip
    return Engine(net(), topology_of(1, 1), Config.model_validate(settings))


def rows(step: int, micro: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(1, WIDTH, generator=draw, dtype=torch.float64)


def edit(module: Any) -> None:
    """An edit that differs by parameter, one of them by replacing `.data`."""
    with torch.no_grad():
        module.second.weight.mul_(0.5)
        module.second.bias.data = module.second.bias.data + 0.25


def trained(stage: int, zero: dict[str, Any], modifier: int | None) -> dict[str, Tensor]:
    """Two steps of two micro-batches; an edit between the micro-batches of the first, and one after it."""
    engine: Any = engine_at(stage, **zero)
    module, rank = engine.module, engine.topology.rank
    some = [module.second.weight, module.second.bias]
    for step in range(2):
        engine.begin(2)
        for micro in range(2):
            engine.backward(module(rows(step, micro, rank)))
            if step == micro == 0:
                with engine.gathered(some, modifier_rank=modifier):
                    if modifier in (None, rank):
                        edit(module)
        engine.update()
        with engine.gathered(some, modifier_rank=modifier):
            if modifier in (None, rank):
                edit(module)
    found: dict[str, Tensor] = engine.full_state_dict()
    return found


def truth() -> dict[str, Tensor]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            for rank in range(RANKS):
                (module(rows(step, micro, rank)) / (2 * RANKS)).backward()
            if step == micro == 0:
                edit(module)
        optimizer.step()
        edit(module)
    return module.state_dict()


PLACES = {
    "ZeRO-0": (0, {}), "ZeRO-1": (1, {}), "ZeRO-2": (2, {}), "ZeRO-3": (3, {}),
    "on the host": (3, {"offload_optimizer": "cpu", "offload_params": "cpu"}),
}  # fmt: skip


@pytest.mark.seldom("ZeRO-0", "ZeRO-2")
@pytest.mark.parametrize("place", PLACES)
def test_edits_between_and_within_steps_are_those_of_one_process(place: str) -> None:
    stage, zero = PLACES[place]
    right = truth()
    for modifier in (None, 1):
        got = run_ranks(RANKS, trained, stage, zero, modifier)[0]
        for name, value in got.items():
            torch.testing.assert_close(value, right[name], rtol=1e-12, atol=1e-12)


def of_sharded() -> None:
    engine: Any = engine_at(3)
    module = engine.module
    whole = {name: value.double() for name, value in net().state_dict().items()}
    absent = lambda: {n for n, p in module.named_parameters() if isinstance(p, AbsentParameter)}  # noqa: E731
    everything = absent()
    assert len(everything) == 6
    with engine.gathered(module.second.parameters()):
        assert absent() == everything - {"second.weight", "second.bias"}
        assert torch.equal(module.second.weight, whole["second.weight"])
        with pytest.raises(RuntimeError, match=r"first\.weight is sharded"):
            module.first.weight.sum()
        with engine.gathered([module.first.weight, module.second.weight]):
            assert torch.equal(module.first.weight, whole["first.weight"])
            kept = module.first.weight.view(-1)
        assert "first.weight" in absent()
        assert torch.equal(module.second.bias, whole["second.bias"])
        with engine.gathered() as inside:
            assert inside is module
            assert not absent()
        assert absent() == everything - {"second.weight", "second.bias"}
    assert absent() == everything
    with pytest.raises(RuntimeError, match="was kept until it was released"):
        kept.zero_()
    with engine.gathered(module.third.bias):  # one parameter, without a list
        assert absent() == everything - {"third.weight", "third.bias"}  # one buffer


def resized(engine: Any) -> None:
    with engine.gathered([engine.module.first.bias], modifier_rank=0):
        if engine.topology.rank == 0:
            engine.module.first.bias.data = torch.zeros(3, dtype=torch.float64)


def refused() -> None:
    engine: Any = engine_at(3)
    stranger = nn.Parameter(torch.zeros(3))
    with (
        pytest.raises(ValueError, match=r"Parameter of shape \[3\] is not a parameter of this"),
        engine.gathered([engine.module.first.weight, stranger]),
    ):
        pass
    for name in ("first.weight", ["first.weight"]):
        with (
            pytest.raises(ValueError, match=r"'first.weight'\]? contains a name: pass parameters"),
            engine.gathered(name),
        ):
            pass
    with (
        pytest.raises(ValueError, match="modifier_rank 2: ranks are 0 to 1"),
        engine.gathered(modifier_rank=2),
    ):
        pass
    with pytest.raises(RuntimeError, match=r"first\.bias was set to values of shape \[3\]"):
        resized(engine)


def interrupted(engine: Any) -> None:
    with engine.gathered(engine.module.first, modifier_rank=1):
        if engine.topology.rank == 1:
            raise KeyError("gone")


def failing() -> None:
    """An error in the block on one rank is an error on all ranks, which would else wait for it."""
    engine: Any = engine_at(3)
    rank = engine.topology.rank
    error = KeyError if rank == 1 else RuntimeError
    with pytest.raises(error, match="gone" if rank == 1 else "raised an error on rank 1"):
        interrupted(engine)
    with engine.gathered(engine.module.first):  # a module: its parameters
        assert engine.module.first.bias.sum().isfinite()


def of_encoded() -> None:
    """Layers get rounded values of int8 gathers, the block exact ones, also in a step."""
    engine: Any = engine_at(3, compress_weights="int8")
    module = engine.module
    right = net().state_dict()["third.weight"]
    engine.begin(2)
    loss = module(rows(0, 0, engine.topology.rank))
    with engine.gathered([module.third.weight]):
        assert torch.equal(module.third.weight, right)
    engine.backward(loss)
    with engine.gathered([module.third.weight]):
        assert torch.equal(module.third.weight, right)
    engine.backward(module(rows(0, 1, engine.topology.rank)))
    engine.update()


@pytest.mark.parametrize("what", [of_sharded, refused, failing, of_encoded])
def test_of_sharded_parameters(what: Any) -> None:
    run_ranks(RANKS, what)
