"""A save beside training has what was there when it began, bit for bit; and is whole, or nothing, whatever happens."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.checkpoints import train
from tests.configs import Case, config_of, engine_of, topology_of
from tests.harness import run_ranks
from threed.checkpoint import manifest, native, saving
from threed.checkpoint.files import CheckpointError
from threed.checkpoint.saving import Save, Saver
from threed.config import Config
from threed.distributed import collectives
from threed.distributed.sharding import Piece
from threed.engine import Engine
from threed.planner.memory_estimate import save_bytes
from threed.zero.snapshot import Room, Snapshot
from threed.zero.state import Record

# ------------------------------------------------------------------------------------------------------------ contents


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def beside() -> bool:
    """Whether this is the thread of a save beside training; a save that waits has nothing to be late for."""
    return threading.current_thread() is not threading.main_thread()


def late_thread() -> Any:
    """Has the thread of a save begin when the next update, in a small model, has long begun."""
    write = Save.write

    def wait_and_write(self: Save, values: Any) -> Any:
        time.sleep(0.2 * beside())
        return write(self, values)

    return mock.patch.object(Save, "write", wait_and_write)


def thread_after(updates: threading.Event) -> Any:
    """The thread of a save begins when `updates` is set."""
    write = Save.write

    def wait_and_write(self: Save, values: Any) -> Any:
        assert updates.wait(60)
        return write(self, values)

    return mock.patch.object(Save, "write", wait_and_write)


def slow_thread() -> Any:
    """Has the thread of a save take its time between tensors: updates come in the middle."""
    values = Snapshot.values

    def slowly(self: Snapshot) -> Any:
        for tensor in values(self):
            time.sleep(0.002 * beside())
            yield tensor

    return mock.patch.object(Snapshot, "values", slowly)


def in_place() -> Any:
    """Has new engines write all states from where they are."""
    return mock.patch.object(saving, "Room", return_value=Room(copies=False))


PACES: dict[str, Callable[[], list[Any]]] = {
    "as it comes": list,
    "the updates first": lambda: [late_thread()],
    "in the middle": lambda: [slow_thread()],
    "in place, the updates first": lambda: [in_place(), late_thread()],
    "in place, in the middle": lambda: [in_place(), slow_thread()],
}


def changed(case: Case, **keys: Any) -> Config:
    """The configuration of a case with other keys, by group."""
    config = config_of(case)
    return config.model_copy(
        update={
            group: getattr(config, group).model_copy(update=values)
            for group, values in keys.items()
        }
    )


CPU: dict[str, Any] = {
    "zero": 3,
    "offload_optimizer": "cpu",
    "offload_params": "cpu",
    "bucket_mib": 0.02,
}
DRIVE: dict[str, Any] = {
    "zero": 3,
    "offload_optimizer": "nvme",
    "offload_params": "nvme",
    "bucket_mib": 0.02,
}
BOTH = {
    "ZeRO 0, tensor ranks": changed(Case(tp=2, zero=0, sequence=True, dtype="fp32")),
    "ZeRO 1, bf16": changed(Case(dp=2, zero=1, dtype="bf16", bucket_mib=0.02)),
    "ZeRO 2, fp16 and its scale": changed(Case(dp=2, zero=2, dtype="fp16", bucket_mib=0.02)),
    "ZeRO 3, tiles": changed(Case(dp=2, zero=3, model="llama", tile=3, bucket_mib=0.02)),
    "on the host": changed(Case(dp=2, **CPU, dtype="bf16")),
    "on a drive": changed(Case(dp=2, **DRIVE)),
    "updated in the backward": changed(
        Case(dp=2, **DRIVE, order="layer"), train={"grad_clip": 0.0}
    ),
    "moments on a drive, parameters on the host": changed(
        Case(
            dp=2,
            zero=3,
            offload_optimizer="nvme",
            offload_params="cpu",
            bucket_mib=0.02,
            dtype="fp32",
        )
    ),
    "delayed": changed(
        Case(dp=2, **(CPU | {"zero": 1, "offload_params": "none"})), zero={"delayed_update": True}
    ),
    "optimistic, undone": changed(Case(pp=2, bucket_mib=0.02), parallel={"optimistic_step": True}),
    "optimistic": changed(
        Case(pp=2, schedule="zb-h1"), parallel={"optimistic_step": True}, train={"grad_clip": 1e9}
    ),
    "pairs": changed(
        Case(pp=2, schedule="dualpipe", microbatches=4, layers=4, dtype="bf16", bucket_mib=0.02)
    ),
    "two ways": changed(
        Case(pp=2, schedule="chimera", microbatches=2, layers=4, model="gpt-untied")
    ),
    "two versions": changed(Case(pp=2, schedule="2bw", microbatches=4, bucket_mib=0.02)),
    "two versions, bf16": changed(
        Case(pp=2, schedule="2bw", microbatches=4, dtype="bf16", model="gpt-untied")
    ),
    "Lion": changed(Case(pp=2, dtype="fp32"), optim={"name": "lion"}),
    "SGD": changed(Case(dp=2, zero=0, dtype="fp32"), optim={"name": "sgd", "momentum": 0.0}),
}


def save_both_ways(folder: Path, chosen: dict[str, list[str]]) -> list[str]:
    """What a save beside training has other than one that waits, and what training had other than without it."""
    wrong = []
    for pace, names in chosen.items():
        with ExitStack() as stack:
            for patch in PACES[pace]():
                stack.enter_context(patch)
            for name in names:
                wrong += [
                    f"{name}, {pace}: {what}"
                    for what in differences(folder / pace / name, BOTH[name])
                ]
    return wrong


def differences(folder: Path, config: Config) -> list[str]:
    """What is wrong with one configuration. One engine after the other: with two versions a step has an open end."""
    said = {"said": [1]}
    alone = engine_of(config)
    train(alone, 2)
    alone.save(folder / "two", said)
    losses = train(alone, 2)
    alone.save(folder / "four")
    engine = engine_of(config)
    train(engine, 2)
    save = engine.start_save(folder / "two beside", said)
    said["said"].append(2)
    others = train(engine, 2)
    save.wait()
    engine.save(folder / "four after")
    save = engine.start_save(folder / "four beside")  # into the memory of the one before
    train(engine, 1)
    engine.load(folder / "four beside")  # which waits for it
    engine.save(folder / "four again")
    wrong = [] if losses == others else ["training is another"]
    if engine.topology.rank == 0:
        for one, other in (
            ("two", "two beside"),
            *(("four", f"four {name}") for name in ("after", "beside", "again")),
        ):
            wrong += (
                []
                if files(folder / one) == files(folder / other)
                else [f"{one} and {other} differ"]
            )
    return wrong


def test_what_is_saved_is_what_was_there(tmp_path: Path) -> None:
    """Every third configuration in one of the orders of copies and updates; all in all of them by the grid."""
    paces, names = list(PACES), list(BOTH)[::3]
    chosen = {pace: names[number :: len(paces)] for number, pace in enumerate(paces)}
    for rank, wrong in enumerate(run_ranks(2, save_both_ways, tmp_path, chosen)):
        assert not wrong, (rank, wrong)


@pytest.mark.grid
def test_what_is_saved_is_what_was_there_in_every_order(tmp_path: Path) -> None:
    for rank, wrong in enumerate(
        run_ranks(2, save_both_ways, tmp_path, {pace: list(BOTH) for pace in PACES})
    ):
        assert not wrong, (rank, wrong)


def unwaited(folder: Path) -> list[bool]:
    """Whether updates that do not wait for a save change what it writes; copied, and in place."""
    config, found = changed(Case(dp=2, zero=2, bucket_mib=0.02)), []
    for copies in (True, False):
        updates = threading.Event()
        with thread_after(updates), nullcontext() if copies else in_place():
            engine = engine_of(config)
            train(engine, 1)
            updates.set()
            engine.save(folder / "one")
            updates.clear()
            save = engine.start_save(folder / "other")
            engine.optimizer.readers.wait = lambda state: None
            train(engine, 1)
            updates.set()
            save.wait()
        name = f"rank-{engine.topology.rank:05d}.safetensors"
        found.append((folder / "one" / name).read_bytes() != (folder / "other" / name).read_bytes())
    return found


def test_without_the_wait_the_files_are_others(tmp_path: Path) -> None:
    """So the tests above would see it."""
    assert run_ranks(2, unwaited, tmp_path) == [[True, True]] * 2


def held_by_saves(folder: Path, config: Config, copied: bool) -> tuple[int, int]:
    """Bytes of copies after two saves; and what the forecast says."""
    with ExitStack() if copied else in_place():
        engine = engine_of(config)
        for number in range(2):
            train(engine, 1)
            save = engine.start_save(folder / str(number))
            train(engine, 1)
            save.wait()
    held = engine.saver.room._buffers.values()
    told = save_bytes(config.checkpoint, engine.layout, engine.optimizer.states, gpu=False)
    return sum(buffer.nbytes for buffer in held), told


def test_copies_take_what_the_forecast_says_and_no_more(tmp_path: Path) -> None:
    every: dict[str, Any] = {"checkpoint": {"every": 2}}
    on_device = changed(Case(dp=2, zero=1, dtype="bf16", bucket_mib=0.02), **every)
    for held, told in run_ranks(2, held_by_saves, tmp_path / "all", on_device, True):
        assert held == told > 0
    for held, _ in run_ranks(2, held_by_saves, tmp_path / "in place", on_device, False):
        assert held == 0
    on_host = changed(Case(dp=2, **CPU), **every)
    for held, told in run_ranks(2, held_by_saves, tmp_path / "host", on_host, True):
        assert held == told == 0
    never = changed(Case(dp=2), checkpoint={"every": 2, "async_": False})
    assert run_ranks(2, forecast_of, never) == [0, 0]


def forecast_of(config: Config) -> int:
    """What the forecast says that saves take."""
    engine = engine_of(config)
    return save_bytes(config.checkpoint, engine.layout, engine.optimizer.states, gpu=False)


class Net(nn.Module):
    """A module of somebody's own, of which a part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)
        self.first.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


