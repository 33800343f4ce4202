"""Writes a native checkpoint in three phases, of which only the first needs the ranks to talk to each other.

    saving = prepare(path, optimizer, topology, config, state, extras)    collective: folder, space, who writes what
    saving.write(values for _, values in read(optimizer, saving.records)) this rank's files; in any thread
    saving.commit()                                                       the first rank publishes the folder
    saving.agree()                                                        collective: raises on all ranks alike

`write` takes any tensors with the values of `saving.records`, in that order. It leaves this rank's part of the
manifest, or an error, in a small file of the unfinished folder. The first rank waits for these files and publishes the
folder, in a thread while training continues. `Saver.save` is the four calls in a row.

A `Root` is a kind of place that saves go to: the disk here, the memory of a node in `copies`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from threed import collectives
from threed.atomic import building_place, publish, write_text
from threed.checkpoint import finite
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import DTYPES, CheckpointError, begin, never, plain, stream_tensors
from threed.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    check_structure,
    digest,
    file_of,
    write_entry,
)
from threed.checkpoint.sections import Held, Section, held
from threed.config import Config
from threed.disk import ELSEWHERE, why
from threed.topology import Axis, Topology
from threed.zero.optimizer import Optimizer
from threed.zero.records import Record, states

PATIENCE_S = 600.0  # how long the first rank waits for another one that writes
POLL_S = 0.02


@dataclass(frozen=True)
class Root:
    """A kind of place that saves go to.

    Attributes:
        name: The name of the threads that write there.
        durable: Whether files are flushed, and whether a program that ends waits for a save.
        elsewhere: How a user chooses another place.
    """

    name: str
    durable: bool
    elsewhere: str


DISK = Root("checkpoint", True, ELSEWHERE)


def prepare(
    path: Path, optimizer: Optimizer, topology: Topology, config: Config, state: Mapping[str, Any], extras: Extras,
    hurries: Callable[[], bool] = never,
) -> Saving:  # fmt: skip
    """Makes the unfinished folder and returns what this rank is to write. Collective; CheckpointError on every rank.

    hurries: asked meanwhile, by any thread, whether `checkpoint.write-limit-mib` does not hold any more.
    """
    everyone = topology.axis("world")
    optimizer.wait()
    mine = held(optimizer.layout, states(optimizer))
    file = SavedFile(
        file_of(everyone.index), [h for h in mine if h.number is not None], *extras.copied()
    )
    sizes = collectives.exchange(file.nbytes, everyone)
    problem, token = _begin(path, sum(sizes)) if everyone.index == 0 else (None, "")
    problem, token = collectives.exchange([problem, token], everyone)[0]
    about = head(optimizer, topology, config, state)
    limit = _share(config.checkpoint.write_limit_mib, sizes, everyone.index)
    described = [h for h in mine if h.portion == h.copy == 0]
    files = [file] if file.held or file.tensors else []
    saving = Saving(path, everyone, token, files, described, about, problem, limit, hurries)
    saving.agree()
    return saving


def head(
    optimizer: Optimizer, topology: Topology, config: Config, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a manifest without sections and files: what is saved as one thing. The host waits for it."""
    counters = {
        "updates": float(optimizer.updates),
        "skips": float(optimizer.bad.skips),
        **optimizer.scaler.state(),
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": config.model_dump(mode="json"),
        "topology": topology.sizes,
        "state": {**state, **counters, **optimizer.bad.state()},
    }


def _begin(path: Path, needed: int) -> tuple[str | None, str]:
    try:
        begin(path, MANIFEST, "checkpoint", needed)
    except OSError as error:
        return f"could not begin {path}: {why(error, path.parent, needed)}", ""
    except CheckpointError as error:
        return str(error), ""
    return None, secrets.token_hex(8)


