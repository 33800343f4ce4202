"""The executor: every plan, over gloo and over a strict rendezvous transport, gives what one process computes.

gloo's asynchronous sends hide orders of communication that would deadlock elsewhere. So here is a second transport, of
tokens and blocking calls on gloo, on which a send returns only once the other side has come to its receive.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.configs import Case, batch, config_of, engine_of, share, topology_of, trained
from tests.harness import run_ranks
from tests.pipeline.test_step import same, state
from tests.test_equivalence import run_all
from threed import schedules
from threed.distributed.collectives import Pending, done
from threed.distributed.topology import Topology
from threed.engine import Engine, StepMetrics
from threed.layers import MicroBatch
from threed.pipeline.activation_checkpointing import ActivationStore, Recomputed
from threed.pipeline.boundary import Form
from threed.pipeline.executor import Executor
from threed.pipeline.stage import AlwaysGathered, Stage
from threed.pipeline.transport import Links, Transport
from threed.planner.gathering import gathering
from threed.schedules import Action, Kind, Plan, all_forward_all_backward, deadlock_check
from threed.schedules.action import COMPUTE, RECEIVES
from threed.testing import RanksFailed


class Rendezvous:
    """Both sides block, in order: the receiver's token says that it is there, then the message goes."""

    posts_ahead = 0  # else `receive` would block a compute action that the message depends on

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def send(
        self, tensors: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        link = self.topology.link(source, target, gradients)
        for tensor in tensors:
            dist.recv(torch.empty(1), link.peer, group=link.axis.group)
            dist.send(tensor.contiguous(), link.peer, group=link.axis.group)
        return [done(tensor) for tensor in tensors]

    def receive(
        self, outs: Sequence[Tensor], source: int, target: int, gradients: bool = False
    ) -> list[Pending]:
        link = self.topology.link(source, target, gradients)
        for out in outs:
            dist.send(torch.ones(1), link.peer, group=link.axis.group)
            dist.recv(out, link.peer, group=link.axis.group)
        return [done(out) for out in outs]


TRANSPORTS: dict[str, Callable[[Topology], Transport]] = {"gloo": Links, "rendezvous": Rendezvous}

# --------------------------------------------------------------------------------------------------- a small model

H, S, B, LAYERS = 4, 3, 2, 6


class First(nn.Module):
    backward_reads_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 10 * H, dtype=torch.float64).view(10, H))

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        assert x is None
        assert micro.tokens is not None
        return self.table[micro.tokens.t()]


class Middle(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(H, H, generator=draw, dtype=torch.float64))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, H + 1, dtype=torch.float64))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        assert micro.labels is not None
        return ((x * self.scale).sum(-1) - micro.labels.t()).square().sum()


def model() -> list[nn.Module]:
    return [First(), *(Middle(i) for i in range(LAYERS - 2)), Last()]


def micros(count: int, training: bool = True) -> list[MicroBatch]:
    draw = torch.Generator().manual_seed(count)
    ids = torch.randint(0, 10, (count, 2, B, S), generator=draw)
    return [MicroBatch(tokens, labels, training=training) for tokens, labels in ids]


def serial(count: int, backward: bool) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Losses, and every layer's gradients added up in the order of micro-batches."""
    layers, losses = model(), []
    for micro in micros(count):
        x: Tensor | None = None
        for layer in layers:
            x = layer(x, micro)
        assert x is not None
        if backward:
            x.backward()
        losses.append(x.detach())
    return losses, [[p.grad for p in layer.parameters()] for layer in layers]


