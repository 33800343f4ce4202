"""Logs the loss of multi-token prediction."""

from __future__ import annotations

import torch

from threed.distributed import collectives
from threed.engine import StepMetrics
from threed.layers import MultiTokenPrediction
from threed.planner.blueprint import Blueprint
from threed.training.callback import Callback, Run


class MultiTokenLog(Callback):
    """Adds the loss of `layers.MultiTokenPrediction` to the rows of logged steps.

    `train/mtp_loss` is the mean over depths, without its coefficient, and over the steps since the
    last logged one.

    Args:
        blueprint: the layers of the model, and those of this rank.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        held = dict.fromkeys(blueprint.held)  # some schedules have a layer twice on a rank
        self._exists = any(isinstance(one, MultiTokenPrediction) for one in blueprint.layers)
        self._own = [
            layer
            for layer in (blueprint.layers[number] for number in held)
            if isinstance(layer, MultiTokenPrediction)
        ]

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        if self._exists and run.is_logged(metrics.step):
            row["train/mtp_loss"] = self._loss(run)

    def _loss(self, run: Run) -> float:
        """Returns the loss. Collective."""
        topology = run.engine.topology
        total = torch.zeros(2, dtype=torch.float64, device=topology.device)
        for layer in self._own:
            if (sums := layer.sums.take()) is not None:
                total += sums
        for axis in (topology.data, topology.axis("pp")):
            total = collectives.sum_of_scalars(total, axis)
        loss, labels = total.tolist()
        return float(loss / max(labels, 1.0))
