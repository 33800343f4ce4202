"""The folder of a run in a machine's memory, which outlives the processes.

    place = Place(token)                             /dev/shm/threed-1000/<token>, or in THREED_MEMORY
    machines = Machines(place, everyone)             which ranks are on which machine; collective
    place.sweep()                                    removes the folders of runs whose launcher has ended
    place.entries()                                  the complete files of every copy

    <token>/launcher.json                      the process that starts the ranks, and when it started
    <token>/<slot>/<section>-<number>.safetensors
    <token>/<slot>/entry-00003-own.json        the files of rank 3, with step and epoch
    <token>/<slot>/entry-00003-copy.json       the same, on its neighbour's machine

Copies are written to two slots in turn, each over the files of the copy before the last one. A file is complete if an
entry names it. The token is in the run folder (`Epochs`), so a folder in memory belongs to one folder of one run; the
epoch is the number of the start.
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

from threed import collectives
from threed.atomic import sync
from threed.checkpoint.files import RunFolderError, in_units
from threed.checkpoint.manifest import digest
from threed.monitor.process import process_space, started
from threed.parse import parse_json
from threed.topology import Axis

FOLDER = "THREED_MEMORY"
RECORD = "memory.json"
ELSEWHERE = f"name another folder in memory by {FOLDER}"
COPIES = 2  # at a time: the complete one, and the one that is written
NEW_S = 60.0  # until a folder must say whose it is


def base() -> Path:
    """Returns the folder that is memory: THREED_MEMORY, else /dev/shm."""
    return Path(os.environ.get(FOLDER) or "/dev/shm")


class Place:
    """This run's folder in this machine's memory. RunFolderError where none can be had."""

    def __init__(self, token: str) -> None:
        self.home = _own_folder(base())
        self.folder = self.home / token

    def begin(self) -> None:
        """Makes the folder, and says whose it is: for one rank of a machine."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _write(self.folder / "launcher.json", launcher())

    def is_this_launchers(self) -> bool:
        """Whether the folder was begun by ranks of the launcher that started this one: before they were restarted."""
        return _read(self.folder / "launcher.json") == launcher()

    def sweep(self) -> list[str]:
        """Removes the folders of other runs whose launcher is gone; returns their names."""
        others = (
            folder
            for folder in self.home.iterdir()
            if _is_token(folder.name) and folder != self.folder
        )
        gone = [
            folder for folder in others if not (_lives(folder / "launcher.json") or _is_new(folder))
        ]
        for folder in gone:
            shutil.rmtree(folder, ignore_errors=True)
        return [folder.name for folder in gone]

    def slot(self, number: int) -> Path:
        """Returns the folder of copies in slot 0 or 1."""
        return self.folder / str(number)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yields the entries of complete files, of each rank and copy, with their path."""
        for file in sorted(self.folder.glob("[01]/entry-*.json")):
            entry = _read(file)
            whole = isinstance(entry, dict) and entry.get("sha256") == digest(entry)
            if whole and "save" in entry:  # else of a rank that failed
                yield {**entry, "path": str(file)}

    def keep(self, save: Sequence[int] = ()) -> None:
        """Removes all files that are not of one copy.

        Args:
            save: Epoch and step of the copy.
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
        """Bytes that are free, or that this run's folder has."""
        mine = sum(file.stat().st_size for file in self.folder.rglob("*.safetensors"))
        return shutil.disk_usage(self.home).free + mine


