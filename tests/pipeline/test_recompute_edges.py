"""Layers that are unkind to recompute: in-place changes, odd views, weights of odd shapes; inputs of changing size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.pipeline.test_executor import Vanishing
from threed.distributed.topology import Topology, alone
from threed.layers import ColumnLinear, MicroBatch, Slicing
from threed.layers.embedding import VocabEmbedding
from threed.layers.recompute import Recompute, Selective
from threed.memory.io import Disk
from threed.pipeline.activation_checkpointing import BUFFERS, ActivationStore, OnDrives, Recomputed
from threed.pipeline.stage import AlwaysGathered, Stage

CPU = torch.device("cpu")
Work = Callable[[Recompute, Tensor, Tensor], Tensor]  # of what runs operations, x and a weight


def gradients(work: Work, *ops: str) -> tuple[Tensor | None, ...]:
    """Of x [2 3 4] and the weight [4 4]."""
    x = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
    weight = nn.Parameter(torch.linspace(-2, 1, 16).view(4, 4))
    selective = Selective(ops)
    with selective.watch():
        y = work(selective if ops else Recompute(), x, weight)
    y.square().sum().backward()
    return x.grad, weight.grad


def changes_the_result(r: Recompute, x: Tensor, weight: Tensor) -> Tensor:
    y = r.run("norm", lambda v: nn.functional.layer_norm(v, (4,)), x)
    y.mul_(2)
    return y @ weight


def changes_a_view_of_the_result(r: Recompute, x: Tensor, weight: Tensor) -> Tensor:
    y = r.run("norm", lambda v: nn.functional.layer_norm(v, (4,)), x)
    z = r.run("activation", lambda v: v * 3, y)
    z[0].mul_(2)
    return z @ weight * r.run("activation", torch.sin, z)


def views_as_complex(r: Recompute, x: Tensor, weight: Tensor) -> Tensor:
    c = torch.view_as_complex(r.run("activation", torch.sin, x).unflatten(-1, (2, 2)))
    return torch.view_as_real(c * c).flatten(-2) @ weight


def conjugates(r: Recompute, x: Tensor, weight: Tensor) -> Tensor:
    c = r.run("activation", lambda v: torch.view_as_complex(v.exp().unflatten(-1, (2, 2))), x)
    return torch.view_as_real(c.conj() * c.conj().imag).flatten(-2) @ weight


@pytest.mark.parametrize(
    "work",
    [changes_the_result, changes_a_view_of_the_result, views_as_complex, conjugates],
    ids=lambda f: f.__name__,
)
def test_gradients_are_those_without_recompute(work: Work) -> None:
    for got, want in zip(gradients(work, "norm", "activation"), gradients(work), strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


def changes_the_input(r: Recompute, x: Tensor, weight: Tensor) -> Tensor:
    a = x @ weight
    # its input is no business of tanh's backward: fine without recompute
    y = r.run("activation", torch.tanh, a)
    a.add_(5)
    return y * a


def operates_in_place(r: Recompute, x: Tensor, weight: Tensor) -> Tensor:
    return r.run("activation", lambda v: v.mul_(2).sin(), x @ weight)


def changes_what_the_operation_saved(r: Recompute, x: Tensor, weight: Tensor) -> Tensor:
    return r.run("activation", lambda v: v.exp().mul_(2), x @ weight)


def changes_what_is_saved(r: Recompute, x: Tensor, weight: Tensor) -> Tensor:
    a = (x @ weight).exp()
    a.mul_(2)
    return r.run("activation", torch.sin, x) * a


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            changes_the_input,
            "an input of the recomputed operation activation, .* was changed in place .* change a copy instead",
        ),
        (
            operates_in_place,
            "an input of the recomputed operation activation, .* was changed in place .* change a copy instead",
        ),
        (
            changes_what_the_operation_saved,
            "a tensor that the backward needs, .* at version 1, and was at 0",
        ),
        (changes_what_is_saved, "a tensor that the backward needs, .* at version 1, and was at 0"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_what_was_changed_in_place_is_an_error(work: Work, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        gradients(work, "activation")


def test_weights_may_be_written_in_place() -> None:
    """They are gathered into buffers: who writes those is the gatherer's business."""
    x, weight = torch.ones(2, 4, requires_grad=True), nn.Parameter(torch.eye(4))
    with Selective(["norm"]).watch():
        y = nn.functional.linear(x, weight) + x @ weight
    with torch.no_grad():
        weight.zero_()
        weight.copy_(torch.eye(4))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 2.0))  # type: ignore[arg-type]


def column_gradients() -> list[tuple[Tensor | None, Tensor | None]]:
    """The gathered input and this rank's weight are both [8 6]."""
    tp = Topology(tp=2).axis("tp")
    up = ColumnLinear("m", 6, [("up", 16)], Slicing(tp, True), bias=False).to_empty(device="cpu")
    up.weight.data = torch.randn(8, 6, generator=torch.Generator().manual_seed(tp.index))
    found = []
    for ops in ((), ("norm",)):
        selective = Selective(ops)
        x = torch.linspace(-1, 1, 24).view(4, 6).add(tp.index).requires_grad_()
        with selective.watch():
            y = selective.column(up, selective.run("norm", torch.tanh, x))
        y.square().sum().backward()
        found.append((x.grad, up.weight.grad))
        up.weight.grad = None
    return found


