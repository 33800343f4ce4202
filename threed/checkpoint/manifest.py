"""Reads, validates and writes the manifest of a native checkpoint.

    finish(path, head, entries)         merges the entries of all ranks, and publishes the folder
    manifest = read_manifest(path)      raises only CheckpointError, with the reason
    problems = verify(path, manifest)   checks the hashes of the files in the manifest

A manifest contains its own hash. The hash detects damage but is not a signature, because anyone who
edits a manifest can also recompute the hash. So the contents of a manifest are validated, too. A
save validates them before it writes the manifest, and a load before it reads any tensor. Counters
must be finite and in range. Names must be printable. Files must be plain files of the folder, and
together they must contain each element of every tensor exactly once (`coverage_problems`).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from threed.checkpoint.files import (
    CheckpointError,
    building_place,
    checksum,
    plain,
    publish,
    tree_hash,
    write_text,
)
from threed.checkpoint.sections import digest as digest
from threed.config.renames import Renames
from threed.config.schema import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

FORMAT = "threed-checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
MOST_BYTES = 2**30  # Maximum size of a manifest, in bytes.
# Tensors are saved in boxes (blocks), and the search for overlapping boxes compares all pairs. So
# the sum over tensors of (number of boxes)^2 * (number of dimensions) is limited to this number. At
# the limit, the search takes seconds.
MOST_PAIRS = 2**31
# Maximum number of windows in a section, summed over the section's lines (see the module
# `sections`). The limit bounds the time and memory of a load, even if the manifest is malformed.
MOST_WINDOWS = 2**20
Corner = tuple[int, ...]
FileEntry = Mapping[str, Any]
IsIntact = Callable[[Path, FileEntry], bool]


def file_of(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


# ----------------------------------------------------------------------------------------------------------- schema


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text")
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


Name = Annotated[str, Field(min_length=1, max_length=2**14), AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, le=2**53)]  # an integer that a double represents exactly
Amount = Annotated[float, Field(ge=0, le=2**53)]
Length = Annotated[int, Field(ge=1, le=2**53)]
Dimensions = Annotated[list[Count], Field(max_length=64)]
Lengths = Annotated[list[Length], Field(max_length=64)]
Row = Field(strict=False)  # accepts a list instead of a tuple, because JSON has no tuples
Buffer = Annotated[tuple[Name, Name, Dimensions], Row]  # a buffer: (name, dtype, shape)
Number = Annotated[tuple[Count, Count], Row]  # A share: (index of its section, its number).
# A piece: (name of the tensor, start, size, offset in the line).
Piece = Annotated[tuple[Name, Dimensions, Lengths, Count], Row]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _File(_Strict):
    """A file of the checkpoint.

    Attributes:
        file: name of the file.
        size: size in bytes.
        tree: hash `tree` of the file, see the module `files`; None if only `sum` was computed, as
            for a copy in memory.
        sum: hash `sum` of the file, see `files`; None if the native library was not available.
        holds: shares in the file, each as (index of the share's section, number of the share).
        buffers: (name, dtype, shape) of each buffer in the file.
        generators: names of the generators whose states the file contains.
    """

    file: Annotated[Name, Field(max_length=100)]
    size: Count
    tree: Hash | None
    sum: Hash | None
    holds: list[Number]
    buffers: list[Buffer] = Field(default_factory=list)
    generators: list[Name] = Field(default_factory=list)


class _Line(_Strict):
    length: Length
    step: Length
    pieces: Annotated[list[Piece], Field(min_length=1)]


class _Section(_Strict):
    parts: Annotated[list[Name], Field(min_length=1)]
    dtype: Literal["F64", "F32", "BF16", "F16"]
    portions: Length
    writers: Length
    lines: Annotated[list[_Line], Field(min_length=1)]


class _Unused(_Strict):
    never: list[Name]
    since: dict[Name, Amount]
    first: bool


class _State(_Strict):
    """The counters of a run."""

    steps: Count
    consumed: Count
    updates: Amount
    skips: Amount
    extra: dict[str, Any]
    uses: dict[Name, Count] = Field(default_factory=dict)
    unused: _Unused | None = None
    aliases: dict[Name, Name] = Field(default_factory=dict)  # further names of tied weights
    loss_scale: Annotated[float, Field(gt=0)] | None = None
    good_steps: Amount | None = None
    hysteresis_left: Amount | None = None
    norm_mean: Annotated[float, Field(ge=0)] = 0.0  # mean gradient norm
    norms: Amount = 0.0  # number of gradient norms that `norm_mean` averages
    rates: list[Annotated[float, Field(ge=0)]] | None = None  # learning rates set by the program
    rooms: dict[Name, Annotated[float, Field(gt=1)]] = Field(default_factory=dict)  # of experts
    last_update: Annotated[  # with schedule 2bw: [gradient norm, learning rate] of the last update
        list[float | None], Field(min_length=2, max_length=2, default_factory=lambda: [0.0, 0.0])
    ]

    @model_validator(mode="after")
    def _complete_scale(self) -> _State:
        scale = (self.loss_scale, self.good_steps, self.hysteresis_left)
        if None in scale and scale != (None,) * 3:
            raise ValueError("loss_scale, good_steps and hysteresis_left go together")
        return self


class _Model(_Strict):
    arch: Name


class _Optim(_Strict):
    name: Name


class _Data(_Strict):
    tokenizer: Name


class _Config(_Strict):
    """The saved configuration: only the keys that other modules read directly from a manifest.

    All other keys are not validated here, because they may differ between versions of threed. They
    are validated when the full configuration is parsed.
    """

    model: _Model
    optim: _Optim
    data: _Data


class _Manifest(_Strict):
    """The schema of a manifest.

    Attributes:
        format: name of the format, always "threed-checkpoint".
        version: version of the format.
        config: configuration of the run that saved the checkpoint.
        topology: number of ranks of each parallel axis in that run, by name of the axis.
        state: counters of the run.
        shapes: shapes of the global tensors, by name.
        sections: descriptions of how the tensors are split, see the module `sections`.
        files: names, hashes and contents of the files.
    """

    format: Literal["threed-checkpoint"]
    version: Literal[3]
    config: _Config
    topology: dict[Name, Length]
    state: _State
    shapes: dict[Name, Lengths]
    sections: list[_Section]
    files: list[_File]


def check_structure(manifest: Mapping[str, Any], what: str = "the manifest") -> None:
    """Checks the structure and values of a manifest, without opening the files that it describes.

    Also checks that, according to the manifest, the files contain each element of every tensor
    exactly once.

    Args:
        manifest: manifest, with or without its hash.
        what: description of the manifest in the message, such as its path.

    Raises:
        CheckpointError: if the manifest is not valid.
    """
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        some = error.errors(include_input=False)[:3]
        text = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in some)
        raise CheckpointError(f"{what} is not valid: {plain(text)}") from None
    for problem in coverage_problems(manifest):
        raise CheckpointError(f"{what} is not valid: {problem}")


def parts_of(manifest: Mapping[str, Any]) -> set[str]:
    """Returns the parts (weight, exp_avg, ...) that are saved for at least one tensor."""
    return {part for section in manifest["sections"] for part in section["parts"]}


# --------------------------------------------------------------------------------------------------------- coverage


def coverage_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error text for each reason why the files do not contain every tensor exactly once.

    The files must contain each share of each section exactly once. The length and the step of a
    line must be multiples of the number of portions. The pieces of a line must not overlap. For
    each saved part of a tensor (weight, exp_avg, ...), all pieces together must partition the
    tensor. Shares, sections, lines, pieces and portions are defined in the module `sections`.

    Args:
        manifest: manifest that matches the schema (`_Manifest`).
    """
    sections, shapes = manifest["sections"], manifest["shapes"]
    names = [entry["file"] for entry in manifest["files"]]
    if len(set(names)) < len(names):
        yield "it names a file twice"
    counts = [section["portions"] * section["writers"] for section in sections]
    due = ((section, number) for section, count in enumerate(counts) for number in range(count))
    holds = sorted(tuple(pair) for entry in manifest["files"] for pair in entry["holds"])
    for have, want in zip_longest(holds, due):
        if have != want:
            yield f"files have numbers of sections twice, or not at all: {have}, not {want}"
    found: dict[tuple[str, str], list[tuple[Corner, Corner]]] = defaultdict(list)
    for number, section in enumerate(sections):
        if sum(line["length"] // line["step"] for line in section["lines"]) > MOST_WINDOWS:
            yield f"section {number} is split into too many windows"
        for line in section["lines"]:
            length, portions = line["length"], section["portions"]
            if length % portions or line["step"] % portions:
                yield f"a line of section {number} is not split evenly"
            ends = [(at, at + math.prod(size)) for *_, size, at in line["pieces"]]
            if ends[-1][1] > length or any(end > at for (_, end), (at, _) in pairwise(ends)):
                yield f"a line of section {number}: its pieces overlap, or exceed its length"
            for name, start, size, _ in line["pieces"]:
                if name not in shapes:
                    yield f"{name} has no shape"
                for part in section["parts"]:
                    found[part, name].append((start, size))
    if sum(len(boxes) ** 2 * len(shapes[name]) for (_, name), boxes in found.items()) > MOST_PAIRS:
        yield "its tensors are split into too many boxes"
    for (part, name), boxes in found.items():
        if problem := partition_problem(f"{part} of {name}", shapes[name], boxes):
            yield problem
    if unused := set(shapes) - {name for _, name in found}:
        yield f"it has no values of {min(unused)}"


def partition_problem(
    what: str, shape: Sequence[int], boxes: Sequence[tuple[Corner, Corner]]
) -> str:
    """Checks that boxes partition a tensor: they cover it and do not overlap.

    Args:
        what: name of the tensor, for the message.
        shape: shape of the tensor.
        boxes: (start, size) of each box, where start and size have one value per dimension.

    Returns:
        An error text, or "".
    """
    if any(not len(start) == len(size) == len(shape) for start, size in boxes):
        return f"a box of {what} has another number of dimensions than {list(shape)}"
    if any(a + n > m for start, size in boxes for a, n, m in zip(start, size, shape, strict=True)):
        return f"a box of {what} is outside its shape {list(shape)}"
    found, wanted = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    if found < wanted:
        return f"the checkpoint has {found} of {wanted} values of {what}"
    if len(boxes) ** 2 * len(shape) > MOST_PAIRS:
        return f"{what} is split into too many boxes"
    corners = np.array(boxes, np.int64).reshape(len(boxes), 2, len(shape))
    first, last = corners[:, 0], corners.sum(1)
    for n in range(len(boxes)):
        if ((first[:n] < last[n]) & (first[n] < last[:n])).all(1).any():
            return f"boxes of {what} overlap"
    return ""


# ---------------------------------------------------------------------------------------------------------- writing


def finish(path: Path, head: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """Writes the manifest from the entries of all ranks, and renames the folder to its final name.

    Args:
        path: final path of the checkpoint.
        head: the manifest's format, version, configuration, topology and state.
        entries: one entry per rank, with the sections and files that the rank describes.

    Raises:
        OSError: if a file cannot be written or the folder cannot be renamed.
        CheckpointError: if the manifest is not valid.
        TypeError, ValueError, RecursionError: if JSON cannot represent `head`.
    """
    # Converts the values to JSON and back, so that they are validated in the form in which a reader
    # parses them. For example, JSON turns tuples into lists.
    body = json.loads(json.dumps({**head, **joined(entries)}))
    check_structure(body, f"{path / MANIFEST}")  # prevents publishing an unreadable checkpoint
    building = building_place(path)
    write_text(building / MANIFEST, json.dumps({**body, "sha256": digest(body)}))
    publish(building, path)


def joined(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the keys "shapes", "sections" and "files" of a manifest, merged from all entries.

    Args:
        entries: one entry per rank, with the sections and files that the rank describes.
    """
    described = [both for entry in entries for both in entry["sections"]]
    # Several ranks may describe the same section. Equal descriptions have the same digest, so the
    # section is listed once.
    sections = {digest(about): about for about, _ in described}
    shapes = {name: shape for _, some in described for name, shape in some.items()}
    numbers = {digest: number for number, digest in enumerate(sections)}
    files = [file for entry in entries for file in entry["files"]]
    for file in files:
        file["holds"] = [[numbers[digest], number] for digest, number in file["holds"]]
    return {"shapes": shapes, "sections": list(sections.values()), "files": files}


def write_entry(file: Path, entry: Mapping[str, Any]) -> None:
    """Writes a rank's part of a manifest, and a hash of this part, to `file`.

    The file is written under a temporary name and then renamed, so that readers never see a partial
    file.
    """
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps({**entry, "sha256": digest(entry)}))
    scratch.rename(file)


# ---------------------------------------------------------------------------------------------------------- reading


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint folder, after checking it.

    Renamed keys and values of the saved configuration are replaced by their current spelling.

    Raises:
        CheckpointError: if the manifest cannot be read, is damaged or not valid, or has a different
            version of the format than `VERSION`.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(_text(file))
        stated = isinstance(manifest, dict) and digest(manifest)
    except FileNotFoundError:
        why = f"it has no {MANIFEST}" if path.exists() else "it does not exist"
        raise CheckpointError(_not_a_checkpoint(path, why)) from None
    except NotADirectoryError:
        raise CheckpointError(
            _not_a_checkpoint(path, "it is a file, but a checkpoint is a folder")
        ) from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {plain(error) or type(error).__name__}"
        ) from None
    version = manifest.get("version") if stated and manifest.get("format") == FORMAT else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{file} is not the manifest of a {FORMAT}")
    if version != VERSION:
        fix = f"this program reads version {VERSION}: use the version of threed that saved it"
        later = ", or a later one" if version > VERSION else ""
        raise CheckpointError(
            f"{file} is of version {plain(version)} of the format, and {fix}{later}"
        )
    if manifest.get("sha256") != stated:
        raise CheckpointError(f"{file} is damaged: its sha256 does not match its contents")
    check_structure(manifest, str(file))
    return {**manifest, "config": Renames().update(manifest["config"])}


def _not_a_checkpoint(path: Path, why: str) -> str:
    hint = did_you_mean(path)
    if path.name.endswith(".tmp"):
        hint = "it is the unfinished save of a run that was killed, or that is saving now"
    return f"{path} is not a checkpoint: {why}{hint and f'; {hint}'}"


def did_you_mean(path: Path) -> str:
    """Returns the question "did you mean ...?" for a path that is not a checkpoint, or "".

    If the path is a run folder or its `checkpoints` folder, the question names the checkpoint of
    the highest step. If the path is a file in a checkpoint, the question names this checkpoint.
    """
    if os.path.isfile(path):
        return f"did you mean {path.parent}?" if os.path.isfile(path.parent / MANIFEST) else ""
    places = [place for place in (path, path / "checkpoints") if os.path.isdir(place)]
    steps = [file.parent for place in places for file in place.glob(f"step-*/{MANIFEST}")]
    steps = [step for step in steps if step.name[5:].isdecimal()]
    return f"did you mean {max(steps, key=lambda step: int(step.name[5:]))}?" if steps else ""


def _text(file: Path) -> str:
    """Returns the text of a regular file.

    The file is opened in non-blocking mode. In blocking mode, `open` of a named pipe would wait for
    a process that writes to the pipe.

    Raises:
        OSError: if the file cannot be read, is not a regular file, or is too large.
    """
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            raise OSError(
                "it is not a regular file"
                if about.st_size <= MOST_BYTES
                else "it is larger than any manifest"
            )
        with open(handle, "rb", closefd=False) as opened:
            return opened.read().decode()
    finally:
        os.close(handle)


def verify(
    path: Path, manifest: Mapping[str, Any], index: int = 0, of: int = 1, thorough: bool = False
) -> list[str]:
    """Checks the hashes of files, and returns an error text for each missing or damaged file.

    The files to check are `manifest["files"][index::of]`. To divide the files between ranks, pass
    the rank as `index` and the number of ranks as `of`.

    Args:
        path: folder of the checkpoint.
        manifest: manifest of the checkpoint, or an excerpt that has only the key "files".
        index: index of the first file to check.
        of: distance between the indices of the files to check.
        thorough: whether to compare the SHA-256 (`tree`) of each file that has one. By default, the
            faster hash `sum` is compared if it is available, which is enough to detect damage.
    """

    def is_intact(file: Path, entry: FileEntry) -> bool:
        light = entry["sum"] is not None and not (thorough and entry["tree"] is not None)
        found = checksum(file) if light else None
        return tree_hash(file) == entry["tree"] if found is None else found == entry["sum"]

    return _problems(path, manifest["files"][index::of], is_intact)


def verified(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint folder, after checking the hashes of all files.

    Raises:
        CheckpointError: if the manifest or a file is missing or damaged.
    """
    manifest = read_manifest(path)
    if problems := verify(path, manifest, thorough=True):
        raise CheckpointError("; ".join(problems))
    return manifest


def missing(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns an error text for each file that is missing or has the wrong size; opens no file."""
    return _problems(path, manifest["files"], lambda file, entry: True)


def _problems(path: Path, entries: Iterable[FileEntry], is_intact: IsIntact) -> list[str]:
    return [p for entry in entries if (p := _problem(path / entry["file"], entry, is_intact))]


def _problem(file: Path, entry: FileEntry, is_intact: IsIntact) -> str:
    """Returns the reason why a file is missing or damaged, or ""."""
    gone = f"{file} is missing, or not a plain file of its folder"
    try:
        about = file.lstat()
        if file.name != entry["file"] or not stat.S_ISREG(about.st_mode):
            return gone
        if about.st_size != entry["size"]:
            return f"{file} has {about.st_size} bytes, not {entry['size']}: it is damaged"
        intact = is_intact(file, entry)
    except (FileNotFoundError, NotADirectoryError):
        return gone
    except (OSError, ValueError) as error:  # ValueError: the name contains a null character
        return f"{file} cannot be read: {error}"
    return "" if intact else f"{file} is damaged: its hash differs from the manifest's"
