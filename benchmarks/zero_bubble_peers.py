"""Compares threed's zero-bubble schedules with those of sail-sg at equal costs.

    python -m benchmarks.zero_bubble_peers CHECKOUT                  CHECKOUT is a checkout of their repository
    python -m benchmarks.zero_bubble_peers CHECKOUT --stages 4 8 --times 1 2

The repository is sail-sg/zero-bubble-pipeline-parallelism. Only its schedulers are imported,
unchanged, and no part of Megatron. Each of their plans is converted to a plan of threed and
simulated by threed's simulator. Results are threed's makespan and peak divided by theirs. The
memory limit of zb-auto is the memory that their plan uses. The fixed schedules are compared for
equal times only, the others for all of COSTS; their V-Half and V-Min ignore the times.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from threed.schedules import Action, Costs, Kind, Plan, simulate, v_half, v_min, zb_auto, zb_v
from threed.schedules.plan_checks import legal

PACKAGE = "megatron.core.pipeline_parallel.zerobubble.scheduler"
KINDS = {"F": Kind.F, "B": Kind.I, "W": Kind.W}
# F, I, W and a message: equal; nearly equal; two measurements of arXiv 2401.10241, table 9; long messages; short W
COSTS = (
    (10.0, 10.0, 10.0, 0.0), (10.0, 12.0, 12.0, 0.2), (18.522, 18.086, 9.337, 0.601), (29.718, 29.444, 19.927, 0.527),
    (10.0, 10.0, 10.0, 1.0), (10.0, 12.0, 8.0, 2.0), (10.0, 14.0, 10.0, 5.0), (10.0, 10.0, 4.0, 0.0),
)  # fmt: skip


def schedulers(checkout: Path) -> dict[str, Any]:
    """Returns their modules by name; raises SystemExit if `checkout` is not their repository."""
    folder = checkout.joinpath(*PACKAGE.split("."))
    if not (folder / "zbv_greedy.py").is_file():
        raise SystemExit(
            f"{folder} has no zbv_greedy.py: give the path of a working tree of "
            "https://github.com/sail-sg/zero-bubble-pipeline-parallelism"
        )
    parts = PACKAGE.split(".")
    # creates the packages without running their __init__, which would import Megatron
    for count in range(1, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:count]))
        package.__path__ = [str(checkout.joinpath(*parts[:count]))]
        sys.modules[package.__name__] = package
    solver = types.ModuleType("pulp")  # a replacement, of which only the value of a number is used
    vars(solver)["value"] = lambda number: number
    sys.modules.setdefault("pulp", solver)
    return {
        name: importlib.import_module(f"{PACKAGE}.{name}") for name in ("zb", "zbv", "zbv_greedy")
    }


class Case(NamedTuple):
    """One of their schedules and the schedule of threed to compare it with."""

    name: str
    theirs: Callable[[dict[str, Any], int, int, Costs], Plan]
    ours: Callable[[int, int, Costs, float], Plan]
    fixed: bool = False  # their schedule ignores costs, so it is compared only for equal costs


def _converted(
    orders: Iterable[Iterable[Any]], stages: int, microbatches: int, chunks: int
) -> Plan:
    ranks = tuple(
        tuple(
            Action(KINDS[node.type.value], node.microbatch, node.chunk if chunks > 1 else 0)
            for node in order
        )
        for order in orders
    )
    placement = tuple((rank, 2 * stages - 1 - rank) for rank in range(stages)) if chunks > 1 else ()
    plan = Plan("theirs", stages, microbatches, chunks, ranks, placement)
    legal(plan)
    return plan


def _times(costs: Costs, chunks: int) -> list[float]:
    return [
        float(cost) / chunks
        for cost in (costs.forward, costs.backward_input, costs.backward_weight)
    ]  # type: ignore[arg-type]


def _v(modules: dict[str, Any], stages: int, microbatches: int, costs: Costs) -> Plan:
    graph = modules["zbv"].PipelineGraph(
        stages,
        microbatches,
        *_times(costs, 2),
        costs.send,
        f_mem=2,
        b_mem=-1,
        w_mem=-1,
        max_mem=None,
    )
    return _converted(graph.create_schedule(_config(stages)), stages, microbatches, 2)


def _controlled(memory: str) -> Callable[[dict[str, Any], int, int, Costs], Plan]:
    def build(modules: dict[str, Any], stages: int, microbatches: int, costs: Costs) -> Plan:
        graph = modules["zbv_greedy"].PipelineGraph(
            stages, microbatches, memory, 1000, 1000, 1000, 1
        )
        return _converted(graph.create_schedule(_config(stages)), stages, microbatches, 2)

    return build


def _automatic(limit: Callable[[int], int]) -> Callable[[dict[str, Any], int, int, Costs], Plan]:
    def build(modules: dict[str, Any], stages: int, microbatches: int, costs: Costs) -> Plan:
        f, b, w = _times(costs, 1)
        config = modules["zb"].GraphConfig(
            mem_f=[1] * stages, mem_b=[0] * stages, mem_w=[-1] * stages, max_mem=[limit(stages)] * stages,
            cost_f=[f] * stages, cost_b=[b] * stages, cost_w=[w] * stages, cost_comm=float(costs.send),
            n_stages=stages, n_micro=microbatches,
        )  # fmt: skip
        return _converted(modules["zb"].create_schedule(config), stages, microbatches, 1)

    return build


def _config(stages: int) -> Any:
    return types.SimpleNamespace(max_chunks=2, n_stages=stages)


def _auto(stages: int, microbatches: int, costs: Costs, peak: float) -> Plan:
    return zb_auto(stages, microbatches, costs, limit=peak)


def _auto_v(stages: int, microbatches: int, costs: Costs, peak: float) -> Plan:
    return zb_auto(stages, microbatches, costs, limit=peak, chunks=2)


CASES = (
    Case("zb-v", _v, lambda p, m, costs, _: zb_v(p, m), fixed=True),
    Case("v-half", _controlled("half"), lambda p, m, costs, _: v_half(p, m), fixed=True),
    Case("v-min", _controlled("min"), lambda p, m, costs, _: v_min(p, m), fixed=True),
    Case("zb-auto for zb, limit p", _automatic(lambda p: p), _auto),
    Case("zb-auto for zb, limit 1.5p", _automatic(lambda p: (3 * p + 1) // 2), _auto),
    Case("zb-auto for zb, limit 2p", _automatic(lambda p: 2 * p), _auto),
    Case("zb-auto for ZB-V", _v, _auto_v),
    Case("zb-auto for V-Half", _controlled("half"), _auto_v),
    Case("zb-auto for V-Min", _controlled("min"), _auto_v),
)


class Result(NamedTuple):
    """threed's values divided by theirs."""

    where: str
    makespan: float
    peak: float
    seconds: float


