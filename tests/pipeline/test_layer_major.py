"""Layer by layer: the same numbers as micro-batch by micro-batch, parameters moved once a pass, and what is refused.

Bytes on the wire are in `test_bytes.py`, peaks of memory in `test_footprint.py`, each with cases of this order.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks.host import drive_bytes
from tests import test_equivalence, users_cases
from tests.configs import RECOMPUTE, STEPS, VOCAB, Case, batch, config_of, engine_of, share, train
from tests.covering import Space, Values
from tests.harness import run_ranks
from tests.layers import test_users_models
from tests.users_models import MODELS as USERS_MODELS
from tests.zero.test_zero_offload import difference
from threed.config import Config, ConfigError
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import Slicing
from threed.memory.tiers import Drive
from threed.pipeline.layer_major import LayerMajorExecutor, check
from threed.planner.forecast import Forecast
from threed.planner.order import choose
from threed.schedules import build

SETTINGS: dict[str, list[object]] = {
    **test_equivalence.SETTINGS, "pp": [1], "dp": [1, 2], "tp": [1, 2], "zero": [2, 3], "schedule": ["1f1b"],
    "shard": ["all"], "partition": ["balanced"], "pad": [0], "order": ["layer"], "microbatches": [2, 3],
    "model": ["gpt", "llama"],
}  # fmt: skip
USERS: dict[str, list[object]] = {
    "model": list(USERS_MODELS), "pp": [1], "dp": [1, 2], "tp": [1, 2], "sequence": [False], "zero": [2, 3],
    "offload": ["none", "nvme"], "recompute": ["none", "full"], "microbatches": [3],
    "bucket_mib": [0.002], "partition": ["balanced"], "schedule": ["1f1b"], "order": ["layer"],
}  # fmt: skip


def make(values: Values) -> Case | None:
    case = test_equivalence.make(values)
    return case if case is not None and case.zero > 1 else None


def make_users(values: Values) -> users_cases.Case | None:
    case = test_users_models.make(values)
    return case if case is not None and case.zero > 1 else None


SPACE = Space(
    SETTINGS, make, lambda case: case.world * case.microbatches, lambda case: (case.dp, case.tp)
)
USERS_SPACE = Space(USERS, make_users, lambda case: case.world, lambda case: (case.dp, case.tp))


def test_every_setting_equals_one_process() -> None:
    cases = SPACE.touching(0)
    assert {case.recompute for case in cases} == set(RECOMPUTE)
    assert {case.zero for case in cases} == {2, 3}
    test_equivalence.run_all(cases)


# Nothing in these models depends on the order. test_users_models.py trains them daily in the other order.
USERS_IN_GRID = {"cast", "frozen-embedding", "kernels", "latent", "residual-32", "vision"}


@pytest.mark.parametrize("grid", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_every_users_model_equals_plain_pytorch(grid: bool) -> None:
    """Ties, frozen parts, layers used twice, buffers, tuples and dicts between layers."""
    cases = USERS_SPACE.touching(0)
    assert {case.model for case in cases} == set(USERS_MODELS)
    test_users_models.run_all([case for case in cases if (case.model in USERS_IN_GRID) == grid])


@pytest.mark.grid
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(5))
def test_covering_sets_equal_one_process(seed: int) -> None:
    test_equivalence.run_all(SPACE.covering(seed))
    test_users_models.run_all(USERS_SPACE.covering(seed))


def by_both_orders(cases: Sequence[Case]) -> list[float]:
    return [difference(train(case), train(replace(case, order="micro"))) for case in cases]


@pytest.mark.parametrize("numbers", [(0, 3), pytest.param((1, 2), marks=pytest.mark.grid)])
def test_on_one_rank_the_order_changes_no_bit(numbers: tuple[int, ...]) -> None:
    """Gradients are added up in the order of micro-batches; a tied table's are not, but layer by layer."""
    plain = Case(
        model="gpt-untied",
        zero=3,
        offload_params="nvme",
        microbatches=8,
        order="layer",
        dropout=0.1,
    )
    cases = [
        plain, replace(plain, dtype="bf16", offload_optimizer="nvme"), replace(plain, dtype="fp32", recompute="full"),
        replace(plain, zero=2, offload_params="none", offload_optimizer="cpu", dtype="fp16"),
    ]  # fmt: skip
    chosen = [cases[number] for number in numbers]
    assert run_ranks(1, by_both_orders, chosen) == [[0.0] * len(chosen)]


# ------------------------------------------------------------------------------------------------------- what is moved


