"""Who is to blame when a run stands still, and where a process is."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from threed.distributed import collectives
from threed.distributed.topology import Topology
from threed.reliability import heartbeat, watchdog
from threed.reliability.heartbeat import Heartbeat
from threed.reliability.watchdog import Watchdog, judge, where

WAITS = "waits in all_reduce over tp, for run at layers/linear.py:94"


def beats(
    *notes: str, steps: dict[int, int] | None = None, states: dict[int, str] | None = None
) -> list[dict[str, Any]]:
    """Beats of ranks that answered with these notes; of those with none that did not."""
    about = {
        "phase": "step",
        "time": time.time() - 12,
        "pid": os.getpid(),
        "host": "a-machine",
        "place": "",
    }
    return [
        {
            "rank": rank,
            "step": (steps or {}).get(rank, 7),
            "state": "hung" if note else "",
            "note": note,
            **about,
        }
        for rank, note in enumerate(notes)
    ]


def test_who_does_not_answer_is_named_first() -> None:
    said = judge(beats(WAITS, "", "in sleep at data/sources.py:3", WAITS), 4)
    assert said.startswith("rank 1 on a-machine does not answer: process ")
    assert "last seen in step 7, phase step" in said
    assert "rank 1" in judge(beats("", ""), 2)
    assert judge(beats(WAITS), 3) == "rank 1 has no heartbeat; rank 2 has no heartbeat"


def test_who_waits_for_nobody_while_others_wait() -> None:
    said = judge(beats(WAITS, WAITS, "in sleep at data/sources.py:3", WAITS), 4)
    assert said.startswith(
        "rank 2 on a-machine waits for no other rank: step 7, phase step, in sleep at"
    )
    assert "data/sources.py:3" in said
    assert "rank 0" not in said


def test_who_is_behind_where_all_wait() -> None:
    assert judge(beats(WAITS, WAITS, WAITS, steps={2: 6}), 3).startswith(
        "rank 2 on a-machine is behind: step 6"
    )
    said = judge(beats(WAITS, WAITS), 2)
    assert said.startswith("all ranks hang in step 7, phase step: rank 0")
    assert said.endswith(WAITS)


def test_long_lists_are_cut() -> None:
    said = judge(beats(*[""] * 40), 40)
    assert "rank 2 on" in said
    assert "and 37 more ranks" in said
    assert len(said) < 600


@pytest.mark.parametrize(("silent", "reads"), [((), 63), ((5,), 62), ((0, 1, 2), 61 * 3 + 60)])
def test_one_rank_reports_and_the_others_read_little(
    silent: tuple[int, ...], reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of 64 ranks but those that are silent ask whether to report."""
    hearts = {rank: Heartbeat(tmp_path, rank) for rank in range(64)}
    for rank in hearts.keys() - set(silent):
        hearts[rank].mark("hung", WAITS)
    seen, read = [0], heartbeat._read

    def counted(path: Path) -> object:
        seen[0] += 1
        return read(path)

    monkeypatch.setattr(heartbeat, "_read", counted)
    asked = [rank for rank in hearts if rank not in silent]
    lowest = [rank for rank in asked if Watchdog(hearts[rank], 64, 0, "t")._is_lowest()]
    assert lowest == [min(asked)]
    assert seen[0] == reads


def wait_in_a_collective(folder: str) -> list[str]:
    """Rank 1 comes late: meanwhile another thread of rank 0 looks where that is."""
    axis, said = Topology(tp=2).axis("tp"), []
    if axis.index == 1:
        file = Path(folder) / "seen"
        while not file.exists():
            time.sleep(0.01)
        collectives.all_reduce(torch.ones(1), axis)
        collectives.barrier(axis)
        return []

    def look() -> None:
        end = time.monotonic() + 60
        while not (text := where()).startswith("waits in") and time.monotonic() < end:
            time.sleep(0.01)
        said.append(text)
        (Path(folder) / "seen").touch()

    thread = threading.Thread(target=look)
    thread.start()
    collectives.all_reduce(torch.ones(1), axis)
    thread.join()
    collectives.barrier(axis)
    return said


def test_where_a_rank_waits(tmp_path: Path) -> None:
    (said, _) = run_ranks(2, wait_in_a_collective, str(tmp_path))
    assert said[0].startswith(
        "waits in all_reduce over tp, for wait_in_a_collective at reliability/test_monitor_watchdog.py:"
    )


def recorded() -> list[str]:
    axis = Topology(tp=2).axis("tp")
    collectives.all_reduce(torch.ones(1), axis)
    return [entry["profiling_name"] for entry in json.loads(collectives.flight_record())["entries"]]


def test_torchs_record_has_the_last_collectives() -> None:
    assert run_ranks(2, recorded)[0][-1].startswith("gloo:")


def test_a_place_outside_of_communication() -> None:
    said = []
    thread = threading.Thread(target=lambda: said.append(where()))
    thread.start()
    thread.join()
    assert said[0].startswith("in ")


class Ended(Exception):
    """In place of the end of the process."""


def test_nothing_is_read_while_a_run_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object) -> None:
        raise AssertionError("read a heartbeat")

    monkeypatch.setattr(heartbeat, "_read", no)
    heart = Heartbeat(tmp_path / "heartbeat", 0)
    guard = Watchdog(heart, 2, limit=60, token="t")
    (tmp_path / "heartbeat" / "hung-t").touch()
    for step in range(3):
        heart.beat(step, "step")
        guard.look()
    guard.stop()
    guard.stop()
    assert not list((tmp_path / "heartbeat").glob("*.stacks"))  # an empty one is removed


@pytest.mark.parametrize("limit", [0.05, 0])
def test_a_rank_that_stands_still_reports(
    limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise Ended(str(code))

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.0)
    heart = Heartbeat(tmp_path / "heartbeat", 0)
    guard = Watchdog(heart, 1, limit=limit, token="t")
    time.sleep(0.1)
    guard.look()  # loading may take longer
    heart.beat(3, "step")
    time.sleep(0.1)
    if not limit:
        guard.look()
        assert not (tmp_path / "hang.txt").exists()
        return
    with pytest.raises(Ended, match="124"):
        guard.look()
    guard.stop()
    report = (tmp_path / "hang.txt").read_text()
    assert "run.hang-timeout 0.05 s" in report
    assert re.search(r"\nrank 0 on \S+: step 3, phase step, in \w+ at \S+:\d+", report)
    assert heartbeat.read_all(tmp_path / "heartbeat")[0]["state"] == "hung"
    assert "most recent call first" in (tmp_path / "heartbeat" / "rank-0.stacks").read_text()
