"""What can be planned without a tensor: the grid of ranks, the cut of a model, what ZeRO-3 gathers, bytes of states.

Grid.of(16, pp=2, tp=4).ranks(5, "tp")                         who is on an axis with whom
balanced([cost.flops for cost in costs], stages=4)             ranges of layers
Cut.of(ranges, plan).chunks(rank)                              the layers of a pipeline rank
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
