"""Around an offloaded training: checkpoints, evaluation, memory, and what is said when a drive fails."""

from __future__ import annotations

import math
import os
import runpy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threed
from tests.harness import run_ranks
from tests.live import Live
from tests.zero.test_zero_offload_wrapped import (
    HOME,
    Case,
    Place,
    Result,
    difference,
    ds_config,
    my_pieces,
    pieces,
    prepared,
    start,
    train_step,
)
from threed.interop.deepspeed.config.reader import read
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.memory.io import SwapError

NVME: Place = ("nvme", "nvme")

# --------------------------------------------------------------------------------------------------------- checkpoints

SAVED = [Case("llama", 3, NVME, "fp64"), Case("llama", 2, ("nvme", "none"), "fp64")]
LOADED = [
    Case("llama", 3, NVME, "fp64"),
    Case("llama", 3, ("cpu", "nvme"), "fp64"),
    Case("llama", 1, HOME, "fp64"),
]


def state(engine: DeepSpeedEngine) -> Result:
    assert engine.metrics is not None
    return [engine.metrics.loss], [engine.metrics.grad_norm], engine.full_state_dict()


def save(cases: list[Case], folder: str) -> list[Result]:
    """Trains a step, saves, trains another one."""
    results = []
    for case in cases:
        engine = start(case)
        train_step(engine, 0)
        engine.save_checkpoint(folder, tag=str(case.stage), client_state={"epoch": case.stage})
        train_step(engine, 1)
        results.append(state(engine))
    return results


def load(cases: list[Case], folder: str) -> list[list[Result]]:
    """What the second step gives after loading over other weights, in a fresh engine and in one that has trained."""
    results: list[list[Result]] = []
    for case in cases:
        engine = start(case, seed=1)
        results.append([])
        for saved in SAVED:
            assert engine.load_checkpoint(folder, str(saved.stage))[1] == {"epoch": saved.stage}
            train_step(engine, 1)
            results[-1].append(state(engine))
    return results


