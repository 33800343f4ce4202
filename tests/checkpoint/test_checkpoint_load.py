"""Loads into new and trained engines: what is read and set, and that a refused load leaves a new engine as it was."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch

from tests.checkpoint.test_checkpoint_native import DAMAGES, flip
from tests.checkpoint.test_checkpoint_retention import in_one_rank, step
from tests.checkpoints import distance, state_of, train
from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks
from tests.runs import run
from threed.checkpoint import finite, reading
from threed.checkpoint.files import CheckpointError, stream_tensors
from threed.checkpoint.lazy_tensors import MemoryTensor
from threed.checkpoint.reading import TensorFile
from threed.data import Data
from threed.distributed import collectives
from threed.distributed.sharding import Piece


def bytes_read() -> int:
    """What this process has read by system calls so far."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


@contextmanager
def counted(into: list[int]) -> Iterator[None]:
    before = bytes_read()
    yield
    into.append(bytes_read() - before)


def loaded_into_new_and_used(folder: Path, case: Case) -> dict[str, float]:
    """Bytes read for each of the files', by a new engine and by one that has trained; how far both are from the one
    that was saved."""
    engine = engine_of(config_of(case))
    train(engine, 2)
    engine.save(folder / "step-2")
    saved, read = state_of(engine), list[int]()
    nbytes = sum(file.stat().st_size for file in (folder / "step-2").glob("*.safetensors"))
    new = engine_of(config_of(case))
    with counted(read):
        new.load(folder / "step-2")
    distances = [distance(saved, state_of(new))]
    train(engine, 1)
    with counted(read):
        engine.load(folder / "step-2")
    distances.append(distance(saved, state_of(engine)))
    return {"new": read[0] / nbytes, "used": read[1] / nbytes, "distance": max(distances)}


ONE = [
    pytest.param(Case(layers=12, dtype="fp32"), marks=pytest.mark.grid),
    Case(layers=12, dtype="bf16", model="qwen-tied", bucket_mib=0.1),
    Case(layers=12, dtype="fp16", model="llama", offload_optimizer="cpu"),
]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes by /proc")
@pytest.mark.parametrize("case", ONE, ids=["fp32", "bf16", "fp16"])
def test_a_load_reads_each_byte_twice_to_hash_it_and_into_place(case: Case, tmp_path: Path) -> None:
    ((found),) = run_ranks(1, loaded_into_new_and_used, tmp_path, case)
    assert found["distance"] == 0.0
    assert found["new"] < 2.2  # the manifest, and headers
    assert found["used"] < 2.2


# ------------------------------------------------------------------------------------------------------------- refused

KINDS = (
    "bit of a value",
    "bit of a header",
    "swapped",
    "cut short",
    "deleted",
    "numbers exchanged",
    "other dtypes",
)


def refused_then_trained(folder: Path, case: Case) -> dict[str, tuple[str, float]]:
    """What a new engine says to each damage, and how far it is from one that never loaded: at once, and two steps on.
    Then the good one is loaded, by this engine too."""
    other = engine_of(config_of(case))
    train(other, 2)
    other.save(folder / "good")
    engine, same = engine_of(config_of(case)), engine_of(config_of(case))
    before, found = state_of(engine), {}
    for kind in KINDS:
        path = folder / kind / "step-2"
        if engine.topology.rank == 0:
            DAMAGES[kind][0](shutil.copytree(folder / "good", path))
        collectives.exchange(None, engine.topology.axis("world"))
        with pytest.raises(CheckpointError) as refused:
            engine.load(path)
        # so that the next one can be refused, too
        assert engine.optimizer.consistency.initial is not None
        found[kind] = str(refused.value), distance(before, state_of(engine))
    again = engine_of(config_of(case))
    with pytest.raises(CheckpointError):
        again.load(folder / KINDS[0] / "step-2")
    again.load(folder / "good")
    found["fallback"] = "", distance(state_of(other), state_of(again))
    for one in (engine, same):
        train(one, 2)
        one.bad_steps()  # ends the last step, where that is open until the next one
    found["training"] = "", distance(state_of(same), state_of(engine))
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(2, 1, 2, model="gpt-untied", dtype="fp32", layers=2, partition="2,2"),
            marks=pytest.mark.grid,
        ),
        Case(1, 4, 1, model="qwen-tied", dtype="bf16", layers=2, zero=3),
        Case(2, 1, 2, dtype="fp32", layers=4, schedule="2bw", microbatches=4, zero=0),
    ],
    ids=["tp pp", "zero 3 in bf16", "two versions"],
)
def test_a_refused_checkpoint_leaves_a_new_engine_as_it_was(case: Case, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(4, refused_then_trained, tmp_path, case)):
        for kind, (said, far) in found.items():
            assert far == 0.0, (rank, kind)
            assert kind not in KINDS or DAMAGES[kind][1] in said, (rank, kind, said)


def refused_by_one_of_two(folder: Path) -> list[float]:
    """Data ranks with copies of all: the first one hashes the only file, the other one reads it beside."""
    case = Case(1, 2, 1, dtype="fp32", layers=2, zero=0)
    other = engine_of(config_of(case))
    train(other, 1)
    other.save(folder / "good")
    engine = engine_of(config_of(case))
    before, world = state_of(engine), engine.topology.axis("world")
    if world.index == 0:
        DAMAGES["bit of a value"][0](_renamed(shutil.copytree(folder / "good", folder / "bad")))
    collectives.exchange(None, world)
    with pytest.raises(CheckpointError, match="is damaged"):
        engine.load(folder / "bad")
    far = [distance(before, state_of(engine))]
    engine.load(folder / "good")
    return [*far, distance(state_of(other), state_of(engine))]


