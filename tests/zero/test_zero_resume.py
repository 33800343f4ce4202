"""Checkpoints of one ZeRO stage, topology and shard size go on under another; what does not fit changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoints import state_of
from tests.checkpoints import train as train_layers
from tests.configs import Case, Result, config_of, engine_of, result_of, topology_of
from tests.harness import run_ranks
from tests.pipeline.test_step import POISONS, data, with_
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.manifest import read_manifest
from threed.checkpoint.reading import Reader
from threed.config import Config
from threed.engine import Engine
from threed.ops.precision import LossScale

BEFORE, AFTER = 2, 2  # steps before a checkpoint, and after it

# ----------------------------------------------------------------------------------------------------- models of layers


@dataclass(frozen=True)
class Move:
    """A checkpoint's way from one case to another; tolerance 0: bit for bit."""

    source: Case
    target: Case
    tolerance: float


def exact(
    source: int, target: int, shape: tuple[int, int, int] = (1, 2, 1), **settings: Any
) -> Move:
    """Another stage is all that differs: the same terms are summed in the same order."""
    common = {
        "sequence": shape[2] > 1,
        "layers": 2,
        "dtype": "fp32",
        "microbatches": 1,
        "dropout": 0.1,
        **settings,
    }
    return Move(Case(*shape, zero=source, **common), Case(*shape, zero=target, **common), 0.0)


def close(source: dict[str, Any], target: dict[str, Any], **settings: Any) -> Move:
    """The order of sums differs: fp64."""
    start, end = (Case(layers=2, microbatches=-8, **case, **settings) for case in (source, target))
    return Move(start, end, 1e-9)


MOVES = [
    exact(0, 3, model="llama", dtype="bf16"),
    exact(3, 0, bucket_mib=0.01),
    exact(3, 1, shape=(2, 2, 1), dtype="bf16"),
    exact(3, 2, shape=(1, 2, 2), model="qwen-tied"),
    close({"dp": 2, "zero": 3}, {"dp": 4, "zero": 2, "shard": 2}),
    close({"dp": 4, "zero": 3, "shard": 2}, {"dp": 4, "zero": 3}, model="llama", bucket_mib=0.01),
    close({"pp": 2, "dp": 2, "zero": 3}, {"tp": 2, "zero": 1}, dropout=0.1),
    close({"dp": 2, "tp": 2, "zero": 2}, {"pp": 2, "dp": 2, "zero": 3}, model="qwen-tied"),
    close({"dp": 4, "zero": 3}, {"zero": 0}, model="gpt-untied", dropout=0.1),
]


def engine_for(move: Move, case: Case) -> Engine:
    """Bit for bit only without clipping: the norm's squares are summed slice by slice."""
    return engine_of(
        with_(config_of(case), train={"grad_clip": 0.0 if move.tolerance == 0.0 else 0.5})
    )


def go_on(engine: Engine) -> tuple[list[float], Result]:
    return train_layers(engine, AFTER), result_of(engine, [])


def depart(folder: Path, moves: dict[int, Move]) -> dict[int, tuple[list[float], Result]]:
    """A checkpoint for each move, then how it would have gone on."""
    out = {}
    for number, move in moves.items():
        engine = engine_for(move, move.source)
        train_layers(engine, BEFORE)
        engine.save(folder / f"move-{number}")
        out[number] = go_on(engine)
    return out


