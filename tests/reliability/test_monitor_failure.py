"""After a failure: every rank that died is named by one other, and only rank 0 ever looks at all."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from tests import programs
from tests.fault_runs import environment
from threed.reliability import failure, heartbeat
from threed.reliability.failure import lost, named, wait_for_names, write_error_file
from threed.reliability.heartbeat import Heartbeat


@pytest.fixture
def ended() -> int:
    """The pid of a process that has ended."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def beat_all(
    folder: Path, dead: dict[int, str], ended: int, monkeypatch: pytest.MonkeyPatch, node: int = 8
) -> None:
    """64 ranks on 8 machines have beaten; those of `dead` have ended, with a last word or without."""
    alive = os.getpid()
    for rank in range(64):
        monkeypatch.setattr("platform.node", lambda rank=rank: f"machine-{rank // node}")
        monkeypatch.setattr("os.getpid", lambda pid=ended if rank in dead else alive: pid)
        heart = Heartbeat(folder, rank)
        heart.beat(6, "step")
        heart.mark(dead.get(rank, ""))
        heart.close()
    monkeypatch.undo()


def ask_all(
    folder: Path, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[int, list[str]], int]:
    """What each of some ranks names, on machines of 8, and how many files they read for it."""
    reads, read, said = [0], heartbeat._read, {}

    def counted(path: Path) -> object:
        reads[0] += path.exists()
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "_read", counted)
        patch.setenv("LOCAL_WORLD_SIZE", "8")
        for rank in ranks:
            patch.setenv("LOCAL_RANK", str(rank % 8))
            patch.setattr("platform.node", lambda rank=rank: f"machine-{rank // 8}")
            said[rank] = named(folder, rank, 64)
    return said, reads[0]


