"""Logs training metrics: loss, learning rate, throughput, memory, bytes sent, pipeline bubble."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

from threed.core import process
from threed.core.device import name as device_name
from threed.core.device import peak_bytes
from threed.distributed import collectives
from threed.distributed.clocks import on_one_clock
from threed.engine import StepMetrics
from threed.monitor.meter import Throughput, Traffic
from threed.ops import attention_backends
from threed.schedules import Action
from threed.schedules.simulation import idle_shares
from threed.training.callback import Callback, Run

GIB = 2**30


class StepLog(Callback):
    """Adds the metrics of training to the rows of logged steps.

    Args:
        run: the run: its engine, data, folder and other objects.
        save_seconds: function that returns the seconds spent on checkpoints since its last call.

    Attributes:
        spans: for each pipeline rank of this rank's pipeline, the actions of the last logged step:
            (action, start, end), in seconds.
    """

    def __init__(self, run: Run, save_seconds: Callable[[], float]) -> None:
        topology, forecast = run.engine.topology, run.forecast
        self.spans: list[Any] = []
        self._save_seconds = save_seconds
        self._traffic = Traffic()
        self._throughput = Throughput(
            0.0 if forecast is None else forecast.flops_per_token,
            topology.world,
            device_name(topology.device),
            run.config.precision.dtype,
        )
        self._began = self._data_s = 0.0

    def before_batch(self) -> None:
        """Starts to measure the time of a step. Called before the step's batch is fetched."""
        self._began = time.perf_counter()

    def before_step(self, run: Run, step: int) -> None:
        self._data_s = time.perf_counter() - self._began
        if run.is_logged(step):
            run.engine.record()
        # Resets the counts, because bytes sent in evaluations and saves are not logged.
        run.engine.topology.traffic.clear()

    def after_step(self, run: Run, metrics: StepMetrics, row: dict[str, float]) -> None:
        if metrics.step == run.start.step + 1:
            for line in attention_backends.described():
                run.note(f"attention  {line}")
        logged = run.is_logged(metrics.step)
        loss = metrics.loss if logged else 0.0  # reading the loss waits for the device
        self._traffic.add(run.engine.topology.traffic)
        # The time of a save is added to the next step, because the save begins after this step's
        # row is written.
        saving = self._save_seconds()
        spent = time.perf_counter() - self._began + saving
        times = {"data_s": self._data_s, "ckpt_s": saving, **metrics.seconds}
        self._throughput.add(metrics.tokens, spent, **times)
        if logged:
            row.update({"train/loss": loss, **self._metrics(run, metrics)})

    def _metrics(self, run: Run, metrics: StepMetrics) -> dict[str, float]:
        """Returns all metrics of a logged step except the loss. Collective."""
        self.spans = self._all_spans(run)
        return {
            "train/lr": metrics.lr,
            "train/grad_norm": metrics.grad_norm,
            "train/tokens": run.tokens,
            "train/skipped_steps": metrics.skipped,
            "train/loss_scale": metrics.loss_scale,
            **self._throughput.take(),
            **self._of_all_ranks(run),
            "run/restarts": process.restarts(),
            **self._bubble(run),
        }

    def _of_all_ranks(self, run: Run) -> dict[str, float]:
        """Returns metrics of the traffic and peak memory of all ranks. Collective.

        Also exchanges the ranks' requests to stop.
        """
        topology = run.engine.topology
        own = {
            "traffic": self._traffic.take(),
            "rss": process.peak_rss_bytes(),
            "alloc": peak_bytes(topology.device),
            "asked": run.stop.asked(),
        }
        ranks = collectives.exchange(own, topology.axis("world"))
        run.stop.take([rank["asked"] for rank in ranks])
        row = {"mem/peak_rss_gib": max(rank["rss"] for rank in ranks) / GIB}
        if topology.device.type == "cuda":
            row["mem/peak_alloc_gib"] = max(rank["alloc"] for rank in ranks) / GIB
        for axis in ("tp", "pp", "dp", "cp", "ep"):
            row[f"comm/{axis}_gib"] = sum(rank["traffic"].get(axis, 0) for rank in ranks) / GIB
        return row

    def _bubble(self, run: Run) -> dict[str, float]:
        if run.engine.topology.pp == 1 or run.forecast is None:
            return {}
        idle = idle_shares(self.spans)
        return {
            "pp/bubble_measured": fmean(idle),
            "pp/slowest_stage": idle.index(min(idle)),
            "pp/bubble_predicted": run.forecast.idle,
            "pp/bubble_ideal": run.forecast.bubble,
        }

    def _all_spans(self, run: Run) -> list[Any]:
        """Returns the recorded actions of all stages of this pipeline, on one clock. Collective."""
        own = [(str(action), begin, end) for action, begin, end in run.engine.record(on=False)]
        rows = on_one_clock(own, run.engine.topology.axis("pp"))
        return [[(Action.parse(text), begin, end) for text, begin, end in row] for row in rows]
