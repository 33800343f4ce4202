"""AdamW, SGD and Lion on slices, with parameter groups: element by element one process, and plain torch."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.configs import STEPS, Case, Result, config_of, engine_of, result_of, topology_of
from tests.harness import run_ranks
from tests.pipeline.test_step import data, with_
from threed import models
from threed.checkpoint.files import CheckpointError
from threed.config import Config, ConfigError, ParamGroup
from threed.engine import Engine
from threed.layers import Slicing
from threed.models import Wrapped
from threed.planner.forecast import Forecast
from threed.zero import setup

LR, DECAY = 1e-2, 0.1
GROUPS = (
    ParamGroup(match="embedding.*", lr=2e-3),
    ParamGroup(match="*norm.*", weight_decay=0.3),  # which has none without
    ParamGroup(match="blocks.1.mlp.up.*", lr=0.0),
    ParamGroup(match="blocks.*.mlp.*.weight", lr=5e-3, weight_decay=0.0),
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "betas": (0.9, 0.95)},
    "sgd": {"name": "sgd", "momentum": 0.9},
    "sgd-plain": {"name": "sgd", "momentum": 0.0},
    "lion": {"name": "lion", "betas": (0.9, 0.99)},
    "mixed": {
        "groups": (
            ParamGroup(match="embedding.*", name="sgd", lr=2e-2),
            ParamGroup(match="blocks.*norm.weight", name="lion", lr=5e-3),
            ParamGroup(match="blocks.1.*", lr=5e-3, weight_decay=0.0),
        )
    },
}
SHAPES = [(1, 2, 1), (1, 2, 2), (2, 2, 1)]


def config(case: Case, optimizer: str) -> Config:
    optim = {
        "lr": LR,
        "min_lr": LR / 10,
        "weight_decay": DECAY,
        "groups": GROUPS,
        **OPTIMIZERS[optimizer],
    }
    return with_(config_of(case), optim=optim)


# ---------------------------------------------------------------------------------------------------------- one process


def train(case: Case, optimizer: str) -> tuple[Result, list[dict[str, Tensor]]]:
    """The result, and Lion's momentum before the first step and after each."""
    engine = engine_of(config(case, optimizer))
    metrics, momenta = [], []
    for step in range(STEPS):
        metrics.append(engine.step(data(engine, step)))
        momenta.append(
            result_of(engine, []).moments.get("exp_avg", {}) if optimizer == "lion" else {}
        )
    return result_of(engine, metrics), momenta


def run(cases: list[Case], optimizers: list[str]) -> dict[tuple[Case, str], Result]:
    return {(case, name): train(case, name)[0] for case in cases for name in optimizers}


def near_ties(momenta: list[dict[str, Tensor]], beta1: float, beta2: float) -> dict[str, Tensor]:
    """Where the sign that Lion takes hangs on rounding: elements whose interpolated momentum was below 1e-12 in some
    step. The gradient g of a step follows from the momentum before and after, m' = beta2 m + (1 - beta2) g."""
    close: dict[str, Tensor] = {}
    for name, first in momenta[0].items():
        before, close[name] = torch.zeros_like(first), torch.zeros_like(first, dtype=torch.bool)
        for after in (moments[name] for moments in momenta):
            grad = (after - beta2 * before) / (1 - beta2)
            close[name] |= (beta1 * before + (1 - beta1) * grad).abs() < 1e-12
            before = after
    return close


def check(got: Result, truth: Result, close: dict[str, Tensor], what: str) -> None:
    """Raises AssertionError naming what differs; a weight near a tie may go either way, by 2 lr a step."""
    torch.testing.assert_close(
        torch.tensor(got.losses), torch.tensor(truth.losses), rtol=1e-9, atol=0.0
    )
    torch.testing.assert_close(
        torch.tensor(got.norms), torch.tensor(truth.norms), rtol=1e-9, atol=0.0
    )
    assert got.moments.keys() == truth.moments.keys()
    for part, tensors in {"weight": truth.weights, **truth.moments}.items():
        found = {"weight": got.weights, **got.moments}[part]
        assert found.keys() == tensors.keys()
        for name, want in tensors.items():
            gap = (found[name] - want).abs()
            flips = close.get(name, torch.zeros_like(want, dtype=torch.bool))
            assert part != "weight" or float(gap.max()) <= 2.001 * STEPS * LR, f"{what}: {name}"
            gap = gap.masked_fill(flips, 0.0) if part == "weight" else gap
            assert float(gap.max()) <= 1e-9, (
                f"{what}: {part} of {name} is off by {float(gap.max())}"
            )


