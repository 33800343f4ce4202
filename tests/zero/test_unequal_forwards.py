"""Forwards of a sharded module outside of steps: other numbers of them per rank are an error on all ranks."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness import run_ranks
from tests.zero.test_gathered import engine_at, rows
from threed.distributed import collectives
from threed.testing.ranks import RanksFailed
from threed.zero import agreement

NEXT: dict[str, Callable[[Any], Any]] = {
    "step": lambda engine: engine.step({"x": rows(0, 0, 0).repeat(2, 1)}),
    "begin": lambda engine: engine.begin(1),
    "evaluate": lambda engine: engine.evaluate({"x": rows(0, 0, 0)}),
    "full_state_dict": lambda engine: engine.full_state_dict(),
    "gathered": lambda engine: engine.gathered().__enter__(),
    "bad_steps": lambda engine: engine.bad_steps(),
}


def forwards(engine: Any, count: int) -> None:
    with torch.no_grad():
        for _ in range(count):
            engine.module(rows(0, 0, engine.topology.rank))


def _differ(engine: Any, loss: Any, x: dict[str, torch.Tensor]) -> None:
    """Runs a forward without gradients on rank 1, and a backward or a forward that trains on rank 0."""
    if engine.topology.rank:
        forwards(engine, 1)
    elif loss is None:
        engine.module(**x)
    else:
        engine.backward(loss)


def a_rank_runs_one_more() -> None:
    engine: Any = engine_at(3)
    rank, x = engine.topology.rank, {"x": rows(0, 0, 0).repeat(2, 1)}  # the rows of a step
    first = float(engine.evaluate(x))
    for name, follows in NEXT.items():
        forwards(engine, 2)
        with pytest.raises(RuntimeError, match=r"began on rank 1, but not on rank 0.*synced_gpus"):
            forwards(engine, 1) if rank else follows(engine)
        assert float(engine.evaluate(x)) == first, name  # the error has left the engine as it was
    # in a step, too: before a forward that trains, and before a backward
    for runs_first in (False, True):
        engine.begin(1)
        loss = engine.module(**x) if runs_first else None
        forwards(engine, 2)
        with pytest.raises(RuntimeError, match="began on rank 1, but not on rank 0"):
            _differ(engine, loss, x)
        engine.discard()
    assert float(engine.step(x).loss) == pytest.approx(first, rel=1e-12)


def test_a_rank_that_runs_one_more_forward_is_named_on_all_ranks() -> None:
    run_ranks(2, a_rank_runs_one_more)


def a_rank_runs_one_while_the_other_exchanges_values(folder: Path) -> None:
    """The other rank has run no forwards, so it compares none: it takes part in an `exchange` of other values."""
    engine: Any = engine_at(3)
    rank, x = engine.topology.rank, {"x": rows(0, 0, 0).repeat(2, 1)}
    first = float(engine.evaluate(x))
    engine.bad_steps()  # now no rank has run a forward since the last comparison
    others: dict[str, Callable[[], Any]] = {
        "full_state_dict": engine.full_state_dict,
        "save": lambda: engine.save(folder / "checkpoint"),
        "exchange": lambda: collectives.exchange("a" * 500, engine.topology.axis("world")),
    }
    for name, other in others.items():
        if name == "exchange":
            forwards(engine, 2)
        with pytest.raises(RuntimeError, match=r"began on rank 1, but not on rank 0.*synced_gpus"):
            forwards(engine, 1) if rank else other()
        assert float(engine.evaluate(x)) == first, name
        engine.bad_steps()
    engine.save(folder / "checkpoint")


def test_a_rank_that_runs_a_forward_while_the_other_saves_is_named_on_all_ranks(
    tmp_path: Path,
) -> None:
    run_ranks(2, a_rank_runs_one_while_the_other_exchanges_values, tmp_path)


def a_rank_ends() -> None:
    engine = engine_at(3)
    forwards(engine, 2)
    if engine.topology.rank == 0:
        os._exit(0)
    forwards(engine, 1)


def test_a_rank_that_waits_for_one_that_has_ended_gets_the_reason() -> None:
    # the reason is in the message itself, and not in a note, which some programs do not print
    reason = r"RuntimeError: rank 1 began a forward .*outside of a training step, but lost the connection"
    with pytest.raises(RanksFailed, match=reason):
        run_ranks(2, a_rank_ends, timeout=60)


def a_rank_waits() -> None:
    with mock.patch.object(agreement, "WAIT_S", 1.0):
        engine: Any = engine_at(3)
    x = {"x": rows(0, 0, 0)}
    before = float(engine.evaluate(x))
    forwards(engine, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if engine.topology.rank == 0:
            time.sleep(2.2)
        for _ in range(2):
            forwards(engine, 1)
        assert float(engine.evaluate(x)) == before
    said = [str(warning.message) for warning in caught]
    if engine.topology.rank == 0:
        assert said == []
    else:
        (text,) = said
        assert text.startswith("rank 1 began a forward of a sharded module outside of a training")
        assert "has waited 1 s for the other ranks" in text
        assert "synced_gpus" in text


def test_a_rank_that_waits_long_for_the_forward_of_another_warns_once() -> None:
    run_ranks(2, a_rank_waits)


def where_unequal_numbers_are_allowed() -> None:
    x = {"x": rows(0, 0, 0)}
    engine: Any = engine_at(3, shard_size=2)
    before = float(engine.evaluate(x))
    forwards(engine, 1 + engine.topology.rank // 2)  # equal in each shard group
    with engine.gathered():
        forwards(engine, engine.topology.rank)
    assert float(engine.step(x).loss) == pytest.approx(before, rel=1e-12)
    engine = engine_at(2)
    forwards(engine, engine.topology.rank)
    assert float(engine.step(x).loss) == pytest.approx(before, rel=1e-12)


def test_ranks_that_gather_nothing_together_may_run_different_numbers() -> None:
    run_ranks(4, where_unequal_numbers_are_allowed)
