"""Steps that are not finite, in every kind of run: skipped alike on all ranks, said, and never in a checkpoint."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.accelerator.pretend import pretending
from tests.configs import Case, config_of, engine_of, topology_of
from tests.harness import run_ranks
from tests.pipeline.test_step import POISONS, data, same, state, with_
from tests.runs import open_text, run
from tests.users_models import Alternating
from tests.zero.test_optimistic import engine_that_draws
from threed.checkpoint.files import CheckpointError
from threed.config import ConfigError
from threed.config.arguments import load
from threed.config.checks import find_problems
from threed.distributed import collectives
from threed.engine import Engine
from threed.layers import Slicing
from threed.monitor import metrics as records
from threed.ops.precision import LossScale
from threed.reliability.recheck import NondeterministicError, Recheck, culprits
from threed.training import Run, final_report
from threed.zero import replicas
from threed.zero.asynchronous import Asynchronous
from threed.zero.step_metrics import BadStepsError

NAN = float("nan")


# --------------------------------------------------------------------------------------------- skipped, in a row, ended


def is_late(engine: Engine) -> bool:
    """Whether an update comes a step later."""
    return isinstance(engine.runner, Asynchronous)


def poison_weight(engine: Engine, rank: int | None = None) -> None:
    """Makes one element of one weight NaN that this rank updates, its master too; on one rank only, or on all."""
    engine.optimizer.wait()
    with engine.optimizer.staged(engine.optimizer.states[0], ("weight",), write=True) as held:
        if rank in (None, engine.topology.rank):
            held["weight"][0] = NAN
    engine.optimizer.gatherer.complete()
    engine.optimizer.wait()


def poison_loss(engine: Engine, value: float = NAN) -> None:
    """The next step's loss comes out as `value` on this rank, with gradients that are finite."""
    inner = engine._local_loss

    def carry(*about: Any) -> Any:
        engine._local_loss = inner  # type: ignore[method-assign]
        return torch.full_like(inner(*about), value)

    engine._local_loss = carry  # type: ignore[method-assign]


COVERING = {
    1: [
        Case(layers=2), Case(layers=2, zero=3, offload_optimizer="cpu", dtype="bf16"),
        Case(layers=2, zero=3, offload_optimizer="nvme", offload_params="nvme", order="layer", bucket_mib=0.02),
    ],
    2: [
        Case(dp=2, layers=2, zero=0, dtype="fp32"),
        Case(dp=2, layers=2, zero=3, offload_optimizer="cpu", offload_params="cpu", dtype="bf16"),
        Case(dp=2, layers=2, zero=2, offload_optimizer="nvme"),
        Case(tp=2, layers=2, sequence=True, model="llama"),
        Case(pp=2, layers=2, schedule="1f1b", dtype="bf16"),
        Case(pp=2, layers=2, schedule="split-1f1b", recompute="full"),
        Case(pp=2, layers=4, schedule="2bw", microbatches=4, zero=0),
    ],
    4: [
        Case(dp=2, tp=2, layers=2, zero=1, model="qwen-tied"),
        Case(pp=2, dp=2, layers=2, zero=3, microbatches=4, dtype="bf16"),
        Case(dp=4, layers=2, zero=2, shard=2),
        Case(pp=2, tp=2, layers=4, schedule="2bw", microbatches=4, zero=0),
    ],
}  # fmt: skip


# These run always, and all of COVERING with the grid.
OFTEN = {
    world: [COVERING[world][number] for number in numbers]
    for world, numbers in {1: (2,), 2: (0, 1, 3, 6), 4: (2,)}.items()
}


def bits(engine: Engine) -> list[torch.Tensor]:
    """All that steps change, once the last one is at its end."""
    engine.finish()
    return state(engine)


def skips_of(case: Case, optimistic: bool, delayed: bool) -> list[str]:
    """What is wrong of a case: one rank's bad loss, then its bad gradient, cost a step each and change nothing else."""
    config = with_(config_of(case), train={"max_bad_steps": 3})
    if optimistic:
        config = with_(config, parallel={"optimistic_step": True})
    if delayed:
        config = with_(config, zero={"delayed_update": True})
    about = f"{case} optimistic={optimistic} delayed={delayed}"
    engine, wrong, before = engine_of(config), [], list[torch.Tensor]()
    late, bad = is_late(engine), engine.topology.rank == engine.topology.world - 1
    for step in range(5):
        if step in (1, 2):
            before = before or bits(engine)
            if bad:
                poison_loss(engine) if step == 1 else POISONS["sink"](engine, NAN)
        metrics = engine.step(data(engine, step))
        if step == 2 and not same(bits(engine), before):
            wrong.append(
                f"{about}: a skipped step changed weights, moments, or the number of updates"
            )
        row = {1: 1, 2: 2}.get(step, 0)
        if engine.bad_steps() != row or (not late and metrics.bad_steps != row):
            wrong.append(
                f"{about}: {engine.bad_steps()}, {metrics.bad_steps} in a row after step {step}"
            )
    if float(engine.optimizer.bad.skips) != 2 or float(engine.optimizer.updates) != 3:
        wrong.append(
            f"{about}: {float(engine.optimizer.bad.skips)} skipped, {float(engine.optimizer.updates)} updates"
        )
    return wrong


