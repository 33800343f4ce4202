"""Engines that are built from Python: their kinds, custom loops, what is refused, and what metrics
show."""

from __future__ import annotations

import copy
import gc
import pickle
import pydoc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from tests.configs import Case, batch, config_of, engine_of, share, topology_of
from tests.harness import run_ranks
from tests.pipeline.test_step import with_
from tests.users_models import MODELS as USERS
from threed import models
from threed.config import Config, ConfigError, ParamGroup
from threed.distributed.topology import Topology
from threed.engine import Engine, LayeredEngine, ModuleEngine
from threed.layers import Slicing
from threed.models import Wrapped, is_layered
from threed.zero.step_metrics import BadStepsError


@pytest.mark.parametrize(
    ("group", "changes", "named"),
    [
        ("precision", {"dtype": "fp8"}, "--precision.dtype fp8"),
    ],
)
def test_a_feature_that_is_not_there_is_refused_by_name(
    group: str, changes: dict[str, object], named: str
) -> None:
    config = config_of(Case(dtype="fp32"))
    config = config.model_copy(update={group: getattr(config, group).model_copy(update=changes)})
    with pytest.raises(ConfigError, match=named):
        engine_of(config)


FEWER = "use a smaller --parallel.pp"
TOO_FEW: list[tuple[int, dict[str, object], str, str]] = [
    (6, {"partition": "uniform"}, "", FEWER),
    (
        3,
        {"schedule": "v-min", "chunks": 2},
        " × 2 chunks of --parallel.schedule v-min",
        f"{FEWER}, another --parallel.schedule",
    ),
    (
        2,
        {"schedule": "interleaved", "chunks": 3},
        " × 3 chunks of --parallel.schedule interleaved",
        f"{FEWER}, fewer --parallel.chunks, another --parallel.schedule",
    ),
]


@pytest.mark.parametrize(("pp", "changes", "chunks", "fix"), TOO_FEW)
def test_too_few_layers_of_a_users_model_are_refused_with_the_flags_to_change(
    pp: int, changes: dict[str, object], chunks: str, fix: str
) -> None:
    given = f"5 layers, embedding and head included, cannot fill the 6 stages of --parallel.pp {pp}"
    problem = f"{given}{chunks}: {fix}, or a model of 6 layers or more"
    run_ranks(pp, refuse_albert, pp, {"parallel": changes}, [problem])


def test_a_partition_that_does_not_fit_a_users_model_is_refused_with_all_other_problems() -> None:
    given = "--parallel.partition 3,1,2"
    problems = [
        f"{given} is for 3 stages: give 2 numbers, one for each of --parallel.pp 2",
        f"{given} makes 6 layers: 5 are needed, embedding and head included",
        "--optim.groups 'tail.*' matches no parameter",
    ]
    groups = (ParamGroup(match="tail.*", lr=1e-3),)
    changes = {"parallel": {"partition": (3, 1, 2)}, "optim": {"groups": groups}}
    run_ranks(2, refuse_albert, 2, changes, problems)


def refuse_albert(pp: int, changes: dict[str, dict[str, object]], problems: list[str]) -> None:
    """Checks, on every rank, the refusal of a model of 5 layers."""
    config = with_(config_of(Case(pp=pp, layers=6, microbatches=pp)), **changes)
    with pytest.raises(ConfigError) as found:
        Engine(USERS["albert"](config.model, Slicing()), topology_of(pp, 1), config)
    assert [text.split(": names are")[0] for text in found.value.problems] == problems


