"""MLPs on chunks of the sequence: the numbers of an MLP on the full sequence, and the memory of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests import peaks, users_layers
from tests import test_equivalence as equivalence
from tests.configs import STEPS, Case, batch, config_of, engine_of, share, topology_of
from tests.covering import Space, Values
from tests.harness import run_ranks
from tests.live import Peak
from tests.users_cases import Case as UsersCase
from tests.users_cases import config_of as users_config
from tests.users_cases import steps_of
from tests.users_models import MODELS, Decoder
from threed.config import Config, ConfigError
from threed.config.checks import find_problems
from threed.distributed.sharding import parameter, vector
from threed.distributed.topology import Topology
from threed.engine import Engine, StepMetrics
from threed.layers import MLP, Block, GatedMLP, Slicing, mlp
from threed.layers.slicing import SummedSink
from threed.planner.forecast import Forecast

CHUNKS = 3  # does not divide the sequence of 16, nor the part of 8 of one of two tensor ranks
SETTINGS: dict[str, list[object]] = {
    name: options[:1] for name, options in equivalence.SETTINGS.items()
} | {
    "pp": [1, 2],
    "dp": [1, 2],
    "tp": [1, 2],
    "model": ["gpt", "llama"],
    "sequence": [True, False],
    "zero": [0, 2, 3],
    "schedule": ["1f1b", "zb-h1", "interleaved"],
    "microbatches": [1, 3],
    "dropout": [0.0, 0.1],
    "recompute": list(equivalence.RECOMPUTE),
    "offload_optimizer": ["none", "cpu", "nvme"],
    "offload_params": ["none", "cpu"],
    "bucket_mib": [64.0, 0.03],
    "tile": [1, 3],
    "order": ["micro", "layer"],
}


def make(values: Values) -> Case | None:
    """A case of the equivalence tests on at most four ranks."""
    case = equivalence.make(values)
    if case is None or case.world > 4:
        return None
    return case if case.pp == 1 and case.zero > 1 else replace(case, order="micro")


SPACE = Space(SETTINGS, make, cost=equivalence.cost, shape=lambda case: (case.pp, case.dp, case.tp))


def in_chunks(config: Config, chunks: int = CHUNKS, key: str = "mlp_chunks") -> Config:
    """Returns the configuration with MLPs, or what else `key` is about, on chunks."""
    recompute = config.recompute.model_copy(update={key: chunks})
    return config.model_copy(update={"recompute": recompute})


def trained(case: Case) -> tuple[Engine, list[StepMetrics]]:
    """Trains a case with chunks."""
    config = in_chunks(config_of(case))
    engine = engine_of(config)
    rows = config.train.global_batch
    metrics = [engine.step(share(batch(step, rows), engine.topology)) for step in range(STEPS)]
    return engine, metrics


EVERYDAY = replace(SPACE, shape=lambda case: case.world)
CHEAPEST = 12  # the cheapest of the first seeds


def test_every_setting_equals_one_process_without_chunks() -> None:
    cases = EVERYDAY.touching(CHEAPEST)
    for name, options in SETTINGS.items():
        assert {getattr(case, name) for case in cases} >= set(options), name
    equivalence.run_all(cases, trained)


@pytest.mark.grid
@pytest.mark.timeout(7200)
def test_a_covering_set_equals_one_process_without_chunks() -> None:
    """With every pair of values of two settings."""
    equivalence.run_all(SPACE.covering(0), trained)


# --------------------------------------------------------------------------------------------------- users' models

USERS = ["albert", "used-twice", "frozen-embedding", "frozen-middle"]  # these have layers.MLP


def users(chunks: int, case: UsersCase) -> Any:
    """Losses, norms, evaluation and weights of a user's model."""
    config, topology = in_chunks(users_config(case), chunks), topology_of(case.pp, case.tp)
    cut = Slicing(topology.axis("tp"), bool(config.parallel.sequence), config.train.seed)
    result = steps_of(Engine(MODELS[case.model](config.model, cut), topology, config), case)
    return [*result.losses, *result.norms, result.evaluation], result.weights


