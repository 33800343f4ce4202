"""Linear layers in tiles against the same layers whole: values, gradients, and what is in memory when.

Tiles lie behind gates that take a closed tile's memory away for real: a read of it crashes, and one of a tile that is
merely on its way gives NaN. So what has gates runs in forked ranks. Only the order of sums differs: fp64 agrees to
1e-12, fp32 to 1e-6 of the largest element, small integers exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.configs import Case, batch, config_of, share, topology_of
from tests.harness import run_ranks
from tests.layers.test_layers import CASES, H, columns, inputs, local_weight
from tests.layers.test_layers import Case as LayerCase
from threed import layers, models
from threed.distributed import collectives
from threed.distributed.sharding import attach, initial, matrix, spec_of
from threed.distributed.topology import Axis, Topology
from threed.engine import Engine
from threed.interop.huggingface.layouts import state_dict_to_hf
from threed.layers import ReplicatedLinear, Slicing
from threed.layers.tiled import GRANULE, slice_rows, spans
from threed.ops import matmul
from threed.ops.matmul import Matmul
from threed.planner.blueprint import blocks
from threed.zero import layout

NAMES = (
    "column", "column of heads", "row", "row without bias", "attention", "attention, grouped",
    "attention, 1 kv head, bias, normed", "mlp", "gated mlp", "gated mlp with bias", "block",
)  # fmt: skip
# its twin is below
TILED = LayerCase(lambda slicing: ReplicatedLinear("t", H, 37, slicing), lambda w, x: x)

# ------------------------------------------------------------------------------------------------- gates and gradients


@dataclass(eq=False)
class Board:
    """What the gates of a layer did, in order, and which tiles have memory."""

    log: list[tuple[str, str]] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    most: int = 0

    def note(self, what: str, tile: str) -> None:
        self.log.append((what, tile))
        self.most = max(self.most, len(self.open))


class StorageGate:
    """Takes a tile's memory away: 0 bytes while it is closed, NaN while it is on its way."""

    def __init__(self, weight: Tensor, board: Board) -> None:
        self.weight, self.board, self.name = weight, board, spec_of(weight).name
        self.values = weight.detach().clone()
        weight.untyped_storage().resize_(0)

    def ahead(self) -> None:
        if self.name not in self.board.open:
            self.weight.untyped_storage().resize_(self.values.nbytes)
            self.weight.data.fill_(torch.nan)
            self.board.open.add(self.name)
            self.board.note("ahead", self.name)

    def open(self) -> None:
        self.ahead()
        self.weight.data.copy_(self.values)
        self.board.note("open", self.name)

    def close(self) -> None:
        assert torch.equal(self.weight.data, self.values), (
            f"{self.name}: closed before it was whole, or written to"
        )
        self.weight.untyped_storage().resize_(0)
        self.board.open.remove(self.name)
        self.board.note("close", self.name)


class ListSink:
    """Keeps every contribution to a gradient."""

    def __init__(self, name: str, board: Board) -> None:
        self.name, self.board, self.grads = name, board, list[Tensor]()

    def add(self, grad: Tensor) -> None:
        self.board.note("gradient", self.name)
        self.grads.append(grad.clone())

    def add_product(self, a: Tensor, b: Tensor, by: Matmul) -> None:
        self.add(by.product(a, b))

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        raise AssertionError("no linear layer adds rows")

    def in_forward(self) -> bool:
        return False


def fill(layer: nn.Module, dtype: torch.dtype, round_to: float | None = None) -> None:
    """Gives the layer the weights that its global names decide, each parameter in memory of its own."""
    for module in layer.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            values = local_weight(param)
            values = values if round_to is None else (values * round_to).round()
            setattr(module, name, attach(nn.Parameter(values.to(dtype)), spec_of(param)))


def tiles_in(layer: nn.Module) -> list[nn.Parameter]:
    return [param for param in layer.parameters() if spec_of(param).tile[1] > 1]


