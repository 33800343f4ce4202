"""Every collective against its formula on one process: forward, backward, odd sizes, bytes, and bit for bit.

Values are whole numbers in floating point wherever a sum is compared, so that any order of adding gives the same; where
the order matters it is the order of the ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import run_ranks
from tests.live import Peak
from threed.distributed import collectives, conjugate, purposes
from threed.distributed.topology import Axis, Topology, alone

WORLDS = [2, 3, 4]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (5, 3), (12,), (0,), (4, 0), (1001,)]

worlds = pytest.mark.parametrize("world", WORLDS)


@functools.cache
def axis_of_all(world: int) -> Axis:
    return Topology(tp=world).axis("tp")


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank brings; any rank can work out what the others do."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-9, 10, shape, generator=draw).to(dtype)


def noise(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=draw, dtype=torch.float64) * 10.0 ** (rank % 3)).to(dtype)


def everyones(
    axis: Axis, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    return [values(rank, shape, dtype, seed) for rank in range(axis.size)]


def sent(axis: Axis, work: Callable[[], object]) -> int:
    before = axis.traffic["tp"]
    work()
    return axis.traffic["tp"] - before


# ----------------------------------------------------------------------------------------------------------- plain


def check_sums(world: int) -> None:
    axis = axis_of_all(world)
    for dtype in DTYPES:
        for shape in SHAPES:
            mine = values(axis.index, shape, dtype)
            total = torch.stack(everyones(axis, shape, dtype)).sum(0).to(dtype)
            assert torch.equal(collectives.all_reduce(mine, axis), total)
            assert torch.equal(mine, values(axis.index, shape, dtype)), (
                "gloo's sum must not eat its argument"
            )
            tall = (world * 3, *shape)
            part = (
                torch.stack(everyones(axis, tall, dtype)).sum(0).to(dtype).chunk(world)[axis.index]
            )
            assert torch.equal(
                collectives.reduce_scatter(values(axis.index, tall, dtype), axis), part
            )


@worlds
def test_sums_of_any_shape_and_type(world: int) -> None:
    run_ranks(world, check_sums, world)


def check_gathers(world: int) -> None:
    axis = axis_of_all(world)
    for dtype in (*DTYPES, torch.uint8, torch.bool):
        for shape in SHAPES[1:]:
            whole = torch.cat(everyones(axis, shape, dtype))
            assert torch.equal(
                collectives.all_gather(values(axis.index, shape, dtype), axis), whole
            )
            out = torch.empty_like(whole)
            shard = out.chunk(world)[axis.index] if shape[0] else out
            shard.copy_(values(axis.index, shape, dtype))
            got = collectives.start_all_gather(shard, axis, out=out).wait()
            assert got is out
            assert torch.equal(out, whole), "a shard may be a part of what is gathered into"
    strided = values(axis.index, (3, 5), torch.float64).t()
    whole = torch.cat([values(rank, (3, 5), torch.float64).t() for rank in range(world)])
    assert torch.equal(collectives.all_gather(strided, axis), whole)


@worlds
def test_gathers_of_any_shape_and_type(world: int) -> None:
    run_ranks(world, check_gathers, world)


def check_gathers_together(world: int) -> None:
    axis = axis_of_all(world)
    shapes = [(2 + n,) for n in range(4)]
    want = [torch.cat(everyones(axis, shape, torch.float32)) for shape in shapes]
    for gloo in (True, False):  # one by one, and coalesced as with NCCL
        buffer = torch.empty(sum(len(full) for full in want))
        outs, before = buffer.split([len(full) for full in want]), axis.traffic.total()
        shards = [values(axis.index, shape, torch.float32) for shape in shapes]
        with mock.patch.object(collectives, "_gloo", lambda axis, gloo=gloo: gloo):
            collectives.start_all_gathers(shards, axis, outs).wait()
        assert torch.equal(buffer, torch.cat(want))
        assert axis.traffic.total() - before == 4 * (world - 1) * sum(map(len, shards))


@worlds
def test_gathers_that_are_started_together(world: int) -> None:
    run_ranks(world, check_gathers_together, world)


def check_strided_sums(world: int) -> None:
    axis = axis_of_all(world)
    total = torch.stack(everyones(axis, (world * 2, 5), torch.float64)).sum(0)
    columns = values(axis.index, (world * 2, 5), torch.float64).t().contiguous().t()
    assert torch.equal(collectives.all_reduce(columns, axis), total)
    assert torch.equal(collectives.reduce_scatter(columns, axis), total.chunk(world)[axis.index])
    with pytest.raises(ValueError, match=rf"dimension 0 is not a multiple of {world} ranks"):
        collectives.reduce_scatter(torch.zeros(world + 1, 2), axis)


@worlds
def test_strided_tensors_and_parts_that_do_not_divide(world: int) -> None:
    run_ranks(world, check_strided_sums, world)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """The sum as documented: in the order of the ranks; 16-bit numbers in fp32, rounded once."""
    wide = parts[0].dtype if parts[0].dtype in (torch.float32, torch.float64) else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def check_order(world: int) -> None:
    axis = axis_of_all(world)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        parts = [noise(rank, (world * 101,), dtype) for rank in range(world)]
        want = in_rank_order(parts)
        got = collectives.all_reduce(parts[axis.index], axis)
        assert torch.equal(got, want), f"{dtype}: {(got - want).abs().max()}"
        odd = collectives.all_reduce(parts[axis.index][:-1], axis)  # padded inside
        assert torch.equal(odd, want[:-1])
        part = collectives.reduce_scatter(parts[axis.index], axis)
        assert torch.equal(part, want.chunk(world)[axis.index])


@worlds
def test_sums_are_in_rank_order_the_same_bits_on_every_rank_and_every_time(world: int) -> None:
    """So replicated weights stay equal bit for bit, and a 16-bit sum over many ranks loses one rounding only."""
    run_ranks(world, check_order, world)


def check_pending(world: int) -> None:
    axis = axis_of_all(world)
    all_parts = [
        [values(rank, (size,), torch.float64, seed=size) for rank in range(world)]
        for size in range(1, 12)
    ]
    running = [collectives.start_all_reduce(parts[axis.index].clone(), axis) for parts in all_parts]
    running += [
        collectives.start_reduce_scatter(torch.cat([parts[axis.index]] * world), axis)
        for parts in all_parts
    ]
    results = [pending.wait() for pending in running]
    for parts, whole, part in zip(
        all_parts, results[: len(all_parts)], results[len(all_parts) :], strict=True
    ):
        assert torch.equal(whole, torch.stack(parts).sum(0))
        assert torch.equal(part, torch.stack(parts).sum(0))
    assert all(pending.wait() is result for pending, result in zip(running, results, strict=True))


@worlds
def test_many_at_once_do_not_mix_and_waiting_again_is_free(world: int) -> None:
    run_ranks(world, check_pending, world)


def check_small(world: int) -> None:
    axis = axis_of_all(world)
    mine = torch.tensor([float(axis.index + 1), 0.5], dtype=torch.float64)
    want = torch.tensor([world * (world + 1) / 2, world / 2], dtype=torch.float64)
    assert torch.equal(collectives.sum_of_scalars(mine, axis), want)
    for count in (1, 4, 9):  # fewer and more than there are ranks
        parts = [noise(rank, (count,), torch.float64) for rank in range(world)]
        got = collectives.sum_of_scalars(parts[axis.index], axis)
        # of 100: fp64 rounding
        torch.testing.assert_close(got, torch.stack(parts).sum(0), rtol=0, atol=1e-13)
        assert len(set(collectives.exchange(got.numpy().tobytes().hex(), axis))) == 1, (
            "the same bits on every rank"
        )
    poisoned = torch.tensor([float("nan") if axis.index == world - 1 else 1.0], dtype=torch.float64)
    assert collectives.sum_of_scalars(poisoned, axis).isnan().all(), (
        "all ranks must see one rank's NaN"
    )
    for source in range(world):
        tensor = values(axis.index, (5, 2), torch.float32)
        assert collectives.broadcast(tensor, axis, source) is tensor
        assert torch.equal(tensor, values(source, (5, 2), torch.float32))
    collectives.barrier(axis)


@worlds
def test_scalars_broadcast_and_barrier(world: int) -> None:
    run_ranks(world, check_small, world)


# ------------------------------------------------------------------------------------------------------- conjugate

Whole = Callable[[list[Tensor]], list[Tensor]]


def every(y: Tensor, n: int) -> list[Tensor]:
    return [y] * n


# What each gives on every rank, as one process would say it, and whether its result is one tensor that all ranks hold
# (then the loss depends on it once) or every rank's own.
FORMULAS: dict[str, tuple[Whole, bool]] = {
    "reduce_from": (lambda xs: every(torch.stack(xs).sum(0), len(xs)), True),
    "gather_from": (lambda xs: every(torch.cat(xs), len(xs)), False),
    "scatter_to": (lambda xs: list(torch.stack(xs).sum(0).chunk(len(xs))), False),
}


def check_conjugate(world: int, name: str) -> None:
    axis = axis_of_all(world)
    formula, shared = FORMULAS[name]
    for shape in ((world,), (world * 3, 2), (world * 2, 3, 5), (0, 4)):
        xs = [values(rank, shape, torch.float64).requires_grad_() for rank in range(world)]
        ys = formula(xs)
        weights = [
            values(0 if shared else rank, tuple(ys[rank].shape), torch.float64, seed=7)
            for rank in range(world)
        ]
        loss = sum(
            (w * y).sum() for w, y in zip(weights[:1] if shared else weights, ys, strict=False)
        )
        grads = torch.autograd.grad(loss, xs)
        x = values(axis.index, shape, torch.float64).requires_grad_()
        y = getattr(conjugate, name)(x, axis)
        assert torch.equal(y, ys[axis.index])
        (grad,) = torch.autograd.grad(y, x, weights[axis.index])
        assert torch.equal(grad, grads[axis.index])


@worlds
@pytest.mark.parametrize("name", FORMULAS)
def test_conjugate_functions_and_their_gradients(world: int, name: str) -> None:
    run_ranks(world, check_conjugate, world, name)


def check_copy_to(world: int) -> None:
    """One x that all ranks hold; each uses its copy in its own way."""
    axis = axis_of_all(world)
    x = values(0, (5, 3), torch.float64).requires_grad_()
    y = conjugate.copy_to(x, axis)
    weights = [values(rank, (5, 3), torch.float64, seed=7) for rank in range(world)]
    assert torch.equal(y, x)
    (grad,) = torch.autograd.grad((weights[axis.index] * y).sum(), x)
    assert torch.equal(grad, torch.stack(weights).sum(0))


@worlds
def test_copy_to_sums_its_gradient(world: int) -> None:
    run_ranks(world, check_copy_to, world)


def check_shared_gradient(world: int) -> None:
    """Autograd hands one gradient tensor to both inputs of a sum: reducing one must not change the other."""
    axis = axis_of_all(world)
    x = values(0, (4,), torch.float64).requires_grad_()
    other = values(0, (4,), torch.float64).requires_grad_()
    dy = values(axis.index, (4,), torch.float64, seed=3)
    (conjugate.copy_to(x, axis) + other).backward(dy)
    assert other.grad is not None
    assert torch.equal(other.grad, values(axis.index, (4,), torch.float64, seed=3))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.stack(everyones(axis, (4,), torch.float64, seed=3)).sum(0))


@worlds
def test_summing_a_gradient_leaves_its_other_users_alone(world: int) -> None:
    run_ranks(world, check_shared_gradient, world)


# --------------------------------------------------------------------------------------------------- housekeeping


def check_exchange(world: int) -> None:
    axis = axis_of_all(world)

    def value(rank: int) -> object:
        return {
            "rank": rank,
            "text": "ünï" * (rank * 5000),
            "list": [None, True, 1.5, [rank]] * rank,
        }

    assert collectives.exchange(value(axis.index), axis) == [value(rank) for rank in range(world)]
    assert collectives.exchange(None, axis) == [None] * world
    assert collectives.exchange("", axis) == [""] * world
    for length in (118, 119, 120, 250):  # the JSON fits into the first message up to 118
        texts = [chr(97 + rank) * (length - rank % 2) for rank in range(world)]
        assert collectives.exchange(texts[axis.index], axis) == texts


@worlds
def test_exchange_gives_every_ranks_value_in_order(world: int) -> None:
    run_ranks(world, check_exchange, world)


def check_purposes(world: int) -> None:
    axis = axis_of_all(world)
    assert collectives.exchange(axis.index, axis, purposes.FORWARD) == list(range(world))
    purpose, value = (purposes.DATA, "a" * 500) if axis.index else (purposes.FORWARD, "")
    others = "rank 1" if world == 2 else f"ranks {', '.join(map(str, range(1, world)))}"
    named = f"a forward of a sharded module began on rank 0, but not on {others}"
    with pytest.raises(purposes.UnequalCallsError, match=named):
        collectives.exchange(value, axis, purpose)
    # a block that the error leaves on one rank only does not wait for the other ranks
    with (
        pytest.raises(purposes.UnequalCallsError, match=named),
        collectives.failing_together(axis, "save") if axis.index else nullcontext(),
    ):
        collectives.exchange(value, axis, purpose)
    assert collectives.exchange(axis.index, axis) == list(range(world))


@worlds
def test_exchanges_for_different_purposes_are_an_error_on_all_ranks(world: int) -> None:
    run_ranks(world, check_purposes, world)


def check_raise_together(world: int) -> None:
    axis = axis_of_all(world)
    collectives.raise_together(["", None], axis, ValueError)
    mine = [f"rank {axis.index} failed", "the same everywhere"] if axis.index else [""]
    if world == 1:
        mine = ["rank 1 failed", "the same everywhere"]
    failed = [f"rank {rank} failed" for rank in range(1, max(2, world))]
    with pytest.raises(ValueError, match="failed") as caught:
        collectives.raise_together(mine, axis, ValueError)
    assert str(caught.value) == "; ".join([failed[0], "the same everywhere", *failed[1:]])


@worlds
def test_raise_together_raises_all_different_problems_on_every_rank(world: int) -> None:
    run_ranks(world, check_raise_together, world)


def check_gather_to_first(world: int) -> None:
    axis = axis_of_all(world)
    for dtype in DTYPES:
        for sizes in (range(world), range(world, 0, -1), [0] * world, [100_003] * world):
            parts = [values(rank, (size,), dtype) for rank, size in enumerate(sizes)]
            got = collectives.gather_to_first(parts[axis.index], axis)
            assert len(got) == (world if axis.index == 0 else 0)
            assert all(torch.equal(a, b) for a, b in zip(got, parts, strict=False))


@worlds
def test_gather_to_first_takes_tensors_of_any_length(world: int) -> None:
    run_ranks(world, check_gather_to_first, world)


def check_links() -> None:
    """Both directions at once between two stages, several messages deep, in order."""
    topology = Topology(pp=2)
    me = topology.axis("pp").index
    out, back = topology.link(me, 1 - me, me == 1), topology.link(1 - me, me, me == 0)
    before = topology.traffic["pp"]
    mine, theirs = (
        [
            values(rank, shape, torch.float32, seed=i)
            for i, shape in enumerate([(3,), (4, 5), (1, 2, 3), (0, 4)])
        ]
        for rank in (me, 1 - me)
    )
    mine[1], theirs[1] = mine[1].t(), theirs[1].t().contiguous()
    sends = [collectives.send(part, out) for part in (mine[:1], mine[1:], [])]
    for part in (theirs[:2], theirs[2:]):  # however many are received at once
        coming = collectives.receive([torch.empty_like(message) for message in part], back)
        assert all(
            torch.equal(pending.wait(), message)
            for pending, message in zip(coming, part, strict=True)
        )
    for pending in itertools.chain(*sends):
        pending.wait()
    assert topology.traffic["pp"] - before == 4 * sum(message.numel() for message in mine)


def test_messages_over_links_arrive_whole_and_in_order() -> None:
    run_ranks(2, check_links)


# ----------------------------------------------------------------------------------------------------------- bytes


def check_bytes(world: int) -> None:
    axis = axis_of_all(world)
    n = world
    for dtype, size in ((torch.float64, 8), (torch.bfloat16, 2)):
        x = torch.zeros(n * 30, dtype=dtype, requires_grad=True)
        part, whole = 30 * size * (n - 1), n * 30 * size * (n - 1) // n
        assert part == whole
        assert sent(axis, lambda: collectives.all_reduce(x.detach(), axis)) == 2 * whole  # noqa: B023
        assert sent(axis, lambda: collectives.reduce_scatter(x.detach(), axis)) == whole  # noqa: B023
        assert sent(axis, lambda: collectives.all_gather(x.detach()[:30], axis)) == part  # noqa: B023
        for name, forward, backward in (
            ("copy_to", 0, 2 * whole),
            ("reduce_from", 2 * whole, 0),
            ("gather_from", whole * n, whole * n),
            ("scatter_to", whole, whole),
        ):
            result: list[Tensor] = []
            f = getattr(conjugate, name)
            assert sent(axis, lambda: result.append(f(x, axis))) == forward, name  # noqa: B023
            assert sent(axis, lambda: result[0].sum().backward()) == backward, name  # noqa: B023
        flat = torch.zeros(10, dtype=dtype)
        assert sent(axis, lambda: collectives.broadcast(flat, axis, 1)) == (  # noqa: B023
            10 * size * (n - 1) * (axis.index == 1)
        )
        assert sent(axis, lambda: collectives.gather_to_first(flat, axis)) == (  # noqa: B023
            10 * size * (axis.index > 0) + sent(axis, lambda: collectives.exchange(10, axis))
        )
    three = torch.zeros(3, dtype=torch.float64)
    assert sent(axis, lambda: collectives.sum_of_scalars(three, axis)) == 24 * (n - 1)
    assert sent(axis, lambda: collectives.barrier(axis)) == 0
    # An uneven all-reduce is padded to a multiple of the ranks; two ranks swap and pad nothing.
    padded = 2 * 4 * (n - 1) * (-(-31 // n)) if n > 2 else 4 * 31
    assert sent(axis, lambda: collectives.all_reduce(torch.zeros(31), axis)) == padded


@worlds
def test_counted_bytes_are_the_formulas(world: int) -> None:
    """all-reduce 2 n (t-1)/t, its halves n (t-1)/t: what a ring moves, whatever the backend does."""
    run_ranks(world, check_bytes, world)


# ------------------------------------------------------------------------------------- memory, over other backends


def bytes_beside(world: int) -> tuple[int, int]:
    """Bytes made by a sum of 4 scalars, and by a reduce-scatter into this rank's part, over ranks that do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world)
    axis = Axis("world", tuple(range(world)), 1, dist.group.WORLD)
    scalars, full = torch.ones(4, dtype=torch.float64), torch.ones(world, 8)
    found = []
    for given, work in (
        (scalars, lambda: collectives.sum_of_scalars(scalars, axis)),
        (full, lambda: collectives.start_reduce_scatter(full, axis, into=full[1:2]).wait()),
    ):
        peak = Peak()
        with peak:
            work()
        found.append(peak.most - given.nbytes)
    return found[0], found[1]