class Named(nn.Module):
    """A user's own attribute of the name that threed's models have."""

    slicing = "slices of the video"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_what_is_a_model() -> None:
    """threed's own have a Slicing; other modules are wrapped, whatever they are called; the rest is
    refused."""
    config = config_of(Case(microbatches=-2))
    module = Named()
    x = torch.ones(2, 4, dtype=torch.float64)
    want = float(module(x).detach())
    assert Engine(module, topology_of(1, 1), config).step({"x": x}).loss == pytest.approx(
        want, rel=1e-12
    )
    wrapped = Wrapped(Named())
    assert Engine(wrapped, topology_of(1, 1), config).model is wrapped
    with pytest.raises(
        TypeError, match=r"dict is not a model: pass an nn\.Module, or layers with their `slicing`"
    ):
        Engine({}, topology_of(1, 1), config)  # type: ignore[arg-type]


def test_an_engine_is_of_the_kind_of_its_model() -> None:
    layered = engine_of(config_of(Case(layers=1)))
    assert type(layered) is LayeredEngine
    assert not hasattr(layered, "backward")
    assert isinstance(layered, Engine)
    module = Engine(Named(), topology_of(1, 1), config_of(Case(microbatches=-2)))
    assert type(module) is ModuleEngine
    assert not hasattr(module, "logits")
    assert isinstance(module, Engine)
    for engine in (layered, module):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copied(engine)


# ------------------------------------------------------------------------------------------------------- custom loops


def train_by_steps(stage: int, custom: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of three steps of two micro-batches on every rank, in a custom loop or
    by `Engine.step`."""
    torch.manual_seed(0)
    config = Config.model_validate({
        "train": {"global_batch": 8, "micro_batch": 4 // Topology().dp}, "precision": {"dtype": "fp64"},
        "zero": {"stage": stage, "resident": 0},
    })  # fmt: skip
    engine, losses = ModuleEngine(Named(), Topology(), config), []
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        rows = torch.randn(8, 4, generator=draw, dtype=torch.float64)
        own = rows.chunk(engine.topology.dp)[engine.topology.rank]
        if custom:
            engine.begin(microbatches=2)
            for x in own.chunk(2):
                engine.backward(engine.module(x))
            losses.append(engine.update().loss)
        else:
            losses.append(engine.step({"x": own}).loss)
    return losses, engine.full_state_dict()


def check_custom_loops(stage: int) -> None:
    losses, weights = train_by_steps(stage, custom=True)
    same_losses, same_weights = train_by_steps(stage, custom=False)
    assert losses == pytest.approx(same_losses, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, same_weights[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_a_custom_loop_trains_as_steps_do(world: int, stage: int) -> None:
    run_ranks(world, check_custom_loops, stage)


def test_a_step_of_a_custom_loop_can_be_discarded() -> None:
    x = torch.ones(2, 4, dtype=torch.float64)
    engine = ModuleEngine(Named(), topology_of(1, 1), config_of(Case(microbatches=-2)))
    before = engine.full_state_dict()
    engine.begin(microbatches=2)
    engine.backward(engine.module(x))
    engine.discard()
    with pytest.raises(RuntimeError, match=r"call Engine\.begin"):
        engine.backward(torch.ones((), requires_grad=True))
    with pytest.raises(RuntimeError, match=r"call Engine\.begin"):
        engine.update()
    engine.begin()
    with engine.inference() as module:
        want = float(module(x))
    engine.backward(engine.module(x))
    assert engine.full_state_dict()["linear.weight"].equal(before["linear.weight"])
    assert engine.update().loss == pytest.approx(want, rel=1e-12)


# --------------------------------------------------------------------------------------------------- what metrics show


def three_steps(case: Case, drops: bool, fails: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights. drops: `zero_grad` comes before each step. fails: the second step first
    fails in its second micro-batch."""
    engine, losses, calls = engine_of(config_of(case)), [], []

    def fail(*_: object) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise OSError("lost")

    for number in range(3):
        data = share(batch(number, case.rows), engine.topology)
        if fails and number == 1:
            hook = engine.blueprint.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(OSError, match="lost"):
                engine.step(data)
            hook.remove()
        if drops:
            engine.zero_grad()
        losses.append(engine.step(data).loss)
    return losses, engine.full_state_dict()


def check_dropping(case: Case) -> None:
    losses, weights = three_steps(case, drops=False, fails=False)
    got, found = three_steps(case, drops=True, fails=case.schedule == "1f1b")
    assert got == losses
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "case",
    [
        *(Case(dp=dp, zero=stage, dtype="fp32") for dp in (1, 2) for stage in range(4)),
        Case(pp=2, schedule="2bw", microbatches=4, dtype="fp32"),
    ],
)
def test_zero_grad_drops_a_step_that_failed_and_nothing_else(case: Case) -> None:
    run_ranks(case.world, check_dropping, case)


