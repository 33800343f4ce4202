"""Which checkpoints stay: damage pushes no good one out, and a run resumes next what it saved last."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.configs import topology_of
from tests.harness import run_ranks
from tests.runs import configuration, open_text, run
from threed.checkpoint import native, run_folder
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.run_folder import Retention, candidates
from threed.cli import launch
from threed.data import Data
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.monitor import metrics

FIVES = {"checkpoint": {"every": 5, "keep": 6}}


def checkpoints(folder: Path) -> list[str]:
    """The run's own, by falling step."""
    return [path.name for path in candidates(folder / "run", "auto")]


def aside(folder: Path) -> list[list[str]]:
    """What was set aside, oldest first, but for the copies of the metrics."""
    places = sorted((folder / "run").glob("checkpoints-abandoned-*"), key=when)
    return [
        sorted((path.name for path in place.glob("step-*")), key=lambda n: int(n[5:]))
        for place in places
    ]


def when(aside: Path) -> list[int]:
    """The numbers in its name: date, time, and a count where several were set aside within a second."""
    return [int(digits) for digits in re.findall(r"\d+", aside.name)]


def logged(folder: Path) -> list[int]:
    return [row["step"] for row in metrics.read(folder / "run" / "metrics.jsonl")]


def step(folder: Path, number: int) -> Path:
    return folder / "run" / "checkpoints" / f"step-{number}"


def verifies(path: Path) -> bool:
    """Whether a checkpoint would load."""
    try:
        return native.verify(path, native.read_manifest(path)) == []
    except CheckpointError:
        return False


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)


def in_one_rank(story: Callable[[Path, Data], None], folder: Path) -> None:
    run_ranks(1, told, story, folder)


def told(story: Callable[[Path, Data], None], folder: Path) -> None:
    story(folder, open_text(folder))


def past_damage(folder: Path, data: Data) -> None:
    run(folder, data, **FIVES)
    assert checkpoints(folder) == [f"step-{n}" for n in (30, 25, 20, 15, 10, 5)]
    flip_a_bit(step(folder, 30) / "rank-00000.safetensors")
    (step(folder, 25) / native.MANIFEST).unlink()
    said = run(folder, data, checkpoint={"every": 1, "keep": 2}, train={"stop_after": 23})
    assert "skipped a checkpoint" in said
    assert f"resumed    {step(folder, 20)}" in said
    assert "set aside  step-25, step-30 in" in said
    assert checkpoints(folder) == ["step-23", "step-22"]
    assert all(verifies(step(folder, n)) for n in (22, 23))
    assert aside(folder) == [["step-25", "step-30"]]  # damaged as they are, for people to look at
    said = run(folder, data, checkpoint={"keep": 2})
    assert f"resumed    {step(folder, 23)}" in said
    assert checkpoints(folder) == ["step-30", "step-23"]
    assert logged(folder) == list(range(1, 31))
    (step(folder, 30) / native.MANIFEST).unlink()
    os.mkfifo(step(folder, 30) / native.MANIFEST)  # whose opening waits for a writer
    (step(folder, 31)).mkdir()
    (step(folder, 31) / native.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"step-31/manifest\.json cannot be read"):
        run(folder, data, checkpoint={"resume": str(step(folder, 31))})
    said = run(folder, data, train={"steps": 24})
    assert said.count("skipped a checkpoint") == 2
    assert f"resumed    {step(folder, 23)}" in said
    assert aside(folder)[-1] == ["step-30", "step-31"]


def test_damaged_checkpoints_push_no_good_one_out(tmp_path: Path) -> None:
    in_one_rank(past_damage, tmp_path)


