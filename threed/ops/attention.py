"""Scaled dot-product attention for layers, recompute and cost traces.

    attend(q, k, v)                                    torch's fused attention, causal or masked
    Causal(window=4096, softcap=50.0)(q, k, v)         with a window, a soft cap or a custom scale
    Causal()(q, k, v, sinks=sinks)                     with attention sinks

A sink is a learned number per head (arXiv 2309.17453; gpt-oss). It acts like the score of one more
key, which all queries attend to and whose value is 0.

On GPUs, windows, soft caps and documents are computed by FlexAttention (`ops.flex`). Elsewhere
every document is a sequence of its own, so no score is computed between two documents.

A block is the attention of some queries to some keys (arXiv 2205.14135, 2310.01889):

    y, lse = forward(offset, causal, q, k, v)                   # lse: log-sum-exp per query
    merge_(y, lse, *forward(..., q, more_k, more_v))            # the same queries, more keys
    dq, dk, dv = backward(offset, causal, dy, q, k, v, y, lse)  # y and lse: merged over all keys

Here `causal` is a `Causal`, and `offset` is the position of the first query minus the position of
the first key. `Blockwise` runs these functions for all blocks of a plan (`Plan`): chunks of queries
(`Causal`), the hops of a ring (`layers.context`), or lists of blocks (`ops.block_sparse`).

Value heads may have another size than query and key heads. A block is computed by torch's flash
attention, if both have the same size, on CPUs in fp32 or fp64, and on GPUs in 16 bits if no pair is
masked or if the block is square and causal (other kernels for GPUs return no log-sum-exp if a mask
is given). The plain operations of this module compute all other blocks, for a bounded number of
queries at a time: blocks in 16 bits on CPUs, blocks with soft caps, which flash attention does not
have, blocks with value heads of another size, and all other blocks on GPUs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.weak import WeakTensorKeyDictionary

from threed.distributed.topology import default_device
from threed.ops import attention_backends, flex
from threed.ops.positions import Range

_ATEN = torch.ops.aten
FLASH = _ATEN._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
_FLASH_GPU = _ATEN._scaled_dot_product_flash_attention
_FLASH_GPU_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward
EFFICIENT = _ATEN._scaled_dot_product_efficient_attention
FUSED = (FLASH, EFFICIENT, _FLASH_GPU, _ATEN._scaled_dot_product_cudnn_attention)
# Maximum number of scores per chunk. In fp32 they take 128 MiB on a GPU, and on a CPU 2 MiB, which
# fit into a cache.
SCORES, SCORES_ON_CPU = 1 << 25, 1 << 19
Borders = tuple[tuple[Range, ...], ...]
Keep = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...]]
_BORDERS = WeakTensorKeyDictionary()  # documents of a micro-batch -> Borders
CHUNKS_OF_A_TRACE, WINDOW_AS_MASK = 64, 0.5  # chunks per sequence; share of a sequence


# ----------------------------------------------------------------------------------- full sequences


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Returns softmax(q k^T scale + mask) v, [s b (a d)]; without a mask, attention is causal.

    Args:
        q: queries [s b a d].
        k: keys [s b k d].
        v: values [s b k d].
        mask: [s s], [a s s] or [b a s s] with queries as rows and keys as columns; sizes a and b
            may be 1. Either bool (True: the query attends to the key), or numbers in q's dtype that
            are added to the scores. It replaces the causal mask.
        scale: factor of the scores. Default: 1 / sqrt(d).
    """
    q, k, v = _batch_first(q), _batch_first(k), _batch_first(v)
    if mask is not None and q.shape[1] != k.shape[1] and not _takes_groups(q, k, v, mask, scale):
        return _attend_by_group(q, k, v, mask, scale)
    return _seq_first(_fused(q, k, v, mask, scale))


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Returns `attend` of q [b a s d] and of k and v [b k s d], as [b a s d]."""
    real = type(q) is Tensor and q.device.type in ("cpu", "cuda")  # neither meta nor fake
    if real and not torch.compiler.is_compiling():
        attention_backends.check(q, k, v, mask, scale, q.is_cuda)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _takes_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> bool:
    """Returns whether torch's fused attention supports grouped heads under a mask.

    On GPUs only cuDNN supports them; for a trace and under torch.compile the answer is no.
    """
    if _device_type(q) != "cuda":
        return True
    if q.is_meta or torch.compiler.is_compiling():
        return False
    return attention_backends.choice(q, k, v, mask, scale) != SDPBackend.MATH.value


def _attend_by_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Returns `attend` of q [b a s d] without repeating keys and values [b k s d].

    The i-th query heads of all groups attend in one call, so there are a / k calls.
    """
    count, parts = q.shape[1] // k.shape[1], []
    for i in range(count):
        by_head = mask.dim() > 2 and mask.shape[-3] > 1
        of_heads = mask[..., i::count, :, :] if by_head else mask
        parts.append(_fused(q[:, i::count], k, v, of_heads, scale).permute(2, 0, 1, 3))
    return torch.stack(parts, 3).flatten(2)


