"""Compares threed with its peers on one machine; see `docs/reference/performance.md`.

    python benchmarks/run.py                                         # all suites without a drive: 1.5 hours on 2 cores
    python benchmarks/run.py --suites zero                           # ZeRO, and DDP, FSDP2, torch, DeepSpeed
    python benchmarks/run.py --suites zero --only ddp threed_zero2   # two engines of it
    python benchmarks/run.py --suites offload --folder /nvme         # offload, and DeepSpeed's: 20 GiB of memory
    python benchmarks/run.py --suites accumulate --folder /nvme      # 8 micro-batches per step, all states on the drive
    python benchmarks/run.py --quick                                 # fewer rounds, only times
    python benchmarks/run.py --show benchmarks/results/X.jsonl       # the tables of an earlier run

The engines of a suite (`benchmarks/suites.py`) run in turn in one process group, whenever the
machine is idle. Then each runs alone, to measure its memory and the bytes that it sends. A name
such as `offload-cpu` selects all suites that begin with it. Records are written to
benchmarks/results/<time>.jsonl, and Markdown tables are printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.suites import FP32_STAGES, STAGES, SUITES, Suite, wire_mib  # noqa: E402


def launched(
    ranks: int, words: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs a command on `ranks` ranks with torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *words,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def measure(suite: Suite, engines: list[str], flags: list[str]) -> dict[str, Any]:
    """Runs the worker on the suite's ranks and returns its record.

    Raises:
        RuntimeError: with the end of its output, if the worker fails.
    """
    tools = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # to find ninja
    )
    environment = {**os.environ, "PATH": tools, "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"OMP_NUM_THREADS": str(suite.threads), "PYTHONWARNINGS": "ignore"}
    own = [*suite.options, "--threads", str(suite.threads)]
    done = launched(
        suite.ranks, ["-m", "benchmarks.worker", "--engines", *engines, *own, *flags], environment
    )
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not records:
        raise RuntimeError(f"worker {' '.join(engines)} failed:\n{done.stderr[-3000:]}")
    if "error" in records[-1]:
        raise RuntimeError(records[-1]["error"])
    return dict(records[-1])


def chosen(suite: Suite, args: argparse.Namespace) -> list[str]:
    """Returns the requested engines of a suite that can run here, and prints why others cannot."""
    names = [name for name in suite.engines if not args.only or name in args.only]
    if importlib.util.find_spec("deepspeed") is None:
        missing = [name for name in names if name.startswith("deepspeed")]
        if missing:
            print(f"left out, as DeepSpeed is not installed: {' '.join(missing)}", file=sys.stderr)
        names = [name for name in names if name not in missing]
    if not names:
        raise RuntimeError(f"none of {' '.join(suite.engines)} is left")
    return names


def run_suite(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs a suite; returns the record of its engines in turn, then those of each engine alone."""
    with tempfile.TemporaryDirectory(prefix="threed-swap-", dir=args.folder) as folder:
        return records_of(name, args, folder)


