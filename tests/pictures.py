"""Draws docs/images/: pictures of schedules, and the dark colors of manually drawn pictures.

    python -m tests.pictures         # after threed/schedules/gantt.py, threed/core/svg_style.py or a picture has changed

A manually drawn picture uses the light colors of `threed.core.svg_style` and contains an element
`<style></style>`.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from threed.cli import commands
from threed.core import svg_style
from threed.ops.positions import Positions

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "zb-auto", "chimera", "dualpipe",
    "dualpipev", "2bw",
)  # fmt: skip
RING = "ring"
BY_HAND = ("grid", "overview", "tensor")


def draw_schedule(name: str) -> str:
    """Returns the picture of a schedule, as `threed schedule` draws it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "plan.svg"
        size = ["--stages", "4", "--microbatches", "8"]
        assert commands.main(["schedule", name, *size, "--svg", str(file)]) == 0
        return file.read_text(encoding="utf-8")


def draw_ring() -> str:
    """Returns the picture of ring attention: in which hop which rank computes which pairs."""
    ranks, cell, left, top = 4, 30, 170, 84
    parts = [Positions.zigzag(2 * ranks, ranks, rank) for rank in range(ranks)]
    owner = {
        first: rank
        for rank in range(ranks)
        for part in parts[rank].ranges
        for first in range(*part)
    }
    colors = (svg_style.BLUE, svg_style.GREEN, svg_style.ORANGE, svg_style.PURPLE)

    def text(
        x: float,
        y: float,
        what: str,
        size: int = 12,
        color: str = svg_style.INK,
        anchor: str = "middle",
    ) -> str:
        return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{what}</text>'

    body = [
        text(left + 4 * cell, 28, "Causal attention on a ring of 4 ranks: 8 chunks, 4 hops", 15)
    ]
    body += [text(left + 4 * cell, 52, "keys of rank", color=svg_style.FAINT)]
    body += [
        text(left - 60, top + 4 * cell + 4, "queries of rank", color=svg_style.FAINT, anchor="end")
    ]
    for chunk in range(2 * ranks):
        at = chunk * cell + cell / 2
        body += [text(left + at, top - 10, str(owner[chunk]))]
        body += [text(left - 12, top + at + 4, str(owner[chunk]), anchor="end")]
        for key in range(chunk + 1):
            hop = (owner[chunk] - owner[key]) % ranks
            x, y = left + key * cell, top + chunk * cell
            corners = f"{x},{y}L{x},{y + cell}L{x + cell},{y + cell}"
            corners += "" if key == chunk else f"L{x + cell},{y}"
            body += [f'<path d="M{corners}Z" fill="{colors[hop]}" stroke="{svg_style.PAPER}"/>']
    for hop, color in enumerate(colors):
        x, y = left + 9 * cell, top + 34 + hop * 44
        what = (
            "keys of this rank" if hop == 0 else f"keys that travelled {hop} rank{'s' * (hop > 1)}"
        )
        body += [f'<rect x="{x}" y="{y}" width="22" height="22" fill="{color}"/>']
        body += [text(x + 32, y + 16, f"hop {hop}: {what}", anchor="start")]
    note = "In each hop, all ranks compute equally many pairs."
    body += [
        text(left + 9 * cell, top + 34 + 4 * 44 + 12, note, color=svg_style.FAINT, anchor="start")
    ]
    return svg_style.document(
        top + 8 * cell + 20, "Ring attention: pairs of queries and keys by hop", body
    )


def restyled(picture: str) -> str:
    """Returns a picture whose `<style>` has the dark variants of the palette."""
    before, after = re.split(r"<style>.*?</style>", picture, maxsplit=1, flags=re.DOTALL)
    return before + svg_style.style(before + after) + after


def check_style(picture: str) -> None:
    """Raises AssertionError if a picture has no title, no dark colors, or text below 10 pixels.

    Text is measured as it is shown at the width of `svg_style.WIDTH`.
    """
    root = ElementTree.fromstring(picture)
    assert root[0].tag.endswith("title") or root[0].tag.endswith("svg"), "no title"
    assert "@media (prefers-color-scheme: dark)" in picture
    scale = svg_style.WIDTH / float(root.attrib["viewBox"].split()[2])
    texts = [(size, text) for size, text in _texts(root, 0.0) if text]
    assert texts
    assert not [(size, text) for size, text in texts if size * scale < svg_style.SMALLEST]


def _texts(element: ElementTree.Element, size: float) -> list[tuple[float, str]]:
    """Returns the font size and the text of each `<text>` and `<tspan>` of an element."""
    css = re.search(r"font(?:-size)?:[^;]*?([\d.]+)px", element.get("style", ""))
    size = float(css[1] if css else element.get("font-size", size))
    found = (
        [(size, (element.text or "").strip())] if element.tag.endswith(("text", "tspan")) else []
    )
    return found + [text for child in element for text in _texts(child, size)]


def luminance(color: str) -> float:
    """Returns the relative luminance of a color, as WCAG 2.2 defines it."""
    parts = [value / 255 for value in bytes.fromhex(color[1:])]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colors, from 1 to 21, as WCAG 2.2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


if __name__ == "__main__":
    (FOLDER / f"{RING}.svg").write_text(draw_ring(), encoding="utf-8")
    for name in SCHEDULES:
        (FOLDER / f"{name}.svg").write_text(draw_schedule(name), encoding="utf-8")
    for name in BY_HAND:
        path = FOLDER / f"{name}.svg"
        path.write_text(restyled(path.read_text(encoding="utf-8")), encoding="utf-8")
