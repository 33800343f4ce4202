"""Draws docs/images/house.svg: the floors of tests/test_floors.py, and in each room the first line of its docstring.

python -m tests.house        # after a room came, went, moved, or says something else of itself
"""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from tests.test_floors import FLOORS, ROOT

PICTURE = ROOT / "docs" / "images" / "house.svg"
# Of each floor, from the top: what it is for, the colour of its frame, and of its ground.
STYLES = {
    6: ("runs and tools", "#4477aa", "#dbe6f3"),
    5: ("around training", "#3f9c5a", "#dff0e3"),
    4: ("running a stage", "#4fa899", "#e3f3f0"),
    3: ("models", "#b3a232", "#f6f0d3"),
    2: ("layers", "#d9822b", "#fbe9d9"),
    1: ("ground", "#8458b3", "#efe5f6"),
    0: ("plain Python", "#5b6676", "#e8ebf0"),
}
SANS = "Inter, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
WIDTH, LEFT, RIGHT, GAP = 1120, 180, 1010, 8  # LEFT, RIGHT: where the rooms begin and end
PER_ROW, LETTER, LINE = 4, 5.55, 13  # LETTER: the width of one at most, on average


def rooms(floor: int) -> list[tuple[str, str]]:
    """The modules and packages of a floor that are there, each with the first line of its docstring."""
    names = [
        name.removeprefix("threed.")
        for name, own in FLOORS.items()
        if own == floor and name.count(".") == 1
    ]
    return [
        (name, first_line(path)) for name in names for path in (source(name),) if path.is_file()
    ]


def source(name: str) -> Path:
    """The file of a module of threed, or of a package's __init__."""
    package = ROOT / "threed" / name / "__init__.py"
    return package if package.is_file() else ROOT / "threed" / f"{name}.py"


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without its last dot."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("`", "").rstrip(".")


def write(x: float, y: float, text: str, size: float, *, mono: bool = False, more: str = "") -> str:
    """A line of text, by its left end unless `more` says otherwise."""
    font = f' font-family="{MONO}"' if mono else ""
    return f'<text x="{x:.1f}" y="{y:g}" font-size="{size:g}"{font}{more}>{escape(text)}</text>'


def draw_room(
    x: float, y: float, width: float, height: float, name: str, phrase: str, colour: str
) -> Iterator[str]:
    """A box of a room: its name, and below it the phrase."""
    box = f'width="{width:.1f}" height="{height:g}" rx="3" fill="#ffffff" stroke="{colour}"'
    yield f'<rect x="{x:.1f}" y="{y:g}" {box}/>'
    yield write(x + 8, y + 17, name, 12, mono=True, more=' font-weight="600" fill="#1f2937"')
    for i, line in enumerate(wrap(phrase, width)):
        yield write(x + 8, y + 31 + i * LINE, line, 10, more=' fill="#4b5563"')


def wrap(phrase: str, width: float) -> list[str]:
    """The lines of a phrase in a room of this width."""
    return textwrap.wrap(phrase, int((width - 14) / LETTER))


def draw_band(floor: int, y: float, width: float, height: float) -> list[str]:
    """The ground of a floor, with its number and what it is for at the left."""
    what, colour, ground = STYLES[floor]
    middle = ' text-anchor="middle" font-weight="600" fill="#ffffff"'
    return [
        f'<rect x="30" y="{y:g}" width="{width:g}" height="{height}" rx="4" fill="{ground}"/>',
        f'<circle cx="54" cy="{y + height / 2:g}" r="14" fill="{colour}"/>',
        write(54, y + height / 2 + 5, str(floor), 14, more=middle),
        write(74, y + height / 2 + 4, what, 11.5, more=' font-weight="600" fill="#1f2937"'),
    ]


def draw_floor(floor: int, y: float) -> tuple[list[str], float]:
    """The drawing of a floor that begins at y, and its height."""
    colour = STYLES[floor][1]
    inside = rooms(floor)
    rows = math.ceil(len(inside) / PER_ROW)
    each = math.ceil(len(inside) / rows)
    widths = [
        (RIGHT - LEFT + GAP) / min(each, len(inside) - i // each * each) - GAP
        for i in range(len(inside))
    ]
    room = 26 + LINE * max(
        len(wrap(phrase, width)) for (_, phrase), width in zip(inside, widths, strict=True)
    )
    height = rows * (room + GAP) + GAP
    parts = draw_band(floor, y, RIGHT - 22, height)
    for number, ((name, phrase), width) in enumerate(zip(inside, widths, strict=True)):
        row, place = divmod(number, each)
        at = LEFT + place * (width + GAP), y + GAP + row * (room + GAP)
        parts += draw_room(*at, width, room, name, phrase, colour)
    return parts, height


def draw() -> str:
    """The picture as SVG."""
    parts, y = [], 126.0
    for floor in STYLES:
        drawn, height = draw_floor(floor, y)
        parts += drawn
        y += height + GAP
    height = y + 46
    roof = ' text-anchor="middle" font-weight="600" fill="#1f2937"'
    small = ' text-anchor="middle" fill="#6b7280"'
    bottom = ' text-anchor="middle" fill="#ffffff"'
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{SANS}" role="img" aria-labelledby="t">',
        f'<title id="t">The house: {len(STYLES)} floors of threed; imports go down only</title>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<path d="M 14 118 L 524 12 L 1034 118 Z" fill="#f8e1e7" stroke="#c0395b" stroke-width="2"/>',
        write(
            524, 66, "threed train · pretrain/gpt.py · pretrain/llama.py", 14, mono=True, more=roof
        ),
        write(524, 88, "start a run: torchrun, and one of these on every rank", 12, more=small),
    ]
    foot = [
        f'<rect x="14" y="{y:g}" width="1020" height="30" rx="3" fill="#7c6a58"/>',
        write(
            524,
            y + 20,
            "torch.distributed (NCCL on GPUs, gloo on CPUs), reached by two rooms alone",
            12,
            more=bottom,
        ),
        f'<path d="M 1066 130 L 1066 {y - 18:g}" stroke="#1f2937" stroke-width="2.5" fill="none"/>',
        f'<path d="M 1059 {y - 20:g} L 1066 {y - 4:g} L 1073 {y - 20:g} Z" fill="#1f2937"/>',
        (
            f'<text transform="translate(1090 {y / 2 + 60:g}) rotate(-90)" font-size="13" fill="#1f2937" '
            'text-anchor="middle" font-weight="600">imports go down only; floor 0 has no torch</text>'
        ),
    ]
    return "\n".join([*head, *parts, *foot, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
