"""The pictures of the three journeys say what the code does: every function is there, and calls the next one."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
from pathlib import Path

import pytest

from tests import house
from tests.journeys import JOURNEYS, WIDTH, Box, Journey, Step, arrange, draw, place, route

every = pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey.name)
Function = ast.FunctionDef | ast.ClassDef


@functools.cache
def tree_of(module: str) -> ast.Module:
    """The source of a module."""
    file = importlib.import_module(module).__file__
    assert file is not None
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def found(tree: ast.AST, names: list[str]) -> Function:
    """A function or class by its qualified name; of a class, what makes its objects."""
    for name in names:
        tree = [
            node
            for node in ast.iter_child_nodes(tree)
            if isinstance(node, Function) and node.name == name
        ][-1]
    assert isinstance(tree, Function)
    made = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    return made[0] if isinstance(tree, ast.ClassDef) and made else tree


def named(function: Function) -> set[str]:
    """All names and attributes in a function's source."""
    nodes = list(ast.walk(function))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {
        n.attr for n in nodes if isinstance(n, ast.Attribute)
    }


def says(caller: Step, step: Step) -> bool:
    """Whether the caller's source names the step, or the first helper, which names the next."""
    tree, names = tree_of(caller.where.partition(":")[0]), caller.name.split(".")
    function = found(tree, names)
    for helper in step.via:
        if helper not in named(function):
            return False
        own = [names[0], helper]
        function = found(tree, own if defines(tree, own) else [helper])
    return step.name.split(".")[-1] in named(function)


def defines(tree: ast.AST, names: list[str]) -> bool:
    """Whether there is such a function or class."""
    try:
        found(tree, names)
    except IndexError:
        return False
    return True


@every
def test_every_step_is_in_the_code(journey: Journey) -> None:
    for step in journey.steps:
        assert (
            not step.by or sum(other.name == step.by for other in journey.steps if other.what) == 1
        ), step.by
    for step in journey.steps:
        module = importlib.import_module(step.where.partition(":")[0])
        assert callable(
            target := functools.reduce(getattr, step.name.split("."), module)
        ) or isinstance(target, property)


@every
def test_every_step_is_called_by_the_one_before(journey: Journey) -> None:
    for caller, step in journey.calls():
        direct = says(caller, step) and step.floor <= caller.floor
        assert direct != bool(step.note), f"{caller.where} -> {step.where}"


@every
def test_only_arrows_with_a_reason_go_up(journey: Journey) -> None:
    boxes = place(journey)
    arrange(boxes)
    for caller, step in journey.calls():
        assert step.note or boxes[step.where].y > boxes[caller.where].y, (
            f"{caller.where} -> {step.where}"
        )


@every
def test_the_picture_is_new(journey: Journey) -> None:
    assert journey.picture.read_text(encoding="utf-8") == draw(journey), (
        "stale: python -m tests.journeys"
    )


@every
def test_boxes_hold_their_text_and_keep_apart(journey: Journey) -> None:
    boxes = place(journey)
    arrange(boxes)
    for box in boxes.values():
        assert (
            0.61 * 9.5 * max(len(box.step.name), len(f"{box.number}  {box.step.file}")) <= WIDTH - 8
        ), box.step.where
        assert box.step.what.count(" ") <= 8
    for a, b in itertools.combinations(boxes.values(), 2):
        assert a.column != b.column or a.y + a.height < b.y or b.y + b.height < a.y


@every
def test_arrows_run_between_boxes(journey: Journey) -> None:
    boxes = place(journey)
    arrange(boxes)
    for caller, step in journey.calls():
        points = route(boxes[caller.where], boxes[step.where], boxes)
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            for box in boxes.values():
                assert not crosses(box, min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)), (
                    step.where,
                    box,
                )


def crosses(box: Box, left: float, top: float, right: float, bottom: float) -> bool:
    """Whether a line goes through the inside of a box."""
    return left < box.x + WIDTH and right > box.x and top < box.y + box.height and bottom > box.y


def test_floors_are_those_of_the_house() -> None:
    assert {step.floor for journey in JOURNEYS for step in journey.steps} == set(house.STYLES)
