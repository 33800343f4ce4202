"""The training loop of DeepSpeed's engine: forward, backward and step are separate calls.

loss = engine(**batch).loss ; engine.backward(loss) ; engine.step()
engine.train_batch(iterator)                # a full step: forwards, backwards and update
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from threed.core.messages import counted
from threed.distributed.topology import Topology
from threed.engine import ModuleEngine, StepMetrics
from threed.interop.deepspeed.api.utils import logger
from threed.interop.deepspeed.api.zero import mark_parameters
from threed.interop.deepspeed.config.translate import Translation
from threed.interop.deepspeed.data import cast_floats, repeat, to_device
from threed.interop.deepspeed.module_methods import ModuleMethods
from threed.interop.deepspeed.ownership import NotCopied, owner, take
from threed.interop.deepspeed.views import EngineOptimizer, SchedulerView
from threed.models import wrap
from threed.models.wrapped import loss_of
from threed.zero.contributions import in_own_backward

DESTROYED = (
    "the engine was destroyed, and its module has the full parameters: call deepspeed.initialize(model="
    "engine.module, ...) again. Accelerator.free_memory destroys engines: call accelerator.prepare with the"
    " unwrapped model and a new optimizer"
)
# The text begins as in DeepSpeed, because programs may search it.
PLAIN_AT_STAGE_0 = (
    "Direct calls to tensor.backward() are not supported at ZeRO stage 0, as in DeepSpeed: call engine.backward(loss),"
    " or use stage 1, 2 or 3"
)


class _StepBegins(NotCopied):
    """Forward pre-hook of an engine's module: begins a step, as a call of the engine does.

    It has no effect for copies of the module, and does not keep the engine alive.
    """

    module: nn.Module | None = None

    def __init__(self, module: nn.Module, begin: Callable[[], None]) -> None:
        self.module, self._begin = module, weakref.WeakMethod(begin)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module is not self.module:
            return
        if torch.is_grad_enabled() and (begin := self._begin()) is not None:
            begin()


class TrainingLoop(ModuleMethods):
    """The methods of DeepSpeed's engine that train and evaluate; see `DeepSpeedEngine`."""

    def __init__(
        self, model: nn.Module, topology: Topology, translation: Translation,
        passed: torch.optim.Optimizer | None = None, training_dataloader: DataLoader[Any] | None = None,
        notes: Sequence[str] = (), ds: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None, *, trains: bool = True,
        make_trainer: Callable[[], ModuleEngine] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model)
        t = self.translation = translation
        self.optimizer: EngineOptimizer | None = None
        self._module_hook: RemovableHandle | None = None
        self.engine = make_trainer() if make_trainer is not None else ModuleEngine(
            wrap(model, topology, cast_buffers=False), topology, t.config,
            learning_rate=t.learning_rate, loss_scale=t.loss_scale, trains=trains,
        )  # fmt: skip
        # If the rest of `initialize` fails, the next call for this module destroys the engine.
        take(model, self)
        mark_parameters(self.engine)
        # A program may run `engine.module` instead of the engine.
        if trains and make_trainer is None:
            begins = _StepBegins(model, self._begin)
            self._module_hook = model.register_forward_pre_hook(begins, prepend=True)
        self.topology, self.device = topology, topology.device
        self.global_rank, self.world_size = topology.rank, topology.world
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.config, self.collate_fn = dict(ds or {}), collate_fn
        self.lr_scheduler: Any = None
        self.client_lr_scheduler: Any = None
        if trains:
            scheduled = t.learning_rate is not None
            self.optimizer = EngineOptimizer(
                self.engine, self.zero_grad, self._step_skipped, passed, scheduled, t.rates
            )
            self.lr_scheduler = SchedulerView(self.optimizer) if scheduled else None
            if self.engine.config.zero.stage in (1, 2):
                _log_buffers(self.optimizer.bit16_groups_flat)
        self.client_optimizer, self.basic_optimizer = passed, self.optimizer
        self.notes = (*notes, *translation.notes)
        self.training_dataloader = training_dataloader
        self.metrics: StepMetrics | None = None
        self._earlier: StepMetrics | None = None  # metrics of the step before the last one
        self.micro_steps = self.global_samples = 0
        self._steps_before = 0  # steps of a checkpoint that was loaded without optimizer states
        self._skipped_before = 0  # skipped steps at the last load
        self._step_applied = False  # whether the last call of `step` was at the boundary
        self._done = 0  # number of micro-batches of the step in progress that `step` has completed
        self._seen = 0  # number of backwards of this step that ran before the last call of `step`
        # whether this micro-batch is the step's last; None: counted by the configuration
        self._boundary: bool | None = None
        self._in_no_sync = False
        self._batches = None if training_dataloader is None else repeat(training_dataloader)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward, and returns the result. Collective.

        If gradients are enabled and no step is in progress, a step begins. An engine that only
        evaluates runs without gradients.

        Args:
            args: positional arguments of the module's forward.
            kwargs: keyword arguments of the module's forward.

        Raises:
            RuntimeError: if the engine was destroyed.
        """
        self._check_not_destroyed()
        if self.translation.auto_cast:
            args, kwargs = cast_floats((args, kwargs), torch.float16)
        if torch.is_grad_enabled() and self.optimizer is not None:
            self._begin()
            output = self.module(*args, **kwargs)
            if self.translation.config.zero.stage == 0:
                _refuse_plain_backwards(output, self.module)
            return output
        with self.engine.inference() as module:
            return module(*args, **kwargs)

    def _begin(self) -> None:
        """Begins a step of the engine, unless a step is in progress."""
        self._check_not_destroyed()
        self.engine.drop_interrupted()
        if not self.engine.accumulating:
            self._forget_step()
            self._trained_optimizer().synchronize()
            self.engine.begin(self.translation.accumulation)
            if self._boundary is not None:
                self.engine.allow_any_count()

    def _check_not_destroyed(self) -> None:
        if owner(self.module) is not self:
            raise RuntimeError(DESTROYED)

    def _trained_optimizer(self) -> EngineOptimizer:
        if self.optimizer is None:
            fix = "pass an optimizer to initialize, or define one in the configuration"
            raise RuntimeError(f"this engine has no optimizer and only evaluates: {fix}")
        return self.optimizer

    def _forget_step(self) -> None:
        """Resets the counters of the step in progress, whose gradients were discarded."""
        self.micro_steps -= self._done
        self._done = self._seen = 0

    @property
    def _pending(self) -> bool:
        """Whether a backward has run since the last call of `step`."""
        self._check_not_destroyed()
        self.engine.drop_interrupted()
        return self.engine.reducer.passes > self._seen

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Runs the backward of one loss of a micro-batch, and accumulates the gradients. Collective.

        The loss is divided by the number of micro-batches of all ranks in the step. So the
        gradients of a step add up to the gradients of the mean loss of the global batch. Instead of
        this method, a program can call `loss.backward()` (see `threed.ModuleEngine.backward`). As
        in DeepSpeed, this raises RuntimeError for an output of the engine at stage 0.

        If the backward raises an error, the step is discarded together with the gradients of its
        earlier micro-batches, and the next micro-batch is the first of a new step.

        Args:
            loss: the mean loss of the micro-batch, a scalar tensor.
            retain_graph: whether another backward of the same graph follows.
            scale_wrt_gas: whether to divide the loss by the number of accumulation steps, in
                addition to the number of ranks.

        Returns:
            `loss`, divided by the number of accumulation steps if `scale_wrt_gas`.

        Raises:
            ValueError: if `loss` is not a scalar tensor.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("backward needs a scalar loss")
        self._begin()
        accumulation = self.translation.accumulation if scale_wrt_gas else 1
        try:
            self.engine.backward(
                loss, 1.0 / (self.topology.dp * accumulation), retain_graph=retain_graph
            )
        except BaseException as error:
            self._discard_step(error)
            raise
        return loss.detach() / accumulation

    def _discard_step(self, error: BaseException) -> None:
        """Discards the current step after an error.

        If this discards the gradients of earlier micro-batches, a note is added to `error`.
        """
        if done := self._done:
            error.add_note(
                f"threed: the step is discarded, with its {counted(done, 'earlier micro-batch')} of"
                f" {self.translation.accumulation}; the next micro-batch is the first of a new step"
            )
        self.engine.discard()
        self._forget_step()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the accumulation boundary, runs an optimizer step.

        The boundary is the last micro-batch of a step. At the boundary, this method is collective.

        Args:
            lr_kwargs: keyword arguments for the scheduler's `step`.

        Raises:
            RuntimeError: if no backward was run for the micro-batch. A backward of another engine
                is sufficient if its loss depends on this module. The error is also raised if
                parameter groups or step hooks were added to the optimizer that was passed to
                `initialize`, if the engine only evaluates, or if it was destroyed.
            AssertionError: within `no_sync`. As in `no_sync`, the text begins as in DeepSpeed.
        """
        optimizer = self._trained_optimizer()
        if self._in_no_sync:
            what = "It is illegal to call Engine.step() inside no_sync context manager"
            raise AssertionError(f"{what}: call it after the block")
        self._step_applied = False
        if not self._pending and not self.engine.reducer.foreign:
            raise RuntimeError("step without a backward: call engine.backward(loss) first")
        self._begin()
        if self.is_gradient_accumulation_boundary():
            optimizer.synchronize()
            self._updated(self.engine.update(), lr_kwargs or {})
        self.micro_steps += 1
        self._seen = self.engine.reducer.passes
        self._done = self._done + 1 if self.engine.accumulating else 0

    def _updated(self, metrics: StepMetrics, lr_kwargs: Mapping[str, Any]) -> None:
        """Records an optimizer step, and advances the program's scheduler.

        Args:
            metrics: the metrics of the step.
            lr_kwargs: keyword arguments for the scheduler's `step`.
        """
        self._earlier, self.metrics = self.metrics, metrics
        self._step_applied = True
        self.global_samples += self.translation.train_batch_size
        self._trained_optimizer().stepped()
        self._step_scheduler(lr_kwargs)

    def _step_scheduler(self, arguments: Mapping[str, Any]) -> None:
        """Advances the program's scheduler.

        With a dynamic loss scale, the scheduler is not advanced if the step was skipped.
        """
        if self.lr_scheduler is None or isinstance(self.lr_scheduler, SchedulerView):
            return
        if not (self.engine.optimizer.scaler.rule.dynamic and self._step_skipped()):
            self.lr_scheduler.step(**arguments)

    def _step_skipped(self) -> bool:
        """Returns whether the last optimizer step was skipped; the host waits for the device."""
        if self.metrics is None:
            return False
        before = self._skipped_before if self._earlier is None else self._earlier.skipped
        return self.metrics.skipped > before

    def was_step_applied(self) -> bool:
        """Returns whether the last call of `step` updated the weights.

        It did not if the micro-batch was not the last of its step, or if the step was skipped.
        """
        return self._step_applied and not self._step_skipped()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether the current micro-batch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self._done + 1) % self.translation.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether the current micro-batch, and the following ones, are the last of a step.

        From the first call on, the program calls this method before the backward of every
        micro-batch. The losses are still divided by `gradient_accumulation_steps`.

        Args:
            is_boundary: whether `step` runs an optimizer step.
        """
        self._boundary = is_boundary
        if self.engine.accumulating:
            self.engine.allow_any_count()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager for backwards that are not followed by `step`.

        Gradients are accumulated, as in all backwards before the last one of a step. The
        micro-batches are not counted towards the accumulation boundary.

        Raises:
            AssertionError: at ZeRO stage 2 or 3, or if blocks are nested. The text begins as in
                DeepSpeed, because programs may search it.
        """
        stage = self.translation.config.zero.stage
        if stage > 1:
            fix = "use stage 0 or 1, or set_gradient_accumulation_boundary(False)"
            what = f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}"
            raise AssertionError(f"{what}: {fix}")
        if self._in_no_sync:
            fix = "end the first block"
            raise AssertionError(f"no_sync context manager reentry is unsupported: {fix}")
        self._begin()
        self.engine.allow_any_count()
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Has no effect: `backward` and `step` reduce the gradients over the ranks.

        Args:
            bucket_size: has no effect.
        """

    def _backward_epilogue(self) -> None:
        """Has no effect. Programs with several engines call it after the backward of their loss."""

    def _check_boundary(self, what: str, instead: str) -> None:
        self.engine.finish()
        # Gradients of plain backwards may be of another engine's loss, and are dropped by zero_grad.
        only_plain = self.engine.has_plain_backwards and not self._done
        if self.engine.reducer.passes and not only_plain:
            raise RuntimeError(f"{what} in the middle of a step: {instead}")

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Runs a full optimizer step: all micro-batches and the update. Collective.

        If an error is raised, the step is discarded, as in `backward`.

        Args:
            data_iter: yields micro-batches; None repeats `training_data` without end. A
                micro-batch is a dict of keyword arguments, a list or tuple of positional arguments,
                or a single argument of the module. The module must return the loss, or an output
                that contains the loss (`threed.models.wrapped.loss_of`).

        Returns:
            The mean loss over micro-batches and ranks, a scalar tensor.

        Raises:
            ValueError: if there is neither an iterator nor training_data.
            RuntimeError: if a step is in progress.
        """
        self._check_boundary("train_batch", "call engine.step() until the boundary first")
        source = self._batches if data_iter is None else data_iter
        if source is None:
            raise ValueError("train_batch needs an iterator, or training_data given to initialize")
        self.train()
        manual, self._boundary = self._boundary, None
        try:
            for _ in range(self.translation.accumulation):
                self.backward(loss_of(self._run(next(source))))
                self.step()
        except BaseException as error:
            self._discard_step(error)
            raise
        finally:
            self._boundary = manual
        assert self.metrics is not None
        return self._public_loss(self.metrics.loss_tensor)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Evaluates as many micro-batches as a step has, and returns their mean loss. Collective.

        The weights are not changed.

        Args:
            data_iter: yields micro-batches, as in `train_batch`.

        Returns:
            The mean loss over micro-batches and ranks, a scalar tensor. It is NaN if a batch has
            token ids beyond the vocabulary.
        """
        n = self.translation.accumulation
        with self.engine.evaluating():
            losses = [loss_of(self._run(next(data_iter))).double().reshape(1) for _ in range(n)]
            total = torch.cat(losses).sum().view(1) / (n * self.topology.dp)
            return self._public_loss(self.engine.sum_losses(total))

    def _public_loss(self, loss: Tensor) -> Tensor:
        """Returns a mean loss in fp32; in fp64 for a model in fp64."""
        return loss if self.translation.config.precision.dtype == "fp64" else loss.float()

    def _run(self, batch: Any) -> Any:
        batch = to_device(batch, self.device)
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, list | tuple) else self(batch)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards all gradients, including gradients from the losses of other engines.

        A program need not call this method, because `step` discards the gradients after each
        update. A warning is issued if the call discards gradients of the current step.

        Args:
            set_to_none: has no effect; accepted because torch's `zero_grad` has it.

        Raises:
            RuntimeError: between `backward` of this engine and `step`. After a plain
                `loss.backward()`, the gradients are dropped, as in PyTorch.
        """
        if self._pending and not self.engine.has_plain_backwards:
            what = "zero_grad between backward and step would discard the gradients of the step"
            raise RuntimeError(f"{what}: call step first")
        if done := self.micro_steps % self.translation.accumulation:
            warnings.warn(
                f"zero_grad drops the gradients of {done} of this step's {self.translation.accumulation} micro-batches;"
                " call it at the accumulation boundary only, or not at all: a step resets the gradients",
                stacklevel=2,
            )
        self.engine.zero_grad()
        self._seen = self.engine.reducer.passes