def _share(limit_mib: float | None, sizes: Sequence[int], rank: int) -> float | None:
    """Returns a rank's share of the bytes that its node may write in a second: so much that all of it end together."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", len(sizes)))
    node = sum(sizes[rank // here * here :][:here])
    return None if limit_mib is None or not sizes[rank] else limit_mib * 2**20 * sizes[rank] / node


@dataclass(frozen=True)
class SavedFile:
    """A file of a save: numbers of sections, and other tensors (buffers, generators).

    Attributes:
        held: The sections, each with the number that the file has.
        about: The manifest's description of `tensors`.
        tensors: On the CPU, by the key in the file.
    """

    name: str
    held: Sequence[Held]
    about: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(h.nbytes for h in self.held) + sum(t.nbytes for t in self.tensors.values())

    @property
    def records(self) -> list[Record]:
        """The records of the optimizer's states in the file, in order."""
        return [record for h in self.held for record in h.extents()]

    def write(self, folder: Path, values: Iterable[Tensor], **how: Any) -> dict[str, Any]:
        """Writes the file; returns its entry of the manifest.

        Args:
            folder: Where to write it.
            values: The values of `records`, in order.
            how: The limit and durability, as for `stream_tensors`.
        """
        holds = [(h.section, number) for h in self.held if (number := h.number) is not None]
        path, stream = folder / self.name, self._stream(values)
        return {**write_file(path, holds, stream, self.tensors, **how), **self.about}

    def _stream(self, values: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the values of the sections; an empty tensor for one without elements here."""
        given = finite.checked(values, self.records)
        for h in self.held:
            left = h.numel
            if left == 0:
                yield torch.empty(0, dtype=DTYPES[h.section.dtype])
            while left > 0 and (tensor := next(given, None)) is not None:
                left -= tensor.numel()
                yield tensor.view(-1)
        yield from given


@dataclass(eq=False)
class Saving:
    """One rank's part of a save.

    Attributes:
        token: Distinguishes this save from earlier ones of the folder.
        files: What this rank writes.
        described: The sections that this rank describes, for all ranks that hold them.
        head: The manifest without sections and files.
        problem: What went wrong on this rank so far.
        limit: Bytes per second that this rank writes, at most.
        hurries: Returns whether the limit has ended.
        given_up: Set to stop waiting for other ranks.
        known: Problems of ranks that could not leave an entry.
    """

    path: Path
    everyone: Axis
    token: str
    files: list[SavedFile]
    described: list[Held]
    head: dict[str, Any]
    problem: str | None = None
    limit: float | None = None
    hurries: Callable[[], bool] = never
    given_up: threading.Event = field(default_factory=threading.Event)
    known: list[str] = field(default_factory=list)
    root: ClassVar[Root] = DISK

    def __post_init__(self) -> None:
        self._place = self.building  # the file that is written

    @property
    def records(self) -> list[Record]:
        """What this rank writes of the optimizer's state, in order."""
        return [record for file in self.files for record in file.records]

    @property
    def building(self) -> Path:
        """The folder that files are written to."""
        return building_place(self.path)

    def write(self, values: Iterable[Tensor]) -> str | None:
        """Writes this rank's files and its entry; returns what went wrong. No collective.

        Args:
            values: The values of `records`, in order. Exceptions that they raise are raised here,
                except OSError and CheckpointError.
        """
        rank = f"rank {self.everyone.index}"
        try:
            self._leave(self._entry(values))
        except OSError as error:
            self._remove()
            nbytes = sum(file.nbytes for file in self.files)
            reason = why(error, self.path.parent, nbytes, self.root.elsewhere)
            self._fail(f"{rank} could not write {self._place}: {reason}")
        except CheckpointError as error:
            self._fail(f"{rank}: {error}")
        except BaseException as error:
            reason = f"{type(error).__name__}: {plain(error)}"
            self._fail(f"{rank} could not write {self._place}: {reason}")
            raise
        return self.problem

    def _entry(self, values: Iterable[Tensor]) -> dict[str, Any]:
        """Writes the files; returns this rank's part of the manifest: sections and files."""
        how = {"limit": self.limit, "hurries": self.hurries, "durable": self.root.durable}
        stream, files = iter(values), []
        for file in self.files:  # the last one exhausts the stream, which frees the last state
            self._place = self.building / file.name
            last = file is self.files[-1]
            some = stream if last else islice(stream, len(file.records))
            files.append(file.write(self.building, some, **how))
        return {"sections": [[h.section.about, h.shapes] for h in self.described], "files": files}

    def note(self, problem: str) -> None:
        """Records an error, unless there was one before."""
        self.problem = self.problem or problem

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self._remove()
        with suppress(OSError):
            self._leave({"error": problem})

    def _remove(self) -> None:
        """Removes this rank's files: a full disk then has space for the entry with the error."""
        for file in self.files:
            with suppress(OSError):
                (self.building / file.name).unlink(missing_ok=True)

    def _leave(self, entry: Mapping[str, Any]) -> None:
        """Writes this rank's entry."""
        write_entry(self._entry_file(self.everyone.index), entry)

    def _entry_file(self, rank: int) -> Path:
        return self.building / f"entry-{rank:05d}-{self.token}.json"

    def commit(self, patience: float = PATIENCE_S) -> str | None:
        """Publishes the folder once every rank has written its part, if this is the first rank; returns what went
        wrong. No collective. patience: seconds to wait for the others."""
        if self.everyone.index == 0:
            try:
                finish(
                    self.building, self.path, self.head, self._entries(time.monotonic() + patience)
                )
            except CheckpointError as error:
                self.problem = str(error)
            except OSError as error:
                self.problem = f"could not finish {self.path}: {why(error, self.path.parent)}"
            except (TypeError, ValueError, RecursionError) as error:  # of the caller's `extra`
                self.problem = f"could not finish {self.path}: {error}"
        if self.everyone.index == 0 and self.problem is not None:
            shutil.rmtree(self.building, ignore_errors=True)
        return self.problem

    def give_up(self, problems: Sequence[str]) -> None:
        """Has the first rank wait for no part any more if some rank had a problem."""
        if problems:
            self.known = list(problems)
            self.given_up.set()

    def _entries(self, end: float) -> list[dict[str, Any]]:
        """Returns the entries of all ranks; CheckpointError with what they could not do, or if one does not come."""
        found: list[dict[str, Any]] = []
        for rank in range(self.everyone.size):
            # others may still write into the folder
            if rank == self.everyone.index and self.problem is not None:
                found.append({"error": self.problem})
                continue
            file = self._entry_file(rank)
            while not file.exists():
                if time.monotonic() > end or self.given_up.is_set():
                    late = f"rank {rank} has not written its part of {self.path} in time"
                    raise CheckpointError("; ".join(dict.fromkeys(self.known)) or late)
                time.sleep(POLL_S)
            found.append(json.loads(file.read_text()))
            file.unlink()
        problems = [entry["error"] for entry in found if "error" in entry]
        if problems:
            raise CheckpointError("; ".join(problems))
        return found

    def agree(self) -> None:
        """Raises CheckpointError on every rank if any has a problem, after removing what was written. Collective."""
        if found := collectives.problems_of_all([self.problem], self.everyone):
            if self.everyone.index == 0:
                shutil.rmtree(self.building, ignore_errors=True)
            collectives.barrier(self.everyone)
            raise CheckpointError("; ".join(found) + " (earlier checkpoints are intact)")


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
    """Writes the manifest from what every rank left, and renames the folder. Raises OSError, CheckpointError, and
    TypeError and others for a `head` that JSON cannot say."""
    # as it will be read: JSON has no tuples
    body = json.loads(json.dumps({**head, **joined(entries)}))
    try:
        check_structure(body)  # what could not be read must not count as saved
    except CheckpointError as error:
        raise CheckpointError(f"could not finish {path}: {error}") from None
    write_text(building / MANIFEST, json.dumps({**body, "sha256": digest(body)}))
    publish(building, path)


def joined(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns shapes, sections and files of a manifest, from what every rank left."""
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
