"""Progress: plain lines off a terminal, a bar on one (a real pseudo-terminal), silence when disabled."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from threed.monitor.progress import Progress, describe

ROOT = Path(__file__).resolve().parents[2]
METRICS = {
    "train/loss": 2.31449,
    "train/lr": 9.8e-4,
    "train/grad_norm": 0.812,
    "train/tokens": 5e6,
    "train/skipped_steps": 0,
    "perf/tokens_per_s": 12345.4,
    "perf/step_s": 0.0829,
}
LINE = "loss 2.3145 | lr 9.8e-04 | norm 0.81 | 12,345 tok/s | 83 ms"


def test_a_line_per_logged_step_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    progress = Progress(200, 0, enabled=True, stream=out)
    progress.advance(39)
    progress.log(40, METRICS)
    progress.note("saved")
    progress.log(80, {"val/loss": 2.5, "val/bits_per_byte": 3.6067, "train/loss": float("nan")})
    progress.close()
    assert out.getvalue().splitlines() == [
        f"step    40/200 | {LINE}",
        "saved",
        "step    80/200 | loss nan | val 2.5000 | 3.607 bits/byte",
    ]


def test_describe_shows_what_matters_only() -> None:
    assert describe({}) == ""
    line = describe({"train/skipped_steps": 2, "perf/mfu": 0.4127, "perf/step_s": 12.34})
    assert line == "skipped 2 | 41.3% mfu | 12.3 s"
    assert (
        describe({"pp/bubble_measured": 0.412, "pp/slowest_stage": 0})
        == "bubble 41% | slowest stage 0"
    )


def test_disabled_says_nothing() -> None:
    out = io.StringIO()
    progress = Progress(200, 0, enabled=False, stream=out)
    progress.advance(1)
    progress.log(40, METRICS)
    progress.note("saved")
    progress.close()
    assert out.getvalue() == ""


PROGRAM = f"""
from threed.monitor.progress import Progress
progress = Progress(200, 20, enabled=True)
progress.advance(30)
progress.log(40, {METRICS!r})
progress.note("checkpoint saved")
progress.log(200, {METRICS!r})
progress.close()
progress.close()
"""


def _on_a_terminal(columns: int) -> str:
    """What PROGRAM prints on a pseudo-terminal of that width."""
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, columns))
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=terminal, check=True)
    os.close(terminal)
    return _drain(main)


def test_a_bar_on_a_terminal() -> None:
    pytest.importorskip("tqdm")
    text = _on_a_terminal(160)
    assert "20/200" in text
    assert "200/200" in text
    assert LINE in text
    assert "\rcheckpoint saved\r\n" in text  # a line of its own, at the left edge
    assert "step   200/200 |" not in text


def test_lines_on_a_terminal_that_does_not_know_its_width() -> None:
    lines = [f"step    40/200 | {LINE}", "checkpoint saved", f"step   200/200 | {LINE}"]
    assert _on_a_terminal(0).splitlines() == lines


def _drain(descriptor: int) -> str:
    chunks = []
    try:
        while chunk := os.read(descriptor, 65536):
            chunks.append(chunk)
    except OSError:  # Linux reports the closed other end of a pseudo-terminal as an error
        pass
    os.close(descriptor)
    return b"".join(chunks).decode()
