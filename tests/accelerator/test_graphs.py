"""`--run.graphs`: replays give the numbers of a training without graphs, bit for bit; what cannot be captured is refused."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import configs
from tests.accelerator import faults as faults_of_steps
from tests.accelerator.late import Device, late, where
from tests.accelerator.pretend import Pretend, pretending
from tests.accelerator.test_late import differences, same_kernels
from tests.accelerator.watching import IN_CAPTURE, summary
from tests.configs import SEQ, Case
from threed.config import Config, ConfigError, RunConfig
from threed.config.checks import find_problems
from threed.core import device as door
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import MicroBatch, Slicing
from threed.pipeline import graphs
from threed.pipeline.graphs import Region, StageGraph, StaticBatch
from threed.testing import Results, results_of
from threed.zero.reducer import Reducer

STEPS = (
    5  # two without graphs, one that is rehearsed, one that is captured, and one that only replays
)


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The device; skips a test where this torch lets nobody make one."""
    return where()


def config_of(case: Case, graphs: Any = True) -> Config:
    """The configuration of a case, with graphs."""
    config = configs.config_of(case)
    return config.model_copy(update={"run": config.run.model_copy(update={"graphs": graphs})})


def train(config: Config, engine: Engine | None = None) -> tuple[Results, list[float]]:
    """Some steps, with an evaluation after each; the losses of these."""
    engine, rows = engine or configs.engine_of(config), config.train.global_batch
    metrics, evaluated = [], []
    for step in range(STEPS):
        metrics.append(engine.step(configs.batch(step, rows)))
        evaluated.append(float(engine.evaluate(configs.batch(100 + step, rows))))
    return results_of(engine, metrics), evaluated


def check(case: Case) -> Device:
    """The same training on the CPU, and late with graphs; returns the device."""
    with same_kernels(config_of(case, False)):
        want, losses = train(config_of(case, False))
        with late(1) as device:
            got, evaluated = train(config_of(case))
            graph = device.graph
        assert differences(got, want) == []
        assert evaluated == losses
    assert graph.captured
    assert len(graph.replays) >= 2 * len(graph.captured)
    return device


@pytest.mark.seldom("*model='llama',*")
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        pytest.param(Case(microbatches=1, zero=0, layers=1), marks=pytest.mark.grid),
        Case(model="llama", dtype="bf16", microbatches=3, layers=1),
        Case(dropout=0.2, model="gpt-untied", layers=1),
        Case(model="llama-mtp", layers=1),
    ],
    ids=str,
)
def test_training_with_graphs_is_the_same(case: Case) -> None:
    check(case)


# -------------------------------------------------------------------------------------------------------- the recorder


def captured(built: Any = None, steps: int = 5, **changes: Any) -> Pretend:
    """Steps of a small GPT in bf16 with threed's kernels, watched; the last two replay."""
    config = config_of(Case(dtype="bf16", **{"microbatches": 2, **changes}))
    with pretending() as device:
        engine = device.engine(config, built)
        faults = []
        for _ in range(steps):
            device.step(engine)
            faults += [fault for fault in device.faults if fault.kind == IN_CAPTURE]
        device.faults = faults
        return device


