"""The public API: what each package exports, and that every exported name is documented.

A public name is in the `__all__` of a package. Its docstring has Google sections:

- `Args:` lists every parameter. A function with one parameter may mention it in the first sentence
  instead, as `name` in backticks or as a word. The parameters of a class are in the docstring of
  the class, under `Args:` or `Attributes:`.
- A method without a docstring has that of the method that it overrides.
- `Returns:` describes the result, unless the first sentence does ("Returns ...", "...; returns
  ..."). Properties and context managers describe their value in the first sentence.
- `Raises:` names every error that the body of the function raises.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import threed

PUBLIC = "layers models schedules data checkpoint training testing config interop".split()
PACKAGES = [
    "threed",
    *(m.name for m in pkgutil.walk_packages(threed.__path__, "threed.") if m.ispkg),
]
METHODS = types.FunctionType | classmethod | staticmethod | property | cached_property
NOT_DOCUMENTED = {"AssertionError", "NotImplementedError", "AttributeError", "StopIteration"}


def exports() -> Iterator[tuple[str, Any]]:
    """Yields every exported name with its object, except modules."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, types.ModuleType):
                yield f"{package}.{name}", value


EXPORTS = {name: value for name, value in exports() if callable(value)}


# ------------------------------------------------------------------------------------------------------------- exports


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_names(package: str) -> None:
    module = importlib.import_module(package)
    assert "__all__" in vars(module)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    if package != "threed" and package.removeprefix("threed.") not in PUBLIC:
        assert "internal" in (module.__doc__ or "")
        assert module.__all__ == []


def test_the_root_exports_the_public_packages() -> None:
    modules = {
        name for name in threed.__all__ if isinstance(getattr(threed, name), types.ModuleType)
    }
    assert modules == set(PUBLIC)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_exported_name_hides_no_module(package: str) -> None:
    module = importlib.import_module(package)
    modules = {found.name for found in pkgutil.iter_modules(module.__path__)}
    hidden = {
        name for name in modules if not isinstance(getattr(module, name, module), types.ModuleType)
    }
    assert hidden == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_lists_of_lazy_exports_agree(package: str) -> None:
    """`if TYPE_CHECKING` imports each name from the module from which `lazy` imports it."""
    module = importlib.import_module(package)
    blocks = [
        node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {a.name: str(node.module) for node in imports for a in node.names}
    if typed:
        assert typed.keys() == set(module.__all__)
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'missing'"):
            _ = module.missing
    for name, home in typed.items():
        value = getattr(module, name)
        assert value is getattr(importlib.import_module(home), name)
        assert isinstance(value, types.ModuleType) or value.__module__ == home


def test_packages_are_imported_without_torch() -> None:
    """So are the lists of names, so that a shell completes `threed.` without a delay."""
    code = """
import sys, threed, threed.config, threed.schedules, threed.checkpoint, threed.interop
for package in (threed, threed.config, threed.schedules, threed.checkpoint, threed.interop):
    assert set(package.__all__) <= set(dir(package))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(threed.__file__).parents[1])


# ---------------------------------------------------------------------------------------------------------- docstrings


def problems_of(name: str, value: Any) -> Iterator[str]:
    """Yields the problems of the docstrings of an exported class or function."""
    if not inspect.isclass(value):
        yield from problems_of_function(name, value, value.__doc__)
        return
    yield from problems_of_class(name, value)
    bases = [base for base in value.__mro__ if base.__module__.startswith(("threed.", __name__))]
    members: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for attribute, member in (pair for base in bases for pair in vars(base).items()):
        if not attribute.startswith("_") and isinstance(member, METHODS):
            members.setdefault(attribute, member)
            texts[attribute] = texts.get(attribute) or member.__doc__ or ""
    for attribute, member in members.items():
        label, text = f"{name}.{attribute}", texts[attribute]
        if not isinstance(member, property | cached_property):
            yield from problems_of_function(label, getattr(value, attribute), text)
        elif not text:
            yield f"{label}: no docstring"


def problems_of_class(name: str, cls: type) -> Iterator[str]:
    doc = inspect.cleandoc(cls.__doc__ or "")
    if not doc or doc.startswith(f"{cls.__name__}("):
        yield f"{name}: no docstring"
        return
    if hasattr(cls, "model_fields") or getattr(cls, "_is_protocol", False):
        return  # each key of a configuration has its own docstring
    named = names_of(doc, "Args") | names_of(doc, "Attributes")
    if dataclasses.is_dataclass(cls):
        expected = {f.name for f in dataclasses.fields(cls) if f.init and f.name[0] != "_"}
    else:
        init = vars(cls).get("__init__")
        expected = set(parameters_of(init)) if inspect.isfunction(init) else set()
        if init is not None:
            yield from problems_of_raises(name, init, doc)
    if missing := sorted(expected - named):
        yield f"{name}: Args without {', '.join(missing)}"


def problems_of_function(name: str, fn: Any, text: str | None) -> Iterator[str]:
    if not text:
        yield f"{name}: no docstring"
        return
    fn, doc = inspect.unwrap(fn), inspect.cleandoc(text)
    first = re.split(r"(?<=[.:])\s", doc.replace("\n", " "), maxsplit=1)[0]
    params = parameters_of(fn)
    missing = [param for param in params if param not in names_of(doc, "Args")]
    if len(params) == 1 and re.search(rf"\b{params[0]}\b", first):
        missing = []
    if missing:
        yield f"{name}: Args without {', '.join(missing)}"
    returns = str(fn.__annotations__.get("return"))
    described = "\nReturns:\n" in doc or re.search(r"\b[Rr]eturns\b", first)
    if not described and not re.match(r"None$|NoReturn$|Iterator\[|Generator\[", returns):
        yield f"{name}: no Returns"
    yield from problems_of_raises(name, fn, doc)


def problems_of_raises(name: str, fn: Any, doc: str) -> Iterator[str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    raised = {
        node.exc.func.id
        for node in ast.walk(body)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    }
    if missing := sorted(raised - names_of(doc, "Raises") - NOT_DOCUMENTED):
        yield f"{name}: Raises without {', '.join(missing)}"


def parameters_of(fn: Any) -> list[str]:
    names = inspect.signature(fn).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def names_of(doc: str, section: str) -> set[str]:
    """Returns the names that a section of a docstring lists, such as `a` and `b` in `a, b: text`."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", doc + "\n", re.MULTILINE)
    lines = re.findall(r"^    ([\w*, ]+):", found[1], re.MULTILINE) if found else []
    return {name.strip(" *") for line in lines for name in line.split(",")}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_exported_name_is_documented(name: str) -> None:
    assert list(problems_of(name, EXPORTS[name])) == []


