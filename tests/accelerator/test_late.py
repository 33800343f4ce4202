"""Training on a device whose streams run late is the same, bit for bit; and is not, where a wait is missing."""

from __future__ import annotations

import functools
import inspect
import math
import pkgutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import configs
from tests import test_equivalence as equivalence
from tests.accelerator import pretend
from tests.accelerator.late import Device, Late, late, where
from tests.accelerator.late_collectives import Communication, Work
from tests.accelerator.late_streams import LateError
from tests.configs import Case
from tests.covering import Space, Values
from tests.harness import run_ranks
from threed.config import Config
from threed.core import device as door
from threed.data.prefetch import Prefetcher
from threed.distributed.topology import Axis, Topology
from threed.engine import Engine
from threed.memory import tiers
from threed.ops import adam, attention, fused_cpu, matmul
from threed.pipeline import batches
from threed.testing import RanksFailed, Results, results_of
from threed.testing.ranks import note
from threed.zero.offload import OffloadedOptimizer
from threed.zero.reduction_stream import ReductionStream
from threed.zero.step_metrics import DataError


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The device; skips a test, also of other processes, where this torch lets nobody make one."""
    return where()


def config_of(case: Case, **zero: Any) -> Config:
    """The configuration of a case, with other settings of ZeRO."""
    config = configs.config_of(case)
    return config.model_copy(update={"zero": config.zero.model_copy(update=zero)})


class Net(nn.Module):
    """A module of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + block(h)
        return F.mse_loss(self.last(h), y)


def train_wrapped(config: Config, device: torch.device) -> Results:
    """A few steps of a wrapped module."""
    with torch.device("meta"):  # parameters that have values cannot move to a device made in Python
        net = Net()
    engine, metrics = Engine(net, Topology(device=device), config), []
    for step in range(configs.STEPS):
        draw = torch.Generator().manual_seed(step)
        batch = {"x": torch.randn(8, 16, generator=draw), "y": torch.randn(8, 8, generator=draw)}
        metrics.append(engine.step(batch))
    return results_of(engine, metrics)


def train(config: Config, steps: int = configs.STEPS) -> Results:
    """A few steps, on batches that a thread makes ahead."""
    engine, rows = configs.engine_of(config), config.train.global_batch
    with Prefetcher(
        lambda step: configs.share(configs.batch(step, rows), engine.topology), 0
    ) as ahead:
        metrics = [engine.step(ahead.get(step)) for step in range(steps)]
    return results_of(engine, metrics)


@contextmanager
def same_kernels(config: Config) -> Iterator[None]:
    """Has the CPU compute what the device does by the same kernels: torch's. What the host updates is its own."""
    others = [
        patch.object(matmul, "_onednn_is_faster", lambda: False),
        patch.object(fused_cpu, "has_tiles", lambda: False),
        patch.object(fused_cpu, "fits", lambda _: False),
        patch.object(attention, "_is_flash", lambda *_: False),  # of the CPU only
        patch.object(attention, "WINDOW_AS_MASK", 1.0),
    ]
    if config.zero.offload_optimizer == "none":
        others.append(patch.object(adam, "STATES", ()))  # no native update
    with ExitStack() as stack:
        for other in others:
            stack.enter_context(other)
        yield


def differences(got: Results, want: Results) -> list[str]:
    """What is not the same, bit for bit."""
    found = [name for name in ("losses", "norms") if getattr(got, name) != getattr(want, name)]
    for part, tensors in want.parts.items():
        found += [
            f"{part} of {name}"
            for name, x in tensors.items()
            if not torch.equal(got.parts[part][name], x)
        ]
    return found


def check(config: Config, seeds: range) -> None:
    """The same training, on the CPU and late in several orders."""
    with same_kernels(config):
        want = train(config)
        for seed in seeds:
            with late(seed):
                got = train(config)
            assert differences(got, want) == [], f"seed {seed}"


