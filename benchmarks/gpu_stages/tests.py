"""Runs the tests that need a GPU, `pytest -m gpu`.

They run the emulator's cases on the GPU, and compare bits if the arithmetic is exact. A rehearsal
only collects them.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu_stages.stage import Stage, main

# Tests that need a GPU; test_benchmarks_gpu.py checks that there are no others. All of tests/ takes 15 s to collect.
PATHS = (
    "tests/cuda", "tests/memory/test_memory_pool.py", "tests/ops/test_ops_rules.py", "tests/zero/test_zero_offload.py",
)  # fmt: skip


def results(report: Path) -> tuple[dict[str, int], list[str]]:
    """Returns the number of tests per outcome, and the failures, from pytest's junit file.

    For each failure, the first line of its message is included.
    """
    ways: Counter[str] = Counter(passed=0, failed=0, error=0, skipped=0)
    failures = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
        found = [(kinds[child.tag], child) for child in case if child.tag in kinds]
        way, child = found[0] if found else ("passed", None)
        ways[way] += 1
        if child is not None and way != "skipped":
            first = (child.get("message") or "").strip().splitlines()[:1]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {''.join(first)[:200]}")
    return dict(ways), failures


def run(stage: Stage) -> None:
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    if not stage.cuda:
        done = stage.run(
            [*pytest, "tests/cuda/test_sums.py", "tests/cuda/test_dropout.py", "--collect-only"]
        )
        found = re.search(r"(\d+)(?:/\d+)? tests collected", done.stdout)
        if found is None:
            raise RuntimeError(f"pytest collected nothing: {(done.stdout + done.stderr)[-300:]}")
        stage.put(collected=int(found[1]), note="collected, not run")
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = stage.run([*pytest, *PATHS, f"--junitxml={report}"])
        print(done.stdout[-20_000:], done.stderr[-5_000:])
        if not report.is_file():
            raise RuntimeError(
                f"pytest ended with {done.returncode} and no report: {done.stdout[-300:]}"
            )
        counts, failures = results(report)
    stage.put(counts=counts, failures=failures)
    if failures:
        raise AssertionError(
            f"{len(failures)} of {sum(counts.values())} tests fail, {failures[0]} first"
        )


if __name__ == "__main__":
    main("tests", run)
