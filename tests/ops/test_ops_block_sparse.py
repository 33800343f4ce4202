"""Block-sparse attention against dense attention under the pattern's mask, and the blocks that are computed.

fp64 to 1e-9 as in all comparisons of attention (the largest error here is 1e-14).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.covering import in_turns
from tests.ops.test_ops_flex import assert_same, eager, gradients  # noqa: F401
from threed import layers
from threed.core import block_patterns
from threed.core.block_patterns import Layout, Part
from threed.layers import (
    BigBirdPattern,
    BlockPattern,
    DensePattern,
    FixedPattern,
    FunctionPattern,
    LongformerPattern,
    MicroBatch,
    Slicing,
    SparseAttention,
    VariablePattern,
)
from threed.ops import attention, attention_backends, block_sparse, flex
from threed.ops.attention import Step
from threed.pipeline.trace import Tracer, stated_flops

LENGTH = 37  # no multiple of a block below
FIRST = 4  # global number of the first head of the rank, for layouts that differ between heads


def named(pattern: object) -> str:
    """A name of a case that is the same in every process; pytest numbers equal names."""
    return type(pattern).__name__


def named_or_type(value: object) -> str:
    """The same for a pattern or a type of numbers."""
    return str(value) if isinstance(value, torch.dtype) else named(value)


def some_blocks(query: int, count: int) -> list[int]:
    """Lists without their own block, and an empty list."""
    return [] if query == 1 else [max(0, query - 2)] if query % 2 else [0, query]


def patterns(block: int, attention: Any) -> list[BlockPattern]:
    how: dict[str, Any] = {"block": block, "attention": attention}
    different = {"different_layout_per_head": True}
    return [
        DensePattern(**how),
        FixedPattern(**how),
        FixedPattern(**how, **different, num_different_global_patterns=4),
        VariablePattern(
            **how, num_random_blocks=2, local_window_blocks=(1, 2, 3),
            global_block_indices=(0, 4), global_block_end_indices=(1, 6),
        ),
        BigBirdPattern(**how, num_random_blocks=2),
        BigBirdPattern(**how, **different),
        LongformerPattern(**how, global_block_indices=(1,)),
        FunctionPattern(**how, function=some_blocks),
    ]  # fmt: skip


def core_of(
    pattern: BlockPattern, softcap: float = 0.0, scale: float | None = None
) -> SparseAttention:
    heads = (FIRST, FIRST + 4) if pattern.different_layout_per_head else None
    return SparseAttention(pattern, heads, softcap, scale)


def heads(
    groups: int = 4, length: int = LENGTH, size: int = 6, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """q [s b 4 d], k and v [s b groups d]."""
    draw = torch.Generator().manual_seed(5)
    made = (
        torch.randn(length, 2, n, size, dtype=torch.float64, generator=draw)
        for n in (4, groups, groups)
    )
    q, k, v = (x.to(dtype).requires_grad_() for x in made)
    return q, k, v


def mask_of(core: SparseAttention, length: int) -> Tensor:
    """[4 s s], pair by pair of blocks."""
    pattern = core.pattern
    count, first = -(-length // pattern.block), (core.heads or (0, 4))[0]
    mask = torch.zeros(4, length, length, dtype=torch.bool)
    for head in range(4):
        for query in range(count):
            rows = slice(query * pattern.block, (query + 1) * pattern.block)
            for key in pattern.key_blocks(query, count, first + head):
                mask[head, rows, key * pattern.block : (key + 1) * pattern.block] = True
    return mask.tril() if pattern.causal else mask


def dense(core: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula under the mask; 0 for a query that sees nothing."""
    s, _, a, d = q.shape
    k, v = (x.repeat_interleave(a // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) * (core.scale or d**-0.5)
    scores = torch.tanh(scores / core.softcap) * core.softcap if core.softcap else scores
    shares = scores.masked_fill(~mask_of(core, s), -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bast,tbad->sbad", shares, v).flatten(2)


@pytest.mark.parametrize(
    ("groups", "softcap", "direction"),
    in_turns(5, [4, 2, 1], [0.0, 0.7], ["unidirectional", "bidirectional"]),
)
def test_each_pattern_is_dense_attention_under_its_mask(
    groups: int, softcap: float, direction: str
) -> None:
    inputs = heads(groups)
    for block in (4, 5, 16, 64):
        for pattern in patterns(block, direction):
            core = core_of(pattern, softcap, 0.3)
            got, want = (gradients(y, inputs) for y in (core(*inputs), dense(core, *inputs)))
            for name, ours, right in zip("y dq dk dv".split(), got, want, strict=True):
                torch.testing.assert_close(
                    ours, right, rtol=0, atol=1e-9, msg=lambda m, n=name, c=core: f"{n}, {c}: {m}"
                )


def test_bounded_numbers_of_scores_change_nothing() -> None:
    """Plain operations, at most 16 queries at a time: bf16, soft caps, GPUs without FlexAttention."""
    inputs = heads(2)
    for pattern in patterns(20, "unidirectional") + patterns(20, "bidirectional"):
        core = core_of(pattern, 0.7)
        with mock.patch.object(attention, "SCORES_ON_CPU", 1):
            assert_same(gradients(core(*inputs), inputs), gradients(dense(core, *inputs), inputs))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_narrower_numbers(dtype: torch.dtype, bound: float) -> None:
    """Within a few roundings of outputs and gradients of about 1."""
    inputs = heads(2, dtype=dtype)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    core = core_of(BigBirdPattern(block=8, different_layout_per_head=True))
    y, want = core(*inputs), dense(core, *wide)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    got = y, *torch.autograd.grad(y, inputs, dy)
    for ours, right in zip(got, (want, *torch.autograd.grad(want, wide, dy.double())), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=bound, atol=bound)


# ------------------------------------------------------------------------------------------------ computed blocks


def computed(core: SparseAttention, groups: int = 4) -> tuple[int, int]:
    """Pairs of positions that forward and backward compute, summed over heads."""
    pairs = Counter[str]()

    def counting(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def counted(offset: int, causal: Any, *given: Tensor) -> Any:
            q, k = given[0], given[2] if name == "backward" else given[1]
            pairs[name] += q.shape[1] * q.shape[2] * k.shape[2]
            return f(offset, causal, *given)

        return counted

    real = {name: getattr(attention, name) for name in ("forward", "backward")}
    with mock.patch.multiple(attention, **{n: counting(n, f) for n, f in real.items()}):
        core(*heads(groups)).sum().backward()
    return pairs["forward"], pairs["backward"]


@pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
def test_only_the_listed_blocks_are_computed(direction: str) -> None:
    for block in (4, 5):
        for pattern in patterns(block, direction):
            core, count = core_of(pattern), -(-LENGTH // block)
            sizes = [min(block, LENGTH - block * i) for i in range(count)]
            listed = sum(
                sizes[query] * sizes[key]
                for head in range(FIRST, FIRST + 4)
                for query in range(count)
                for key in pattern.key_blocks(query, count, head)
            )
            assert computed(core) == (listed, listed), pattern
            assert core.flops(2 * LENGTH, LENGTH, 4, 6) == 2 * 2 * 2 * 6 * listed


def drop(parts: list[Part]) -> list[Part]:
    """The parts without the first key block of the last part that has several ranges."""
    at = max(i for i, part in enumerate(parts) if len(part.keys) > 1)
    first, last = parts[at].keys[0]
    parts[at] = parts[at]._replace(
        keys=parts[at].keys[1:], offset=parts[at].offset - (last - first)
    )
    return parts


def repeat(parts: list[Part]) -> list[Part]:
    """The first key block twice, in the last part that has several ranges."""
    at = max(i for i, part in enumerate(parts) if len(part.keys) > 1)
    first, last = parts[at].keys[0]
    parts[at] = parts[at]._replace(
        keys=(parts[at].keys[0], *parts[at].keys), offset=parts[at].offset + last - first
    )
    return parts


@pytest.mark.parametrize("fault", [drop, repeat])
def test_a_dropped_and_a_repeated_block_are_found(
    fault: Callable[[list[Part]], list[Part]],
) -> None:
    """Planted faults: outputs, gradients and the number of computed pairs all differ."""
    inputs, core = heads(), core_of(FixedPattern(block=4))
    want, right = gradients(dense(core, *inputs), inputs), computed(core)[0]
    (layout,) = core.lists(LENGTH, 4)
    wrong = (layout._replace(parts=tuple(fault(list(layout.parts)))),)
    with mock.patch.object(block_sparse, "layouts", return_value=wrong):
        got = gradients(core(*inputs), inputs)
        assert computed(core)[0] != right
    for ours, true in zip(got, want, strict=True):
        assert (ours - true).abs().max() > 1e-3


def test_layouts_of_other_heads_are_found() -> None:
    """A planted fault: a rank that counts its heads from 0."""
    pattern = FixedPattern(block=4, num_different_global_patterns=4, different_layout_per_head=True)
    inputs = heads()
    torn, right = (SparseAttention(pattern, heads=(at, at + 4)) for at in (0, 6))
    assert (torn(*inputs) - dense(right, *inputs)).abs().max() > 1e-3


def test_different_layouts_need_the_heads_of_the_rank() -> None:
    pattern = BigBirdPattern(different_layout_per_head=True)
    with pytest.raises(ValueError, match=r"pass heads=slicing.core_heads\(heads\)"):
        SparseAttention(pattern)
    with pytest.raises(ValueError, match=r"heads 0 to 7 for a rank with 4 heads: pass heads="):
        SparseAttention(pattern, heads=(0, 8))(*heads())


@dataclass
class Between:
    """The plan of the listed blocks between some queries and some keys; heads are [b a s d]."""

    core: SparseAttention
    lists: Sequence[Layout]
    merges = False

    @property
    def causal(self) -> layers.Causal:
        return self.core.causal

    def steps(
        self, q: Tensor, k: Tensor, v: Tensor, sums: list[Tensor] | None = None
    ) -> Iterator[Step]:
        return block_sparse.steps(self.lists, self.causal, q, k, v, (0, 0))

    def forward(self, *heads: Tensor) -> tuple[Tensor, Tensor]:
        y, lse = attention.output(self, *(x.permute(2, 0, 1, 3) for x in heads))
        return y.unflatten(2, (heads[0].shape[1], -1)).permute(1, 2, 0, 3), lse

    def backward(self, dy: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        (*heads, y), lse = (x.permute(2, 0, 1, 3) for x in given[:-1]), given[-1]
        dy, y = dy.permute(2, 0, 1, 3).flatten(2), y.flatten(2)
        found = attention.gradients(self, dy, *heads, None, y, lse)[:3]
        return tuple(x.permute(1, 2, 0, 3) for x in found)


def test_parts_of_the_keys_are_merged_to_attention_of_all() -> None:
    """Three ranges of positions as on ranks of a ring, each with the blocks between two of them."""
    q, k, v = (x.detach().permute(1, 2, 0, 3) for x in heads(2))
    dy = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(6))
    ranges, count = [(0, 10), (10, 31), (31, LENGTH)], 4
    for pattern in patterns(4, "unidirectional") + patterns(5, "bidirectional"):
        core = core_of(pattern)
        numbers = core.heads or (0, count)
        between = {
            (rows, keys): Between(
                core, block_patterns.layouts(pattern, LENGTH, numbers, rows, keys)
            )
            for rows in ranges
            for keys in ranges
        }
        full = Between(core, core.lists(LENGTH, count))
        want, lse = full.forward(q, k, v)
        grads = full.backward(dy, q, k, v, want, lse)
        got = [torch.zeros_like(x) for x in (want, q, k, v)]
        for rows in ranges:
            at = slice(None), slice(None), slice(*rows)
            y, total = torch.zeros_like(q[at]), torch.full_like(lse[at], -torch.inf)
            for keys in ranges:
                pair = [x[:, :, slice(*keys)] for x in (k, v)]
                attention.merge_(y, total, *between[rows, keys].forward(q[at], *pair))
            got[0][at] = y
            torch.testing.assert_close(total, lse[at], rtol=0, atol=1e-12)
            for keys in ranges:
                of = slice(None), slice(None), slice(*keys)
                parts = between[rows, keys].backward(dy[at], q[at], k[of], v[of], y, total)
                for sums, part, place in zip(got[1:], parts, (at, of, of), strict=True):
                    sums[place] += part
        assert_same(tuple(got), (want, *grads))


# --------------------------------------------------------------------------------------------------- FlexAttention


FLEX: list[BlockPattern] = [
    FixedPattern(block=16),
    FixedPattern(block=128, attention="bidirectional", num_local_blocks=2),
    FixedPattern(block=48, num_different_global_patterns=4, different_layout_per_head=True),
    BigBirdPattern(block=30, different_layout_per_head=True, attention="bidirectional"),
    BigBirdPattern(block=256),
    DensePattern(block=100),
    FunctionPattern(block=32, function=some_blocks),
]


@pytest.mark.seldom(
    "FixedPattern-torch.float32*", "FixedPattern-torch.float64_2", "BigBirdPattern-torch.float32*"
)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [
        pytest.param(pattern, dtype, marks=pytest.mark.grid if (number + place) % 2 else ())
        for number, pattern in enumerate(FLEX)
        for place, dtype in enumerate((torch.float64, torch.float32))
    ],
    ids=named_or_type,
)
def test_flex_attention_is_dense_attention_under_the_mask(
    pattern: BlockPattern, dtype: torch.dtype
) -> None:
    inputs, core = heads(2, 300, 16, dtype), core_of(pattern, 0.9)
    got, want = gradients(core(*inputs), inputs), gradients(dense(core, *inputs), inputs)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, right in zip(got, want, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=bound)
    assert any(line.startswith("FlexAttention: float") and type(pattern).__name__ in line
               for line in attention_backends.described())  # fmt: skip


@pytest.mark.parametrize("pattern", FLEX, ids=named)
def test_the_lists_of_flex_attention_are_those_of_all_pairs(pattern: BlockPattern) -> None:
    """A block is listed if it has a visible pair, and full if all of its pairs are visible."""
    core, length = core_of(pattern), 300
    numbers = core.heads or (0, 4)
    mask = mask_of(core, length)
    listed, *lists = block_sparse.flex_lists(pattern, length, numbers, torch.device("cpu"))
    count = len(listed)
    assert count == (4 if pattern.different_layout_per_head else 1)
    padded = torch.nn.functional.pad(mask[:count], (0, 84, 0, 84))
    blocks = padded.unflatten(2, (3, 128)).unflatten(1, (3, 128))
    exists = torch.arange(384).view(3, 128) < length  # positions behind the last do not count
    pairs = exists.view(1, 3, 128, 1, 1) & exists.view(1, 1, 1, 3, 128)
    some, every = blocks.any(-1).any(2), (blocks | ~pairs).all(-1).all(2)
    partial, full = (_dense(*lists[at : at + 2]) for at in (0, 2))
    assert torch.equal(full, every)
    assert not (partial & full).any()
    assert torch.equal(partial | full, some)


def _dense(counts: Tensor, indices: Tensor) -> Tensor:
    dense = torch.zeros(indices.shape, dtype=torch.bool)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape[:3])).tolist():
        dense[*at, indices[*at][: counts[*at]].long()] = True
    return dense[0]


# -------------------------------------------------------------------------------------------------- traces, memory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("pattern", patterns(16, "unidirectional"), ids=named)
def test_a_trace_counts_the_listed_blocks(pattern: BlockPattern, device: str) -> None:
    seq, slicing = 80, Slicing()
    tokens = torch.empty(2, seq, dtype=torch.int64, device="meta")
    micro = MicroBatch(
        tokens, tokens, tokens[:, 0], torch.empty((), device="meta")
    )  # fmt: skip

    def costs(core: Any) -> Any:
        norms = tuple(layers.RMSNorm(name, 32, slicing) for name in ("one", "two"))
        attends = layers.Attention("attention", 32, 4, slicing, kv_heads=2, core=core)
        block = layers.Block("block", norms, attends, layers.MLP("mlp", 32, 64, slicing), slicing)
        model = [layers.Embedding("embedding", 64, 32, slicing), block]
        found = Tracer(micro, torch.float32, torch.float32, Counter()).trace(model)[1]
        stated = stated_flops(model, 2 * seq, seq)
        assert stated is not None
        assert found.flops == stated[1]
        return found

    with mock.patch.object(attention, "default_device", return_value=torch.device(device)):
        core, sparse, full = core_of(pattern), costs(core_of(pattern)), costs(layers.Causal())
    assert full.flops - sparse.flops == 4 * 2 * seq * seq * 4 * 8 - core.flops(2 * seq, seq, 4, 8)
    assert (sparse.kept, sparse.forward, sparse.backward) == (
        full.kept,
        full.forward,
        full.backward,
    )


def test_the_backward_keeps_output_and_one_number_per_query_and_head() -> None:
    q, k, v = heads(2, 256, 16)
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = core_of(BigBirdPattern(block=16))(q, k, v)
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, y)}
    assert saved.keys() >= given
    assert sum(n for at, n in saved.items() if at not in given) == 256 * 2 * 4 * 8
    gc.collect()


def test_flex_attention_gets_128_positions_per_block() -> None:
    """The docstring of `BlockPattern` names this number."""
    assert flex.BLOCK == 128
    assert "128" in (BlockPattern.__doc__ or "")
