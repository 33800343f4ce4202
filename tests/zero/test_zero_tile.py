"""Tiles of linear layers under ZeRO-3: never more than two whole at once, and the same training as in one process."""

from __future__ import annotations

import pytest
import torch

from tests.configs import Case, Result, config_of, engine_of, train
from tests.harness import run_ranks
from threed.config import ConfigError
from threed.zero.gather import Gatherer
from threed.zero.layout import Group


def train_and_watch(case: Case) -> tuple[Result, int]:
    """A run, and how many tiles were whole at once at most."""
    most, inner = 0, Gatherer.open

    def open_(self: Gatherer, group: Group, holder: int) -> None:
        nonlocal most
        inner(self, group, holder)
        most = max(most, sum(held.key.tile is not None for held in self._holders))

    Gatherer.open = open_  # type: ignore[method-assign]
    try:
        return train(case), most
    finally:
        Gatherer.open = inner  # type: ignore[method-assign]


CASES = [
    Case(dp=2, zero=3, tile=3, model="qwen-tied"),
    pytest.param(Case(dp=2, zero=3, tile=4, bucket_mib=0.002), marks=pytest.mark.grid),
    Case(dp=2, tp=2, zero=3, tile=3, sequence=True, model="llama"),
    Case(pp=2, dp=2, zero=3, tile=2, microbatches=8),
    Case(zero=3, tile=2, offload_params="nvme", offload_optimizer="nvme"),
    pytest.param(
        Case(dp=2, zero=3, tile=2, offload_params="nvme", dropout=0.1), marks=pytest.mark.grid
    ),
    Case(dp=2, zero=3, tile=3, offload_params="cpu", recompute="full"),
    pytest.param(Case(dp=2, zero=3, tile=3, recompute="selective"), marks=pytest.mark.grid),
]


@pytest.mark.seldom("*model='qwen-tied'*", "*offload_params='cpu'*")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_come_one_by_one_and_change_nothing(case: Case) -> None:
    ((truth, _),) = run_ranks(1, train_and_watch, case.truth)
    got, most = run_ranks(case.world, train_and_watch, case)[0]
    assert most == 2
    assert got.losses == pytest.approx(truth.losses, abs=1e-9)
    assert got.weights.keys() == truth.weights.keys()
    for name, want in truth.weights.items():
        torch.testing.assert_close(got.weights[name], want, rtol=0, atol=1e-9)


def test_a_model_that_is_cut_otherwise_is_refused() -> None:
    config = config_of(Case(zero=3, layers=2))
    config = config.model_copy(update={"zero": config.zero.model_copy(update={"tile": 4})})
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    from threed.distributed.topology import Topology
    from threed.engine import Engine

    with pytest.raises(ConfigError, match=r"--zero\.tile 4.*leave it out"):
        Engine(module, Topology(), config)
    assert engine_of(config).layout.parameters


def count_resident(tile: int) -> int:
    config = config_of(Case(dp=2, zero=3, layers=2, tile=tile))
    config = config.model_copy(update={"zero": config.zero.model_copy(update={"resident": 1000})})
    engine = engine_of(config)
    return sum(group.numel for group in engine.layout.groups if not group.sliced)


def test_tiles_of_a_large_matrix_do_not_stay_whole_for_being_small() -> None:
    few, many = (run_ranks(2, count_resident, tile)[0] for tile in (1, 8))
    assert few == many
