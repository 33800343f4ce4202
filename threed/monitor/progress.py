"""Shows progress on rank 0: a tqdm bar on a terminal, otherwise one line per logged step.

    progress = Progress(total=200, start=0, enabled=rank == 0)
    progress.advance(step)                    # optional: moves the bar between logged steps
    progress.log(step, metrics)               # step    40/200 | loss 2.3145 | lr 9.8e-04 | norm 0.81 | ...
    progress.note("checkpoint saved")         # prints the message above the bar
    progress.close()

If tqdm is not installed, a terminal also gets one line per logged step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


_FIELDS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("train/loss", "loss {:.4f}".format),
    ("val/loss", "val {:.4f}".format),
    ("val/bits_per_byte", "{:.3f} bits/byte".format),
    ("train/lr", "lr {:.1e}".format),
    ("train/grad_norm", "norm {:.2f}".format),
    ("train/skipped_steps", lambda n: f"skipped {n:.0f}" if n else ""),
    ("perf/tokens_per_s", "{:,.0f} tok/s".format),
    ("perf/mfu", "{:.1%} mfu".format),
    ("pp/bubble_measured", "bubble {:.0%}".format),
    ("pp/slowest_stage", "slowest stage {:.0f}".format),
    ("perf/step_s", _duration),
)


def describe(metrics: Mapping[str, Any]) -> str:
    """Formats the main metrics in a fixed order, as `loss 2.3145 | lr 9.8e-04 | ...`."""
    parts = [show(metrics[key]) for key, show in _FIELDS if metrics.get(key) is not None]
    return " | ".join(part for part in parts if part)


class Progress:
    """Shows the progress of a run.

    Args:
        total: number of steps of the run.
        start: number of completed steps.
        enabled: whether this rank shows progress.
        stream: output stream; by default standard output.
    """

    def __init__(self, total: int, start: int, enabled: bool, stream: TextIO | None = None) -> None:
        self._total = total
        self._enabled = enabled
        self._stream = stream or sys.stdout
        self._bar = (
            _bar(total, start, self._stream) if enabled and _can_show_bar(self._stream) else None
        )

    def advance(self, step: int) -> None:
        """Moves the bar to `step`, if there is a bar."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of `step` next to the bar; without a bar, prints a line of metrics."""
        if self._bar is not None:
            self._bar.set_postfix_str(describe(metrics), refresh=False)
            self.advance(step)
        elif self._enabled:
            self._print(f"step {step:>5}/{self._total} | {describe(metrics)}")

    def note(self, text: str) -> None:
        """Prints a message, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._enabled:
            self._print(text)

    def close(self) -> None:
        """Ends the bar; its last state stays visible. Idempotent."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _can_show_bar(stream: TextIO) -> bool:
    """Returns whether `stream` is a terminal of known width; some containers report width 0."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def _bar(total: int, start: int, stream: TextIO) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, initial=start, file=stream, unit="step", dynamic_ncols=True)
