"""Bytes on the wire: our counters against the formulas, the planner's forecast, and the kernel's own counter.

The formulas (per rank, step and, where said, micro-batch; e bytes an element):
  tp   8 b s h (t-1)/t e a block (arXiv 2205.05198: the same with sequence parallelism), 2 b s h (t-1)/t e for the
       embedding and for the head, three numbers a token for cross entropy; once a step the gradients that are partial
  pp   b s h e a boundary and direction (/ t with sequence parallelism); once a step the sums of tied weights
  dp   2 P (N-1)/N elements of P parameters, padding included
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from threed import models
from threed.config import Config, resolve
from threed.engine import Engine
from threed.forecast import layer_costs
from threed.layers import Slicing
from threed.monitor.process import loopback_bytes
from threed.planner import communication_bytes
from threed.topology import Topology


@dataclass(frozen=True)
class Case:
    """A shape, and what of the model and training is not the default."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    sequence: bool = False
    zero: int = 1
    dtype: str = "fp32"
    micro: int = 2
    microbatches: int = 3
    model: tuple[tuple[str, object], ...] = ()
    bucket_mib: float = 64.0
    schedule: str = "1f1b"

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp


LLAMA = (("arch", "llama"), ("kv_heads", 2), ("ffn", 96))
QWEN = (("arch", "llama"), ("kv_heads", 1), ("ffn", 70), ("qk_norm", True), ("tied", True))
UNTIED = (("tied", False),)
# Sizes that are multiples of 32: no padding, and the planner can be exact.
BASE = {"layers": 5, "hidden": 64, "heads": 4, "seq": 16, "vocab": 53}


def config_of(case: Case) -> Config:
    config = Config.model_validate({
        "parallel": {"tp": case.tp, "pp": case.pp, "sequence": case.sequence, "schedule": case.schedule},
        "zero": {"stage": case.zero, "bucket_mib": case.bucket_mib},
        "precision": {"dtype": case.dtype},
        "model": {**BASE, **dict(case.model)},
        "train": {"global_batch": case.dp * case.micro * case.microbatches, "micro_batch": case.micro, "steps": 10},
    })  # fmt: skip
    return resolve(config, 53, case.world)


def engine_of(config: Config) -> Engine:
    topology = Topology(pp=config.parallel.pp, tp=config.parallel.tp)
    slicing = Slicing(topology.axis("tp"), bool(config.parallel.sequence))
    return Engine(models.build(config.model, slicing), topology, config)


def data(config: Config, engine: Engine) -> dict[str, torch.Tensor]:
    rows = config.train.global_batch // engine.topology.dp
    ids = torch.randint(0, 53, (2, rows, config.model.seq), generator=torch.Generator().manual_seed(0))
    return {"tokens": ids[0], "labels": ids[1]}


# -------------------------------------------------------------------------------------------------------- formulas


@dataclass
class Sent:
    """What a rank sent in a step, by label, and what the formulas say: exactly, and without padding (the planner)."""

    counted: dict[str, int]
    exact: dict[str, int]
    planned: dict[str, int]
    padding: int
    buckets: int


