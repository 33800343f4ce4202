"""Buckets, slices and runs: every element of every parameter in exactly one place, on every rank the same order.

The geometry is checked for any number of ranks without starting them; what a gradient does on its way is checked on the
real reducer, and training with buckets of any size against one process.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.configs import Case, batch, config_of, engine_of, share, topology_of
from tests.harness import run_ranks
from tests.test_equivalence import run_all
from threed import models
from threed.distributed.sharding import ShardSpec, matrix, parameter, vector
from threed.distributed.topology import Axis, Topology
from threed.engine import Engine
from threed.layers import Slicing
from threed.zero import layout
from threed.zero.contributions import own_backward
from threed.zero.layout import ALIGN, DataAxes, GroupOptions, Layout, Policy
from threed.zero.reducer import Reducer

# -------------------------------------------------------------------------------------------------------- geometry


CPU = torch.device("cpu")


@dataclass
class Grid:
    """The axes of a topology as one rank sees them, without processes: layouts are made from these alone."""

    sizes: dict[str, int]
    place: dict[str, int]
    rank: int = 0
    device: torch.device = CPU
    traffic: Counter[str] = field(default_factory=Counter)

    def axis(self, name: str) -> Axis:
        return Axis(name, tuple(range(self.sizes.get(name, 1))), self.place.get(name, 0))

    def stages(self, stages: tuple[int, ...]) -> Axis:
        return Axis("pp", stages, self.place.get("pp", 0))


@dataclass(frozen=True)
class Shape:
    """A parameter to be: its size, whether it decays, and whether its gradient is partial over tp."""

    rows: int
    columns: int
    decay: bool
    partial: bool


class Unit(nn.Module):
    """A layer of some parameters; a matrix, or without columns a vector."""

    def __init__(self, number: int, shapes: tuple[Shape, ...]) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            name, axis = f"u{number}.p{i}", "tp" if shape.partial else None
            size = (shape.rows, shape.columns) if shape.columns else (shape.rows,)
            piece = (
                matrix(name, size, 0, (0, shape.rows), 1.0)
                if len(size) == 2
                else vector(name, shape.rows)
            )
            self.register_parameter(
                f"p{i}", parameter(ShardSpec((piece,), axis, axis, shape.decay), size)
            )


SHAPES = st.builds(Shape, st.integers(0, 40), st.integers(0, 9), st.booleans(), st.booleans())
UNITS = st.lists(st.lists(SHAPES, min_size=1, max_size=5).map(tuple), min_size=1, max_size=5)


def policy(
    data: Axis, shards: bool, bucket_bytes: int, dtype: torch.dtype = torch.float32, stage: int = 1
) -> Policy:
    """Slices over the data ranks (stage 1, or `stage`), or none (stage 0)."""
    alone = Axis("dp", (data.ranks[data.index],), 0, None, data.traffic)
    shard, replicas = (data, alone) if shards else (alone, data)
    return Policy(
        stage if shards else 0,
        DataAxes(shard, replicas, shard),
        bucket_bytes,
        dtype,
        torch.float32,
        options=by_decay,
    )


def by_decay(spec: ShardSpec) -> GroupOptions:
    return GroupOptions(decay=0.1 if spec.decay else 0.0)


def layouts(
    units: list[tuple[Shape, ...]],
    data: int,
    bucket_bytes: int,
    *,
    shards: bool = True,
    tp_index: int = 0,
) -> list[Layout]:
    """The layout of every data rank."""
    return [
        layout.build(
            [Unit(n, shapes) for n, shapes in enumerate(units)], {},
            grid,  # type: ignore[arg-type]
            policy(grid.axis("dp"), shards, bucket_bytes, torch.float64),
        )
        for rank in range(data)
        for grid in (Grid({"dp": data, "tp": 2}, {"dp": rank, "tp": tp_index}, rank),)
    ]  # fmt: skip


GEOMETRY = (UNITS, st.integers(1, 5), st.sampled_from([1, 100, 300, 1000, 3001, 10**9]))


@settings(max_examples=60)
@given(*GEOMETRY)
def test_buckets_tile_their_group_and_slices_their_bucket(
    units: list[tuple[Shape, ...]], data: int, bucket_bytes: int
) -> None:
    ranks = layouts(units, data, bucket_bytes)
    for groups in zip(*(plan.groups for plan in ranks), strict=True):
        assert len({(g.key, g.numel) for g in groups}) == 1
        assert groups[0].numel % (data * ALIGN) == 0
        for buckets in zip(*(g.buckets for g in groups), strict=True):
            assert len({(b.first, b.last) for b in buckets}) == 1
            spans = [(b.own_first, b.own_last) for b in buckets]
            assert [first for first, _ in spans] == [
                buckets[0].first,
                *(last for _, last in spans[:-1]),
            ]
            assert spans[-1][1] == buckets[0].last
            assert len({last - first for first, last in spans}) == 1
            assert buckets[0].last - buckets[0].first <= max(bucket_bytes // 4, data * ALIGN)
        edges = [(b.first, b.last) for b in groups[0].buckets]
        assert edges[0][0] == 0
        assert edges[-1][1] == groups[0].numel
        assert all(a[1] == b[0] for a, b in pairwise(edges))


@settings(max_examples=60)
@given(*GEOMETRY, st.booleans())
def test_runs_cover_every_element_once_over_the_ranks(
    units: list[tuple[Shape, ...]], data: int, bucket_bytes: int, shards: bool
) -> None:
    """And lie where they say: parameters are numbered, and every run is read back from its slice of the buffer."""
    seen: Counter[tuple[str, int]] = Counter()
    total = 0
    for plan in layouts(units, data, bucket_bytes, shards=shards):
        total = plan.parameters
        for slot in plan.slots:
            slot.param.data.copy_(
                torch.arange(slot.param.numel(), dtype=torch.float64).view(slot.param.shape)
            )
        for bucket in plan.buckets:
            own = bucket.group.params[bucket.own_first : bucket.own_last]
            covered = torch.zeros(len(own), dtype=torch.bool)
            for run in bucket.runs():
                part = slice(run.offset, run.offset + run.last - run.first)
                assert torch.equal(
                    own[part], torch.arange(run.first, run.last, dtype=torch.float64)
                )
                assert not covered[part].any()
                covered[part] = True
                seen.update((run.piece.name, element) for element in range(run.first, run.last))
            assert not own[~covered].any()  # what no run covers is padding, and padding is zero
    assert len(seen) == total
    assert set(seen.values()) <= {1 if shards else data}


@settings(max_examples=60)
@given(*GEOMETRY)
def test_parameters_do_not_touch_and_lie_in_backward_order(
    units: list[tuple[Shape, ...]], data: int, bucket_bytes: int
) -> None:
    plan = layouts(units, data, bucket_bytes)[-1]
    assert plan.parameters == sum(s.rows * (s.columns or 1) for shapes in units for s in shapes)
    for group in plan.groups:
        assert all(slot.first % ALIGN == 0 for slot in group.slots)
        assert all(a.last <= b.first for a, b in pairwise(group.slots))
        assert [slot.units[0] for slot in group.slots] == sorted(
            (s.units[0] for s in group.slots), reverse=True
        )
        kinds = {(by_decay(s.spec), s.spec.partial) for s in group.slots}
        assert kinds == {(group.key.options, group.key.partial)}
    earliest = [min((s.units[0] for s in bucket.slots), default=-1) for bucket in plan.buckets]
    assert earliest == sorted(earliest, reverse=True)


def test_a_replicated_parameter_has_one_owner() -> None:
    """Of all data and tensor ranks one counts an element of a replicated parameter in the norm and in checkpoints."""
    units = [(Shape(50, 0, False, True), Shape(30, 4, True, False))]
    for shards in (True, False):
        owners: Counter[tuple[str, int]] = Counter()
        for tp_index in (0, 1):
            for plan in layouts(units, 3, 200, shards=shards, tp_index=tp_index):
                for bucket in plan.buckets:
                    for run in bucket.runs() if bucket.group.owned else ():
                        owners.update(
                            (run.piece.name, element) for element in range(run.first, run.last)
                        )
        # replicated over tp
        assert {n for (name, _), n in owners.items() if name == "u0.p0"} == {1}
        # another shard on each tensor rank
        assert {n for (name, _), n in owners.items() if name == "u0.p1"} == {2}
        assert len(owners) == 50 + 120


def test_a_tied_weight_is_owned_by_its_first_stage() -> None:
    for stage in (0, 1):
        grid = Grid({"dp": 1, "pp": 2}, {"pp": stage})
        unit = Unit(0, (Shape(8, 4, True, False),))
        plan = layout.build(
            [unit],
            {"u0.p0": layout.Tie(0, (0, 1), (0, 1), ((0,), (0,)))},
            grid,  # type: ignore[arg-type]
            policy(grid.axis("dp"), True, 100),
        )
        assert [group.owned for group in plan.groups] == [stage == 0]
        assert [[axis.ranks for axis in group.sums] for group in plan.groups] == [[(0, 1)]]


# ---------------------------------------------------------------------------------------------- gradients on the way


def reducer_of(*shapes: Shape, bucket_bytes: int = 200) -> tuple[Reducer, Unit]:
    unit = Unit(0, shapes)
    topology = Topology()
    return Reducer(
        layout.build([unit], {}, topology, policy(topology.axis("dp"), True, bucket_bytes))
    ), unit


def flat(reducer: Reducer) -> Tensor:
    """All gradients in storage order."""
    reducer.finish()
    return torch.cat([group.grads for group in reducer.layout.groups])


TWO = (Shape(8, 8, True, False), Shape(40, 0, True, False))


def test_gradients_of_a_step_add_up_and_the_next_step_begins_anew() -> None:
    reducer, unit = reducer_of(*TWO)
    for scale in (1.0, 10.0):
        reducer.begin(3)
        for micro in range(3):
            (
                unit.p0.sum() * (scale + micro)
                + (unit.p1 * unit.p1.detach()).sum() * 0
                + unit.p1.sum()
            ).backward()
        assert unit.p0.grad is None
        grads = flat(reducer)
        assert grads.sum() == 64 * (3 * scale + 3) + 40 * 3
        assert grads.unique().tolist() == [0.0, 3.0, 3 * scale + 3]


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    """Also when its buffer still holds the gradient of the step before; and in some micro-batches only is enough."""
    reducer, unit = reducer_of(*TWO)
    for used in ((True, True), (False, False), (True, False)):
        reducer.begin(2)
        for micro in range(2):
            loss = unit.p0.sum() * 2.0
            (loss + unit.p1.sum() if used[micro] else loss).backward()
        reducer.all_passes_ended()
        grads = flat(reducer)
        assert grads.sum() == 64 * 4.0 + 40.0 * sum(used)


def test_a_gradient_that_comes_too_late_is_an_error_by_name() -> None:
    """The first step learns how often a parameter is used; more than that later is an error once its bucket left."""
    reducer, unit = reducer_of(*TWO)
    for _ in range(2):
        reducer.begin(1)
        (unit.p0.sum() + unit.p1.sum()).backward()
        unit.p0.sum().backward()
        reducer.finish()
    reducer.begin(1)
    (unit.p0.sum() + unit.p1.sum()).backward()
    unit.p0.sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"u0\.p0: a gradient arrived after the 2 per micro-batch .*runs_vary = True",
    ):
        unit.p0.sum().backward()
    reducer.finish()
    with pytest.raises(RuntimeError, match=r"u0\.p1: a gradient arrived after"):
        unit.p1.sum().backward()  # its bucket has left


def check_unused_somewhere(stage: int, dynamic: bool) -> None:
    """Used on one data rank only: the others' share is zero, and nobody waits for ever."""
    topology = topology_of(1, 1)
    unit = Unit(0, TWO)
    plan = layout.build([unit], {}, topology, policy(topology.axis("dp"), True, 100, stage=stage))
    reducer = Reducer(plan, dynamic=dynamic)
    for _ in range(2):
        reducer.begin(1)
        loss = unit.p0.sum()
        with own_backward(reducer):
            (loss + unit.p1.sum() * 5 if topology.rank == 1 else loss).backward()
        reducer.pass_ended()
        got = reducer.finish()
        for bucket, part in zip(plan.buckets, (g.storage.fetch().wait() for g in got), strict=True):
            for run in bucket.runs():
                want = 2.0 if run.piece.name == "u0.p0" else 5.0
                assert (part[run.offset : run.offset + run.last - run.first] == want).all()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_parameter_used_on_one_data_rank_only(stage: int, dynamic: bool) -> None:
    run_ranks(2, check_unused_somewhere, stage, dynamic)


