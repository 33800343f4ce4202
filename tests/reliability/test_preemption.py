"""All ranks stop at the same step, whoever was asked; the file that a preempted run leaves; signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from threed.core import process
from threed.distributed.topology import Topology, alone
from threed.reliability import preemption
from threed.reliability.preemption import FILE, Preempted, Stop
from threed.reliability.signals import TERMINATED, Signals


def steps_until_stop(asked_at: dict[int, int], order: str) -> tuple[int, str, bool]:
    """How many steps this rank makes when some ranks are asked in some step; ranks meet every third step."""
    axis = Topology(dp=2).axis("world")
    step = 0
    stop = Stop(
        axis,
        torch.device("cpu"),
        lambda: f"S{axis.index}" if step >= asked_at.get(axis.index, 99) else "",
    )
    while step < 9 and not stop:
        step += 1
        if order == "meets" and step % 3 == 0:
            stop.now()
        stop.check()
    return step, stop.reason, bool(stop)


@pytest.mark.parametrize(
    ("asked_at", "order", "expected"),
    [
        ({1: 4}, "checks", (5, "S1 (rank 1)", True)),
        ({0: 2, 1: 4}, "checks", (3, "S0 (rank 0)", True)),
        ({1: 3}, "meets", (3, "S1 (rank 1)", True)),
        ({0: 1}, "checks", (2, "S0 (rank 0)", True)),
        ({}, "checks", (9, "", False)),
    ],
)
def test_all_ranks_stop_at_the_same_step(
    asked_at: dict[int, int], order: str, expected: tuple[int, str, bool]
) -> None:
    assert run_ranks(2, steps_until_stop, asked_at, order) == [expected] * 2


def test_reasons() -> None:
    stop = Stop(alone(), torch.device("cpu"), str)
    assert not stop.take(["", ""])
    assert stop.take(["SIGTERM", "SIGTERM"])
    assert stop.reason == "SIGTERM"
    stop.reason = ""
    stop.take(["train.time-limit 3600 s", ""])
    assert stop.reason == "train.time-limit 3600 s"


def test_a_restart_of_a_preempted_job_ends_and_the_next_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axis = alone("world")
    preemption.begin(tmp_path, "a", axis)
    preemption.mark(tmp_path, 7, "SIGTERM", tmp_path / "step-7", "a", 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(Preempted, match="preempted in step 7 by SIGTERM"):
        preemption.begin(tmp_path, "a", axis)
    assert json.loads((tmp_path / FILE).read_text())["step"] == 7
    preemption.begin(tmp_path, "b", axis)
    assert not (tmp_path / FILE).exists()
    preemption.mark(tmp_path, 7, "SIGTERM", tmp_path / "step-7", "a", 2)
    preemption.begin(tmp_path, "a", axis)  # an elastic job that lost a machine
    assert not (tmp_path / FILE).exists()
    (tmp_path / FILE).write_text("{")
    preemption.begin(tmp_path, "b", axis)  # what cannot be read keeps nobody out


def test_signals_are_heard_while_the_main_thread_is_busy_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = Signals()
    with signals:
        listener = threading.Thread(target=signals.listen, args=(30,))
        listener.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        listener.join(30)
        assert signals.asked == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGTERM)
        signals.listen(30)
        assert signals.asked == "SIGUSR1"
        assert signals.terminated
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher's, perhaps, that hands the same one on
        signals.listen(30)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_main_thread_sees_a_signal_although_no_thread_listens() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.asked == "SIGUSR1"


def test_a_second_sigterm_ends_a_process_that_waits_in_c() -> None:
    program = """
import ctypes, threading
import threed.reliability.signals as module
module.SAME_S = 0.5
signals = module.Signals().__enter__()
def listen():
    while True: signals.listen(1)
threading.Thread(target=listen, daemon=True).start()
print("ready", flush=True)
while True: ctypes.CDLL(None).sleep(300)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGTERM)
            time.sleep(1.0)
            assert child.poll() is None
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == TERMINATED
        finally:
            child.kill()


def test_when_the_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that was set
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    process._launched.cache_clear()
    parent = process.since_launch()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    process._launched.cache_clear()
    assert parent + 10 > process.since_launch() >= 0
    process._launched.cache_clear()
