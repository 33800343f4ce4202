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

from tests.configs import Case, batch, config_of
from tests.configs import engine_of as engine_of_config
from tests.harness import run_ranks
from tests.pipeline.test_step import data, poison_sink, with_
from tests.schedules.test_schedules_training import Counter
from threed.distributed.sharding import slices
from threed.engine import Engine, StepMetrics
from threed.zero.asynchronous import Asynchronous
from threed.zero.state import WEIGHT, read_records, records
from threed.zero.update import Update

STEPS = 4
TOLERANCE = 1e-9  # fp64: the order of sums is all that differs
Weights = dict[str, Tensor]

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
        self.optim, self.rate = self.engine.config.optim, self.engine.optimizer.rates.schedule
        self.engine.optimizer.step = self._no_step  # type: ignore[method-assign]
        self.decay = {r.piece.name: r.state.bucket.group.key.options.decay for r in self._records()}
        self.weights = self.previous = self.engine.full_state_dict()
        self.moments = [
            {name: torch.zeros_like(w) for name, w in self.weights.items()} for _ in range(2)
        ]
        self.losses, self.norms, self.updates = list[float](), list[float](), 0

    def _records(self) -> list[Any]:
        return list(records(self.engine.optimizer, (WEIGHT,)))

    def _no_step(self, gradients: Any, carry: Tensor) -> Any:
        zero = torch.zeros((), dtype=torch.float64)
        return lambda: Update(zero, zero, zero, zero, zero, zero, carry, zero, zero)

    def gradients(self, step: int, weights: Weights) -> Weights:
        self.engine.load_full_state_dict(weights)
        self.losses.append(
            self.engine.step(batch(step, self.engine.config.train.global_batch)).loss
        )
        found = {name: torch.zeros_like(w) for name, w in weights.items()}
        for r in self._records():
            found[r.piece.name][slices(r.piece.start, r.piece.size)] = r.of(
                r.state.bucket.grad.fetch().wait()
            )
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
        self.weights = {
            name: rule(name, w, grads[name] * clip, lr) for name, w in self.weights.items()
        }

    def adamw(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        (b1, b2), t = self.optim.betas, self.updates
        m = self.moments[0][name] = b1 * self.moments[0][name] + (1 - b1) * g
        v = self.moments[1][name] = b2 * self.moments[1][name] + (1 - b2) * g * g
        direction = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + self.optim.eps)
        return w * (1 - lr * self.decay[name]) - lr * direction

    def sgd(self, name: str, w: Tensor, g: Tensor, lr: float) -> Tensor:
        self.moments[0][name] = (
            self.optim.momentum * self.moments[0][name] + g + self.decay[name] * w
        )
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
    return max(
        [*off, *(float((tensor - weights[name]).abs().max()) for name, tensor in found.items())]
    )


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
    (replace(BW, pp=2, dropout=0.1, recompute="full"), Way("sgd"), None),
    (replace(BW, pp=2, dp=2, bucket_mib=0.02), Way(), 1),
    (replace(BW, pp=2, dp=2, zero=0, model="llama", recompute="half"), Way("sgd", 0.0), None),
    (replace(BW, pp=2, tp=2, sequence=True, dropout=0.1, recompute="selective"), Way("sgd"), None),
    (replace(BW, pp=4, dropout=0.1, bucket_mib=0.02), Way("sgd"), None),
    (replace(BW, pp=4, model="qwen-tied", microbatches=8), Way(), None),
]


def check(cases: Sequence[tuple[Case, Way, int | None]]) -> None:
    keys = [(case.truth, way, poisoned) for case, way, poisoned in cases]
    distinct = list(dict.fromkeys(keys))
    (found,) = run_ranks(1, by_rule, distinct)
    truths, wrong = dict(zip(distinct, found, strict=True)), list[str]()
    for shape in dict.fromkeys((case.pp, case.dp, case.tp) for case, *_ in cases):
        mine = [n for n, (case, *_) in enumerate(cases) if (case.pp, case.dp, case.tp) == shape]
        ranks = run_ranks(
            math.prod(shape), compare, [cases[n] for n in mine], [truths[keys[n]] for n in mine]
        )
        wrong += itertools.chain(*ranks)
    assert not wrong, "\n".join(wrong)


