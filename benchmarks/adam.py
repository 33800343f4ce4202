"""Compares AdamW on the CPU: threed's kernel, torch's, DeepSpeed's and torch.compile's.

    python benchmarks/adam.py --numel 200000000 --threads 2
    python benchmarks/adam.py --numel 50000000 --threads 1 --huge-pages --rounds 10

There are two measurements:

    full: bf16 gradients, fp32 p, m and v, and a bf16 copy of p, as in mixed-precision training with
        the optimizer on the host. An implementation without bf16 support converts in separate
        passes.
    step: fp32 gradients and no copy: only the call of the optimizer.

Bandwidths are computed with 28 bytes per parameter, the least that `full` can transfer. All
implementations update the same tensors in turn. In every round, after each of them, the bandwidth
of an in-place addition is measured (c += a, 12 bytes per element). Results are for the fastest
repetition, as in STREAM. A JSON record per implementation is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import host  # noqa: E402
from threed.core import native  # noqa: E402
from threed.memory.pool import host_buffer  # noqa: E402
from threed.ops.adam import Adam  # noqa: E402
from threed.ops.update import StepScalars  # noqa: E402

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
CHUNK = 10_000_000  # parameters per tensor
STREAM = 64 * 2**20  # elements per array of the in-place addition
LEAST_BYTES = 28  # per parameter: p, m and v are read and written, bf16 is read, bf16 is written


class Arrays:
    """Parameters, moments, gradients and copies, as lists of tensors with seeded values."""

    def __init__(self, numel: int, huge: bool) -> None:
        self.huge = huge
        sizes = [CHUNK] * (numel // CHUNK) + ([numel % CHUNK] if numel % CHUNK else [])
        random = torch.Generator().manual_seed(0)
        self.p = [self.empty(size, torch.float32).normal_(generator=random) for size in sizes]
        self.m, self.v, self.g32 = (
            [self.empty(size, torch.float32).zero_() for size in sizes] for _ in range(3)
        )
        self.g16 = [self.empty(size, torch.bfloat16).normal_(generator=random) for size in sizes]
        self.p16 = [self.empty(size, torch.bfloat16).zero_() for size in sizes]
        for wide, narrow in zip(self.g32, self.g16, strict=True):
            wide.copy_(narrow)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor, from torch's allocator or in huge pages."""
        return (
            host_buffer(size * dtype.itemsize).view(dtype)
            if self.huge
            else torch.empty(size, dtype=dtype)
        )


class Threed:
    """threed's kernel, csrc/cpu/adam.cpp."""

    def __init__(self, arrays: Arrays) -> None:
        if native.library("cpu") is None:
            raise ImportError(f"no native library: {native.status()['cpu']}")
        self.arrays, self.rule, self.steps = arrays, Adam(*BETAS, EPS), 0

    def _update(self, grads: list[Tensor], copies: list[Tensor] | list[None]) -> None:
        self.steps += 1
        now = StepScalars(
            *(torch.tensor(value, dtype=torch.float64) for value in (LR, self.steps, 1.0, 0.0))
        )
        arrays = self.arrays
        for p, g, m, v, out in zip(arrays.p, grads, arrays.m, arrays.v, copies, strict=True):
            self.rule.update(p, g, (m, v), now, DECAY, out)

    def step(self) -> None:
        """Runs only the optimizer, without conversions."""
        self._update(self.arrays.g32, [None] * len(self.arrays.p))

    def full(self) -> None:
        """Runs the update with bf16 gradients and a bf16 copy."""
        self._update(self.arrays.g16, self.arrays.p16)


class TorchFused:
    """torch.optim.AdamW(fused=True), with a conversion before and after it."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.params = [torch.nn.Parameter(p) for p in arrays.p]
        self.optimizer = self.make()
        for param, g, m, v in zip(self.params, arrays.g32, arrays.m, arrays.v, strict=True):
            param.grad = g
            self.optimizer.state[param] = {"step": self.first_step(), "exp_avg": m, "exp_avg_sq": v}

    def make(self) -> Any:
        """Returns the optimizer."""
        return torch.optim.AdamW(
            self.params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )

    def first_step(self) -> Any:
        """Returns the initial value of the optimizer's counter."""
        return torch.zeros(())

    def step(self) -> None:
        """Runs only the optimizer, without conversions."""
        self.optimizer.step()

    def full(self) -> None:
        """Converts gradients to fp32, runs the optimizer, and converts parameters to bf16."""
        for wide, narrow in zip(self.arrays.g32, self.arrays.g16, strict=True):
            wide.copy_(narrow)
        self.optimizer.step()
        for narrow, wide in zip(self.arrays.p16, self.arrays.p, strict=True):
            narrow.copy_(wide)


class DeepSpeed(TorchFused):
    """DeepSpeedCPUAdam, with the same conversions.

    It is compiled at its first use; TORCH_EXTENSIONS_DIR is the folder for the result.
    """

    def make(self) -> Any:
        """Returns the optimizer; raises ImportError without DeepSpeed."""
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # so that ninja is found
        os.environ["PATH"] = (
            f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        )
        with _stdout_to_stderr():
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(self.params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)

    def first_step(self) -> int:
        """Returns the initial value of the optimizer's counter, a number."""
        return 0


