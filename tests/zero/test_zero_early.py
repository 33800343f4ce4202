"""Updates that begin in the backward: the bits of one at the end of a step, or none changed; what passes a drive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from benchmarks.host import drive_bytes
from tests.configs import Case, config_of, engine_of
from tests.harness import run_ranks
from tests.pipeline.test_step import data, same, state, with_
from tests.reliability.test_bad_numbers import poison_loss
from threed.config import Config
from threed.config.checks import find_problems
from threed.engine import Engine
from threed.memory.io import SwapError
from threed.memory.tiers import Drive
from threed.ops.precision import LossScale
from threed.planner.forecast import Forecast
from threed.zero.early_updates import Early
from threed.zero.layout import Bucket

ALL: dict[str, Any] = {
    "zero": 3,
    "offload_optimizer": "nvme",
    "offload_params": "nvme",
    "order": "layer",
}
CASE = Case(**ALL, microbatches=4, bucket_mib=0.02, dtype="bf16", layers=2)
NAN = float("nan")


def changed(case: Case, **groups: dict[str, object]) -> Config:
    """The configuration of a case without clipping, and with some keys changed."""
    return with_(
        config_of(case), **{**groups, "train": {"grad_clip": 0.0, **groups.get("train", {})}}
    )


def early_of(engine: Engine) -> Early:
    assert engine.optimizer.early is not None
    return engine.optimizer.early


def counting(engine: Engine) -> list[int]:
    """How many buckets each step updates in its backward, and with what comes after it."""
    early, found = early_of(engine), list[int]()
    inner = early.end

    def end(now: Any) -> set[Any]:
        found.append(len(done := inner(now)))
        return done

    early.end = end  # type: ignore[method-assign]
    return found


def whole(engine: Engine) -> list[Tensor]:
    """Copies of everything that a step changes; nothing of it is left in buffers."""
    engine.optimizer.wait()
    return state(engine)


def drive_of(engine: Engine) -> Drive:
    (drive,) = engine.layout.policy.drives
    return drive


# --------------------------------------------------------------------------------------------------- right, or not done


RIGHT: dict[str, tuple[Config, str]] = {
    "bf16": (changed(CASE), "all"),
    "fp32, whose weights are the parameters": (changed(replace(CASE, dtype="fp32")), "all"),
    "a large bucket": (changed(replace(CASE, bucket_mib=64.0, model="gpt-untied")), "all"),
    "Lion, recomputed": (changed(replace(CASE, recompute="nvme"), optim={"name": "lion"}), "all"),
    "SGD, fp16": (
        changed(replace(CASE, dtype="fp16"), optim={"name": "sgd", "momentum": 0.0}),
        "all",
    ),
    "small parameters stay whole": (changed(CASE, zero={"resident": 100}), "some"),
    "tiles": (changed(replace(CASE, model="llama", tile=3)), "all"),
    "never clipped": (changed(CASE, train={"grad_clip": 1e9}), "all"),
    "always clipped": (changed(CASE, train={"grad_clip": 1e-3}), "first"),
    "clipped now and then": (changed(CASE, train={"grad_clip": 0.9}), "any"),
    "spikes": (changed(CASE, train={"max_norm_spike": 3.0}), "all"),
}
RANKS: dict[str, tuple[Config, str]] = {
    "data ranks": (changed(replace(CASE, dp=2)), "all"),
    "data ranks, small parameters whole": (changed(replace(CASE, dp=2), zero={"resident": 100}), "some"),
    "copies of slices": (changed(replace(CASE, dp=2, shard=1)), "any"),
    "tensor ranks": (changed(replace(CASE, tp=2, sequence=True, dropout=0.1)), "any"),
    # the gradients of experts have a queue of their own, so they come in no fixed order with others
    "experts": (changed(replace(CASE, model="qwen3_moe", dp=2, ep=2)), "all"),
    "experts over tensor ranks": (changed(replace(CASE, model="qwen3_moe", tp=2, ep=2)), "any"),
}  # fmt: skip


def against_late(config: Config, updated: str, steps: int = 4) -> list[str]:
    """What an engine has other than one that updates at the end of a step."""
    engine, late = engine_of(config), engine_of(with_(config, zero={"early_update": False}))
    count, wrong, largest = counting(engine), list[str](), len(engine.optimizer.states)
    for step in range(steps):
        one, other = engine.step(data(engine, step)), late.step(data(late, step))
        if (one.loss, one.grad_norm) != (other.loss, other.grad_norm):
            wrong.append(f"loss or norm of step {step}")
        if not same(whole(engine), whole(late)):
            wrong.append(f"state after step {step}")
    begun = {"all": [largest] * 3, "first": [0] * 3, "some": count[1:], "any": count[1:]}[updated]
    if (
        count[0]
        or count[1:] != begun
        or (updated == "some" and not all(0 < n < largest for n in count[1:]))
    ):
        wrong.append(f"{count} of {largest} were updated early")
    if drive_of(engine).in_use > len(engine.optimizer.states) * 5:
        wrong.append("buffers are in use")
    return wrong


def against_late_all(cases: dict[str, tuple[Config, str]]) -> dict[str, list[str]]:
    return {name: wrong for name, case in cases.items() if (wrong := against_late(*case))}


# "tiles" also has bf16.
OFTEN = (
    "small parameters stay whole",
    "tiles",
    "clipped now and then",
    "tensor ranks",
    "experts",
)


def test_every_bit_is_as_of_an_update_at_the_end() -> None:
    assert run_ranks(
        1, against_late_all, {name: RIGHT[name] for name in OFTEN if name in RIGHT}
    ) == [{}]
    assert (
        run_ranks(2, against_late_all, {name: RANKS[name] for name in OFTEN if name in RANKS})
        == [{}] * 2
    )


@pytest.mark.grid
def test_every_bit_is_as_of_an_update_at_the_end_in_every_case() -> None:
    assert run_ranks(1, against_late_all, RIGHT) == [{}]
    assert run_ranks(2, against_late_all, RANKS) == [{}] * 2


@contextmanager
def poisoned(engine: Engine, bucket: Bucket, value: float) -> Iterator[None]:
    """In the block the gradient of a bucket has `value` in it, on this rank."""
    memory = engine.reducer.memory
    inner = memory.take_window

    def take_window(taken: Bucket) -> Tensor:
        window = inner(taken)
        if taken is bucket:
            window[0] = value
        return window

    with mock.patch.object(memory, "take_window", take_window):
        yield


def skipped(config: Config) -> list[str]:
    """What a step changes that is skipped for the gradient of one bucket, or for its loss; and whether the steps after
    it are those of an engine that has not had it."""
    scale = LossScale(initial=256.0, hysteresis=9) if config.precision.dtype == "fp16" else None
    engine, twin = (engine_of(config, loss_scale=scale) for _ in range(2))
    count, wrong, buckets = counting(engine), list[str](), engine.layout.buckets
    for step in range(3):
        engine.step(data(engine, step))
        twin.step(data(twin, step))
    for number, (bucket, value) in enumerate(
        [(buckets[0], NAN), (buckets[-1], math.inf), (None, NAN)]
    ):
        before = whole(engine)
        early_of(engine)._last_guess_right = True  # as after a step that was not skipped
        with mock.patch.object(engine.optimizer.readers, "wait") as updated:
            if bucket is None:
                poison_loss(engine)
                engine.step(data(engine, 3))
            else:
                with poisoned(engine, bucket, value):
                    engine.step(data(engine, 3))
        if count[-1] or not same(whole(engine), before):
            wrong.append(f"skip {number} changed something")
        if not updated.called:
            wrong.append(f"nothing was updated in step {number}")
        if float(engine.optimizer.bad.skips) != number + 1:
            wrong.append(f"{float(engine.optimizer.bad.skips)} skips")
    if scale is not None:
        return wrong
    for step in range(3, 6):
        engine.step(data(engine, step))
        twin.step(data(twin, step))
        if not same(whole(engine), whole(twin)):
            wrong.append(f"step {step} after those that were skipped")
    if config.train.grad_clip == 0 and count[-3:] != [0, len(buckets), len(buckets)]:
        wrong.append(f"after a wrong guess: {count}")
    return wrong


SKIPPED = [
    changed(CASE),
    changed(replace(CASE, dtype="fp16")),
    changed(CASE, train={"grad_clip": 0.5}),
]


def skipped_all(configs: Sequence[Config]) -> list[list[str]]:
    return [skipped(config) for config in configs]


def test_a_step_that_is_skipped_changes_no_bit() -> None:
    """Neither where the gradient of the first layer is not finite, which comes last, nor that of the last, nor where
    only the loss is not."""
    assert run_ranks(1, skipped_all, SKIPPED[1:]) == [[[]] * len(SKIPPED[1:])]
    assert run_ranks(2, skipped_all, [changed(replace(CASE, dp=2))]) == [[[]]] * 2


@pytest.mark.grid
def test_a_step_that_is_skipped_changes_no_bit_on_one_rank_without_clipping() -> None:
    assert run_ranks(1, skipped_all, SKIPPED[:1]) == [[[]]]


# ----------------------------------------------------------------------------------------------------------- broken off


def broken_off(folder: Path, where: str) -> list[str]:
    """What a step leaves that breaks off in its backward: by a layer's error, or by one of the drive."""
    config = changed(CASE)
    engine, twin = engine_of(config), engine_of(config)
    for step in range(2):
        engine.step(data(engine, step))
        twin.step(data(twin, step))
    before, updated, disk = whole(engine), list[int](), drive_of(engine).disk

    on: tuple[Any, str] = (
        (disk, "write") if where == "drive" else (engine.optimizer.readers, "wait")
    )
    inner = getattr(*on)

    def fail(*about: Any) -> Any:
        updated.append(1)
        if len(updated) > len(engine.layout.buckets) // 2:
            raise SwapError(5, "broken off") if where == "drive" else RuntimeError("broken off")
        return inner(*about)

    with mock.patch.object(*on, fail), pytest.raises((RuntimeError, SwapError), match="broken off"):
        engine.step(data(engine, 2))
    wrong = [] if len(updated) > 2 else ["nothing was updated before"]
    engine.save(folder / "one")
    twin.save(folder / "other")
    one, other = (
        (folder / name / "rank-00000.safetensors").read_bytes() for name in ("one", "other")
    )
    wrong += [] if one == other else ["what was saved after it"]
    if not same(whole(engine), before):
        wrong.append("it changed something")
    for step in range(2, 5):
        engine.step(data(engine, step))
        twin.step(data(twin, step))
        if not same(whole(engine), whole(twin)):
            wrong.append(f"step {step}")
    engine.load(folder / "other")
    return [*wrong, *([] if same(whole(engine), before) else ["what was loaded"])]