def compare_users(cases: list[UsersCase]) -> None:
    for case in cases:
        (want, weights), (found, others) = users(1, case), users(CHUNKS, case)
        assert found == pytest.approx(want, rel=1e-9), case
        for name, weight in weights.items():
            torch.testing.assert_close(
                others[name], weight, rtol=0, atol=1e-9, msg=f"{case} {name}"
            )


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.grid)])
@pytest.mark.parametrize("tp", [1, 2])
def test_users_models_train_the_same(tp: int, others: bool) -> None:
    """Each model with one mode of recomputation, in turn, or with the other modes."""
    cases = [
        UsersCase(model, tp=tp, sequence=tp > 1, zero=1, recompute=mode)
        for i, model in enumerate(USERS)
        for j, mode in enumerate(("none", "full", "selective"))
        if ((i + tp) % 3 != j) == others
    ]
    run_ranks(tp, compare_users, cases, timeout=600)


# ------------------------------------------------------------------------------------- an MLP without an engine


class Swish(nn.Module):
    """x sigmoid(beta x), with a trained beta, whose gradient autograd computes."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = parameter(Slicing().shared(vector("m.beta", 1), partial=True), (1,))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def drops(x: Tensor) -> Tensor:
    """A user's activation that draws random numbers."""
    return x.relu() * torch.rand_like(x)


def plain(kind: type[MLP] = MLP, **options: Any) -> MLP:
    made = kind("m", 8, 20, Slicing(), **options).to_empty(device="cpu").double()
    draw = torch.Generator().manual_seed(0)
    for p in made.parameters():
        p.data.copy_(torch.randn(p.shape, generator=draw))
    return made


def freeze_up(made: MLP) -> None:
    made.up.requires_grad_(False)


def freeze(made: MLP) -> None:
    made.requires_grad_(False)


def hook_down(made: MLP) -> None:
    made.down.register_forward_hook(lambda module, given, y: 2 * y)


def hook_up(made: MLP) -> None:
    made.up.register_forward_pre_hook(lambda module, given: (3 * given[0],))


def hook_weights(made: MLP) -> None:
    for p in made.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-1, 1))


def nothing(made: MLP) -> None:
    """Changes nothing."""


ALONE: dict[str, tuple[Callable[[], MLP], Callable[[MLP], None]]] = {
    "mlp": (plain, nothing),
    "without biases": (lambda: plain(bias=False), nothing),
    "gated": (lambda: plain(GatedMLP), nothing),
    "gated, biases, relu": (lambda: plain(GatedMLP, bias=True, activation=torch.relu), nothing),
    "trained activation": (lambda: plain(activation=Swish()), nothing),
    "random activation": (lambda: plain(activation=drops), nothing),
    "frozen up": (plain, freeze_up),
    "frozen": (plain, freeze),
    "hooks of up": (plain, hook_up),
    "hooks of down": (plain, hook_down),
    "gradient hooks": (plain, hook_weights),
}


@pytest.mark.parametrize("given", [True, False], ids=["x with gradient", "x without"])
@pytest.mark.parametrize("what", ALONE)
def test_an_mlp_without_an_engine_gives_its_gradients(what: str, given: bool) -> None:
    if what == "frozen" and not given:
        return  # nothing has a gradient
    build, change = ALONE[what]
    results = []
    for chunks in (1, CHUNKS, 7, 100):
        made = build()
        made.chunks = 1 if what == "random activation" and chunks == 1 else chunks
        change(made)
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(7, 2, 8, generator=draw, dtype=torch.float64).requires_grad_(given)
        torch.manual_seed(2)
        y = made(x)
        (y * torch.arange(7.0, dtype=torch.float64).view(7, 1, 1)).sum().backward()
        drawn = torch.rand(())
        results.append([y.detach(), drawn, x.grad, *(p.grad for p in made.parameters())])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert (one is None) == (two is None)
            if one is not None and two is not None:
                torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_gradient_hooks_of_an_activation_are_refused_by_name() -> None:
    made = plain(activation=Swish())
    made.chunks = 2
    made.activation.beta.register_hook(lambda gradient: gradient)  # type: ignore[attr-defined]
    y = made(torch.randn(4, 1, 8, dtype=torch.float64))
    with pytest.raises(
        RuntimeError, match=r"activation\.beta of an MLP: its gradient hooks would run once"
    ):
        y.sum().backward()


