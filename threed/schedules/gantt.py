"""Draw the actions of each rank over time, as a stand-alone SVG.

Use: `svg(simulate(plan, costs).spans, title="1F1B")`. For measured spans, in seconds, add unit="s".

The chart has one lane per rank. A compute action is a box, with the number of the micro-batch if it
fits. A forward that runs together with a backward is the upper half of a framed box, and the
backward is the lower half. Later chunks of a rank, and the second direction of a bidirectional
plan, have paler colors. Communication, which overlaps with compute, is a strip at the lower edge
of the lane. Idle time is gray. On hover, a box shows its action and times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from threed.core import svg_style as style
from threed.schedules.action import COMPUTE, Action, Kind
from threed.schedules.event_simulation import Span

# For each kind of action: its color, the fraction of background color mixed into the color (from 0
# to 1), and its text in the legend.
_STYLES = {
    Kind.F: (style.BLUE, 0.0, "forward"),
    Kind.B: (style.GREEN, 0.0, "backward"),
    Kind.I: (style.TEAL, 0.0, "input gradient"),
    Kind.W: (style.YELLOW, 0.0, "weight gradient"),
    Kind.SEND_F: (style.PURPLE, 0.0, "send activation"),
    Kind.RECV_F: (style.PURPLE, 0.5, "receive activation"),
    Kind.SEND_B: (style.ORANGE, 0.0, "send gradient"),
    Kind.RECV_B: (style.ORANGE, 0.5, "receive gradient"),
    Kind.GATHER: (style.GRAY, 0.0, "gather"),
    Kind.REDUCE: (style.RED, 0.0, "reduce"),
    Kind.VALIDATE: (style.SLATE, 0.0, "validate"),
    Kind.NORM: (style.WINE, 0.4, "begin the norm"),
    Kind.UPDATE: (style.WINE, 0.0, "update"),
}
_LEFT, _RIGHT = 64, 22
_PALEST = 0.5  # fraction of background color mixed into the colors of the last chunk
_EDGES, _NO_EDGE = f'<g stroke="{style.PAPER}" stroke-width="0.8">', ' stroke="none"'
_LABEL = 11  # font size of the numbers in boxes
_SCALES = {"s": ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))}


@dataclass(frozen=True)
class _Page:
    """The layout of the chart.

    x(t) is the horizontal position of time t in pixels, and y(r) is the upper edge of the lane of
    rank r in pixels.

    Attributes:
        origin: the time at the left edge of the lanes.
        extent: the length of time that the width of a lane represents.
        top: y of the first lane, in pixels.
        lane: height of a lane, in pixels.
        gap: distance between two lanes, in pixels.
        lanes: number of lanes, one per rank.
        strip: height of the communication strip in a lane, in pixels; 0 without communication.
        chunks: number of chunks per rank.
    """

    origin: float
    extent: float
    top: int
    lane: int
    gap: int
    lanes: int
    strip: int
    chunks: int

    def x(self, time: float) -> float:
        return _LEFT + (time - self.origin) / self.extent * (style.WIDTH - _LEFT - _RIGHT)

    def y(self, rank: int) -> int:
        return self.top + rank * (self.lane + self.gap)

    @property
    def bottom(self) -> int:
        return self.y(self.lanes) - self.gap


def svg(
    spans_per_rank: Sequence[Sequence[Span]],
    title: str = "",
    subtitle: str = "",
    legend: bool = True,
    unit: str = "",
    ways: int = 1,
    extent: float = 0.0,
) -> str:
    """Returns a Gantt chart as SVG text, 830 pixels wide.

    Args:
        spans_per_rank: per rank, (action, start, end). The axis starts at the earliest start.
        title: heading.
        subtitle: second line of the heading.
        legend: whether to add a legend.
        unit: unit of the times, shown on the axis; "s" may be shown as ms or µs.
        ways: number of directions of the plan (`Plan.ways`). If it is 2, the legend explains paler
            colors as the other direction, otherwise as later chunks.
        extent: minimum length of time that the width of the chart represents. Charts with the same
            `extent` have the same scale if none of them lasts longer than `extent`.
    """
    page = _page(spans_per_rank, 12 + 26 * bool(title) + 20 * bool(subtitle), extent)
    body = [*_headings(title, subtitle), *_lanes(page), *_axis(page, unit)]
    drawn = [
        (rank, span)
        for rank, spans in enumerate(spans_per_rank)
        for span in spans
        if span[2] > span[1]
    ]
    body += [_EDGES, *(_box(page, *each) for each in drawn), "</g>"]
    body += [
        '<g text-anchor="middle">',
        *(label for each in drawn for label in _labels(page, *each)),
        "</g>",
    ]
    height = page.bottom + 46
    if legend:
        entries, height = _legend(_entries(spans_per_rank, page.chunks, ways), height)
        body += entries
    return style.document(height, title or "Pipeline schedule", body, _dark(page.chunks))


def stack(charts: Sequence[str]) -> str:
    """Returns an SVG that shows several charts, each returned by `svg`, one below the other."""
    body, top = list[str](), 0
    for chart in charts:
        body.append(chart.replace("<svg ", f'<svg y="{top}" ', 1))
        top += int(chart.split('height="', 1)[1].split('"', 1)[0])
    return "\n".join([style.frame(top), *body, "</svg>\n"])


def _page(spans_per_rank: Sequence[Sequence[Span]], top: int, least: float) -> _Page:
    spans = [span for rank in spans_per_rank for span in rank]
    origin = min((start for _, start, _ in spans), default=0.0)
    extent = max(least, max((end for _, _, end in spans), default=0.0) - origin)
    lane = max(6, min(34, 560 // max(1, len(spans_per_rank))))
    communicates = any(action.kind not in COMPUTE and end > start for action, start, end in spans)
    strip = lane // 4 if communicates else 0
    chunks = 1 + max((part.chunk for action, _, _ in spans for part in action.parts), default=0)
    gap, lanes = min(5, lane // 4), len(spans_per_rank)
    return _Page(origin, extent if extent > 0 else 1.0, top, lane, gap, lanes, strip, chunks)


def _headings(title: str, subtitle: str) -> Iterator[str]:
    if title:
        yield style.text(_LEFT, 28, title, size=16, bold=True)
    if subtitle:
        yield style.text(_LEFT, 22 + 24 * bool(title), subtitle, fill=style.FAINT)


def _lanes(page: _Page) -> Iterator[str]:
    # A label needs 13 pixels. If lanes are lower, only every n-th lane has a label.
    every = ceil(13 / (page.lane + page.gap))
    for rank in range(page.lanes):
        y = page.y(rank)
        yield f'<rect x="{_LEFT}" y="{y}" width="{style.WIDTH - _LEFT - _RIGHT}" height="{page.lane}" fill="{style.SURFACE}"/>'
        if rank % every == 0:
            yield style.text(
                _LEFT - 8, y + page.lane / 2 + 4, f"rank {rank}", fill=style.FAINT, anchor="end"
            )


def _axis(page: _Page, unit: str) -> Iterator[str]:
    factor, name = _scale(page.extent, unit)
    step = _step(page.extent * factor)
    digits = max(0, -floor(log10(step)))
    for index in range(floor(page.extent * factor / step * (1 + 1e-9)) + 1):
        x = page.x(page.origin + index * step / factor)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{page.top}" y2="{page.bottom + 5}" stroke="{style.RULE}"/>'
        yield style.text(
            x,
            page.bottom + 18,
            f"{index * step:.{digits}f}",
            size=11,
            fill=style.FAINT,
            anchor="middle",
        )
    label = f"time ({name})" if name else "time"
    yield style.text(
        style.WIDTH - _RIGHT, page.bottom + 34, label, size=11, fill=style.FAINT, anchor="end"
    )


def _scale(extent: float, unit: str) -> tuple[float, str]:
    """Returns (factor, name) of the axis's unit. Times in `unit` are multiplied by the factor.

    The axis has the largest unit in which the extent is at least 1. If the extent is below 1 in
    every unit, the axis has the smallest unit.
    """
    scales = _SCALES.get(unit, ((1.0, unit),))
    return next((scale for scale in scales if extent * scale[0] >= 1), scales[-1])


def _step(extent: float) -> float:
    """Returns the distance between ticks: 1, 2 or 5 times a power of ten, for at most 12 steps."""
    power: float = 10.0 ** floor(log10(extent / 12))
    return power * next(factor for factor in (1, 2, 5, 10) if ceil(extent / (power * factor)) <= 12)


def _places(
    page: _Page, rank: int, span: Span
) -> Iterator[tuple[Action, float, float, float, float]]:
    """Yields each part of an action with the x, y, width and height of its box in pixels."""
    action, start, end = span
    x = page.x(start)
    y = float(page.y(rank))
    width = page.x(end) - page.x(start)
    height = page.lane - page.strip
    if action.kind not in COMPUTE:
        y, height = y + height, page.strip
    each = height / len(action.parts)
    for number, part in enumerate(action.parts):
        yield part, x, y + number * each, width, each


def _box(page: _Page, rank: int, span: Span) -> str:
    action, start, end = span
    hint = f"<title>{action}: {start - page.origin:.6g} to {end - page.origin:.6g}</title>"
    places = list(_places(page, rank, span))
    box = "".join(
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{_fill(page, part)}"'
        f"{_NO_EDGE if width <= 3 else ''}>{hint}</rect>"
        for part, x, y, width, height in places
    )
    _, x, y, width, height = places[0]
    if len(places) > 1 and width > 3:
        box += (
            f'<rect x="{x + 0.8:.2f}" y="{y + 0.8:.1f}" width="{width - 1.6:.2f}" '
            f'height="{len(places) * height - 1.6:.1f}" fill="none" stroke="{style.INK}" stroke-width="1.2"/>'
        )
    return box


def _labels(page: _Page, rank: int, span: Span) -> Iterator[str]:
    """Yields the SVG of the micro-batch numbers in an action's boxes.

    A forward and a backward that run together have two boxes. Small boxes have no number.
    """
    for part, x, y, width, height in _places(page, rank, span):
        label = str(part.microbatch)
        fits = width >= 0.62 * _LABEL * len(label) + 3 and height >= _LABEL
        if part.kind in COMPUTE and fits:
            place = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 0.36 * _LABEL:.1f}"'
            yield f'<text {place} font-size="{_LABEL}" fill="{_ink(_fill(page, part))}">{label}</text>'


def _fill(page: _Page, action: Action) -> str:
    return _shade(action.kind, action.chunk, page.chunks)[0]


def _shade(kind: Kind, chunk: int, chunks: int) -> tuple[str, str]:
    """Returns the color of an action in the light and in the dark theme, paler for later chunks."""
    color, share, _ = _STYLES[kind]
    return style.paler(color, 1 - (1 - share) * (1 - _PALEST * chunk / max(1, chunks - 1)))


def _dark(chunks: int) -> dict[str, str]:
    """Returns all colors of a chart: color in the light theme -> color in the dark theme."""
    return style.DARK | dict(
        _shade(kind, chunk, chunks) for kind in _STYLES for chunk in range(chunks)
    )


def _ink(fill: str) -> str:
    red, green, blue = bytes.fromhex(fill[1:])
    return style.PAPER if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else style.INK


def _entries(
    spans_per_rank: Sequence[Sequence[Span]], chunks: int, ways: int
) -> list[tuple[tuple[str, ...], str]]:
    """Returns the entries of the legend: (the colors of a box from top to bottom, meaning)."""
    actions = [action for spans in spans_per_rank for action, _, _ in spans]
    present = {part.kind for action in actions for part in action.parts}
    entries: list[tuple[tuple[str, ...], str]] = [
        ((_shade(kind, 0, 1)[0],), meaning)
        for kind, (_, _, meaning) in _STYLES.items()
        if kind in present
    ]
    paired = sorted({action.beside.kind for action in actions if action.beside is not None})
    entries += [
        ((style.BLUE, _STYLES[kind][0]), f"forward with {_STYLES[kind][2]}") for kind in paired
    ]
    if chunks > 1:
        shade = _shade(Kind.F, chunks - 1, chunks)[0]
        entries.append(
            ((shade,), "paler: the other direction" if ways == 2 else "paler: later chunks")
        )
    return [*entries, ((style.SURFACE,), "idle")]


def _legend(entries: Sequence[tuple[tuple[str, ...], str]], y: int) -> tuple[list[str], int]:
    """Returns the SVG of the legend, which begins at y, and the y of its lower edge."""
    body, x = [], float(_LEFT)
    for fills, meaning in entries:
        width = 22 + 6.6 * len(meaning) + 18
        if x + width > style.WIDTH - _RIGHT + 18:
            x, y = float(_LEFT), y + 20
        edge = style.INK if len(fills) > 1 else style.RULE
        for number, fill in enumerate(fills):
            top, height = y + number * 12 / len(fills), 12 / len(fills)
            body.append(
                f'<rect x="{x:.1f}" y="{top:g}" width="14" height="{height:g}" rx="2" fill="{fill}" stroke="{edge}"/>'
            )
        body.append(style.text(x + 20, y + 10.5, meaning))
        x += width
    return body, y + 26
