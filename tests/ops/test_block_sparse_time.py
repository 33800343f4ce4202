"""The time of block-sparse attention on a CPU, beside dense causal attention by torch's fused kernel."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from threed.layers import Causal, LongformerPattern, SparseAttention

LENGTH, HEADS, SIZE, ROUNDS = 4096, 4, 64, 7
# An eighth of the blocks on and below the diagonal, or a little less.
EIGHTHS = {
    "64 positions": LongformerPattern(block=64, num_sliding_window_blocks=5),
    "128 positions": LongformerPattern(block=128, num_sliding_window_blocks=1),
}


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["64 positions", pytest.param("128 positions", marks=pytest.mark.grid)]
)
def test_an_eighth_of_the_blocks_takes_at_most_three_tenths_of_the_time(name: str) -> None:
    """Forward and backward in turns; medians of CPU time, which other processes disturb little."""
    core = SparseAttention(EIGHTHS[name])
    blocks = LENGTH // core.pattern.block
    listed = sum(len(core.pattern.key_blocks(i, blocks)) for i in range(blocks))
    assert 0.11 < listed / (blocks * (blocks + 1) / 2) <= 0.125
    draw = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(LENGTH, 1, HEADS, SIZE, generator=draw).requires_grad_() for _ in range(3)
    )
    times: dict[object, list[float]] = {core: [], Causal(): []}
    for _ in range(ROUNDS):
        for attends, taken in times.items():
            begin = time.process_time()
            attends(q, k, v).sum().backward()  # type: ignore[operator]
            taken.append(time.process_time() - begin)
    sparse, dense = (statistics.median(taken[1:]) for taken in times.values())
    print(f"\n{name}: sparse {sparse:.3f} s, dense {dense:.3f} s, ratio {sparse / dense:.3f}")
    assert sparse <= 0.3 * dense, f"{sparse:.3f} s beside {dense:.3f} s"