def chunks_of(total: int) -> list[range]:
    """Which layers each stage of the model has: as even as can be."""
    return [range(LAYERS * i // total, LAYERS * (i + 1) // total) for i in range(total)]


class Vanishing:
    """A gatherer that means it: the weights of a layer are NaN but from `ready` to `release`.

    It counts how often each layer was gathered, and how many are, or are on their way, at the worst moment.
    """

    def __init__(self, layers: Sequence[nn.Module], held: Sequence[int]) -> None:
        self.weights = {unit: [p.data.clone() for p in layers[unit].parameters()] for unit in held}
        self.layers, self.whole, self.gathers, self.most = layers, set[int](), Counter[int](), 0
        for unit in held:
            self._fill(unit, None)

    def _fill(self, unit: int, values: Sequence[Tensor] | None) -> None:
        for n, param in enumerate(self.layers[unit].parameters()):
            param.data.fill_(torch.nan) if values is None else param.data.copy_(values[n])

    def is_freed(self, unit: int) -> bool:
        return True

    def start(self, unit: int) -> None:
        self.gathers[unit] += unit not in self.whole
        self.whole.add(unit)
        self.most = max(self.most, len(self.whole))

    def ready(self, unit: int) -> None:
        assert unit in self.whole
        self._fill(unit, self.weights[unit])

    def release(self, unit: int) -> None:
        self.whole.remove(unit)
        self._fill(unit, None)


def run_plan(
    plan: Plan, transport: Transport, rank: int, prefetch: int = 1
) -> tuple[Executor, Vanishing]:
    """Runs a lowered plan on this rank and compares everything it gives with one process, bit for bit.

    Weights are there only while they are gathered, and no more layers than may be.
    """
    layers, ranges = model(), chunks_of(plan.total_stages)
    held = [ranges[plan.stage_of(rank, chunk)] for chunk in range(plan.chunks)]
    reduced: list[int] = []
    gatherer = Vanishing(layers, [i for part in held for i in part])
    stages = [Stage([layers[i] for i in part], gatherer, prefetch, part.start) for part in held]
    executor = Executor(stages, transport, rank, reduced.append)
    executor.record()
    outputs = executor.run(plan, micros(plan.microbatches, not plan.forward_only))
    losses, grads = serial(plan.microbatches, not plan.forward_only)
    ends = any(LAYERS - 1 in part for part in held)
    assert len(outputs) == (plan.microbatches if ends else 0)
    assert all(torch.equal(a, b) for a, b in zip(outputs, losses, strict=False))
    for part in held:
        for i in part:
            for param, want in zip(layers[i].parameters(), grads[i], strict=True):
                assert (param.grad is None) == (want is None)
                assert want is None or (param.grad is not None and torch.equal(param.grad, want))
    assert sorted(reduced) == ([] if plan.forward_only else list(range(plan.chunks)))
    assert gatherer.whole == set()
    assert gatherer.most <= prefetch + 1
    return executor, gatherer


# ---------------------------------------------------------------------------------------------------------- plans


def plans(stages: int) -> list[Plan]:
    """Every other one has GATHER in it."""
    builders = (schedules.gpipe, schedules.one_f_one_b, all_forward_all_backward.forward_only)
    return [
        schedules.lower(build(stages, count), count % 2 == 0)
        for build in builders
        for count in range(1, 10)
    ]


def check_plans(stages: int, transport: str) -> None:
    topology = Topology(pp=stages)
    rank = topology.axis("pp").index
    for plan in plans(stages):
        executor, _ = run_plan(plan, TRANSPORTS[transport](topology), rank)
        check_spans(executor.spans, plan, rank)


def check_spans(spans: Sequence[tuple[Action, float, float]], plan: Plan, rank: int) -> None:
    """What ran is the plan, one after the other."""
    assert [action for action, *_ in spans] == list(plan.ranks[rank])
    assert all(start <= end for _, start, end in spans)
    assert all(end <= start for (_, _, end), (_, start, _) in pairwise(spans))


@pytest.mark.seldom("3-gloo")
@pytest.mark.parametrize(
    ("stages", "transport"),
    [
        *((1, "gloo"), (2, "rendezvous"), (3, "gloo"), (4, "rendezvous")),
        *(
            pytest.param(stages, transport, marks=pytest.mark.grid)
            for stages, transport in (
                (1, "rendezvous"),
                (2, "gloo"),
                (3, "rendezvous"),
                (4, "gloo"),
            )
        ),
    ],
)
def test_every_plan_gives_what_one_process_computes(stages: int, transport: str) -> None:
    run_ranks(stages, check_plans, stages, transport)


def vee(microbatches: int) -> Plan:
    """A schedule of a user: four stages on two ranks, placed 0 1 | 1 0, so that rank 1 hands over to itself."""
    forward = [[Action(Kind.F, m, c) for m in range(microbatches)] for c in (0, 1)]
    backward = [[Action(Kind.B, m, c) for m in range(microbatches)] for c in (0, 1)]
    order = (*forward[0], *forward[1], *backward[1], *backward[0])
    return Plan("vee", 2, microbatches, 2, (order, order), ((0, 3), (1, 2)))


def check_vee(transport: str) -> None:
    topology = Topology(pp=2)
    topology.prepare(links=[(1, 0, False), (0, 1, True)])
    for count in (1, 2, 5):
        for gathers in (False, True):
            run_plan(
                schedules.lower(vee(count), gathers), TRANSPORTS[transport](topology), topology.rank
            )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_chunks_on_a_rank_run_too(transport: str) -> None:
    run_ranks(2, check_vee, transport)


# --------------------------------------------------------------------------------------------------------- gathers


def check_gathers(stages: int) -> None:
    """Layer by layer, what is gathered is what the planner says, with and without GATHER in the plan."""
    topology = Topology(pp=stages)
    rank = topology.axis("pp").index
    held = chunks_of(stages)[rank]
    units, reads = [{i: 1} for i in held], [i > 0 for i in held]
    for build, count in itertools.product((schedules.gpipe, schedules.one_f_one_b), (1, 3, 8)):
        for prefetch, gathers in itertools.product((1, 2, LAYERS), (False, True)):
            plan = schedules.lower(build(stages, count), gathers)
            _, gatherer = run_plan(plan, Links(topology), rank, prefetch)
            planned = gathering(units, reads, plan.ranks[rank], prefetch=prefetch)
            assert gatherer.gathers == planned.times
            assert gatherer.most == planned.most == min(prefetch + 1, len(held))


@pytest.mark.seldom("1")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_layers_are_gathered_as_often_as_planned(stages: int) -> None:
    run_ranks(stages, check_gathers, stages)


def test_gathers_of_each_layer_by_hand() -> None:
    """The first layer reads no weights in backwards; the last one stays whole where the rank turns round."""
    for build, last in ((schedules.one_f_one_b, 3), (schedules.gpipe, 5)):
        _, gatherer = run_plan(schedules.lower(build(1, 3), True), Links(Topology()), 0)
        assert gatherer.gathers == {0: 3, 1: 6, 2: 6, 3: 6, 4: 6, 5: last}


# ------------------------------------------------------------------------------------------------- a plan that is wrong


def late_receives(plan: Plan) -> Plan:
    """The trap: every receive moved to just before its use."""
    use = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
    ranks = []
    for actions in plan.ranks:
        waiting = {a._replace(kind=use[a.kind]): a for a in actions if a.kind in RECEIVES}
        moved: list[Action] = []
        for action in actions:
            if action.kind not in RECEIVES:
                moved += [waiting[action], action] if action in waiting else [action]
        ranks.append(tuple(moved))
    return dataclasses.replace(plan, ranks=tuple(ranks))


def check_late(transport: str) -> None:
    topology = Topology(pp=2)
    run_plan(
        late_receives(schedules.lower(schedules.one_f_one_b(2, 4))),
        TRANSPORTS[transport](topology),
        topology.rank,
    )


def test_a_receive_just_before_its_use_deadlocks_where_sends_block() -> None:
    """So the strict transport bites where gloo does not, and says what the check on paper says."""
    with pytest.raises(
        ValueError, match=r"deadlocks: rank 0 at SF0\.1 with rank 1; rank 1 at SB0\.0 with rank 0"
    ):
        deadlock_check.check_rendezvous(late_receives(schedules.lower(schedules.one_f_one_b(2, 4))))
    run_ranks(2, check_late, "gloo")
    with pytest.raises(RanksFailed, match=r"ranks still running: \[0, 1\]") as caught:
        run_ranks(2, check_late, "rendezvous", timeout=2)
    assert all("in check_late" in caught.value.stacks[rank] for rank in range(2))


def test_a_message_to_nobody_is_refused_by_rank_and_action() -> None:
    for text, complaint in (
        ("F0.0 SF0.0", "SF0.0 has no stage to send to"),
        ("RF0.0", "RF0.0 has no stage to receive"),
    ):
        plan = Plan("wrong", 1, 1, 1, (tuple(Action.parse(word) for word in text.split()),))
        with pytest.raises(ValueError, match=f"plan wrong: rank 0: {complaint}"):
            Executor([Stage(model(), AlwaysGathered())], Links(Topology()), 0).run(plan, micros(1))


class ComesAndGoes(AlwaysGathered):
    """Says of one layer that its weights are not always there."""

    def __init__(self, unit: int) -> None:
        self.unit = unit

    def is_freed(self, unit: int) -> bool:
        return unit == self.unit


@pytest.mark.parametrize(("apart", "graphs"), [(None, 1), (0, 2), (1, 3), (LAYERS - 1, 2)])
def test_neighbors_that_stay_whole_share_a_graph(apart: int | None, graphs: int) -> None:
    stage = Stage(model(), AlwaysGathered() if apart is None else ComesAndGoes(apart))
    with mock.patch.object(torch.autograd, "backward", wraps=torch.autograd.backward) as backward:
        for micro in micros(2):
            stage.forward(0, None, micro)
            stage.backward(0, None)
    assert backward.call_count == 2 * graphs
    want = Stage(model(), AlwaysGathered())
    for micro in micros(2):
        want.forward(0, None, micro)
        want.backward(0, None)
    for layer, other in zip(stage.layers, want.layers, strict=True):
        for p, q in zip(layer.parameters(), other.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)


class Doubling(nn.Module):
    """Changes its input, which the layer before, or a stage's boundary, may need."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("apart", [None, 1])
def test_an_input_changed_in_place_ends_the_step_whether_graphs_are_shared_or_not(
    apart: int | None,
) -> None:
    first, second, *_ = model()
    layers = [first, Doubling(), second]
    stage = Stage(layers, AlwaysGathered() if apart is None else ComesAndGoes(apart))
    with pytest.raises(RuntimeError, match="in-place"):
        stage.forward(0, None, micros(1)[0])


class Detached(Last):
    """Its loss has no graph."""

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return super().forward(x, micro).detach()


def detached(frozen: bool = False) -> list[nn.Module]:
    layers = [*model()[:-1], Detached()]
    return [layer.requires_grad_(not frozen) for layer in layers]


@pytest.mark.parametrize("apart", [None, LAYERS - 1])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_loss_without_a_gradient_is_refused(apart: int | None, recomputed: bool) -> None:
    store = ActivationStore(None, None, torch.device("cpu")) if recomputed else None
    gatherer = AlwaysGathered() if apart is None else ComesAndGoes(apart)
    stage = Stage(detached(), gatherer, recomputed=Recomputed(frozenset({LAYERS - 1}), store))
    (micro,) = micros(1)
    stage.forward(0, None, micro)
    with pytest.raises(
        RuntimeError, match=f"the loss that layer {LAYERS - 1} .Detached. returned has no gradient"
    ):
        stage.backward(0, None)


def test_a_loss_without_a_gradient_is_refused_where_only_other_stages_train() -> None:
    stage = Stage([Detached().requires_grad_(False)], AlwaysGathered())
    (micro,) = micros(1)
    for upstream in (True, False):
        x = torch.ones(S, B, H).requires_grad_(upstream)
        stage.forward(0, x, micro)
        with pytest.raises(RuntimeError, match="has no gradient") if upstream else nullcontext():
            stage.backward(0, None)


def test_what_trains_nothing_and_what_is_no_loss_needs_no_gradient() -> None:
    (micro,), (evaluated,) = micros(1), micros(1, training=False)
    frozen = Stage(detached(frozen=True), AlwaysGathered())
    frozen.forward(0, None, micro)
    assert frozen.backward(0, None) is None
    Stage(detached(), AlwaysGathered()).forward(0, None, evaluated)
    middle = Stage(detached(), AlwaysGathered())  # its output may be numbers of tokens
    form = Form.of(middle.forward(0, None, micro))
    assert middle.backward(0, form.gradients([])) is None


# -------------------------------------------------------------------------------------------------- the whole engine


def train_in_order(case: Case) -> tuple[Engine, list[StepMetrics]]:
    """On a rank: the steps of a case over the strict transport."""
    return trained(case, transport=Rendezvous(topology_of(case.pp, case.tp)))


CASES = [
    Case(pp=2, tp=2, sequence=True, schedule="1f1b", microbatches=8, dropout=0.1),
    Case(pp=2, dp=2, schedule="gpipe", microbatches=3, model="qwen-tied"),
    Case(pp=4, schedule="1f1b", microbatches=8, model="gpt"),
    Case(pp=4, schedule="gpipe", microbatches=1, model="llama"),
]


SLICED = [
    Case(pp=2, dp=2, zero=3, schedule="1f1b", microbatches=8, model="qwen-tied", dropout=0.1),
    Case(pp=2, dp=2, zero=3, schedule="gpipe", microbatches=3, bucket_mib=0.01, prefetch=2),
    Case(pp=2, dp=2, zero=2, schedule="1f1b", microbatches=3, dtype="bf16"),
]


def check_same_bits(cases: list[Case]) -> None:
    for case in cases:
        (strict, ours), (loose, theirs) = train_in_order(case), trained(case)
        assert [(m.loss, m.grad_norm) for m in ours] == [(m.loss, m.grad_norm) for m in theirs]
        assert same(state(strict), state(loose))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SLICED[:2], id="some"),
        pytest.param(SLICED[2:], id="others", marks=pytest.mark.grid),
    ],
)
def test_slices_over_the_strict_transport_are_those_over_gloo_bit_for_bit(
    cases: list[Case],
) -> None:
    """Gathers and reductions run beside messages that block: what is gathered ahead is the plan's affair."""
    run_ranks(4, check_same_bits, cases)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[:2], id="some"),
        pytest.param(CASES[2:], id="others", marks=pytest.mark.grid),
    ],
)
def test_training_over_the_strict_transport_is_training_on_one_process(cases: list[Case]) -> None:
    run_all(cases, train_in_order)


