"""A run's copies in its machines' memory, and what a start resumes from: memory, or the newest checkpoint.

    memory = Memory(engine, folder)             nothing happens unless `checkpoint.memory-every` asks for it
    extra = resume(engine, folder, retention, memory)
    memory.begin(note)                          after the start's state is known, before the first step
    memory.save_if_due(step, extra)             after a step; written while training goes on
    with memory.ending(): ...                   an error leaves what is being written some seconds to end
    memory.remove()                             the run has ended well

Ranks that torchrun starts again, on as many machines, fewer or more, find in memory the newest step of which the
machines that are left have everything; a file of the run folder (`node_memory.Record`) says which steps count.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from threed import collectives
from threed.checkpoint import native, resuming
from threed.checkpoint.copies import Copies
from threed.checkpoint.files import CheckpointError, RunFolderError, in_units
from threed.checkpoint.node_memory import (
    COPIES,
    ELSEWHERE,
    RECORD,
    Machines,
    Place,
    Record,
    base,
    too_small,
)
from threed.checkpoint.retention import Retention, after_restart, candidates
from threed.checkpoint.union import Found, Loading, look
from threed.disk import why
from threed.engine import Engine
from threed.interop.huggingface.folder import is_hf_folder
from threed.metrics import BadStepsError
from threed.topology import Axis
from threed.zero.replicas import ReplicaError

PATIENCE_S = 10.0  # for copies that are written when a run fails


class Memory:
    """The copies of a run. every: steps between copies, 0 for none.

    Collective, as all its methods but `finish`. RunFolderError on every rank where a machine has no place for them.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self._note: Callable[[str], None] = print
        self.every = engine.config.checkpoint.memory_every or 0
        self.world = engine.topology.axis("world")
        self.copies: Copies | None = None
        self.taken: tuple[int, int] | None = None  # the save that this start took
        self._told = ""
        self._again = False
        if not self.every:
            if self.world.index == 0:
                (folder / RECORD).unlink(
                    missing_ok=True
                )  # a run without copies goes another way than theirs
            return
        self.record = _record(folder, self.world)
        self.place = self._agreed(lambda: Place(self.record.run))
        self.machines = Machines(self.place, self.world)
        mine = self._agreed(self._begin_here)
        self._again = any(collectives.exchange(mine, self.world))
        if not self._again and engine.config.checkpoint.resume != "auto" and self.machines.first:
            self.place.keep()  # else a restart of this start would find it

    def _begin_here(self) -> bool:
        """Makes this machine's folder; returns whether it was this launcher's before."""
        if not self.machines.first:
            return False
        mine = "TORCHELASTIC_RUN_ID" in os.environ and self.place.is_this_launchers()
        self.place.begin()
        self.place.sweep()
        return mine

    def _agreed(self, act: Callable[[], Any]) -> Any:
        """Does something that may raise RunFolderError, which then all ranks raise."""
        result, problem = None, ""
        try:
            result = act()
        except RunFolderError as error:
            problem = str(error)
        except OSError as error:
            reason = why(error, base(), elsewhere=ELSEWHERE)
            problem = f"copies in memory cannot be begun in {base()} on {platform.node()}: {reason}"
        collectives.raise_together([problem], self.world, RunFolderError)
        return result

    # ---------------------------------------------------------------------------------------------------------- start

    def found(self, resume: str) -> list[Found]:
        """Returns the saves in memory, newest first, if this start may take one: with "auto", or where torchrun started
        the ranks again."""
        if not self.every or not (resume == "auto" or self._again):
            return []
        return look(self.place, self.machines, self.record, self.world, self.engine.topology.device)

    def load(self, found: Found) -> dict[str, Any]:
        """Loads a save; CheckpointError on every rank where it cannot be. Returns what was saved with it."""
        if found.problem:
            raise CheckpointError(f"step {found.step} is not whole in memory: {found.problem}")
        engine = self.engine
        others = resuming.model_differences(found.manifest, engine.config)
        others += resuming.optimizer_differences(
            found.manifest, engine.config, engine.optimizer.rule.state_names
        )
        if others:  # as with a checkpoint: a start anew would drop it
            raise RunFolderError(
                f"step {found.step} of this run is in memory, and {'; '.join(others)}"
            )
        loading = Loading(self.place, self.machines, engine.topology)
        extra: dict[str, Any] = loading.load(found, engine.optimizer, engine.extras, engine.load)
        self.taken = found.epoch, found.step
        return extra

    def begin(self, note: Callable[[str], None]) -> None:
        """Drops the copies that this start did not load, and prepares to save.

        Args:
            note: prints a line on rank 0.

        Raises:
            RunFolderError: if there is too little memory.
        """
        self._note = note
        if not self.every:
            return
        engine = self.engine
        if self.machines.first:
            self.place.keep(*(self.taken or ()))
        self.record = self.record.next(self.taken)
        if self.world.index == 0:
            self.record.write(self.folder)
        replicate = engine.config.run.replicate == "neighbour"
        self.copies = Copies(
            engine.optimizer, engine.topology, engine.config, engine.extras, self.place, self.machines,
            self.record.epoch, replicate,
        )  # fmt: skip
        sizes = collectives.exchange([self.copies.nbytes, self.copies.sent], self.world)
        held = [0] * self.machines.count
        for rank, (own, sent) in enumerate(sizes):
            held[self.machines.of[rank]] += own
            held[self.machines.of[self.machines.neighbour(rank)]] += sent
        needed = COPIES * held[self.machines.mine]
        problem = too_small(self.place, needed) if self.machines.first else ""
        collectives.raise_together([problem], self.world, RunFolderError)
        machines = f"{self.machines.count} machine{'s' * (self.machines.count > 1)}"
        copies = (
            ", with a neighbour's copies"
            if self.copies.neighbour
            else ", no neighbour to keep more" * replicate
        )
        often = "each step" if self.every == 1 else f"every {self.every} steps"
        self._note(
            f"memory     {often} in {self.place.folder}, {in_units(COPIES * max(held))} on each of {machines}{copies}"
        )

    # ---------------------------------------------------------------------------------------------------------- steps

    def save_if_due(self, step: int, extra: Callable[[], Mapping[str, Any]]) -> None:
        """Begins to copy the state of a step. extra: what a checkpoint keeps beside."""
        if self.copies is None or step % self.every or self.engine.bad_steps():
            return  # in a row of skipped steps the state from before it stays, as with checkpoints
        self.copies.save(self.engine.counters(extra()))
        if self.copies.problem and self.copies.problem != self._told:
            self._told = self.copies.problem
            self._note(
                f"no copies in memory of the step before {step}: {self._told}; training goes on"
            )

    def finish(self, patience: float = PATIENCE_S) -> None:
        """Lets copies that are written end. Not collective, in any thread."""
        if self.copies is not None:
            self.copies.finish(patience)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Where the block ends by an error, copies that are written have some seconds to end."""
        try:
            yield
        except (
            BadStepsError,
            ReplicaError,
        ):  # on all ranks alike: the states themselves may be wrong
            self.drop()
            raise
        except Exception:
            self.finish()
            raise

    def drop(self) -> None:
        """Leaves nothing in memory for a next start. Not collective."""
        if self.copies is None:
            return
        self.finish()  # or its thread would make anew what is removed
        if self.machines.first:
            self.place.keep()

    def remove(self) -> None:
        """Removes the copies: all is saved."""
        if self.copies is None:
            return
        self.copies.end()
        collectives.barrier(self.world)
        if self.machines.first:
            self.place.remove()


def _record(folder: Path, everyone: Axis) -> Record:
    """Returns the first rank's record of a run folder. Collective."""
    mine = Record.of(folder)
    run, epoch, base = collectives.exchange([mine.run, mine.epoch, mine.base], everyone)[0]
    return Record(run, epoch, None if base is None else (base[0], base[1]))