def ends_of(case: Case, optimistic: bool) -> list[str]:
    """What is wrong with the end of a run with a NaN in one rank's weight."""
    config = with_(config_of(case), train={"max_bad_steps": 3})
    if optimistic:
        config = with_(config, parallel={"optimistic_step": True})
    engine, ended = engine_of(config), 0
    engine.step(data(engine))
    poison_weight(engine)
    for step in range(1, 6):
        metrics = engine.step(data(engine, step))
        try:
            metrics.loss  # noqa: B018  reading it is the test
        except BadStepsError as error:
            ended = step
            if "3 steps in a row up to step 4 were skipped (loss nan" not in str(
                error
            ) and not is_late(engine):
                return [f"{case}: {error}"]
            break
    # Of steps that overlap, the update of a batch comes in the next one.
    return [] if ended == 3 + is_late(engine) else [f"{case}: ended at {ended}"]


def look_at_all(cases: Sequence[Case]) -> list[str]:
    wrong: list[str] = []
    for case in cases:
        hopeful = [False, True] if case.pp > 1 and case.schedule != "2bw" else [False]
        for optimistic in hopeful:
            wrong += skips_of(case, optimistic, False)
            wrong += ends_of(case, optimistic)
        if case.offload_optimizer == "cpu":
            wrong += skips_of(case, False, True)
    return wrong


def often_and_in_the_grid() -> list[Any]:
    """Parameters: a world, and the cases of OFTEN, or those of COVERING with the grid."""
    grid = [pytest.param(world, COVERING[world], marks=pytest.mark.grid) for world in COVERING]
    return [*OFTEN.items(), *grid]


@pytest.mark.seldom("1-cases0")
@pytest.mark.parametrize(("world", "cases"), often_and_in_the_grid())
def test_what_is_not_finite_is_skipped_alike_and_ends_a_run(world: int, cases: list[Case]) -> None:
    """Over stages of ZeRO, offload, delayed and optimistic updates, pipelines (2bw too), tensor ranks, formats."""
    for wrong in run_ranks(world, look_at_all, cases):
        assert not wrong, "\n".join(wrong)


def rows_under_fp16(_: int) -> list[int]:
    """Bad steps in a row, of a run whose loss scale falls to its smallest while every step overflows."""
    scale = LossScale(initial=8.0, hysteresis=1, window=100, minimum=2.0)
    engine = engine_of(config_of(Case(layers=2, dtype="fp16")), loss_scale=scale)
    poison_weight(engine)
    return [engine.step(data(engine, step)).bad_steps for step in range(5)]


def test_a_falling_loss_scale_is_no_row_of_bad_steps() -> None:
    """Scales 8, 4 are still falling; at 2, the smallest, steps count."""
    assert run_ranks(1, rows_under_fp16, 0) == [[0, 0, 1, 2, 3]]


# --------------------------------------------------------------------------------------------------------- checkpoints


def saved_and_loaded(case: Case, folder: str) -> list[str]:
    """What a save and a load say about one rank's values that are not finite, and what is on the disk then."""
    engine, path, said = engine_of(config_of(case)), Path(folder) / "step-1", []
    engine.step(data(engine))
    engine.save(path)
    before = sorted(entry.name for entry in Path(folder).iterdir())
    good = bits(engine)
    if engine.topology.rank == engine.topology.world - 1:
        poison_part(engine, "exp_avg_sq", math.inf)
    for target in (path, Path(folder) / "step-2"):
        with pytest.raises(CheckpointError) as refused:
            engine.save(target)
        said.append(str(refused.value))
    assert sorted(entry.name for entry in Path(folder).iterdir()) == before
    engine.load(path)  # the one that was there before is whole
    assert same(bits(engine), good)
    with mock.patch("threed.checkpoint.sections.is_finite", return_value=True):
        if engine.topology.rank == engine.topology.world - 1:
            poison_part(engine, "weight", NAN)
        engine.save(Path(folder) / "step-3")
    with pytest.raises(CheckpointError) as refused:
        engine.load(Path(folder) / "step-3")
    said.append(str(refused.value))
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        engine.step(data(engine, 1))
    engine.load(path)
    assert same(bits(engine), good)
    return said


def poison_part(engine: Engine, part: str, value: float) -> None:
    """Sets one element of this rank's part of the state, of a bucket that it saves."""
    state = next(
        s for s in engine.optimizer.states if s.bucket.group.owned and next(s.bucket.runs(), None)
    )
    with engine.optimizer.staged(state, (part,), write=True) as held:
        held[part][next(state.bucket.runs()).offset] = value


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, layers=2, zero=3, dtype="bf16", offload_optimizer="cpu"),
        Case(pp=2, layers=2, dtype="fp32", model="llama"),
    ],
)
def test_values_that_are_not_finite_are_neither_saved_nor_loaded(
    case: Case, tmp_path: Path
) -> None:
    first, second = run_ranks(2, saved_and_loaded, case, str(tmp_path))
    assert first == second
    assert all("rank 1: exp_avg_sq of " in text for text in first[:2])
    assert all(
        "not finite (NaN or infinite), and is not saved (earlier checkpoints are intact)" in t
        for t in first[:2]
    )
    assert "step-3: weight of " in first[2]
    assert "so training cannot go on from it" in first[2]


