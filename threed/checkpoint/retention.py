"""Which checkpoints of a run folder are resumed from, kept, deleted, or set aside.

    demo/checkpoints/step-40                              the run's history: the highest step was saved last
    demo/checkpoints-abandoned-20260801-101500/step-60    set aside when the run went back to step 40

A run that goes back, to an earlier step or past damaged checkpoints, abandons the later ones: they are moved to another
folder before its first step. So steps are always in order of time, and the next start resumes what was saved last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from threed import collectives
from threed.atomic import sync
from threed.checkpoint import native
from threed.checkpoint.files import CheckpointError
from threed.topology import Axis


def candidates(folder: Path, resume: str) -> Iterator[Path]:
    """Returns the checkpoints to try, best first: the one named, or those of a run folder by falling step."""
    if resume == "auto":
        steps = [
            path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdecimal()
        ]
        yield from sorted(steps, key=_step, reverse=True)
    elif resume != "none":
        yield Path(resume)


def after_restart(folder: Path, resume: str) -> str:
    """Returns what to resume from: `resume`; but "auto" in a job that torchrun restarted and that has saved
    a checkpoint, because starting anew would abandon it."""
    job = job_name()
    if resume == "auto" or job is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return resume
    for path in candidates(folder, "auto"):
        with contextlib.suppress(CheckpointError):
            if native.read_manifest(path)["state"]["extra"].get("job") == job:
                return "auto"
    return resume


def job_name() -> str | None:
    """Returns torchrun's name for all attempts of one start, to be saved in checkpoints; None if there is none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def _step(path: Path) -> int:
    return int(path.name[5:])


def _stands_for(path: Path) -> Iterator[int]:
    """Yields the step of a checkpoint, and those whose checkpoints were put off until it."""
    yield _step(path)
    with contextlib.suppress(CheckpointError):
        put_off = native.read_manifest(path)["state"]["extra"].get("put_off")
        yield from (
            step for step in (put_off if isinstance(put_off, list) else ()) if isinstance(step, int)
        )


class Retention:
    """Keeps the newest `keep` good checkpoints of a run folder, and besides those of steps that `every` divides (0: of
    none), or that were written for such a step, whose own was put off.

    Good are those that this run loaded or wrote; of any other the hashes are checked first. A damaged one does not
    count, so no good one is deleted for it: it stays, for inspection, until `keep` good ones are newer, and is then
    deleted as any checkpoint of its age. The newest good one is never deleted.
    """

    def __init__(self, folder: Path, keep: int, everyone: Axis, every: int = 0) -> None:
        self.folder, self.keep, self.everyone, self.every = folder, keep, everyone, every
        self._good: dict[str, bool] = {}

    def trust(self, path: Path) -> str | None:
        """Counts a checkpoint just loaded or written as good; returns its name, or None if it is not this run's."""
        if not self._owns(path):
            return None
        self._good[path.absolute().name] = True
        return path.absolute().name

    def _owns(self, path: Path) -> bool:
        return path.absolute().parent.resolve() == (self.folder / "checkpoints").resolve()

    def sweep(self) -> None:
        """Removes what saves that were killed left behind. Only a run that owns the folder may do this, on one rank.

        Where a replacement was broken off between its two renames (`atomic.publish`), the older folder is renamed back.
        """
        place = self.folder / "checkpoints"
        for old in place.glob("step-*.old"):
            if (final := old.with_suffix("")).exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(final)
        for building in place.glob("step-*.tmp"):
            shutil.rmtree(building, ignore_errors=True)

    def prune(self) -> list[str]:
        """Deletes what is older than the newest `keep` good ones; returns a line for each damaged one. Collective."""
        paths = list(candidates(self.folder, "auto")) if self.everyone.index == 0 else []
        names = collectives.exchange([path.name for path in paths], self.everyone)[0]
        problems: list[str] = []
        good = 0
        for number, name in enumerate(names, 1):
            if name not in self._good:
                found = self._problems(self.folder / "checkpoints" / name)
                self._good[name], problems = not found, problems + found[:1]
            good += self._good[name]
            if good == self.keep:
                self._delete(paths[number:])
                break
        return problems

    def _delete(self, paths: Sequence[Path]) -> None:
        """Deletes checkpoints, on the first rank, but those that are kept for good."""
        for path in paths:
            if not (self.every and any(step % self.every == 0 for step in _stands_for(path))):
                shutil.rmtree(path, ignore_errors=True)

    def _problems(self, path: Path) -> list[str]:
        """Returns what is wrong with a checkpoint, from every rank's share of its files."""
        try:
            mine = native.verify(
                path, native.read_manifest(path), self.everyone.index, self.everyone.size
            )
        except CheckpointError as error:
            mine = [str(error)]
        return collectives.problems_of_all(mine, self.everyone)

    def set_aside(self, origin: Path | None, step: int) -> str:
        """Moves away the checkpoints that a run from `origin` at `step` abandons; returns a message, or nothing.

        Abandoned are later steps; and all, where a run begins anew (None) or from another run's checkpoint. The metrics
        go along as a copy. Collective; CheckpointError on every rank where it fails.
        """
        kept = step if origin is not None and self._owns(origin) else -1
        text = collectives.attempt_together(
            lambda: self._move_later(kept), self.everyone, CheckpointError,
            lambda error: f"the checkpoints after step {step} cannot be set aside: {error}",
        )  # fmt: skip
        return str(collectives.exchange(text, self.everyone)[0])

    def _move_later(self, step: int) -> str:
        later = [path for path in candidates(self.folder, "auto") if _step(path) > step]
        if not later or self.everyone.index:
            return ""
        aside = _new_folder(self.folder / time.strftime("checkpoints-abandoned-%Y%m%d-%H%M%S"))
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            shutil.copy2(metrics, aside)
        # the newest last: until all are moved, the run resumes from it
        for path in reversed(later):
            path.rename(aside / path.name)
        for place in (aside, self.folder, self.folder / "checkpoints"):
            sync(place)
        return f"{', '.join(path.name for path in reversed(later))} in {aside}"


def _new_folder(path: Path) -> Path:
    """Makes a folder of this name, or with a number where that is taken."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    free.mkdir()
    return free
