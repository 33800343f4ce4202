"""Compares random configurations with one process: each trains the same, or is refused.

    python -m tests.fuzz --seeds 0 100       # a line for each seed, then counts; exit code 0 if all are the same or refused

A seed determines topology (with context and expert parallelism), schedule (including random legal
plans), ZeRO, offload, recompute, compilation, optimizer, model, frozen parts, documents in rows,
whether evaluations and comparisons of replicas run between steps, and whether the last step runs
from a checkpoint, in another layout. Losses, norms, weights, moments and evaluations are compared in
fp64 with a tolerance of 1e-9, because only the order of sums differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from tests.configs import (
    EXPERT_MODELS,
    MODELS,
    SEQ,
    VOCAB,
    batch,
    documents,
    share,
    topology_of,
)  # fmt: skip
from tests.harness import run_ranks
from tests.users_models import MODELS as USERS
from threed import models
from threed.config import Config
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.engine import Engine, StepMetrics
from threed.layers import Block, Slicing
from threed.schedules.registry import ScheduleName
from threed.testing import RanksFailed, Results, differences, results_of

STEPS, RANKS, TOLERANCE, TIMEOUT_S = 3, 8, 1e-9, 150.0
PLANS = [
    f"{Path(__file__).with_name('random_plans.py')}:{name}"
    for name in ("first", "second", "third", "fourth")
]
SCHEDULES = [*get_args(ScheduleName), *PLANS]
OWN = [
    "middle-losses",
    "middle-losses",
    "albert",
    "a-b-a-b-a",
    "three-way-tie",
    "used-twice",
    "frozen-middle",
]
WELL = {"same", "refused"}  # the kinds of outcomes that are correct
Keys = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """The random choices of a seed.

    Attributes:
        world: number of ranks.
        keys: the configuration, by group.
        model: a name of `tests.configs` or of `tests.users_models`.
        frozen: which parts of blocks are frozen.
        looks: whether evaluations and comparisons of replicas run between steps.
        documents: whether the rows of batches consist of several documents.
        then: the layout in which the last step runs, from a checkpoint; None: the same layout.
    """

    world: int
    keys: dict[str, Keys]
    model: str
    frozen: str = ""
    looks: bool = False
    documents: bool = False
    then: Trial | None = None

    @property
    def truth(self) -> Trial:
        """The same training on one process, in one micro-batch.

        It follows the rule of 2bw or of delayed updates if the trial uses them.
        """
        parallel: Keys = {"schedule": "2bw"} if self.keys["parallel"]["schedule"] == "2bw" else {}
        late = {"stage": 1, "offload_optimizer": "cpu", "delayed_update": True}
        zero: Keys = late if self.keys["zero"].get("delayed_update") else {"stage": 0}
        train = self.keys["train"] | {"micro_batch": self.keys["train"]["global_batch"]}
        keys = self.keys | {
            "parallel": parallel,
            "zero": zero,
            "recompute": {},
            "run": {},
            "train": train,
            "experts": self.keys["experts"] | {"room": 0.0},
        }
        return replace(self, world=1, keys=keys, then=None)

    @property
    def late(self) -> bool:
        """Whether updates take effect a step later."""
        two_versions = self.keys["parallel"]["schedule"] == "2bw"
        return two_versions or bool(self.keys["zero"].get("delayed_update"))

    @property
    def problems(self) -> list[str]:
        """Why the configuration is refused without building the model; empty if it is not."""
        try:
            return find_problems(Config.model_validate(self.keys), self.world)
        except ValueError as error:
            return [str(error)]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        kind: same, refused, different, crash or hang; the kinds in WELL are correct.
    """

    kind: str
    why: str = ""


# -------------------------------------------------------------------------------------------------------------- drawing


def draw(seed: int) -> Trial:
    """Returns the trial of a seed."""
    d = random.Random(seed)
    model = d.choice([*MODELS, *d.sample([*EXPERT_MODELS], 7), *OWN])
    built = model in MODELS or model in EXPERT_MODELS
    trial = Trial(
        1,
        {"model": _model(d, model), "optim": _optim(d, built)},
        model,
        frozen=d.choice(["", "", "block", "mlp"]) if built else "",
        looks=d.random() < 0.5,
        documents=d.random() < 0.3,
    )
    trial = _laid_out(d, trial)
    keeps = trial.late or d.random() < 0.6
    return trial if keeps else replace(trial, then=_other_layout(d, trial))


