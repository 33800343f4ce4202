"""Self-attention, cut by heads: multi-head, grouped-query, rotary or not, with or without q/k norms, any core.

Query, key and value are packed into one column-parallel matmul. With fewer key/value heads than tensor ranks, so many
neighbours share a head: then query and key/value are two matmuls behind one gather, because their gradients are
reduced over different ranks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from threed.layers.linear import ColumnLinear, RowLinear
from threed.layers.norm import RMSNorm
from threed.layers.recompute import Recompute
from threed.layers.slicing import Slicing
from threed.ops import attention as ops
from threed.ops import rotary
from threed.ops.frequencies import Theta, scale_of, turned_of

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


@functools.lru_cache(maxsize=16)
def rotary_table(
    length: int, size: int, theta: Theta, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [s 1 1 d] of rotary angles (arXiv 2104.09864), in the half-split layout that Hugging Face uses."""
    angle = rotary.angles(length, size, theta, device)
    angle = torch.cat((angle, angle), dim=-1).view(length, 1, 1, turned_of(theta, size))
    cos, sin = angle.cos(), angle.sin()
    if (scale := scale_of(theta)) != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, theta: Theta) -> Tensor:
    """Rotary positions on x [s b a d]; theta: the base, or what `ops.frequencies` makes of one."""
    table = rotary_table.__wrapped__ if torch.compiler.is_compiling() else rotary_table
    cos, sin = table(x.shape[0], x.shape[-1], theta, x.device, x.dtype)
    rest = None
    if (turned := turned_of(theta, x.shape[-1])) < x.shape[-1]:
        x, rest = x[..., :turned], x[..., turned:]
    left, right = x.chunk(2, dim=-1)
    y = x * cos + torch.cat((-right, left), dim=-1) * sin
    return y if rest is None else torch.cat((y, rest), dim=-1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(q k^T scale + mask) v: q [s b a d], k and v [s b k d] -> [s b (a d)]; causal when there is no mask.

    mask: bool, True where a query (row) may look at a key (column), or numbers of q's dtype to be added; [s s] or
    [a s s]. It decides alone who looks at whom. scale: by default 1 / sqrt(d).
    """
    q, k, v = (
        part.permute(1, 2, 0, 3) for part in (q, k, v)
    )  # [b a s d]; plain views, for einops costs 5 µs a call
    grouped = q.shape[1] != k.shape[1]
    if (
        grouped and mask is not None and q.is_cuda
    ):  # the fused kernel that takes masks knows no groups
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        grouped = False
    if q.is_cuda and not torch.compiler.is_compiling():
        _check_fused(q, k, v, mask, scale, grouped)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return y.permute(2, 0, 1, 3).flatten(2)


_looked_at: set[tuple[object, ...]] = set()


def _check_fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, grouped: bool
) -> None:
    """Looks, once for such tensors, whether torch takes a fused kernel for them, which keeps no scores of all pairs.

    Raises RuntimeError where there is one but it is switched off; warns where there is none.
    """
    kind = (q.shape, k.shape, q.dtype, mask is None, q.requires_grad)
    if kind in _looked_at:
        return
    chosen = torch._fused_sdp_choice(
        q, k, v, mask, 0.0, mask is None, scale=scale, enable_gqa=grouped
    )
    if chosen == SDPBackend.MATH.value:
        what = f"{q.dtype} heads {list(q.shape)} [b a s d], keys {list(k.shape)}, {'no ' if mask is None else 'a '}mask"
        problem = f"attention without a fused kernel ({what}): it keeps the scores of all pairs of positions"
        if (
            q.dtype in (torch.bfloat16, torch.float16)
            and mask is None
            and q.shape[3] % 8 == 0
            and q.shape[3] <= 256
        ):
            raise RuntimeError(
                f"{problem}; there is one for these, which is switched off: leave out torch.nn.attention.sdpa_kernel"
                " and torch.backends.cuda.enable_flash_sdp(False)"
            )
        has = "bf16 or fp16, heads of a multiple of 8 up to 256, and no mask but the causal one have one"
        warnings.warn(f"{problem}; {has}", stacklevel=3)
    _looked_at.add(kind)


class Attention(nn.Module):
    """x [s b h] -> [s b h] (both [s/t b h] when sequences are cut).

    heads a, kv_heads k, head_dim d. tp must divide a, and divide k or be a multiple of it. bias: of query, key and
    value, and of the output unless out_bias says another thing. rotary: the base of rotary positions, or what
    `ops.frequencies` makes of one, or None. qk_norm: RMSNorm of every query and key head (Qwen3), with one weight [d]
    for all heads, to which norm_offset is added.

    core: what a query looks at, and how: a function or module of this rank's heads, whole sequences of them, after
    norms and rotary positions where there are any: q [s b a/t d], k and v [s b k/t d] (with fewer key/value heads than
    ranks one each) -> [s b a/t d] or [s b (a/t d)]. By default causal attention; `attend` does the rest for a mask of
    your own. Which heads of the model these are, `slicing.heads(a)` says; parameters of a core are replicated and
    partial (`slicing.shared(..., partial=True)`), or cut by heads.
    """

    recompute = Recompute()

    def __init__(
        self, name: str, hidden: int, heads: int, slicing: Slicing, *, kv_heads: int | None = None,
        head_dim: int | None = None, bias: bool = True, out_bias: bool | None = None, rotary: Theta | None = None,
        qk_norm: bool = False, norm_offset: float = 0.0, eps: float = 1e-5, core: Core = attend, std: float = 0.02,
        out_std: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        k, d, t = kv_heads or heads, head_dim or hidden // heads, slicing.tp.size
        if heads % t or (k % t and t % k) or heads % k:
            raise ValueError(
                f"{name}: {heads} heads and {k} key/value heads cannot be cut over tp {t}"
            )
        if rotary is not None and turned_of(rotary, d) % 2:
            raise ValueError(
                f"{name}: heads of size {d}: rotary positions turn pairs; use head_dim={d + 1}"
            )
        self.slicing, self.d, self.rotary, self.core = slicing, d, rotary, core
        self.heads, self.kv_heads = heads // t, max(k // t, 1)
        shared = t // k if k < t else 1
        column = functools.partial(
            ColumnLinear, name, hidden, slicing=slicing, std=std, bias=bias, multiple=d
        )
        query, key_value = [("query", heads * d)], [("key", k * d), ("value", k * d)]
        self.qkv = column(query + key_value) if shared == 1 else None
        if shared > 1:
            self.query = column(query, local=True)
            self.key_value = column(key_value, local=True, shared=shared)
        # A head's norm sees this rank's heads only, whatever is done with sequences: its gradient is always partial.
        norm = functools.partial(
            RMSNorm, width=d, slicing=slicing, eps=eps, partial=True, offset=norm_offset
        )
        self.query_norm = norm(f"{name}.query_norm") if qk_norm else None
        self.key_norm = norm(f"{name}.key_norm") if qk_norm else None
        bias = bias if out_bias is None else out_bias
        self.out = RowLinear(
            f"{name}.out", heads * d, hidden, slicing, std=out_std, bias=bias, multiple=d
        )

    def flops(self, tokens: int, seq: int) -> int | None:
        """FLOPs of a forward beside its linear layers', over the whole square of positions; None of a core that does
        not say (`flops(tokens, seq, heads, size)`)."""
        if self.core is attend:
            return 4 * tokens * seq * self.heads * self.d
        states = None if isinstance(self.core, nn.Module) else getattr(self.core, "flops", None)
        return None if states is None else states(tokens, seq, self.heads, self.d)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recompute.run("attention", self.heads_attend, *self._project(x)))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values in one tensor [s b (a+2k)/t d]; queries and the others where these are shared."""
        if self.qkv is not None:
            return (self.recompute.column(self.qkv, x),)
        # torch.compile does not compute twice what other ranks take part in: its backward keeps what was gathered.
        again = self.slicing.sequence_parallel and not torch.compiler.is_compiling()
        x = self.recompute.run("norm", self.slicing.gather, x) if again else self.slicing.gather(x)
        return self.query(x), self.key_value(x)

    def heads_attend(self, *projected: Tensor) -> Tensor:
        """Heads' norms, rotary positions and the core -> [s b (a/t d)]."""
        (first, *rest) = projected
        if not rest and self._turns_in_place(first):
            assert self.rotary is not None
            q, k, v = rotary.split_and_turn(
                first,
                (self.heads, self.kv_heads, self.kv_heads),
                self.heads + self.kv_heads,
                self.d,
                self.rotary,
            )
            return self.core(q, k, v).flatten(2)
        if not rest and self._is_short(first):
            return ops.short_attention(first, self.d)
        q, k, v = self._heads(*projected)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            q, k = rotate(q, self.rotary), rotate(k, self.rotary)
        y = self.core(q, k, v)
        return y.flatten(2) if y.dim() == 4 else y

    def _turns_in_place(self, qkv: Tensor) -> bool:
        """Whether rotary positions may be written over the projection: no head's norm comes first, and none computes
        the core again from what was projected."""
        plain = (
            self.rotary is not None
            and self.query_norm is None
            and type(self.recompute) is Recompute
        )
        return plain and rotary.fits(qkv, self.d, self.rotary or 0.0)

    def _is_short(self, qkv: Tensor) -> bool:
        """Returns whether causal attention alone is computed of qkv [s b 3ad], by the kernels for short sequences."""
        plain = self.core is attend and self.rotary is None and self.query_norm is None
        plain = plain and self.heads == self.kv_heads and type(self.recompute) is Recompute
        return plain and torch.is_grad_enabled() and ops.fits(qkv, self.d)

    def _heads(self, *projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [s b a/t d], key and value [s b k/t d]."""
        sizes = [self.heads * self.d, self.kv_heads * self.d, self.kv_heads * self.d]
        *query, rest = projected
        parts = (*query, *rest.split(sizes[len(query) :], dim=-1))
        q, k, v = (part.view(*part.shape[:2], -1, self.d) for part in parts)
        return q, k, v
