"""The engine: a model, a topology and a configuration, trained one optimizer step at a time.

    topo    = Topology(pp=2, tp=2)
    engine  = Engine(model, topo, config)
    metrics = engine.step(batch)            # this data rank's share of the global batch; one optimizer step
    engine.evaluate(batch) · engine.logits(tokens) · engine.save(path) · engine.load(path) · engine.full_state_dict()

One step: the global number of valid tokens -> the plan's forwards and backwards, gradients leaving bucket by bucket ->
norm -> AdamW on this rank's slices -> parameters gathered while the next forward begins. No tensor's value is read on
the host; `StepMetrics` does that when it is asked.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.checkpoint import native
from threed.checks import find_refusals
from threed.config import Config, ConfigError
from threed.layers import MicroBatch
from threed.models import Model
from threed.ops.adam import Adam
from threed.pipeline import build
from threed.pipeline.executor import Boundary, Executor, Span
from threed.pipeline.stage import Stage
from threed.pipeline.transport import Links, Transport
from threed.precision import dtype
from threed.schedules import Plan, forward_only, lower
from threed.schedules import build as build_plan
from threed.sharding import Box, Piece, initial
from threed.topology import Topology
from threed.zero import layout, learning_rate, records
from threed.zero.optimizer import Optimizer
from threed.zero.reducer import Reducer

Batch = Mapping[str, Tensor]
PHASES = ("fwd_bwd_s", "dp_comm_s", "optim_s")


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """What one step found out; reading a property waits for the device.

    tokens: of the global batch. seconds: host time of the step's phases (fwd_bwd_s, dp_comm_s: what of the gradient
    reduction was left to wait for, optim_s).
    """

    step: int
    tokens: int
    _loss: Tensor
    _grad_norm: Tensor
    _lr: Tensor
    _skipped: Tensor
    seconds: Mapping[str, float]

    @property
    def loss(self) -> float:
        """The global batch's mean token loss before the update, in nats."""
        return float(self._loss)

    @property
    def grad_norm(self) -> float:
        """The global gradient norm before clipping."""
        return float(self._grad_norm)

    @property
    def lr(self) -> float:
        """The learning rate of this update."""
        return float(self._lr)

    @property
    def skipped(self) -> int:
        """Steps skipped so far because a gradient was not finite."""
        return int(self._skipped)


@functools.lru_cache(maxsize=32)
def lowered(schedule: str, stages: int, microbatches: int) -> Plan:
    """A schedule's plan with its communication; "forward-only" for evaluation and sampling."""
    if schedule == "forward-only":
        return lower(forward_only(stages, microbatches))
    return lower(build_plan(schedule, stages, microbatches))


