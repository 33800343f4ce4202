"""Folders of torch.distributed.checkpoint: the tensors and objects that their `.metadata` lists.

    folder = DistFolder(path, PickleReader())        CheckpointError if it is not one
    folder.shapes["decoder.final_layernorm.weight"]
    tensors = folder.tensors(["output_layer.weight"])    their boxes are checked; values are read later
    folder.entry("common_state/shard_0_1")           an object; None if there is none

`.metadata` is a pickle with, per tensor, its shape, its boxes, and the place of each box in a `__R_N.distcp` file, where
it is a file of torch.save (torch/distributed/checkpoint/metadata.py and filesystem.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import Boxed, FileTensor, LazyTensor, Shape
from threed.checkpoint.manifest import partition_problem
from threed.interop.pickle_reader import PickleReader, as_written_by


class DistFolder:
    """A folder; shapes: of its tensors, by name."""

    def __init__(self, path: Path, reader: PickleReader) -> None:
        self.path, self._reader = path, reader
        metadata = reader.bare(path / ".metadata")
        with as_written_by("torch.distributed.checkpoint", path):
            state = metadata.state
            self._places = {(str(key.state["fqn"]), tuple(key.state.get("offset") or ())): info.state
                            for key, info in state["storage_data"].items()}  # fmt: skip
            tensors = {str(name): entry.state for name, entry in state["state_dict_metadata"].items()
                       if entry.name.endswith(".TensorStorageMetadata")}  # fmt: skip
            self.shapes = {name: _lengths(entry["size"]) for name, entry in tensors.items()}
            self._chunks = {name: [(_lengths(c.state["offsets"]), _lengths(c.state["sizes"])) for c in entry["chunks"]]
                            for name, entry in tensors.items()}  # fmt: skip

    def entry(self, name: str) -> Any:
        """Returns an object that is an entry of its own; None if there is none."""
        info = self._places.get((name, ()))
        return None if info is None or name in self.shapes else self._read(info)

    def tensors(self, names: Sequence[str]) -> dict[str, LazyTensor]:
        """Returns tensors by name.

        Raises:
            CheckpointError: boxes leave gaps, overlap, or differ from those that are listed.
        """
        if empty := next((name for name in names if not self._chunks[name]), None):
            raise CheckpointError(f"{self.path} has no boxes of {plain(empty)}")
        for name in names:
            what, shape = f"weight of {name}", self.shapes[name]
            if problem := partition_problem(what, shape, self._chunks[name]):
                raise CheckpointError(f"{self.path}: {plain(problem)}")
        return {
            name: Boxed(self.shapes[name], [self._box(name, *box) for box in self._chunks[name]])
            for name in names
        }

    def _box(self, name: str, first: Shape, size: Shape) -> tuple[Shape, FileTensor]:
        """Returns a box of a tensor, and its first element along every dimension."""
        if (name, first) not in self._places:
            raise CheckpointError(f"{self.path} does not say where a box of {plain(name)} is")
        found = self._read(self._places[name, first])
        if not isinstance(found, FileTensor) or found.shape != size:
            problem = "has another shape than its list says"
            raise CheckpointError(f"{self.path}: a box of {plain(name)} {problem}")
        return first, found

    def _read(self, info: Mapping[str, Any]) -> Any:
        """Returns what torch.save wrote to a part of a file."""
        with as_written_by("torch.distributed.checkpoint", self.path):
            file = info["relative_path"]
            (first, length) = _lengths([info["offset"], info["length"]])
            if Path(file).name != file or not file.isprintable():
                raise CheckpointError(f"{self.path} names {plain(file)}, which is no file of it")
            if info.get("transform_descriptors"):
                problem = "has files that are compressed or encrypted: that is not read"
                raise CheckpointError(f"{self.path} {problem}")
        return self._reader.torch_file(self.path / file, first, first + length)


def _lengths(values: Iterable[Any]) -> Shape:
    """Returns numbers of elements or bytes, and raises TypeError for what is none."""
    found = tuple(values)
    if not all(type(value) is int and 0 <= value < 2**53 for value in found):
        raise TypeError(f"{plain(found)} are no lengths")
    return found
