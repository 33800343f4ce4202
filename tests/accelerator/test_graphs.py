"""`--run.graphs`: replays give the numbers of a training without graphs, bit for bit; what cannot be captured is refused."""

from __future__ import annotations

from typing import Any

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import configs
from tests.accelerator import test_pretend as faults_of_steps
from tests.accelerator.late import Device, late, where
from tests.accelerator.pretend import Pretend, pretending
from tests.accelerator.test_late import differences, same_kernels
from tests.accelerator.watching import IN_CAPTURE, summary
from tests.configs import Case
from threed.config import Config, ConfigError
from threed.core import device as door
from threed.engine import Engine
from threed.models import Decoder
from threed.pipeline.graphs import Region
from threed.testing import Results, results_of

STEPS = 5  # plain, rehearsed, captured, and two replays


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
    assert len(graph.replays) > len(graph.captured)
    return device


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(microbatches=1, zero=0),
        Case(model="llama", dtype="bf16", microbatches=3),
        Case(dropout=0.2, model="gpt-untied"),
    ],
    ids=str,
)
def test_training_with_graphs_is_the_same(case: Case) -> None:
    check(case)


# -------------------------------------------------------------------------------------------------------- the recorder


def captured(model: Any = None, steps: int = 5, **changes: Any) -> Pretend:
    """Steps of a small GPT in bf16 with threed's kernels, watched; the last two replay."""
    config = config_of(Case(dtype="bf16", **{"microbatches": 2, **changes}))
    with pretending() as device:
        engine = device.engine(config, model)
        faults = []
        for _ in range(steps):
            device.step(engine)
            faults += [fault for fault in device.faults if fault.kind == IN_CAPTURE]
        device.faults = faults
        return device


@pytest.mark.parametrize(
    "changes", [{}, {"model": "llama"}, {"dropout": 0.1}, {"zero": 0}], ids=str
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
    config = config_of(Case(dtype="bf16"))
    return lambda slicing: faults_of_steps.PlantedModel(config, slicing, wrong)


@pytest.mark.parametrize("wrong", PLANTED)
def test_the_recorder_finds(wrong: Any) -> None:
    """What threed's own check would refuse before the capture is captured here."""
    with patch.object(Region, "_problem", lambda *_: None):
        device = captured(planted(wrong))
    assert any(PLANTED[wrong] in fault.operation for fault in device.faults), summary(device.faults)
    assert all("test_" in fault.place or "device.py" in fault.place for fault in device.faults)
