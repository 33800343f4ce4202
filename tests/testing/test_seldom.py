"""The mark `seldom` of tests/conftest.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.conftest import move_seldom_variants_to_the_grid

def pytest_configure(config):
    for mark in ("grid", "seldom"):
        config.addinivalue_line("markers", mark)

def pytest_collection_modifyitems(items, config):
    move_seldom_variants_to_the_grid(items, config)
"""
TESTS = """
import pytest

@pytest.mark.seldom(NAMES)
@pytest.mark.parametrize("size", [1, 2, 12])
def test_sizes(size):
    pass

def test_other():
    pass
"""


def collect(folder: Path, names: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_them.py").write_text(TESTS.replace("NAMES", names))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    path = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=path, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("names", "daily"), [('"1"', {"2", "12"}), ('"*2"', {"1"}), ('"1", "12"', {"2"})]
)
def test_named_variants_run_with_the_grid(tmp_path: Path, names: str, daily: set[str]) -> None:
    tests = {"1", "2", "12"}
    for mark, variants in (("not grid", daily), ("grid", tests - daily)):
        done = collect(tmp_path, names, "-m", mark)
        assert {name for name in tests if f"test_sizes[{name}]" in done.stdout} == variants
        assert ("test_other" in done.stdout) == (mark == "not grid")


def test_a_name_without_a_variant_is_an_error(tmp_path: Path) -> None:
    done = collect(tmp_path, '"1", "3"')
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_them.py::test_sizes: no variant ['3']" in done.stderr
    one = collect(tmp_path, '"1", "3"', "test_them.py::test_sizes[2]")
    assert one.returncode == 0