def changed_by_hand(folder: Path, stage: int, place: str) -> bool:
    """Whether a save of a wrapped module is that of before its parameters were changed by hand."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 16), "y": torch.randn(4, 8)}
    case = Case(
        dp=2,
        zero=stage,
        dtype="fp32",
        bucket_mib=0.0005,
        offload_optimizer="cpu" if place == "host" else "none",
    )
    config = changed(case, train={"global_batch": 8, "micro_batch": 2})
    with in_place() if place == "in place" else ExitStack():
        engine = Engine(Net(), topology_of(1, 1), config)
    engine.step(batch)
    engine.save(folder / "one")
    with late_thread():
        save = engine.start_save(folder / "other")
        with engine.gathered() as module, torch.no_grad():
            for param in module.parameters():
                param.add_(1)
        engine.step(batch)
        save.wait()
    return engine.topology.rank > 0 or files(folder / "one") == files(folder / "other")


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        *((1, "device"), (3, "host"), (3, "in place")),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in ((3, "device"), (1, "host"), (1, "in place"))
        ),
    ],
)
def test_what_is_changed_by_hand_afterwards_is_not_saved(
    stage: int, place: str, tmp_path: Path
) -> None:
    """Of several slices, frozen ones too."""
    assert run_ranks(2, changed_by_hand, tmp_path, stage, place) == [True, True]


def waiting_for_each_other(folder: Path) -> list[Any]:
    """Two saves in a row, one that replaces another, and one that goes on when the next one waits."""
    engine = engine_of(config_of(Case(dp=2, dtype="fp32")))
    with slow_thread():
        train(engine, 1)
        first = engine.start_save(folder / "step-1")
        second = engine.start_save(folder / "step-1b")
        assert first.done
        train(engine, 1)
        engine.save(folder / "step-2")
        assert second.done
        again = engine.start_save(folder / "step-1")
        train(engine, 1)
        assert again.wait() == folder / "step-1"
        assert (again.wait(), again.problem) == (folder / "step-1", None)
        assert again.blocked_s > 0
    steps = {p.name: native.read_manifest(p)["state"]["steps"] for p in sorted(folder.iterdir())}
    return [steps, all(native.verify(p, native.read_manifest(p)) == [] for p in folder.iterdir())]


def test_one_save_at_a_time(tmp_path: Path) -> None:
    steps = {"step-1": 2, "step-1b": 1, "step-2": 2}
    assert run_ranks(2, waiting_for_each_other, tmp_path)[0] == [steps, True]


def test_parts_of_a_state_have_copies_of_their_own() -> None:
    """They may have the same size, as numbers of a section in a copy in memory."""
    engine = engine_of(config_of(Case(dtype="fp32", layers=2, bucket_mib=0.02)))
    states = engine.optimizer.states[:2]
    places = [(state, at) for at in (0, 8) for state in states]
    wanted = [
        Record("weight", Piece("x", (16,), (at,), (8,), offset=at), state) for state, at in places
    ]
    found = [values.clone() for values in Snapshot(wanted, engine.optimizer, Room()).values()]
    expected = [state.weight.fetch().wait()[at : at + 8] for state, at in places]
    assert all(map(torch.equal, found, expected))


def room_of_one(rank_without: int) -> tuple[bool, bool]:
    """Whether there is room, where one rank has no memory; and where all have."""
    engine, found = engine_of(config_of(Case(dp=2))), []
    for free in (0 if engine.topology.rank == rank_without else 2**40, 2**40):
        with mock.patch.object(saving, "free_bytes", return_value=free):
            found.append(Saver(engine.optimizer, engine.topology, engine.config).has_room())
    return found[0], found[1]


def without_room(folder: Path) -> int:
    """A save for which there is no memory is written at once; returns the bytes of its copies."""
    engine = engine_of(config_of(Case(dp=2, dtype="fp32")))
    expected = pytest.warns(UserWarning, match="no memory for a copy: training waits")
    with (
        mock.patch.object(saving, "free_bytes", return_value=0),
        expected if engine.topology.rank == 0 else ExitStack(),
    ):
        save = engine.start_save(folder / "step")
    assert save.done
    assert save.wait() == folder / "step"
    engine.load(folder / "step")
    return len(engine.saver.room._buffers)


def test_without_memory_for_a_copy_training_waits(tmp_path: Path) -> None:
    assert run_ranks(2, without_room, tmp_path) == [0, 0]


def test_all_ranks_have_room_or_none(tmp_path: Path) -> None:
    assert run_ranks(2, room_of_one, 1) == [(False, True)] * 2


# -------------------------------------------------------------------------------------------------------------- faults


def save_on_a_full_disk(folder: Path, full: int) -> list[str]:
    """A save during which rank `full` cannot write more than 30 kB to a file; training goes on, and the next works."""
    engine = engine_of(config_of(Case(dp=2, dtype="fp32", layers=2)))
    engine.save(folder / "step-1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.topology.rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    save, said = engine.start_save(folder / "step-2"), []
    losses = train(engine, 2)
    try:
        save.wait()
    except CheckpointError as error:
        said.append(str(error))
    assert (save.done, bool(save.problem)) == (True, engine.topology.rank in (0, full))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said.append(str(sorted(path.name for path in folder.iterdir())))
    save = engine.start_save(folder / "step-2", {"bad": object()})
    try:
        save.wait()
    except CheckpointError as error:
        said.append(str(error))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        engine.start_save(folder.parent)
    engine.start_save(folder / "step-3").wait()
    engine.load(folder / "step-1")
    assert train(engine, 2) == losses
    return [*said, str(sorted(path.name for path in folder.iterdir()))]


@pytest.mark.parametrize("full", [0, 1])
def test_a_save_that_fails_is_told_on_all_ranks_and_training_goes_on(
    full: int, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("mine")
    results = run_ranks(2, save_on_a_full_disk, tmp_path / "run", full)
    assert results[0] == results[1]
    said, left, bad, after = results[0]
    assert f"rank {full} could not write" in said
    assert "earlier checkpoints are intact" in said
    assert left == "['step-1']"
    assert "not JSON serializable" in bad
    assert after == "['step-1', 'step-3']"


def failing_in_place(folder: Path) -> list[str]:
    """Saves that fail while updates wait for them; the last one does not."""
    with in_place():
        engine = engine_of(config_of(Case(dtype="fp32", layers=2, bucket_mib=0.02)))
    with slow_thread():
        for _ in range(3):
            with mock.patch(
                "threed.checkpoint.sections.is_finite", side_effect=[True] * 4 + [False]
            ):
                save = engine.start_save(folder / "step")
                train(engine, 1)
                with pytest.raises(CheckpointError, match="not finite"):
                    save.wait()
        save = engine.start_save(folder / "step")
        train(engine, 1)
        save.wait()
    return sorted(path.name for path in folder.iterdir())


def update_before_flush(folder: Path) -> bool:
    """Returns whether an update ends while the file of a save is still flushed to the disk."""
    updated = threading.Event()
    found: list[bool] = []

    def flush(_: Any) -> None:
        found.append(updated.wait(20))

    with in_place():
        engine = engine_of(config_of(Case(dtype="fp32", layers=2)))
    with mock.patch("threed.checkpoint.files._flush", flush):
        save = engine.start_save(folder / "step")
        train(engine, 1)
        updated.set()
        save.wait()
    return all(found)


def test_no_update_waits_for_a_flush(tmp_path: Path) -> None:
    assert run_ranks(1, update_before_flush, tmp_path) == [True]


def test_saves_that_fail_let_updates_go_on(tmp_path: Path) -> None:
    assert run_ranks(1, failing_in_place, tmp_path) == [["step"]]


def save_without_a_word(folder: Path) -> str:
    """A save of which rank 1 can write nothing, not even that: as on a disk that became read-only."""
    engine = engine_of(config_of(Case(dp=2, dtype="fp32", layers=2)))
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with ExitStack() as stack:
        if engine.topology.rank == 1:
            for name in ("_write_files", "_write_own_entry"):
                stack.enter_context(mock.patch.object(Save, name, side_effect=refused))
        save = engine.start_save(folder / "step-1")
        train(engine, 1)
        with pytest.raises(CheckpointError) as failed:
            save.wait()
    engine.start_save(folder / "step-2").wait()
    return f"{failed.value}; {sorted(path.name for path in folder.iterdir())}"


def test_the_first_rank_waits_for_no_word_that_a_disk_refuses(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_without_a_word, tmp_path)
    assert first == second
    assert first.startswith("rank 1 could not write ")
    assert "Read-only file system" in first
    assert first.endswith("['step-2']")


def unasked(folder: Path) -> list[str]:
    """Nobody asks how a save ended that failed; the next one says it."""
    engine = engine_of(config_of(Case(dp=2, dtype="fp32", layers=2)))
    engine.start_save(folder / "step-1", {"bad": object()})
    with (
        pytest.warns(UserWarning, match="checkpoint .*step-1 was not saved: .*not JSON")
        if engine.topology.rank == 0
        else (ExitStack())
    ):
        engine.start_save(folder / "step-2").wait()
    return sorted(path.name for path in folder.iterdir())


def test_an_error_that_nobody_asks_for_is_a_warning(tmp_path: Path) -> None:
    assert run_ranks(2, unasked, tmp_path)[0] == ["step-2"]


def save_and_fail(engine: Engine, path: Path, error: type[BaseException]) -> None:
    """A run that ends by an error while it saves."""
    with engine.saver.ending():
        engine.start_save(path)
        raise error


def given_up(folder: Path) -> list[Any]:
    """What is left where a step fails while a save is written: with time to end, and by an interrupt."""
    engine, found = engine_of(config_of(Case(dp=2, dtype="fp32", layers=2))), []
    for name, error in (("step-1", ValueError), ("step-2", KeyboardInterrupt)):
        with slow_thread(), pytest.raises(error):
            save_and_fail(engine, folder / name, error)
        collectives.barrier(engine.topology.axis("world"))
        found.append(sorted(path.name for path in folder.iterdir()))
        assert not any(thread.name == "checkpoint" for thread in threading.enumerate())
    train(engine, 1)
    return found


def test_a_run_that_fails_lets_a_save_end_and_an_interrupt_does_not(tmp_path: Path) -> None:
    found = run_ranks(2, given_up, tmp_path)[0]
    assert found[0] == ["step-1"]
    assert "step-2" not in found[1]
    assert native.verify(tmp_path / "step-1", native.read_manifest(tmp_path / "step-1")) == []


# --------------------------------------------------------------------------------------------------------------- kills


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def then_die(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that kills its process at its end."""
    return lambda *args: (call(*args), die())


