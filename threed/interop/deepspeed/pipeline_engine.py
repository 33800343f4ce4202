"""DeepSpeed's `PipelineEngine`: trains a `PipelineModule` by threed's pipeline.

engine, optimizer, loader, scheduler = threed.initialize(model=model, config="ds_config.json")
loss = engine.train_batch(iterator)          # a full step: all micro-batches and the update
loss = engine.eval_batch(iterator)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from threed.config import Config, ConfigError
from threed.config.resolution import resolve
from threed.distributed import collectives
from threed.distributed.sharding import point, spec_of
from threed.engine import LayeredEngine
from threed.interop.deepspeed.api.checkpointing import checkpoint
from threed.interop.deepspeed.api.topology import PipelineParallelGrid
from threed.interop.deepspeed.config.optimizers import Group, find_groups, hyper_parameters
from threed.interop.deepspeed.config.translate import ModelFacts, Translation, translate
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.interop.deepspeed.names import Refused, not_offered
from threed.interop.deepspeed.ownership import owner
from threed.interop.deepspeed.pipeline_layers import ROOT, PipelineBatches, PipelineModel, pack
from threed.interop.deepspeed.pipeline_module import PipelineModule
from threed.pipeline.batches import Batch, Batches
from threed.zero.release import full_values
from threed.zero.state import initialize_states

INTERVAL = "activation_checkpoint_interval"
NO_EFFECT = "threed does not split layers over ranks, and recomputes layers itself"


class PipelineTrainer(LayeredEngine):
    """A `LayeredEngine` for the layers of a `PipelineModule`, with their own initial values.

    The arguments are the same as `Engine`'s, with a `PipelineModel` as the model.
    """

    model: PipelineModel
    accumulating = has_plain_backwards = False

    @property
    def module(self) -> nn.Module:
        """The module with the layers of this rank's stage."""
        return self.model.module

    @property
    def aliases(self) -> dict[str, str]:
        """Further name of a weight in the module -> its global name."""
        named = self.module.named_parameters(remove_duplicate=False)
        pairs = ((name, spec_of(param).name) for name, param in named)
        return {name: first for name, first in pairs if name != first}

    def drop_interrupted(self) -> None:
        """Has no effect, because backwards run only within `step`."""

    @property
    def names(self) -> list[str]:
        """The names of the parameters and persistent buffers of all stages."""
        return self.model.names()

    # Stages hold different layers.
    gathered = Refused(
        "gathered of a PipelineEngine", "use full_state_dict() and load_state_dict(weights)"
    )

    def destroy(self) -> None:
        """Ends the engine and gives the module back, complete for each stage. Collective.

        See `ModuleEngine.destroy`. The engine cannot be used afterwards.
        """
        self.saver.end()
        self._sync_states()
        self.reducer.drop()
        values = list(full_values(self.optimizer, self.model.given_dtype))
        self._undo.close()
        for slot, full in values:
            point(slot.param, full)

    def _make_batches(self, layers: Sequence[nn.Module]) -> Batches:
        return PipelineBatches(self.model, self.topology, self.config, layers)

    def _initialize(self) -> None:
        self.model.agree(self.topology)
        initialize_states(self.optimizer, self.model.initial, again=False)
        self.model.initialized()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: the layers are in evaluation mode and can run forwards. Collective."""
        training = self.module.training
        self.module.eval()
        try:
            with super().evaluating():
                yield
        finally:
            self.module.train(training)

    def run_forwards(self, batch: Batch, without_loss: Sequence[int] = ()) -> list[Tensor]:
        """Returns the weighted losses or the outputs of a batch's micro-batches. Collective.

        Call it within `evaluating`. The weighted losses of all data ranks add up to the mean loss.

        Args:
            batch: result of `pack`.
            without_loss: micro-batches of which the outputs are returned.

        Returns:
            One tensor per micro-batch on the last stage; an empty list on other stages.
        """
        micros = self.batches.micro_batches(batch, self.steps, self.consumed, 1.0, False)
        for number in without_loss:
            micros[number] = dataclasses.replace(micros[number], weight=None)
        outputs = self.executor.run(self.plan_of(len(micros), training=False), micros)
        self.gatherer.release_all()
        return outputs

    def mean_loss(self, losses: list[Tensor]) -> Tensor:
        """Returns the mean loss of all stages and data ranks from weighted losses. Collective.

        Args:
            losses: weighted losses of the micro-batches; empty except on the last stage.
        """
        return self.sum_losses(self._local_loss(losses, 1.0))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the full weights and persistent buffers, on the CPU of rank 0. Collective.

        Returns:
            See `Engine.full_state_dict`; names are as in a `PipelineModule` with one stage.
        """
        found = super().full_state_dict().items()
        return {name.removeprefix(f"{ROOT}."): value for name, value in found}

    def load_full_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Sets weights and buffers from full tensors; optimizer moments are kept. Collective.

        Args:
            weights: all tensors of `full_state_dict`, on every rank.

        Raises:
            KeyError, ValueError: if names or shapes differ from the names and shapes of the model.
        """
        buffers = {name.removeprefix(f"{ROOT}."): name for name in self.buffers.shapes()}
        super().load_full_state_dict({buffers.get(n, n): value for n, value in weights.items()})


def _only_batches(method: str) -> Any:
    instead = "use train_batch() or eval_batch()"
    return Refused(f"{method} of a PipelineEngine", instead, RuntimeError)


class PipelineEngine(DeepSpeedEngine):
    """DeepSpeed's engine of a `PipelineModule`. Steps run by `train_batch` only.

    Its arguments are those of `DeepSpeedEngine`, with a function that creates a `PipelineTrainer`.

    Attributes:
        grid: position of this process among stages and data ranks.
        num_stages: number of stages.
        stage_id: stage of this rank.
        agg_train_loss: the last result of `train_batch`; None before the first step.
    """

    def __init__(
        self, module: PipelineModule, *args: Any, make_trainer: Callable[[], Any], **kwargs: Any
    ) -> None:
        super().__init__(module, *args, make_trainer=make_trainer, **kwargs)
        self.trainer = cast(PipelineTrainer, self.engine)
        self.grid: PipelineParallelGrid = module.mpu()
        self.num_stages, self.stage_id = module.num_stages, module.stage_id
        self.agg_train_loss: Tensor | None = None
        self._batch_fn: Callable[[Any], Any] | None = None

    # `train_batch` runs all micro-batches of a step. The errors are RuntimeErrors, as in DeepSpeed.
    __call__ = forward = _only_batches("forward")
    backward, step = _only_batches("backward"), _only_batches("step")
    no_sync = _only_batches("no_sync")
    set_gradient_accumulation_boundary = _only_batches("set_gradient_accumulation_boundary")

    def _names(self) -> list[str]:
        return self.trainer.names

    def _dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(self.trainer.model.weights, self.trainer.batches.dtype)

    def _frozen(self) -> list[str]:
        trained = self.trainer.model.weights
        return [*super()._frozen(), *(name for name in trained if not trained[name])]

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Runs a full optimizer step: all micro-batches and the update. Collective.

        Args:
            data_iter: yields micro-batches (inputs, labels), the same on all stages of a data rank.
                Inputs are a tensor or a tuple of tensors; labels are a tensor, a tuple of tensors,
                or None. None: the iterator of `set_dataloader` or `set_dataiterator`, or
                `training_data` without end.

        Returns:
            The mean loss over micro-batches and data ranks, on every rank.

        Raises:
            RuntimeError: if gradients are disabled.
            ValueError: if there is no iterator, or a micro-batch has other values.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch without gradients: use eval_batch(data_iter)")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        batch = self._read(self._batches, self.gradient_accumulation_steps())
        self.module.train()
        self._trained_optimizer().synchronize()
        metrics = self.trainer.step(batch)
        self._updated(metrics, {})
        self.micro_steps += self.gradient_accumulation_steps()
        self.agg_train_loss = self._public_loss(metrics.loss_tensor)
        return self.agg_train_loss

    @torch.no_grad()
    def eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True,
        reduce_output: str | None = "avg", bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:  # fmt: skip
        """Evaluates micro-batches; the weights are not changed. Collective.

        Args:
            data_iter: yields micro-batches, as in `train_batch`.
            return_logits: whether to also return the outputs of the last micro-batch.
            compute_loss: whether to compute the loss; if False, `reduce_output` must be None.
            reduce_output: "avg" to return the mean loss; None to return the loss (or the outputs,
                without `compute_loss`) of each micro-batch of this data rank.
            bcast_loss: has no effect: all ranks get the mean loss.
            num_micro_batches: number of micro-batches; None: as many as a step has.

        Returns:
            The mean loss over micro-batches and data ranks, on every rank; or, with `reduce_output`
            None, a list on the last stage, and None on other stages. With `return_logits`, a pair
            of this and the outputs of the last micro-batch on the last stage; None on others.
        """
        if reduce_output not in ("avg", None) or (reduce_output and not compute_loss):
            given = f"reduce_output {reduce_output!r} with compute_loss {compute_loss}"
            raise NotImplementedError(not_offered(given, "use 'avg' for losses, or None"))
        count = num_micro_batches or self.gradient_accumulation_steps()
        batch = self._read(data_iter, count)
        with self.trainer.evaluating():
            results: list[Tensor] = self.trainer.run_forwards(
                batch, () if compute_loss else range(count)
            )
            logits = results[-1:]
            if return_logits and compute_loss:
                last = {k: v for k, v in batch.items() if k.startswith(f"{count - 1}/")}
                logits = self.trainer.run_forwards(last, [0])
            output: Any = self.trainer.mean_loss(results) if compute_loss else results
        if reduce_output is None:
            scale = count * self.topology.dp if compute_loss else 1
            output = [result * scale for result in results] if results else None
        else:
            output = self._public_loss(output)
        return (output, logits[0] if logits else None) if return_logits else output

    def _read(self, source: Iterator[Any] | None, count: int) -> Batch:
        """Returns the next `count` micro-batches of an iterator as a batch."""
        if owner(self.module) is not self:
            raise RuntimeError("this engine was destroyed: call deepspeed.initialize again")
        if source is None:
            fix = "pass an iterator on every stage, or training_data to initialize"
            raise ValueError(f"no data on rank {self.global_rank}: {fix}")
        pairs = []
        for _ in range(count):
            pair = next(source)
            pair = pair if self._batch_fn is None else self._batch_fn(pair)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                kind = f"a {type(pair).__name__}"
                kind += f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
                fix = "the iterator must yield (inputs, labels); see set_batch_fn"
                raise ValueError(f"a micro-batch is {kind}: {fix}")
            pairs.append((pair[0], pair[1]))
        return pack(pairs)

    def set_dataloader(self, loader: Any) -> None:
        """Sets the loader from which `train_batch` reads, once.

        Args:
            loader: yields micro-batches; to read it repeatedly, pass a `RepeatingLoader`.
        """
        self.training_dataloader = loader
        self._batches = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Sets the iterator from which `train_batch` reads.

        Args:
            iterator: yields micro-batches.
        """
        self._batches = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Sets a function that is applied to every item of the data iterators.

        Args:
            fn: returns (inputs, labels) from an item.
        """
        self._batch_fn = fn

    def is_first_stage(self) -> bool:
        """Returns whether this rank has the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Returns whether this rank has the last stage."""
        return self.stage_id == self.num_stages - 1

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per step and data rank."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """The number of samples per micro-batch."""
        return self.train_micro_batch_size_per_gpu()

    def reset_activation_shape(self) -> None:
        """Has no effect: shapes may always differ between micro-batches of different shapes."""


def prepare(
    model: PipelineModule, ds: dict[str, Any], given: Iterable[Any] | None, notes: list[str]
) -> tuple[Translation, Callable[[], PipelineTrainer]]:
    """Returns the translated configuration, and a function that creates the engine. Collective.

    Args:
        model: the module.
        ds: the ds_config, with the sections of the passed optimizer and scheduler. The group
            "pipeline" is removed.
        given: parameters or groups of this stage; every rank must have equally many groups with the
            same values. None: one group of all parameters.
        notes: messages for the user, to which keys without effect are added.

    Raises:
        ConfigError: if the configuration is invalid; the message lists all problems.
    """
    interval = _interval(ds.pop("pipeline", None), model, notes)
    model.set_checkpoint_interval(interval)
    flags = model.describe()
    groups = _groups_of_all_stages(model, given, hyper_parameters(ds))
    dtypes = {dtype for _, dtype in flags.values()}
    if len(dtypes) > 1:
        fix = "convert the layers to one dtype, such as module.float()"
        raise ConfigError([f"PipelineModule: parameters are {', '.join(sorted(dtypes))}: {fix}"])
    translation = translate(ds, model.axes.dp, ModelFacts(None, next(iter(dtypes), None)), groups)
    config = _with_pipeline(translation.config, model, interval)
    make_trainer = functools.partial(
        PipelineTrainer, model.as_model(interval, flags), model.axes, config,
        learning_rate=translation.learning_rate, loss_scale=translation.loss_scale,
    )  # fmt: skip
    return dataclasses.replace(translation, config=config), make_trainer


def _interval(section: Any, model: PipelineModule, notes: list[str]) -> int:
    """Returns the number of layers that are recomputed together; 0: no recomputation.

    Args:
        section: the group "pipeline" of a ds_config, or None.
        model: the module, whose interval applies unless the group has one.
        notes: messages for the user, to which keys without effect are added.
    """
    given = section or {}
    known = {INTERVAL, "stages", "partition", "seed_layers", "pipe_partitioned", "grad_partitioned"}
    known |= {"use_reentrant"}
    if not isinstance(given, Mapping) or (unknown := sorted({*given} - known)):
        what = (
            f"no such key: {', '.join(unknown)}" if isinstance(given, Mapping) else "not an object"
        )
        raise ConfigError([f"pipeline: {what}; the key with an effect is {INTERVAL}"])
    notes += [f"pipeline.{key}: no effect: {NO_EFFECT}" for key in given if key != INTERVAL]
    interval = int(given.get(INTERVAL) or model.activation_checkpoint_interval)
    if interval and model.activation_checkpoint_func is not checkpoint:
        notes.append(f"activation_checkpoint_func: no effect: {NO_EFFECT}")
    return interval


def _with_pipeline(config: Config, model: PipelineModule, interval: int) -> Config:
    """Returns a configuration with the stages of a module, with all derived values."""
    values: dict[str, Any] = {"pp": model.num_stages, "schedule": model.schedule}
    parallel = config.parallel.model_copy(update=values | {"partition": model.counts(interval)})
    mode = {"mode": "full" if interval else "none"}
    recompute = config.recompute.model_copy(update=mode)
    config = config.model_copy(update={"parallel": parallel, "recompute": recompute})
    return resolve(config, 0, model.axes.world)


def _groups_of_all_stages(
    model: PipelineModule, given: Iterable[Any] | None, params: Mapping[str, Any] | None
) -> tuple[Group, ...]:
    """Returns the parameter groups with the parameters of all stages. Collective.

    Args:
        model: the module.
        given: parameters or groups of this stage, or None.
        params: the optimizer's hyper-parameters, as in a ds_config.
    """
    problems, own = list[str](), list[list[Any]]()
    names = {name: spec_of(param).name for name, param in model.named_parameters()}
    try:
        found = find_groups(model, given, params)
        own = [[[names[n] for n in g.names], g.lr, g.weight_decay] for g in found]
    except ConfigError as error:
        problems = error.problems
    if found_problems := collectives.problems_of_all(problems, model.axes.axis("world")):
        raise ConfigError(found_problems)
    stages = collectives.exchange(own, model.axes.axis("pp"))
    if any([g[1:] for g in stage] != [g[1:] for g in stages[0]] for stage in stages):
        fix = "pass equally many groups, with the same lr and weight_decay, on every rank"
        raise ConfigError([f"model_parameters: stages have different groups: {fix}"])
    return tuple(
        Group(tuple(dict.fromkeys(n for g in same for n in g[0])), same[0][1], same[0][2])
        for same in zip(*stages, strict=True)
    )
