"""PipeDream-2BW trains as its rule says, by gradients of weights one update older; draining it changes nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.configs import VOCAB, Case, batch, config_of, share
from tests.configs import engine_of as engine_of_config
from tests.harness import run_ranks
from tests.test_schedules_training import Counter
from tests.test_step import data, poison_sink, with_
from threed import schedules
from threed.checks import find_problems
from threed.config import Config, ConfigError
from threed.engine import Engine, StepMetrics
from threed.schedules import Action, Costs, Kind, Plan, drain, first, lower, simulate, two_bw, validate
from threed.sharding import slices
from threed.zero.records import WEIGHT, records
from threed.zero.update import Update

STEPS = 5
TOLERANCE = 1e-9  # fp64: the order of sums is all that differs
Weights = dict[str, Tensor]

# ------------------------------------------------------------------------------------------------------------ the plan


def renumbered(actions: Sequence[Action], by: int) -> list[Action]:
    return [action._replace(microbatch=action.microbatch + by) for action in actions]


def test_steps_one_after_the_other_are_1f1b_without_an_end() -> None:
    for p, m, steps in itertools.product(range(1, 6), range(1, 9), range(1, 4)):
        if m < p:
            continue
        plan, endless = two_bw(p, m), schedules.one_f_one_b(p, m * steps)
        parts = [first(plan), *[plan] * (steps - 1), drain(plan)]
        for rank in range(p):
            whole = [renumbered(part.ranks[rank], m * number) for number, part in enumerate(parts)]
            assert tuple(itertools.chain(*whole)) == endless.ranks[rank]


def test_a_step_waits_for_nothing_and_holds_what_1f1b_does() -> None:
    for p, m in itertools.product((1, 2, 3, 4, 8, 16), (1, 2, 3, 4, 8, 16, 32)):
        if m < p:
            with pytest.raises(ValueError, match=f"{m} micro-batches; {p} stages need at least {p}"):
                schedules.build("2bw", p, m)
            continue
        plan = schedules.build("2bw", p, m)
        for part in (plan, first(plan), drain(plan)):
            validate(part)
            validate(lower(part))
        timeline = simulate(plan, Costs(1, 1.5, 0.5))
        assert timeline.bubble == 0
        assert timeline.span == m * 3
        assert timeline.peak_activations == tuple(range(p, 0, -1))
        assert timeline.messages == simulate(schedules.one_f_one_b(p, m), Costs(1, 1, 1)).messages


def test_a_lowered_step_in_full() -> None:
    plan = two_bw(2, 3)
    assert str(lower(plan)) == (
        "rank 0: F0.0 SF0.0 B0.-1 REDUCE0 NORM0 F0.1 SF0.1 RB0.0 B0.0 F0.2 SF0.2 RB0.1 B0.1 UPDATE0 RB0.2\n"
        "rank 1: RF0.0 F0.0 NORM0 B0.0 RF0.1 SB0.0 F0.1 B0.1 RF0.2 SB0.1 F0.2 UPDATE0 B0.2 SB0.2 REDUCE0"
    )
    assert str(lower(drain(plan))) == "rank 0: B0.-1 REDUCE0 NORM0 UPDATE0\nrank 1: NORM0 UPDATE0"


def test_what_is_wrong_with_an_asynchronous_plan_is_said() -> None:
    plan = lower(two_bw(2, 3))

    def moved(rank: int, text: str, to: int) -> Plan:
        actions = list(plan.ranks[rank])
        actions.insert(to, actions.pop(actions.index(Action.parse(text))))
        return replace(plan, ranks=tuple(tuple(actions) if r == rank else a for r, a in enumerate(plan.ranks)))

    wrong = {
        r"rank 0: NORM0 appears before REDUCE0": moved(0, "NORM0", 0),
        r"rank 0: UPDATE0 appears before NORM0": moved(0, "UPDATE0", 0),
        r"rank 1: UPDATE0 appears after B0\.2, which overwrites gradients": moved(1, "UPDATE0", 17),
        r"rank 0: B0\.0 appears before REDUCE0 of the step before": moved(0, "REDUCE0", 9),
        r"deadlocks: rank 0 at UPDATE0 with all ranks; rank 1 at RF0\.1 with rank 0": moved(0, "UPDATE0", 5),
        r"rank 0: B0\.-1 needs|rank 0 has B0\.-1 behind it": replace(plan, begun=(0, 1)),
        r"rank 0: UPDATE0 without a step before": replace(first(plan), ranks=(plan.ranks[0][-2:], ())),
        r"there are 3 micro-batches": replace(plan, left=(4, 0)),
    }
    for message, one in wrong.items():
        with pytest.raises(ValueError, match=message):
            validate(one)
    with pytest.raises(ValueError, match="it cannot be written as CSV"):
        schedules.to_csv(two_bw(2, 3))


# ------------------------------------------------------------------------------------------------------------ the rule


@dataclass(frozen=True)
class Way:
    """How a case's weights are updated: the optimizer, and the norm beyond which gradients are clipped; 0: none are."""

    optimizer: str = "adamw"
    clip: float = 0.5