# ---------------------------------------------------------------------------------------------------------------- runs


@contextlib.contextmanager
def before_step(number: int, do: Any) -> Any:
    """Does something to the engine before its step of this number, on every rank."""
    inner = Engine.step

    def step(engine: Engine, batch: Any) -> Any:
        if engine.steps == number - 1:
            do(engine)
        return inner(engine, batch)

    with mock.patch.object(Engine, "step", step):
        yield


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def only_skipped(folder: Path) -> tuple[str, bool]:
    """A run of three steps, each of them skipped; fewer than max_bad_steps."""
    train = {"steps": 3, "eval_samples": 2, "sample_tokens": 0}
    with (
        before_step(1, lambda engine: poison_weight(engine, 0)),
        pytest.raises(BadStepsError) as ended,
    ):
        run(folder, open_text(folder), 1, train=train)
    return str(ended.value), (folder / "run" / "checkpoints").exists()


def test_a_short_run_of_skipped_steps_only_fails(tmp_path: Path) -> None:
    text, saved = run_ranks(1, only_skipped, tmp_path)[0]
    assert text.startswith("all 3 steps of the run were skipped, so the weights have not changed")
    assert not saved


KEEPS = {
    "checkpoint": {"every": 2, "keep": 2},
    "train": {"steps": 20, "max_bad_steps": 4, "eval_samples": 2},
}


def lost_weight(folder: Path) -> list[str]:
    """A weight turns NaN on one rank, after checkpoints of steps 2 and 4; then the run is resumed."""
    text, said = open_text(folder), []

    with (
        before_step(6, lambda engine: poison_weight(engine, 1)),
        pytest.raises(BadStepsError) as ended,
    ):
        said.append(run(folder, text, 2, **KEEPS))
    said.append(str(ended.value))
    said.append(run(folder, text, 2, **{**KEEPS, "train": {**KEEPS["train"], "sample_tokens": 0}}))
    return said


def test_a_run_with_a_lost_weight_ends_and_goes_on_from_its_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    """Losses after it are those of a run to which nothing happened, bit for bit."""
    saids = run_ranks(2, lost_weight, tmp_path)
    assert [said[0] for said in saids] == [saids[0][0]] * 2
    assert saids[0][0].startswith(
        "4 steps in a row up to step 9 were skipped (loss nan, gradient norm nan"
    )
    assert "resumed    " in saids[0][1]
    assert "step-4" in saids[0][1]
    run_ranks(2, undisturbed, tmp_path / "other")
    rows, others = (
        records.read(path / "run" / "metrics.jsonl") for path in (tmp_path, tmp_path / "other")
    )
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in others]
    assert len(rows) == 20
    assert rows[-1]["train/skipped_steps"] == 0


def undisturbed(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    run(folder, open_text(folder), 2, **KEEPS)


def from_before_a_nan(folder: Path) -> str:
    """A run that ends at step 4 with a NaN, which its last checkpoint has: as if nobody had looked; then its resume."""
    short = {**KEEPS, "train": {**KEEPS["train"], "stop_after": 4}}
    with (
        before_step(4, lambda engine: poison_weight(engine, 1)),
        mock.patch("threed.checkpoint.sections.is_finite", return_value=True),
    ):
        run(folder, open_text(folder), 2, **short)
    return run(folder, open_text(folder), 2, **short)


def test_a_checkpoint_with_a_nan_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    said = run_ranks(2, from_before_a_nan, tmp_path)[0]
    skipped = next(line for line in said.splitlines() if line.startswith("skipped a checkpoint: "))
    assert "step-4: weight of " in skipped
    assert "not finite (NaN or infinite), so training cannot go on from it" in skipped
    assert next(line for line in said.splitlines() if line.startswith("resumed ")).endswith(
        "step-2"
    )
    assert kept(tmp_path) == ["step-2", "step-4"]
    assert records.read(tmp_path / "run" / "metrics.jsonl")[-1]["train/skipped_steps"] == 0


def bad_batches(folder: Path) -> str:
    """Steps 4 to 6 have a gradient that is not finite; a checkpoint is due after the 4th and the 6th."""
    with contextlib.ExitStack() as stack:
        for number in (4, 5, 6):
            stack.enter_context(before_step(number, lambda engine: POISONS["sink"](engine, NAN)))
        return run(folder, open_text(folder), **{**KEEPS, "train": {**KEEPS["train"], "steps": 7}})


def test_a_checkpoint_waits_for_a_step_that_is_not_skipped(tmp_path: Path) -> None:
    """And the learning rate for the update that it belongs to."""
    said = run_ranks(1, bad_batches, tmp_path)[0]
    rows = records.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["train/skipped_steps"] for row in rows] == [0, 0, 0, 1, 2, 3, 3]
    assert rows[3]["train/lr"] == rows[4]["train/lr"] == rows[5]["train/lr"] == rows[6]["train/lr"]
    assert "step 4: 1 step skipped, 1 in a row so far (loss " in said
    assert "no checkpoint of step 4: 1 step in a row skipped; delayed" in said
    assert kept(tmp_path) == ["step-2", "step-7"]


