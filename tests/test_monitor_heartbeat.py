"""Heartbeats: what is read back, who is named, what a beat costs, readers against a writer at full speed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from threed.monitor import heartbeat
from threed.monitor.heartbeat import RECORD_BYTES, Heartbeat, culprit, read_all, slowest

ROOT = Path(__file__).resolve().parents[1]


def test_beats_are_read_back_in_rank_order(tmp_path: Path) -> None:
    before = time.time()
    hearts = {rank: Heartbeat(tmp_path / "heartbeat", rank) for rank in (10, 2, 0)}
    hearts[2].beat(41, "recv_forward")
    hearts[2].beat(5, "x")  # a shorter record leaves nothing of the longer one
    beats = read_all(tmp_path / "heartbeat")
    assert [(b["rank"], b["step"], b["phase"]) for b in beats] == [(0, 0, "start"), (2, 5, "x"), (10, 0, "start")]
    assert all(before <= beat["time"] <= time.time() and beat["pid"] == os.getpid() for beat in beats)
    assert all(path.stat().st_size == RECORD_BYTES for path in (tmp_path / "heartbeat").iterdir())


def test_slowest_is_the_lowest_step_then_the_oldest_beat(tmp_path: Path) -> None:
    hearts = [Heartbeat(tmp_path, rank) for rank in range(4)]
    for rank in (3, 0, 1, 2):  # rank 3 beats first and then stays silent
        hearts[rank].beat(41, "recv_forward")
    at = read_all(tmp_path)[3]["time"]
    assert slowest(tmp_path, now=at + 12.34) == "rank 3 last seen step 41, phase recv_forward, 12.3 s ago"
    hearts[1].beat(40, "optimizer")
    assert slowest(tmp_path).startswith("rank 1 last seen step 40, phase optimizer, 0.0 s ago")


def test_a_rank_whose_process_has_ended_is_named_before_any_other(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0).beat(7, "step")
    child = os.fork()
    if child == 0:
        Heartbeat(tmp_path, 1).beat(9, "step")
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it is over, and not yet gone from the table
    named = "rank 1, whose process has ended, last seen step 9, phase step"
    assert slowest(tmp_path).startswith(named)
    os.waitpid(child, 0)
    assert slowest(tmp_path).startswith(named)


def ask_all(folder: Path, world: int, node: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """What every rank says after a failure, on machines of `node` ranks, and how many files they read for it."""
    reads, read, said = [0], heartbeat._read, []

    def counted(path: Path) -> object:
        reads[0] += path.exists()
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "_read", counted)
        patch.setenv("LOCAL_WORLD_SIZE", str(node))
        for rank in range(world):
            patch.setenv("LOCAL_RANK", str(rank % node))
            patch.setattr("platform.node", lambda rank=rank: f"machine-{rank // node}")
            said.append(culprit(folder, rank, world))
    return said, reads[0]


@pytest.mark.parametrize("dead", [(), (42,), (0,), (0, 1, 7), (8, 9, 10, 63)])
def test_every_rank_that_died_is_named_and_no_rank_but_the_first_reads_all_files(
    dead: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 ranks on 8 machines. When each read all, that was 4096 reads; at 16,384 ranks 268 million."""
    alive, child = os.getpid(), os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for rank in range(64):
        monkeypatch.setattr("platform.node", lambda rank=rank: f"machine-{rank // 8}")
        monkeypatch.setattr("os.getpid", lambda pid=child if rank in dead else alive: pid)
        Heartbeat(tmp_path, rank).beat(5 if rank == 33 else 6, "step")
    monkeypatch.undo()
    said, reads = ask_all(tmp_path, 64, 8, monkeypatch)
    os.waitpid(child, 0)
    lines = {rank: line for rank, line in enumerate(said) if rank not in dead}
    for rank in dead:
        assert any(f"rank {rank}, whose process has ended, last seen step 6" in line for line in lines.values())
    if 0 in lines and not any(rank < 8 for rank in dead):
        assert lines[0].startswith("rank 33 last seen step 5")
    assert sum(line != "" for rank, line in lines.items() if rank > 0) <= len(dead)
    assert reads < 2 * 64 + 8 * len(dead)


def test_ranks_that_never_beat_and_files_of_a_larger_run(tmp_path: Path) -> None:
    assert slowest(tmp_path / "none") == f"no heartbeat in {tmp_path / 'none'}"
    for rank in (0, 1, 7):
        Heartbeat(tmp_path, rank).beat(9 - rank, "forward")
    assert slowest(tmp_path).startswith("rank 7 last seen step 2")
    assert slowest(tmp_path, world_size=2).startswith("rank 1 last seen step 8")
    assert slowest(tmp_path, world_size=4) == f"never seen: rank 2, 3 (no heartbeat in {tmp_path})"


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
from threed.monitor.heartbeat import Heartbeat
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
