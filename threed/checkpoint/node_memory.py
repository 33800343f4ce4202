"""Manages a run's folder in a machine's memory (tmpfs). The folder outlives the processes.

    place = Place(token)                   /dev/shm/threed-<user id>/<token>
    machines = Machines(place, everyone)   collective; which ranks are on which machine
    place.sweep()                          removes folders of runs whose launcher has exited
    place.entries()                        yields the entries of all copies

    <token>/launcher.json                      process that started the ranks, and its start time
    <token>/<slot>/<section>-<number>.safetensors
    <token>/<slot>/entry-00003-own.json        entry of rank 3
    <token>/<slot>/entry-00003-copy.json       entry of rank 3 on its neighbor machine

An entry is a JSON file that lists the files of one rank, with the step and the epoch of the copy.
The epoch counts the starts of the run: 1 for the first start. An entry is written after the files
that it lists, so a file is complete if an entry lists it. Copies are written to the slots 0 and 1
in turn, so that a new copy never overwrites the newest complete copy. The token is a random name
that is stored in the run folder (`Epochs`), so a folder in memory belongs to exactly one run
folder. The environment variable THREED_MEMORY replaces /dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from threed.checkpoint.files import RunFolderError, in_units
from threed.checkpoint.manifest import digest
from threed.core.atomic import sync
from threed.core.parse import parse_json
from threed.core.process import process_space, started
from threed.distributed import collectives
from threed.distributed.topology import Axis

FOLDER = "THREED_MEMORY"
RECORD = "memory.json"
ELSEWHERE = f"name another folder in memory by {FOLDER}"
COPIES = 2  # Number of copies at a time: the newest complete one, and the one in progress.
# A folder without launcher.json is not removed in its first NEW_S seconds, because another process
# may still be creating it.
NEW_S = 60.0


def base() -> Path:
    """Returns the folder in memory that contains one folder per user, by default /dev/shm."""
    return Path(os.environ.get(FOLDER) or "/dev/shm")


class Place:
    """This run's folder in this machine's memory, which is a subfolder of the user's folder.

    Args:
        token: name of the folder, see `Epochs.run`.

    Raises:
        RunFolderError: if the user's folder cannot be created, or other users can write to it.
    """

    def __init__(self, token: str) -> None:
        self.home = _own_folder(base())
        self.folder = self.home / token

    def begin(self) -> None:
        """Creates the folder and records the launcher. Call this method on one rank per machine."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _write(self.folder / "launcher.json", launcher())

    def is_this_launchers(self) -> bool:
        """Returns whether the launcher of this process also started the ranks that made the folder.

        If so, those ranks have failed, and the launcher has started new ranks.
        """
        return _read(self.folder / "launcher.json") == launcher()

    def sweep(self) -> list[str]:
        """Removes the folders of other runs whose launchers have exited; returns their names."""
        runs = (
            folder
            for folder in self.home.iterdir()
            if _is_token(folder.name) and folder != self.folder
        )
        gone = [
            folder
            for folder in runs
            if not (_launcher_runs(folder / "launcher.json") or _is_new(folder))
        ]
        for folder in gone:
            shutil.rmtree(folder, ignore_errors=True)
        return [folder.name for folder in gone]

    def slot(self, number: int) -> Path:
        """Returns the folder of slot 0 or 1."""
        return self.folder / str(number)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yields the valid entries of all ranks and copies, each with its file's path as "path"."""
        for file in sorted(self.folder.glob("[01]/entry-*.json")):
            entry = _read(file)
            intact = isinstance(entry, dict) and entry.get("sha256") == digest(entry)
            if intact and "save" in entry:  # the entry of a rank that failed has only an error
                yield {**entry, "path": str(file)}

    def keep(self, save: Sequence[int] = ()) -> None:
        """Removes all files except the files and entries of one copy.

        Args:
            save: epoch and step of the copy to keep; empty to keep none.
        """
        kept = set[Path]()
        for entry in self.entries():
            if entry["save"] == list(save):
                path = Path(entry["path"])
                kept |= {path, *(path.with_name(file["file"]) for file in entry["files"])}
        for file in self.folder.glob("[01]/*"):
            if file not in kept:
                file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def free(self) -> int:
        """Returns the bytes that copies can use: free space, and the space of the run's files."""
        used = sum(file.stat().st_size for file in self.folder.rglob("*.safetensors"))
        return shutil.disk_usage(self.home).free + used


