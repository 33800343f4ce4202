"""Unmodified `transformers` models whose state lives on the host or on a drive, as a ds_config.json says it.

Offload changes the place of things and nothing else: on two ranks every bit is that of the run without it, on one rank
every bit is the same wherever the slices live, and all of it is what plain PyTorch computes.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threed
from tests import hf_models
from tests.harness import run_ranks
from threed.interop.deepspeed.engine import DeepSpeedEngine
from threed.memory import io

STEPS, ROWS = 3, 8
# Adam amplifies rounding where gradients are near zero: a larger eps where numbers are narrow.
EPS = {"fp64": 1e-8, "fp32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}
Place = tuple[str, str]  # of the optimizer's states, of parameters
HOME: Place = ("none", "none")
STATES: list[Place] = [("cpu", "none"), ("nvme", "none")]
PARAMS: list[Place] = [
    ("none", "cpu"),
    ("none", "nvme"),
    ("cpu", "cpu"),
    ("cpu", "nvme"),
    ("nvme", "cpu"),
]
ALL = [*STATES, *PARAMS, ("nvme", "nvme")]
Result = tuple[list[float], list[float], dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model, where its state lives, and what is special about it."""

    model: str = "gpt2"
    stage: int = 3
    place: Place = HOME
    dtype: str = "fp32"
    accumulation: int = 2
    threshold: int = 40  # elements up to which a parameter stays whole under stage 3
    checkpointing: bool = False
    frozen: str = ""  # parameters whose name has this in it
    meta: bool = False

    def at(self, place: Place) -> Case:
        return replace(self, place=place)


def ds_config(case: Case) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.stage, "reduce_bucket_size": 3000}
    zero |= {"stage3_param_persistence_threshold": case.threshold}
    for key, device in zip(("offload_optimizer", "offload_param"), case.place, strict=True):
        zero[key] = {
            "device": device,
            "nvme_path": tempfile.gettempdir(),
            "pin_memory": True,
            "buffer_count": 4,
        }
    return {
        "train_batch_size": ROWS, "gradient_accumulation_steps": case.accumulation, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": EPS[case.dtype], "weight_decay": 0.1}},
        "bf16": {"enabled": case.dtype == "bf16"}, "zero_optimization": zero,
        # The first steps of these models overflow by it, and no more than that.
        "fp16": {"enabled": case.dtype == "fp16", "initial_scale_power": 20, "hysteresis": 1},
    }  # fmt: skip


def prepared(case: Case, seed: int = 0) -> nn.Module:
    """The model with what is special about it."""
    with torch.device("meta" if case.meta else "cpu"):
        model = hf_models.make(case.model, seed)
    model = model if case.dtype == "fp64" else model.float()
    for name, param in model.named_parameters():
        if case.frozen and case.frozen in name:
            param.requires_grad_(False)
    if case.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def start(case: Case, seed: int = 0) -> DeepSpeedEngine:
    return threed.initialize(model=prepared(case, seed), config=ds_config(case))[0]


def pieces(step: int, count: int) -> list[dict[str, Tensor]]:
    full = hf_models.batch(step, ROWS)
    return [{key: value.chunk(count)[i] for key, value in full.items()} for i in range(count)]


def my_pieces(engine: DeepSpeedEngine, step: int) -> list[dict[str, Tensor]]:
    n = engine.gradient_accumulation_steps()
    return pieces(step, engine.world_size * n)[engine.global_rank * n :][:n]


