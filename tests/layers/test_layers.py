"""Every layer over 1, 2 and 4 tensor ranks, with sequences cut and not, against a serial twin written out in torch.

Forward, the input's gradient and every weight's gradient agree to 1e-12 in fp64 (the order of sums is all that
differs), once through autograd alone and once through the sinks of the real reducer.
"""

from __future__ import annotations

import functools
import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import run_ranks
from threed import layers
from threed.core import rng
from threed.distributed import collectives, conjugate
from threed.distributed.sharding import Piece, ShardSpec, attach, parameter, spec_of, vector
from threed.distributed.topology import Axis, Topology
from threed.layers import MicroBatch, Slicing
from threed.ops import attention_backends
from threed.planner.blueprint import blocks
from threed.zero import layout
from threed.zero.layout import DataAxes, Policy
from threed.zero.reducer import Reducer

S, B, H, VOCAB, DROP = 8, 3, 16, 13, 0.3
Weights = dict[str, Tensor]
Span = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A layer, how it is called, and its serial twin.

    into, out: how its input and output are cut: "rows" (of the sequence, when sequences are cut), "columns", "tokens"
    (whole ids), "scalar". outputs: (name, features) of packed column outputs.
    """

    build: Callable[[Slicing], nn.Module]
    twin: Callable[[Weights, Tensor], Tensor]
    call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)
    into: str = "rows"
    out: str = "rows"
    width: int = H
    outputs: tuple[tuple[str, int], ...] = ()


# ---------------------------------------------------------------------------------------------------------- twins


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = torch.einsum("sbi,oi->sbo", x, w[f"{name}.weight"])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return (
        x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
        + w[f"{name}.bias"]
    )


def rms_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]


def rotary(x: Tensor, theta: float) -> Tensor:
    """[s b a d]: pairs (i, i + d/2) turn by position / theta^(2i/d); angles in fp32, as in the layer."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0]).float().view(-1, 1, 1, 1) * (
        1.0 / theta ** (torch.arange(half).float() / half)
    )
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)


