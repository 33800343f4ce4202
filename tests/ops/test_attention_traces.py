"""Traces of attention on the meta device: for which device, and in how many operations."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from threed.ops import attention
from threed.ops.attention import CHUNKS_OF_A_TRACE, Causal, Chunks, attend


def test_a_trace_of_a_long_sequence_has_few_chunks() -> None:
    on_meta, on_cpu = (
        torch.empty(1, 16, 8192, 1, device=device) for device in (torch.device("meta"), "cpu")
    )

    def queries(q: Tensor, window: int) -> list[slice]:
        return [step.at[2] for step in Chunks(Causal(window)).steps(q, q, q)]

    traced, run = queries(on_meta, 1024), queries(on_cpu, 1024)
    assert len(traced) <= CHUNKS_OF_A_TRACE < len(run)
    assert [at.start for at in traced] == list(range(0, 8192, 128))
    assert queries(on_meta[:, :, :256], 64) == queries(on_cpu[:, :, :256], 64)


@pytest.mark.parametrize(("device", "calls", "heads"), [("cuda", 4, 2), ("cpu", 1, 8)])
def test_grouped_heads_under_a_mask_repeat_no_keys(device: str, calls: int, heads: int) -> None:
    """CUDA's fused attention does not take groups under a mask: one head of every group attends at a time."""
    q, k = (torch.empty(16, 1, n, 4, device="meta") for n in (8, 2))
    mask = torch.empty(16, 16, dtype=torch.bool, device="meta")
    inner = F.scaled_dot_product_attention
    with (
        patch.object(attention, "default_device", lambda: torch.device(device)),
        patch.object(F, "scaled_dot_product_attention", side_effect=inner) as fused,
    ):
        attend(q, k, k, mask)
    shapes = [[part.shape[1] for part in call.args[:3]] for call in fused.call_args_list]
    assert shapes == [[heads, 2, 2]] * calls
    keys = [
        part.untyped_storage()._cdata for call in fused.call_args_list for part in call.args[1:3]
    ]
    assert set(keys) == {k.untyped_storage()._cdata}


@pytest.mark.parametrize("size", [(), (4,), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("learned", [False, True])
def test_groups_one_at_a_time_are_attention_of_all(size: tuple[int, ...], learned: bool) -> None:
    draw = torch.Generator().manual_seed(2)
    shapes = [(7, 2, 4, 6), (7, 2, 2, 6), (7, 2, 2, 6), (*size, 7, 7)]
    q, k, v, bias = (torch.randn(s, dtype=torch.float64, generator=draw) for s in shapes)
    given = [x.requires_grad_() for x in (q, k, v, *([bias] if learned else []))]
    results = []
    for grouped in (True, False):
        with patch.object(attention, "_takes_groups", lambda *_, grouped=grouped: grouped):
            y = attend(q, k, v, bias, 0.3)
        results.append((y, *torch.autograd.grad(y.square().sum(), given)))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)


def saved_bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> int:
    """Bytes of the distinct tensors that attention keeps for its backward, without its inputs."""
    sizes: dict[int, int] = {}
    keep = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        keep.append(x)
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = attend(q, k, v, mask)
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, mask, y)}
    return sum(n for at, n in sizes.items() if at not in given)


def test_grouped_heads_under_a_mask_keep_one_output_more_and_no_keys() -> None:
    """Kept: the outputs of the calls (as many bytes as q), and a log-sum-exp per query and head."""
    q, k = (torch.randn(64, 2, n, 32, requires_grad=True) for n in (8, 2))
    v, mask = k.detach().clone().requires_grad_(), torch.zeros(64, 64)
    with patch.object(attention, "_takes_groups", lambda *_: False):
        kept = saved_bytes(q, k, v, mask)
    assert kept <= 4 * (q.numel() + q.numel() // 32)
