"""The engine: trains a model on a topology, one optimizer step per call.

    topo    = Topology(pp=2, tp=2)
    engine  = Engine(model, topo, config)
    metrics = engine.step(batch)         # batch: this data rank's share of the global batch
    engine.save(path)                    # engine.start_save(path).wait() writes in the background

A step counts the valid tokens of the global batch; runs the pipeline plan, while gradients are
reduced bucket by bucket; computes the gradient norm; updates this rank's slices of the parameters;
and gathers the parameters, overlapped with the next forward. Usually the host does not wait for the
value of a tensor during a step. It waits when the program reads a property of `StepMetrics`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from threed.checkpoint import compatibility, native
from threed.checkpoint.extras import Extras
from threed.checkpoint.saving import Save, Saver
from threed.config import Config, ConfigError
from threed.config.checks import find_refusals
from threed.config.resolution import resolve
from threed.distributed import collectives
from threed.distributed.sharding import initial
from threed.distributed.topology import Topology
from threed.interop.huggingface.folder import is_hf_folder
from threed.interop.huggingface.weights import load_hf
from threed.layers import MicroBatch
from threed.layers.linear import use_sinks
from threed.models import Model, Wrapped, buffers, is_layered, options_of, wrap
from threed.ops.precision import LossScale
from threed.pipeline import activation_checkpointing, compiling
from threed.pipeline.batches import Batch, Batches
from threed.pipeline.executor import Executor, Outdated, Span
from threed.pipeline.layer_major import LayerMajorExecutor
from threed.pipeline.overlap import Overlap
from threed.pipeline.transport import Transport, links
from threed.planner.build import draw
from threed.zero import agreement, records, replicas, setup
from threed.zero.asynchronous import Asynchronous
from threed.zero.contributions import PlainBackwards, own_backward
from threed.zero.gather import Gatherer
from threed.zero.hooks import ModuleGatherer
from threed.zero.layout import Slot
from threed.zero.offload import OffloadedOptimizer
from threed.zero.optimizer import Optimizer, Synchronous
from threed.zero.rates import Rates
from threed.zero.reducer import OPEN, Reducer
from threed.zero.step_metrics import Faults, Later, loss_of
from threed.zero.step_metrics import StepMetrics as StepMetrics


class Engine:
    """Trains a model on a topology, one optimizer step per call.

    `Engine(...)` returns a `LayeredEngine` for a `threed.models.Model` and a `ModuleEngine` for any
    other `nn.Module`. Every rank creates the engine with the same model and configuration. Methods
    marked "Collective." must be called on every rank, in the same order.

    Args:
        model: a `threed.models.Model` with layers on the meta device; or, with tp = pp = 1, any
            `nn.Module` with a forward that takes the tensors of a batch as keyword arguments and
            returns a loss.
        topology: the axes (pipeline, data, context, tensor) of the ranks.
        config: the configuration; for a `threed.models.Model` it must be resolved
            (`threed.config.resolve`).
        learning_rate: function from the number of updates applied so far to the learning rate of
            the next update (both scalar tensors, fp64); replaces the configured schedule.
        loss_scale: rule by which the loss scale changes; replaces the configured rule.
        transport: object that sends activations between pipeline stages; by default it uses the
            topology's point-to-point links.

    Attributes:
        config: the resolved configuration.
        topology: the topology of the ranks.
        model: the model; for an `nn.Module` the `threed.models.Wrapped` around it.
        steps: number of completed steps.
        consumed: total number of samples in the global batches of all completed steps.
        wraps_module: True for a `ModuleEngine`, whose parameters the program may edit between
            steps.

    Raises:
        ConfigError: if the configuration is invalid, or needs a feature that is not available.
        TypeError: if `model` is neither a `threed.models.Model` nor an `nn.Module`.
        ValueError: if the module cannot be wrapped, or if model or configuration differ between
            ranks.

    Example:

        engine = threed.Engine(model, threed.Topology(pp=2, tp=2), config)
        for batch in batches:
            metrics = engine.step(batch)
            print(metrics.step, metrics.loss)
        engine.save("checkpoints/step-200")
    """

    wraps_module: ClassVar[bool]

    def __new__(cls, model: Model | nn.Module | None = None, *_: Any, **__: Any) -> Engine:
        """Returns a `LayeredEngine` for a model of pipeline layers, else a `ModuleEngine`."""
        kind = LayeredEngine if is_layered(model) else ModuleEngine
        # `copy.copy` of an engine passes the engine's own class, which is a subclass, as `cls`. The
        # copy must have the same class.
        return super().__new__(kind if cls is Engine else cls)

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
        # host seconds spent so far in forwards and backwards of the step in progress
        self._seconds = 0.0
        self._numbers: Later | None = None  # results of the last step; None before the first step
        agreement.check_configuration(config, topology.axis("world"))
        self.config, blueprint = draw(self.model, topology, config)
        self.blueprint, self.layout = blueprint, blueprint.layout
        own_layers = [blueprint.layers[number] for number in blueprint.held]
        self.batches = Batches(self.model, topology, config, blueprint.layers)
        flags = [self.batches.empty, *blueprint.flags]
        self.faults = Faults(flags, topology.device, warns=topology.rank == 0)
        wrapped = self.model if isinstance(self.model, Wrapped) else None
        self.buffers = buffers.build(
            blueprint.layers, blueprint.pipeline.layout, topology, blueprint.fully_recomputed,
            None if wrapped is None else wrapped.module,
        )  # fmt: skip
        codec = setup.weight_codec(config)
        self.gatherer: Gatherer = (
            Gatherer(self.layout, codec)
            if wrapped is None
            else ModuleGatherer(self.layout, wrapped, config.zero.prefetch, codec)
        )
        self.optimizer = self._make_optimizer(
            Rates(
                learning_rate or setup.learning_rate(config.optim, config.train.steps),
                setup.rate_factors(config.optim),
                topology.device,
            ),
            loss_scale or setup.loss_scale(config.precision),
        )
        self.saver = Saver(self.optimizer, topology, self.config)
        agreement.check_buckets(self.layout, topology)
        self._initialize()
        self.reducer = Reducer(
            self.layout, setup.gradient_codecs(config), self.wraps_module, blueprint.layer_major,
            early=self.optimizer.early, unused=self.optimizer.unused,
            warns=topology.axis("tp").index == 0, gatherer=self.gatherer, plain=self._plain_backwards(),
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
        # `Overlap` runs a forward and a backward at the same time on two streams. It is not used if
        # parameters are sharded or layers have buffers, because the allocator could reuse their
        # memory while the second stream still reads it.
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

    def _make_optimizer(self, rates: Rates, loss_scale: LossScale) -> Optimizer:
        """Returns the optimizer; an `OffloadedOptimizer` if states or parameters are offloaded."""
        policy, train = self.layout.policy, self.config.train
        offloads = policy.optimizer_tier is not None or policy.params_tier is not None
        return (OffloadedOptimizer if offloads else Optimizer)(
            self.layout, self.gatherer, self.topology.axis("world"), rates,
            device=self.topology.device, grad_clip=train.grad_clip, loss_scale=loss_scale,
            optimistic=self.blueprint.optimistic, max_spike=train.max_norm_spike,
            dynamic=self.wraps_module,
        )  # fmt: skip

    def _prepare(self, model: Model | nn.Module, config: Config) -> tuple[Model, Config]:
        """Returns the model to train and its resolved configuration. Collective."""
        raise NotImplementedError

    def _initialize(self) -> None:
        """Sets the weights to their initial values. Collective."""
        raise NotImplementedError

    def _plain_backwards(self) -> PlainBackwards | None:
        """Returns how the engine takes part in backwards that the program starts."""
        return None

    def step(self, batch: Batch) -> StepMetrics:
        """Runs one optimizer step. Collective.

        The step is skipped (weights stay unchanged) if a token id is not in the vocabulary or if no
        label of the global batch is valid; see `StepMetrics.skipped` for the other reasons. After a
        step with an invalid token id, reading `StepMetrics.loss` raises DataError.

        Args:
            batch: this data rank's share of the global batch; every pipeline and tensor rank passes
                the same tensors. 'tokens' and 'labels': int64 [b s], with b a multiple of the
                micro-batch size; labels below 0 are ignored. 'samples' (optional): int64 [b],
                global sample indices, consecutive by default. For a wrapped module: the keyword
                arguments of the module's forward.

        Returns:
            The metrics of the step. Their values are on the device; reading a value waits until the
            device has computed it.
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
            except Outdated:
                # The previous update was wrong and has been corrected, so the step is repeated.
                rewind()
        self._seconds = time.perf_counter() - began
        tokens = next(iter(batch.values())).numel() * self.topology.dp
        metrics = self._end_step(self._local_loss(losses, scale), tokens)
        # changed only here, so that the samples of a step that raises an error are not counted
        self.consumed += self.batches.rows(batch) * self.topology.dp
        return metrics

    def _begin(self, microbatches: int) -> None:
        # A step that was interrupted by an error may have left parameters gathered.
        self.gatherer.release_all()
        if self.buffers.exist:
            self.buffers.begin_step()
        self.runner.begin(microbatches)
        self._seconds = 0.0

    def _end_step(self, loss: Tensor, tokens: int) -> StepMetrics:
        """Reduces the gradients and updates the weights. Collective.

        Args:
            loss: this rank's term, fp64 [1]; the loss of the step is the sum of all ranks' terms.
            tokens: number of tokens of the global batch, for the metrics.
        """
        began = time.perf_counter()
        self.gatherer.release_all()
        if self.buffers.exist:
            # Raises an error if the forward changed a buffer that must stay constant. Called before
            # the update, so that the weights are unchanged in this case.
            self.buffers.end_step()
        update = self.runner.update(self.faults.appended_to(loss))
        reducing, updating = self.runner.seconds
        passes = self._seconds + time.perf_counter() - began - reducing - updating
        self.steps += 1
        if self._numbers is not None:
            # Compute the previous step's results first, so that the flags of invalid data are
            # counted in the order of the steps.
            self._numbers()
        self._numbers = Later(update, self.faults)
        if not self.runner.pending:
            self._numbers()
        seconds = {"fwd_bwd_s": passes, "dp_comm_s": reducing, "optim_s": updating}
        limit = self.config.train.max_bad_steps
        return StepMetrics(self.steps, tokens, self._numbers, seconds, self.faults, limit)

    def zero_grad(self) -> None:
        """Drops the gradients of a step that has not ended.

        Also drops the gradients that backwards of other engines have computed for this engine's
        parameters. A step has ended when `step` returns, even if its update is applied later, as in
        the asynchronous schedule 2BW.
        """
        self.runner.drop()

    def finish(self) -> None:
        """Completes the last step if its update is pending. Collective.

        The last update is pending if it was optimistic (applied before the gradient norm was known)
        and is not validated yet, or if the schedule is asynchronous (2BW). A call of this method
        does not change the results of training.
        """
        self.reducer.recover()
        self.runner.finish(self.executor.run)

    def _sync_states(self) -> None:
        """Releases gathered parameters and completes the last step, so that states can be read.

        Collective.
        """
        self.gatherer.release_all()
        self.finish()

    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the mean loss of a batch, without training. Collective.

        Args:
            batch: this data rank's share of the batch, as for `step`.

        Returns:
            The mean loss as defined in `StepMetrics.loss`, a scalar tensor; NaN if a token id is
            not in the vocabulary or no label is valid.
        """
        with self.evaluating():
            micros = self.batches.micro_batches(batch, self.steps, self.consumed, 1.0, False)
            losses = self.executor.run(self.plan_of(len(micros), training=False), micros)
            self.gatherer.release_all()
            return self.sum_losses(self._local_loss(losses, 1.0))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager for forwards without training. Collective.

        Completes the last step first. If a forward in the `with` block finds invalid data, it sets
        separate flags. At the end of the block, the flags of the step in progress are restored.
        """
        self.finish()
        with torch.inference_mode(False), self.faults.apart():
            self.buffers.agree()
            yield

    def sum_losses(self, loss: Tensor) -> Tensor:
        """Sums a loss over all ranks. Call it within `evaluating`. Collective.

        Args:
            loss: this rank's term, fp64 [1].

        Returns:
            The sum as a scalar tensor; NaN if any rank found invalid data.
        """
        own = self.faults.appended_to(loss)
        return loss_of(collectives.sum_of_scalars(own, self.topology.axis("world")))

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the next update; reading this property waits for the device.

        The first rate applies to the parameters that no parameter group matches. The other rates
        apply to the groups in `config.optim.groups`, one rate per group, in this order.
        """
        return self.optimizer.rates(self.optimizer.updates).tolist()

    def set_learning_rates(self, rates: Sequence[float] | None) -> None:
        """Replaces the schedule by constant learning rates, or returns to the schedule.

        The rates apply to all following steps, and are saved in checkpoints. Every rank must pass
        the same rates.

        Args:
            rates: one rate per entry of `learning_rates`; None to return to the schedule.

        Raises:
            ValueError: if the number of rates is not the length of `learning_rates`, or if a rate
                is negative or not finite.
        """
        self.optimizer.rates.set(rates)

    def bad_steps(self) -> int:
        """Completes the last step; returns the number of consecutive skipped steps. Collective."""
        self.finish()
        return int(self.optimizer.bad.in_a_row)

    def compare_replicas(self) -> None:
        """Checks that replicas of parameters and optimizer states are equal. Collective.

        Raises:
            ReplicaError: if replicas differ between ranks; the message names the ranks.
        """
        self._sync_states()
        replicas.check(self.optimizer, self.topology, self.steps)

    def _local_loss(self, losses: list[Tensor], scale: Tensor | float) -> Tensor:
        """Returns this rank's term of the loss, fp64 [1]; the loss is the sum of all ranks' terms.

        The term is zero unless this rank is on the last pipeline stage and has tensor-parallel
        index 0.

        Args:
            losses: weighted losses of the micro-batches; empty except on the last stage.
            scale: loss scale by which the losses were multiplied.
        """
        device = self.topology.device
        if not losses or self.topology.axis("tp").index > 0:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return torch.stack(losses).double().sum().view(1) / scale

    def record(self, on: bool = True) -> list[Span]:
        """Starts or stops recording the times of actions; returns the spans recorded until then.

        Args:
            on: True to start, False to stop.

        Returns:
            (action, start, end) of each action that this rank has run since the last call with
            True; start and end are in seconds of `time.perf_counter`. Empty if recording was off.
        """
        return self.executor.record(on)

    def save(
        self, path: str | Path, extra: Mapping[str, Any] | None = None, *,
        hurries: Callable[[], bool] | None = None,
    ) -> Path:  # fmt: skip
        """Writes a checkpoint; returns its path. Collective.

        The files are written to a folder with a temporary name, which is renamed to `path` when all
        files are complete. So an interrupted save leaves no partial checkpoint at `path`.

        Args:
            path: the folder of the checkpoint.
            extra: values for the manifest, which must be serializable as JSON; `load` returns them.
            hurries: function that returns True once the limit `checkpoint.write-limit-mib` (MiB/s)
                no longer applies, for example because the run must stop. The function may be called
                in any thread. None: the limit always applies.

        Raises:
            CheckpointError: on every rank, if the checkpoint cannot be written.
            DataError: if a step had invalid data and reading metrics has not raised the error yet.
        """
        self.saver.end()  # waits for the previous save and raises its error, if it failed
        return self.saver.start(
            Path(path), self.counters(extra), self.extras, background=False, hurries=hurries
        ).path

    def start_save(
        self, path: str | Path, extra: Mapping[str, Any] | None = None, *,
        before_publishing: Callable[[], None] | None = None, hurries: Callable[[], bool] | None = None,
    ) -> Save:  # fmt: skip
        """Starts a checkpoint in the background; returns the save in progress. Collective.

        Waits for the previous save first. Call `Save.wait` before the program exits. If there is
        not enough memory for a copy of the states, this method issues a warning, and returns only
        when the checkpoint is complete.

        Args:
            path: the folder of the checkpoint.
            extra: values for the manifest, which must be serializable as JSON; `load` returns them.
            before_publishing: function that is called on rank 0 in the writing thread, after all
                files are written and before the folder is renamed to `path`.
            hurries: see `save`.

        Returns:
            The save in progress. Its method `wait()`, which is collective, waits for the end of the
            save. Its property `done` is True once this rank's part has ended, successfully or not;
            on rank 0, once the entire save has ended.

        Raises:
            CheckpointError: on every rank, if a problem is found before this call returns; `wait`
                raises later problems.
            DataError: see `save`.
        """
        return self.saver.start(
            Path(path), self.counters(extra), self.extras, now=self.wraps_module,
            before_publishing=before_publishing, hurries=hurries,
        )  # fmt: skip

    def counters(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the state of training for a checkpoint's manifest. Collective.

        Args:
            extra: values of the caller, which must be serializable as JSON.

        Returns:
            A dict with the number of completed steps ("steps"), the number of consumed samples
            ("consumed") and `extra` ("extra"). Entries of `Reducer.state` and, with an asynchronous
            schedule, of `Asynchronous.state` are added.

        Raises:
            DataError: see `save`.
        """
        self._sync_states()
        if self._numbers is not None:
            self.faults.raise_before_save(
                self.steps, self._numbers().counts, self.topology.axis("world")
            )
        state = {"steps": self.steps, "consumed": self.consumed, "extra": dict(extra or {})}
        return state | self.reducer.state(self.topology.axis("pp")) | self.runner.state()

    def load(self, path: str | Path, hashed: Collection[str] | None = None) -> dict[str, Any]:
        """Loads a checkpoint of any topology, or the weights of a Hugging Face folder. Collective.

        Args:
            path: the checkpoint or Hugging Face folder.
            hashed: names of the files whose hashes this rank checks. None: each rank checks a share
                of the files.

        Returns:
            The `extra` values that were passed to `save`. For a Hugging Face folder, a dict with
            one entry "hf": the data of the folder that a later export needs.

        Raises:
            CheckpointError: on every rank, if the checkpoint cannot be loaded. If a file is missing
                or damaged, or the checkpoint is of a different model or optimizer, the engine is
                unchanged. If the checkpoint has values that are not finite, an engine that still
                had its initial weights gets them back; any other engine refuses to train or save
                until a checkpoint is loaded successfully.
        """
        self.saver.end()
        self._sync_states()
        arguments = (Path(path), self.optimizer, self.topology, self.config, self.extras)
        state = load_hf(*arguments) if is_hf_folder(Path(path)) else native.load(*arguments, hashed)
        self.steps, self.consumed = int(state["steps"]), int(state["consumed"])
        self.reducer.restore(state)
        self.runner.restore(state)
        return dict(state["extra"])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the full weights and persistent buffers, on the CPU of rank 0. Collective.

        Returns:
            On rank 0: global name -> full tensor; weights are fp32, or fp64 if the model uses fp64.
            An empty dict on other ranks.
        """
        self._sync_states()
        return native.collect(self.optimizer, self.topology) | self.buffers.collect()

    def load_full_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Sets weights and buffers from full tensors; optimizer moments are kept. Collective.

        Args:
            weights: global name -> full tensor; every rank passes all tensors.

        Raises:
            KeyError, ValueError: if names or shapes differ from the model's names and shapes.
        """
        self._sync_states()
        compatibility.take_full(self.optimizer, self.buffers, self.topology, weights)