@pytest.mark.parametrize("where", ["drive", "layer"])
def test_a_step_that_breaks_off_leaves_states_whole(where: str, tmp_path: Path) -> None:
    assert run_ranks(1, broken_off, tmp_path, where) == [[]]


def changed_meanwhile() -> str:
    engine = engine_of(changed(CASE))
    for step in range(2):
        engine.step(data(engine, step))
    engine.reducer.finish = lambda inner=engine.reducer.finish: (
        engine.optimizer.updates.add_(1),
        inner(),
    )[1]  # type: ignore[assignment, misc]
    with pytest.raises(RuntimeError, match="during a step") as caught:
        engine.step(data(engine, 2))
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        engine.step(data(engine, 3))
    return str(caught.value)


def test_a_rate_that_changes_within_a_step_is_refused() -> None:
    assert "learning rate" in run_ranks(1, changed_meanwhile)[0]


# -------------------------------------------------------------------------------------------------------- what is moved


def moved(clip: float) -> dict[str, float]:
    """GB a step by the drive's own count, and by the kernel's; what it reserves by its own count and the forecast's."""
    wide = {"hidden": 256, "ffn": 1024, "vocab": 4096}
    config = changed(
        replace(CASE, model="gpt-untied", bucket_mib=1.0), model=wide, train={"grad_clip": clip}
    )
    engine, moved = engine_of(config), Counter[str]()
    drive = drive_of(engine)
    for step in range(2):
        engine.step(data(engine, step))
    drive.settle()

    def counted(name: str) -> Any:
        own = getattr(drive.disk, name)

        def call(offset: int, tensor: Tensor) -> Any:
            moved[name] += tensor.nbytes
            return own(offset, tensor)

        return mock.patch.object(drive.disk, name, call)

    before = drive_bytes()
    with counted("read"), counted("write"):
        engine.step(data(engine, 2))
    drive.settle()
    seen = [now - then for now, then in zip(drive_bytes(), before, strict=True)]
    psi, tables = sum(group.numel for group in engine.layout.groups), 2 * 4096 * 256
    forecast = Forecast.of(config, 1).ranks[0].bytes["offloaded"]
    return {
        "read": moved["read"], "write": moved["write"], "read, kernel": seen[0], "write, kernel": seen[1],
        "psi": psi, "tables": tables, "reserved": drive.disk._size, "forecast": forecast, "in use": drive.in_use,
    }  # fmt: skip


