"""Models of `transformers` that are sliced by the plans in their configurations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from threed.config import ConfigError, ModelConfig
from threed.distributed.sharding import Piece, slices
from threed.interop.huggingface.layouts import SEQ
from threed.interop.huggingface.live_weights import LiveModel, random_values
from threed.interop.huggingface.plan import Plan, find_problems
from threed.interop.huggingface.plan_arguments import LayerArguments
from threed.interop.huggingface.plan_layers import (
    PlanBlock,
    PlanEmbedding,
    PlanHead,
    SharedInput,
    Skeleton,
    Substitute,
    sliced,
)
from threed.layers import Slicing


class PlannedDecoder(LiveModel):
    """A model of `transformers`, sliced by the plans in its configuration.

    The parameters have the names of `transformers`, so `Engine.full_state_dict` returns weights
    under these names.

    Args:
        module: the model of `transformers`.
        slicing: how layers are sharded over tensor ranks.

    Attributes:
        slicing: how layers are sharded over tensor ranks.
        plan: the plans of the module.
        hidden: width of the activations between layers.
        config: sizes of the model, for `threed.Config`.

    Raises:
        ConfigError: if the model cannot be sliced.
    """

    boundaries_replicated = True

    def __init__(self, module: Any, slicing: Slicing) -> None:
        super().__init__(module)
        self.slicing, self.plan = slicing, Plan.of(module)
        self.hidden = int(module.config.hidden_size)
        name = type(module).__name__
        if problems := list(find_problems(module, self.plan, slicing)):
            raise ConfigError([f"{name}: {text}" for text in problems])
        self._skeleton = Skeleton(module, self.plan)
        arguments = LayerArguments.of(self._skeleton, len(self._blocks))
        if arguments is None:
            text = "its base model is not a chain of layers, each of which reads only the output of the previous one"
            raise ConfigError([f"{name}: {text}: threed cannot split it over pipeline stages"])
        self._arguments = arguments
        self.config = _sizes(module.config)

    @property
    def _blocks(self) -> nn.ModuleList:
        return getattr(self._skeleton.base, self.plan.layers)

    def layers(self) -> list[nn.Module]:
        """Returns the pipeline layers: the embedding, one per layer of the model, and the head."""
        blocks = [self._block(number) for number in range(len(self._blocks))]
        return [self._embedding(), *blocks, self._head()]

    def costs(self, micro_batch: int) -> list[float]:
        """Returns the cost of each layer: its number of parameters that take part in products."""
        sizes = [float(sum(p.numel() for p in block.parameters())) for block in self._blocks]
        return [0.0, *sizes, float(self._skeleton.head.weight.numel())]

    def initial(self, piece: Piece, seed: int) -> Tensor:
        """Returns the initial values of a piece, [*piece.size]. See `ModelOptions`."""
        value = self.module.get_parameter(piece.name).detach()
        if value.is_meta:
            value = random_values(self.module, piece.name, seed)
        return value[slices(piece.start, piece.size)]

    def named_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns `weights`, which already have the names of `transformers`."""
        return weights

    def _embedding(self) -> nn.Module:
        plan, skeleton = self.plan, self._skeleton
        table = getattr(skeleton.base, plan.embedding)
        part = self._sliced(plan.embedding, SharedInput(self.slicing))
        base = skeleton.part(embedding=part)
        return PlanEmbedding(self._prefix + plan.embedding, base, table.num_embeddings)

    def _block(self, number: int) -> nn.Module:
        name, shared = f"{self.plan.layers}.{number}", SharedInput(self.slicing)
        arguments = functools.partial(self._arguments, number)
        return PlanBlock(self._prefix + name, self._sliced(name, shared), arguments, shared)

    def _head(self) -> nn.Module:
        shared = SharedInput(self.slicing)
        norm = Substitute(self._sliced(self.plan.norm, shared))
        base, output = self._skeleton.part(norm=norm), self._skeleton.head
        # The plan of the base model has no style for the head.
        head = sliced(output, self._skeleton.head_name, "", self.plan, self.slicing, shared)
        if output.weight is getattr(self._skeleton.base, self.plan.embedding).weight:
            head.weight = self._sliced(self.plan.embedding, shared).weight
        model = self._skeleton.with_head(base, head)
        return PlanHead(norm, model, output.out_features, self.slicing)

    def _sliced(self, path: str, shared: SharedInput) -> nn.Module:
        part = self._skeleton.base.get_submodule(path)
        return sliced(part, path, self._prefix, self.plan, self.slicing, shared)

    @property
    def _prefix(self) -> str:
        return f"{self.module.base_model_prefix}."


def _sizes(config: Any) -> ModelConfig:
    """Returns the sizes of a model that is sliced by its plan."""
    positions = int(getattr(config, "max_position_embeddings", None) or SEQ)
    return ModelConfig(
        layers=config.num_hidden_layers, hidden=config.hidden_size, heads=config.num_attention_heads,
        vocab=config.vocab_size, seq=min(SEQ, positions), positions=positions,
    )  # fmt: skip
