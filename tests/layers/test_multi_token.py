"""Multi-token prediction: plain PyTorch as reference in every topology, planted faults, checkpoints."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests import peaks
from tests.configs import topology_of
from tests.harness import run_ranks
from tests.hf_decoders import LENGTH, ROWS, STEPS, VOCAB, Trained, casts, difference
from tests.mtp_reference import FACTOR, inputs, reference, train_plainly, weights
from tests.planner.test_footprint import SMALL as SIZE
from tests.planner.test_footprint import check
from tests.runs import open_text, run
from threed import models
from threed.config import Config, ModelConfig
from threed.config.arguments import load
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.distributed import collectives
from threed.distributed.grid import Grid
from threed.engine import Engine
from threed.interop.huggingface.layouts import hf_to_state_dict, model_of, state_dict_to_hf
from threed.layers import MicroBatch, MultiTokenPrediction, Slicing
from threed.layers.context import Context
from threed.monitor import metrics
from threed.planner.stages import Column

SMALL = {"bucket_mib": 0.03}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {}, "full": {"mode": "full"}, "selective": {"mode": "selective"}, "chunks": {"loss_chunks": 3},
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A topology, with the settings of a run there."""

    parallel: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    micro_batch: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        sizes = [self.parallel.get(axis, 1) for axis in ("pp", "dp", "tp", "cp")]
        return int(torch.tensor(sizes).prod())


