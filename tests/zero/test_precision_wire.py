"""What gradients are kept in, what they travel in, and what they sum to: by an independent computation, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from tests.configs import SEQ, VOCAB, Case, config_of, engine_of, share, topology_of
from tests.harness import run_ranks
from tests.pipeline.test_step import with_
from threed.config import Config
from threed.distributed.sharding import Piece
from threed.engine import Engine
from threed.ops.precision import DTYPES
from threed.zero.reductions import Gradient

ROWS, MICROBATCHES = 8, 2  # rows a rank
Gradients = list[list[dict[str, Tensor]]]  # by rank and micro-batch


@dataclass(frozen=True)
class Wire:
    """How gradients are kept, in what they travel, and how they are sliced."""

    grad: str | None
    reduce: str | None
    stage: int
    shard: int | str = "all"
    # a model of threed.layers, in one micro-batch, in place of a module of plain torch
    layers: bool = False

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """That of gradients, and that on the wire."""
        grad = self.grad or "fp32"
        return DTYPES[grad], DTYPES[self.reduce or grad]


FORMATS = [
    (None, "bf16"),
    (None, "fp16"),
    ("bf16", None),
    ("fp64", None),
    ("fp64", "fp32"),
    ("bf16", "fp32"),
]


class Net(nn.Module):
    """Plain torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) - y).square().mean()