def test_training_follows_the_rule() -> None:
    check([CASES[number] for number in (0, 2, 3, 4, 6)])


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_training_follows_the_rule_in_other_combinations() -> None:
    check([CASES[1], CASES[5]])
    shapes = [
        (2, 1, 1),
        (4, 1, 1),
        (2, 2, 1),
        (2, 1, 2),
        (4, 2, 1),
        (2, 2, 2),
        (4, 1, 2),
        (3, 1, 1),
    ]
    options = itertools.product(
        shapes, ("gpt", "llama", "qwen-tied"), (Way(), Way("sgd"), Way(clip=0.0)), (0, 1)
    )
    check([
        (
            replace(
                BW, pp=pp, dp=dp, tp=tp, model=model, zero=zero if dp > 1 else 1, microbatches=(4, 8)[n % 2],
                dropout=0.1 * (n % 3 > 0), sequence=tp > 1 and n % 2 == 0, bucket_mib=(64.0, 0.02)[n % 2],
                recompute=("none", "full", "selective", "half")[n % 4],
            ),
            way, (None, None, 1)[n % 3],
        )
        for n, ((pp, dp, tp), model, way, zero) in enumerate(options)
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------- drained in between


def bits(engine: Engine) -> list[Tensor]:
    """Everything that steps change: both versions of the weights, moments, and counters. Drains."""
    engine.full_state_dict()
    held = [
        values.clone()
        for _, values in read_records(engine.optimizer, list(records(engine.optimizer)))
    ]
    return [*held, engine.optimizer.updates.clone(), torch.tensor([engine.steps, engine.consumed])]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def drain_on_the_way(case: Case, folder: str) -> dict[str, bool]:
    """What holds of a run that is evaluated, read and saved, of one that goes on from there, and one of 1F1B."""
    plain, read_, found = engine_of(case), engine_of(case), {}
    losses, end = [plain.step(data(plain, step)).loss for step in range(STEPS)], bits(plain)
    again = [read_.step(data(read_, step)).loss for step in range(2)]
    read_.evaluate(data(read_, 9))
    again.append(read_.step(data(read_, 2)).loss)
    assert isinstance(read_.runner, Asynchronous)
    assert read_.runner.open
    path = read_.save(f"{folder}/{case.world}")
    assert not read_.runner.open
    before = bits(read_)
    again.append(read_.step(data(read_, 3)).loss)
    found["draining changes nothing"] = same(bits(read_), end) and again == losses
    resumed = engine_of(case)
    resumed.step(data(resumed, 7))  # open while it loads
    resumed.load(path)
    found["what is saved is loaded"] = same(bits(resumed), before)
    third = [resumed.step(data(resumed, 3)).loss]
    found["a resumed run is the same"] = same(bits(resumed), end) and third == losses[3:]
    other = engine_of(replace(case, schedule="1f1b"))
    other.load(path)
    other.step(data(other, 3))
    resumed.load(other.save(f"{folder}/{case.world}-other"))
    assert resumed.optimizer.versions is not None
    found["both versions are what 1F1B saved"] = all(
        torch.equal(group.params, group.previous) for group in resumed.layout.groups
    )
    resumed.step(data(resumed, 4))
    return found


@pytest.mark.parametrize(
    "case", [replace(BW, pp=2, dropout=0.1), replace(BW, pp=2, dp=2, dtype="bf16")], ids=str
)
def test_draining_changes_nothing_and_a_resumed_run_is_the_same(case: Case, tmp_path: Path) -> None:
    for found in run_ranks(case.world, drain_on_the_way, case, str(tmp_path)):
        assert all(found.values()), found


def resume_elsewhere(
    case: Case, path: str, steps: Sequence[int], save: bool
) -> tuple[list[float], Weights]:
    engine = engine_of(case)
    if not save:
        engine.load(path)
    losses = [engine.step(data(engine, step)).loss for step in steps]
    if save:
        engine.save(path)
        losses.append(engine.step(data(engine, 3)).loss)
    return losses, {name: tensor.clone() for name, tensor in engine.full_state_dict().items()}


def test_a_run_resumes_in_another_topology(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    losses, weights = run_ranks(2, resume_elsewhere, replace(BW, pp=2), path, range(3), True)[0]
    for case in (BW, replace(BW, pp=2, tp=2)):
        again, found = run_ranks(case.world, resume_elsewhere, case, path, (3,), False)[0]
        assert again == pytest.approx(losses[3:], abs=TOLERANCE)
        assert (
            max(float((found[name] - weights[name]).abs().max()) for name in weights) <= TOLERANCE
        )


def loaded_elsewhere(case: Case, path: str) -> list[list[float]]:
    """Norms and rates of the steps of a run that goes on; and after a load, in a new engine and in one that has
    trained."""
    engine, found = engine_of(case), []
    for step in range(2):
        engine.step(data(engine, step))
    engine.save(path)
    for trains, loads in ((2, False), (0, True), (3, True)):
        engine = engine_of(case)
        for step in range(trains):
            engine.step(data(engine, step))
        if loads:
            engine.load(path)
        steps = [engine.step(data(engine, step)) for step in (2, 3)]
        found.append([number for metrics in steps for number in (metrics.grad_norm, metrics.lr)])
        engine.finish()
    return found


def test_metrics_after_a_load_are_those_of_the_run_that_went_on(tmp_path: Path) -> None:
    for went_on, new, used in run_ranks(
        2, loaded_elsewhere, replace(BW, pp=2), str(tmp_path / "saved")
    ):
        assert went_on == new == used
        assert all(went_on)


def vary(case: Case) -> list[float]:
    """Batches of other lengths, and of other numbers of micro-batches."""
    engine, made = engine_of(case), []
    for step, (rows, length) in enumerate([(8, 16), (8, 8), (12, 8), (8, 16)]):
        made.append(
            engine.step({key: value[:, :length] for key, value in batch(step, rows).items()}).loss
        )
    return [*made, float(engine.evaluate(batch(9, 8)))]


def test_batches_may_vary() -> None:
    (alone,), (apart, _) = run_ranks(1, vary, BW), run_ranks(2, vary, replace(BW, pp=2))
    assert apart == pytest.approx(alone, abs=TOLERANCE)


def break_a_step(case: Case, path: str) -> None:
    engine = engine_of(case)
    engine.step(data(engine))
    engine.save(path)
    saved = bits(engine)
    engine.step(data(engine, 1))

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    handle = engine.executor.stages[0].layers[1].register_forward_hook(broken)
    with pytest.raises(ZeroDivisionError):
        engine.step(data(engine, 2))
    handle.remove()
    for use in (
        lambda: engine.step(data(engine, 2)),
        lambda: engine.save(path),
        engine.full_state_dict,
    ):
        with pytest.raises(RuntimeError, match=r"interrupted .* load a checkpoint"):
            use()
    engine.load(path)
    assert same(bits(engine), saved)
    engine.step(data(engine, 1))


def test_a_step_that_broke_off_is_neither_saved_nor_trained_on(tmp_path: Path) -> None:
    run_ranks(1, break_a_step, BW, str(tmp_path / "saved"))


def most_alive(case: Case) -> tuple[int, int]:
    """The most inputs of a linear layer that were alive at once in three steps; and after a drain."""
    engine, most = engine_of(case), 0
    block = next(layer for layer in engine.executor.stages[0].layers if hasattr(layer, "mlp"))
    counter = Counter(block.mlp.down)

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, counter.alive())

    block.mlp.down.register_forward_pre_hook(look)
    for step in range(3):
        engine.step(data(engine, step))
    engine.full_state_dict()
    return most, counter.alive()


def test_live_activations_are_as_many_as_the_plan_says() -> None:
    case = replace(BW, pp=4, layers=4, model="llama", partition=(2, 1, 1, 2))
    assert run_ranks(4, most_alive, case) == [(4, 0), (3, 0), (2, 0), (1, 0)]