OFFLOADED: dict[str, Any] = {
    "zero": 3,
    "offload_optimizer": "cpu",
    "offload_params": "cpu",
    "bucket_mib": 0.03,
}
DRIVE: dict[str, Any] = {
    "zero": 3,
    "offload_optimizer": "nvme",
    "offload_params": "nvme",
    "bucket_mib": 0.03,
}
CASES = {
    "everything on the device": Case(zero=3, bucket_mib=0.03, prefetch=2),
    "optimizer on the host, ZeRO 1": Case(zero=1, offload_optimizer="cpu", bucket_mib=0.03),
    "optimizer on the host, ZeRO 2": Case(zero=2, offload_optimizer="cpu", bucket_mib=0.03),
    "optimizer on the host, ZeRO 3": Case(zero=3, offload_optimizer="cpu", bucket_mib=0.03),
    "parameters on the host": Case(zero=3, offload_params="cpu", bucket_mib=0.03, prefetch=2),
    "both on the host, bf16": Case(**OFFLOADED, dtype="bf16", model="llama", recompute="cpu"),
    "everything on a drive": Case(**DRIVE, recompute="nvme"),
    "the same, layer by layer": Case(**DRIVE, recompute="nvme", order="layer", microbatches=3),
    "recompute": Case(recompute="full", dropout=0.1, layers=2),
    "recompute from the host": Case(recompute="cpu", dtype="fp32", model="llama"),
    "recompute in an arena": Case(recompute="half", zero=2),
}


# Only with the grid, because other cases contain the same transfers: delayed updates of ZeRO 1 and 3, "both on the host,
# bf16", "the same, layer by layer", and the cases of FAULTS, which also train without a fault (`right`).
OCCUR_IN_OTHERS = {
    "optimizer on the host, ZeRO 1",
    "optimizer on the host, ZeRO 3",
    "everything on a drive",
    "recompute from the host",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.grid if name in OCCUR_IN_OTHERS else ())
        for name in CASES
    ],
)
def test_training_is_the_same(name: str) -> None:
    check(config_of(CASES[name]), range(1))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.grid), 3])
def test_so_is_a_delayed_update(stage: int) -> None:
    case = Case(zero=stage, offload_optimizer="cpu", bucket_mib=0.03, dtype="bf16")
    check(config_of(case, delayed_update=True), range(1))


def test_so_is_a_wrapped_module() -> None:
    config = Config.model_validate({
        "zero": {"stage": 3, "resident": 0, "bucket_mib": 0.01, "offload_params": "cpu", "offload_optimizer": "cpu"},
        "train": {"global_batch": 8, "micro_batch": 4, "steps": 10},
    })  # fmt: skip
    with same_kernels(config):
        want = train_wrapped(config, torch.device("cpu"))
        with late() as device:
            assert differences(train_wrapped(config, device.where), want) == []


# ------------------------------------------------------------------------------------------------------ planted faults


Plant = Callable[[ExitStack], None]


def nothing(stack: ExitStack) -> None:
    """Plants no fault."""


@dataclass(frozen=True)
class Changed:
    """A fault in the source of a function of a module or class: an expression is left out, or is another one."""

    owner: str
    name: str
    line: str
    instead: str = "..."

    def __call__(self, stack: ExitStack) -> None:
        """Plants it."""
        owner = pkgutil.resolve_name(self.owner)
        function = getattr(owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.line) == 1, (
            f"{self.name} has changed: it has no longer one `{self.line}`"
        )
        made: dict[str, Any] = {}
        exec(
            f"from __future__ import annotations\n{source.replace(self.line, self.instead)}",
            inspect.unwrap(function).__globals__,
            made,
        )
        if isinstance(owner, type):
            stack.enter_context(patch.object(owner, self.name, made[self.name]))
        else:
            stack.enter_context(pretend.replaced([(function, made[self.name])]))

    def __str__(self) -> str:
        return f"{self.name}: {self.line}"


