"""What a forecast says that ranks hold, against real engines byte by byte; models of one's own; what cannot be said."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import users_truths
from tests.configs import MODELS, VOCAB, topology_of
from tests.covering import Space
from tests.harness import run_ranks
from tests.live import Live
from tests.looping import OWN
from tests.users_layers import CHANNELS, PATCH
from tests.users_models import MODELS as USERS_MODELS
from tests.users_models import Vision
from threed import models
from threed.config import Config, ConfigError
from threed.config.arguments import load
from threed.config.checks import find_refusals
from threed.config.resolution import resolve
from threed.engine import Engine
from threed.layers import Slicing
from threed.models import Model
from threed.pipeline.trace import TraceError
from threed.planner.forecast import EFFICIENCY, Forecast
from threed.zero.state import holdings

HELD = ("parameters", "gradients", "optimizer", "offloaded")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "model": ("gpt", "qwen-tied", "gemma3", "two-ties", "three-way-tie", "used-twice", "frozen-middle"),
    "grid": ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (3, 1, 1)),
    "zero": (0, 1, 2, 3),
    "dtypes": (("fp64", None), ("fp32", None), ("bf16", None), ("bf16", "bf16"), ("fp32", "bf16"), ("fp16", None)),
    "optimizer": (("adamw", 0.9), ("lion", 0.9), ("sgd", 0.9), ("sgd", 0.0)),
    "shard": ("all", 1, 2),
    "resident": (0, 500),
    "tile": (1, 2),
    "bucket_mib": (64.0, 0.05),
    "places": (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("none", "nvme"), ("cpu", "nvme")),
    "delayed": (False, True),
    "schedule": ("1f1b", "gpipe", "looping", "vee"),
    "groups": (False, True),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration. grid: pp, dp, tp. dtypes: of parameters and gradients. optimizer: and its momentum. places: of
    optimizer states and of parameters. groups: whether some parameters have rates of their own."""

    model: str
    grid: tuple[int, int, int]
    zero: int
    dtypes: tuple[str, str | None]
    optimizer: tuple[str, float]
    shard: int | str
    resident: int
    tile: int
    bucket_mib: float
    places: tuple[str, str]
    delayed: bool
    schedule: str
    groups: bool

    @property
    def world(self) -> int:
        pp, dp, tp = self.grid
        return pp * dp * tp


def config_of(case: Case) -> Config:
    (pp, dp, tp), own = case.grid, case.model in USERS_MODELS
    sizes = (
        {"hidden": 24, "heads": users_truths.HEADS, "seq": 8} if own else {"hidden": 32, "seq": 16}
    )
    config = Config.model_validate({
        "parallel": {"pp": pp, "tp": tp, "schedule": "1f1b" if case.schedule in OWN else case.schedule},
        "zero": {
            "stage": case.zero, "shard_size": case.shard, "resident": case.resident, "tile": case.tile,
            "bucket_mib": case.bucket_mib, "offload_optimizer": case.places[0], "offload_params": case.places[1],
            "nvme_path": tempfile.gettempdir() if "nvme" in case.places else None, "delayed_update": case.delayed,
        },
        "precision": {"dtype": case.dtypes[0], "grad_dtype": case.dtypes[1]},
        "model": {"layers": 3, **sizes, **({} if own else MODELS[case.model])},
        "train": {"global_batch": 4 * dp, "micro_batch": 2, "steps": 10},
        "optim": {
            "name": case.optimizer[0], "momentum": case.optimizer[1],
            "groups": "*.weight: lr=1e-4" if case.groups else (),
        },
    })  # fmt: skip
    if case.schedule in OWN:  # a name that only this process knows
        parallel = config.parallel.model_copy(update={"schedule": case.schedule})
        config = config.model_copy(update={"parallel": parallel})
    return resolve(config, VOCAB, case.world)


