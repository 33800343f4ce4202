"""Machines of a job of torchrun that are lost or come while it trains, each an agent with a memory of its own.

`python -m pytest tests/reliability/test_elastic_agents.py -m "grid or not grid"` does all; FAULT_RESULTS and FAULT_REPEATS are
those of `tests/fault_runs.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fault_runs import SCRIPT, environment, losses, params, prepare, repeat, saved
from tests.harness import free_port, run_script
from tests.programs import Program
from threed.checkpoint import node_memory
from threed.monitor import metrics

LAST = 14
FLAGS = (
    "--preset tiny --data.path text.txt --model.layers 2 --model.hidden 32 --train.global-batch 12 --log.wandb off"
    f" --log.every 1 --train.sample-tokens 0 --precision.dtype fp64 --train.steps {LAST} --checkpoint.every 4"
    " --checkpoint.async false"
).split()
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(600)
"""
NEXT_ONE, ALONE = ("--run.replicate", "neighbor"), ("--checkpoint.memory-every", "1")


@dataclass(frozen=True)
class Story:
    """What happens to the agents of a job: `begin` are there at first; once step 6 is done and in memory some are lost,
    with their ranks and their memory, and after step 9 some come. Ranks wait for that before steps 7 and 10.

    says: a line that is expected. exact: the ranks are as many at the end. code: of the agents that are left.
    """

    name: str
    says: str
    begin: str = "ab"
    lost: str = ""
    come: str = ""
    ranks: int = 1
    flags: tuple[str, ...] = NEXT_ONE
    kill_a_rank: bool = False
    exact: bool = False
    store: bool = False
    code: int = 0
    always: bool = False


MEMORY = r"resumed    step 6 from the memory of {} machine.*; the newest checkpoint is step 4"
SAVED = r"resumed    runs/tiny/checkpoints/step-\d+"
STORIES = [
    Story("lost", MEMORY.format(1), lost="b", always=True),
    Story("lost-without-neighbor", SAVED, lost="b", flags=ALONE),
    Story("lost-whole-states", MEMORY.format(1), lost="b", flags=(*ALONE, "--zero.stage", "0")),
    Story("lost-tensor-ranks", MEMORY.format(1), lost="b", ranks=2, flags=(*NEXT_ONE, "--parallel.tp", "2")),
    Story("lost-rank-0", MEMORY.format(1), lost="a", store=True),
    Story("lost-one-of-three", MEMORY.format(2), begin="abc", lost="c", flags=NEXT_ONE),
    Story("a-rank-killed", MEMORY.format(2), kill_a_rank=True, exact=True),
    Story("added", SAVED, begin="a", come="b"),
    Story("lost-and-added", SAVED, lost="b", come="c"),
    Story("lost-store", "", lost="a", code=1),
]  # fmt: skip


class Agents:
    """Agents of one job on this machine, each with a memory of its own."""

    def __init__(self, story: Story, folder: Path) -> None:
        self.story, self.folder, self.port = story, folder, free_port()
        self.known: dict[str, Program] = {}
        self.store = None
        if story.store:
            log = folder / "store.log"
            self.store = Program(["-c", STORE, str(self.port)], folder, os.environ, log, log)

    def start(self, name: str) -> None:
        hosts = "false" if self.known or self.store else "true"
        # A busy machine is late with its beats; whom others give up for that goes on beside them, as a job of its own.
        beats = 8 if self.story.lost else 60
        beating = f"join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt={beats},is_host={hosts}"
        line = [
            "-m", "torch.distributed.run", "--nnodes", "1:3", "--nproc-per-node", str(self.story.ranks),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}", "--rdzv-id", "job",
            "--rdzv-conf", beating, "--max-restarts", "3", "--monitor-interval", "0.2", "--local-addr", "localhost",
        ]  # fmt: skip
        (self.folder / f"memory-{name}").mkdir(exist_ok=True)
        held = ("step=7 at=step do=hold-lost", "step=10 at=step do=hold-come")
        about = environment(self.folder, ";".join(f"rank=all always=yes {fault}" for fault in held))
        about |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        about |= {node_memory.FOLDER: str(self.folder / f"memory-{name}")}
        line += [SCRIPT, *FLAGS, *self.story.flags]
        log = self.folder / f"{name}.log"
        self.known[name] = Program(line, self.folder, about, log, log)

    def ranks(self, name: str) -> list[int]:
        """The processes of an agent's ranks."""
        pid = self.known[name].pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def lose(self, name: str) -> None:
        """The machine goes: agent, ranks and memory."""
        for pid in (*self.ranks(name), self.known[name].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.known.pop(name).wait()
        shutil.rmtree(self.folder / f"memory-{name}")

    def steps(self) -> int:
        """The newest step that is told of."""
        file = self.folder / "runs" / "tiny" / "metrics.jsonl"
        return (
            max((int(row["step"]) for row in metrics.read(file)), default=0) if file.exists() else 0
        )

    def wait_for(self, step: int) -> None:
        end = time.monotonic() + 120
        while self.steps() < step:
            assert time.monotonic() < end, self.said()
            assert all(agent.poll() is None for agent in self.known.values()), self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("*.log")))

    def codes(self) -> set[int]:
        return {agent.wait(120) for agent in self.known.values()}

    def end(self) -> None:
        for agent in (*self.known.values(), *([self.store] if self.store else [])):
            agent.kill()
            agent.wait()