def put_off_for_good(folder: Path) -> list[str]:
    """Every fourth checkpoint stays; those of the 4th and the 6th step are put off. Then the run goes on."""
    asked = {
        "checkpoint": {"every": 2, "keep": 2, "keep_every": 4},
        "train": {**KEEPS["train"], "stop_after": 12},
    }
    with contextlib.ExitStack() as stack:
        for number in (4, 5, 6):
            stack.enter_context(before_step(number, lambda engine: POISONS["sink"](engine, NAN)))
        run(folder, open_text(folder), **asked)
    first = kept(folder)
    run(folder, open_text(folder), **{**asked, "train": {**KEEPS["train"], "stop_after": 14}})
    return [*first, *kept(folder)]


def test_a_checkpoint_that_was_put_off_counts_as_its_multiple(tmp_path: Path) -> None:
    first = ["step-7", "step-8", "step-10", "step-12"]
    second = ["step-7", "step-8", "step-12", "step-14"]
    assert sorted(run_ranks(1, put_off_for_good, tmp_path)[0]) == sorted(first + second)


def absurd_rate(folder: Path) -> list[str]:
    """Good checkpoints of steps 2 and 4; then the same run with a learning rate of 1e38."""
    text = open_text(folder)
    run(folder, text, **{**KEEPS, "train": {**KEEPS["train"], "steps": 20, "stop_after": 4}})
    flags = {**KEEPS, "optim": {"lr": 1e38, "warmup": 0}, "precision": {"dtype": "fp32"}}
    with pytest.raises((BadStepsError, CheckpointError)) as ended:
        run(folder, text, **flags)
    return [str(ended.value), run(folder, text, **KEEPS)]


def test_a_learning_rate_of_1e38_ends_the_run_and_costs_no_good_checkpoint(tmp_path: Path) -> None:
    ended, said = run_ranks(1, absurd_rate, tmp_path)[0]
    assert "4 steps in a row up to step" in ended
    assert "step-4" in said.split("resumed")[1].splitlines()[0]


def says_nothing(folder: Path) -> str:
    """A run whose model has a NaN when it generates text."""
    inner = final_report.finish

    def finish(run: Run, *args: Any) -> None:
        poison_weight(run.engine)
        inner(run, *args)

    with mock.patch.object(final_report, "finish", finish):
        tiny = {
            "train": {
                "steps": 2,
                "global_batch": 4,
                "micro_batch": 2,
                "eval_samples": 2,
                "sample_tokens": 8,
            }
        }
        return run(folder, open_text(folder), 2, **tiny)


def test_a_model_with_a_nan_generates_a_line_that_says_so(tmp_path: Path) -> None:
    said = run_ranks(2, says_nothing, tmp_path)[0]
    assert (
        "the model writes:\nno sample: the model's logits are not finite (NaN or infinite)" in said
    )


# ------------------------------------------------------------------------------------------------------------ replicas


def flip(values: torch.Tensor, bit: int = 0, at: int = 0) -> None:
    """Flips one bit of one element, in place."""
    flat = values.view(-1).view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    )
    flat[at] ^= 1 << bit


def flip_parameter(engine: Engine, replicated: bool = False) -> str:
    """Flips the lowest bit of a parameter that is whole on this rank; its name."""
    group = next(
        g
        for g in engine.layout.groups
        if not g.sliced and (g.key.replicated or g.key.tied or not replicated)
    )
    flip(group.view(group.slots[-1], group.params))
    return group.slots[-1].spec.name


def flip_state(engine: Engine, part: str) -> str:
    """Flips the lowest bit of this rank's part of a state; the name of the parameter."""
    engine.optimizer.wait()
    state = next(s for s in engine.optimizer.states if next(s.bucket.runs(), None))
    run = next(state.bucket.runs())
    buffers = state.fetch((part,))
    flip(buffers[part].wait(), at=run.offset)
    buffers[part].store()
    return run.piece.name


def parameter(engine: Engine) -> str:
    return f"{flip_parameter(engine)} (parameters)"


def copied(engine: Engine) -> str:
    return f"{flip_parameter(engine, replicated=True)} (parameters)"


def moment(engine: Engine) -> str:
    return f"{flip_state(engine, 'exp_avg')} (exp_avg)"


def master(engine: Engine) -> str:
    return f"{flip_state(engine, 'weight')} (weight)"