@dataclass(frozen=True)
class Causal:
    """Causal attention, for the argument `core` of `layers.Attention`.

    Attributes:
        window: number of positions that a query attends to, including its own. 0: no limit.
        softcap: c in c tanh(score / c), which replaces each score (arXiv 2408.00118). 0: no cap.
        scale: factor of the scores. Default: 1 / sqrt(d).
    """

    window: int = 0
    softcap: float = 0.0
    scale: float | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns attention [s b (a d)].

        Args:
            q: queries [s b a d].
            k: keys [s b k d].
            v: values [s b k d].
            documents: number of each position's document, [b s], not decreasing along s. A query
                attends only to its own document. Default: each sequence is one document.
                Without FlexAttention the host reads their borders.
            sinks: attention sinks, one number per query head, [a]. Default: none.
        """
        length, trace = q.shape[0], q.is_meta and not _on_cpu(q)
        window = self.window if self.window < length else 0
        # On CPUs torch keeps the scores of all pairs if the heads of keys and values differ in size.
        unequal = _on_cpu(q) and q.shape[-1] != v.shape[-1]
        plain = not (window or self.softcap or documents is not None or unequal)
        if sinks is None and (trace or plain):
            return attend(q, k, v, None, self.scale)
        queries, keys, values = _batch_first(q), _batch_first(k), _batch_first(v)
        given = {"documents": documents, "sinks": sinks}
        if not (plain and _is_flash_on_gpu(0, self, queries, keys, values)):
            # For a trace, torch's fused attention stands for FlexAttention, which saves the same.
            if trace and sinks is not None:
                y = _fused(queries, keys, values, None, self.scale)
                lse = y.new_empty(y.shape[:3], dtype=_wide(y))
                return _seq_first(flex.with_sinks(y, lse, sinks))
            if flex.fits(queries):
                self._record("FlexAttention", queries, keys, window, **given)
                how = (window, self.softcap, self.scale, documents, sinks)
                return _seq_first(flex.attend(queries, keys, values, *how))
        more = sinks is not None or documents is not None or self.softcap or unequal
        if not more and window > WINDOW_AS_MASK * length and _on_cpu(q):
            return attend(q, k, v, _mask((length, length), 0, window, q), self.scale)
        self._record("chunks of threed", queries, keys, window, **given)
        chunks = Chunks(Causal(window, self.softcap, self.scale), documents)
        return cast(Tensor, Blockwise.apply(q, k, v, sinks, chunks))

    def _record(
        self, kernel: str, q: Tensor, k: Tensor, window: int, **given: Tensor | None
    ) -> None:
        """Records the kernel that computes attention of q [b a s d] and k [b k s d]."""
        what = f"window {window}, soft cap {self.softcap:g}"
        what += "".join(f", {name}" for name, value in given.items() if value is not None)
        attention_backends.record(kernel, q, k, what)

    def flops(self, tokens: int, seq: int, heads: int, size: int) -> int:
        """Returns the FLOPs of a forward, counted for all pairs of positions.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
            heads: number of query heads.
            size: width of a head.
        """
        return 4 * tokens * seq * heads * size


class Step(NamedTuple):
    """Attention of some queries to some keys, which is computed at once.

    Attributes:
        at: index of the queries in q [b a s d]: rows of the batch, heads and positions.
        offset: position of the first query minus position of the first key.
        keys: the keys, [b k m d]; valid until the next step.
        values: the values, [b k m d]; valid until the next step.
        of: for each range of the keys, its index in the sums of gradients [b k s d].
    """

    at: tuple[slice, slice, slice]
    offset: int
    keys: Tensor
    values: Tensor
    of: tuple[tuple[slice, slice, slice], ...]


class Plan(Protocol):
    """The steps in which `Blockwise` computes attention."""

    @property
    def causal(self) -> Causal:
        """Window, soft cap and scale of every step."""

    @property
    def merges(self) -> bool:
        """Whether a query is in several steps, so that their results must be merged."""

    def steps(
        self, q: Tensor, k: Tensor, v: Tensor, sums: list[Tensor] | None = None
    ) -> Iterator[Step]:
        """Yields the steps.

        Args:
            q: queries [b a s d].
            k: keys [b k s d].
            v: values [b k s d].
            sums: in a backward, the sums of the gradients of keys and of values [b k s d], in fp32
                or wider, to which the gradients of each step are added. A plan that merges gets an
                empty list. It sets the sums before each step, and after the last step it sets the
                gradients of k and v.
        """


class Blockwise(torch.autograd.Function):
    """Attention computed step by step; the first arguments are those of `output`.

    The forward saves its inputs, its output and the log-sum-exp per query and head. With `keep`, it
    calls `keep` with a function that computes the last two, see `layers.recompute.Recompute.keep`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, keep: Keep | None = None
    ) -> Tensor:  # fmt: skip
        find = functools.partial(output, plan, q, k, v, sinks)
        out, lse = find() if keep is None else keep(find)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(ctx.plan, dy, *ctx.saved_tensors), None, None


