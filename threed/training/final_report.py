"""The final report of a run: figures, Hugging Face export, sampled text, and paths."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from threed.checkpoint.run_folder import resuming_flags
from threed.config import Config
from threed.core.disk import why
from threed.core.messages import counted
from threed.core.packages import MissingPackageError
from threed.data import Data
from threed.data.tokenizer import EncodeError, Tokenizer
from threed.distributed import collectives
from threed.engine import Engine
from threed.interop.huggingface.export import export_hf
from threed.models.custom import ForwardError
from threed.monitor import figures
from threed.planner.forecast import Forecast
from threed.schedules import Plan, svg
from threed.schedules.gantt import stack
from threed.schedules.simulation import idle_shares, replay
from threed.training.callback import Run
from threed.training.checkpoints import Checkpoints
from threed.training.profiling import PeakMemory
from threed.training.sampling import NoLogitsError, NotFiniteError, generate

PROMPT = "def "


def finish(
    run: Run,
    checkpoints: Checkpoints,
    peak: PeakMemory,
    spans: Sequence[Any],
    command: Sequence[str],
) -> None:
    """Samples text, draws figures, exports the last checkpoint, and prints paths. Collective.

    Args:
        run: the run: its engine, data, folder and other objects.
        checkpoints: callback that has saved the last checkpoint.
        peak: callback that has measured the peak memory.
        spans: actions of the last logged step, per pipeline rank (`StepLog.spans`).
        command: words of the command line, for the hint on how to resume.
    """
    engine, config = run.engine, run.config
    run.beat("end")
    peaks = collectives.exchange(peak.nbytes, engine.topology.axis("world"))
    count = config.train.sample_tokens
    text = sample_text(engine, run.data, count) if count and not run.stop.now() else ""
    # From here on, the other ranks wait for rank 0. This must not count as a hang.
    run.supervision.watchdog.stop()
    if run.forecast is None:
        return
    rows = [
        {"rank": r.rank, "label": r.label, "predicted": r.bytes, "measured": n, "step": peak.step}
        for r, n in zip(run.forecast.ranks, peaks, strict=True)
    ]
    made = [
        ("figures", path) for path in draw(run, run.forecast, spans, rows if any(peaks) else [])
    ]
    checkpoint = checkpoints.path(checkpoints.last_saved)
    made += [("metrics", run.folder / "metrics.jsonl"), ("checkpoint", checkpoint)]
    if config.checkpoint.export_hf:
        made += export(checkpoint, run.folder / "hf", run.data.tokenizer, run.note)
    if text:
        run.note(f"the model writes:\n{text}\n")
    for what, path in made:
        run.note(f"{what:<10} {path}")
    given = shlex.join([*further(command, engine.steps, config), *resuming_flags(config)])
    run.note(f"resume     torchrun {_torchrun_flags(engine.topology.world)} {given}")


def further(command: Sequence[str], steps: int, config: Config) -> list[str]:
    """Returns a command that trains further after `steps` steps.

    It is the command of the run without the flag `--train.stop-after`. If the run is complete, the
    number of steps is doubled.

    Args:
        command: words of the command line of the run.
        steps: number of steps that the run has trained.
        config: the resolved configuration of the run.
    """
    words = _without("--train.stop-after", command)
    if steps < config.train.steps:
        return words
    return [*_without("--train.steps", words), "--train.steps", str(2 * config.train.steps)]


def _without(flag: str, words: Sequence[str]) -> list[str]:
    """Returns the words of a command without a flag and its value."""
    values = [False, *(word == flag for word in words)]
    return [
        word
        for word, is_value in zip(words, values, strict=False)
        if not (is_value or word == flag or word.startswith(f"{flag}="))
    ]


def _torchrun_flags(world: int) -> str:
    """Returns the flags of torchrun for the ranks of this run, on as many machines."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local == world or world % local:
        return f"--standalone --nproc-per-node {world}"
    where = "--rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    return f"--nnodes {world // local} --nproc-per-node {local} {where}"


def sample_text(engine: Engine, data: Data, count: int) -> str:
    """Returns a prompt with the model's continuation, or why sampling failed. Collective.

    Args:
        engine: engine with the model.
        data: data with the tokenizer.
        count: number of tokens to generate.
    """
    try:
        prompt = [*data.tokenizer.bos_ids, *data.tokenizer.encode(PROMPT)] or [data.tokenizer.eot]
        return data.tokenizer.decode(generate(engine, prompt, count))
    except (NotFiniteError, NoLogitsError, EncodeError, ForwardError) as error:
        return f"no sample: {error}"


def export(
    checkpoint: Path, folder: Path, tokenizer: Tokenizer, note: Callable[[str], None]
) -> list[tuple[str, Path]]:
    """Writes a Hugging Face folder.

    Args:
        checkpoint: checkpoint to export.
        folder: folder to write.
        tokenizer: tokenizer to include.
        note: function that prints a message if a package is missing.

    Returns:
        A list with the folder's entry in the report, (name, path); empty if a package is missing.
    """
    try:
        return [("export", export_hf(checkpoint, folder, tokenizer))]
    except MissingPackageError as error:
        note(f"export     not written: {error}; then: threed convert {checkpoint} {folder}")
        return []


def draw(
    run: Run, forecast: Forecast, spans: Sequence[Sequence[Any]], memory: list[dict[str, Any]]
) -> list[Path]:
    """Draws loss.svg, memory.svg and pipeline.svg, and returns the paths of the drawn figures.

    A disk error is only reported, because the run already has its checkpoint.

    Args:
        run: the run: its engine, data, folder and other objects.
        forecast: forecast of the run.
        spans: actions of the last logged step, per pipeline rank (`StepLog.spans`).
        memory: predicted and measured bytes per rank (see `monitor.figures`).
    """
    data, folder = run.data, run.folder
    entropies = {"uniform_entropy": data.uniform_entropy, "unigram_entropy": data.unigram_entropy}
    try:
        figures.save_figure_data(folder, **entropies, memory=memory)
        drawn = figures.report(folder)
        if any(spans):
            drawn.append(folder / "figures" / "pipeline.svg")
            drawn[-1].write_text(_pipeline(forecast, run.engine.blueprint.pipeline.plan, spans))
        return drawn
    except OSError as error:
        run.note(f"no figures: {why(error, folder)}")
        return []


def _pipeline(forecast: Forecast, plan: Plan, spans: Sequence[Sequence[Any]]) -> str:
    """Returns an SVG of two timelines: the last logged step as measured, and its plan simulated
    with the measured mean time of each kind of action."""
    planned, ranks = replay(plan, spans), counted(len(spans), "pipeline rank")
    ends = [end for row in spans for _, _, end in row]
    extent = max(ends) - min(start for row in spans for _, start, _ in row)
    name, count = Path(forecast.config.parallel.schedule).name, forecast.microbatches
    ran = f"ranks idle {fmean(idle_shares(spans)):.1%}, predicted {forecast.idle:.1%}; {counted(count, 'micro-batch')}"
    due = f"ranks idle {fmean(idle_shares(planned)):.1%}: each action takes the mean of its kind, messages take no time"
    return stack([  # only the first timeline has a legend
        svg(spans, f"One step of {name} on {ranks}, as it ran", ran, unit="s", ways=plan.ways),
        svg(planned, "As planned, with these times", due, legend=False, unit="s", extent=extent),
    ])  # fmt: skip
