"""Reads the weights of a model of `transformers` in memory, and writes trained weights as a folder."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters, under all of their names, and the buffers of a module.

    Selection biases of experts are buffers in `transformers`.
    """
    named = module.named_parameters(remove_duplicate=False)
    return {**dict(named), **dict(module.named_buffers())}


class LiveModel(ABC):
    """Base class of models of pipeline layers with the initial weights of a module.

    The weights are read from the module when an engine is created. Afterwards `module.to("meta")`
    frees them.

    Args:
        module: the model of `transformers`.

    Attributes:
        module: the model of `transformers`.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    @abstractmethod
    def named_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns weights under the names of `transformers`, with one name per tied weight."""

    def hf_state_dict(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns weights for `module.load_state_dict`, on rank 0.

        Args:
            weights: the result of `Engine.full_state_dict`.

        Returns:
            The weights under the names of `transformers`. A tied weight has several names. The
            result is empty if `weights` is empty, as on ranks other than 0.
        """
        if not weights:
            return {}
        named = self.named_weights(weights)
        tensors = list(tensors_of(self.module).items())
        first = {id(tensor): name for name, tensor in reversed(tensors) if name in named}
        return {name: named[first[id(t)]] for name, t in tensors if id(t) in first}

    def save_pretrained(self, folder: str | Path, weights: Mapping[str, Tensor]) -> None:
        """Writes a Hugging Face folder with the module's configuration and other weights.

        Weights are written in the dtypes of the module's parameters. The method does nothing if
        `weights` is empty, as on ranks other than 0.

        Args:
            folder: the folder to write.
            weights: the result of `Engine.full_state_dict`.
        """
        if weights:
            tensors = tensors_of(self.module)
            # The names of a tied weight get one tensor, which transformers then writes once.
            cast: dict[int, Tensor] = {}
            state = {
                name: cast.setdefault(id(tensors[name]), value.to(tensors[name].dtype))
                for name, value in self.hf_state_dict(weights).items()
            }
            self.module.save_pretrained(folder, state_dict=state)


def random_values(model: Any, name: str, seed: int) -> Tensor:
    """Returns initial values of a parameter on the meta device, drawn by the model's own code.

    The values depend only on the name and the seed, so they are equal in all topologies.

    Args:
        model: a model of `transformers`.
        name: name of the parameter.
        seed: seed of the initialization.
    """
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    fresh = copy.deepcopy(module, {id(child): child for child in module.children()})
    fresh._modules = {}
    fill(fresh, model, int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4]))
    return fresh.get_parameter(key).detach()


def fill(module: nn.Module, model: Any, seed: int) -> None:
    """Allocates the tensors of a module on the CPU, with initial values by the model's own code.

    Args:
        module: a part of the model, on the meta device.
        model: the model of `transformers`.
        seed: seed of the random values.
    """
    module.to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for part in module.modules():
            model._init_weights(part)
