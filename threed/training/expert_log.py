"""Logs the load of experts and the losses of routers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from threed.distributed import collectives
from threed.engine import StepMetrics
from threed.layers import MixtureOfExperts
from threed.planner.blueprint import Blueprint
from threed.training.callback import Callback, Run


class ExpertLog(Callback):
    """Adds metrics of the mixtures of experts to the rows of logged steps.

    They are means over the steps since the last logged one: `moe/load_max` and `moe/load_min`, the
    largest and the smallest number of tokens of an expert of any layer, divided by the mean of the
    layer; `moe/aux_loss` and `moe/z_loss`, means over tokens and layers, without coefficients, 0 for a loss that is off; and
    `moe/bias_max`, the largest absolute value of a selection bias.

    Args:
        blueprint: the layers of the model, and those of this rank.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._has_experts = bool(_mixtures(blueprint.layers))
        self._own = _mixtures([blueprint.layers[number] for number in blueprint.held])

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        if self._has_experts and run.is_logged(metrics.step):
            row.update(self._metrics(run))

    def _metrics(self, run: Run) -> dict[str, float]:
        """Returns the metrics. Collective."""
        topology, own = run.engine.topology, list[list[float]]()
        taken = [(mixture, mixture.take_sums()) for mixture in self._own]
        found = [(mixture, sums) for mixture, sums in taken if sums is not None]
        if found:
            flat = torch.cat([sums for _, sums in found])
            for axis in (topology.data, topology.axis("tp")):
                flat = collectives.sum_of_scalars(flat, axis)
            parts = flat.cpu().split([len(sums) for _, sums in found])
            own = [_row(mixture, sums) for (mixture, _), sums in zip(found, parts, strict=True)]
        stages = collectives.exchange(own, topology.axis("pp"))
        rows = [row for stage in stages for row in stage]
        if not rows:
            return {}
        most, least, aux, z, bias_max = zip(*rows, strict=True)
        return {
            "moe/load_max": max(most), "moe/load_min": min(least), "moe/bias_max": max(bias_max),
            "moe/aux_loss": sum(aux) / len(aux), "moe/z_loss": sum(z) / len(z),
        }  # fmt: skip


def _row(mixture: MixtureOfExperts, sums: Tensor) -> list[float]:
    """Returns largest and smallest share, both losses, and the largest bias of a layer."""
    loads, losses = sums[:-2], sums[-2:]
    tokens = loads.sum() / mixture.per_token
    shares = loads / loads.mean()
    bias = 0.0 if mixture.bias is None else mixture.bias.detach().abs().max()
    return [float(x) for x in (shares.max(), shares.min(), *(losses / tokens), bias)]


def _mixtures(layers: Sequence[nn.Module]) -> list[MixtureOfExperts]:
    return [
        part for layer in layers for part in layer.modules() if isinstance(part, MixtureOfExperts)
    ]
