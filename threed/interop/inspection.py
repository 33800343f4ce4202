"""Describes a checkpoint or a Hugging Face folder; implements `threed inspect CHECKPOINT`.

info = inspect("runs/tiny/checkpoints/step-200")     checks all hashes first
info.steps, info.weights["embedding.weight"]
print(info)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.lazy_tensors import LazyTensor
from threed.checkpoint.reading import Reader
from threed.core.messages import counted
from threed.interop.huggingface.folder import HFFolder, is_hf_folder
from threed.interop.safetensors_folder import (
    SafetensorsFolder,
    is_safetensors_folder,
    read_settings,
)
from threed.zero.state import WEIGHT

Shape = tuple[int, ...]
_TITLES = {
    "hf": "a Hugging Face folder; its tensors match its configuration; it has no hashes",
    "safetensors": "an exported custom model; it has no hashes",
}


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a native checkpoint, a Hugging Face folder or an exported custom model.

    `str(info)` is the text that `threed inspect` prints.

    Attributes:
        path: the folder.
        format: "native", "hf" (Hugging Face) or "safetensors" (an exported custom model).
        arch: architecture of the model, a value of `--model.arch`.
        weights: shape of each weight, by name.
        buffers: (dtype, shape) of each persistent buffer, by name; empty for a Hugging Face folder.
        dtypes: dtypes of the tensors; empty for a native checkpoint, which has the master weights
            of the optimizer (fp32 or fp64).
        files: for a native checkpoint, the number of files that its manifest lists; else None.
        nbytes: for a native checkpoint, the total size of these files in bytes; else None.
        steps: for a native checkpoint, the number of completed optimizer steps; else None.
        consumed: for a native checkpoint, the number of samples in these steps; else None.
        topology: for a native checkpoint, the size of each parallel axis of the run that saved it,
            such as {"pp": 2, "dp": 2, "tp": 1}; else None.
    """

    path: Path
    format: str
    arch: str
    weights: Mapping[str, Shape]
    buffers: Mapping[str, tuple[str, Shape]]
    dtypes: tuple[str, ...] = ()
    files: int | None = None
    nbytes: int | None = None
    steps: int | None = None
    consumed: int | None = None
    topology: Mapping[str, int] | None = None

    @property
    def parameters(self) -> int:
        """The number of elements of all weights."""
        return sum(math.prod(shape) for shape in self.weights.values())

    def __str__(self) -> str:
        """Returns the text that `threed inspect` prints."""
        weights = [f"{name:<44} {list(shape)}" for name, shape in sorted(self.weights.items())]
        if self.files is None:
            title = _TITLES[self.format]
            model = f"model {self.arch}, {self.parameters:,} parameters, {', '.join(self.dtypes)}"
            return "\n".join([f"{self.path}: {title}", model, *weights])
        sizes = " × ".join(f"{a} {n}" for a, n in (self.topology or {}).items() if n > 1)
        lines = [
            f"{self.path}: {counted(self.files, 'file')}, {self.nbytes:,} bytes, every hash verified",
            f"after step {self.steps} and {counted(self.consumed or 0, 'sample')}",
            f"model {self.arch}, saved on {sizes or 'one rank'}",
        ]
        buffers = [
            f"{name:<44} {list(shape)} buffer, {dtype}"
            for name, (dtype, shape) in sorted(self.buffers.items())
        ]
        return "\n".join([*lines, *weights, *buffers])


def inspect(path: str | Path) -> CheckpointInfo:
    """Checks a checkpoint, a Hugging Face folder or an exported model, and returns its contents.

    No process group is required. Weights are not loaded. For a native checkpoint, every file is
    read to check its hash. A Hugging Face folder has no hashes; instead, the names and shapes of
    its tensors are compared with its config.json.

    Args:
        path: the folder of a native checkpoint, a Hugging Face folder, or the safetensors folder
            that `convert` writes for a custom model.

    Returns:
        The contents of the folder, which `print(inspect(path))` prints as text.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or is damaged; the message lists all
            problems.

    Example:

        info = threed.checkpoint.inspect("runs/tiny/checkpoints/step-200")
        print(info.steps, info.parameters)
    """
    path = Path(path)
    if is_safetensors_folder(path):
        return _of_export(path)
    return _of_folder(path) if is_hf_folder(path) else _of_checkpoint(path)


def _of_checkpoint(path: Path) -> CheckpointInfo:
    manifest = native.read_manifest(path)
    if damaged := native.verify(path, manifest, thorough=True):
        raise CheckpointError("\n".join(damaged))
    reader = Reader(path, manifest)
    return CheckpointInfo(
        path,
        "native",
        manifest["config"]["model"]["arch"],
        reader.shapes,
        {name: (dtype, tuple(shape)) for name, (_, dtype, shape) in reader.buffers.items()},
        files=len(manifest["files"]),
        nbytes=sum(entry["size"] for entry in manifest["files"]),
        steps=manifest["state"]["steps"],
        consumed=manifest["state"]["consumed"],
        topology=manifest["topology"],
    )


def _of_export(path: Path) -> CheckpointInfo:
    tensors = SafetensorsFolder(path)
    shapes = {name: tuple(tensors[name].shape) for name in tensors}
    arch = read_settings(path)["model"]["arch"]
    return CheckpointInfo(path, "safetensors", arch, shapes, {}, _dtypes(tensors.values()))


def _dtypes(tensors: Iterable[Tensor | LazyTensor]) -> tuple[str, ...]:
    return tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def _of_folder(path: Path) -> CheckpointInfo:
    folder = HFFolder(path)
    if problems := list(folder.problems()):
        raise CheckpointError("\n".join(problems))
    dtypes = _dtypes(folder.tensor(WEIGHT, name) for name in folder.shapes)
    return CheckpointInfo(path, "hf", folder.model.arch, folder.shapes, {}, dtypes)
