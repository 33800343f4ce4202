"""Writes a native checkpoint in three phases, of which only the first needs the ranks to talk to each other.

    saving = prepare(path, optimizer, topology, config, state, extras)    collective: folder, space, who writes what
    saving.write(values for _, values in read(optimizer, saving.records)) this rank's file; safe in another thread
    saving.commit()                                                       the first rank publishes the folder
    saving.agree()                                                        collective: raises on all ranks alike

`write` takes any tensors with the values of `saving.records`, in that order. It leaves what the manifest says of this
rank in a small file of the unfinished folder, an error too: so the first rank can wait for all of them, and publish,
in a thread of its own while training goes on. `save` is the four in a row.
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
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from threed import collectives
from threed.atomic import building_place, publish, write_text
from threed.checkpoint import finite
from threed.checkpoint.extras import Extras
from threed.checkpoint.files import DTYPES, CheckpointError, begin, never, plain, stream_tensors
from threed.checkpoint.manifest import FORMAT, MANIFEST, VERSION, check_structure, digest, file_of
from threed.checkpoint.sections import Held, Section, held
from threed.config import Config
from threed.disk import why
from threed.topology import Axis, Topology
from threed.zero.optimizer import Optimizer
from threed.zero.records import Record, read, states

PATIENCE_S = 600.0  # how long the first rank waits for another one that writes
POLL_S = 0.02


def save(
    path: Path, optimizer: Optimizer, topology: Topology, config: Config, state: Mapping[str, Any], extras: Extras,
    hurries: Callable[[], bool] = never,
) -> Path:  # fmt: skip
    """Writes the checkpoint folder `path`, whole or not at all. Collective; CheckpointError on every rank alike."""
    saving = prepare(path, optimizer, topology, config, state, extras, hurries)
    saving.write(values for _, values in read(optimizer, saving.records))
    saving.agree()  # here, a rank that has died is noticed at once
    saving.commit()
    saving.agree()
    return path


def prepare(
    path: Path, optimizer: Optimizer, topology: Topology, config: Config, state: Mapping[str, Any], extras: Extras,
    hurries: Callable[[], bool] = never,
) -> Saving:  # fmt: skip
    """Makes the unfinished folder and returns what this rank is to write. Collective; CheckpointError on every rank.

    hurries: asked meanwhile, by any thread, whether `checkpoint.write-limit-mib` does not hold any more.
    """
    everyone = topology.axis("world")
    optimizer.wait()
    extras.ready()
    mine = held(optimizer.layout, states(optimizer))
    said, values = extras.entries()
    beside = {
        key: value.to("cpu", copy=True) for key, value in values.items()
    }  # the next step may change them
    nbytes = sum(h.nbytes for h in mine) + sum(tensor.nbytes for tensor in beside.values())
    sizes = collectives.exchange(nbytes, everyone)
    problem, token = _begin(path, sum(sizes)) if everyone.index == 0 else (None, "")
    problem, token = collectives.exchange([problem, token], everyone)[0]
    about = head(optimizer, topology, config, state)
    limit = _share(config.checkpoint.write_limit_mib, sizes, everyone.index)
    described = mine if topology.data.index == 0 else []
    mine = [h for h in mine if h.number is not None]
    saving = Saving(
        path, everyone, token, mine, described, said, beside, about, problem, limit, hurries
    )
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


@dataclass(eq=False)
class Saving:
    """A checkpoint in the making, as one rank has it.

    token: tells this save from earlier ones of the folder. mine: what this rank writes of the optimizer's state.
    described: the sections that it describes, for all that hold them. beside: what it writes besides, as `said`.
    head: the manifest without sections and files. problem: what went wrong here, so far.
    """

    path: Path
    everyone: Axis
    token: str
    mine: list[Held]
    described: list[Held]
    said: dict[str, Any]
    beside: dict[str, Tensor]
    head: dict[str, Any]
    problem: str | None = None
    limit: float | None = None  # bytes that this rank writes in a second, at most
    hurries: Callable[[], bool] = never  # whether that does not hold any more
    given_up: threading.Event = field(
        default_factory=threading.Event
    )  # set: do not wait for others any more
    known: list[str] = field(
        default_factory=list
    )  # what is known otherwise of ranks that could not write

    @property
    def records(self) -> list[Record]:
        """What this rank writes of the optimizer's state, in order."""
        return [record for h in self.mine for record in h.extents()]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in this rank's file."""
        return sum(h.nbytes for h in self.mine) + sum(
            tensor.nbytes for tensor in self.beside.values()
        )

    @property
    def building(self) -> Path:
        """The unfinished folder."""
        return building_place(self.path)

    @property
    def file(self) -> Path:
        """Where this rank writes its tensors."""
        return self.building / file_of(self.everyone.index)

    def write(self, values: Iterable[Tensor]) -> str | None:
        """Writes this rank's file, flushed to the disk; returns what went wrong. No collective.

        values: those of `records`, in order. What else they raise than OSError and CheckpointError is raised here.
        """
        rank = self.everyone.index
        try:
            self._leave(self._entry(values))
        except OSError as error:
            self._remove()
            self._fail(
                f"rank {rank} could not write {self.file}: {why(error, self.path.parent, self.nbytes)}"
            )
        except CheckpointError as error:
            self._fail(f"rank {rank}: {error}")
        except BaseException as error:
            self._fail(
                f"rank {rank} could not write {self.file}: {type(error).__name__}: {plain(error)}"
            )
            raise
        return self.problem

    def _entry(self, values: Iterable[Tensor]) -> dict[str, Any]:
        """Writes the file; returns what the first rank needs to know: its entry of the manifest, and sections."""
        sections = [[h.section.about, h.shapes] for h in self.described]
        if not (self.mine or self.beside):
            return {"sections": sections}
        holds = [(h.section, number) for h in self.mine if (number := h.number) is not None]
        entry = write_file(
            self.file, holds, self._stream(values), self.beside, self.limit, self.hurries
        )
        return {"sections": sections, "entry": {**entry, **self.said}}

    def _stream(self, values: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the values of the sections; one of which this rank has no element is an empty tensor."""
        given = finite.checked(values, self.records)
        for h in self.mine:
            left = h.numel
            if left == 0:
                yield torch.empty(0, dtype=DTYPES[h.section.dtype])
            while left > 0 and (tensor := next(given, None)) is not None:
                left -= tensor.numel()
                yield tensor.view(-1)
        yield from given

    def note(self, problem: str) -> None:
        """Records an error, unless there was one before."""
        self.problem = self.problem or problem

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self._remove()
        with suppress(OSError):
            self._leave({"error": problem})

    def _remove(self) -> None:
        """Removes what was written here: a full disk then has room for the few bytes that say so."""
        with suppress(OSError):
            self.file.unlink(missing_ok=True)

    def _leave(self, entry: Mapping[str, Any]) -> None:
        """Leaves this rank's entry for the first rank: by a rename, so that it is never seen in part."""
        place = self._entry_file(self.everyone.index)
        scratch = place.with_suffix(".part")
        scratch.write_text(json.dumps(entry))
        scratch.rename(place)

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
            if (
                rank == self.everyone.index and self.problem is not None
            ):  # others may still write into the folder
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
    limit: float | None = None,
    hurries: Callable[[], bool] = never,
) -> dict[str, Any]:
    """Writes a file, flushed to the disk, and returns its entry of the manifest.

    Args:
        holds: the sections in the file, and the number of each.
        values: those of the sections, in order, each in one or several parts [n].
        extra: other tensors, by name.
        limit, hurries: see `files.write_hashed`.
    """
    about: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        str(key): (DTYPES[section.dtype], (section.numel(number),))
        for key, (section, number) in enumerate(holds)
    }
    about |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in extra.items()}
    named = [[section.digest, number] for section, number in holds]
    metadata = {str(key): f"{digest} {number}" for key, (digest, number) in enumerate(named)}
    hashes = stream_tensors(path, about, chain(values, extra.values()), metadata, limit, hurries)
    return {"file": path.name, **hashes._asdict(), "size": path.stat().st_size, "holds": named}


def finish(
    building: Path, path: Path, head: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the manifest from what every rank left, and renames the folder. Raises OSError, CheckpointError, and
    TypeError and others for a `head` that JSON cannot say."""
    body = json.loads(
        json.dumps({**head, **joined(entries)})
    )  # as it will be read: JSON has no tuples
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
    files = [entry["entry"] for entry in entries if "entry" in entry]
    for file in files:
        file["holds"] = [[numbers[digest], number] for digest, number in file["holds"]]
    return {"shapes": shapes, "sections": list(sections.values()), "files": files}