def case_of(values: Mapping[str, Any]) -> Case | None:
    """The case of some settings; None where they are refused, or mean the same as others."""
    case = Case(**values)
    pp, dp, _ = case.grid
    idle = (
        (case.zero < 2 and case.resident)
        or (pp == 1 and case.schedule != "1f1b")
        or (dp == 1 and case.shard != "all")
    )
    if idle or (pp == 3 and case.schedule in OWN):  # not so many layers
        return None
    try:
        refused = find_refusals(config_of(case))
    except (ConfigError, ValueError):
        return None
    return None if refused else case


def builder(case: Case, config: Config) -> Callable[[Slicing], Model]:
    if case.model in USERS_MODELS:
        return lambda slicing: USERS_MODELS[case.model](config.model, slicing)
    return lambda slicing: models.build(config.model, slicing)


def engine_of(case: Case) -> Engine:
    config = config_of(case)
    topology = topology_of(*case.grid[::2])
    slicing = Slicing(
        topology.axis("tp"), bool(config.parallel.sequence), config.train.seed, config.zero.tile
    )
    return Engine(builder(case, config)(slicing), topology, config)


def held_by_engines(cases: list[Case]) -> list[dict[str, int]]:
    """What this rank holds in each case."""
    found = []
    for case in cases:
        engine = engine_of(case)
        held = holdings(engine.layout, engine.optimizer.states, beside_gpu=False)
        if case.delayed:  # the update works on a copy of the gradients
            width = engine.layout.policy.grad_dtype.itemsize
            held["optimizer"] += width * sum(bucket.share for bucket in engine.layout.buckets)
        found.append(held)
        del engine
        gc.collect()
    return found


@functools.cache
def covering() -> list[Case]:
    return Space(SETTINGS, case_of, lambda case: case.world + 1.0).covering(
        seed=0, count=4, sample=30
    )


def test_the_cases_are_many_and_differ() -> None:
    assert len(covering()) >= 40
    assert sum(case.model in USERS_MODELS for case in covering()) >= 10
    assert {place for case in covering() for place in case.places} == {"none", "cpu", "nvme"}
    assert any(case.delayed for case in covering())
    assert any(case.groups for case in covering())


WORLDS = sorted({pp * dp * tp for pp, dp, tp in SETTINGS["grid"]})


@pytest.mark.seldom("1")
@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=pytest.mark.grid if n > 2 else ()) for n in WORLDS]
)
def test_a_forecast_holds_what_engines_hold(world: int) -> None:
    """Parameters, gradients, optimizer states, and what is on a drive: to the byte, on every rank."""
    cases = [case for case in covering() if case.world == world]
    assert cases
    everyone = run_ranks(world, held_by_engines, cases)
    for number, case in enumerate(cases):
        config = config_of(case)
        said = Forecast.of(config, world, builder(case, config)).ranks
        for rank, found in enumerate(everyone):
            assert {part: said[rank].bytes.get(part, 0) for part in HELD} == found[number], (
                f"{case}: rank {rank}"
            )


def live_and_held(cases: list[Case]) -> list[tuple[int, int, int]]:
    """Bytes of live storages that an engine brings, what `holdings` counts of them with the buffers of drives, and what
    is in swap files."""
    found = []
    for case in cases:
        engine_of(case)  # groups, tables
        gc.collect()
        with Live() as live:
            before = live.bytes()
            engine = engine_of(case)
            gc.collect()
            held = holdings(engine.layout, engine.optimizer.states, beside_gpu=False)
            buffers = sum(drive.nbytes * drive.count for drive in engine.layout.policy.drives)
            counted = sum(held.values()) - held["offloaded"] + buffers
            found.append((live.bytes() - before, counted, held["offloaded"]))
            del engine
        gc.collect()
    return found


PLAIN = {name: values[0] for name, values in SETTINGS.items()} | {
    "grid": (1, 2, 1),
    "dtypes": ("bf16", None),
}


CHANGES: list[dict[str, Any]] = [
    {"zero": 3, "tile": 2}, {"zero": 2, "places": ("cpu", "none"), "delayed": True},
    {"zero": 3, "places": ("nvme", "nvme")}, {"zero": 1, "dtypes": ("fp32", None)},
]  # fmt: skip
OTHER_CHANGES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 2},
    {"zero": 1},
    {"zero": 3},
    {"zero": 3, "model": "frozen-middle"},
]