def going_back(folder: Path, data: Data) -> None:
    run(folder, data, **FIVES)
    back = {"resume": str(step(folder, 10)), "keep": 2}
    said = run(folder, data, checkpoint=back, optim={"lr": 1e-4}, train={"stop_after": 17})
    assert "set aside  step-15, step-20, step-25, step-30 in" in said
    assert f"checkpoint {step(folder, 17)}" in said
    assert checkpoints(folder) == ["step-17", "step-10"]
    assert verifies(step(folder, 17))
    (kept,) = (folder / "run").glob("checkpoints-abandoned-*")
    assert all(verifies(kept / f"step-{n}") for n in (15, 20, 25, 30))
    assert len(metrics.read(kept / "metrics.jsonl")) == 30
    assert logged(folder) == list(range(1, 18))

    said = run(folder, data, checkpoint={"keep": 2})
    assert f"resumed    {step(folder, 17)}" in said
    assert checkpoints(folder) == ["step-30", "step-17"]
    assert logged(folder) == list(range(1, 31))

    # And back to what was abandoned: another history, so this one goes aside as a whole.
    said = run(
        folder,
        data,
        checkpoint={"resume": str(kept / "step-25"), "keep": 2},
        train={"stop_after": 27},
    )
    assert "set aside  step-17, step-30 in" in said
    assert checkpoints(folder) == ["step-27"]
    said = run(folder, data, checkpoint={"resume": "none"}, train={"stop_after": 1})
    assert "set aside  step-27 in" in said
    assert checkpoints(folder) == ["step-1"]
    assert logged(folder) == [1]
    assert aside(folder) == [
        ["step-15", "step-20", "step-25", "step-30"],
        ["step-17", "step-30"],
        ["step-27"],
    ]


def past_all(folder: Path, data: Data) -> None:
    run(folder, data, checkpoint={"every": 5, "keep": 3}, train={"stop_after": 15})
    none = "no checkpoint of this run can be resumed; --checkpoint.resume none starts from scratch and keeps them aside"
    with pytest.raises(CheckpointError) as refused:
        run(folder, data, optim={"name": "sgd"})
    said = str(refused.value)
    assert said.count("the checkpoint's optimizer is adamw") == 1
    assert said.endswith(f"start over with --checkpoint.resume none; {none}")
    for number in (15, 10, 5):
        (step(folder, number) / native.MANIFEST).unlink()
    with pytest.raises(CheckpointError) as refused:
        run(folder, data)
    first = f"{step(folder, 15)} is not a checkpoint: it has no manifest.json"
    assert str(refused.value) == f"{first} (the same problem in step-10, step-5); {none}"


def test_why_no_checkpoint_can_be_resumed_is_said_once(tmp_path: Path) -> None:
    in_one_rank(past_all, tmp_path)


def test_a_run_that_went_back_resumes_what_it_saved_last(tmp_path: Path) -> None:
    in_one_rank(going_back, tmp_path)


class Killed(BaseException):
    """The end of a process, as far as the files can tell."""


def dying(folder: Path, data: Data) -> None:
    """A run that goes back is killed before each of its renames; the last one would have published its checkpoint."""
    run(folder, data, checkpoint={"every": 5, "keep": 3}, train={"stop_after": 15, "steps": 20})
    rename, back = os.rename, {"resume": str(step(folder, 5)), "keep": 1}
    for survived, newest in (
        (0, "step-15"),
        (1, "step-15"),
        (1, "step-5"),
    ):  # nothing, step-10, step-15 moved
        left = iter([rename] * survived)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", lambda *names, left=left: next(left, die)(*names))
            with pytest.raises(Killed):
                run(folder, data, checkpoint=back, train={"stop_after": 6, "steps": 20})
        assert checkpoints(folder)[0] == newest
        assert all(verifies(path) for path in candidates(folder / "run", "auto"))
        lost_none = checkpoints(folder) + [name for names in aside(folder) for name in names]
        assert sorted(lost_none) == ["step-10", "step-15", "step-5"]
    run(folder, data, checkpoint=back, train={"stop_after": 6, "steps": 20})
    assert checkpoints(folder) == ["step-6"]


def die(*names: Any) -> None:
    raise Killed


def test_a_crash_while_going_back_loses_nothing(tmp_path: Path) -> None:
    in_one_rank(dying, tmp_path)