# ------------------------------------------------------------------------------------------------------------ memory


def count_alive(refs: list[StorageWeakRef]) -> int:
    return sum(not ref.expired() for ref in refs)


def check_freed(schedule: str) -> None:
    """Holds weak references to the storage of all that a stage hands out, and counts at every call what still lives.

    Alive may be what is on its way: the last sends are waited for two messages later.
    """
    engine = engine_of(config_of(Case(pp=2, schedule=schedule, microbatches=8)))
    (stage,) = engine.executor.stages
    last = engine.executor.rank == 1
    for name in ("forward", "backward"):
        inner, refs = getattr(stage, f"{name}_by_layer"), []

        def watched(*args, inner=inner, refs=refs, name=name):  # type: ignore[no-untyped-def]
            assert count_alive(refs) <= 3 or (last and name == "forward"), (
                f"{name}s kept: {count_alive(refs)}"
            )
            out = yield from inner(*args)
            if out is not None:
                assert out._base is None
                refs.append(StorageWeakRef(out.untyped_storage()))
            return out

        setattr(stage, f"{name}_by_layer", watched)
        stage.__dict__[f"{name}_refs"] = refs
    engine.step(share(batch(0, engine.config.train.global_batch), engine.topology))
    handed = stage.__dict__["backward_refs" if last else "forward_refs"]
    assert len(handed) == 8
    assert count_alive(handed) == 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_was_sent_is_free_before_its_backward(schedule: str) -> None:
    """Under GPipe all graphs are open at once: if they, or the transport, held the outputs, these would pile up."""
    run_ranks(2, check_freed, schedule)


