"""The manifest of a native checkpoint: read and validated before any tensor is, and before it is written.

    manifest = read_manifest(path)               # CheckpointError, naming what is wrong; nothing else is raised
    problems = verify(path, manifest)            # the hashes of the files it names

Its hash finds damage, but is no signature: somebody who changes a manifest can change its hash too. So its structure is
checked against a schema: counters are finite and in range, names printable, files plain files of the folder, and the
boxes of every tensor hold each of its elements exactly once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from threed.checkpoint.files import CheckpointError, plain, sha256

FORMAT = "threed-checkpoint"
VERSION = 2  # 1 had neither buffers nor generators
MANIFEST = "manifest.json"
MOST_BYTES = 2**30  # of a manifest
MOST_CORNERS = 2**24  # of the boxes of one tensor: seconds of work
Corner = tuple[int, ...]


def file_of(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


# ----------------------------------------------------------------------------------------------------------- schema


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text")
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


Name = Annotated[str, Field(min_length=1, max_length=2**14), AfterValidator(_printable)]
Counter = Annotated[int, Field(ge=0, le=2**53)]  # exact as a double, too
Amount = Annotated[float, Field(ge=0, le=2**53)]
Length = Annotated[int, Field(ge=1, le=2**53)]
Dimensions = Annotated[list[Counter], Field(max_length=64)]
Lengths = Annotated[list[Length], Field(max_length=64)]
Row = Field(strict=False)  # JSON has lists for tuples
TensorBox = Annotated[tuple[Name, Name, Lengths, Dimensions, Lengths], Row]  # part, name, global shape, start, size
Buffer = Annotated[tuple[Name, Name, Dimensions], Row]  # name, dtype, shape


class _Entry(_Strict):
    """A file of the checkpoint, and what is in it."""

    file: Annotated[Name, Field(max_length=100)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Counter
    boxes: list[TensorBox]
    buffers: list[Buffer] = []
    generators: list[Name] = []


class _Unused(_Strict):
    never: list[Name]
    since: dict[Name, Amount]
    first: bool


class _State(_Strict):
    """The counters of a run."""

    steps: Counter
    consumed: Counter
    updates: Amount
    skips: Amount
    extra: dict[str, Any]
    uses: dict[Name, Counter] = {}
    unused: _Unused | None = None
    loss_scale: Annotated[float, Field(gt=0)] | None = None
    good_steps: Amount | None = None
    hysteresis_left: Amount | None = None
    norm_mean: Annotated[float, Field(ge=0)] = 0.0  # of gradients
    norms: Amount = 0.0

    @model_validator(mode="after")
    def _whole_scale(self) -> _State:
        if len({value is None for value in (self.loss_scale, self.good_steps, self.hysteresis_left)}) > 1:
            raise ValueError("loss_scale, good_steps and hysteresis_left go together")
        return self


class _Model(_Strict):
    arch: Name


class _Optim(_Strict):
    name: Name


class _Data(_Strict):
    tokenizer: Name


class _Config(_Strict):
    """What is read of a configuration before `Config` itself sees it, whose keys differ between versions."""

    model: _Model
    optim: _Optim
    data: _Data


class _Manifest(_Strict):
    format: Literal["threed-checkpoint"]
    version: Literal[1, 2]
    config: _Config
    topology: dict[Name, Length]
    state: _State
    files: list[_Entry]


def check_structure(manifest: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless a manifest has the structure, the values in range, and the boxes that it must."""
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        some = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False)[:3]]
        raise CheckpointError(plain("; ".join(some))) from None
    names = [entry["file"] for entry in manifest["files"]]
    if len(set(names)) < len(names):
        raise CheckpointError("it names a file twice")
    for problem in _coverage_problems(manifest["files"]):
        raise CheckpointError(problem)


# --------------------------------------------------------------------------------------------------------- coverage


