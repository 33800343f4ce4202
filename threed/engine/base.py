"""The base class of engines: the parts of a step that all models share."""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from threed.checkpoint import compatibility, native
from threed.checkpoint.saving import Extras, Save, Saver
from threed.config import Config, ConfigError
from threed.config.checks import find_batch_problems, find_refusals, find_size_problems
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.engine.rooms import Rooms
from threed.interop.huggingface.folder import is_hf_folder
from threed.interop.huggingface.weights import load_hf
from threed.layers.linear import use_sinks
from threed.models import Model, Wrapped, buffers, is_layered, options_of
from threed.ops.precision import LossScale
from threed.pipeline import compiling, graphs
from threed.pipeline.batches import Batch, Batches
from threed.pipeline.executor import Executor, Outdated, Span
from threed.pipeline.layer_major import LayerMajorExecutor
from threed.pipeline.overlap import Overlap
from threed.pipeline.transport import Transport, links
from threed.planner.blueprint import overlaps
from threed.planner.build import draw
from threed.zero import agreement, replicas, setup
from threed.zero.asynchronous import Asynchronous
from threed.zero.contributions import own_backward
from threed.zero.gather import Gatherer
from threed.zero.hooks import ModuleGatherer
from threed.zero.offload import OffloadedOptimizer
from threed.zero.optimizer import Optimizer, Synchronous
from threed.zero.plain_backwards import PlainBackwards
from threed.zero.rates import Rates, rate_factors, rate_schedule
from threed.zero.reducer import Reducer
from threed.zero.sinks import refuse_torch_steps
from threed.zero.step_metrics import Faults
from threed.zero.step_metrics import StepMetrics as StepMetrics
from threed.zero.update import Later, loss_of

NOT_LAYERS = ": an engine is not an nn.Module: use the methods of threed.Engine"
NOT_A_MODULE = (
    ": an engine is not an nn.Module: use engine.module, or, for the Trainer of transformers, Accelerate or TRL, pass"
    " the module instead of an engine, and call threed.install_as_deepspeed() first (docs/guide/accelerate.md)"
)


class _EngineType(type):
    """The class of `Engine`; shows the methods of all kinds of engines, as in `help(Engine.begin)`."""

    def __getattr__(cls, name: str) -> Any:
        own = cls is Engine and not name.startswith("_")
        for kind in Engine._kinds.values() if own else ():
            if name in vars(kind):
                return getattr(kind, name)
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")