@functools.cache
def truth_of(case: Case, optimizer: str) -> tuple[Result, dict[str, Tensor]]:
    """One process's result, and near ties."""
    result, momenta = train(case.truth, optimizer)
    close = near_ties(momenta, *OPTIMIZERS["lion"]["betas"]) if optimizer == "lion" else {}
    # A bias on keys adds the same to all scores of a query: its gradient is zero, and what is computed is rounding.
    assert {name for name, flags in close.items() if flags.any()} <= {
        f"blocks.{n}.attention.key.bias" for n in (0, 1)
    }
    return result, close


NAMES = ("adamw", "sgd", "lion", "mixed")


def cases_of(shape: tuple[int, int, int]) -> list[Case]:
    pp, dp, tp = shape
    return [
        Case(pp, dp, tp, sequence=tp > 1, zero=zero, layers=2, bucket_mib=0.02)
        for zero in (0, 1, 2, 3)
    ]


@pytest.mark.seldom("(1, 2, 1)")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_optimizer_with_groups_equals_one_process(shape: tuple[int, int, int]) -> None:
    """Stages 0 to 3, on more than two ranks 1 and 3, with clipping; a bucket holds parts of several parameters."""
    some = {(1, 2, 1): ["adamw", "mixed"], (1, 2, 2): ["sgd"], (2, 2, 1): ["lion"]}
    check_all(cases_of(shape)[:: 1 if shape == SHAPES[0] else -2], some[shape])


@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_optimizer_equals_one_process_in_every_shape(shape: tuple[int, int, int]) -> None:
    check_all(cases_of(shape), [*NAMES])


def check_all(cases: list[Case], names: list[str]) -> None:
    for (case, optimizer), got in run_ranks(cases[0].world, run, cases, names)[0].items():
        check(got, *truth_of(case, optimizer), f"{optimizer} {case}")


@pytest.mark.parametrize(
    ("optimizer", "moments"), [("adamw", 2), ("sgd", 1), ("sgd-plain", 0), ("lion", 1)]
)
def test_the_forecast_knows_what_an_optimizer_keeps(optimizer: str, moments: int) -> None:
    forecast = Forecast.of(config(Case(dtype="fp32", zero=0), optimizer), 1)
    assert forecast.ranks[0].bytes["optimizer"] == moments * 4 * forecast.parameters


def test_groups_do_what_they_say() -> None:
    """Of one plain SGD step: weights move by their own rate, from what their own decay adds to the gradient."""
    engines = {groups: engine_of(with_(config(Case(layers=2), "sgd-plain"), optim={"groups": groups, "warmup": 0},
                                       train={"grad_clip": 0.0})) for groups in ((), GROUPS)}  # fmt: skip
    start = engines[()].full_state_dict()
    moved = {}
    for groups, engine in engines.items():
        engine.step(data(engine))
        moved[groups] = {
            name: start[name] - values for name, values in engine.full_state_dict().items()
        }
    for name, step in moved[()].items():
        decays = start[name].dim() > 1
        grad = step / LR - (DECAY * start[name] if decays else 0.0)
        rate, decay = LR, DECAY if decays else 0.0
        if name.startswith("embedding."):
            rate = 2e-3
        elif "norm." in name:
            decay = 0.3
        elif name.startswith("blocks.1.mlp.up."):
            rate = 0.0
        elif ".mlp." in name and name.endswith(".weight"):
            rate, decay = 5e-3, 0.0
        torch.testing.assert_close(
            moved[GROUPS][name], rate * (grad + decay * start[name]), rtol=0, atol=1e-12
        )