def check_same_order() -> list[list[tuple[int, int, list[str]]]]:
    """Buckets in their order, of several models: sizes and the names in them."""
    orders = []
    for model in ("gpt", "qwen-tied"):
        engine = engine_of(config_of(Case(dp=2, tp=2, sequence=True, model=model, bucket_mib=0.01)))
        buckets = engine.layout.buckets
        orders.append([(b.first, b.last, [slot.spec.name for slot in b.slots]) for b in buckets])
    return orders


def test_buckets_have_one_order_on_all_data_ranks() -> None:
    orders = run_ranks(4, check_same_order)  # rank = 2 * dp index + tp index
    assert orders[0] == orders[2]
    assert orders[1] == orders[3]
    assert all(len(order) > 10 for order in orders[0])


def check_swapped() -> None:
    """A model of one's own that comes out in another order on one rank."""
    case = Case(dp=2, layers=2)
    config, topology = config_of(case), topology_of(1, 1)
    model = models.build(config.model, Slicing(topology.axis("tp")))
    plain = model.layers

    def layers() -> list[nn.Module]:
        made = plain()
        block = made[1]
        if topology.rank == 1:
            block._modules = dict(reversed(block._modules.items()))
        return made

    model.layers = layers  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"blocks\.0 \(Block\): parameter .* is not the same on ranks 0 and 1"
    ):
        Engine(model, topology, config)