def records_of(name: str, args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Does the same as `run_suite`; `folder` is for the swap files of engines."""
    suite, names = SUITES[name], chosen(SUITES[name], args)
    flags = ["--quiet", str(args.quiet), "--patience", str(args.patience), "--folder", folder]
    flags += ["--torch-matmul"] if args.torch_matmul else []
    flags += ["--preset", args.preset] if args.preset else []
    records = []
    if len(names) > 1 and not args.memory_only:
        rounds = 3 if args.quick else args.rounds
        records = [measure(suite, names, [*flags, "--rounds", str(rounds)])]
        for engine, found in records[0]["results"].items():
            if not found["loss_difference"] <= suite.parity:
                raise RuntimeError(
                    f"{engine} does not train what {names[0]} trains: losses {found['losses']}"
                )
    if not args.quick:
        records += [measure(suite, [engine], [*flags, "--warmup", "3"]) for engine in names]
    return [{"suite": name, **record} for record in records]


def heading(columns: str) -> list[str]:
    """Returns the first two lines of a Markdown table."""
    names = columns.split(", ")
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def line(record: dict[str, Any], engine: str, *cells: str) -> str:
    """Returns a line of a table, which begins with the suite and the engine."""
    return f"| {record['suite']} | {record['world']} | {engine} | {STAGES.get(engine, '–')} | {' | '.join(cells)} |"


def speed_table(records: list[dict[str, Any]]) -> list[str]:
    """Returns the table of times, with ratios to the suite's first engine."""
    columns = "suite, ranks, engine, ZeRO stage, tokens/s, speed ratio, 95 %, CPU ms a token, CPU ratio, CPU 95 %"
    lines = heading(f"{columns}, losses differ by, rounds")
    for record in records:
        for engine, r in record["results"].items():
            speed, cpu = (
                f"{low:.3f}–{high:.3f}" for low, high in (r["speed_interval"], r["cpu_interval"])
            )
            lines.append(line(
                record, engine, f"{r['tokens_per_s']:,.0f}", f"**{r['speed']:.3f}**", speed,
                f"{1e3 * r['cpu_s_per_token']:.3f}", f"{r['cpu']:.3f}", cpu,
                f"{r['loss_difference']:.0e}", str(record["rounds"]),
            ))  # fmt: skip
    return lines


def bound_table(records: list[dict[str, Any]]) -> list[str]:
    """Returns the table of pipelines: speed without messages, gap closed, bubbles.

    The speed is what a pipeline would reach if messages took no time. The gap is that of a peer to
    this speed: of the peer with the same schedule, or of the first engine. The bubbles are the
    measured one, and that of the plan with the measured times.
    """
    columns = "suite, ranks, engine, ZeRO stage, tokens/s, if messages took no time, gap closed"
    lines = heading(f"{columns}, bubble %, expected %")
    for record in records:
        first, *_ = record["results"].values()
        for engine, r in record["results"].items():
            if bound := r.get("bound_tokens_per_s"):
                peer = record["results"].get(engine.replace("threed", "torch"), first)
                gap, closed = (x - peer["tokens_per_s"] for x in (bound, r["tokens_per_s"]))
                share = f"{closed / gap:.0%}" if gap > 0 else "no gap"
                bubbles = (f"{100 * r[key]:.1f}" for key in ("bubble", "bubble_expected"))
                lines.append(
                    line(
                        record,
                        engine,
                        f"{r['tokens_per_s']:,.0f}",
                        f"{bound:,.0f}",
                        share,
                        *bubbles,
                    )
                )
    return lines


def update_table(records: list[dict[str, Any]]) -> list[str]:
    """Returns the table of the times after the last backward, until all results are stored.

    Ratios are to the suite's first engine.
    """
    lines = heading(
        "suite, ranks, engine, ZeRO stage, update s, times faster, 95 %, step s, rounds"
    )
    for record in records:
        for engine, r in record["results"].items():
            low, high = r["update_interval"]
            ratio = [f"**{r['update']:.2f}**", f"{low:.2f}–{high:.2f}"]
            seconds = [f"{r[key] / 1e3:.3f}" for key in ("update_ms", "step_ms")]
            lines.append(
                line(record, engine, seconds[0], *ratio, seconds[1], str(record["rounds"]))
            )
    return lines


def memory_table(records: list[dict[str, Any]]) -> list[str]:
    """Returns the table of the memory of the fullest rank, and the bytes sent by all ranks."""
    columns = "suite, ranks, engine, ZeRO stage, peak RSS above base MiB, peak of live tensors MiB, live between steps MiB"
    columns += ", loopback MiB a step, formula MiB, ratio, counted MiB a step"
    lines = heading(f"{columns}, read from the drive MiB a step, written to it MiB a step")
    for r in records:
        (engine,) = r["engines"]
        memory = [f"{max(r[key]):.0f}" for key in ("peak_mib", "live_peak_mib", "live_mib")]
        formula = (
            wire_mib(FP32_STAGES[engine], r["parameters"], r["world"])
            if engine in FP32_STAGES
            else None
        )
        wire = [f"{formula:.1f}", f"{r['loopback_mib'] / formula:.3f}"] if formula else ["–", "–"]
        counted = (
            ", ".join(f"{axis} {mib:.1f}" for axis, mib in r["counted_mib"].items() if mib >= 0.05)
            or "–"
        )
        drive = [f"{mib:.0f}" for mib in r.get("drive_mib", ())] or ["–", "–"]
        lines.append(line(r, engine, *memory, f"{r['loopback_mib']:.1f}", *wire, counted, *drive))
    return lines


def tables(records: list[dict[str, Any]]) -> str:
    """Returns the records as Markdown."""
    together, alone = ([r for r in records if ("results" in r) is kind] for kind in (True, False))
    lines = speed_table(together) if together else []
    if updates := [record for record in together if record.get("settle")]:
        lines += ["", *update_table(updates)]
    if bounds := [
        r for r in together if any("bound_tokens_per_s" in found for found in r["results"].values())
    ]:
        lines += ["", *bound_table(bounds)]
    return "\n".join([*lines, "", *memory_table(alone)] if alone else lines)


def named(text: str) -> list[str]:
    """Returns the suite with this name, or all suites whose names begin with it."""
    found = [text] if text in SUITES else [name for name in SUITES if name.startswith(f"{text}-")]
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: the suites are {', '.join(SUITES)}")
    return found


def parse() -> argparse.Namespace:
    usual = [name for name in SUITES if not name.startswith(("offload", "accumulate"))]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suites", nargs="+", type=named, default=[usual], metavar="SUITE", help=", ".join(SUITES)
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ENGINE",
        help="of each suite, these engines; the first is the base",
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds; no memory or bytes")
    parser.add_argument(
        "--memory-only", action="store_true", help="no times: memory and bytes of each engine"
    )
    parser.add_argument(
        "--torch-matmul", action="store_true", help="threed multiplies as peers do, never by oneDNN"
    )
    parser.add_argument(
        "--preset", help="another model than the suite's: tiny, small, base or 200m"
    )
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="on the drive that is swapped to"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--quiet", type=float, default=0.12, help="cores that others may use during a step"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=900,
        help="seconds after which nothing disturbed is repeated",
    )
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="print the tables of a former run's records"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.show:
        print(tables([json.loads(line) for line in args.show.read_text().splitlines()]))
        return
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    path = results / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}.jsonl"
    records: list[dict[str, Any]] = []
    suites = [name for names in args.suites for name in names]
    for name in suites:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = run_suite(name, args)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        records += found
        with path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)
    print(tables(records))
    print(f"\nrecords: {path}")
    sys.exit(len({record["suite"] for record in records}) < len(suites))


if __name__ == "__main__":
    main()
