"""A checkpoint of another program, as this package sees it, and how it becomes a native one.

    write_native(source, out, dtype, tokenizer, {"tokenizer": hashes})

A `Source` says the model, which parts there are of each of our tensors, and how far its training was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from threed.checkpoint.files import CheckpointError
from threed.checkpoint.finite import narrowed
from threed.config import Config, DataConfig, ModelConfig, OptimConfig
from threed.interop.huggingface.export import dtype_of
from threed.interop.huggingface.folder import slabs
from threed.interop.native_writer import FILE_BYTES, Part, write_parts
from threed.zero.records import WEIGHT

Shape = tuple[int, ...]
SQUARES = "exp_avg_sq"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Progress:
    """How far a training was: steps that it did, samples that it saw, updates of its optimizer."""

    steps: int = 0
    samples: int = 0
    updates: float = 0.0


class Source(Protocol):
    """What is read of another program's checkpoint.

    title: whose it is. shapes: of our tensors, by our names. notes: what is left out. scale: the loss scale, as a
    checkpoint's state has it; empty where there is none.
    """

    title: str
    model: ModelConfig
    progress: Progress

    @property
    def scale(self) -> Mapping[str, float]: ...

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def problems(self) -> Iterator[str]:
        """Yields what of it does not fit its model."""

    def parts(self, name: str) -> Sequence[str]:
        """Returns what there is of one of our tensors: the weight, and moments."""

    def part_dtype(self, name: str, part: str) -> torch.dtype:
        """Returns the format of a part."""

    def part_box(self, name: str, part: str, start: Shape, size: Shape) -> Tensor:
        """Returns a box [*size] of a part."""


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
    about = {(name, part): (_format(source, name, part, dtype), source.shapes[name])
             for name in source.shapes for part in source.parts(name)}  # fmt: skip

    def rows(part: Part) -> Iterator[Tensor]:
        (name, kind), (to, shape) = part, about[part]
        for first, last in slabs(shape, max(to.itemsize, 4)):
            start, size = (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
            values = source.part_box(name, kind, start, size)
            if not values.isfinite().all():
                raise CheckpointError(
                    f"{kind} of {name} has values that are not finite: take an earlier checkpoint"
                )
            if kind == SQUARES and (values < 0).any():
                raise CheckpointError(
                    f"{kind} of {name} has values below zero, which no mean of squares has"
                )
            yield narrowed(name, values, to)

    config = Config(
        model=source.model, data=DataConfig(tokenizer=tokenizer), optim=OptimConfig(name="adamw")
    )
    done = source.progress
    state = {
        "steps": done.steps, "consumed": done.samples, "updates": done.updates,
        "skips": max(0.0, done.steps - done.updates),
        "extra": {"tokenizer": None, **(extra or {}), "imported": source.title}, **source.scale,
    }  # fmt: skip
    write_parts(out, config, about, rows, state, file_bytes)
    for note in source.notes:
        warnings.warn(f"{source.title}: {note}", stacklevel=2)
    return out


def _format(source: Source, name: str, part: str, dtype: str | None) -> torch.dtype:
    """Returns the format to write a part in."""
    found = source.part_dtype(name, part)
    if found not in FLOATS:
        raise CheckpointError(f"{part} of {name} is {found}: weights of that format are not read")
    return dtype_of(dtype) if dtype is not None and part == WEIGHT else found
