"""The walkthroughs agree with the code: every function exists and is called by the previous one."""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path

import pytest

from tests.walkthroughs import PAGE, WALKTHROUGHS, Step, Walkthrough, page

every = pytest.mark.parametrize(
    "walkthrough", WALKTHROUGHS, ids=lambda walkthrough: walkthrough.name
)
Function = ast.FunctionDef | ast.ClassDef


@functools.cache
def tree_of(module: str) -> ast.Module:
    """Returns the syntax tree of a module."""
    file = importlib.import_module(module).__file__
    assert file is not None
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def found(tree: ast.AST, names: list[str]) -> Function:
    """Returns a function or class by its qualified name.

    For a class, it returns the function that creates its objects.
    """
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
    """Returns all names and attributes in a function's source."""
    nodes = list(ast.walk(function))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {
        n.attr for n in nodes if isinstance(n, ast.Attribute)
    }


def says(caller: Step, step: Step) -> bool:
    """Returns whether the caller's source contains the step, directly or through the helpers."""
    tree, names = tree_of(caller.where.partition(":")[0]), caller.name.split(".")
    function = found(tree, names)
    for helper in step.via:
        if helper not in named(function):
            return False
        own = [names[0], helper]
        function = found(tree, own if defines(tree, own) else [helper])
    return step.name.split(".")[-1] in named(function)


def defines(tree: ast.AST, names: list[str]) -> bool:
    """Returns whether there is such a function or class."""
    try:
        found(tree, names)
    except IndexError:
        return False
    return True


@every
def test_every_step_is_in_the_code(walkthrough: Walkthrough) -> None:
    for step in walkthrough.steps:
        assert (
            not step.by
            or sum(other.name == step.by for other in walkthrough.steps if other.what) == 1
        ), step.by
    for step in walkthrough.steps:
        module = importlib.import_module(step.where.partition(":")[0])
        assert callable(
            target := functools.reduce(getattr, step.name.split("."), module)
        ) or isinstance(target, property)


@every
def test_every_step_is_called_by_the_one_before(walkthrough: Walkthrough) -> None:
    for caller, step in walkthrough.calls():
        direct = says(caller, step)
        assert direct != bool(step.note), f"{caller.where} -> {step.where}"


def test_the_page_is_new() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "stale: python -m tests.walkthroughs"
