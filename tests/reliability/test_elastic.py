"""Runs that go on from their machines' memory, on as many machines as before, fewer or more.

A machine is a folder that is named as memory, here that of ranks of one world; machines that torchrun starts are in
`tests/reliability/test_elastic_agents.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.harness import free_port, run_ranks
from tests.runs import open_text, run
from threed.checkpoint import node_memory, sections
from threed.checkpoint.files import CheckpointError, RunFolderError
from threed.config import Config
from threed.config.checks import check_sizes, find_problems
from threed.config.resolution import resolve
from threed.core.process import process_space
from threed.distributed import collectives, launcher
from threed.distributed.topology import Topology, _agree_on_prefix
from threed.engine import Engine
from threed.monitor import metrics
from threed.planner.forecast import Forecast
from threed.reliability import elastic
from threed.trainer import Loop, Trainer
from threed.training.checkpoints import Checkpoints

STEPS, BROKEN = 10, 7  # a run ends after so many, and broken off before this one
Keys = dict[str, dict[str, Any]]
SLICED: Keys = {"zero": {"stage": 1, "bucket_mib": 0.01}}
NEIGHBOR: Keys = {"run_keys": {"replicate": "neighbor"}}


def keys_of(folder: Path, keys: Keys, world: int) -> Keys:
    said = {
        "train": {"stop_after": STEPS, "global_batch": 8},
        "checkpoint": {"every": 4, "async_": False},
        **keys,
    }
    said["checkpoint"] = {
        "memory_every": 1,
        "every": 4,
        "async_": False,
        **keys.get("checkpoint", {}),
    }
    said["run"] = {"dir": str(folder / "run"), "name": "run", **said.pop("run_keys", {})}
    return said


@contextmanager
def on_machine(folder: Path, number: int) -> Iterator[None]:
    place = folder / f"memory-{number}"
    place.mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(os.environ, {node_memory.FOLDER: str(place)}):
        yield


@contextmanager
def broken_off(before: int | None) -> Iterator[None]:
    """Has every rank fail before a step."""
    one_step = Loop._one_step

    def failing(self: Loop, *batches: Any) -> None:
        if self.engine.steps + 1 == before:
            raise RuntimeError("planted")
        one_step(self, *batches)

    with mock.patch.object(Loop, "_one_step", failing):
        yield


def runs(
    folder: Path, cases: dict[str, Keys], world: int, before: int | None = None, machines: int = 2
) -> dict[str, str]:
    """Runs cases on this rank, each in its folder: what it printed, or why it failed."""
    rank = Topology().rank if world > 1 else 0
    said = {}
    for name, keys in cases.items():
        here = folder / name
        here.mkdir(parents=True, exist_ok=True)
        data = open_text(here)
        with on_machine(here, rank * machines // world), broken_off(before):
            try:
                said[name] = run(here, data, world, **keys_of(here, keys, world))
            except (RuntimeError, RunFolderError) as error:
                said[name] = f"{type(error).__name__}: {error}"
        if world > 1:
            collectives.barrier(Topology().axis("world"))
    return said


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in metrics.read(folder / "run" / "metrics.jsonl")]


def resumed(text: str) -> str:
    return next(
        (
            line.removeprefix("resumed    ")
            for line in text.splitlines()
            if line.startswith("resumed ")
        ),
        "",
    )


def checkpoint(folder: Path, step: int) -> str:
    return str(folder / "run" / "checkpoints" / f"step-{step}")


def in_memory(folder: Path) -> list[Path]:
    return sorted(folder.glob("memory-*/threed-*/*/[01]/*"))


CHECKPOINT = "the newest checkpoint is step 4"
FROM_ONE = f"step 6 from the memory of 1 machine; {CHECKPOINT}"
TWO_LAYERS = {"layers": 2, "hidden": 16, "heads": 2, "seq": 16}
FEWER: dict[str, tuple[Keys, str]] = {
    "slices, a neighbor": ({**SLICED, **NEIGHBOR}, FROM_ONE),
    "slices alone": (SLICED, "step-4"),
    "whole states": ({"zero": {"stage": 0}}, FROM_ONE),
    "tensor ranks, ZeRO 3": (
        {"zero": {"stage": 3, "resident": 0}, "parallel": {"tp": 2}, **NEIGHBOR},
        FROM_ONE,
    ),
    "slices in groups of a machine": (
        {"zero": {"stage": 2, "shard_size": 2, "bucket_mib": 0.01}},
        FROM_ONE,
    ),
    "stages": ({"parallel": {"pp": 2}, "model": TWO_LAYERS, **NEIGHBOR}, FROM_ONE),
    "every third step": (
        {**SLICED, **NEIGHBOR, "checkpoint": {"memory_every": 3, "every": 0}},
        "step 6 from the memory of 1 machine; there is no checkpoint",
    ),
}


def straight(folder: Path) -> dict[str, list[float]]:
    """The losses of runs of one rank that nothing happened to, of one layer and of two."""
    data = open_text(folder)
    found = {}
    for name, model in (("one", {}), ("two", {"model": TWO_LAYERS})):
        run(
            folder,
            data,
            1,
            train={"stop_after": STEPS, "global_batch": 8},
            run={"dir": str(folder / name)},
            **model,
        )
        found[name] = [row["train/loss"] for row in metrics.read(folder / name / "metrics.jsonl")]
    return found


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return run_ranks(1, straight, tmp_path_factory.mktemp("straight"))[0]  # type: ignore[no-any-return]


def went_on(folder: Path, said: str, expected: str, truth: list[float]) -> None:
    """A run took what it should, has the losses of one that nothing happened to, and left nothing in memory."""
    assert resumed(said).removeprefix(str(folder / "run" / "checkpoints") + "/") == expected, said
    assert losses(folder) == pytest.approx(truth, abs=1e-9)
    assert in_memory(folder) == []


SOME = ["slices, a neighbor", "slices alone", "tensor ranks, ZeRO 3"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME, id="some"),
        pytest.param([n for n in FEWER if n not in SOME], id="others", marks=pytest.mark.grid),
    ],
)
def test_fewer_machines_go_on_from_the_memory_that_is_left(
    names: list[str], tmp_path: Path, truth: dict[str, list[float]]
) -> None:
    """Four ranks on two machines are broken off, and one machine with its memory is gone: two ranks go on."""
    cases = {name: FEWER[name][0] for name in names}
    for said in run_ranks(4, runs, tmp_path, cases, 4, BROKEN):
        assert set(said.values()) == {"RuntimeError: planted"}
    for number, name in enumerate(names):
        shutil.rmtree(tmp_path / name / f"memory-{number % 2}")  # the first, or the second
        (tmp_path / name / f"memory-{1 - number % 2}").rename(tmp_path / name / "memory-0")
    said = run_ranks(2, runs, tmp_path, cases, 2, None, 1)[0]
    for name in names:
        keys, expected = FEWER[name]
        went_on(tmp_path / name, said[name], expected, truth["two" if "model" in keys else "one"])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def newest(folder: Path, step: int, machine: int = 0) -> Path:
    """The folder of a step on a machine."""
    entries = folder.glob(f"memory-{machine}/threed-*/*/[01]/entry-*.json")
    return next(file.parent for file in entries if json.loads(file.read_text())["save"][1] == step)


BY_FIVE: Keys = {**SLICED, "checkpoint": {"every": 5}}
OF_TWO_MACHINES = "step 6 from the memory of 2 machines; the newest checkpoint is step 5"


def test_as_many_machines_or_more(tmp_path: Path, truth: dict[str, list[float]]) -> None:
    """Two machines with their memory; one of them with damage there; and one that gets a second beside it."""
    two_ranks = dict.fromkeys(("damaged", "all damaged"), BY_FIVE)
    run_ranks(4, runs, tmp_path, {"same": BY_FIVE}, 4, BROKEN)
    run_ranks(2, runs, tmp_path, two_ranks, 2, BROKEN)
    run_ranks(2, runs, tmp_path, {"more": BY_FIVE}, 2, BROKEN, 1)
    flip(next(newest(tmp_path / "damaged", 6, 1).glob("*.safetensors")))
    for step in (5, 6):
        flip(next(newest(tmp_path / "all damaged", step).glob("*.safetensors")))
    said = run_ranks(4, runs, tmp_path, {"same": BY_FIVE, "more": BY_FIVE}, 4)[0]
    said |= run_ranks(2, runs, tmp_path, two_ranks, 2)[0]
    went_on(tmp_path / "same", said["same"], OF_TWO_MACHINES, truth["one"])
    went_on(
        tmp_path / "more",
        said["more"],
        "step 6 from the memory of 1 machine; the newest checkpoint is step 5",
        truth["one"],
    )
    for name in two_ranks:
        skipped(tmp_path / name, said[name], "is damaged", truth["one"])


def skipped(folder: Path, said: str, problem: str, truth: list[float]) -> None:
    """A run went on from the checkpoint of step 5, because the memory of step 6 has a problem."""
    went_on(folder, said, "step-5", truth)  # memory of step 5 is no newer
    assert re.search(f"skipped a checkpoint: .*{problem}", said), said


@pytest.mark.grid
def test_as_many_machines_in_other_cases(tmp_path: Path, truth: dict[str, list[float]]) -> None:
    """Tensor ranks; a run that is broken off twice before there was a copy; a missing file."""
    four_ranks: dict[str, Keys] = {"tensor ranks": {**BY_FIVE, "parallel": {"tp": 2}}}
    two_ranks = dict.fromkeys(("twice", "a file is gone"), BY_FIVE)
    run_ranks(4, runs, tmp_path, four_ranks, 4, BROKEN)
    run_ranks(2, runs, tmp_path, two_ranks, 2, BROKEN)
    run_ranks(2, runs, tmp_path, {"twice": BY_FIVE}, 2, BROKEN)
    next(newest(tmp_path / "a file is gone", 6, 1).glob("*.safetensors")).unlink()
    said = run_ranks(4, runs, tmp_path, four_ranks, 4)[0]
    said |= run_ranks(2, runs, tmp_path, two_ranks, 2)[0]
    for name in ("tensor ranks", "twice"):
        went_on(tmp_path / name, said[name], OF_TWO_MACHINES, truth["one"])
    skipped(tmp_path / "a file is gone", said["a file is gone"], "is missing", truth["one"])


def failures(folder: Path) -> dict[str, str]:
    """Runs of which rank 1 cannot write its copy of step 4, nor then its neighbor's; cannot make a folder; cannot
    make its machine's folder."""
    write, mkdir, count = sections.stream_tensors, Path.mkdir, [0]
    end, sizes = elastic.Memory._end, list[int]()

    def full(path: Path, *args: Any, **more: Any) -> Any:
        count[0] += not more["durable"]
        if count[0] == 4 and not more["durable"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *args, **more)

    def no_step(path: Path, *args: Any, **more: Any) -> None:
        count[0] += path.name in ("0", "1")
        if count[0] == 6 and path.name in ("0", "1"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        mkdir(path, *args, **more)

    def no_folder(place: node_memory.Place) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def counted(self: elastic.Memory) -> None:
        end(self)
        files = self.place.folder.rglob("*.safetensors")
        sizes.append(sum(file.stat().st_size for file in files))

    keys: Keys = {**SLICED, **NEIGHBOR}
    said = {}
    for name, patch in {
        "full": mock.patch.object(sections, "stream_tensors", full),
        "no step": mock.patch.object(Path, "mkdir", no_step),
        "no folder": mock.patch.object(node_memory.Place, "begin", no_folder),
    }.items():
        count[0] = 0
        sizes.clear()
        with (
            patch if Topology().rank == 1 else contextlib.nullcontext(),
            mock.patch.object(elastic.Memory, "_end", counted),
        ):
            said |= runs(folder, {name: keys}, 2)
        said[f"{name}: bytes"] = json.dumps(sizes)
    return said


def test_training_goes_on_where_copies_fail(tmp_path: Path) -> None:
    """Nobody waits for what does not come, and the next copies are whole again; there are never more than two. A folder
    that cannot even be begun is one line, the same on all ranks."""
    ranks = run_ranks(2, failures, tmp_path)
    for name, what in {
        "full": r"5: rank 1 could not write .*: No space left on device: needs .*"
        f"name another folder in memory by {node_memory.FOLDER}",
        "no step": r"7: rank 1 could not write .*: \[Errno 13\] Permission denied",
    }.items():
        (line,) = re.findall(
            "no copies in memory of the step before (.*); training goes on", ranks[0][name]
        )
        assert re.fullmatch(what, line), line
        for rank in ranks:
            before, one, *later = json.loads(rank[f"{name}: bytes"])
            assert before == 0
            assert 0 < one <= max(later) <= 2 * one
            assert len(later) == STEPS - 2
    assert ranks[0]["no folder"] == ranks[1]["no folder"]
    line = ranks[0]["no folder"]
    assert line.startswith("RunFolderError: cannot keep copies in memory in "), line
    assert "No space left on device" in line
    assert f"name another folder in memory by {node_memory.FOLDER}" in line


def test_a_place_in_memory_that_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(node_memory.FOLDER, str(tmp_path / "none"))
    with pytest.raises(RunFolderError, match="is not a folder"):
        node_memory.Place("a" * 32)
    mine = tmp_path / f"threed-{os.getuid()}"
    monkeypatch.setenv(node_memory.FOLDER, str(tmp_path))
    mine.mkdir(mode=0o777)
    mine.chmod(0o777)
    with pytest.raises(RunFolderError, match="only you can write to"):
        node_memory.Place("a" * 32)
    mine.chmod(0o700)
    place = node_memory.Place("a" * 32)
    place.begin()
    assert node_memory.too_small(place, 2**60).startswith("copies in memory need 1,024.0 PiB on ")
    assert node_memory.too_small(place, 1) == ""


def test_what_ended_runs_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launcher is gone; that of one that lives stays, one of which nothing is seen here, one that is being made,
    and what is no run's."""
    monkeypatch.setenv(node_memory.FOLDER, str(tmp_path))
    places = [node_memory.Place(letter * 32) for letter in "abcde"]
    for place in places[:4]:
        place.begin()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for place, space in ((places[1], process_space()), (places[2], "another boot or container")):
        (place.folder / "launcher.json").write_text(json.dumps([gone.pid, "123", space]))
    places[4].folder.mkdir()
    others = [places[0].home / name for name in ("cache", "a" * 31, "A" * 32)]
    for other in others:
        other.mkdir()
        os.utime(other, (1, 1))
    assert places[0].sweep() == ["b" * 32]
    assert [place.folder.exists() for place in places] == [True, False, True, True, True]
    assert all(other.exists() for other in others)


def test_ranks_of_one_start_meet_whatever_is_in_the_store() -> None:
    """Twice in one store, with what an earlier start of as many ranks left half done, and other ranks beside them."""
    store = dist.TCPStore("localhost", free_port(), is_master=True, wait_for_workers=False)
    store.set("meet/3/1", "0" * 16)

    def meet(size: int) -> list[str]:
        with ThreadPoolExecutor(size) as threads:
            return list(
                threads.map(lambda rank: _agree_on_prefix(store.clone(), rank, size), range(size))
            )

    names = [meet(3), meet(2), meet(3)]
    assert [len(set(some)) for some in names] == [1, 1, 1]
    assert len({some[0] for some in names}) == 3


def test_keys_that_copies_do_not_go_with() -> None:
    for keys, said in (
        (
            {"run": {"replicate": "neighbor"}, "checkpoint": {"memory_every": 0}},
            "there are no copies in memory",
        ),
        (
            {"checkpoint": {"memory_every": 2}, "parallel": {"pp": 2, "schedule": "2bw"}},
            "updates are one step late",
        ),
    ):
        found = find_problems(Config.model_validate(keys), 2)
        assert [line for line in found if said in line], found


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        (
            {},
            1,
            "with micro-batches of 2 works for dp 1, 2, 4: use --train.global-batch 24,",
        ),
        ({"train": {"global_batch": 24}}, 1, ""),
        ({"train": {"global_batch": 48}}, 2, ""),
        ({"parallel": {"tp": 2}}, 1, "may give 1 rank, not a multiple of tp 2 × pp 1"),
        ({"parallel": {"dp": 2}, "train": {"global_batch": 24}}, 1, "leave --parallel.dp out"),
    ],
)
def test_every_size_of_an_elastic_job_is_looked_at(keys: Keys, ranks: int, said: str) -> None:
    found = "; ".join(check_sizes(Config.model_validate(keys), (1, 4), ranks))
    assert said in found
    assert bool(found) == bool(said)


