"""Precision: the loss scale by its published definition, and half-precision training however it is sliced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import STEPS, Case, Result, config_of, engine_of, result_of
from tests.harness import run_ranks
from tests.pipeline.test_step import POISONS, data, same, state, with_
from threed.config import PrecisionConfig
from threed.ops.precision import LossScale
from threed.zero.setup import loss_scale
from threed.zero.update import Scaler

# ------------------------------------------------------------------------------------------------------- the definition


@dataclass
class Definition:
    """The dynamic loss scale of Apex, Megatron-LM and DeepSpeed, in plain Python.

    It counts iterations, as theirs does: an overflow at iteration i makes the next growth due at i + window.
    """

    scale: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    iteration: int = 0
    overflowed: int = -1  # the last iteration that did

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def step(self, overflow: bool) -> None:
        """Takes notice of an iteration."""
        if overflow:
            if self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.left -= 1
            self.overflowed = self.iteration
        else:
            grows = (self.iteration - self.overflowed) % self.window == 0
            self.scale *= 2 if grows else 1
            self.left = self.hysteresis if grows or self.consecutive else self.left
        self.iteration += 1

    @property
    def state(self) -> dict[str, float]:
        """As a checkpoint would keep it."""
        good = self.iteration - 1 - self.overflowed
        return {"loss_scale": self.scale, "good_steps": good, "hysteresis_left": self.left}


def check_follows(rule: LossScale, overflows: list[bool]) -> None:
    """Scale and counters after each step."""
    scaler = Scaler(rule, torch.device("cpu"))
    want = Definition(rule.initial, rule.window, rule.hysteresis, rule.consecutive, rule.minimum)
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow), dtype=torch.float64))
        want.step(overflow)
        assert scaler.state() == want.state


@given(
    st.builds(
        LossScale, initial=st.sampled_from([1.0, 2.0, 1024.0, 65536.0]), window=st.integers(1, 5),
        hysteresis=st.integers(1, 4), consecutive=st.booleans(), minimum=st.sampled_from([0.25, 1.0]),
    ),
    st.lists(st.booleans(), max_size=40),
)  # fmt: skip
def test_the_loss_scale_follows_the_definition(rule: LossScale, overflows: list[bool]) -> None:
    check_follows(rule, overflows)


def test_the_default_is_65536_a_window_of_1000_and_hysteresis_2() -> None:
    definition = Definition()
    assert LossScale() == LossScale(definition.scale, definition.window, definition.hysteresis)
    check_follows(LossScale(), [n in (999, 2050, 2060, 2070) for n in range(3100)])


def test_a_constant_scale_stays() -> None:
    scaler = Scaler(LossScale(1024.0, window=1, dynamic=False), torch.device("cpu"))
    for overflow in (0.0, 1.0, 1.0, 0.0):
        scaler.update(torch.tensor(overflow, dtype=torch.float64))
        assert float(scaler.scale) == 1024.0


def test_only_fp16_moves_its_scale_and_only_where_it_is_dynamic() -> None:
    scales = {
        loss_scale(PrecisionConfig(dtype=dtype, loss_scale=given))
        for dtype, given in (("bf16", "dynamic"), ("fp32", "dynamic"), ("fp64", "dynamic"))
    }
    assert scales == {LossScale(1.0, dynamic=False)}
    assert loss_scale(PrecisionConfig(dtype="fp16", loss_scale=1024.0)) == LossScale(
        1024.0, dynamic=False
    )
    assert loss_scale(PrecisionConfig(dtype="fp16", loss_scale="dynamic")) == LossScale()


# --------------------------------------------------------------------------------------------------- an engine in fp16

OVERFLOWS = [None, 0, 1, None, None, 1, 0, None, None, None]  # the rank that overflows in each step


def rate(done: int) -> float:
    """The learning rate after so many updates: up to 3e-3 in two, then straight down to a tenth at ten."""
    return 3e-3 * (done + 1) / 2 if done < 2 else 3e-4 + 2.7e-3 * (10 - done) / 8


def check_overflows(case: Case, rule: LossScale) -> None:
    """Every step uses the scale that the definition says, and those that overflow anywhere do nothing else."""
    engine = engine_of(with_(config_of(case), optim={"schedule": "linear"}), loss_scale=rule)
    want, updates = Definition(rule.initial, rule.window, rule.hysteresis, rule.consecutive), 0
    for step, bad in enumerate(OVERFLOWS):
        before = state(engine)
        if bad == engine.topology.rank:
            POISONS["sink"](engine, float("inf"))
        metrics = engine.step(data(engine, step))
        assert metrics.loss_scale == want.scale, step
        want.step(bad is not None)
        assert engine.optimizer.scaler.state() == want.state
        assert same(state(engine), before) == (bad is not None)
        updates += bad is None
        assert (metrics.skipped, float(engine.optimizer.updates)) == (step + 1 - updates, updates)
        assert metrics.lr == pytest.approx(rate(updates - (bad is None)), rel=1e-12)


def run_overflows(stages: list[int]) -> None:
    for stage, consecutive in zip(stages, (False, True, False, True), strict=True):
        rule = LossScale(initial=256.0, window=3, consecutive=consecutive)
        check_overflows(Case(dp=2, layers=1, zero=stage, dtype="fp16", microbatches=1), rule)


def test_an_overflow_on_one_rank_skips_everywhere_and_moves_the_scale() -> None:
    run_ranks(2, run_overflows, [0, 1, 2, 3])


def test_fp16_begins_with_the_default_and_comes_down() -> None:
    """A scale far too large: nothing is updated until it fits, and hysteresis is spent once."""
    engine = engine_of(
        config_of(Case(layers=1, dtype="fp16", microbatches=1)), loss_scale=LossScale(2.0**40)
    )
    scales = [engine.step(data(engine, step)).loss_scale for step in range(3)]
    assert scales == [2.0**40, 2.0**40, 2.0**39]
    assert float(engine.optimizer.updates) == 0
    default = engine_of(config_of(Case(layers=1, dtype="fp16", microbatches=1)))
    assert default.step(data(default)).loss_scale == 65536.0


def check_unscaled(case: Case) -> None:
    """fp32, scaled by powers of two: nothing but exponents differs, so not a bit does in the end."""
    wanted = None
    for rule in (
        LossScale(1.0, dynamic=False),
        LossScale(1024.0, dynamic=False),
        LossScale(8.0, window=1),
    ):
        engine = engine_of(config_of(case), loss_scale=rule)
        metrics = [engine.step(data(engine, step)) for step in range(STEPS)]
        grows = 2.0 if rule.dynamic else 1.0
        assert [m.loss_scale for m in metrics] == [
            rule.initial * grows**step for step in range(STEPS)
        ]
        found = [m.loss for m in metrics], [m.grad_norm for m in metrics], state(engine)
        wanted = wanted or found
        assert found[:2] == wanted[:2]
        assert same(found[2], wanted[2])


def run_unscaled(cases: list[Case]) -> None:
    for case in cases:
        check_unscaled(case)


def test_gradients_are_unscaled_by_the_scale_of_their_backward() -> None:
    """With clipping, and also where the scale doubles after every step."""
    run_ranks(
        2, run_unscaled, [Case(dp=2, layers=1, zero=stage, dtype="fp32") for stage in (0, 1, 2, 3)]
    )


# ------------------------------------------------------------------------------------- half precision, sliced and whole

SHAPES = [(1, 2, 1), (1, 2, 2), (2, 2, 1)]


def shapes(grid: tuple[int, int, int]) -> list[Any]:
    """Returns SHAPES as parameters of a test; the given one runs only with the grid."""
    return [pytest.param(one, marks=pytest.mark.grid if one == grid else ()) for one in SHAPES]


EXACT, CLOSE = {"microbatches": 1}, {"microbatches": 3}


def run_twin(case: Case, clip: float) -> Result:
    engine = engine_of(
        with_(config_of(case), train={"grad_clip": clip}),
        loss_scale=LossScale(256.0, dynamic=False),
    )
    metrics = [engine.step(data(engine, step)) for step in range(STEPS)]
    assert metrics[-1].skipped == 0
    return result_of(engine, metrics)


def run_twins(cases: list[Case], clip: float) -> list[tuple[Case, Result]]:
    return [(case, run_twin(case, clip)) for case in cases]


def differences(
    shape: tuple[int, int, int], microbatches: int, clip: float
) -> Iterator[tuple[str, float, float]]:
    """Of every sliced run from its un-sharded twin, part by part: the case, the largest difference, and the largest
    value there is."""
    first = Case(*shape, sequence=shape[2] > 1, layers=2, microbatches=microbatches, model="llama")
    cases = [
        replace(first, dtype=dtype, zero=zero)
        for dtype in ("bf16", "fp16")
        for zero in (0, 1, 2, 3)
    ]
    results = dict(run_ranks(first.world, run_twins, cases, clip)[0])
    for case, got in results.items():
        twin = results[replace(case, zero=0)]
        assert got.weights.keys() == twin.weights.keys()
        for part, tensors in {"weight": twin.weights, **twin.moments}.items():
            found = {"weight": got.weights, **got.moments}[part]
            gap = max(float((found[name] - want).abs().max()) for name, want in tensors.items())
            yield (
                f"{part} of {case}",
                gap,
                max(float(want.abs().max()) for want in tensors.values()),
            )


@pytest.mark.seldom("(1, 2, 1)")
@pytest.mark.parametrize("shape", shapes(grid=(2, 2, 1)), ids=str)
def test_slicing_changes_no_bit_of_a_half_precision_run(shape: tuple[int, int, int]) -> None:
    """One micro-batch, no clipping: fp32 masters and moments are equal, for every sum has the same terms in order."""
    found = list(differences(shape, 1, 0.0))
    assert all(size > 0 for _, _, size in found)
    assert [(what, gap) for what, gap, _ in found if gap != 0.0] == []


@pytest.mark.seldom("(1, 2, 1)")
@pytest.mark.parametrize("shape", shapes(grid=(1, 2, 2)), ids=str)
def test_slicing_changes_the_order_of_sums_only(shape: tuple[int, int, int]) -> None:
    """Three micro-batches and clipping: gradients are summed over ranks and micro-batches in another order, and so are
    the squares of the norm. That is fp32 rounding, but it may turn one weight's rounding to half precision over, which
    is 2^-8 of it in bf16: so may an update, at most lr, differ by that in each step, and the moments by that of their
    largest. Measured are 1e-9 in weights; a lost or doubled gradient moves them by 1e-3."""
    for what, gap, largest in differences(shape, 3, 0.5):
        bound = STEPS * 3e-3 if what.startswith("weight") else largest
        assert gap <= bound * 2**-8, what