class Engine(metaclass=_EngineType):
    """Trains a model on a topology, one optimizer step per call.

    `Engine(...)` returns a `LayeredEngine` for a `threed.models.Model` and a `ModuleEngine` for any
    other `nn.Module`. Only a `ModuleEngine` has `begin`, `backward`, `update`, `gathered`,
    `inference` and `destroy`. Every rank creates the engine with the same model and configuration. Methods
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
        trains: False for an engine that only evaluates an `nn.Module`; see `ModuleEngine`.

    Attributes:
        config: the resolved configuration.
        topology: the topology of the ranks.
        model: the model; for an `nn.Module` the `threed.models.Wrapped` around it.
        steps: number of completed steps.
        consumed: total number of samples in the global batches of all completed steps.
        trains: False for an engine that only evaluates.
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
    _kinds: ClassVar[dict[bool, type[Engine]]] = {}  # by `wraps_module`

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        Engine._kinds.setdefault(cls.wraps_module, cls)

    def __new__(cls, model: Model | nn.Module | None = None, *_: Any, **__: Any) -> Engine:
        """Returns a `LayeredEngine` for a model of pipeline layers, else a `ModuleEngine`."""
        kind = cls._kinds[not is_layered(model)]
        # `copy.copy` of an engine passes the engine's own class, which is a subclass, as `cls`. The
        # copy must have the same class.
        return super().__new__(kind if cls is Engine else cls)

    def __init__(
        self, model: Model | nn.Module, topology: Topology, config: Config, *,
        learning_rate: Callable[[Tensor], Tensor] | None = None,
        loss_scale: LossScale | None = None, transport: Transport | None = None,
        trains: bool = True,
    ) -> None:  # fmt: skip
        _check_types(topology, config)
        if refused := find_refusals(config):
            raise ConfigError(refused)
        self.topology, self.trains = topology, trains
        with _without_inference_mode(), ExitStack() as undo:
            # actions that give the model back; also run if this constructor fails
            self._undo = undo
            self._build(model, config, learning_rate, loss_scale, transport)
            self._complete()
            self._undo = undo.pop_all()

    def _build(
        self, model: Model | nn.Module, config: Config, learning_rate: Callable[[Tensor], Tensor] | None,
        loss_scale: LossScale | None, transport: Transport | None,
    ) -> None:  # fmt: skip
        """Builds all parts of the engine. Collective."""
        topology = self.topology
        self.model, config = self._prepare(model, config)
        self.steps, self.consumed = 0, 0
        # host seconds spent so far in forwards and backwards of the step in progress
        self._seconds = 0.0
        self._numbers: Later | None = None  # results of the last step; None before the first step
        agreement.check_configuration(config, topology.axis("world"), self.trains)
        self._check_sizes(config)
        self.config, blueprint = draw(self.model, topology, config, self.trains)
        self.blueprint, self.layout = blueprint, blueprint.layout
        graphed = graphs.wanted(self.config, self.model, blueprint.layers, topology, self.trains)
        own_layers = [blueprint.layers[number] for number in blueprint.held]
        self.batches = self._make_batches(blueprint.layers)
        batches = self.batches
        flags = [batches.empty, batches.decreasing, batches.differing, *blueprint.flags]
        self.faults = Faults(flags, topology.device, warns=topology.rank == 0)
        self.rooms = Rooms(blueprint.layers, self.faults)
        wrapped = self.model if isinstance(self.model, Wrapped) else None
        self.buffers = buffers.build(
            blueprint.layers, blueprint.pipeline.layout, topology, blueprint.fully_recomputed,
            None if wrapped is None else wrapped.module,
        )  # fmt: skip
        codec = setup.weight_codec(config)
        self.gatherer: Gatherer = (
            Gatherer(self.layout, codec)
            if wrapped is None
            else ModuleGatherer(
                self.layout, wrapped, config.zero.prefetch, codec, topology.axis("world")
            )
        )
        self._undo.callback(self.gatherer.remove)
        self.optimizer = self._make_optimizer(
            Rates(
                learning_rate or rate_schedule(config.optim, config.train.steps),
                rate_factors(config.optim),
                topology.device,
            ),
            loss_scale or setup.loss_scale(config.precision),
        )
        self._undo.callback(self.optimizer.close)
        self.saver = Saver(self.optimizer, topology, self.config)
        agreement.check_buckets(self.layout, topology)
        self._initialize()
        self.reducer = Reducer(
            self.layout, setup.gradient_codecs(config), self.wraps_module, blueprint.layer_major,
            early=self.optimizer.early, unused=self.optimizer.unused,
            warns=topology.axis("tp").index == 0, gatherer=self.gatherer, plain=self._plain_backwards(),
        )  # fmt: skip
        self._undo.callback(self.reducer.remove)
        if self.trains:
            ends = refuse_torch_steps().remove
            self._undo.callback(ends)
            weakref.finalize(self, ends)
        self.plan_of = functools.lru_cache(maxsize=32)(blueprint.lowered)
        parts = self.plan_of, self.reducer, self.optimizer
        asynchronous = Asynchronous(*parts) if blueprint.pipeline.plan.asynchronous else None
        self.runner: Synchronous | Asynchronous = asynchronous or Synchronous(*parts)
        for layer in own_layers if blueprint.pipeline.plan.splits and wrapped is None else ():
            use_sinks(layer)
        compiling.compile_layers(own_layers, blueprint.layers, config.run)
        self.buffers.begin()
        self.extras = Extras(self.buffers, topology, generators=self.wraps_module and self.trains)
        # `Overlap` runs a forward and a backward at the same time on two streams. It is not used if
        # parameters are sharded or layers have buffers, because the allocator could reuse their
        # memory while the second stream still reads it.
        frees = self.layout.slices_parameters or any(list(layer.buffers()) for layer in own_layers)
        overlap = overlaps(blueprint.pipeline, topology) and not frees
        self.executor = (LayerMajorExecutor if blueprint.layer_major else Executor)(
            blueprint.stages(self.gatherer, self.reducer, graphed),
            transport or links(self.model, topology), topology.axis("pp").index,
            self.runner.all_passes_ended, self.reducer.pass_ended,
            weight_gradients=self.reducer.deferral, overlap=Overlap(topology.device, topology.twins()) if overlap else None,
            device=topology.device, varying=options_of(self.model).boundaries_vary,
            on_validate=self.optimizer.validate, updates=asynchronous,
        )  # fmt: skip

    if not TYPE_CHECKING:  # so that type checkers report unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError; the message states what to use instead."""
            problem = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(nn.Module, name):
                problem += NOT_A_MODULE if self.wraps_module else NOT_LAYERS
            raise AttributeError(problem)

    def _check_sizes(self, config: Config) -> None:
        """Raises ConfigError if sizes of the configuration do not fit the topology."""
        topology = self.topology
        problems = find_size_problems(
            config, pp=topology.pp, tp=topology.tp, cp=topology.cp, dp=topology.dp
        )
        # A custom loop does not need the global batch, so its default may be any.
        given = "global_batch" in config.train.model_fields_set
        if self.trains and (given or not self.wraps_module):
            problems += find_batch_problems(config, topology.dp)
        if problems:
            raise ConfigError(problems)

    def _make_batches(self, layers: Sequence[nn.Module]) -> Batches:
        """Returns the object that splits batches into micro-batches, given all layers."""
        return Batches(self.model, self.topology, self.config, layers)

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

    def _complete(self) -> None:
        """Frees everything that only the construction needed; called when it has succeeded."""

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
        if torch.is_inference_mode_enabled():
            with _without_inference_mode():
                return self.step(batch)
        self.gatherer.end_forwards()
        began = time.perf_counter()
        rewinds = []
        if self.optimizer.pending:
            tallies = self.blueprint.tallies
            rewinds = [self.extras.rewinding(), *(tally.rewinding() for tally in tallies)]
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
                for rewind in rewinds:
                    rewind()
        self._seconds = time.perf_counter() - began
        tokens = next(iter(batch.values())).numel() * self.topology.dp
        metrics = self._end_step(self._local_loss(losses, scale), tokens)
        # changed only here, so that the samples of a step that raises an error are not counted
        self.consumed += self.batches.rows(batch) * self.topology.dp
        return metrics

    def _begin(self, microbatches: int) -> None:
        if self.rooms.exist:
            self.rooms.grow()
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
            self.rooms.read(self._numbers().counts)
        self._numbers = Later(update, self.faults.add)
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
            not in the vocabulary, the numbers of documents decrease, or no label is valid.
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
        self.gatherer.end_forwards()
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

    def lacked_room(self) -> bool:
        """Completes the last step; returns whether rows of experts did not fit since the last call.

        See `--experts.room`. Collective.
        """
        self.finish()
        return self._numbers is not None and self.rooms.lacked(self._numbers().counts)

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
        before_publishing: Callable[[], None] | None = None, hurries: Callable[[], bool] | None = None,
    ) -> Path:  # fmt: skip
        """Writes a checkpoint; returns its path. Collective.

        The files are written to a folder with a temporary name, which is renamed to `path` when all
        files are complete. So an interrupted save leaves no partial checkpoint at `path`.

        Args:
            path: the folder of the checkpoint.
            extra: values for the manifest, which must be serializable as JSON; `load` returns them.
            before_publishing: function that is called on rank 0 after all files are written and
                before the folder is renamed to `path`; an error that it raises fails the save.
            hurries: function that returns True once the limit `checkpoint.write-limit-mib` (MiB/s)
                no longer applies, for example because the run must stop. The function may be called
                in any thread. None: the limit always applies.

        Raises:
            CheckpointError: on every rank, if the checkpoint cannot be written.
            DataError: if a step had invalid data and reading metrics has not raised the error yet.
        """
        self.saver.end()  # waits for the previous save and raises its error, if it failed
        return self.saver.start(
            Path(path), self.counters(extra), self.extras, background=False,
            before_publishing=before_publishing, hurries=hurries,
        ).path  # fmt: skip

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
            before_publishing: see `save`; called in the writing thread.
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
            ("consumed") and `extra` ("extra"). Entries of `Reducer.state`, `Rooms.state` and, with an
            asynchronous schedule, of `Asynchronous.state` are added.

        Raises:
            DataError: see `save`.
        """
        self._sync_states()
        if self._numbers is not None:
            self.faults.raise_before_save(
                self.steps, self._numbers().counts, self.topology.axis("world")
            )
        state = {"steps": self.steps, "consumed": self.consumed, "extra": dict(extra or {})}
        state |= self.reducer.state(self.topology.axis("pp")) | self.rooms.state()
        return state | self.runner.state()

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
        self.rooms.restore(state)
        self.runner.restore(state)
        return dict(state["extra"])

    def destroy(self) -> None:
        """Gives the module back, if the engine wraps one; see `ModuleEngine.destroy`. Collective.

        Raises:
            NotImplementedError: if the model consists of pipeline layers.
        """
        raise NotImplementedError(
            "threed does not offer destroy() for a model of pipeline layers, of which a rank has only a part: delete"
            " the engine and the model, and build both again; full_state_dict() returns the weights"
        )

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


def _without_inference_mode() -> AbstractContextManager[Any]:
    """Returns a context that ends inference mode if it is on.

    Otherwise it does nothing: `inference_mode(False)` would also enable gradients, and the threads
    of autograd, which the caller may have disabled.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _check_types(topology: object, config: object) -> None:
    """Raises TypeError if an argument of an engine is, for example, a dict instead of a Config."""
    for name, value, kind, call in (
        ("topology", topology, Topology, "threed.Topology(pp=..., tp=...)"),
        ("config", config, Config, 'threed.Config(zero={"stage": 1}, ...)'),
    ):
        if not isinstance(value, kind):
            raise TypeError(
                f"Engine(model, topology, config): {name} is a {type(value).__name__}: pass {call}"
            )


# Makes help(Engine) show the parameters of __init__ instead of the parameters of __new__.
_parameters = list(inspect.signature(Engine.__init__).parameters.values())[1:]
Engine.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]