@pytest.mark.parametrize(
    "changes",
    [CHANGES, pytest.param(OTHER_CHANGES, marks=pytest.mark.grid)],
    ids=["some", "others"],
)
def test_what_is_held_are_the_live_storages(changes: list[dict[str, Any]]) -> None:
    """All that an engine has alive before its first step, but for a few numbers."""
    cases = [Case(**{**PLAIN, **change}) for change in changes]
    for found in run_ranks(2, live_and_held, cases):
        for case, (live, held, away) in zip(cases, found, strict=True):
            assert 0 <= live - held <= 512, case  # step numbers, loss scale, norms
            assert (away > 0) == ("nvme" in case.places)


# -------------------------------------------------------------------------------------------------- models of one's own


class WithExample(Vision):
    """Says what its batches are."""

    def example(self, micro_batch: int) -> dict[str, Tensor]:
        pixels = torch.empty(micro_batch, CHANNELS, 2 * PATCH, self.config.seq // 2 * PATCH)
        return {"pixels": pixels, "labels": torch.empty(micro_batch, dtype=torch.int64)}


def vision(world: int, **parallel: Any) -> Config:
    config = Config.model_validate({
        "parallel": {**parallel},
        "model": {"layers": 2, "hidden": 24, "heads": users_truths.HEADS, "seq": 8},
        "train": {"global_batch": 8, "micro_batch": 2, "steps": 10},
        "zero": {"stage": 3, "resident": 0},
    })  # fmt: skip
    return resolve(config, VOCAB, world)


def test_a_model_that_reads_other_things_says_what_by_an_example() -> None:
    config = vision(4, pp=2, tp=2)
    found = Forecast.of(config, 4, lambda slicing: WithExample(config.model, slicing))
    patches, classes = 24 * (3 * 4 * 4 + 8), 24 * 12  # with positions; with biases
    per_block = 24 * 3 * 24 + 3 * 24 + 24 * 24 + 24 + 4 * 24 + 2 * 2 * 24 * 24 + 3 * 24
    assert found.parameters >= 2 * per_block + patches + classes - 12
    assert {rank.label for rank in found.ranks} == {"pp0 tp0", "pp0 tp1", "pp1 tp0", "pp1 tp1"}
    assert all(rank.sends["tp"] > 0 and rank.sends["pp"] > 0 for rank in found.ranks)
    message = 8 // 2 * 2 * 24 * 4  # this rank's patches, of two rows
    assert found.ranks[0].sends["pp"] == found.ranks[2].sends["pp"] == 4 * message


def test_flops_a_token_are_counted_whatever_a_model_says_that_it_costs() -> None:
    class Says(models.Decoder):
        def costs(self, micro_batch: int) -> list[float]:
            return [1.0] * (self.config.layers + 2)

    config = resolve(
        Config.model_validate({"model": {"layers": 2, "hidden": 32, "heads": 4, "seq": 16}}), 64, 8
    )
    plain = Forecast.of(config, 8)
    assert (
        Forecast.of(config, 8, lambda slicing: Says(config.model, slicing)).flops_per_token
        == plain.flops_per_token
    )


def test_buffers_of_modules_are_counted_and_the_model_has_its_name() -> None:
    class Masked(models.Decoder):
        def layers(self) -> list[nn.Module]:
            layers = super().layers()
            layers[1].register_buffer("mask", torch.zeros(1000))
            layers[2].register_buffer("mask", layers[1].mask)  # the same tensor: once
            return layers

    config = resolve(
        Config.model_validate({"model": {"layers": 2, "hidden": 32, "heads": 4, "seq": 16}}), 64, 8
    )
    plain = Forecast.of(config, 8)
    found = Forecast.of(config, 8, lambda slicing: Masked(config.model, slicing))
    assert found.ranks[0].bytes["buffers"] == plain.ranks[0].bytes["buffers"] + 4000
    assert (plain.text().split()[1], found.text().split()[1]) == ("gpt,", "Masked,")


GROUPS_OF_RANKS = [
    pytest.param(
        {"pp": 4, "tp": 2}, 1024,
        ["rank 0 – rank 255", "rank 256 – rank 511", "rank 512 – rank 767", "rank 768 – rank 1023"],
        marks=pytest.mark.grid,
    ),
    (
        {"pp": 4, "tp": 2}, 64, ["rank 0 – rank 15", "rank 16 – rank 31", "rank 32 – rank 47", "rank 48 – rank 63"],
    ),
    ({"pp": 2}, 2, ["rank 0  pp0", "rank 1  pp1"]),
    ({}, 1, ["rank 0  alone"]),
    (
        {"tp": 2}, 4,
        ["rank 0 – rank 2 (2 ranks)  dp0 tp0 – dp1 tp0", "rank 1 – rank 3 (2 ranks)  dp0 tp1 – dp1 tp1"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parallel", "world", "wanted"), GROUPS_OF_RANKS)
def test_ranks_that_hold_the_same_are_told_of_once_and_every_stage_is_there(
    parallel: dict[str, int], world: int, wanted: list[str]
) -> None:
    """In GiB. Of an MLP of odd width one of two tensor ranks holds more, by more than the last digit."""
    odd = {"layers": 40, "ffn": 2049} if parallel == {"tp": 2} else {"layers": 6, "ffn": 2048}
    config = resolve(Config.model_validate({
        "parallel": {**parallel, "sequence": False},
        "model": {**odd, "hidden": 512, "heads": 4, "seq": 16},
        "train": {"global_batch": world, "micro_batch": 1, "steps": 10},
    }), 64, world)  # fmt: skip
    found = Forecast.of(config, world)
    lines = [line for line in found.text().splitlines() if line.startswith("  rank")]
    assert [line[2 : 2 + len(head)] for line, head in zip(lines, wanted, strict=True)] == wanted
    for line in lines:
        peak, parts = re.search(r" ([\d.]+) GiB = (.*)$", line).groups()  # type: ignore[union-attr]
        assert float(peak) == pytest.approx(
            sum(float(part.split()[1]) for part in parts.split(" + ")), abs=3e-4
        )
    held = [rank for rank in found.ranks if f"rank {rank.rank} " in found.text() or rank.rank == 0]
    assert {rank.layers[0].start for rank in held} == {rank.layers[0].start for rank in found.ranks}
    assert "MiB" not in found.text()


def test_a_model_that_cannot_be_traced_is_refused_by_name() -> None:
    config = vision(1)
    with pytest.raises(
        TraceError, match=r"patches \(Patches\) could not be run on the meta device"
    ):
        Forecast.of(config, 1, lambda slicing: Vision(config.model, slicing))


@pytest.mark.parametrize("name", ["albert", "two-tensors", "hourglass"])
def test_a_users_model_is_forecast_whole_and_cut(name: str) -> None:
    """Ranks of a pipeline together hold what one rank holds, and copies of what is tied."""
    config = {pp: resolve(Config.model_validate({
        "parallel": {"pp": pp},
        "model": {"layers": 3, "hidden": 32, "heads": 4, "seq": 8},
        "train": {"global_batch": 4, "micro_batch": 2, "steps": 10},
    }), VOCAB, pp) for pp in (1, 2)}  # fmt: skip
    alone, cut = (
        Forecast.of(c, pp, lambda s, c=c: USERS_MODELS[name](c.model, s))
        for pp, c in config.items()
    )
    assert alone.parameters == cut.parameters
    assert [rank.layers for rank in alone.ranks] == [(range(len(alone.ranks[0].layers[0])),)]
    assert [part.start for rank in cut.ranks for part in rank.layers][1:] == [
        cut.ranks[0].layers[0].stop
    ]
    both = sum(rank.bytes["parameters"] for rank in cut.ranks)
    assert alone.ranks[0].bytes["parameters"] <= both
    assert cut.ranks[0].sends["pp"] > 0 == alone.ranks[0].sends["pp"]
    assert "layers 0–" in cut.text()


H100 = "NVIDIA H100 80GB HBM3"


def forecast_of(**changes: Any) -> Forecast:
    config = resolve(Config.model_validate({
        "parallel": changes, "precision": {"dtype": "bf16"},
        "model": {"layers": 6, "hidden": 64, "heads": 4, "seq": 16},
        "train": {"global_batch": 16, "micro_batch": 2, "steps": 10},
    }), VOCAB, 4)  # fmt: skip
    return dataclasses.replace(Forecast.of(config, 4), device=H100)


def test_seconds_of_a_step_follow_from_flops_and_bytes() -> None:
    flops = forecast_of().flops_per_token * 16 * 16 / 4
    for sizes in ({}, {"tp": 2}, {"tp": 4}):
        found = forecast_of(**sizes)
        assert found.seconds == pytest.approx(flops / (989e12 * EFFICIENCY), rel=0.01)
        sent = max(sum(rank.sends.values()) for rank in found.ranks)
        assert found.step_seconds(1.0, 100.0, 1.0) == pytest.approx(
            flops / 1e12 + sent / 100e9, rel=0.01
        )
        assert f"tokens/s at 50% of {H100}'s peak" in found.text()
    for schedule in ("1f1b", "gpipe"):
        found = forecast_of(pp=2, schedule=schedule)
        assert found.seconds is not None
        never_waiting = flops / (989e12 * EFFICIENCY)
        assert found.seconds * (1 - found.idle) == pytest.approx(never_waiting, rel=0.01)
        assert found.idle > 0.1


def test_seconds_that_are_not_known_are_not_said() -> None:
    found = forecast_of()
    for device in (None, "Tesla T4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        unknown = dataclasses.replace(found, device=device)
        assert unknown.seconds is None
        assert "\ntime " not in unknown.text()
    fp32 = found.config.precision.model_copy(update={"dtype": "fp32"})
    config = found.config.model_copy(update={"precision": fp32})
    assert dataclasses.replace(found, config=config).seconds is None
    with pytest.raises(ValueError, match="FLOPs of a step are not known"):
        dataclasses.replace(found, step_flops=None).step_seconds(1.0)


def test_seconds_of_a_measured_cut_are_those_of_its_times() -> None:
    found = forecast_of(pp=2, partition="measured")
    assert found.division is not None
    assert found.seconds == pytest.approx(found.division.seconds)
    assert "tokens/s by measured times" in found.text()
    assert forecast_of(pp=2, tp=2, partition="measured").seconds is None  # times of whole layers


def test_prefetch_beyond_the_last_unit_is_planned_without_a_loop_over_it() -> None:
    flags = "--zero.stage 3 --zero.prefetch 1000000007 --model.vocab 260"
    config = resolve(load(flags.split())[0], 260, 2)
    begin = time.process_time()
    Forecast.of(config, 2)
    assert time.process_time() - begin < 30  # it would take minutes


@pytest.mark.parametrize("ep", [1, 4])
def test_groups_that_do_not_fit_are_refused_although_a_rank_has_few_of_the_experts(ep: int) -> None:
    """Of the eight experts of a layer, rank 0 has the first two with ep 4, so only the other ranks have expert 5."""

    def forecast(pattern: str) -> Forecast:
        flags = [
            "--preset",
            "qwen3-moe-tiny",
            f"--parallel.ep={ep}",
            f"--optim.groups={pattern}: lr=1e-4",
        ]
        return Forecast.of(resolve(load(flags)[0], 260, 4), 4)

    with pytest.raises(ConfigError, match=r"'\*\.exparts\.\*' matches no parameter"):
        forecast("*.exparts.*")
    with pytest.raises(ConfigError, match=r"mlp\.experts\.0\..* different options"):
        forecast("*.experts.5.*")
    forecast("*.experts.*")
