"""Ranks agree on the step they stop at on a device that is behind the host, as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.accelerator.late import late, where
from tests.harness import run_ranks
from threed.distributed.topology import Topology
from threed.reliability import preemption
from threed.reliability.preemption import Stop


def copy_that_nobody_waits_for(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return lambda: host.nan_to_num()


def steps_until_stop(asked_in: int, seed: int | None, waits: bool = True) -> int:
    """The step in which this rank stops, if rank 1 is asked in some step. waits: before it reads what was summed."""
    if seed is None:
        return count(asked_in, torch.device("cpu"))
    with late(seed=seed), pytest.MonkeyPatch.context() as patch:
        if not waits:
            patch.setattr(preemption, "start_copy_out", copy_that_nobody_waits_for)
        return count(asked_in, where())


def count(asked_in: int, device: torch.device) -> int:
    axis = Topology(dp=2, device=device).axis("world")
    step = 0
    stop = Stop(axis, device, lambda: "SIGUSR1" if axis.index == 1 and step >= asked_in else "")
    work = torch.ones(8, 8, device=device)
    while step < 9 and not stop:
        step += 1
        work = work @ work * 0.1
        stop.check()
    return step


@pytest.mark.parametrize("asked_in", [1, 4, 99])
def test_ranks_on_a_late_device_stop_where_those_on_cpus_do(asked_in: int) -> None:
    where()
    expected = run_ranks(2, steps_until_stop, asked_in, None)
    assert expected == [min(asked_in + 1, 9)] * 2
    for seed in range(2):
        assert run_ranks(2, steps_until_stop, asked_in, seed) == expected


def test_without_the_wait_they_do_not() -> None:
    where()
    assert run_ranks(2, steps_until_stop, 1, 0, False) != [2, 2]
