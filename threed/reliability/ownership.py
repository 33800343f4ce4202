"""Checks the run folder at the start of a run: every rank can use it, and no other run uses it.

    probe(folder, everyone)                      # checks that all ranks share the folder
    with owned(folder, everyone, job) as owner:  # RunFolderError if another run uses the folder
        owner.check()                            # before a save: RunFolderError if taken over

The run that uses the folder has a file `owner-N.json` there, where N counts the runs that have used
the folder. The file contains host, process and job. Its modification time is renewed every second
while the run is alive, and set to zero when the run ends. The file is first written under a
temporary name and then hard-linked to its final name, so it is never incomplete. (On a file system
without hard links, it is written under its final name.) If two runs start at the same time, only
one of them gets the folder.

A new run takes the folder over if the previous run has ended, or is an earlier attempt of the same
torchrun job, or no longer renews its file. To see whether the file is renewed, the new run watches
it for three seconds if the owner's process was on this machine and has ended, otherwise for a
minute. Clocks of different machines are not compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from threed.checkpoint.files import RunFolderError
from threed.core import process
from threed.core.atomic import sync
from threed.core.disk import why
from threed.core.parse import parse_json
from threed.distributed import collectives
from threed.distributed.topology import Axis

RENEW_S = 1.0  # seconds between renewals of an owner's file
# Seconds without a renewal after which a new run takes the folder over: `GONE_S` if the owner's
# process was on this machine and has ended, and `PATIENCE_S` otherwise.
GONE_S = 3.0
PATIENCE_S = 60.0
VISIBLE_S = 10.0  # seconds after which a new file must be visible on all machines


# ------------------------------------------------------------------------------------------------ probe


def probe(folder: Path, everyone: Axis) -> None:
    """Checks that every rank can write in `folder` and sees the file of the next rank. Collective.

    Raises:
        RunFolderError: on every rank, if a check fails on any rank; the message names these ranks
            and their machines.
    """
    place = folder / f".probe-{collectives.exchange(secrets.token_hex(8), everyone)[0]}"
    own_file, other = place / str(everyone.index), (everyone.index + 1) % everyone.size
    try:
        with _on_every_rank(everyone, folder, f"cannot write in {folder}"):
            place.mkdir(parents=True, exist_ok=True)
            own_file.touch()
        unseen = f"does not see in {folder} what rank {other} wrote there"
        with _on_every_rank(everyone, folder, f"{unseen} (all machines must share the folder)"):
            _wait_for(place / str(other))
    finally:
        with contextlib.suppress(OSError):
            own_file.unlink()
        with contextlib.suppress(OSError):
            place.rmdir()  # fails on all ranks but the last, because the folder is not empty


@contextlib.contextmanager
def _on_every_rank(everyone: Axis, folder: Path, problem: str) -> Iterator[None]:
    """Raises RunFolderError on every rank if the block raised OSError on any rank. Collective."""
    found = ""
    try:
        yield
    except OSError as error:
        reason = why(error, folder, elsewhere="use another folder")
        found = f"rank {everyone.index} on {platform.node()} {problem}: {reason}"
    if all_found := collectives.problems_of_all([found], everyone):
        more = f" (and {len(all_found) - 3} more ranks)" if len(all_found) > 3 else ""
        raise RunFolderError(f"{'; '.join(all_found[:3])}{more}; choose another with --run.dir")


def _wait_for(file: Path) -> None:
    end = time.monotonic() + VISIBLE_S
    while not file.exists():
        if time.monotonic() > end:
            raise FileNotFoundError(f"{file} is not there after {VISIBLE_S:g} s")
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------------ owner


@dataclass(frozen=True)
class Run:
    """Rank 0 of a run, as recorded in its owner file.

    Attributes:
        host: name of the machine.
        pid: process id.
        job: torchrun's run id, which is the same for all attempts of a job; None without torchrun.
        attempt: number of times that torchrun has restarted the job.
    """

    host: str
    pid: int
    job: str | None
    attempt: int

    @classmethod
    def here(cls, job: str | None) -> Run:
        """Returns the `Run` that describes this process."""
        return cls(platform.node(), os.getpid(), job, process.restarts())

    def is_over(self, file: Path, successor: Run, patience: float) -> bool:
        """Returns whether another run may take the folder over from this run.

        Args:
            file: owner file of this run.
            successor: the run that wants to use the folder.
            patience: seconds to wait for a renewal of the file.
        """
        if self.job is not None and self.job == successor.job and self.attempt < successor.attempt:
            return True
        process_ended = self.host == successor.host and process.state(self.pid) == "ended"
        return not _is_renewed(file, min(GONE_S, patience) if process_ended else patience)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _is_renewed(file: Path, patience: float) -> bool:
    """Waits up to `patience` seconds; returns whether a file's modification time was renewed."""
    first, end = _modified(file), time.monotonic() + patience
    while first != 0 and time.monotonic() < end:
        time.sleep(min(0.5, patience / 10))
        now = _modified(file)
        if first is None:
            first = now
        elif now not in (None, 0, first):
            return True
    return False