PLACES = {
    "alone": Place(micro_batch=2),
    "full": Place(recompute="full"),
    "selective": Place(recompute="selective"),
    "chunks": Place(recompute="chunks"),
    "layer by layer": Place(zero={"stage": 3, "order": "layer"}),
    "tp": Place({"tp": 2, "sequence": False}, {"stage": 3, "tile": 2}, micro_batch=2),
    "sequence": Place({"tp": 2, "sequence": True}),
    "sequence full": Place({"tp": 2, "sequence": True}, recompute="full"),
    "pp": Place({"pp": 2}),
    "pp full": Place({"pp": 2}, recompute="full"),
    "pp zb-v": Place({"pp": 2, "schedule": "zb-v"}),
    "pp dualpipev": Place({"pp": 2, "schedule": "dualpipev"}),
    "pp chimera": Place({"pp": 2, "schedule": "chimera"}),
    "pp interleaved": Place({"pp": 2, "schedule": "interleaved", "chunks": 2}),
    "zero0": Place({"dp": 2}, {"stage": 0}),
    "zero1": Place({"dp": 2}, {"stage": 1, **SMALL}),
    "zero2": Place({"dp": 2}, {"stage": 2, **SMALL}),
    "zero3": Place({"dp": 2}, {"stage": 3, **SMALL}, "full"),
    "ep": Place({"dp": 2, "ep": 2}, {"stage": 3}),
    "ring": Place({"cp": 2, "cp_heads": 1}),
    "ulysses": Place({"cp": 2, "cp_heads": 2}, {"stage": 2}, micro_batch=2),
    "pp tp zero3": Place({"pp": 2, "tp": 2, "sequence": True}, {"stage": 3}, micro_batch=2),
    "pp dp ep": Place({"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-v"}, {"stage": 2, **SMALL}),
    "dp cp": Place({"dp": 2, "cp": 2, "ep": 4, "cp_heads": 1}, {"stage": 3}, "selective"),
}  # fmt: skip
# Contain every kind of schedule, stage of ZeRO, mode of recomputation and kind of ranks; the others run in the grid. "pp tp
# zero3" has a split sequence; "pp tp zero3" and "dp cp" have stage 3.
EVERYDAY = (
    "alone", "chunks", "layer by layer", "tp", "pp full", "pp dualpipev", "pp chimera", "zero1",
    "ulysses", "pp tp zero3", "pp dp ep", "dp cp",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model, and whether its batches have packed documents."""

    depths: int = 2
    tied: bool = False
    packed: bool = False

    @property
    def module(self) -> Any:
        """The model of the reference; the same weights in each call."""
        return reference(self.depths, tie_word_embeddings=self.tied)


FAULTY = Kind(2, tied=True, packed=True)  # the kind in which each of the faults below matters
KINDS = [FAULTY, Kind(), Kind(1, packed=True)]


@dataclass(frozen=True)
class Start:
    """The model and its first weights, by native name."""

    model: ModelConfig
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, kind: Kind) -> Start:
        module = kind.module
        model = model_of(json.loads(module.config.to_json_string()))
        assert (model.mtp_depth, model.mtp_loss) == (kind.depths, FACTOR)
        return cls(model, hf_to_state_dict(weights(module), model))


def config_of(model: ModelConfig, place: Place) -> Config:
    return resolve(Config.model_validate({
        "model": {**dict(model), "seq": LENGTH, "vocab": VOCAB}, "parallel": place.parallel,
        "zero": {"resident": 0, **place.zero}, "recompute": RECOMPUTE[place.recompute],
        "precision": {"dtype": "fp64"}, "experts": {"bias_rate": 0.0},
        "train": {"global_batch": ROWS, "micro_batch": place.micro_batch, "steps": STEPS, "grad_clip": 0.5},
        "optim": {"lr": 3e-3, "warmup": 0, "schedule": "constant", "eps": 1e-8},
    }), VOCAB, place.world)  # fmt: skip


def engine_of(start: Start, place: Place) -> Engine:
    config, p = config_of(start.model, place), place.parallel
    topology = topology_of(p.get("pp", 1), p.get("tp", 1), p.get("cp", 1))
    engine = Engine(models.build(config.model, Slicing.of(topology, config)), topology, config)
    engine.load_full_state_dict(start.weights)
    return engine


def share(engine: Engine, kind: Kind, step: int) -> dict[str, Tensor]:
    """Returns this data rank's rows of a batch."""
    data, numbers = inputs(step, kind.packed)
    data |= {"documents": numbers} if kind.packed else {}
    index, dp = engine.topology.axis("dp").index, engine.topology.dp
    return {name: value.chunk(dp)[index] for name, value in data.items()}


def mean_loss(engine: Engine) -> float:
    """Returns the mean loss of all depths since the last call. Collective."""
    topology = engine.topology
    own = torch.zeros(2, dtype=torch.float64)
    for number in dict.fromkeys(engine.blueprint.held):
        layer = engine.blueprint.layers[number]
        if isinstance(layer, MultiTokenPrediction) and (sums := layer.sums.take()) is not None:
            own += sums
    for axis in (topology.data, topology.axis("pp")):
        own = collectives.sum_of_scalars(own, axis)
    return float(own[0] / own[1])


def train(start: Start, kind: Kind, place: Place) -> tuple[Trained, list[float]]:
    """Trains, and returns what `mtp_reference.train_plainly` does. Collective."""
    engine, main, norms, further = engine_of(start, place), [], [], []
    for step in range(STEPS):
        # the rotary tables of both are in fp64; they are computed in the first step
        with casts(torch.float64 if step == 0 else torch.float32):
            metrics = engine.step(share(engine, kind, step))
        main.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
        further.append(mean_loss(engine))
    full = engine.full_state_dict()
    found = state_dict_to_hf(full, start.model) if full else {}
    return Trained(main, norms, found), further


Truth = tuple[Start, Trained, list[float]]


def truth_of(kind: Kind) -> Truth:
    return Start.of(kind), *train_plainly(kind.module, kind.packed)


def error(found: tuple[Trained, list[float]], truth: Truth) -> float:
    """Returns the largest difference of losses, norms and weights."""
    (mine, further), (_, want, want_further) = found, truth
    kept = {name: value for name, value in mine.weights.items() if name in want.weights}
    gaps = [abs(a - b) for a, b in zip(further, want_further, strict=True)]
    return max(difference(replace(mine, weights=kept), want), *gaps)


def compare(names: list[str], truths: dict[Kind, Truth], every: bool) -> dict[str, float]:
    """Trains each place with one kind, in turn, or with every kind."""
    found = {}
    for i, name in enumerate(names):
        for kind in KINDS if every else [KINDS[i % len(KINDS)]]:
            trained = train(truths[kind][0], kind, PLACES[name])
            found[f"{name} {kind}"] = error(trained, truths[kind])
    return found


@pytest.fixture(scope="module")
def truths() -> dict[Kind, Truth]:
    return {kind: truth_of(kind) for kind in KINDS}


@pytest.mark.seldom("2")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_equals_plain_pytorch(world: int, truths: dict[Kind, Truth]) -> None:
    names = [name for name in EVERYDAY if PLACES[name].world == world]
    all_agree(run_ranks(world, compare, names, truths, False, timeout=600))


@pytest.mark.grid
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_kind_equals_plain_pytorch(world: int, truths: dict[Kind, Truth]) -> None:
    names = [name for name, place in PLACES.items() if place.world == world]
    all_agree(run_ranks(world, compare, names, truths, True, timeout=1200))


def all_agree(ranks: list[dict[str, float]]) -> None:
    for found in ranks:
        assert max(found.values()) < 1e-9, {name: gap for name, gap in found.items() if gap >= 1e-9}


# ------------------------------------------------------------------------------------------------------------- faults


def _nearer(self: MicroBatch, count: int, slicing: Slicing) -> MicroBatch:
    return self if count == 1 else AHEAD(self, count - 1, slicing)


def _across(self: MicroBatch, count: int, slicing: Slicing) -> MicroBatch:
    return AHEAD(replace(self, documents=None), count, slicing)


def _within_the_rank(self: MicroBatch, count: int, slicing: Slicing) -> MicroBatch:
    alone = replace(slicing, context=Context())
    return AHEAD(replace(self, full=None, documents=None), count, alone)


AHEAD, NEW = MicroBatch.ahead, MultiTokenPrediction.__init__


def _changed(change: Callable[[MultiTokenPrediction], None]) -> Any:
    def init(self: MultiTokenPrediction, *args: Any, **keys: Any) -> None:
        NEW(self, *args, **keys)
        change(self)

    return patch.object(MultiTokenPrediction, "__init__", init)


def _undivided(layer: MultiTokenPrediction) -> None:
    layer.factor *= layer.depths


def _without_embedding_gradient(layer: MultiTokenPrediction) -> None:
    layer.embedding.register_forward_hook(lambda module, given, y: y.detach())


def _without_final_norm(layer: MultiTokenPrediction) -> None:
    if layer.depth == 1:
        layer.previous_norm.forward = lambda x: x  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "one position too few": lambda: patch.object(MicroBatch, "ahead", _nearer),
    "across documents": lambda: patch.object(MicroBatch, "ahead", _across),
    "not divided by the depths": lambda: _changed(_undivided),
    "no gradient of the embedding": lambda: _changed(_without_embedding_gradient),
    "no final norm": lambda: _changed(_without_final_norm),
}