def batches_share_a_page_locked_buffer(stack: ExitStack) -> None:
    buffers: dict[torch.Size, Tensor] = {}

    def start_copy_in(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        shared = buffers.setdefault(values.shape, values.pin_memory())
        return shared.copy_(values).to(device, dtype, non_blocking=True)

    stack.enter_context(patch.object(batches, "start_copy_in", start_copy_in))


def collectives_are_not_waited_for(stack: ExitStack) -> None:
    there = Work.wait
    never = lambda self: None if isinstance(self.kept[0], Late) else there(self)  # noqa: E731
    stack.enter_context(patch.object(Work, "wait", never))


GATHERER = "threed.zero.gather:Gatherer"
STORE = "threed.pipeline.activation_checkpointing:ActivationStore"
DEEP = {"layers": 6}  # else there are buffers enough
FAULTY_STEPS = 1  # of one process; the first step shows each of FAULTS in every order but one
FAULTS: list[tuple[Plant, Case]] = [
    (Changed("threed.core.device", "on_stream", "stream.wait_stream(before)"), Case(**OFFLOADED)),
    (Changed("threed.core.device", "on_stream", "stream.wait_stream(before)"), Case(recompute="cpu")),
    (Changed(GATHERER, "_gather_from_host", "current_stream(window.device).wait_event(gathered)"), Case(**OFFLOADED)),
    (Changed(GATHERER, "_gather_from_host", "copied.synchronize()"), Case(**DRIVE)),
    (Changed("threed.memory.tiers", "start_copy", "copied.synchronize()"), Case(**OFFLOADED)),
    (Changed("threed.memory.tiers", "start_copy", "copied.synchronize()"), Case(zero=1, offload_optimizer="cpu")),
    (Changed(STORE, "get", "current_stream(self.device).wait_event(saved.arrived)"),
     Case(recompute="cpu", **DEEP)),
    (Changed(STORE, "_store_left", "current_stream(self.device).wait_event(event)"),
     Case(recompute="cpu", **DEEP)),
    (Changed(STORE, "_copy_out", "staged, part)", "staged, None)"), Case(recompute="cpu", **DEEP)),
    (Changed(STORE, "_store_left", "event.synchronize()"), Case(recompute="nvme", **DEEP)),
    (Changed(STORE, "fetch", "self._store_left(at_most=0)"), Case(recompute="nvme", **DEEP)),
    (Changed(STORE, "release", "self._stream.synchronize()"), Case(recompute="nvme", **DEEP)),
    (batches_share_a_page_locked_buffer, Case()),
]  # fmt: skip
OVERLAP = "threed.pipeline.overlap:Overlap"
PAIRS = Case(pp=2, schedule="dualpipev", layers=2, microbatches=8)
IN_BUCKETS = Case(dp=2, zero=2, bucket_mib=0.03, **DEEP)
STREAM = "threed.zero.reduction_stream:ReductionStream"
BOTH_WAYS = Case(pp=2, schedule="chimera", layers=2)
CONTEXT = "threed.layers.context"
RING, HEADS = Case(cp=2, cp_heads=1, layers=2), Case(cp=2, cp_heads=2, layers=2)
EXPERTS = Case(dp=2, ep=2, model="Biased", layers=2)
FAULTS_OF_RANKS: list[tuple[Plant, Case]] = [
    (Changed(OVERLAP, "run_pair", "main.wait_stream(self._side)"), PAIRS),
    (Changed(OVERLAP, "run_pair", "self._side.wait_stream(main)"), PAIRS),
    (Changed(OVERLAP, "backward", "main.wait_stream(self._side)"), PAIRS),
    (Changed(GATHERER, "complete", "pending.wait()"), BOTH_WAYS),
    (Changed("threed.core.device", "on_stream", "stream.wait_stream(before)"), IN_BUCKETS),
    (Changed(STREAM, "_release_oldest", "stream.wait_event(event)"), IN_BUCKETS),
    (
        Changed(STREAM, "join", "current_stream(self._stream.device).wait_stream(self._stream)"),
        Case(dp=2, bucket_mib=0.03),
    ),
    (
        Changed(
            "threed.zero.reductions:Reductions",
            "wait_oldest",
            "reduction.pending.wait()",
            "reduction.pending._finish()",
        ),
        IN_BUCKETS,
    ),
    (collectives_are_not_waited_for, Case(dp=2, zero=3, bucket_mib=0.03)),
    (collectives_are_not_waited_for, Case(pp=2)),
    (collectives_are_not_waited_for, Case(tp=2)),
    (Changed(f"{CONTEXT}:_Moving", "hops", "coming.wait()", "coming._finish()"), RING),
    (
        Changed(f"{CONTEXT}:_Ring", "steps", "part.add_(home.wait())", "part.add_(home._finish())"),
        RING,
    ),
    (Changed(f"{CONTEXT}:_Ring", "steps", "split(home.wait())", "split(home._finish())"), RING),
    (Changed("threed.distributed.collectives", "all_to_all", ".wait()", "._finish()"), HEADS),
    (Changed("threed.distributed.conjugate:Exchange", "finish", ".wait()", "._finish()"), EXPERTS),
    (
        Changed("threed.pipeline.executor:Executor", "_wait_for_oldest_send", "part.wait()"),
        Case(pp=2, microbatches=8),
    ),
    (
        Changed("threed.core.device", "on_stream", "stream.wait_stream(before)"),
        Case(dp=2, **OFFLOADED),
    ),
    (
        Changed("threed.memory.tiers", "start_copy", "copied.synchronize()"),
        Case(dp=2, zero=2, offload_optimizer="cpu"),
    ),
]


def function_of(plant: Plant) -> object:
    """The function into which a fault is planted."""
    return (plant.owner, plant.name) if isinstance(plant, Changed) else plant


def in_turns(
    faults: Sequence[tuple[Plant, Case]], others: Sequence[tuple[Plant, Case]] = ()
) -> list[Any]:
    """Parameters: the first fault of each function always, further ones of the same function with the grid.

    A function with a fault in `others` has no first one.
    """
    found, known = [], {function_of(plant) for plant, _ in others}
    for plant, case in faults:
        where = function_of(plant)
        found.append(pytest.param(plant, case, marks=pytest.mark.grid if where in known else ()))
        known.add(where)
    return found


def test_every_fault_can_be_planted() -> None:
    """The lines that the faults change are in the source."""
    for plant, _ in (*FAULTS, *FAULTS_OF_RANKS):
        with ExitStack() as stack:
            plant(stack)


def named(value: object) -> str:
    """A fault in a word; a case has no name."""
    return "" if isinstance(value, Case) else getattr(value, "__name__", str(value))


def found(config: Config, want: Results, seed: int, plant: Plant = nothing) -> str:
    """What is wrong with a training; nothing if it is the same."""
    try:
        with late(seed), ExitStack() as stack:
            plant(stack)
            return ", ".join(differences(train(config, FAULTY_STEPS), want)[:3])
    except (LateError, DataError) as error:
        return str(error)


@functools.cache
def right(case: Case) -> Results:
    """The training on the CPU, which is the same late without a fault."""
    config = config_of(case)
    with same_kernels(config):
        want = train(config, FAULTY_STEPS)
        assert not found(config, want, 0)
    return want


@pytest.mark.parametrize(("plant", "case"), in_turns(FAULTS), ids=named)
def test_a_planted_fault_is_found(plant: Plant, case: Case) -> None:
    config, want = config_of(case), right(case)
    with same_kernels(config):
        assert any(found(config, want, seed, plant) for seed in range(4))


# --------------------------------------------------------------------------------------------------------------- ranks

OF_RANKS = {
    "ZeRO 1": Case(dp=2, zero=1, bucket_mib=0.03, layers=2),
    "ZeRO 2": Case(dp=2, zero=2, bucket_mib=0.03, layers=2),
    "ZeRO 3": Case(dp=2, zero=3, bucket_mib=0.03, prefetch=2),
    "everything on the host": Case(dp=2, **OFFLOADED, recompute="cpu"),
    "the same, layer by layer": Case(
        dp=2, **OFFLOADED, recompute="cpu", order="layer", microbatches=3
    ),
    "1F1B": Case(pp=2, microbatches=4, recompute="cpu"),
    "pairs": Case(pp=2, schedule="dualpipev", layers=4, microbatches=6, recompute="half"),
    "both ways": BOTH_WAYS,
    "context ranks in a ring": Case(cp=2, cp_heads=1, model="mistral", layers=2, recompute="full"),
    "context ranks that exchange heads": HEADS,
    "expert ranks": EXPERTS,
    "biases of experts": replace(EXPERTS, model="Chosen"),
    "parts of inputs, gathered": Case(tp=2, recompute="sliced"),
}


def same_in_all_orders(config: Config, plant: Plant) -> None:
    """The same training with a fault, on two ranks, each order in a world of its own.

    The order of seed 0 hides several of the faults.
    """
    for seed in range(1, 5):
        run_ranks(2, same_on_ranks, config, range(seed, seed + 1), plant, timeout=60)


def same_on_ranks(config: Config, seeds: range, plant: Plant = nothing, name: str = "") -> None:
    """The same training, by the ranks of this world."""
    with same_kernels(config):
        want = train(config)
        for seed in seeds:
            with late(seed), ExitStack() as stack:
                plant(stack)
                assert differences(train(config), want) == [], f"{name} seed {seed}"


def all_same_on_ranks(configs_by_name: dict[str, Config]) -> None:
    """The same for several configurations, in one order each."""
    for name, config in configs_by_name.items():
        note(name)  # named if the ranks hang
        same_on_ranks(config, range(1), name=name)


# Only with the grid, because other cases contain the same transfers: ZeRO 2 reduces the same buckets, "the same, layer by
# layer" has everything on the host, "expert ranks" exchange the same tokens, and "parts of inputs on the host" are gathered.
OF_RANKS_IN_OTHERS = {
    "ZeRO 1",
    "everything on the host",
    "biases of experts",
    "parts of inputs, gathered",
}


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_training_is_the_same_on_two_ranks(others: bool) -> None:
    configs_by_name = {name: config_of(case) for name, case in OF_RANKS.items()}
    away = configs_by_name["parts of inputs, gathered"]
    recompute = away.recompute.model_copy(update={"offload": "cpu"})
    away = away.model_copy(update={"recompute": recompute})
    configs_by_name["parts of inputs on the host"] = away
    chosen = {
        name: config
        for name, config in configs_by_name.items()
        if (name in OF_RANKS_IN_OTHERS) == others
    }
    run_ranks(2, all_same_on_ranks, chosen, timeout=600)


# Four stages. With two blocks, one rank has the embedding and the head, which do not use the ring.
SLICED_PAIRS = Case(pp=2, tp=2, schedule="dualpipev", layers=2, microbatches=4)
RING_PAIRS = Case(pp=2, cp=2, cp_heads=1, schedule="dualpipev", layers=3, microbatches=4)


def channels_of_pairs(config: Config, name: str) -> list[tuple[int, int]]:
    """Takes a step as on the CPU; returns how many collectives on each stream of pairs used each communicator of an axis."""
    uses, topologies = list[tuple[Any, Any]](), list[Topology]()

    def queued(self: Communication, begin: Any, *args: Any, group: Any = None, **more: Any) -> Any:
        uses.append((self.streams.current, group))
        return queue(self, begin, *args, group=group, **more)

    def prepared(self: Topology, *args: Any) -> None:
        topologies.append(self)
        prepare(self, *args)

    queue, prepare = Communication.queue, Topology.prepare
    with same_kernels(config):
        want = train(config, 1)
        with late(0) as device, ExitStack() as stack:
            stack.enter_context(patch.object(Communication, "queue", queued))
            stack.enter_context(patch.object(Topology, "prepare", prepared))
            assert differences(train(config, 1), want) == []
            side, topology = device.streams.named("copies", "overlap"), topologies[-1]
    tp, second = topology.axis(name), topology.second(name)
    assert second is not None
    assert tp.group is not second.group
    return [
        (
            sum(used == (stream, tp.group) for used in uses),
            sum(used == (stream, second.group) for used in uses),
        )
        for stream in (side, *{stream for stream, _ in uses if stream is not side})
    ]


EXPERT_PAIRS = Case(
    pp=2, dp=2, ep=2, model="Biased", schedule="dualpipev", layers=4, microbatches=4
)


@pytest.mark.seldom("case0-tp")
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (SLICED_PAIRS, "tp"),
        pytest.param(RING_PAIRS, "cp", marks=pytest.mark.grid),
        (EXPERT_PAIRS, "dp@ep"),
    ],
)
def test_streams_of_a_pair_have_communicators_of_their_own(case: Case, name: str) -> None:
    """Else NCCL would run a backward's reductions after all of the forward that it runs with."""
    for (shared, own), *others in run_ranks(4, channels_of_pairs, config_of(case), name):
        assert shared == 0
        assert own > 0
        assert sum(first for first, _ in others) > 0
        assert sum(second for _, second in others) == 0


