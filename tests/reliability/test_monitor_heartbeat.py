"""Heartbeats: what is read back, states of processes, what a beat costs, readers against a writer at full speed."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from threed.distributed.topology import Topology
from threed.reliability.heartbeat import RECORD_BYTES, Heartbeat, process_state, read_all, who
from threed.reliability.supervision import place_of

ROOT = Path(__file__).resolve().parents[2]


def test_beats_are_read_back_in_rank_order(tmp_path: Path) -> None:
    before = time.time()
    hearts = {rank: Heartbeat(tmp_path / "heartbeat", rank) for rank in (10, 2, 0)}
    hearts[2].beat(41, "recv_forward")
    hearts[2].beat(5, "x")  # a shorter record leaves nothing of the longer one
    beats = read_all(tmp_path / "heartbeat")
    assert [(b["rank"], b["step"], b["phase"]) for b in beats] == [
        (0, 0, "start"),
        (2, 5, "x"),
        (10, 0, "start"),
    ]
    assert all(
        before <= beat["time"] <= time.time() and beat["pid"] == os.getpid() for beat in beats
    )
    assert all(path.stat().st_size == RECORD_BYTES for path in (tmp_path / "heartbeat").iterdir())


def test_a_mark_keeps_the_beat_and_fits_the_record(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 7, "stage 1, dp 0, tp 3")
    heart.beat(41, "step")
    heart.mark("failed", 'ValueError: "x" of ünusual size\n' + "y" * 1000)
    (beat,) = read_all(tmp_path)
    assert (beat["step"], beat["phase"], beat["state"]) == (41, "step", "failed")
    assert beat["note"].startswith("ValueError:  x  of  nusual size yyy")
    assert (tmp_path / "rank-7.json").stat().st_size == RECORD_BYTES
    assert who(beat) == f"rank 7 on {beat['host']} (stage 1, dp 0, tp 3)"
    heart.beat(42, "data")
    assert [(b["state"], b["note"]) for b in read_all(tmp_path)] == [("", "")]


def test_the_state_of_a_process(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    beat = {"pid": child, "host": platform.node()}
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
    assert process_state(beat) == "stopped"
    assert process_state({**beat, "host": "another"}) == "unknown"
    assert process_state({**beat, "pid": os.getpid()}) == "running"
    os.kill(child, signal.SIGCONT)
    # it is over, and not yet gone from the table
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process_state(beat) == "ended"
    os.waitpid(child, 0)
    assert process_state(beat) == "ended"


def test_a_restarted_rank_takes_its_file_over(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0)
    heart.beat(41, "backward")
    heart.close()
    heart.close()
    Heartbeat(tmp_path, 0)
    assert [(beat["step"], beat["phase"]) for beat in read_all(tmp_path)] == [(0, "start")]


def test_damaged_files_and_long_names(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0).beat(3, "p" * 100)
    (tmp_path / "rank-1.json").write_text('{"rank": 1, "st')
    (tmp_path / "rank-2.json").write_text("[]")
    assert [beat["rank"] for beat in read_all(tmp_path)] == [0]
    with pytest.raises(ValueError, match="at most 100"):
        Heartbeat(tmp_path, 3).beat(1, "p" * 300)


@pytest.mark.alone
def test_a_beat_costs_less_than_fifty_microseconds(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0)
    costs = []
    for step in range(2000):
        start = time.perf_counter()
        heart.beat(step, "recv_forward")
        costs.append(time.perf_counter() - start)
    assert sorted(costs)[1000] < 50e-6  # the median: a busy machine may delay single ones


def test_a_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    program = f"""
from threed.reliability.heartbeat import Heartbeat
heart, step = Heartbeat({str(tmp_path)!r}, 0), 0
while True:
    step += 1
    heart.beat(step, "x" * (step % 90))
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as writer:
        try:
            deadline = time.monotonic() + 120
            while not (seen := [read_all(tmp_path)])[0] and time.monotonic() < deadline:
                time.sleep(0.01)
            # At least 3000 times, and until the writer had a turn on a busy machine.
            while len(seen) < 3000 or (seen[-1] == seen[0] and time.monotonic() < deadline):
                seen.append(read_all(tmp_path))
        finally:
            writer.kill()
    whole = [beat for (beat,) in seen if beat["step"]]
    assert all(beat["phase"] == "x" * (beat["step"] % 90) for beat in whole)
    steps = [beat["step"] for (beat,) in seen]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


def test_messages_name_the_context_rank_if_there_are_several() -> None:
    at = {"pp": 1, "dp": 0, "cp": 2, "tp": 3}
    place = place_of(cast(Topology, SimpleNamespace(coordinates=at, cp=4)))
    assert place == "stage 1, dp 0, cp 2, tp 3"
    place = place_of(cast(Topology, SimpleNamespace(coordinates=at | {"cp": 0}, cp=1)))
    assert place == "stage 1, dp 0, tp 3"


def test_a_rank_marked_hung_does_not_go_on(tmp_path: Path) -> None:
    """Its watchdog is about to end it; the rank that stalled may have continued meanwhile."""
    heart = Heartbeat(tmp_path, 0)
    heart.beat(6, "step")
    heart.mark("hung", "waits in recv")
    thread = threading.Thread(target=heart.beat, args=(7, "data"), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    (beat,) = read_all(tmp_path)
    assert (beat["step"], beat["state"]) == (6, "hung")
    heart.mark("ended")  # ends the thread
    thread.join(10)
    heart.close()
