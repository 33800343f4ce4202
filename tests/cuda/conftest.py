"""On which device a test of a kernel runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from threed.ops import launch


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The emulator, on tensors of the CPU; or a GPU, on which all tensors of the test are made."""
    if request.param == "cuda":
        launch.problem(torch.device("cuda", 0))  # its test kernel is not a launch of the test
    with torch.device("cuda" if request.param == "cuda" else "cpu"):
        yield request.param
