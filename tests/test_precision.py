"""Precision: the loss scale by its published definition, half-precision training however it is sliced, and what
travels between ranks in a narrower dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.checkpoints import state_of
from tests.configs import SEQ, STEPS, VOCAB, Case, Result, config_of, engine_of, result_of, share, topology_of
from tests.configs import batch as tokens_of
from tests.harness import run_ranks
from tests.test_step import POISONS, data, same, state, with_
from threed.config import Config
from threed.engine import Engine
from threed.precision import DTYPES, LossScale, Scaler
from threed.sharding import Box, Piece, boxes

# ------------------------------------------------------------------------------------------------------- the definition


@dataclass
class Definition:
    """The dynamic loss scale of Apex, Megatron-LM and DeepSpeed, in plain Python.

    It counts iterations, as theirs does: an overflow at iteration i makes the next growth due at i + window.
    """

    scale: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    iteration: int = 0
    overflowed: int = -1  # the last iteration that did

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def step(self, overflow: bool) -> None:
        """Takes notice of an iteration."""
        if overflow:
            if self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.left -= 1
            self.overflowed = self.iteration
        else:
            grows = (self.iteration - self.overflowed) % self.window == 0
            self.scale *= 2 if grows else 1
            self.left = self.hysteresis if grows or self.consecutive else self.left
        self.iteration += 1

    @property
    def state(self) -> dict[str, float]:
        """As a checkpoint would keep it."""
        good = self.iteration - 1 - self.overflowed
        return {"loss_scale": self.scale, "good_steps": good, "hysteresis_left": self.left}


def check_follows(rule: LossScale, overflows: list[bool]) -> None:
    """Scale and counters after each step."""
    scaler = Scaler(rule, torch.device("cpu"))
    want = Definition(rule.initial, rule.window, rule.hysteresis, rule.consecutive, rule.minimum)
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow), dtype=torch.float64))
        want.step(overflow)
        assert scaler.state() == want.state


@given(
    st.builds(
        LossScale, initial=st.sampled_from([1.0, 2.0, 1024.0, 65536.0]), window=st.integers(1, 5),
        hysteresis=st.integers(1, 4), consecutive=st.booleans(), minimum=st.sampled_from([0.25, 1.0]),
    ),
    st.lists(st.booleans(), max_size=40),
)  # fmt: skip
def test_the_loss_scale_follows_the_definition(rule: LossScale, overflows: list[bool]) -> None:
    check_follows(rule, overflows)


def test_the_default_is_65536_a_window_of_1000_and_hysteresis_2() -> None:
    definition = Definition()
    assert LossScale() == LossScale(definition.scale, definition.window, definition.hysteresis)
    check_follows(LossScale(), [n in (999, 2050, 2060, 2070) for n in range(3100)])


def test_a_constant_scale_stays() -> None:
    scaler = Scaler(LossScale(1024.0, window=1, dynamic=False), torch.device("cpu"))
    for overflow in (0.0, 1.0, 1.0, 0.0):
        scaler.update(torch.tensor(overflow, dtype=torch.float64))
        assert float(scaler.scale) == 1024.0


# --------------------------------------------------------------------------------------------------- an engine in fp16

OVERFLOWS = [None, 0, 1, None, None, 1, 0, None, None, None]  # the rank that overflows in each step


def rate(done: int) -> float:
    """The learning rate after so many updates: up to 3e-3 in two, then straight down to a tenth at ten."""
    return 3e-3 * (done + 1) / 2 if done < 2 else 3e-4 + 2.7e-3 * (10 - done) / 8


def check_overflows(case: Case, rule: LossScale) -> None:
    """Every step uses the scale that the definition says, and those that overflow anywhere do nothing else."""
    engine = engine_of(with_(config_of(case), optim={"schedule": "linear"}), loss_scale=rule)
    want, updates = Definition(rule.initial, rule.window, rule.hysteresis, rule.consecutive), 0
    for step, bad in enumerate(OVERFLOWS):
        before = state(engine)
        if bad == engine.topology.rank:
            POISONS["sink"](engine, float("inf"))
        metrics = engine.step(data(engine, step))
        assert metrics.loss_scale == want.scale, step
        want.step(bad is not None)
        assert engine.optimizer.scaler.state() == want.state
        assert same(state(engine), before) == (bad is not None)
        updates += bad is None
        assert (metrics.skipped, float(engine.optimizer.updates)) == (step + 1 - updates, updates)
        assert metrics.lr == pytest.approx(rate(updates - (bad is None)), rel=1e-12)


def run_overflows(stages: list[int]) -> None:
    for stage, consecutive in zip(stages, (False, True, False, True), strict=True):
        rule = LossScale(initial=256.0, window=3, consecutive=consecutive)
        check_overflows(Case(dp=2, layers=1, zero=stage, dtype="fp16", microbatches=1), rule)


def test_an_overflow_on_one_rank_skips_everywhere_and_moves_the_scale() -> None:
    run_ranks(2, run_overflows, [0, 1, 2, 3])


def test_fp16_begins_with_the_default_and_comes_down() -> None:
    """A scale far too large: nothing is updated until it fits, and hysteresis is spent once."""
    engine = engine_of(config_of(Case(layers=1, dtype="fp16", microbatches=1)), loss_scale=LossScale(2.0**40))
    scales = [engine.step(data(engine, step)).loss_scale for step in range(3)]
    assert scales == [2.0**40, 2.0**40, 2.0**39]
    assert float(engine.optimizer.updates) == 0
    default = engine_of(config_of(Case(layers=1, dtype="fp16", microbatches=1)))
    assert default.step(data(default)).loss_scale == 65536.0


def check_unscaled(case: Case) -> None:
    """fp32, scaled by powers of two: nothing but exponents differs, so not a bit does in the end."""
    wanted = None
    for rule in (LossScale(1.0, dynamic=False), LossScale(1024.0, dynamic=False), LossScale(8.0, window=1)):
        engine = engine_of(config_of(case), loss_scale=rule)
        metrics = [engine.step(data(engine, step)) for step in range(STEPS)]
        grows = 2.0 if rule.dynamic else 1.0
        assert [m.loss_scale for m in metrics] == [rule.initial * grows**step for step in range(STEPS)]
        found = [m.loss for m in metrics], [m.grad_norm for m in metrics], state(engine)
        wanted = wanted or found
        assert found[:2] == wanted[:2]
        assert same(found[2], wanted[2])


def run_unscaled(cases: list[Case]) -> None:
    for case in cases:
        check_unscaled(case)


def test_gradients_are_unscaled_by_the_scale_of_their_backward() -> None:
    """With clipping, and also where the scale doubles after every step."""
    run_ranks(2, run_unscaled, [Case(dp=2, layers=1, zero=stage, dtype="fp32") for stage in (0, 1, 2, 3)])


# ------------------------------------------------------------------------------------- half precision, sliced and whole

SHAPES = [(1, 2, 1), (1, 2, 2), (2, 2, 1)]
EXACT, CLOSE = {"microbatches": 1}, {"microbatches": 3}


def run_twin(case: Case, clip: float) -> Result:
    engine = engine_of(with_(config_of(case), train={"grad_clip": clip}), loss_scale=LossScale(256.0, dynamic=False))
    metrics = [engine.step(data(engine, step)) for step in range(STEPS)]
    assert metrics[-1].skipped == 0
    return result_of(engine, metrics)


def run_twins(cases: list[Case], clip: float) -> list[tuple[Case, Result]]:
    return [(case, run_twin(case, clip)) for case in cases]


def differences(shape: tuple[int, int, int], microbatches: int, clip: float) -> Iterator[tuple[str, float, float]]:
    """Of every sliced run from its un-sharded twin, part by part: the case, the largest difference, and the largest
    value there is."""
    first = Case(*shape, sequence=shape[2] > 1, layers=2, microbatches=microbatches, model="llama")
    cases = [replace(first, dtype=dtype, zero=zero) for dtype in ("bf16", "fp16") for zero in (0, 1, 2, 3)]
    results = dict(run_ranks(first.world, run_twins, cases, clip)[0])
    for case, got in results.items():
        twin = results[replace(case, zero=0)]
        assert got.weights.keys() == twin.weights.keys()
        for part, tensors in {"weight": twin.weights, **twin.moments}.items():
            found = {"weight": got.weights, **got.moments}[part]
            gap = max(float((found[name] - want).abs().max()) for name, want in tensors.items())
            yield f"{part} of {case}", gap, max(float(want.abs().max()) for want in tensors.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slicing_changes_no_bit_of_a_half_precision_run(shape: tuple[int, int, int]) -> None:
    """One micro-batch, no clipping: fp32 masters and moments are equal, for every sum has the same terms in order."""
    found = list(differences(shape, 1, 0.0))
    assert all(size > 0 for _, _, size in found)
    assert [(what, gap) for what, gap, _ in found if gap != 0.0] == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slicing_changes_the_order_of_sums_only(shape: tuple[int, int, int]) -> None:
    """Three micro-batches and clipping: gradients are summed over ranks and micro-batches in another order, and so are
    the squares of the norm. That is fp32 rounding, but it may turn one weight's rounding to half precision over, which
    is 2^-8 of it in bf16: so may an update, at most lr, differ by that in each step, and the moments by that of their
    largest. Measured are 1e-9 in weights; a lost or doubled gradient moves them by 1e-3."""
    for what, gap, largest in differences(shape, 3, 0.5):
        bound = STEPS * 3e-3 if what.startswith("weight") else largest
        assert gap <= bound * 2**-8, what


# ------------------------------------------------------------------------------------- what travels, and what it sums to

ROWS, MICROBATCHES = 8, 2  # rows a rank
Gradients = list[list[dict[str, Tensor]]]  # by rank and micro-batch


@dataclass(frozen=True)
class Wire:
    """How gradients are kept, in what they travel, and how they are sliced."""

    grad: str | None
    reduce: str | None
    stage: int
    shard: int | str = "all"
    layers: bool = False  # a model of threed.layers, in one micro-batch, in place of a module of plain torch

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """That of gradients, and that on the wire."""
        grad = self.grad or "fp32"
        return DTYPES[grad], DTYPES[self.reduce or grad]


FORMATS = [(None, "bf16"), (None, "fp16"), ("bf16", None), ("fp64", None), ("fp64", "fp32"), ("bf16", "fp32")]


class Net(nn.Module):
    """Plain torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)) for _ in range(2))
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
    ids = torch.randint(0, VOCAB, (world * ROWS, SEQ + 1), generator=torch.Generator().manual_seed(3))
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def plain_gradients(world: int) -> Gradients:
    """What autograd gives each rank in each micro-batch of Net, fp32."""
    return [[one_gradient(world, rank, number) for number in range(MICROBATCHES)] for rank in range(world)]


