"""Trains a model in every topology, and compares the results with training on one process.

One process trains some steps as the reference, and repeats this training with another seed of
torch's global random generators, because the results must not depend on these generators. Then
every topology trains on forked gloo ranks, from the same weights on the same batches. Every rank
compares its shards with the reference.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from threed import models
from threed.config import Config, ConfigError
from threed.config.resolution import resolve
from threed.core.errors import PicklableError
from threed.core.messages import counted
from threed.core.source import MODEL, count_arguments, place_of
from threed.distributed.sharding import ModelError
from threed.distributed.topology import Topology
from threed.engine import Engine, StepMetrics
from threed.layers import Slicing
from threed.layers.contract import contract
from threed.models.buffers import find
from threed.models.custom import ForwardError
from threed.testing import diagnose
from threed.testing.compare import Finding, Results, agree, differences, results_of
from threed.testing.diagnose import About, Layers, Seen
from threed.testing.ranks import RanksFailed, run_ranks
from threed.testing.topologies import DEFAULT, configured, plain, ranks_of, words
from threed.testing.watch import Watch, label
from threed.zero.step_metrics import DataError

Build = Callable[..., Any]
BatchOf = Callable[[Config, int], Mapping[str, Tensor]]
ALONE = "one process"
VOCAB = 53  # a prime, so that no number of tensor ranks divides the vocabulary evenly
DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"layers": 4, "hidden": 32, "heads": 4, "seq": 16, "vocab": VOCAB},
    "train": {"steps": 3, "global_batch": 8, "micro_batch": 2, "grad_clip": 0.0},
    "optim": {"lr": 3e-3, "warmup": 0},
    "zero": {"resident": 0},  # shards all parameters, although they are small
    "precision": {"dtype": "fp64"},
}
# Largest differences that are tolerated. Correct topologies differ only in the order of sums. In
# fp32, some Adam steps amplify the resulting rounding errors of 1e-7.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}


@dataclass(frozen=True)
class Refused:
    """A topology that cannot run this model.

    Attributes:
        topology: name of the topology.
        why: message of the error that the model or the configuration raised.
    """

    topology: str
    why: str


@dataclass(frozen=True)
class Difference:
    """A difference between a topology and one process.

    Attributes:
        topology: name of the topology.
        layer: layer in which the difference begins, if known.
        parameter: global name of a parameter that differs, if known.
        what: description, with the likely cause.
        largest: largest absolute difference, if known.
    """

    topology: str
    layer: str | None
    parameter: str | None
    what: str
    largest: float | None


@dataclass
class Report:
    """The result of `same_everywhere`. `str()` returns a text for users.

    Attributes:
        topologies: names of the compared topologies.
        refused: topologies that cannot run the model.
        differences: all differences found.
    """

    topologies: list[str] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether at least one topology was compared, and all compared topologies are equal."""
        return bool(self.topologies) and not self.differences

    @property
    def exit_code(self) -> int:
        """Exit code of `threed verify`: 0 if equal, 1 if different, 2 if not compared."""
        return 1 if self.differences else 0 if self.topologies else 2

    def add(self, topology: str, found: Iterable[About]) -> None:
        """Adds differences of a topology.

        Args:
            topology: name of the topology.
            found: (layer, parameter, description, largest absolute difference) of each difference.
        """
        for layer, parameter, what, size in found:
            largest = size if math.isfinite(size) else None
            self.differences.append(Difference(topology, layer, parameter, what, largest))

    def json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps({"same": self.same, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        lines = [f"not compared   {r.topology}: {r.why}" for r in self.refused]
        for d in self.differences:
            where = " ".join(filter(None, (d.layer, d.parameter and f"({d.parameter})")))
            size = "" if d.largest is None else f" [largest difference {d.largest:.3g}]"
            where += ": " if where else ""
            lines.append(f"differs        {d.topology}: {where}{d.what}{size}")
        verdict = ("same", "differs", "nothing could be compared")[self.exit_code]
        wrong = {d.topology for d in self.differences}
        equal = ", ".join(name for name in self.topologies if name not in wrong)
        lines += [f"equal          {equal}"] if equal else []
        if self.topologies and self.refused:
            compared, total = len(self.topologies), len(self.topologies) + len(self.refused)
            verdict += f" ({compared} of {total} topologies compared)"
        return "\n".join([*lines, verdict])


class _Broken(PicklableError):
    """Raised on a rank whose training failed. Its attribute `report` is sent to the parent."""

    def __init__(self, phase: str, layer: str, error: Exception, layers: Layers) -> None:
        super().__init__(f"{phase} {layer}: {error}")
        text = f"{type(error).__name__}: {error}{place_of(error)}"
        kinds = {
            ModelError: "model",
            ForwardError: "forward",
            ValueError: "value",
            Exception: "other",
        }
        kind = next(name for cause, name in kinds.items() if isinstance(error, cause))
        about = {"phase": phase, "layer": layer, "kind": kind, "text": text, "layers": layers}
        self.report = {**about, "message": str(error)}


@dataclass(frozen=True)
class _Task:
    """The arguments of the training on every rank."""

    build: Build
    batch: BatchOf
    config: Config
    folder: str
    tolerance: float

    @property
    def file(self) -> str:
        return f"{self.folder}/truth.pt"


def same_everywhere(
    build: Build, batch: BatchOf | None = None, topologies: Sequence[str] = DEFAULT, *, config: Config | None = None,
    tolerance: float | None = None, timeout: float = 120.0,
) -> Report:  # fmt: skip
    """Trains a model in each topology on gloo ranks, and compares the results with one process.

    Losses, gradient norms, weights, moments and persistent buffers are compared, element by
    element.

    Args:
        build: the model's class, or a function that returns the model. It is called with (config,
            slicing), (config) or (), where `config` is a `ModelConfig` and `slicing` a `Slicing`.
            It must be importable from a module, because ranks are separate processes. If it returns
            a plain `nn.Module`, only topologies with data parallelism and ZeRO can train the model;
            and without `batch`, the model must read token ids (`threed.models.TokenModule`).
        batch: a function, called as `batch(config, step)` with the `Config` and the number of a
            step. It returns the global batch: tensors by name, each with
            `config.train.global_batch` rows. Must be importable. By default, random tokens.
        topologies: names of topologies; see `threed.testing.topologies`.
        config: configuration of the model and the training, which has `config.train.steps` steps.
            By default, a small model is trained in fp64.
        tolerance: largest tolerated difference, relative for losses and norms, absolute for all
            other values; by default 1e-9 in fp64 and 1e-5 in fp32.
        timeout: limit per topology, in seconds.

    Returns:
        The report.

    Raises:
        ValueError: if a topology's name is invalid, or `build` or `batch` cannot be passed to other
            processes.
        ConfigError: if `config` sets the number of ranks of an axis, compiles layers, or uses a
            dtype other than fp64 and fp32.

    Example:

        report = same_everywhere(MyModel)
        assert report.same, report
    """
    parsed = {name: words(name) for name in topologies}
    config = config or Config.model_validate(DEFAULTS)
    _check(build, batch, config)
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        tolerance = tolerance or TOLERANCES[config.precision.dtype]
        task = _Task(build, batch or random_tokens, config, folder, tolerance)
        try:
            (found,) = run_ranks(1, _train_reference, task, timeout=timeout)
        except RanksFailed as error:
            _explain_failure(report, ALONE, error, timeout)
            return report
        truth = _load(task.file)
        report.add(ALONE, diagnose.repeated(found, truth["layers"]))
        for name in parsed if not report.differences else ():
            _compare(report, name, parsed[name], task, truth, timeout)
    return report


def _compare(
    report: Report,
    name: str,
    parsed: dict[str, int],
    task: _Task,
    truth: Mapping[str, Any],
    timeout: float,
) -> None:
    """Trains in one topology, and adds its differences from the reference to the report.

    A training that fails is also added to the report.
    """
    try:
        ranks = run_ranks(ranks_of(parsed), _train_and_compare, task, parsed, timeout=timeout)
    except RanksFailed as error:
        _explain_failure(report, name, error, timeout)
        return
    report.topologies.append(name)
    report.add(name, diagnose.Explainer(truth, parsed.get("tp", 1), parsed).explain(ranks))


def _explain_failure(report: Report, name: str, error: RanksFailed, timeout: float) -> None:
    """Adds a failed training to the report: as a refused topology if the model or the configuration
    does not support the topology, otherwise as a difference."""
    broken = diagnose.report_of(error)
    if broken is None:
        layer, what = diagnose.explain_lost_ranks(error, timeout)
        report.add(name, [(layer, None, what, math.nan)])
        return
    lines, layers = broken["message"].splitlines() or [broken["text"]], broken["layers"]
    is_value = broken["kind"] == "value"
    if broken["kind"] == "model":
        report.add(name, [(*diagnose.named(line, layers), line, math.nan) for line in lines])
    elif broken["kind"] == "forward":
        report.refused.append(Refused(name, broken["message"]))
    elif broken["phase"] != "step" and (is_value or name == ALONE):
        report.refused.append(Refused(name, lines[0] if is_value else broken["text"]))
    else:
        in_place = "in-place" in broken["message"]
        hint = "; change a copy: x = x * 2, not x.mul_(2)" if in_place else ""
        what = f"ends with {broken['text']}{hint}"
        layer, parameter = diagnose.named(lines[0], layers) if is_value else (None, None)
        report.add(name, [(layer or broken["layer"] or None, parameter, what, math.nan)])


def _check(build: Build, batch: BatchOf | None, config: Config) -> None:
    p = config.parallel
    if (p.tp, p.pp, p.cp, p.ep) != (1, 1, 1, 1) or p.dp or p.sequence:
        given = "--parallel.tp, pp, dp and sequence"
        raise ConfigError([f"{given}: the topologies set them; use --topologies tp2,pp2"])
    if (dtype := config.precision.dtype) not in TOLERANCES:
        raise ConfigError([f"--precision.dtype {dtype}: rounding hides differences; use fp64"])
    if config.run.compile:
        why = "the comparison observes each layer, and compiled layers cannot be observed"
        raise ConfigError([f"--run.compile true: {why}"])
    try:
        pickle.dumps((build, batch))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        fix = f"define them at a module's top level ({error})"
        raise ValueError(f"build and batch are sent to other processes: {fix}") from None


def random_tokens(config: Config, step: int) -> dict[str, Tensor]:
    """Returns a global batch of random tokens, with some labels ignored (-100).

    The probability that a label is ignored rises from 0 in the first row to 0.2 in the last.

    Args:
        config: configuration with batch size, sequence length and vocabulary.
        step: number of the step, which seeds the tokens.
    """
    rows, seq = config.train.global_batch, config.model.seq
    draw = torch.Generator().manual_seed(1000 * rows + step)
    ids = torch.randint(0, config.model.vocab or VOCAB, (rows, seq + 1), generator=draw)
    ignored = torch.rand(rows, seq, generator=draw) < torch.linspace(0, 0.2, rows).view(-1, 1)
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].masked_fill(ignored, -100)}