def _own_folder(memory: Path) -> Path:
    """Returns this user's folder in `memory`, after checking that no other user can write to it."""
    fix = f"set {FOLDER} to a folder in memory (tmpfs) that you own, or omit --checkpoint.memory-every"
    folder = memory / f"threed-{os.getuid()}"
    try:
        if not memory.is_dir():
            raise RunFolderError(
                f"{memory}, for copies in memory, is not a folder on {platform.node()}: {fix}"
            )
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RunFolderError(
            f"{folder}, for copies in memory, cannot be created: {error}; {fix}"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RunFolderError(
            f"{folder} on {platform.node()} is not a folder that only you can write to: remove it, or {fix}"
        )
    return folder


def launcher() -> list[Any]:
    """Returns the identity of the launcher, which is this process's parent.

    Returns:
        [pid, start time of the process, `process_space()`]. The pid alone does not identify a
        process, because pids are reused.
    """
    return [os.getppid(), started(os.getppid()), process_space()]


def _launcher_runs(file: Path) -> bool:
    found = _read(file)
    if not (isinstance(found, list) and len(found) == 3):
        return False
    return found[2] != process_space() or (bool(found[1]) and started(int(found[0])) == found[1])


def _is_new(folder: Path) -> bool:
    """Returns whether another process may still be creating the folder."""
    with contextlib.suppress(OSError):
        return (
            not (folder / "launcher.json").exists() and time.time() - folder.stat().st_mtime < NEW_S
        )
    return True


def _read(file: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return parse_json(file.read_bytes(), str(file))
    return None


def _write(file: Path, value: Any) -> None:
    """Writes JSON to a temporary file and renames it, so that readers never see a partial file."""
    scratch = file.with_suffix(f".{secrets.token_hex(4)}.part")
    scratch.write_text(json.dumps(value))
    scratch.rename(file)


# --------------------------------------------------------------------------------------------------------- machines


class Machines:
    """The machines of a run, with their ranks. The constructor is collective.

    Ranks are on the same machine if they share the folder in memory.

    Attributes:
        of: for each rank, the index of its machine. Machines are ordered by their first rank.
        count: number of machines.
        rank: global index of this rank.
        ranks: for each machine, the list of its ranks.
    """

    def __init__(self, place: Place, everyone: Axis) -> None:
        about = place.home.stat()
        identity = f"{_boot()} {about.st_dev} {about.st_ino}"
        found = collectives.exchange(identity, everyone)
        names = list(dict.fromkeys(found))
        self.of = [names.index(name) for name in found]
        self.count, self.rank = len(names), everyone.index
        self.ranks = [
            [r for r, machine in enumerate(self.of) if machine == number]
            for number in range(self.count)
        ]

    @property
    def mine(self) -> int:
        """The index of this rank's machine."""
        return self.of[self.rank]

    @property
    def first(self) -> bool:
        """Whether this rank is the first on its machine."""
        return self.ranks[self.mine][0] == self.rank

    def neighbor(self, rank: int) -> int:
        """Returns the rank on the next machine that stores a second copy of `rank`'s files."""
        targets = self.ranks[(self.of[rank] + 1) % self.count]
        return targets[self.ranks[self.of[rank]].index(rank) % len(targets)]


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


# ----------------------------------------------------------------------------------------------------------- record


@dataclass(frozen=True)
class Epochs:
    """The record of which copies in memory are valid, stored in the run folder as `memory.json`.

    Attributes:
        run: token that names this run's folders in memory.
        epoch: number of the newest start of the run: 1 for the first start, 0 before it. Copies
            that were made after the newest start are valid.
        base: (epoch, step) of the copy from which the newest start resumed, or None. This copy is
            valid, too. All other copies that were made after earlier starts are obsolete, because
            training continued from a different state.
    """

    run: str
    epoch: int
    base: tuple[int, int] | None

    @classmethod
    def of(cls, folder: Path, everyone: Axis) -> Epochs:
        """Returns the record that rank 0 reads from a run folder, or a new record. Collective."""
        values = [_read(folder / RECORD), folder.stat().st_ino, secrets.token_hex(16)]
        found, number, token = collectives.exchange(values, everyone)[0]
        with contextlib.suppress(KeyError, TypeError, ValueError):
            run, epoch, base = str(found["run"]), int(found["epoch"]), found["base"]
            # The record contains the inode of its run folder. If the inode differs, the run folder
            # is a copy of another run folder, and the token belongs to the original.
            if _is_token(run) and found["folder"] == number:
                return cls(run, epoch, None if base is None else (int(base[0]), int(base[1])))
        return cls(token, 0, None)

    def counts(self, epoch: int, step: int) -> bool:
        """Returns whether a copy is valid, so that the next start of the run may load it.

        Args:
            epoch: number of the start of the run after which the copy was made.
            step: training step after which the copy was made.
        """
        return epoch == self.epoch or (epoch, step) == self.base

    def write(self, folder: Path) -> None:
        """Writes `memory.json` to the run folder and flushes it to disk."""
        _write(folder / RECORD, {**asdict(self), "folder": folder.stat().st_ino})
        sync(folder / RECORD)
        sync(folder)


def _is_token(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def too_small(place: Place, needed: int) -> str:
    """Checks that the folder in memory has enough space.

    Args:
        place: this run's folder in memory.
        needed: bytes that all copies of the run need on this machine.

    Returns:
        An error text, or "".
    """
    free = place.free()
    if free >= needed:
        return ""
    what = f"copies in memory need {in_units(needed)} on {platform.node()}, {in_units(free)} are free in {base()}"
    return f"{what}: enlarge it (mount -o remount,size=…), set {FOLDER} to another folder, or omit --checkpoint.memory-every"