def arrive(folder: Path, moves: dict[int, Move]) -> dict[int, tuple[list[float], Result]]:
    """How it goes on elsewhere, from other weights than one begins with."""
    out = {}
    for number, move in moves.items():
        engine = engine_for(move, move.target)
        train_layers(engine, 1)
        engine.load(folder / f"move-{number}")
        assert (engine.steps, float(engine.optimizer.updates)) == (BEFORE, BEFORE)
        out[number] = go_on(engine)
    return out


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((0, 3, 4, 8), id="some"),
        pytest.param((1, 2, 5, 6, 7), id="others", marks=pytest.mark.grid),
    ],
)
def test_any_stage_goes_on_from_any_other(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """Losses, weights and both moments, two steps on, as without the move."""
    moves = {number: MOVES[number] for number in numbers}
    wanted: dict[int, tuple[list[float], Result]] = {}
    found: dict[int, tuple[list[float], Result]] = {}
    for world in (1, 2, 4):
        some = {number: move for number, move in moves.items() if move.source.world == world}
        wanted |= run_ranks(world, depart, tmp_path, some)[0] if some else {}
    for world in (1, 2, 4):
        some = {number: move for number, move in moves.items() if move.target.world == world}
        found |= run_ranks(world, arrive, tmp_path, some)[0]
    for number, move in moves.items():
        (losses, want), (got_losses, got) = wanted[number], found[number]
        assert got_losses == (
            losses if move.tolerance == 0.0 else pytest.approx(losses, rel=1e-9, abs=0)
        ), move
        for part, tensors in {"weight": want.weights, **want.moments}.items():
            others = {"weight": got.weights, **got.moments}[part]
            assert others.keys() == tensors.keys()
            for name, values in tensors.items():
                gap = float((others[name] - values).abs().max())
                assert gap <= move.tolerance, f"{move}: {part} of {name} is off by {gap}"


# ------------------------------------------------------------------------------------------------------ wrapped modules

ROWS = 8


class Net(nn.Module):
    """Plain torch, fp64; `seed` draws its values."""

    def __init__(self, seed: int = 2, frozen: str = "") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 3)
        self.double()
        for name, param in self.named_parameters():
            param.requires_grad_(not (frozen and name.startswith(frozen)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) - y).square().mean()


