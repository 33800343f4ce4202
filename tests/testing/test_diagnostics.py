"""What only looks at a run does not change it: losses, norms and the final checkpoint are those of an undisturbed run,
bit for bit, also where an update runs late, or may be undone.

A checkpoint taken on the way resumes to the same final checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.configs import Case, batch, config_of, engine_of, share
from tests.harness import run_ranks
from threed.config import Config
from threed.engine import Engine, StepMetrics
from threed.zero import replicas

STEPS, AT = 4, 2  # a checkpoint is taken after step AT


def changed(case: Case, **sections: dict[str, Any]) -> Config:
    """The configuration of a case with some keys set."""
    config = config_of(case)
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()
        }
    )


def delayed(**keys: Any) -> Config:
    return changed(
        Case(dp=2, offload_optimizer="cpu", bucket_mib=0.02, **keys), zero={"delayed_update": True}
    )


def optimistic(clip: float = 1e9, **keys: Any) -> Config:
    """Updates that do not wait for the norm; with a small clip every second one is undone."""
    return changed(Case(**keys), parallel={"optimistic_step": True}, train={"grad_clip": clip})


DRIVE: dict[str, Any] = {
    "zero": 3,
    "offload_optimizer": "nvme",
    "offload_params": "nvme",
    "bucket_mib": 0.02,
}
MODES = {
    "delayed, ZeRO 1": delayed(zero=1),
    "delayed, ZeRO 2, bf16": delayed(zero=2, dtype="bf16"),
    "delayed, ZeRO 3, parameters on the device": delayed(zero=3),
    "delayed, ZeRO 3, parameters on the host, bf16": delayed(
        zero=3, offload_params="cpu", dtype="bf16"
    ),
    "delayed, ZeRO 3, parameters on a drive": delayed(zero=3, offload_params="nvme"),
    "2bw, ZeRO 0": changed(Case(pp=2, zero=0, schedule="2bw", microbatches=4)),
    "2bw, ZeRO 1, data ranks, bf16": changed(Case(dp=2, zero=1, schedule="2bw", dtype="bf16")),
    "optimistic, ZeRO 0": optimistic(pp=2, zero=0),
    "optimistic, ZeRO 1, undone": optimistic(0.05, pp=2, zero=1),
    "optimistic, ZeRO 2": optimistic(pp=2, dp=2, zero=2),
    "optimistic, ZeRO 3, undone": optimistic(0.05, pp=2, dp=2, zero=3),
    "ZeRO 1": changed(Case(dp=2, zero=1)),
    "ZeRO 2 on a drive": changed(Case(dp=2, zero=2, offload_optimizer="nvme", bucket_mib=0.02)),
    "ZeRO 3 on a drive": changed(Case(dp=2, **DRIVE)),
    "ZeRO 3, updated in the backward": changed(
        Case(dp=2, **DRIVE, order="layer"), train={"grad_clip": 1e9}
    ),
}
Diagnostic = Callable[[Engine, StepMetrics, Path], object]


def evaluate(engine: Engine, metrics: StepMetrics, folder: Path) -> object:
    return engine.evaluate(share(batch(50, engine.config.train.global_batch), engine.topology))


def logits(engine: Engine, metrics: StepMetrics, folder: Path) -> object:
    return engine.logits(batch(51, engine.config.train.global_batch)["tokens"][:1])


def save_in_background(engine: Engine, metrics: StepMetrics, folder: Path) -> object:
    return engine.start_save(folder / f"background-{engine.steps}")


DIAGNOSTICS: dict[str, Diagnostic] = {
    "metrics": lambda engine, metrics, folder: (
        metrics.loss,
        metrics.grad_norm,
        metrics.skipped,
        repr(metrics),
    ),
    "compare_replicas": lambda engine, metrics, folder: engine.compare_replicas(),
    "replicas.compared": lambda engine, metrics, folder: replicas.compared(engine.optimizer),
    "evaluate": evaluate,
    "logits": logits,
    "full_state_dict": lambda engine, metrics, folder: engine.full_state_dict(),
    "save": lambda engine, metrics, folder: engine.save(folder / f"step-{engine.steps}"),
    "start_save": save_in_background,
    "bad_steps": lambda engine, metrics, folder: engine.bad_steps(),
    "counters": lambda engine, metrics, folder: engine.counters(None),
    "settle": lambda engine, metrics, folder: engine.optimizer.wait(),
    "record": lambda engine, metrics, folder: engine.record(),
}
Outcome = tuple[list[float], list[float], bytes]


def train(config: Config, folder: Path, names: list[str], resumed: Path | None = None) -> Outcome:
    """Losses and norms of some steps, with diagnostics after each, and this rank's file of the final checkpoint."""
    engine, seen = engine_of(config), list[StepMetrics]()
    if resumed is not None:
        engine.load(resumed)
    while engine.steps < STEPS:
        full = batch(engine.steps, config.train.global_batch)
        seen.append(engine.step(share(full, engine.topology)))
        for name in names:
            DIAGNOSTICS[name](engine, seen[-1], folder)
    path = engine.save(folder / "final")
    file = path / f"rank-{engine.topology.rank:05d}.safetensors"
    return [m.loss for m in seen], [m.grad_norm for m in seen], file.read_bytes()


