"""The run folder at the start of a run: every rank can use it, and no other run does.

    probe(folder, everyone)                      # every rank writes there, and sees what another one wrote
    with owned(folder, everyone, job) as owner:  # RunFolderError, saying who has it
        owner.check()                            # before a save: it is still this run's

The owner's file is `owner-N.json`, N counting the runs of the folder; it appears complete, by a hard link to a free
name, so of two runs that start at once one has it. Its modification time is renewed every 10 s while the run lives.

A run takes the folder over from one that has ended: which said so; or whose process is gone, on this machine; or whose
file was not renewed during 60 s, on another one (no clocks are compared); or which torchrun has restarted as this one.
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
from typing import Any

from threed import collectives
from threed.atomic import sync
from threed.checkpoint.files import RunFolderError
from threed.disk import why
from threed.monitor.process import process_space, started
from threed.parse import parse_json
from threed.topology import Axis

BEAT_S, PATIENCE_S = (
    10.0,
    60.0,
)  # how often an owner's file is renewed, and how long one waits to see that
VISIBLE_S = 10.0  # until what one rank wrote must be there for another


# ------------------------------------------------------------------------------------------------------------ probe


def probe(folder: Path, everyone: Axis) -> None:
    """Checks that every rank can write in `folder` and sees what the next rank wrote there. Collective.

    Raises RunFolderError on every rank, naming ranks and their machines.
    """
    token = collectives.exchange(secrets.token_hex(8), everyone)[0]
    place = folder / f".probe-{token}"
    wrote, index = (
        _attempt(lambda: _write(place / str(everyone.index), token), folder),
        everyone.index,
    )
    try:
        _refuse([_at(index, f"cannot write in {folder}: {wrote}")] if wrote else [], everyone)
        other = (
            (index + 1) % everyone.size
        )  # in a ring: wherever machines do not share a folder, two neighbours differ
        unseen = _attempt(lambda: _wait_for(place / str(other), token), folder)
        text = f"does not see in {folder} what rank {other} wrote there ({unseen}): all machines must share the folder"
        _refuse([_at(index, text)] if unseen else [], everyone)
    finally:
        with contextlib.suppress(OSError):
            (place / str(index)).unlink()
        with contextlib.suppress(OSError):  # the last one to leave can
            place.rmdir()


def _at(rank: int, text: str) -> str:
    return f"rank {rank} on {platform.node()} {text}"


def _attempt(action: Any, folder: Path) -> str:
    """Returns why an action on files failed, or nothing."""
    try:
        action()
    except OSError as error:
        return why(error, folder, elsewhere="use another folder")
    except ValueError as error:
        return str(error)
    return ""


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _wait_for(file: Path, text: str) -> None:
    end = time.monotonic() + VISIBLE_S
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.1)
    if file.read_text() != text:
        raise OSError(f"{file} has other contents")


def _refuse(problems: list[str], everyone: Axis) -> None:
    """Raises on every rank if any rank found a problem."""
    found = [problem for rank in collectives.exchange(problems, everyone) for problem in rank]
    if found:
        more = f" (and {len(found) - 3} more ranks)" if len(found) > 3 else ""
        raise RunFolderError(f"{'; '.join(found[:3])}{more}; choose another with --run.dir")


# ------------------------------------------------------------------------------------------------------------ owner


@dataclass(frozen=True)
class Run:
    """Who has a folder: a process of a machine. machine: the boot and the namespace in which its pid is one.
    started: of the process, in ticks, for pids come again. attempt: torchrun's restarts of `job`."""

    host: str
    machine: str
    pid: int
    started: str
    since: str
    token: str
    job: str | None
    attempt: int
    ended: bool = False

    @classmethod
    def here(cls, job: str | None) -> Run:
        """Returns this process."""
        since, attempt = (
            time.strftime("%Y-%m-%d %H:%M:%S"),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
        pid = os.getpid()
        return cls(
            platform.node(),
            process_space(),
            pid,
            started(pid),
            since,
            secrets.token_hex(8),
            job,
            attempt,
        )

    def is_over(self, file: Path, successor: Run, patience: float) -> bool:
        """Returns whether the run of `file` has ended, or is an earlier attempt of the successor's job."""
        if self.ended or (
            self.job is not None and self.job == successor.job and self.attempt < successor.attempt
        ):
            return True
        if self.machine == successor.machine:
            return started(self.pid) != self.started
        return not _is_renewed(file, patience)


def _is_renewed(file: Path, patience: float) -> bool:
    """Returns whether a file's modification time changes while one waits."""
    first, end = _modified(file), time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(min(0.5, patience / 10))
        if _modified(file) != first:
            return True
    return False


def _modified(file: Path) -> int:
    with (
        contextlib.suppress(OSError),
        file.open("rb") as opened,
    ):  # a network file system asks its server on opening
        return os.fstat(opened.fileno()).st_mtime_ns
    return -1


class Owner:
    """This run's right to a folder; only the first rank, which has a file, renews and checks it."""

    def __init__(
        self, folder: Path, everyone: Axis, run: Run, file: Path | None, beat: float = BEAT_S
    ) -> None:
        self.folder, self.everyone, self.run, self.file = folder, everyone, run, file
        self._over = threading.Event()
        if file is not None:
            threading.Thread(
                target=self._renew, args=(file, beat), daemon=True, name="owner"
            ).start()

    def _renew(self, file: Path, beat: float) -> None:
        while not self._over.wait(beat):
            with contextlib.suppress(OSError):
                os.utime(file)

    def check(self) -> None:
        """Raises RunFolderError on every rank if another run has taken the folder over. Collective."""
        newest = _newest(self.folder) if self.file is not None else None
        lost = newest is not None and newest[1].token != self.run.token
        text = (
            f"{self.folder} was taken over: {_describe(newest[1])}; this run saves nothing more"
            if newest
            else ""
        )
        _tell([text] if lost else [], self.everyone)

    def end(self) -> None:
        """Says that this run has ended."""
        self._over.set()
        if self.file is not None:
            scratch = self.file.with_suffix(".tmp")
            with contextlib.suppress(OSError):
                scratch.write_text(json.dumps({**asdict(self.run), "ended": True}))
                scratch.replace(self.file)


@contextlib.contextmanager
def owned(
    folder: Path, everyone: Axis, job: str | None, patience: float = PATIENCE_S
) -> Iterator[Owner]:
    """Has the folder for this run while entered. Collective; RunFolderError on every rank if another run has it.

    job: torchrun's name for all attempts of one start, None if there is none.
    """
    run, file, problem = Run.here(job), None, ""
    if everyone.index == 0:
        try:
            file = _take(folder, run, patience)
        except OSError as error:
            problem = f"{folder} cannot be used: {why(error, folder)}"
        except RunFolderError as error:
            problem = str(error)
    _tell([problem] if problem else [], everyone)
    owner = Owner(folder, everyone, run, file)
    try:
        yield owner
    finally:
        owner.end()


def _tell(problems: list[str], everyone: Axis) -> None:
    found = collectives.exchange(problems, everyone)[0]
    if found:
        raise RunFolderError(found[0])


def _take(folder: Path, run: Run, patience: float) -> Path:
    """Returns the owner's file, new and this run's; RunFolderError if another run has the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        newest = _newest(folder)
        number = 1 if newest is None else _number(newest[0]) + 1
        if newest is not None and not newest[1].is_over(newest[0], run, patience):
            fix = "end that run, or choose another folder with --run.dir or --run.name"
            raise RunFolderError(
                f"{folder} is in use by another run: {_describe(newest[1])}; {fix}"
            )
        file = folder / f"owner-{number}.json"
        if not _create(file, json.dumps(asdict(run))):
            continue
        if (newest := _newest(folder)) is None or newest[1].token != run.token:
            file.unlink(
                missing_ok=True
            )  # another run was quicker, and has removed the file that was looked at here
            continue
        for old in _files(folder):
            if _number(old) < number:
                old.unlink(missing_ok=True)
        return file


def _create(file: Path, text: str) -> bool:
    """Makes a file with its contents at once; returns False if the name is taken."""
    scratch = file.with_name(f"{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        scratch.write_text(text)
        sync(scratch)
        try:
            os.link(scratch, file)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            with file.open("x") as opened:
                opened.write(text)
    except FileExistsError:
        return False
    finally:
        scratch.unlink(missing_ok=True)
    return True


def _files(folder: Path) -> list[Path]:
    """Returns the owners' files, by falling number."""
    found = [file for file in folder.glob("owner-*.json") if file.stem[6:].isdecimal()]
    return sorted(found, key=_number, reverse=True)


def _number(file: Path) -> int:
    return int(file.stem[6:])


def _newest(folder: Path) -> tuple[Path, Run] | None:
    """Returns the newest owner's file and what it says; None if there is none."""
    for file in _files(folder):
        with contextlib.suppress(FileNotFoundError):  # a newer owner removes it: there is another
            try:
                return file, Run(**parse_json(file.read_bytes(), str(file)))
            except (ValueError, TypeError) as error:
                raise RunFolderError(
                    f"{file} cannot be read ({error}): remove it if no run uses the folder"
                ) from None
    return None


def _describe(run: Run) -> str:
    return f"process {run.pid} on {run.host}, since {run.since}"
