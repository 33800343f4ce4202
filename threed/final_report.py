"""The end of a run: pictures, the Hugging Face export, and a few lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.data import Data
from threed.engine import Engine
from threed.forecast import Forecast
from threed.monitor import figures
from threed.sampling import generate
from threed.schedules import span_and_bubble, svg

PROMPT = "def "


def sample_text(engine: Engine, data: Data, count: int) -> str:
    """Returns a prompt and the `count` tokens with which the model continues it. Collective."""
    prompt = data.tokenizer.encode(PROMPT) or [data.tokenizer.eot]
    return data.tokenizer.decode(generate(engine, prompt, count))


def memory_rows(forecast: Forecast, peaks: Sequence[int], step: int) -> list[dict[str, Any]]:
    """Returns the predicted and the measured bytes of every rank in a step, for the picture."""
    return [
        {"rank": rank.rank, "label": rank.label, "predicted": rank.bytes, "measured": peak, "step": step}
        for rank, peak in zip(forecast.ranks, peaks, strict=True)
    ]


def draw(
    folder: Path, data: Data, forecast: Forecast, spans: Sequence[Sequence[Any]], memory: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Draws loss.svg, memory.svg and pipeline.svg into the run's figures; returns those that were drawn."""
    figures.save_figure_data(
        folder, uniform_entropy=data.uniform_entropy, unigram_entropy=data.unigram_entropy, memory=list(memory)
    )
    drawn = figures.report(folder)
    if any(spans):
        bubble = span_and_bubble(spans)[1]
        subtitle = f"measured bubble {bubble:.1%}, ideal {forecast.bubble:.1%}; {forecast.microbatches} micro-batches"
        ranks = f"{len(spans)} pipeline rank{'s' * (len(spans) > 1)}"
        schedule = Path(forecast.config.parallel.schedule).name
        title = f"One step of {schedule} on {ranks}, as it ran"
        drawn.append(folder / "figures" / "pipeline.svg")
        drawn[-1].write_text(svg(spans, title, subtitle, unit="s"))
    return drawn
