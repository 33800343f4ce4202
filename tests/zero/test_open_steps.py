"""Steps whose number of micro-batches is not known when they begin equal those where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from threed import Config, Engine, Topology
from threed.engine import ModuleEngine

STEPS = (3, 1, 2)  # micro-batches of each step


class Tied(nn.Module):
    """A weight that is used twice, and one that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rare = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        x = self.second(self.first(torch.tanh(self.first(x))))
        return (self.rare(x) if rare else x).square().mean()


def trained(stage: int, topology: Topology, known: bool, last: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = Config.model_validate(
        {
            "zero": {"stage": stage, "bucket_mib": 0.0001},
            "train": {"micro_batch": 2, "global_batch": 2 * topology.dp, "grad_clip": 0.5},
            "precision": {"dtype": "fp64"},
        }
    )
    engine = Engine(Tied().double(), topology, config)
    assert isinstance(engine, ModuleEngine)
    for step, count in enumerate(STEPS):
        engine.begin(count if known else None)
        for number in range(count):
            x = torch.full((2, 4), 0.1 * (step + number + topology.rank), dtype=torch.float64)
            weight = 1 / (count * topology.dp)
            engine.backward(engine.module(x, step != 1), weight, last and number == count - 1)
        assert engine.update().grad_norm > 0
    return engine.full_state_dict()


def all_trained() -> list[dict[str, Tensor]]:
    topology = Topology()
    ways = ((True, False), (False, False), (False, True))
    return [trained(stage, topology, *way) for stage in range(4) for way in ways]


@pytest.mark.parametrize("world", [1, 2])
def test_an_open_step_equals_a_known_one(world: int) -> None:
    found = run_ranks(world, all_trained)[0]
    for number, weights in enumerate(found):
        for name, weight in found[number - number % 3].items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-12)


def test_an_open_step_needs_weights_and_can_be_discarded() -> None:
    config = Config.model_validate(
        {"zero": {"stage": 3}, "train": {"micro_batch": 2, "global_batch": 2}}
    )
    engine = Engine(Tied(), Topology(), config)
    assert isinstance(engine, ModuleEngine)
    before = engine.full_state_dict()
    engine.begin(None)
    loss = engine.module(torch.ones(2, 4), True)
    with pytest.raises(ValueError, match=r"begin\(None\) needs a weight"):
        engine.backward(loss)
    engine.backward(loss, 1.0)
    engine.discard()
    engine.begin(None)
    engine.zero_grad()
    metrics = engine.update()
    assert metrics.grad_norm == 0
    for name, weight in engine.full_state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-4)  # weight decay only


@pytest.mark.parametrize("stage", [1, 3])
def test_a_discarded_step_has_no_gradients_of_other_engines_backwards(stage: int) -> None:
    config = Config.model_validate(
        {"zero": {"stage": stage, "resident": 0}, "train": {"micro_batch": 2, "global_batch": 2}}
    )
    engines = [Engine(Tied(), Topology(), config) for _ in range(2)]
    for engine in engines:
        engine.begin()
    first, second = engines
    x = torch.ones(2, 4)
    first.backward(first.module(x, True) + second.module(x, True))
    for engine in engines:
        engine.discard()
    second.begin()
    assert second.update().grad_norm == 0


@pytest.mark.parametrize("count", [None, 3])
def test_the_loss_of_a_step_is_without_dropped_micro_batches(count: int | None) -> None:
    config = Config.model_validate({"train": {"micro_batch": 2, "global_batch": 2}})
    engine = Engine(Tied(), Topology(), config)
    assert isinstance(engine, ModuleEngine)
    engine.begin(count)
    engine.backward(engine.module(torch.ones(2, 4), True), 0.5)
    engine.zero_grad()
    losses = [engine.module(torch.full((2, 4), x), True) for x in (0.5, -1.0)]
    for loss in losses:
        engine.backward(loss, 0.5)
    assert engine.update().loss == pytest.approx(
        sum(map(float, (loss.detach() for loss in losses))) / 2
    )