def after(count: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that kills its process when it comes for the n-th time."""
    calls = iter(range(count))

    def counted(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if next(calls, None) is not None else die()

    return counted


MOMENTS: dict[str, tuple[int, Callable[[], Any]]] = {  # who dies, and where
    "copying": (1, lambda: mock.patch.object(Snapshot, "_into", after(2, Snapshot._into))),
    "writing": (1, lambda: mock.patch.object(Snapshot, "_read", after(2, Snapshot._read))),
    "an entry is left": (1, lambda: mock.patch.object(Save, "commit", die)),
    "before the first rank looks": (0, lambda: mock.patch.object(Save, "commit", die)),
    "the manifest is written": (0, lambda: mock.patch.object(manifest, "publish", die)),
    "published": (0, lambda: mock.patch.object(saving, "finish", then_die(saving.finish))),
}


def save_and_die(folder: Path, case: Case, moment: str) -> None:
    """Saves steps 2 and 4 beside training, and dies while the second is saved."""
    engine = engine_of(config_of(case))
    train(engine, 2)
    save = engine.start_save(folder / "step-2")
    train(engine, 2)
    save.wait()
    rank, patch = MOMENTS[moment]
    with patch() if engine.topology.rank == rank else ExitStack():
        engine.start_save(folder / "step-4")
        train(engine, 1)
        time.sleep(60)


def go_on(folder: Path, case: Case) -> list[list[float]]:
    """Losses of steps 3 to 6, as the newest whole checkpoint has it, and without any."""
    engine = engine_of(config_of(case))
    straight = train(engine, 6)
    resumed = engine_of(config_of(case))
    whole = [path for path in folder.iterdir() if path.suffix != ".tmp"]
    resumed.load(max(whole))
    first = resumed.steps
    losses = train(resumed, 6 - first)
    resumed.start_save(folder / "step-4").wait()  # where the broken one lies
    return [losses, straight[first:], [first]]


# "copying" is like "writing"; "before the first rank looks" is like "the manifest is written".
MOMENTS_IN_GRID = ("copying", "before the first rank looks")


@pytest.mark.seldom("the manifest is written")
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=pytest.mark.grid if moment in MOMENTS_IN_GRID else ())
        for moment in MOMENTS
    ],
)
def test_kill_9_in_the_middle_of_a_save_beside_training_loses_nothing(
    moment: str, tmp_path: Path
) -> None:
    case = Case(dp=2, dtype="fp32", layers=2, bucket_mib=0.02, dropout=0.1)
    with pytest.raises(AssertionError, match="died without a traceback, exit code -9"):
        run_ranks(2, save_and_die, tmp_path, case, moment)
    for path in tmp_path.iterdir():
        assert path.suffix == ".tmp" or native.verify(path, native.read_manifest(path)) == []
    losses, straight, first = run_ranks(2, go_on, tmp_path, case)[0]
    # All is there once the second rank has left its entry: whether the first one publishes before it ends is open.
    assert first[0] in {"published": (4,), "an entry is left": (2, 4)}.get(moment, (2,))
    assert losses == straight
