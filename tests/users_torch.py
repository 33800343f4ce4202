"""Pipeline layers of torch's own modules, whose weight gradients are difficult to defer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.users_layers import whole
from tests.users_models import Decoder
from threed.layers import MicroBatch, Slicing

Run = Callable[..., Tensor]


class Torch(nn.Module):
    """x + run(x, *modules), with sharding records on the modules' parameters."""

    def __init__(self, name: str, slicing: Slicing, run: Run, *modules: nn.Module) -> None:
        super().__init__()
        self.name, self.run, self.inner = name, run, nn.ModuleList(modules).double()
        made = {
            param: whole(f"{name}.{path}", param.shape, slicing)
            for path, param in self.inner.named_parameters()
        }
        for owner in self.inner.modules():
            for key, param in list(owner.named_parameters(recurse=False)):
                setattr(owner, key, made[param])

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x + self.run(x, *self.inner)


def in_place(x: Tensor, *parts: nn.Module) -> Tensor:
    """Applies modules one after the other; some of them change their input in place."""
    return nn.Sequential(*parts)(x)


def forces(x: Tensor, linear: nn.Module) -> Tensor:
    """Returns the gradient of an energy that a linear layer computes; the layer is used once more.

    The backward differentiates this gradient again.
    """
    with (
        torch.enable_grad()
    ):  # also in the forward of a recomputed layer, which runs without gradients
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = linear(x).tanh().square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0] + linear(x)


def vectors(x: Tensor, linear: nn.Module) -> Tensor:
    """Applies a linear layer to vectors, one by one."""
    return torch.stack([linear(one) for one in x.flatten(0, 1)]).view_as(x)


def beside(x: Tensor, first: nn.Linear, normed: nn.Module) -> Tensor:
    """Uses a weight computed from other weights, and a weight read outside of its module."""
    return F.linear(first(normed(x)).tanh(), first.weight.t())


def heads(x: Tensor, attention: nn.Module) -> Tensor:
    """Applies a module that reads the weight of a linear layer inside it."""
    return attention(x, x, x, need_weights=False)[0]


class TorchModules(Decoder):
    """A model with a layer of each kind."""

    def layers(self) -> list[nn.Module]:
        h, slicing = self.hidden, self.slicing
        parts = (
            nn.Linear(h, h),
            nn.ReLU(inplace=True),
            nn.Linear(h, h, bias=False),
            nn.ReLU(inplace=True),
        )
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(h, h))
        found = [
            Torch("in-place", slicing, in_place, *parts),
            Torch("forces", slicing, forces, nn.Linear(h, h)),
            Torch("vectors", slicing, vectors, nn.Linear(h, h)),
            Torch("beside", slicing, beside, nn.Linear(h, h), normed),
            Torch("flat", slicing, lambda x, gru: gru(x)[0], nn.GRU(h, h)),
            Torch("heads", slicing, heads, nn.MultiheadAttention(h, 2)),
        ]
        return [self.embedding(), *found, self.head()]
