"""Measures a training step of GPT 1.3B in bf16: threed and plain PyTorch.

threed runs with and without --run.compile, plain PyTorch compiled and eager. All train from the
same weights on the same batches, with AdamW, fp32 masters and clipping, and their losses must
agree. They run in turn, in blocks of steps. Then threed runs with each fused kernel replaced by
plain operations, and the GPU's idle time between kernels and the slowest kernels are measured.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import reference
from benchmarks.gpu_stages import build
from benchmarks.gpu_stages.record import NOT_MEASURED
from benchmarks.gpu_stages.stage import NotHere, Stage, main
from benchmarks.gpu_stages.timing import busy
from benchmarks.reference import ADAM, GPTConfig
from benchmarks.trainer import make_trainer, renamed
from threed.config import ConfigError
from threed.distributed.topology import Topology
from threed.ops import activation, adam, cross_entropy, launch, norm, sums

# Peaks of dense bf16 matrix products in TFLOP/s, from the vendor's data sheets.
PEAK = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "4090": 165.0,
}
TARGET_MFU, TARGET_RATIO = (
    0.58,
    1.05,
)  # share of the peak; ratio to the speed of compiled plain PyTorch
LARGE, SMALL = GPTConfig(24, 2048, 16, 2048, 50304), GPTConfig(2, 64, 4, 64, 512)
LEARNING_RATE = 1e-4  # without warm-up, a model of this size diverges at the benchmarks' 1e-3
# The first losses are from the same weights. They differ only by roundings to bf16 (8 bits), which the mean over thousands
# of tokens reduces by half or more. Later losses also differ because of updates, which Adam makes equally large for small
# and large gradients.
FIRST_LOSS, LATER_LOSSES = 2.0**-9, 0.02

# Kernel -> threed's function that returns whether the kernel is used. The model has no dropout and no rotary positions.
SWITCHES: dict[str, tuple[Any, str]] = {
    "cross entropy": (cross_entropy, "fits"),
    "norms with residual": (norm, "fits"),
    "GELU": (activation, "fits"),
    "sums of bias gradients": (sums, "column_fits"),
    "AdamW": (adam, "fits"),
    "sums of squares": (sums, "fits"),
    "all of csrc/cuda": (launch, "available"),
}


@dataclass(frozen=True)
class Plan:
    """The size of the measurement.

    Attributes:
        steps: steps per block, which is timed as a whole.
        rounds: number of rounds of blocks.
        checked: number of losses to compare.
    """

    config: GPTConfig
    batch: int
    micro: int
    steps: int
    rounds: int
    checked: int

    @property
    def tokens(self) -> int:
        return self.batch * self.config.seq_len


def plan_for(memory: int, small: bool) -> Plan:
    """Returns a plan whose micro-batches fit.

    Two engines are in memory at a time, each with about 24 GB of weights and states.
    """
    if small:
        return Plan(SMALL, 4, 2, 1, 2, 3)
    if memory < 60e9:
        raise NotHere(
            f"two engines of 1.3 billion parameters need 60 GB, and this GPU has {memory / 1e9:.0f}"
        )
    return Plan(LARGE, 16, 4 if memory > 75e9 else 2, 3, 5, 5)


# ---------------------------------------------------------------------------------------------------------------- sides


class Side:
    """An engine to measure.

    `step(x, y)` runs one optimizer step on [b s], and returns its loss as a tensor or a number.
    """

    def step(self, x: Tensor, y: Tensor) -> Any:
        raise NotImplementedError


class Ours(Side):
    """threed's engine."""

    def __init__(
        self, plan: Plan, weights: dict[str, Tensor], device: torch.device, **run: Any
    ) -> None:
        settings = {
            "precision": {"dtype": "bf16"}, "optim": {"lr": LEARNING_RATE}, "run": run,
            "train": {"global_batch": plan.batch, "micro_batch": plan.micro, "grad_clip": 1.0},
        }  # fmt: skip
        self.trainer = make_trainer(plan.config, Topology(device=device), settings)
        self.trainer.load_full_state_dict(renamed(weights, plan.config.n_head))

    def step(self, x: Tensor, y: Tensor) -> Any:
        return self.trainer.step({"tokens": x, "labels": y})


class Plain(Side):
    """The reference model in plain PyTorch with autocast; compiled if there is a backend."""

    def __init__(
        self, plan: Plan, weights: dict[str, Tensor], device: torch.device, backend: str | None
    ) -> None:
        with device:
            self.model = reference.GPT(plan.config)
        self.model.load_state_dict(weights)
        self.micro, self.device = plan.micro, device
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), fused=True, **{**ADAM, "lr": LEARNING_RATE}
        )  # type: ignore[arg-type]
        self.loss: Callable[[Tensor, Tensor], Tensor] = self._loss
        if backend is not None:
            self.loss = torch.compile(self._loss, backend=backend, fullgraph=True)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return reference.loss_of(self.model(x), y)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        parts = list(zip(x.split(self.micro), y.split(self.micro), strict=True))
        total = torch.zeros((), device=self.device)
        for tokens, labels in parts:
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.loss(tokens, labels) / len(parts)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def value(loss: Any) -> float:
    """Returns an engine's loss as a number."""
    return float(loss if isinstance(loss, Tensor) else loss.loss)