def with_faults(truth: Truth, place: Place, faults: list[str]) -> dict[str, float]:
    found = {}
    for name in faults:
        with FAULTS[name]():
            found[name] = error(train(truth[0], FAULTY, place), truth)
    return found


def test_planted_faults_are_found(truths: dict[Kind, Truth]) -> None:
    found = run_ranks(1, with_faults, truths[FAULTY], PLACES["alone"], list(FAULTS))[0]
    assert found.pop("none") < 1e-9
    assert min(found.values()) > 1e-4, found


def with_local_positions(truth: Truth) -> float:
    with patch.object(MicroBatch, "ahead", _within_the_rank):
        return error(train(truth[0], FAULTY, PLACES["ring"]), truth)


def test_a_shift_within_a_context_rank_is_found(truths: dict[Kind, Truth]) -> None:
    assert min(run_ranks(2, with_local_positions, truths[FAULTY])) > 1e-4


def test_a_micro_batch_looks_ahead_in_its_document() -> None:
    tokens = torch.arange(12).view(2, 6)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 4]])
    micro = MicroBatch(tokens, tokens + 1, documents=documents)
    later = micro.ahead(2, Slicing())
    assert later.tokens is not None
    assert later.labels is not None
    assert later.tokens.tolist() == [[2, 3, 4, 5, 0, 0], [8, 9, 10, 11, 0, 0]]
    none = -100
    assert later.labels.tolist() == [[3, none, none, 6, none, none], [9, 10, 11, 12, none, none]]
    assert (micro.ahead(9, Slicing()).labels == none).all()
    with pytest.raises(ValueError, match="needs 'tokens' and 'labels'"):
        MicroBatch(tokens).ahead(1, Slicing())