DP0 = Case(dp=4, layers=2, zero=0, dtype="bf16")
HSDP = Case(dp=4, layers=2, zero=3, shard=2, dtype="bf16")
FLIPS: dict[int, list[tuple[Case, Any, int, str]]] = {
    2: [
        (Case(dp=2, layers=2, zero=0, dtype="fp32"), parameter, 1, "ranks 0 (H), 1 (H) hold different values"),
        (Case(dp=2, layers=2, zero=1), parameter, 0, "ranks 0 (H), 1 (H)"),
        (Case(tp=2, layers=2, model="llama"), copied, 1, "ranks 0 (H), 1 (H)"),
        (Case(pp=2, layers=2, zero=0), copied, 1, "ranks 0 (H), 1 (H)"),
        (Case(pp=2, layers=4, schedule="2bw", microbatches=4, zero=0), copied, 1, "ranks 0 (H), 1 (H)"),
        (Case(pp=2, layers=4, schedule="dualpipe", microbatches=4, zero=0), parameter, 0, "ranks 0 (H), 1 (H)"),
    ],
    4: [
        (DP0, parameter, 2, "rank 2 (H) has other values than ranks 0, 1, 3"),
        (DP0, moment, 0, "rank 0 (H) has other values than ranks 1, 2, 3"),
        (DP0, master, 3, "rank 3 (H) has other values than ranks 0, 1, 2"),
        (HSDP, moment, 3, "ranks 1 (H), 3 (H) hold different values"),
        (replace(HSDP, offload_optimizer="cpu", offload_params="cpu"), master, 0, "ranks 0 (H), 2 (H)"),
        (Case(dp=2, tp=2, layers=2, zero=0), copied, 3, "rank 3 (H) has other values than ranks 1, 2"),
        (Case(pp=2, dp=2, layers=2, zero=1, dtype="bf16"), parameter, 2, ""),
    ],
}  # fmt: skip


def compared_after_flips(flips: Sequence[tuple[Case, Any, int, str]]) -> list[str]:
    """What is wrong about the comparison: after steps without a fault, and after one bit of one rank was flipped."""
    wrong = []
    for case, how, rank, says in flips:
        engine = engine_of(config_of(case))
        for step in range(2):
            engine.step(data(engine, step))
        engine.compare_replicas()
        mine = how(engine) if engine.topology.rank == rank else ""
        name = collectives.exchange(mine, engine.topology.axis("world"))[rank]
        try:
            engine.compare_replicas()
            said = "nothing"
        except replicas.ReplicaError as error:
            said = str(error).replace(f"({socket.gethostname()})", "(H)")
        if says not in said or not said.startswith(f"step 2: replicas of {name} differ: "):
            wrong.append(f"{case} {how.__name__} on {rank}, {name}: {said}")
    return wrong


@pytest.mark.parametrize("world", FLIPS)
def test_a_bit_that_flips_in_a_copy_is_found_and_its_rank_named(world: int) -> None:
    """Of parameters, masters and moments; copies on data ranks, in HSDP's groups, on tensor ranks, on tied stages."""
    for wrong in run_ranks(world, compared_after_flips, FLIPS[world]):
        assert not wrong, "\n".join(wrong)


def compared_with_ties_in_turn() -> None:
    """Two blocks in turn over two stages, which complete their buckets, and update them, in different orders."""
    config = config_of(Case(pp=2, zero=2, bucket_mib=0.002))
    engine = Engine(Alternating(config.model, Slicing(seed=1)), topology_of(2, 1), config)
    engine.step(data(engine, 0))
    engine.compare_replicas()


def test_stages_compare_the_same_copies_whatever_the_order_of_their_updates() -> None:
    run_ranks(2, compared_with_ties_in_turn)


def flipped_on_the_way(folder: Path) -> str:
    """A run of two data ranks, one of which has a bit flipped before step 5; saved every second step."""
    flags = {
        **KEEPS,
        "zero": {"stage": 0},
        "run": {"dir": str(folder / "run"), "name": "run", "check_replicas": 3},
    }

    def damage(engine: Engine) -> None:
        engine.optimizer.wait()
        if engine.topology.rank == 1:
            flip_parameter(engine)

    with before_step(5, damage), pytest.raises(replicas.ReplicaError) as ended:
        run(folder, open_text(folder), 2, **flags)
    return str(ended.value)


def test_a_run_with_a_flipped_bit_ends_before_it_saves(tmp_path: Path) -> None:
    """Copies are compared after steps 3 and 6, and before each checkpoint: after 2, 4 and 6."""
    for said in run_ranks(2, flipped_on_the_way, tmp_path):
        assert said.startswith("step 6: replicas of ")
        assert "two replicas cannot show which is right" in said
    assert kept(tmp_path) == ["step-2", "step-4"]


# -------------------------------------------------------------------------------------------------------------- spikes


def scale_gradients(engine: Engine, factor: float) -> None:
    """The next step's summed gradients come out larger by a factor, on every rank."""
    inner = engine.optimizer._own_sums

    def share(gradients: Any, carry: Any) -> Any:
        engine.optimizer._own_sums = inner  # type: ignore[method-assign]
        for gradient in gradients:
            staged = gradient.storage.fetch()
            staged.wait().mul_(factor)
            staged.store()
            gradient.squares.mul_(factor**2)
        return inner(gradients, carry)

    engine.optimizer._own_sums = share  # type: ignore[method-assign]