def _modified(file: Path) -> int | None:
    """Returns a file's modification time in ns; 0 if its run has ended.

    Returns None if the file cannot be read, because a network file system may fail for a moment
    while the run is alive.
    """
    try:
        # the file is opened so that a network file system reads its attributes from the server
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0
    except OSError:
        return None


class Owner:
    """The ownership of a run folder.

    Only rank 0 has an owner file. A thread of rank 0 renews this file, and `check` verifies that it
    is the newest owner file.

    Args:
        folder: the run folder.
        everyone: axis of all ranks.
        file: the owner file on rank 0; None on other ranks.
    """

    def __init__(self, folder: Path, everyone: Axis, file: Path | None) -> None:
        self.folder, self.everyone, self.file = folder, everyone, file
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="owner")
        self._thread.start()

    def _renew(self) -> None:
        while self.file is not None and not self._over.wait(RENEW_S):
            with contextlib.suppress(OSError):
                os.utime(self.file)

    def check(self) -> None:
        """Raises RunFolderError on every rank if another run has taken the folder over. Collective."""
        newest, problem = _newest(self.folder) if self.file is not None else None, ""
        if newest is not None and newest[0] != self.file:
            problem = f"{self.folder} was taken over by {newest[1]}; this run saves nothing more"
        collectives.raise_together([problem], self.everyone, RunFolderError)

    def end(self) -> None:
        """Marks this run as ended."""
        self._over.set()
        self._thread.join()
        if self.file is not None:
            with contextlib.suppress(OSError):
                os.utime(self.file, (0, 0))


@contextlib.contextmanager
def owned(
    folder: Path, everyone: Axis, job: str | None, patience: float = PATIENCE_S
) -> Iterator[Owner]:
    """Context manager: the run owns the folder inside the block. Collective.

    Args:
        folder: the run folder.
        everyone: axis of all ranks.
        job: torchrun's run id, which is the same for all attempts of a job; None without torchrun.
        patience: seconds to wait for a renewal of another run's file, before the run takes over.

    Raises:
        RunFolderError: on every rank, if another run uses the folder.
    """

    def take() -> Path | None:
        return None if everyone.index else _take(folder, Run.here(job), patience)

    def describe(error: OSError) -> str:
        return f"{folder} cannot be used: {why(error, folder)}"

    file = collectives.attempt_together(take, everyone, RunFolderError, describe)
    owner = Owner(folder, everyone, file)
    try:
        yield owner
    finally:
        owner.end()


def _take(folder: Path, run: Run, patience: float) -> Path:
    """Creates this run's owner file, and returns its path.

    Raises:
        RunFolderError: if another run uses the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        newest = _newest(folder)
        if newest is not None and not newest[1].is_over(newest[0], run, patience):
            fix = "end that run, or choose another folder with --run.dir or --run.name"
            raise RunFolderError(f"{folder} is in use by another run: {newest[1]}; {fix}")
        number = 1 if newest is None else _number(newest[0]) + 1
        file = folder / f"owner-{number}.json"
        if not _create(file, json.dumps(asdict(run))):
            continue
        older = [other for other in _files(folder) if other != file]
        if older and _number(older[0]) > number:  # another run has taken the folder in the meantime
            file.unlink(missing_ok=True)
            continue
        for other in older:
            other.unlink(missing_ok=True)
        return file


def _create(file: Path, text: str) -> bool:
    """Creates a file that is never visible without its contents, if hard links are supported.

    Returns:
        Whether the file was created; False if a file with this name exists.
    """
    scratch = file.with_name(f"{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        scratch.write_text(text)
        sync(scratch)
        try:
            os.link(scratch, file)
        except FileExistsError:
            return False
        except OSError:  # the file system does not support hard links
            with file.open("x") as opened:
                opened.write(text)
    except FileExistsError:
        return False
    finally:
        scratch.unlink(missing_ok=True)
    return True


def _files(folder: Path) -> list[Path]:
    """Returns the owner files, newest first."""
    found = [file for file in folder.glob("owner-*.json") if file.stem[6:].isdecimal()]
    return sorted(found, key=_number, reverse=True)


def _number(file: Path) -> int:
    return int(file.stem[6:])


def _newest(folder: Path) -> tuple[Path, Run] | None:
    """Returns the path and contents of the newest owner file, or None without an owner file.

    Raises:
        RunFolderError: if the file cannot be parsed.
    """
    for file in _files(folder):
        with contextlib.suppress(FileNotFoundError):  # a newer owner may have removed the file
            try:
                return file, Run(**parse_json(file.read_bytes(), str(file)))
            except (ValueError, TypeError) as error:
                fix = "remove it if no run uses the folder"
                raise RunFolderError(f"{file} cannot be read ({error}): {fix}") from None
    return None