def test_metrics_show_their_values() -> None:
    """Also of a step whose loss is no number, whose properties raise."""
    config = config_of(Case(microbatches=-2))
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"max_bad_steps": 1})}
    )
    engine = Engine(Named(), topology_of(1, 1), config)
    metrics = engine.step({"x": torch.ones(2, 4, dtype=torch.float64)})
    shown = repr(metrics)
    assert shown.startswith(
        f"StepMetrics(step=1, tokens={metrics.tokens}, loss={metrics.loss:.6g}, grad_norm="
    )
    assert f"lr={metrics.lr:.6g}, loss_scale=1, skipped=0, bad_steps=0, fwd_bwd_s=" in shown
    bad = engine.step({"x": torch.full((2, 4), torch.nan, dtype=torch.float64)})
    assert "loss=nan" in str(bad)
    assert "skipped=1, bad_steps=1" in str(bad)
    with pytest.raises(BadStepsError):
        print(bad.loss)


def shown_while_updates_are_optimistic() -> list[str]:
    case = Case(pp=2, layers=2, microbatches=4)
    config = config_of(case)
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"optimistic_step": True})}
    )
    engine = engine_of(config)
    metrics = engine.step(batch(0, case.rows))
    # on one rank alone: it must not wait for others
    before = repr(metrics) if engine.topology.rank == 0 else ""
    return [before, f"loss={metrics.loss:.6g}", repr(metrics)]


def test_metrics_that_need_other_ranks_show_that_they_were_not_read() -> None:
    for before, loss, after in run_ranks(2, shown_while_updates_are_optimistic):
        assert before == "" or "step=1, " in before
        assert before == "" or "loss=<not read yet>, grad_norm=<not read yet>" in before
        assert f"{loss}, grad_norm=" in after


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"pp": 2}, r'parallel\.pp is 2, but the topology has pp 1: set parallel={"pp": 1}'),
        ({"tp": 2}, r'parallel\.tp is 2, but the topology has tp 1: set parallel={"tp": 1}'),
        ({"dp": 2}, r'parallel\.dp is 2, but the topology has dp 1: set parallel={"dp": 1}'),
        (
            {"tp": 2, "dp": 3},
            r'parallel\.tp is 2 and parallel\.dp is 3, but the topology has tp 1 and dp 1: set parallel={"tp": 1, "dp": 1}',
        ),
    ],
)
def test_a_topology_with_other_sizes_than_the_configuration_is_refused(
    sizes: dict[str, int], named: str
) -> None:
    config = config_of(Case(dtype="fp32"))
    config = with_(config, parallel={"dp": None, **sizes})
    with pytest.raises(ConfigError, match=named):
        Engine(models.build(config.model, Slicing()), Topology(), config)


def test_a_wrapped_module_with_a_configuration_for_tensor_ranks_is_refused() -> None:
    assert run_ranks(2, refused_sizes) == [refused_sizes_text()] * 2


def refused_sizes() -> str:
    with pytest.raises(ConfigError) as caught:
        Engine(nn.Linear(2, 1), Topology(), Config.model_validate({"parallel": {"tp": 2}}))
    return str(caught.value)