def _renamed(path: Path) -> Path:
    """The damage is one of rank 2's file, which is rank 0's here."""
    (path / "rank-00002.safetensors").symlink_to(path / next(path.glob("rank-0000[01]*")).name)
    return path


def test_copies_that_another_rank_hashes_are_set_back_too(tmp_path: Path) -> None:
    assert run_ranks(2, refused_by_one_of_two, tmp_path) == [[0.0, 0.0]] * 2


def refused_for_a_nan(folder: Path, case: Case) -> float:
    """A new engine and a checkpoint with a NaN in one rank's file: how far it is from what it was."""
    other = engine_of(config_of(case))
    state = other.optimizer.states[-1]
    with other.optimizer.staged(state, ("weight",), write=True) as held:
        if other.topology.rank == other.topology.world - 1:
            held["weight"][next(state.bucket.runs()).offset] = torch.nan
    with mock.patch("threed.checkpoint.sections.is_finite", return_value=True):
        other.save(folder / "step-0")
    engine = engine_of(config_of(case))
    before = state_of(engine)
    with pytest.raises(
        CheckpointError,
        match=r"weight of .* not finite \(NaN or infinite\), so training cannot go on",
    ):
        engine.load(folder / "step-0")
    return distance(before, state_of(engine))


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_a_nan_is_found_on_the_way_and_leaves_a_new_engine_as_it_was(
    dtype: str, tmp_path: Path
) -> None:
    assert run_ranks(
        2, refused_for_a_nan, tmp_path, Case(1, 2, 1, dtype=dtype, layers=1, zero=2)
    ) == [0.0, 0.0]


def too_large_for_fp16(folder: Path) -> list[float]:
    """Weights that fp32 holds and fp16 does not, loaded into a run of fp16: how far it is from what it was."""
    case = Case(1, 2, 1, dtype="fp32", layers=1, zero=2)
    other = engine_of(config_of(case))
    other.save(folder / "fine")
    state = other.optimizer.states[-1]
    with other.optimizer.staged(state, ("weight",), write=True) as held:
        held["weight"][next(state.bucket.runs()).offset] = 70_000.0
    other.save(folder / "large")
    far = []
    for how in (replace(case, dtype="fp16"), replace(case, dtype="fp16", offload_optimizer="cpu")):
        engine = engine_of(config_of(how))
        before = state_of(engine)
        with pytest.raises(CheckpointError, match="beyond 65504"):
            engine.load(folder / "large")
        far.append(distance(before, state_of(engine)))
        engine.load(folder / "fine")
    engine_of(config_of(replace(case, dtype="bf16"))).load(folder / "large")
    return far


def test_weights_beyond_fp16_are_refused_by_a_run_of_fp16(tmp_path: Path) -> None:
    assert run_ranks(2, too_large_for_fp16, tmp_path) == [[0.0, 0.0]] * 2


def resumed(folder: Path, data: Data) -> None:
    """A run whose newest checkpoint is damaged."""
    run(folder, data, checkpoint={"every": 4, "keep": 3}, train={"stop_after": 8})
    flip(step(folder, 8) / "rank-00000.safetensors", -5)
    said = run(folder, data, checkpoint={"every": 4, "keep": 3}, train={"stop_after": 12})
    assert "resumed    " in said
    assert "step-8/rank-00000.safetensors is damaged" in said


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    in_one_rank(resumed, tmp_path)


def test_after_an_error_nothing_more_is_written_and_nothing_is_raised() -> None:
    """For the other ranks are on their way to a collective."""
    asked = list[str]()

    class Damaged:
        shapes: ClassVar = dict.fromkeys("abc", (1,))
        parts: ClassVar = dict.fromkeys("abc", ("weight",))

        def tensor(self, part: str, name: str) -> MemoryTensor:
            asked.append(name)
            if name == "b":
                raise CheckpointError("b cannot be read")
            return MemoryTensor(torch.ones(1))

    restore = finite.Restore(Damaged(), ())
    for name in "abc":
        restore("weight", Piece(name, (1,), (0,), (1,)), torch.zeros(1))
    assert asked == ["a", "b"]
    assert restore.problems == ["b cannot be read"]


def test_after_a_read_error_no_thread_writes_any_more(tmp_path: Path) -> None:
    """One block's read fails at once; the reads of the others are slow, and have ended when the error is raised."""
    path = tmp_path / "file"
    stream_tensors(path, {"w": (torch.uint8, (4 * 2**20,))}, [torch.zeros(4 * 2**20).byte()])
    out, begin = torch.zeros(4 * 2**20, dtype=torch.uint8), TensorFile(path).tensors["w"][2]

    def slow(handle: int, into: memoryview, at: int) -> None:
        if at == begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.2)
        into[:] = bytes([1]) * len(into)

    with (
        mock.patch.object(reading, "fill", slow),
        mock.patch.object(reading, "BLOCK", 2**20),
        pytest.raises(CheckpointError, match=r"file cannot be read: .*Input/output error"),
    ):
        TensorFile(path).read("w", 0, out)
    before = out.clone()
    time.sleep(0.3)
    assert torch.equal(out, before)
