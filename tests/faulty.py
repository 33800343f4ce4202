"""`pretrain/gpt.py` with one fault in it, for tests: a rank does something in a step, at a place in the code.

FAULT="rank=1 step=6 at=forward do=SIGKILL" python -m torch.distributed.run … tests/faulty.py --preset tiny …

Ranks are "1", "0,1" or "all"; `at` is a key of PLACES; `do` is the name of a signal, which the rank sends to itself,
or to its launcher after "launcher-"; or a key of ACTIONS; or "hold-" and the name of a file, until which is there it
waits. It happens once, in the first attempt of a job, or in each with FAULT_ATTEMPTS=all; when is written into
`fired-RANK`. Several faults are parted by semicolons.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from threed import collectives, final_report, launch
from threed.data import Prefetcher
from threed.engine import Engine
from threed.pipeline.executor import Executor
from threed.trainer import Trainer
from threed.zero.optimizer import Optimizer

PLACES: dict[str, tuple[Any, str]] = {
    "step": (Engine, "step"),
    "forward": (Executor, "_forward"),
    "collective": (collectives.Pending, "wait"),
    "update": (Optimizer, "step"),
    "data": (Prefetcher, "get"),
    "evaluate": (Engine, "evaluate"),
    "save": (Engine, "save"),
    "fsync": (os, "fsync"),
    "sample": (Engine, "logits"),
}


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def plant() -> None:
    raise RuntimeError("planted")


def twice() -> None:
    """Gets SIGTERM twice, while it would never come to the end of its step."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(4)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


ACTIONS: dict[str, Callable[[], object]] = {
    "raise": plant,
    "sleep": lambda: time.sleep(600),
    "spin": lambda: ctypes.PyDLL(None).sleep(600),  # in C, with the lock that Python's threads need
    "ENOSPC": lambda: fail(errno.ENOSPC),
    "EROFS": lambda: fail(errno.EROFS),
    "slow": lambda: time.sleep(1),
    "SIGTERM-twice": twice,
}


def act(do: str) -> None:
    """Does what a fault says."""
    if do in ACTIONS:
        ACTIONS[do]()
    elif do.startswith("hold-"):
        while not Path(do.removeprefix("hold-")).exists():
            time.sleep(0.05)
    else:
        os.kill(
            os.getppid() if do.startswith("launcher-") else os.getpid(), signal.Signals[do.removeprefix("launcher-")]
        )


def plant_fault(fault: str) -> None:
    """Puts a fault into this process, if it is of its rank."""
    said = dict(word.split("=") for word in fault.split())
    rank = os.environ.get("RANK", "0")
    if said["rank"] != "all" and rank not in said["rank"].split(","):
        return
    owner, name = PLACES[said["at"]]
    before, one_step, state = getattr(owner, name), Trainer._one_step, {"step": 0, "fired": False}

    def counted(self: Trainer, *args: Any) -> None:
        state["step"] = self.engine.steps + 1
        one_step(self, *args)

    def faulty(*args: Any, **keywords: Any) -> Any:
        due = state["step"] >= int(said["step"]) if said["do"] == "slow" else state["step"] == int(said["step"])
        if due and (not state["fired"] or said["do"] == "slow"):
            state["fired"] = True
            Path(f"fired-{rank}").write_text(str(time.time()))
            act(said["do"])
        return before(*args, **keywords)

    Trainer._one_step = counted  # type: ignore[method-assign]
    setattr(owner, name, faulty)


if __name__ == "__main__":
    if "FAULT_NO_FIGURES" in os.environ:  # seconds of matplotlib
        final_report.draw = lambda *about: []
    attempts = ("0",) if "FAULT_ATTEMPTS" not in os.environ else (os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") in attempts and "FAULT" in os.environ:
        for fault in os.environ["FAULT"].split(";"):
            plant_fault(fault)
    sys.exit(launch.main(sys.argv[1:], arch="gpt", prog="pretrain/gpt.py"))
