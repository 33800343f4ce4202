"""Keeps copies of a run's state in its machines' memory, and resumes from a copy or a checkpoint.

    memory = Memory(engine, folder)             # inactive unless `checkpoint.memory-every` is set
    extra = resume(engine, folder, retention, memory)
    memory.begin(note)                          # after the state is loaded, before the first step
    memory.save_if_due(step, extra)             # after a step; a thread writes the copy
    with memory.ending(): ...                   # on an error, waits some seconds for the copy
    memory.remove()                             # after the run has finished successfully

If torchrun restarts the ranks, on the same or another number of machines, they resume from the
newest step for which the remaining machines together have a complete state. Each launch or restart
of the ranks is called a start. A file in the run folder (`node_memory.Epochs`) counts the starts
and records which copies may be loaded.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from threed.checkpoint import native
from threed.checkpoint.copies import Copy, Neighbor, Plan
from threed.checkpoint.files import CheckpointError, RunFolderError, in_units
from threed.checkpoint.loading_copies import Found, load_copy, look
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
from threed.checkpoint.run_folder import (
    Retention,
    after_restart,
    candidates,
    model_differences,
    optimizer_differences,
)
from threed.core.disk import why
from threed.core.messages import counted
from threed.distributed import collectives
from threed.engine import Engine
from threed.interop.huggingface.folder import is_hf_folder
from threed.zero.replicas import ReplicaError
from threed.zero.snapshot import Room
from threed.zero.state import records
from threed.zero.step_metrics import BadStepsError

T = TypeVar("T")
PATIENCE_S = 10.0  # seconds to wait for a copy in progress when the run fails


class Memory:
    """The copies of a run in memory. All methods are collective unless stated otherwise.

    Args:
        engine: engine with the state to copy.
        folder: the run folder.

    Raises:
        RunFolderError: on every rank, if a machine has no folder in memory for the copies.

    Attributes:
        every: number of steps between copies; 0 for no copies.
        taken: (epoch, step) of the copy from which the ranks resumed, or None. The epoch is the
            number of the start in which the copy was written.
        problem: error message of the newest finished copy; "" if it succeeded.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self._note: Callable[[str], None] = print
        self.every = engine.config.checkpoint.memory_every or 0
        self.world = engine.topology.axis("world")
        self.room = Room(copies=False)
        self._writing: Copy | None = None
        self._slot = 0  # slot (0 or 1) to which the next copy is written
        self._first = True  # True as long as this process has not completed a copy
        self.taken: tuple[int, int] | None = None
        self.problem = ""
        self._reported = ""
        self._restarted = False
        if not self.every:
            # Removes the record of copies, so that a later start loads no copies of earlier starts.
            if self.world.index == 0:
                (folder / RECORD).unlink(missing_ok=True)
            return
        self.record = Epochs.of(folder, self.world)
        self.place = self._on_all_ranks(lambda: Place(self.record.run))
        self.machines = Machines(self.place, self.world)
        restarted = self._on_all_ranks(self._begin_folder)
        self._restarted = any(collectives.exchange(restarted, self.world))
        if (
            not self._restarted
            and engine.config.checkpoint.resume != "auto"
            and self.machines.first
        ):
            self.place.keep()  # removes old copies, because a later restart would load them

    def _begin_folder(self) -> bool:
        """Creates this machine's folder in memory. Only the first rank of the machine does so.

        Returns:
            On the first rank of the machine: whether the folder already existed, because torchrun
            has restarted the ranks. On the other ranks: False.
        """
        if not self.machines.first:
            return False
        restarted = "TORCHELASTIC_RUN_ID" in os.environ and self.place.is_this_launchers()
        self.place.begin()
        self.place.sweep()
        return restarted

    def _on_all_ranks(self, act: Callable[[], T]) -> T:
        """Returns `act()`; if it fails on any rank, raises RunFolderError on all. Collective."""

        def describe(error: OSError) -> str:
            reason = why(error, base(), elsewhere=ELSEWHERE)
            return f"cannot keep copies in memory in {base()} on {platform.node()}: {reason}"

        return collectives.attempt_together(act, self.world, RunFolderError, describe)

    # ---------------------------------------------------------------------------------------------------------- start

    def found(self, resume: str) -> list[Found]:
        """Returns the copies in memory, newest first.

        The list is empty unless `resume` is "auto" or torchrun has restarted the ranks.
        """
        if not self.every or not (resume == "auto" or self._restarted):
            return []
        return look(self.place, self.machines, self.record, self.world, self.engine.topology.device)

    def load(self, found: Found) -> dict[str, Any]:
        """Loads a copy, and returns the additional state that was saved with it.

        Raises:
            CheckpointError: on every rank, if the copy is incomplete or cannot be loaded.
            RunFolderError: if the copy is of a different model or optimizer.
        """
        if found.problem:
            raise CheckpointError(f"step {found.step} is incomplete in memory: {found.problem}")
        engine = self.engine
        differences = model_differences(found.manifest, engine.config)
        differences += optimizer_differences(found.manifest, engine.config)
        # A difference is an error, as for checkpoints. If the run started from scratch instead, it
        # would delete the copy.
        if differences:
            raise RunFolderError(
                f"step {found.step} of this run is in memory, and {'; '.join(differences)}"
            )
        extra = load_copy(
            found, self.place, self.machines, engine.topology, records(engine.optimizer),
            engine.buffers.persistent(), engine.load,
        )  # fmt: skip
        self.taken, self._slot = (found.epoch, found.step), 1 - found.slot
        return extra

    def begin(self, note: Callable[[str], None]) -> None:
        """Removes all copies except the one that was loaded, and prepares to save.

        Args:
            note: function that prints a line on rank 0.

        Raises:
            RunFolderError: if a machine has too little memory.
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
        requested = engine.config.run.replicate == "neighbor"
        replicate = requested and machines.count > 1
        self.neighbor = Neighbor(engine.topology, machines) if replicate else None
        machine_bytes = [0] * machines.count
        plan = self.plan
        own_bytes = [
            sum(file.nbytes for file in plan.files),
            sum(file.nbytes for file in plan.files if file.name in plan.alone),
        ]
        for rank, (own, sent) in enumerate(collectives.exchange(own_bytes, self.world)):
            machine_bytes[machines.of[rank]] += own
            machine_bytes[machines.of[machines.neighbor(rank)]] += sent * replicate
        needed = COPIES * machine_bytes[machines.mine]
        problem = too_small(self.place, needed) if machines.first else ""
        collectives.raise_together([problem], self.world, RunFolderError)
        each = f"{in_units(COPIES * max(machine_bytes))} on each of {_machines(machines.count)}"
        copies = ", no other machine for a neighbor's copies" * requested
        if replicate:
            copies = ", with a neighbor's copies"
        often = "each step" if self.every == 1 else f"every {self.every} steps"
        self._note(f"memory     {often} in {self.place.folder}, {each}{copies}")

    # ---------------------------------------------------------------------------------------------------------- steps

    def save_if_due(self, step: int, extra: Callable[[], Mapping[str, Any]]) -> None:
        """Begins to copy the state if `step` is a multiple of `every`; a thread writes the copy.

        If the step was skipped, no copy is written, and the copy of an earlier step remains.
        Checkpoints are delayed after a skipped step for the same reason: training may not be able
        to continue from this state. If the previous copy is still being written, this method waits
        until it is finished.

        Args:
            step: the number of finished steps.
            extra: function that returns the additional state, as it is saved in a checkpoint.
        """
        if not self.every or step % self.every or self.engine.bad_steps():
            return
        self.save(self.engine.counters(extra()))
        if self.problem and self.problem != self._reported:
            self._reported = self.problem
            self._note(
                f"no copies in memory of the step before {step}: {self._reported}; training goes on"
            )

    def save(self, state: Mapping[str, Any]) -> None:
        """Waits until the previous copy is finished, and begins to copy the current state.

        Args:
            state: counters of the run and additional state, as they are saved in a checkpoint.
        """
        self._end()
        engine, began, save = self.engine, time.perf_counter(), [self.record.epoch, state["steps"]]
        engine.optimizer.wait()
        plan = self.plan.with_extras(engine.extras, self.machines)
        self._writing = Copy(
            self.place.slot(self._slot), self.world, "own", plan.files, plan.described,
            engine.saver.head(state), began, save=save, alone=plan.alone, neighbor=self.neighbor,
        )  # fmt: skip
        self._writing.start(engine.optimizer, self.room, now=engine.wraps_module)

    def _end(self) -> None:
        """Waits until the newest copy has finished on all ranks; sets `problem`. Collective."""
        copy = self._writing
        if copy is None:
            return
        self.finish(None)
        self._writing = None
        problems = collectives.problems_of_all([copy.problem], self.world)
        self.problem = problems[0] if problems else ""
        if problems:
            return
        if self._first:  # now that one copy is complete, removes the copies of earlier starts
            if self.machines.first:
                self.place.keep(copy.save)
            collectives.barrier(self.world)
        self._first, self._slot = False, 1 - self._slot

    def finish(self, patience: float | None = PATIENCE_S) -> None:
        """Waits until the copy in progress has finished on this rank. Not collective.

        Any thread may call it.

        Args:
            patience: maximum wait in seconds, after which the copy is stopped; None for no limit.
        """
        # `_writing` is read only once, because another thread may set it to None
        if (writing := self._writing) is not None:
            writing.give_up(patience)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Context manager: if the block raises an error, waits some seconds for a copy in progress.

        After a BadStepsError or ReplicaError, all copies are removed instead, because the state
        itself may be wrong. Not collective.
        """
        try:
            yield
        except (BadStepsError, ReplicaError):
            # These errors are raised on all ranks, so all machines remove their copies.
            self.drop()
            raise
        except Exception:
            self.finish()
            raise

    def drop(self) -> None:
        """Removes all copies on this machine, so that a new start cannot resume from them.

        Not collective; call it on every rank.
        """
        if not self.every:
            return
        self.finish()  # otherwise a copy in progress would write files after the removal
        if self.machines.first:
            self.place.keep()

    def remove(self) -> None:
        """Removes the copies and their folder. Call it once the run has saved its state to disk."""
        if not self.every:
            return
        self._end()
        collectives.barrier(self.world)
        if self.machines.first:
            self.place.remove()