# ------------------------------------------------------------------------------------ evaluation, logs, checkpoints


def evaluated(truth: Truth) -> tuple[float, list[float], bool]:
    """Returns losses of an evaluation and of a step, and whether logits are those without the layers."""
    start = truth[0]
    engine = engine_of(start, PLACES["alone"])
    rows = share(engine, FAULTY, 0)
    with casts(torch.float64):
        loss = float(engine.evaluate(rows))
        logits = engine.logits(rows["tokens"])
        model = start.model.model_copy(update={"mtp_depth": 0})
        names = {name for name in start.weights if not name.startswith(("blocks.2", "blocks.3"))}
        main = Start(model, {name: start.weights[name] for name in names})
        plain = engine_of(main, PLACES["alone"])
        same = torch.equal(logits, plain.logits(rows["tokens"]))
    return loss, truth[1].losses, same and float(plain.evaluate(rows)) == loss


def test_evaluations_and_logits_have_no_further_tokens(truths: dict[Kind, Truth]) -> None:
    loss, losses, same = run_ranks(1, evaluated, truths[FAULTY])[0]
    assert loss == pytest.approx(losses[0], abs=1e-9)
    assert same


def continued(truth: Truth, folder: Path, names: list[str], saves: bool) -> list[float]:
    """Saves after the first step, or loads there; returns the errors at the end."""
    errors = []
    for name in names:
        engine = engine_of(truth[0], PLACES[name])
        if saves:
            engine.step(share(engine, FAULTY, 0))
            engine.save(folder / "saved")
        else:
            engine.load(folder / "saved")
        losses = [engine.step(share(engine, FAULTY, step)).loss for step in range(1, STEPS)]
        errors += [float(loss) for loss in losses]
    return errors


@pytest.mark.parametrize(
    "places",
    [
        pytest.param({1: ["alone"], 4: ["pp dp ep"]}, id="some"),
        pytest.param({2: ["sequence", "zero3", "ring"]}, id="others", marks=pytest.mark.grid),
    ],
)
def test_checkpoints_load_in_another_topology(
    places: dict[int, list[str]], truths: dict[Kind, Truth], tmp_path: Path
) -> None:
    want = run_ranks(2, continued, truths[FAULTY], tmp_path, ["pp"], True)[0]
    for world, names in places.items():
        found = run_ranks(world, continued, truths[FAULTY], tmp_path, names, False)[0]
        assert found == pytest.approx(want * len(names), abs=1e-9)


def log(folder: Path, names: Sequence[str]) -> None:
    data = open_text(folder)
    model = {"layers": 2, "arch": "llama", "kv_heads": 2, "mtp_depth": 2}
    for name in names:
        parallel = {key: n for key, n in PLACES[name].parallel.items() if key != "cp_heads"}
        run(
            folder, data, PLACES[name].world, model=model, parallel=parallel, log={"every": 2},
            train={"steps": 4, "global_batch": 8, "eval_every": 0},
            run={"dir": str(folder / name), "name": "run"}, checkpoint={"export_hf": False},
        )  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [("pp dualpipev", "ring"), pytest.param(("pp", "tp", "zero1"), marks=pytest.mark.grid)],
    ids=["stages and a ring", "others"],
)
def test_the_logged_loss_is_that_of_one_process(names: tuple[str, ...], tmp_path: Path) -> None:
    run_ranks(1, log, tmp_path, ["alone"])
    run_ranks(2, log, tmp_path, names)
    rows = {
        name: [
            row for row in metrics.read(tmp_path / name / "metrics.jsonl") if "train/loss" in row
        ]
        for name in ["alone", *names]
    }
    assert [row["step"] for row in rows["alone"]] == [1, 2, 4]
    for name in names:
        for key in ("train/loss", "train/mtp_loss"):
            found, want = ([row[key] for row in rows[which]] for which in (name, "alone"))
            assert found == pytest.approx(want, rel=1e-9), (name, key)
    assert rows["alone"][-1]["train/mtp_loss"] > 1