class Noted(Links):
    """Notes when receives are posted."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.posted: list[float] = []

    def receive(self, *given: Any) -> list[Pending]:
        self.posted.append(time.perf_counter())
        return super().receive(*given)


def check_posted_ahead() -> None:
    topology, plan = Topology(pp=2), schedules.lower(schedules.one_f_one_b(2, 4))
    transport = Noted(topology)
    executor, _ = run_plan(plan, transport, topology.rank)
    check_spans(executor.spans, plan, topology.rank)
    receives = [
        number for number, action in enumerate(plan.ranks[topology.rank]) if action.kind in RECEIVES
    ]
    before = [
        [start for action, start, _ in executor.spans[:number] if action.kind in COMPUTE]
        for number in receives
    ]
    assert [bool(starts) for starts in before] == [topology.rank == 0, True, True, True]
    # those before them were for the form
    for posted, starts in zip(transport.posted[-4:], before, strict=True):
        assert not starts or posted < starts[-1]


def test_receives_are_posted_before_the_action_that_runs_meanwhile() -> None:
    run_ranks(2, check_posted_ahead)


def check_span_order() -> None:
    engine = engine_of(config_of(Case(pp=2, microbatches=3)))
    data = share(batch(0, engine.config.train.global_batch), engine.topology)
    assert engine.record() == []
    engine.step(data)
    plan = schedules.lower(schedules.one_f_one_b(2, 3))
    spans = engine.record(False)
    check_spans(spans, plan, engine.executor.rank)
    assert sum(end - start for action, start, end in spans if action.kind in COMPUTE) > 0
    engine.step(data)
    assert engine.record() == []


def test_recorded_spans_are_the_plan_and_stop_when_told() -> None:
    run_ranks(2, check_span_order)
