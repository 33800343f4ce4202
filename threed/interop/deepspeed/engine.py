"""A `threed.Engine` with DeepSpeed's interface: forward, backward and step are separate calls.

engine = DeepSpeedEngine(model, topology, translation)
loss = engine(**batch).loss ; engine.backward(loss) ; engine.step()        # or engine.train_batch(iterator)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from threed import collectives
from threed.atomic import building
from threed.engine import ModuleEngine, StepMetrics
from threed.interop.deepspeed.config.translate import Translation
from threed.interop.deepspeed.data import repeat, to_device
from threed.interop.deepspeed.missing import INSTEAD
from threed.interop.deepspeed.views import OptimizerView, PassedOptimizer
from threed.models.wrapped import loss_of
from threed.topology import Topology

LATEST = "latest"  # the file with the newest checkpoint's tag


class DeepSpeedEngine:
    """A `threed.Engine` with DeepSpeed's interface; other attributes are looked up in the module.

    Args:
        model: the module to train.
        topology: data ranks only.
        translation: of DeepSpeed's configuration.
        passed: the optimizer that was passed to `initialize`.
        training_loader: the default of `train_batch`.
        notes: messages of `initialize`, before those of the translation.

    Attributes:
        engine: the wrapped engine.
        metrics: of the last step.
        micro_steps: calls of `step` so far, except in discarded steps.
    """

    def __init__(
        self, model: nn.Module, topology: Topology, translation: Translation,
        passed: PassedOptimizer | None = None, training_loader: DataLoader[Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        t = self.translation = translation
        self.engine = ModuleEngine(
            model, topology, t.config, learning_rate=t.learning_rate, loss_scale=t.loss_scale
        )
        self.module, self.topology = model, topology
        self.device = topology.device
        self.global_rank = topology.rank
        self.world_size = topology.world
        self.optimizer = OptimizerView(self.engine, self.zero_grad)
        self._passed = passed
        self.notes = (*notes, *translation.notes)
        self.training_loader = training_loader
        self.metrics: StepMetrics | None = None
        self.micro_steps = 0
        self._pending = False  # a backward without a call of `step` so far
        self._batches = None if training_loader is None else repeat(training_loader)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not there yet
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
        """Runs the module's forward."""
        if torch.is_grad_enabled():
            self._begin()
            return self.module(*args, **kwargs)
        with self.engine.inference() as module:
            return module(*args, **kwargs)

    forward = __call__

    def _begin(self) -> None:
        """Begins a step."""
        if not self.engine.accumulating:
            self.engine.begin(self.translation.accumulation)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Runs the backward of one micro-batch's mean loss, as its share of the mean over micro-batches and ranks.

        If it raises, the step is discarded with the gradients of its earlier micro-batches; the next micro-batch is the
        first of a new step.

        scale_wrt_gas: whether to divide by the accumulation steps. Returns the loss. RuntimeError when `step` was
        not called after the last one.
        """
        if retain_graph:
            raise ValueError("retain_graph is not there: add the losses, and call backward once")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("backward needs a scalar loss")
        if self._pending:
            fix = "call engine.step() after each, it acts at the boundary only"
            raise RuntimeError(f"backward was called twice: {fix}")
        self._begin()
        weight = 1.0 / (self.topology.dp * (self.translation.accumulation if scale_wrt_gas else 1))
        try:
            self.engine.backward(loss, weight)
        except BaseException as error:
            self._give_up_step(error)
            raise
        self._pending = True
        return loss

    def _give_up_step(self, error: BaseException) -> None:
        """Discards the current step, and adds a note to the error if earlier micro-batches are lost."""
        if done := self.micro_steps % self.translation.accumulation:
            error.add_note(
                f"threed: the step is discarded, with its {done} earlier micro-batches of"
                f" {self.translation.accumulation}; the next micro-batch is the first of a new step"
            )
        self.engine.discard()
        self.micro_steps -= done
        self._pending = False

    def step(self) -> None:
        """Ends a micro-batch; at the accumulation boundary, does one optimizer step. Collective there.

        Raises:
            RuntimeError: there is no gradient, neither from a backward of this engine nor from one of another engine
                whose loss depends on this module.
        """
        if not self._pending and not self.engine.reducer.foreign:
            raise RuntimeError("step without a backward: call engine.backward(loss) first")
        self._begin()
        if self._passed is not None:
            self._passed.check()
        if self.is_gradient_accumulation_boundary():
            self.metrics = self.engine.update()
        self.micro_steps += 1
        self._pending = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether the current micro-batch is the last of its step."""
        return (self.micro_steps + 1) % self.translation.accumulation == 0

    def _check_boundary(self, what: str, instead: str) -> None:
        self.engine.finish()
        if self._pending or self.micro_steps % self.translation.accumulation:
            raise RuntimeError(f"{what} in the middle of a step: {instead}")

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Does a whole optimizer step from an iterator over micro-batches, by default of training_data without end.

        If it raises, the step is discarded, as in `backward`.

        A micro-batch: a dict of keyword arguments, a sequence of positional ones, or a tensor; the module returns the
        loss, or something with one (`threed.models.wrapped.loss_of`). Returns the mean loss over micro-batches
        and ranks, a scalar tensor.
        """
        self._check_boundary("train_batch", "call engine.step() until the boundary first")
        source = self._batches if data_iter is None else data_iter
        if source is None:
            raise ValueError("train_batch needs an iterator, or training_data given to initialize")
        self.module.train()
        try:
            for _ in range(self.translation.accumulation):
                self.backward(loss_of(self._run(next(source))))
                self.step()
        except BaseException as error:
            self._give_up_step(error)
            raise
        assert self.metrics is not None
        return self.metrics.loss_tensor

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Returns the mean loss over the micro-batches of a step and over ranks, without training; NaN if a batch has
        ids beyond the vocabulary. Collective."""
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
        """Sets the module's mode."""
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Sets the module's mode to evaluation."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients so far, also those from losses of other engines; a step does so by itself.

        RuntimeError between `backward` and `step`; a warning where micro-batches of the same step are dropped.
        """
        if self._pending:
            what = "zero_grad between backward and step would drop what the step is made of"
            raise RuntimeError(f"{what}: step first")
        if done := self.micro_steps % self.translation.accumulation:
            warnings.warn(
                f"zero_grad drops the gradients of {done} of this step's {self.translation.accumulation} micro-batches;"
                " call it at the accumulation boundary only, or not at all: a step leaves none behind",
                stacklevel=2,
            )
        self.engine.zero_grad()

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.engine.steps

    @property
    def global_samples(self) -> int:
        """Samples of all ranks that went into `global_steps`."""
        return self.engine.steps * self.translation.train_batch_size

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite."""
        return int(self.engine.optimizer.bad.skips)

    def get_lr(self) -> list[float]:
        """Returns the learning rate of the next update, of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Returns the gradient norm of the last step, before clipping; None before the first."""
        return None if self.metrics is None else self.metrics.grad_norm

    def train_batch_size(self) -> int:
        """Samples in a step, over all ranks."""
        return self.translation.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one forward pass of one rank."""
        return self.translation.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-batches of one rank in a step."""
        return self.translation.accumulation

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage."""
        return self.translation.config.zero.stage

    def gathered(self) -> AbstractContextManager[nn.Module]:
        """Returns the module, whole between steps; see `threed.Engine.gathered`."""
        return self.engine.gathered()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns names -> full weights (at least fp32) on rank 0, an empty dict elsewhere. Collective."""
        return self.engine.full_state_dict()

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError: a rank may hold slices only."""
        fix = "use engine.full_state_dict(), or save_checkpoint()"
        raise NotImplementedError(f"a rank may hold slices only: {fix}")

    module_state_dict = state_dict

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Writes save_dir/tag (by default global_stepN), and the tag into save_dir/latest. Collective.

        client_state: numbers, text, lists and dicts. RuntimeError in the middle of a step, whose gradients would be
        lost; ValueError when ranks give different tags.
        """
        self._check_boundary("save_checkpoint", "save at an accumulation boundary")
        tag = tag or f"global_step{self.global_steps}"
        everyone = self.topology.axis("world")
        if len(tags := set(collectives.exchange(tag, everyone))) > 1:
            raise ValueError(f"ranks save under different tags: {', '.join(sorted(tags))}")
        self.engine.save(Path(save_dir) / tag, {"client_state": dict(client_state or {})})
        if everyone.index == 0:
            with building(Path(save_dir) / LATEST) as (scratch,):
                scratch.write_text(tag, encoding="utf-8")
        collectives.barrier(everyone)  # nobody leaves before `latest` is there
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None
    ) -> tuple[str | None, Any]:
        """Loads load_dir/tag, by default the tag in load_dir/latest: its path and client_state; (None, None) where
        there is none. From any number of ranks and any stage. Collective. RuntimeError in the middle of a step."""
        self._check_boundary("load_checkpoint", "load at an accumulation boundary")
        if tag is None:
            with contextlib.suppress(FileNotFoundError):
                tag = (Path(load_dir) / LATEST).read_text(encoding="utf-8").strip()
        if tag is None:
            return None, None
        path = Path(load_dir) / tag
        extra = self.engine.load(path)
        self.micro_steps = self.engine.steps * self.translation.accumulation
        return str(path), extra.get("client_state", {})