def attention(
    w: Weights, x: Tensor, heads: int, kv: int, d: int, theta: float | None = None, normed: bool = False,
    core: Callable[[Tensor], Tensor] = causal,
) -> Tensor:  # fmt: skip
    """core: what is made of the scores [b a s s] before the softmax."""
    s, b, _ = x.shape
    q, k, v = (linear(w, f"a.{n}", x).view(s, b, -1, d) for n in ("query", "key", "value"))
    if normed:
        q, k = rms_norm(w, "a.query_norm", q), rms_norm(w, "a.key_norm", k)
    if theta:
        q, k = rotary(q, theta), rotary(k, theta)
    k, v = (part.repeat_interleave(heads // kv, dim=2) for part in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) / math.sqrt(d)
    y = torch.einsum("bast,tbad->sbad", core(scores).softmax(-1), v)
    return linear(w, "a.out", y.reshape(s, b, heads * d))


def latent(w: Weights, x: Tensor, low_rank: bool) -> Tensor:
    """Four heads: 3 elements without and 4 with rotary positions, values of 5, latent vectors of 6.

    With a query of low rank, elements 0 and 1 form a pair, and 2 and 3, otherwise 0 and 2, 1 and 3.
    """
    s, b, _ = x.shape
    if low_rank:
        q = linear(w, "a.query_up", rms_norm(w, "a.query_norm", linear(w, "a.query_down", x)))
    else:
        q = linear(w, "a.query", x)
    q, down = q.view(s, b, 4, 7), linear(w, "a.kv_down", x)
    k, v = (
        linear(w, "a.kv_up", rms_norm(w, "a.kv_norm", down[..., :6]))
        .view(s, b, 4, 8)
        .split([3, 5], -1)
    )
    order = [0, 2, 1, 3] if low_rank else [0, 1, 2, 3]
    q_rope = rotary(q[..., 3:][..., order], 100.0)
    k_rope = rotary(down[..., 6:][..., order].unsqueeze(2), 100.0).squeeze(2)
    scores = torch.einsum("sbad,tbad->bast", q[..., :3], k)
    scores = (scores + torch.einsum("sbad,tbd->bast", q_rope, k_rope)) / math.sqrt(7)
    y = torch.einsum("bast,tbad->sbad", causal(scores).softmax(-1), v)
    return linear(w, "a.out", y.flatten(2))


def distance() -> Tensor:
    return torch.arange(S).view(-1, 1) - torch.arange(S)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(w: Weights, x: Tensor) -> Tensor:
    return linear(w, "m.down", gelu(linear(w, "m.up", x)))


def gated(w: Weights, x: Tensor) -> Tensor:
    gate = linear(w, "m.gate", x)
    return linear(w, "m.down", gate * torch.sigmoid(gate) * linear(w, "m.up", x))


def dropout(x: Tensor, name: str) -> Tensor:
    keep = rng.keep_mask(
        1234, name, 2, torch.tensor([5, 9, 7]), (0, S), (0, x.shape[-1]), x.shape[-1], DROP
    )
    return torch.where(keep, x / (1 - DROP), 0.0)


def block(w: Weights, x: Tensor) -> Tensor:
    heads = attention(w, layer_norm(w, "n1", x), 4, 4, 4, None, False)
    x = x + dropout(heads, "blk.attention.dropout")
    return x + dropout(mlp(w, layer_norm(w, "n2", x)), "blk.mlp.dropout")


def head(w: Weights, x: Tensor) -> Tensor:
    logits = linear(w, "w", rms_norm(w, "n", x))
    return (
        F.cross_entropy(
            logits.flatten(0, 1), labels().t().flatten(), reduction="sum", ignore_index=-100
        )
        / 17
    )


def word(w: Weights, tokens: Tensor) -> Tensor:
    return w["e.weight"][tokens.t()]


def embedding(w: Weights, tokens: Tensor) -> Tensor:
    return dropout(
        w["e.word.weight"][tokens.t()] + w["e.position.weight"][:S].unsqueeze(1), "e.dropout"
    )


# ------------------------------------------------------------------------------------------- parts that users bring


def look_back(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    at = torch.arange(len(q)).view(-1, 1) - torch.arange(len(q))
    return layers.attend(q, k, v, (at >= 0) & (at < window))


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma 2's, in four dimensions, on its own way from scores to values."""
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], dim=2) for part in (k, v))
    scores = 2.0 * torch.tanh(torch.einsum("sbad,tbad->bast", q, k) / math.sqrt(q.shape[-1]) / 2.0)
    return torch.einsum("bast,tbad->sbad", causal(scores).softmax(-1), v)


class Slopes(nn.Module):
    """ALiBi with slopes [a] that are learned, cut by heads, and a temperature [1] that all heads share."""

    def __init__(self, heads: int, slicing: Slicing) -> None:
        super().__init__()
        first, last = slicing.heads(heads)
        self.slopes = parameter(
            ShardSpec((vector("a.slopes", heads, (first, last)),), decay=False), (last - first,)
        )
        self.heat = parameter(slicing.shared(vector("a.heat", 1), partial=True), (1,))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = (self.slopes.view(-1, 1, 1) * distance()).masked_fill(distance() < 0, -torch.inf)
        return layers.attend(q * self.heat, k, v, bias)


class OverHeads(nn.Module):
    """A linear layer that every head goes through by itself."""

    def __init__(self, slicing: Slicing) -> None:
        super().__init__()
        self.up = layers.ColumnLinear("o", H, [("up", 12)], slicing, multiple=3)
        self.each = layers.ReplicatedLinear("o.each", 3, 5, slicing, partial=True)
        self.down = layers.RowLinear("o.down", 20, H, slicing, multiple=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.each(self.up(x).unflatten(-1, (-1, 3))).flatten(2))


class OfTheWhole(nn.Module):
    """A linear layer on the sum of all positions; every rank has all of its input and of its gradient."""

    def __init__(self, slicing: Slicing) -> None:
        super().__init__()
        self.slicing = slicing
        self.out = layers.ReplicatedLinear("p", H, 5, slicing, partial=False)

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum(0)
        return self.out(
            conjugate.reduce_from(total, self.slicing.tp)
            if self.slicing.sequence_parallel
            else total
        )