# ----------------------------------------------------------------------------------------------------------- measuring


class Bench:
    """The stage's device, batches and figures."""

    def __init__(self, stage: Stage, plan: Plan) -> None:
        self.stage, self.plan = stage, plan
        made = reference.batches(plan.config, plan.checked, plan.batch)
        self.batches = [tuple(part.to(stage.device) for part in batch) for batch in made]
        self.weights = reference.initial_weights(plan.config)

    def block(self, side: Side, steps: int) -> float:
        """Returns the seconds per step of a block of steps.

        During the block the host does not wait for the GPU.
        """
        self.wait()
        begin = time.perf_counter()
        for number in range(steps):
            side.step(*self.batches[number % len(self.batches)])
        self.wait()
        return (time.perf_counter() - begin) / steps

    def wait(self) -> None:
        if self.stage.cuda:
            torch.cuda.synchronize()

    def losses(self, side: Side) -> list[float]:
        """Returns the losses of the first steps, each on another batch.

        These steps are also the warm-up, and the peak memory is measured during them.
        """
        if self.stage.cuda:
            torch.cuda.reset_peak_memory_stats()  # the memory for building the engine does not count
        return [value(side.step(*batch)) for batch in self.batches]

    def in_turn(self, sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
        """Returns the seconds of each engine's blocks; every round begins with another engine."""
        found: dict[str, list[float]] = {name: [] for name in sides}
        names = list(sides)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name].append(sides[name]())
        return found

    def speed(self, seconds: list[float]) -> dict[str, Any]:
        """Returns the tokens/s and the utilization of an engine, from its blocks."""
        middle, config = statistics.median(seconds), self.plan.config
        rate = self.plan.tokens / middle
        tflops = rate * config.flops_per_token() / 1e12
        peak = peak_of(self.stage)
        return {
            "step_s": middle, "low_s": min(seconds), "high_s": max(seconds), "tokens_per_s": rate, "tflops": tflops,
            "mfu": tflops / peak if peak else NOT_MEASURED,
        }  # fmt: skip

    @contextlib.contextmanager
    def memory(self, into: dict[str, Any]) -> Iterator[None]:
        """Context manager: stores the peak memory inside the block, minus the memory before it."""
        if not self.stage.cuda:
            yield
            into["peak_gib"] = NOT_MEASURED
            return
        free()
        before = torch.cuda.memory_allocated()
        yield
        into["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30


def peak_of(stage: Stage) -> float | None:
    """Returns the peak of this GPU in TFLOP/s; None if it is not known."""
    name = torch.cuda.get_device_name() if stage.cuda else ""
    return next((tflops for key, tflops in PEAK.items() if key in name), None)


def free() -> None:
    """Frees the memory of deleted engines, which are in reference cycles with their parameters."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def agree(ours: list[float], others: list[float]) -> str:
    """Returns why the losses of two engines do not agree; empty if they do."""
    apart = [abs(a - b) / abs(a) for a, b in zip(ours, others, strict=True)]
    for number, (found, limit) in enumerate(
        zip(apart, [FIRST_LOSS] + [LATER_LOSSES] * (len(apart) - 1), strict=True)
    ):
        if not found <= limit:  # also true for NaN
            return f"losses of step {number + 1} are {found:.4f} apart, more than {limit:.4f}: {ours}, {others}"
    return ""


def beside(
    bench: Bench, ours: Side, expected: list[float], make: Callable[[], Side]
) -> dict[str, Any]:
    """Compares another engine with threed's: losses, speed of both in turn, ratios, memory."""
    found: dict[str, Any] = {}
    with bench.memory(found):
        other = make()
        losses = bench.losses(other)
    found["losses"] = losses
    if why := agree(expected, losses):
        return {**found, "wrong": why}
    steps, rounds = bench.plan.steps, bench.plan.rounds
    works = {"ours": lambda: bench.block(ours, steps), "other": lambda: bench.block(other, steps)}
    seconds = bench.in_turn(works, rounds)
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["other"], strict=True)]
    return {
        **found, **bench.speed(seconds["other"]), "ours": bench.speed(seconds["ours"]),
        "ours_times_as_fast": statistics.median(ratios), "by_round": ratios,
    }  # fmt: skip


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Context manager: threed uses plain operations instead of one kernel."""
    module, function = SWITCHES[name]
    with mock.patch.object(module, function, return_value=False):
        yield


def ablation(bench: Bench, ours: Side) -> dict[str, Any]:
    """Returns how much longer a step takes without each kernel."""

    def block(name: str | None) -> Callable[[], float]:
        def work() -> float:
            with without(name) if name else contextlib.nullcontext():
                ours.step(*bench.batches[0])  # the first step after a change is not timed
                return bench.block(ours, bench.plan.steps)

        return work

    works = {"none": block(None), **{name: block(name) for name in SWITCHES}}
    seconds = bench.in_turn(works, 1 if bench.stage.small else 3)
    base = statistics.median(seconds["none"])
    return {
        name: {
            "step_s": statistics.median(times),
            "longer_by": statistics.median(times) / base - 1,
            "blocks_s": times,
        }
        for name, times in seconds.items()
    }


def profile(bench: Bench, side: Side) -> dict[str, Any]:
    """Returns the GPU's idle time between kernels in two steps, and the slowest kernels."""
    # Only the GPU is profiled, because profiling the host would slow it down and cause idle time of the GPU.
    kind = (
        torch.profiler.ProfilerActivity.CUDA
        if bench.stage.cuda
        else torch.profiler.ProfilerActivity.CPU
    )
    bench.wait()
    with torch.profiler.profile(activities=[kind]) as profiler:
        for number in range(2):
            side.step(*bench.batches[number])
        bench.wait()
    wanted = torch.autograd.DeviceType.CUDA if bench.stage.cuda else torch.autograd.DeviceType.CPU
    events = [
        event for event in profiler.events()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]  # fmt: skip
    kernels = [(event.time_range.start, event.time_range.end) for event in events]
    total: Counter[str] = Counter()
    for event in events:
        total[event.name] += event.time_range.elapsed_us()
    found = busy(kernels)
    longest = {name[:120]: us / 2e3 for name, us in total.most_common(20)}
    return {
        **found,
        "idle_share": found["idle_us"] / max(found["span_us"], 1e-9),
        "longest_ms_a_step": longest,
    }


