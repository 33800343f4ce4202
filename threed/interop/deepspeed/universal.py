"""DeepSpeed's universal checkpoints, which its ds_to_universal makes of others: a file for each part of a parameter.

    checkpoint = UniversalCheckpoint(folder, config)         a `Source`; CheckpointError for what is not read, by name

A folder has the model's files (`deepspeed`), and of each parameter that is trained zero/NAME/fp32.pt, exp_avg.pt,
exp_avg_sq.pt, and perhaps step.pt: a tensor, or a dictionary with one as `param`; of stage 3 flat. zero/
optimizer_state.pt has groups and the loss scale (deepspeed/checkpoint/ds_to_universal.py, of 0.19.8).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import FileTensor, Reshaped
from threed.interop.deepspeed.checkpoint import (
    MOMENTS,
    DeepSpeedCheckpoint,
    files_of,
    scale_of,
    stage_of,
    step_folder,
)
from threed.interop.pickle_reader import PickleReader, number
from threed.interop.source import Progress
from threed.zero.records import WEIGHT

PARTS = {"fp32.pt": WEIGHT, **{f"{part}.pt": part for part in MOMENTS}, "step.pt": "step"}
STATE = "optimizer_state.pt"


def is_universal(path: Path) -> bool:
    """Returns whether a folder of DeepSpeed's is one, by its files."""
    folder = step_folder(path)
    return folder is not None and any(folder.glob("zero/*/fp32.pt"))


class UniversalCheckpoint(DeepSpeedCheckpoint):
    """A universal checkpoint as a `Source`."""

    def _read(self, folder: Path) -> None:
        models, states = files_of(folder)
        if states:
            raise CheckpointError(
                f"{folder} is a universal checkpoint and another one: take one of them away"
            )
        own = [folder / "zero" / STATE] if (folder / "zero" / STATE).is_file() else []
        reader = PickleReader()
        heads: list[Any] = [reader.torch_file(file) for file in (*models, *own)]
        about = heads.pop() if own else {}
        if not all(isinstance(head, dict) for head in (*heads, about)):
            raise CheckpointError(f"{folder}: the model's files are not DeepSpeed's")
        self.stage = stage_of(about)
        self._begin(heads[0], "universal, from ")
        self.scale = scale_of(about.get("loss_scaler"))
        if not own:
            self._note(f"it has no zero/{STATE}: the loss scale of fp16 is left out")
        shapes = {
            name: tuple(shape)
            for group in heads[0]["param_shapes"]
            for name, shape in group.items()
        }
        self._take(folder, shapes, reader)
        if self.stage == 3:
            self._frozen([found.get("frozen_param_fragments") or {} for found in heads], heads[0])
        else:
            self._rest(heads[0])
        self._finish(heads[0])

    def _take(self, folder: Path, shapes: dict[str, tuple[int, ...]], reader: PickleReader) -> None:
        """Takes each parameter's parts."""
        for name in shapes:
            if (
                Path(name).name != name
                or name == ".."
                or not name.isprintable()
                or len(name.encode()) > 250
            ):
                raise CheckpointError(
                    f"{folder} has a parameter {plain(name)}, which cannot be the name of a folder"
                )
        files = {
            (name, part): folder / "zero" / name / file
            for name in shapes
            for file, part in PARTS.items()
        }
        here = {key: file for key, file in files.items() if file.is_file()}
        if missing := [name for name in shapes if (name, WEIGHT) not in here]:
            raise CheckpointError(
                f"{folder} has no zero/{plain(missing[0])}/fp32.pt, and its model has that parameter"
            )
        found = {key: reader.torch_file(file) for key, file in here.items()}
        steps = set[float | None]()
        for (name, part), value in found.items():
            tensor = value.get("param") if isinstance(value, dict) else value
            if part == "step":
                steps.add(number(tensor))
                continue
            if not isinstance(tensor, FileTensor):
                raise CheckpointError(f"{files[name, part]} has no tensor")
            shape = shapes[name]
            if tensor.shape not in (shape, (math.prod(shape),)):
                raise CheckpointError(
                    f"{files[name, part]} is {list(tensor.shape)}, and its parameter {list(shape)}"
                )
            self._tensors.setdefault(name, {})[part] = (
                tensor if tensor.shape == shape else Reshaped(shape, tensor)
            )
        whole = [name for name, parts in self._tensors.items() if set(MOMENTS) <= parts.keys()]
        if whole and len(whole) < len(shapes):
            lost = next(name for name in shapes if name not in whole)
            raise CheckpointError(
                f"{folder} has moments of {plain(whole[0])}, and not those of {plain(lost)}"
            )
        if not whole:  # those of another optimizer, or none
            self._tensors = {name: {WEIGHT: parts[WEIGHT]} for name, parts in self._tensors.items()}
        if len(updates := {step for step in steps if step is not None}) > 1:
            raise CheckpointError(
                f"{folder} has different numbers of updates: {plain(sorted(updates))}"
            )
        if updates:
            self.progress = Progress(self.progress.steps, self.progress.samples, updates.pop())
