"""What an engine refuses when it is built from Python, past the command line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.configs import Case, batch, config_of, engine_of, topology_of
from tests.harness import run_ranks
from threed.config import ConfigError
from threed.engine import Engine
from threed.metrics import BadStepsError
from threed.models import Wrapped


@pytest.mark.parametrize(
    ("group", "changes", "named"),
    [
        ("parallel", {"cp": 2}, "--parallel.cp 2"),
        ("precision", {"dtype": "fp8"}, "--precision.dtype fp8"),
    ],
)
def test_a_feature_that_is_not_there_is_refused_by_name(
    group: str, changes: dict[str, object], named: str
) -> None:
    config = config_of(Case(dtype="fp32"))
    config = config.model_copy(update={group: getattr(config, group).model_copy(update=changes)})
    with pytest.raises(ConfigError, match=named):
        engine_of(config)


class Named(nn.Module):
    """A user's own attribute of the name that threed's models have."""

    slicing = "slices of the video"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_what_is_a_model() -> None:
    """threed's own have a Slicing; other modules are wrapped, whatever they are called; the rest is refused."""
    config = config_of(Case(microbatches=-2))
    module = Named()
    x = torch.ones(2, 4, dtype=torch.float64)
    want = float(module(x).detach())
    assert Engine(module, topology_of(1, 1), config).step({"x": x}).loss == pytest.approx(
        want, rel=1e-12
    )
    wrapped = Wrapped(Named())
    assert Engine(wrapped, topology_of(1, 1), config).model is wrapped
    with pytest.raises(
        TypeError, match=r"dict is no model: pass an nn\.Module, or layers with their `slicing`"
    ):
        Engine({}, topology_of(1, 1), config)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- what metrics show


def test_metrics_show_their_values() -> None:
    """Also of a step whose loss is no number, whose properties raise."""
    config = config_of(Case(microbatches=-2))
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"max_bad_steps": 1})}
    )
    engine = Engine(Named(), topology_of(1, 1), config)
    metrics = engine.step({"x": torch.ones(2, 4, dtype=torch.float64)})
    shown = repr(metrics)
    assert shown.startswith(
        f"StepMetrics(step=1, tokens={metrics.tokens}, loss={metrics.loss:.6g}, grad_norm="
    )
    assert f"lr={metrics.lr:.6g}, loss_scale=1, skipped=0, bad_steps=0, fwd_bwd_s=" in shown
    bad = engine.step({"x": torch.full((2, 4), torch.nan, dtype=torch.float64)})
    assert "loss=nan" in str(bad)
    assert "skipped=1, bad_steps=1" in str(bad)
    with pytest.raises(BadStepsError):
        print(bad.loss)


def shown_while_updates_are_optimistic() -> list[str]:
    case = Case(pp=2, layers=2, microbatches=4)
    config = config_of(case)
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"optimistic_step": True})}
    )
    engine = engine_of(config)
    metrics = engine.step(batch(0, case.rows))
    before = (
        repr(metrics) if engine.topology.rank == 0 else ""
    )  # on one rank alone: it must not wait for others
    return [before, f"loss={metrics.loss:.6g}", repr(metrics)]


def test_metrics_that_need_other_ranks_show_that_they_were_not_read() -> None:
    for before, loss, after in run_ranks(2, shown_while_updates_are_optimistic):
        assert before == "" or "step=1, " in before
        assert before == "" or "loss=<not read yet>, grad_norm=<not read yet>" in before
        assert f"{loss}, grad_norm=" in after
