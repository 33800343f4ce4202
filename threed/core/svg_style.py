"""The style of all pictures: palette with dark variants, font and width. Pictures are SVG files.

A picture is written in its light colors. `styled` adds the dark variants as CSS rules under
`@media (prefers-color-scheme: dark)`, so a browser shows the picture in its color scheme, even in
an `<img>`. Programs that ignore CSS show the light colors. The rules select elements by color, in
attributes (`fill="#4477aa"`) and in the inline styles that matplotlib writes (`fill: #4477aa`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

# Width in pixels. GitHub does not scale pictures of this width, because a README's text column has
# the same width.
WIDTH = 830
SMALLEST = 10  # smallest font size in pixels; text that does not fit in this size is left out
FONT = "Inter, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"

PAPER, INK, FAINT, RULE, SURFACE = "#ffffff", "#1f2937", "#57606a", "#d5dae1", "#eceff3"
# Readers with a color vision deficiency can distinguish blue, green and red (Paul Tol's schemes).
BLUE, GREEN, TEAL, YELLOW = "#4477aa", "#3f9c5a", "#1f9e97", "#a98b12"
PURPLE, ORANGE, RED, WINE = "#9467bd", "#d9622b", "#c0395b", "#7a2f4a"
GRAY, SLATE = "#8c8c8c", "#4b5563"

DARK = {
    PAPER: "#0d1117", INK: "#e6edf3", FAINT: "#9aa7b4", RULE: "#3a4350", SURFACE: "#1c232d",
    BLUE: "#6ea8dc", GREEN: "#5cbd7a", TEAL: "#45c4bb", YELLOW: "#d6bb4a",
    PURPLE: "#b794dd", ORANGE: "#f08a5d", RED: "#e8718d", WINE: "#b05a7d",
    GRAY: "#7d8590", SLATE: "#8793a3",
}  # fmt: skip


def paler(color: str, share: float) -> tuple[str, str]:
    """Returns a mixture of a color and the background, as its (light, dark) variants.

    Args:
        color: a color of the palette.
        share: fraction of the background, from 0 to 1.
    """
    return _mix(color, PAPER, share), _mix(DARK[color], DARK[PAPER], share)


def _mix(color: str, other: str, share: float) -> str:
    pairs = zip(bytes.fromhex(color[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def document(height: int, title: str, body: Sequence[str], dark: Mapping[str, str] = DARK) -> str:
    """Returns an SVG document, WIDTH pixels wide, on the background color.

    Args:
        height: height in pixels.
        title: title for screen readers.
        body: the SVG elements of the picture, as text.
        dark: dark variants of the colors of `body`.
    """
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return styled("\n".join([frame(height), paper, *body, "</svg>\n"]), title, dark)


def frame(height: int) -> str:
    """Returns the opening tag of an SVG document, WIDTH pixels wide."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-size="12">'


def styled(text: str, title: str, dark: Mapping[str, str] = DARK) -> str:
    """Returns an SVG document with a title, the font, and the dark variants of its colors.

    Args:
        text: an SVG document in the light colors.
        title: title for screen readers, the first child of the root element.
        dark: dark variants of the document's colors.

    Raises:
        KeyError: if `dark` lacks a color of the document.
    """
    head = f"\n<title>{escape(title, quote=False)}</title>\n{style(text, dark)}"
    return re.sub(r"<svg\b[^>]*>", lambda tag: tag[0] + head, text, count=1)


def style(text: str, dark: Mapping[str, str] = DARK) -> str:
    """Returns the `<style>` element for an SVG document: its font, and its dark colors."""
    used = sorted(set(re.findall(r'\b(fill|stroke)(="|: )(#[0-9a-f]{6})', text)))
    rules = [
        (f'[{name}="{color}"]' if sign == '="' else f'[style*="{name}: {color}"]')
        + f"{{{name}:{dark[color]}!important}}"
        for name, sign, color in used
    ]
    media = "\n".join(["@media (prefers-color-scheme: dark) {", *rules, "}"])
    return f"<style>\ntext{{font-family:{FONT}!important}}\n{media}\n</style>"


def text(
    x: float,
    y: float,
    content: str,
    size: int = 12,
    fill: str = INK,
    anchor: str = "start",
    bold: bool = False,
) -> str:
    """Returns a text element.

    Args:
        x: horizontal position of the anchor, in pixels.
        y: vertical position of the base line, in pixels.
        content: text to show.
        size: font size, in pixels.
        fill: color.
        anchor: start, middle or end.
        bold: whether the text is bold.
    """
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    weight = ' font-weight="600"' if bold else ""
    return f"<text {place}{weight}>{escape(content)}</text>"
