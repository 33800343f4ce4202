"""A run's copies in its machines' memory, and what a start resumes from: memory, or the newest checkpoint.

    memory = Memory(engine, folder)             nothing happens unless `checkpoint.memory-every` asks for it
    extra = resume(engine, folder, retention, memory)
    memory.begin(note)                          after the start's state is known, before the first step
    memory.save_if_due(step, extra)             after a step; written while training goes on
    with memory.ending(): ...                   an error leaves what is being written some seconds to end
    memory.remove()                             the run has ended well

Ranks that torchrun starts again, on as many machines, fewer or more, find in memory the newest step of which the
machines that are left have everything; a file of the run folder (`node_memory.Epochs`) says which steps count.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from threed import collectives
from threed.checkpoint import native, resuming
from threed.checkpoint.copies import Copy, Neighbour, Plan
from threed.checkpoint.files import CheckpointError, RunFolderError, in_units
from threed.checkpoint.node_memory import (
    COPIES,
    ELSEWHERE,
    RECORD,
    Epochs,
    Machines,
    Place,
    base,
    too_small,
)
from threed.checkpoint.retention import Retention, after_restart, candidates
from threed.checkpoint.union import Found, load_copy, look
from threed.disk import why
from threed.engine import Engine
from threed.interop.huggingface.folder import is_hf_folder
from threed.metrics import BadStepsError
from threed.zero.records import records
from threed.zero.replicas import ReplicaError
from threed.zero.snapshot import Room

T = TypeVar("T")
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
        self.room = Room(copies=False)
        self._writing: Copy | None = None
        self._slot = 0  # of the next copy
        self._first = True  # no copy of this start is complete
        self.taken: tuple[int, int] | None = None  # the save that this start took
        self.problem = ""  # of the newest copy that has ended
        self._told = ""
        self._again = False
        if not self.every:
            if self.world.index == 0:  # copies of an earlier start do not count any more
                (folder / RECORD).unlink(missing_ok=True)
            return
        self.record = Epochs.of(folder, self.world)
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

    def _agreed(self, act: Callable[[], T]) -> T:
        """Returns `act()`; RunFolderError on every rank if it fails on any. Collective."""

        def describe(error: OSError) -> str:
            reason = why(error, base(), elsewhere=ELSEWHERE)
            return f"copies in memory cannot be begun in {base()} on {platform.node()}: {reason}"

        return collectives.attempt_together(act, self.world, RunFolderError, describe)

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
        others += resuming.optimizer_differences(found.manifest, engine.config)
        if others:  # as with a checkpoint: a start anew would drop it
            raise RunFolderError(
                f"step {found.step} of this run is in memory, and {'; '.join(others)}"
            )
        extra = load_copy(
            found, self.place, self.machines, engine.topology, records(engine.optimizer),
            engine.buffers.persistent(), engine.load,
        )  # fmt: skip
        self.taken, self._slot = (found.epoch, found.step), 1 - found.slot
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
        engine, machines = self.engine, self.machines
        if machines.first:
            self.place.keep(self.taken or ())
        self.record = Epochs(self.record.run, self.record.epoch + 1, self.taken)
        if self.world.index == 0:
            self.record.write(self.folder)
        self.plan = Plan.of(engine.optimizer, engine.topology, machines)
        asked = engine.config.run.replicate == "neighbour"
        replicate = asked and machines.count > 1
        self.neighbour = Neighbour(engine.topology, machines) if replicate else None
        held = [0] * machines.count
        plan = self.plan
        mine = [
            sum(file.nbytes for file in plan.files),
            sum(file.nbytes for file in plan.files if file.name in plan.alone),
        ]
        for rank, (own, sent) in enumerate(collectives.exchange(mine, self.world)):
            held[machines.of[rank]] += own
            held[machines.of[machines.neighbour(rank)]] += sent * replicate
        needed = COPIES * held[machines.mine]
        problem = too_small(self.place, needed) if machines.first else ""
        collectives.raise_together([problem], self.world, RunFolderError)
        each = f"{in_units(COPIES * max(held))} on each of {_machines(machines.count)}"
        copies = (
            ", with a neighbour's copies" if replicate else ", no neighbour to keep more" * asked
        )
        often = "each step" if self.every == 1 else f"every {self.every} steps"
        self._note(f"memory     {often} in {self.place.folder}, {each}{copies}")

    # ---------------------------------------------------------------------------------------------------------- steps

    def save_if_due(self, step: int, extra: Callable[[], Mapping[str, Any]]) -> None:
        """Begins to copy the state of a step; waits for the copy before.

        Args:
            extra: Returns what a checkpoint contains besides.
        """
        if not self.every or step % self.every or self.engine.bad_steps():
            return  # in a row of skipped steps the state from before it stays, as with checkpoints
        self.save(self.engine.counters(extra()))
        if self.problem and self.problem != self._told:
            self._told = self.problem
            self._note(
                f"no copies in memory of the step before {step}: {self._told}; training goes on"
            )

    def save(self, state: Mapping[str, Any]) -> None:
        """Begins to copy the current state; waits for the copy before.

        Args:
            state: The counters of the run.
        """
        self._end()
        engine, began, save = self.engine, time.perf_counter(), [self.record.epoch, state["steps"]]
        engine.optimizer.wait()
        plan = self.plan.with_extras(engine.extras, self.machines)
        self._writing = Copy(
            self.place.slot(self._slot), self.world, "own", plan.files, plan.described,
            engine.saver.head(state), began, save=save, alone=plan.alone, neighbour=self.neighbour,
        )  # fmt: skip
        self._writing.start(engine.optimizer, self.room, now=engine.wraps_module)

    def _end(self) -> None:
        """Waits until the newest copy has ended on all ranks. Collective."""
        copy = self._writing
        if copy is None:
            return
        self.finish(None)
        self._writing = None
        problems = collectives.problems_of_all([copy.problem], self.world)
        self.problem = problems[0] if problems else ""
        if problems:
            return
        if self._first:  # of earlier starts nothing is needed any more
            if self.machines.first:
                self.place.keep(copy.save)
            collectives.barrier(self.world)
        self._first, self._slot = False, 1 - self._slot

    def finish(self, patience: float | None = PATIENCE_S) -> None:
        """Waits until the copy in progress has ended on this rank, or some seconds. Not collective, in any thread."""
        if (writing := self._writing) is not None:  # which another thread may reset
            writing.give_up(patience)

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
        if not self.every:
            return
        self.finish()  # or its thread would make anew what is removed
        if self.machines.first:
            self.place.keep()

    def remove(self) -> None:
        """Removes the copies: all is saved."""
        if not self.every:
            return
        self._end()
        collectives.barrier(self.world)
        if self.machines.first:
            self.place.remove()


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
            refused.append((path, str(error)))
            continue
        extra["problems"] = [reason for _, reason in refused]
        if copy is None:
            here = Path(path)
            saved = retention.trust(here) == f"step-{engine.steps}"
            manifest = None if is_hf_folder(here) else native.read_manifest(here)
            return {**extra, "path": here, "saved": saved, "manifest": manifest}
        steps = [_step(path) for path in paths if path not in dict(refused)]
        newest = (
            f"the newest checkpoint is step {max(steps)}" if steps else "there is no checkpoint"
        )
        text = f"step {copy.step} from the memory of {_machines(copy.machines)}; {newest}"
        here = folder / "checkpoints" / f"step-{copy.step}"
        return {**extra, "path": here, "saved": False, "manifest": copy.manifest, "resumed": text}
    if refused and any(copy is None for _, copy in tried):
        none = "no checkpoint of this run can be resumed; --checkpoint.resume none starts anew and keeps them aside"
        raise CheckpointError("; ".join([*_once(refused), none]))
    return {"problems": [reason for _, reason in refused]} if refused else {}


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


def _machines(count: int) -> str:
    return f"{count} machine{'s' * (count > 1)}"


def _step(path: str) -> int:
    name = Path(path).name
    return int(name[5:]) if name.startswith("step-") and name[5:].isdecimal() else -1


def _in_order(paths: list[str], copies: list[Found]) -> list[tuple[str, Found | None]]:
    """Checkpoints and what is in memory, by falling step; of one step the checkpoint first."""
    both: list[tuple[str, Found | None]] = [(path, None) for path in paths]
    both += [("", copy) for copy in copies]
    return sorted(both, key=lambda one: -(_step(one[0]) if one[1] is None else one[1].step))