@pytest.mark.seldom("{}")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"model": "llama", "layers": 1}, marks=pytest.mark.grid),
        {"model": "llama-mtp", "layers": 1},
        {"dropout": 0.1, "layers": 1},
        pytest.param({"zero": 0, "layers": 1}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_a_capture_makes_no_call_that_cuda_does_not_permit(changes: dict[str, Any]) -> None:
    device = captured(**changes)
    assert device.faults == [], summary(device.faults)
    assert device.captured["addmm"] + device.captured["mm"] > 10
    assert device.launches["graph"] == 4  # two micro-batches, forward and backward
    assert "mm" not in device.launches


def waits(y: Tensor) -> Tensor:
    door.synchronize(y.device)
    return y


def waits_for_an_event(y: Tensor) -> Tensor:
    door.mark(y.device).synchronize()
    return y


def asks_an_event(y: Tensor) -> Tensor:
    return y if door.mark(y.device).query() else -y


def makes_a_process_group(y: Tensor) -> Tensor:
    dist.new_group([0])
    return y


def allocates_on_another_stream(y: Tensor) -> Tensor:
    with door.on_stream(door.copy_stream(y.device, "in")):
        torch.empty(8, device=y.device)
    return y


def reads_the_state_of_a_generator(y: Tensor) -> Tensor:
    door.rng_states(y.device)
    return y


def page_locks(y: Tensor) -> Tensor:
    torch.zeros(8).pin_memory()
    return y


def communicates(y: Tensor) -> Tensor:
    dist.all_reduce(y.detach())
    return y


def draws_from_a_generator(y: Tensor) -> Tensor:
    return y + torch.rand(y.shape[-1], generator=GENERATOR, device=y.device)


GENERATOR = torch.Generator()
PLANTED = {
    waits: "the host waits for the device",
    waits_for_an_event: "the host waits for the event",
    asks_an_event: "event query",
    makes_a_process_group: "a new process group",
    allocates_on_another_stream: "an allocation outside of the pool",
    reads_the_state_of_a_generator: "the state of a generator is read",
    page_locks: "page-locked memory",
    communicates: "a collective: allreduce_",
    faults_of_steps.reads_an_item: "a value is read on the host",
    faults_of_steps.selects: "a value is read on the host: nonzero",
    faults_of_steps.copies_to_the_host: "a copy from pretend to cpu",
    faults_of_steps.copies_from_pageable_memory: "a copy from cpu to pretend",
}


def planted(wrong: Any) -> Any:
    """Makes a GPT with a layer that does something wrong."""
    config = config_of(Case(dtype="bf16", layers=1))
    return lambda slicing: faults_of_steps.PlantedModel(config, slicing, wrong)


@pytest.mark.seldom(
    "waits",
    "asks_an_event",
    "makes_a_process_group",
    "reads_the_state*",
    "page_locks",
    "communicates",
    "selects",
    "copies_to_the_host",
)
@pytest.mark.parametrize("wrong", PLANTED)
def test_the_recorder_finds(wrong: Any) -> None:
    """What threed's own check would refuse before the capture is captured here."""
    with patch.object(Region, "_problem", lambda *_: None):
        device = captured(planted(wrong), steps=4, layers=1, microbatches=1)
    found = [fault for fault in device.faults if PLANTED[wrong] in fault.operation]
    assert found, summary(device.faults)


# ------------------------------------------------------------------------------------------------- wrong replays, refusals


def nothing_is_copied(self: StaticBatch, micro: MicroBatch) -> None:
    """A replay sees the micro-batch that was captured."""
    self._step.fill_(micro.step)


WRONG = {
    "the step is not filled in": patch.object(Tensor, "fill_", lambda self, value: self),
    "inputs are not copied": patch.object(StaticBatch, "fill", nothing_is_copied),
    "all micro-batches add": patch.object(Reducer, "fresh", property(lambda _: False)),
    "contributions are not counted": patch.object(Reducer, "count", lambda self, added: None),
}


@pytest.mark.seldom("the step is not*", "contributions are not*")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_replay_is_found(wrong: str) -> None:
    # Only dropout depends on the step; its many operations take most of the time.
    dropout = 0.2 if wrong == "the step is not filled in" else 0.0
    with WRONG[wrong], pytest.raises((AssertionError, ConfigError, RuntimeError)):
        check(Case(dropout=dropout, layers=1))


def run_planted(wrong: Any, graphs: Any = True, steps: int = 4) -> None:
    """Steps of a GPT with a layer that does something wrong, on the device with values."""
    config = config_of(Case(layers=1), graphs)
    with late(1):
        topology = configs.topology_of(1, 1)
        model = faults_of_steps.PlantedModel(config, Slicing(), wrong)
        engine = Engine(model, topology, config)  # type: ignore[arg-type]
        for step in range(steps):
            engine.step(configs.batch(step, 8))


def keeps_a_tensor(y: Tensor) -> Tensor:
    KEPT.append(y.detach() + 1)
    return y


def draws_on_the_host(y: Tensor) -> Tensor:
    return y * random.choice((1.0, 1.0))


def selects_by_a_mask(y: Tensor) -> Tensor:
    return y + y.detach()[y > 0].numel() * 0


def draws_on_the_cpu(y: Tensor) -> Tensor:
    torch.rand(3)
    return y


KEPT = list[Tensor]()
REFUSED = {
    keeps_a_tensor: "a layer keeps a tensor of its pass, allocated at ",
    draws_on_the_host: "a random number is drawn on the host, by random or numpy",
    draws_on_the_cpu: "a random number is drawn on the host",
    selects_by_a_mask: "a shape depends on values",
    faults_of_steps.reads_an_item: "the host reads a value of the device",
    faults_of_steps.copies_to_the_host: "a value crosses between host and device",
    faults_of_steps.takes_a_scalar_of_the_host: "a value crosses between host and device",
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_layer_that_cannot_be_captured_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"--run.graphs true: {REFUSED[wrong]}.*use --run.graphs"):
        run_planted(wrong)


def test_documents_are_refused_without_flex_attention() -> None:
    """Attention then reads their borders on the host."""
    config = config_of(Case(microbatches=1, layers=1))
    numbers = torch.arange(SEQ).div(3, rounding_mode="floor").expand(8, -1).contiguous()
    batch = {**configs.batch(0, 8), "documents": numbers}
    with late(1):
        engine = configs.engine_of(config)
        for _ in range(2):  # the third micro-batch is rehearsed
            engine.step(batch)
        with pytest.raises(ConfigError, match="a value crosses between host and device"):
            engine.step(batch)


def test_what_only_the_capture_shows_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"capture of a forward failed: .*use --run.graphs false"):
        run_planted(waits_for_an_event)