@pytest.mark.seldom(
    "backward: main*",
    "complete: pending*",
    "_release_oldest*",
    "join: current*",
    "wait_oldest*",
    "hops: coming*",
    "steps: part*",
    "_wait_for_oldest_send*",
)
@pytest.mark.parametrize(("plant", "case"), in_turns(FAULTS_OF_RANKS, FAULTS), ids=named)
def test_a_planted_fault_of_ranks_is_found(plant: Plant, case: Case) -> None:
    with pytest.raises(RanksFailed) as failed:
        same_in_all_orders(config_of(case), plant)
    assert failed.value.failures


def evaluate_and_load(config: Config, folder: Path) -> float:
    """The loss of weights that are overwritten as soon as it is under way."""
    engine, rows = configs.engine_of(config), config.train.global_batch
    engine.save(folder)
    engine.step(configs.batch(0, rows))
    loss = engine.evaluate(configs.batch(1, rows))
    engine.load(folder)
    return float(loss)


def test_the_host_waits_before_it_changes_what_the_device_reads(tmp_path: Path) -> None:
    config = config_of(Case(**OFFLOADED))
    want = evaluate_and_load(config, tmp_path / "plain")
    with late():
        assert evaluate_and_load(config, tmp_path / "late") == want
    with late(), patch.object(OffloadedOptimizer, "_let_device_read", lambda self: None):
        assert evaluate_and_load(config, tmp_path / "planted") != want


