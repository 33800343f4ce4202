"""Planning without tensors: grid of ranks, partition of a model, ZeRO-3 gathers, state sizes.

Grid.of(16, pp=2, tp=4).ranks(5, "tp")                         # ranks of rank 5's tp axis
balanced([cost.flops for cost in costs], stages=4)             # ranges of layers
Cut.of(ranges, plan).chunks(rank)                              # layers of a pipeline rank
"""

from __future__ import annotations

from threed.planner.cut import Cut, Tie, partition
from threed.planner.gathering import Gathering, gathering
from threed.planner.grid import Grid
from threed.planner.memory import drive_buffers, optimizer_bytes, regime, update_buffers
from threed.planner.partition import balanced, explicit, uniform

__all__ = [
    "Cut",
    "Gathering",
    "Grid",
    "Tie",
    "balanced",
    "drive_buffers",
    "explicit",
    "gathering",
    "optimizer_bytes",
    "partition",
    "regime",
    "uniform",
    "update_buffers",
]
