"""Models as lists of pipeline layers, by the name of their architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from threed.config import ModelConfig
from threed.layers import Slicing
from threed.models.gpt import GPT
from threed.models.llama import Llama
from threed.models.wrapped import Wrapped as Wrapped

ARCHITECTURES: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}


class Model(Protocol):
    """What an engine needs of a model: its pipeline layers, the width of what passes between them, and the slicing.

    A layer maps (x, micro) to x; the first gets None, the last returns the micro-batch's weighted loss, or logits when
    the micro-batch has no labels.
    """

    hidden: int
    slicing: Slicing

    def layers(self) -> list[nn.Module]:
        """The pipeline layers in order, on the meta device, each with a global `name`."""

    def costs(self, micro_batch: int) -> Sequence[float]:
        """What each layer costs, in any unit: what stages are balanced by."""


def build(config: ModelConfig, slicing: Slicing) -> Model:
    """The model that `config.arch` names."""
    return ARCHITECTURES[config.arch](config, slicing)
