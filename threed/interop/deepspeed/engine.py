"""DeepSpeed's engine API on top of `threed.ModuleEngine`.

engine = DeepSpeedEngine(model, topology, translation)
loss = engine(**batch).loss ; engine.backward(loss) ; engine.step()
engine.save_checkpoint("checkpoints")

`training` has the methods that train, `checkpoints` the methods that save and load, and
`module_methods` the methods of nn.Module. `names` lists names that are not offered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from threed.interop.deepspeed.api.marks import unmark
from threed.interop.deepspeed.checkpoints import Checkpoints
from threed.interop.deepspeed.config.reader import value_of
from threed.interop.deepspeed.data import deepspeed_io, repeat
from threed.interop.deepspeed.ownership import owner, release
from threed.interop.deepspeed.repeated_training import release_trainers
from threed.ops.precision import DTYPES


class DeepSpeedEngine(Checkpoints):
    """DeepSpeed's engine API. Attributes that the engine does not have are looked up in the module.

    The engine is an `nn.Module` whose methods act on the wrapped module.

    Args:
        model: the module to train.
        topology: a topology with data parallelism only.
        translation: the translated DeepSpeed configuration.
        passed: the torch optimizer that was passed to `initialize`; None if none was passed.
        training_dataloader: the loader from which `train_batch` reads without an iterator, or None.
        notes: messages of `initialize`. The attribute `notes` has these messages, followed by the
            messages of the translation.
        ds: the ds_config.
        collate_fn: default `collate_fn` of `deepspeed_io`.
        trains: whether the engine has an optimizer; otherwise it only evaluates.
        make_trainer: creates the engine to drive; None: a `threed.engine.ModuleEngine`.

    Attributes:
        engine: the wrapped `threed.engine.ModuleEngine`.
        module: the trained module.
        translation: the translated DeepSpeed configuration.
        config: the ds_config, a dict.
        optimizer: the optimizer, whose learning rates can be set; None if the engine only
            evaluates.
        basic_optimizer: the same as `optimizer`.
        client_optimizer: the optimizer that was passed to `initialize`, or None.
        lr_scheduler: the scheduler that was passed to `initialize`, which `step` advances; or a
            view of the configuration's schedule; or None if there is neither.
        training_dataloader: the loader of the training data, or None.
        metrics: metrics of the last step; None before the first step.
        micro_steps: number of micro-batches that `step` has completed. The micro-batches of
            discarded steps are not counted.
        global_samples: number of samples in all steps so far, over all ranks, including skipped
            steps.
        local_rank: number of this rank on its machine.
        notes: messages about keys that have no effect, and about values chosen by threed.
    """

    def set_scheduler(self, scheduler: Any) -> None:
        """Sets the scheduler that `step` advances.

        Args:
            scheduler: a torch scheduler of the engine's optimizer, or of the passed optimizer.
        """
        self.lr_scheduler = self.client_lr_scheduler = scheduler

    def destroy(self) -> None:
        """Ends the engine and gives the module back. Collective.

        Afterwards every rank has the full parameters, and the module can be used by plain PyTorch
        or another engine. The gradients of a step in progress are dropped. Another call has no
        effect.
        """
        if owner(self.module) is not self:
            return
        if self.engine.accumulating:
            self.engine.discard()
        self.engine.destroy()
        for param in self.module.parameters():
            unmark(param)
        if self._module_hook is not None:
            self._module_hook.remove()
        if self.optimizer is not None:
            self.optimizer.remove()
        release(self.module)
        release_trainers()

    # ------------------------------------------------------------------------------------------------- steps and data

    @property
    def global_steps(self) -> int:
        """The number of optimizer steps, including skipped steps."""
        return self._steps_before + self.engine.steps

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite."""
        return 0 if self.optimizer is None else int(self.engine.optimizer.bad.skips)

    def get_global_grad_norm(self) -> float | None:
        """Returns the last step's gradient norm before clipping; None before the first step.

        If the step was skipped because a gradient was not finite, the norm is inf, as in DeepSpeed.
        """
        if self.metrics is None:
            return None
        norm = self.metrics.grad_norm
        return norm if math.isfinite(norm) else math.inf

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns (batch size of a step, micro-batch size per rank, accumulation steps)."""
        t = self.translation
        return t.train_batch_size, t.micro_batch, t.accumulation

    def train_batch_size(self) -> int:
        """Returns the number of samples in one step, over all ranks."""
        return self.translation.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of samples in one forward pass of one rank."""
        return self.translation.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of micro-batches per rank in one step."""
        return self.translation.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of accumulation steps of all following steps.

        Args:
            train_batch_size: number of samples in one step, over all ranks.

        Raises:
            ValueError: if the size is not a multiple of micro-batch size × data ranks.
            RuntimeError: if a step is in progress.
        """
        share = self.translation.micro_batch * self.topology.dp
        if train_batch_size < share or train_batch_size % share:
            raise ValueError(
                f"train_batch_size {train_batch_size}: use a multiple of {share} (micro-batch size × data ranks)"
            )
        self._set_sizes(self.translation.micro_batch, train_batch_size // share)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro-batch size that the engine reports; the accumulation steps are kept.

        The program or its loader determines the actual size.

        Args:
            micro_batch_size: number of samples in one forward pass of one rank.

        Raises:
            RuntimeError: if a step is in progress.
        """
        self._set_sizes(micro_batch_size, self.translation.accumulation)

    def _set_sizes(self, micro: int, accumulation: int) -> None:
        self._check_boundary("a change of batch sizes", "make it at the accumulation boundary")
        total = micro * accumulation * self.topology.dp
        self.translation = dataclasses.replace(
            self.translation, micro_batch=micro, accumulation=accumulation, train_batch_size=total
        )

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, route: str = "train",
        pin_memory: bool = True, data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None, num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:  # fmt: skip
        """Returns a loader of this rank's part of a dataset.

        Args:
            dataset: the full dataset.
            batch_size: number of samples per batch; None: the micro-batch size.
            route: "train" shuffles the dataset; "eval" and "predict" keep its order.
            pin_memory: has no effect: batches are page-locked if the device is a GPU.
            data_sampler: sampler to use instead.
            collate_fn: the loader's `collate_fn`; None: the one that was passed to `initialize`.
            num_local_io_workers: number of worker processes; None: no workers.
        """
        return deepspeed_io(
            dataset, self.topology, self.translation, collate_fn or self.collate_fn, batch_size=batch_size,
            shuffle=route == "train", sampler=data_sampler, workers=num_local_io_workers or 0,
        )  # fmt: skip

    def set_dataloader(self, loader: DataLoader[Any]) -> None:
        """Sets the loader from which `train_batch` reads without an iterator.

        Args:
            loader: yields micro-batches of this rank.
        """
        self.training_dataloader, self._batches = loader, repeat(loader)

    # ------------------------------------------------------------------------------------------------------- optimizer

    def get_lr(self) -> list[float]:
        """Returns the learning rates of the next update, one per parameter group."""
        return [] if self.optimizer is None else self.optimizer.rates()

    def get_type(self) -> list[Any]:
        """Returns the entry "type" of each parameter group, 0.0 if there is none."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Returns the betas, or the momentum, of each parameter group."""
        return self._of_groups("betas", "momentum")

    def _of_groups(self, *keys: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [next((group[key] for key in keys if key in group), 0.0) for group in groups]

    def optimizer_name(self) -> str | None:
        """Returns the class of the passed optimizer, or the configuration's type in lower case."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        name = value_of(self.config, "optimizer.type")
        return None if name is None else str(name).lower()

    def optimizer_params(self) -> Any:
        """Returns `optimizer.params` of the configuration, or None."""
        return value_of(self.config, "optimizer.params")

    def scheduler_name(self) -> Any:
        """Returns `scheduler.type` of the configuration, or None."""
        return value_of(self.config, "scheduler.type")

    def scheduler_params(self) -> Any:
        """Returns `scheduler.params` of the configuration, or None."""
        return value_of(self.config, "scheduler.params")

    def gradient_clipping(self) -> float:
        """Returns the maximum gradient norm; 0 if gradients are not clipped."""
        return self.translation.config.train.grad_clip

    # ------------------------------------------------------------------------------------------------------- precision

    def fp16_enabled(self) -> bool:
        """Returns whether the weights are fp16."""
        return self.translation.config.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Returns whether the weights are bf16."""
        return self.translation.config.precision.dtype == "bf16"

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns (dtype of the weights, dtype in which gradients are accumulated)."""
        precision = self.translation.config.precision
        return DTYPES[precision.dtype], DTYPES[precision.grad_dtype or precision.dtype]

    def loss_scale(self) -> float:
        """Returns the configuration's fixed loss scale; 0 if it is dynamic.

        `optimizer.cur_scale` is the current loss scale.
        """
        scale = self.translation.loss_scale
        return 0.0 if scale is None or scale.dynamic else scale.initial

    def dynamic_loss_scale(self) -> bool:
        """Returns whether the loss scale is not fixed."""
        return self.loss_scale() == 0

    # ------------------------------------------------------------------------------------------------ ZeRO, parallelism

    def zero_optimization(self) -> bool:
        """Returns whether the ZeRO stage is at least 1."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage."""
        return self.translation.config.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Returns whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Returns whether parameters are sharded."""
        return self.zero_optimization_stage() == 3

    def zero_use_cpu_optimizer(self) -> bool:
        """Returns whether updates run on the host."""
        return self.translation.config.zero.offload_optimizer != "none"

    def zero_cpu_offload(self) -> bool:
        """Returns whether optimizer states are stored in host memory."""
        return self.translation.config.zero.offload_optimizer == "cpu"

    def empty_partition_cache(self) -> None:
        """Has no effect: gathered parameters are released after use."""

    @property
    def dp_world_size(self) -> int:
        """The number of data ranks."""
        return self.topology.dp

    @property
    def mp_world_size(self) -> int:
        """1, because models are not split over ranks."""
        return 1

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the data ranks; None for one rank."""
        return self.topology.axis("dp").group

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

    def apply(self, fn: Callable[[nn.Module], None]) -> DeepSpeedEngine:
        """Applies a function to all submodules, with full parameters; returns the engine. Collective.

        Args:
            fn: the function; it must make the same changes on every rank.
        """
        with self.engine.gathered() as module:
            module.apply(fn)
        return self
