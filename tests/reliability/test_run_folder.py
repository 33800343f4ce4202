"""A run folder: every rank can use it, one run at a time has it, and one that has ended keeps nobody out."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.configs import topology_of
from tests.harness import run_ranks
from tests.runs import open_text, run
from threed.checkpoint.files import RunFolderError
from threed.config import TrainConfig
from threed.core import process
from threed.distributed import collectives
from threed.distributed.topology import Topology, alone
from threed.reliability import ownership
from threed.reliability.ownership import Run, owned, probe
from threed.reliability.ownership import _newest as newest
from threed.reliability.ownership import _take as take

# ------------------------------------------------------------------------------------------------------------ probe


def probed(folder: Path) -> dict[str, str]:
    """What a rank hears where all share a folder; where two halves have one each; and where rank 2 cannot write."""
    everyone, ownership.VISIBLE_S, said = topology_of(1, 1).axis("world"), 0.3, {}
    for name, part in (
        ("shared", ""),
        ("halves", str(everyone.index // 2)),
        ("blocked", str(everyone.index)),
    ):
        place = folder / name / part
        place.mkdir(parents=True, exist_ok=True)
        if name == "blocked" and everyone.index == 2:
            (place / "run").touch()
        collectives.barrier(everyone)
        os.chdir(place)
        try:
            probe(Path("run"), everyone)
            said[name] = ""
        except RunFolderError as error:
            said[name] = str(error)
        collectives.barrier(everyone)
        said[name] += "left" if any(Path("run").glob(".probe-*")) else ""
    return said


def test_every_rank_tries_the_folder_and_all_hear_who_cannot_use_it(tmp_path: Path) -> None:
    first, *others = run_ranks(4, probed, tmp_path)
    assert others == [first] * 3
    assert first["shared"] == ""
    host = os.uname().nodename
    assert f"rank 1 on {host} does not see in run what rank 2 wrote there" in first["halves"]
    assert f"rank 3 on {host} does not see in run what rank 0 wrote there" in first["halves"]
    assert "rank 0" not in first["halves"].partition(" on ")[0]
    assert first["blocked"].startswith(f"rank 2 on {host} cannot write in run: ")
    assert "--run.dir" in first["blocked"]


# ------------------------------------------------------------------------------------------------------------ owner


def ended_process() -> dict[str, object]:
    """A process that is gone, as a run's record names it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.kill()
    while process.state(child.pid) != "ended":  # a zombie by then
        time.sleep(0.01)
    return {"pid": child.pid, "zombie": child}


def keep_renewing(file: Path, over: threading.Event) -> None:
    while not over.wait(0.05):
        os.utime(file)


# Who has the folder, compared with this process, which lives; and whether a new run may take it over.
OWNERS: dict[str, tuple[Callable[[], dict[str, object]], bool]] = {
    "this process": (lambda: {"renewed": True}, False),
    "a process that is gone": (ended_process, True),
    "a process of that number in another container": (lambda: {**ended_process(), "renewed": True}, False),
    "a process whose number came again": (dict, True),
    "a run that said it ended": (lambda: {"ended": True}, True),
    "another machine's, renewed": (lambda: {"host": "h7", "renewed": True}, False),
    "another machine's, silent": (lambda: {"host": "h7"}, True),
    "an earlier attempt of the job": (lambda: {"host": "h7", "job": "j", "attempt": 0, "renewed": True}, True),
    "the same attempt of the job": (lambda: {"job": "j", "renewed": True}, False),
}  # fmt: skip


def test_a_folder_is_taken_over_from_runs_that_have_ended_and_from_no_other(tmp_path: Path) -> None:
    here = dataclasses.replace(Run.here("j"), attempt=1)
    for number, (name, (change, free)) in enumerate(OWNERS.items()):
        folder, about, over = tmp_path / str(number), change(), threading.Event()
        renewed, zombie, ended = (about.pop(key, False) for key in ("renewed", "zombie", "ended"))
        other = dataclasses.replace(here, **{"job": None, **about})  # type: ignore[arg-type]
        file = take(folder, other, 0.0)
        if renewed:
            threading.Thread(target=keep_renewing, args=(file, over), daemon=True).start()
        if ended:
            os.utime(file, (0, 0))
        try:
            assert take(folder, here, 0.6).name == "owner-2.json", name
            said = ""
        except RunFolderError as error:
            said = str(error)
        over.set()
        if isinstance(zombie, subprocess.Popen):
            zombie.communicate()
        assert (said == "") == free, (name, said)
        assert free or f"in use by another run: {other}; end that run" in said
        assert [path.name for path in folder.iterdir()] == [f"owner-{2 if free else 1}.json"]