def output(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns attention [s b (a d)], and the log-sum-exp [b a s].

    Args:
        plan: the steps.
        q: queries [s b a d].
        k: keys [s b k d].
        v: values [s b k d].
        sinks: attention sinks [a], or None.
    """
    s, b, a, _ = q.shape
    dtype, wide = q.dtype, _wide(q)
    y = q.new_zeros(s, b, a, v.shape[-1], dtype=wide if plan.merges else dtype)
    lse = q.new_full((b, a, s), -torch.inf, dtype=wide)
    q, k, v, heads = map(_batch_first, (for_steps(q, plan.merges), k, v, y))
    for at, offset, keys, values, _ in plan.steps(q, k, v):
        part = forward(offset, plan.causal, q[at], keys, values)
        if plan.merges:
            merge_(heads[at], lse[at], *part)
        else:
            heads[at], lse[at] = part
    if sinks is not None:
        scores = sinks.to(wide).unsqueeze(1)
        heads.mul_(torch.sigmoid(lse - scores).unsqueeze(-1))
        lse = torch.logaddexp(lse, scores)
    # Not a view, because autograd forbids in-place changes of a view that was made in a Function.
    out: Tensor = _ATEN._unsafe_view(y.to(dtype), (s, b, -1))
    return out, lse


def gradients(
    plan: Plan, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns the gradients of q, k, v and the sinks (None without sinks).

    Args:
        plan: the steps.
        dy: gradient of the output [s b (a d)].
        q: queries [s b a d].
        k: keys [s b k d].
        v: values [s b k d].
        sinks: attention sinks [a], or None.
        y: the output [s b (a d)].
        lse: log-sum-exp [b a s], including the sinks.
    """
    dy, y = (x.unflatten(2, (q.shape[2], -1)) for x in (dy, y))
    dq = torch.zeros_like(q, dtype=lse.dtype if plan.merges else q.dtype)
    queries, dy, y = (_batch_first(for_steps(x, plan.merges)) for x in (q, dy, y))
    k, v, grad = _batch_first(k), _batch_first(v), _batch_first(dq)
    sums = [] if plan.merges else [torch.zeros_like(x, dtype=lse.dtype) for x in (k, v)]
    for at, offset, keys, values, of in plan.steps(queries, k, v, sums):
        inputs = dy[at], queries[at], keys, values, y[at], lse[at]
        part, *more = backward(offset, plan.causal, *inputs)
        if plan.merges:
            grad[at] += part
        else:
            grad[at] = part
        lengths = [place[2].stop - place[2].start for place in of]
        for total, parts in zip(sums, more, strict=True):
            for place, piece in zip(of, parts.split(lengths, 2), strict=True):
                total[place] += piece
    dk, dv = (x.to(k.dtype).permute(2, 0, 1, 3) for x in sums)
    if sinks is None:
        return dq.to(q.dtype), dk, dv, None
    # The gradient of a score is its share of the softmax times dy (value - y); a sink's value is 0.
    shares = torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse)
    dsinks = -(shares * (dy * y).sum(-1, dtype=lse.dtype)).sum((0, 2))
    return dq.to(q.dtype), dk, dv, dsinks.to(sinks.dtype)


