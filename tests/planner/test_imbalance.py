"""The forecast of an imbalance between expert ranks, against real ranks with a planted one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.peaks import config_of, measure
from threed.config import Config
from threed.layers import MixtureOfExperts, Routing
from threed.planner.forecast import Forecast

# Four experts: each of two ranks has two.
MODEL = {
    "arch": "mixtral", "layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 256, "seq": 128, "vocab": 500,
    "experts": 4, "experts_per_token": 2,
}  # fmt: skip
CASES: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "2": (
        2,
        [
            {"recompute": {"mode": "selective"}, "precision": {"dtype": "bf16"}},
            {"parallel": {"tp": 2}},
        ],
    ),
    "2, others": (2, [{}, {"recompute": {"mode": "full"}}]),
    "4, others": (
        4,
        [
            {"parallel": {"pp": 2}, "zero": {"stage": 2}},
            {"parallel": {"cp": 2}, "zero": {"stage": 3}},
        ],
    ),
}


@dataclass(frozen=True)
class Planted(Routing):
    """Sends `load` times the mean number of choices to the experts 0 and 1, of four."""

    load: float = 1.0

    def choose(self, scores: Tensor, bias: Tensor | None, count: int) -> Tensor:
        choices = torch.arange(scores[..., 0].numel()).view(scores.shape[:-1])
        chosen = torch.stack((choices % 2, 2 + choices % 2), -1)  # one choice of each rank
        more = choices < round((self.load - 1) * choices.numel())
        return torch.where(more.unsqueeze(-1), torch.tensor((0, 1)), chosen)


def measure_all(configs: list[Config], loads: list[float]) -> list[list[int]]:
    """This rank's peaks, in bytes."""

    def plant(load: float) -> Any:
        def change(layer: nn.Module) -> None:
            for part in layer.modules():
                if isinstance(part, MixtureOfExperts):
                    part.routing = Planted(load=load)

        return change

    return [[measure(config, plant(load)) for load in loads] for config in configs]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.grid if "others" in name else ())
        for name, case in CASES.items()
    ],
)
def test_the_peak_of_the_busiest_rank_is_forecast(world: int, cases: list[dict[str, Any]]) -> None:
    """Tolerance: that of tests/planner/test_footprint.py."""
    configs = []
    for changes in cases:
        groups = {"model": MODEL, **changes}
        groups["parallel"] = {"ep": 2, **changes.get("parallel", {})}
        configs.append(config_of(world, train={"global_batch": 4 * world}, **groups))
    loads = [1.25, 2.0]
    measured = run_ranks(world, measure_all, configs, loads, timeout=1800)
    for number, config in enumerate(configs):
        forecast, before = Forecast.of(config, world), 0
        for place, load in enumerate(loads):
            found = forecast.with_imbalance(load)
            assert found is not None
            most = max(rank[number][place] for rank in measured)
            print(f"{config.parallel} {load}: {found.peak:,} for {most:,}")
            assert -0.03 <= found.peak / most - 1 <= 0.05
            assert most > 1.03 * before  # the imbalance is worth a forecast
            before = most
        assert forecast.with_imbalance(1.0).peak == max(r.bytes["peak"] for r in forecast.ranks)


def test_the_peak_is_that_of_the_stage_with_the_largest() -> None:
    groups = {"model": MODEL, "parallel": {"pp": 2, "ep": 2}, "train": {"global_batch": 16}}
    made = Forecast.of(config_of(4, **groups), 4)
    peaks = [rank.bytes["peak"] for rank in made.ranks]
    assert made.with_imbalance(1.0).peak == max(peaks) > min(peaks)  # type: ignore[union-attr]


def test_the_peak_with_a_room_is_forecast() -> None:
    """It does not depend on the load, and is larger than without a room."""
    groups = {"model": MODEL, "parallel": {"ep": 2}, "train": {"global_batch": 8}}
    configs = [
        config_of(2, experts={"room": room, "capacity": capacity, "aux_loss": 0.01}, **groups)
        for room, capacity in ((0.0, 0.0), (1.75, 0.0), (1.75, 1.5))
    ]
    measured = run_ranks(2, measure_all, configs, [1.0, 1.5], timeout=1800)
    peaks = []
    for number, config in enumerate(configs):
        peaks.append(max(rank.bytes["peak"] for rank in Forecast.of(config, 2).ranks))
        for place in range(2) if number else range(1):
            most = max(rank[number][place] for rank in measured)
            print(f"{config.experts} {peaks[-1]:,} for {most:,}")
            assert -0.03 <= peaks[-1] / most - 1 <= 0.05
    assert peaks[1] > 1.1 * peaks[0]


def test_a_room_limits_the_imbalance() -> None:
    """More rows than fit are not sent: the step is skipped."""
    groups = {"model": MODEL, "parallel": {"ep": 2}, "train": {"global_batch": 16}}
    made = Forecast.of(config_of(2, experts={"room": 1.5}, **groups), 2)
    peaks = [made.with_imbalance(load) for load in (1.5, 2.0)]
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0].peak == peaks[1].peak
    assert "2 times the mean" in made.imbalance_text()


def test_models_without_expert_ranks_have_no_imbalance() -> None:
    made = Forecast.of(config_of(2, model=MODEL, train={"global_batch": 8}), 2)
    assert made.with_imbalance(2.0) is None
    assert made.imbalance_text() == ""