def install(layer: nn.Module, sinks: bool = True) -> Board:
    """Puts every tile behind a gate, and its gradient into a sink if there are to be any."""
    board = Board()
    for param in tiles_in(layer):
        if sinks:
            param.sink = ListSink(spec_of(param).name, board)  # type: ignore[attr-defined]
        param.tile_gatherer = StorageGate(param, board)  # type: ignore[attr-defined]
    return board


def grads(layer: nn.Module, topology: Topology) -> dict[str, Tensor]:
    """By global name: this rank's boxes of the gradient in a tensor that is NaN elsewhere."""
    found: dict[str, Tensor] = {}
    for param in layer.parameters():
        spec, sink = spec_of(param), getattr(param, "sink", None)
        if sink is None:
            assert param.grad is not None, spec.name
            grad = param.grad
        else:
            assert (param.grad, len(sink.grads)) == (None, 1), spec.name
            grad = sink.grads[0]
        grad = collectives.all_reduce(grad, topology.axis(spec.partial)) if spec.partial else grad
        for piece in spec.pieces:
            full = found.setdefault(piece.name, grad.new_full(piece.shape, torch.nan))
            box = full[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))]
            assert box.isnan().all(), f"{piece.name}: two parameters hold the same elements"
            box.copy_(grad.reshape(-1)[piece.offset : piece.offset + piece.numel].view(piece.size))
    return found


def largest(*tensors: Tensor) -> float:
    return max(tensor.nan_to_num().abs().max().item() for tensor in tensors)


