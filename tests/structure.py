"""Draws docs/images/structure.svg: the packages of `threed` by level, with their docstrings.

    python -m tests.structure        # after LEVELS of tests/test_floors.py or a package's docstring has changed

The picture shows the first line of each docstring.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

from tests.test_floors import LEVELS, ROOT
from threed.core import svg_style as style

PICTURE = ROOT / "docs" / "images" / "structure.svg"
WIDTH, GAP, LINE = style.WIDTH, 8, 14  # pixels
LETTER = 6.1  # width of an average letter of the descriptions, in pixels


def description(name: str) -> str:
    """Returns the first line of the docstring of a package or module of threed."""
    path = ROOT.joinpath("threed", *name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("`", "").rstrip(".")


def draw_box(x: float, y: float, width: float, height: float, name: str) -> Iterator[str]:
    box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
    yield f'<rect {box} fill="{style.PAPER}" stroke="{style.BLUE}"/>'
    yield style.text(x + 8, y + 18, name, size=13, bold=True)
    for number, line in enumerate(wrapped(name, width)):
        yield style.text(x + 8, y + 34 + number * LINE, line, size=11, fill=style.FAINT)


def wrapped(name: str, width: float) -> list[str]:
    return textwrap.wrap(description(name), int((width - 16) / LETTER))


def draw_floor(names: tuple[str, ...], y: float) -> tuple[list[str], float]:
    """Returns the elements of a level of packages that begins at y, and its height in pixels."""
    width = (WIDTH - 2 * GAP - (len(names) + 1) * GAP) / len(names)
    height = 28 + LINE * max(len(wrapped(name, width)) for name in names)
    outer = f'x="{GAP}" y="{y:g}" width="{WIDTH - 2 * GAP}" height="{height + 2 * GAP:g}" rx="6"'
    parts = [f'<rect {outer} fill="{style.SURFACE}"/>']
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
    title = "Packages of threed; each imports only from packages below it"
    return style.document(round(y), title, parts)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
