"""Logs the load of experts and the losses of routers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.engine import StepMetrics
from threed.layers import MixtureOfExperts
from threed.monitor.loads import LoadFile
from threed.planner.blueprint import Blueprint
from threed.training.callback import Callback, Run


class _Mixture(NamedTuple):
    """A mixture of experts: the number of its layer in the model, and whether it is on this rank."""

    layer: int
    module: MixtureOfExperts
    own: bool


class ExpertLog(Callback):
    """Adds metrics of the mixtures of experts to the rows of logged steps, and records their loads.

    They are means over the steps since the last logged one: `moe/load_max` and `moe/load_min`, the
    largest and the smallest number of tokens of an expert of any layer, divided by the mean of the
    layer; `moe/aux_loss` and `moe/z_loss`, means over tokens and layers, without coefficients, 0 for
    a loss that is off; and `moe/bias_max`, the largest absolute value of a selection bias.

    Args:
        blueprint: the layers of the model, and those of this rank.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        held = set(blueprint.held)
        self._mixtures = [
            _Mixture(number, part, number in held)
            for number, layer in enumerate(blueprint.layers)
            for part in layer.modules()
            if isinstance(part, MixtureOfExperts)
        ]
        self._loads: LoadFile | None = None

    def begin(self, run: Run) -> None:
        if self._mixtures and run.engine.topology.axis("world").index == 0:
            self._loads = LoadFile(run.folder, run.start.step, run.note)

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        if self._mixtures and run.is_logged(metrics.step):
            row.update(self._metrics(run, metrics.step))

    def end(self, run: Run) -> None:
        if self._loads is not None:
            self._loads.close()

    def _metrics(self, run: Run, step: int) -> dict[str, float]:
        """Returns the metrics; records the loads. Collective."""
        found = [
            (one, sums)
            for one, sums in zip(self._mixtures, self._sums(run), strict=True)
            if sums.any()
        ]
        biases = [one.module.bias for one in self._mixtures if one.own]
        own = max((float(b.detach().abs().max()) for b in biases if b is not None), default=0.0)
        bias_max = max(collectives.exchange(own, run.engine.topology.axis("pp")))
        if not found:
            return {}
        loads = [sums[:-2] / sums[:-2].mean() for _, sums in found]
        if self._loads is not None:
            numbers = [one.layer for one, _ in found]
            self._loads.append(step, numbers, [each.tolist() for each in loads], step == run.last)
        losses = torch.stack(
            [sums[-2:] * one.module.per_token / sums[:-2].sum() for one, sums in found]
        )
        aux, z = losses.mean(0).tolist()
        return {
            "moe/load_max": max(float(each.max()) for each in loads),
            "moe/load_min": min(float(each.min()) for each in loads),
            "moe/bias_max": bias_max, "moe/aux_loss": aux, "moe/z_loss": z,
        }  # fmt: skip

    def _sums(self, run: Run) -> list[Tensor]:
        """Returns the sums of each mixture over all ranks, see `take_sums`. Collective."""
        topology = run.engine.topology
        sizes = [one.module.experts + 2 for one in self._mixtures]
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=topology.device)
        for one, part in zip(self._mixtures, flat.split(sizes), strict=True):
            sums = one.module.take_sums() if one.own else None
            if sums is not None:
                part.copy_(sums)
        for axis in (topology.data, topology.axis("tp"), topology.axis("pp")):
            flat = collectives.sum_of_scalars(flat, axis)
        return list(flat.cpu().split(sizes))
