"""The end of a run: figures, the Hugging Face export, a sample of text, and where everything is."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
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
    memory = memory_rows(run.forecast, peaks, peak.step) if any(peaks) else []
    plan = engine.blueprint.plan
    drawn = draw(run.folder, run.data, run.forecast, plan, spans, memory, run.note)
    checkpoint = checkpoints.path(checkpoints.last_saved)
    made = [("figures", path) for path in drawn]
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


def memory_rows(forecast: Forecast, peaks: Sequence[int], step: int) -> list[dict[str, Any]]:
    """Returns the predicted and the measured bytes of every rank in a step, for the picture."""
    return [
        {
            "rank": rank.rank,
            "label": rank.label,
            "predicted": rank.bytes,
            "measured": peak,
            "step": step,
        }
        for rank, peak in zip(forecast.ranks, peaks, strict=True)
    ]


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
    folder: Path, data: Data, forecast: Forecast, plan: Plan, spans: Sequence[Sequence[Any]],
    memory: Sequence[Mapping[str, Any]], note: Callable[[str], None],
) -> list[Path]:  # fmt: skip
    """Draws loss.svg, memory.svg and pipeline.svg into the run's figures; returns those that were drawn.

    A disk that takes none is only told: the run has its checkpoint.
    """
    try:
        return _drawn(folder, data, forecast, plan, spans, memory)
    except OSError as error:
        note(f"no figures: {why(error, folder)}")
        return []


def _drawn(
    folder: Path, data: Data, forecast: Forecast, plan: Plan, spans: Sequence[Sequence[Any]],
    memory: Sequence[Mapping[str, Any]],
) -> list[Path]:  # fmt: skip
    figures.save_figure_data(
        folder,
        uniform_entropy=data.uniform_entropy,
        unigram_entropy=data.unigram_entropy,
        memory=list(memory),
    )
    drawn = figures.report(folder)
    if any(spans):
        drawn.append(folder / "figures" / "pipeline.svg")
        drawn[-1].write_text(_pipeline(forecast, plan, spans))
    return drawn


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