def spiking(case: Case, folder: str) -> list[str]:
    """What is wrong with a run whose 4th and 6th steps are spikes: also optimistic, and resumed after the 5th."""
    wrong, config = [], with_(config_of(case), train={"max_norm_spike": 3.0, "grad_clip": 1e9})
    engines = [engine_of(config)]
    if case.pp > 1 and case.schedule != "2bw":
        engines.append(engine_of(with_(config, parallel={"optimistic_step": True})))
    ends = []
    with mock.patch("threed.zero.update.JUDGED_FROM", 2.0):
        for number, engine in enumerate(engines):
            norms = []
            for step in range(8):
                if step == 5:
                    engine.save(f"{folder}/{number}")
                if step in (3, 5):
                    scale_gradients(engine, 30.0)
                metrics = engine.step(data(engine, step))
                norms.append(metrics.grad_norm)
                skipped, row = (
                    (metrics.skipped, metrics.bad_steps) if not is_late(engine) else (0, 0)
                )
                want = (
                    ((step >= 3) + (step >= 5), step in (3, 5)) if not is_late(engine) else (0, 0)
                )
                if (skipped, row) != want:
                    wrong.append(
                        f"{case}: {skipped} skipped, {row} in a row after step {step}, not {want}"
                    )
            ends.append([*bits(engine), engine.optimizer.bad.mean, engine.optimizer.bad.norms])
            if not is_late(engine):
                kept_norms = [norm for step, norm in enumerate(norms) if step not in (3, 5)]
                if not math.isclose(
                    float(engine.optimizer.bad.mean),
                    sum(kept_norms) / len(kept_norms),
                    rel_tol=1e-9,
                ):
                    wrong.append(
                        f"{case}: the mean is {float(engine.optimizer.bad.mean)} of {norms}"
                    )
            if float(engine.optimizer.bad.skips) != 2:
                wrong.append(f"{case}: {float(engine.optimizer.bad.skips)} skipped")
            resumed = engine_of(engine.config)
            resumed.load(f"{folder}/{number}")
            for step in range(5, 8):
                if step == 5:
                    scale_gradients(resumed, 30.0)
                resumed.step(data(resumed, step))
            ends.append([*bits(resumed), resumed.optimizer.bad.mean, resumed.optimizer.bad.norms])
    wrong += [
        f"{case}: other weights, moments or means, run {n}"
        for n, end in enumerate(ends)
        if not same(end, ends[0])
    ]
    return wrong


@pytest.mark.seldom("case1")
@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, layers=2, zero=2, dtype="bf16"),
        Case(pp=2, layers=2, schedule="split-1f1b"),
        Case(pp=2, layers=4, schedule="2bw", microbatches=4, zero=0),
        Case(dp=2, layers=2, zero=3, offload_optimizer="cpu"),
    ],
)
def test_spikes_are_skipped_and_their_mean_is_in_checkpoints(case: Case, tmp_path: Path) -> None:
    """The same bits waiting for the norm or not, and resumed or not."""
    for wrong in run_ranks(2, spiking, case, str(tmp_path)):
        assert not wrong, "\n".join(wrong)


def flipped_exponent(case: Case) -> list[float]:
    """A high bit of the exponent of a weight that one rank alone holds flips; what follows."""
    config = with_(config_of(case), train={"max_norm_spike": 5.0, "max_bad_steps": 3})
    engine, row = engine_of(config), []
    with mock.patch("threed.zero.update.JUDGED_FROM", 3.0):
        for step in range(8):
            if step == 5 and engine.topology.rank == 1:
                state = next(s for s in engine.optimizer.states if next(s.bucket.runs(), None))
                flip(state.weight.fetch().wait(), bit=30, at=next(state.bucket.runs()).offset)
            metrics = engine.step(data(engine, step))
            row.append(metrics.bad_steps)
            if metrics.bad_steps < 3:
                assert metrics.loss > 0 or math.isnan(metrics.loss)
    with pytest.raises(BadStepsError):
        metrics.loss  # noqa: B018  reading it is the test
    return row


def test_a_bit_that_flips_in_memory_and_makes_a_number_huge_ends_a_run() -> None:
    """Of a weight that has no copy to be compared with; a low bit would not be seen."""
    assert (
        run_ranks(2, flipped_exponent, Case(dp=2, layers=2, zero=3, dtype="fp32"))
        == [[0] * 5 + [1, 2, 3]] * 2
    )


def test_nothing_of_it_is_read_on_the_host_in_a_step() -> None:
    """As rank 1 of four, with spikes judged."""
    case = Case(pp=2, dp=2, layers=2, dtype="bf16", microbatches=2)
    config = with_(config_of(case), train={"max_norm_spike": 10.0})
    with pretending(1, case.world) as device:
        engine = device.engine(config)
        device.step(engine)
        device.step(engine)
        assert device.faults == device.waits == []