# ----------------------------------------------------------------------------------------------------------- resuming


def resume(engine: Engine, folder: Path, retention: Retention, memory: Memory) -> dict[str, Any]:
    """Loads the newest complete state, from memory or a checkpoint. Collective.

    Returns:
        A dict with the additional state that was saved, and with the keys below. If no state was
        loaded, the dict contains only `problems`, or nothing if there were no problems.

        - path: path of the checkpoint; for a copy in memory, the path that a checkpoint of its step
          would have.
        - resumed: description of the copy; only for a copy in memory.
        - problems: list of the reasons why newer states could not be loaded.
        - saved: whether the step is on disk as a checkpoint of this run.
        - manifest: manifest of the native checkpoint or copy; None for other checkpoints.

    Raises:
        CheckpointError: if there are checkpoints, but none of them can be loaded.
        RunFolderError: if the newest copy in memory is of a different model or optimizer.
    """
    requested, world = engine.config.checkpoint.resume, engine.topology.axis("world")
    first = collectives.exchange(after_restart(folder, requested), world)[0]
    in_memory = memory.found(first)
    begun_from = first if in_memory and first not in ("auto", "none") else ""
    first = "auto" if in_memory else first
    paths = collectives.exchange([str(path) for path in candidates(folder, first)], world)[0]
    refused: list[tuple[str, str]] = []
    tried = _in_order(paths, in_memory)
    if begun_from:  # the state from which the run originally started is tried last
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
        none = "no checkpoint of this run can be resumed; --checkpoint.resume none starts from scratch and keeps them aside"
        raise CheckpointError("; ".join([*_grouped(refused), none]))
    return {"problems": [reason for _, reason in refused]} if refused else {}