def wrapped(net: Net, stage: int, optim: str = "adamw") -> Engine:
    config = Config.model_validate({
        "zero": {"stage": stage, "resident": 0, "bucket_mib": 0.004}, "precision": {"dtype": "fp64"},
        "train": {"global_batch": ROWS, "micro_batch": ROWS // topology_of(1, 1).dp, "grad_clip": 0.0},
        "optim": {"name": optim, "lr": 1e-2, "warmup": 0, "schedule": "constant"},
    })  # fmt: skip
    return Engine(net, topology_of(1, 1), config)


def train_wrapped(engine: Engine, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        draw = torch.Generator().manual_seed(engine.steps)
        full = {
            k: torch.randn(ROWS, n, generator=draw, dtype=torch.float64)
            for k, n in (("x", 8), ("y", 3))
        }
        topology = engine.topology
        losses.append(
            engine.step(
                {key: value.chunk(topology.dp)[topology.rank] for key, value in full.items()}
            ).loss
        )
    return losses


def resume_wrapped(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Stage 3, part of it frozen, to stages 1 and 3: bit for bit. Gives how it went on."""
    first = wrapped(Net(frozen="blocks.1"), 3)
    begun = first.full_state_dict()
    train_wrapped(first, BEFORE)
    first.save(folder)
    losses, weights = train_wrapped(first, AFTER), first.full_state_dict()
    for stage in (1, 3):
        engine = wrapped(Net(seed=9, frozen="blocks.1"), stage)
        engine.load(folder)
        assert train_wrapped(engine, AFTER) == losses
        for name, values in engine.full_state_dict().items():
            assert torch.equal(values, weights[name]), name
            assert torch.equal(values, begun[name]) == name.startswith("blocks.1."), name
    return losses, weights


def parts_of(folder: Path) -> dict[str, set[str]]:
    """Which parts of which tensors a checkpoint holds."""
    return Reader(folder, read_manifest(folder)).parts


def test_wrapped_modules_go_on_and_keep_what_is_frozen(tmp_path: Path) -> None:
    """On the same ranks, and on one process; frozen weights are saved, without moments."""
    losses, weights = run_ranks(2, resume_wrapped, tmp_path / "net")[0]
    names, saved = {name for name, _ in Net().named_parameters()}, parts_of(tmp_path / "net")
    assert saved.keys() == weights.keys() == names
    for name, parts in saved.items():
        assert parts == (
            {"weight"} if name.startswith("blocks.1.") else {"weight", "exp_avg", "exp_avg_sq"}
        ), name
    alone = wrapped(Net(seed=5, frozen="blocks.1"), 0)
    alone.load(tmp_path / "net")
    assert train_wrapped(alone, AFTER) == pytest.approx(losses, rel=1e-9)
    for name, values in alone.full_state_dict().items():
        torch.testing.assert_close(values, weights[name], rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------------------- the loss scale


def resume_scale(folder: Path) -> None:
    """From stage 3 to stage 1, with an overflow just before and one after the checkpoint."""
    rule = LossScale(initial=256.0, window=3)
    first = engine_of(
        config_of(Case(dp=2, zero=3, dtype="fp16", layers=1, microbatches=1)), loss_scale=rule
    )
    for poisoned in (False, True):
        if poisoned and first.topology.rank == 1:
            POISONS["sink"](first, float("inf"))
        first.step(data(first, first.steps))
    first.save(folder)
    saved = first.optimizer.scaler.state()
    assert saved == {"loss_scale": 256.0, "good_steps": 0.0, "hysteresis_left": 1.0}
    second = engine_of(
        config_of(Case(dp=2, zero=1, dtype="fp16", layers=1, microbatches=1)), loss_scale=rule
    )
    second.load(folder)
    assert second.optimizer.scaler.state() == saved
    for engine in (first, second):
        if engine.topology.rank == 0:
            POISONS["sink"](engine, float("nan"))
        metrics = [engine.step(data(engine, engine.steps)) for _ in range(5)]
        assert [m.loss_scale for m in metrics] == [256.0, 128.0, 128.0, 128.0, 256.0]
        assert [m.skipped for m in metrics] == [2] * 5
    assert first.optimizer.scaler.state() == second.optimizer.scaler.state()


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    run_ranks(2, resume_scale, tmp_path / "scaled")


@pytest.mark.parametrize("constant", ["fp32", "fp16"])
def test_a_constant_scale_is_no_news_to_a_dynamic_one(tmp_path: Path, constant: str) -> None:
    """A run that goes on in fp16 finds its scale from the top, whatever the run before multiplied with."""
    case = Case(layers=1, dtype=constant, microbatches=1)
    first = engine_of(config_of(case), loss_scale=LossScale(2.0, dynamic=False))
    first.step(data(first))
    first.save(tmp_path / "constant")
    second = engine_of(config_of(Case(layers=1, dtype="fp16", microbatches=1)))
    second.load(tmp_path / "constant")
    assert second.step(data(second, 1)).loss_scale == 2.0**16


# ------------------------------------------------------------------------------------------------------ what is refused

KEPT = {"adamw": "exp_avg, exp_avg_sq", "sgd": "momentum_buffer", "lion": "exp_avg"}


def everything(engine: Engine) -> tuple[Any, ...]:
    optimizer = engine.optimizer
    counters = (engine.steps, engine.consumed, float(optimizer.updates), float(optimizer.bad.skips))
    return (
        *counters,
        optimizer.scaler.state(),
        [(part, name, v.tolist()) for part, name, v in state_of(engine)],
    )


def refused(folder: Path, engine: Engine, twin: Engine, message: str) -> None:
    """The load fails with `message`, changes nothing, and training goes on as that of a twin that did not try."""
    train_wrapped(engine, 1)
    before = everything(engine)
    with pytest.raises(CheckpointError, match=message):
        engine.load(folder)
    assert everything(engine) == before
    train_wrapped(engine, 2)
    train_wrapped(twin, 3)
    assert everything(engine) == everything(twin)


def check_refusals(folder: Path) -> None:
    for name in KEPT:
        engine = wrapped(Net(), 3, name)
        train_wrapped(engine, 1)
        engine.save(folder / name)
    for name, kept in KEPT.items():
        for other in KEPT.keys() - {name}:
            engine, twin = wrapped(Net(), 1, other), wrapped(Net(), 1, other)
            line = f"optimizer is {name}, which keeps {kept}; this run has {other}, which keeps {KEPT[other]}: resume"
            refused(folder / name, engine, twin, f"{line} with --optim.name {name}")
    part = wrapped(Net(frozen="head"), 2)
    train_wrapped(part, 2)
    part.save(folder / "frozen")
    whole = wrapped(Net(), 3)
    train_wrapped(whole, 1)
    whole.load(folder / "frozen")  # moments of what is trained now begin at zero; the others go on
    saved, loaded = part.full_state_dict(), whole.full_state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
    for kind, name, values in state_of(whole):
        if kind != "weight" and name.startswith("head"):
            assert not values.count_nonzero(), (kind, name)
        if kind == "exp_avg_sq" and not name.startswith("head"):
            assert values.count_nonzero(), name
    part.load(folder / "adamw")  # the other way round nothing is missing
    assert part.steps == 1


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Another optimizer's checkpoint, in every pair. One without the moments of what is trained now does fit."""
    run_ranks(2, check_refusals, tmp_path)
