"""A save beside training on a device whose streams run late has the bits that were there; and not where a wait is
missing."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests import configs
from tests.accelerator.late import late, where
from tests.accelerator.test_late import Changed, Plant, config_of, named, nothing, same_kernels
from tests.checkpoints import train
from tests.configs import Case
from threed.checkpoint import saving
from threed.checkpoint.saving import Save
from threed.config import Config


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The device; skips a test where this torch lets nobody make one."""
    return where()


def saved_on_cpu(config: Config, folder: Path) -> list[bytes]:
    """What a save that waits writes after two steps, and after four."""
    engine, found = configs.engine_of(config), []
    for name in ("two", "four"):
        train(engine, 2)
        engine.save(folder / name)
        found.append((folder / name / "rank-00000.safetensors").read_bytes())
    return found


def thread_after(told: threading.Event) -> Any:
    """Has the thread of a save begin after something."""
    write = Save.write

    def wait_and_write(self: Save, values: Any) -> Any:
        told.wait(60)
        return write(self, values)

    return patch.object(Save, "write", wait_and_write)


def saved_late(
    config: Config, folder: Path, plant: Plant = nothing, at_once: bool = False
) -> list[bytes]:
    """What a save beside training writes, two steps before the fourth, and one that waits after that. Copies come as
    late as they can: when all other streams wait for them. Where all is copied, the thread begins after these steps, or
    at once."""
    told = threading.Event()
    with (
        late() as device,
        ExitStack() as stack,
        patch.object(saving, "free_bytes", return_value=2**40),
    ):
        plant(stack)
        stack.enter_context(thread_after(told))
        engine = configs.engine_of(config)
        train(engine, 2)
        streams, copies = device.streams, device.streams.named("copies", "save")
        # the order stays
        stack.enter_context(patch.object(streams.random, "random", return_value=1.0))
        streams.order.remove(copies)
        streams.order.append(copies)
        save = engine.start_save(folder / "beside")
        # updates wait for the thread
        if at_once or config.zero.offload_optimizer != "none":
            told.set()
        train(engine, 2)
        told.set()
        save.wait()
        engine.save(folder / "after")
    return [(folder / name / "rank-00000.safetensors").read_bytes() for name in ("beside", "after")]


HOST: dict[str, Any] = {
    "zero": 3,
    "offload_optimizer": "cpu",
    "offload_params": "cpu",
    "bucket_mib": 0.03,
}
CASES = {
    "everything on the device": config_of(Case(zero=3, bucket_mib=0.03, dtype="bf16", layers=2)),
    "the optimizer on the host": config_of(Case(**HOST, dtype="bf16", layers=2)),
    "a delayed update": config_of(
        Case(zero=1, offload_optimizer="cpu", bucket_mib=0.03, dtype="bf16"), delayed_update=True
    ),
    "on a drive": config_of(
        Case(zero=3, offload_optimizer="nvme", offload_params="nvme", bucket_mib=0.03)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_is_what_was_there(name: str, tmp_path: Path) -> None:
    with same_kernels(CASES[name]):
        want = saved_on_cpu(CASES[name], tmp_path)
        assert saved_late(CASES[name], tmp_path) == want


SNAPSHOT = "threed.zero.snapshot:Snapshot"
FAULTS: list[tuple[Plant, bool]] = [
    (Changed(SNAPSHOT, "_release", "current_stream(self._device).wait_event(copied)"), False),
    (Changed(SNAPSHOT, "_read", "item.copied.synchronize()"), True),
]


@pytest.mark.seldom("_read: item*")
@pytest.mark.parametrize(("plant", "at_once"), FAULTS, ids=named)
def test_a_missing_wait_is_found(plant: Plant, at_once: bool, tmp_path: Path) -> None:
    config = config_of(Case(bucket_mib=0.03, dtype="bf16"))
    with same_kernels(config):
        want = saved_on_cpu(config, tmp_path)
        assert saved_late(config, tmp_path, plant, at_once=at_once) != want
