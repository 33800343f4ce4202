"""Reads checkpoint folders of torch.distributed.checkpoint.

    folder = DistFolder(path, PickleReader())            raises CheckpointError for other folders
    folder.shapes["decoder.final_layernorm.weight"]
    tensors = folder.tensors(["output_layer.weight"])    checks the chunks; reads values on demand
    folder.entry("common_state/shard_0_1")               a pickled object, or None

The file `.metadata` is a pickle. For each tensor, it has the shape, and the offset and size of each
chunk into which the tensor is split. For each chunk, it has the name of a file `__R_N.distcp` and a
byte range in this file. The bytes in this range are the output of torch.save
(torch/distributed/checkpoint/metadata.py and filesystem.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.checkpoint.files import CheckpointError, plain
from threed.checkpoint.lazy_tensors import Boxed, FileTensor, LazyTensor, Shape
from threed.checkpoint.manifest import partition_problem
from threed.interop.pickles.pickle_reader import PickleReader, as_written_by


class DistFolder:
    """A checkpoint folder of torch.distributed.checkpoint.

    Args:
        path: the folder, which contains `.metadata`.
        reader: the reader of the pickles; its limits apply to all files of the folder together.

    Attributes:
        shapes: the shape of each tensor, by name.

    Raises:
        CheckpointError: if `.metadata` cannot be read.
    """

    def __init__(self, path: Path, reader: PickleReader) -> None:
        self.path, self._reader = path, reader
        metadata = reader.bare(path / ".metadata")
        with as_written_by("torch.distributed.checkpoint", path):
            state = metadata.state
            self._locations = {(str(key.state["fqn"]), tuple(key.state.get("offset") or ())): info.state
                               for key, info in state["storage_data"].items()}  # fmt: skip
            tensors = {str(name): entry.state for name, entry in state["state_dict_metadata"].items()
                       if entry.name.endswith(".TensorStorageMetadata")}  # fmt: skip
            self.shapes = {name: _lengths(entry["size"]) for name, entry in tensors.items()}
            self._chunks = {name: [(_lengths(c.state["offsets"]), _lengths(c.state["sizes"])) for c in entry["chunks"]]
                            for name, entry in tensors.items()}  # fmt: skip

    def entry(self, name: str) -> Any:
        """Returns the object that was saved under `name`; None for a missing object or a tensor."""
        info = self._locations.get((name, ()))
        return None if info is None or name in self.shapes else self._read(info)

    def tensors(self, names: Sequence[str]) -> dict[str, LazyTensor]:
        """Returns tensors by name; their values are read on demand.

        Raises:
            CheckpointError: if the chunks of a tensor leave gaps or overlap, or a chunk does not
                have the shape that `.metadata` lists.
        """
        if empty := next((name for name in names if not self._chunks[name]), None):
            raise CheckpointError(f"{self.path} has no chunks of {plain(empty)}")
        for name in names:
            what, shape = f"weight of {name}", self.shapes[name]
            if problem := partition_problem(what, shape, self._chunks[name]):
                raise CheckpointError(f"{self.path}: {plain(problem)}")
        return {
            name: Boxed(self.shapes[name], [self._chunk(name, *box) for box in self._chunks[name]])
            for name in names
        }

    def _chunk(self, name: str, first: Shape, size: Shape) -> tuple[Shape, FileTensor]:
        """Returns (offset of a chunk in its tensor, the chunk as a tensor).

        Args:
            name: name of the tensor.
            first: offset of the chunk in the tensor, per dimension.
            size: size of the chunk, per dimension.
        """
        if (name, first) not in self._locations:
            raise CheckpointError(f"{self.path} has a chunk of {plain(name)} without a location")
        found = self._read(self._locations[name, first])
        if not isinstance(found, FileTensor) or found.shape != size:
            problem = "does not have the listed shape"
            raise CheckpointError(f"{self.path}: a chunk of {plain(name)} {problem}")
        return first, found

    def _read(self, info: Mapping[str, Any]) -> Any:
        """Returns the object that torch.save wrote to a byte range of a file.

        Args:
            info: location of the object in `.metadata`: name of the file, offset and length.
        """
        with as_written_by("torch.distributed.checkpoint", self.path):
            file = info["relative_path"]
            (first, length) = _lengths([info["offset"], info["length"]])
            if Path(file).name != file or not file.isprintable():
                raise CheckpointError(f"{self.path} names {plain(file)}, which is not a file in it")
            if info.get("transform_descriptors"):
                problem = "has compressed or encrypted files, which are not supported"
                raise CheckpointError(f"{self.path} {problem}")
        return self._reader.torch_file(self.path / file, first, first + length)


def _lengths(values: Iterable[Any]) -> Shape:
    """Returns values as a tuple; raises TypeError unless all values are integers in [0, 2**53)."""
    found = tuple(values)
    if not all(type(value) is int and 0 <= value < 2**53 for value in found):
        raise TypeError(f"{plain(found)} are not lengths")
    return found