def _grouped(refused: list[tuple[str, str]]) -> list[str]:
    """Returns the reasons why checkpoints could not be loaded, without repetitions.

    If reasons differ only in the path of the checkpoint, only the first one is returned, followed
    by the names of the other checkpoints in parentheses.

    Args:
        refused: (path, reason) of each checkpoint.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for path, reason in refused:
        groups.setdefault(reason.replace(path, "") if path else reason, []).append((path, reason))
    lines = []
    for (_, first), *more in groups.values():
        names = ", ".join(Path(path).name for path, reason in more if reason != first)
        lines.append(f"{first} (the same problem in {names})" if names else first)
    return lines


def _machines(count: int) -> str:
    return counted(count, "machine")


def _step(path: str) -> int:
    name = Path(path).name
    return int(name[5:]) if name.startswith("step-") and name[5:].isdecimal() else -1


def _in_order(paths: list[str], copies: list[Found]) -> list[tuple[str, Found | None]]:
    """Returns checkpoints and copies in memory, highest step first.

    If a checkpoint and a copy are of the same step, the checkpoint is first.

    Returns:
        (path, None) for each checkpoint, and ("", copy) for each copy.
    """
    saves: list[tuple[str, Found | None]] = [(path, None) for path in paths]
    saves += [("", copy) for copy in copies]
    return sorted(saves, key=lambda one: -(_step(one[0]) if one[1] is None else one[1].step))