def test_off_gloo_no_buffer_grows_with_the_ranks() -> None:
    """Scalars need their own size, slices nothing: the sum is written where it belongs."""
    for world in (8, 16384):
        assert run_ranks(1, bytes_beside, world) == [(32, 0)]


# ------------------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "copy_to",
        "reduce_from",
        "gather_from",
        "scatter_to",
    ],
)
def test_over_one_rank_nothing_happens(name: str) -> None:
    axis, x = alone(), torch.ones(3)
    module = collectives if hasattr(collectives, name) else conjugate
    assert getattr(module, name)(x, axis) is x
    assert not axis.traffic


def test_over_one_rank_control_gives_ones_own() -> None:
    axis, x = alone(), torch.ones(3)
    assert collectives.exchange({"a": 1}, axis) == [{"a": 1}]
    assert collectives.broadcast(x, axis, 0) is x
    assert torch.equal(collectives.sum_of_scalars(x, axis), x)
    assert torch.equal(collectives.gather_to_first(x, axis)[0], x)
    collectives.barrier(axis)
    collectives.leave()  # there is no process group: nothing to leave


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_split_cuts_evenly_and_leaves_nothing_out(parts: int) -> None:
    for size in range(20):
        spans = [collectives.split(size, parts, index) for index in range(parts)]
        assert [first for first, _ in spans] == [0, *(last for _, last in spans[:-1])]
        assert spans[-1][1] == size
        lengths = [last - first for first, last in spans]
        assert max(lengths) - min(lengths) <= 1


class FailedWork:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_an_error_of_communication_mentions_other_ranks() -> None:
    pending = collectives.done(torch.ones(1), FailedWork())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="closed by peer") as failed:
        pending.wait()
    assert "which may have failed or been killed" in failed.value.__notes__[0]
