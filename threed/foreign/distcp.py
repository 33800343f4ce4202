"""A folder of torch.distributed.checkpoint: what its `.metadata`, a pickle, says, and the tensors and objects in it.

    folder = DistFolder(path)                        CheckpointError for what is none, and below for what is damaged
    folder.shapes["decoder.final_layernorm.weight"]
    boxes = folder.tensors(["output_layer.weight"])  by name; which boxes there are is checked, values are read later
    folder.entry("common_state/shard_0_1")           an object; None where there is none

`.metadata` says of each tensor its shape, its boxes, and where in a `__R_N.distcp` file each box is, as torch.save
writes it (torch/distributed/checkpoint/metadata.py and filesystem.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.checkpoint import coverage
from threed.checkpoint.files import CheckpointError, plain
from threed.foreign.outlines import Job, Place, outline
from threed.foreign.spread import Boxed, Boxes, Shape, Spread

Pieces = list[tuple[Shape, Spread]]  # the first element along every dimension, and a box


class DistFolder:
    """A folder; shapes: of its tensors, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (metadata,) = outline([Job(path / ".metadata", kind="pickle")])
        try:
            state = metadata.state
            self._places = {(str(key.state["fqn"]), tuple(key.state.get("offset") or ())): info.state
                            for key, info in state["storage_data"].items()}  # fmt: skip
            tensors = {str(name): entry.state for name, entry in state["state_dict_metadata"].items()
                       if entry.name.endswith(".TensorStorageMetadata")}  # fmt: skip
            self.shapes: dict[str, Shape] = {
                name: _lengths(entry["size"]) for name, entry in tensors.items()
            }
            self._chunks = {name: [(_lengths(c.state["offsets"]), _lengths(c.state["sizes"])) for c in entry["chunks"]]
                            for name, entry in tensors.items()}  # fmt: skip
        except (
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
            IndexError,
            OverflowError,
        ) as error:
            text = f"{type(error).__name__}: {plain(error)}"
            raise CheckpointError(
                f"{path} is not as torch.distributed.checkpoint writes it ({text})"
            ) from None

    def entry(self, name: str) -> Any:
        """Returns an object that is an entry of its own; None where there is none."""
        info = self._places.get((name, ()))
        return None if info is None or name in self.shapes else outline([self._job(info)])[0]

    def tensors(self, names: Sequence[str]) -> dict[str, Boxes]:
        """Returns tensors by name. CheckpointError where boxes leave holes, overlap, or are other ones than listed."""
        return {
            name: Boxed(self.shapes[name], pieces) for name, pieces in self.pieces(names).items()
        }

    def pieces(self, names: Sequence[str]) -> dict[str, Pieces]:
        """Returns the boxes of tensors, by name."""
        if empty := next((name for name in names if not self._chunks[name]), None):
            raise CheckpointError(f"{self.path} has no boxes of {plain(empty)}")
        listed = [
            ["weight", name, list(self.shapes[name]), *map(list, box)]
            for name in names
            for box in self._chunks[name]
        ]
        for problem in coverage.of_boxes([{"boxes": listed}]):
            raise CheckpointError(f"{self.path}: {plain(problem)}")
        keys = [(name, first) for name in names for first, _ in self._chunks[name]]
        if missing := next(
            (name for name, first in keys if (name, first) not in self._places), None
        ):
            raise CheckpointError(f"{self.path} does not say where a box of {plain(missing)} is")
        found = dict(
            zip(keys, outline([self._job(self._places[key]) for key in keys]), strict=True)
        )
        pieces: dict[str, Pieces] = {}
        for name in names:
            for first, size in self._chunks[name]:
                place = found[name, first]
                if not isinstance(place, Place) or place.shape != size:
                    raise CheckpointError(
                        f"{self.path}: a box of {plain(name)} has another shape than its list says"
                    )
                pieces.setdefault(name, []).append((first, Spread(place.shape, place)))
        return pieces

    def _job(self, info: Mapping[str, Any]) -> Job:
        try:
            file, (first, length) = (
                info["relative_path"],
                _lengths([info["offset"], info["length"]]),
            )
            if Path(file).name != file or not file.isprintable():
                raise CheckpointError(f"{self.path} names {plain(file)}, which is no file of it")
            if info.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self.path} has files that are compressed or encrypted: that is not read"
                )
            return Job(self.path / file, first, first + length)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            text = f"{type(error).__name__}: {plain(error)}"
            raise CheckpointError(
                f"{self.path} is not as torch.distributed.checkpoint writes it ({text})"
            ) from None


def _lengths(values: Iterable[Any]) -> Shape:
    """Returns numbers of elements or bytes, and raises TypeError for what is none."""
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise TypeError(f"{plain(found)} are no lengths")
    return found