# ------------------------------------------------------------------------------------------------------ computed twice


class Bent:
    """Bends one tensor on the way through one rank's module, in the first of two computations of a step, or in both."""

    def __init__(self, engine: Engine, rank: int, backward: bool, layer: int = 0) -> None:
        self.on = False
        module = engine.executor.stages[0].layers[layer]
        if engine.topology.rank == rank:
            if backward:
                module.register_full_backward_pre_hook(self.gradient)
            else:
                module.register_forward_hook(self.output)

    def output(self, module: Any, args: Any, output: Any) -> Any:
        if not self.on:
            return None
        self.on = False
        return output * NAN

    def gradient(self, module: Any, grads: Any) -> Any:
        if not self.on:
            return None
        self.on = False
        return tuple(None if grad is None else grad * NAN for grad in grads)


def rechecked(erring: tuple[Case, bool, int, bool, str]) -> list[str]:
    """What is wrong where a rank errs once, in its third step; whose weights are as if it had not."""
    case, optimistic, rank, backward, says = erring
    config = config_of(case)
    if optimistic:
        config = with_(config, parallel={"optimistic_step": True})
    scale = LossScale(initial=4.0, minimum=4.0, window=3) if case.dtype == "fp16" else None
    undisturbed, engine = engine_of(config, loss_scale=scale), engine_of(config, loss_scale=scale)
    lines = list[str]()
    recheck, bent = Recheck(engine, lines.append), Bent(engine, rank, backward)
    for step in range(4):
        undisturbed.step(data(undisturbed, step))
        bent.on = step == 2
        metrics = recheck.step(data(engine, step))
        if metrics.step != step + 1 or metrics.skipped or metrics.bad_steps:
            return [f"{erring}: {metrics.step} {metrics.skipped} {metrics.bad_steps}"]
    said = "; ".join(lines).replace(f"({socket.gethostname()})", "(H)")
    wrong = [] if said == says else [f"{erring}: {said}"]
    states = [
        repr((e.optimizer.scaler.state(), e.consumed, float(e.optimizer.bad.skips)))
        for e in (engine, undisturbed)
    ]
    if not same(bits(engine), bits(undisturbed)) or states[0] != states[1]:
        wrong.append(f"{erring}: other weights, or {states}")
    return wrong


BOTH = "one of the ranks 0 (H), 1 (H)"
TWICE = "step 3 was computed twice, with different results: "
USED = " erred; the second one was used"
ERRING: dict[int, list[tuple[Case, bool, int, bool, str]]] = {
    2: [
        (Case(dp=2, layers=2, zero=3, dtype="bf16"), False, 1, True, f"{TWICE}rank 1 (H){USED}"),
        (Case(dp=2, layers=2, zero=0, dtype="fp32"), False, 0, False, f"{TWICE}rank 0 (H){USED}"),
        (Case(dp=2, layers=2, zero=2, offload_optimizer="cpu"), False, 1, False, f"{TWICE}rank 1 (H){USED}"),
        (Case(pp=2, layers=2, dtype="bf16"), False, 0, False, f"{TWICE}rank 0 (H){USED}"),
        (Case(pp=2, layers=2, schedule="split-1f1b"), True, 1, False, f"{TWICE}rank 1 (H){USED}"),
        (Case(pp=2, layers=2, recompute="full"), True, 1, True, f"{TWICE}rank 1 (H){USED}"),
        (Case(dp=2, layers=2, dtype="fp16"), False, 1, False, f"{TWICE}rank 1 (H){USED}"),
        (Case(pp=2, layers=4, schedule="zb-v"), False, 0, False, TWICE + BOTH + USED),
        (Case(pp=2, layers=4, schedule="dualpipe", microbatches=4), False, 0, False, TWICE + BOTH + USED),
        (Case(dp=2, layers=2, zero=3, order="layer"), False, 0, False, f"{TWICE}rank 0 (H){USED}"),
        (Case(tp=2, layers=2, sequence=True), False, 0, False, TWICE + BOTH + USED),
    ],
    4: [
        (Case(pp=2, dp=2, layers=2, zero=2, dropout=0.1), False, 1, False, f"{TWICE}rank 1 (H){USED}"),
        (Case(pp=2, tp=2, layers=2), False, 3, False, f"{TWICE}one of the ranks 2 (H), 3 (H){USED}"),
    ],
}  # fmt: skip


# These run always, and all of ERRING with the grid.
ERRING_OFTEN = {2: (0, 2, 5, 7, 10), 4: (1,)}


def recheck_all(world: int, numbers: Sequence[int]) -> list[str]:
    return [problem for number in numbers for problem in rechecked(ERRING[world][number])]


@pytest.mark.seldom("2-numbers0")
@pytest.mark.parametrize(
    ("world", "numbers"),
    [
        *ERRING_OFTEN.items(),
        *(
            pytest.param(world, tuple(range(len(cases))), marks=pytest.mark.grid)
            for world, cases in ERRING.items()
        ),
    ],
)
def test_a_rank_that_errs_once_is_named_and_its_step_done_again(
    world: int, numbers: Sequence[int]
) -> None:
    """The weights are those of a run in which it did not, bit for bit."""
    for wrong in run_ranks(world, recheck_all, world, numbers):
        assert not wrong, "\n".join(wrong)