def engine_of(case: Case, way: Way = Way()) -> Engine:
    config = with_(config_of(case), optim={"name": way.optimizer}, train={"grad_clip": way.clip})
    return engine_of_config(config)


class Loop:
    """A plain loop on one process: the rule, and the optimizers' formulas, on dictionaries of tensors. An engine is
    asked for gradients only."""

    def __init__(self, case: Case, way: Way) -> None:
        self.engine, self.way = engine_of(case, way), way
        self.optim, self.rate = self.engine.config.optim, self.engine.optimizer.learning_rate
        self.engine.optimizer.step = self._no_step  # type: ignore[method-assign]
        self.decay = {r.piece.name: r.state.bucket.group.key.options.decay for r in self._records()}
        self.weights = self.previous = self.engine.full_state_dict()
        self.moments = [{name: torch.zeros_like(w) for name, w in self.weights.items()} for _ in range(2)]
        self.losses, self.norms, self.updates = list[float](), list[float](), 0

    def _records(self) -> list[Any]:
        return list(records(self.engine.optimizer, (WEIGHT,)))

    def _no_step(self, gradients: Any, carry: Tensor) -> Any:
        zero = torch.zeros((), dtype=torch.float64)
        return lambda: Update(zero, zero, zero, zero, zero, zero, carry)

    def gradients(self, step: int, weights: Weights) -> Weights:
        self.engine.load_full_state_dict(weights)
        self.losses.append(self.engine.step(batch(step, self.engine.config.train.global_batch)).loss)
        found = {name: torch.zeros_like(w) for name, w in weights.items()}
        for r in self._records():
            found[r.piece.name][slices(r.box.start, r.box.size)] = r.of(r.state.bucket.grad.fetch().wait())
        return found

    def step(self, number: int, poisoned: bool = False) -> None:
        grads = self.gradients(number, self.previous)
        self.previous = self.weights  # W(t), which the next gradients are of
        if poisoned:
            self.norms.append(math.nan)
            return
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        self.norms.append(norm)
        clip = min(1.0, self.way.clip / (norm + 1e-6)) if self.way.clip else 1.0
        lr = float(self.rate(torch.tensor(float(self.updates), dtype=torch.float64)))
        self.updates += 1
        rule = self.adamw if self.way.optimizer == "adamw" else self.sgd
        self.weights = {name: rule(name, w, grads[name] * clip, lr) for name, w in self.weights.items()}

    def adamw(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        (b1, b2), t = self.optim.betas, self.updates
        m = self.moments[0][name] = b1 * self.moments[0][name] + (1 - b1) * g
        v = self.moments[1][name] = b2 * self.moments[1][name] + (1 - b2) * g * g
        direction = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + self.optim.eps)
        return w * (1 - lr * self.decay[name]) - lr * direction

    def sgd(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        self.moments[0][name] = self.optim.momentum * self.moments[0][name] + g + self.decay[name] * w
        return w - lr * self.moments[0][name]


Truth = tuple[list[float], list[float], Weights]


def by_rule(cases: Sequence[tuple[Case, Way, int | None]]) -> list[Truth]:
    """Losses, norms and last weights of every case; in one step, if given, a gradient is not finite."""
    found = []
    for case, way, poisoned in cases:
        loop = Loop(case, way)
        for step in range(STEPS):
            loop.step(step, step == poisoned)
        found.append((loop.losses, loop.norms, loop.weights))
    return found


def difference(engine: Engine, metrics: Sequence[StepMetrics], truth: Truth) -> float:
    """The largest: of losses, of norms, which come one step later, and of the weights on rank 0."""
    losses, norms, weights = truth
    assert metrics[0].grad_norm == metrics[0].lr == 0
    off = [abs(m.loss - loss) for m, loss in zip(metrics, losses, strict=True)]
    said = zip(metrics[1:], norms[:-1], strict=True)
    off += [abs(m.grad_norm - norm) for m, norm in said if not math.isnan(norm)]
    found = engine.full_state_dict()
    assert not found or found.keys() == weights.keys()
    return max([*off, *(float((tensor - weights[name]).abs().max()) for name, tensor in found.items())])


def train(case: Case, way: Way, poisoned: int | None) -> tuple[Engine, list[StepMetrics]]:
    engine, made = engine_of(case, way), list[StepMetrics]()
    for step in range(STEPS):
        if step == poisoned and engine.topology.rank == engine.topology.world - 1:
            poison_sink(engine, math.nan)
        made.append(engine.step(data(engine, step)))
    return engine, made


def compare(cases: Sequence[tuple[Case, Way, int | None]], truths: Sequence[Truth]) -> list[str]:
    wrong = []
    for (case, way, poisoned), truth in zip(cases, truths, strict=True):
        engine, metrics = train(case, way, poisoned)
        if not (off := difference(engine, metrics, truth)) <= TOLERANCE:
            wrong.append(f"{case} {way} {poisoned}: off by {off}")
        assert metrics[-1].skipped == (poisoned is not None)
    return wrong


BW = Case(schedule="2bw", microbatches=4)
CASES: list[tuple[Case, Way, int | None]] = [
    (replace(BW, dropout=0.1), Way("sgd"), None),
    (replace(BW, pp=2, dropout=0.1), Way("sgd"), None),
    (replace(BW, pp=2, model="llama", recompute="full"), Way(), 2),
    (replace(BW, pp=2, dp=2, dropout=0.1, bucket_mib=0.02), Way(), None),
    (replace(BW, pp=2, dp=2, zero=0, model="llama", recompute="half"), Way("sgd", 0.0), None),
    (replace(BW, pp=2, tp=2, sequence=True, dropout=0.1), Way("sgd"), None),
    (replace(BW, pp=2, tp=2, model="llama", recompute="selective"), Way(), 2),
    (replace(BW, pp=4, dropout=0.1, bucket_mib=0.02), Way("sgd"), None),
    (replace(BW, pp=4, model="qwen-tied", recompute="cpu", microbatches=8), Way(), None),
]


def check(cases: Sequence[tuple[Case, Way, int | None]]) -> None:
    keys = [(case.truth, way, poisoned) for case, way, poisoned in cases]
    distinct = list(dict.fromkeys(keys))
    (found,) = run_ranks(1, by_rule, distinct)
    truths, wrong = dict(zip(distinct, found, strict=True)), list[str]()
    for shape in dict.fromkeys((case.pp, case.dp, case.tp) for case, *_ in cases):
        mine = [n for n, (case, *_) in enumerate(cases) if (case.pp, case.dp, case.tp) == shape]
        ranks = run_ranks(math.prod(shape), compare, [cases[n] for n in mine], [truths[keys[n]] for n in mine])
        wrong += itertools.chain(*ranks)
    assert not wrong, "\n".join(wrong)


def test_training_follows_the_rule() -> None:
    check(CASES)


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_training_follows_the_rule_in_other_combinations() -> None:
    shapes = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (2, 2, 2), (4, 1, 2), (3, 1, 1)]
    options = itertools.product(shapes, ("gpt", "llama", "qwen-tied"), (Way(), Way("sgd"), Way(clip=0.0)), (0, 1))
    check([
        (
            replace(
                BW, pp=pp, dp=dp, tp=tp, model=model, zero=zero if dp > 1 else 1, microbatches=(4, 8)[n % 2],
                dropout=0.1 * (n % 3 > 0), sequence=tp > 1 and n % 2 == 0, bucket_mib=(64.0, 0.02)[n % 2],
                recompute=("none", "full", "selective", "half")[n % 4],
            ),
            way, (None, None, 2)[n % 3],
        )
        for n, ((pp, dp, tp), model, way, zero) in enumerate(options)
    ])  # fmt: skip
