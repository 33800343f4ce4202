"""threed beside torch-native peers: same model, weights, data and optimizer, one run.

    python benchmarks/run.py                     # all pairs, and each engine alone for memory and bytes
    python benchmarks/run.py --pairs tp2 tp2-sp  # some
    python benchmarks/run.py --quick             # few rounds: does it run?

Each pair is one world of ranks in which blocks of the two engines alternate; the ratio is the median over rounds, with
a bootstrap interval. Memory and bytes come from runs of one engine. Lines of JSON go to benchmarks/results/, tables in
Markdown to the screen. One thread a rank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# name -> (ranks, peer, threed)
PAIRS = {
    "dp2": (2, "ddp", "threed"),
    "dp2-fsdp": (2, "fsdp2", "threed"),
    "tp2": (2, "dtensor_tp", "threed_tp"),
    "tp2-sp": (2, "dtensor_tp_sp", "threed_tp_sp"),
    "pp2": (2, "torch_1f1b", "threed_1f1b"),
    "pp2-gpipe": (2, "torch_gpipe", "threed_gpipe"),
    "2x2x2": (8, "torch_3d", "threed_3d"),
    "2x2x2-sp": (8, "torch_3d_sp", "threed_3d_sp"),
}


def measure(ranks: int, *flags: str) -> dict[str, Any]:
    """One world of workers; what rank 0 found, or {"error": the end of what they said}."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    line = [*launcher, "-m", "benchmarks.worker", *flags]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    return found[0] if done.returncode == 0 and found else {"error": done.stderr[-2000:]}


def pair_rows(names: list[str], extra: list[str], keep: Any) -> Iterator[str]:
    """A line of the table of pairs for each."""
    yield "| pair | ranks | peer | peer tokens/s | threed tokens/s | threed / peer | 95 % | rounds | loss difference |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name in names:
        ranks, peer, ours = PAIRS[name]
        found = keep({"pair": name}, measure(ranks, "--engine", peer, "--vs", ours, *extra))
        if "error" in found:
            yield f"| {name} | {ranks} | {peer} | failed: {found['error'].strip().splitlines()[-1][:80]} | | | | | |"
            continue
        a, b = found["tokens_per_s"]
        low, high = found["interval"]
        yield (
            f"| {name} | {ranks} | {peer} | {a:.0f} | {b:.0f} | **{found['b_over_a']:.3f}** | {low:.3f}–{high:.3f} |"
            f" {found['rounds']} | {found['loss_difference']:.1e} |"
        )


def single_rows(names: list[str], extra: list[str], keep: Any) -> Iterator[str]:
    """A line of the table of engines run alone, for each engine of the pairs."""
    yield "| engine | ranks | step ms | peak RSS MiB a rank | loopback MiB a step | counted MiB a step |"
    yield "| --- | --- | --- | --- | --- | --- |"
    engines = dict.fromkeys((ranks, engine) for ranks, *both in map(PAIRS.get, names) for engine in both)  # type: ignore[misc]
    for ranks, engine in engines:
        found = keep({"alone": engine}, measure(ranks, "--engine", engine, *extra))
        if "error" in found:
            yield f"| {engine} | {ranks} | failed | | | |"
            continue
        peaks = sorted(set(found["peak_rss_mib"]))
        counted = ", ".join(f"{axis} {size:.1f}" for axis, size in found["counted_mib"].items() if size >= 0.05)
        yield (
            f"| {engine} | {ranks} | {found['step_ms']:.0f} | {peaks[0]}–{peaks[-1]} |"
            f" {found['loopback_mib']:.1f} | {counted or '–'} |"
        )


def main() -> None:
    """Measures what was asked for, and prints the tables as they grow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quiet", type=float, default=0.12, help="cores that other processes may use during a step")
    parser.add_argument("--quick", action="store_true", help="two rounds, whatever else runs")
    parser.add_argument("--no-alone", action="store_true", help="pairs only, no runs of one engine")
    args = parser.parse_args()
    common = ["--quiet", "99" if args.quick else str(args.quiet)]
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    out = results / f"{datetime.date.today().isoformat()}.jsonl"

    def keep(about: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        with out.open("a") as file:
            file.write(json.dumps({**about, **found}) + "\n")
        return found

    rounds = "2" if args.quick else str(args.rounds)
    for row in pair_rows(args.pairs, ["--rounds", rounds, *common], keep):
        print(row, flush=True)
    if not args.no_alone:
        print()
        for row in single_rows(args.pairs, ["--steps", "4" if args.quick else "10", *common], keep):
            print(row, flush=True)
    print(f"\nraw results: {out}")


if __name__ == "__main__":
    main()
