"""Models of `transformers` in tensor and pipeline parallelism.

    model = threed.from_transformers(module, threed.Slicing(topology.axis("tp")))
    engine = threed.Engine(model, topology, config)
    model.save_pretrained("trained", engine.full_state_dict())

A model of an architecture in `threed.config.architectures` is rebuilt from `threed.layers`. Any
other decoder is sliced by the plans in its configuration (`planned`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import MemoryTensor, read_box
from threed.config import ConfigError
from threed.distributed.sharding import Piece, few, initial
from threed.interop.huggingface.changes import find_changes, shared_parameters
from threed.interop.huggingface.layouts import (
    Entry,
    default_seq,
    entries,
    model_of,
    state_dict_to_hf,
)
from threed.interop.huggingface.live_weights import LiveModel, tensors_of
from threed.interop.huggingface.planned import PlannedDecoder
from threed.layers import Slicing
from threed.models import Decoder


def from_transformers(
    module: Any, slicing: Slicing | None = None, *, plan: bool | None = None
) -> RebuiltDecoder | PlannedDecoder:
    """Returns a model of pipeline layers with the weights of a model of `transformers`.

    `threed.Engine` trains the result in any topology. The initial weights are the weights of
    `module`, which is not changed. If `module` is on the meta device, the initial weights are
    random.

    Args:
        module: a causal language model of `transformers` with its head.
        slicing: how layers are sharded over tensor ranks; by default they are not sharded.
        plan: True to slice the module by the plans in its configuration, False to rebuild it from
            `threed.layers`. None: it is rebuilt if threed has its architecture.

    Raises:
        ConfigError: if the module can be neither rebuilt nor sliced; the message has the reasons.
        TypeError: if `module` is not a model of `transformers`.

    Example:

        module = transformers.AutoModelForCausalLM.from_pretrained("Llama-3.1-8B")
        topology = threed.Topology(pp=2, tp=2)
        model = threed.from_transformers(module, threed.Slicing(topology.axis("tp")))
        config = threed.config.resolve(threed.Config(model=model.config), 0, topology.world)
        engine = threed.Engine(model, topology, config)
    """
    if not isinstance(module, nn.Module) or not hasattr(module, "base_model_prefix"):
        text = "pass a causal language model of transformers (AutoModelForCausalLM)"
        raise TypeError(f"{type(module).__name__} is not a model of transformers: {text}")
    slicing = slicing or Slicing()
    if plan:
        return PlannedDecoder(module, slicing)
    try:
        return RebuiltDecoder(module, slicing)
    except CheckpointError as error:
        if plan is False:
            raise ConfigError([f"{type(module).__name__}: {error}"]) from None
        reason = str(error)
    try:
        return PlannedDecoder(module, slicing)
    except ConfigError as error:
        lines = [f"{type(module).__name__} cannot be rebuilt from threed.layers: {reason}"]
        raise ConfigError([*error.problems, *lines]) from None


class RebuiltDecoder(Decoder, LiveModel):
    """A model of `transformers`, rebuilt from `threed.layers`.

    Args:
        module: the model of `transformers`.
        slicing: how layers are sharded over tensor ranks.

    Raises:
        CheckpointError: if threed does not have the model's architecture.
    """

    def __init__(self, module: Any, slicing: Slicing) -> None:
        model = model_of(json.loads(module.config.to_json_string()))
        # a module of transformers has no layers of multi-token prediction, whatever its configuration says
        keys = {"seq": default_seq(model), "mtp_depth": 0}
        Decoder.__init__(self, model.model_copy(update=keys), slicing)
        LiveModel.__init__(self, module)
        table = entries(self.config)
        self._entries = {name: entry for entry in table for name, _ in entry.native}
        self._places = _places(table, module)
        _refuse(module, {name for name, _ in self._places.values()})

    def initial(self, piece: Piece, seed: int) -> Tensor:
        """Returns the initial values of a piece, [*piece.size]. See `ModelOptions`."""
        entry = self._entries[piece.name]
        name, first = self._places[entry.name]
        value = tensors_of(self.module)[name].detach()
        if value.is_meta:
            return initial(piece, seed)
        value = value.reshape(-1, *entry.shape[1:])[first : first + entry.shape[0]]
        native = entry.native_part(piece.name, MemoryTensor(value))
        return read_box(native, piece.start, piece.size)

    def named_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns weights under the names of `transformers`, in its layout."""
        shapes = {name: tensor.shape for name, tensor in tensors_of(self.module).items()}
        joined: dict[str, list[Tensor]] = {}
        for name, value in state_dict_to_hf(weights, self.config).items():
            joined.setdefault(self._places[name][0], []).append(value)
        return {
            name: values[0] if len(values) == 1 else torch.cat(values).view(shapes[name])
            for name, values in joined.items()
        }


def _places(table: Sequence[Entry], module: nn.Module) -> dict[str, tuple[str, int]]:
    """Returns the place of each Hugging Face tensor: (parameter of the module, first row in it).

    The parameters of experts have a dimension of experts in front, which is merged with the rows.

    Raises:
        CheckpointError: if a parameter is missing, or has another shape than by the configuration.
    """
    tensors = tensors_of(module)
    found, rows = dict[str, tuple[str, int]](), Counter[str]()
    inner: dict[str, tuple[int, ...]] = {}
    for entry in table:
        name = entry.live if entry.live in tensors else entry.name
        found[entry.name] = name, rows[name]
        rows[name] += entry.shape[0]
        inner[name] = entry.shape[1:]
    for name, count in rows.items():
        if name not in tensors:
            text = f"it has no {name}: quantized models and adapters are not supported"
            raise CheckpointError(text)
        given, shape = tensors[name].shape, (count, *inner[name])
        if given.numel() != math.prod(shape) or given[-1:] != torch.Size(shape)[-1:]:
            text = f"{name} has shape {list(given)}, but {list(shape)} by its configuration"
            raise CheckpointError(text)
    return found


def _refuse(module: nn.Module, names: set[str]) -> None:
    """Raises CheckpointError if a module is not what its configuration describes.

    Args:
        module: the module.
        names: the parameters and buffers that the rebuilt model reads.
    """
    tensors = tensors_of(module)
    params = dict(module.named_parameters(remove_duplicate=False))
    if frozen := sorted(name for name in names & params.keys() if not params[name].requires_grad):
        raise CheckpointError(
            f"a rebuilt model has no frozen parameters, but {frozen[0]} is frozen"
        )
    read = {id(tensors[name]) for name in names}
    if more := [name for name, param in params.items() if id(param) not in read]:
        raise CheckpointError(f"its configuration describes no parameter {few(more)}")
    for same in shared_parameters(module):
        if len(names.intersection(same)) > 1:
            raise CheckpointError(f"{few(same)} are one parameter, but not by its configuration")
    if changes := list(find_changes(module)):
        raise CheckpointError(f"{few(changes)}; a rebuilt model is what its configuration says")
