"""What an engine refuses when it is built from Python, past the command line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.configs import Case, config_of, engine_of, topology_of
from threed.config import ConfigError
from threed.engine import Engine
from threed.models import Wrapped


@pytest.mark.parametrize(
    ("group", "changes", "named"),
    [
        ("parallel", {"cp": 2}, "--parallel.cp 2"),
        ("precision", {"dtype": "fp8"}, "--precision.dtype fp8"),
    ],
)
def test_a_feature_that_is_not_there_is_refused_by_name(group: str, changes: dict[str, object], named: str) -> None:
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
    assert Engine(module, topology_of(1, 1), config).step({"x": x}).loss == pytest.approx(want, rel=1e-12)
    wrapped = Wrapped(Named())
    assert Engine(wrapped, topology_of(1, 1), config).model is wrapped
    with pytest.raises(TypeError, match=r"dict is no model: pass an nn\.Module, or layers with their `slicing`"):
        Engine({}, topology_of(1, 1), config)  # type: ignore[arg-type]