def saved(case: Case, folder: Path) -> Result:
    """Saves after a step, and goes on."""
    engine = engine_of(config(case, "mixed"))
    engine.step(data(engine, 0))
    engine.save(folder)
    return result_of(engine, [engine.step(data(engine, 1))])


def resumed(case: Case, folder: Path) -> Result:
    """The step after the save, elsewhere; with other optimizers the checkpoint is refused."""
    engine = engine_of(config(case, "adamw"))
    with pytest.raises(CheckpointError, match=r"optimizer is adamw --optim\.groups"):
        engine.load(folder)
    engine = engine_of(config(case, "mixed"))
    engine.load(folder)
    return result_of(engine, [engine.step(data(engine, 1))])


def test_optimizers_of_groups_resume_in_another_topology(tmp_path: Path) -> None:
    here, there = Case(tp=2, layers=2), Case(pp=2, layers=2)
    want = run_ranks(2, saved, here, tmp_path / "step")[0]
    got = run_ranks(2, resumed, there, tmp_path / "step")[0]
    check(got, want, {}, "resumed")


# ---------------------------------------------------------------------------------------------------------- plain torch

ROWS = 8


class Net(nn.Module):
    """Plain torch, fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) - y).square().mean()


def inputs(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    shapes = {"x": (ROWS, 8), "y": (ROWS, 3)}
    return {
        key: torch.randn(shape, generator=draw, dtype=torch.float64)
        for key, shape in shapes.items()
    }


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, algorithm 2."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                m = self.state[param].setdefault("m", torch.zeros_like(param))
                update = (beta1 * m + (1 - beta1) * param.grad).sign() + group[
                    "weight_decay"
                ] * param
                param -= group["lr"] * update
                m.copy_(beta2 * m + (1 - beta2) * param.grad)


PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9),
    "sgd-plain": lambda groups: torch.optim.SGD(groups, lr=LR),
    "lion": lambda groups: Lion(groups, LR, (0.9, 0.99)),
    "lion of mixed": lambda groups: Lion(groups, LR, (0.9, 0.95)),
}
NET_GROUPS = (
    ParamGroup(match="blocks.1.*", lr=3e-3),
    ParamGroup(match="*.bias", lr=LR / 2, weight_decay=0.25),
)
NET_MIXED = (
    ParamGroup(match="blocks.1.*", name="lion", lr=3e-3),
    ParamGroup(match="*.bias", name="sgd", lr=LR / 2, weight_decay=0.25),
)


def train_plainly(optimizer: str) -> dict[str, Tensor]:
    """By torch, with its own parameter groups."""
    net, groups = Net(), defaultdict[str, list[dict[str, Any]]](list)
    mixed = optimizer == "mixed"
    for name, param in net.named_parameters():
        group = {"params": [param], "lr": LR, "weight_decay": DECAY if param.dim() > 1 else 0.0}
        kind = "adamw" if mixed else optimizer
        if name.startswith("blocks.1."):
            kind, group["lr"] = "lion of mixed" if mixed else optimizer, 3e-3
        elif name.endswith(".bias"):
            kind = "sgd" if mixed else optimizer
            group |= {"lr": LR / 2, "weight_decay": 0.25}
        groups[kind].append(group)
    steppers = [PLAIN[kind](some) for kind, some in groups.items()]
    for step in range(STEPS):
        net.zero_grad()
        net(**inputs(step)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        for stepper in steppers:
            stepper.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def wrapped(optimizer: str, stage: int, groups: tuple[ParamGroup, ...] = NET_GROUPS) -> Engine:
    config = Config.model_validate({
        "zero": {"stage": stage, "resident": 0, "bucket_mib": 0.004}, "precision": {"dtype": "fp64"},
        "train": {"global_batch": ROWS, "micro_batch": 2, "grad_clip": 0.5},
        "optim": {
            "lr": LR, "warmup": 0, "schedule": "constant", "weight_decay": DECAY,
            **OPTIMIZERS[optimizer], "groups": NET_MIXED if optimizer == "mixed" else groups,
        },
    })  # fmt: skip
    return Engine(Net(), topology_of(1, 1), config)


def train_wrapped() -> dict[tuple[str, int], dict[str, Tensor]]:
    found = {}
    for optimizer in OPTIMIZERS:
        for stage in (0, 1, 2, 3):
            engine = wrapped(optimizer, stage)
            for step in range(STEPS):
                index, dp = engine.topology.rank, engine.topology.dp
                engine.step({key: value.chunk(dp)[index] for key, value in inputs(step).items()})
            found[optimizer, stage] = engine.full_state_dict()
    return found


def test_a_wrapped_module_trains_as_by_torchs_optimizers() -> None:
    plain = {optimizer: train_plainly(optimizer) for optimizer in OPTIMIZERS}
    for (optimizer, stage), weights in run_ranks(2, train_wrapped)[0].items():
        assert weights.keys() == plain[optimizer].keys()
        for name, want in plain[optimizer].items():
            gap = float((weights[name] - want).abs().max())
            assert gap <= 1e-9, f"{optimizer}, stage {stage}: {name} is off by {gap}"


# ------------------------------------------------------------------------------------------------------------- patterns


def groups_of(*patterns: str) -> Config:
    groups = tuple(ParamGroup(match=pattern, lr=1e-3) for pattern in patterns)
    return with_(config_of(Case(pp=2, tp=2, layers=2)), optim={"groups": groups})


@pytest.mark.parametrize("model", ["gpt", "llama", "net"])
def test_patterns_that_match_nothing_are_named(model: str) -> None:
    """All of them, beside some names that there are."""
    if model == "net":
        layers, right = Wrapped(Net()).layers(), ["*", "blocks.1.*", "head.bias"]
    else:
        built = models.build(config_of(Case(model=model, layers=2)).model, Slicing())
        layers, right = built.layers(), ["*", "blocks.1.*", "embedding.word.weight"]
    assert not list(setup.find_group_problems(groups_of(*right).optim, layers))
    wrong = groups_of("blocks.7.*", *right, "Head.*").optim
    found = list(setup.find_group_problems(wrong, layers))
    named = [re.findall(r"--optim.groups '(.*)' matches no parameter", p) for p in found]
    assert named == [["blocks.7.*"], ["Head.*"]]
    assert all("blocks.0." in problem or "embedding.word.weight" in problem for problem in found)


def refuse() -> None:
    """Every rank, whatever stage it is."""
    with pytest.raises(ConfigError, match=r"'blocks\.7\.\*' matches no parameter"):
        engine_of(groups_of("embedding.*", "blocks.7.*", "head.*"))
    engine_of(groups_of("embedding.*", "blocks.1.*", "head.*"))


def test_the_engine_refuses_patterns_that_match_nothing() -> None:
    run_ranks(4, refuse)
    with pytest.raises(ConfigError, match=r"'tail\.\*' matches no parameter"):
        wrapped("sgd", 1, (ParamGroup(match="tail.*", lr=1e-3),))


def refuse_groups_of_some_experts(case: Case) -> None:
    """Patterns that match some experts of a layer, or nothing, and a pattern that fits."""

    def build(pattern: str) -> Engine:
        groups = (ParamGroup(match=pattern, lr=1e-3),)
        return engine_of(with_(config_of(case), optim={"groups": groups}))

    with pytest.raises(ConfigError, match=r"mlp\.experts\.\d\..* different options"):
        build("*.experts.3.*")
    with pytest.raises(ConfigError, match=r"'\*\.exparts\.\*' matches no parameter"):
        build("*.exparts.*")
    build("*.experts.*.weight")


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_patterns_must_match_all_experts_in_every_layout(ep: int) -> None:
    """With ep 4, each rank has one of the four experts."""
    run_ranks(4, refuse_groups_of_some_experts, Case(model="Single", dp=4, ep=ep, microbatches=1))