def test_a_weight_of_the_gathered_inputs_shape_is_no_input() -> None:
    for plain, again in run_ranks(2, column_gradients):
        assert torch.equal(plain[0], again[0])
        assert torch.equal(plain[1], again[1])


# ------------------------------------------------------------------------------------------------------------- a stage


class InPlace(nn.Module):
    """Changes its input, which it may: x needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return torch.tanh(x.mul_(2) @ self.weight)


class Source(nn.Module):
    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        return torch.ones(2, 4)


def test_a_layer_that_changes_its_input_is_not_recomputed_from_it() -> None:
    stage = Stage(
        [Source(), InPlace()],
        AlwaysGathered(),
        recomputed=Recomputed(frozenset({1}), ActivationStore(None, None, CPU)),
    )
    with pytest.raises(
        RuntimeError,
        match=r"layer 1 \(InPlace\) changed its input in place.*`recomputable = False`",
    ):
        stage.forward(0, None, MicroBatch())


class Added(nn.Module):
    """Its backward reads no weights, but the operation that is computed again does."""

    backward_reads_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.recompute = nn.Parameter(torch.ones(4)), Recompute()

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        return self.recompute.run("activation", lambda v: (v + self.bias).tanh(), x)


def test_weights_are_whole_where_operations_are_computed_again() -> None:
    """The weights of `Vanishing` are NaN where they are not gathered."""
    found = []
    for units in (set[int](), {0, 2}):
        layers, selective = [Added() for _ in range(3)], Selective(["activation"])
        for unit in units:
            selective.install(layers[unit])
        gatherer = Vanishing(layers, range(3))
        stage = Stage(
            layers, gatherer, recomputed=Recomputed(frozenset(units), selective=selective)
        )
        stage.forward(0, torch.ones(2, 4, requires_grad=True), MicroBatch())
        dx = stage.backward(0, torch.ones(2, 4))
        assert [gatherer.gathers[unit] for unit in range(3)] == [
            1 + (unit in units) for unit in range(3)
        ]
        found.append([dx, *(layer.bias.grad for layer in layers)])
    for got, want in zip(found[1], found[0], strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


def test_an_embeddings_gradient_goes_to_its_sink_under_saved_tensor_hooks() -> None:
    rows: list[Tensor] = []

    class Sink:
        def add_rows(self, index: Tensor, values: Tensor) -> None:
            rows.append(index)

    table = VocabEmbedding("e", 7, 4, Slicing(alone())).to_empty(device="cpu")
    table.weight.sink = Sink()  # type: ignore[attr-defined]
    with Selective(["norm"]).watch():
        y = table(torch.tensor([[1, 2, 6]]))
    y.sum().backward()
    assert [index.tolist() for index in rows] == [[1, 2, 6]]
    assert table.weight.grad is None


# ------------------------------------------------------------------------------------------------------------ a drive


def test_inputs_of_changing_size_use_their_regions_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path, "a")
    store, most = ActivationStore(None, OnDrives(disk), CPU), 20_000
    for sizes in (range(1000, most + 1, 1000), range(most, 0, -999), [most, 1, 777, most] * 3):
        for size in sizes:
            inputs = [torch.arange(size) + n for n in range(8)]  # more than there are buffers
            kept = [store.save(x) for x in inputs]
            for one, x in reversed(list(zip(kept, inputs, strict=True))):
                assert torch.equal(store.get(one), x)
                store.release(one)
        # growing by half, the last time beyond what was needed
        assert disk._size <= 4.5 * 8 * most * 8


def test_inputs_of_one_size_take_no_more_than_they_are(tmp_path: Path) -> None:
    disk = Disk(tmp_path, "a")
    store = ActivationStore(None, OnDrives(disk), CPU)
    for _ in range(3):
        for one in [store.save(torch.ones(5 * 1024)) for _ in range(8)]:
            store.release(one)
    assert disk._size == 8 * 5 * 4096


def test_inputs_kept_before_a_larger_one_come_back_and_their_regions_go(tmp_path: Path) -> None:
    disk = Disk(tmp_path, "a")
    storages = OnDrives(disk)
    store = ActivationStore(None, storages, CPU)
    inputs = [torch.arange(n) for n in (10, 900, 5000, 30, 60_000, 7)]
    kept = [store.save(x) for x in inputs]
    for one, x in zip(kept, inputs, strict=True):
        assert torch.equal(store.get(one), x)
        store.release(one)
    size, free = disk._size, len(storages._free)
    for one in [store.save(torch.ones(60_000)) for _ in range(free)]:
        store.release(one)
    assert disk._size == size
    assert free == 2  # of the largest drive: 60 000 and 7
    assert storages._drive is not None
    # every buffer came back
    assert len([storages._drive.take() for _ in range(BUFFERS)]) == BUFFERS