def share(batch: Mapping[str, Tensor], topology: Topology) -> dict[str, Tensor]:
    """Returns this data rank's rows of a global batch."""
    parts, own = topology.dp, topology.axis("dp").index
    return {key: value.chunk(parts)[own] for key, value in batch.items()}


# ------------------------------------------------------------------------------------------------------- on the ranks


def _train(
    task: _Task, parsed: dict[str, int], seed: int, look: Callable[[str, Engine, list[StepMetrics]], Any],
    truth: Mapping[str, Any],
) -> tuple[dict[str, Any], Watch]:  # fmt: skip
    """Trains the model in one topology. Called on every rank of the topology.

    Args:
        task: arguments of the training.
        parsed: the parsed name of the topology: the result of `topologies.words`.
        seed: seed of torch's global random numbers.
        look: called as look("first", engine, metrics) after the first step, and with "last" after
            the last step.
        truth: results of the reference training; empty in the reference training itself.

    Returns:
        (results, watch). `results` is a dict with the keys "first" and "last" (what `look` has
        returned), "layers" and "batches". `watch` has the values that layers passed to each other.
    """
    os.dup2(2, 1)  # sends a model's prints to stderr, because the report is written to stdout
    phase, at, layers = "build", lambda: "", list[tuple[str, list[str]]]()
    try:
        config = resolve(configured(task.config, parsed), VOCAB, ranks_of(parsed))
        topology = Topology(pp=config.parallel.pp, tp=config.parallel.tp, cp=config.parallel.cp)
        slicing = Slicing.of(topology, config)
        _seed(config.train.seed)
        given = (config.model, slicing)[: count_arguments(task.build, MODEL)]
        model = task.build(*given)
        layers += _layers(model)
        if isinstance(model, nn.Module) and task.batch is random_tokens:
            model = models.for_tokens(model, VOCAB, type(model).__name__)
        engine = Engine(model, topology, config)
        watch = Watch(engine, truth.get("seen", {}))
        _seed(seed)
        phase, at = "batch", lambda: watch.at
        known = truth.get("batches")
        batches = [_batch(task, config, step, known) for step in range(config.train.steps)]
        phase = "step"
        metrics = [engine.step(share(batches[0], topology))]
        if math.isnan(metrics[0].loss):
            raise DataError("the loss of step 1 is NaN")
        # `look` finishes the step, so all its backwards are recorded before `watch.stop()`.
        first = look("first", engine, metrics)
        watch.stop()
        metrics += [engine.step(share(batch, topology)) for batch in batches[1:]]
        last = look("last", engine, metrics)
        return {"first": first, "last": last, "layers": layers, "batches": batches}, watch
    except DataError as error:
        # The engine raises DataError only after the step. At that time `at()` returns the layer
        # that ran last, which need not be the cause. So the report names the first layer whose
        # output is not finite.
        raise _Broken(phase, watch.first_not_finite(), error, layers) from error
    except Exception as error:
        raise _Broken(phase, at(), error, layers) from error