class Swish(nn.Module):
    """x sigmoid(beta x) with a beta [1] that all features share, of which a rank sees its own."""

    def __init__(self, slicing: Slicing) -> None:
        super().__init__()
        self.beta = parameter(slicing.shared(vector("m.beta", 1), partial=True), (1,))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def over_heads(w: Weights, x: Tensor) -> Tensor:
    return linear(
        w,
        "o.down",
        torch.cat([linear(w, "o.each", part) for part in linear(w, "o.up", x).split(3, -1)], -1),
    )


def with_swish(w: Weights, x: Tensor) -> Tensor:
    up = linear(w, "m.up", x)
    return linear(w, "m.down", up * torch.sigmoid(w["m.beta"] * up))


def with_relu(w: Weights, x: Tensor) -> Tensor:
    return linear(w, "m.down", linear(w, "m.gate", x).clamp(min=0) * linear(w, "m.up", x))


# ---------------------------------------------------------------------------------------------------------- cases


def labels() -> Tensor:
    ids = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(4))
    return ids.masked_fill(torch.rand(B, S, generator=torch.Generator().manual_seed(5)) < 0.3, -100)


def micro(**more: Tensor) -> MicroBatch:
    return MicroBatch(samples=torch.tensor([5, 9, 7]), step=2, **more)


def in_block(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, micro())


def from_tokens(layer: nn.Module, tokens: Tensor) -> Tensor:
    return layer(None, micro(tokens=tokens))


def to_loss(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, micro(labels=labels(), weight=torch.tensor(1 / 17, dtype=torch.float64)))


def make_block(slicing: Slicing) -> nn.Module:
    norms = layers.LayerNorm("n1", H, slicing), layers.LayerNorm("n2", H, slicing)
    parts = layers.Attention("a", H, 4, slicing), layers.MLP("m", H, 20, slicing)
    return layers.Block("blk", norms, *parts, slicing, dropout=DROP)


def make_head(slicing: Slicing) -> nn.Module:
    return layers.LanguageModelHead(
        "head", "w.weight", layers.RMSNorm("n", H, slicing), VOCAB, H, slicing
    )


def attention_case(
    heads: int, kv: int, d: int, theta: float | None = None, normed: bool = False, bias: bool = True
) -> Case:
    return Case(
        lambda slicing: layers.Attention(
            "a", H, heads, slicing, kv_heads=kv, head_dim=d, rotary=theta, qk_norm=normed, bias=bias
        ),
        lambda w, x: attention(w, x, heads, kv, d, theta, normed),
    )


def latent_case(low_rank: bool) -> Case:
    return Case(
        lambda slicing: layers.LatentAttention(
            "a", H, 4, slicing, kv_rank=6, nope_dim=3, rope_dim=4, value_dim=5, rotary=100.0, eps=1e-5,
            query_rank=9 if low_rank else None, interleaved=low_rank, bias=low_rank,
        ),
        lambda w, x: latent(w, x, low_rank),
    )  # fmt: skip


def core_case(
    heads: int, kv: int, d: int, core: Callable[[Slicing], Callable[..., Tensor]],
    scores: Callable[[Weights, Tensor], Tensor], theta: float | None = None,
) -> Case:  # fmt: skip
    return Case(
        lambda slicing: layers.Attention(
            "a", H, heads, slicing, kv_heads=kv, head_dim=d, rotary=theta, core=core(slicing)
        ),
        lambda w, x: attention(w, x, heads, kv, d, theta, core=functools.partial(scores, w)),
    )


