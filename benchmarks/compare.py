"""Compares the speed of two checkouts of threed, engine by engine.

    git worktree add /tmp/before HEAD~1
    python benchmarks/compare.py /tmp/before --engines threed_zero1 threed_1f1b     # with the checkout of this file

For each engine of `benchmarks/engines.py` two process groups train the same model at the same time, one per checkout.
They take turns: a block of steps of one, then a block of the other, and the order alternates. The ratio of a pair of
blocks is the speed of the new checkout divided by the speed of the old one. The program prints the median ratio and its
95 % interval.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 6  # steps


class World:
    """One checkout's process group: `ranks` processes that run a block of steps when they are asked to."""

    def __init__(
        self, tree: Path, engine: str, ranks: int, args: argparse.Namespace, folder: str
    ) -> None:
        address = os.path.join(folder, f"{abs(hash((tree, engine)))}.socket")
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command += [
            __file__,
            str(tree),
            "--rank-of",
            address,
            "--engines",
            engine,
            "--swap",
            folder,
        ]
        command += [
            f"--{name}={getattr(args, name)}"
            for name in ("preset", "batch", "microbatches", "steps")
        ]
        command += ["--settle"] if args.settle else []
        self._name = f"{engine} of {tree}, on {ranks} ranks,"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(ranks)
            server.settimeout(1)
            self.process = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=subprocess.DEVNULL
            )
            self.ranks = [self._accept(server) for _ in range(ranks)]
        self.losses: list[float] = self._answers()[0]

    def _accept(self, server: socket.socket) -> Connection:
        """Waits until a rank connects."""
        while self.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                return Connection(server.accept()[0].detach())
        raise self._failure()

    def _failure(self) -> SystemExit:
        return SystemExit(f"{self._name} failed with exit code {self.process.wait()}: see above")

    def block(self) -> float:
        """Runs a block; returns the median seconds of a step, of the slowest rank."""
        return float(max(self._answers("block")))

    def _answers(self, *requests: str) -> list[Any]:
        """Sends requests to all ranks; returns an answer of each."""
        try:
            for rank, request in itertools.product(self.ranks, requests):
                rank.send(request)
            return [rank.recv() for rank in self.ranks]
        except (EOFError, OSError) as error:
            raise self._failure() from error

    def end(self) -> None:
        for rank in self.ranks:
            rank.send("end")
        self.process.wait()


def serve(args: argparse.Namespace) -> None:
    """Runs one rank: builds the engine, then a block of steps for every request."""
    import torch
    import torch.distributed as dist

    from benchmarks import reference, worker

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = reference.PRESETS[args.preset]
    words = argparse.Namespace(
        **vars(args), folder=args.swap, warmup=WARMUP, torch_matmul=False, threads=1
    )
    worker.load(args.engines[0])
    engine = worker.ENGINES[args.engines[0]](config, words)
    batches = reference.batches(config, WARMUP + args.steps, args.batch)
    parent: Connection = Client(args.rank_of)
    parent.send(worker.warm(engine, batches[:WARMUP]))
    gc.collect()
    gc.freeze()
    while parent.recv() == "block":
        steps = worker.timed(engine, batches[WARMUP:], args.settle)
        parent.send(statistics.median(step[0] for step in steps))
    dist.barrier()
    os._exit(0)


def ranks_of(engine: str) -> int:
    """Returns the number of ranks of an engine's suites: 2 if one has 2, else the least."""
    from benchmarks.suites import SUITES

    found = {suite.ranks for suite in SUITES.values() if engine in suite.engines} or {2}
    return 2 if 2 in found else min(found)


def compare(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the ratios of all pairs of one engine."""
    from benchmarks.worker import bootstrap, largest_difference

    ranks = ranks_of(engine)
    with tempfile.TemporaryDirectory(prefix="threed-compare-") as folder:
        worlds = [
            World(Path(tree).resolve(), engine, ranks, args, folder) for tree in (args.old, ROOT)
        ]
        ratios = []
        for pair in range(args.pairs):
            order = worlds if pair % 2 == 0 else worlds[::-1]
            spent = {world: world.block() for world in order}
            ratios.append(spent[worlds[0]] / spent[worlds[1]])
        difference = largest_difference(worlds[0].losses, worlds[1].losses)
        for world in worlds:
            world.end()
    low, high = bootstrap(ratios)
    return {
        "engine": engine,
        "speed": statistics.median(ratios),
        "interval": [low, high],
        "losses_differ": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="the other checkout")
    parser.add_argument("--engines", nargs="+", required=True)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of blocks per engine")
    parser.add_argument("--steps", type=int, default=3, help="steps per block")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument(
        "--settle", action="store_true", help="a step ends when its gathers and writes are complete"
    )
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--swap", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        serve(args)
    from benchmarks.worker import ENGINES

    if unknown := [name for name in args.engines if name not in ENGINES]:
        parser.error(f"no engine {', '.join(unknown)}: use {', '.join(ENGINES)}")
    for engine in args.engines:
        print(json.dumps(compare(engine, args)), flush=True)


if __name__ == "__main__":
    if str(ROOT) not in sys.path and "--rank-of" not in sys.argv:
        sys.path.insert(0, str(ROOT))
    main()
