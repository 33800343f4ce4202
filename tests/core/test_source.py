"""How the classes and functions of a user's file are called and named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from threed.core import source
from threed.core.source import MODEL, count_arguments, is_foreign, load, name_of


def both(config: Any, slicing: Any) -> None: ...
def one(c: Any) -> None: ...
def none() -> None: ...
def width_only(width: int = 4, depth: int = 2) -> None: ...
def named(config: Any = None, depth: int = 2) -> None: ...
def anything(*args: Any) -> None: ...
def three(config: Any, slicing: Any, depth: int) -> None: ...
def keyword(config: Any, *, depth: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "count"),
    [(both, 2), (one, 1), (none, 0), (width_only, 0), (named, 1), (anything, 2), (type("", (), {}), 0)],
)  # fmt: skip
def test_a_model_gets_the_arguments_that_it_takes(function: Any, count: int) -> None:
    assert count_arguments(function, MODEL) == count


@pytest.mark.parametrize("function", [three, keyword])
def test_other_arguments_are_refused_with_the_expected_ones(function: Any) -> None:
    name = function.__name__
    forms = rf"{name}\(config, slicing\) or {name}\(config\) or {name}\(\): give all other param"
    with pytest.raises(
        ValueError, match=rf"^{name}\(.*depth.*\) of a\.py cannot be called as {forms}"
    ):
        count_arguments(function, MODEL, "a.py")


def test_the_name_of_a_class_is_its_file_and_its_name() -> None:
    assert name_of(source.Source) == f"{Path(source.__file__)}:Source"

    class Local:
        pass

    for other in (Local, int, 3, lambda: None):
        with pytest.raises(ValueError, match="not a class or function at the top level of a file"):
            name_of(other)


def test_a_module_of_the_program_is_not_imported_again() -> None:
    assert load(__file__) is sys.modules[__name__]


def test_errors_are_told_apart_by_where_they_were_raised() -> None:
    package = Path(source.__file__).parents[1]
    with pytest.raises(ValueError, match="write FILE") as ours:
        source.find_model("mine")
    assert not is_foreign(ours.value, package)
    with pytest.raises(ValueError, match="invalid literal") as theirs:
        int("x")
    assert is_foreign(theirs.value, package)
