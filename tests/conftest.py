"""What holds for all tests: one thread a rank, nothing downloads, GPU tests skip themselves."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

# No deadline: machines that share cores stall. Repeatable in CI, where nobody can look at a failing example.
settings.register_profile("threed", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("threed")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":  # else ranks that share a machine would fight over one GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        reason = f"needs a CUDA device, which torch {torch.__version__} does not see; run it by pytest -m gpu"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
