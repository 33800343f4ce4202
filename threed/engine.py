"""The engine: a model, a topology and a configuration, trained one optimizer step at a time.

    topo    = Topology(pp=2, tp=2)
    engine  = Engine(model, topo, config)
    metrics = engine.step(batch)         # this data rank's share of the global batch; one optimizer step
    engine.save(path)                    # engine.start_save(path).wait() writes in the background

One step: the global number of valid tokens -> the plan's forwards and backwards, gradients leaving
bucket by bucket -> norm -> the update of this rank's slices -> parameters gathered while the next
forward begins. No tensor's value is read on the host; `StepMetrics` does that when it is asked.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from threed import buffers, collectives
from threed.batches import Batch, Batches
from threed.checkpoint import fit, native
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import never
from threed.checkpoint.saving import Save, Saver
from threed.checks import find_refusals
from threed.config import Config, ConfigError
from threed.drawing import draw
from threed.interop.huggingface.folder import is_hf_folder
from threed.interop.huggingface.weights import load_hf
from threed.layers import MicroBatch
from threed.layers.linear import use_sinks
from threed.metrics import Faults, Later, loss_of
from threed.metrics import StepMetrics as StepMetrics
from threed.models import Model, Wrapped, is_layered, options_of, wrap
from threed.pipeline import activation_checkpointing, compiling
from threed.pipeline.executor import Executor, Outdated, Span
from threed.pipeline.layer_major import LayerMajorExecutor
from threed.pipeline.overlap import Overlap
from threed.pipeline.transport import Transport, links
from threed.precision import LossScale
from threed.resolution import resolve
from threed.sharding import initial
from threed.topology import Topology
from threed.zero import agreement, records, replicas, setup
from threed.zero.access import Holder
from threed.zero.asynchronous import Asynchronous
from threed.zero.counting import own_backward
from threed.zero.gather import Gatherer
from threed.zero.hooks import ModuleGatherer
from threed.zero.offload import OffloadedOptimizer
from threed.zero.optimizer import Optimizer, Synchronous
from threed.zero.reducer import Reducer


class Engine:
    """Trains `model` on `topology` by `config`.

    Args:
        model: a `threed.models.Model` with layers on the meta device, for a `LayeredEngine`; or,
            with tp = pp = 1, any `nn.Module` whose forward takes the batch's tensors as keywords
            and returns a loss, for a `ModuleEngine`.
        topology: the axes of the ranks.
        config: for a `threed.models.Model`, resolved.
        learning_rate, loss_scale: used instead of the configuration's.
        transport: between stages; by default the topology's links.

    Raises:
        ConfigError: a feature is missing.
        TypeError: `model` is not a model.
        ValueError: the module cannot be wrapped, or ranks have different models or configurations.
    """

    wraps_module: ClassVar[bool]  # then the program may use and change parameters anywhere

    def __new__(cls, model: Model | nn.Module | None = None, *_: Any, **__: Any) -> Engine:
        kind = LayeredEngine if is_layered(model) else ModuleEngine
        return super().__new__(kind if cls is Engine else cls)  # a copy has its class already

    def __init__(
        self, model: Model | nn.Module, topology: Topology, config: Config, *,
        learning_rate: Callable[[Tensor], Tensor] | None = None,
        loss_scale: LossScale | None = None, transport: Transport | None = None,
    ) -> None:  # fmt: skip
        if refused := find_refusals(config):
            raise ConfigError(refused)
        self.topology = topology
        self.model, config = self._prepare(model, config)
        self.steps, self.consumed = 0, 0
        self._seconds = 0.0  # of the step in progress
        self._numbers: Later | None = None  # of the last step
        agreement.check_configuration(config, topology.axis("world"))
        self.config, blueprint = draw(self.model, topology, config)
        self.blueprint, self.layout = blueprint, blueprint.layout
        own_layers = [blueprint.layers[number] for number in blueprint.held]
        self.batches = Batches(self.model, topology, config, blueprint.layers)
        flags = [self.batches.empty, *blueprint.flags]
        self.faults = Faults(flags, topology.device, warns=topology.rank == 0)
        wrapped = self.model if isinstance(self.model, Wrapped) else None
        self.buffers = buffers.build(
            blueprint.layers, blueprint.pipeline.cut, topology, blueprint.again,
            None if wrapped is None else wrapped.module,
        )  # fmt: skip
        codec = setup.weight_codec(config)
        self.gatherer: Gatherer = (
            Gatherer(self.layout, codec)
            if wrapped is None
            else ModuleGatherer(self.layout, wrapped, config.zero.prefetch, codec)
        )
        self.optimizer = self._make_optimizer(
            learning_rate or setup.learning_rate(config.optim, config.train.steps),
            loss_scale or setup.loss_scale(config.precision),
        )
        self.saver = Saver(self.optimizer, topology, self.config)
        agreement.check_buckets(self.layout, topology)
        self._initialise()
        self.reducer = Reducer(
            self.layout, setup.gradient_codecs(config), self.wraps_module, blueprint.layer_major,
            early=self.optimizer.early, unused=self.optimizer.unused,
            warns=topology.axis("tp").index == 0, gatherer=self.gatherer,
        )  # fmt: skip
        self.plan_of = functools.lru_cache(maxsize=32)(blueprint.lowered)
        parts = self.plan_of, self.reducer, self.optimizer
        asynchronous = Asynchronous(*parts) if blueprint.pipeline.plan.asynchronous else None
        self.runner: Synchronous | Asynchronous = asynchronous or Synchronous(*parts)
        for layer in own_layers if blueprint.pipeline.plan.splits else ():
            use_sinks(layer)
        compiling.compile_layers(own_layers, blueprint.layers, config.run)
        self.buffers.begin()
        self.extras = Extras(self.buffers, topology, generators=self.wraps_module)
        # A pair's other stream could reuse memory of them while it is read.
        frees = self.layout.slices_parameters or any(list(layer.buffers()) for layer in own_layers)
        streams = topology.device, topology.axis("tp"), topology.second("tp")
        self.executor = (LayerMajorExecutor if blueprint.layer_major else Executor)(
            blueprint.stages(self.gatherer, self.reducer),
            transport or links(self.model, topology), topology.axis("pp").index,
            self.runner.all_passes_ended, self.reducer.pass_ended,
            weight_gradients=self.reducer.deferral, overlap=None if frees else Overlap(*streams),
            device=topology.device, varying=options_of(self.model).boundaries_vary,
            on_validate=self.optimizer.validate, updates=asynchronous,
        )  # fmt: skip

    def _make_optimizer(
        self, learning_rate: Callable[[Tensor], Tensor], loss_scale: LossScale
    ) -> Optimizer:
        """Returns the optimizer of this rank's states, which may be offloaded."""
        policy, train = self.layout.policy, self.config.train
        offloads = policy.optimizer_tier is not None or policy.params_tier is not None
        return (OffloadedOptimizer if offloads else Optimizer)(
            self.layout, self.gatherer, self.topology.axis("world"), learning_rate,
            device=self.topology.device, grad_clip=train.grad_clip, loss_scale=loss_scale,
            optimistic=self.blueprint.optimistic, max_spike=train.max_norm_spike,
            dynamic=self.wraps_module,
        )  # fmt: skip

    def _prepare(self, model: Model | nn.Module, config: Config) -> tuple[Model, Config]:
        """Returns the model and the resolved configuration. Collective."""
        raise NotImplementedError

    def _initialise(self) -> None:
        """Sets the weights to their initial values. Collective."""
        raise NotImplementedError

    def step(self, batch: Batch) -> StepMetrics:
        """Runs one optimizer step on this data rank's share of the global batch. Collective.

        A step with ids beyond the vocabulary, or without any valid label, is skipped (`DataError`).

        Args:
            batch: 'tokens' and 'labels', int64 [b s], b a multiple of the micro-batch size; labels
                below 0 are not counted; 'samples', int64 [b], global indices, by default in order.
        """
        began = time.perf_counter()
        rewind = self.extras.rewinding() if self.optimizer.pending else lambda: None
        while True:
            self.faults.clear()
            self.reducer.recover()
            scale = self.optimizer.scaler.scale
            micros = self.batches.micro_batches(batch, self.steps, self.consumed, scale, True)
            self._begin(len(micros))
            try:
                with own_backward(self.reducer):
                    losses = self.runner.run(self.executor.run, micros)
                break
            except Outdated:  # the update before this step was undone, and done again
                rewind()
        self._seconds = time.perf_counter() - began
        tokens = next(iter(batch.values())).numel() * self.topology.dp
        metrics = self._end_step(self._carry(losses, scale), tokens)
        # Like `steps`, this counts only steps that were done.
        self.consumed += self.batches.rows(batch) * self.topology.dp
        return metrics

    def _begin(self, microbatches: int) -> None:
        self.gatherer.release_all()  # of a step that an error broke off
        if self.buffers.exist:
            self.buffers.begin_step()
        self.runner.begin(microbatches)
        self._seconds = 0.0

    def _end_step(self, loss: Tensor, tokens: int) -> StepMetrics:
        """Ends a step. loss: fp64 [1], this rank's part of a sum over all ranks."""
        began = time.perf_counter()
        self.gatherer.release_all()
        if self.buffers.exist:
            self.buffers.end_step()  # raises for what must not change, before anything is updated
        update = self.runner.update(self.faults.appended_to(loss))
        reducing, updating = self.runner.seconds
        passes = self._seconds + time.perf_counter() - began - reducing - updating
        self.steps += 1
        if self._numbers is not None:
            self._numbers()  # faults are counted in the order of steps
        self._numbers = Later(update, self.faults)
        if not self.runner.pending:
            self._numbers()
        seconds = {"fwd_bwd_s": passes, "dp_comm_s": reducing, "optim_s": updating}
        most = self.config.train.max_bad_steps
        return StepMetrics(self.steps, tokens, self._numbers, seconds, self.faults, most)

    def zero_grad(self) -> None:
        """Drops all gradients of steps that have not ended, also those from losses of other engines.

        A step that `step` has returned has ended, also if its update comes later (2bw).
        """
        self.runner.drop()

    def finish(self) -> None:
        """Ends the last step (optimistic updates, 2bw); changes no result. Collective."""
        self.reducer.recover()
        self.runner.finish(self.executor.run)

    def _take_in(self) -> None:
        """Ends the last step, and releases all gathered parameters: the states are current."""
        self.gatherer.release_all()
        self.finish()

    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the mean token loss of a batch (each data rank passes its share), a scalar; NaN
        if ids are beyond the vocabulary, or no label counts. Does not train. Collective."""
        with self.evaluating():
            micros = self.batches.micro_batches(batch, self.steps, self.consumed, 1.0, False)
            losses = self.executor.run(self.plan_of(len(micros), training=False), micros)
            self.gatherer.release_all()
            return self.sum_losses(self._carry(losses, 1.0))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Prepares for forwards without training; a step in progress continues after. Collective."""
        self.finish()
        with torch.inference_mode(False), self.faults.apart():
            self.buffers.agree()
            yield

    def sum_losses(self, loss: Tensor) -> Tensor:
        """Returns the sum over all ranks of the losses [1], inside `evaluating`; NaN if some data
        was invalid. Collective."""
        own = self.faults.appended_to(loss)
        return loss_of(collectives.sum_of_scalars(own, self.topology.axis("world")))

    def bad_steps(self) -> int:
        """Returns how many last steps in a row were bad; ends the last step. Collective."""
        self.finish()
        return int(self.optimizer.bad.in_a_row)

    def compare_replicas(self) -> None:
        """Compares copies between ranks. Raises ReplicaError naming those that differ. Collective."""
        self._take_in()
        replicas.check(self.optimizer, self.topology, self.steps)

    def _carry(self, losses: list[Tensor], scale: Tensor | float) -> Tensor:
        """Returns this rank's part of the loss, fp64 [1]."""
        device = self.topology.device
        if not losses or self.topology.axis("tp").index > 0:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return torch.stack(losses).double().sum().view(1) / scale

    def record(self, on: bool = True) -> list[Span]:
        """Starts or stops recording when actions run; returns the spans recorded so far."""
        return self.executor.record(on)

    def save(
        self, path: str | Path, extra: Mapping[str, Any] | None = None, *,
        hurries: Callable[[], bool] = never,
    ) -> Path:  # fmt: skip
        """Writes a checkpoint folder at `path`, atomically; `load` returns `extra`. Collective.

        Args:
            hurries: see `Saver.start`.

        Raises:
            DataError: a step had invalid data, and reading metrics has not raised the error.
        """
        self.saver.end()  # `counters` may raise, and would hide an error of the save before
        return self.saver.start(
            Path(path), self.counters(extra), self.extras, background=False, hurries=hurries
        ).path

    def start_save(
        self, path: str | Path, extra: Mapping[str, Any] | None = None, *,
        before_publishing: Callable[[], None] = lambda: None, hurries: Callable[[], bool] = never,
    ) -> Save:  # fmt: skip
        """Begins to write a checkpoint while training continues; otherwise as `save`. Collective.

        Waits for the previous save. Call `Save.wait` before the program ends. Without memory for a
        copy of the state it warns, and returns once the checkpoint is complete.

        Args:
            before_publishing: called in a thread of rank 0, when all files are written.
        """
        return self.saver.start(
            Path(path), self.counters(extra), self.extras, now=self.wraps_module,
            before_publishing=before_publishing, hurries=hurries,
        )  # fmt: skip

    def counters(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the counters for a manifest; raises DataError as `save`. Collective."""
        self._take_in()
        if self._numbers is not None:
            self.faults.raise_before_save(
                self.steps, self._numbers().counts, self.topology.axis("world")
            )
        state = {"steps": self.steps, "consumed": self.consumed, "extra": dict(extra or {})}
        return state | self.reducer.state(self.topology.axis("pp")) | self.runner.state()

    def load(self, path: str | Path, hashed: Collection[str] | None = None) -> dict[str, Any]:
        """Loads a checkpoint of any topology, or weights from a Hugging Face folder. Collective.

        Args:
            hashed: see `native.load`.

        Returns:
            `extra` of `save`; of a Hugging Face folder its record as `hf`.

        Raises:
            CheckpointError: another model's names or shapes; nothing is overwritten.
        """
        self.saver.end()
        self._take_in()
        about = (Path(path), self.optimizer, self.topology, self.config, self.extras)
        state = load_hf(*about) if is_hf_folder(Path(path)) else native.load(*about, hashed)
        self.steps, self.consumed = int(state["steps"]), int(state["consumed"])
        self.reducer.restore(state)
        self.runner.restore(state)
        return dict(state["extra"])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns all weights (at least fp32) and persistent buffers on rank 0. Collective."""
        self._take_in()
        return native.collect(self.optimizer, self.topology) | self.buffers.collect()

    def load_full_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Sets weights and buffers from full tensors, which every rank passes; moments stay."""
        self._take_in()
        fit.take_full(self.optimizer, self.buffers, self.topology, weights)


class LayeredEngine(Engine):
    """Trains a model of pipeline layers (`threed.models.Model`) on pipeline, tensor and data ranks."""

    wraps_module = False

    def _prepare(self, model: Model | nn.Module, config: Config) -> tuple[Model, Config]:
        layered = cast(Model, model)
        setup.check_tile(config.zero.tile, layered.slicing.tile, wrapped=False)
        return layered, config

    def _initialise(self) -> None:
        values = functools.partial(initial, seed=self.config.train.seed)
        records.initialise(self.optimizer, values, again=True)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Returns the logits [b s v/t] of tokens [b s] on the last stage, None on the others."""
        self.finish()
        with torch.inference_mode(False):
            micro = MicroBatch(tokens.to(self.topology.device), training=False)
            outputs = self.executor.run(self.plan_of(1, training=False), [micro])
            self.gatherer.release_all()
            return outputs[0].transpose(0, 1) if outputs else None


class ModuleEngine(Engine):
    """Trains any `nn.Module` on data ranks.

    `step` runs a whole batch. A custom loop runs the micro-batches itself:

        engine.begin(microbatches=4)
        for inputs in micro_batches:
            loss = engine.module(**inputs).loss
            engine.backward(loss)
        metrics = engine.update()

    Attributes:
        accumulating: whether a step of a custom loop has begun.
    """

    wraps_module = True
    accumulating = False
    model: Wrapped
    gatherer: ModuleGatherer
    _microbatches: int  # of the step in progress, and its loss so far
    _loss: Tensor

    @property
    def module(self) -> nn.Module:
        """The module. Called between `begin` and `update`, it gathers its parameters as it runs."""
        return self.model.module

    def _prepare(self, model: Model | nn.Module, config: Config) -> tuple[Wrapped, Config]:
        wrapped = wrap(model, self.topology)
        setup.check_tile(config.zero.tile, wrapped.slicing.tile, wrapped=True)
        config = resolve(config, 0, self.topology.world)
        activation_checkpointing.enable(wrapped.module, config)
        return wrapped, config

    def _initialise(self) -> None:
        values = functools.partial(self.model.initial, seed=self.config.train.seed)
        self.model.agree(self.topology.data, self.topology.device)
        records.initialise(self.optimizer, values, again=False)
        self.model.initialised(self.topology.device, self.batches.dtype)
        self.gatherer.changes.begin()

    def begin(self, microbatches: int = 1) -> None:
        """Begins an optimizer step of so many micro-batches in a custom loop. Collective."""
        self.faults.clear()
        self._begin(microbatches)
        self.accumulating, self._microbatches = True, microbatches
        self._loss = torch.zeros(1, dtype=torch.float64, device=self.topology.device)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Runs the backward of a micro-batch; adds its gradients and its loss to the step's.

        If it raises, the step's gradients are discarded: call `begin` for the next step.

        Args:
            loss: the micro-batch's mean loss, a scalar.
            weight: the loss is multiplied by it; by default so that the step's loss is the mean
                over its micro-batches and the data ranks.

        Raises:
            RuntimeError: `begin` was not called.
        """
        self._check_begun()
        began = time.perf_counter()
        weight = 1.0 / (self._microbatches * self.topology.dp) if weight is None else weight
        self._check_scales()
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        self.accumulating = False
        with own_backward(self.reducer):
            scale = (self.optimizer.scaler.scale * weight).to(wide.dtype)
            torch.autograd.backward((wide * scale,))
        self.accumulating = True
        self._loss += loss.detach().double() * weight
        self.reducer.pass_ended()
        self._seconds += time.perf_counter() - began

    def update(self, tokens: int = 0) -> StepMetrics:
        """Ends a step: sums gradients over ranks, and updates. tokens: for the metrics. Collective."""
        self._check_begun()
        # Ranks have launched different buckets so far; collectives of buffers come next.
        self.reducer.all_passes_ended()
        return self._end_step(self._loss, tokens)

    def _check_begun(self) -> None:
        if not self.accumulating:
            raise RuntimeError("call Engine.begin(microbatches) first: no step is in progress")

    def _end_step(self, loss: Tensor, tokens: int) -> StepMetrics:
        self.accumulating = False
        self._take_in()
        self._check_scales()
        return super()._end_step(loss, tokens)

    def _begin(self, microbatches: int) -> None:
        self.gatherer.release_all()  # also if the check raises
        self._check_scales()
        super()._begin(microbatches)

    def _check_scales(self) -> None:
        """Raises RuntimeError under fp16 if another engine's backward left a gradient, which has
        that engine's loss scale."""
        for slot, _ in self.reducer.foreign if self.config.precision.dtype == "fp16" else ():
            raise RuntimeError(
                f"{slot.spec.name}: another engine's backward left a gradient, with that"
                " engine's loss scale: call zero_grad() before this engine's backward"
            )

    def discard(self) -> None:
        """Discards the step in progress of a custom loop, after an error in a forward."""
        self.accumulating = False
        self.reducer.give_up()

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """Yields the module for forwards without gradients."""
        try:
            # What a module caches must be usable in training too.
            with torch.inference_mode(False), torch.no_grad():
                yield self.module
        finally:
            self.gatherer.release_all()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the module into evaluation mode for forwards in the block. Collective."""
        with super().evaluating(), self.model.evaluating():
            yield

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Yields the module with all parameters, to read or change alike on all ranks. Collective."""
        if self.gatherer.is_held(Holder.GATHERED):
            yield self.module  # which the block around this one keeps gathered
            return
        self._take_in()
        self.optimizer.wait()
        try:
            with self.gatherer.gathered():
                yield self.module
        finally:
            self._take_in()

    def _take_in(self) -> None:
        """Does the same, and copies values that the program has changed to the states."""
        super()._take_in()
        self.gatherer.changes.take_in(self.optimizer)
