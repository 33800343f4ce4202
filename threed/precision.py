"""Number formats by their names in the configuration."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def dtype(name: str) -> torch.dtype:
    """The torch dtype of a configured name."""
    return DTYPES[name]