CASES = {
    "column": Case(
        lambda slicing: layers.ColumnLinear("c", H, [("one", 12), ("two", 7)], slicing),
        lambda w, x: torch.cat((linear(w, "c.one", x), linear(w, "c.two", x)), -1),
        out="columns", outputs=(("c.one", 12), ("c.two", 7)),
    ),
    "column of heads": Case(
        lambda slicing: layers.ColumnLinear("c", H, [("one", 20)], slicing, multiple=5, bias=False),
        lambda w, x: linear(w, "c.one", x),
        out="columns", outputs=(("c.one", 20),),
    ),
    "row": Case(
        lambda slicing: layers.RowLinear("r", 14, H, slicing), lambda w, x: linear(w, "r", x), into="columns", width=14
    ),
    "row without bias": Case(
        lambda slicing: layers.RowLinear("r", 14, H, slicing, bias=False), lambda w, x: linear(w, "r", x),
        into="columns", width=14,
    ),
    "replicated": Case(
        lambda slicing: layers.ReplicatedLinear("l", H, 7, slicing), lambda w, x: linear(w, "l", x)
    ),
    "replicated without bias": Case(
        lambda slicing: layers.ReplicatedLinear("l", H, 7, slicing, bias=False), lambda w, x: linear(w, "l", x)
    ),
    "replicated, over heads": Case(OverHeads, over_heads),
    "replicated, of the whole": Case(OfTheWhole, lambda w, x: linear(w, "p", x.sum(0, keepdim=True))[0], out="whole"),
    "layer norm": Case(lambda slicing: layers.LayerNorm("n", H, slicing), lambda w, x: layer_norm(w, "n", x)),
    "rms norm": Case(lambda slicing: layers.RMSNorm("n", H, slicing), lambda w, x: rms_norm(w, "n", x)),
    "attention": attention_case(4, 4, 4),
    "attention, wide heads, no bias": attention_case(4, 4, 6, bias=False),
    "attention, grouped": attention_case(8, 4, 2, theta=100.0),
    "attention, 2 kv heads": attention_case(8, 2, 4, theta=100.0),
    "attention, 1 kv head, bias, normed": attention_case(4, 1, 4, theta=10000.0, normed=True),
    "attention, normed": attention_case(4, 4, 4, theta=10000.0, normed=True, bias=False),
    "attention, window": core_case(
        4, 4, 3, lambda slicing: functools.partial(look_back, window=3),
        lambda w, x: causal(x).masked_fill(distance() >= 3, -torch.inf),
    ),
    "attention, window beyond the sequence, 2 kv heads": core_case(
        8, 2, 3, lambda slicing: functools.partial(look_back, window=S + 5), lambda w, x: causal(x)
    ),
    "attention, soft cap, 1 kv head, rotary": core_case(
        4, 1, 4, lambda slicing: soft_cap, lambda w, x: causal(2.0 * torch.tanh(x / 2.0)), theta=100.0
    ),
    "attention, learned slopes": core_case(
        8, 4, 3, lambda slicing: Slopes(8, slicing),
        lambda w, x: causal(x * w["a.heat"] + w["a.slopes"].view(-1, 1, 1) * distance()),
    ),
    "latent attention": latent_case(low_rank=False),
    "latent attention, query of low rank": latent_case(low_rank=True),
    "mlp, swish": Case(lambda slicing: layers.MLP("m", H, 22, slicing, activation=Swish(slicing)), with_swish),
    "gated mlp, relu": Case(lambda slicing: layers.GatedMLP("m", H, 22, slicing, activation=F.relu), with_relu),
    "mlp": Case(lambda slicing: layers.MLP("m", H, 22, slicing), mlp),
    "gated mlp": Case(lambda slicing: layers.GatedMLP("m", H, 22, slicing), gated),
    "gated mlp with bias": Case(lambda slicing: layers.GatedMLP("m", H, 22, slicing, bias=True), gated),
    "dropout": Case(lambda slicing: layers.Dropout("d", DROP, slicing), lambda w, x: dropout(x, "d"), in_block),
    "block": Case(make_block, block, in_block),
    "word embedding": Case(lambda slicing: layers.VocabEmbedding("e", VOCAB, H, slicing), word, into="tokens"),
    "word embedding of few words": Case(lambda slicing: layers.VocabEmbedding("e", 3, H, slicing), word, into="tokens"),
    "embedding": Case(
        lambda slicing: layers.Embedding("e", VOCAB, H, slicing, positions=S + 2, dropout=DROP), embedding, from_tokens,
        into="tokens",
    ),
    "head": Case(make_head, head, to_loss, out="scalar"),
    "head, logits": Case(
        make_head, lambda w, x: linear(w, "w", rms_norm(w, "n", x)), in_block, out="columns",
        outputs=(("w", VOCAB),),
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- the check


def full_weight(piece: Piece) -> Tensor:
    """The whole global tensor a piece is cut from: noise that its name decides; norms about 1."""
    draw = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
    noise = torch.randn(piece.shape, generator=draw, dtype=torch.float64) * 0.4
    return noise + 1 if piece.name.endswith("norm.weight") or piece.name.startswith("n") else noise


def cut(full: Tensor, piece: Piece) -> Tensor:
    return full[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))]