def loss_of(forward: Any, piece: dict[str, Tensor]) -> Tensor:
    """In the width of the weights; the loss inside of transformers is fp32 whatever they are."""
    out = forward(**piece)
    if isinstance(out, Tensor):
        return out
    logits, labels = out.logits[:, :-1].flatten(0, 1), piece["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels) if out.logits.dtype == torch.float64 else out.loss


def train_step(engine: DeepSpeedEngine, step: int) -> None:
    for piece in my_pieces(engine, step):
        engine.backward(loss_of(engine, piece))
        engine.step()


def train(case: Case) -> Result:
    engine = start(case)
    losses, norms = [], []
    for step in range(STEPS):
        train_step(engine, step)
        assert engine.metrics is not None
        losses.append(engine.metrics.loss)
        norms.append(engine.metrics.grad_norm)
    if case.dtype == "fp16":
        assert 0 < engine.skipped_steps < STEPS
    return losses, norms, engine.full_state_dict()


def train_all(cases: Sequence[Case]) -> list[Result]:
    return [train(case) for case in cases]


def difference(got: Result, want: Result) -> float:
    """The largest difference of two results in anything; infinite where only one of two is not a number."""
    assert got[2].keys() == want[2].keys()
    pairs = [
        torch.tensor(two, dtype=torch.float64).unbind()
        for two in zip(got[:2], want[:2], strict=True)
    ]
    pairs += [(got[2][name].double(), tensor.double()) for name, tensor in want[2].items()]
    gaps = (torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()) for a, b in pairs)
    return max(float(gap.nan_to_num(nan=float("inf")).max()) for gap in gaps)


def train_plainly(case: Case, count: int) -> Result:
    """Torch's AdamW and clipping on the mean of `count` micro-batches' mean losses."""
    model = prepared(case)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, eps=EPS[case.dtype], weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(0.0)
        for piece in pieces(step, count):
            loss = loss_of(model, piece) / count
            loss.backward()
            losses[-1] += float(loss.detach())
        for param in trained:  # what was never used has no gradient, and torch leaves it alone
            unused_now = param.grad is None and param in optimizer.state
            param.grad = torch.zeros_like(param) if unused_now else param.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return (
        losses,
        norms,
        {
            name: param.detach().clone()
            for name, param in model.named_parameters(remove_duplicate=False)
        },
    )


# --------------------------------------------------------------------------------------------- places change no number

# cases, and places of their states
TWO_RANKS = [
    (Case(stage=1), STATES),
    (Case("llama", stage=2, dtype="bf16", checkpointing=True), STATES),
    (Case(stage=2, dtype="fp16"), STATES[1:]),
    (Case("llama"), ALL[1::2]),
    (
        Case(dtype="bf16", checkpointing=True),
        [("none", "nvme"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")],
    ),
    (Case("llama", dtype="fp16", accumulation=4), [("cpu", "cpu"), ("nvme", "nvme")]),
    (Case("odd", frozen="blocks.0.0"), [("nvme", "none"), ("nvme", "nvme")]),
    (Case("llama", dtype="bf16", threshold=10**6), [("nvme", "nvme")]),  # all of it stays whole
    (Case(dtype="bf16", meta=True, accumulation=1), [("nvme", "nvme")]),
]


def test_on_two_ranks_offload_changes_no_bit() -> None:
    """Every dtype and kind of model, in one place each.

    Other tests have stage 1, checkpointing under stage 3, and small parameters that stay whole.
    """
    check_two_ranks([(case, places[-1:]) for case, places in (TWO_RANKS[n] for n in (1, 5, 6, 8))])


@pytest.mark.grid
def test_on_two_ranks_offload_changes_no_bit_in_any_place() -> None:
    check_two_ranks(TWO_RANKS)


def check_two_ranks(cases: Sequence[tuple[Case, Sequence[Place]]]) -> None:
    runs = [case.at(place) for case, places in cases for place in (HOME, *places)]
    results = dict(zip(runs, run_ranks(2, train_all, runs)[0], strict=True))
    for case, places in cases:
        found = {place: difference(results[case.at(place)], results[case]) for place in places}
        assert found == dict.fromkeys(places, 0), case


ONE_RANK = [
    (Case(stage=1, dtype="bf16"), STATES),
    (Case("llama", stage=2, checkpointing=True), STATES),
    (Case("llama", dtype="bf16"), [*PARAMS, ("nvme", "nvme")]),
    (Case(checkpointing=True), [("cpu", "cpu"), ("nvme", "nvme")]),
    (Case(dtype="fp16", meta=True), [("cpu", "cpu"), ("nvme", "nvme")]),
]


def test_on_one_rank_slices_are_the_same_wherever_they_live() -> None:
    """One rank alone has slices only where there is offload; they may be summed up in another order than the whole."""
    runs = [case.at(place) for case, places in ONE_RANK for place in (HOME, *places)]
    results = dict(zip(runs, run_ranks(1, train_all, runs)[0], strict=True))
    for case, places in ONE_RANK:
        first = results[case.at(places[0])]
        assert difference(first, results[case]) <= 1e-6
        found = {place: difference(results[case.at(place)], first) for place in places}
        assert found == dict.fromkeys(places, 0), case


FP64 = [
    *(Case(m, stage, ("nvme", "none"), "fp64") for m in ("gpt2", "llama") for stage in (1, 2)),
    *(Case(m, 3, place, "fp64") for m in ("gpt2", "llama") for place in (("cpu", "cpu"), ("nvme", "nvme"))),
    Case("gpt2", 3, ("cpu", "nvme"), "fp64", checkpointing=True, frozen="attn"),
    Case("llama", 3, ("nvme", "nvme"), "fp64", checkpointing=True, frozen="layers.1"),
    Case("gpt2", 3, ("nvme", "cpu"), "fp64", frozen="wte"),  # tied
    Case("odd", 3, ("nvme", "nvme"), "fp64"),  # a block that runs twice, weights used in other modules, unused ones
    Case("odd", 3, ("cpu", "nvme"), "fp64", frozen="blocks.1"),
    Case("odd-span", 2, ("nvme", "none"), "fp64"),
]  # fmt: skip


@pytest.mark.seldom("1")
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, FP64[::2]),
        (2, FP64[1::2]),
        pytest.param(1, FP64[1::2], marks=pytest.mark.grid),
        pytest.param(2, FP64[::2], marks=pytest.mark.grid),
    ],
    ids=["1", "2", "1, others", "2, others"],
)
def test_it_is_what_plain_pytorch_computes(world: int, cases: list[Case]) -> None:
    """Every second case on one rank, and the others on two."""
    wanted: dict[Case, Result] = {}
    for case, got in zip(cases, run_ranks(world, train_all, cases)[0], strict=True):
        plain = replace(case, place=HOME, stage=0, checkpointing=False)
        if plain not in wanted:
            wanted[plain] = train_plainly(plain, world * case.accumulation)
        assert difference(got, wanted[plain]) <= 1e-12, case


