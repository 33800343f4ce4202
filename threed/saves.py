"""The saves of a run: beside training where that can be, told when they fail, and counted once they are whole.

    saves = Saves(engine, retention, note, first)
    saves.save(path, extra, beside=True)      begins one, after the one before has ended
    saves.make_room(step, last)               once activations are known: takes the memory for copies
    saves.look()                              in each step: says that one has failed
    saves.end()                               waits for the one that is written

`last_saved` is the newest step that is saved. An error of a save that goes on beside training is told in the step after
it happened, or at the next save, or at the end; training goes on, and the end saves what was not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from threed.checkpoint.beside import Save
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.retention import Retention
from threed.engine import Engine


class Saves:
    """Saves an engine's state into a run's folder. note: tells people, on the first rank. first: called before a
    checkpoint is published, perhaps in another thread."""

    def __init__(
        self,
        engine: Engine,
        retention: Retention,
        note: Callable[[str], None],
        first: Callable[[], None],
    ) -> None:
        self.engine, self.retention, self.note, self.first = engine, retention, note, first
        engine.saver.before_publishing = first
        self.last_saved = -1
        self._under_way: Save | None = None
        self._told: set[Path] = set()

    def save(self, path: Path, extra: Mapping[str, Any], *, beside: bool, may_fail: bool) -> None:
        """Saves, or begins to. beside: it may be written while training goes on. may_fail: an error is only told.
        Collective."""
        try:
            if beside and self._goes_on_beside():
                published = lambda: self.retention.published(path)  # noqa: E731
                self._under_way = self.engine.start_save(path, extra, published)
                return
            self.first()
            self.engine.save(path, extra)
        except CheckpointError as error:
            if not may_fail:
                raise
            self._tell(path, error)
            return
        self._count(path)

    def _goes_on_beside(self) -> bool:
        asked, saver = self.engine.config.checkpoint.async_, self.engine.saver
        if asked is False:
            return False
        first, room = saver.room is None, saver.has_room()
        if first and not room:
            what = (
                "updates wait for the drive"
                if asked is True
                else "training waits for each checkpoint"
            )
            self.note(f"no memory for a copy of what is saved: {what}")
        return room or asked is True

    def make_room(self, step: int, last: int) -> None:
        """Takes the memory for copies, after some step, where saves beside training are to come. Collective."""
        every = self.engine.config.checkpoint.every
        if every and (step // every + 1) * every < last and self._goes_on_beside():
            self.engine.saver.make_room()

    def look(self) -> None:
        """Says it if the save that is written has failed; the first rank learns that before it ends on the others."""
        if (
            self._under_way is not None
            and self._under_way.done
            and self._under_way.problem is not None
        ):
            self._tell(
                self._under_way.path, f"{self._under_way.problem} (earlier checkpoints are intact)"
            )

    def end(self) -> None:
        """Waits for the save that is written, if there is one. Collective."""
        save, self._under_way = self._under_way, None
        if save is None:
            return
        try:
            save.wait()
        except CheckpointError as error:
            self.retention.distrust(save.path)
            self._tell(save.path, error)
        else:
            self._count(save.path)

    def _count(self, path: Path) -> None:
        """Counts a checkpoint that is whole; the oldest ones beyond `keep` go."""
        self.last_saved = int(path.name[5:])
        self.retention.trust(path)
        for problem in self.retention.prune() if not self.engine.bad_steps() else ():
            self.note(f"a checkpoint that does not count: {problem}")

    def _tell(self, path: Path, error: object) -> None:
        if path not in self._told:
            self._told.add(path)
            self.note(f"no checkpoint of step {path.name[5:]}: {error}; training goes on")