def compare(
    case: Case,
    modules: dict[str, Any],
    stages: Sequence[int],
    times: Sequence[float],
    costs: Sequence[Costs],
) -> Iterator[Result]:
    """Yields one result per size and costs."""
    for p in stages:
        for m in dict.fromkeys(max(1, math.ceil(p * factor)) for factor in times):
            for cost in costs[:1] if case.fixed else costs:
                with contextlib.redirect_stdout(io.StringIO()):  # their code prints
                    plan = case.theirs(modules, p, m, cost)
                theirs = simulate(plan, cost)
                peak = max(theirs.peak_activations)
                begin = time.perf_counter()
                ours = simulate(case.ours(p, m, cost, peak), cost)
                seconds = time.perf_counter() - begin
                values = (cost.forward, cost.backward_input, cost.backward_weight, cost.send)
                yield Result(
                    f"p {p}, m {m}, costs {values}", ours.makespan / theirs.makespan,
                    max(ours.peak_activations) / peak, seconds,
                )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, and every case in which threed is more than 1 % slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4, 6, 8, 12, 16])
    parser.add_argument(
        "--times", type=float, nargs="+", default=[1, 2, 4], help="micro-batches by stages"
    )
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    arguments = parser.parse_args(argv)
    modules = schedulers(arguments.checkout)
    costs = [Costs(f, b, w, send=send) for f, b, w, send in COSTS]
    print(
        "| schedule | runs | makespan ours/theirs: mean | worst | peak: worst | ahead | equal | behind | slowest s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    behind = []
    for case in CASES:
        if arguments.cases and case.name not in arguments.cases:
            continue
        results = list(compare(case, modules, arguments.stages, arguments.times, costs))
        print(_row(case.name, results), flush=True)
        behind += [
            (case.name, result)
            for result in results
            if result.makespan > 1.01 or result.peak > 1.01
        ]
    for name, result in behind:
        print(f"{name}: {result.where}: makespan × {result.makespan:.4f}, peak × {result.peak:.3f}")
    return 0


def _row(name: str, results: list[Result]) -> str:
    ratios = [result.makespan for result in results]
    ahead, lost = sum(r < 1 - 1e-9 for r in ratios), sum(r > 1 + 1e-9 for r in ratios)
    worst_peak = max(result.peak for result in results)
    slowest = max(result.seconds for result in results)
    return (
        f"| {name} | {len(results)} | {sum(ratios) / len(ratios):.4f} | {max(ratios):.4f} | {worst_peak:.3f} | {ahead} "
        f"| {len(ratios) - ahead - lost} | {lost} | {slowest:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
