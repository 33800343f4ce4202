"""The tier of host memory: memory is occupied when it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from threed.memory.tiers import LAZY_BYTES, InMemory, memory_tier

CPU = torch.device("cpu")


def resident() -> int:
    """The resident memory of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory is always resident")
@pytest.mark.parametrize("numel", [LAZY_BYTES // 8, 2**25])
def test_host_memory_is_zero_and_occupied_when_it_is_written(numel: int) -> None:
    before = resident()
    storage = memory_tier(CPU)(numel, torch.float64)
    assert isinstance(storage, InMemory)
    assert resident() - before < numel * 8 // 1024 // 4 + 4096
    values = storage.fetch().wait()
    assert values.shape == (numel,)
    assert values.dtype == torch.float64
    assert values[0] == values[-1] == 0
    values[-1] = 1.0
    assert values.clone()[-1] == 1.0


def test_an_error_names_the_bytes_that_cannot_be_allocated() -> None:
    with pytest.raises(RuntimeError, match=str(2**50)):
        memory_tier(CPU)(2**48, torch.float32)
