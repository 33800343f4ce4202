"""Runs DeepSpeed's own unit tests on the CPU, with threed as deepspeed.

git clone https://github.com/deepspeedai/DeepSpeed       # tested with commit edaa722
python -m tests.interop.deepspeed_unit DeepSpeed
python -m tests.interop.deepspeed_unit DeepSpeed checkpoint/test_sparse.py -k strict
python -m tests.interop.deepspeed_unit DeepSpeed --real real.jsonl      # DeepSpeed itself
python -m tests.interop.deepspeed_unit DeepSpeed --compare real.jsonl

Runs the test files that use only names which threed offers (`names.OFFERED`). Needs pytest below
8.4, because of the fixtures of these tests, and transformers; DeepSpeed must not be installed. Further
arguments are files below tests/unit and options of pytest. Prints a table per folder and per test
function: passed, refused (the error begins "threed does not offer", or is a ConfigError), skipped,
failed, and internal, which are failures of the functions under `internal` in deepspeed_unit.toml. The
exit status is 1 if another function fails, or if a function under `passes` has no test that passes.

`--real FILE` runs the same tests with DeepSpeed itself, which must be installed, writes the results to
FILE, and prints the same table. `--compare FILE` reads these results, and also prints the cases that pass
with DeepSpeed, and that neither pass nor are refused with threed, internal ones too. DeepSpeed compiles
its operators on their first use, which takes longer than a test may: load them once before `--real`
(`python -c "from deepspeed.ops.op_builder import *; CPUAdamBuilder().load(); FusedAdamBuilder().load()"`).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.interop.deepspeed import namespace

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_suffix(".toml")
COLUMNS = ("passed", "refused", "skipped", "failed", "internal")


def main(arguments: Sequence[str]) -> int:
    """Runs the tests and prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(prog="deepspeed_unit", allow_abbrev=False)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--real", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    options, given = parser.parse_known_args(arguments)
    tests = options.clone.resolve() / "tests"
    expected = tomllib.loads(EXPECTED.read_text(encoding="utf-8"))
    files = [f"unit/{name}" for name in given if name.endswith(".py")]
    files = files or sorted(offered_files(tests, expected["needs"]))
    with tempfile.TemporaryDirectory() as scratch:
        results = (options.real or Path(scratch) / "results.jsonl").resolve()
        results.write_text("", encoding="utf-8")
        if options.real is None:
            (Path(scratch) / "sitecustomize.py").write_text(
                "from tests.interop import deepspeed_unit_site\n", encoding="utf-8"
            )
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "tests.interop.deepspeed_unit_plugin",
            "-p", "no:cacheprovider", *(name for name in given if not name.endswith(".py")), *files,
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": f"{scratch}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "8",
            "DS_DISABLE_REUSE_DIST_ENV": "1", "OMP_NUM_THREADS": "1",
            "DEEPSPEED_UNIT_RESULTS": str(results),
        }  # fmt: skip
        subprocess.run(command, cwd=tests, env=environment, check=False)
        rows = read_rows(results)
    if options.real is not None:
        return report(rows, {"passes": [], "internal": {}}, complete=True)
    status = report(rows, expected, complete=not given)
    if options.compare is not None:
        for case, error in differing(rows, read_rows(options.compare)):
            print(f"passes with DeepSpeed only: {case}: {' '.join(error.split())[:300]}")
    return status


# --------------------------------------------------------------------------------------------------------------- files


def offered_files(tests: Path, left_out: Mapping[str, str]) -> Iterator[str]:
    """Yields the test files that use only names which threed offers, relative to `tests`.

    Args:
        tests: the folder tests of a clone of DeepSpeed.
        left_out: files that are not run, with the reason.
    """
    for path in (tests / "unit").rglob("test_*.py"):
        name = path.relative_to(tests / "unit").as_posix()
        if name not in left_out and not any(missing(ast.parse(path.read_text(encoding="utf-8")))):
            yield f"unit/{name}"