def state_under_load(bench: Bench, side: Side) -> dict[str, str]:
    """Returns clocks, power and reasons for lower clocks during training."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(build.state)
        while not asked.done():
            bench.block(side, 1)
        return asked.result()


def run(stage: Stage) -> None:
    plan = plan_for(stage.memory(), stage.small)
    stage.put(
        model=vars(plan.config), parameters=plan.config.parameters, batch=plan.batch, micro_batch=plan.micro,
        flops_per_token=plan.config.flops_per_token(), peak_tflops=peak_of(stage) or NOT_MEASURED,
        target_mfu=TARGET_MFU, target_ratio=TARGET_RATIO,
    )  # fmt: skip
    bench = Bench(stage, plan)
    mine: dict[str, Any] = {}
    with bench.memory(mine):
        ours = Ours(plan, bench.weights, stage.device)
        losses = bench.losses(ours)
    alone = [bench.block(ours, plan.steps) for _ in range(plan.rounds)]
    stage.put(ours={**mine, "losses": losses, **bench.speed(alone)})
    stage.put(state_under_load=state_under_load(bench, ours))
    others: dict[str, Any] = {}

    def compare(name: str) -> None:
        others[name] = attempt(
            lambda: beside(bench, ours, losses, lambda: other_side(name, bench)), stage
        )
        stage.put(others=others)
        free()

    compare("plain, compiled")
    ablated = attempt(lambda: ablation(bench, ours), stage)
    stage.put(ablation=ablated)
    profiled = attempt(lambda: profile(bench, ours), stage)
    stage.put(profile=profiled)
    for name in ("ours, --run.compile", "plain, eager"):
        compare(name)
    pieces = {**others, "ablation": ablated, "profile": profiled}
    if faults := [
        f"{name}: {piece['wrong']}" for name, piece in pieces.items() if "wrong" in piece
    ]:
        raise AssertionError("; ".join(faults))


def other_side(name: str, bench: Bench) -> Side:
    """Returns the engine to compare threed with; a rehearsal does not compile."""
    cuda, given = bench.stage.cuda, (bench.plan, bench.weights, bench.stage.device)
    if name == "ours, --run.compile":
        return Ours(*given, compile=True, compile_backend="inductor" if cuda else "aot_eager")
    return Plain(*given, None if name == "plain, eager" else "inductor" if cuda else "eager")


def attempt(work: Callable[[], dict[str, Any]], stage: Stage) -> dict[str, Any]:
    """Returns the result of `work`, or its error, so that later measurements still run."""
    if not stage.has_time(45):
        return {"note": f"{NOT_MEASURED}: no time"}
    try:
        return work()
    except torch.OutOfMemoryError:
        return {"note": f"{NOT_MEASURED}: out of memory beside our engine"}
    except (
        ConfigError
    ) as error:  # such as --run.compile with a torch version that does not support it
        return {"note": f"{NOT_MEASURED}: {str(error)[:300]}"}
    except Exception as error:
        return {"wrong": f"{type(error).__name__}: {str(error)[:300]}"}


if __name__ == "__main__":
    main("step", run)
