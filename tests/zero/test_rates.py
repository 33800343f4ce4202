"""Learning rates that the program sets are those of the update, per group, and are saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from threed import Config, Engine, Topology


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(self.slow(x)).sum()


def engine_of(module: nn.Module, lr: float | None = 0.4) -> Engine:
    groups = [{"match": "fast.*|nothing.*", "lr": lr}]
    optim = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "groups": groups, "schedule": "constant"}
    optim |= {"warmup": 0, "weight_decay": 0.0}
    train = {"micro_batch": 2, "global_batch": 2, "grad_clip": 0.0}
    config = Config.model_validate({"optim": optim, "train": train, "precision": {"dtype": "fp64"}})
    return Engine(module, Topology(), config)


def test_rates_per_group(tmp_path: Path) -> None:
    torch.manual_seed(0)
    twin = Pair().double()
    module = Pair().double()
    module.load_state_dict(twin.state_dict())
    engine = engine_of(module)
    assert engine.learning_rates == pytest.approx([0.1, 0.4])
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64)
    for rates in (None, [0.2, 0.05], [0.0, 0.3], None):
        engine.set_learning_rates(rates)
        slow, fast = engine.learning_rates
        groups = [{"params": twin.slow.parameters(), "lr": slow}]
        optimizer = torch.optim.SGD([*groups, {"params": twin.fast.parameters(), "lr": fast}])
        optimizer.zero_grad()
        twin(x).backward()
        optimizer.step()
        metrics = engine.step({"x": x})
        assert metrics.lr == pytest.approx(slow)
        for name, weight in engine.full_state_dict().items():
            torch.testing.assert_close(weight, twin.state_dict()[name], rtol=0, atol=1e-12)
    engine.set_learning_rates([0.2, 0.05])
    engine.save(tmp_path / "set")
    engine.set_learning_rates(None)
    engine.save(tmp_path / "schedule")
    engine.load(tmp_path / "set")
    assert engine.learning_rates == [0.2, 0.05]
    engine.load(tmp_path / "schedule")
    assert engine.learning_rates == pytest.approx([0.1, 0.4])


def test_a_group_without_a_rate_has_its_own_entry() -> None:
    engine = engine_of(Pair().double(), lr=None)
    assert engine.learning_rates == pytest.approx([0.1, 0.1])
    before = engine.full_state_dict()
    engine.set_learning_rates([0.0, 0.3])
    engine.step({"x": torch.ones(2, 2, dtype=torch.float64)})
    after = engine.full_state_dict()
    assert torch.equal(after["slow.weight"], before["slow.weight"])
    assert not torch.equal(after["fast.weight"], before["fast.weight"])


@pytest.mark.parametrize("rates", [[0.1], [0.1, -0.1], [0.1, float("nan")], [0.1, float("inf")]])
def test_rates_that_make_no_sense_are_refused(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="rate"):
        engine_of(Pair()).set_learning_rates(rates)