def for_steps(x: Tensor, merges: bool) -> Tensor:
    """Returns x in the dtype in which steps are computed.

    If results are merged, it is fp32 or wider on CPUs. There the operations for blocks in 16 bits
    would round each block's probabilities and output, and flash attention in fp32 is available.
    """
    return x.to(_wide(x)) if merges and _on_cpu(x) else x


@dataclass(frozen=True, eq=False)
class Chunks:
    """The plan of attention within one rank: one chunk of queries at a time.

    Attributes:
        causal: window, soft cap and scale.
        documents: number of each position's document [b s], or None.
    """

    causal: Causal
    documents: Tensor | None = None
    merges = False

    def steps(
        self, q: Tensor, k: Tensor, v: Tensor, sums: list[Tensor] | None = None
    ) -> Iterator[Step]:
        """Yields the steps, see `Plan.steps`."""
        (b, a, s, _), causal = q.shape, self.causal
        # Flash attention keeps no scores, so it needs no chunks.
        full = Causal(0, causal.softcap)
        fused = _is_flash(q, v, causal) or _is_flash_on_gpu(0, full, q, k, v)
        documents = (((0, s),),) if self.documents is None else borders(self.documents)
        for number, ranges in enumerate(documents):
            row = slice(0, b) if self.documents is None else slice(number, number + 1)
            for first, last in ranges:
                pairs = _chunks_of_document((row.stop - row.start) * a, first, last, causal, q)
                if fused and not 0 < causal.window < last - first:
                    pairs = iter([(slice(first, last), slice(first, last))])
                for queries, keys in pairs:
                    at, of = (row, slice(None), queries), (row, slice(None), keys)
                    yield Step(at, queries.start - keys.start, k[of], v[of], (of,))


def borders(documents: Tensor) -> Borders:
    """Returns, for each row of documents [b s], the range of positions of each document.

    The result is read from the device once per tensor, so once per micro-batch.
    """
    found = _BORDERS.get(documents)
    if found is None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        rows = [firsts.nonzero().flatten().tolist() for firsts in begins.cpu()]
        length = documents.shape[1]
        found = tuple(tuple(zip(row, [*row[1:], length], strict=True)) for row in rows)
        _BORDERS[documents] = found
    return found


