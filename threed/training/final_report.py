"""The end of a run: figures, the Hugging Face export, a sample of text, and where everything is."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from threed import collectives
from threed.checkpoint.resuming import resuming_flags
from threed.data import Data
from threed.data.tokenizer import EncodeError, Tokenizer
from threed.disk import why
from threed.engine import LayeredEngine
from threed.forecast import Forecast
from threed.interop.huggingface.export import export_hf
from threed.monitor import figures
from threed.packages import MissingPackageError
from threed.schedules import Plan, idle_shares, replay, stack, svg
from threed.training.callback import Run
from threed.training.checkpoints import Checkpoints
from threed.training.profiling import PeakMemory
from threed.training.sampling import NotFiniteError, generate

PROMPT = "def "


def finish(
    run: Run,
    checkpoints: Checkpoints,
    peak: PeakMemory,
    spans: Sequence[Any],
    command: Sequence[str],
) -> None:
    """Samples text, draws the figures, exports the last checkpoint, and prints the paths. Collective.

    Args:
        spans: per stage, the actions of the last logged step.
        command: the words of the command line, for the hint how to resume.
    """
    engine, config = run.engine, run.config
    run.beat("end")
    peaks = collectives.exchange(peak.nbytes, engine.topology.axis("world"))
    count = config.train.sample_tokens
    text = sample_text(engine, run.data, count) if count and not run.stop.now() else ""
    run.supervision.watchdog.stop()  # from here on the other ranks wait for rank 0
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
    ranks = f"--standalone --nproc-per-node {engine.topology.world}"
    run.note(f"resume     torchrun {ranks} {shlex.join([*command, *resuming_flags(config)])}")


def sample_text(engine: LayeredEngine, data: Data, count: int) -> str:
    """Returns a prompt and the `count` tokens with which the model continues it, or why it does not. Collective."""
    try:
        prompt = [*data.tokenizer.bos_ids, *data.tokenizer.encode(PROMPT)] or [data.tokenizer.eot]
        return data.tokenizer.decode(generate(engine, prompt, count))
    except (NotFiniteError, EncodeError) as error:
        return f"nothing: {error}"


def export(
    checkpoint: Path, folder: Path, tokenizer: Tokenizer, note: Callable[[str], None]
) -> list[tuple[str, Path]]:
    """Writes a Hugging Face folder and returns its entry for the report. If a package is missing, calls `note` with a
    message and returns no entry."""
    try:
        return [("export", export_hf(checkpoint, folder, tokenizer))]
    except MissingPackageError as error:
        note(f"export     not written: {error}; then: threed convert {checkpoint} {folder}")
        return []


def draw(
    run: Run, forecast: Forecast, spans: Sequence[Sequence[Any]], memory: list[dict[str, Any]]
) -> list[Path]:
    """Draws loss.svg, memory.svg and pipeline.svg into the run's figures, and returns those that were drawn.

    An error of the disk is only reported: the run has its checkpoint.

    Args:
        memory: predicted and measured bytes of every rank in a step.
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
    """A step as it ran; below it as the plan has it, with the same times of actions and without any of messages."""
    planned, ranks = replay(plan, spans), f"{len(spans)} pipeline rank{'s' * (len(spans) > 1)}"
    ends = [end for row in spans for _, _, end in row]
    extent = max(ends) - min(start for row in spans for _, start, _ in row)
    name, count = Path(forecast.config.parallel.schedule).name, forecast.microbatches
    ran = f"ranks idle {fmean(idle_shares(spans)):.1%}, predicted {forecast.idle:.1%}; {count} micro-batches"
    due = f"ranks idle {fmean(idle_shares(planned)):.1%}: each action takes the mean of its kind, messages take no time"
    return stack([  # the legend stands with the messages
        svg(spans, f"One step of {name} on {ranks}, as it ran", ran, unit="s", ways=plan.ways),
        svg(planned, "As planned, with these times", due, legend=False, unit="s", extent=extent),
    ])  # fmt: skip