# ---------------------------------------------------------------------------------------------------- the device itself


def on_two_streams(device: Device, waits: bool) -> float:
    """4.0, if the streams wait for each other."""
    x, side = torch.full((8,), 1.0, device=device.where), device.streams.named("side")
    main = device.streams.current
    if waits:
        side.wait_stream(main)
    with device.on(side):
        y = x + 1
    if waits:
        main.wait_stream(side)
    return float((y * 2)[3])


def test_streams_run_in_many_orders() -> None:
    results = {waits: [] for waits in (False, True)}
    for seed in range(20):
        for waits, found in results.items():
            with late(seed) as device:
                found.append(on_two_streams(device, waits))
    assert results[True] == [4.0] * 20
    assert 4.0 in results[False]
    assert any(math.isnan(value) for value in results[False])


def copied_and_freed(device: Device) -> Tensor:
    """A copy of fours on the host, whose source is freed, and its memory used again, before the copy was made."""
    pending = tiers.start_copy(torch.full((64,), 2.0, device=device.where) * 2, torch.device("cpu"))
    torch.full((64,), 5.0, device=device.where)
    device.streams.current.synchronize()
    return pending.wait()


def test_memory_is_reused_at_once_unless_a_stream_is_recorded() -> None:
    wrong = 0
    for seed in range(8):
        with late(seed) as device:
            assert torch.equal(copied_and_freed(device), torch.full((64,), 4.0))
        with late(seed) as device, patch.object(Late, "record_stream", lambda self, stream: None):
            wrong += not torch.equal(copied_and_freed(device), torch.full((64,), 4.0))
    assert wrong


