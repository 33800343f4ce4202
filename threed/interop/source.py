"""A checkpoint of another program, as this package sees it, and how it becomes a native one.

    write_native(source, out, dtype, tokenizer, {"tokenizer": hashes})

A `Source` is a `TensorSource` with the model, and how far its training was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import TensorSource
from threed.config import Config, DataConfig, ModelConfig, OptimConfig
from threed.interop.native_writer import FILE_BYTES, write_tensors

SQUARES = "exp_avg_sq"


@dataclass(frozen=True)
class Progress:
    """How far a training was: steps that it did, samples that it saw, updates of its optimizer."""

    steps: int = 0
    samples: int = 0
    updates: float = 0.0


class Source(TensorSource, Protocol):
    """What is read of another program's checkpoint.

    Attributes:
        title: the program and the kind of checkpoint.
        scale: the loss scale, as a checkpoint's state has it; empty if there is none.
        notes: what is left out.
    """

    title: str
    model: ModelConfig
    progress: Progress

    @property
    def scale(self) -> Mapping[str, float]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def problems(self) -> Iterator[str]:
        """Yields what of it does not fit its model."""


def write_native(
    source: Source, out: Path, dtype: str | None = None, tokenizer: str = "none",
    extra: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes the native checkpoint `out`, whole or not at all, and warns of what is left out.

    dtype: of all weights; None: each as it is. Moments stay as they are. extra: kept in the manifest. Raises
    CheckpointError.
    """
    if problems := list(source.problems()):
        raise CheckpointError("; ".join(problems))
    config = Config(
        model=source.model, data=DataConfig(tokenizer=tokenizer), optim=OptimConfig(name="adamw")
    )
    done = source.progress
    state = {
        "steps": done.steps, "consumed": done.samples, "updates": done.updates,
        "skips": max(0.0, done.steps - done.updates),
        "extra": {"tokenizer": None, **(extra or {}), "imported": source.title}, **source.scale,
    }  # fmt: skip
    write_tensors(out, config, source, dtype, _check, state, file_bytes)
    for note in source.notes:
        warnings.warn(f"{source.title}: {note}", stacklevel=2)
    return out


def _check(part: str, name: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise CheckpointError(
            f"{part} of {name} has values that are not finite: take an earlier checkpoint"
        )
    if part == SQUARES and (values < 0).any():
        raise CheckpointError(
            f"{part} of {name} has values below zero, which no mean of squares has"
        )
