"""Self-attention with heads sharded over tensor ranks, multi-head or grouped-query.

Rotary positions and norms of queries and keys are optional. The core computes attention from
queries, keys and values. A custom function or module can replace it.

Query, key and value are packed into one column-parallel matmul. If there are fewer key/value heads
than tensor ranks, neighboring ranks share a key/value head. In this case the input is gathered
once, and the query projection and the key/value projection are two matmuls, because the gradients
of the two weights are reduced over different ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from threed.distributed.sharding import ShardSpec, parameter, vector
from threed.layers.context import NEEDS_HEADS, RingCore
from threed.layers.linear import ColumnLinear, RowLinear
from threed.layers.norm import RMSNorm, norm_and_rotate
from threed.layers.recompute import Recompute
from threed.layers.slicing import Slicing
from threed.ops import rotary, short_attention
from threed.ops.attention import Causal
from threed.ops.frequencies import Theta, rotated_size

Core = Callable[..., Tensor]
CAUSAL = Causal()


def takes(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function or a module's forward has a parameter of this name."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:  # a builtin function without a signature
        return False
    return any(parameter.name == name for parameter in parameters)


def _name_of(core: Core) -> str:
    return getattr(core, "__name__", type(core).__name__)


def _divides(ranks: int, heads: int, kv_heads: int) -> bool:
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_context(name: str, heads: int, kv_heads: int, core: Core, slicing: Slicing) -> None:
    """Raises ValueError if attention cannot be split over the context ranks.

    Args:
        name: global name of the layer.
        heads: number of query heads per tensor rank.
        kv_heads: number of key/value heads per tensor rank.
        core: the core of the layer.
        slicing: parallel layout.
    """
    context = slicing.context
    u = context.heads.size
    if not _divides(u, heads, kv_heads):
        sizes = [n for n in range(1, u) if context.size % n == 0 and _divides(n, heads, kv_heads)]
        flag = "cp-heads" if isinstance(core, RingCore) else "cp"
        raise ValueError(
            f"{name}: {heads} heads and {kv_heads} key/value heads of a tensor rank cannot be divided over"
            f" {u} context ranks: use --parallel.{flag} {max(sizes)}"
        )
    if context.ring.size > 1 and not isinstance(core, RingCore):
        raise ValueError(f"{name}: {NEEDS_HEADS.format(cp=context.size)}")


class Attention(nn.Module):
    """Self-attention: x [s b h] -> [s b h] (with sequence parallelism both are [s/t b h]).

    t is the number of tensor ranks, tp.

    Args:
        name: global name, the prefix of the parameters' names.
        hidden: hidden width h.
        heads: number of query heads a, a multiple of tp and of `kv_heads`.
        slicing: parallel layout.
        kv_heads: number of key/value heads k, a multiple or a divisor of tp. Default: `heads`.
        head_dim: size d of a head. Default: hidden // heads.
        bias: whether query, key and value have a bias.
        out_bias: whether the output projection has a bias. Default: `bias`.
        rotary: base of the rotary frequencies or a result of `ops.frequencies.frequencies`. None:
            no rotary positions.
        qk_norm: whether every query and key head is normalized by an RMSNorm, as in Qwen3. One
            weight [d] is used for all heads.
        norm_offset: constant added to the weights of the query and key norms.
        sinks: whether every query head has an attention sink (arXiv 2309.17453), as in gpt-oss: a
            learned number, the parameter `name`.sinks [a], which is added to the scores of each
            query like the score of one more key. The value of this key is 0.
        eps: constant added to the mean square in the query and key norms.
        core: function or module that computes attention for this rank's heads over full sequences,
            after norms and rotary positions: q [s b a/t d], k and v [s b k/t d] (a single head if
            k < t) -> [s b a/t d] or [s b (a/t d)]. Default: `Causal`. A core with a custom mask can
            call `attend`. If it has a parameter `documents`, it is called with the documents
            [b s] of the micro-batch, if there are any. With `sinks` it must have a parameter
            `sinks`, the numbers [a/t] of its heads. `slicing.core_heads(a)` returns the global
            indices of the core's heads. Parameters of a core are either sharded by heads, or
            replicated with partial gradients (`slicing.shared(..., partial=True)`).
        std: standard deviation of the initial weights of query, key and value.
        out_std: standard deviation of the initial weights of the output projection.

    Attributes:
        documents: whether the core keeps packed documents apart.

    Raises:
        ValueError: if the heads do not divide evenly, rotary positions would rotate an odd number
            of elements per head, or the core does not support sinks.
    """

    recompute = Recompute()
    context = True

    def __init__(
        self, name: str, hidden: int, heads: int, slicing: Slicing, *, kv_heads: int | None = None,
        head_dim: int | None = None, bias: bool = True, out_bias: bool | None = None, rotary: Theta | None = None,
        qk_norm: bool = False, norm_offset: float = 0.0, eps: float = 1e-5, sinks: bool = False, core: Core = CAUSAL,
        std: float = 0.02, out_std: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        k, d, t = kv_heads or heads, head_dim or hidden // heads, slicing.tp.size
        if heads % t or (k % t and t % k) or heads % k:
            raise ValueError(
                f"{name}: {heads} heads and {k} key/value heads cannot be divided among {t} tensor ranks: use"
                " another --parallel.tp"
            )
        if rotary is not None and rotated_size(rotary, d) % 2:
            raise ValueError(
                f"{name}: heads of size {d}: rotary positions rotate pairs; use head_dim={d + 1}"
            )
        if sinks and not takes(core, "sinks"):
            raise ValueError(
                f"{name}: the core {_name_of(core)} does not support attention sinks: give it a parameter `sinks` ([a]), or"
                " use sinks=False"
            )
        check_context(name, heads // t, max(k // t, 1), core, slicing)
        self.slicing, self.d, self.rotary, self.core = slicing, d, rotary, core
        self.name, self.documents = name, takes(core, "documents")
        self.heads, self.kv_heads = heads // t, max(k // t, 1)
        self.plain = core == CAUSAL and rotary is None and not (qk_norm or sinks) and k == heads
        shared = t // k if k < t else 1
        column = functools.partial(
            ColumnLinear, name, hidden, slicing=slicing, std=std, bias=bias, multiple=d
        )
        query, key_value = [("query", heads * d)], [("key", k * d), ("value", k * d)]
        self.qkv = column(query + key_value) if shared == 1 else None
        if shared > 1:
            self.query = column(query, local=True)
            self.key_value = column(key_value, local=True, shared=shared)
        # A rank normalizes only its own heads, so its gradients of the norms' weights are always
        # partial: they have to be summed over tensor ranks.
        norm = functools.partial(
            RMSNorm, width=d, slicing=slicing, eps=eps, partial=True, offset=norm_offset
        )
        self.query_norm = norm(f"{name}.query_norm") if qk_norm else None
        self.key_norm = norm(f"{name}.key_norm") if qk_norm else None
        numbers = ShardSpec((vector(f"{name}.sinks", heads, slicing.heads(heads)),), decay=False)
        self.sinks = parameter(numbers, (heads // t,)) if sinks else None
        bias = bias if out_bias is None else out_bias
        self.out = RowLinear(
            f"{name}.out", heads * d, hidden, slicing, std=out_std, bias=bias, multiple=d
        )

    def flops(self, tokens: int, seq: int) -> int | None:
        """Returns the FLOPs of the core's forward; masked pairs of positions are counted, too.

        Returns None if the core is a module, or has no method `flops(tokens, seq, heads, size)`.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
        """
        states = None if isinstance(self.core, nn.Module) else getattr(self.core, "flops", None)
        return None if states is None else states(tokens, seq, self.heads, self.d)

    def forward(self, x: Tensor, documents: Tensor | None = None, add_bias: bool = True) -> Tensor:
        """Returns the output, [s b h] (with sequence parallelism [s/t b h]). Collective.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h].
            documents: number of each token's document in the full sequences, int64 [b s], not
                decreasing along s. A token attends only to its own document, in which positions
                begin at 0. Default: each sequence is one document.
            add_bias: whether to add the bias of the output projection; if false, the caller adds it.

        Raises:
            ValueError: if documents are given, and the core does not support them.
        """
        attend: Callable[..., Tensor] = self.heads_attend
        if documents is not None:
            if not self.documents:
                raise ValueError(
                    f"{self.name}: the core {_name_of(self.core)} does not support packed documents: give it a parameter"
                    " `documents` (int64 [b s]), or leave out the batch's 'documents' and --data.packing"
                )
            attend = functools.partial(attend, documents=documents)
        y = self.recompute.run("attention", attend, *self._project(x))
        return self.out(y) if add_bias else self.out(y, add_bias=False)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns (qkv [s b (a+2k)d/t],), or (query, key_value) if ranks share key/value heads."""
        if self.qkv is not None:
            return (self.recompute.column(self.qkv, x),)
        # Under torch.compile collectives are not recomputed, so the gathered x is saved.
        regather = self.slicing.sequence_parallel and not torch.compiler.is_compiling()
        x = (
            self.recompute.run("norm", self.slicing.gather, x)
            if regather
            else self.slicing.gather(x)
        )
        return self.query(x), self.key_value(x)

    def heads_attend(self, *projected: Tensor, documents: Tensor | None = None) -> Tensor:
        """Applies the query and key norms, rotary positions and the core; returns [s b (a/t d)].

        Args:
            projected: the results of `_project`.
            documents: as in `forward`.
        """
        if documents is None and self.plain and self._is_short(projected[0]):
            return short_attention.short_attention(projected[0], self.d)
        q, k, v = self._heads(*projected, documents=documents)
        context, keep = self.slicing.context, self.recompute.keep
        y = context.attend(self.core, q, k, v, documents, self.sinks, keep)
        return y.flatten(2) if y.dim() == 4 else y

    def _is_short(self, qkv: Tensor) -> bool:
        """Returns whether `short_attention` computes the attention of qkv [s b 3ad/t]."""
        saves_all = type(self.recompute) is Recompute and torch.is_grad_enabled()
        return saves_all and self.slicing.context.size == 1 and short_attention.fits(qkv, self.d)

    def _heads(self, *projected: Tensor, documents: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns query [s b a/t d], key and value [s b k/t d], with norms and rotary positions."""
        first, theta = projected[0], self.rotary
        counts = (self.heads, self.kv_heads, self.kv_heads)
        if len(projected) == 1 and documents is None and self._rotates_in_place(first):
            positions = self.slicing.gathered_positions(first)
            return rotary.split_and_rotate(first, counts, self.d, theta or 0.0, positions)
        if len(projected) == 1 and documents is None and theta is not None:
            found = norm_and_rotate(
                (self.query_norm, self.key_norm), first, counts[:2], self.d, theta,
                self.slicing.gathered_positions(first),
            )  # fmt: skip
            if found is not None:
                return found
        *query, rest = (part.view(*part.shape[:2], -1, self.d) for part in projected)
        heads = (*query, *rest.split(counts[len(query) :], dim=2))
        q, k, v = heads
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if theta is not None:
            positions = self.slicing.gathered_positions(q)
            q, k = (rotary.rotate(x, theta, positions, documents) for x in (q, k))
        return q, k, v

    def _rotates_in_place(self, qkv: Tensor) -> bool:
        """Returns whether rotary positions may be applied in place to qkv, the projection's output.

        This is not possible if heads are normalized, if the backward recomputes attention from qkv,
        or if the kernel does not support qkv.
        """
        plain = self.query_norm is None and type(self.recompute) is Recompute
        return self.rotary is not None and plain and rotary.fits(qkv, self.d, self.rotary)