def _coverage_problems(files: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields what is wrong with the boxes of each tensor."""
    found: dict[tuple[str, str], list[tuple[Corner, Corner]]] = defaultdict(list)
    shapes: dict[str, list[int]] = {}
    for entry in files:
        for part, name, shape, start, size in entry["boxes"]:
            if shapes.setdefault(name, shape) != shape:
                yield f"{name} has shape {shapes[name]} and shape {shape}"
            if not len(start) == len(size) == len(shape):
                yield f"a box of {part} of {name} has other dimensions than {shape}"
            found[part, name].append((start, size))
    for (part, name), boxes in found.items():
        if problem := _coverage_problem(shapes[name], boxes):
            yield problem.format(f"{part} of {name}")


def _coverage_problem(shape: Sequence[int], boxes: Sequence[tuple[Corner, Corner]]) -> str:
    """Returns why boxes (start, size) are no partition of a tensor, "" if they are one."""
    if any(a + n > m for start, size in boxes for a, n, m in zip(start, size, shape, strict=True)):
        return f"a box of {{}} lies outside of its shape {list(shape)}"
    found, wanted = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    if found < wanted:
        return f"the checkpoint has {found} of {wanted} values of {{}}"
    cut = [d for d, m in enumerate(shape) if any(size[d] < m for _, size in boxes)]
    if len(boxes) << len(cut) > MOST_CORNERS:
        return "{} is cut into too many boxes"
    return "" if found == wanted and _is_partition(shape, boxes, cut) else "boxes of {} overlap"


def _is_partition(shape: Sequence[int], boxes: Sequence[tuple[Corner, Corner]], cut: Sequence[int]) -> bool:
    """Returns whether boxes hold every element of a tensor exactly once; `cut`: the dimensions that they cut.

    Their indicator functions then add up to that of the tensor. Two sums are the same if their mixed differences are,
    and those of a box are 1 or -1 at its corners and else 0: so all corners must cancel but those of the tensor.
    """
    corners: dict[Corner, int] = defaultdict(int)
    whole = ((0,) * len(shape), shape)
    for sign, some in ((1, boxes), (-1, [whole])):
        for start, size in some:
            mine: list[tuple[Corner, int]] = [((), sign)]
            for d in cut:
                a, b = start[d], start[d] + size[d]
                mine = [new for at, s in mine for new in (((*at, a), s), ((*at, b), -s))]
            for at, s in mine:
                corners[at] += s
    return not any(corners.values())


# ---------------------------------------------------------------------------------------------------------- reading


def digest(body: Mapping[str, Any]) -> str:
    """Returns the hash of a manifest without its hash entry, so that damage in counters and boxes is detected too."""
    text = json.dumps({key: value for key, value in body.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and checks the manifest of a folder: CheckpointError if it is not valid, or names files it may not."""
    file = path / MANIFEST
    try:
        manifest = json.loads(_text(file))
        stated = isinstance(manifest, dict) and digest(manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{file} cannot be read: {plain(error) or type(error).__name__}") from None
    if not stated or manifest.get("format") != FORMAT or manifest.get("version") not in (1, VERSION):
        raise CheckpointError(f"{file} is not that of a version 1 or {VERSION} {FORMAT}")
    if manifest.get("sha256") != stated:
        raise CheckpointError(f"{file} is damaged: its sha256 is not the one it states")
    try:
        check_structure(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{file} is not valid: {error}") from None
    for entry in manifest["files"]:
        _check_file(path, entry["file"], entry["size"])
    return dict(manifest)


def _text(file: Path) -> str:
    """Returns the text of a plain file; OSError for anything else: to open a pipe would wait for a writer."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            raise OSError("it is no plain file" if about.st_size <= MOST_BYTES else "it is larger than any manifest")
        with open(handle, "rb", closefd=False) as opened:
            return opened.read().decode()
    finally:
        os.close(handle)


def _check_file(path: Path, name: str, size: int) -> None:
    file = path / name
    try:
        about = None if Path(name).name != name else file.lstat()
    except FileNotFoundError:
        about = None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if about is None or not stat.S_ISREG(about.st_mode):
        raise CheckpointError(f"{file} is missing, or not a plain file of its folder")
    if about.st_size != size:
        raise CheckpointError(f"{file} has {about.st_size} bytes, not {size}: it is damaged")


def verify(path: Path, manifest: Mapping[str, Any], index: int = 0, of: int = 1) -> list[str]:
    """Returns a line for each file with damaged contents; checks every `of`-th file, from `index` on."""
    problems = (_content_problem(path / entry["file"], entry["sha256"]) for entry in manifest["files"][index::of])
    return [problem for problem in problems if problem]


def _content_problem(file: Path, wanted: str) -> str | None:
    try:
        return None if sha256(file) == wanted else f"{file} is damaged: its sha256 differs from the manifest's"
    except OSError as error:
        return f"{file} cannot be read: {error}"
