"""The engine: a model, a topology and a configuration, trained one optimizer step at a time.

    topo    = Topology(pp=2, tp=2)
    engine  = Engine(model, topo, config)
    metrics = engine.step(batch)            # this data rank's share of the global batch; one optimizer step
    engine.evaluate(batch) · engine.logits(tokens) · engine.save(path) · engine.load(path) · engine.full_state_dict()
    save    = engine.start_save(path) · save.wait()     # written while training goes on

One step: the global number of valid tokens -> the plan's forwards and backwards, gradients leaving bucket by bucket ->
norm -> AdamW on this rank's slices -> parameters gathered while the next forward begins. No tensor's value is read on
the host; `StepMetrics` does that when it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threed import buffers, collectives
from threed.batches import Batch, Batches
from threed.checkpoint import fit, native
from threed.checkpoint.beside import Save, Saver
from threed.checkpoint.extras import Extras
from threed.checks import find_refusals
from threed.config import Config, ConfigError
from threed.drawing import draw
from threed.interop.huggingface.folder import is_hf_folder
from threed.interop.huggingface.weights import load_hf
from threed.layers import MicroBatch
from threed.layers.linear import use_sinks
from threed.metrics import Faults, Later, Numbers, loss_of
from threed.metrics import StepMetrics as StepMetrics
from threed.models import Model, Wrapped, as_model, options_of
from threed.pipeline import activation_checkpointing, compiling
from threed.pipeline.executor import Executor, Outdated, Span
from threed.pipeline.layer_major import LayerMajorExecutor
from threed.pipeline.overlap import Overlap
from threed.pipeline.transport import Transport, links
from threed.precision import LossScale
from threed.resolution import resolve
from threed.sharding import Piece, initial
from threed.topology import Topology
from threed.zero import agreement, records, replicas, setup
from threed.zero.access import Holder
from threed.zero.asynchronous import Asynchronous
from threed.zero.foreign_gradients import check_scales, own_backward
from threed.zero.gather import Gatherer
from threed.zero.hooks import Hooks
from threed.zero.manual_edits import Changes
from threed.zero.optimizer import Optimizer
from threed.zero.reducer import Reducer
from threed.zero.update import Update

PHASES = ("fwd_bwd_s", "dp_comm_s", "optim_s")


class Engine:
    """Trains `model` on `topology` by `config`.

    model: a `threed.models.Model` with layers on the meta device, and a resolved configuration; or, with tp = pp = 1,
    any `nn.Module` whose forward takes the batch's tensors as keyword arguments and returns a loss. learning_rate,
    loss_scale: used instead of the configuration's. transport: between stages; by default the topology's links. Raises
    ConfigError for missing features, TypeError if `model` is not a model, and ValueError if it cannot be wrapped, or if
    ranks have different models or configurations (the message names the ranks).
    """

    def __init__(
        self, model: Model | nn.Module, topology: Topology, config: Config, *,
        learning_rate: Callable[[Tensor], Tensor] | None = None, loss_scale: LossScale | None = None,
        transport: Transport | None = None,
    ) -> None:  # fmt: skip
        if refused := find_refusals(config):
            raise ConfigError(refused)
        self.topology = topology
        self.model = as_model(model, topology)
        self.wrapped = self.model if isinstance(self.model, Wrapped) else None
        setup.check_tile(config.zero.tile, self.model.slicing.tile, self.wrapped is not None)
        self.config = config = resolve(config, 0, topology.world) if self.wrapped else config
        if self.wrapped is not None:
            activation_checkpointing.enable(self.wrapped.module, config)
        self.changes: Changes | None = None
        self.steps, self.consumed, self._begun = 0, 0, False
        self._numbers: Later | None = None  # of the last step
        agreement.check_configuration(config, topology.axis("world"))
        self.config, blueprint = draw(
            self.model, topology, config, wrapped=self.wrapped is not None
        )
        self.blueprint = blueprint
        layers, mine = blueprint.layers, [blueprint.layers[number] for number in blueprint.held]
        self.batches = Batches(self.model, topology, config, layers)
        self.layout = blueprint.layout
        self.faults = Faults(
            [self.batches.empty, *blueprint.flags], topology.device, warns=topology.rank == 0
        )
        module = self.wrapped and self.wrapped.module
        self.buffers = buffers.build(layers, blueprint.cut, topology, blueprint.again, module)
        dynamic = self.wrapped is not None
        gather_axis = setup.gather_axis(config, topology, self.layout.policy)
        self.gatherer = Gatherer(self.layout, gather_axis, dynamic, setup.weight_codec(config))
        self.optimizer = Optimizer(
            self.layout, self.gatherer, topology.axis("world"), setup.rule(config.optim),
            learning_rate or setup.learning_rate(config.optim, config.train.steps), device=topology.device,
            grad_clip=config.train.grad_clip, loss_scale=loss_scale or setup.loss_scale(config.precision),
            optimistic=blueprint.optimistic, max_spike=config.train.max_norm_spike,
            dynamic=dynamic,
        )  # fmt: skip
        self.saver = Saver(self.optimizer, topology, self.config)
        agreement.check_buckets(self.layout, topology)
        if self.wrapped is not None:
            self.wrapped.agree(topology.data, topology.device)
        records.initialise(
            self.optimizer, self._initial_value, again=self.wrapped is None
        )  # a module has them once
        self.hooks = self._hook_up()
        self.reducer = Reducer(
            self.layout, setup.gradient_codecs(config), dynamic, blueprint.layer_major, early=self.optimizer.early,
            unused=self.optimizer.unused, warns=topology.axis("tp").index == 0,
            on_gradient=None if self.hooks is None else self.hooks.on_gradient,
            gather_order=None if self.hooks is None else self.hooks.gather_order,
        )  # fmt: skip
        self.asynchronous: Asynchronous | None = None
        if blueprint.plan.asynchronous:
            self.asynchronous = Asynchronous(blueprint.lowered, self.reducer, self.optimizer)
        for layer in mine if blueprint.plan.splits else ():
            use_sinks(layer)
        compiling.compile_layers(mine, layers, config.run)
        self.buffers.begin()
        self.extras = Extras(self.buffers, topology, generators=self.wrapped is not None)
        self.executor = (LayerMajorExecutor if blueprint.layer_major else Executor)(
            blueprint.stages(self.gatherer, self.reducer), transport or links(self.model, topology),
            topology.axis("pp").index, (self.asynchronous or self.reducer).all_passes_ended, self._pass_ended,
            weight_gradients=self.reducer.deferral, overlap=self._overlap(mine), device=topology.device,
            varying=options_of(self.model).boundaries_vary, on_validate=self.optimizer.validate,
            updates=self.asynchronous,
        )  # fmt: skip

    def _overlap(self, mine: list[nn.Module]) -> Overlap | None:
        """The streams of pairs. What a layer frees, another stream could reuse while it is read: so pairs run one after
        the other where parameters are freed, or buffers may be replaced."""
        frees = self.layout.slices_parameters or any(
            True for layer in mine for _ in layer.buffers()
        )
        return None if frees else Overlap(self.topology.device)

    def _initial_value(self, piece: Piece) -> Tensor:
        seed = self.config.train.seed
        return initial(piece, seed) if self.wrapped is None else self.wrapped.initial(piece, seed)

    def _hook_up(self) -> Hooks | None:
        if self.wrapped is None:
            return None
        self.wrapped.initialised(self.topology.device, self.batches.dtype)
        self.changes = Changes(self.wrapped.module, self.layout, self.optimizer, self.gatherer)
        w, ahead = self.wrapped, self.config.zero.prefetch
        return Hooks(w.module, w.units, self.layout, self.gatherer, ahead)

    # ------------------------------------------------------------------------------------------------------- running

    def step(self, batch: Batch) -> StepMetrics:
        """Runs one optimizer step on this data rank's share of the global batch. Collective.

        batch: 'tokens' and 'labels', int64 [b s], b a multiple of the micro-batch size; labels below 0 are not
        counted; 'samples', int64 [b], global sample indices, by default in order of consumption. A step with ids beyond
        the vocabulary, or without any label that counts, is skipped: see `DataError`.
        """
        began = time.perf_counter()
        rewind = self.extras.rewinding() if self.optimizer.pending else lambda: None
        while True:
            self.faults.clear()
            micros = self._micro_batches(batch, training=True)
            self._begin(len(micros))
            try:
                with own_backward(self.reducer):
                    if self.asynchronous is None:
                        losses = self.executor.run(self.blueprint.lowered(len(micros)), micros)
                    else:
                        losses = self.asynchronous.run(self.executor.run, micros)
                break
            except Outdated:  # the update before this step was undone, and done again
                rewind()
        self._backwards_s = time.perf_counter() - began
        tokens = next(iter(batch.values())).numel() * self.topology.dp
        metrics = (self.update if self.asynchronous is None else self._end_step)(
            self._carry(losses), tokens
        )
        self.consumed += (
            self.batches.rows(batch) * self.topology.dp
        )  # as `steps`: only of a step that was done
        return metrics

    def begin(self, microbatches: int) -> None:
        """Begins an optimizer step of so many micro-batches; `step` does this by itself. Collective."""
        self.faults.clear()
        self._begin(microbatches)

    def _begin(self, microbatches: int) -> None:
        self._forwards_ended()  # nothing is left of a step that an error broke off
        check_scales(self.config.precision.dtype, self.layout.slots)
        self.buffers.begin_step()
        if self.asynchronous is None:  # which begins when the step before has ended
            self.reducer.begin(microbatches)
        self._begun, self._backwards_s = True, 0.0

    @property
    def module(self) -> nn.Module:
        """The wrapped module; called between `begin` and `update`, it gathers its parameters as it runs."""
        if self.wrapped is None:
            raise AttributeError("a model of threed.layers runs by `step` and `evaluate` only")
        return self.wrapped.module

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0) -> None:
        """Runs the backward of one micro-batch of a wrapped module, of loss * weight * the loss scale. If it raises,
        the step's gradients are discarded: call `begin` for the next step."""
        if not self._begun:
            raise RuntimeError(
                "call Engine.begin(microbatches) first: gradients of the last step are in the way"
            )
        began = time.perf_counter()
        check_scales(self.config.precision.dtype, self.layout.slots)
        self._begun = False
        with own_backward(self.reducer):
            torch.autograd.backward((loss * (self.optimizer.scaler.scale * weight).to(loss.dtype),))
        self._begun = True
        self._pass_ended()
        self._backwards_s += time.perf_counter() - began

    def zero_grad(self) -> None:
        """Drops all gradients so far: of the step that is under way, and those that other engines' losses brought."""
        if self.asynchronous is not None:  # the last step keeps its own
            self.finish()
        self.reducer.drop()

    def update(self, loss: Tensor, tokens: int = 0) -> StepMetrics:
        """Ends an optimizer step: sums what is left of the gradients, and updates. Collective.

        loss: fp64 [1], this rank's part of a sum over all ranks. tokens: of the global batch, for the metrics.
        """
        times = [time.perf_counter()]
        self._begun = False
        self._take_in()
        check_scales(self.config.precision.dtype, self.layout.slots)
        gradients = self.reducer.finish()
        times.append(time.perf_counter())
        self.buffers.end_step()  # refuses what must not change, while nothing is updated
        update = self.optimizer.step(gradients, self.faults.appended_to(loss))
        times.append(time.perf_counter())
        return self._metrics(
            update, tokens, (self._backwards_s, times[1] - times[0], times[2] - times[1])
        )

    def _end_step(self, loss: Tensor, tokens: int) -> StepMetrics:
        """Ends a step whose update comes in the next one; it has made that of the step before."""
        assert self.asynchronous is not None
        self._begun = False
        self.buffers.end_step()
        spent = self.asynchronous.seconds
        results = self.asynchronous.results(self.faults.appended_to(loss))
        return self._metrics(results, tokens, (self._backwards_s - sum(spent), *spent))

    def _metrics(
        self, update: Callable[[], Update], tokens: int, seconds: Sequence[float]
    ) -> StepMetrics:
        self.steps += 1
        if self._numbers is not None:
            self._numbers()  # faults are counted in the order of steps
        self._numbers = Later(lambda: self._numbers_of(update()))
        if not (self.optimizer.pending or self.asynchronous):
            self._numbers()
        spent, most = dict(zip(PHASES, seconds, strict=True)), self.config.train.max_bad_steps
        return StepMetrics(self.steps, tokens, self._numbers, spent, self.faults, most)

    def _numbers_of(self, update: Update) -> Numbers:
        loss, found = loss_of(update.sums), self.faults.add(update.sums[1:])
        return Numbers(
            loss,
            update.grad_norm,
            update.lr,
            update.loss_scale,
            update.skips,
            update.in_a_row,
            found,
        )

    def _pass_ended(self, chunk: int = 0) -> None:
        self.reducer.pass_ended(chunk)
        if self.hooks is not None:
            self.hooks.pass_ended()

    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the mean token loss of a batch, of which each data rank passes its share, without training: a scalar,
        the same on every rank; NaN if ids are beyond the vocabulary, or no label counts. Collective."""
        self.finish()
        evaluating = nullcontext() if self.wrapped is None else self.wrapped.evaluating()
        with torch.inference_mode(False), evaluating, self.faults.apart():
            micros = self._micro_batches(batch, training=False)
            self.buffers.agree()
            losses = self.executor.run(self.blueprint.lowered(len(micros), training=False), micros)
            self._forwards_ended()
            mine = self.faults.appended_to(self._carry(losses, 1.0))
            return loss_of(collectives.sum_of_scalars(mine, self.topology.axis("world")))

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits [b s v/t] of tokens [b s], cut by vocabulary, on the last stage; None on the others."""
        self.finish()
        with torch.inference_mode(False):
            micro = MicroBatch(tokens.to(self.topology.device), training=False)
            outputs = self.executor.run(self.blueprint.lowered(1, training=False), [micro])
            self._forwards_ended()
            return outputs[0].transpose(0, 1) if outputs else None

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Yields the wrapped module with all parameters gathered. Changes must be the same on all ranks. Collective."""
        if self.gatherer.is_held(Holder.GATHERED):
            yield self.module  # which the block around this one keeps gathered
            return
        self._take_in()
        self.optimizer.settle()
        try:
            with self.gatherer.gathered():
                yield self.module
        finally:
            self._take_in()

    def _take_in(self) -> None:
        """Frees what is gathered; values that were changed by hand are kept."""
        self._forwards_ended()
        self.finish()
        if self.changes is not None:
            self.changes.take_in()

    def bad_steps(self) -> int:
        """How many steps in a row, up to the last one, were skipped and count as bad; ends that step. Collective."""
        self.finish()
        return int(self.optimizer.bad.in_a_row)

    def compare_replicas(self) -> None:
        """Compares what several ranks hold copies of. ReplicaError on every rank, naming those that differ."""
        self._take_in()
        replicas.check(self.optimizer, self.topology, self.steps)

    def finish(self) -> None:
        """Ends the last step (optimistic updates, 2bw). Does not change the training. Collective."""
        self.reducer.recover()
        self.optimizer.validate()
        if self.asynchronous is not None:
            self.asynchronous.drain(self.executor.run)

    def _forwards_ended(self) -> None:
        if self.hooks is not None:
            self.hooks.pass_ended()
        self.gatherer.release_all()

    def _carry(self, losses: list[Tensor], scale: Tensor | float | None = None) -> Tensor:
        """This rank's part of the loss, fp64 [1]: what the last stage's first tensor rank computed, else zero."""
        device = self.topology.device
        if not losses or self.topology.axis("tp").index > 0:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return torch.stack(losses).double().sum().view(1) / (
            self.optimizer.scaler.scale if scale is None else scale
        )

    def _micro_batches(self, batch: Batch, training: bool) -> list[MicroBatch]:
        self.reducer.recover()
        scale = self.optimizer.scaler.scale if training else 1.0
        return self.batches.micro_batches(batch, self.steps, self.consumed, scale, training)

    def record(self, on: bool = True) -> list[Span]:
        """Starts (or stops) to record what runs when; gives the spans recorded so far."""
        spans = self.executor.spans
        self.executor.record(on)
        return spans

    # --------------------------------------------------------------------------------------------------------- state

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Writes a checkpoint folder at `path`, atomically; `load` returns `extra`. Collective. Raises DataError on all
        ranks, before anything is written, if a step had invalid data and reading metrics has not raised the error."""
        self.saver.end()
        return self.saver.save(Path(path), self.counters(extra), self.extras)

    def start_save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        published: Callable[[], None] | None = None,
    ) -> Save:
        """Begins to write a checkpoint, of this step, while training goes on; `Save.wait` before the program ends. One
        at a time: waits for the one before. published: called in a thread of the first rank, once it is whole."""
        state, now = (
            self.counters(extra),
            self.wrapped is not None,
        )  # whose parameters anybody may change
        return self.saver.start(Path(path), state, self.extras, now=now, published=published)

    def counters(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the counters for a manifest, after the last update. Collective. DataError: see `save`."""
        self._take_in()
        if self._numbers is not None:
            self.faults.raise_before_save(
                self.steps, self._numbers().found, self.topology.axis("world")
            )
        counted = collectives.exchange(self.reducer.counted(), self.topology.axis("pp"))
        uses = {name: count for stage in counted for name, count in stage.items()}
        state = {
            "steps": self.steps,
            "consumed": self.consumed,
            "extra": dict(extra or {}),
            "uses": uses,
        }
        state |= {} if self.asynchronous is None else self.asynchronous.state()
        if self.optimizer.unused is not None:
            state["unused"] = self.optimizer.unused.state()
        return state

    def load(self, path: str | Path, hashed: Collection[str] | None = None) -> dict[str, Any]:
        """Loads weights, moments, buffers and counters from a checkpoint of any topology, or weights alone from a
        Hugging Face folder; returns `extra` of `save`, of a folder its record as `hf`. Collective. CheckpointError,
        before anything is overwritten, if names or shapes are those of another model. hashed: see `native.load`."""
        self.saver.end()
        self._take_in()
        about = (Path(path), self.optimizer, self.topology, self.config, self.extras)
        state = load_hf(*about) if is_hf_folder(Path(path)) else native.load(*about, hashed)
        self.steps, self.consumed = int(state["steps"]), int(state["consumed"])
        self.reducer.restore(state.get("uses", {}))
        if self.asynchronous is not None:
            self.asynchronous.restore(state)
        if self.optimizer.unused is not None:
            self.optimizer.unused.restore(state.get("unused"))
        return dict(state["extra"])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Global names -> full tensors (masters, at least fp32; persistent buffers) on rank 0, an empty dict elsewhere.
        Collective."""
        self._take_in()
        return native.collect(self.optimizer, self.topology) | self.buffers.collect()

    def load_full_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Takes weights and buffers from full tensors by global name, which every rank must pass; moments stay."""
        self._take_in()
        fit.take_full(self.optimizer, self.buffers, self.topology, weights)