def test_second_derivatives_are_refused() -> None:
    made = plain()
    made.chunks = 2
    x = torch.randn(4, 1, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True, through an MLP that runs in chunks"):
        torch.autograd.grad(made(x).sum(), x, create_graph=True)


# -------------------------------------------------------------------------------------------- contributions, faults


def counted(case: Case) -> dict[str, int | None]:
    """Returns the number of contributions per micro-batch to the gradients of MLPs."""
    engine, _ = trained(case)
    return {
        slot.spec.name: engine.reducer.sink_of(slot).counts.per_pass
        for slot in engine.layout.slots
        if ".mlp." in slot.spec.name
    }


CASE = Case(model="gpt", layers=2, microbatches=3)


def test_a_layer_contributes_once_per_micro_batch() -> None:
    (found,) = run_ranks(1, counted, CASE)
    assert len(found) == 8
    assert set(found.values()) == {1}


def twice(self: SummedSink, *given: Any) -> None:
    """Adds a product twice."""
    for _ in range(2):
        out, add = self.memory()
        torch.addmm(out * add, *given[:2], out=out)
        self.mark_added()


def left_out(length: int, parts: int, part: int) -> tuple[int, int]:
    """Splits a sequence, without the last position of the second chunk."""
    first, last = parts_of(length, parts, part)
    return first, last - (part == 1)


parts_of = mlp.split
FAULTS: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "a gradient counted twice": lambda: mock.patch.object(SummedSink, "add_product", twice),
    "a part of a chunk left out": lambda: mock.patch.object(mlp, "split", left_out),
    "a contribution per chunk": lambda: mock.patch.object(mlp, "one_contribution", separate),
}


class separate:
    """A context in which contributions to a sink are not summed."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.count = len(params)

    def __enter__(self) -> list[None]:
        return [None] * self.count

    def __exit__(self, *_: object) -> None: ...


def with_fault(case: Case) -> dict[str, Any]:
    """Returns what is seen of each fault: the differences from no chunks, and the contributions."""
    engine = engine_of(config_of(case))
    rows = engine.config.train.global_batch
    want = [engine.step(share(batch(i, rows), engine.topology)).grad_norm for i in range(STEPS)]
    found = {}
    for name, fault in FAULTS.items():
        with fault():
            other, metrics = trained(case)
        counts = {other.reducer.sink_of(slot).counts.per_pass for slot in other.layout.slots}
        off = max(abs(m.grad_norm - norm) for m, norm in zip(metrics, want, strict=True))
        found[name] = (off, max(count or 0 for count in counts))
    return found


def test_faults_are_found() -> None:
    (found,) = run_ranks(1, with_fault, replace(CASE, model="llama"))
    off, counts = found.pop("none")
    assert off < 1e-9
    assert counts == 1
    assert found["a gradient counted twice"][0] > 1e-6
    assert found["a part of a chunk left out"][0] > 1e-6
    assert found["a contribution per chunk"][1] == CHUNKS


# ------------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("kind", [MLP, GatedMLP])
def test_only_one_chunk_of_inner_features_exists(kind: type[MLP]) -> None:
    """Without chunks, the backward has four of them: up, the activation, and their gradients."""
    s, b, h, f = 256, 2, 16, 512
    most = []
    for chunks in (1, 4, 16):
        made = kind("m", h, f, Slicing(), bias=False).to_empty(device="cpu")
        for p in made.parameters():
            nn.init.normal_(p)
        made.chunks = chunks
        x = torch.randn(s, b, h).requires_grad_()
        with Peak() as live:
            made(x).sum().backward()
        fixed = 2 * sum(p.nbytes for p in made.parameters()) + 4 * x.nbytes
        most.append((live.most - fixed) / (s * b * f * 4))
    assert most[0] > 2.5
    assert most[1] < most[0] / 4 * 1.1
    assert most[2] < most[0] / 16 * 1.1


def sized(world: int, seq: int, **groups: dict[str, Any]) -> Config:
    model = {"layers": 3, "hidden": 64, "heads": 4, "ffn": 512, "seq": seq, "arch": "llama"}
    train = {"micro_batch": 1, "global_batch": 2}
    return peaks.config_of(world, model=model, train=train, **groups)


BOTH = {"mlp_chunks": 8, "loss_chunks": 16}
CONFIGS: dict[int, list[dict[str, dict[str, Any]]]] = {
    1: [
        {"recompute": {"mode": "selective", "ops": ("attention", "activation", "norm"), **BOTH}},
        {"recompute": {"mlp_chunks": 8}},
        {"recompute": {"mode": "full", **BOTH}},
        {"recompute": BOTH, "zero": {"stage": 3, "tile": 2}},
    ],
    2: [
        {"recompute": {"mode": "full", **BOTH}, "parallel": {"tp": 2}},
        {"recompute": BOTH, "parallel": {"tp": 2, "sequence": False}},
    ],
}


@pytest.mark.parametrize(
    ("world", "others"),
    [
        (2, False),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in ((1, False), (1, True), (2, True))
        ),
    ],
)
def test_the_forecast_is_the_measured_peak(world: int, others: bool) -> None:
    """Up to a percent; gloo may keep messages."""
    chosen = CONFIGS[world][1:] if others else CONFIGS[world][:1]
    configs = [sized(world, 1024, **groups) for groups in chosen]
    measured = zip(*run_ranks(world, peaks.measure_all, configs, timeout=900), strict=True)
    for config, found in zip(configs, measured, strict=True):
        said = [rank.bytes["peak"] for rank in Forecast.of(config, world).ranks]
        assert found == pytest.approx(said, rel=0.01), config.recompute


def test_only_the_residual_stream_grows_with_the_sequence() -> None:
    """The additional bytes per position and block, in [b h] of fp32."""

    def growth(**recompute: Any) -> float:
        peaks = [
            Forecast.of(sized(1, seq, recompute={"mode": "full", **recompute}), 1)
            .ranks[0]
            .bytes["peak"]
            for seq in (4096, 8192)
        ]
        return (peaks[1] - peaks[0]) / 4096 / (64 * 4)

    assert growth() > 50
    assert growth(mlp_chunks=64, loss_chunks=64) < 25


# ---------------------------------------------------------------------------------------------------------- refusals


class Louder(MLP):
    """A user's MLP with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LouderBlocks(MODELS["albert"]):  # type: ignore[misc]
    """Its MLPs have a forward of their own."""

    def block(self, name: str, width: int | None = None) -> Block:
        block: Block = super().block(name, width)
        block.mlp.__class__ = Louder
        return block