def _chunks_of_document(
    sequences: int, start: int, end: int, causal: Causal, q: Tensor
) -> Iterator[tuple[slice, slice]]:
    """Yields chunks of the queries of a document, and the keys that each chunk attends to.

    The number of scores per chunk is bounded.

    Args:
        sequences: number of rows of the batch times number of heads.
        start: first position of the document.
        end: last position of the document plus 1.
        causal: window, soft cap and scale.
        q: queries, for their device.
    """
    s = end - start
    window = causal.window or s
    most = SCORES_ON_CPU if _on_cpu(q) else SCORES
    count = min(max(16, most // (sequences * min(s, 2 * window))), max(window, 64))
    # On the meta device memory does not limit the chunks, but each operation takes a fraction of a
    # millisecond to trace. Therefore every sequence is divided into at most CHUNKS_OF_A_TRACE
    # chunks.
    count = max(count, -(-s // CHUNKS_OF_A_TRACE)) if q.is_meta else count
    for first in range(start, end, count):
        last = min(end, first + count)
        # Cost traces, on the meta device, count all pairs of positions, so they use all keys.
        seen = max(start, first - window + 1)
        yield slice(first, last), slice(start, end) if q.is_meta else slice(seen, last)


# ------------------------------------------------------------------------------------------- blocks


def forward(offset: int, causal: Causal, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes attention of some queries to some keys.

    Args:
        offset: position of the first query minus position of the first key.
        causal: window, soft cap and scale.
        q: queries at n consecutive positions, [b a n d].
        k: keys at m consecutive positions, [b k m d].
        v: values at the positions of the keys, [b k m d].

    Returns:
        y [b a n d], and the log-sum-exp of each query's scores [b a n], in fp32 or wider. If a
        query attends to no key, its y is 0 and its log-sum-exp minus infinity.
    """
    if _is_flash_on_gpu(offset, causal, q, k, v):
        square = offset == 0 and q.shape[2] == k.shape[2]
        y, lse, *_ = _FLASH_GPU(q, k, v, 0.0, square, False, scale=causal.scale)
        return y, lse
    if not _is_flash(q, v, causal):
        parts = [
            _plain_forward(offset + rows.start, causal, q[:, :, rows], k, v)
            for rows in _rows_at_once(q, k)
        ]
        y, lse = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*parts, strict=True))
        return y, lse
    square, mask = _visible(q, k, offset, causal.window)
    y, lse = FLASH(q, k, v, 0.0, square, attn_mask=mask, scale=causal.scale)
    if mask is not None and _has_masked_query(q, k, offset, causal.window):
        # For queries that attend to no key, torch returns a log-sum-exp of 0, not minus infinity.
        lse = lse.masked_fill(mask.isneginf().all(-1), -torch.inf)
    return y, lse


def backward(
    offset: int, causal: Causal, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the contributions of some queries and some keys to the gradients of q, k and v.

    Args:
        offset: as in `forward`.
        causal: as in `forward`.
        dy: gradient of the output [b a n d].
        q: as in `forward`.
        k: as in `forward`.
        v: as in `forward`.
        y: output of these queries over all their keys, not only `k`.
        lse: log-sum-exp of these queries over all their keys.
    """
    # For a query that attends to no key, score and lse are -inf. lse is replaced by 0, so that
    # exp(score - lse) is exp(-inf) = 0 and not exp(-inf + inf) = NaN.
    lse = lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)
    if _is_flash_on_gpu(offset, causal, q, k, v):
        n, m = q.shape[2], k.shape[2]
        unused = q.new_zeros(2, dtype=torch.uint64)  # state of the dropout's generator
        dq, dk, dv = _FLASH_GPU_BACKWARD(
            dy, q, k, v, y, lse, None, None, n, m, 0.0, offset == 0 and n == m, unused, unused,
            scale=causal.scale,
        )  # fmt: skip
        return dq, dk, dv
    if not _is_flash(q, v, causal):
        return _plain_backward_in_chunks(offset, causal, dy, q, k, v, y, lse)
    square, mask = _visible(q, k, offset, causal.window)
    dq, dk, dv = _FLASH_BACKWARD(
        dy, q, k, v, y, lse, 0.0, square, attn_mask=mask, scale=causal.scale
    )
    return dq, dk, dv


def merge_(y: Tensor, lse: Tensor, more_y: Tensor, more_lse: Tensor) -> None:
    """Merges two outputs of attention of the same queries to different keys, in place.

    Computes in fp32 or wider.

    Args:
        y: output of `forward` for the first keys [b a n d]; overwritten by the output for all keys.
        lse: log-sum-exp for the first keys [b a n]; overwritten by the log-sum-exp for all keys.
        more_y: output of `forward` for the other keys [b a n d].
        more_lse: log-sum-exp for the other keys [b a n].
    """
    more_lse = more_lse.to(lse.dtype)
    share = torch.sigmoid(more_lse - lse).masked_fill_(more_lse.isneginf(), 0.0)
    y.sub_(share.unsqueeze(-1) * (y - more_y))
    lse.copy_(torch.logaddexp(lse, more_lse))


def _is_flash(q: Tensor, v: Tensor, causal: Causal) -> bool:
    """Returns whether torch's flash attention computes a block.

    Flash attention is not used for 16-bit dtypes, because plain matrix products are faster on CPUs.
    """
    return (
        _on_cpu(q) and q.dtype.itemsize >= 4 and not causal.softcap and q.shape[-1] == v.shape[-1]
    )


def _is_flash_on_gpu(offset: int, causal: Causal, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether torch's flash attention for GPUs computes a block."""
    n, m, size = q.shape[2], k.shape[2], q.shape[3]
    window = causal.window
    square = offset == 0 and n == m and (not window or window >= n)
    complete = m - 1 <= offset and (not window or offset + n <= window)
    fits = q.dtype.itemsize == 2 and size == v.shape[3] and size % 8 == 0 and size <= 256
    return _device_type(q) == "cuda" and fits and not causal.softcap and (square or complete)


def _rows_at_once(q: Tensor, k: Tensor) -> list[slice]:
    """Returns chunks of the queries whose scores are computed at a time."""
    n, most = q.shape[2], SCORES_ON_CPU if _on_cpu(q) else SCORES
    count = max(16, most // (q.shape[0] * q.shape[1] * k.shape[2]))
    count = max(count, -(-n // CHUNKS_OF_A_TRACE)) if q.is_meta else count
    return [slice(at, min(at + count, n)) for at in range(0, n, count)]


def _visible(q: Tensor, k: Tensor, offset: int, window: int) -> tuple[bool, Tensor | None]:
    """Returns `is_causal` and `attn_mask` of torch's flash attention for a block.

    They are (True, None) for a square causal block, (False, None) if no key is masked, and else
    (False, mask [n m]).
    """
    n, m = q.shape[2], k.shape[2]
    if offset == 0 and n == m and (not window or window >= n):
        return True, None
    if m - 1 <= offset and (not window or offset + n <= window):
        return False, None
    return False, _mask((n, m), offset, window, q)


def _has_masked_query(q: Tensor, k: Tensor, offset: int, window: int) -> bool:
    """Returns whether some query attends to no key.

    Only the first and the last query are checked: if any query attends to no key, the first or the
    last query does not attend to a key either.
    """
    return offset < 0 or 0 < window <= offset + q.shape[2] - k.shape[2]


def _mask(size: tuple[int, int], offset: int, window: int, like: Tensor) -> Tensor:
    make = _cached_mask.__wrapped__ if torch.compiler.is_compiling() else _cached_mask
    return make(size, offset, window, like.device, like.dtype)


@functools.lru_cache(maxsize=8)
def _cached_mask(
    size: tuple[int, int], offset: int, window: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns an additive mask [n m]: 0 if the query attends to the key, else minus infinity."""
    query = torch.arange(offset, offset + size[0], device=device).unsqueeze(1)
    key = torch.arange(size[1], device=device)
    hidden = (key > query) | (key <= query - window) if window else key > query
    return torch.zeros(size, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _plain_forward(
    offset: int, causal: Causal, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, offset, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    shares = scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min)).exp_().to(v.dtype)
    return (shares @ v).view(*q.shape[:3], v.shape[-1]), lse.view(q.shape[:3])


def _plain_backward_in_chunks(
    offset: int, causal: Causal, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    chunks = _rows_at_once(q, k)
    if len(chunks) == 1:
        return _plain_backward(offset, causal, dy, q, k, v, y, lse)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    for rows in chunks:
        queries = [x[:, :, rows] for x in (dy, q, y, lse)]
        dq[:, :, rows], more_k, more_v = _plain_backward(
            offset + rows.start, causal, queries[0], queries[1], k, v, queries[2], queries[3]
        )
        dk += more_k
        dv += more_v
    return dq, dk, dv


def _plain_backward(
    offset: int, causal: Causal, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores, capped = _scores(q, k, offset, causal)
    dy, y, queries = _grouped(dy, k), _grouped(y, k), _grouped(q, k)
    shares = scores.sub_(lse.reshape(*scores.shape[:3], 1)).exp_()
    dv = shares.to(v.dtype).mT @ dy
    sums = (dy * y).sum(-1, keepdim=True, dtype=scores.dtype)
    change = (dy @ v.mT).to(scores.dtype).sub_(sums).mul_(shares)
    change = change if capped is None else change.mul_(capped.square_().neg_().add_(1))
    change = change.mul_(_scale(q, causal)).to(q.dtype)
    return (change @ k).view(q.shape), change.mT @ queries, dv


def _scores(q: Tensor, k: Tensor, offset: int, causal: Causal) -> tuple[Tensor, Tensor | None]:
    """Returns the scores, and tanh(score / softcap) (None without a soft cap).

    Both are [b k (g n) m] in fp32 or wider; g = a / k is the number of query heads per key head.
    Scores of masked keys are minus infinity.
    """
    scores, capped, scale = (_grouped(q, k) @ k.mT).to(_wide(q)), None, _scale(q, causal)
    if causal.softcap:
        capped = scores.mul_(scale / causal.softcap).tanh_()
        scores = capped * causal.softcap
    else:
        scores.mul_(scale)
    square, mask = _visible(q, k, offset, causal.window)
    mask = _mask((q.shape[2], k.shape[2]), 0, 0, q) if square else mask
    if mask is not None:
        scores.unflatten(2, (-1, q.shape[2])).masked_fill_(mask.isneginf(), -torch.inf)
    return scores, capped


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Returns x [b a n d] as [b k (g n) d]: the heads that share a key head form a matrix."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _batch_first(x: Tensor) -> Tensor:
    """Returns heads [s b a d] as a view [b a s d]. einops would take 5 microseconds per call."""
    return x.permute(1, 2, 0, 3)


def _seq_first(y: Tensor) -> Tensor:
    """Returns the heads of y [b a s d] side by side, [s b (a d)]."""
    return y.permute(2, 0, 1, 3).flatten(2)


def _scale(q: Tensor, causal: Causal) -> float:
    return q.shape[-1] ** -0.5 if causal.scale is None else causal.scale


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _device_type(q: Tensor) -> str:
    """Returns the type of q's device; for a meta tensor, the type of the default device."""
    return (default_device() if q.is_meta else q.device).type


def on_gpu(q: Tensor) -> bool:
    """Returns whether q is on a GPU; for a meta tensor, whether the default device is a GPU."""
    return not _on_cpu(q)


def _on_cpu(q: Tensor) -> bool:
    return _device_type(q) == "cpu"