# ------------------------------------------------------------------------------------------------------ a slow drive


def train_slowly(cases: Sequence[Case]) -> list[Result]:
    """Transfers take their time, and what is read is not a number until they are done."""
    submit, move = io.Disk._submit, io._move

    def spoiled(disk: io.Disk, write: bool, offset: int, tensor: Tensor) -> list[Future[None]]:
        if not write:
            ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes)
        return submit(disk, write, offset, tensor)

    def late(*arguments: Any) -> None:
        time.sleep(0.002)
        move(*arguments)

    io.Disk._submit, io._move = spoiled, late  # type: ignore[method-assign]
    return train_all(cases)


def test_nothing_is_used_before_it_has_arrived_or_overwritten_before_it_has_left() -> None:
    case = Case("llama", dtype="bf16")
    runs = [case, case.at(("nvme", "nvme")), case.at(("none", "nvme")), case.at(("nvme", "none"))]
    want, *others = run_ranks(2, train_slowly, runs)[0]
    assert [difference(got, want) for got in others] == [0, 0, 0]


class Routed(nn.Module):
    """Residual layers of which each step runs others: what was gathered ahead is often not what comes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(layers))
        self.route: Sequence[int] = range(layers)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.route:
            x = x + torch.tanh(self.layers[number](x))
        return x.square().mean()


def train_routed(place: Place, routes: Sequence[Sequence[int]]) -> Result:
    torch.manual_seed(0)
    case = Case(accumulation=1, threshold=0, place=place)
    config = ds_config(case)
    engine = threed.initialize(model=Routed(30), config=config)[0]
    losses, norms = [], []
    for step, route in enumerate(routes):
        engine.module.route = route
        loss = engine(torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(step)))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, engine.full_state_dict()


def test_wrong_guesses_of_what_comes_next_starve_no_drive() -> None:
    pick, routes = random.Random(0), [list(range(30))]
    for count in (20, 10, 15):
        routes += [sorted(pick.sample(routes[0], count)), routes[0]]
    want, got = (train_routed(place, routes) for place in (("cpu", "cpu"), ("nvme", "nvme")))
    assert difference(got, want) == 0
