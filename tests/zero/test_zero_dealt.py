"""Parameters that are dealt over data ranks (`ShardSpec.over`): a layer of experts, of which each rank holds some.

Every token goes to every expert. The model trains to the numbers of one process in every topology, in fp64 to 1e-9
(only the order of sums differs), and its checkpoints load in every topology.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.configs import share
from tests.harness import run_ranks
from tests.layers.test_own_models import VOCAB, Result, batch, compare, configuration
from threed import layers
from threed.config import Config, ModelConfig
from threed.distributed import collectives, conjugate
from threed.distributed.sharding import Init, ModelError, Piece, ShardSpec, parameter
from threed.distributed.topology import Axis, Topology
from threed.engine import Engine
from threed.layers import Slicing

EXPERTS, WIDTH, STEPS = 4, 20, 3


class Experts(nn.Module):
    """Adds the sum of all experts to x [s b h]; each rank of `over` holds some of the experts."""

    def __init__(self, name: str, hidden: int, slicing: Slicing, over: str, axis: Axis) -> None:
        super().__init__()
        self.name, self.axis = name, axis
        self.norm = layers.RMSNorm(f"{name}.norm", hidden, slicing)
        experts = range(*collectives.split(EXPERTS, axis.size, axis.index))
        for what, shape in (("up", (WIDTH, hidden)), ("down", (hidden, WIDTH))):
            pieces = tuple(
                Piece(f"{name}.{e}.{what}", shape, (0, 0), shape, n * WIDTH * hidden, Init(0.2))
                for n, e in enumerate(experts)
            )
            spec = ShardSpec(pieces, slicing.replicated, slicing.partial, over=over)
            setattr(self, what, parameter(spec, (len(experts), *shape)))

    def forward(self, x: Tensor, micro: layers.MicroBatch) -> Tensor:
        tokens = conjugate.gather_from(self.norm(x), self.axis)
        features = torch.einsum("sbh,efh->sbef", tokens, self.up).relu().square()
        out = torch.einsum("sbef,ehf->sbh", features, self.down)
        return x + conjugate.scatter_to(out, self.axis)


class ExpertModel:
    """Two layers of experts between an embedding and a head."""

    def __init__(
        self, config: ModelConfig, slicing: Slicing, over: str, axis: Axis, frozen: bool = False
    ) -> None:
        self.slicing, self.hidden = slicing, config.hidden
        self.over, self.axis, self.frozen = over, axis, frozen  # the experts of the first layer

    def layers(self) -> list[nn.Module]:
        h, slicing = self.hidden, self.slicing
        embedding = layers.Embedding("embedding", VOCAB, h, slicing)
        blocks = [Experts(f"blocks.{i}", h, slicing, self.over, self.axis) for i in range(2)]
        blocks[0].requires_grad_(not self.frozen)
        norm = layers.RMSNorm("head.norm", h, slicing)
        head = layers.LanguageModelHead("head", "embedding.word.weight", norm, VOCAB, h, slicing)
        return [embedding, *blocks, head]


@functools.cache
def topology_of(pp: int, tp: int) -> Topology:
    topology = Topology(pp=pp, tp=tp)
    if topology.dp > 2:
        topology.prepare(["dp/2"])
    return topology


def engine_of(config: Config, over: str = "dp", frozen: bool = False) -> Engine:
    topology = topology_of(config.parallel.pp, config.parallel.tp)
    slicing = Slicing(
        topology.axis("tp"), bool(config.parallel.sequence), config.train.seed, config.zero.tile
    )
    model = ExpertModel(config.model, slicing, over, topology.axis(over), frozen)
    return Engine(model, topology, config)


def step(engine: Engine, number: int) -> tuple[float, float]:
    metrics = engine.step(share(batch(number), engine.topology))
    return metrics.loss, metrics.grad_norm


def train(
    config: Config, over: str = "dp", folder: Path | None = None, frozen: bool = False
) -> Result:
    """Returns losses, gradient norms and weights; saves the state before the last step."""
    engine, numbers = engine_of(config, over, frozen), []
    for number in range(STEPS):
        if folder is not None and number == STEPS - 1:
            engine.save(folder)
        numbers.append(step(engine, number))
    engine.compare_replicas()
    return [loss for loss, _ in numbers], [norm for _, norm in numbers], engine.full_state_dict()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """What one process gives, and its checkpoint."""
    folder = tmp_path_factory.mktemp("alone") / "checkpoint"
    return train(configuration(), folder=folder), folder


def check_resumed(config: Config, folder: Path, truth: Result, over: str = "dp") -> None:
    """Checks that the last step is the same after a load."""
    engine = engine_of(config, over)
    engine.load(folder)
    loss, norm = step(engine, STEPS - 1)
    weights = engine.full_state_dict()
    if weights:
        compare(([loss], [norm], weights), (truth[0][-1:], truth[1][-1:], truth[2]), f"{folder}")


def everywhere(
    world: int, cases: list[tuple[str, dict[str, Any]]], truth: Result, saved: Path, out: Path
) -> None:
    for number, (over, groups) in enumerate(cases):
        config = configuration(world, **groups)
        got = train(config, over, out / str(number))
        if got[2]:
            compare(got, truth, f"{over} {groups}")
        check_resumed(config, saved, truth, over)
        check_resumed(config, out / str(number), truth, over)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "resident": 0, "bucket_mib": 0.005, **more}


TWO = [("dp", {"parallel": {"dp": 2}, "zero": zero(stage)}) for stage in range(4)]
FOUR = [
    *(("dp/2", {"parallel": {"dp": 4}, "zero": zero(stage)}) for stage in range(4)),
    ("dp", {"parallel": {"dp": 4}, "zero": zero(2, shard_size=2)}),
    ("dp/2", {"parallel": {"dp": 4}, "zero": zero(3, shard_size=2)}),
    ("dp", {"parallel": {"dp": 2, "tp": 2, "sequence": True}, "zero": zero(3)}),
    ("dp", {"parallel": {"dp": 2, "tp": 2, "sequence": False}, "zero": zero(1)}),
    ("dp", {"parallel": {"dp": 2, "pp": 2}, "zero": zero(2)}),
    *(
        (
            "dp",
            {
                "parallel": {"dp": 2, "pp": 2, "schedule": "dualpipev"},
                "train": {"micro_batch": 1},
                "zero": zero(stage),
            },
        )
        for stage in (1, 3)
    ),
]


# OFTEN: data ranks alone, in shards, with tensor ranks and with a pipeline; every stage
OFTEN, OTHERS = ([FOUR[n] for n in some] for some in ((0, 4, 7, 10), (1, 2, 3, 5, 6, 8, 9)))


@pytest.mark.seldom("2")
@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, TWO), (4, OFTEN), pytest.param(4, OTHERS, marks=pytest.mark.grid)],
    ids=["2", "4", "4, others"],
)
def test_dealt_parameters_train_and_resume_as_on_one_process(
    world: int, cases: list[Any], alone: tuple[Result, Path], tmp_path: Path
) -> None:
    truth, saved = alone
    run_ranks(world, everywhere, world, cases, truth, saved, tmp_path)
    for number in range(len(cases)):  # saved in parts, loaded on one process
        check_resumed(configuration(), tmp_path / str(number), truth)


def two_bw(world: int, stage: int) -> Result:
    parallel = {"pp": 2, "dp": world // 2, "schedule": "2bw"}
    return train(configuration(world, parallel=parallel, zero=zero(stage)))


def test_dealt_parameters_train_under_2bw_as_undealt_ones_do() -> None:
    truth = run_ranks(2, two_bw, 2, 0)
    for stage in (0, 1):
        for got, want in zip(run_ranks(4, two_bw, 4, stage)[::2], truth, strict=True):
            compare(got, want, f"2bw, stage {stage}")


def train_frozen(world: int, stage: int) -> Result:
    """Trains with the first layer's experts frozen."""
    return train(configuration(world, parallel={"dp": world}, zero=zero(stage)), frozen=True)


def test_frozen_dealt_parameters_stay_as_they_are() -> None:
    truth = train_frozen(1, 0)
    for stage in range(4):
        got = run_ranks(2, train_frozen, 2, stage)[0]
        compare(got, truth, f"frozen, stage {stage}")


def dealt_wrongly() -> None:
    topology = topology_of(1, 1)
    config = configuration(2, parallel={"dp": 2})
    slicing, own = Slicing(topology.axis("tp"), False, 0, 1), Axis("dp", (topology.rank,), 0)
    for over, axis, message in (
        ("pp", topology.axis("dp"), "must be 'dp' or blocks of it"),
        ("dp", own, "hold the same elements"),
    ):
        with pytest.raises(ModelError, match=message):
            Engine(ExpertModel(config.model, slicing, over, axis), topology, config)


def test_records_that_deal_wrongly_are_refused() -> None:
    run_ranks(2, dealt_wrongly)
