"""Multi-head latent attention, with heads sharded over tensor ranks.

See DeepSeek-V2, arXiv 2405.04434, section 2.1. The keys and values of all heads are computed from
one small vector per position, the latent vector. Queries are computed from the input, or from
another latent vector. The first `nope_dim` elements of a query or key head have no rotary
positions. Its last `rope_dim` elements have them; for keys, these elements are shared by all heads.

    x [h] -> query_down -> query_norm -> query_up ------------> query [a (nope + rope)]
    x [h] -> kv_down -> latent [rank] -> kv_norm -> kv_up ----> key and value [a (nope + value)]
                     -> rotary key [rope]

The projections to latent vectors are small and replicated over tensor ranks. With sequence
parallelism each rank applies them to its own positions. The latent vectors are gathered, and x only
if queries are computed from x.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from threed.layers.attention import check_context
from threed.layers.linear import ColumnLinear, ReplicatedLinear, RowLinear
from threed.layers.norm import RMSNorm
from threed.layers.recompute import Recompute
from threed.layers.slicing import Slicing
from threed.ops import rotary
from threed.ops.attention import Causal
from threed.ops.frequencies import Theta, mscale_of, rotated_size


class LatentAttention(nn.Module):
    """Causal latent attention: x [s b h] -> [s b h] (with sequence parallelism both [s/t b h]).

    t is the number of tensor ranks, tp. The global names of the weights are `name` and query (or
    query_down, query_norm and query_up), kv_down, kv_norm, kv_up and out. Rows of kv_up are
    grouped by heads: the `nope_dim` rows of a head's key, then the `value_dim` rows of its value.

    Args:
        name: global name, the prefix of the parameters' names.
        hidden: hidden width h.
        heads: number of heads a, a multiple of tp.
        slicing: parallel layout.
        kv_rank: size of the latent vector of keys and values.
        nope_dim: number of elements of a query or key head without rotary positions.
        rope_dim: number of elements of a query or key head with rotary positions.
        value_dim: size of a value head.
        rotary: base of the rotary frequencies, or the result of `ops.frequencies.frequencies` for
            heads of size `rope_dim`. If its scaling has `mscale_all_dim`, the scores are multiplied
            by the square of that mscale, as in DeepSeek-V2 and V3.
        query_rank: size of the latent vector of queries. Default: queries are computed from x.
        interleaved: whether the elements of a rotated pair are neighbors in a head, as in DeepSeek;
            otherwise element i of the first half is paired with element i of the second half.
        bias: whether the projections to latent vectors and the output projection have a bias.
        eps: constant added to the mean square in the norms of latent vectors.
        std: standard deviation of the initial weights of all projections but the last.
        out_std: standard deviation of the initial weights of the output projection.

    Raises:
        ValueError: if the heads do not divide evenly, or `rotary` does not rotate pairs of all
            `rope_dim` elements.
    """

    recompute = Recompute()
    context = True

    def __init__(
        self, name: str, hidden: int, heads: int, slicing: Slicing, *, kv_rank: int, nope_dim: int, rope_dim: int,
        value_dim: int, rotary: Theta, query_rank: int | None = None, interleaved: bool = True, bias: bool = False,
        eps: float = 1e-6, std: float = 0.02, out_std: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        t, size, mscale = slicing.tp.size, nope_dim + rope_dim, mscale_of(rotary)
        self.core = Causal(scale=None if mscale == 1.0 else size**-0.5 * mscale * mscale)
        if heads % t:
            raise ValueError(
                f"{name}: {heads} heads cannot be divided over tp {t}: use another --parallel.tp"
            )
        if rope_dim % 2 or rotated_size(rotary, rope_dim) != rope_dim:
            raise ValueError(
                f"{name}: rotary positions must rotate pairs of all {rope_dim} elements of rope_dim: use an even"
                " rope_dim, and rotary=frequencies(theta, rope_dim)"
            )
        check_context(name, heads // t, heads // t, self.core, slicing)
        self.slicing, self.rotary, self.interleaved = slicing, rotary, interleaved
        self.heads, self.kv_rank, self.value_dim = heads // t, kv_rank, value_dim
        self.nope_dim, self.rope_dim = nope_dim, rope_dim
        column = functools.partial(ColumnLinear, name, slicing=slicing, std=std, bias=False)
        down = functools.partial(ReplicatedLinear, slicing=slicing, std=std, bias=bias)
        norm = functools.partial(RMSNorm, slicing=slicing, eps=eps)
        self.query_down = down(f"{name}.query_down", hidden, query_rank) if query_rank else None
        self.query_norm = norm(f"{name}.query_norm", query_rank) if query_rank else None
        query = ("query_up" if query_rank else "query", heads * size)
        self.query = column(query_rank or hidden, [query], multiple=size)
        self.kv_down = down(f"{name}.kv_down", hidden, kv_rank + rope_dim)
        self.kv_norm = norm(f"{name}.kv_norm", kv_rank)
        part = nope_dim + value_dim
        self.kv_up = column(kv_rank, [("kv_up", heads * part)], multiple=part, local=True)
        self.out = RowLinear(
            f"{name}.out", heads * value_dim, hidden, slicing, std=out_std, bias=bias, multiple=value_dim
        )  # fmt: skip

    def flops(self, tokens: int, seq: int) -> int:
        """Returns the FLOPs of the scores and of the sums of values; masked pairs are counted, too.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
        """
        return 2 * tokens * seq * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Returns the output, [s b h] (with sequence parallelism [s/t b h]). Collective.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h].
            documents: number of each token's document in the full sequences, int64 [b s], not
                decreasing along s. A token attends only to its own document, in which positions
                begin at 0. Default: each sequence is one document.
        """
        query = self._query(x)
        latent, key = self._latent(x).split([self.kv_rank, self.rope_dim], -1)
        attend = functools.partial(self.heads_attend, documents=documents)
        return self.out(self.recompute.run("attention", attend, query, self.kv_up(latent), key))

    def _query(self, x: Tensor) -> Tensor:
        """Returns the queries of this rank's heads, [s b (a/t d)]. Collective."""
        if self.query_down is not None and self.query_norm is not None:
            x = self.recompute.run("norm", self.query_norm, self.query_down(x))
        return self.recompute.column(self.query, x)

    def _latent(self, x: Tensor) -> Tensor:
        """Returns normalized latent vectors and rotary keys, [s b (rank + rope)]. Collective.

        Each rank uses both for its own heads only. Therefore f, which sums their gradients over
        tensor ranks, comes after the norm.
        """
        small = self.kv_down(x)
        if torch.compiler.is_compiling():  # compiled graphs do not recompute collectives
            return self.slicing.gather(self.recompute.run("norm", self._normed, small))
        return self.recompute.run("norm", lambda y: self.slicing.gather(self._normed(y)), small)

    def _normed(self, small: Tensor) -> Tensor:
        latent, key = small.split([self.kv_rank, self.rope_dim], -1)
        return torch.cat((self.kv_norm(latent), key), -1)

    def heads_attend(
        self, query: Tensor, keys_values: Tensor, key: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Applies rotary positions and attention of this rank's heads; returns [s b (a/t value)].

        Args:
            query: [s b (a/t (nope + rope))].
            keys_values: the result of `kv_up`, [s b (a/t (nope + value))].
            key: the rotary key of all heads, before the rotation, [s b rope].
            documents: as in `forward`.
        """
        q, q_rope = query.unflatten(-1, (self.heads, -1)).split([self.nope_dim, self.rope_dim], -1)
        k, v = keys_values.unflatten(-1, (self.heads, -1)).split(
            [self.nope_dim, self.value_dim], -1
        )
        positions = self.slicing.gathered_positions(query)
        q_rope, k_rope = (
            rotary.rotate(x, self.rotary, positions, documents, interleaved=self.interleaved)
            for x in (q_rope, key.unsqueeze(2))
        )
        q = torch.cat((q, q_rope), -1)
        k = torch.cat((k, k_rope.expand(-1, -1, self.heads, -1)), -1)
        context, keep = self.slicing.context, self.recompute.keep
        y = context.attend(self.core, q, k, v, documents, keep=keep)
        return y.flatten(2) if y.dim() == 4 else y
