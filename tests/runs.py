"""The real trainer in ranks of the harness: a tiny model on a tiny text, a run in a fraction of a second."""

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
    """TINY with other values in some groups, as the run `folder`/run."""
    said = {"run": {"dir": str(folder / "run"), "name": "run"}, **TINY}
    said = {
        name: {**said.get(name, {}), **groups.get(name, {})} for name in said.keys() | groups.keys()
    }
    return resolve(Config.model_validate(said), data.vocab, world)


def open_text(folder: Path) -> Data:
    """Numbers and their squares; ranks may call it at the same time."""
    text, mine = folder / "text.txt", folder / f"text-{os.getpid()}.tmp"
    mine.write_text("".join(f"line {n} has the square {n * n}\n" for n in range(500)))
    # the first one's stays: another rank may be reading it
    with contextlib.suppress(FileExistsError):
        text.hardlink_to(mine)
    mine.unlink()
    return open_data(str(text), "bytes", 0.1, SEQ, 1, cache=folder / "cache")


def run(folder: Path, data: Data, /, world: int = 1, **groups: dict[str, Any]) -> str:
    """Trains to the end as a command line would; what this rank printed. Collective."""
    engine = engine_of(configuration(folder, data, world, **groups))
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        # seconds of matplotlib; test_pretrain.py looks at the figures
        patch.setattr(final_report, "draw", lambda *about: [])
        Trainer(engine, data, ["pretrain/gpt.py"]).run()
    collectives.barrier(engine.topology.axis("world"))  # rank 0 writes on after the others are done
    return said.getvalue()