def test_what_passes_the_drive() -> None:
    """States once each way, parameters twice in and once out, but for the two tables that backward does not read; and
    gradients only where they might be clipped. On the drive there is twice the state, and a gradient."""
    for clip, gradients in ((0.0, 0), (1e9, 4)):
        (found,) = run_ranks(1, moved, clip)
        psi = found["psi"]
        assert found["read"] == pytest.approx((12 + 2 * 2) * psi - 2 * found["tables"], rel=0.01)
        assert found["write"] == pytest.approx((12 + 2 + gradients) * psi, rel=0.01)
        if found["read, kernel"]:  # where that is a real drive
            assert found["read, kernel"] == pytest.approx(found["read"], rel=0.05)
            assert found["write, kernel"] == pytest.approx(found["write"], rel=0.05)
        assert found["reserved"] == pytest.approx((2 * 14 + 4) * psi, rel=0.02)
        assert found["forecast"] == pytest.approx(found["reserved"], rel=0.01)
        assert found["in use"] == 0


# ----------------------------------------------------------------------------------------------------- where it is done


PLACES: list[tuple[dict[str, object], bool]] = [
    ({}, True),
    ({"early_update": True}, True),
    ({"early_update": False}, False),
    ({"order": "micro"}, False),
    ({"offload_params": "cpu"}, False),
    ({"offload_optimizer": "cpu"}, False),
]


def where_it_is_done(places: Sequence[dict[str, object]]) -> list[bool]:
    engines = (engine_of(changed(CASE, zero=dict(zero))) for zero in places)
    return [engine.optimizer.early is not None for engine in engines]


def test_where_it_is_done_by_itself() -> None:
    assert run_ranks(1, where_it_is_done, [zero for zero, _ in PLACES]) == [
        [done for _, done in PLACES]
    ]


@pytest.mark.parametrize("key", ["order", "offload_optimizer", "offload_params"])
def test_what_it_needs_is_said(key: str) -> None:
    other = {"order": "micro", "offload_optimizer": "cpu", "offload_params": "cpu"}
    (problem,) = find_problems(changed(CASE, zero={"early_update": True, key: other[key]}), 1)
    flag, value = f"--zero.{key.replace('_', '-')}", "layer" if key == "order" else "nvme"
    assert problem.startswith(f"--zero.early-update true with {flag} {other[key]}: ")
    assert problem.endswith(f"use {flag} {value}, or --zero.early-update auto")