def refused_sizes_text() -> str:
    fix = 'set parallel={"tp": 1, "dp": 2} in the Config, as in the topology'
    return f"parallel.tp is 2 and parallel.dp is 1, but the topology has tp 1 and dp 2: {fix}"


def test_batch_sizes_that_do_not_divide_are_refused_before_the_first_step() -> None:
    named = (
        r"--train\.global-batch 5 is not divisible by --train\.micro-batch 2 × dp 1 = 2: use 4 or 6"
    )
    sizes = {"global_batch": 5, "micro_batch": 2}
    config = with_(config_of(Case(dtype="fp32")), train=sizes)
    for model in (models.build(config.model, Slicing()), nn.Linear(2, 1)):
        wrapped = Config.model_validate({"train": sizes})
        with pytest.raises(ConfigError, match=named):
            Engine(model, Topology(), config if is_layered(model) else wrapped)
    Engine(nn.Linear(2, 1), Topology(), wrapped, trains=False)


def test_a_custom_loop_does_not_need_batch_sizes() -> None:
    assert run_ranks(3, one_step_of_a_loop) == [1, 1, 1]


def one_step_of_a_loop() -> int:
    engine = Engine(nn.Linear(2, 1), Topology(), Config())  # 16 rows in micro-batches of 2
    assert isinstance(engine, ModuleEngine)
    engine.begin()
    engine.backward(engine.module(torch.ones(1, 2)).sum())
    return engine.update().step


@pytest.mark.parametrize("kind", [Engine, ModuleEngine, LayeredEngine])
def test_help_shows_every_method(kind: type[Engine]) -> None:
    names = {name for engine in (kind, ModuleEngine, LayeredEngine) for name in dir(engine)}
    for name in names if kind is Engine else dir(kind):
        if not name.startswith("_"):
            assert len(pydoc.render_doc(getattr(kind, name)).splitlines()) > 2, name
    with pytest.raises(AttributeError, match="has no attribute 'gather'"):
        Engine.gather  # noqa: B018


def test_an_engine_is_not_a_module() -> None:
    wrapped: Any = Engine(nn.Linear(2, 1), Topology(), Config())
    for name in ("to", "forward", "parameters", "train"):
        assert not hasattr(wrapped, name)
        with pytest.raises(
            AttributeError, match=r"use engine\.module, or, .*install_as_deepspeed\(\)"
        ):
            getattr(wrapped, name)
    layered: Any = engine_of(config_of(Case(dtype="fp32")))
    with pytest.raises(AttributeError, match=r"use the methods of threed\.Engine"):
        layered.to("cpu")
    for engine in (wrapped, layered):
        with pytest.raises(AttributeError, match=r"has no attribute 'stpe'$"):
            engine.stpe  # noqa: B018


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_of_a_torch_optimizer_that_changes_nothing_is_refused(stage: int) -> None:
    module, other = nn.Linear(2, 1), nn.Linear(2, 1)
    zero = {"stage": stage, **({"offload_params": "cpu"} if stage else {})}
    sizes = {"global_batch": 2, "micro_batch": 2}
    config = Config.model_validate({"zero": zero, "train": sizes})
    before = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = Engine(Wrapped(module, loss=torch.sum), Topology(), config)
    both = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=1.0)
    for optimizer in (before, both):
        engine.step({"input": torch.ones(2, 2)})
        weights = engine.full_state_dict()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"SGD\.step\(\) has no effect: .* engine\.step\(\)"):
            optimizer.step()
        assert all(
            torch.equal(value, weights[name]) for name, value in engine.full_state_dict().items()
        )
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    if not stage:  # gradients of the program
        module.weight.grad = torch.ones(1, 2)
        before.step()
        module.weight.grad = None
        after = engine.full_state_dict()["weight"]
        torch.testing.assert_close(after, weights["weight"] - 1, rtol=0, atol=1e-6)  # rounded once
    engine.destroy()
    before.step()
    del engine
    gc.collect()
    assert not _global_optimizer_post_hooks
