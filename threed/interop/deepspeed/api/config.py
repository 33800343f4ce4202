"""deepspeed.runtime.config: a checked configuration, and enumerations of its values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threed.config import ConfigError
from threed.distributed import topology
from threed.interop.deepspeed.config.reader import read
from threed.interop.deepspeed.config.translate import translate

DeepSpeedConfigError = ConfigError


class ZeroStageEnum(int, enum.Enum):
    """The ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  (an alias of `weights`)


class OffloadDeviceEnum(enum.StrEnum):
    """The values of `device` in `offload_optimizer` and `offload_param`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """The kinds of states of DeepSpeed's engine, for `engine.offload_states`."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedConfig:
    """A ds_config, checked, with its batch sizes for the current number of ranks.

    Args:
        config: the path of a ds_config.json, or a dict.
        mpu: no effect.
        mesh_device: no effect.

    Attributes:
        world_size: number of ranks.
        global_rank: this process's rank.
        train_batch_size: samples per step, on all ranks.
        train_micro_batch_size_per_gpu: samples per micro-batch of one rank.
        gradient_accumulation_steps: micro-batches per step.
        gradient_clipping: the maximum gradient norm; 0 disables clipping.
        zero_optimization_stage: the ZeRO stage.
        zero_enabled: whether the stage is at least 1.

    Raises:
        ConfigError: if the configuration is invalid; the message lists all problems.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        self._param_dict = read(config)
        everyone = topology.everyone()
        self.world_size, self.global_rank = everyone.size, everyone.index
        # Programs may define the optimizer in code.
        ds = {"optimizer": {"type": "AdamW"}, **self._param_dict}
        found = translate(ds, everyone.size)
        self.train_batch_size = found.train_batch_size
        self.train_micro_batch_size_per_gpu = found.micro_batch
        self.gradient_accumulation_steps = found.accumulation
        self.gradient_clipping = found.config.train.grad_clip
        self.zero_optimization_stage = found.config.zero.stage
        self.zero_enabled = self.zero_optimization_stage > 0