def _laid_out(d: random.Random, trial: Trial) -> Trial:
    """Returns the trial with a layout: everything except the model and the optimizer."""
    model = trial.model
    experts = model in EXPERT_MODELS
    while True:
        pp, tp, dp = d.choice([1, 1, 2, 2, 2, 3, 4]), d.choice([1, 1, 2]), d.choice([1, 1, 2, 3])
        cp = d.choice([1, 1, 1, 2, 2, 4])
        if 2 <= pp * tp * dp * cp <= RANKS and (pp * tp * dp * cp <= 6 or d.random() < 0.3):
            break
    parallel, count = _parallel(d, pp, tp)
    ep = d.choice([n for n in (1, 2, 4) if dp * cp * tp % n == 0]) if experts else 1
    parallel |= {"pp": pp, "tp": tp, "dp": dp, "cp": cp, "ep": ep}
    parallel |= {"cp_heads": d.choice(["auto", "auto", 1, cp])} if cp > 1 else {}
    zero = _zero(d, parallel, dp * cp)
    run = {} if trial.documents else _run(d, model)  # documents need blocks that are not compiled
    if run and parallel["schedule"] != "2bw" and parallel.get("optimistic_step") is not True:
        zero |= {"stage": 3, "offload_params": d.choice(["none", "cpu", "nvme"])}
    recompute = _recompute(d, tp)
    places = (zero.get("offload_optimizer"), zero.get("offload_params"), recompute.get("offload"))
    zero |= {"nvme_path": tempfile.gettempdir()} if "nvme" in places else {}
    micro = d.choice([1, 1, 2])
    train = {
        "global_batch": dp * micro * count, "micro_batch": micro, "steps": 10, "grad_clip": d.choice([0.0, 0.05, 1.0])
    }  # fmt: skip
    keys = trial.keys | {
        "parallel": parallel, "zero": zero, "recompute": recompute, "train": train, "run": run,
        "precision": {"dtype": "fp64"}, "experts": _experts(d, model, ep) if experts else {},
    }  # fmt: skip
    return replace(trial, world=pp * tp * dp * cp, keys=keys)


def _other_layout(d: random.Random, trial: Trial) -> Trial | None:
    """Returns the same training in another layout; None if few tries find none."""
    keys = trial.keys
    for _ in range(200):
        other = _laid_out(d, trial)
        room = {"room": other.keys["experts"].get("room", 0.0)}
        same = {"experts": keys["experts"] | room, "optim": keys["optim"]}
        train = other.keys["train"] | {"grad_clip": keys["train"]["grad_clip"]}
        other = replace(other, keys=other.keys | same | {"train": train})
        rows_fit = train["global_batch"] == keys["train"]["global_batch"]
        if rows_fit and not other.late and not other.problems:
            return other
    return None


def _experts(d: random.Random, model: str, ep: int) -> Keys:
    room = d.choice([0.0, 0.0, 8.0]) if ep > 1 else 0.0  # never too small
    keys = {"room": room, "capacity": d.choice([0.0, 0.0, 0.0, 0.7])}
    if ":" in EXPERT_MODELS[model]["arch"]:  # these have coefficients of their own
        return keys
    return keys | {"aux_loss": d.choice([0.0, 0.02]), "z_loss": d.choice([0.0, 0.01])}


def _parallel(d: random.Random, pp: int, tp: int) -> tuple[Keys, int]:
    """Returns the keys of the topology, and the number of micro-batches per data rank."""
    name = d.choice(SCHEDULES) if pp > 1 else d.choice(["1f1b", "gpipe", "2bw"])
    count = d.choice([pp, 2 * pp, 2 * pp, 2 * pp + 1, 5]) if pp > 1 else d.choice([1, 2, 3, 5])
    keys: Keys = {"schedule": name, "sequence": tp > 1 and d.random() < 0.6}
    if name in ("interleaved", "zb-auto"):
        keys["chunks"] = d.choice([None, 2, 3] if name == "interleaved" else [None, 1, 2])
    if pp > 1:
        keys["partition"] = d.choice(["balanced", "balanced", "uniform"])
        keys["optimistic_step"] = (
            d.choice(["auto", "auto", True, False]) if name != "2bw" else "auto"
        )
    return keys, count


