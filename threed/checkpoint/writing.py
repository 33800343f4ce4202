"""The files of a save, and the manifest that makes them a checkpoint.

    entry = SavedFile(name, sections, about, tensors).write(folder, values)     one file of a rank
    finish(building, path, head, entries)                                       publishes the folder

An entry is a rank's part of the manifest: its files with their hashes, and the sections that it
describes (`sections`). `saving` says who writes what, and when.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from threed.atomic import publish, write_text
from threed.checkpoint import finite
from threed.checkpoint.files import DTYPES, CheckpointError, stream_tensors
from threed.checkpoint.manifest import MANIFEST, check_structure, digest
from threed.checkpoint.sections import Held, Section
from threed.zero.records import Record


@dataclass(frozen=True)
class SavedFile:
    """A file of a save: numbers of sections, and other tensors (buffers, generators).

    Attributes:
        held: Sections, each with the number that the file has.
        about: The manifest's description of `tensors`.
        tensors: On the CPU, by the key in the file.
    """

    name: str
    held: Sequence[tuple[Held, int]]
    about: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = sum(h.nbytes(number) for h, number in self.held)
        return held + sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def records(self) -> list[Record]:
        """The records of the optimizer's states in the file, in order."""
        return [record for h, number in self.held for record in h.extents(number)]

    def write(self, folder: Path, values: Iterable[Tensor], **how: Any) -> dict[str, Any]:
        """Writes the file; returns its entry of the manifest.

        Args:
            folder: Where to write it.
            values: The values of `records`, in order.
            how: The limit and durability, as for `stream_tensors`.
        """
        holds = [(h.section, number) for h, number in self.held]
        flat = (tensor.view(-1) for tensor in finite.checked(values, self.records))
        return {**write_file(folder / self.name, holds, flat, self.tensors, **how), **self.about}


def write_file(
    path: Path,
    holds: Sequence[tuple[Section, int]],
    values: Iterable[Tensor],
    extra: Mapping[str, Tensor] = MappingProxyType({}),
    **how: Any,
) -> dict[str, Any]:
    """Writes a file; returns its entry of the manifest.

    Args:
        holds: The sections in the file, and the number of each.
        values: The values of the sections, in order, each in one or several parts [n].
        extra: Other tensors, by name.
        how: The limit and durability, as for `stream_tensors`.
    """
    about: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        str(key): (DTYPES[section.dtype], (section.numel(number),))
        for key, (section, number) in enumerate(holds)
    }
    about |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in extra.items()}
    named = [[section.digest, number] for section, number in holds]
    metadata = {str(key): f"{digest} {number}" for key, (digest, number) in enumerate(named)}
    hashes = stream_tensors(path, about, chain(values, extra.values()), metadata, **how)
    return {"file": path.name, **hashes._asdict(), "size": path.stat().st_size, "holds": named}


def finish(
    building: Path, path: Path, head: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the manifest from the entries of all ranks, and publishes the folder.

    Raises:
        OSError: The disk fails.
        CheckpointError: The manifest is not valid.
        TypeError, ValueError, RecursionError: JSON cannot represent `head`.
    """
    # as it will be read: JSON has no tuples
    body = json.loads(json.dumps({**head, **joined(entries)}))
    try:
        check_structure(body)  # what could not be read must not count as saved
    except CheckpointError as error:
        raise CheckpointError(f"could not finish {path}: {error}") from None
    write_text(building / MANIFEST, json.dumps({**body, "sha256": digest(body)}))
    publish(building, path)


def joined(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns shapes, sections and files of a manifest, from the entries of all ranks."""
    shapes: dict[str, Any] = {}
    sections: dict[str, Any] = {}  # by digest: ranks that hold copies of each other say the same
    for entry in entries:
        for about, some in entry["sections"]:
            sections.setdefault(Section(about).digest, about)
            shapes |= some
    numbers = {digest: number for number, digest in enumerate(sections)}
    files = [file for entry in entries for file in entry["files"]]
    for file in files:
        file["holds"] = [[numbers[digest], number] for digest, number in file["holds"]]
    return {"shapes": shapes, "sections": list(sections.values()), "files": files}