def inputs(rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return {"x": torch.randn(ROWS, 8, generator=draw), "y": torch.randn(ROWS, 3, generator=draw)}


def tokens(world: int) -> dict[str, Tensor]:
    """With no label left out: ranks then weigh the same."""
    ids = torch.randint(
        0, VOCAB, (world * ROWS, SEQ + 1), generator=torch.Generator().manual_seed(3)
    )
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def plain_gradients(world: int) -> Gradients:
    """What autograd gives each rank in each micro-batch of Net, fp32."""
    return [
        [one_gradient(world, rank, number) for number in range(MICROBATCHES)]
        for rank in range(world)
    ]


def one_gradient(world: int, rank: int, number: int) -> dict[str, Tensor]:
    net = Net()
    part = {key: value.chunk(MICROBATCHES)[number] for key, value in inputs(rank).items()}
    (net(**part) / (world * MICROBATCHES)).backward()
    return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


def layer_config(wire: Wire, world: int) -> Config:
    case = Case(
        dp=world,
        zero=wire.stage,
        shard=wire.shard,
        layers=1,
        model="llama",
        dtype="fp32",
        microbatches=1,
    )
    return with_(
        config_of(case), precision={"grad_dtype": wire.grad or "fp32", "reduce_dtype": wire.reduce}
    )


def layer_gradients(world: int) -> Gradients:
    """What one process gives for each rank's share; a power of two more than the share's part of the whole."""
    found, full = [], tokens(world)
    for rank in range(world):
        engine = engine_of(layer_config(Wire(None, None, 0), 1))
        captured = capture(engine)
        engine.step({key: value.chunk(world)[rank] for key, value in full.items()})
        found.append([{name: values / world for name, _, values in captured}])
    return found


def engine_for(wire: Wire, world: int) -> Engine:
    if wire.layers:
        return engine_of(layer_config(wire, world))
    bucket = 400 * wire.dtypes[0].itemsize  # bytes: so many elements whatever they are
    config = Config.model_validate({
        "zero": {"stage": wire.stage, "resident": 0, "bucket_mib": bucket / 2**20, "shard_size": wire.shard},
        "precision": {"grad_dtype": wire.grad, "reduce_dtype": wire.reduce},
        "train": {"global_batch": world * ROWS, "micro_batch": ROWS // MICROBATCHES, "grad_clip": 0.0},
    })  # fmt: skip
    return Engine(Net(), topology_of(1, 1), config)


def capture(engine: Engine) -> list[tuple[str, Piece, Tensor]]:
    """A list that the next step fills with what arrives at the optimizer: name, place in the tensor, values."""
    found: list[tuple[str, Piece, Tensor]] = []
    inner: Callable[..., object] = engine.optimizer.step

    def step(gradients: list[Gradient], carry: Tensor) -> object:
        slices = (gradient.storage.fetch().wait() for gradient in gradients)
        for bucket, part in zip(engine.layout.buckets, slices, strict=True):
            for run in bucket.runs():
                for piece in run.pieces():
                    at = piece.offset
                    values = part[at : at + piece.numel].view(piece.size).clone()
                    found.append((piece.name, piece, values))
        return inner(gradients, carry)

    engine.optimizer.step = step  # type: ignore[method-assign, assignment]
    return found


def add_up(terms: list[Tensor], wide: torch.dtype) -> Tensor:
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total


def summed(grads: list[list[Tensor]], wire: Wire) -> Tensor:
    """By definition: each rank's gradients [rank][micro-batch] rounded to the wire's dtype once, summed in fp32 or
    better in rank order. An all-reduce over more than two ranks sends sums, which it must round as well."""
    grad, moved = wire.dtypes
    wide = torch.promote_types(torch.float32, grad)
    size = len(grads) if wire.shard == "all" else int(wire.shard)
    if wire.stage == 0:
        kept = [keep(parts, grad) for parts in grads]
        if size == 2:
            return add_up([k.to(moved) for k in kept], wide).to(grad)
        return (
            add_up([k.to(moved) for k in kept], torch.promote_types(torch.float32, moved))
            .to(moved)
            .to(grad)
        )
    groups = [grads[first : first + size] for first in range(0, len(grads), size)]
    per_group = []
    for group in groups:
        if wire.stage == 1:
            sums = [add_up([keep(parts, grad).to(moved) for parts in group], wide)]
        else:
            sums = [
                add_up([part.to(grad).to(moved) for part in parts], wide)
                for parts in zip(*group, strict=True)
            ]
        per_group.append(keep(sums, grad))
    return (
        per_group[0]
        if len(groups) == 1
        else add_up([g.to(moved) for g in per_group], wide).to(grad)
    )


def keep(parts: list[Tensor], grad: torch.dtype) -> Tensor:
    """Accumulated where it is kept, which rounds every time."""
    total = parts[0].to(grad)
    for part in parts[1:]:
        total = (total.to(torch.promote_types(part.dtype, grad)) + part).to(grad)
    return total


def check_wire(wires: list[Wire], gradients: Gradients) -> dict[Wire, tuple[int, int]]:
    """What arrives is what should; the bytes that this rank sent in the step, and the elements of its gradients."""
    sent, world = {}, len(gradients)
    for wire in wires:
        engine = engine_for(wire, world)
        topology, captured = engine.topology, capture(engine)
        before = sum(topology.traffic.values())
        engine.step(share(tokens(world), topology) if wire.layers else inputs(topology.rank))
        elements = sum(group.numel for group in engine.layout.groups)
        sent[wire] = sum(topology.traffic.values()) - before, elements
        wanted = {n: summed([[m[n] for m in r] for r in gradients], wire) for n in gradients[0][0]}
        assert captured
        for name, box, values in captured:
            if wire.layers and wire.grad == "bf16" and name == "embedding.word.weight":
                continue  # rows of the same token are added where gradients are kept, in bf16
            want = wanted[name][
                tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
            ]
            assert torch.equal(values, want), f"{wire} {name} {box}"
    return sent


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_gradients_travel_and_arrive_in_the_formats_asked_for(world: int) -> None:
    """In 2 micro-batches, and buckets that cut parameters; bytes change by the formula and the numbers' width."""
    wires = [
        Wire(*formats, stage) for formats in [(None, None), *FORMATS] for stage in (0, 1, 2, 3)
    ]
    for sent in run_ranks(world, check_wire, wires, plain_gradients(world)):
        for wire, (count, elements) in sent.items():
            plain, same_elements = sent[replace(wire, grad=None, reduce=None)]
            assert elements == same_elements
            times = (2, 1, MICROBATCHES, MICROBATCHES)[wire.stage]
            moved = times * elements * (world - 1) // world
            assert count - plain == moved * (wire.dtypes[1].itemsize - 4), wire


def test_groups_of_ranks_sum_in_two_steps() -> None:
    wires = [Wire(*formats, stage, shard=2) for formats in FORMATS for stage in (1, 2, 3)]
    run_ranks(4, check_wire, wires, plain_gradients(4))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_layers_gradients_too(world: int) -> None:
    """Products written where gradients are kept."""
    wires = [
        Wire(*formats, stage, layers=True) for formats in FORMATS[:3] for stage in (0, 1, 2, 3)
    ]
    run_ranks(world, check_wire, wires, layer_gradients(world))
