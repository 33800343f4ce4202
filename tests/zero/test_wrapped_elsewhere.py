"""Training of modules that people bring goes on elsewhere: from two ranks to one or four, from any stage to another.

All equal what plain PyTorch does without an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.zero.test_wrapped_models import (
    ROWS,
    STEPS,
    MaskedMean,
    Result,
    Sinusoid,
    Taught,
    Tuned,
    answers,
    clip,
    engine_of,
    gan_engines,
    gan_plainly,
    gan_step,
    made,
    masked,
    mine,
    pairs,
    plain_steps,
    same_weights,
    tokens,
)
from threed.distributed.topology import Topology

pytestmark = pytest.mark.filterwarnings("ignore:buffers are each rank's own")

HALF = STEPS // 2
MICRO = 2  # rows of BatchNorm's micro-batches in every world; others have one, as a teacher follows in each
BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


class InMicroBatches(nn.Module):
    """The mean over micro-batches, as an engine takes it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Tensor) -> Tensor:
        parts = {name: value.split(MICRO) for name, value in batch.items()}
        return torch.stack(
            [
                self.inner(**{name: part[n] for name, part in parts.items()})
                for n in range(ROWS // MICRO)
            ]
        ).mean()


class Clipped(Taught):
    def __init__(self) -> None:
        super().__init__("in place", inside=False)


def taught() -> nn.Module:
    return Taught("data in place")


def tuned() -> nn.Module:
    return Tuned("not given")


def following(step: int) -> dict[str, Tensor]:
    return pairs()[step]


def unlabeled(step: int) -> dict[str, Tensor]:
    return masked(step, -1)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "teacher": (taught, following),
    "clipped": (Clipped, following),
    "batch norm": (Sinusoid, tokens),
    "masked mean": (MaskedMean, unlabeled),
    "causal": (tuned, answers),
}
HERE = range(4)
Moves = dict[int, int]  # from the stage before to the one after: on one process, and on four
ALONE, FOUR = {0: 3, 1: 2, 2: 0, 3: 1}, {1: 3, 3: 0}


def plainly(kind: str) -> Result:
    build, batch = KINDS[kind]
    module = made(build)
    whole = InMicroBatches(module) if kind == "batch norm" else module
    losses, _ = plain_steps(
        whole, [batch(step) for step in range(STEPS)], clip if kind == "clipped" else None
    )
    return losses, {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}