def test_how_many_machines_torchrun_was_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "1:4")
    assert launcher.machines_asked() is None  # no torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert launcher.machines_asked() == (1, 4)
    monkeypatch.setenv("PET_NNODES", "2")
    assert launcher.machines_asked() is None


def test_the_forecast_counts_copies() -> None:
    def copies_of(**keys: Any) -> float:
        config = resolve(Config.model_validate({**SLICED, "model": TWO_LAYERS, **keys}), 260, 2)
        return Forecast.of(config, 2).ranks[0].bytes.get("copies", 0)

    one = copies_of(checkpoint={"memory_every": 1})
    assert copies_of() == 0
    assert copies_of(run={"replicate": "neighbor"}) == 2 * one > 0


def exactly(folder: Path) -> None:
    """In one rank: what is in memory goes on exactly; a start that goes another way drops it."""
    data = open_text(folder)

    def start(before: int | None, resume: str = "auto", every: int | None = 1, **more: Any) -> str:
        asked: Keys = {"checkpoint": {"every": 0, "memory_every": every, "resume": resume, **more}}
        with on_machine(folder, 0), broken_off(before):
            try:
                return run(folder, data, 1, **keys_of(folder, asked, 1))
            except RuntimeError as error:
                return str(error)

    def base() -> list[int] | None:
        """The step that the newest start took from memory."""
        return json.loads((folder / "run" / "memory.json").read_text())["base"]  # type: ignore[no-any-return]

    assert start(4) == "planted"
    assert resumed(start(None)) == "step 3 from the memory of 1 machine; there is no checkpoint"
    whole = losses(folder)
    assert start(5, "none") == "planted"
    assert start(3, "none") == "planted"  # anew: step 4 of the start before is of another run
    assert start(6) == "planted"
    assert base() == [4, 2]
    flip(next(newest(folder, 5).glob("*.safetensors")))
    said = start(None)
    assert resumed(said) == "step 4 from the memory of 1 machine; there is no checkpoint"
    assert re.search("skipped a checkpoint: .*is damaged", said)
    assert losses(folder) == whole
    assert start(5, "none") == "planted"
    assert start(3, "auto", None) == "planted"  # without copies
    assert not (folder / "run" / "memory.json").exists()
    assert resumed(start(None)) == ""
    assert losses(folder) == whole


