"""What the backward of a custom `autograd.Function` gets for a saved parameter: the parameter itself, as in PyTorch."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.configs import RECOMPUTE, topology_of
from tests.harness import run_ranks
from threed import Config, Engine, Topology, layers
from threed.config.resolution import resolve
from threed.distributed.sharding import Init, Piece, ShardSpec

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


class First(layers.PipelineLayer):
    name = "first"

    def forward(self, x: Tensor | None, micro: layers.MicroBatch) -> Tensor:
        assert micro.tokens is not None
        return micro.tokens.t()[..., None].double().expand(-1, -1, WIDTH) / 10 + 1


class Middle(layers.PipelineLayer):
    name = "middle"

    def __init__(self) -> None:
        super().__init__()
        whole = Piece("middle.weight", (WIDTH, WIDTH), (0, 0), (WIDTH, WIDTH), init=Init(std=0.1))
        spec = ShardSpec((whole,), replicated="tp")
        self.weight = layers.parameter(spec, (WIDTH, WIDTH))

    def forward(self, x: Tensor, micro: layers.MicroBatch) -> Tensor:
        out: Tensor = Product.apply(x, self.weight, self.weight.view(WIDTH, WIDTH))
        return out


class Last(layers.PipelineLayer):
    name, recomputable = "last", False

    def forward(self, x: Tensor, micro: layers.MicroBatch) -> Tensor:
        assert micro.weight is not None
        return x.square().sum() * micro.weight


class Layered:
    def __init__(self, slicing: layers.Slicing) -> None:
        self.slicing, self.hidden = slicing, WIDTH

    def layers(self) -> list[nn.Module]:
        return [First(), Middle(), Last()]


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


def of_layers() -> None:
    """Recomputed layers, whose inputs are saved on a drive, or sliced over tensor ranks."""
    for tp in (1, RANKS):
        topology = topology_of(1, tp)
        for stage, mode in (
            (0, "none"),
            (1, "full"),
            (2, "nvme"),
            (3, "full"),
            (3, "sliced" if tp > 1 else "nvme"),
        ):
            config = layers_config(stage, RECOMPUTE[mode], topology)
            model = Layered(layers.Slicing(topology.axis("tp"), False))
            engine = Engine(model, topology, config)
            weight: Any = engine.blueprint.layers[1].weight
            prepare(weight)
            tokens = torch.arange(8).view(2, 4)
            engine.step({"tokens": tokens, "labels": tokens})
            assert [some is weight for some in weight.saved] == [True]
            assert weight.main_grad.abs().sum() > 0


def layers_config(stage: int, recompute: dict[str, Any], topology: Topology) -> Config:
    drive = tempfile.gettempdir() if recompute.get("offload") == "nvme" else None
    config = Config.model_validate({
        "parallel": {"tp": topology.tp, "sequence": False}, "precision": {"dtype": "fp64"}, "recompute": recompute,
        "zero": {"stage": stage, "resident": 0, "nvme_path": drive},
        "train": {"global_batch": 2 * topology.dp, "micro_batch": 2}, "model": {"seq": 4},
    })  # fmt: skip
    return resolve(config, 10, topology.world)


def test_a_saved_parameter_of_a_layer_is_the_parameter() -> None:
    run_ranks(RANKS, of_layers)


def test_a_saved_parameter_is_the_parameter() -> None:
    run_ranks(RANKS, of_wrapped)
