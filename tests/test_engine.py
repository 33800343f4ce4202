"""What an engine refuses when it is built from Python, past the command line."""

from __future__ import annotations

import pytest

from tests.configs import Case, config_of, engine_of
from threed.config import ConfigError


@pytest.mark.parametrize(
    ("group", "changes", "named"),
    [
        ("parallel", {"cp": 2}, "--parallel.cp 2"),
        ("checkpoint", {"async_": True}, "--checkpoint.async true"),
        ("precision", {"dtype": "fp8"}, "--precision.dtype fp8"),
    ],
)
def test_a_feature_that_is_not_there_is_refused_by_name(group: str, changes: dict[str, object], named: str) -> None:
    config = config_of(Case(dtype="fp32"))
    config = config.model_copy(update={group: getattr(config, group).model_copy(update=changes)})
    with pytest.raises(ConfigError, match=named):
        engine_of(config)
