"""Offload that goes wrong says so, with rank and file; nothing goes on with wrong numbers, and checkpoints survive."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.checkpoints import distance, state_of
from tests.checkpoints import train as steps
from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks
from threed.checkpoint import sections
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.reading import SavedBox
from threed.config import Config
from threed.engine import Engine
from threed.memory.io import SwapError
from threed.memory.tiers import Drive, StagedBuffer
from threed.ops.adam import Adam
from threed.zero import optimizer
from threed.zero.reductions import Gradient

CASE = Case(
    dp=2,
    zero=3,
    dtype="fp32",
    layers=2,
    offload_optimizer="nvme",
    offload_params="nvme",
    microbatches=1,
)


def config_in(folder: Path, case: Case = CASE) -> Config:
    config = config_of(case)
    return config.model_copy(
        update={"zero": config.zero.model_copy(update={"nvme_path": str(folder)})}
    )


def drive_of(engine: Engine) -> Drive:
    drive = engine.layout.policy.optimizer_tier
    assert isinstance(drive, Drive)
    return drive


def build_with_little_space(folder: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(SwapError) as caught:
        engine_of(config_in(folder, Case(zero=3, offload_optimizer="nvme", offload_params="nvme")))
    return str(caught.value)


def test_no_space_is_an_error_before_training_begins(tmp_path: Path) -> None:
    (message,) = run_ranks(1, build_with_little_space, tmp_path)
    assert "rank 0" in message
    assert str(tmp_path) in message


def lose_a_part_of_the_file(folder: Path) -> str:
    engine = engine_of(config_in(folder / "swap", Case(zero=3, layers=2, offload_optimizer="nvme")))
    steps(engine, 1)
    engine.save(folder / "good")
    before = state_of(engine)
    drive = drive_of(engine)
    drive.settle()
    size = os.fstat(drive.disk._fd).st_size
    os.ftruncate(drive.disk._fd, size // 2 // 4096 * 4096)
    with pytest.raises(SwapError) as caught:
        steps(engine, 1)
    with pytest.raises((SwapError, RuntimeError)):
        engine.save(folder / "bad")
    assert not (folder / "bad").exists()
    again = engine_of(config_in(folder / "swap", Case(zero=3, layers=2, offload_optimizer="nvme")))
    again.load(folder / "good")
    assert distance(state_of(again), before) == 0.0
    return str(caught.value)


def test_a_short_read_ends_training_and_leaves_checkpoints_whole(tmp_path: Path) -> None:
    (message,) = run_ranks(1, lose_a_part_of_the_file, tmp_path)
    assert "rank 0" in message
    assert str(tmp_path / "swap") in message


def train_and_save(folder: Path) -> list[float]:
    engine = engine_of(config_in(folder / "swap"))
    losses = steps(engine, 2)
    engine.save(folder / "good")
    return losses + steps(engine, 2)


def die_while_swapping(folder: Path) -> None:
    engine = engine_of(config_in(folder / "swap"))
    engine.load(folder / "good")
    if engine.topology.rank == 1:
        inner, drive = Drive.give_after, drive_of(engine)

        def give_after(self: Drive, *args: object) -> None:
            inner(self, *args)  # type: ignore[arg-type]
            if len(drive._writing) > 1:
                os.kill(os.getpid(), signal.SIGKILL)

        Drive.give_after = give_after  # type: ignore[method-assign]
    steps(engine, 1)


def resume(folder: Path) -> list[float]:
    engine = engine_of(config_in(folder / "swap"))
    engine.load(folder / "good")
    return steps(engine, 2)


def test_a_rank_killed_in_the_middle_of_a_swap_leaves_nothing_wrong(tmp_path: Path) -> None:
    want = run_ranks(2, train_and_save, tmp_path)[0]
    with pytest.raises(AssertionError, match="rank 1: the process died"):
        run_ranks(2, die_while_swapping, tmp_path)
    assert list((tmp_path / "swap").iterdir()) == []  # its swap file went with it
    assert run_ranks(2, resume, tmp_path)[0] == want[2:]


def fail_on_one_rank(folder: Path) -> None:
    engine = engine_of(config_in(folder))
    if engine.topology.rank == 1:
        os.ftruncate(drive_of(engine).disk._fd, 0)
    steps(engine, 1)


def test_the_rank_whose_drive_fails_is_the_one_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*SwapError.*rank 1"):
        run_ranks(2, fail_on_one_rank, tmp_path)


def try_again(folder: Path) -> None:
    """A step whose gradients cannot be read is none: tried again, it has the same dropout, and counts once."""
    case = Case(dp=2, zero=2, layers=2, dropout=0.1, offload_optimizer="nvme", microbatches=1)
    engine, twin = (engine_of(config_in(folder / name, case)) for name in ("one", "other"))
    inner = engine.reducer.finish

    def fails() -> list[Gradient]:
        raise SwapError(5, "Input/output error")

    engine.reducer.finish = fails  # type: ignore[method-assign]
    with pytest.raises(SwapError, match="Input/output"):
        steps(engine, 1)
    engine.reducer.finish = inner  # type: ignore[method-assign]
    assert steps(engine, 2) == steps(twin, 2)
    assert (engine.steps, engine.consumed) == (twin.steps, twin.consumed)
    assert distance(state_of(engine), state_of(twin)) == 0.0


def test_a_step_that_failed_is_tried_again_as_it_was(tmp_path: Path) -> None:
    run_ranks(2, try_again, tmp_path)


def moments_survive(folder: Path) -> None:
    """A step that is given up leaves the swapped state as it was."""
    engine = engine_of(
        config_in(folder, Case(zero=2, layers=2, offload_optimizer="nvme", dtype="fp32"))
    )
    steps(engine, 1)
    before = state_of(engine)
    sink = engine.reducer.sinks[0]
    inner = sink.add_product
    sink.add_product = lambda a, b, by: inner(torch.full_like(a, torch.nan), b, by)  # type: ignore[method-assign]
    for other in engine.reducer.sinks:
        other.add = lambda grad, add=other.add: add(grad * torch.nan)  # type: ignore[method-assign, misc]
    steps(engine, 1)
    assert distance(state_of(engine), before) == 0.0


def test_a_skipped_step_writes_nothing(tmp_path: Path) -> None:
    run_ranks(1, moments_survive, tmp_path)


# ------------------------------------------------------------------------------------------------ found by a review


def in_use(engine: Engine) -> int:
    return drive_of(engine).in_use - len(drive_of(engine)._writing)


def fail_to_save(folder: Path) -> None:
    """A full disk under the checkpoint, many times over, and wrong weights: every buffer comes back."""
    engine = engine_of(
        config_in(
            folder / "swap", Case(zero=3, layers=2, offload_optimizer="nvme", offload_params="nvme")
        )
    )
    steps(engine, 1)
    before = state_of(engine)
    weights = {**engine.full_state_dict(), "head.norm.weight": torch.zeros(3)}
    inner = sections.stream_tensors

    def fails(
        path: Path, about: object, tensors: Iterator[torch.Tensor], *_: object, **__: object
    ) -> str:
        next(tensors)
        raise OSError(28, "No space left on device")

    sections.stream_tensors = fails  # type: ignore[assignment]
    for number in range(8):
        with pytest.raises(CheckpointError, match="rank 0 could not write"):
            engine.save(folder / f"{number}")
        with pytest.raises(ValueError, match=r"head\.norm\.weight"):
            engine.load_full_state_dict(weights)
    sections.stream_tensors = inner
    assert in_use(engine) == 0
    assert distance(state_of(engine), before) == 0.0
    steps(engine, 1)


def test_a_failed_save_gives_every_buffer_back(tmp_path: Path) -> None:
    run_ranks(1, fail_to_save, tmp_path)


def break_an_update(folder: Path, delayed: bool) -> str:
    case = Case(
        zero=2,
        layers=2,
        offload_optimizer="cpu" if delayed else "nvme",
        dtype="fp32",
        bucket_mib=0.01,
    )
    config = config_of(case)
    config = config.model_copy(
        update={"zero": config.zero.model_copy(update={"delayed_update": delayed})}
    )
    engine = engine_of(config)
    steps(engine, 2)
    engine.save(folder / "good")
    before = state_of(engine)
    inner, calls = Adam.update, 0

    def update(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(5, "Input/output error")
        inner(*args)  # type: ignore[arg-type]

    Adam.update = update  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match="Input/output"):
        steps(engine, 2)
    Adam.update = inner  # type: ignore[method-assign]
    messages = []
    for attempt in (
        lambda: engine.save(folder / "bad"),
        engine.full_state_dict,
        lambda: steps(engine, 1),
    ):
        with pytest.raises((RuntimeError, OSError)) as caught:
            attempt()
        messages.append(str(caught.value))
    assert not (folder / "bad").exists()
    engine.load(folder / "good")
    assert distance(state_of(engine), before) == 0.0
    steps(engine, 1)
    return messages[0]


@pytest.mark.parametrize("delayed", [False, True])
def test_an_update_that_breaks_off_is_neither_saved_nor_trained_on(
    tmp_path: Path, delayed: bool
) -> None:
    run_ranks(1, break_an_update, tmp_path, delayed)


def make_many(folder: Path) -> None:
    for _ in range(6):
        engine = engine_of(
            config_in(
                folder, Case(zero=3, layers=2, offload_optimizer="nvme", offload_params="nvme")
            )
        )
        steps(engine, 1)
        del engine
        gc.collect()
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert sum(str(folder) in file for file in files) <= 1  # the last one's, at most


def test_engines_that_are_dropped_leave_no_file_open(tmp_path: Path) -> None:
    run_ranks(1, make_many, tmp_path)


# ------------------------------------------------------------------------------------------------ looked at and changed


def look_save_and_load(folder: Path, dtype: str) -> None:
    """States on a drive are those in memory, when they are looked at between steps, saved, and loaded."""
    case = Case(
        zero=3,
        layers=3,
        offload_optimizer="nvme",
        offload_params="cpu",
        dtype=dtype,
        bucket_mib=0.01,
    )
    engine = engine_of(config_in(folder / "swap", case))
    twin = engine_of(config_of(replace(case, offload_optimizer="cpu")))
    for number in range(3):
        for each in (engine, twin):
            steps(each, 1)
        if number:  # not after the first step, so that the second follows it directly
            assert distance(state_of(engine), state_of(twin)) == 0.0
        assert all(
            torch.equal(value, twin.full_state_dict()[name])
            for name, value in engine.full_state_dict().items()
        )
    steps(engine, 1)
    engine.save(folder / "saved")
    saved = state_of(engine)
    steps(engine, 2)
    engine.load(folder / "saved")
    assert distance(state_of(engine), saved) == 0.0
    steps(engine, 1)
    steps(twin, 2)
    assert distance(state_of(engine), state_of(twin)) == 0.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_on_a_drive_are_those_in_memory(tmp_path: Path, dtype: str) -> None:
    run_ranks(1, look_save_and_load, tmp_path, dtype)


ON_DRIVE = Case(zero=3, layers=3, offload_optimizer="nvme", dtype="bf16", bucket_mib=0.01)


def fail_while_values_move(folder: Path) -> None:
    """A load that breaks off, and an update that cannot store a state: neither is saved nor trained on, until a load
    comes through."""
    engine = engine_of(config_in(folder / "swap", ON_DRIVE))
    twin = engine_of(config_of(replace(ON_DRIVE, offload_optimizer="cpu")))
    for each in (engine, twin):
        steps(each, 1)
    engine.save(folder / "good")
    good = state_of(engine)

    def fails(*_: object) -> torch.Tensor:
        raise SwapError(5, "Input/output error")

    for owner, name, attempt in (
        (SavedBox, "read", lambda: engine.load(folder / "good")),
        (optimizer, "store_all", lambda: steps(engine, 1)),
    ):
        steps(engine, 1)
        inner = getattr(owner, name)
        setattr(owner, name, fails)
        with pytest.raises((OSError, CheckpointError), match="Input/output"):
            attempt()
        setattr(owner, name, inner)
        for refused in (lambda: engine.save(folder / "bad"), lambda: steps(engine, 1)):
            with pytest.raises((RuntimeError, CheckpointError), match="load a checkpoint"):
                refused()
        engine.load(folder / "good")
        assert distance(state_of(engine), good) == 0.0
    for each in (engine, twin):
        steps(each, 2)
    assert distance(state_of(engine), state_of(twin)) == 0.0
    assert in_use(engine) == 0


def test_a_load_or_an_update_that_fails_halfway_leaves_nothing_mixed(tmp_path: Path) -> None:
    run_ranks(1, fail_while_values_move, tmp_path)


def break_one_rank_at_the_end(folder: Path) -> None:
    """The last bucket's state is not stored on one rank; after a load all ranks go on in the same order."""
    case = replace(ON_DRIVE, dp=2, zero=2, microbatches=1)
    engine, twin = (engine_of(config_in(folder / name, case)) for name in ("one", "other"))
    for each, name in ((engine, "a"), (twin, "b")):
        steps(each, 1)
        each.save(folder / name)
    inner, calls = optimizer.store_all, 0

    def store_all(buffers: dict[str, StagedBuffer]) -> None:
        nonlocal calls
        calls += 1
        if calls == len(engine.optimizer.states) and engine.topology.rank == 1:
            raise OSError(5, "Input/output error")
        inner(buffers)

    with (
        mock.patch.object(optimizer, "store_all", store_all),
        pytest.raises(OSError, match="Input/output")
        if engine.topology.rank == 1
        else nullcontext(),
    ):
        steps(engine, 1)
    engine.load(folder / "a")
    twin.load(folder / "b")
    assert steps(engine, 3) == steps(twin, 3)
    assert distance(state_of(engine), state_of(twin)) == 0.0


def test_ranks_update_in_the_same_order_after_one_failed(tmp_path: Path) -> None:
    run_ranks(2, break_one_rank_at_the_end, tmp_path)