def _zero(d: random.Random, parallel: Keys, dp: int) -> Keys:
    asynchronous = parallel["schedule"] == "2bw"
    stage = d.choice([0, 1] if asynchronous else [0, 1, 2, 3, 3])
    keys: Keys = {
        "stage": stage, "resident": d.choice([0, 0, 100]), "bucket_mib": d.choice([64.0, 0.01, 0.002]),
        "prefetch": d.choice([1, 2, 3]),
    }  # fmt: skip
    if dp > 1 and stage and d.random() < 0.25:
        keys["shard_size"] = d.choice([n for n in (1, 2, 3) if dp % n == 0])
    if asynchronous or not stage or parallel.get("optimistic_step") is True:
        return keys
    keys["offload_optimizer"] = d.choice(["none", "none", "cpu", "nvme"])
    if stage == 3:
        keys |= {
            "offload_params": d.choice(["none", "none", "cpu", "nvme"]),
            "tile": d.choice([1, 1, 3]),
        }
    if stage > 1 and parallel["schedule"] in ("1f1b", "gpipe") and "partition" not in parallel:
        keys["order"] = d.choice(["micro", "layer", "auto"])
    if keys["offload_optimizer"] == "cpu" and d.random() < 0.5:
        keys["delayed_update"] = True
    return keys


def _recompute(d: random.Random, tp: int) -> Keys:
    more = {"loss_chunks": d.choice([1, 1, 3]), "mlp_chunks": d.choice([1, 1, 1, 2, 3])}
    mode = d.choice(["none", "full", "full", "selective"])
    if mode == "none":
        return more
    if mode == "selective":
        ops = tuple(sorted(d.sample(["attention", "activation", "norm"], d.choice([1, 2, 3]))))
        return {**more, "mode": mode, "ops": ops, "every": d.choice([1, 2])}
    keys = {
        **more,
        "mode": mode,
        "every": d.choice([1, 2]),
        "partition": tp > 1 and d.random() < 0.5,
    }
    return keys | d.choice([{}, {}, {"arena": True}, {"offload": "cpu"}, {"offload": "nvme"}])


def _run(d: random.Random, model: str) -> Keys:
    """Returns the keys for compiling blocks.

    There are none for models of `tests.users_models`, which are not compilable.
    """
    if model in MODELS | EXPERT_MODELS and d.random() < 0.15:
        return {"compile": True, "compile_backend": "aot_eager"}
    return {}


def _optim(d: random.Random, built: bool) -> Keys:
    name = d.choice(["adamw", "adamw", "sgd", "lion"])
    rate = {"adamw": 3e-3, "sgd": 3e-2, "lion": 1e-3}[name]
    groups = d.choice(
        ["", "", "*mlp*: lr=5e-3", "*norm*: weight-decay=0.3, lr=1e-2; embedding.*: lr=1e-3"]
    )
    keys = {
        "name": name,
        "lr": rate,
        "warmup": d.choice([0, 2]),
        "schedule": d.choice(["cosine", "linear", "constant"]),
    }
    return keys | ({"groups": groups} if groups and built else {})


def _model(d: random.Random, model: str) -> Keys:
    keys = (MODELS | EXPERT_MODELS).get(model, {"heads": 4})
    built_in = "arch" in keys and ":" not in keys["arch"]
    tied = {"tied": d.choice([True, False])} if built_in and d.random() < 0.5 else {}
    ahead = {"mtp_depth": 1} if built_in and keys["arch"] != "gpt" and d.random() < 0.1 else {}
    return {
        "layers": d.choice([3, 4, 6]),
        "hidden": 32,
        "seq": SEQ,
        "dropout": d.choice([0.0, 0.1]),
        **keys,
        **tied,
        **ahead,
    }


# ------------------------------------------------------------------------------------------------------------- training


class Frozen:
    """A model with frozen parts: every second block, or the MLPs of all blocks."""

    def __init__(self, model: models.Model, part: str) -> None:
        self.model, self.part, self.slicing, self.hidden = model, part, model.slicing, model.hidden

    def layers(self) -> list[nn.Module]:
        """The layers of the model."""
        found = self.model.layers()
        blocks = [layer for layer in found if isinstance(layer, Block)]
        for layer in blocks[::2] if self.part == "block" else [block.mlp for block in blocks]:
            layer.requires_grad_(False)
        return found


def engine_of(trial: Trial) -> Engine:
    """Returns the engine of a trial on this rank."""
    config = resolve(Config.model_validate(trial.keys), VOCAB, trial.world)
    p = config.parallel
    topology = topology_of(p.pp, p.tp, p.cp)
    slicing = Slicing.of(topology, config)
    build = USERS.get(trial.model, models.build)
    model: Any = build(config.model, slicing)
    return Engine(Frozen(model, trial.frozen) if trial.frozen else model, topology, config)


