"""Compares random configurations with one process: each trains the same, or is refused.

    python -m tests.fuzz --seeds 0 100       # a line for each seed, then counts; exit code 0 if all are the same or refused

A seed determines topology (with context and expert parallelism), schedule (including random legal
plans), ZeRO, offload, recompute, compilation, optimizer, model, frozen parts, documents in rows,
whether evaluations and comparisons of replicas run between steps, and whether the last step runs
from a checkpoint, in another layout. Seeds from FURTHER on draw more: see `_further`. Losses, norms,
weights, moments and evaluations are compared in fp64 with a tolerance of 1e-9, because only the order
of sums differs.
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
from threed import models, schedules
from threed.config import Config
from threed.config.checks import find_problems
from threed.config.resolution import resolve
from threed.engine import Engine, StepMetrics
from threed.layers import Block, Slicing
from threed.schedules.registry import ScheduleName
from threed.testing import RanksFailed, Results, differences, results_of
from threed.zero import update
from threed.zero.step_metrics import DataError

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
# Seeds below give the same trials as before further features were added.
FURTHER = 60_000
EXAMPLES = {
    name: {"arch": f"{Path(__file__).parents[1]}/examples/{name}", "heads": 4}
    for name in (
        "sparse_attention.py:SparseModel",
        "latent_attention.py:LatentModel",
        "sliding_window.py:SlidingWindow",
        "convolution_stem.py:ConvolutionModel",
        "custom_model.py:ParallelModel",
    )
}
MORE_OWN = ["two-ties", "frozen-embedding", "kernels", "hourglass", "latent", "two-tensors", "cast"]
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
        gaps: whether no label of some rows is counted; in the second step of no row, so it is skipped.
        background: whether the checkpoint is written while the next step runs.
        exchanges: whether weights are collected and set again between steps.
        sizes: whether batches differ in their numbers of rows and in their sequence lengths.
        faults: whether a step with invalid data, and one that raises an error, come before each step.
    """

    world: int
    keys: dict[str, Keys]
    model: str
    frozen: str = ""
    looks: bool = False
    documents: bool = False
    then: Trial | None = None
    gaps: bool = False
    background: bool = False
    exchanges: bool = False
    sizes: bool = False
    faults: bool = False

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
        return any(_rule(self))

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
    more = random.Random(f"further {seed}") if seed >= FURTHER else None
    trial = _further(more, trial) if more else trial
    trial = _laid_out(d, trial)
    trial = _further_layout(more, trial) if more else trial
    keeps = (trial.late and not more) or d.random() < 0.6
    return trial if keeps else replace(trial, then=_other_layout(d, trial))


def _further(d: random.Random, trial: Trial) -> Trial:
    """Returns the trial with further features of its model, optimizer, batches and program."""
    keys = dict(trial.keys)
    if trial.model in OWN or d.random() < 0.15:
        trial = replace(trial, model=d.choice([*EXAMPLES, *MORE_OWN]), frozen="")
        model = {name: keys["model"][name] for name in ("layers", "hidden", "seq", "dropout")}
        keys["model"] = model | EXAMPLES.get(trial.model, {"heads": 4})
        keys["optim"] = {name: value for name, value in keys["optim"].items() if name != "groups"}
    other = d.choice(["sgd, lr=1e-2", "lion, lr=1e-3", "adamw, lr=2e-3"])
    groups = d.choice([None, None, f"*norm*: name={other}", f"*.weight: name={other}; *0*: lr=0"])
    keys["optim"] |= {"groups": groups} if groups else {}
    keys["optim"] |= {"schedule": "wsd"} if d.random() < 0.1 else {}
    if keys["model"].get("mtp_depth"):
        keys["model"] = keys["model"] | {"mtp_depth": d.choice([1, 2, 3])}
    names = {"gaps": 0.3, "background": 0.5, "exchanges": 0.3, "sizes": 0.3, "faults": 0.2}
    return replace(trial, keys=keys, **{name: d.random() < p for name, p in names.items()})


def _further_layout(d: random.Random, trial: Trial) -> Trial:
    """Returns the trial with further features of its layout."""
    keys = {group: dict(values) for group, values in trial.keys.items()}
    parallel, zero = keys["parallel"], keys["zero"]
    if parallel["tp"] > 1 and not keys["run"]:
        keys["recompute"]["gathered"] = d.choice(["auto", True, True, False])
    if d.random() < 0.1 and parallel["pp"] == 1:
        parallel["schedule"] = "1f1b"
        drive = {
            "offload_params": "nvme",
            "offload_optimizer": "nvme",
            "nvme_path": tempfile.gettempdir(),
        }
        zero |= {"stage": 3, "order": "layer", "delayed_update": False, **drive}
        zero["early_update"] = d.choice(["auto", True, False])
    if parallel["pp"] > 1 and trial.model in MODELS | EXPERT_MODELS and d.random() < 0.4:
        parallel["partition"] = _partition(d, keys) or parallel["partition"]
    trial = replace(trial, sizes=trial.sizes and _can_shorten(trial))
    keys["train"]["max_norm_spike"] = d.choice([0.0, 0.0, 1.001])
    if trial.model in ("Biased", "deepseek_v3"):
        keys["experts"]["bias_rate"] = d.choice([0.001, 0.1])
    return replace(trial, keys=keys)


