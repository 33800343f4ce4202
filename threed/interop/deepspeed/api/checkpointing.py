"""deepspeed.checkpointing: activation checkpointing of parts of a model, by torch's implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from threed.core.device import is_accelerator
from threed.distributed import topology
from threed.interop.deepspeed.config.reader import read
from threed.interop.deepspeed.names import not_offered

_REFUSED = "use deepspeed.checkpointing.checkpoint without it, or models of threed.layers with recompute.offload"
_configured = False  # whether `configure` was called


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and recomputes its activations in the backward.

    Args:
        function: a function or a module.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of the function.
    """
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def configure(
    mpu_: Any = None, deepspeed_config: str | Path | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None, contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None, profile: bool | None = None,
) -> None:  # fmt: skip
    """Checks the options of activation checkpointing; afterwards `is_configured` returns True.

    Args:
        mpu_: no effect.
        deepspeed_config: a ds_config; its group `activation_checkpointing` has the options that are
            not given.
        partition_activations: must not be True.
        contiguous_checkpointing: must not be True.
        num_checkpoints: no effect.
        checkpoint_in_cpu: must not be True.
        synchronize: no effect.
        profile: no effect.

    Raises:
        NotImplementedError: for an option that is not offered.
    """
    section = {} if deepspeed_config is None else read(deepspeed_config)
    options = section.get("activation_checkpointing") or {}
    for name, value, key in (
        ("partition_activations", partition_activations, "partition_activations"),
        ("contiguous_checkpointing", contiguous_checkpointing, "contiguous_memory_optimization"),
        ("checkpoint_in_cpu", checkpoint_in_cpu, "cpu_checkpointing"),
    ):
        if options.get(key) if value is None else value:
            raise NotImplementedError(
                not_offered(f"deepspeed.checkpointing.configure({name}=True)", _REFUSED)
            )
    global _configured
    _configured = True


def is_configured() -> bool:
    """Returns whether `configure` was called."""
    return _configured


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the generator of the GPU. Layers are not split, so all ranks use the same seed."""
    if is_accelerator(device := topology.default_device()):
        torch.get_device_module(device).manual_seed(seed)
