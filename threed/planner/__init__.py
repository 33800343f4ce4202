"""What a training run will cost before it starts: bytes, FLOPs and communication per rank, and how to cut the layers.

costs  = transformer_costs(Decoder(...), layers=24)            one LayerCost for each pipeline layer
stages = balanced([cost.flops for cost in costs], stages=4)    ranges of layers
rank_bytes(costs[stages[0].start : stages[0].stop], ...)       memory of a rank
communication_bytes(...)                                       what it sends in a step
"""

from __future__ import annotations

from threed.planner.communication import communication_bytes, data_parallel_bytes
from threed.planner.costs import (
    Decoder,
    LayerCost,
    block_cost,
    embedding_cost,
    fully_recomputed,
    head_cost,
    sliced_parameters,
    stage_parameters,
    train_flops_per_token,
    transformer_costs,
)
from threed.planner.gathering import Gathering, gathering
from threed.planner.memory import Offload, drive_buffers, optimizer_bytes, rank_bytes, regime, update_loans
from threed.planner.partition import balanced, explicit, uniform

__all__ = [
    "Decoder",
    "Gathering",
    "LayerCost",
    "Offload",
    "balanced",
    "block_cost",
    "communication_bytes",
    "data_parallel_bytes",
    "drive_buffers",
    "embedding_cost",
    "explicit",
    "fully_recomputed",
    "gathering",
    "head_cost",
    "optimizer_bytes",
    "rank_bytes",
    "regime",
    "sliced_parameters",
    "stage_parameters",
    "train_flops_per_token",
    "transformer_costs",
    "uniform",
    "update_loans",
]
