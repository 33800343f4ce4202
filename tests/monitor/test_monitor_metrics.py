"""metrics.jsonl: valid JSON for any float, whole lines or none, truncation on resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threed.monitor.metrics import MetricsFile, decode, encode, read

ROOT = Path(__file__).resolve().parents[2]
VALUES = st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans())


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _fill(path: Path, steps: range) -> list[dict[str, float]]:
    rows = [{"step": step, "train/loss": 1.0 / step} for step in steps]
    with MetricsFile(path) as file:
        for row in rows:
            file.append(row)
    return rows


@given(st.dictionaries(st.text().filter(lambda key: key != "non_finite"), VALUES))
def test_any_row_is_one_line_of_strict_json_and_comes_back(row: dict[str, object]) -> None:
    line = encode(row)
    assert "\n" not in line
    json.loads(line, parse_constant=_refuse)
    # repr tells nan from nan, 0.0 from -0.0 and 1 from 1.0 from True, which == does not
    assert {key: repr(value) for key, value in decode(line).items()} == {
        k: repr(v) for k, v in row.items()
    }


def test_non_finite_values_are_named_beside_a_null() -> None:
    line = encode(
        {
            "step": 7,
            "train/loss": math.nan,
            "train/grad_norm": math.inf,
            "x": -math.inf,
            "train/lr": 0.1,
        }
    )
    assert json.loads(line) == {
        "step": 7,
        "train/loss": None,
        "train/grad_norm": None,
        "x": None,
        "train/lr": 0.1,
        "non_finite": {"train/loss": "nan", "train/grad_norm": "inf", "x": "-inf"},
    }


def test_each_row_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.append({"step": step})
        assert [row["step"] for row in read(path)] == list(range(1, step + 1))
    file.close()
    file.close()


@pytest.mark.parametrize("cut", range(1, 28))
def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = _fill(path, range(1, 4))
    last = len(encode(rows[2])) + 1
    path.write_bytes(path.read_bytes()[:-cut])
    whole = 3 if cut == 1 else 2  # only the line end is missing: the row itself is there
    expected = rows[:whole] if cut <= last else rows[:1]
    assert read(path) == expected
    with MetricsFile(path) as file:
        file.append({"step": 9})
    assert read(path) == [*expected, {"step": 9}]


def test_truncate_after_keeps_earlier_steps_and_goes_on_appending(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = _fill(path, range(1, 11))
    with MetricsFile(path) as file:
        file.append({"step": 6, "val/loss": 2.0})
        assert file.truncate_after(6) == 4
        file.append({"step": 7, "train/loss": 0.5})
        assert file.truncate_after(100) == 0
    assert read(path) == [*rows[:6], {"step": 6, "val/loss": 2.0}, {"step": 7, "train/loss": 0.5}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_damage_in_the_middle_is_named_by_read_and_dropped_by_truncate(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = _fill(path, range(1, 4))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"\0\0\0\0", *lines[1:]]))
    with pytest.raises(ValueError, match="line 2 is damaged"):
        read(path)
    with MetricsFile(path) as file:
        assert file.truncate_after(3) == 1
    assert read(path) == rows


def test_a_value_json_cannot_hold_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m.jsonl") as file:
        with pytest.raises(TypeError):
            file.append({"step": 1, "train/loss": object()})
        file.append({"step": 2})
    assert read(tmp_path / "m.jsonl") == [{"step": 2}]


def test_a_full_disk_takes_back_the_half_written_row(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes write(2) fail half way through a row, as a full disk does."""
    program = f"""
import resource
from threed.monitor.metrics import MetricsFile, read
path = {str(tmp_path / "m.jsonl")!r}
file = MetricsFile(path)
file.append({{"step": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
try:
    file.append({{"step": 2, "text": "x" * 100}})
except OSError as error:
    print("refused", error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
file.append({{"step": 3}})
print(read(path))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["refused 27", "[{'step': 1}, {'step': 3}]"]
