"""The style of pictures: dark variants of all colors, contrast of text, titles."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.pictures import contrast
from threed.core import svg_style as style

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("text", [style.INK, style.FAINT])
@pytest.mark.parametrize("ground", [style.PAPER, style.SURFACE])
def test_text_has_the_contrast_that_wcag_requires_in_both_color_schemes(
    text: str, ground: str
) -> None:
    assert contrast(text, ground) >= 4.5
    assert contrast(style.DARK[text], style.DARK[ground]) >= 4.5


@pytest.mark.parametrize("color", sorted({*style.DARK} - {style.PAPER, style.SURFACE, style.RULE}))
def test_colors_are_visible_on_both_backgrounds(color: str) -> None:
    assert contrast(color, style.PAPER) >= 3
    assert contrast(style.DARK[color], style.DARK[style.PAPER]) >= 3


def test_dark_rules_select_attributes_and_inline_styles() -> None:
    body = [
        f'<rect fill="{style.BLUE}" stroke="none"/>',
        f'<path style="fill: none; stroke: {style.RED}"/>',
    ]
    text = style.document(20, "a < b", body)
    root = ElementTree.fromstring(text)
    assert root.find(f"{SVG}title").text == "a < b"
    assert root.attrib["viewBox"] == f"0 0 {style.WIDTH} 20"
    rules = root.find(f"{SVG}style").text
    assert f'[fill="{style.BLUE}"]{{fill:{style.DARK[style.BLUE]}!important}}' in rules
    assert f'[style*="stroke: {style.RED}"]{{stroke:{style.DARK[style.RED]}!important}}' in rules
    assert style.GREEN not in rules  # not used


def test_a_color_without_a_dark_variant_is_refused() -> None:
    with pytest.raises(KeyError, match="#123456"):
        style.document(20, "title", ['<rect fill="#123456"/>'])


def test_paler_mixes_with_the_background_of_each_color_scheme() -> None:
    assert style.paler(style.BLUE, 0) == (style.BLUE, style.DARK[style.BLUE])
    assert style.paler(style.BLUE, 1) == (style.PAPER, style.DARK[style.PAPER])
    assert style.paler(style.BLUE, 0.5)[0] == "#a2bbd4"
