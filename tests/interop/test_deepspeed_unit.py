"""The runner of DeepSpeed's unit tests: which files it runs, and how it counts results."""

from __future__ import annotations

import ast

import pytest

from tests.interop import deepspeed_unit

OFFERED = """
import deepspeed
import deepspeed.comm as dist
from deepspeed.ops.adam import FusedAdam
dist.barrier(); deepspeed.zero.Init(); deepspeed.utils.logger.info("")
"""


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (OFFERED, []),
        ("from deepspeed.ops.lamb import FusedLamb", ["deepspeed.ops.lamb.FusedLamb"]),
        ("import deepspeed\ndeepspeed.init_inference()", ["deepspeed.init_inference"]),
        ("from deepspeed import comm\ncomm.broken", ["deepspeed.comm.broken"]),
        ("import deepspeed.moe.layer", ["deepspeed.moe.layer"]),
        ("from deepspeed.checkpoint import *", []),
    ],
)
def test_missing_names(text: str, missing: list[str]) -> None:
    assert list(deepspeed_unit.missing(ast.parse(text))) == missing


def test_results(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": "unit/a/test_x.py::test_1[0]", "outcome": "passed", "error": "", "kinds": []},
        {"id": "unit/a/test_x.py::test_1[1]", "outcome": "failed", "error": "x", "kinds": ["ConfigError"]},
        {"id": "unit/a/test_x.py::test_2", "outcome": "failed", "error": "x", "kinds": ["AssertionError"]},
    ]  # fmt: skip
    expected = {"passes": ["a/test_x.py::test_1"], "internal": {"a/test_x.py::test_2": "a reason"}}
    assert deepspeed_unit.report(rows, expected, complete=True) == 0
    assert deepspeed_unit.report(rows, {**expected, "internal": {}}, complete=True) == 1
    assert deepspeed_unit.report(rows[1:], expected, complete=True) == 1
    assert "failed: unit/a/test_x.py::test_2: x" in capsys.readouterr().out


def test_comparison_with_deepspeed() -> None:
    def row(name: str, outcome: str, error: str = "") -> dict[str, object]:
        return {"id": f"unit/a/test_x.py::{name}", "outcome": outcome, "error": error, "kinds": []}

    real = [row(name, "passed") for name in ("both", "refused", "fails", "skipped", "absent")]
    real += [row("neither", "failed")]
    own = [
        row("both", "passed"),
        row("refused", "failed", "threed does not offer x: use y"),
        row("fails", "failed", "text"),
        row("skipped", "skipped"),
        row("neither", "failed"),
    ]
    assert list(deepspeed_unit.differing(own, real)) == [
        ("unit/a/test_x.py::absent", "not run"),
        ("unit/a/test_x.py::fails", "text"),
        ("unit/a/test_x.py::skipped", "skipped"),
    ]
