"""The phases of a save: written and published in threads while training goes on, and what goes wrong in one of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import distance, state_of, train
from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.saving import Save
from threed.distributed import collectives
from threed.engine import Engine
from threed.zero.state import read_records

CASE = Case(1, 2, 1, model="llama", zero=2, layers=2, dtype="fp32", bucket_mib=0.02)


def prepared(engine: Engine, path: Path) -> Save:
    state = {"steps": engine.steps, "consumed": engine.consumed, "extra": {}}
    return engine.saver.prepare(path, state, engine.extras)


def copies(engine: Engine, saving: Save) -> list[Tensor]:
    return [values.clone() for _, values in read_records(engine.optimizer, saving.records)]


def save_beside_training(folder: Path) -> tuple[float, int, bool]:
    """Steps go on while a thread of each rank writes, and the first rank's publishes."""
    engine = engine_of(config_of(CASE))
    train(engine, 2)
    saving = prepared(engine, folder / "step-2")
    before, values = state_of(engine), copies(engine, saving)
    begin = threading.Event()

    def work() -> None:
        begin.wait()
        saving.write(iter(values))
        saving.commit()

    thread = threading.Thread(target=work)
    thread.start()
    train(engine, 1)
    unfinished = not (folder / "step-2").exists()
    begin.set()
    train(engine, 1)
    thread.join()
    saving.agree()
    other = engine_of(engine.config)
    other.load(folder / "step-2")
    return distance(before, state_of(other)), other.steps, unfinished


def test_a_checkpoint_is_written_and_published_beside_training(tmp_path: Path) -> None:
    assert run_ranks(2, save_beside_training, tmp_path) == [(0.0, 2, True)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def broken(values: list[Tensor], error: Exception) -> Iterator[Tensor]:
    yield values[0]
    raise error


def save_and_fail(folder: Path) -> list[tuple[str | None, str, bool]]:
    """Saves of which one rank cannot write its part: what commit gives, what all hear, and if something is left."""
    engine, out = engine_of(config_of(CASE)), []
    for name, patience, error in (
        ("disk", 60.0, OSError(28, "No space left on device")),
        ("values", 60.0, CheckpointError("weight of x is not finite")),
        ("late", 0.3, None),
        ("other", 60.0, ValueError("of the program")),
    ):
        saving = prepared(engine, folder / name)
        values = copies(engine, saving)
        if engine.topology.rank == 0:
            saving.write(values)
        elif isinstance(error, ValueError):
            with pytest.raises(ValueError, match="of the program"):
                saving.write(broken(values, error))
        elif error is not None:
            saving.write(broken(values, error))
        else:  # what an earlier save left is not this one's
            (saving.building / "entry-00001-0123456789abcdef.json").write_text("{}")
        saving.commit(patience)
        problem = saving.problem
        with pytest.raises(CheckpointError) as caught:
            saving.agree()
        collectives.barrier(engine.topology.axis("world"))
        out.append(
            (problem if engine.topology.rank == 0 else "", str(caught.value), any(folder.iterdir()))
        )
        collectives.barrier(engine.topology.axis("world"))
    saving = prepared(engine, folder / "good")
    saving.write(copies(engine, saving))
    saving.commit()
    assert saving.problem is None
    saving.agree()
    return out


def test_what_one_rank_cannot_write_all_hear_of(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_and_fail, tmp_path)
    assert [said for _, said, _ in first] == [said for _, said, _ in second]
    disk, values, late, other = first
    assert "rank 1 could not write" in disk[1]
    assert "No space left" in disk[1]
    assert "rank 1: weight of x is not finite (earlier checkpoints are intact)" in values[1]
    assert "rank 1 has not written its part" in late[1]
    assert "ValueError: of the program" in other[1]
    for problem, said, left in first:
        assert problem
        assert problem in said
        assert not left
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_values_that_were_not_announced_are_an_error(tmp_path: Path) -> None:
    engine = engine_of(config_of(Case(layers=1)))
    saving = prepared(engine, tmp_path / "x")
    with pytest.raises(ValueError, match="announced"):
        saving.write([torch.zeros(3)])
    saving.commit()
    assert "announced" in str(saving.problem)
