"""What the backward of a custom `autograd.Function` gets for a saved parameter: the parameter itself, as in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.configs import topology_of
from tests.harness import run_ranks
from threed import Config, Engine

WIDTH, RANKS = 8, 2


class Product(torch.autograd.Function):
    """x @ weight.T, which adds the weight's gradient to `weight.main_grad`, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, view: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, view)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, view = ctx.saved_tensors
        own = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        weight.main_grad.add_(own)
        weight.saved.append(weight)
        assert torch.equal(weight, view)
        return grad @ weight, own, None


class Net(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.recomputes = recomputes
        prepare(self.second.weight)

    def product(self, x: Tensor) -> Tensor:
        weight = self.second.weight
        out: Tensor = Product.apply(x, weight, weight.view(WIDTH, WIDTH))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = checkpoint(self.product, x, use_reentrant=True) if self.recomputes else self.product(x)
        return x.square().mean()


def prepare(weight: Any) -> None:
    weight.main_grad, weight.saved = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), []


def net(recomputes: bool) -> Net:
    torch.manual_seed(0)
    return Net(recomputes).double()


def rows(rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(2, WIDTH, generator=draw, dtype=torch.float64)


def of_wrapped() -> None:
    """Stages 0 to 3; the values are those of plain PyTorch, divided by the number of ranks."""
    for recomputes in (False, True):
        for stage, offload in ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "cpu")):
            module, right = net(recomputes), net(recomputes)
            for some in (module, right):
                prepare(some.second.weight)
            config = Config.model_validate({
                "zero": {"stage": stage, "resident": 0, "offload_params": offload}, "precision": {"dtype": "fp64"},
                "train": {"global_batch": 2 * RANKS, "micro_batch": 2},
            })  # fmt: skip
            engine: Any = Engine(module, topology_of(1, 1), config)
            engine.begin()
            engine.backward(module(rows(engine.topology.rank)))
            right(rows(engine.topology.rank)).backward()
            weight: Any = module.second.weight
            assert [some is weight for some in weight.saved] == [True]
            wanted: Any = right.second.weight
            torch.testing.assert_close(
                weight.main_grad * RANKS, wanted.main_grad, rtol=1e-12, atol=1e-12
            )
            engine.update()


def test_a_saved_parameter_is_the_parameter() -> None:
    run_ranks(RANKS, of_wrapped)
