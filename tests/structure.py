"""Draws docs/images/structure.svg: the packages of `threed` by floor, with the first line of each docstring.

python -m tests.structure        # after LEVELS of tests/test_floors.py or a package's docstring changed
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from xml.sax.saxutils import escape

from tests.test_floors import LEVELS, ROOT

PICTURE = ROOT / "docs" / "images" / "structure.svg"
WIDTH, GAP, LINE = 830, 8, 14  # pixels
LETTER = 6.1  # width of an average letter of the descriptions, in pixels
STYLE = """
.floor { fill: #eef2f7 } .box { fill: #ffffff; stroke: #4477aa } .name { fill: #1f2937 } .text { fill: #4b5563 }
@media (prefers-color-scheme: dark) {
  .floor { fill: #1c232d } .box { fill: #0d1117; stroke: #6ea8dc } .name { fill: #e6edf3 } .text { fill: #adbac7 }
}
"""


def description(name: str) -> str:
    """Returns the first line of the docstring of a package or module of threed."""
    path = ROOT.joinpath("threed", *name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("`", "").rstrip(".")


def text(x: float, y: float, content: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" {more}>{escape(content)}</text>'


def draw_box(x: float, y: float, width: float, height: float, name: str) -> Iterator[str]:
    box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
    yield f'<rect {box} class="box"/>'
    yield text(x + 8, y + 18, name, "name", 'font-size="13" font-weight="600"')
    for number, line in enumerate(wrapped(name, width)):
        yield text(x + 8, y + 34 + number * LINE, line, "text", 'font-size="11"')


def wrapped(name: str, width: float) -> list[str]:
    return textwrap.wrap(description(name), int((width - 16) / LETTER))


def draw_floor(names: tuple[str, ...], y: float) -> tuple[list[str], float]:
    """Returns the elements of a floor that begins at y, and its height."""
    width = (WIDTH - 2 * GAP - (len(names) + 1) * GAP) / len(names)
    height = 28 + LINE * max(len(wrapped(name, width)) for name in names)
    outer = f'x="{GAP}" y="{y:g}" width="{WIDTH - 2 * GAP}" height="{height + 2 * GAP:g}" rx="6"'
    parts = [f'<rect {outer} class="floor"/>']
    for number, name in enumerate(names):
        parts += draw_box(2 * GAP + number * (width + GAP), y + GAP, width, height, name)
    return parts, height + 2 * GAP


def draw() -> str:
    """Returns the picture as SVG."""
    parts, y = [], float(GAP)
    for names in reversed(LEVELS):
        drawn, height = draw_floor(names, y)
        parts += drawn
        y += height + GAP
    size = f'viewBox="0 0 {WIDTH} {y:g}" width="{WIDTH}" height="{y:g}"'
    font = "font-family=\"Inter, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif\""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-labelledby="t">'
    title = '<title id="t">Packages of threed; each imports only from packages below it</title>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
