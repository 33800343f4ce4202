"""How a stage's parameters are laid out: which ranks have slices, and where they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from threed.memory.tiers import Drive, Tier
from threed.ops.adam import Adam
from threed.ops.update import Rule
from threed.sharding import ShardSpec, spec_of
from threed.topology import Axis

CPU = torch.device("cpu")


@dataclass(frozen=True)
class GroupOptions:
    """The options of a parameter group: its rule, a factor on the learning rate, and the weight decay."""

    rule: Rule = field(default_factory=Adam)
    factor: float = 1.0
    decay: float = 0.0


@dataclass(frozen=True)
class Policy:
    """How a stage's parameters are laid out.

    stage: of ZeRO, 0 to 3. shard: the axis S that slices are spread over. replicas: the axis R of ranks that hold the
    same slice. resident: parameters with fewer elements stay whole under stage 3. options: of the group of a
    parameter. arena: gradient buffers are kept from step to step, also under stage 3.
    params_tier: stores slices of parameters under stage 3. optimizer_tier: stores the optimizer's state and, from
    stage 2 on, slices of gradients. By default both are on the device. With a tier, they are slices also on one rank.
    host: where a tier's values are worked on. states_once: pipeline ranks that hold the same parameters share the
    optimizer's states of them, each a part; not with tiers. versions: 2 where a step begins before the update of the
    one before it: of parameters, and a copy of the slices of gradients. early: updates begin in the backward, and write
    to second regions of the drive (`threed.zero.early`). delayed: an update runs during the next step, which uses the
    parameters from before it.
    """

    stage: int
    shard: Axis
    replicas: Axis
    bucket_bytes: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    resident: int = 0
    options: Callable[[ShardSpec], GroupOptions] = lambda spec: GroupOptions()
    arena: bool = False
    params_tier: Tier | None = None
    optimizer_tier: Tier | None = None
    host: torch.device = CPU
    states_once: bool = False
    versions: int = 1
    early: bool = False
    delayed: bool = False

    @property
    def drives(self) -> set[Drive]:
        """The drives among the tiers."""
        return {tier for tier in (self.params_tier, self.optimizer_tier) if isinstance(tier, Drive)}

    @property
    def slices_gradients(self) -> bool:
        """Whether gradients exist in full only bucket by bucket (stages 2 and 3)."""
        return self.stage >= 2 and (self.shard.size > 1 or self.optimizer_tier is not None)

    def slices_parameter(self, param: nn.Parameter) -> bool:
        """Returns whether a parameter is whole only while it is used (stage 3)."""
        spread = self.shard.size > 1 or self.params_tier is not None
        whole = param.numel() * spec_of(param).tile[1]  # of the whole matrix, for a tile
        return self.stage == 3 and spread and whole >= max(self.resident, 1)
