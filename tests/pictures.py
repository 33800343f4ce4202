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

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "zb-auto", "chimera", "dualpipe",
    "dualpipev", "2bw",
)  # fmt: skip
BY_HAND = ("grid", "overview", "tensor")


def draw_schedule(name: str) -> str:
    """Returns the picture of a schedule, as `threed schedule` draws it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "plan.svg"
        size = ["--stages", "4", "--microbatches", "8"]
        assert commands.main(["schedule", name, *size, "--svg", str(file)]) == 0
        return file.read_text(encoding="utf-8")


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
    for name in SCHEDULES:
        (FOLDER / f"{name}.svg").write_text(draw_schedule(name), encoding="utf-8")
    for name in BY_HAND:
        path = FOLDER / f"{name}.svg"
        path.write_text(restyled(path.read_text(encoding="utf-8")), encoding="utf-8")