def train(
    trial: Trial, engine: Engine | None = None
) -> tuple[Engine, list[StepMetrics], list[float]]:
    """Returns the engine after the remaining steps, their metrics, and the losses of evaluations.

    Args:
        trial: the trial. With `then`, its engine makes all steps except the last one.
        engine: an engine that has made some of the steps.
    """
    engine, metrics, evaluated = engine or engine_of(trial), list[StepMetrics](), list[float]()
    for step in range(engine.steps, STEPS - 1 if trial.then else STEPS):
        metrics.append(engine.step(_batch(trial, step, engine)))
        if trial.looks:
            evaluated.append(float(engine.evaluate(_batch(trial, 100 + step, engine))))
            engine.compare_replicas()
    return engine, metrics, evaluated


def _batch(trial: Trial, step: int, engine: Engine) -> dict[str, torch.Tensor]:
    """Returns this data rank's rows of a batch."""
    rows = trial.keys["train"]["global_batch"]
    whole = batch(step, rows)
    if trial.documents:
        whole["documents"] = documents(step, rows)
    return share(whole, engine.topology)


def find_truth(trial: Trial, file: Path) -> None:
    """Writes the results of a trial on one process to a file."""
    engine, metrics, evaluated = train(trial)
    torch.save({"results": vars(results_of(engine, metrics)), "evaluated": evaluated}, file)


def save(trial: Trial, folder: Path) -> tuple[list[StepMetrics], list[float]]:
    """Makes all steps except the last one, and saves a checkpoint."""
    engine, metrics, evaluated = train(trial)
    engine.save(folder)
    return metrics, evaluated


def compare(
    trial: Trial, file: Path, checkpoint: Path, before: tuple[list[StepMetrics], list[float]]
) -> list[str]:
    """Returns this rank's differences from the results of one process.

    Args:
        trial: the trial, or the layout of its last step.
        file: the results of one process.
        checkpoint: the checkpoint before the last step, if `before` has steps.
        before: metrics and evaluations of the steps before the checkpoint.
    """
    engine = engine_of(trial)
    if before[0]:
        engine.load(checkpoint)
    engine, metrics, evaluated = train(trial, engine)
    metrics, evaluated = before[0] + metrics, before[1] + evaluated
    truth = torch.load(file)
    found = differences(engine, metrics, Results(**truth["results"]), TOLERANCE)
    # The gradient of a key's bias consists only of rounding errors, and Lion uses its sign. So these biases are not compared.
    noise = "key.bias" if trial.keys["optim"]["name"] == "lion" else " "
    texts = [str(one) for one in found if not one.parameter.endswith(noise)]
    pairs = zip(evaluated, truth["evaluated"], strict=True)
    return texts + [
        f"evaluated {a}, {b} on one process"
        for a, b in pairs
        if not abs(a - b) <= TOLERANCE * abs(b)
    ]


def outcome(trial: Trial, folder: Path) -> Outcome:
    """Runs a trial and returns its outcome."""
    if problems := trial.problems:
        return Outcome("refused", "; ".join(problems))
    truth, checkpoint, last = folder / "truth.pt", folder / "checkpoint", trial
    before: tuple[list[StepMetrics], list[float]] = ([], [])
    try:
        run_ranks(1, find_truth, trial.truth, truth, timeout=TIMEOUT_S)
        if trial.then:
            before = run_ranks(trial.world, save, trial, checkpoint, timeout=TIMEOUT_S)[0]
            last = trial.then
        ranks = run_ranks(last.world, compare, last, truth, checkpoint, before, timeout=TIMEOUT_S)
    except RanksFailed as error:
        if not error.failures:
            return Outcome("hang", str(error))
        refused = all("ConfigError: " in text for text in error.failures.values())
        return Outcome("refused" if refused else "crash", str(error))
    wrong = [f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in found]
    return Outcome("different", "\n".join(wrong[:10])) if wrong else Outcome("same")


def main() -> int:
    """Runs the trials of the seeds on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 20), metavar=("FIRST", "END"))
    counts = Counter[str]()
    for seed in range(*parser.parse_args().seeds):
        trial = draw(seed)
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(trial, Path(folder))
        counts[found.kind] += 1
        print(
            f"{seed}: {found.kind}, {trial.world} ranks, {trial.model}, {trial.keys['parallel']}, {trial.keys['zero']}",
            flush=True,
        )
        if found.why:
            print(f"    {found.why}", flush=True)
    print(dict(counts))
    return int(bool(set(counts) - WELL))


if __name__ == "__main__":
    sys.exit(main())
