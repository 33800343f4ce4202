"""torch.distributed.pipelining as a judge of our plans, and plans that were published with it.

Every schedule that torch can express, as its CSV text, passes torch's own validation and simulation, and gives on two
gloo ranks the gradients of one process. PRIVATE functions of the pinned wheel do that (torch 2.13.0,
torch/distributed/pipelining/schedules.py): another version of torch may need another test, and no other code.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from threed.schedules import (
    Action,
    Kind,
    Plan,
    available,
    build,
    from_csv,
    lower,
    read_csv,
    to_csv,
    validate,
)
from threed.testing.ranks import preload

preload("torch.distributed.pipelining")  # a second of imports
DATA = Path(__file__).parents[1] / "data" / "schedules"
PUBLISHED = sorted(path.name for path in DATA.glob("*.csv"))
OURS = available()  # without what other tests register
NOT_EXPRESSIBLE = {
    "chimera": "every stage is on two ranks",
    "dualpipe": "every stage is on two ranks",
    "2bw": "two versions of the weights: no order of actions says so",
}
JUDGED = [name for name in OURS if name not in NOT_EXPRESSIBLE]
SIZES = [(stages, count) for stages in (1, 2, 3, 4, 8) for count in (1, 2, 3, 4, 6, 8, 16)]


def published(name: str) -> Plan:
    """A plan of tests/data/schedules, as our reader gives it."""
    return read_csv(str(DATA / name))


def built(name: str, sizes: list[tuple[int, int]]) -> list[Plan]:
    """The plans of a schedule for those numbers that it has: at least one."""
    plans = []
    for stages, count in sizes:
        try:
            plans.append(build(name, stages, count))
        except ValueError:
            continue
    assert plans, f"{name} has none of {sizes}"
    return plans


# ------------------------------------------------------------------------------------- validation and simulation there


def judge(plan: Plan) -> None:
    """torch accepts our text: it is complete, in order, and no rank waits for ever."""
    from torch.distributed.pipelining import schedules as judges

    rows = list(csv.reader(io.StringIO(to_csv(plan))))
    actions = {
        rank: [judges._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)
    }
    total = plan.total_stages
    home = judges._validate_schedule(actions, plan.stages, total, plan.microbatches)
    assert home == {plan.stage_of(r, c): r for r in range(plan.stages) for c in range(plan.chunks)}
    with_messages = judges._add_send_recv(actions, home.__getitem__, total)
    flat = {  # its simulator knows no pairs; its runtime runs their parts one after the other
        rank: [part for action in mine for part in action.sub_actions or (action,)]
        for rank, mine in with_messages.items()
    }
    ran = judges._simulate_comms_compute(flat, home.__getitem__, total)
    assert {rank: [a for a in mine if a is not None] for rank, mine in ran.items()} == flat


@pytest.mark.parametrize("name", JUDGED)
def test_every_plan_passes_what_torch_asks(name: str) -> None:
    for plan in built(name, SIZES):
        judge(plan)


@pytest.mark.parametrize("name", PUBLISHED)
def test_plans_published_with_torch_are_right_here_and_there(name: str) -> None:
    plan = published(name)
    validate(plan)
    validate(lower(plan, gathers=True))
    judge(plan)
    assert same_order(from_csv(to_csv(plan)), plan)


def test_a_published_plan_without_communication_or_gaps_is_written_as_it_was() -> None:
    for name in ("dualpipev_4rank_10mb.csv", "torchtitan_custom_2rank.csv"):
        assert to_csv(published(name)).split() == (DATA / name).read_text().split()
    pair = Action.parse("F0.7+B1.3")
    assert pair in published("dualpipev_4rank_10mb.csv").ranks[0]


@pytest.mark.parametrize("name", JUDGED)
def test_a_plan_that_was_written_is_read_again(name: str) -> None:
    for plan in built(name, SIZES):
        assert same_order(from_csv(to_csv(plan)), plan)


def same_order(one: Plan, other: Plan) -> bool:
    """Whether two plans do the same on all ranks, whatever the order of a rank's chunks."""
    return [by_stage(one, rank) for rank in range(one.stages)] == [
        by_stage(other, rank) for rank in range(other.stages)
    ]


def by_stage(plan: Plan, rank: int) -> list[list[tuple[Kind, int, int]]]:
    """What a rank does, by stages of the model."""
    return [
        [(p.kind, p.microbatch, plan.stage_of(rank, p.chunk)) for p in a.parts]
        for a in plan.ranks[rank]
    ]


def test_a_bidirectional_plan_cannot_be_written() -> None:
    plan = replace(build("1f1b", 2, 2), ways=2, chunks=2, placement=((0, 1), (1, 0)))
    with pytest.raises(ValueError, match="has every stage on two ranks"):
        to_csv(plan)


# ------------------------------------------------------------------------------------------------------ gradients there

WIDTH, ROWS = 3, 2  # of a micro-batch


def layer(stage: int) -> nn.Module:
    """A stage of the model, the same in every process."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of so many micro-batches."""
    draw = torch.Generator().manual_seed(count)
    return tuple(
        torch.randn(count * ROWS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)
    )  # type: ignore[return-value]


def loss(y: Tensor, target: Tensor) -> Tensor:
    """A sum, so that that of micro-batches is that of the batch."""
    return (y - target).square().sum()


@functools.cache
def gradients_of_one_process(stages: int, count: int) -> list[Tensor]:
    """Of all parameters, stage by stage."""
    model = nn.Sequential(*map(layer, range(stages)))
    x, target = batch(count)
    loss(model(x), target).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def run_there(texts: list[str]) -> list[str]:
    """Runs plans in torch's runtime, on every rank; what differs from one process."""
    import tempfile

    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank, wrong = torch.distributed.get_rank(), []
    for text in texts:
        plan = from_csv(text)
        total, count = plan.total_stages, plan.microbatches
        held = [plan.stage_of(rank, chunk) for chunk in range(plan.chunks)]
        modules = {stage: layer(stage) for stage in held}
        stages = [
            PipelineStage(module, at, total, torch.device("cpu")) for at, module in modules.items()
        ]
        runtime = _PipelineScheduleRuntime(stages, count, loss_fn=loss, scale_grads=False)  # type: ignore[arg-type]
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(text)
            file.flush()
            runtime._load_csv(file.name)
        x, target = batch(count)
        runtime.step(*([x] if 0 in held else []), target=target if total - 1 in held else None)
        expected = gradients_of_one_process(total, count)
        for stage, module in modules.items():
            own = expected[2 * stage : 2 * stage + 2]  # weight and bias
            for param, truth in zip(module.parameters(), own, strict=True):
                # fp64, and micro-batches are summed in another order
                if param.grad is None or not torch.allclose(
                    param.grad, truth, rtol=1e-10, atol=1e-12
                ):
                    wrong.append(f"stage {stage} of\n{text}")
    return wrong


def test_plans_give_the_gradients_of_one_process_in_torchs_runtime() -> None:
    plans = [plan for name in JUDGED for plan in built(name, [(2, 4), (2, 5)])]
    plans += [published(name) for name in PUBLISHED]
    for stages, group in itertools.groupby(
        sorted(plans, key=lambda plan: plan.stages), lambda plan: plan.stages
    ):
        texts = [to_csv(plan) for plan in group]
        assert run_ranks(stages, run_there, texts) == [[]] * stages
