"""The engine of wrapped modules: any `nn.Module`, trained on data ranks."""

from __future__ import annotations

import dataclasses
import functools
import gc
import operator
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from threed.config import Config, OptimConfig, RecomputeConfig
from threed.config.resolution import resolve
from threed.core.messages import counted
from threed.distributed import collectives
from threed.distributed.sharding import few, point
from threed.engine.base import Engine
from threed.models import Model, Wrapped, wrap
from threed.pipeline import activation_checkpointing, compiling
from threed.zero import setup
from threed.zero.contributions import own_backward
from threed.zero.hooks import ModuleGatherer
from threed.zero.layout import Slot
from threed.zero.plain_backwards import PlainBackwards
from threed.zero.reducer import OPEN
from threed.zero.release import full_values
from threed.zero.sinks import refuse_gradients
from threed.zero.state import initialize_states
from threed.zero.step_metrics import StepMetrics as StepMetrics


class ModuleEngine(Engine):
    """Trains any `nn.Module` on data ranks; `Engine(...)` creates it for a plain module.

    `step` runs a full batch. Instead, a custom loop can run the micro-batches itself, between
    `begin` and `update`.

    With `trains=False`, the engine only evaluates, for example the reference model of DPO. A rank
    then keeps only its weights, in the compute dtype and sharded by `zero.stage`: no gradients,
    master weights or optimizer states. The sections `optim` and `recompute` have no effect. Run the
    module under `torch.no_grad()` or in `inference()`. `load` loads the weights of a checkpoint.
    `begin`, `backward`, `step`, `update` and `save` raise RuntimeError. The flags `requires_grad`
    do not change, but a backward that computes a gradient of a parameter raises RuntimeError. To
    compute gradients of inputs, freeze the parameters (`module.requires_grad_(False)`).

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
    _varies = False  # whether the number of backwards may differ from the number in `begin`
    _microbatches: int | None  # number of micro-batches of the step in progress; None: not known
    _plain_began: float  # host time at which the last plain backward reached a parameter
    _loss: Tensor  # weighted sum of the step's losses so far, fp64 [1]

    @property
    def module(self) -> nn.Module:
        """The module. Between `begin` and `update`, running it gathers its sharded parameters.

        A call of the module by the program gets its arguments unchanged: `precision.cast_inputs`
        has an effect only in `step` and `evaluate`.
        """
        return self.model.module

    def _prepare(self, model: Model | nn.Module, config: Config) -> tuple[Wrapped, Config]:
        wrapped = wrap(model, self.topology)
        self._undo.callback(wrapped.remove)
        setup.check_tile(config.zero.tile, wrapped.slicing.tile, wrapped=True)
        config = resolve(config, 0, self.topology.world)
        compiling.compile_layers((), [wrapped], config.run)  # refused before the module is changed
        config = config if self.trains else _without_training(config)
        self._undo.callback(activation_checkpointing.enable(wrapped.module, config))
        return wrapped, config

    def _initialize(self) -> None:
        slots = () if self.trains else self.layout.slots
        for slot in slots:
            self._undo.callback(refuse_gradients(slot).remove)
        values = functools.partial(self.model.initial, seed=self.config.train.seed)
        self.model.agree(self.topology.data, self.topology.device)
        initialize_states(self.optimizer, values, again=False)
        self.model.initialized(self.topology.device, self.batches.dtype)
        self.gatherer.changes.begin()

    def begin(self, microbatches: int | None = 1) -> None:
        """Begins an optimizer step in a custom loop. Collective.

        Args:
            microbatches: number of micro-batches of the step; None if the number is not known. With
                None, every call of `backward` needs an argument `weight`. Moreover, under ZeRO
                stages 0 and 1, gradients are reduced during the last backward only if it is called
                with `last=True`; otherwise they are reduced after it.

        Raises:
            ValueError: if `microbatches` is not an integer of at least 1, nor None.
            RuntimeError: if a step with gradients is in progress.
        """
        if microbatches is not None and not (
            isinstance(microbatches, SupportsIndex) and operator.index(microbatches) >= 1
        ):
            raise ValueError(f"begin({microbatches!r}): pass an integer of at least 1, or None")
        self.drop_interrupted()
        if self.accumulating and self.reducer.passes:
            raise RuntimeError(
                f"begin: a step with {counted(self.reducer.passes, 'backward')} is in progress: call update() to end it,"
                " or discard() to drop its gradients"
            )
        self.faults.clear()
        self._begin(OPEN if microbatches is None else microbatches)
        self.accumulating, self._microbatches, self._divisor = True, microbatches, None
        self._varies = False
        self._loss = torch.zeros(1, dtype=torch.float64, device=self.topology.device)
        self.plain.allow(True)

    def _plain_backwards(self) -> PlainBackwards:
        self.plain = PlainBackwards(self.module, self._plain_begins, self._plain_ended)
        self._undo.callback(self.plain.allow, False)
        return self.plain

    def _plain_begins(self) -> None:
        """Begins a pass for a `loss.backward()` of the program.

        Gradients then accumulate without a weight, and the update divides their sum.
        """
        if self.config.precision.dtype == "fp16":
            raise RuntimeError(
                "threed does not offer loss.backward() under fp16: call engine.backward(loss), which scales the loss"
            )
        self._check_given()
        if self._divisor is None:
            if self.reducer.passes:
                raise RuntimeError(
                    "loss.backward() in a step after engine.backward(loss): use one of them"
                )
            self._divisor = self.topology.dp * (self._microbatches or 1)
        self.reducer.count_freely()
        self.accumulating = False
        self._plain_began = time.perf_counter()

    @property
    def has_plain_backwards(self) -> bool:
        """Whether the program has called `loss.backward()` in the step in progress."""
        return self.accumulating and self._divisor is not None

    def allow_any_count(self) -> None:
        """Allows another number of backwards in the step in progress than `begin` got.

        The number is still the default weight of the losses.
        """
        self._varies = True
        self.reducer.count_freely()

    def drop_interrupted(self) -> None:
        """Discards the step if an error has interrupted a plain backward of it."""
        if self.plain.interrupted:
            self.discard()

    def _plain_ended(self) -> None:
        self.accumulating = True
        self.reducer.pass_ended()
        self._seconds += time.perf_counter() - self._plain_began

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
        this method in the same step; the step is then discarded.

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
            ValueError: if `loss` is not a real scalar tensor, or the step began with `begin(None)` and
                no weight is given.
        """
        self.drop_interrupted()
        self._check_begun()
        began = time.perf_counter()
        if weight is None:
            if self._microbatches is None:
                raise ValueError("backward in a step of begin(None) needs a weight")
            weight = 1.0 / (self._microbatches * self.topology.dp)
        self._check_grads()
        if retain_graph:
            self.reducer.count_freely()
        if last:
            self.reducer.next_is_last()
        self.accumulating = False
        with own_backward(self.reducer):
            if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
                kind = type(loss).__name__
                if isinstance(loss, Tensor):
                    kind = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
                raise ValueError(
                    f"backward needs the mean loss, a real scalar tensor, but got {kind}"
                )
            wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
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
        self.drop_interrupted()
        self._check_begun()
        ran = self.reducer.passes
        if self._microbatches and 0 < ran < self._microbatches and not self._varies:
            warnings.warn(
                f"update after {counted(ran, 'backward')}, but begin({self._microbatches}): the gradients are divided by"
                f" {self._microbatches}; pass the number of micro-batches of the step to begin, or weights to backward",
                stacklevel=2,
            )
        # Some ranks may have launched more reductions than others. Every rank must launch all of
        # its reductions before another collective is called.
        self.reducer.all_passes_ended()
        self.optimizer.divide_by(self._divisor or 1)
        metrics = self._end_step(self._loss, tokens)
        return dataclasses.replace(metrics, has_loss=self._divisor is None)

    def _check_trains(self) -> None:
        if not self.trains:
            raise RuntimeError(
                "this engine only evaluates (trains=False): it has no gradients and optimizer states; train and save"
                " with an engine that trains, and get the weights by full_state_dict()"
            )

    def _check_begun(self) -> None:
        self._check_trains()
        if not self.accumulating:
            raise RuntimeError("call Engine.begin(microbatches) first: no step is in progress")

    def _end_step(self, loss: Tensor, tokens: int) -> StepMetrics:
        self.accumulating = False
        self.plain.allow(False)
        self.gatherer.set_in_step(False)
        self._sync_states()
        self._check_grads()
        return super()._end_step(loss, tokens)

    def _begin(self, microbatches: int) -> None:
        self._check_trains()
        self.plain.allow(False)
        self.optimizer.divide_by(1)
        self.gatherer.release_all()  # parameters must be freed even if the check raises an error
        self.gatherer.end_forwards()
        self._check_grads()
        super()._begin(microbatches)
        self.gatherer.set_in_step(True)

    def _check_given(self) -> None:
        """Raises RuntimeError if the program has set `.grad` of a parameter.

        This value would be multiplied by the number of data ranks, or divided by the number of
        micro-batches.
        """
        if given := [sink.slot.spec.name for sink in self.reducer.sinks if sink.given]:
            raise RuntimeError(
                f".grad of {few(given)} was set before the backward: set it to None, or call zero_grad(). To add a"
                " gradient g to the gradient of the loss, add (param * g).sum() to the loss"
            )

    def _check_grads(self) -> None:
        """Raises RuntimeError if values of `.grad` cannot be added to this step's gradients.

        With fp16, gradients of other engines cannot be added, because the engines may have
        different loss scales. In a step with plain backwards they cannot be added either: the other
        engine has multiplied its losses by weights, but the losses of plain backwards have no
        weights.
        """
        self._check_given()
        scaled = self.config.precision.dtype == "fp16" or self._divisor is not None
        for slot, _ in self.reducer.foreign if scaled else ():
            why = "scaled by that engine's loss scale"
            if self._divisor is not None:
                why = "multiplied by a weight, unlike the gradients of loss.backward()"
            raise RuntimeError(
                f"{slot.spec.name} has a gradient of another engine's backward, {why}: call zero_grad()"
                " before this engine's backward"
            )

    def finish(self) -> None:
        """Completes the last step if its update is pending. Collective. See `Engine.finish`."""
        self.drop_interrupted()
        self.gatherer.end_forwards()
        super().finish()

    def zero_grad(self) -> None:
        """Drops the gradients of a step that has not ended; see `Engine.zero_grad`."""
        self.drop_interrupted()
        super().zero_grad()
        if self.accumulating:
            self._loss.zero_()
            self._divisor = None

    def discard(self) -> None:
        """Discards the step in progress of a custom loop, for example after an error.

        Also drops the gradients that backwards of other engines have computed for this engine's
        parameters.
        """
        self.accumulating = False
        self.plain.allow(False)
        self.gatherer.set_in_step(False)
        self.reducer.give_up()

    @torch.inference_mode(False)  # otherwise plain PyTorch could not train the parameters
    def destroy(self) -> None:
        """Ends the engine and gives the module back, complete and without the engine. Collective.

        Afterwards every rank has all parameters in full, with their current values, on the engine's
        device, and in the dtype that the module had before. If that dtype is wider than the
        engine's, the values of trained parameters come from the master weights. Parameters stay the
        same objects, tied and frozen as they are, and can be used by another engine or by plain
        PyTorch. Hooks, attributes and activation checkpointing that the engine has added to the
        module are removed. Swap files are closed, and the engine's memory is freed. Afterwards all
        methods raise RuntimeError, but another call of `destroy` has no effect.

        The module needs memory for its full parameters, in addition to the engine's.

        Raises:
            RuntimeError: if a step with gradients is in progress, if an error has interrupted an
                update, or if the call is in a block of `gathered`; the engine is unchanged.
        """
        self.drop_interrupted()
        if self.accumulating and self.reducer.passes:
            raise RuntimeError(
                f"destroy: a step with {counted(self.reducer.passes, 'backward')} is in progress: call update() to end"
                " it, or discard() to drop its gradients"
            )
        if self.gatherer.lent:
            raise RuntimeError("destroy inside `with engine.gathered():`: end the block first")
        self.saver.end()
        super()._sync_states()  # does not refuse a module with other parameters than at first
        self.gatherer.changes.absorb_edits(self.optimizer)
        self.reducer.drop()
        values = list(full_values(self.optimizer, self.model.given_dtype))
        try:
            try:
                self._undo.close()
            finally:  # an error of a drive must not lose the weights
                for slot, full in values:
                    point(slot.param, full)
        finally:
            vars(self).clear()
            self.__class__ = _Destroyed
            gc.collect()  # parts of the engine refer to each other

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """Further name of a tied weight or buffer -> the name under which the engine has it.

        A persistent buffer has several names if its module has several names.
        """
        first = {id(slot.param): slot.spec.name for slot in self.layout.slots}
        named = self.module.named_parameters(remove_duplicate=False)
        tied = {name: first[id(p)] for name, p in named if first.get(id(p), name) != name}
        place: dict[tuple[nn.Module, str], str] = {}
        for path, owner in self.module.named_modules(remove_duplicate=False):
            for key in owner._buffers:
                name = f"{path}.{key}" if path else key
                kept = key not in owner._non_persistent_buffers_set
                if kept and place.setdefault((owner, key), name) != name:
                    tied[name] = place[owner, key]
        return tied

    def _empty(self) -> dict[str, Tensor]:
        """Returns the parameters without elements by name; the layout does not contain them."""
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: param.detach().cpu() for name, param in named if not param.numel()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the full weights and persistent buffers, on the CPU of rank 0. Collective.

        Returns:
            See `Engine.full_state_dict`. A tied weight or buffer is in the dict under all its names.
        """
        found = super().full_state_dict()
        if not found:
            return {}
        found |= self._empty()
        return found | {name: found[first] for name, first in self.aliases.items()}

    def load_full_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Sets weights and buffers from full tensors; optimizer moments are kept. Collective.

        Args:
            weights: see `Engine.load_full_state_dict`. A tied weight may have any of its names; if
                it has several, their values must be equal.

        Raises:
            KeyError, ValueError: if names or shapes differ from the names and shapes of the model.
        """
        empty = self._empty()
        known = {name: value for name, value in weights.items() if name not in empty}
        for name, first in self.aliases.items():
            if name in known:
                value = known.pop(name)
                if not torch.equal(known.setdefault(first, value), value):
                    raise ValueError(f"{name} and {first} are tied, but have different values")
        super().load_full_state_dict(known)

    def counters(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the state of training for a checkpoint's manifest. Collective.

        Args:
            extra: see `Engine.counters`.

        Returns:
            See `Engine.counters`; in addition, "aliases": the property `aliases`.
        """
        self._check_trains()
        return super().counters(extra) | {"aliases": self.aliases}

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """Context manager: yields the module for forwards without gradients."""
        gatherer = self.gatherer  # the block may destroy the engine
        try:
            # `no_grad` instead of inference mode, because the module may cache tensors here and use
            # them in training later
            with torch.inference_mode(False), torch.no_grad():
                yield self.module
        finally:
            gatherer.release_all()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: the module is in evaluation mode and can run forwards. Collective."""
        with super().evaluating(), self.model.evaluating():
            yield

    @contextmanager
    def gathered(
        self,
        params: Iterable[Tensor] | nn.Module | None = None,
        *,
        modifier_rank: int | None = None,
    ) -> Iterator[nn.Module]:
        """Context manager: yields the module with full parameters, to read or edit. Collective.

        Blocks can be nested. They can also be used within a step of a custom loop, between its
        backwards; edits in such a block take effect in the update of the step.

        Args:
            params: the parameters that the block uses, or a submodule; None: all parameters. Other
                parameters in the same buffer are gathered, too.
            modifier_rank: rank that edits the parameters; at the end of the block, all other ranks
                get its values. None: the program makes the same changes on every rank.

        Raises:
            ValueError: if an entry of `params` is not a parameter of this engine, or if no rank has
                the number `modifier_rank`.
        """
        self.drop_interrupted()
        self.gatherer.end_forwards()
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
                if modifier_rank is None:
                    yield self.module
                else:
                    try:
                        with collectives.failing_together(everyone, "the block of gathered"):
                            yield self.module
                    finally:  # also after an error, so that the replicas of a parameter stay equal
                        self.gatherer.changes.broadcast(slots, everyone, modifier_rank)
        finally:
            if between_steps:
                self._sync_states()

    def _slots_of(self, params: Iterable[Tensor] | nn.Module | None) -> list[Slot]:
        """Returns the slots of parameters in their order, without repetition; all for None."""
        if params is None:
            return list(self.layout.slots)
        known = {id(slot.param): slot for slot in self.layout.slots}
        found: dict[Slot, None] = {}
        given = params.parameters() if isinstance(params, nn.Module) else params
        for param in (given,) if isinstance(given, Tensor) else given:
            if isinstance(param, str):
                raise ValueError(
                    f"gathered: {given!r} contains a name: pass parameters, such as"
                    " engine.module.get_parameter(name), or a submodule"
                )
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
        self.gatherer.changes.check_structure()
        self.gatherer.changes.absorb_edits(self.optimizer)

    def _complete(self) -> None:
        self.model.complete()


def _without_training(config: Config) -> Config:
    """Returns the configuration with the defaults of all keys that concern gradients and states."""
    unused = {"offload_optimizer": "none", "delayed_update": False, "early_update": "auto"}
    zero = config.zero.model_copy(update=unused)
    defaults = {"zero": zero, "optim": OptimConfig(), "recompute": RecomputeConfig()}
    return config.model_copy(update=defaults)


class _Destroyed(ModuleEngine):
    """The class of an engine after `destroy`."""

    def __getattribute__(self, name: str) -> Any:
        if name == "destroy" or name.startswith("__"):
            return super().__getattribute__(name)
        raise RuntimeError(
            f"engine.{name}: the engine was destroyed; threed.Engine(module, ...) makes a new one"
        )

    def destroy(self) -> None:
        """Has no effect."""