def missing(tree: ast.Module) -> Iterator[str]:
    """Yields the names of deepspeed that a file uses and threed does not offer."""
    modules = namespace.modules()
    local: dict[str, str] = {}  # name in the file -> module of deepspeed
    for node in ast.walk(tree):
        for name, target in _imports(node):
            if target in modules:
                local[name] = target
            elif not _offered(target):
                yield target
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in local and rest and not _reachable(local[first], rest):
                yield ".".join((local[first], *rest))


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (name in the file, full name) for each name of deepspeed that a statement imports."""
    if isinstance(node, ast.Import):
        found = [(entry.asname or "deepspeed", entry.name) for entry in node.names]
        for name, full in found:
            if full.partition(".")[0] == "deepspeed":
                yield name, full
                if name == "deepspeed":
                    yield name, "deepspeed"
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "deepspeed":
        for entry in node.names:
            star = entry.name == "*"
            full = str(node.module) if star else f"{node.module}.{entry.name}"
            yield "" if star else entry.asname or entry.name, full


def _offered(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return module in namespace.modules() and attribute in dir(namespace.modules()[module])


def _reachable(module: str, names: Iterable[str]) -> bool:
    """Returns whether names of an attribute, such as ["comm", "barrier"], exist in a module."""
    for name in names:
        full = f"{module}.{name}"
        if full not in namespace.modules():
            return _offered(full)
        module = full
    return True


# -------------------------------------------------------------------------------------------------------------- report


Table = Mapping[str, Counter[str]]


def read_rows(file: Path) -> list[Mapping[str, Any]]:
    """Returns the results of the plugin; of a test that was run twice, the last result."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return list({row["id"]: row for row in rows}.values())


def function_of(row: Mapping[str, Any]) -> str:
    """Returns the file, class and function of a result, without the parameters."""
    return str(row["id"]).partition("[")[0].removeprefix("unit/")


def count(rows: Iterable[Mapping[str, Any]], internal: Iterable[str]) -> Table:
    """Returns the number of results of each kind, per function."""
    functions: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        function = function_of(row)
        functions[function][kind_of(row, function in internal)] += 1
    return functions


def report(rows: Sequence[Mapping[str, Any]], expected: Mapping[str, Any], complete: bool) -> int:
    """Prints the tables, and returns the exit status.

    Args:
        rows: the results of the plugin.
        expected: the content of deepspeed_unit.toml.
        complete: whether all files were run.
    """
    functions = count(rows, expected["internal"])
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for function, counts in functions.items():
        folders[function.partition("::")[0].rpartition("/")[0]] += counts
    for row in rows:
        if kind_of(row, function_of(row) in expected["internal"]) == "failed":
            print(f"failed: {row['id']}: {' '.join(row['error'].split())[:300]}")
    for table in (functions, folders, {"all": sum(folders.values(), Counter())}):
        print(f"\n{'':90}", *(f"{name:>8}" for name in COLUMNS))
        for name, counts in sorted(table.items()):
            print(f"{name:90}", *(f"{counts[column]:8}" for column in COLUMNS))
    absent = [name for name in expected["passes"] if complete and not functions[name]["passed"]]
    for name in absent:
        print(f"does not pass: {name}")
    failed = any(counts["failed"] for counts in folders.values())
    return int(failed or bool(absent))


def differing(
    rows: Iterable[Mapping[str, Any]], real: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yields (case, error) for the cases that pass only with DeepSpeed itself.

    Args:
        rows: the results with threed.
        real: the results with DeepSpeed.
    """
    own = {row["id"]: row for row in rows}
    for name in sorted(row["id"] for row in real if row["outcome"] == "passed"):
        found = own.get(name, {"outcome": "not run", "error": ""})
        if (kind := kind_of(found, False)) not in ("passed", "refused"):
            yield name, found["error"] or kind


def kind_of(row: Mapping[str, Any], internal: bool) -> str:
    """Returns the column of a result."""
    if row["outcome"] != "failed":
        return str(row["outcome"])
    if "threed does not offer" in row["error"] or "ConfigError" in row["kinds"]:
        return "refused"
    return "internal" if internal else "failed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
