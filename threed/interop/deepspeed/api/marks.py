"""DeepSpeed's attributes of parameters, which peft, transformers and trl read.

Parameters that are built in `zero.Init`, and sharded parameters of an engine under ZeRO stage 3, have
the attributes `ds_id`, `ds_shape`, `ds_numel`, `ds_status` and `ds_active_sub_modules`. DeepSpeed's
methods of parameters are refused.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from threed.interop.deepspeed.names import Refused

_GATHER = "use deepspeed.zero.GatheredParameters"
_METHODS = {
    "all_gather": _GATHER,
    "all_gather_coalesced": _GATHER,
    "partition": _GATHER,
    "partition_gradients": "use engine.backward, which reduces gradients",
    "reduce_gradients_at_owner": "use engine.backward, which reduces gradients",
    "convert_to_zero_parameters": "use deepspeed.zero.Init",
}
_VALUES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_active_sub_modules")


class ZeroParamStatus(enum.Enum):
    """Whether the full values of a parameter are in memory."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


# In a backward, autograd returns the parameters that a function has saved as new tensors, which are
# gathered. trl reads `ds_status` of such a tensor.
Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]


def mark(param: Any, number: int, shape: torch.Size, status: ZeroParamStatus) -> None:
    """Sets DeepSpeed's attributes of a parameter.

    Args:
        param: the parameter.
        number: its `ds_id`.
        shape: its full shape.
        status: its `ds_status`.
    """
    values = (number, shape, shape.numel(), status, set[Any]())
    vars(param).update(zip(_VALUES, values, strict=True))
    for name, instead in _METHODS.items():
        vars(param)[name] = Refused(f"{name} of a parameter", instead)


def unmark(param: Tensor) -> None:
    """Removes the attributes that `mark` has set."""
    for name in (*_VALUES, *_METHODS):
        vars(param).pop(name, None)


def is_zero_param(param: Any) -> bool:
    """Returns whether a parameter was built in `zero.Init` or belongs to an engine in stage 3."""
    return isinstance(param, Tensor) and "ds_id" in vars(param)