def wait_until(true: Callable[[], bool], agents: Agents) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, agents.said()
        time.sleep(0.05)


def step_of(entry: Path) -> int:
    """The step of a rank's entry; -1 if it is being replaced."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads(entry.read_text())["save"][1])
    return -1


def whole(story: Story, folder: Path, step: int) -> bool:
    """Whether a step is in the memory of all machines, and of their neighbors where they keep copies."""
    copied = len(story.begin) > 1 and story.flags[:2] == NEXT_ONE
    files = folder.glob("memory-*/threed-*/*/[01]/entry-*.json")
    return [step_of(file) for file in files].count(step) == len(story.begin) * story.ranks * (
        1 + copied
    )


def tell(story: Story, folder: Path) -> dict[str, Any]:
    """Plays a story to its end; what was seen."""
    prepare(folder)
    began, agents = time.monotonic(), Agents(story, folder)
    seen: dict[str, Any] = {}
    try:
        for name in story.begin:
            agents.start(name)
        agents.wait_for(6)
        wait_until(lambda: whole(story, folder, 6), agents)
        if story.kill_a_rank:
            os.kill(agents.ranks("b")[0], signal.SIGKILL)
        for name in story.lost:
            agents.lose(name)
        when = time.monotonic()
        (folder / "lost").touch()
        if story.code == 0 and (story.lost or story.kill_a_rank):
            agents.wait_for(7)
            seen["recovered_s"] = round(time.monotonic() - when, 1)
        if story.come:
            agents.wait_for(9)
            agents.start(story.come)
            wait_until(lambda: "closing signal SIGTERM" in agents.said(), agents)
        (folder / "come").touch()
        assert agents.codes() == {story.code}, agents.said()
    finally:
        agents.end()
    said = agents.said()
    assert len(re.findall(story.says, said)) >= 1, said
    return {
        "exit": story.code,
        "seconds": round(time.monotonic() - began, 1),
        **seen,
        "steps": saved(folder),
    }


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, ...], list[tuple[int, float]]]:
    """The losses of runs that nothing happened to, by flags and ranks, once they were asked for."""
    return {}


def played(story: Story, folder: Path, undisturbed: dict[Any, Any]) -> dict[str, Any]:
    """Plays a story; its losses are those of a run that nothing happened to, of as many ranks where it is exact."""
    flags = story.flags if story.exact else story.flags[2:]  # without copies
    key = (flags, len(story.begin) * story.ranks if story.exact else story.ranks)
    if key not in undisturbed:
        straight = prepare(folder / "straight")
        done = run_script(key[1], [SCRIPT, *FLAGS, *flags], straight, environment(straight))
        assert done.returncode == 0, done.stdout + done.stderr
        undisturbed[key] = losses(straight)
    seen = tell(story, folder / "run")
    if story.code:  # the same command, once more
        done = run_script(
            story.ranks, [SCRIPT, *FLAGS, *story.flags], folder / "run", environment(folder / "run")
        )
        assert done.returncode == 0, done.stdout + done.stderr
    got = losses(folder / "run")
    assert [step for step, _ in got] == [step for step, _ in undisturbed[key]]
    tolerance = 0.0 if story.exact else 1e-9
    assert [loss for _, loss in got] == pytest.approx(
        [loss for _, loss in undisturbed[key]], abs=tolerance, rel=0
    )
    return seen


@pytest.mark.parametrize("story", params(STORIES))
def test_agents_that_come_and_go(story: Story, tmp_path: Path, undisturbed: dict[Any, Any]) -> None:
    repeat(f"agents-{story.name}", tmp_path, lambda folder: played(story, folder, undisturbed))
