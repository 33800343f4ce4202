"""The documentation site builds without warnings and without a network, and its links work."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

from tests import site

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
built = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="needs mkdocs-material and mkdocstrings[python]: pip install 'threed[docs]'",
)
# No proxy listens on this address, so a download fails.
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")


class Page(HTMLParser):
    """The parts of a page that the tests read.

    Attributes:
        ids: the anchors of the page.
        links: targets of links.
        loaded: addresses of scripts, style sheets and pictures.
        headings: the texts of its headings of level 2.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids = set[str]()
        self.links, self.loaded, self.headings = list[str](), list[str](), list[str]()
        self.inside = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "h2":
            self.inside = True
            self.headings.append("")
        elif tag == "a" and "href" in values:
            self.inside &= "headerlink" not in values.get("class", "")
            self.links.append(values["href"])
        elif tag in ("script", "img", "iframe") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(values["href"])

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag != "h2"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.headings[-1] += f" {data.strip()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as by `make docs`, but outside of the repository."""
    home = tmp_path_factory.mktemp("site")
    (home / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    (home / "threed").symlink_to(ROOT / "threed")
    site.write(home / "build" / "docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=home,
        env={**os.environ, **OFFLINE, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Documentation built" in done.stderr  # with --quiet, --strict would ignore warnings
    return home / "site"


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


@built
@pytest.mark.slow
def test_links_lead_somewhere(folder: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute
            continue
        for target in [*page.links, *page.loaded]:
            name, _, anchor = unquote(target).partition("#")
            if ":" in name:
                continue
            file = (path.parent / name).resolve() if name else path
            if not file.is_file() or (anchor and anchor not in pages[file].ids | {"__top"}):
                broken.append(f"{path.relative_to(folder)}: {target}")
    assert broken == []


@built
@pytest.mark.slow
def test_nothing_is_loaded_from_the_network(folder: Path, pages: dict[Path, Page]) -> None:
    loaded = {target for page in pages.values() for target in page.loaded}
    assert [target for target in loaded if target.startswith(("http:", "https:", "//"))] == []
    assert any(target.endswith("site/iframe-worker.js") for target in loaded)
    assert (folder / "search" / "search_index.js").stat().st_size > 100_000


@built
@pytest.mark.slow
@pytest.mark.parametrize("package", site.PACKAGES)
def test_a_page_of_the_api_has_the_public_names(package: str, pages: dict[Path, Page]) -> None:
    (page,) = (page for path, page in pages.items() if path.name == f"{package}.html")
    module = importlib.import_module(package)
    names = [
        f"{package}.{name}"
        for name in site.names_of(package)
        if not isinstance(getattr(module, name), ModuleType)
    ]
    listed = [heading.split()[0] for heading in page.headings]  # without labels such as dataclass
    assert [name for name in listed if name != "Packages"] == names
    assert set(names) <= page.ids


@built
@pytest.mark.slow
def test_docstrings_are_parsed(folder: Path) -> None:
    text = (folder / "api" / "threed.html").read_text()
    for section in ("Parameters:", "Returns:", "Raises:", "Attributes:"):
        assert section in text
    for page in (folder / "api").glob("*.html"):
        assert "::</p>" not in page.read_text(), (
            f"{page.name}: Markdown: 'Example:', not 'Example::'"
        )
        names = re.findall(r"<b><code>(?:<span[^>]*>)?([^<]+)<", page.read_text())
        wrong = [name for name in names if not name.lstrip("*").isidentifier()]
        assert wrong == [], f"{page.name}: one entry of Args or Attributes per name"


def test_links_of_pages() -> None:
    move = site.new_target
    assert move("zero.md", "docs/guide/usage.md", "guide/usage.md") == "zero.md"
    assert move("../index.md", "docs/guide/usage.md", "guide/usage.md") == "../index.md"
    assert (
        move("docs/guide/zero.md", "CONTRIBUTING.md", "internals/contributing.md")
        == "../guide/zero.md"
    )
    assert (
        move("../../CONTRIBUTING.md", "docs/guide/zero.md", "guide/zero.md")
        == "../internals/contributing.md"
    )
    elsewhere = move("../../README.md", "docs/guide/zero.md", "guide/zero.md")
    assert elsewhere == f"{site.repository()}/blob/main/README.md"


def test_inline_code_of_pages() -> None:
    assert site.with_code("| `a\\|b` | c\\|d |") == "| `a|b` | c\\|d |"
    assert site.with_code("`--zero.stage 3`, `tp`") == "`--zero.stage 3`{.flag}, `tp`"
    assert site.with_code("`a|b|N,N`") == '<code class="choices">a&#124;<wbr>b&#124;<wbr>N,N</code>'
    assert site.with_code(block := "```sh\necho `--help`\n```\n") == block
