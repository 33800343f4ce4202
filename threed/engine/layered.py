"""The engine of models that consist of pipeline layers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from threed.config import Config
from threed.distributed.sharding import initial
from threed.engine.base import Engine
from threed.layers import MicroBatch
from threed.models import Model, options_of
from threed.zero import setup
from threed.zero.state import initialize_states


class LayeredEngine(Engine):
    """Trains a model of pipeline layers; `Engine(...)` creates it for a `threed.models.Model`.

    In addition to the methods of `Engine`, it has the method `logits`.
    """

    wraps_module = False

    def _prepare(self, model: Model | nn.Module, config: Config) -> tuple[Model, Config]:
        if not self.trains:
            raise NotImplementedError(
                "threed does not offer trains=False for a model of pipeline layers: use evaluate() and logits() of an"
                " engine that trains"
            )
        layered = cast(Model, model)
        setup.check_tile(config.zero.tile, layered.slicing.tile, wrapped=False)
        return layered, config

    def _initialize(self) -> None:
        values, seed = options_of(self.model).initial or initial, self.config.train.seed
        # A model with its own initial values may free them after this call.
        again = values is initial
        initialize_states(self.optimizer, lambda piece: values(piece, seed), again)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Returns the logits of a batch of tokens. Collective.

        Args:
            tokens: token ids, int64 [b s].

        Returns:
            On the last pipeline stage: the logits [b s v/t] of this tensor rank's shard of the
            vocabulary. None on other stages.
        """
        self.finish()
        with torch.inference_mode(False):
            context = self.model.slicing.context
            own = context.positions(tokens.shape[1])
            micro = MicroBatch(own.columns(tokens.to(self.topology.device)), training=False)
            outputs = self.executor.run(self.plan_of(1, training=False), [micro])
            self.gatherer.release_all()
            return context.gather(outputs[0]).transpose(0, 1) if outputs else None