def _batch(
    task: _Task, config: Config, step: int, before: Sequence[Mapping[str, Tensor]] | None
) -> dict[str, Tensor]:
    """Returns the global batch of a step.

    Raises ValueError if the batch is invalid, or if two calls for the same step return different
    batches.

    Args:
        task: arguments of the training.
        config: the resolved configuration.
        step: number of the step.
        before: batches of the reference training, by step, to compare the batch with. None: calls
            the user's function a second time and compares the two results.
    """
    batch = task.batch(config, step)
    rows = config.train.global_batch
    call = f"batch(config, {step})"
    items = batch.items() if isinstance(batch, Mapping) else ()
    gave = {key: _shape(value) for key, value in items}
    if not gave or any(shape is None or shape[:1] != [rows] for shape in gave.values()):
        shapes = ", ".join(f"{key} {shape or 'without rows'}" for key, shape in gave.items())
        fix = f"it must return tensors by name, with {counted(rows, 'row')} (--train.global-batch)"
        raise ValueError(f"{call} returned {shapes or type(batch).__name__}: {fix}")
    if "tokens" in batch and batch["tokens"].is_floating_point():
        raise ValueError(f"{call} returned tokens of {batch['tokens'].dtype}: ids are integers")
    old = before[step] if before else task.batch(config, step)
    same = (v.shape == old[key].shape and agree(v, old[key]).all() for key, v in batch.items())
    if old.keys() != batch.keys() or not all(same):
        again = "when it was called again, perhaps on another rank"
        raise ValueError(f"{call} returned other values {again}: seed random numbers by the step")
    return dict(batch)


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) and value.dim() else None


