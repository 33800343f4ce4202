"""Resume is bit-exact in the same topology, and goes on from any other's checkpoint with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import distance, state_of, train
from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks

RESUMED = [
    Case(*shape, model=model, zero=zero, dtype=dtype, dropout=0.1, sequence=shape[2] > 1, bucket_mib=mib, layers=2,
         microbatches=3 if shape[0] > 1 else 1)
    for shape, model, zero, dtype, mib in [
        ((2, 1, 2), "gpt", 1, "fp32", 64.0),
        ((2, 1, 2), "gpt-untied", 0, "bf16", 64.0),
        ((1, 2, 2), "llama", 0, "bf16", 64.0),
        ((1, 2, 2), "qwen-tied", 1, "fp32", 64.0),
        ((2, 2, 1), "gpt", 0, "fp32", 64.0),
        ((2, 2, 1), "qwen-tied", 1, "bf16", 0.02),
        ((1, 1, 4), "llama", 1, "bf16", 64.0),
        ((1, 4, 1), "gpt", 1, "fp32", 0.02),
    ]
] + [Case(2, 2, zero=2, schedule="dualpipe", microbatches=4, dtype="bf16", dropout=0.1, layers=2)]  # fmt: skip


def resume(folder: Path, cases: list[Case]) -> list[str]:
    """What differs between six steps, and three, a restart and three."""
    wrong = []
    for number, case in enumerate(cases):
        straight = engine_of(config_of(case))
        first = train(straight, 3)
        straight.save(folder / f"step-{number}", {"note": case.model})
        second = train(straight, 3)
        resumed = engine_of(config_of(case))
        extra = resumed.load(folder / f"step-{number}")
        losses = train(resumed, 3)
        gap = distance(state_of(straight), state_of(resumed))
        moved = max(
            float(values.abs().max())
            for part, _, values in state_of(resumed)
            if part == "exp_avg_sq"
        )
        facts = (
            losses == second,
            gap == 0.0,
            extra == {"note": case.model},
            resumed.steps == 6,
            moved > 0,
        )
        facts += (resumed.consumed == straight.consumed, len(set(first + second)) == 6)
        if not all(facts):
            wrong.append(f"{case}: {facts}, distance {gap}, losses {losses} and {second}")
    return wrong


def test_six_steps_are_three_a_restart_and_three(tmp_path: Path) -> None:
    """Difference 0.0 in every weight, in both moments and in the losses."""
    results = run_ranks(4, resume, tmp_path, [RESUMED[n] for n in (1, 5, 8)])
    assert not any(results), results
    alone = [Case(model="gpt", dtype=dtype, dropout=0.1, layers=3) for dtype in ("fp32", "bf16")]
    assert run_ranks(1, resume, tmp_path / "alone", alone) == [[]]


@pytest.mark.grid
def test_six_steps_are_three_a_restart_and_three_in_every_case(tmp_path: Path) -> None:
    results = run_ranks(4, resume, tmp_path, RESUMED)
    assert not any(results), results


@dataclass(frozen=True)
class Move:
    """A checkpoint's way from one topology to another."""

    source: Case
    target: Case
    tolerance: float


def move(
    source: tuple[int, int, int], target: tuple[int, int, int], tolerance: float, **settings: Any
) -> Move:
    """A move with the same model, data and batch on both sides."""
    zero, schedule = settings.pop("zero", (1, 1)), settings.pop("schedule", ("1f1b", "1f1b"))
    settings = {
        "microbatches": -12,
        "layers": 3,
        "dtype": "fp64" if tolerance < 1e-6 else "fp32",
        **settings,
    }
    cases = [
        Case(*shape, zero=z, schedule=name, sequence=shape[2] > 1, **settings)
        for shape, z, name in zip((source, target), zero, schedule, strict=True)
    ]
    return Move(*cases, tolerance)


# fp64: the order of sums is all that differs; fp32: the same at 1e-7 a rounding. No tp divides the vocabulary, 53.
MOVES = [
    move((2, 2, 1), (1, 2, 2), 1e-5, microbatches=3),
    move((2, 2, 1), (1, 2, 2), 1e-9, microbatches=3, model="llama", dropout=0.1),
    move(
        (1, 1, 4), (4, 1, 1), 1e-9, model="qwen-tied"
    ),  # one key/value head on four ranks, tied over four stages
    move((1, 4, 1), (1, 1, 4), 1e-9, model="qwen-tied", bucket_mib=0.01),
    move((2, 1, 2), (1, 4, 1), 1e-9, model="llama", zero=(1, 0)),
    move((1, 4, 1), (2, 1, 2), 1e-9, model="gpt-untied", zero=(0, 1), dropout=0.1),
    move((4, 1, 1), (1, 1, 1), 1e-9, model="gpt"),
    move((1, 2, 2), (1, 1, 1), 1e-9, model="llama"),
    move((2, 1, 2), (2, 1, 1), 1e-9, model="qwen-tied"),
    move((1, 2, 2), (1, 1, 2), 1e-5, model="gpt", dropout=0.1),
    move((1, 1, 1), (2, 2, 2), 1e-9, model="llama", dropout=0.1),
    move(
        (2, 2, 1), (1, 2, 2), 1e-9, model="qwen-tied", microbatches=4, schedule=("chimera", "1f1b")
    ),
    move(
        (1, 2, 2),
        (2, 2, 1),
        1e-9,
        model="gpt",
        zero=(1, 3),
        microbatches=4,
        schedule=("1f1b", "dualpipe"),
    ),
]


def depart(
    folder: Path, moves: dict[int, Move]
) -> dict[int, tuple[list[float], dict[str, Tensor]]]:
    """Two steps and a checkpoint for each move, then how it would have gone on: losses and weights."""
    out = {}
    for number, one in moves.items():
        engine = engine_of(config_of(one.source))
        train(engine, 2)
        engine.save(folder / f"move-{number}")
        out[number] = (train(engine, 3), engine.full_state_dict())
    return out


def arrive(
    folder: Path, moves: dict[int, Move]
) -> dict[int, tuple[list[float], dict[str, Tensor]]]:
    """How it goes on in the other topology."""
    out = {}
    for number, one in moves.items():
        engine = engine_of(config_of(one.target))
        engine.load(folder / f"move-{number}")
        out[number] = (train(engine, 3), engine.full_state_dict())
    return out


def by_world(
    moves: dict[int, Move], case: Callable[[Move], Case]
) -> Iterator[tuple[int, dict[int, Move]]]:
    for world in sorted({case(one).world for one in moves.values()}):
        yield world, {number: one for number, one in moves.items() if case(one).world == world}


@pytest.mark.grid
def test_any_topology_goes_on_from_any_other(tmp_path: Path) -> None:
    """Losses and every weight, three steps on, as without the move; every run of the tests has those of
    tests/checkpoint/test_checkpoint_matrix.py, one step on."""
    moves, wanted, found = dict(enumerate(MOVES)), {}, {}
    for world, some in by_world(moves, lambda one: one.source):
        wanted |= run_ranks(world, depart, tmp_path, some)[0]
    for world, some in by_world(moves, lambda one: one.target):
        found |= run_ranks(world, arrive, tmp_path, some)[0]
    for number, one in moves.items():
        assert found[number][0] == pytest.approx(wanted[number][0], rel=one.tolerance, abs=0), one
        assert found[number][1].keys() == wanted[number][1].keys()
        for name, want in wanted[number][1].items():
            torch.testing.assert_close(
                found[number][1][name],
                want,
                rtol=0,
                atol=one.tolerance,
                msg=lambda m, n=name, o=one: f"{o} {n}: {m}",
            )
