"""Attention with a window over long sequences is traced in few operations."""

from __future__ import annotations

import torch

from threed.ops.attention import CHUNKS_OF_A_TRACE, _chunks


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