def _seed(seed: int) -> None:
    """Seeds the global random generators of torch, `random` and numpy, which user code may use.

    It is called twice per training. Before the model is built, all ranks pass the same seed, so
    that they get equal initial values. Before the first step, each rank passes a different seed. If
    the user's forward draws random numbers, its results then differ from the reference, and the
    comparison reports it.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _layers(model: Any) -> Layers:
    """Returns the layers of a model, each with the global names of its parameters and buffers.

    An `nn.Module` without the attribute `slicing` counts as one layer. For an object without the
    method `layers`, the result is empty; the engine later rejects such an object with an error.
    """
    if isinstance(model, nn.Module) and not hasattr(model, "slicing"):
        own = (*model.named_parameters(), *model.named_buffers())
        return [("module", [name for name, _ in own])]
    found = []
    for number, layer in enumerate(model.layers() if hasattr(model, "layers") else ()):
        specs = [p.spec for p in layer.parameters() if hasattr(p, "spec")]
        buffers = find([(contract(layer).name or f"layers.{number}", layer)])
        names = [
            *(piece.name for spec in specs for piece in spec.pieces),
            *(b.name for b in buffers),
        ]
        found.append((label(layer, number), names))
    return found


def _load(file: str) -> dict[str, Any]:
    """Loads the file of `_train_reference`. The file is trusted, so any pickle is allowed."""
    return torch.load(file, mmap=True, weights_only=False)


def _train_reference(task: _Task) -> Seen:
    """Trains on one process, and writes the results to the task's file, as the reference.

    Then trains again with another seed of the global random generators, and returns the differences
    from the reference. Any difference means that the model uses these generators.
    """
    task = replace(task, config=plain(task.config))
    truth, watch = _train(task, {}, 0, lambda when, *held: vars(results_of(*held)), {})
    torch.save({**truth, "seen": watch.seen}, task.file)
    return _train_and_compare(task, {})


def _train_and_compare(task: _Task, parsed: dict[str, int]) -> Seen:
    """Trains on all ranks of a topology. Returns this rank's differences from the reference."""
    truth, usual = _load(task.file), task.config.train.micro_batch
    # Buffers with statistics, such as running means, depend on how the batch is divided over ranks
    # and micro-batches. So buffers are not compared if a topology divides the batch differently
    # from the reference.
    divided = parsed.get("dp", 1) > 1 or parsed.get("micro", usual) != usual

    def look(when: str, engine: Engine, metrics: list[StepMetrics]) -> list[Finding]:
        want = Results(**truth[when])
        want = replace(want, buffers={}) if divided else want
        return differences(engine, metrics, want, task.tolerance)

    found, watch = _train(task, parsed, 1 + int(os.environ["RANK"]), look, truth)
    between = diagnose.boundaries(watch.seen, truth["seen"], watch.slicing, task.tolerance)
    return Seen(found["first"], list(between) if found["first"] else [], found["last"])
