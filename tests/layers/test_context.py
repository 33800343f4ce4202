"""Context parallelism: blocks of attention, the ring, heads, planted faults, memory, refusals."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.configs import Case, trained
from tests.covering import in_turns
from tests.engine.test_documents import Largest
from tests.harness import run_ranks
from tests.ops.test_ops_block_sparse import core_of, patterns
from tests.test_equivalence import run_cases, write_truths
from threed import layers, models
from threed.config import Config
from threed.config.checks import find_problems
from threed.config.resolution import context_heads, resolve
from threed.distributed.topology import Topology
from threed.engine import Engine
from threed.layers import Slicing
from threed.layers import context as context_module
from threed.layers.context import RingCore, ring_attention
from threed.ops.attention import Causal
from threed.ops.block_sparse import SparseAttention
from threed.ops.positions import QUERIES, Block, Positions, blocks
from threed.pipeline import batches
from threed.planner.forecast import Forecast

patch = mock.patch.object


# ------------------------------------------------------------------------------------------ positions


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [0, 1, 3, 8, 40, 47])
def test_blocks_contain_every_visible_pair_once(parts: int, window: int) -> None:
    length = 48 * parts
    for i, j in itertools.product(range(parts), repeat=2):
        queries, keys = Positions.zigzag(length, parts, i), Positions.zigzag(length, parts, j)
        seen = torch.zeros(queries.total, keys.total, dtype=torch.int64)
        for rows, columns, offset in blocks(queries, keys, window):
            n, m = rows[1] - rows[0], columns[1] - columns[0]
            behind = torch.arange(offset, offset + n).unsqueeze(1) - torch.arange(m)
            visible = (behind >= 0) & (behind < (window or 2 * length))
            assert visible.any(1).all(), "a query of a block attends to none of its keys"
            seen[slice(*rows), slice(*columns)] += visible
        cpu = torch.device("cpu")
        behind = queries.indices(cpu).unsqueeze(1) - keys.indices(cpu)
        assert torch.equal(seen, ((behind >= 0) & (behind < (window or length))).long())


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_all_ranks_compute_equally_many_pairs_in_every_hop(parts: int) -> None:
    length, total = 16 * parts, 0
    for hop in range(parts):
        counts = set()
        for rank in range(parts):
            mine = Positions.zigzag(length, parts, rank)
            found = blocks(mine, Positions.zigzag(length, parts, (rank - hop) % parts))
            counts.add(sum(map(pairs, found)))
            total += sum(map(pairs, found))
            assert len(found) == 1, "adjacent blocks are merged"
        assert len(counts) == 1
    assert total == length * (length + 1) // 2


def pairs(block: Block) -> int:
    """Returns the number of pairs of a query and a key that it attends to, without a window."""
    (first, last), (low, high), offset = block
    return sum(min(high - low, offset + row + 1) for row in range(last - first))


def test_parts_of_positions_are_disjoint_and_in_order() -> None:
    whole = Positions.zigzag(48, 3, 1)
    assert whole.ranges == ((8, 16), (32, 40))
    parts = [whole.part(4, index) for index in range(4)]
    assert [part.ranges for part in parts] == [((8, 12),), ((12, 16),), ((32, 36),), ((36, 40),)]
    assert Positions.zigzag(48, 3, 2).ranges == ((16, 32),)
    full = torch.arange(96).view(2, 48)
    assert torch.equal(whole.columns(full), full[:, whole.indices(torch.device("cpu"))])


# ------------------------------------------------------------------------------------------- the ring


def attend_in_a_ring(
    dtype: torch.dtype, core: RingCore, kv_heads: int, documents: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Returns y, dq, dk and dv of this rank, and this rank's positions."""
    topology = Topology(cp=torch.distributed.get_world_size())
    ring = topology.axis("cp")
    own = Positions.zigzag(LENGTH, ring.size, ring.index)
    *given, dy = inputs(dtype, kv_heads)
    q, k, v = (own.rows(x).requires_grad_() for x in given)
    y = ring_attention(q, k, v, core, ring, documents)
    grads = torch.autograd.grad(y, (q, k, v), own.rows(dy).flatten(2))
    return (*(x.detach() for x in (y.unflatten(2, (HEADS, -1)), *grads)), own.indices(y.device))


