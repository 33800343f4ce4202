"""Blocks through torch.compile inside the engine: no graph break, one graph for all that are alike, the same numbers.

`fullgraph` makes a break an error. The backend that only traces (aot_eager) computes with the same kernels in the same
order, so there every number is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor, nn

from tests import test_equivalence as equivalence
from tests.configs import (
    SEQ,
    VOCAB,
    Case,
    batch,
    compare_in_worlds,
    config_of,
    engine_of,
    padded_to,
    share,
)
from tests.covering import Space, Values
from threed.config import Config, ConfigError
from threed.config.resolution import resolve
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import Block, Dropout

pytest.importorskip("torch._opaque_base", reason="this torch has no opaque objects")
SETTINGS: dict[str, list[object]] = {
    name: options[:1] for name, options in equivalence.SETTINGS.items()
} | {
    "dp": [1, 2],
    "tp": [1, 2],
    "model": ["gpt", "qwen-tied", "phi3", "gemma2", "gemma3"],
    "sequence": [True, False],
    "zero": [0, 3],
    "microbatches": [1, 3],
    "dropout": [0.0, 0.1],
    "recompute": ["none", "full", "selective"],
    "tile": [1, 3],
    "schedule": ["1f1b", "zb-h1"],
}


def make(values: Values) -> Case | None:
    """A case of the equivalence tests on at most two ranks."""
    case = equivalence.make(values)
    return (
        replace(case, schedule=str(values["schedule"]))
        if case is not None and case.world <= 2
        else None
    )


SPACE = Space(
    SETTINGS, make, cost=lambda case: 4 + case.world * case.layers, shape=lambda c: (c.dp, c.tp)
)


def compiled(config: Config, backend: str = "aot_eager") -> Config:
    """The same, compiled."""
    return config.model_copy(
        update={"run": config.run.model_copy(update={"compile": True, "compile_backend": backend})}
    )


def steps(
    config: Config, pad: int = 0, count: int = 2
) -> tuple[list[tuple[float, float | None]], dict[str, Tensor]]:
    """Losses and norms of some steps, the loss of an evaluation after them, and the weights on rank 0."""
    with padded_to(pad):
        engine = engine_of(config)
    rows = config.train.global_batch
    seen = [engine.step(share(batch(step, rows), engine.topology)) for step in range(count)]
    evaluated = float(engine.evaluate(share(batch(count, rows), engine.topology)))
    return [*((s.loss, s.grad_norm) for s in seen), (evaluated, None)], engine.full_state_dict()


def compare(cases: Sequence[Case]) -> list[str]:
    """On every rank: what differs between a case as it is, and compiled."""
    wrong = []
    for case in cases:
        dynamo.reset()
        config = config_of(case)
        (numbers, weights) = steps(config, case.pad)
        (again, weights_again) = steps(compiled(config), case.pad)
        other = [
            name for name, value in weights.items() if not torch.equal(value, weights_again[name])
        ]
        if numbers != again or other:
            wrong.append(f"{case}: {numbers} and {again}; {other}")
    return wrong


def compare_rounded(cases: Sequence[Case]) -> list[str]:
    """The same with inductor, which fuses: losses and norms to 1e-6, as rotary tables differ by a rounding of fp32."""
    wrong = []
    for case in cases:
        dynamo.reset()
        config = config_of(case)
        numbers = steps(config, case.pad)[0]
        again = steps(compiled(config, "inductor"), case.pad)[0]
        pairs = [
            pair
            for a, b in zip(numbers, again, strict=True)
            for pair in zip(a, b, strict=True)
            if pair[0] is not None
        ]
        if any(b != pytest.approx(a, rel=1e-6) for a, b in pairs):
            wrong.append(f"{case}: {numbers} and {again}")
    return wrong


# Windows are in WINDOWS, other families and every pair of settings in the grid: compiling one of their cases takes 20 s.
EVERYDAY = [
    Case(recompute="selective", dropout=0.1, microbatches=3, layers=1),
    Case(dp=2, zero=3, tile=3, recompute="full", microbatches=3, layers=2),
]


def test_every_number_is_the_same_with_every_setting() -> None:
    compare_in_worlds(EVERYDAY[:1], compare)


DRIVE = {"zero": 3, "offload_params": "nvme", "offload_optimizer": "nvme"}
WINDOWS = Case(**DRIVE, order="layer", model="mistral")
OFFLOADED = [
    Case(**DRIVE, order="layer", model="gemma3"),
    Case(dp=2, zero=3, offload_params="cpu", recompute="full", model="qwen-tied"),
    Case(
        dp=2,
        zero=3,
        offload_params="nvme",
        offload_optimizer="cpu",
        tile=3,
        recompute="selective",
        prefetch=3,
    ),
    Case(pp=2, **DRIVE, schedule="zb-h1", microbatches=3, dropout=0.1),
    Case(tp=2, **DRIVE, tile=3, recompute="full", layers=1),
]


def test_every_number_is_the_same_where_states_are_offloaded() -> None:
    """While a layer runs, parameters of others are freed, or being read from a drive: torch must not look at them."""
    compare_in_worlds([WINDOWS], compare)


@pytest.mark.grid
def test_every_number_is_the_same_in_the_other_cases() -> None:
    compare_in_worlds([EVERYDAY[1], *OFFLOADED], compare)


def test_every_number_is_the_same_with_two_versions_of_the_weights() -> None:
    """Passes read the older version while the newest is being gathered."""
    compare_in_worlds([Case(dp=2, zero=1, schedule="2bw", microbatches=3)], compare)


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_every_number_is_the_same_in_a_covering_set() -> None:
    compare_in_worlds(SPACE.covering(0), compare)


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 4))
def test_every_number_is_the_same_in_all_topologies(seed: int) -> None:
    compare_in_worlds(equivalence.SPACE.covering(seed), compare)


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_inductors_numbers_are_the_same_within_rounding_in_a_covering_set() -> None:
    compare_in_worlds(SPACE.covering(0), compare_rounded)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    dynamo.reset()
    dynamo.utils.counters.clear()


def alone(**changes: object) -> Config:
    """The configuration of one process."""
    return config_of(Case(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dropout", "place"),
    [
        (0.0, "nvme"),
        (0.1, "none"),
        *(pytest.param(*case, marks=pytest.mark.grid) for case in ((0.0, "none"), (0.1, "nvme"))),
    ],
)
def test_blocks_that_are_alike_share_one_graph(dropout: float, place: str) -> None:
    """Also where their parameters come from a drive: no guard is on what the engine keeps of them."""
    config = compiled(alone(layers=6, dropout=dropout, zero=3, offload_params=place))
    engine, rows = engine_of(config), config.train.global_batch
    for step in range(4):
        engine.step(batch(step, rows))
    assert sum(1 for layer in engine.blueprint.layers if isinstance(layer, Block)) == 6
    # The number of a step rules dropout: it becomes an input of the graph when it is another one.
    assert dynamo.utils.counters["stats"]["unique_graphs"] == (1 if dropout == 0 else 2)
    assert not dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    "place",
    [pytest.param({}, id="device"), pytest.param(DRIVE, id="drive", marks=pytest.mark.grid)],
)
def test_inductor_trains_to_the_same_within_rounding(place: dict[str, object]) -> None:
    config = alone(model="llama", dropout=0.1, **place)
    (numbers, weights), (again, weights_again) = steps(config), steps(compiled(config, "inductor"))
    # Rotary tables are fp32, and other sines by one rounding.
    assert [loss for loss, _ in again] == pytest.approx([loss for loss, _ in numbers], rel=1e-8)
    assert [norm for _, norm in again[:-1]] == pytest.approx(
        [norm for _, norm in numbers[:-1]], rel=1e-6
    )
    for name, value in weights.items():
        torch.testing.assert_close(weights_again[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "schedule",
    ["zb-h1", *(pytest.param(name, marks=pytest.mark.grid) for name in ("zb-v", "dualpipev"))],
)
def test_a_backward_that_waits_keeps_what_the_compiler_writes_over(schedule: str) -> None:
    """Inductor reuses the memory of an output's gradient once the input's is made; the weight's comes from it later."""
    config = alone(schedule=schedule, microbatches=4, layers=4)
    (numbers, weights), (again, weights_again) = steps(config), steps(compiled(config, "inductor"))
    assert [norm for _, norm in again[:-1]] == pytest.approx(
        [norm for _, norm in numbers[:-1]], rel=1e-6
    )
    for name, value in weights.items():
        torch.testing.assert_close(weights_again[name], value, rtol=1e-5, atol=1e-7)


