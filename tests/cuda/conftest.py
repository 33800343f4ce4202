"""On which device a test of a kernel runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The emulator, on tensors of the CPU; or a GPU, on which all tensors of the test are made."""
    with torch.device("cuda" if request.param == "cuda" else "cpu"):
        yield request.param
