"""Clocks of machines that are hours apart: nothing that a run does or says compares them."""

from __future__ import annotations

import time
from unittest import mock

from tests.configs import topology_of
from tests.harness import run_ranks
from threed.distributed import clocks
from threed.distributed.clocks import Span, on_one_clock


def spans_of(machines: int) -> list[list[Span]]:
    """What four ranks measured, of which those of each machine have a clock of their own, in the same two moments."""
    everyone, real = topology_of(1, 1).axis("world"), time.perf_counter
    machine = everyone.index * machines // everyone.size

    def late() -> float:
        return real() + 7200.0 * machine

    with (
        mock.patch.object(time, "perf_counter", late),
        mock.patch.object(clocks, "_clock", return_value=f"machine {machine}"),
    ):
        mine = [(f"F{everyone.index}", time.perf_counter(), time.perf_counter() + 1.0)]
        return on_one_clock(mine, everyone)


def test_spans_of_machines_lie_beside_each_other() -> None:
    for machines in (1, 2, 4):
        for rows in run_ranks(4, spans_of, machines):
            assert [row[0][0] for row in rows] == ["F0", "F1", "F2", "F3"]
            begins = [row[0][1] for row in rows]
            assert max(begins) - min(begins) < 1000  # and not 7200
            assert all(abs(end - begin - 1.0) < 1e-3 for ((_, begin, end),) in rows)