def _can_shorten(trial: Trial) -> bool:
    """Returns whether the ranks can divide sequences of half the length."""
    return trial.keys["parallel"]["cp"] * trial.keys["parallel"]["tp"] <= SEQ // 4


def _partition(d: random.Random, keys: dict[str, Keys]) -> tuple[int, ...]:
    """Returns random numbers of layers per stage; () if the schedule does not fit."""
    parallel, train = keys["parallel"], keys["train"]
    count = train["global_batch"] // train["micro_batch"] // parallel["dp"]
    try:
        plan = schedules.build(parallel["schedule"], parallel["pp"], count, parallel.get("chunks"))
    except ValueError:
        return ()
    layers = keys["model"]["layers"] + keys["model"].get("mtp_depth", 0) + 2
    if plan is None or plan.total_stages > layers:
        return ()
    cuts = sorted(d.sample(range(1, layers), plan.total_stages - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


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
        kept = ("grad_clip", "max_norm_spike")
        train = other.keys["train"] | {k: v for k, v in keys["train"].items() if k in kept}
        other = replace(other, keys=other.keys | same | {"train": train})
        rows_fit = train["global_batch"] == keys["train"]["global_batch"]
        fits = rows_fit and _can_shorten(other) >= trial.sizes
        if fits and _rule(trial) == _rule(other) and not other.problems:
            return other
    return None


def _rule(trial: Trial) -> tuple[bool, bool]:
    """Returns whether the trial uses 2bw, and whether it delays updates."""
    two_versions = trial.keys["parallel"]["schedule"] == "2bw"
    return two_versions, bool(trial.keys["zero"].get("delayed_update"))


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
    update.JUDGED_FROM = 1.0  # spikes are found from the second step on
    engine, metrics, evaluated = engine or engine_of(trial), list[StepMetrics](), list[float]()
    faults = 2 if trial.faults else 1  # steps of the engine per step of the trial
    for step in range(engine.steps // faults, STEPS - 1 if trial.then else STEPS):
        if trial.faults:
            _fail(trial, step, engine)
        metrics.append(engine.step(_batch(trial, step, engine)))
        if trial.exchanges:
            weights = [engine.full_state_dict()]
            if trial.world > 1:
                torch.distributed.broadcast_object_list(weights, 0)
            engine.load_full_state_dict(weights[0])
        if trial.looks:
            evaluated.append(float(engine.evaluate(_batch(trial, 100 + step, engine))))
            engine.compare_replicas()
    return engine, metrics, evaluated


def _fail(trial: Trial, step: int, engine: Engine) -> None:
    """Runs a step that raises an error, and one that is skipped, because a token is invalid."""
    usual = _batch(trial, step, engine)
    try:
        engine.step({name: values[:, :0] for name, values in usual.items()})
    except ValueError:
        pass
    else:
        raise AssertionError("a step without tokens raised no error")
    metrics = engine.step(_batch(trial, step, engine, invalid=True))
    try:
        print(metrics.loss)
    except DataError:
        return
    raise AssertionError("a step with an invalid token raised no error")


def _batch(
    trial: Trial, step: int, engine: Engine, invalid: bool = False
) -> dict[str, torch.Tensor]:
    """Returns this data rank's rows of a batch; if `invalid`, the batch's last token is invalid."""
    turn = step % 3 if trial.sizes else 1
    rows = trial.keys["train"]["global_batch"] * (2 if turn == 2 and step >= 100 else 1)
    whole = batch(step, rows)
    if invalid:
        # before rows are given to ranks, because the next step of 2bw reports the norm of this one
        whole["tokens"][-1, SEQ // 2 - 1 if turn == 0 else -1] = VOCAB
    if trial.gaps:
        whole["labels"][slice(None) if step == 1 else slice(1, None, 2)] = -100
    if trial.documents:
        whole["documents"] = documents(step, rows)
    if turn == 0:
        whole = {name: values[:, : SEQ // 2].contiguous() for name, values in whole.items()}
    return share(whole, engine.topology)


def find_truth(trial: Trial, file: Path) -> None:
    """Writes the results of a trial on one process to a file."""
    engine, metrics, evaluated = train(trial)
    torch.save({"results": vars(results_of(engine, metrics)), "evaluated": evaluated}, file)


def save(trial: Trial, folder: Path) -> tuple[list[StepMetrics], list[float]]:
    """Makes all steps except the last one, and saves a checkpoint."""
    engine, metrics, evaluated = train(trial)
    if trial.background:
        saving = engine.start_save(folder)
        engine.step(_batch(trial, 50, engine))
        saving.wait()
    else:
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
    # no label of the second step is counted
    texts = [text for text in texts if "nan in step 2, nan on one process" not in text]
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
        reasons = (
            "ConfigError: ",
            "ModelError: ",
            " context ranks: use --parallel.cp",
            "so context parallelism can only divide its heads",
            "the batch has 'documents': ",
        )
        refused = all(any(map(text.count, reasons)) for text in error.failures.values())
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
