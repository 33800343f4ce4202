"""Runs `pretrain/gpt.py` with an injected fault, for tests.

    FAULT="rank=1 step=6 at=forward do=SIGKILL" python -m torch.distributed.run … tests/faulty.py --preset tiny …

The words of FAULT; several faults are separated by semicolons:

    rank: the ranks with the fault: "1", "0,1" or "all".
    step: the step in which it happens. At the places of a save, the step of the checkpoint.
    at: the place in the code, a key of PLACES or SAVE.
    do: a key of ACTIONS or one of DAMAGES; or the name of a signal, which the rank sends to itself,
        or with the prefix "launcher-" to its launcher; or "hold-FILE", which waits until FILE
        exists.
    always=yes: the fault also happens after a restart of the job. Otherwise only in its first attempt.
    each=yes: the fault happens in every step from `step` on. Otherwise only once.

The time of the fault is written to `fired-RANK`. CLOCK="1:7200" sets the clock of rank 1 two hours
ahead. VISIBLE_S is how long ranks wait for a file of another machine, in seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from threed.checkpoint import files, manifest
from threed.checkpoint.run_folder import Retention
from threed.checkpoint.saving import Save, Saver
from threed.cli import launch
from threed.core.native import build
from threed.data.prefetch import Prefetcher
from threed.distributed import collectives
from threed.engine import Engine
from threed.interop.huggingface import export
from threed.monitor.metrics import MetricsFile
from threed.pipeline.executor import Executor
from threed.reliability import ownership
from threed.trainer import Loop
from threed.training import final_report
from threed.zero.optimizer import Optimizer
from threed.zero.snapshot import Snapshot

PLACES: dict[str, tuple[Any, str]] = {
    "step": (Engine, "step"),
    "forward": (Executor, "_forward"),
    "collective": (collectives.Pending, "wait"),
    "update": (Optimizer, "step"),
    "data": (Prefetcher, "get"),
    "evaluate": (Engine, "evaluate"),
    "save": (Engine, "save"),
    "fsync": (os, "fsync"),
    "metrics": (MetricsFile, "append"),
    "sample": (Engine, "logits"),
    "end": (final_report, "finish"),
    "export": (final_report, "export_hf"),
    "file": (export, "stream_tensors"),
    "load": (Engine, "load"),
    "build": (build, "_compile"),
}
# The places of a save, in order. A fault at `copy` happens at the second call, in the middle of the copy.
SAVE: dict[str, tuple[Any, str]] = {
    "prepare": (Saver, "prepare"),
    "copy": (Snapshot, "_into"),
    "write": (Save, "write"),
    "block": (files, "_write_block"),
    "flush": (files, "_flush"),
    "entry": (Save, "_write_own_entry"),
    "commit": (Save, "commit"),
    "manifest": (manifest, "write_text"),
    "publish": (manifest, "publish"),
    "published": (Retention, "trust"),
    "prune": (Retention, "_delete"),
}
LATER = ("copy",)
BALLAST = Path("runs/ballast")


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def plant() -> None:
    raise RuntimeError("planted")


def twice() -> None:
    """Sends this process SIGTERM twice, and sleeps, so that the step does not end."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(4)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def fill() -> None:
    """Writes a file that takes all free space of the disk with the run folders."""
    with BALLAST.open("ab", buffering=0) as file:
        for size in (2**20, 2**16, 2**12):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def free() -> None:
    """Deletes the file of `fill` after this rank's part of an asynchronous save has ended."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    BALLAST.unlink(missing_ok=True)


def let_another_die() -> None:
    """Waits until another rank has had its fault, and half a second longer."""
    end = time.monotonic() + 60
    while not any(path.name != f"fired-{os.environ['RANK']}" for path in Path().glob("fired-*")):
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.5)


def break_disk() -> None:
    """Triggers an error of the ext4 with the run folders, which then becomes read-only."""
    device = os.stat("runs").st_dev
    name = Path(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")).name
    Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("a test")


def set_clock(seconds: float) -> None:
    """Adds `seconds` to the results of `time.time` in this process."""
    real = time.time
    time.time = lambda: real() + seconds


def damage(do: str, engine: Engine) -> None:
    """Changes values on rank 1 without an error, as faulty hardware would."""
    from tests.pipeline import test_step
    from tests.reliability import test_bad_numbers

    mine = engine.topology.rank == 1
    engine.optimizer.wait()
    if do == "nan-weight":
        test_bad_numbers.poison_weight(engine, 1)
    elif do == "nan-gradient" and mine:
        test_step.POISONS["sink"](engine, float("nan"))
    elif do == "flip-parameter" and mine:
        test_bad_numbers.flip_parameter(engine)
    elif do == "flip-moment" and mine:
        test_bad_numbers.flip_state(engine, "exp_avg")
    elif do == "flip-exponent" and mine:
        state = next(s for s in engine.optimizer.states if next(s.bucket.runs(), None))
        test_bad_numbers.flip(
            state.weight.fetch().wait(), bit=30, at=next(state.bucket.runs()).offset
        )


DAMAGES = ("nan-weight", "nan-gradient", "flip-parameter", "flip-moment", "flip-exponent")
ACTIONS: dict[str, Callable[[], object]] = {
    "raise": plant,
    "sleep": lambda: time.sleep(600),
    "spin": lambda: ctypes.PyDLL(None).sleep(600),  # sleeps in C and holds Python's lock
    "ENOSPC": lambda: fail(errno.ENOSPC),
    "EIO": lambda: fail(errno.EIO),
    "EROFS": lambda: fail(errno.EROFS),
    "fill": fill,
    "free": free,
    "break": break_disk,
    "slow": lambda: time.sleep(1),
    "clock-ahead": lambda: set_clock(7200),
    "clock-back": lambda: set_clock(-7200),
    "wait": let_another_die,
    "SIGTERM-twice": twice,
}


def act(do: str, args: tuple[Any, ...]) -> None:
    """Performs the action of a fault.

    Args:
        do: the word `do` of the fault.
        args: arguments of the call before which the fault happens.
    """
    if do in DAMAGES:
        damage(do, args[0])
    elif do in ACTIONS:
        ACTIONS[do]()
    elif do.startswith("hold-"):
        while not Path(do.removeprefix("hold-")).exists():
            time.sleep(0.05)
    else:
        os.kill(
            os.getppid() if do.startswith("launcher-") else os.getpid(),
            signal.Signals[do.removeprefix("launcher-")],
        )


def saved_step(args: tuple[Any, ...]) -> int | None:
    """Returns the step of the checkpoint in the arguments of a call during a save, or None."""
    for value in args:
        value = Path(value.name) if isinstance(value, FileIO) else getattr(value, "path", value)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, Path) and (found := re.search(r"step-(\d+)", str(value))):
            return int(found[1])
    return None


def plant_fault(fault: str) -> None:
    """Installs a fault in this process if the fault is for this rank and attempt."""
    said = dict(word.split("=") for word in fault.split())
    rank = os.environ.get("RANK", "0")
    if said["rank"] != "all" and rank not in said["rank"].split(","):
        return
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and "always" not in said:
        return
    of_save = said["at"] in SAVE
    owner, name = (SAVE | PLACES)[said["at"]]
    before = getattr(owner, name)
    one_step = Loop._one_step
    state = {"step": 0, "calls": 0, "fired": False}

    def counted(self: Loop, *args: Any) -> None:
        state["step"] = self.engine.steps + 1
        one_step(self, *args)

    def faulty(*args: Any, **keywords: Any) -> Any:
        step = (
            (saved_step(args) or state["step"])
            if of_save and said["at"] != "prune"
            else state["step"]
        )
        lasting = "each" in said or of_save or "always" in said
        due = step >= int(said["step"]) if lasting else step == int(said["step"])
        due = due and not (said["at"] == "prune" and not args[1])  # this call deletes nothing
        state["calls"] += due
        late = said["at"] in LATER and state["calls"] < 2
        if due and not late and (not state["fired"] or "each" in said):
            state["fired"] = True
            Path(f"fired-{rank}").write_text(str(time.time()))
            act(said["do"], args)
        return before(*args, **keywords)

    Loop._one_step = counted  # type: ignore[method-assign]
    setattr(owner, name, faulty)


if __name__ == "__main__":
    if "FAULT_NO_FIGURES" in os.environ:  # matplotlib takes seconds
        final_report.draw = lambda *about: []
    ownership.VISIBLE_S = float(os.environ.get("VISIBLE_S", ownership.VISIBLE_S))
    clock_of, _, ahead = os.environ.get("CLOCK", "").partition(":")
    if ahead and clock_of == os.environ.get("RANK", "0"):
        set_clock(float(ahead))
    for fault in filter(None, os.environ.get("FAULT", "").split(";")):
        plant_fault(fault)
    sys.exit(launch.main(sys.argv[1:], arch="gpt", prog="pretrain/gpt.py"))
