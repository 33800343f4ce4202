"""Gantt charts in the style of all pictures: dark colors, legible text, labels only where they fit."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tests.pictures import check_style, contrast
from threed.schedules import Action, Costs, Kind, build, simulate, svg
from threed.schedules.gantt import stack

SVG = "{http://www.w3.org/2000/svg}"


def chart(name: str, stages: int, microbatches: int, **options: object) -> str:
    plan = build(name, stages, microbatches)
    return svg(simulate(plan, Costs(1, 1, 1)).spans, name, ways=plan.ways, **options)


def texts(picture: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(f"{SVG}text"))


@pytest.mark.parametrize(
    ("name", "stages", "microbatches"),
    [("dualpipe", 4, 8), ("interleaved", 8, 64), ("1f1b", 64, 64), ("gpipe", 200, 2)],
)
def test_charts_of_any_size_have_the_style(name: str, stages: int, microbatches: int) -> None:
    check_style(chart(name, stages, microbatches))


def test_communication_and_stacked_charts_have_the_style() -> None:
    kinds = [kind for kind in Kind if kind not in (Kind.W, Kind.FB)]
    one = svg([[(Action(kind, 0), i, i + 1) for i, kind in enumerate(kinds)]], "all", unit="s")
    assert {"send activation", "receive gradient", "time (s)"} <= {text.text for text in texts(one)}
    check_style(one)
    both = stack([one, chart("1f1b", 2, 2)])
    check_style(both)
    heights = [
        float(root.attrib["height"]) for root in ElementTree.fromstring(both).iter(f"{SVG}svg")
    ]
    assert heights[0] == sum(heights[1:])


def test_ranks_are_labeled_where_there_is_room() -> None:
    for stages in (4, 16, 64, 200):
        places = [
            float(text.attrib["y"])
            for text in texts(chart("gpipe", stages, 2))
            if (text.text or "").startswith("rank ")
        ]
        assert len(places) == stages or stages > 32
        assert min(b - a for a, b in pairwise(places)) >= 12


def test_numbers_in_boxes_contrast_with_them_in_both_color_schemes() -> None:
    picture = chart("dualpipe", 4, 8)
    dark = dict(re.findall(r'\[fill="(#\w+)"\]{fill:(#\w+)!', picture))
    boxes = [
        (float(box["x"]), float(box["y"]), float(box["width"]), float(box["height"]), box["fill"])
        for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect")
        for box in [rect.attrib]
        if rect.find(f"{SVG}title") is not None
    ]
    pairs = {
        (fill, text.attrib["fill"])
        for text in texts(picture)
        for x, y, width, height, fill in boxes
        if x < float(text.attrib["x"]) < x + width and y < float(text.attrib["y"]) < y + height
    }
    assert len(pairs) == 8  # forwards, backwards and their two parts, of both directions
    for fill, ink in pairs:
        assert contrast(ink, fill) >= 3
        assert contrast(dark[ink], dark[fill]) >= 3


def test_the_axis_names_its_unit() -> None:
    assert "time (forward = 1)" in {
        text.text for text in texts(chart("1f1b", 2, 2, unit="forward = 1"))
    }