def sum_of_a_released_window(device: Device) -> Tensor:
    """Twice a window of twos, which is released on one of two streams, and reused on the one that has filled it."""
    axis = Axis("dp", (0, 1), 0)
    group = SimpleNamespace(shard=axis, sums=(), params=torch.empty(0, device=device.where))
    grad = SimpleNamespace(dtype=torch.float32)
    bucket: Any = SimpleNamespace(group=group, first=0, last=64, earliest_unit=0, grad=grad)
    policy = SimpleNamespace(slices_gradients=True, grad_dtype=torch.float32)
    layout: Any = SimpleNamespace(buckets=[bucket], policy=policy)
    reductions = ReductionStream(layout, lambda window: None)
    window = torch.full((64,), 2.0, device=device.where)
    with reductions.current() as filled_on:
        total = window * 2
        reductions.release_later(window, filled_on)
    del window
    with device.on(device.streams.named("side")):
        reductions.make_room(bucket)
    torch.full((64,), 5.0, device=device.where)
    reductions.join()
    return total.cpu()


def test_a_window_is_released_on_the_stream_that_has_filled_it() -> None:
    """A forward and a backward may run on two streams."""
    streams = "{filled_on, current_stream(window.device)}"
    fault = Changed(STREAM, "_release_oldest", streams, "{current_stream(window.device)}")
    wrong = 0
    for seed in range(8):
        with late(seed) as device:
            assert torch.equal(sum_of_a_released_window(device), torch.full((64,), 4.0))
        with late(seed) as device, ExitStack() as stack:
            fault(stack)
            wrong += not torch.equal(sum_of_a_released_window(device), torch.full((64,), 4.0))
    assert wrong