def _log_buffers(buffers: Sequence[Tensor]) -> None:
    """Logs one message per flat buffer, with the text of DeepSpeed's message."""
    for number, flat in enumerate(buffers):
        what = f"Flattening param group {number}: {flat.numel():,} parameters on {flat.device}"
        logger.info(f"{what} (sufficient memory)")


def _refuse_plain_backwards(output: Any, module: nn.Module) -> None:
    """Makes backwards from a forward's output raise RuntimeError, unless an engine starts them.

    DeepSpeed does so at stage 0. As there, outputs of `engine.module` are accepted, and so are
    outputs in a transform of `torch.func`. Backwards that compute no gradient of a parameter, such
    as `torch.autograd.grad` for gradients of inputs, are accepted, too.

    Args:
        output: the output, with tensors at any depth.
        module: the engine's module.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    alive = weakref.ref(module)  # an output may outlive the engine, or belong to the module

    def refuse(grad: Tensor) -> None:
        found = alive()
        if in_own_backward() or found is None:
            return
        trained = (param for param in found.parameters() if param.requires_grad)
        edges = map(torch.autograd.graph.get_gradient_edge, trained)
        if any(torch._C._will_engine_execute_node(edge.node) for edge in edges):
            raise RuntimeError(PLAIN_AT_STAGE_0)

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(refuse)