def close(got: Tensor | None, want: Tensor | None, what: str, scale: float = 0.0) -> None:
    """Equal up to the order of sums of numbers as large as `scale`, by default the largest.

    A block is a chain of a dozen products, each of which rounds by about half of 2^-23 of its own scale: 12 times that
    is 7e-7. On a processor with AVX2 and no AVX-512 one element of a block was 1.06e-6 off. fp64 is held to 1e-12.
    """
    assert want is not None
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}[want.dtype] * (scale or largest(want))
    torch.testing.assert_close(
        got, want, rtol=0, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


# ------------------------------------------------------------------------------------------------ tiled against whole


def pair(
    build: Callable[[Slicing], nn.Module], slicing: Slicing, tiles: int
) -> tuple[nn.Module, nn.Module]:
    """The layer whole, and in tiles; axes prepared."""
    whole, tiled = build(slicing), build(replace(slicing, tile=tiles))
    topology_of(1, slicing.tp.size).prepare(blocks([whole]))
    return whole, tiled


def check(name: str, tp: int, sequence: bool, tiles: int, dtype: torch.dtype, sinks: bool) -> None:
    case, topology = CASES.get(name, TILED), topology_of(1, tp)
    slicing = Slicing(topology.axis("tp"), sequence)
    whole, tiled = pair(case.build, slicing, tiles)
    fill(whole, dtype)
    fill(tiled, dtype)
    board, count = install(tiled, sinks), len(tiles_in(tiled))
    full = inputs(case).to(dtype)
    x = (
        slicing.positions(len(full)).rows(full)
        if case.into == "rows"
        else columns(full, whole, case, row=True)
    )
    x0, x1 = x.clone().requires_grad_(), x.clone().requires_grad_()
    what = f"{name}, tp {tp}, {tiles} tiles, {dtype}"
    want, got = case.call(whole, x0), case.call(tiled, x1)
    close(got, want, f"{what}: forward")
    assert not board.open
    dy = torch.randn(
        want.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).to(dtype)
    want.backward(dy)
    got.backward(dy)
    close(x1.grad, x0.grad, f"{what}: dx")
    wanted, gotten = grads(whole, topology), grads(tiled, topology)
    assert wanted.keys() == gotten.keys()
    for key in wanted:  # a key's bias has a gradient of zero: sums of large numbers that cancel
        close(gotten[key], wanted[key], f"{what}: {key}", largest(*wanted.values()))
    assert count > 1
    assert (board.most, board.open) == (2, set())
    assert [what for what, _ in board.log].count("close") == 2 * count


def check_all(name: str, tp: int) -> None:
    for sequence in (False, True) if tp > 1 else (False,):
        for tiles, dtype, sinks in (
            (2, torch.float64, True),
            (3, torch.float32, True),
            (100, torch.float64, False),
        ):
            check(name, tp, sequence, tiles, dtype, sinks)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_in_tiles_is_the_layer(tp: int) -> None:
    run_ranks(tp, check_every_case, tp)


def check_every_case(tp: int) -> None:
    for name in (*NAMES, "tiled linear"):
        check_all(name, tp)


def check_exact(tiles: int) -> None:
    """Sums of small integers have no order: each product is in the sums once, and the forward is the whole layer's."""
    draw = torch.Generator().manual_seed(1)
    for build in (
        lambda slicing: layers.ColumnLinear("c", 48, [("one", 37), ("two", 150)], slicing),
        lambda slicing: layers.RowLinear("r", 48, 187, slicing),
        lambda slicing: ReplicatedLinear("t", 48, 187, slicing),
    ):
        whole, tiled = pair(build, Slicing(), tiles)
        for layer in (whole, tiled):
            fill(layer, torch.float32, round_to=10)
        install(tiled)
        x = torch.randint(-9, 10, (5, 3, 48), generator=draw).float()
        dy = torch.randint(-9, 10, (5, 3, 187), generator=draw).float()
        results: list[dict[str, Tensor]] = []
        for layer in (whole, tiled):
            mine = x.clone().requires_grad_()
            y = layer(mine)
            y.backward(dy)
            assert mine.grad is not None
            results.append({"y": y, "dx": mine.grad, **grads(layer, topology_of(1, 1))})
        assert results[0].keys() == results[1].keys()
        for what, want in results[0].items():
            assert torch.equal(results[1][what], want), what


@pytest.mark.parametrize("tiles", [2, 5, 64])
def test_sums_of_integers_are_exactly_those_of_the_whole_layer(tiles: int) -> None:
    run_ranks(1, check_exact, tiles)


def test_narrow_gradients_of_the_input_are_as_good_as_those_of_the_whole_layer() -> None:
    """bf16: the sum over tiles is made in fp32, and rounded once."""
    errors = {}
    for tiles in (1, 16):
        layer = layers.ColumnLinear("c", 64, [("one", 1024)], Slicing(tile=tiles), bias=False)
        fill(layer, torch.bfloat16)
        x = (
            torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1))
            .bfloat16()
            .requires_grad_()
        )
        dy = torch.randn(32, 1, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
        layer(x).backward(dy)
        exact = dy.double() @ torch.cat([weight.detach().double() for weight in layer.parameters()])
        assert x.grad is not None
        errors[tiles] = (
            ((x.grad.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
        )
    assert errors[16] < 1.5 * errors[1] < 1.5 * 2**-8


# -------------------------------------------------------------------------------------------------------------- gates


def walk(tiles: list[str], gradients: bool = False) -> list[tuple[str, str]]:
    """What gates do in one pass over the tiles."""
    log = [("ahead", tiles[0])]
    for tile, following in zip(tiles, [*tiles[1:], None], strict=True):
        log += [("open", tile)] + ([("ahead", following)] if following else [])
        log += [("close", tile)] + ([("gradient", tile)] if gradients else [])
    return log


def check_order(tp: int) -> None:
    layer = layers.ColumnLinear(
        "c", H, [("one", 4 * tp), ("two", 5 * tp)], Slicing(topology_of(1, tp).axis("tp"), tile=3)
    )
    fill(layer, torch.float64)
    names = [spec_of(tile).name for tile in tiles_in(layer)]
    board = install(layer)
    x = torch.randn(4, 2, H, dtype=torch.float64)
    y = layer(x.clone().requires_grad_())
    assert board.log == walk(names)
    board.log.clear()
    y.sum().backward()
    after = [("gradient", name) for name in names[::-1]]  # buckets lie in backward order
    # With a sum over ranks to hide, gradients wait until it has left.
    assert board.log == (
        walk(names[::-1], gradients=True) if tp == 1 else walk(names[::-1]) + after
    )
    board.log.clear()
    with torch.no_grad():
        layer(x)
    assert board.log == walk(names)
    y = layer(x)  # needs no gradient
    board.log.clear()
    y.sum().backward()
    assert board.log == after


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tile_is_opened_while_it_is_used_and_the_next_is_on_its_way(tp: int) -> None:
    run_ranks(tp, check_order, tp)


def check_hooks(tiles: int, frozen: bool, gates: int) -> None:
    """Who keeps elsewhere what autograd saves never sees a tile that is away, and does not come between a tile and its
    sink; frozen tiles get no gradient. gates: how many tiles have one (small ones may stay whole)."""
    layer = layers.RowLinear("r", H, 9, Slicing(tile=tiles), bias=False)
    fill(layer, torch.float64)
    weights = list(layer.parameters())
    for weight in weights:
        weight.requires_grad_(not frozen)
    board = install(layer) if gates else Board()
    for weight in weights[gates:]:
        if gates:
            weight.tile_gatherer.open()  # type: ignore[attr-defined]
        weight.tile_gatherer, weight.sink = None, ListSink("r", board)  # type: ignore[attr-defined]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor.clone()  # reads it

    x = torch.randn(4, 2, H, dtype=torch.float64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert [(weight.grad, len(weight.sink.grads)) for weight in weights] == [
        (None, not frozen)
    ] * tiles  # type: ignore[attr-defined]
    assert saved[0].shape == (4, 2, H)
    assert len(saved) == (1 if gates else 1 + tiles)


@pytest.mark.parametrize(
    ("tiles", "frozen", "gates"),
    [(4, True, 4), (4, False, 4), (4, False, 1), (4, False, 0), (1, False, 0)],
)
def test_what_autograd_saves_may_be_kept_elsewhere(tiles: int, frozen: bool, gates: int) -> None:
    run_ranks(1, check_hooks, tiles, frozen, gates)


# ------------------------------------------------------------------------------------------------------------ records


def test_initial_values_and_names_do_not_depend_on_tiles() -> None:
    def build(slicing: Slicing) -> nn.Module:
        return nn.ModuleList([
            layers.Attention("a", H, 4, slicing, kv_heads=1), layers.GatedMLP("m", H, 22, slicing, bias=True),
            layers.MLP("n", H, 23, slicing), ReplicatedLinear("t", H, 11, slicing),
        ])  # fmt: skip

    def values(tp: int, tiles: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for rank in range(tp):
            for param in build(
                Slicing(Axis("tp", tuple(range(tp)), rank), tile=tiles)
            ).parameters():
                for piece in spec_of(param).pieces:
                    part = initial(piece, seed=7)
                    full = found.setdefault(piece.name, torch.full(piece.shape, torch.nan))
                    full[
                        tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
                    ] = part
        return found

    want = values(1, 1)
    assert not any(full.isnan().any() for full in want.values())
    for tp, tiles in itertools.product((1, 2, 4), (1, 2, 3, 7, 1000)):
        got = values(tp, tiles)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want), (tp, tiles)


def test_tiles_are_parameters_of_their_own_and_weights_of_one_tile_are_as_before() -> None:
    slicing = Slicing(tile=4)
    model = nn.ModuleList([layers.Attention("a", H, 4, slicing), layers.MLP("m", H, 22, slicing)])
    slots = layout.collect([model])
    assert len(slots) == len(list(model.parameters())) == 4 * 4 + 4
    tiles = [slot for slot in slots if slot.spec.tile[1] > 1]
    assert [slot.spec.tile for slot in tiles] == 4 * [(i, 4) for i in range(4)]
    assert slots[0].spec.name == "a.query.weight[0/4]"
    whole = layers.ColumnLinear("c", H, [("one", 12)], Slicing())
    assert [spec_of(p).name for p in whole.parameters()] == ["c.one.weight", "c.one.bias"]
    assert list(dict(layers.RowLinear("r", H, 1, slicing).named_parameters())) == ["weight", "bias"]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 70))
def test_tiles_cover_the_rows_and_none_is_empty(rows: int, tiles: int) -> None:
    cuts = spans(rows, tiles)
    assert len(cuts) == max(1, min(rows, tiles))
    assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
    assert cuts[-1][1] == rows
    sizes = [last - first for first, last in cuts]
    assert rows == 0 or min(sizes) > 0
    if rows >= GRANULE * tiles:
        assert all(first % GRANULE == 0 for first, _ in cuts)
    else:
        assert max(sizes) - min(sizes) <= 1


def test_rows_of_packed_matrices() -> None:
    pieces = (matrix("q", (8, 3), 0, (4, 8), 1.0), matrix("k", (2, 3), 0, (1, 2), 1.0, offset=12))
    assert [(p.name, p.start, p.size, p.offset) for p in slice_rows(pieces, 2, 5)] == [
        ("q", (6, 0), (2, 3), 0),
        ("k", (1, 0), (1, 3), 6),
    ]


# ----------------------------------------------------------------------------------------------------- ReplicatedLinear


@pytest.mark.parametrize("tiles", [1, 3])
def test_a_tiled_linear_layer_is_a_linear_layer(tiles: int) -> None:
    layer = ReplicatedLinear("t", 5, 37, Slicing(), tiles=tiles)
    fill(layer, torch.float64)
    weight, bias = torch.cat([tile for tile in layer.parameters() if tile.dim() == 2]), layer.bias
    x = torch.randn(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(6)
    ).requires_grad_()
    dy = torch.randn(3, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    want, got = F.linear(x, weight, bias), layer(x)
    close(got, want, "forward")
    got.backward(dy)
    found = grads(layer, topology_of(1, 1))
    wanted = torch.autograd.grad(want, (x, *layer.parameters()), dy)
    close(x.grad, wanted[0], "dx")
    close(found["t.weight"], torch.cat(wanted[1:-1]), "weight")
    close(found["t.bias"], wanted[-1], "bias")


def test_the_product_is_written_where_it_belongs() -> None:
    """Forward is bit for bit what the tiles give one by one: nothing is rounded on the way into the output."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        layer = ReplicatedLinear("t", 40, 203, Slicing(), tiles=3)
        fill(layer, dtype)
        x = torch.randn(9, 2, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert layer.bias is not None
        parts = layer.bias.split([len(tile) for tile in tiles_in(layer)])
        want = [
            matmul.linear(x, tile, part) for tile, part in zip(tiles_in(layer), parts, strict=True)
        ]
        assert torch.equal(layer(x), torch.cat(want, dim=-1))


# ------------------------------------------------------------------------------------------------------------ training


def train_in_tiles(folder: str, tp: int) -> tuple[float, dict[str, Tensor]]:
    """Two steps whole, and two in tiles; the checkpoint of the one goes on as the other."""
    config = config_of(Case(tp=tp, model="qwen-tied", layers=2, sequence=tp > 1))
    topology = topology_of(1, tp)
    slicing = Slicing(topology.axis("tp"), tp > 1, config.train.seed)
    configs = [
        config.model_copy(update={"zero": config.zero.model_copy(update={"stage": 3, "tile": n})})
        for n in (1, 3)
    ]
    engines = [
        Engine(models.build(c.model, replace(slicing, tile=c.zero.tile)), topology, c)
        for c in configs
    ]
    data = [share(batch(step, config.train.global_batch), topology) for step in range(2)]
    losses = [[engine.step(part).loss for part in data] for engine in engines]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    states = [engine.full_state_dict() for engine in engines]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(
            states[1][name], value, rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )
    for saved, other in (engines, engines[::-1]):
        path = saved.save(Path(folder) / f"step-{engines.index(saved)}")
        other.load(path)
        mine, theirs = saved.full_state_dict(), other.full_state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    return engines[1].step(data[0]).loss, states[1]


def test_training_and_checkpoints_do_not_depend_on_tiles(tmp_path: Path) -> None:
    (alone, weights), *_ = run_ranks(1, train_in_tiles, str(tmp_path / "1"), 1)
    (both, _), *_ = run_ranks(2, train_in_tiles, str(tmp_path / "2"), 2)
    assert abs(alone - both) < 1e-10
    config = config_of(Case(model="qwen-tied", layers=2))
    assert "model.layers.1.self_attn.k_proj.weight" in state_dict_to_hf(weights, config.model)
