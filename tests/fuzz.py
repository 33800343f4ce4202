"""Compares random configurations with one process: each trains the same, or is refused.

    python -m tests.fuzz --seeds 0 100       # a line for each seed, then counts; exit code 0 if all are the same or refused

A seed determines topology, schedule (including random legal plans), ZeRO, offload, recompute,
compilation, optimizer, model, frozen parts, and whether evaluations and comparisons of replicas run
between steps. Losses, norms, weights, moments and evaluations are compared in fp64 with a tolerance
of 1e-9, because only the order of sums differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from tests.configs import MODELS, SEQ, VOCAB, batch, share, topology_of
from tests.harness import run_ranks
from tests.users_models import MODELS as USERS
from threed import models
from threed.config import Config
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.engine import Engine, StepMetrics
from threed.layers import Slicing
from threed.schedules.registry import ScheduleName
from threed.testing import RanksFailed, Results, differences, results_of

STEPS, RANKS, TOLERANCE, TIMEOUT_S = 3, 6, 1e-9, 150.0
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
        model: a name of `tests.configs.MODELS` or of `tests.users_models`.
        frozen: which parts of blocks are frozen.
        looks: whether evaluations and comparisons of replicas run between steps.
    """

    world: int
    keys: dict[str, Keys]
    model: str
    frozen: str
    looks: bool

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
        }
        return Trial(1, keys, self.model, self.frozen, self.looks)


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
    while True:
        pp, tp, dp = d.choice([1, 1, 2, 2, 2, 3, 4]), d.choice([1, 1, 2]), d.choice([1, 1, 2, 3])
        if 2 <= pp * tp * dp <= RANKS:
            break
    model = d.choice([*MODELS, *OWN])
    parallel, count = _parallel(d, pp, tp)
    zero, run = _zero(d, parallel, dp), _run(d, model)
    if run and parallel["schedule"] != "2bw" and parallel.get("optimistic_step") is not True:
        zero |= {"stage": 3, "offload_params": d.choice(["none", "cpu", "nvme"])}
    recompute = _recompute(d, tp)
    places = (zero.get("offload_optimizer"), zero.get("offload_params"), recompute.get("offload"))
    zero |= {"nvme_path": tempfile.gettempdir()} if "nvme" in places else {}
    micro = d.choice([1, 1, 2])
    train = {
        "global_batch": dp * micro * count, "micro_batch": micro, "steps": 10, "grad_clip": d.choice([0.0, 0.05, 1.0])
    }  # fmt: skip
    keys = {
        "parallel": {**parallel, "pp": pp, "tp": tp, "dp": dp}, "zero": zero, "recompute": recompute, "train": train,
        "optim": _optim(d), "run": run, "precision": {"dtype": "fp64"}, "model": _model(d, model),
    }  # fmt: skip
    frozen = d.choice(["", "", "block", "mlp"]) if model in MODELS else ""
    return Trial(pp * tp * dp, keys, model, frozen, d.random() < 0.5)


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
    more = {"loss_chunks": d.choice([1, 1, 3])}
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
    if model in MODELS and d.random() < 0.15:
        return {"compile": True, "compile_backend": "aot_eager"}
    return {}


def _optim(d: random.Random) -> Keys:
    name = d.choice(["adamw", "adamw", "sgd", "lion"])
    rate = {"adamw": 3e-3, "sgd": 3e-2, "lion": 1e-3}[name]
    return {
        "name": name,
        "lr": rate,
        "warmup": d.choice([0, 2]),
        "schedule": d.choice(["cosine", "linear", "constant"]),
    }


def _model(d: random.Random, model: str) -> Keys:
    keys = MODELS.get(model, {"heads": 4})
    tied = {"tied": d.choice([True, False])} if model in MODELS and d.random() < 0.5 else {}
    return {
        "layers": d.choice([3, 4, 6]),
        "hidden": 32,
        "seq": SEQ,
        "dropout": d.choice([0.0, 0.1]),
        **keys,
        **tied,
    }


# ------------------------------------------------------------------------------------------------------------- training


class Frozen:
    """A model with frozen parts: every second block, or the MLPs of all blocks."""

    def __init__(self, model: models.Model, part: str) -> None:
        self.model, self.part, self.slicing, self.hidden = model, part, model.slicing, model.hidden

    def layers(self) -> list[nn.Module]:
        """The layers of the model."""
        found = self.model.layers()
        for layer in (
            found[1:-1:2] if self.part == "block" else [layer.mlp for layer in found[1:-1]]
        ):
            layer.requires_grad_(False)  # type: ignore[union-attr]
        return found


def engine_of(trial: Trial) -> Engine:
    """Returns the engine of a trial on this rank."""
    config = resolve(Config.model_validate(trial.keys), VOCAB, trial.world)
    topology = topology_of(config.parallel.pp, config.parallel.tp)
    slicing = Slicing(
        topology.axis("tp"), bool(config.parallel.sequence), config.train.seed, config.zero.tile
    )
    build = USERS.get(trial.model, models.build)
    model: Any = build(config.model, slicing)
    return Engine(Frozen(model, trial.frozen) if trial.frozen else model, topology, config)


def train(trial: Trial) -> tuple[Engine, list[StepMetrics], list[float]]:
    """Returns the engine after some steps, their metrics, and the losses of evaluations."""
    engine, metrics, evaluated = engine_of(trial), list[StepMetrics](), list[float]()
    rows = trial.keys["train"]["global_batch"]
    for step in range(STEPS):
        metrics.append(engine.step(share(batch(step, rows), engine.topology)))
        if trial.looks:
            evaluated.append(
                float(engine.evaluate(share(batch(100 + step, rows), engine.topology)))
            )
            engine.compare_replicas()
    return engine, metrics, evaluated


def find_truth(trial: Trial, file: Path) -> None:
    """Writes the results of a trial on one process to a file."""
    engine, metrics, evaluated = train(trial)
    torch.save({"results": vars(results_of(engine, metrics)), "evaluated": evaluated}, file)


def compare(trial: Trial, file: Path) -> list[str]:
    """Returns this rank's differences from the results of one process."""
    engine, metrics, evaluated = train(trial)
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
    try:
        if problems := find_problems(Config.model_validate(trial.keys), trial.world):
            return Outcome("refused", "; ".join(problems))
    except ValueError as error:
        return Outcome("refused", str(error))
    try:
        run_ranks(1, find_truth, trial.truth, folder / "truth.pt", timeout=TIMEOUT_S)
        ranks = run_ranks(trial.world, compare, trial, folder / "truth.pt", timeout=TIMEOUT_S)
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
            f"{seed}: {found.kind}, {trial.world} ranks, {trial.model}, {trial.keys['parallel']}, {trial.keys['zero']}"
        )
        if found.why:
            print(f"    {found.why}", flush=True)
    print(dict(counts))
    return int(bool(set(counts) - WELL))


if __name__ == "__main__":
    sys.exit(main())
