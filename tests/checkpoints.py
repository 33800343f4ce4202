"""Helpers for tests of checkpoints: more training steps, and a rank's state for comparisons."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tests.configs import batch, share
from threed.checkpoint.files import checksum, tree_hash
from threed.engine import Engine
from threed.zero.state import read_records, records


def train(engine: Engine, count: int) -> list[float]:
    """Runs `count` more steps, and returns their losses."""
    rows = engine.config.train.global_batch
    return [
        engine.step(share(batch(engine.steps, rows), engine.topology)).loss for _ in range(count)
    ]


def state_of(engine: Engine) -> list[tuple[str, str, Tensor]]:
    """Returns a copy of every box of weights and moments on this rank."""
    found = read_records(engine.optimizer, records(engine.optimizer))
    return [(r.part, r.piece.name, values.clone()) for r, values in found]


def distance(one: list[tuple[str, str, Tensor]], other: list[tuple[str, str, Tensor]]) -> float:
    """Returns the largest absolute difference between two states of the same topology."""
    assert [a[:2] for a in one] == [b[:2] for b in other]
    return max(
        (float((a[2] - b[2]).abs().max()) for a, b in zip(one, other, strict=True)), default=0.0
    )


def hashes_of(file: Path) -> dict[str, str | None]:
    """Returns the hashes of a file's contents that are stored in its manifest."""
    return {"tree": tree_hash(file), "sum": checksum(file)}
