"""Runs the real trainer in ranks of the harness: a tiny model on a tiny text, in under a second."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from tests.configs import engine_of
from threed.config import Config
from threed.config.resolution import resolve
from threed.data import Data, open_data
from threed.distributed import collectives
from threed.trainer import Trainer
from threed.training import final_report

SEQ = 16
TINY: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "hidden": 16, "heads": 2, "seq": SEQ},
    "train": {
        "steps": 30,
        "global_batch": 4,
        "micro_batch": 2,
        "eval_samples": 2,
        "sample_tokens": 0,
    },
    "optim": {"warmup": 2},
    "precision": {"dtype": "fp64"},
    "log": {"wandb": "off", "every": 1},
}


def configuration(folder: Path, data: Data, /, world: int, **groups: dict[str, Any]) -> Config:
    """Returns TINY with other values in some groups, for a run in the folder `folder`/run."""
    said = {"run": {"dir": str(folder / "run"), "name": "run"}, **TINY}
    said = {
        name: {**said.get(name, {}), **groups.get(name, {})} for name in said.keys() | groups.keys()
    }
    return resolve(Config.model_validate(said), data.vocab, world)


def open_text(folder: Path) -> Data:
    """Returns a text of numbers and their squares as data; ranks may call this at the same time."""
    text, mine = folder / "text.txt", folder / f"text-{os.getpid()}.tmp"
    mine.write_text("".join(f"line {n} has the square {n * n}\n" for n in range(500)))
    # Another rank may be reading an existing file. So it is not replaced, and no link to it is removed:
    # both would count as a change.
    try:
        text.hardlink_to(mine)
    except FileExistsError:
        mine.unlink()
    return open_data(str(text), "bytes", 0.1, SEQ, 1, cache=folder / "cache")


def run(folder: Path, data: Data, /, world: int = 1, **groups: dict[str, Any]) -> str:
    """Trains to the end like the command line, and returns this rank's output. Collective."""
    engine = engine_of(configuration(folder, data, world, **groups))
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        # figures take seconds, and are tested in test_pretrain.py
        patch.setattr(final_report, "draw", lambda *about: [])
        Trainer(engine, data, ["pretrain/gpt.py"]).run()
    collectives.barrier(
        engine.topology.axis("world")
    )  # rank 0 writes files after the other ranks have finished
    return said.getvalue()