def disturbed(place: Path, names: list[str]) -> list[str]:
    """On every rank: the modes in which a diagnostic changes something, or a checkpoint resumes to something else."""
    wrong = []
    for number, name in enumerate(names):
        config, here = MODES[name], place / str(number)
        plain = train(config, here / "plain", [])
        if train(config, here / "all", list(DIAGNOSTICS)) != plain:
            each = [one for one in DIAGNOSTICS if train(config, here / one, [one]) != plain]
            wrong.append(f"{name}: changed by {', '.join(each) or 'all together'}")
        losses, _, final = train(config, here / "again", [], here / "all" / f"step-{AT}")
        if (losses, final) != (plain[0][AT:], plain[2]):
            wrong.append(f"{name}: a checkpoint of step {AT} resumes to something else")
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_nothing_that_looks_at_a_run_changes_it(world: int, tmp_path: Path) -> None:
    names = [
        name
        for name, config in MODES.items()
        if config.parallel.pp * (config.parallel.dp or 1) == world
    ]
    assert names
    names = names[1::2] if world > 2 else names[3::6]  # the others: below, in the grid
    for rank, wrong in enumerate(run_ranks(world, disturbed, tmp_path, names)):
        assert not wrong, (rank, wrong)


@pytest.mark.grid
@pytest.mark.parametrize("world", [2, 4])
def test_nothing_that_looks_at_a_run_changes_it_in_any_mode(world: int, tmp_path: Path) -> None:
    names = [n for n, c in MODES.items() if c.parallel.pp * (c.parallel.dp or 1) == world]
    for rank, wrong in enumerate(run_ranks(world, disturbed, tmp_path, names)):
        assert not wrong, (rank, wrong)


def resumed_elsewhere(place: Path) -> list[list[tuple[list[float], list[Tensor]]]]:
    """Losses and weights after a checkpoint of each of two modes, resumed in both: delayed updates, and 2bw."""
    modes = [delayed(zero=1), changed(Case(dp=2, zero=1, schedule="2bw", bucket_mib=0.02))]
    found = []
    for number, config in enumerate(modes):
        engine = engine_of(config)
        for step in range(AT):
            engine.step(share(batch(step, config.train.global_batch), engine.topology))
        path = engine.save(place / str(number))
        found.append([losses_from(path, mode) for mode in modes])
    return found


def losses_from(path: Path, config: Config) -> tuple[list[float], list[Tensor]]:
    """Losses of the steps after a checkpoint, and the weights on rank 0."""
    engine = engine_of(config)
    engine.load(path)
    full = [batch(step, config.train.global_batch) for step in range(AT, STEPS)]
    losses = [engine.step(share(one, engine.topology)).loss for one in full]
    return losses, list(engine.full_state_dict().values())


def test_delayed_updates_and_2bw_resume_from_each_other(tmp_path: Path) -> None:
    """Both update by gradients of weights one update older (fp64: the order of sums is all that differs)."""
    for of_rank in run_ranks(2, resumed_elsewhere, tmp_path):
        losses, weights = of_rank[0][0]
        for other, values in (of_rank[0][1], of_rank[1][0], of_rank[1][1]):
            assert other == pytest.approx(losses, rel=1e-9)
            assert all((a - b).abs().max() <= 1e-9 for a, b in zip(values, weights, strict=True))
