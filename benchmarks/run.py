"""threed beside torch-native peers: tokens/s, bytes moved, peak memory, on one machine. See `docs/performance.md`.

    python benchmarks/run.py                     # everything: about 20 minutes on 2 cores
    python benchmarks/run.py --quick             # fewer rounds, time only
    python benchmarks/run.py --pairs tp2 tp2_sp  # some pairs

Each pair runs interleaved in one process group, whenever the machine is quiet; then each of its engines runs alone for
memory and bytes. Raw records go to benchmarks/results/<time>.jsonl, a Markdown table to the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# name: ranks, peer, threed
PAIRS = {
    "dp2": (2, "ddp", "threed"),
    "dp2_fsdp2": (2, "fsdp2", "threed"),
    "tp2": (2, "dtensor_tp", "threed_tp"),
    "tp2_sp": (2, "dtensor_tp_sp", "threed_tp_sp"),
    "pp2": (2, "torch_1f1b", "threed_1f1b"),
    "pp2_gpipe": (2, "torch_gpipe", "threed_gpipe"),
    "2x2x2": (8, "torch_3d", "threed_3d"),
    "2x2x2_sp": (8, "torch_3d_sp", "threed_3d_sp"),
}
PARITY = 1e-5  # relative difference of the losses of the first steps


def measure(ranks: int, arguments: list[str]) -> dict[str, Any]:
    """Runs the worker on so many ranks and reads its record; RuntimeError with its last words when it fails."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*launch, "-m", "benchmarks.worker", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not records:
        raise RuntimeError(f"worker {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    if "error" in records[-1]:
        raise RuntimeError(records[-1]["error"])
    return dict(records[-1])


def run_pair(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A pair's record, then those of its engines alone."""
    ranks, *engines = PAIRS[name]
    options = ["--quiet", str(args.quiet), "--patience", str(args.patience)]
    options += ["--torch-matmul"] if args.torch_matmul else []
    rounds = ["--rounds", str(3 if args.quick else args.rounds)]
    records = [measure(ranks, ["--engine", engines[0], "--vs", engines[1], *rounds, *options])]
    if records[0]["loss_difference"] > PARITY:
        raise RuntimeError(f"{name}: the two engines do not train the same thing: losses {records[0]['losses']}")
    if not args.quick:
        records += [measure(ranks, ["--engine", engine, *options]) for engine in engines]
    return [{"pair": name, **record} for record in records]


def heading(columns: str) -> list[str]:
    """The first two lines of a Markdown table."""
    names = columns.split(", ")
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def table(records: list[dict[str, Any]]) -> str:
    """The records as Markdown."""
    lines = heading(
        "pair, peer, threed, peer tokens/s, threed tokens/s, ratio, 95 %, CPU ms a step, losses differ by, rounds"
    )
    for r in (r for r in records if "b" in r):
        lines.append(
            f"| {r['pair']} | {r['a']} | {r['b']} | {r['tokens_per_s'][0]:.0f} | {r['tokens_per_s'][1]:.0f}"
            f" | **{r['b_over_a']:.2f}** | {r['interval'][0]:.2f} – {r['interval'][1]:.2f}"
            f" | {r['cpu_ms'][0]:.0f}, {r['cpu_ms'][1]:.0f} | {r['loss_difference']:.0e} | {r['rounds']} |"
        )
    alone = {(r["engine"], r["world"]): r for r in records if "b" not in r}
    if alone:
        lines += ["", *heading("engine, ranks, peak MiB a rank, loopback MiB a step, counted MiB a step")]
    for r in alone.values():
        counted = ", ".join(f"{axis} {mib:.1f}" for axis, mib in r["counted_mib"].items() if mib >= 0.05) or "–"
        peak = f"{min(r['peak_rss_mib'])} – {max(r['peak_rss_mib'])}"
        lines.append(f"| {r['engine']} | {r['world']} | {peak} | {r['loopback_mib']:.1f} | {counted} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--quick", action="store_true", help="3 rounds a pair; no memory or bytes")
    parser.add_argument("--torch-matmul", action="store_true", help="threed multiplies as peers do, never by oneDNN")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quiet", type=float, default=0.12, help="cores that others may use during a step")
    parser.add_argument("--patience", type=float, default=600, help="seconds a pair may spend waiting for others")
    args = parser.parse_args()
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    path = results / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}.jsonl"
    records: list[dict[str, Any]] = []
    for name in args.pairs:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = run_pair(name, args)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        records += found
        with path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)
    print(table(records))
    print(f"\nrecords: {path}")
    sys.exit(len({record["pair"] for record in records}) < len(args.pairs))


if __name__ == "__main__":
    main()