@pytest.mark.parametrize("dead", [(), (42,), (0,), (0, 1, 7), (8, 9, 10, 63)])
def test_every_rank_that_was_killed_is_named_once(
    dead: tuple[int, ...], ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When each read all, that was 4096 reads; at 16,384 ranks 268 million."""
    beat_all(tmp_path, dict.fromkeys(dead, ""), ended, monkeypatch)
    said, reads = ask_all(tmp_path, [rank for rank in range(64) if rank not in dead], monkeypatch)
    lines = [line for lines in said.values() for line in lines]
    assert len(lines) == len(dead)
    for rank in dead:
        begin = f"rank {rank} on machine-{rank // 8} was killed: process {ended} has ended in step 6, phase step"
        assert sum(line.startswith(begin) for line in lines) == 1
    assert reads <= 64 + len(dead)


def test_ranks_that_spoke_for_themselves_are_not_named(
    ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_all(tmp_path, {3: "failed", 9: "lost", 17: "ended"}, ended, monkeypatch)
    said, _ = ask_all(tmp_path, [rank for rank in range(64) if rank not in (3, 9, 17)], monkeypatch)
    assert not any(said.values())


def test_ranks_behind_one_that_lost_contact_are_not_named_again(
    ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_all(tmp_path, {2: "lost", 3: "", 5: "failed", 6: ""}, ended, monkeypatch)
    said, _ = ask_all(tmp_path, [0, 1, 2, 4, 7], monkeypatch)
    assert [line.split(" was")[0] for line in said[2]] == ["rank 3 on machine-0"]
    assert [line.split(" was")[0] for line in said[4]] == ["rank 6 on machine-0"]
    assert not said[0] + said[1] + said[7]


# Runs four ranks of one machine, and sends them signals one by one. The arguments are a folder, and per signal its name
# and the rank. After each signal except an ASK the program waits until the rank has ended. It prints the exit codes.
RANKS = """
import os, pathlib, signal, sys, threading, time, types
from threed.config import Config
from threed.distributed.topology import alone
from threed.reliability import signals
from threed.reliability.supervision import Supervision

signals.SAME_S = 0.2

def run(rank, ready):
    places = {"pp": 0, "dp": rank, "tp": 0}
    topology = types.SimpleNamespace(rank=rank, world=4, cp=1, coordinates=places, axis=alone)
    with Supervision(pathlib.Path(sys.argv[1]), topology, Config()) as supervision:
        supervision.heart.beat(6, "step")
        os.write(ready, b"x")
        threading.Event().wait(600)

reader, ready = os.pipe()
pids = []
for rank in range(4):
    pids.append(os.fork())
    if pids[-1] == 0:
        run(rank, ready)
        os._exit(0)
for _ in pids:
    os.read(reader, 1)
codes = {}
for word in sys.argv[2:]:
    name, rank = word.split("-")
    os.kill(pids[int(rank)], signal.SIGTERM if name == "ASK" else getattr(signal, name))
    if name == "ASK":
        time.sleep(1)
    else:
        codes[int(rank)] = os.waitstatus_to_exitcode(os.waitpid(pids[int(rank)], 0)[1])
print(codes)
"""


@pytest.mark.parametrize(
    ("sent", "codes", "says"),
    [
        # torchrun ends the other ranks, of which some exit before others have read the heartbeats
        ("SIGKILL-3 SIGTERM-2 SIGTERM-1 SIGTERM-0", {3: -9, 2: 143, 1: 143, 0: 143}, "3 was killed"),
        ("SIGKILL-3 SIGTERM-0 SIGTERM-1 SIGTERM-2", {3: -9, 0: 143, 1: 143, 2: 143}, "3 was killed"),
        # rank 0 has been asked to stop, so torchrun's SIGTERM is its second one
        (
            "ASK-0 SIGKILL-3 SIGTERM-0 SIGTERM-1 SIGTERM-2",
            {3: -9, 0: 143, 1: 143, 2: 143},
            "3 was killed",
        ),
        (
            "ASK-1 SIGTERM-1 SIGTERM-3 SIGTERM-2 SIGTERM-0",
            {1: 143, 3: 143, 2: 143, 0: 143},
            "1 ended in step 6, phase step: a second SIGTERM",
        ),
    ],
)  # fmt: skip
def test_ranks_that_end_one_after_the_other_report_the_cause_once(
    sent: str, codes: dict[int, int], says: str, tmp_path: Path
) -> None:
    words = ["-c", RANKS, str(tmp_path), *sent.split()]
    done = programs.run(words, tmp_path, environment(tmp_path), timeout=100)
    assert done.stdout.strip() == str(codes), done.stderr
    said = re.sub(r" on \S+ \(.*?\)", "", done.stderr)
    lines = [line for line in said.splitlines() if line.startswith("threed: rank")]
    assert len(lines) == 1, lines
    assert says in lines[0]


def test_rank_0_says_so_where_no_rank_is_known_to_have_failed(tmp_path: Path) -> None:
    hearts = [Heartbeat(tmp_path, rank) for rank in range(3)]
    for rank, step in enumerate((7, 7, 6)):
        hearts[rank].beat(step, "step")
    (line,) = wait_for_names(tmp_path, 0, 3, patience=0.2)
    assert "no rank is known to have failed" in line
    assert "rank 2 on" in line
    assert wait_for_names(tmp_path, 1, 3, patience=0.2) == []
    hearts[2].mark("failed", "its own words")
    assert wait_for_names(tmp_path, 0, 3, patience=60) == []


def test_what_says_that_another_rank_is_gone() -> None:
    assert lost(
        RuntimeError("[/pytorch/third_party/gloo/…] Connection closed by peer [127.0.0.1]:4711")
    )
    assert lost(RuntimeError("NCCL error: remote process exited or there was a network error"))
    assert not lost(ValueError("Connection closed by peer"))
    assert not lost(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))


def test_torchruns_report_has_the_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    write_error_file("rank 3 was killed")
    write_error_file("something that followed from it")
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    assert ProcessFailure(0, os.getpid(), 1, str(file)).message == "rank 3 was killed"
    assert int(json.loads(file.read_text())["timestamp"]) > 0
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    failure.write_error_file("nobody reads it")


def test_a_refusing_rank_waits_for_the_message_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "REFUSAL_S", 60.0)
    first = tmp_path / "0" / "error.json"
    first.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "3" / "error.json"))
    threading.Timer(0.3, first.touch).start()
    failure.wait_for_first_rank()
    assert first.exists()
    monkeypatch.setattr(failure, "REFUSAL_S", 0.1)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    failure.wait_for_first_rank()  # other launchers have no such files