def local_weight(param: Tensor) -> Tensor:
    spec = spec_of(param)
    return torch.cat([cut(full_weight(piece), piece).reshape(-1) for piece in spec.pieces]).view(
        param.shape
    )


def fill_alone(layer: nn.Module) -> None:
    """Gives the layer weights of its own, without sinks: gradients come through autograd."""
    for module in layer.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, attach(nn.Parameter(local_weight(param)), spec_of(param)))


def grads_alone(layer: nn.Module, topology: Topology) -> Iterator[tuple[Tensor, Tensor]]:
    """Every parameter and its gradient, summed over the axes its record says it is partial over."""
    for param in layer.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        partial = spec_of(param).partial
        yield param, collectives.all_reduce(grad, topology.axis(partial)) if partial else grad


def fill_buffers(layer: nn.Module, topology: Topology) -> Reducer:
    """Lays the layer out in buffers with sinks, as the engine does."""
    wide, data = torch.float64, topology.axis("dp")
    alone = Axis("dp", (topology.rank,), 0)
    plan = layout.build(
        [layer], {}, topology, Policy(0, DataAxes(alone, data, alone), 2**20, wide, wide)
    )
    for slot in plan.slots:
        slot.param.data.copy_(local_weight(slot.param))
    reducer = Reducer(plan)
    reducer.begin(1)
    return reducer


def grads_of_buffers(reducer: Reducer) -> Iterator[tuple[Tensor, Tensor]]:
    """Every parameter and its gradient as the optimizer will see it; nothing is left to autograd."""
    slices = (gradient.storage.fetch().wait() for gradient in reducer.finish())
    for bucket, part in zip(reducer.layout.buckets, slices, strict=True):
        for slot in bucket.group.slots:
            assert slot.param.grad is None
            yield slot.param, bucket.group.view(slot, part)


def columns(full: Tensor, layer: nn.Module, case: Case, row: bool) -> Tensor:
    """This rank's features of a full tensor, as the layer's record says."""
    pieces = spec_of(layer.weight if hasattr(layer, "weight") else next(layer.parameters())).pieces
    if row:
        return full[..., pieces[0].start[1] : pieces[0].start[1] + pieces[0].size[1]]
    base, at = {}, 0
    for name, width in case.outputs:
        base[f"{name}.weight"], at = at, at + width
    spans = [(base[p.name] + p.start[0], base[p.name] + p.start[0] + p.size[0]) for p in pieces]
    return torch.cat([full[..., first:last] for first, last in spans], -1)


def localize(
    full: Tensor, how: str, layer: nn.Module, case: Case, slicing: Slicing, row: bool
) -> Tensor:
    if how == "rows":
        return slicing.positions(S).rows(full)
    return columns(full, layer, case, row) if how == "columns" else full


def inputs(case: Case) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    if case.into == "tokens":
        return torch.randint(0, 3, (B, S), generator=draw)
    return torch.randn(S, B, case.width, generator=draw, dtype=torch.float64)


