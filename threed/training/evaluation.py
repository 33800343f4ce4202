"""Computes the mean token loss over the first windows (sequences) of the validation data, each used
once.

    evaluation = Evaluation(engine, data)
    evaluation.notice                     # a note for the user; empty if there are enough windows
    loss = evaluation.loss(stops)         # collective; None if `stops` returned true
    evaluation.bits_per_byte(loss)

An evaluation runs full global batches, so it works with any topology, micro-batch and schedule. In
the last batch the labels of rows beyond the last window are ignored. The mean weights each batch by
its number of labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from threed.core.messages import counted
from threed.data import Data
from threed.engine import Engine, StepMetrics
from threed.ops.positions import IGNORED
from threed.training.callback import Callback, Run


class Evaluation(Callback):
    """Evaluates every `train.eval-every` steps and after the last step.

    The windows are the first `train.eval-samples` of the validation data, or all of them if there
    are fewer.

    Attributes:
        windows: number of windows per evaluation.
    """

    def __init__(self, engine: Engine, data: Data) -> None:
        train, axis = engine.config.train, engine.topology.axis("dp")
        self.engine, self.data, self.asked = engine, data, train.eval_samples
        self.windows = min(train.eval_samples, len(data.valid))
        self.batch = train.global_batch
        self.share = train.global_batch // axis.size
        self.index = axis.index

    @property
    def notice(self) -> str:
        """A note for the user if there are fewer than `train.eval-samples` windows, else ""."""
        if self.windows == self.asked:
            return ""
        there = f"{counted(self.windows, 'window')} of {self.data.valid.seq} tokens"
        return f"{there}, fewer than --train.eval-samples {self.asked}: val/loss is the mean over all of them"

    def loss(self, stops: Callable[[], bool]) -> float | None:
        """Returns the mean token loss in nats, or None if interrupted. Collective.

        Args:
            stops: function called after each global batch. If it returns true, the evaluation ends.
                It must return the same value on all ranks.
        """
        sums, labels = list[Tensor](), 0
        for first in range(0, self.windows, self.batch):
            last = min(first + self.batch, self.windows)
            if here := len(self.data.valid.labels(first, last)):
                loss = self.engine.evaluate(self._rows(first + self.index * self.share))
                sums.append(loss * here)
            labels += here
            if stops():
                return None
        return float(torch.stack(sums).sum()) / labels if labels else math.nan

    def _rows(self, first: int) -> dict[str, Tensor]:
        """Returns this rank's rows, from window `first` on; rows after the last have no labels."""
        rows = self.data.valid.batch(first, self.share)
        rows["labels"][max(0, self.windows - first) :] = IGNORED
        return rows

    def bits_per_byte(self, loss: float) -> float:
        """Converts a loss in nats per token to bits per byte of the windows' text."""
        return loss / math.log(2) / self._bytes_per_label if self._bytes_per_label else math.nan

    @cached_property
    def _bytes_per_label(self) -> float:
        return self.data.bytes_per_label(self.windows)

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        every = run.config.train.eval_every
        if run.stop or (metrics.step != run.last and (every == 0 or metrics.step % every)):
            return

        def is_interrupted() -> bool:
            run.beat("evaluate")
            return run.stop.check()

        run.beat("evaluate")
        loss = self.loss(is_interrupted)
        if loss is not None:
            row["val/loss"] = loss
            row["val/bits_per_byte"] = self.bits_per_byte(loss)