def read_from_drive(order: str) -> tuple[int, int, int, int]:
    """Bytes of parameters that a step reads from its drive by the drive's own count, and of anything; by the kernel's,
    that the process read; and the parameters."""
    case = Case(
        model="gpt-untied", zero=3, offload_params="nvme", dtype="bf16", microbatches=8, order=order
    )
    config = config_of(case)
    wide = config.model.model_copy(update={"hidden": 256, "ffn": 1024, "vocab": 4096})
    engine = engine_of(config.model_copy(update={"model": wide}))
    engine.step(share(batch(0, case.rows), engine.topology))
    tier, read = engine.layout.policy.params_tier, Counter[int]()
    assert isinstance(tier, Drive)
    own = tier.disk.read

    def counted(offset: int, into: Tensor) -> Any:
        read[offset] += into.nbytes
        return own(offset, into)

    tier.disk.read = counted  # type: ignore[method-assign]
    before = drive_bytes()[0]
    engine.step(share(batch(1, case.rows), engine.topology))
    engine.optimizer.wait()
    places = {bucket.storage.offset for group in engine.layout.groups for bucket in group.buckets}  # type: ignore[attr-defined]
    params = sum(count for offset, count in read.items() if offset in places)
    return (
        params,
        sum(read.values()),
        drive_bytes()[0] - before,
        2 * sum(group.numel for group in engine.layout.groups),
    )


def test_a_drive_is_read_once_a_pass() -> None:
    """Twice in a step what backward reads, less the last layer, which stays; with 8 micro-batches nearly 8 times
    that."""
    ((layer, all_layer, seen_layer, psi),) = run_ranks(1, read_from_drive, "layer")
    ((micro, all_micro, seen_micro, _),) = run_ranks(1, read_from_drive, "micro")
    tables = 2 * 4096 * 256 * 2  # embedding and head: not read again
    assert layer == pytest.approx(2 * psi - tables, rel=0.01)
    assert micro / layer > 6.5
    if seen_micro:  # where the kernel's count is that of a real drive
        assert seen_layer == pytest.approx(all_layer, rel=0.05)
        assert seen_micro == pytest.approx(all_micro, rel=0.05)


# ------------------------------------------------------------------------------------------------------- one step of it


def traced(case: Case) -> tuple[list[tuple[str, int]], list[str]]:
    """The layers' forwards in a step, as (name, micro-batch), and the actions of its spans."""
    engine = engine_of(config_of(case))
    seen: list[tuple[str, int]] = []
    first: dict[int, int] = {}

    def look(layer: nn.Module, given: tuple[Any, ...]) -> None:
        sample = int(given[1].samples[0])
        seen.append((str(getattr(layer, "name", "")), first.setdefault(sample, len(first))))

    (stage,) = engine.executor.stages
    for layer in stage.layers:
        layer.register_forward_pre_hook(look)
    engine.record()
    engine.step(share(batch(0, case.rows), engine.topology))
    return seen, [str(action) for action, _, _ in engine.record(on=False)]


def test_every_layer_runs_all_micro_batches_before_the_next() -> None:
    case = Case(zero=3, offload_params="cpu", microbatches=4, order="layer")
    ((seen, spans),) = run_ranks(1, traced, case)
    layers = list(dict.fromkeys(name for name, _ in seen))
    assert len(layers) == case.layers + 2
    assert seen == [(name, micro) for name in layers for micro in range(4)]
    forwards, backwards = (
        [f"{kind}0.{micro}" for _ in layers[1:] for micro in range(4)] for kind in "FB"
    )
    # one micro-batch's logits are alive
    turn = [f"{kind}0.{micro}" for micro in range(4) for kind in "FB"]
    assert spans == [*forwards, *turn, *backwards]


class Breaks(nn.Module):
    """A layer that fails once, in a forward or in a backward."""

    def __init__(self, layer: nn.Module, where: str) -> None:
        super().__init__()
        self.layer, self.left, self.where = layer, 2, where
        self.name = getattr(layer, "name", "")

    def forward(self, x: Any, micro: Any) -> Any:
        self.left -= 1
        if not self.left and self.where == "forward":
            raise RuntimeError("broken off")
        y = self.layer(x, micro)
        if not self.left:
            y.register_hook(self._fail)
        return y

    def _fail(self, grad: Tensor) -> None:
        raise RuntimeError("broken off")


def after_a_step_that_broke_off(case: Case, where: str) -> float:
    """How far weights are from those of an engine in which nothing broke; nothing that the step kept is alive."""
    config = config_of(case)
    whole, engine = engine_of(config), engine_of(config)
    (stage,) = engine.executor.stages
    kept = stage.layers
    stage.layers = [Breaks(n, where) if i == 2 else n for i, n in enumerate(stage.layers)]
    with pytest.raises(RuntimeError, match="broken off"):
        engine.step(share(batch(0, case.rows), engine.topology))
    stage.layers = kept
    for number in range(STEPS):
        for one in (whole, engine):
            one.step(share(batch(number, case.rows), one.topology))
    gc.collect()
    assert not stage._frames  # type: ignore[attr-defined]
    evaluated = [
        float(one.evaluate(share(batch(7, case.rows), one.topology))) for one in (whole, engine)
    ]
    assert evaluated[0] == evaluated[1]
    weights = [one.full_state_dict() for one in (whole, engine)]
    return max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_breaks_off_leaves_nothing_behind(where: str) -> None:
    case = Case(zero=3, offload_params="cpu", microbatches=4, order="layer", recompute="half")
    assert run_ranks(1, after_a_step_that_broke_off, case, where) == [0.0]


