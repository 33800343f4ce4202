"""The door to the device: what there is without one, and the order in which a stream's work is told."""

from __future__ import annotations

import pytest
import torch

from threed.core import device

CPU = torch.device("cpu")


def test_on_a_cpu_nothing_is_asked_of_a_gpu() -> None:
    device.use(CPU)
    device.reset_peak(CPU)
    assert device.name(CPU) is None
    assert device.peak_bytes(CPU) == 0


def test_what_has_memory_of_its_own() -> None:
    kinds = {"cpu": False, "meta": False, "cuda": True, "xpu": True}
    assert {kind: device.is_accelerator(torch.device(kind)) for kind in kinds} == kinds


def test_values_of_the_host_stay_the_same_tensor_on_the_host() -> None:
    values = torch.arange(3.0)
    assert device.start_copy_in(values, CPU) is values
    assert device.start_copy_in(values, CPU, torch.float64).dtype == torch.float64
    assert device.start_copy_in(values, torch.device("meta")).is_meta


def test_generators_draw_the_same_again() -> None:
    states = device.rng_states(CPU)
    first = torch.rand(3)
    device.set_rng_states(states, CPU)
    assert torch.equal(torch.rand(3), first)
    assert list(states) == ["cpu"]


class Stream:
    """Writes down what it waits for."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told, self.device = name, told, CPU

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")


def test_work_beside_waits_for_what_was_told_and_leaves_the_stream_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    compute, copies = Stream("compute", told), Stream("copies", told)
    current = [compute]
    monkeypatch.setattr(device, "current_stream", lambda _: current[0])
    monkeypatch.setattr(
        torch.accelerator, "set_stream", lambda s: (current.__setitem__(0, s), told.append(s.name))
    )

    def work() -> None:
        with device.on_stream(copies):  # type: ignore[arg-type]
            with device.on_stream(copies):  # type: ignore[arg-type]
                assert current == [copies]
            assert current == [copies]
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        work()
    assert current == [compute]
    assert told == [
        "copies waits for compute",
        "copies",
        "copies waits for copies",
        "copies",
        "copies",
        "compute",
    ]