def one_gradient(world: int, rank: int, number: int) -> dict[str, Tensor]:
    net, part = Net(), {key: value.chunk(MICROBATCHES)[number] for key, value in inputs(rank).items()}
    (net(**part) / (world * MICROBATCHES)).backward()
    return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


def layer_config(wire: Wire, world: int) -> Config:
    case = Case(dp=world, zero=wire.stage, shard=wire.shard, layers=1, model="llama", dtype="fp32", microbatches=1)
    return with_(config_of(case), precision={"grad_dtype": wire.grad or "fp32", "reduce_dtype": wire.reduce})


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
    config = Config.model_validate({
        "zero": {"stage": wire.stage, "resident": 0, "bucket_mib": 0.0015, "shard_size": wire.shard},
        "precision": {"grad_dtype": wire.grad, "reduce_dtype": wire.reduce},
        "train": {"global_batch": world * ROWS, "micro_batch": ROWS // MICROBATCHES, "grad_clip": 0.0},
    })  # fmt: skip
    return Engine(Net(), topology_of(1, 1), config)


def capture(engine: Engine) -> list[tuple[str, tuple[Box, Piece], Tensor]]:
    """A list that the next step fills with what arrives at the optimizer: name, place in the tensor, values."""
    found: list[tuple[str, tuple[Box, Piece], Tensor]] = []
    inner: Callable[..., object] = engine.optimizer.step

    def step(slices: list[Tensor], carry: Tensor) -> object:
        for bucket, part in zip(engine.layout.buckets, slices, strict=True):
            for run in bucket.runs():
                for box in boxes(run.piece, run.first, run.last):
                    at = run.offset + box.offset
                    values = part[at : at + box.numel].view(box.size).clone()
                    found.append((run.piece.name, (box, run.piece), values))
        return inner(slices, carry)

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
        return add_up([k.to(moved) for k in kept], torch.promote_types(torch.float32, moved)).to(moved).to(grad)
    groups = [grads[first : first + size] for first in range(0, len(grads), size)]
    per_group = []
    for group in groups:
        if wire.stage == 1:
            sums = [add_up([keep(parts, grad).to(moved) for parts in group], wide)]
        else:
            sums = [add_up([part.to(grad).to(moved) for part in parts], wide) for parts in zip(*group, strict=True)]
        per_group.append(keep(sums, grad))
    return per_group[0] if len(groups) == 1 else add_up([g.to(moved) for g in per_group], wide).to(grad)


def keep(parts: list[Tensor], grad: torch.dtype) -> Tensor:
    """Accumulated where it is kept, which rounds every time."""
    total = parts[0].to(grad)
    for part in parts[1:]:
        total = (total.to(torch.promote_types(part.dtype, grad)) + part).to(grad)
    return total


def check_wire(wires: list[Wire], gradients: Gradients) -> dict[Wire, int]:
    """What arrives is what should, bit for bit; the bytes that this rank sent in the step."""
    sent, world = {}, len(gradients)
    for wire in wires:
        engine = engine_for(wire, world)
        topology, captured = engine.topology, capture(engine)
        before = sum(topology.traffic.values())
        engine.step(share(tokens(world), topology) if wire.layers else inputs(topology.rank))
        sent[wire] = sum(topology.traffic.values()) - before
        assert captured
        wanted = {n: summed([[m[n] for m in r] for r in gradients], wire) for n in gradients[0][0]}
        assert {name for name, *_ in captured} <= wanted.keys()
        for name, (box, _), values in captured:
            if wire.layers and wire.grad == "bf16" and name == "embedding.word.weight":
                continue  # rows of the same token are added where gradients are kept, in bf16
            want = wanted[name][tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
            assert torch.equal(values, want), f"{wire} {name} {box}"
    return sent


def check_bytes(sent: dict[Wire, int], elements: int, world: int, rounds: int) -> None:
    """fp32 gradients sent what the formula says, and the others that many times their width."""
    for wire, count in sent.items():
        plain = sent[replace(wire, grad=None, reduce=None)]
        times = 2 if wire.stage == 0 else rounds if wire.stage > 1 else 1
        gradients = times * elements * (world - 1) // world
        assert count - plain == gradients * (wire.dtypes[1].itemsize - 4), wire


def padded_elements(wire: Wire, world: int) -> int:
    return sum(group.numel for group in engine_for(wire, world).layout.groups)


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_travel_and_arrive_in_the_formats_asked_for(world: int) -> None:
    """In 2 micro-batches, and buckets that cut parameters."""
    wires = [Wire(*formats, stage) for formats in [(None, None), *FORMATS] for stage in (0, 1, 2, 3)]
    results = run_ranks(world, check_wire, wires, plain_gradients(world))
    for wire in wires:
        (elements,) = {*run_ranks(world, padded_elements, wire, world)} if wire.grad == wire.reduce is None else {0}
        if elements:
            same_stage = {w: n for w, n in results[0].items() if w.stage == wire.stage}
            check_bytes(same_stage, elements, world, MICROBATCHES)


def test_groups_of_ranks_sum_in_two_steps() -> None:
    wires = [Wire(*formats, stage, shard=2) for formats in FORMATS for stage in (1, 2, 3)]
    run_ranks(4, check_wire, wires, plain_gradients(4))


@pytest.mark.parametrize("world", [2, 4])
def test_layers_gradients_too(world: int) -> None:
    """Products written where gradients are kept."""
    wires = [Wire(*formats, stage, layers=True) for formats in FORMATS[:3] for stage in (0, 1, 2, 3)]
    run_ranks(world, check_wire, wires, layer_gradients(world))
