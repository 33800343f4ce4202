"""Layers that do something wrong on an accelerator: they read values on the host, or make it wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from threed.config import Config
from threed.layers import Slicing
from threed.models import Decoder


def reads_an_item(y: Tensor) -> Tensor:
    return y * y.sum().item()


def asks_whether(y: Tensor) -> Tensor:
    return y if bool((y > 0).any()) else -y


def makes_a_list(y: Tensor) -> Tensor:
    return y * len(y.sum((1, 2)).tolist())


def selects(y: Tensor) -> Tensor:
    return y + y.detach().nonzero().shape[1]


def takes_a_scalar_of_the_host(y: Tensor) -> Tensor:
    return y * torch.tensor(0.5)


def takes_a_tensor_of_the_host(y: Tensor) -> Tensor:
    return y + torch.zeros(y.shape[-1], dtype=y.dtype)


def copies_to_the_host(y: Tensor) -> Tensor:
    return y + y.detach().cpu().to(y.device, non_blocking=True).sum()


def makes_a_tensor_of_a_number(y: Tensor) -> Tensor:
    return y * torch.tensor(0.5, device=y.device)


def copies_from_pageable_memory(y: Tensor) -> Tensor:
    return y + torch.zeros(y.shape[-1], dtype=y.dtype).to(y.device, non_blocking=True)


class Planted(nn.Module):
    """A layer that does something wrong to what another one returns."""

    def __init__(self, layer: nn.Module, wrong: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.wrong, self.name = layer, wrong, layer.name

    def forward(self, x: Any, micro: Any) -> Any:
        return self.wrong(self.layer(x, micro))


class PlantedModel:
    """A GPT with such a layer in it."""

    def __init__(self, config: Config, slicing: Slicing, wrong: Callable[[Tensor], Tensor]) -> None:
        self.inner, self.slicing, self.wrong = Decoder(config.model, slicing), slicing, wrong
        self.costs = lambda micro_batch: [1.0] * (config.model.layers + 2)

    def layers(self) -> list[nn.Module]:
        """The layers of the GPT, the second of them planted."""
        first, second, *rest = self.inner.layers()
        return [first, Planted(second, self.wrong), *rest]