def test_memory_belongs_to_the_start_that_left_it(tmp_path: Path) -> None:
    run_ranks(1, exactly, tmp_path)


class Starts:
    """Starts of runs in one world, as torchrun's ranks or not: what each said, and where. Collective."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world, self.data = folder, world, open_text(folder)

    def __call__(
        self,
        name: str,
        before: int | None = None,
        job: bool = False,
        launcher: int | None = None,
        **groups: Any,
    ) -> str:
        keys = keys_of(self.folder / name, groups, self.world)
        about = {"TORCHELASTIC_RUN_ID": "job"} if job else {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, about))
            stack.enter_context(on_machine(self.folder, 0))  # one for all runs
            stack.enter_context(broken_off(before))
            if launcher is not None:
                stack.enter_context(
                    mock.patch.object(node_memory, "launcher", return_value=[launcher, "1", "here"])
                )
            try:
                return run(self.folder / name, self.data, self.world, **keys)
            except (RuntimeError, RunFolderError, CheckpointError) as error:
                return f"{type(error).__name__}: {error}"


def other_ways(folder: Path) -> None:
    """In one rank: starts that are to begin again elsewhere than in what is in memory, or to leave it alone."""
    start = Starts(folder, 1)
    alone: Keys = {"checkpoint": {"every": 0}}

    start(
        "origin",
        checkpoint={"every": 5, "memory_every": 0},
        train={"stop_after": 5, "global_batch": 8},
    )
    origin = checkpoint(folder / "origin", 5)
    keys: Keys = {"checkpoint": {"every": 0, "resume": origin}}

    def broken_with_its_memory(name: str) -> None:
        assert start(name, 8, job=True, **keys).endswith("planted")
        for file in in_memory(folder):
            if file.suffix == ".safetensors":
                file.unlink()

    broken_with_its_memory("from a path")
    said = start("from a path", job=True, **keys)
    assert resumed(said).startswith(origin), said
    assert said.count("skipped a checkpoint: ") == 2, said
    broken_with_its_memory("from nothing")
    flip(next(Path(origin).glob("*.safetensors")))
    said = start("from nothing", job=True, **keys)
    assert said.startswith("CheckpointError: "), said
    assert "is damaged" in said
    shutil.rmtree(folder / "memory-0")

    assert start("anew", 7, job=True, launcher=111, **alone).endswith("planted")
    anew: Keys = {"checkpoint": {"every": 0, "resume": "none"}}
    with mock.patch.object(Trainer, "_log_header", side_effect=RuntimeError("at the start")):
        assert start("anew", job=True, launcher=222, **anew).endswith("at the start")
    said = start("anew", job=True, launcher=222, **anew)
    assert resumed(said) == "", said
    assert len(losses(folder / "anew")) == STEPS

    assert start("model", 4, **alone).endswith("planted")
    for other in ({"model": {"hidden": 32}}, {"optim": {"name": "lion"}}):
        said = start("model", **alone, **other)
        assert said.startswith("RunFolderError: step 3 of this run is in memory, and "), said
    shutil.copytree(folder / "model" / "run", folder / "copied" / "run")
    assert start("copied", 6, **alone).endswith("planted")
    assert (
        resumed(start("model", **alone))
        == "step 3 from the memory of 1 machine; there is no checkpoint"
    )
    assert (
        resumed(start("copied", **alone))
        == "step 5 from the memory of 1 machine; there is no checkpoint"
    )

    keys = {"checkpoint": {"every": 2, "memory_every": 5}}
    assert start("damaged", 7, **keys).endswith("planted")
    flip(next(Path(checkpoint(folder / "damaged", 6)).glob("*.safetensors")))
    assert (
        resumed(start("damaged", **keys))
        == "step 5 from the memory of 1 machine; the newest checkpoint is step 4"
    )
    assert in_memory(folder) == []


def skipped_steps(folder: Path) -> None:
    """In one rank: no copies are made in a row of skipped steps, nor is any left where a run ends by one; and they take
    nothing of what checkpoints say of those that were put off."""
    start, copied, one_step = Starts(folder, 1), list[int](), Loop._one_step

    def planted(self: Loop, *batches: Any) -> None:
        state = self.engine.optimizer.states[0]
        if self.engine.steps == 5:
            with self.engine.optimizer.staged(state, ("weight",), write=True) as held:
                held["weight"].mul_(1e200)
        one_step(self, *batches)

    def seen(self: elastic.Memory, state: Any) -> None:
        copied.append(state["steps"])
        save(self, state)

    save = elastic.Memory.save
    bad: Keys = {"train": {"stop_after": STEPS, "global_batch": 8, "max_bad_steps": 3}}
    with (
        mock.patch.object(Loop, "_one_step", planted),
        mock.patch.object(elastic.Memory, "save", seen),
    ):
        assert start("bad", **bad).startswith("BadStepsError: ")
    assert copied == [1, 2, 3, 4, 5]
    assert in_memory(folder) == []
    assert "/step-4" in resumed(start("bad", **bad))

    def asking(self: Checkpoints, *args: Any, **more: Any) -> None:
        self._extra()  # as memory does
        save_checkpoint(self, *args, **more)

    save_checkpoint = Checkpoints.save
    bad_at = mock.patch.object(Engine, "bad_steps", lambda self: int(self.steps == 4))
    with bad_at, mock.patch.object(Checkpoints, "save", asking):
        start(
            "put off", checkpoint={"every": 2, "keep": 1, "keep_every": 4}, train={"stop_after": 7}
        )
    kept = {
        path.name: path / "manifest.json"
        for path in (folder / "put off" / "run" / "checkpoints").iterdir()
    }
    assert json.loads(kept["step-5"].read_text())["state"]["extra"]["put_off"] == [4]


@pytest.mark.parametrize("what", [other_ways, skipped_steps])
def test_what_is_not_taken_from_memory(what: Callable[[Path], None], tmp_path: Path) -> None:
    run_ranks(1, what, tmp_path)


def replicas_differ(folder: Path) -> None:
    """Rank 0's weights change by themselves; the next start goes on from before that."""
    start, one_step = Starts(folder, 2), Loop._one_step

    def planted(self: Loop, *batches: Any) -> None:
        if self.engine.steps == 5 and self.engine.topology.rank == 0:
            self.engine.optimizer.states[0].storages["weight"].tensor.mul_(1.5)  # type: ignore[attr-defined]
        one_step(self, *batches)

    keys: Keys = {"zero": {"stage": 0}, "run_keys": {"check_replicas": 4}}
    with mock.patch.object(Loop, "_one_step", planted):
        assert start("run", **keys).startswith("ReplicaError: step 8")
    # files of a rank that was late may be left, but no step
    collectives.barrier(Topology().axis("world"))
    said = start("run", **keys)
    assert Topology().rank or "/step-4" in resumed(said), said


def test_replicas_that_differ_leave_memory(tmp_path: Path) -> None:
    run_ranks(2, replicas_differ, tmp_path)