def test_memory_has_no_values_until_something_writes_them() -> None:
    with late() as device:
        assert torch.empty(4, device=device.where).isnan().all()
        assert torch.empty(2, dtype=torch.int64, device=device.where).tolist() == [-1, -1]
        assert torch.empty(3, pin_memory=True).isnan().all()


def test_copies_are_as_late_as_on_cuda() -> None:
    with late() as device:
        pinned, paged = torch.ones(3).pin_memory(), torch.ones(3)
        late_copy, at_once = (x.to(device.where, non_blocking=True) for x in (pinned, paged))
        out = late_copy.to("cpu", non_blocking=True)
        waited = (late_copy + 0).cpu()
        pinned.fill_(2)
        paged.fill_(2)
        assert out.is_pinned()
        assert (late_copy.tolist(), at_once.tolist(), waited.tolist()) == (
            [1] * 3,
            [1] * 3,
            [1] * 3,
        )
        again = pinned.to(device.where, non_blocking=True)
        pinned.fill_(3)
        assert again.tolist() == [3] * 3
        unread = again.to("cpu", non_blocking=True)
        assert unread.isnan().all()
        door.synchronize()
        assert unread.tolist() == [3] * 3


def test_what_a_device_would_hang_or_crash_on_is_named() -> None:
    with late() as device, pytest.raises(LateError, match="of the host"):
        torch.ones(3, device=device.where) + torch.ones(3)
    with late() as device:
        x = torch.ones(3, device=device.where)
        x.untyped_storage().resize_(0)
        with pytest.raises(LateError, match="memory that was freed"):
            x + 1
        never = device.streams.named("side").record_event()
        never.position += 1
        device.streams.current.wait_event(never)
        with pytest.raises(LateError, match="streams wait for one another: a wait of"):
            door.synchronize()
        device.streams.order.clear()


# ---------------------------------------------------------------------------------------------------------------- grid


SETTINGS: dict[str, list[object]] = equivalence.SETTINGS | {
    "pp": [1, 2],
    "dp": [1, 2],
    "tp": [1, 2],
    "schedule": ["1f1b", "zb-v"],
    "microbatches": [1, 2],
    "dtype": ["fp64", "bf16"],
    "shard": ["all"],
    "pad": [0],
}


def make(values: Values) -> Case | None:
    """A case of the equivalence tests that two ranks can run."""
    case = equivalence.make(values)
    return case if case is not None and case.world <= 2 else None


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(4))
def test_so_it_is_in_a_covering_set(seed: int) -> None:
    for case in Space(SETTINGS, make, cost=lambda case: case.microbatches).covering(seed):
        run_ranks(case.world, same_on_ranks, config_of(case), range(seed, seed + 2))


@pytest.mark.grid
@pytest.mark.parametrize("name", CASES)
def test_so_it_is_in_many_orders(name: str) -> None:
    check(config_of(CASES[name]), range(1, 21))