# ----------------------------------------------------------------------------------------------------------- resuming


def resume(engine: Engine, folder: Path, retention: Retention, memory: Memory) -> dict[str, Any]:
    """Loads the newest state that is whole; returns what was saved with it, or nothing. Collective.

    Of what is returned `path` is the checkpoint, or where one of that step would be; `resumed` says it for people;
    `problems` are of newer ones; `saved`: the step is on the disk; `manifest`: of a native checkpoint.
    """
    asked, world = engine.config.checkpoint.resume, engine.topology.axis("world")
    first = collectives.exchange(after_restart(folder, asked), world)[0]
    in_memory = memory.found(first)
    begun_from = first if in_memory and first not in ("auto", "none") else ""
    first = "auto" if in_memory else first
    paths = collectives.exchange([str(path) for path in candidates(folder, first)], world)[0]
    problems: list[str] = []
    refused: list[tuple[str, str]] = []
    tried = _in_order(paths, in_memory)
    if begun_from:  # where nothing of this run's own can be read, it begins again where it began
        tried.append((begun_from, None))
    for path, copy in tried:
        try:
            extra = engine.load(path) if copy is None else memory.load(copy)
        except CheckpointError as error:
            if first != "auto":
                raise
            problems.append(str(error))
            refused.append((path, problems[-1]))
            paths = [other for other in paths if other != path]
            continue
        if copy is None:
            saved = retention.trust(Path(path)) == f"step-{engine.steps}"
            manifest = None if is_hf_folder(Path(path)) else native.read_manifest(Path(path))
            return {
                **extra,
                "path": Path(path),
                "problems": problems,
                "saved": saved,
                "manifest": manifest,
            }
        newest = max((_step(path) for path in paths), default=-1)  # of those that were not refused
        checkpoint = (
            f"the newest checkpoint is step {newest}" if newest >= 0 else "there is no checkpoint"
        )
        machines = f"the memory of {copy.machines} machine{'s' * (copy.machines > 1)}"
        text = f"step {copy.step} from {machines}; {checkpoint}"
        path = str(folder / "checkpoints" / f"step-{copy.step}")
        about = {"problems": problems, "saved": False, "resumed": text, "manifest": copy.manifest}
        return {**extra, "path": Path(path), **about}
    if problems and any(copy is None for _, copy in tried):
        none = "no checkpoint of this run can be resumed; --checkpoint.resume none starts anew and keeps them aside"
        raise CheckpointError("; ".join([*_once(refused), none]))
    return {"problems": problems} if problems else {}


def _once(refused: list[tuple[str, str]]) -> list[str]:
    """Returns why checkpoints were refused, given as (path, why): each reason once, in the words of the first.

    Where it speaks of that checkpoint, the others of which the same can be said are named behind it.
    """
    said: dict[str, list[tuple[str, str]]] = {}
    for path, reason in refused:
        said.setdefault(reason.replace(path, "") if path else reason, []).append((path, reason))
    lines = []
    for (_, first), *others in said.values():
        names = ", ".join(Path(path).name for path, reason in others if reason != first)
        lines.append(f"{first} (the same of {names})" if names else first)
    return lines


def _step(path: str) -> int:
    name = Path(path).name
    return int(name[5:]) if name.startswith("step-") and name[5:].isdecimal() else -1


def _in_order(paths: list[str], copies: list[Found]) -> list[tuple[str, Found | None]]:
    """Checkpoints and what is in memory, by falling step; of one step the checkpoint first."""
    both: list[tuple[str, Found | None]] = [(path, None) for path in paths]
    both += [("", copy) for copy in copies]
    return sorted(both, key=lambda one: -(_step(one[0]) if one[1] is None else one[1].step))
