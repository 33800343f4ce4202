"""Every matrix product of a linear layer is made by the layer's `Matmul`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers.test_layers import local_weight
from threed.config import ModelConfig
from threed.layers import LanguageModelHead, MicroBatch, Slicing
from threed.layers.linear import Product
from threed.models import build
from threed.ops import launch, matmul
from threed.ops.matmul import Matmul

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_linear_pointwise"}


class Watched(TorchDispatchMode):
    """Counts products by the function of `by` that made them; "none" if they were made elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.running = Counter[str](), list[str]()
        names = ("linear", "input_gradient", "product", "add_product_")
        self.by = Matmul(*(self.counted(name, getattr(matmul, name)) for name in names))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **keywords: Any) -> Any:
            self.running.append(name)
            try:
                return function(*args, **keywords)
            finally:
                self.running.pop()

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket.__name__ in PRODUCTS:
            self.found[self.running[-1] if self.running else "none"] += 1
        return func(*args, **(kwargs or {}))


def gradients(tile: int, chunks: int, by: Matmul | None) -> list[Tensor]:
    """Of the loss of a small model, whose layers multiply so."""
    config = ModelConfig(arch="gpt", vocab=53, hidden=24, heads=4, layers=2, seq=8)
    layers = build(config, Slicing(tile=tile)).layers()
    for module in (part for layer in layers for part in layer.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(local_weight(param)))
        if by is not None and isinstance(module, Product | LanguageModelHead):
            module.matmul = by
    ids = torch.arange(16).remainder(53).view(2, 8)
    scale = torch.ones((), dtype=torch.float64)
    x, micro = None, MicroBatch(ids, ids, torch.arange(2), scale, loss_chunks=chunks)
    for layer in layers:
        x = layer(x, micro)
    assert x is not None
    x.backward()
    return [
        param.grad for layer in layers for param in layer.parameters() if param.grad is not None
    ]


@pytest.mark.parametrize(("tile", "chunks"), [(1, 1), (1, 3), (2, 1)])
def test_all_products_are_of_the_strategy(tile: int, chunks: int) -> None:
    with Watched() as watched:
        got = gradients(tile, chunks, watched.by)
    linears = 4 * 2
    assert "none" not in watched.found
    if tile == 1:
        weights = linears + chunks
        assert watched.found["linear"] == linears + (2 * chunks if chunks > 1 else 1)
        assert watched.found["input_gradient"] == weights
        assert watched.found["product"] + watched.found["add_product_"] == weights
    assert len(got) > linears
    for grad, want in zip(got, gradients(tile, chunks, None), strict=True):
        assert torch.equal(grad, want)


def test_a_product_elsewhere_would_be_seen() -> None:
    with Watched() as watched:
        gradients(1, 1, None)
    assert watched.found.keys() == {"none"}


@pytest.mark.parametrize("fresh", [True, False])
def test_a_plan_for_gpus_uses_no_addmm_that_some_torch_lacks_on_the_meta_device(
    fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, torch 2.11 fails in `addmm` with `out_dtype`: no run on a GPU got past its plan."""

    def as_in_torch_2_11(*args: Any, **keywords: Any) -> None:
        raise TypeError("unsupported operand type(s) for *: 'torch.dtype' and 'Tensor'")

    monkeypatch.setattr(launch, "on_gpu", lambda x: True)
    monkeypatch.setattr(torch, "addmm", as_in_torch_2_11)
    a, b = (torch.empty(n, m, dtype=torch.bfloat16, device="meta") for n, m in ((8, 4), (4, 6)))
    out = torch.empty(8, 6, device="meta")
    assert matmul.widens(a, b, torch.float32)
    matmul.add_product_(out, a, b, fresh=fresh)