def test_help_shows_no_internal_default() -> None:
    """A default such as `<function never at 0x7f...>` does not help a reader."""
    functions = {name: value for name, value in EXPORTS.items() if not inspect.isclass(value)}
    for name, value in EXPORTS.items():
        if inspect.isclass(value):
            functions |= {
                f"{name}.{key}": member
                for key, member in inspect.getmembers(value, inspect.isfunction)
                if member.__module__.startswith("threed.")
            }
    exported = list(EXPORTS.values())
    for name, function in functions.items():
        for parameter in inspect.signature(function).parameters.values():
            default = parameter.default
            internal = inspect.isfunction(default) and default.__module__.startswith("threed.")
            assert not internal or default in exported, f"{name}: {parameter}"


class Documented:
    """Adds numbers.

    Args:
        start: first number.

    Raises:
        ValueError: if `start` is negative.
    """

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError(start)
        self.start = start

    @property
    def value(self) -> int:
        """The sum."""
        return self.start

    def add(self, number: int) -> None:
        """Adds `number`."""

    def added(self, a: int, b: int) -> int:
        """Adds two numbers and returns the sum.

        Args:
            a, b: the numbers.

        Raises:
            LookupError: if `a` is None.
        """
        if a is None:
            raise LookupError(a)
        return a + b


DOCSTRINGS = {
    "class": ("", "no docstring"),
    "constructor": ("Adds.\n\nRaises:\n    ValueError: x.", "Args without start"),
    "constructor, error": ("Adds.\n\nArgs:\n    start: x.", "Raises without ValueError"),
    "property": ("value", "", "no docstring"),
    "parameter": ("add", "Adds.", "Args without number"),
    "parameters": ("added", "Returns a sum.\n\nArgs:\n    a: x.\n\nRaises:\n    LookupError: x.", "Args without b"),
    "result": ("added", "Adds.\n\nArgs:\n    a, b: x.\n\nRaises:\n    LookupError: x.", "no Returns"),
    "error": ("added", "Returns a sum.\n\nArgs:\n    a, b: x.", "Raises without LookupError"),
}  # fmt: skip


def test_a_complete_docstring_has_no_problem() -> None:
    assert list(problems_of("Documented", Documented)) == []


@pytest.mark.parametrize("case", DOCSTRINGS.values(), ids=DOCSTRINGS)
def test_a_gap_in_a_docstring_is_found(case: tuple[str, ...]) -> None:
    *attribute, text, problem = case
    if not attribute:
        changed = type("Documented", (Documented,), dict(vars(Documented)) | {"__doc__": text})
        found = list(problems_of_class("it", changed))
    elif attribute == ["value"]:
        changed = type(
            "Changed",
            (),
            {"value": property(lambda self: 1), "__doc__": "Text.", "__module__": "threed.x"},
        )
        found = list(problems_of("it", changed))
    else:
        found = list(problems_of_function("it", getattr(Documented, attribute[0]), text))
    assert [line.partition(": ")[2] for line in found] == [problem]
