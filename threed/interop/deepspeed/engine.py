"""DeepSpeed's engine API: forward, backward and step are separate calls.

engine = DeepSpeedEngine(model, topology, translation)
loss = engine(**batch).loss ; engine.backward(loss) ; engine.step()
engine.train_batch(iterator)                # a full step: forwards, backwards and update
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from threed.core.atomic import building
from threed.core.messages import counted
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.engine import ModuleEngine, StepMetrics
from threed.interop.deepspeed.api.zero import mark_parameters
from threed.interop.deepspeed.config.translate import Translation
from threed.interop.deepspeed.data import repeat, to_device
from threed.interop.deepspeed.missing import INSTEAD
from threed.interop.deepspeed.views import EngineOptimizer, SchedulerView, from_json, to_json
from threed.interop.loading import LATEST
from threed.models.wrapped import loss_of


class DeepSpeedEngine:
    """DeepSpeed's engine API. Attributes that the engine does not have are looked up in the module.

    Args:
        model: the module to train.
        topology: a topology with data parallelism only.
        translation: the translated DeepSpeed configuration.
        passed: the torch optimizer that was passed to `initialize`; None if none was passed.
        training_loader: the loader from which `train_batch` reads without an iterator, or None.
        notes: messages of `initialize`. The attribute `notes` has these messages, followed by the
            messages of the translation.

    Attributes:
        engine: the wrapped `threed.engine.ModuleEngine`.
        module: the trained module.
        translation: the translated DeepSpeed configuration.
        optimizer: the optimizer, whose learning rates can be set.
        lr_scheduler: the scheduler that was passed to `initialize`, which `step` advances; or a
            view of the configuration's schedule; or None if there is neither.
        metrics: metrics of the last step; None before the first step.
        micro_steps: number of micro-batches that `step` has completed. The micro-batches of
            discarded steps are not counted.
        notes: messages about keys that have no effect, and about values chosen by threed.
    """

    def __init__(
        self, model: nn.Module, topology: Topology, translation: Translation,
        passed: torch.optim.Optimizer | None = None, training_loader: DataLoader[Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        t = self.translation = translation
        self.engine = ModuleEngine(
            model, topology, t.config, learning_rate=t.learning_rate, loss_scale=t.loss_scale
        )
        mark_parameters(self.engine)
        self.module, self.topology = model, topology
        self.device = topology.device
        self.global_rank = topology.rank
        self.world_size = topology.world
        scheduled = t.learning_rate is not None
        self.optimizer = EngineOptimizer(self.engine, self.zero_grad, passed, scheduled)
        self.lr_scheduler: Any = SchedulerView(self.optimizer) if scheduled else None
        self.notes = (*notes, *translation.notes)
        self.training_loader = training_loader
        self.metrics: StepMetrics | None = None
        self.micro_steps = 0
        self._skipped = 0  # value of the property `skipped_steps` after the last update
        self._done = 0  # number of micro-batches of the step in progress that `step` has completed
        self._seen = 0  # number of backwards of this step that ran before the last call of `step`
        # whether this micro-batch is the step's last; None: counted by the configuration
        self._boundary: bool | None = None
        self._batches = None if training_loader is None else repeat(training_loader)

    def __getattr__(self, name: str) -> Any:
        # Before `module` is set, `self.module` below would call this method again, without end.
        if name == "module":
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            kind = type(self.module).__name__
        if name in INSTEAD:
            raise AttributeError(f"threed's engine has no {name}: {INSTEAD[name]}")
        raise AttributeError(
            f"neither threed's engine nor its module ({kind}) has an attribute {name!r}"
        )

    # ------------------------------------------------------------------------------------------------------- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward, and returns the result. Collective.

        If gradients are enabled and no step is in progress, a step begins.

        Args:
            args: positional arguments of the module's forward.
            kwargs: keyword arguments of the module's forward.
        """
        if torch.is_grad_enabled():
            self._begin()
            return self.module(*args, **kwargs)
        with self.engine.inference() as module:
            return module(*args, **kwargs)

    forward = __call__

    def _begin(self) -> None:
        """Begins a step of the engine, unless a step is in progress."""
        self.engine.drop_interrupted()
        if not self.engine.accumulating:
            self._forget_step()
            self.optimizer.synchronize()
            self.engine.begin(self.translation.accumulation)
            if self._boundary is not None:
                self.engine.allow_any_count()

    def _forget_step(self) -> None:
        """Resets the counters of the step in progress, whose gradients were discarded."""
        self.micro_steps -= self._done
        self._done = self._seen = 0

    @property
    def _pending(self) -> bool:
        """Whether a backward has run since the last call of `step`."""
        self.engine.drop_interrupted()
        return self.engine.reducer.passes > self._seen

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Runs the backward of one loss of a micro-batch, and accumulates the gradients. Collective.

        The loss is divided by the number of micro-batches of all ranks in the step. So the
        gradients of a step add up to the gradients of the mean loss of the global batch. Instead of
        this method, a program can call `loss.backward()` (see `threed.ModuleEngine.backward`).

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

    def step(self) -> None:
        """Ends a micro-batch; at the accumulation boundary, runs an optimizer step.

        The boundary is the last micro-batch of a step. At the boundary, this method is collective.

        Raises:
            RuntimeError: if no backward was run for the micro-batch. A backward of another engine
                is sufficient if its loss depends on this module. The error is also raised if
                parameter groups or step hooks were added to the optimizer that was passed to
                `initialize`.
        """
        if not self._pending and not self.engine.reducer.foreign:
            raise RuntimeError("step without a backward: call engine.backward(loss) first")
        self._begin()
        if self.is_gradient_accumulation_boundary():
            self.optimizer.synchronize()
            self.metrics = self.engine.update()
            self.optimizer.stepped()
            self._step_scheduler()
        self.micro_steps += 1
        self._seen = self.engine.reducer.passes
        self._done = self._done + 1 if self.engine.accumulating else 0

    def _step_scheduler(self) -> None:
        """Advances the program's scheduler.

        With a dynamic loss scale, the scheduler is not advanced if the step was skipped.
        """
        if self.lr_scheduler is None or isinstance(self.lr_scheduler, SchedulerView):
            return
        before, self._skipped = self._skipped, self.skipped_steps
        if self._skipped == before or not self.engine.optimizer.scaler.rule.dynamic:
            self.lr_scheduler.step()

    def _scheduler_state(self) -> dict[str, Any]:
        state = {} if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        found: dict[str, Any] = to_json(state)
        return found

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
        self.module.train()
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
        return self.metrics.loss_tensor

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
            return self.engine.sum_losses(torch.cat(losses).sum().view(1) / (n * self.topology.dp))

    def _run(self, batch: Any) -> Any:
        batch = to_device(batch, self.device)
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, list | tuple) else self(batch)

    # ---------------------------------------------------------------------------------------------------------- state

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Sets the training mode of the module; returns the engine.

        Args:
            mode: True for training, False for evaluation.
        """
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Sets the module to evaluation mode; returns the engine."""
        return self.train(False)

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

    @property
    def global_steps(self) -> int:
        """The number of optimizer steps, including skipped steps."""
        return self.engine.steps

    @property
    def global_samples(self) -> int:
        """The number of samples in all steps so far, over all ranks, including skipped steps."""
        return self.engine.steps * self.translation.train_batch_size

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite."""
        return int(self.engine.optimizer.bad.skips)

    def get_lr(self) -> list[float]:
        """Returns the learning rates of the next update, one per parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Returns the last step's gradient norm before clipping; None before the first step."""
        return None if self.metrics is None else self.metrics.grad_norm

    def train_batch_size(self) -> int:
        """Returns the number of samples in one step, over all ranks."""
        return self.translation.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of samples in one forward pass of one rank."""
        return self.translation.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-batches per rank in one step."""
        return self.translation.accumulation

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage."""
        return self.translation.config.zero.stage

    def gathered(
        self,
        params: Iterable[Tensor] | nn.Module | None = None,
        *,
        modifier_rank: int | None = None,
    ) -> AbstractContextManager[nn.Module]:
        """Returns a context manager that yields the module with full (gathered) parameters.

        See `threed.ModuleEngine.gathered`.

        Args:
            params: the parameters that the block uses, or a submodule; None: all parameters.
            modifier_rank: rank that edits the parameters; None: every rank makes the same changes.
        """
        return self.engine.gathered(params, modifier_rank=modifier_rank)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the full weights and persistent buffers by name on rank 0. Collective.

        Weights are fp32, or fp64 if the model uses fp64. Other ranks return an empty dict.
        """
        return self.engine.full_state_dict()

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError, because a rank may hold only slices of the weights."""
        fix = "use engine.full_state_dict(), or save_checkpoint()"
        raise NotImplementedError(f"a rank may have slices only: {fix}")

    module_state_dict = state_dict

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Writes the checkpoint save_dir/tag, and writes the tag to save_dir/latest. Collective.

        Args:
            save_dir: the folder of checkpoints.
            tag: the name of the checkpoint; None means "global_stepN". Must be equal on all ranks.
            client_state: data of the program (numbers, strings, lists and dicts) to save with the
                checkpoint.
            save_latest: whether to write the tag to save_dir/latest.

        Returns:
            True.

        Raises:
            RuntimeError: if a step is in progress, because its gradients would be lost.
            ValueError: if the ranks have different tags.
        """
        self._check_boundary("save_checkpoint", "save at an accumulation boundary")
        self.optimizer.synchronize()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        everyone = self.topology.axis("world")
        if len(tags := set(collectives.exchange(tag, everyone))) > 1:
            raise ValueError(f"ranks save under different tags: {', '.join(sorted(tags))}")
        extra = {"client_state": dict(client_state or {}), "lr_scheduler": self._scheduler_state()}
        self.engine.save(Path(save_dir) / tag, extra)
        if everyone.index == 0 and save_latest:
            with building(Path(save_dir) / LATEST) as (scratch,):
                scratch.write_text(tag, encoding="utf-8")
        collectives.barrier(everyone)  # ensures that no rank returns before `latest` exists
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | int | None = None
    ) -> tuple[str | None, Any]:
        """Loads the checkpoint load_dir/tag. Collective.

        The checkpoint may have been saved with any number of ranks and any ZeRO stage.

        Args:
            load_dir: the folder of checkpoints.
            tag: the name of the checkpoint; None means the tag in load_dir/latest.

        Returns:
            (path of the checkpoint, client_state that was saved with it); (None, None) without
            `tag` if the file `latest` is missing.

        Raises:
            RuntimeError: if a step is in progress.
        """
        self._check_boundary("load_checkpoint", "load at an accumulation boundary")
        if tag is None:
            with contextlib.suppress(FileNotFoundError):
                tag = (Path(load_dir) / LATEST).read_text(encoding="utf-8").strip()
        if tag is None:
            warnings.warn(
                f"{load_dir} has no file {LATEST}: nothing was loaded; pass a tag, or another folder",
                stacklevel=2,
            )
            return None, None
        path = Path(load_dir) / str(tag)
        if self._pending:
            self.zero_grad()
        extra = self.engine.load(path)
        self.optimizer.show()
        if self.lr_scheduler is not None and (state := extra.get("lr_scheduler")):
            self.lr_scheduler.load_state_dict(from_json(state))
        self._skipped = self.skipped_steps
        self.micro_steps = self.engine.steps * self.translation.accumulation
        self._done = self._seen = 0
        return str(path), extra.get("client_state", {})
