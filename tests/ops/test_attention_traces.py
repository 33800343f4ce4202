"""Traces of attention on the meta device: for which device, and in how many operations."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from threed.ops import attention
from threed.ops.attention import CHUNKS_OF_A_TRACE, _chunks, attend


def test_a_trace_of_a_long_sequence_has_few_chunks() -> None:
    on_meta, on_cpu = (
        torch.empty(8192, 1, 16, 1, device=device) for device in (torch.device("meta"), "cpu")
    )
    traced, run = list(_chunks(on_meta, 1024)), list(_chunks(on_cpu, 1024))
    assert len(traced) <= CHUNKS_OF_A_TRACE < len(run)
    assert [rows.start for rows, _ in traced] == list(range(0, 8192, 128))
    short = on_meta[:256]
    assert [rows for rows, _ in _chunks(short, 64)] == [
        rows for rows, _ in _chunks(on_cpu[:256], 64)
    ]


@pytest.mark.parametrize(("device", "heads"), [("cuda", 8), ("cpu", 2)])
def test_a_trace_for_a_gpu_repeats_grouped_heads_under_a_mask(device: str, heads: int) -> None:
    """CUDA's fused attention does not support them, so a layer keeps repeated keys and values."""
    q, k = (torch.empty(16, 1, n, 4, device="meta") for n in (8, 2))
    mask = torch.empty(16, 16, dtype=torch.bool, device="meta")
    inner = F.scaled_dot_product_attention
    with (
        patch.object(attention, "default_device", lambda: torch.device(device)),
        patch.object(F, "scaled_dot_product_attention", side_effect=inner) as fused,
    ):
        attend(q, k, k, mask)
    assert [part.shape[1] for part in fused.call_args.args[:3]] == [8, heads, heads]