def test_a_generator_is_registered_with_the_graph() -> None:
    run_planted(draws_from_a_generator, steps=5)


def test_layers_that_changed_are_captured_again() -> None:
    config = config_of(Case(microbatches=1))
    with late(1) as device:
        engine, counts = configs.engine_of(config), list[int]()
        for step in range(8):
            if step == 5:
                engine.executor.stages[0].layers[1].train(False)
            engine.step(configs.batch(step, 8))
            counts.append(len(device.graph.captured))
        assert counts == [0, 0, 0, 2, 2, 2, 2, 4]
        engine.executor.stages[0].layers[1].register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError, match="Block has hooks, which a replay would not call"):
            engine.step(configs.batch(9, 8))


def evaluate_shapes(engine: Engine) -> None:
    """Evaluates batches of six lengths."""
    for length in range(1, 7):
        engine.evaluate({k: v[:, :length].contiguous() for k, v in configs.batch(0, 8).items()})


def test_shapes_without_end_are_refused() -> None:
    config = config_of(Case())
    with late(1):
        engine = configs.engine_of(config)
        with pytest.raises(ConfigError, match="more than 4 different shapes"):
            evaluate_shapes(engine)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"parallel": {"pp": 2}},
            "--run.graphs true with --parallel.pp 2: .*; use --parallel.pp 1",
        ),
        ({"parallel": {"tp": 2}}, "--parallel.tp 2: collectives inside layers"),
        ({"parallel": {"schedule": "gpipe"}}, "each backward must follow its forward"),
        ({"zero": {"stage": 3}}, "--zero.stage 3: a CUDA graph contains the addresses"),
        ({"zero": {"offload_optimizer": "cpu"}}, "--zero.offload-optimizer cpu"),
        ({"recompute": {"mode": "full"}}, "--recompute.mode full"),
        ({"run": {"compile": True}}, "--run.compile true"),
        ({"run": {"recheck_bad_steps": True}}, "--run.recheck-bad-steps true"),
        ({"log": {"profile_steps": "2:3"}}, "--log.profile-steps"),
    ],
    ids=str,
)
def test_keys_without_graphs_are_refused_by_name(keys: dict[str, Any], text: str) -> None:
    keys = keys | {"run": {"graphs": True, **keys.get("run", {})}}
    problems = "\n".join(find_problems(Config.model_validate(keys), 2))
    assert re.search(text, problems), problems


def test_devices_and_models_without_graphs_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="graphs true on cpu: only CUDA GPUs have CUDA"):
        configs.engine_of(config_of(Case()))
    with late(), pytest.raises(ConfigError, match="with a wrapped module"), torch.device("meta"):
        Engine(nn.Linear(2, 2), Topology(device=where()), Config(run=RunConfig(graphs=True)))


def is_on(config: Config) -> bool:
    """Whether an engine uses graphs."""
    return isinstance(configs.engine_of(config).executor.stages[0], StageGraph)


def test_auto_uses_graphs_of_small_layers_on_one_gpu_only(recwarn: Any) -> None:
    assert not is_on(config_of(Case(), "auto"))  # a CPU
    with late():
        assert is_on(config_of(Case(), "auto"))
        assert not is_on(config_of(Case(zero=2), "auto"))
        with patch.object(graphs, "LAUNCH_BOUND", 1e3):
            assert not is_on(config_of(Case(), "auto"))
            assert is_on(config_of(Case(), True))
    assert not recwarn.list


def test_auto_warns_of_a_layer_that_cannot_be_captured() -> None:
    stated = patch.object(graphs, "stated_flops", lambda *_: [1])  # for layers of others, too
    with stated, pytest.warns(UserWarning, match="no CUDA graphs are used: the host reads a value"):
        run_planted(faults_of_steps.reads_an_item, "auto")


def test_the_seam_calls_torch_as_its_documentation_asks() -> None:
    calls = list[Any]()
    graph = SimpleNamespace(
        register_generator_state=lambda g: calls.append(("register", g)),
        replay=lambda: calls.append("replay"),
    )

    @contextmanager
    def capture(*args: Any, **keywords: Any) -> Iterator[None]:
        inspect.signature(torch.cuda.graph).bind(*args, **keywords)
        calls.append(("capture", args, keywords))
        yield

    with patch.object(torch.cuda, "CUDAGraph", lambda: graph):
        made = door.DeviceGraph("pool", [GENERATOR])
        with patch.object(torch.cuda, "graph", capture), made.capture():
            pass
    made.replay()
    keywords = {"pool": "pool", "capture_error_mode": "thread_local"}
    assert calls == [("register", GENERATOR), ("capture", (graph,), keywords), "replay"]