def drawn_and_counted(case: Case) -> bool:
    """Whether a step that is computed twice draws and counts once: losses, buffers and torch's generator."""
    found = []
    for disturbed in (False, True):
        engine = engine_that_draws(config_of(case))
        torch.manual_seed(engine.topology.rank)
        recheck, bent = Recheck(engine, lambda line: None), Bent(engine, 1, False, layer=1)
        losses = []
        for step in range(4):
            bent.on = disturbed and step == 2
            losses.append(recheck.step(data(engine, step)).loss)
        buffers = [
            b.tolist() for layer in engine.executor.stages[0].layers for b in layer.buffers()
        ]
        found.append(repr((losses, buffers, torch.get_rng_state().tolist())))
    return found[0] == found[1]


def test_buffers_and_generators_are_as_if_a_step_had_run_once() -> None:
    assert all(run_ranks(2, drawn_and_counted, Case(pp=2, layers=2)))


def bad_data(case: Case) -> list[str]:
    """The lines about two steps, one of which has a micro-batch with a loss that is no number whenever it runs."""
    engine, lines = engine_of(config_of(case)), list[str]()
    recheck, inner = Recheck(engine, lines.append), engine.batches.micro_batches

    def micro_batches(*about: Any, **more: Any) -> Any:
        return [
            replace(micro, weight=micro.weight * NAN)
            if micro.weight is not None and case.rows + 5 in micro.samples
            else micro
            for micro in inner(*about, **more)
        ]

    engine.batches.micro_batches = micro_batches  # type: ignore[method-assign]
    before = [bits(engine)]
    for step in range(2):
        metrics = recheck.step(data(engine, step))
        before.append(bits(engine))
    return [*lines, f"{metrics.skipped} {metrics.bad_steps} {same(before[2], before[1])}"]


@pytest.mark.parametrize(
    "case", [Case(dp=2, layers=2, zero=1), Case(pp=2, layers=2), Case(tp=2, layers=2)]
)
def test_data_that_are_bad_twice_are_named(case: Case) -> None:
    """The sixth sample of the second step, and the others of its micro-batch."""
    first = case.rows + 4
    samples = ", ".join(str(number) for number in range(first, first + 4))
    for lines in run_ranks(2, bad_data, case):
        assert lines == [
            f"step 2 was computed twice, with equal results: no machine erred, the data are bad (samples {samples})",
            "1 1 True",
        ]


def deterministic_steps(case: Case) -> None:
    """Only steps are computed deterministically; an operation that cannot be is refused by name."""
    engine, flags, ops = engine_of(config_of(case)), list[bool](), list[Any]()
    recheck = Recheck(engine, lambda line: None)

    def hook(*_: Any) -> None:
        flags.append(torch.are_deterministic_algorithms_enabled())
        for op in ops:
            op()

    layer = engine.executor.stages[0].layers[0]
    layer.register_forward_hook(hook)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        recheck.step(data(engine, 0))
        ops.append(lambda: torch.zeros(3).put_(torch.tensor([0]), torch.ones(1)))
        with pytest.raises(
            NondeterministicError, match=r"recheck-bad-steps .*: put_ does not have a deterministic"
        ):
            recheck.step(data(engine, 1))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
    assert flags
    assert all(flags)


def test_steps_are_computed_deterministically_where_bad_ones_are_computed_twice() -> None:
    deterministic_steps(Case(layers=2))
    assert not torch.are_deterministic_algorithms_enabled()


def test_who_is_blamed() -> None:
    """Of two data ranks with three stages: the first stage by what it handed on, else the last one by its gradients."""
    places = [{"dp": rank // 3, "pp": rank % 3, "tp": 0} for rank in range(6)]
    no, gradient, both = (False, False), (False, True), (True, True)
    assert culprits([no] * 6, places, True) == []
    assert culprits([no, no, no, gradient, both, both], places, True) == [4]
    assert culprits([no, no, no, gradient, gradient, no], places, True) == [4]
    assert culprits([gradient, both, both, no, no, gradient], places, True) == [1, 5]
    assert culprits([no, no, no, gradient, both, both], places, False) == [3, 4, 5]


def test_what_makes_no_sense_is_refused() -> None:
    config = config_of(Case(layers=2))
    for group, key in (("zero", "delayed_update"), ("parallel", "schedule")):
        late = with_(
            config,
            run={"recheck_bad_steps": True},
            **{group: {key: "2bw" if key == "schedule" else True}},
        )
        said = "\n".join(find_problems(late, 1))
        assert "weights change before a step could be computed again" in said
    lonely = with_(config, run={"check_replicas": 5})
    assert "one rank: there are no replicas" in "\n".join(find_problems(lonely, 1))
    with pytest.raises(ConfigError, match="must be above 1, such as 10, or 0 for none"):
        load(["--train.max-norm-spike", "0.5"])