def test_another_order_of_parameters_on_one_rank_is_refused() -> None:
    """The buckets are of the same sizes: their sums would be of different things, without a word."""
    run_ranks(2, check_swapped)


# ----------------------------------------------------------------------------------------------------------- training

SIZES = [0.003, 0.02, 1e6]  # MiB: two that cut parameters, and everything in one


def training_cases(stages: int) -> list[Case]:
    """Every size with every shape; some of ZeRO's stages with each, in turns."""
    small = functools.partial(Case, layers=1)
    shapes = (
        small(dp=2, tp=2, sequence=True),
        small(pp=2, dp=2),
        small(tp=2, sequence=True, model="gpt-untied"),
        small(dp=3, zero=0, model="llama"),
    )
    # 32 elements a rank: hundreds of buckets
    absurd = [replace(shape, bucket_mib=1e-4) for shape in shapes]
    cases = absurd + [replace(shape, bucket_mib=mib) for mib in SIZES for shape in shapes]
    return [
        replace(case, zero=zero)
        for number, case in enumerate(cases)
        for zero in ([1 + (number + k) % 3 for k in range(stages)] if case.zero else [0])
    ]


def test_buckets_of_any_size_give_the_training_of_one_process() -> None:
    """Every size with two of the four shapes, in one of the stages of ZeRO; all combinations by the grid."""
    cases, shapes = training_cases(stages=1), 4
    some = [case for n, case in enumerate(cases) if (n // shapes + n % shapes) % 2 == 0]
    assert {case.zero for case in some} == {0, 1, 2, 3}
    run_all(some)


@pytest.mark.grid
def test_buckets_of_any_size_give_it_in_every_stage() -> None:
    run_all(training_cases(stages=3))


def check_few_words(vocab: int) -> list[float]:
    """A vocabulary smaller than tp: some ranks hold no words at all."""
    topology = topology_of(1, 1) if not torch.distributed.is_initialized() else topology_of(1, 4)
    config = config_of(Case(tp=topology.tp, layers=2, sequence=topology.tp > 1, microbatches=1))
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab": vocab})})
    engine = engine_of(config)
    draw = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, vocab, (2, 8, 16), generator=draw)
    return [engine.step({"tokens": tokens, "labels": labels}).loss for _ in range(3)]


@pytest.mark.parametrize("vocab", [1, 3, 5])
def test_a_vocabulary_smaller_than_tp_trains(vocab: int) -> None:
    want = check_few_words(vocab)
    for losses in run_ranks(4, check_few_words, vocab, timeout=60):
        assert losses == pytest.approx(want, rel=1e-9)


def check_padding() -> None:
    engine = engine_of(config_of(Case(dp=3, layers=2, dtype="fp32", bucket_mib=0.01)))
    for step in range(2):
        engine.step(share(batch(step, engine.config.train.global_batch), engine.topology))
    engine.optimizer.wait()
    for group in engine.layout.groups:
        real = torch.zeros(group.numel, dtype=torch.bool)
        for slot in group.slots:
            real[slot.first : slot.last] = True
        assert not group.params[~real].any()
        assert not group.grads[~real].any()  # stage 1: in full
    for state, bucket in zip(engine.optimizer.states, engine.layout.buckets, strict=True):
        real = torch.zeros(bucket.own_last - bucket.own_first, dtype=torch.bool)
        for run in bucket.runs():
            real[run.offset : run.offset + run.last - run.first] = True
        for values in (storage.fetch().wait() for storage in state.storages.values()):
            assert not values[~real].any()


def test_padding_is_zero_and_stays_zero() -> None:
    run_ranks(3, check_padding)
