"""A mixture of experts: each token goes to a few of many MLPs, which are divided over ranks.

    mlp = MixtureOfExperts("blocks.0.mlp", hidden=512, ffn=256, experts=64, per_token=4, slicing=slicing)

Each rank routes its own tokens. It sorts a copy of each token per chosen expert by expert, and sends
the copies to the ranks that hold the experts (all-to-all with exact sizes). These ranks run each
expert on its rows, and send the results back, where they are added with the router's weights, in the
order of the choices. No token is dropped.

The ranks of a pipeline stage, dp × cp × tp, are divided into blocks of ep neighbors (`Slicing.experts`).
Each rank of a block holds experts/ep of the experts, and ranks at the same place in their blocks hold
the same experts. If tensor ranks hold the same tokens, because there is no sequence parallelism, each
one routes its part of them.

The host reads the numbers of rows once per forward; not if ep is 1 and a GPU computes in 16 bits. A second forward in the
backward (`--recompute.mode full`) uses the choices of the first (`MicroBatch.memo`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.distributed import collectives, conjugate
from threed.distributed.collectives import split
from threed.distributed.sharding import Piece, ShardSpec, matrix, parameter, vector
from threed.layers.linear import ReplicatedLinear
from threed.layers.mlp import GatedMLP, gated
from threed.layers.recompute import Recompute
from threed.layers.routing import LossFactors, Routing, WithGradients, losses
from threed.layers.slicing import MicroBatch, Slicing, for_autograd, sink_of
from threed.ops import grouped
from threed.ops.grouped import Groups
from threed.ops.matmul import WIDE

SOFTMAX, NO_LOSSES = Routing(), LossFactors()


class Sizes(NamedTuple):
    """Numbers of rows, on the host.

    Attributes:
        sends: for each expert rank.
        receives: from each expert rank.
        groups: for each expert of this rank; empty if no one needs them.
    """

    sends: list[int]
    receives: list[int]
    groups: list[int]


@dataclass(frozen=True, eq=False)
class Routes:
    """Where the tokens of a rank go, n tokens with k experts each.

    Attributes:
        experts: the experts of each token, [... k].
        order: the choices, numbered token · k + choice, sorted by expert: int64 [n k].
        place: the inverse of `order`: the row of each choice.
        counts: number of this rank's tokens per expert, int64 [e].
        shares: see `routing.losses`.
        sizes: the numbers of rows that travel.
        groups: the rows of each expert of this rank.
        by_expert: the received rows, sorted by expert: int64 [m]; None if they arrive in this order.
        back: the inverse of `by_expert`, or None.
    """

    experts: Tensor
    order: Tensor
    place: Tensor
    counts: Tensor
    shares: Tensor | None
    sizes: Sizes
    groups: Groups
    by_expert: Tensor | None
    back: Tensor | None


class MixtureOfExperts(nn.Module):
    """A router and gated MLPs, of which a few run for each token: x [s b h] -> [s b h].

    With sequence parallelism x is [s/t b h]. The parameters are named as in files of Hugging Face,
    one by one: `name`.router.weight, `name`.experts.3.gate.weight, and so on. The losses of the router
    are added to the gradients, not to the loss that is returned.

    Args:
        name: global name, the prefix of the parameters' names.
        hidden: hidden width h.
        ffn: number of inner features of an expert.
        experts: number of experts, a multiple of the number of expert ranks.
        per_token: number of experts that run for a token.
        slicing: parallel layout.
        routing: how experts are chosen. Default: softmax, with normalized weights.
        shared_ffn: number of inner features of an MLP that runs for every token; 0: none.
        losses: coefficients of the router's losses, which `--experts.aux-loss` and
            `--experts.z-loss` replace.
        biases: whether the router and all MLPs have biases. The biases of an expert are added before
            its output is weighted.
        activation: activation of the gates, or `layers.clamped_swiglu`.
        std: standard deviation of the initial weights of router, gates and `up`.
        out_std: standard deviation of the initial weights of `down`.

    Raises:
        ValueError: if the experts cannot be divided over the ranks or into the groups, or fewer
            experts exist than a token needs.
    """

    recompute = Recompute()
    context = True

    def __init__(
        self, name: str, hidden: int, ffn: int, experts: int, per_token: int, slicing: Slicing, *,
        routing: Routing = SOFTMAX, shared_ffn: int = 0, losses: LossFactors = NO_LOSSES,
        biases: bool = False, activation: Callable[[Tensor], Tensor] = F.silu, std: float = 0.02,
        out_std: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__()
        axis, over = slicing.experts.axis, slicing.experts.over
        _check(name, experts, per_token, routing, axis.size)
        self.name, self.slicing, self.axis, self.routing = name, slicing, axis, routing
        self.experts, self.per_token, self.losses = experts, per_token, losses
        self.activation = activation
        self._sums: Tensor | None = None
        # each tensor rank routes its own tokens, so gradients of the router are partial
        self.router = _Router(
            f"{name}.router", hidden, experts, slicing, tiles=1, std=std, bias=biases, partial=True
        )
        self.bias: nn.Parameter | None = None
        if routing.bias:
            spec = slicing.shared(vector(f"{name}.router.balance", experts), partial=True)
            self.bias = parameter(replace(spec, rule="balance"), (experts,))
        own, numel = range(*split(experts, axis.size, axis.index)), ffn * hidden
        up, down = [], []
        for i, expert in enumerate(own):
            prefix = f"{name}.experts.{expert}"
            for j, part in enumerate(("gate", "up")):
                at = (2 * i + j) * numel
                up.append(matrix(f"{prefix}.{part}.weight", (ffn, hidden), 0, (0, ffn), std, at))
            shape = (hidden, ffn)
            down.append(matrix(f"{prefix}.down.weight", shape, 0, (0, hidden), out_std, i * numel))
        alike = None if over else slicing.replicated  # without expert ranks, tensor ranks hold all
        self.gate_up = parameter(
            ShardSpec(tuple(up), alike, alike, over=over), (len(own), 2 * ffn, hidden)
        )
        self.down = parameter(
            ShardSpec(tuple(down), alike, alike, over=over), (len(own), hidden, ffn)
        )
        self.gate_up_bias = _biases(up, (len(own), 2 * ffn), alike, over) if biases else None
        self.down_bias = _biases(down, (len(own), hidden), alike, over) if biases else None
        self.shared = (
            GatedMLP(
                f"{name}.shared", hidden, shared_ffn, slicing, bias=biases, std=std, out_std=out_std,
                activation=activation,
            ) if shared_ffn else None
        )  # fmt: skip

    def set_losses(self, losses: LossFactors) -> None:
        """Sets the coefficients of the router's losses."""
        self.losses = losses

    def take_sums(self) -> Tensor | None:
        """Returns sums over this rank's tokens since the last call, fp64 [e + 2]; None without tokens.

        The sums are the number of tokens per expert, and both losses of the router without their
        coefficients. Sums over all ranks of a pipeline stage describe the step.
        """
        sums, self._sums = self._sums, None
        return sums

    def _add(self, first: int, values: Tensor) -> None:
        """Adds values to the sums that begin with number `first`."""
        if self._sums is None:
            self._sums = torch.zeros(self.experts + 2, dtype=torch.float64, device=values.device)
        self._sums[first : first + len(values)] += values

    def flops(self, tokens: int, seq: int) -> int:
        """Returns the FLOPs of this rank's experts in a forward, if all have equally many tokens.

        Args:
            tokens: number of tokens of the micro-batch.
            seq: sequence length.
        """
        _, inner, hidden = self.gate_up.shape
        return 3 * inner * hidden * tokens * self.per_token // self.slicing.tp.size

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Returns the weighted sum of the experts' outputs. Collective.

        Args:
            x: [s b h]; with sequence parallelism [s/t b h].
            micro: the micro-batch; its weight multiplies the router's losses.

        Raises:
            ValueError: if the tokens of a training step cannot be divided over tensor ranks.
        """
        tp = self.slicing.tp
        same = tp.size > 1 and not self.slicing.sequence_parallel  # x is equal on all tensor ranks
        divided = same and len(x) % tp.size == 0
        if micro.training and same and not divided:
            raise ValueError(
                f"{self.name}: a sequence of {len(x)} tokens cannot be divided over tp {tp.size}, whose ranks route a"
                " part each: pad the batch"
            )
        own = conjugate.part_of(x, tp) if divided else x
        logits = self.router(own)
        scores = self.routing.scores(logits)
        routes = self._routes(own, scores, micro, divided)
        y = self._run(own, self.routing.weights(logits, scores, routes.experts), routes)
        y = self._with_gradients(y, logits, scores, routes, micro)
        y = conjugate.join_parts(y, tp) if divided else y
        return y if self.shared is None else y + self.shared(x)

    def _routes(self, x: Tensor, scores: Tensor, micro: MicroBatch, divided: bool) -> Routes:
        """Returns the routes of this rank's tokens x [n b h] with scores [n b e]. Collective."""
        if micro.memo is not None and self.name in micro.memo:
            found: Routes = micro.memo.pop(self.name)
            return found
        with torch.no_grad():
            routes = self._new_routes(x, scores, micro, divided)
        if micro.memo is not None:
            micro.memo[self.name] = routes
        return routes

    def _new_routes(self, x: Tensor, scores: Tensor, micro: MicroBatch, divided: bool) -> Routes:
        axis, device = self.axis, scores.device
        experts = self.routing.choose(scores, self.bias, self.per_token)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        shares = None
        if micro.training:
            self._add(0, counts)
            if self.losses.aux:
                shares = self._shares(experts, scores, divided)
        sent = counts.view(axis.size, -1)  # [ep e/ep]
        received = collectives.all_to_all(sent, axis)
        one_kernel = [grouped.in_one_kernel(x, weights) for weights in (self.gate_up, self.down)]
        if axis.size == 1 and all(one_kernel):
            sizes = Sizes([len(order)], [len(order)], [])  # no other size is needed on the host
        else:
            sizes = read_sizes(sent, received, len(order))
        by_expert = back = None
        if axis.size > 1:
            by_expert = _by_expert(received, sum(sizes.receives))
            back = _inverse(by_expert)
        ends = received.sum(0).cumsum(0).to(torch.int32)
        rows = sizes, Groups(ends, sizes.groups), by_expert, back
        return Routes(experts, order, _inverse(order), counts, shares, *rows)

    def _shares(self, experts: Tensor, scores: Tensor, divided: bool) -> Tensor:
        """Returns the share of the choices of each sequence that each expert gets, [b e].

        It is relative to an equal share. Collective over the ranks that hold parts of a sequence.
        """
        chosen = torch.zeros_like(scores).scatter_(-1, experts, 1.0).sum(0)
        axes = [self.slicing.context.axis]
        axes += [self.slicing.tp] if divided or self.slicing.sequence_parallel else []
        length = len(scores)
        for axis in axes:
            chosen, length = collectives.all_reduce(chosen, axis), length * axis.size
        return chosen * (self.experts / (self.per_token * length))

    def _run(self, x: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts. Collective.

        Args:
            x: [n b h].
            weights: [n b k].
            routes: routes of these tokens.
        """
        k, order, place = self.per_token, routes.order, routes.place
        rows = _Take.apply(x.flatten(0, -2), order // k, place, k)
        rows = conjugate.exchange_rows(rows, self.axis, routes.sizes.sends, routes.sizes.receives)
        by_expert, back = routes.by_expert, routes.back
        if by_expert is not None:
            rows = _Take.apply(rows, by_expert, back, 1)
        inner = _product(rows, self.gate_up, routes.groups)
        inner = _with_biases(inner, self.gate_up_bias, routes.groups)
        inner = self.recompute.run("activation", self._activate, inner)
        rows = _product(inner, self.down, routes.groups)
        rows = _with_biases(rows, self.down_bias, routes.groups)
        if by_expert is not None:
            rows = _Take.apply(rows, back, by_expert, 1)
        rows = conjugate.exchange_rows(rows, self.axis, routes.sizes.receives, routes.sizes.sends)
        outputs = _Take.apply(rows, place, order, 1).view(*weights.shape, -1)
        return (outputs * weights.unsqueeze(-1).to(outputs.dtype)).sum(-2)

    def _activate(self, gate_up: Tensor) -> Tensor:
        return gated(self.activation, gate_up)

    def _with_gradients(
        self, y: Tensor, logits: Tensor, scores: Tensor, routes: Routes, micro: MicroBatch
    ) -> Tensor:
        """Returns y; its backward starts the gradients of the losses and of the bias."""
        if not micro.training:
            return y
        loss = excess = None
        if any(self.losses) and micro.weight is not None:
            loss, sums = losses(self.losses, logits, scores, routes.shares, micro.weight)
            if torch.is_grad_enabled():  # not in the first of two forwards
                self._add(self.experts, sums)
        if self.bias is not None:
            excess = routes.counts.to(self.bias.dtype) - routes.order.numel() / self.experts
        if loss is None and excess is None:
            return y
        out: Tensor = WithGradients.apply(y, loss, self.bias, excess)
        return out


def read_sizes(sent: Tensor, received: Tensor, total: int) -> Sizes:
    """Reads the numbers of rows that travel. The host waits for the device, unless it is "meta".

    On the meta device, all experts get equally many rows.

    Args:
        sent: number of this rank's rows for each rank and expert, [ep e/ep].
        received: number of rows from each rank for each expert of this rank, [ep e/ep].
        total: number of rows of this rank.
    """
    if sent.is_meta:
        return even_sizes(len(sent), sent.shape[1], total)
    ranks = len(sent)
    numbers = torch.cat((sent.sum(1), received.sum(1), received.sum(0))).cpu().tolist()
    return Sizes(numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :])


def even_sizes(ranks: int, own: int, total: int) -> Sizes:
    """Returns the numbers of rows if all experts get equally many.

    Args:
        ranks: number of expert ranks.
        own: number of experts per rank.
        total: number of rows of this rank.
    """

    def parts(number: int, count: int) -> list[int]:
        ends = [split(number, count, i) for i in range(count)]
        return [stop - start for start, stop in ends]

    each = parts(total, ranks)
    return Sizes(each, each, parts(sum(each), own))


def _by_expert(received: Tensor, total: int) -> Tensor:
    """Returns the received rows, which are sorted by rank and expert, sorted by expert: int64 [m]."""
    rows = torch.arange(total, device=received.device)
    segments = torch.searchsorted(received.flatten().cumsum(0), rows, right=True)
    return (segments % received.shape[1]).argsort(stable=True)


def _inverse(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation, int64 [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _biases(
    weights: list[Piece], shape: tuple[int, int], alike: str | None, over: str | None
) -> nn.Parameter:
    """Returns the biases of the experts' matrices, [e/ep out]: one vector per matrix."""
    pieces = list[Piece]()
    for weight in weights:
        name, at = weight.name.replace(".weight", ".bias"), sum(piece.numel for piece in pieces)
        pieces.append(vector(name, weight.shape[0], offset=at))
    return parameter(ShardSpec(tuple(pieces), alike, alike, decay=False, over=over), shape)


class _Router(ReplicatedLinear):
    """Computes logits in fp32 at least."""

    matmul = WIDE


def _check(name: str, experts: int, per_token: int, routing: Routing, ranks: int) -> None:
    if per_token > experts:
        raise ValueError(f"{name}: {per_token} experts per token, but only {experts} experts")
    if experts % ranks:
        raise ValueError(
            f"{name}: {experts} experts cannot be divided over --parallel.ep {ranks}: it must divide them"
        )
    if experts % routing.groups:
        raise ValueError(
            f"{name}: {experts} experts cannot be divided into {routing.groups} groups"
        )
    if per_token > experts // routing.groups * routing.groups_per_token:
        raise ValueError(
            f"{name}: {routing.groups_per_token} of {routing.groups} groups have fewer than {per_token} experts"
        )


class _Take(torch.autograd.Function):
    """Returns x[index]: x [n h] -> [m h].

    inverse: the rows of the result that are copies of row 0 of x, then of row 1, and so on; each row
        of x has `copies` copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.inverse, ctx.copies = inverse, copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        dx = dy.index_select(0, ctx.inverse)
        return dx if ctx.copies == 1 else dx.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class _Product(torch.autograd.Function):
    """Multiplies the rows of each expert by its matrix: x [n in], weights [e out in] -> [n out].

    tracked: the weights, as in `layers.linear._Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, groups: Groups, tracked: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.param, ctx.groups = weights, groups
        return grouped.product(x, weights, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weights), param, groups = ctx.saved_tensors, ctx.param, ctx.groups
        if torch.is_grad_enabled():
            raise RuntimeError("torch.autograd.grad with create_graph=True, through experts")
        dy, dw = dy.contiguous(), None
        dx = (
            grouped.product(dy, weights.transpose(1, 2), groups)
            if ctx.needs_input_grad[0]
            else None
        )
        if param.requires_grad:
            sink = sink_of(param)
            if sink is None:
                dw = torch.empty_like(weights)
                grouped.add_products_(dw, dy, x, groups, fresh=True)
            else:
                sink.add_groups(dy, x, groups)
        return dx, None, None, dw


def _product(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    y: Tensor = _Product.apply(x, weights, groups, *for_autograd(x, weights))
    return y


class _AddBiases(torch.autograd.Function):
    """Adds the bias of its expert to each row: y [n out], biases [e out] -> [n out].

    tracked: the biases, as in `layers.linear._Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, biases: Tensor, groups: Groups, tracked: Tensor | None
    ) -> Tensor:
        ctx.param, ctx.groups = biases, groups
        return y + biases.index_select(0, grouped.group_of_rows(groups, len(y)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        biases = ctx.param
        if not biases.requires_grad:
            return dy, None, None, None
        db, sink = grouped.sums(dy.contiguous(), ctx.groups), sink_of(biases)
        if sink is None:
            return dy, None, None, db
        sink.add(db)
        return dy, None, None, None


def _with_biases(y: Tensor, biases: Tensor | None, groups: Groups) -> Tensor:
    if biases is None:
        return y
    out: Tensor = _AddBiases.apply(y, biases, groups, *for_autograd(y, biases))
    return out