LENGTH, HEADS, SIZE = 256, 4, 16


def inputs(dtype: torch.dtype, kv_heads: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(LENGTH, 2, n, SIZE, generator=draw).to(dtype) for n in sizes]


def truth(
    dtype: torch.dtype, core: RingCore, kv_heads: int, computed: torch.dtype,
    documents: Tensor | None = None,
) -> Any:  # fmt: skip
    """Returns y, dq, dk and dv of full sequences, of inputs in `dtype`, computed in `computed`."""
    q, k, v, dy = (x.to(computed) for x in inputs(dtype, kv_heads))
    given = [x.requires_grad_() for x in (q, k, v)]
    y = core(*given) if isinstance(core, SparseAttention) else core(*given, documents)
    return y.detach().unflatten(2, (HEADS, -1)), *torch.autograd.grad(y, given, dy.flatten(2))


CORES = [Causal(), Causal(window=40), Causal(window=3, softcap=2.0), Causal(LENGTH, 5.0, 0.3)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_computes_attention_of_full_sequences(ranks: int) -> None:
    for causal, kv_heads in zip(CORES, (4, 2, 1, 4), strict=True):
        exact = truth(torch.float64, causal, kv_heads, torch.float64)
        for *found, own in run_ranks(ranks, attend_in_a_ring, torch.float64, causal, kv_heads):
            for mine, full in zip(found, exact, strict=True):
                assert (mine - full[own]).abs().max() < 1e-12, causal


@pytest.mark.parametrize(
    ("ranks", "direction"), in_turns(3, (2, 4), ("unidirectional", "bidirectional"))
)
def test_a_ring_computes_block_sparse_attention(ranks: int, direction: str) -> None:
    """Blocks of 30 positions are cut by the chunks of the ranks."""
    cores = [
        core_of(pattern, softcap, 0.3)
        for softcap in (0.0, 0.7)
        for pattern in patterns(30, direction)
    ]
    found = run_ranks(ranks, sparse_in_a_ring, cores)
    for number, core in enumerate(cores):
        exact = truth(torch.float64, core, (4, 2, 1)[number % 3], torch.float64)
        pairs = 0
        for rank in found:
            computed, (*parts, own) = rank[number]
            for mine, full in zip(parts, exact, strict=True):
                assert (mine - full[own]).abs().max() < 1e-12, core
            pairs += computed
        # of a block that the causal mask cuts, a chunk needs only the part below its first query
        assert pairs <= core.flops(LENGTH, LENGTH, HEADS, SIZE) // (4 * SIZE)
        assert core.pattern.causal or pairs == core.flops(LENGTH, LENGTH, HEADS, SIZE) // (4 * SIZE)


def sparse_in_a_ring(cores: list[SparseAttention]) -> list[tuple[int, tuple[Tensor, ...]]]:
    """Returns the pairs that this rank computes in the forward, and the results, of each core."""
    results, forward = [], context_module.attention.forward
    for number, core in enumerate(cores):
        with patch(context_module.attention, "forward", mock.Mock(side_effect=forward)) as called:
            parts = attend_in_a_ring(torch.float64, core, (4, 2, 1)[number % 3])
        shapes = [(q.shape, k.shape) for _, _, q, k, _ in (call.args for call in called.mock_calls)]
        results.append((sum(q[1] * q[2] * k[2] for q, k in shapes), parts))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_keeps_documents_apart(ranks: int) -> None:
    """Documents end within chunks, at their ends, and after a single token."""
    sizes = ((50, 130, 1, 75), (64, 64, 128))
    rows = [[n for n, size in enumerate(row) for _ in range(size)] for row in sizes]
    for causal, kv_heads in zip(CORES, (4, 2, 1, 4), strict=True):
        given = torch.float64, causal, kv_heads
        exact = truth(*given, torch.float64, torch.tensor(rows))
        for *found, own in run_ranks(ranks, attend_in_a_ring, *given, torch.tensor(rows)):
            for mine, full in zip(found, exact, strict=True):
                assert (mine - full[own]).abs().max() < 1e-12, causal


def order_of_hops() -> list[str]:
    """Returns the order in which the ring's transfers start and end and its blocks are computed."""
    found = list[str]()

    def noting(owner: Any, name: str, word: str) -> AbstractContextManager[Any]:
        real = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            found.append(word)
            return real(*args, **more)

        return patch(owner, name, noted)

    with (
        noting(context_module.collectives, "start_shift", "send"),
        noting(context_module.attention, "forward", "block"),
        noting(context_module.attention, "backward", "block"),
    ):
        attend_in_a_ring(torch.float64, Causal(), 4)
    return found


def test_transfers_start_before_the_blocks_that_they_overlap_with() -> None:
    hops = ["send", "block"] * 3 + ["block"]
    backward = [word for word in hops for word in ((word, "send") if word == "block" else (word,))]
    for found in run_ranks(4, order_of_hops):
        assert found == hops + backward


def transfers(model: str) -> dict[str, tuple[int, list[float], list[Tensor]]]:
    """Returns the number of transfers, the losses and the weights, without and with recompute."""
    found = {}
    for mode in ("none", "selective"):
        case = Case(cp=2, cp_heads=1, model=model, microbatches=1, layers=2, recompute=mode)
        shift = context_module.collectives.start_shift
        with patch(context_module.collectives, "start_shift", mock.Mock(wraps=shift)) as counted:
            engine, metrics = trained(case)
        weights = list(engine.full_state_dict().values())
        found[mode] = counted.call_count, [m.loss for m in metrics], weights
    return found


@pytest.mark.parametrize("model", ["gpt", "llama", "deepseek_v2"])
def test_keys_do_not_travel_again_if_attention_is_recomputed(model: str) -> None:
    for found in run_ranks(2, transfers, model):
        (count, losses, weights), (again, *recomputed) = found["none"], found["selective"]
        assert again == count > 0
        assert recomputed[0] == losses
        assert all(map(torch.equal, recomputed[1], weights))


def test_bf16_on_eight_ranks_is_as_exact_as_one_kernel() -> None:
    """Partial outputs are merged, and gradients of keys are summed, in fp32."""
    exact = truth(torch.bfloat16, Causal(), 2, torch.float64)
    one = truth(torch.bfloat16, Causal(), 2, torch.bfloat16)
    limits = [1.5 * rms(mine.double() - full) for mine, full in zip(one, exact, strict=True)]
    found = [torch.empty_like(full) for full in exact]
    for *parts, own in run_ranks(8, attend_in_a_ring, torch.bfloat16, Causal(), 2):
        for mine, full in zip(parts, found, strict=True):
            full[own] = mine.double()
    for mine, full, limit in zip(found, exact, limits, strict=True):
        assert rms(mine - full) <= limit


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def largest_of_a_ring(causal: Causal, documents: Tensor | None) -> int:
    """Returns the number of elements of the largest tensor of a forward and backward."""
    with patch(sys.modules[__name__], "LENGTH", LONG), Largest() as largest:
        attend_in_a_ring(torch.float32, causal, 4, documents)
    return largest.elements


LONG = 4096
PACKED = torch.repeat_interleave(torch.arange(4), torch.tensor([2750, 3, 93, 1250])).expand(2, -1)


@pytest.mark.parametrize(
    ("causal", "documents"),
    [
        (Causal(), None),
        (Causal(1500, 2.0), PACKED),
        pytest.param(Causal(1500), None, marks=pytest.mark.grid),
        pytest.param(Causal(1500, 2.0), None, marks=pytest.mark.grid),
        pytest.param(Causal(), PACKED, marks=pytest.mark.grid),
        pytest.param(Causal(1500), PACKED, marks=pytest.mark.grid),
    ],
)
def test_no_tensor_of_a_ring_has_all_pairs_of_positions(
    causal: Causal, documents: Tensor | None
) -> None:
    """Neither those of the sequence, nor those of a rank, nor those of one of its chunks."""
    sent = 2 * LONG // 2 * 2 * HEADS * SIZE  # keys and values of a rank, in one message
    mask = QUERIES[1] * (causal.window + QUERIES[1])
    for largest in run_ranks(2, largest_of_a_ring, causal, documents):
        assert largest <= max(sent, mask) < (LONG // 4) ** 2


# ------------------------------------------------------------------------------------- planted faults


def own_keys_in_the_backward() -> AbstractContextManager[Any]:
    """The backward uses this rank's keys in every hop."""
    real = context_module._Moving.hops

    def hops(self: Any, *args: Any) -> Iterator[Any]:
        first = self.flat.clone()
        for _, _, index in real(self, *args):
            backward = torch._C._current_autograd_node() is not None
            yield *self.split(first if backward else self.flat), index

    return patch(context_module._Moving, "hops", hops)


def one_hop_too_few() -> AbstractContextManager[Any]:
    """The gradients of keys stay at the rank before the last hop."""
    real, calls = context_module.collectives.start_shift, itertools.count()

    def start_shift(x: Tensor, axis: Any) -> Any:
        pending = real(x, axis)
        if x.dtype == torch.float64 and next(calls) % 4 == 3:
            return context_module.collectives.done(x)
        return pending

    return patch(context_module.collectives, "start_shift", start_shift)


def positions_from_0() -> AbstractContextManager[Any]:
    """Each rank numbers the positions of its rows from 0."""

    def positions_of(self: Slicing, x: Tensor) -> Positions:
        return Positions(((0, len(x)),), len(x) * self.sequence_parts)

    return patch(Slicing, "positions_of", positions_of)


def labels_shifted_after_the_split() -> AbstractContextManager[Any]:
    """Labels are computed from a rank's own tokens."""
    real = batches.Batches._own_positions

    def own(self: Any, part: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        found, full = real(self, part)
        return found | {"labels": found["tokens"].roll(-1, 1)}, full

    return patch(batches.Batches, "_own_positions", own)


def loss_divided_by_local_tokens() -> AbstractContextManager[Any]:
    real = batches.count_items
    return patch(batches, "count_items", lambda *a, **k: real(*a, **k) / 2)


def window_dropped() -> AbstractContextManager[Any]:
    return patch(
        context_module, "blocks", lambda queries, keys, window, inside=None: blocks(queries, keys)
    )


def torn_groups_of_heads() -> AbstractContextManager[Any]:
    """Key/value heads are repeated in the wrong order."""
    real = Tensor.repeat_interleave

    def repeat(self: Tensor, count: int, dim: int) -> Tensor:
        return real(self, count, dim).flip(dim)

    return patch(Tensor, "repeat_interleave", repeat)


def sums_over_dp() -> AbstractContextManager[Any]:
    """Gradients are summed over ranks with different samples only."""
    real = Topology._set_up

    def set_up(self: Any, grid: Any, *rest: Any, **more: Any) -> None:
        real(self, grid, *rest, **more)
        self._axes["dp*cp"] = self._axes["dp"]

    return patch(Topology, "_set_up", set_up)


RING = Case(cp=2, cp_heads=1, zero=0, layers=2)
FAULTS: dict[Callable[[], AbstractContextManager[Any]], Case] = {
    own_keys_in_the_backward: RING,
    one_hop_too_few: RING,
    positions_from_0: RING,
    labels_shifted_after_the_split: RING,
    loss_divided_by_local_tokens: RING,
    window_dropped: Case(cp=2, cp_heads=1, zero=0, layers=2, model="mistral"),
    torn_groups_of_heads: Case(cp=4, cp_heads=4, zero=0, layers=2, model="llama"),
    sums_over_dp: RING,
}


def findings(name: str, folder: str) -> list[str]:
    fault, case = next((f, case) for f, case in FAULTS.items() if f.__name__ == name)
    with fault():
        return run_cases([case], folder, trained)


@pytest.mark.seldom("own_keys*", "one_hop*", "loss_divided*", "sums_over_dp")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[], Any], truths: str) -> None:
    case = FAULTS[fault]
    assert any(run_ranks(case.world, findings, fault.__name__, truths))


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the results of one process, which those of the cases without a fault equal."""
    folder = str(tmp_path_factory.mktemp("truths"))
    cases = list(dict.fromkeys(FAULTS.values()))
    run_ranks(1, write_truths, list(dict.fromkeys(case.truth for case in cases)), folder)
    for case in cases:
        assert not any(run_ranks(case.world, run_cases, [case], folder, trained))
    return folder


# ------------------------------------------------------------------------------------ memory, refusals


def forecast_of(cp: int, u: int, **model: Any) -> Forecast:
    config = Config.model_validate({
        "parallel": {"cp": cp, **({"cp_heads": u} if cp > 1 else {})},
        "model": {"layers": 4, "hidden": 256, "heads": 8, "seq": 2048, **model},
        "train": {"global_batch": 2, "micro_batch": 2, "steps": 10},
        "recompute": {"loss_chunks": 8},
    })  # fmt: skip
    return Forecast.of(resolve(config, 53, cp), cp)


@pytest.fixture(scope="module")
def alone() -> int:
    """Bytes of activations of one process."""
    return forecast_of(1, 1).ranks[0].bytes["activations"]


@pytest.mark.seldom("8-1", "4-2")
@pytest.mark.parametrize(
    ("cp", "heads"),
    [
        (8, 1),
        (4, 2),
        (8, 8),
        *(
            pytest.param(*sizes, marks=pytest.mark.grid)
            for sizes in ((2, 1), (4, 1), (2, 2), (8, 2))
        ),
    ],
)
def test_activations_of_a_rank_are_a_fraction_of_those_of_one_process(
    cp: int, heads: int, alone: int
) -> None:
    """tests/planner/test_footprint.py compares the forecast with the storages of a real step."""
    for rank in forecast_of(cp, heads).ranks:
        assert rank.bytes["activations"] <= 1.08 / cp * alone


def chosen(cp: int, heads: int, kv_heads: int | None = None, tp: int = 1, **keys: Any) -> int:
    """Returns the context ranks that exchange positions for heads."""
    config = Config.model_validate({
        "parallel": {"cp": cp, "tp": tp}, **keys,
        "model": {"arch": "llama", "heads": heads, "kv_heads": kv_heads},
    })  # fmt: skip
    return context_heads(config)


def test_the_number_of_ranks_that_exchange_heads() -> None:
    assert chosen(2, 8) == 2
    assert chosen(8, 8, 1) == 1  # with one key/value head, the ring sends little
    # gradients travel around the ring in fp32
    assert chosen(8, 8, 1, precision={"dtype": "bf16"}) == 8
    assert chosen(4, 6, 6) == 2  # four ranks cannot divide six heads
    assert chosen(4, 8, 8, tp=8) == 1  # a tensor rank has one head


@pytest.mark.parametrize(
    ("cp", "heads", "kv_heads"),
    [
        (4, 8, 2),
        pytest.param(2, 8, 8, marks=pytest.mark.grid),
        pytest.param(8, 8, 1, marks=pytest.mark.grid),
    ],
)
def test_the_fewest_bytes_are_sent(cp: int, heads: int, kv_heads: int) -> None:
    sent = {u: forecast_sends(cp, u, heads, kv_heads) for u in (1, 2, 4, 8) if u <= cp}
    assert sent[chosen(cp, heads, kv_heads)] == min(sent.values())


def forecast_sends(cp: int, u: int, heads: int, kv_heads: int) -> int:
    model = {"arch": "llama", "heads": heads, "kv_heads": kv_heads, "seq": 64, "layers": 1}
    return forecast_of(cp, u, **model).ranks[0].sends["cp"]


def problems(**keys: Any) -> list[str]:
    return find_problems(Config.model_validate(keys), 8)


def test_invalid_configurations_are_refused_with_a_fix() -> None:
    given = {"cp": 4, "cp_heads": 3}
    assert problems(parallel=given) == [
        (
            "--parallel.cp-heads 3 with 8 heads and 8 key/value heads per tensor rank and --parallel.cp 4: it must divide"
            " cp and the heads, and divide the key/value heads or be a multiple of them; use 1, 2 or 4, or auto"
        )
    ]
    given = {"cp": 8, "cp_heads": 1}
    assert problems(parallel=given, model={"seq": 100}) == [
        "--model.seq 100 is not divisible by 16, for --parallel.cp 8: use 96 or 112"
    ]
    assert problems(parallel={"cp": 2}, run={"compile": True}) == [
        (
            "--parallel.cp 2 with --run.compile true: attention over context ranks cannot be compiled yet; use"
            " --run.compile false, or --parallel.cp 1"
        )
    ]
    assert problems(parallel={"cp_heads": 2}) == [
        (
            "--parallel.cp-heads 2 with --parallel.cp 1: there are no context ranks; use --parallel.cp 2 or more, or"
            " --parallel.cp-heads auto"
        )
    ]


class Unaware(nn.Module):
    """A layer of a user that does not state that it supports context parallelism."""

    def forward(self, x: Tensor, micro: Any) -> Tensor:
        return x


def refusals() -> list[str]:
    """Returns the errors of engines and steps that cannot work with two context ranks."""
    topology, found = Topology(cp=2), []
    config = resolve(
        Config.model_validate({
            "parallel": {"cp": 2, "cp_heads": 1}, "train": {"global_batch": 2, "micro_batch": 2},
            "model": {"layers": 1, "hidden": 32, "heads": 4, "seq": 16},
        }), 53, 2,
    )  # fmt: skip
    slicing = Slicing.of(topology, config)
    decoder = models.build(config.model, slicing)
    own = mock.Mock(slicing=slicing, hidden=32, spec=["slicing", "hidden", "layers"])
    own.layers = lambda: [decoder.layers()[0], Unaware(), decoder.layers()[2]]
    ids = torch.zeros(2, 16, dtype=torch.int64)

    def core() -> Any:
        return layers.Attention("attention", 32, 4, slicing, core=layers.attend)

    attempts: list[Callable[[], Any]] = [
        lambda: Engine(own, topology, config),
        lambda: Engine(models.build(config.model, Slicing()), topology, config),
        lambda: Engine(nn.Linear(2, 2), topology, config),
        core,
    ]
    engine = Engine(decoder, topology, config)
    attempts += [
        lambda: engine.step({"tokens": ids[:, :6], "labels": ids[:, :6]}),
        lambda: engine.step({"tokens": ids, "labels": ids[:, :8]}),
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            found.append(str(error))
        else:
            found.append("no error")
    return found


def test_what_context_ranks_cannot_do_is_refused_by_name() -> None:
    for found in run_ranks(2, refusals):
        texts = (
            "layer 1 (Unaware) does not state that it supports context parallelism: set `context = True`",
            "the model's Slicing has 1 context rank, the topology has 2: build the model with Slicing.of(",
            "Linear cannot be split by cp 2: build it from threed.layers",
            "attention: a custom core sees full sequences, so context parallelism can only divide its heads",
            "sequence length 6 is not a multiple of 4, for cp 2: pad the batch to one",
            "the batch's 'labels' are [2, 8]: context parallelism needs one per token, [2, 16]",
        )
        assert all(map(str.startswith, found, texts)), found


def test_a_sequence_is_gathered_in_order_and_its_gradients_are_summed() -> None:
    for rank, (order, grad) in enumerate(run_ranks(4, gathered)):
        assert torch.equal(order, torch.arange(32.0)), rank
        assert torch.equal(grad, torch.full((8,), 4.0)), rank


def gathered() -> tuple[Tensor, Tensor]:
    topology = Topology(cp=4)
    slicing = Slicing(context=layers.context.Context.of(topology, 2))
    x = slicing.split_sequence(torch.arange(32.0)).requires_grad_()
    full = slicing.gather_sequence(x)
    full.sum().backward()
    assert x.grad is not None
    return full.detach(), x.grad