def restarted(folder: Path, data: Data) -> None:
    run(folder, data, checkpoint={"every": 5}, train={"stop_after": 10})
    back = {"resume": str(step(folder, 5)), "every": 1}
    attempts = {  # (job, restarts): the last step, and what must have been resumed
        ("one", "0"): (7, 5),
        ("one", "1"): (8, 7),
        ("two", "1"): (
            6,
            5,
        ),  # another job, killed before it saved anything: not its own, however it was restarted
        ("two", "0"): (6, 5),
        ("none", "1"): (6, 5),  # torchrun's word for no name
    }
    for (job, restarts), (last, resumed) in attempts.items():
        os.environ |= {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": restarts}
        said = run(folder, data, checkpoint={**back, "keep": 9}, train={"stop_after": last})
        assert f"resumed    {step(folder, resumed)}\n" in said, (job, restarts)
    os.environ["TORCHELASTIC_RUN_ID"] = "three"
    for restarts, steps in (("0", [1, 2]), ("1", [1, 2, 3])):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = restarts
        run(
            folder,
            data,
            checkpoint={"resume": "none", "every": 1, "keep": 9},
            train={"stop_after": steps[-1]},
        )
        assert checkpoints(folder) == [f"step-{n}" for n in reversed(steps)]
    # rotated away since
    gone = configuration(folder, data, 1, checkpoint={"resume": str(step(folder, 99))})
    assert launch._resume_problems(folder / "run", gone, data) == []
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    assert len(launch._resume_problems(folder / "run", gone, data)) == 1


def test_a_restarted_job_goes_on_where_it_was_and_not_where_it_began(tmp_path: Path) -> None:
    in_one_rank(restarted, tmp_path)


def looking(folder: Path, data: Data) -> None:
    run(folder, data, checkpoint={"every": 1, "keep": 9}, train={"stop_after": 4})
    before = logged(folder)
    back = {"resume": str(step(folder, 2)), "keep": 1}
    # nothing to train, nothing to save
    said = run(folder, data, checkpoint=back, train={"stop_after": 2})
    assert "set aside" not in said
    assert checkpoints(folder) == ["step-4", "step-3", "step-2", "step-1"]
    assert logged(folder) == before


def test_a_run_that_only_looks_back_abandons_nothing(tmp_path: Path) -> None:
    in_one_rank(looking, tmp_path)


def keeping(folder: Path, data: Data) -> None:
    for keep in (1, 2, 3):
        run(
            folder,
            data,
            checkpoint={"every": 1, "keep": keep, "resume": "none"},
            train={"stop_after": 5},
        )
        assert checkpoints(folder) == [f"step-{n}" for n in range(5, 5 - keep, -1)]


def test_as_many_stay_as_were_asked_for(tmp_path: Path) -> None:
    in_one_rank(keeping, tmp_path)


def verified_by_all(folder: Path) -> list[Any]:
    """Runs of two ranks over one damaged checkpoint: what the second one said, what it left, and the third one."""
    data, everyone = open_text(folder), topology_of(1, 1).axis("world")
    run(folder, data, 2, train={"stop_after": 6}, checkpoint={"every": 1, "keep": 9})
    if everyone.index == 0:
        flip_a_bit(step(folder, 4) / "rank-00001.safetensors")
    collectives.barrier(everyone)
    said = run(folder, data, 2, checkpoint={"keep": 4, "every": 1}, train={"stop_after": 7})
    after_one = checkpoints(folder)
    collectives.barrier(everyone)
    run(folder, data, 2, checkpoint={"keep": 4, "every": 1}, train={"stop_after": 10})
    return [said, after_one, checkpoints(folder)]


def test_what_was_there_before_counts_once_it_verifies(tmp_path: Path) -> None:
    said, after_one, later = run_ranks(2, verified_by_all, tmp_path)[0]
    assert said.count("not counted") == 1
    assert "rank-00001.safetensors is damaged" in said
    # 7 was written, 6 loaded, 5 and 3 are good; 4 is damaged, does not count, and stays until it is old enough to go.
    assert after_one == ["step-7", "step-6", "step-5", "step-4", "step-3"]
    assert later == ["step-10", "step-9", "step-8", "step-7"]


def test_checkpoints_of_one_second_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda text: "checkpoints-abandoned-now")
    kept = Retention(tmp_path / "run", 2, Topology().axis("world"))
    for _ in range(3):
        step(tmp_path, 3).mkdir(parents=True)
        assert "step-3 in" in kept.set_aside(None, 0)
    assert kept.set_aside(None, 0) == ""
    assert aside(tmp_path) == [["step-3"]] * 3