# Makes help(Engine) show the parameters of __init__ instead of the parameters of __new__.
_parameters = list(inspect.signature(Engine.__init__).parameters.values())[1:]
Engine.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]


class LayeredEngine(Engine):
    """Trains a model of pipeline layers; `Engine(...)` creates it for a `threed.models.Model`.

    In addition to the methods of `Engine`, it has the method `logits`.
    """

    wraps_module = False

    def _prepare(self, model: Model | nn.Module, config: Config) -> tuple[Model, Config]:
        layered = cast(Model, model)
        setup.check_tile(config.zero.tile, layered.slicing.tile, wrapped=False)
        return layered, config

    def _initialize(self) -> None:
        values = functools.partial(initial, seed=self.config.train.seed)
        records.initialize(self.optimizer, values, again=True)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Returns the logits of a batch of tokens. Collective.

        Args:
            tokens: token ids, int64 [b s].

        Returns:
            On the last pipeline stage: the logits [b s v/t] of this tensor rank's shard of the
            vocabulary. None on other stages.
        """
        self.finish()
        with torch.inference_mode(False):
            micro = MicroBatch(tokens.to(self.topology.device), training=False)
            outputs = self.executor.run(self.plan_of(1, training=False), [micro])
            self.gatherer.release_all()
            return outputs[0].transpose(0, 1) if outputs else None


class ModuleEngine(Engine):
    """Trains any `nn.Module` on data ranks; `Engine(...)` creates it for a plain module.

    `step` runs a full batch. Instead, a custom loop can run the micro-batches itself, between
    `begin` and `update`.

    Attributes:
        accumulating: True between `begin` and `update`, except while a backward runs.

    Example:

        engine.begin(microbatches=4)
        for inputs in micro_batches:
            loss = engine.module(**inputs).loss
            engine.backward(loss)
        metrics = engine.update()
    """

    wraps_module = True
    accumulating = False
    model: Wrapped
    gatherer: ModuleGatherer
    plain: PlainBackwards
    # in a step with plain backwards: the update divides the sum of gradients by this number
    _divisor: int | None = None
    _microbatches: int | None  # number of micro-batches of the step in progress; None: not known
    _loss: Tensor  # weighted sum of the step's losses so far, fp64 [1]

    @property
    def module(self) -> nn.Module:
        """The module. Between `begin` and `update`, running it gathers its sharded parameters."""
        return self.model.module

    def _prepare(self, model: Model | nn.Module, config: Config) -> tuple[Wrapped, Config]:
        wrapped = wrap(model, self.topology)
        setup.check_tile(config.zero.tile, wrapped.slicing.tile, wrapped=True)
        config = resolve(config, 0, self.topology.world)
        activation_checkpointing.enable(wrapped.module, config)
        return wrapped, config

    def _initialize(self) -> None:
        values = functools.partial(self.model.initial, seed=self.config.train.seed)
        self.model.agree(self.topology.data, self.topology.device)
        records.initialize(self.optimizer, values, again=False)
        self.model.initialized(self.topology.device, self.batches.dtype)
        self.gatherer.changes.begin()

    def begin(self, microbatches: int | None = 1) -> None:
        """Begins an optimizer step in a custom loop. Collective.

        Args:
            microbatches: number of micro-batches of the step; None if the number is not known. With
                None, every call of `backward` needs an argument `weight`. Moreover, under ZeRO
                stages 0 and 1, gradients are reduced during the last backward only if it is called
                with `last=True`; otherwise they are reduced after it.
        """
        self.faults.clear()
        self._begin(OPEN if microbatches is None else microbatches)
        self.accumulating, self._microbatches, self._divisor = True, microbatches, None
        self._loss = torch.zeros(1, dtype=torch.float64, device=self.topology.device)
        self.plain.allow(True)

    def _plain_backwards(self) -> PlainBackwards:
        plain = self.plain = PlainBackwards(self._plain_begins, self._plain_ended)
        module_of_outputs = lambda module, args, output: self._watch(output)  # noqa: E731
        self.module.register_forward_hook(module_of_outputs)
        return plain

    def _watch(self, output: Any) -> None:
        """Registers hooks by which a gradient of the module's output begins a plain backward.

        Without them, it would begin at the first gradient of a parameter. With a reentrant
        activation checkpoint, this is in a nested backward, which ends earlier.
        """
        for leaf in tree_leaves(output) if self.plain.accepts and torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self.plain.enter)

    def _plain_begins(self) -> None:
        """Begins a pass for a `loss.backward()` of the program.

        Gradients then accumulate without a weight, and the update divides their sum.
        """
        if self.config.precision.dtype == "fp16":
            raise RuntimeError(
                "loss.backward() under fp16: call engine.backward(loss), which scales the loss"
            )
        if self._divisor is None:
            if self.reducer.passes:
                raise RuntimeError(
                    "loss.backward() in a step after engine.backward(loss): use one of them"
                )
            self._divisor = self.topology.dp * (self._microbatches or 1)
        self._check_scales()
        self.reducer.count_freely()
        self.accumulating = False

    def _plain_ended(self) -> None:
        self.accumulating = True
        self.reducer.pass_ended()

    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, last: bool = False, *,
        retain_graph: bool = False,
    ) -> None:  # fmt: skip
        """Runs the backward of a micro-batch and accumulates its gradients and its loss.

        A micro-batch may have several losses, each with a backward. If this method raises an error,
        the gradients of the step are discarded. Afterwards, call `begin` to start the next step.

        Instead, a program can call `loss.backward()`, also of a loss that depends on the modules of
        several engines. The gradients are then divided by the number of micro-batches that `begin`
        got (by 1 for None) and by the number of data ranks. Reductions of ZeRO stages 0 and 1 start
        only after the last backward, and the metrics' loss is NaN. Refused under fp16, and after
        this method in the same step.

        Args:
            loss: mean loss of the micro-batch, a scalar.
            weight: the loss of the step is the sum of the micro-batches' losses, each multiplied by
                its `weight`. By default 1 / (micro-batches × data ranks), so that the loss of the
                step is the mean over all micro-batches of all data ranks.
            last: whether this is the last backward of the step. Only needed if the number of
                micro-batches of the step is not known (`begin(None)`).
            retain_graph: whether another backward of the same graph follows.

        Raises:
            RuntimeError: if `begin` was not called.
            ValueError: if the step began with `begin(None)` and no weight is given.
        """
        self._check_begun()
        began = time.perf_counter()
        if weight is None:
            if self._microbatches is None:
                raise ValueError("backward in a step of begin(None) needs a weight")
            weight = 1.0 / (self._microbatches * self.topology.dp)
        self._check_scales()
        if retain_graph:
            self.reducer.count_freely()
        if last:
            self.reducer.next_is_last()
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        self.accumulating = False
        with own_backward(self.reducer):
            scale = (self.optimizer.scaler.scale * weight * (self._divisor or 1)).to(wide.dtype)
            torch.autograd.backward((wide * scale,), retain_graph=retain_graph)
        self.accumulating = True
        self._loss += loss.detach().double() * weight
        self.reducer.pass_ended()
        self._seconds += time.perf_counter() - began

    def update(self, tokens: int = 0) -> StepMetrics:
        """Ends the step: reduces the gradients over ranks and updates the weights. Collective.

        Args:
            tokens: number of tokens of the global batch, for the metrics only.

        Returns:
            The metrics of the step.

        Raises:
            RuntimeError: if `begin` was not called.
        """
        self._check_begun()
        # Some ranks may have launched more reductions than others. Every rank must launch all of
        # its reductions before another collective is called.
        self.reducer.all_passes_ended()
        self.optimizer.divide_by(self._divisor or 1)
        metrics = self._end_step(self._loss, tokens)
        return dataclasses.replace(metrics, has_loss=self._divisor is None)

    def _check_begun(self) -> None:
        if not self.accumulating:
            raise RuntimeError("call Engine.begin(microbatches) first: no step is in progress")

    def _end_step(self, loss: Tensor, tokens: int) -> StepMetrics:
        self.accumulating = False
        self.plain.allow(False)
        self._sync_states()
        self._check_scales()
        return super()._end_step(loss, tokens)

    def _begin(self, microbatches: int) -> None:
        self.plain.allow(False)
        self.optimizer.divide_by(1)
        self.gatherer.release_all()  # parameters must be freed even if the check raises an error
        self._check_scales()
        super()._begin(microbatches)

    def _check_scales(self) -> None:
        """Raises RuntimeError if gradients of another engine's backward have another factor.

        With fp16 the factor is that engine's loss scale; in a step with plain backwards, it is the
        weight of that engine's losses.
        """
        scaled = self.config.precision.dtype == "fp16" or self._divisor is not None
        for slot, _ in self.reducer.foreign if scaled else ():
            raise RuntimeError(
                f"{slot.spec.name} has a gradient of another engine's backward, scaled by that"
                " engine's loss scale: call zero_grad() before this engine's backward"
            )

    def zero_grad(self) -> None:
        super().zero_grad()
        if self.accumulating:
            self._loss.zero_()

    def discard(self) -> None:
        """Discards the step in progress of a custom loop, for example after an error."""
        self.accumulating = False
        self.plain.allow(False)
        self.reducer.give_up()

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """Context manager: yields the module for forwards without gradients."""
        try:
            # `no_grad` instead of inference mode, because the module may cache tensors here and use
            # them in training later
            with torch.inference_mode(False), torch.no_grad():
                yield self.module
        finally:
            self.gatherer.release_all()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: the module is in evaluation mode and can run forwards. Collective."""
        with super().evaluating(), self.model.evaluating():
            yield

    @contextmanager
    def gathered(
        self, params: Iterable[Tensor] | None = None, *, modifier_rank: int | None = None
    ) -> Iterator[nn.Module]:
        """Context manager: yields the module with full parameters, to read or edit. Collective.

        Blocks can be nested. They can also be used within a step of a custom loop, between its
        backwards; edits in such a block take effect in the update of the step.

        Args:
            params: the parameters of the module that the block uses; None: all parameters. Other
                parameters in the same buffer are gathered, too.
            modifier_rank: rank that edits the parameters; at the end of the block, all other ranks
                get its values. None: the program makes the same changes on every rank.

        Raises:
            ValueError: if an entry of `params` is not a parameter of this engine, or if no rank has
                the number `modifier_rank`.
        """
        slots = self._slots_of(params)
        everyone = self.topology.axis("world")
        if modifier_rank is not None and not 0 <= modifier_rank < everyone.size:
            raise ValueError(f"modifier_rank {modifier_rank}: ranks are 0 to {everyone.size - 1}")
        between_steps = not (self.gatherer.lent or self.accumulating)
        if between_steps:
            self._sync_states()
            self.optimizer.wait()
        try:
            with self.gatherer.gathered(slots):
                yield self.module
                if modifier_rank is not None:
                    self.gatherer.changes.broadcast(slots, everyone, modifier_rank)
        finally:
            if between_steps:
                self._sync_states()

    def _slots_of(self, params: Iterable[Tensor] | None) -> list[Slot]:
        """Returns the slots of parameters in their order, without repetition; all for None."""
        if params is None:
            return list(self.layout.slots)
        known = {id(slot.param): slot for slot in self.layout.slots}
        found: dict[Slot, None] = {}
        for param in (params,) if isinstance(params, Tensor) else params:
            if id(param) not in known:
                shape = list(getattr(param, "shape", ()))
                raise ValueError(
                    f"gathered: a {type(param).__name__} of shape {shape} is not a parameter of this engine"
                )
            found[known[id(param)]] = None
        return list(found)

    def _sync_states(self) -> None:
        """Completes the last step; copies the program's edits of parameters to the optimizer.

        See `threed.zero.manual_edits`.
        """
        super()._sync_states()
        self.gatherer.changes.absorb_edits(self.optimizer)