# -------------------------------------------------------------------------------------------------- refused, and chosen


REFUSED: list[tuple[dict[str, dict[str, object]], str, str]] = [
    (
        {"zero": {"stage": 1}},
        "--zero.order layer with --zero.stage 1: lower stages keep full parameters",
        "--zero.stage 2 or 3",
    ),
    (
        {"parallel": {"pp": 2}},
        "--zero.order layer with --parallel.pp 2: a stage would have to wait",
        "--parallel.pp 1",
    ),
]


@pytest.mark.parametrize(("changes", "message", "fix"), REFUSED)
def test_what_it_cannot_do_is_refused_by_name(
    changes: dict[str, dict[str, object]], message: str, fix: str
) -> None:
    groups: dict[str, dict[str, object]] = {"zero": {"stage": 3, "order": "layer"}}
    groups |= {name: groups.get(name, {}) | values for name, values in changes.items()}
    (problem,) = find_problems(Config.model_validate(groups), 2)
    assert problem.startswith(message)
    assert problem.count("; use --") == 1
    assert problem.endswith(f"; use {fix}, or --zero.order micro")


def wrapped(order: str) -> str:
    config = Config.model_validate({"zero": {"stage": 3, "order": order}})
    try:
        engine = Engine(nn.Linear(4, 4), Topology(), config)  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return engine.config.zero.order


def test_a_wrapped_module_runs_by_itself() -> None:
    assert "--zero.order layer with a wrapped module: " in run_ranks(1, wrapped, "layer")[0]
    assert run_ranks(1, wrapped, "auto") == ["micro"]


def test_only_a_plan_of_all_forwards_and_then_all_backwards_is_run_so() -> None:
    check(build("gpipe", 1, 3))
    with pytest.raises(
        ValueError,
        match=r"plan 1f1b: rank 0: B0\.0: layer-major execution needs a plan of one stage",
    ):
        check(build("1f1b", 1, 3))
    with pytest.raises(ValueError, match=r"plan gpipe: rank 0: F0\.0: layer-major execution"):
        check(build("gpipe", 2, 3))


def test_the_choice_by_bytes() -> None:
    """What all but one micro-batch keep, against what slices have freed."""
    assert choose(8, kept=100, freed=700) == "layer"
    assert choose(8, kept=101, freed=700) == "micro"
    assert choose(1, kept=0, freed=700) == "micro"  # nothing to gain
    assert choose(8, kept=0, freed=0) == "micro"  # nothing comes and goes


AUTO: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"recompute": {"mode": "full"}}, "layer"),
    ({}, "micro"),  # activations of four micro-batches are larger than the model
    ({"recompute": {"mode": "full"}, "zero": {"stage": 2}}, "micro"),
    ({"recompute": {"mode": "full"}, "zero": {"resident": 2**30}}, "micro"),
    ({"recompute": {"mode": "full"}, "train": {"global_batch": 4}}, "micro"),
]


def auto(changes: dict[str, dict[str, Any]]) -> Config:
    groups: dict[str, dict[str, Any]] = {
        "model": {"layers": 3, "hidden": 64, "heads": 4, "seq": 16},
        "zero": {"stage": 3, "order": "auto", "resident": 0},
        "train": {"global_batch": 16, "micro_batch": 2, "steps": 10},
    }  # fmt: skip
    return resolve(
        Config.model_validate(
            {n: groups.get(n, {}) | changes.get(n, {}) for n in {*groups, *changes}}
        ),
        VOCAB,
        2,
    )


def chosen(configs: Sequence[Config]) -> list[str]:
    engines = (engine_of(config) for config in configs)
    return [
        "layer" if isinstance(engine.executor, LayerMajorExecutor) else "micro"
        for engine in engines
    ]


def test_engines_and_forecasts_choose_alike() -> None:
    configs, wanted = [auto(changes) for changes, _ in AUTO], [order for _, order in AUTO]
    assert run_ranks(2, chosen, configs) == [wanted] * 2
    assert [Forecast.of(config, 2).config.zero.order for config in configs] == wanted


def order_of_vision() -> str:
    config = users_cases.config_of(users_cases.Case("vision", zero=3, microbatches=3, order="auto"))
    zero = config.zero.model_copy(update={"offload_params": "cpu"})
    config = config.model_copy(update={"zero": zero})
    return Engine(
        USERS_MODELS["vision"](config.model, Slicing()), Topology(), config
    ).config.zero.order


def test_a_model_that_cannot_be_traced_runs_micro_batch_by_micro_batch() -> None:
    assert run_ranks(1, order_of_vision) == ["micro"]