class Plain(nn.Module):
    """A layer of a user's own around threed's: it may be compiled."""

    compilable = True

    def __init__(self, block: Block, breaks: bool) -> None:
        super().__init__()
        self.block, self.breaks, self.name = block, breaks, block.name

    def forward(self, x: Tensor, micro: object) -> Tensor:
        y = self.block(x, micro)
        if self.breaks:
            print(float(y.sum()))
        return y.mul(1.0)


def own(breaks: bool) -> tuple[Engine, int]:
    """An engine whose blocks are of a user's own type."""
    from threed import models
    from threed.layers import Slicing

    config = compiled(alone())
    model = models.build(config.model, Slicing(seed=config.train.seed))
    layers = [
        Plain(layer, breaks) if isinstance(layer, Block) else layer for layer in model.layers()
    ]
    model.layers = lambda: layers  # type: ignore[method-assign]
    return Engine(model, Topology(), config), config.train.global_batch


def test_a_users_layer_is_compiled_if_it_says_so() -> None:
    engine, rows = own(breaks=False)
    loss = engine.step(batch(0, rows)).loss
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert loss == engine_of(alone()).step(batch(0, rows)).loss


def test_a_layer_that_breaks_the_graph_is_an_error() -> None:
    engine, rows = own(breaks=True)
    with pytest.raises(dynamo.exc.Unsupported, match=r"print|item"):
        engine.step(batch(0, rows))


def test_a_module_that_cannot_be_compiled_by_layers_is_refused() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB, VOCAB)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.table(tokens).flatten(0, 1), labels.flatten())

    config = Config.model_validate(
        {"train": {"global_batch": 4, "micro_batch": 4}, "run": {"compile": True}}
    )
    with pytest.raises(
        ConfigError, match=r"--run.compile: no layer of this model .* `compilable = True`"
    ):
        Engine(Whole(), Topology(), resolve(config, VOCAB, 1))


def test_dropout_is_a_function_of_the_step_in_a_graph_too() -> None:
    config = alone(dropout=0.3)
    first, again = steps(compiled(config), count=3)[0], steps(config, count=3)[0]
    assert first == again
    assert any(
        isinstance(m, Dropout)
        for layer in engine_of(config).blueprint.layers
        for m in layer.modules()
    )
    assert SEQ % 4 == 0