class Engine:
    """Trains `model` on `topology` as `config` (resolved) says.

    model: see `threed.models.Model`; layers on the meta device. Raises ConfigError for features that are not there, and
    ValueError when ranks disagree about model or configuration, naming them. transport: how stages talk; the topology's
    links unless a test brings its own.
    """

    def __init__(self, model: Model, topology: Topology, config: Config, *, transport: Transport | None = None) -> None:
        if refused := find_refusals(config):
            raise ConfigError(refused)
        self.model, self.topology, self.config = model, topology, config
        self.steps = self.consumed = 0
        self.dtype = dtype(config.precision.dtype)
        self._check_same_configuration()
        layers = model.layers()
        self.ranges = build.partition(config.parallel.partition, model.costs(config.train.micro_batch), topology.pp)
        self.stage_index = topology.axis("pp").index
        mine = [layers[index] for index in self.ranges[self.stage_index]]
        tied = build.tied_weights(layers, self.ranges)
        topology.prepare(build.blocks(layers), tied.values())
        self.layout = layout.build(
            mine,
            tied,
            topology,
            shards=config.zero.stage > 0,
            bucket_bytes=int(config.zero.bucket_mib * 2**20),
            param_dtype=self.dtype,
            grad_dtype=dtype(config.precision.grad_dtype or "fp32"),
        )
        self.optimizer = self._make_optimizer()
        self.reducer = Reducer(self.layout)
        self._check_same_buckets()
        records.fill(self.optimizer, self._initial_value, ("weight",))
        stage = Stage(mine, self.optimizer)
        self.executor = Executor([stage], transport or Links(topology), self.stage_index, self.reducer.flush)

    def _make_optimizer(self) -> Optimizer:
        o, train = self.config.optim, self.config.train
        min_lr = o.lr / 10 if o.min_lr is None else o.min_lr
        rate = learning_rate.schedule(o.schedule, o.lr, min_lr, o.warmup, train.steps)
        adam = Adam(o.betas[0], o.betas[1], o.eps)
        everyone = self.topology.axis("world")
        return Optimizer(self.layout, everyone, adam, rate, decay=o.weight_decay, grad_clip=train.grad_clip)

    def _initial_value(self, part: str, piece: Piece, box: Box) -> Tensor:
        return initial(piece, box, self.config.train.seed)

    def _check_same_configuration(self) -> None:
        """Makes sure that all ranks mean the same run, before they meet in anything that depends on it: a rank that
        makes other groups or sends other shapes hangs gloo, or aborts the process without a word."""
        fingerprint = hashlib.sha256(self.config.model_dump_json().encode()).hexdigest()
        everyone = collectives.exchange(fingerprint, self.topology.axis("world"))
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ValueError(
                    f"rank {rank} runs another configuration than rank 0: start all ranks with the same flags"
                )

    def _check_same_buckets(self) -> None:
        """Makes sure that data ranks will sum the same things: a model that is built in another order on one of them
        has buckets of the same sizes with other parameters in them."""
        cuts = [(b.first, b.last, [(s.spec.name, s.first) for s in b.slots()]) for b in self.layout.buckets]
        mine, data = hashlib.sha256(repr(cuts).encode()).hexdigest(), self.topology.axis("dp")
        for rank, other in zip(data.ranks, collectives.exchange(mine, data), strict=True):
            if other != mine:
                raise ValueError(f"rank {rank} cut its parameters into other buckets than rank {self.topology.rank}")

    # ------------------------------------------------------------------------------------------------------- running

    def step(self, batch: Batch) -> StepMetrics:
        """One optimizer step on this data rank's share of the global batch.

        batch: 'tokens' and 'labels', int64 [b s], b a multiple of the micro-batch size; labels below 0 are not
        counted; 'samples', int64 [b], global sample indices, by default in order of consumption.
        """
        times = [time.perf_counter()]
        micros = self._micro_batches(batch, training=True)
        self.reducer.begin(len(micros))
        losses = self.executor.run(self._plan(len(micros)), micros, self._boundary(batch))
        times.append(time.perf_counter())
        slices = self.reducer.finish()
        times.append(time.perf_counter())
        update = self.optimizer.step(slices, self._carry(losses))
        times.append(time.perf_counter())
        self.steps += 1
        self.consumed += len(batch["tokens"]) * self.topology.dp
        tokens = batch["tokens"].numel() * self.topology.dp
        seconds = {name: b - a for name, a, b in zip(PHASES, times[:-1], times[1:], strict=True)}
        skipped = self.optimizer.skips.clone()
        return StepMetrics(self.steps, tokens, update.sums[0], update.grad_norm, update.lr, skipped, seconds)

    def evaluate(self, batch: Batch) -> Tensor:
        """The mean token loss (scalar tensor, on every rank) of this data rank's share of a batch, without training."""
        micros = self._micro_batches(batch, training=False)
        losses = self.executor.run(self._forward_plan(len(micros)), micros, self._boundary(batch))
        return collectives.sum_of_scalars(self._carry(losses), self.topology.axis("world"))[0]

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits [b s v/t] of tokens [b s], cut by vocabulary, on the last stage; None on the others."""
        micro = MicroBatch(tokens.to(self.topology.device), training=False)
        outputs = self.executor.run(self._forward_plan(1), [micro], self._boundary({"tokens": tokens}, len(tokens)))
        return outputs[0].transpose(0, 1) if outputs else None

    def _carry(self, losses: list[Tensor]) -> Tensor:
        """This rank's part of the loss, fp64 [1]: what the last stage's first tensor rank computed, else zero."""
        device = self.topology.device
        if not losses or self.topology.axis("tp").index > 0:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return torch.stack(losses).double().sum().view(1)

    def _micro_batches(self, batch: Batch, training: bool) -> list[MicroBatch]:
        size, rows = self.config.train.micro_batch, len(batch["tokens"])
        if rows == 0 or rows % size:
            raise ValueError(f"this rank's batch of {rows} sequences is not a multiple of micro-batch {size}")
        device = self.topology.device
        tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)
        samples = batch["samples"].to(device) if "samples" in batch else self._samples(rows)
        weight = self._weight(labels)
        return [
            MicroBatch(t, y, n, weight, self.steps, training)
            for t, y, n in zip(tokens.split(size), labels.split(size), samples.split(size), strict=True)
        ]

    def _samples(self, rows: int) -> Tensor:
        first = self.consumed + self.topology.axis("dp").index * rows
        return torch.arange(first, first + rows, device=self.topology.device)

    def _weight(self, labels: Tensor) -> Tensor | None:
        """1 / the global number of valid tokens; needed, and so agreed upon, on the last stage only."""
        if self.stage_index < self.topology.pp - 1:
            return None
        valid = (labels >= 0).sum().double().view(1)
        return 1.0 / collectives.sum_of_scalars(valid, self.topology.axis("dp"))[0].clamp(min=1)

    def _boundary(self, batch: Batch, rows: int | None = None) -> Boundary:
        length = batch["tokens"].shape[1]
        first, last = self.model.slicing.rows(length)
        shape = (last - first, rows or self.config.train.micro_batch, self.model.hidden)
        return Boundary(shape, self.dtype, self.topology.device)

    def _plan(self, microbatches: int) -> Plan:
        return lowered(self.config.parallel.schedule, self.topology.pp, microbatches)

    def _forward_plan(self, microbatches: int) -> Plan:
        return lowered("forward-only", self.topology.pp, microbatches)

    def record(self, on: bool = True) -> list[Span]:
        """Starts (or stops) to record what runs when; gives the spans recorded so far."""
        spans = self.executor.spans or []
        self.executor.spans = [] if on else None
        return spans

    # --------------------------------------------------------------------------------------------------------- state

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Writes a checkpoint folder at `path`, whole or not at all; `extra` is kept in its manifest."""
        state = {"steps": self.steps, "consumed": self.consumed, "extra": dict(extra or {})}
        return native.save(Path(path), self.optimizer, self.topology, self.config, state)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Takes weights, moments and counters from a checkpoint of any topology; gives back what was saved as extra."""
        state = native.load(Path(path), self.optimizer, self.topology, self.config)
        self.steps, self.consumed = int(state["steps"]), int(state["consumed"])
        return dict(state["extra"])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Global names -> full tensors (masters: at least fp32) on rank 0, an empty dict elsewhere. Collective."""
        return native.collect(self.optimizer, self.topology)

    def load_full_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Takes weights from full tensors by global name, which every rank must pass; moments stay as they are."""
        missing = {r.piece.name for r in records.records(self.optimizer, ("weight",))} - set(weights)
        if missing:
            raise KeyError(f"weights are missing: {', '.join(sorted(missing)[:10])}")

        def source(part: str, piece: Piece, box: Box) -> Tensor:
            full = weights[piece.name]
            if tuple(full.shape) != piece.shape:
                raise ValueError(f"{piece.name}: shape {tuple(full.shape)}, the model has {piece.shape}")
            return full[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]

        records.fill(self.optimizer, source, ("weight",))
