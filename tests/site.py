"""Writes the sources of the documentation site to build/docs: Markdown that mkdocs.yml describes.

python -m tests.site         # `make docs` runs this before the site generator

The sources are the pages of docs/, CONTRIBUTING.md and CHANGELOG.md, a page per public package with
the names of its `__all__`, and a page with the help texts of the command line. A link to another
file of the repository becomes a link to this file on the web page of the repository.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import inspect
import io
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

from tests.test_floors import ROOT
from threed.cli import commands

SOURCES = ROOT / "build" / "docs"  # mkdocs.yml has the same path
PACKAGES = (
    "threed",
    "threed.layers",
    "threed.models",
    "threed.schedules",
    "threed.data",
    "threed.checkpoint",
    "threed.training",
    "threed.testing",
    "threed.config",
    "threed.interop",
)
TOOLS = ("train", "schedule", "tokenize", "convert", "inspect", "report", "verify")
MOVED = {"CONTRIBUTING.md": "internals/contributing.md", "CHANGELOG.md": "internals/changelog.md"}
INTRODUCTION = """The help texts of `threed`, and of `threed TOOL` for each tool. `plan` has the keys of `train`, which
[All keys](configuration.md) lists in tables."""
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s#]+)")


def write(folder: Path = SOURCES) -> None:
    """Replaces the contents of `folder` by the sources of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for name, place in MOVED.items():
        shutil.copyfile(ROOT / name, folder / place)
    for page in sorted(folder.rglob("*.md")):
        place = str(page.relative_to(folder))
        page.write_text(with_links(with_code(page.read_text()), place))
    for place, text in generated():
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text)


def generated() -> Iterator[tuple[str, str]]:
    """Yields the paths and texts of the pages that are not files of the repository."""
    yield "reference/cli.md", command_line()
    yield "api/index.md", packages()
    for package in PACKAGES:
        yield f"api/{package}.md", reference(package)


# ------------------------------------------------------------------------------------------------------ links and tables


def with_code(text: str) -> str:
    """Returns a page with inline code in the form that Python-Markdown needs.

    In the code of a table, GitHub needs a backslash before a |, which Python-Markdown would print.
    Flags and lists of choices are marked, so that browsers break lines at suitable positions.
    """
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [CODE.sub(lambda match: new_code(match[1]), part) for part in parts[::2]]
    return "".join(parts)


def new_code(words: str) -> str:
    """Returns inline code of the site as HTML, with possible line breaks after each | of a list."""
    words = words.replace("\\|", "|")
    if words.count("|") > 1:
        return (
            f'<code class="choices">{"&#124;<wbr>".join(map(html.escape, words.split("|")))}</code>'
        )
    return f"`{words}`" + ("{.flag}" if words.startswith("--") and len(words) <= 40 else "")


def with_links(text: str, place: str) -> str:
    """Returns a page of the repository with the links of the site.

    Args:
        text: the page.
        place: its path in the site.
    """
    old = next((name for name, moved in MOVED.items() if moved == place), f"docs/{place}")
    return LINK.sub(lambda match: match[1] + new_target(match[2], old, place), text)


def new_target(target: str, old: str, place: str) -> str:
    """Returns a link's target in the site: a relative path, or the URL of a file of the repository.

    Args:
        target: path in the link, relative to the page in the repository.
        old: path of the page in the repository.
        place: path of the page in the site.
    """
    file = os.path.normpath(os.path.join(os.path.dirname(old), target))
    in_site = file.removeprefix("docs/") if file.startswith("docs/") else MOVED.get(file)
    if in_site is None:
        return f"{repository()}/blob/main/{file}"
    return os.path.relpath(in_site, os.path.dirname(place) or ".")


def repository() -> str:
    """Returns the URL of the repository."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    return str(address)


# ----------------------------------------------------------------------------------------------------------------- API


def names_of(package: str) -> tuple[str, ...]:
    """Returns the `__all__` of a package."""
    return tuple(vars(importlib.import_module(package)).get("__all__", ()))


def packages() -> str:
    """Returns the first page of the API reference: a table of the public packages."""
    rows = [
        f"| [`{package}`]({package}.md) | {first_sentence(importlib.import_module(package))} |"
        for package in PACKAGES
    ]
    head = "# Python API\n\nAll other packages and modules of `threed` are private.\n"
    return "\n".join([head, "| package | contents |", "|---|---|", *rows, ""])


def reference(package: str) -> str:
    """Returns the page of a package: its docstring, and an entry for each name of its `__all__`."""
    module = importlib.import_module(package)
    parts, modules = [f"# {package}", inspect.cleandoc(module.__doc__ or "")], []
    for name in names_of(package):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            modules.append(submodule(value))
        else:
            parts.append(entry(package, name, value))
    if modules:
        parts += ["## Packages", "\n".join(modules)]
    return "\n\n".join(parts) + "\n"


def entry(package: str, name: str, value: object) -> str:
    """Returns the entry of a name: a directive for mkdocstrings, or a link to another package.

    The heading has the public name, and the directive names the module that defines it:
    mkdocstrings reads the sources, and does not find names that a package imports on first use.
    """
    public, path = f"{package}.{name}", f"{package}.{name}"
    if inspect.isclass(value) or inspect.isroutine(value):
        path = f"{value.__module__}.{value.__qualname__}"
    for other in PACKAGES[1:]:
        if other != package and path.startswith(f"{other}.") and name in names_of(other):
            anchor = f'<a id="{public}"></a>'
            return f"{anchor}\n\n## {public}\n\nSee [`{other}.{name}`]({other}.md#{other}.{name})."
    if path == public:
        return f"::: {path}"
    options = f"    options:\n      heading: {public}\n      toc_label: {name}"
    return f'<a id="{public}"></a>\n\n::: {path}\n{options}'


def submodule(module: ModuleType) -> str:
    """Returns a line for a package in the `__all__` of `threed`."""
    name = module.__name__
    shown = f"[`{name}`]({name}.md)" if name in PACKAGES else f"`{name}`"
    return f"- {shown}: {first_sentence(module)}"


def first_sentence(module: ModuleType) -> str:
    """Returns the first sentence of a module's docstring."""
    return re.split(r"\.\s|\.$|\n\n", inspect.cleandoc(module.__doc__ or ""))[0].replace("\n", " ")


# -------------------------------------------------------------------------------------------------------- command line


def command_line() -> str:
    """Returns the page of the command line: the help text of each tool."""
    parts = [
        "# Command line",
        INTRODUCTION,
        help_text(),
    ]
    for tool in TOOLS:
        parts += [f"## threed {tool}", help_text(tool)]
    return "\n\n".join(parts) + "\n"


def help_text(*words: str) -> str:
    """Returns a code block with the output of `threed WORDS --help`."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="84", NO_COLOR="1"),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        commands.main([*words, "--help"])
    return f"```text\n{printed.getvalue().rstrip()}\n```"


if __name__ == "__main__":
    write()