def ring(elements: int, ranks: int) -> int:
    """Elements one rank sends in an all-reduce; over more than two ranks padded to a multiple of them."""
    padded = elements if ranks == 2 else -(-elements // ranks) * ranks
    assert 2 * padded * (ranks - 1) % ranks == 0
    return 2 * padded * (ranks - 1) // ranks


def activations(case: Case, config: Config, stage: range) -> dict[str, int]:
    """tp and pp bytes of a step that come from activations, written out from the formulas."""
    m, t, e = config.model, case.tp, 2 if case.dtype == "bf16" else 8 if case.dtype == "fp64" else 4
    tokens, last = case.micro * m.seq, m.layers + 1
    whole = tokens * m.hidden * e
    tp = 0
    for layer in stage:
        reductions = 1 if layer in (0, last) else 4
        tp += reductions * 2 * whole * (t - 1) // t
        tp += 3 * tokens * max(e, 4) * (t - 1) if layer == last else 0
    ends = (0 in stage) + (last in stage)
    return {"tp": tp * case.microbatches, "pp": (2 - ends) * whole // (t if case.sequence else 1) * case.microbatches}


def gradients(engine: Engine, case: Case) -> dict[str, int]:
    """Bytes of a step's gradient sums and parameter gathers, from how this rank's parameters really lie."""
    sent = {"tp": 0, "pp": 0, "dp": 0}
    for bucket in engine.layout.buckets:
        group, window = bucket.group, bucket.last - bucket.first
        g, p = group.grads.element_size(), group.params.element_size()
        if group.shard.size > 1:
            n = group.shard.size
            sent["dp"] += window // n * (n - 1) * (g + p)
        for axis in group.sums:
            sent[axis.label] += g * (ring(bucket.own_last - bucket.own_first, axis.size) if axis.size > 1 else 0)
    return sent


def messages(engine: Engine, case: Case) -> dict[str, int]:
    """The step's few numbers: valid tokens over data ranks where the loss is; norm and loss over all."""
    last = engine.stage_index == case.pp - 1
    return {"dp": 8 * (case.dp - 1) if last else 0, "world": 2 * 8 * (case.world - 1)}


def planned(engine: Engine, case: Case, config: Config) -> dict[str, int]:
    """The planner's forecast for this rank."""
    stage = engine.ranges[engine.stage_index]
    layers = layer_costs(config, engine.topology.axis("tp").index)
    last = engine.stage_index == case.pp - 1
    return communication_bytes(
        layers[stage.start : stage.stop],
        microbatches=case.microbatches,
        shards=case.dp,
        param_bytes=engine.layout.groups[0].params.element_size(),
        reduce_bytes=engine.layout.groups[0].grads.element_size(),
        zero_stage=case.zero,
        input_bytes=layers[stage.start - 1].output_bytes if stage.start else 0,
        last=last,
        tied_elsewhere=bool(config.model.tied) and case.pp > 1 and (stage.start == 0 or last),
    )


def measure(case: Case) -> Sent:
    config = config_of(case)
    engine = engine_of(config)
    engine.step(data(config, engine))
    before = dict(engine.topology.traffic)
    engine.step(data(config, engine))
    counted = {k: v - before.get(k, 0) for k, v in engine.topology.traffic.items()}
    exact = dict.fromkeys(("tp", "pp", "dp", "world"), 0)
    stage = engine.ranges[engine.stage_index]
    for part in (activations(case, config, stage), gradients(engine, case), messages(engine, case)):
        for label, sent in part.items():
            exact[label] += sent
    padding = sum(group.numel for group in engine.layout.groups) - engine.layout.parameters
    return Sent(counted, exact, planned(engine, case, config), padding, len(engine.layout.buckets))


CASES = {
    "tp2": Case(tp=2),
    "tp2 sequence": Case(tp=2, sequence=True),
    "tp4 sequence fp64": Case(tp=4, sequence=True, dtype="fp64"),
    "tp4 bf16": Case(tp=4, sequence=True, dtype="bf16"),
    "tp4, one shared kv head": Case(tp=4, sequence=True, model=QWEN),
    "tp4, two shared kv heads, whole sequences": Case(tp=4, model=LLAMA),
    "tp2, heads normed, whole sequences": Case(tp=2, model=(*QWEN, ("kv_heads", 4))),
    "pp2": Case(pp=2),
    "pp2 untied": Case(pp=2, model=UNTIED, schedule="gpipe"),
    "pp4 bf16": Case(pp=4, dtype="bf16", microbatches=8, micro=1),
    "dp2": Case(dp=2),
    "dp2 zero 0": Case(dp=2, zero=0),
    "dp3": Case(dp=3),
    "dp3 zero 0": Case(dp=3, zero=0),
    "dp2 bf16, small buckets": Case(dp=2, dtype="bf16", bucket_mib=0.01),
    "2x2x2": Case(pp=2, dp=2, tp=2, sequence=True),
    "2x2x2 zero 0, whole sequences": Case(pp=2, dp=2, tp=2, zero=0),
    "2x2x2 llama bf16": Case(pp=2, dp=2, tp=2, sequence=True, model=LLAMA, dtype="bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_counted_bytes_are_the_formulas(name: str) -> None:
    """Exactly, on every rank and axis; and the planner's, but for padding that it cannot know."""
    case = CASES[name]
    for rank, sent in enumerate(run_ranks(case.world, measure, case)):
        for label, exact in sent.exact.items():
            assert sent.counted.get(label, 0) == exact, f"rank {rank}: {label}"
        for label in ("tp", "pp", "dp"):
            extra = exact_without_messages(sent, label, case, rank) - sent.planned[label]
            # An all-reduce over three ranks pads each bucket to a multiple of them.
            most = 2 * 8 * (sent.padding + 2 * sent.buckets * (case.dp > 2))
            assert 0 <= extra <= most, f"rank {rank}: {label}: planned {sent.planned[label]}, {extra} off"


def exact_without_messages(sent: Sent, label: str, case: Case, rank: int) -> int:
    last = rank >= case.world - case.dp * case.tp
    return sent.exact[label] - (8 * (case.dp - 1) if label == "dp" and last else 0)


def test_the_planner_is_exact_where_nothing_is_padded() -> None:
    case = Case(pp=2, tp=2, sequence=True)
    for rank, sent in enumerate(run_ranks(4, measure, case)):
        assert sent.padding == 0
        for label in ("tp", "pp", "dp"):
            assert sent.planned[label] == exact_without_messages(sent, label, case, rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallelism_moves_the_same_bytes(ranks: int) -> None:
    """All-gather and reduce-scatter are halves of the all-reduce (2205.05198); partial gradients come on top."""
    whole = run_ranks(ranks, measure, Case(tp=ranks))[0]
    parts = run_ranks(ranks, measure, Case(tp=ranks, sequence=True))[0]
    norms = 2 * 5 * 2 * 64 + 2 * 64 + 2 * 5 * 64 + 16 * 64  # LayerNorms, row biases, positions
    assert parts.counted["tp"] - whole.counted["tp"] == 4 * 2 * norms * (ranks - 1) // ranks


# ------------------------------------------------------------------------------------------------ the kernel's counter

BIG = (("hidden", 256), ("seq", 128), ("layers", 2), ("vocab", 53), ("heads", 4))
KERNEL = {
    "tp2": Case(tp=2, sequence=True, micro=4, microbatches=2, model=BIG),
    "pp2": Case(pp=2, micro=4, microbatches=2, model=BIG),
    "dp2": Case(dp=2, micro=4, microbatches=1, model=BIG),
    "2x2x2": Case(pp=2, dp=2, tp=2, sequence=True, micro=4, microbatches=1, model=BIG),
}


def loopback_up() -> None:
    """Switches this network's loopback on: ifconfig lo up, by ioctl (netdevice(7))."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket() as any_socket:
        flags = struct.unpack("16sH14s", fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14s", b"lo", 0, b"")))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14s", b"lo", flags | up, b""))


def enter_own_network() -> None:
    """Moves the ranks into a network of their own, whose loopback nobody else uses; where that is not allowed, not.

    Groups made from here on talk there; rank 0 makes it, the others join (unshare(2), setns(2)).
    """
    libc, new_network, pid = ctypes.CDLL(None, use_errno=True), 0x40000000, torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0 and libc.unshare(new_network) == 0:
        loopback_up()
        pid += os.getpid()
    dist.broadcast(pid, 0)
    if pid.item() and dist.get_rank():
        folder = os.open(f"/proc/{pid.item()}/ns/net", os.O_RDONLY)
        assert libc.setns(folder, new_network) == 0, os.strerror(ctypes.get_errno())
        os.close(folder)
    dist.barrier()


def on_the_wire(case: Case, windows: int = 6) -> list[float]:
    """Bytes the kernel saw on loopback / bytes that all ranks counted, over some steps; until one is close to 1.

    Where the loopback is shared, whatever else uses it adds to the kernel's figure: so several windows are tried.
    """
    enter_own_network()
    config = config_of(case)
    engine = engine_of(config)
    batch = data(config, engine)
    ratios: list[float] = []
    while len(ratios) < windows and not (ratios and ratios[-1] < 1.05):
        before = look(engine)
        for _ in range(2):
            engine.step(batch)
        counted, seen = (look(engine) - before).tolist()
        ratios.append(seen / counted)
    return ratios


def look(engine: Engine) -> torch.Tensor:
    """Bytes counted by all ranks, and by the kernel, so far: when all that was counted has been sent."""
    engine.optimizer.settle()
    dist.barrier()
    kernel = loopback_bytes()
    assert kernel is not None
    mine = [sum(engine.topology.traffic.values()), kernel if engine.topology.rank == 0 else 0]
    both = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(both)
    dist.barrier()
    return both


@pytest.mark.skipif(loopback_bytes() is None, reason="needs Linux: /proc/net/dev counts loopback bytes")
@pytest.mark.parametrize("name", KERNEL)
def test_the_kernel_counts_the_bytes_we_count(name: str) -> None:
    """Within 5 %: headers and acknowledgements come on top. So our counter is no tautology."""
    case = KERNEL[name]
    ratios = run_ranks(case.world, on_the_wire, case)[0]
    assert 0.99 < min(ratios) < 1.05, f"kernel / counted: {ratios}"