def test_an_owner_is_described_by_its_process_and_machine() -> None:
    assert str(Run("h7", 4711, None, 0)) == "process 4711 on h7"


def contend(folder: Path, rounds: int) -> list[bool]:
    """Rounds in which all ranks want one folder at once, that of a run which ended: whether this rank had it."""
    everyone, had = topology_of(1, 1).axis("world"), []
    ownership.RENEW_S = 0.05
    for turn in range(rounds):
        place = folder / str(turn)
        if everyone.index == 0:
            os.utime(take(place, Run.here(None), 0.0), (0, 0))
        collectives.barrier(everyone)
        try:
            with owned(place, alone("world"), None, patience=3.0):
                had.append(True)
                collectives.barrier(everyone)
        except RunFolderError:
            had.append(False)
            collectives.barrier(everyone)
    return had


@pytest.mark.parametrize("rounds", [8, pytest.param(40, marks=pytest.mark.grid)])
def test_of_runs_that_start_at_once_one_has_the_folder(rounds: int, tmp_path: Path) -> None:
    found = run_ranks(4, contend, tmp_path, rounds)
    assert [sum(ranks) for ranks in zip(*found, strict=True)] == [1] * rounds


def second_run(folder: Path) -> None:
    """A run beside another, after it, and one that loses its folder."""
    data, everyone = open_text(folder), Topology().axis("world")
    tiny = {"train": {"steps": 4}, "checkpoint": {"every": 2}}
    run(folder, data, **tiny)
    place = folder / "run"
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    with owned(place, everyone, None) as owner:
        with pytest.raises(
            RunFolderError, match=f"in use by another run: process {os.getpid()} on"
        ):
            run(folder, data, **tiny)
        now = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
        assert {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)} == {
            place / "owner-1.json", place / "owner-2.json",
        }  # fmt: skip
        owner.check()
        record = (place / "owner-2.json").read_text()
        (place / "owner-2.json").write_text("{")
        with pytest.raises(RunFolderError, match=r"owner-2\.json cannot be read"):
            run(folder, data, **tiny)
        (place / "owner-2.json").write_text(record)
        other = dataclasses.replace(Run.here(None), host="h7")
        (place / "owner-3.json").write_text(json.dumps(dataclasses.asdict(other)))
        with pytest.raises(
            RunFolderError,
            match=r"was taken over by process \d+ on h7; this run saves nothing more",
        ):
            owner.check()
    (place / "owner-3.json").unlink()
    leave_rubbish(place / "checkpoints")
    said = run(folder, data, train={"steps": 6, "seed": 3}, checkpoint={"every": 2})
    assert f"resumed    {place / 'checkpoints' / 'step-4'}" in said
    assert f"train.seed was {TrainConfig().seed} and is 3: " in said
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == ["step-4", "step-6"]
    assert newest(place)[0].stat().st_mtime == 0  # type: ignore[index]


def leave_rubbish(checkpoints: Path) -> None:
    """What saves leave that are killed while they write, and between the renames of a replacement."""
    (checkpoints / "step-77.tmp").mkdir()
    (checkpoints / "step-77.tmp" / "rank-00000.safetensors").write_bytes(b"half")
    (checkpoints / "step-4").rename(checkpoints / "step-4.old")
    (checkpoints / "step-2.old").mkdir()


def test_a_second_run_is_refused_before_it_changes_anything(tmp_path: Path) -> None:
    run_ranks(1, second_run, tmp_path)


@pytest.mark.parametrize(
    ("seen", "renewed"),
    [([None, 5, 6], True), ([None, None, 5, 5, 6], True), ([5, None, 6], True), ([5, 5], False), ([0], False)],
)  # fmt: skip
def test_an_owner_file_that_cannot_be_read_for_a_moment_is_not_that_of_an_ended_run(
    seen: list[int | None], renewed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may fail to open the file once; the run is alive if its time changes later."""
    answers = iter(seen)
    monkeypatch.setattr(ownership, "_modified", lambda file: next(answers, seen[-1]))
    monkeypatch.setattr(ownership.time, "sleep", lambda seconds: None)
    assert ownership._is_renewed(tmp_path / "owner", 0.05) is renewed


def test_the_time_of_an_owner_file(tmp_path: Path) -> None:
    file = tmp_path / "owner"
    assert ownership._modified(file) == 0
    file.mkdir()  # cannot be opened: unknown
    assert ownership._modified(file) is None
    file.rmdir()
    file.write_text("")
    assert (ownership._modified(file) or 0) > 0