def train(kind: str, engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(engine.step(mine(KINDS[kind][1](step))).loss)
        if kind == "clipped":
            with engine.gathered() as module:
                clip(module)
    return losses


def engine_for(kind: str, stage: int, seed: int = 0) -> Any:
    return engine_of(made(KINDS[kind][0], seed), stage, MICRO if kind == "batch norm" else 0)


def depart(folder: Path, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, list[float]]:
    """Some kinds at every stage for two steps, and a checkpoint of each."""
    losses = {}
    for kind in kinds:
        for stage in HERE:
            engine = engine_for(kind, stage)
            losses[kind] = train(kind, engine, range(HALF))
            engine.save(folder / f"{kind}-{stage}")
    return losses


def arrive(folder: Path, moves: Moves) -> dict[str, list[Result]]:
    """Two steps more from each checkpoint, at another stage; also what is in the buffers."""
    results: dict[str, list[Result]] = {}
    for kind in KINDS:
        for before, stage in moves.items():
            engine = engine_for(kind, stage, seed=9)
            engine.load(folder / f"{kind}-{before}")
            results.setdefault(kind, []).append(
                (train(kind, engine, range(HALF, STEPS)), engine.full_state_dict())
            )
    return results


def test_modules_go_on_elsewhere(tmp_path: Path) -> None:
    """fp64; the loss of transformers is computed in fp32, to about 1e-7."""
    begun = run_ranks(2, depart, tmp_path)[0]
    ended = [arrive(tmp_path, ALONE), run_ranks(4, arrive, tmp_path, FOUR)[0]]
    for kind in KINDS:
        losses, weights = plainly(kind)
        for result, full in (one for results in ended for one in results[kind]):
            assert begun[kind] + result == pytest.approx(
                losses, rel=1e-6 if kind == "causal" else 1e-9
            )
            same_weights(
                {name: value for name, value in full.items() if name not in BUFFERS}, weights
            )
            assert (full.keys() >= BUFFERS) == (kind == "batch norm")


def statistics(folder: Path, stage: int) -> tuple[dict[str, Tensor], float]:
    """What BatchNorm counted, and what an evaluation makes of it, as saved by two ranks."""
    engine = engine_for("batch norm", stage, seed=9)
    engine.load(folder / f"batch norm-{stage}")
    full = engine.full_state_dict()
    return {name: full[name] for name in BUFFERS & full.keys()}, float(
        engine.evaluate(mine(tokens(7)))
    )


def counted_by_rank_0() -> dict[str, Tensor]:
    """Plain PyTorch's training, beside which a twin with its weights sees data rank 0's rows of each step."""
    module, twin, steps = made(Sinusoid), made(Sinusoid), iter(range(HALF + 1))

    def count(trained: nn.Module) -> None:
        if (step := next(steps)) < HALF:
            mine = {name: value.chunk(2)[0].split(MICRO) for name, value in tokens(step).items()}
            with torch.no_grad():
                for name, param in twin.named_parameters():
                    param.copy_(trained.get_parameter(name))
                for x, labels in zip(mine["x"], mine["labels"], strict=True):
                    twin(x, labels)

    count(module)
    whole = InMicroBatches(module)
    plain_steps(whole, [tokens(step) for step in range(HALF)], lambda _: count(module))
    return {name: value for name, value in twin.named_buffers() if name in BUFFERS}


def test_statistics_elsewhere_are_those_of_data_rank_0(tmp_path: Path) -> None:
    """In evaluation the loss depends on them: the same on one process and on four, at every stage."""
    run_ranks(2, depart, tmp_path, ("batch norm",))
    counted = counted_by_rank_0()
    for stage in HERE:
        alone, four = statistics(tmp_path, stage), run_ranks(4, statistics, tmp_path, stage)
        for got in (alone[0], four[0][0]):
            same_weights(got, counted)
        assert [loss for _, loss in four] == pytest.approx([alone[1]] * 4, rel=1e-9)


def gan_departs(folder: Path) -> None:
    for stage in HERE:
        engines = gan_engines(stage)
        for step in range(HALF):
            gan_step(*engines, "zero_grad", step)
        for name, engine in zip(("maker", "judge"), engines, strict=True):
            engine.save_checkpoint(folder / f"{name}-{stage}")


def gan_arrives(folder: Path, moves: Moves) -> list[list[dict[str, Tensor]]]:
    found = []
    for before, stage in moves.items():
        engines = gan_engines(stage, seed=9)
        for name, engine in zip(("maker", "judge"), engines, strict=True):
            engine.load_checkpoint(folder / f"{name}-{before}")
        for step in range(HALF, STEPS):
            gan_step(*engines, "zero_grad", step)
        found.append([engine.full_state_dict() for engine in engines])
    return found


def test_two_engines_of_a_gan_go_on_elsewhere(tmp_path: Path) -> None:
    run_ranks(2, gan_departs, tmp_path)
    want = gan_plainly("zero_grad")
    for got in [*gan_arrives(tmp_path, ALONE), *run_ranks(4, gan_arrives, tmp_path, FOUR)[0]]:
        for weights, plain in zip(got, want, strict=True):
            same_weights(weights, plain)


def rounded(folder: Path, save: bool, stage: int) -> list[float]:
    """A table of positions under bf16: losses of two steps, from the beginning or from the checkpoint."""
    engine = engine_of(
        made(Sinusoid, seed=0 if save else 9).float(), stage, MICRO, precision={"dtype": "bf16"}
    )
    if not save:
        engine.load(folder / "bf16")
    losses = [
        engine.step(mine(tokens(step))).loss
        for step in range(0 if save else HALF, HALF if save else STEPS)
    ]
    if save:
        engine.save(folder / "bf16")
        losses += [engine.step(mine(tokens(step))).loss for step in range(HALF, STEPS)]
    assert Topology().rank or engine.module.table.dtype == torch.bfloat16  # type: ignore[union-attr]
    return losses


def test_buffers_in_the_compute_dtype_go_on_elsewhere(tmp_path: Path) -> None:
    """On the same ranks bit for bit, whatever the stage; on others sums of gradients round elsewhere: to a few bf16
    steps of a loss near 3."""
    went_on = run_ranks(2, rounded, tmp_path, True, 1)[0]
    for stage in HERE:
        assert run_ranks(2, rounded, tmp_path, False, stage)[0] == went_on[HALF:]
    assert rounded(tmp_path, False, 3) == pytest.approx(went_on[HALF:], rel=2**-7)