def _own_folder(memory: Path) -> Path:
    """Returns this user's folder in `memory`, which nobody else may write."""
    fix = f"set {FOLDER} to a folder in memory (tmpfs) of yours, or leave --checkpoint.memory-every out"
    folder = memory / f"threed-{os.getuid()}"
    try:
        if not memory.is_dir():
            raise RunFolderError(
                f"{memory}, for copies in memory, is no folder on {platform.node()}: {fix}"
            )
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RunFolderError(
            f"{folder}, for copies in memory, cannot be made: {error}; {fix}"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RunFolderError(
            f"{folder} on {platform.node()} is not yours alone to write: remove it, or {fix}"
        )
    return folder


def launcher() -> list[Any]:
    """Returns the process that started this one, and when that started: pids come again."""
    return [os.getppid(), started(os.getppid()), process_space()]


def _lives(file: Path) -> bool:
    found = _read(file)
    if not (isinstance(found, list) and len(found) == 3):
        return False
    return found[2] != process_space() or (bool(found[1]) and started(int(found[0])) == found[1])


def _is_new(folder: Path) -> bool:
    """Whether a folder may be one that is just being made."""
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
    """Writes a small file, so that it is never seen in part."""
    scratch = file.with_suffix(f".{secrets.token_hex(4)}.part")
    scratch.write_text(json.dumps(value))
    scratch.rename(file)


# --------------------------------------------------------------------------------------------------------- machines


class Machines:
    """Which ranks share a memory folder: `of` each rank the number of its machine, by first rank. Collective."""

    def __init__(self, place: Place, everyone: Axis) -> None:
        about = place.home.stat()
        mine = f"{_boot()} {about.st_dev} {about.st_ino}"
        found = collectives.exchange(mine, everyone)
        names = list(dict.fromkeys(found))
        self.of = [names.index(name) for name in found]
        self.count, self.rank = len(names), everyone.index
        self.ranks = [
            [r for r, machine in enumerate(self.of) if machine == number]
            for number in range(self.count)
        ]

    @property
    def mine(self) -> int:
        """This rank's machine."""
        return self.of[self.rank]

    @property
    def first(self) -> bool:
        """Whether this rank is the first on its machine."""
        return self.ranks[self.mine][0] == self.rank

    def neighbour(self, rank: int) -> int:
        """Returns the rank of the next machine that keeps a copy for a rank."""
        others = self.ranks[(self.of[rank] + 1) % self.count]
        return others[self.ranks[self.of[rank]].index(rank) % len(others)]


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


# ----------------------------------------------------------------------------------------------------------- record


@dataclass(frozen=True)
class Epochs:
    """What the run folder says of memory, in `memory.json`.

    run: names this run's folders. epoch: the newest start. base: (epoch, step) of what that start took from memory, if
    it did; of other epochs nothing counts, for the run has gone another way since.
    """

    run: str
    epoch: int
    base: tuple[int, int] | None

    @classmethod
    def of(cls, folder: Path, everyone: Axis) -> Epochs:
        """Returns the first rank's `memory.json` of a run folder; a new one if there is none. Collective."""
        mine = [_read(folder / RECORD), folder.stat().st_ino, secrets.token_hex(16)]
        found, number, token = collectives.exchange(mine, everyone)[0]
        with contextlib.suppress(KeyError, TypeError, ValueError):
            run, epoch, base = str(found["run"]), int(found["epoch"]), found["base"]
            if _is_token(run) and found["folder"] == number:  # else a copy of another run's folder
                return cls(run, epoch, None if base is None else (int(base[0]), int(base[1])))
        return cls(token, 0, None)

    def counts(self, epoch: int, step: int) -> bool:
        """Whether a save is one that a start may take."""
        return epoch == self.epoch or (epoch, step) == self.base

    def write(self, folder: Path) -> None:
        """Writes it, durably."""
        _write(folder / RECORD, {**asdict(self), "folder": folder.stat().st_ino})
        sync(folder / RECORD)
        sync(folder)


def _is_token(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def too_small(place: Place, needed: int) -> str:
    """Returns what to do where a machine's memory folder has not `needed` bytes, else nothing."""
    free = place.free()
    if free >= needed:
        return ""
    what = f"copies in memory need {in_units(needed)} on {platform.node()}, {in_units(free)} are free in {base()}"
    return f"{what}: make it larger (mount -o remount,size=…), name another by {FOLDER}, or leave them out"