class Compiled:
    """The formulas in torch.compile, which also fuses the conversions."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays, self.steps = arrays, 0
        self.compiled = torch.compile(_formulas, dynamic=False)

    def _update(self, grads: list[Tensor], copies: list[Tensor] | list[None]) -> None:
        self.steps += 1
        corrections = [torch.tensor(1 - beta**self.steps) for beta in BETAS]
        arrays = self.arrays
        for p, g, m, v, out in zip(arrays.p, grads, arrays.m, arrays.v, copies, strict=True):
            self.compiled(p, m, v, g, out, *corrections)

    step, full = Threed.step, Threed.full


def _formulas(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    out: Tensor | None,
    correction1: Tensor,
    correction2: Tensor,
) -> None:
    g = g.float()
    m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
    v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
    p.mul_(1 - LR * DECAY)
    p.sub_((LR / correction1) * m / ((v / correction2).sqrt() + EPS))
    if out is not None:
        out.copy_(p)


CONTENDERS: dict[str, Callable[[Arrays], Any]] = {
    "threed": Threed, "torch_fused": TorchFused, "deepspeed_cpu_adam": DeepSpeed, "torch_compile": Compiled
}  # fmt: skip


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Context manager: output of libraries and compilers to stdout goes to stderr instead."""
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)
        os.close(out)


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def chosen(names: list[str], arrays: Arrays) -> dict[str, Any]:
    """Returns the implementations that can run here, and prints the names of the others.

    It also checks that all of them compute the same update from the same start.
    """
    found, wanted = {}, None
    for name in names:
        small = Arrays(10_007, huge=False)
        try:
            twin = CONTENDERS[name](small)
            for _ in range(3):
                twin.full()
        except ImportError as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            continue
        wanted = small if wanted is None else wanted
        torch.testing.assert_close(
            small.p, wanted.p, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        found[name] = CONTENDERS[name](arrays)
    return found


def measure(
    contenders: dict[str, Any],
    rounds: int,
    streams: tuple[Tensor, Tensor],
    wait: Callable[[], None],
) -> tuple[dict[str, Any], float]:
    """Measures all implementations in turn.

    Returns:
        The seconds of each implementation's calls, and of the fastest in-place addition.
    """
    a, c = streams
    times: dict[str, Any] = {name: {"step": [], "full": [], "foreign": []} for name in contenders}
    updates = []
    for _ in range(rounds):
        for name, contender in contenders.items():
            wait()
            before = host.stamp()
            for kind in ("step", "full"):
                times[name][kind].append(seconds(getattr(contender, kind)))
            wall, own, everybody = (
                end - begin for begin, end in zip(before, host.stamp(), strict=True)
            )
            times[name]["foreign"].append((everybody - own) / wall)
            updates += [seconds(functools.partial(c.add_, a)) for _ in range(2)]
    return times, min(updates)


def record(
    name: str, times: dict[str, list[float]], update: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns an implementation's record.

    Args:
        name: name of the implementation.
        times: seconds of its calls.
        update: bandwidth of the in-place addition, in GB/s.
        args: the command line.
    """
    foreign = times["foreign"][times["full"].index(min(times["full"]))]
    found: dict[str, Any] = {
        "impl": name, "numel": args.numel, "threads": args.threads, "huge_pages": args.huge_pages,
        "rounds": args.rounds, "update_gb_s": round(update, 2), "foreign_cores": round(foreign, 2),
        "torch": torch.__version__,
    }  # fmt: skip
    for kind in ("step", "full"):
        best, median = min(times[kind]), statistics.median(times[kind])
        rate = LEAST_BYTES * args.numel / best / 1e9
        found[kind] = {
            "best_ms": round(1e3 * best, 2), "median_ms": round(1e3 * median, 2),
            "spread_pct": round(100 * (max(times[kind]) - best) / median, 1),
            "gb_s": round(rate, 2), "pct_of_update": round(100 * rate / update, 1),
        }  # fmt: skip
    return found


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--numel",
        type=int,
        default=50_000_000,
        help="parameters (default 50M; each takes 20 bytes)",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument(
        "--huge-pages", action="store_true", help="all arrays on huge pages, the bandwidth's too"
    )
    parser.add_argument(
        "--quiet", type=float, default=0.3, help="a turn begins when others use fewer cores"
    )
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds of waiting for that in all (default 0)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a record per implementation."""
    args = parsed(argv)
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    arrays = Arrays(args.numel, args.huge_pages)
    contenders = chosen(args.only, arrays)
    streams = (
        arrays.empty(STREAM, torch.float32).fill_(1),
        arrays.empty(STREAM, torch.float32).fill_(1),
    )
    measure(
        contenders, 1, streams, lambda: None
    )  # a first round compiles the code, and touches all pages of memory
    end = time.monotonic() + args.patience
    times, best = measure(
        contenders, args.rounds, streams, lambda: host.wait_until_quiet(args.quiet, end)
    )
    for name in contenders:
        print(json.dumps(record(name, times[name], 12 * STREAM / best / 1e9, args)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
