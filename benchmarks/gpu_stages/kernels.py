"""Measures every kernel of csrc/cuda, eager PyTorch, torch.compile, and Liger if it is installed.

First, each side's results are compared with fp64. Times are those of the GPU alone; the sides run
in turn, each with an empty cache. A share is the bandwidth of a kernel (its stated bytes divided by
its time), divided by the bandwidth of copies that the stage `bandwidth` measured. A rehearsal times
only plain sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch

from benchmarks.gpu_stages import record
from benchmarks.gpu_stages.kernel_cases import (
    FAMILIES,
    SMALL,
    Case,
    Results,
    Side,
    limit_of,
    sizes_for,
)
from benchmarks.gpu_stages.record import NOT_MEASURED
from benchmarks.gpu_stages.stage import Stage, main
from benchmarks.gpu_stages.timing import difference, interleaved


def copies(inputs: tuple[Any, ...], dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Returns copies of the inputs, with floating-point tensors in `dtype`."""
    return tuple(
        x.to(dtype, copy=True) if dtype and x.is_floating_point() else x.clone() for x in inputs
    )


def truth_of(case: Case) -> Results:
    """Returns a case's results in fp64, computed by plain PyTorch."""
    side = case.truth or case.plain(lambda function: function)
    return case.seen(side(*copies(case.inputs, torch.float64))())


def wrong(case: Case, name: str, side: Side, truth: Results) -> tuple[float, str]:
    """Compares a side's results with the truth.

    Returns:
        The largest relative difference, and a message that is empty if the results are right.
    """
    if name != "ours" and not case.comparable:
        return 0.0, ""
    got, largest = case.seen(side(*copies(case.inputs))()), 0.0
    for number, (mine, right) in enumerate(zip(got, truth, strict=True)):
        if mine is None or right is None:
            continue
        found, limit = difference(mine, right.view_as(mine)), limit_of(mine, name == "ours")
        largest = max(largest, found)
        if not found <= limit:  # also true for NaN
            return found, f"result {number} of {name} is off by {found:.2e}, more than {limit:.2e}"
    return largest, ""


def sides_of(case: Case, stage: Stage) -> dict[str, Side | str]:
    """Returns the sides by name; for a side that cannot run here, the reason instead."""
    backend = "inductor" if stage.cuda else "eager"  # a rehearsal does not compile
    sides: dict[str, Side | str] = {} if not stage.cuda else {"ours": case.ours}
    sides |= {
        "eager": case.plain(lambda function: function),
        "compiled": case.plain(lambda function: torch.compile(function, backend=backend)),
    }
    for name, make in case.others.items():
        try:
            sides[name] = make()
        except ImportError as error:
            sides[name] = f"{NOT_MEASURED}: {error}"
    return sides


def measured(case: Case, stage: Stage, bandwidth: float | None) -> dict[str, Any]:
    """Returns the times and differences of a case's sides."""
    torch._dynamo.reset()
    truth = truth_of(case)
    works: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, side in sides_of(case, stage).items():
        if isinstance(side, str):
            found[name] = {"note": side}
            continue
        try:
            off, why = wrong(case, name, side, truth)
            found[name] = {"difference": off, **({"wrong": why} if why else {})}
            if not why:
                works[name] = side(*copies(case.inputs))
        except (
            Exception
        ) as error:  # an error of another library or of a compiler: the other sides still run
            text = f"{type(error).__name__}: {str(error)[:200]}"
            found[name] = {"wrong": text} if name == "ours" else {"note": f"{NOT_MEASURED}: {text}"}
    for name, times in interleaved(works, stage.device, rounds=3 if stage.small else 40).items():
        rate = case.nbytes / times["median_ms"] / 1e6
        found[name] |= {
            **times,
            "gb_per_s": rate,
            "share": rate / bandwidth if bandwidth else NOT_MEASURED,
        }
    return {"bytes": case.nbytes, "kernels": list(case.kernels), "sides": found}


def each(stage: Stage, work: Callable[[Case], None]) -> None:
    """Calls `work` for every case; prints the names of the cases for which no time is left."""
    sizes = SMALL if stage.small else sizes_for(stage.memory())
    stage.put(sizes=vars(sizes))
    torch.manual_seed(0)
    left_out = []
    for family in FAMILIES:
        for case in family(sizes, stage.device):
            if stage.has_time():
                work(case)
            else:
                left_out.append(case.name)
    stage.put(left_out=left_out)


def run(stage: Stage) -> None:
    if stage.args.once:
        each(stage, lambda case: _once(case, stage))
        return
    # Backwards run repeatedly on one graph, whose memory a compiled backward would otherwise reuse.
    functorch.donated_buffer = False
    bandwidth = record.figures(stage.out, "bandwidth").get("copy_gb_per_s")
    stage.put(copy_gb_per_s=bandwidth or NOT_MEASURED)
    cases: dict[str, Any] = {}

    def measure(case: Case) -> None:
        cases[case.name] = measured(case, stage, bandwidth)
        stage.put(cases=cases)

    each(stage, measure)
    ours = {name: case["sides"].get("ours", {}) for name, case in cases.items()}
    if faults := [f"{name}: {side['wrong']}" for name, side in ours.items() if "wrong" in side]:
        raise AssertionError(f"{len(faults)} of our kernels are wrong; {faults[0]}")


def _once(case: Case, stage: Stage) -> None:
    """Runs threed's kernel once, for an external tool."""
    if stage.cuda:
        case.ours(*copies(case.inputs))()
        torch.cuda.synchronize()
        print(f"ran {case.name}", flush=True)


if __name__ == "__main__":
    main(
        "kernels",
        run,
        lambda parser: parser.add_argument(
            "--once", action="store_true", help="run ours once each"
        ),
    )