# ---------------------------------------------------------------------------------------------- forecasts, refusals

# number of ranks -> cases
FORECASTS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"recompute": {"loss_chunks": 4}, "model": {"tied": True}},
        {},
        {"recompute": {"mode": "full"}},
    ],
    2: [
        {"parallel": {"pp": 2}},
        {"parallel": {"cp": 2, "cp_heads": 1}},
        {"parallel": {"tp": 2}},
        {"zero": {"stage": 3}},
    ],
}


@pytest.mark.seldom("1")
@pytest.mark.parametrize(
    ("world", "forecasts"),
    [
        (1, FORECASTS[1][:1]),
        (2, FORECASTS[2][:1]),
        pytest.param(1, FORECASTS[1][1:], marks=pytest.mark.grid),
        pytest.param(2, FORECASTS[2][1:], marks=pytest.mark.grid),
    ],
    ids=["1", "2", "1-others", "2-others"],
)
def test_the_forecast_is_that_of_live_storages(world: int, forecasts: list[dict[str, Any]]) -> None:
    """Within the bounds of tests/planner/test_footprint.py."""
    size = {**SIZE, "arch": "llama", "kv_heads": 2, "mtp_depth": 2, "layers": 2}
    cases = []
    for changes in forecasts:
        parallel = changes.get("parallel", {})
        data = world // (parallel.get("pp", 1) * parallel.get("tp", 1) * parallel.get("cp", 1))
        groups = {**changes, "train": {"micro_batch": 2, "global_batch": 8 * data}}
        groups["model"] = {**size, **changes.get("model", {})}
        cases.append((str(changes), peaks.config_of(world, **groups)))
    check(cases, world, under=0.03)


def test_the_published_layer_has_its_number_of_parameters() -> None:
    """The published files have 671 B parameters, and 14 B of the further layer with its two copies.

    The numbers of elements are those of the safetensors files of deepseek-ai/DeepSeek-V3, by dtype.
    """
    counts = []
    for further in ("0", "1"):
        config = resolve(load(["--preset", "deepseek-v3", "--model.mtp-depth", further])[0], 257, 1)
        column = Column(config, Grid(), functools.partial(models.build, config.model), 0)
        counts.append(column.parameters)
    bf16, fp8, fp32 = 3_918_786_560, 680_571_043_840, 41_555_600
    # one scale per block of 128 x 128; kv_a_proj_with_mqa has 4.5 blocks of rows
    scales = fp8 // 128**2 + 62 * 7168 // 128 // 2
    copies = 2 * 129280 * 7168
    assert counts[0] == 671_026_419_200
    assert counts[1] + copies == bf16 + fp8 + fp32 - scales
    assert round((counts[1] - counts[0]) / 1e9, 1) == 11.6


@pytest.mark.parametrize(
    ("model", "parallel", "problem"),
    [
        (
            {"seq": 8, "mtp_depth": 8}, {},
            "--model.mtp-depth 8 with --model.seq 8: no token is so far ahead; use at most 7",
        ),
        (
            {"layers": 2, "mtp_depth": 1}, {"pp": 2, "schedule": "interleaved", "chunks": 3},
            "--model.layers 2, --model.mtp-depth 1, with embedding and head 5, for the 6 stages",
        ),
        (
            {"layers": 2, "mtp_depth": 1}, {"pp": 2, "partition": (2, 2)},
            "--parallel.partition 2,2 makes 4 layers: 5 are needed, embedding and head included",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    model: dict[str, Any], parallel: dict[str, Any], problem: str
) -> None:
    values = {"model": {"arch": "llama", **model}, "parallel": parallel}
    found = find_problems(Config.model_validate(values), 2)
    assert any(text.startswith(problem) for text in found), found