class NoHead(Decoder):
    """Its last layer computes the loss itself."""

    def layers(self) -> list[nn.Module]:
        return [self.embedding(), users_layers.Classifier(self.hidden, self.slicing)]


class NoBlocks(Decoder):
    """Only an embedding and a head."""

    def layers(self) -> list[nn.Module]:
        return [self.embedding(), self.head()]


def errors() -> list[str]:
    plain, found = users_config(UsersCase("albert")), []
    mlps, losses = in_chunks(plain), in_chunks(plain, key="loss_chunks")
    for config, model in (
        (mlps, nn.Linear(2, 2)),
        *((mlps, kind(plain.model, Slicing())) for kind in (LouderBlocks, NoBlocks)),
        (losses, nn.Linear(2, 2)),
        (losses, NoHead(plain.model, Slicing())),
    ):
        with pytest.raises(ConfigError) as error:
            Engine(model, Topology(), config)
        found.append(str(error.value))
    return found


def test_what_cannot_run_in_chunks_is_refused_by_name() -> None:
    """Before the first step, in which only the last stage would raise an error."""
    wrapped, louder, none, loss, headless = run_ranks(1, errors)[0]
    assert "--recompute.mlp-chunks 3: a wrapped module has no layers.MLP" in wrapped
    assert "--recompute.mlp-chunks 3: Louder replaces the forward of layers.MLP" in louder
    assert "--recompute.mlp-chunks 3: this model has no layers.MLP or layers.GatedMLP" in none
    assert "--recompute.loss-chunks 3: a wrapped module has no layers.Lang" in loss
    assert "--recompute.loss-chunks 3: this model has no layers.LanguageModelHead" in headless


def test_compiled_layers_and_graphs_are_refused_by_name() -> None:
    for key, value in (("compile", True), ("graphs", True)):
        config = in_chunks(config_of(Case()))
        config = config.model_copy(update={"run": config.run.model_copy(update={key: value})})
        (problem,) = (p for p in find_problems(config, 1) if "mlp-chunks" in p)
        assert f"--run.{key}" in problem