def same(world: int) -> list[Case]:
    """With the same micro-batches, however many ranks share them."""
    return [replace(case, accumulation=4 // world) for case in LOADED]


def save_and_load(folder: str) -> tuple[list[Result], list[list[Result]]]:
    return save(SAVED, folder), load(same(2), folder)


def test_checkpoints_know_no_places(tmp_path: Path) -> None:
    """Saved from a drive by two ranks, a training goes on anywhere, on one rank or two."""
    want, by_two = run_ranks(2, save_and_load, str(tmp_path))[0]
    by_one = run_ranks(1, load, same(1), str(tmp_path))[0]
    for case, got in zip((*same(2), *same(1)), (*by_two, *by_one), strict=True):
        assert [difference(a, b) <= 1e-12 for a, b in zip(got, want, strict=True)] == [
            True,
            True,
        ], case


# ---------------------------------------------------------------------------------------------------------- a program


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Biases and norms without decay."""
    params = list(model.parameters())
    bare = [param for param in params if param.dim() < 2]
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": bare, "weight_decay": 0.0, "lr": 1e-3},
    ]


def program(places: list[Place], stage: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    """A torch optimizer with groups, a schedule, evaluation in between and amid a step, a file of keys."""
    results = []
    for place in places:
        case = Case("llama", stage, place, "bf16")
        model, ds = prepared(case), ds_config(case)
        own = torch.optim.AdamW(grouped(model), lr=3e-3, weight_decay=0.1, eps=1e-5)
        params = {
            "warmup_num_steps": 3,
            "total_num_steps": 9,
            "warmup_type": "linear",
            "warmup_max_lr": 3e-3,
        }
        ds |= {"scheduler": {"type": "WarmupDecayLR", "params": params}}
        engine, _, _, _ = threed.initialize(model=model, config=ds, optimizer=own)
        losses = []
        for _ in range(3):
            losses.append(float(engine.eval_batch(iter(my_pieces(engine, 0)))))
            for piece in my_pieces(engine, 0):
                engine.backward(engine(**piece).loss)
                with torch.no_grad():
                    losses.append(float(engine(**pieces(8, 1)[0]).loss))
                engine.step()
        losses.append(float(engine.train_batch(iter(my_pieces(engine, 0)))))
        results.append((losses, engine.full_state_dict()))
    return results


@pytest.mark.parametrize(
    "places",
    [[NVME], pytest.param([("cpu", "cpu"), NVME, ("nvme", "none")], marks=pytest.mark.grid)],
    ids=["drive", "all"],
)
def test_a_program_with_everything_in_it(places: list[Place]) -> None:
    (losses, weights), *others = run_ranks(2, program, [HOME, *places], 3)[0]
    assert losses[-1] < losses[0]
    for other_losses, other_weights in others:
        assert other_losses == losses
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)


def example(places: list[Place], folder: str) -> list[list[float]]:
    """Losses of examples/deepspeed_offload.py, by where its file says that state lives."""
    os.chdir(folder)  # its folder is relative
    path = Path(__file__).parents[2] / "examples" / "deepspeed_offload.py"
    train = runpy.run_path(str(path))["train"]
    train.__globals__["SEQ"] = 32  # bf16 is slow on processors that do not multiply it
    ds = read(path.with_name("ds_offload.json"))
    losses = []
    for place in places:
        for key, device in zip(("offload_optimizer", "offload_param"), place, strict=True):
            ds["zero_optimization"][key]["device"] = device
        losses.append(train(ds, steps=2))
    return losses


def test_the_example_trains_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    alone = run_ranks(1, example, [NVME], str(tmp_path))[0][0]
    first, *others = run_ranks(2, example, [NVME, HOME, ("cpu", "nvme")], str(tmp_path))[0]
    assert others == [first, first]
    assert first == pytest.approx(alone, abs=2e-4)  # bf16
    # one of 260 bytes, untrained; which bytes these are depends on the version of Python
    assert alone[0] == pytest.approx(math.log(260), abs=0.05)


# -------------------------------------------------------------------------------------------------------------- memory


class Deep(nn.Module):
    """Many blocks, so that one of them is small beside all."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, y)


def peak(blocks: int) -> tuple[int, int]:
    """The most bytes of tensors alive while a model is built slice by slice and trained; those of its parameters."""
    with torch.device("meta"):
        model = Deep(blocks)
    live, most, inner = Live(), 0, Live.__torch_dispatch__

    def watch(self: Live, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal most
        out = inner(self, func, types, args, kwargs)
        most = max(most, live.bytes_now())
        return out

    Live.__torch_dispatch__ = watch  # type: ignore[method-assign]
    try:
        with live:
            ds = ds_config(Case(place=NVME, accumulation=1)) | {"train_batch_size": 2}
            ds["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            engine = threed.initialize(model=model, config=ds)[0]
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 64), torch.zeros(2, 64)))
                engine.step()
    finally:
        Live.__torch_dispatch__ = inner  # type: ignore[method-assign]
    return most, engine.engine.layout.parameters * 4


def test_memory_does_not_grow_with_the_model() -> None:
    """Of the 16 bytes a parameter has in all, activations of 2 × 64 numbers and a few scalars a block remain."""
    (few, small), (many, large) = (run_ranks(1, peak, blocks)[0] for blocks in (8, 32))
    assert many - few < (large - small) / 5
    assert many < 4 * large  # parameters, gradients, moments


# -------------------------------------------------------------------------------------------------------------- errors


def refused(folder: str) -> list[str]:
    found = []
    for place in (("nvme", "none"), ("none", "nvme")):
        ds = ds_config(Case("llama", place=place))
        for key in ("offload_optimizer", "offload_param"):
            ds["zero_optimization"][key]["nvme_path"] = folder
        try:
            threed.initialize(model=prepared(Case("llama")), config=ds)
        except SwapError as error:
            found.append(str(error))
    return found


def test_a_folder_that_is_none() -> None:
    with tempfile.NamedTemporaryFile() as file:
        found = run_ranks(1, refused, file.name)[0]
    assert len(found) == 2
    for text in found:
        assert "rank 0" in text
        assert file.name in text


def test_what_is_said_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    engine = start(replace(Case("llama"), place=("nvme", "cpu")))
    said = capsys.readouterr().err
    assert said.count("\n") == len(engine.notes)
    assert (
        "threed: zero_optimization.offload_param.nvme_path: no effect: NVMe offload is not enabled"
        in said
    )
    zero = engine.engine.config.zero
    assert (zero.offload_optimizer, zero.offload_params, zero.nvme_path) == (
        "nvme",
        "cpu",
        tempfile.gettempdir(),
    )
