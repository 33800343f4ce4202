"""The saves of a run, beside training: which stay, what is said when one fails, and what a run's end waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.checkpoint.test_checkpoint_beside import files, slow_thread
from tests.checkpoint.test_checkpoint_retention import (
    checkpoints,
    in_one_rank,
    logged,
    step,
    verifies,
)
from tests.config.test_config import problem, problems
from tests.configs import Case, batch, config_of, engine_of
from tests.harness import run_ranks
from tests.runs import configuration, open_text, run
from threed.checkpoint import manifest, saving
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.saving import Saver
from threed.data import Data
from threed.engine import Engine
from threed.planner.forecast import Forecast
from threed.reliability.preemption import Preempted
from threed.reliability.supervision import Supervision
from threed.zero import snapshot


def same_run(folder: Path) -> list[Any]:
    """The same run with saves beside it and with saves that wait."""
    data = open_text(folder)
    for name, how in (("beside", True), ("waiting", False)):
        with slow_thread():
            run(
                folder / name,
                data,
                2,
                checkpoint={"every": 4, "keep": 3, "async_": how},
                train={"stop_after": 10},
            )
    kept = [checkpoints(folder / name) for name in ("beside", "waiting")]
    names = [name for name in kept[0] if name != "step-8"]  # which the end has
    apart = {"manifest.json"}  # it names the run's folder
    same = [
        {k: v for k, v in files(step(folder / "beside", int(n[5:]))).items() if k not in apart}
        == {k: v for k, v in files(step(folder / "waiting", int(n[5:]))).items() if k not in apart}
        for n in names
    ]
    return [*kept, same, logged(folder / "beside") == logged(folder / "waiting")]


def test_a_run_saves_the_same_beside_itself(tmp_path: Path) -> None:
    for name in ("beside", "waiting"):
        (tmp_path / name).mkdir()
    expected = ["step-10", "step-8", "step-4"]
    assert run_ranks(2, same_run, tmp_path)[0] == [expected, expected, [True, True], True]


def kept_for_good(folder: Path, data: Data) -> None:
    for how in (True, False):
        asked = {"every": 1, "keep": 2, "keep_every": 3, "async_": how, "resume": "none"}
        run(folder, data, checkpoint=asked, train={"stop_after": 8})
        assert checkpoints(folder) == ["step-8", "step-7", "step-6", "step-3"]
    run(folder, data, checkpoint=asked | {"resume": "auto"}, train={"stop_after": 10})
    assert checkpoints(folder) == ["step-10", "step-9", "step-6", "step-3"]
    assert all(verifies(step(folder, n)) for n in (3, 6, 9, 10))


def test_every_kth_stays(tmp_path: Path) -> None:
    in_one_rank(kept_for_good, tmp_path)


def interrupted(folder: Path) -> list[tuple[int, bool]]:
    """Interrupts the wait for a save, trains on, and saves again: the steps of both, and whether they are intact."""
    engine = engine_of(config_of(Case(layers=1)))
    engine.step(batch(0, 4))
    with slow_thread():
        save = engine.start_save(folder / "one")
        with (
            mock.patch.object(save._ended, "wait", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            save.wait()
        engine.step(batch(1, 4))
        engine.start_save(folder / "two").wait()
    found = [(folder / name, manifest.read_manifest(folder / name)) for name in ("one", "two")]
    return [(body["state"]["steps"], manifest.verify(path, body) == []) for path, body in found]


def test_an_interrupted_wait_does_not_end_the_save(tmp_path: Path) -> None:
    assert run_ranks(1, interrupted, tmp_path) == [[(1, True), (2, True)]]


def refusing(steps: set[int]) -> Any:
    """Has the checkpoints of some steps fail when all is written."""
    publish = manifest.publish

    def refuse(building: Path, path: Path) -> None:
        if int(path.name[5:]) in steps:
            raise OSError(28, "No space left on device")
        publish(building, path)

    return mock.patch.object(manifest, "publish", refuse)


def failing(folder: Path) -> list[Any]:
    """A run of which two saves fail; one whose last save fails; and what the next start has."""
    data, asked = open_text(folder), {"every": 3, "keep": 9, "async_": True}
    with refusing({3, 9}):
        said = run(folder, data, 2, checkpoint=asked, train={"stop_after": 10})
    first = checkpoints(folder)
    with refusing({13}), pytest.raises(CheckpointError, match="No space left"):
        run(folder, data, 2, checkpoint=asked, train={"stop_after": 13})
    return [said, first, checkpoints(folder)]


def test_a_save_that_fails_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    said, first, second = run_ranks(2, failing, tmp_path)[0]
    assert said.count("no checkpoint of step 3: could not finish") == 1
    assert said.count("no checkpoint of step 9: could not finish") == 1
    assert said.count("training goes on") == 2
    assert "no checkpoint of step 6" not in said
    lines = said.splitlines()  # as soon as it is known, if not at the next save
    told = next(n for n, line in enumerate(lines) if "no checkpoint of step 3" in line)
    assert told < next(
        n for n, line in enumerate(lines) if line.startswith("step") and " 8/" in line
    )
    assert first == ["step-10", "step-6"]
    assert second == ["step-12", "step-10", "step-6"]


def crashing(folder: Path, data: Data) -> None:
    """A run that breaks off in the step after a save."""
    train, calls = Engine.step, iter(range(5))

    def crash(self: Engine, batch: Any) -> Any:
        if next(calls, None) is None:
            raise ZeroDivisionError
        return train(self, batch)

    with slow_thread(), mock.patch.object(Engine, "step", crash), pytest.raises(ZeroDivisionError):
        run(folder, data, checkpoint={"every": 5, "async_": True})
    assert checkpoints(folder) == ["step-5"]
    assert verifies(step(folder, 5))
    said = run(folder, data, checkpoint={"every": 5, "async_": True})
    assert f"resumed    {step(folder, 5)}" in said
    assert logged(folder) == list(range(1, 31))


def test_a_run_that_fails_still_has_the_save_that_was_under_way(tmp_path: Path) -> None:
    in_one_rank(crashing, tmp_path)


def without_room(folder: Path, data: Data) -> None:
    """Where there is no memory for a copy."""
    with mock.patch.object(saving, "free_bytes", return_value=0):
        for how in ("auto", True):
            said = run(
                folder,
                data,
                checkpoint={"every": 2, "async_": how, "resume": "none"},
                train={"stop_after": 6},
            )
            what = "no memory for a copy of the state: training waits for each checkpoint"
            assert said.count(what) == 1
            assert checkpoints(folder) == ["step-6", "step-4"]
        said = run(
            folder,
            data,
            checkpoint={"every": 2, "async_": False, "resume": "none"},
            train={"stop_after": 6},
        )
        assert "no memory" not in said


def test_no_room_is_said(tmp_path: Path) -> None:
    in_one_rank(without_room, tmp_path)


def ended_under_a_limit(folder: Path, data: Data) -> None:
    """A run that is asked to end in the middle of a save that would take an hour; with and without saves beside it."""
    made = Saver.prepare
    for how in (True, False):
        asked = {"every": 4, "keep": 9, "async_": how, "resume": "none", "write_limit_mib": 1e-4}
        saved: list[int] = []

        def stopped(self: Supervision, saved: list[int] = saved) -> str:
            return "train.time-limit" if saved else ""

        def prepare(*about: Any, saved: list[int] = saved) -> Any:
            saved.append(1)
            return made(*about)

        with (
            mock.patch.object(Supervision, "asked", stopped),
            mock.patch.object(Saver, "prepare", prepare),
            pytest.raises(Preempted),
        ):
            run(folder, data, checkpoint=asked)
        assert all(verifies(step(folder, int(name[5:]))) for name in checkpoints(folder))
        assert "step-4" in checkpoints(folder)


def test_a_run_that_is_to_end_writes_as_fast_as_it_can(tmp_path: Path) -> None:
    in_one_rank(ended_under_a_limit, tmp_path)


def with_room_made(folder: Path, data: Data) -> None:
    """Memory for copies is there after the second step, and the first save takes no more of it."""
    taken, at = [], []
    buffer, start = snapshot.pool.host_buffer, Engine.start_save

    def counted(nbytes: int) -> Any:
        taken.append(nbytes)
        return buffer(nbytes)

    def begin(self: Engine, *about: Any, **keywords: Any) -> Any:
        at.append(len(taken))
        return start(self, *about, **keywords)

    with (
        mock.patch.object(snapshot.pool, "host_buffer", counted),
        mock.patch.object(Engine, "start_save", begin),
    ):
        run(folder, data, checkpoint={"every": 4, "async_": True}, train={"stop_after": 9})
        assert at == [len(taken)] * 2
        assert taken
        del taken[:]
        run(
            folder,
            data,
            checkpoint={"every": 4, "async_": True, "resume": "none"},
            train={"stop_after": 4},
        )
        assert not taken  # the only save is the last one, for which training waits


def test_the_memory_for_copies_is_there_before_the_first_save(tmp_path: Path) -> None:
    in_one_rank(with_room_made, tmp_path)


def forecasts(folder: Path, data: Data) -> None:
    """A forecast has the copy where there will be one."""
    texts = [
        Forecast.of(configuration(folder, data, 1, checkpoint=asked), 1).text()
        for asked in ({"every": 5}, {}, {"every": 5, "async_": False})
    ]
    assert ["saving" in text for text in texts] == [True, False, False]


def test_the_forecast_counts_the_copy(tmp_path: Path) -> None:
    in_one_rank(forecasts, tmp_path)


@pytest.mark.parametrize("flag", ["--checkpoint.async true", "--checkpoint.keep-every 10"])
def test_keys_that_would_do_nothing_are_refused(flag: str) -> None:
    assert f"{flag} with --checkpoint.every 0" in problem(flag)
    assert problems(f"{flag} --checkpoint.every 5") == []