def close(got: Tensor, want: Tensor, what: str) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def check(name: str, tp: int, sequence: bool, sinks: bool) -> None:
    case, topology = CASES[name], topology_of(tp)
    slicing = Slicing(topology.axis("tp"), sequence)
    layer = case.build(slicing)
    topology.prepare(blocks([layer]))
    weights = {
        p.name: full_weight(p).requires_grad_()
        for q in layer.parameters()
        for p in spec_of(q).pieces
    }
    reducer = fill_buffers(layer, topology) if sinks else None
    if reducer is None:
        fill_alone(layer)

    full_x = inputs(case)
    twin_x = full_x if case.into == "tokens" else full_x.clone().requires_grad_()
    want = case.twin(weights, twin_x)
    dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    want.backward(dy)

    x = localize(full_x, case.into, layer, case, slicing, row=True).clone()
    x = x if case.into == "tokens" else x.requires_grad_()
    y = case.call(layer, x)
    close(
        y.detach(),
        localize(want.detach(), case.out, layer, case, slicing, row=False),
        f"{name}: forward",
    )
    y.backward(localize(dy, case.out, layer, case, slicing, row=False))
    if twin_x.grad is not None:
        assert x.grad is not None
        close(
            x.grad, localize(twin_x.grad, case.into, layer, case, slicing, row=True), f"{name}: dx"
        )
    seen = set()
    for param, grad in grads_of_buffers(reducer) if reducer else grads_alone(layer, topology):
        for piece in spec_of(param).pieces:
            seen.add(piece.name)
            got = grad.reshape(-1)[piece.offset : piece.offset + piece.numel].view(piece.size)
            full_grad = weights[piece.name].grad
            close(
                got,
                cut(
                    torch.zeros_like(full_weight(piece)) if full_grad is None else full_grad, piece
                ),
                piece.name,
            )
    assert seen == set(weights)


@functools.cache
def topology_of(tp: int) -> Topology:
    return Topology(tp=tp)


def check_all(name: str, tp: int) -> None:
    for sequence in (False, True):
        for sinks in (False, True):
            check(name, tp, sequence, sinks)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_on_one_rank_is_its_twin(name: str) -> None:
    check_all(name, 1)


def check_every_layer(tp: int) -> None:
    for name in CASES:
        try:
            check_all(name, tp)
        except Exception as error:
            error.add_note(f"layer {name!r}")
            raise


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.grid), 4])
def test_layers_cut_over_ranks_are_their_twins(tp: int) -> None:
    run_ranks(tp, check_every_layer, tp)


@pytest.mark.parametrize(
    ("count", "ranks"), [(6, 2), (4, 4), (5, 3), (2, 4), (1, 6), (2, 6), (3, 1)]
)
def test_heads_of_a_rank_are_those_that_its_layers_hold(count: int, ranks: int) -> None:
    held = [Slicing(Axis("tp", tuple(range(ranks)), i)).heads(count) for i in range(ranks)]
    assert {n for first, last in held for n in range(first, last)} == set(range(count))
    assert all(last - first >= 1 for first, last in held)
    if count >= ranks:
        assert [first for first, _ in held[1:]] == [last for _, last in held[:-1]]  # each once
    else:
        # shared by neighbors
        assert [first for first, _ in held] == [i // (ranks // count) for i in range(ranks)]


def test_rotary_positions_refuse_heads_of_odd_size() -> None:
    with pytest.raises(
        ValueError, match=r"a: heads of size 7: rotary positions rotate pairs; use head_dim=8"
    ):
        layers.Attention("a", 42, 6, Slicing(), rotary=10000.0)


def test_attention_that_no_kernel_computes_is_said_once_and_one_switched_off_is_refused() -> None:
    q = torch.randn(1, 2, 7, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_backends.check(q, q, q, None, None, True)
    q = torch.randn(1, 2, 9, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with pytest.warns(
            UserWarning, match=r"without a fused kernel \(torch.float32 heads \[1, 2, 9, 8\]"
        ):
            attention_backends.check(q, q, q, None, None, True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attention_backends.check(q, q, q, None, None, True)
        q = q.to(torch.bfloat16)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"\(torch.bfloat16 heads .* a fused kernel supports these"
            ):
                attention_backends.check(q, q, q, None, None, True)
