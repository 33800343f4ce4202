"""A mixture of experts: each token goes to a few of many MLPs, which are divided over ranks.

    mlp = MixtureOfExperts("blocks.0.mlp", hidden=512, ffn=256, experts=64, per_token=4, slicing=slicing)

Each rank routes its own tokens. It sorts a copy of each token per chosen expert by expert, and sends
the copies to the ranks that hold the experts (`layers.dispatch`). These ranks run each expert on its
rows, and send the results back, where they are added with the router's weights, in the order of the
choices. A shared expert runs while rows travel.

The ranks of a pipeline stage, dp × cp × tp, are divided into blocks of ep neighbors (`Slicing.experts`).
Each rank of a block holds experts/ep of the experts, and ranks at the same place in their blocks hold
the same experts. If tensor ranks hold the same tokens, because there is no sequence parallelism, each
one routes its part of them.

On GPUs, kernels choose and weigh the experts, and sort the choices (`ops.router`). The host reads the
numbers of rows once per forward. If one kernel multiplies all groups
(`ops.grouped.in_one_kernel`), it reads nothing with ep 1 or `--experts.room`. A second forward in the
backward (`--recompute.mode full`) uses the choices of the first (`MicroBatch.memo`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.distributed import collectives, conjugate
from threed.distributed.collectives import split
from threed.distributed.sharding import Piece, ShardSpec, matrix, parameter, vector
from threed.distributed.topology import Axis
from threed.layers.dispatch import Limits, Routes, open_routes, within_capacity
from threed.layers.linear import ReplicatedLinear
from threed.layers.mlp import GatedMLP, gated
from threed.layers.recompute import Recompute
from threed.layers.routing import (
    Kernels,
    Losses,
    LossFactors,
    Routing,
    gates,
    gates_by_kernel,
    losses,
    rule_of,
)
from threed.layers.slicing import Flag, MicroBatch, Slicing, Tally, for_autograd, sink_of
from threed.ops import grouped, router
from threed.ops.grouped import Groups
from threed.ops.matmul import WIDE
from threed.ops.positions import Positions
from threed.ops.router import Rule, Sorted

SOFTMAX, NO_LOSSES, NO_LIMITS = Routing(), LossFactors(), Limits()


@dataclass(frozen=True, eq=False)
class Choices:
    """The experts of a rank's tokens, n tokens with k experts each.

    Attributes:
        experts: the experts of each token, [... k].
        counts: number of this rank's tokens per expert, including those dropped: [e].
        chosen: number of tokens of each full sequence that chose an expert, [b e]; None without an
            auxiliary loss.
        share: factor that turns `chosen` into `shares` of `routing.losses`.
        routes: the rows that travel.
        excess: gradient of the biases, if a kernel computed it, [e].
    """

    experts: Tensor
    counts: Tensor
    chosen: Tensor | None
    share: float
    routes: Routes
    excess: Tensor | None = None


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

    Attributes:
        assumed_load: on the meta device, the number of rows that this rank receives, divided by the
            mean over expert ranks.

    Raises:
        ValueError: if the experts cannot be divided over the ranks or into the groups, or fewer
            experts exist than a token needs.
    """

    recompute = Recompute()
    context = True
    assumed_load = 1.0

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
        self.limits, self.data_flags = NO_LIMITS, tuple[Flag, ...]()
        self.tallies = Tally(), Tally()  # of loads, and of losses
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

    def set_limits(self, limits: Limits) -> None:
        """Sets the limits of the rows of experts. With a room, rows that do not fit set a flag."""
        self.limits = limits
        self.data_flags = (
            (Flag(f"{self.name}: more rows for an expert rank than --experts.room", error=False),)
            if limits.room
            else ()
        )

    def set_room(self, room: float) -> None:
        """Replaces the room of this layer (`Limits.room`), which must have one, by another one."""
        self.limits = self.limits._replace(room=room)

    def assume_load(self, load: float) -> None:
        """Sets `assumed_load` to `load`."""
        self.assumed_load = load

    def take_sums(self) -> Tensor | None:
        """Returns sums over this rank's tokens since the last call, fp64 [e + 2]; None without tokens.

        The sums are the number of tokens per expert, and both losses of the router without their
        coefficients. Sums over all ranks of a pipeline stage describe the step.
        """
        loads, sums = (tally.take() for tally in self.tallies)
        return (
            loads
            if loads is None
            else torch.cat((loads, loads.new_zeros(2) if sums is None else sums))
        )

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
        weights, choices = self._routed(own, logits, micro, divided)
        y, shared = self._run(own, weights, choices.routes, x)
        y = conjugate.join_parts(y, tp) if divided else y
        return y if shared is None else y + shared

    def _routed(
        self, x: Tensor, logits: Tensor, micro: MicroBatch, divided: bool
    ) -> tuple[Tensor, Choices]:
        """Returns the weights and choices of tokens x [n b h] with logits [n b e]. Collective."""
        factors = self.losses if micro.training and micro.weight is not None else NO_LOSSES
        rule = rule_of(self.routing, self.per_token, factors)
        capacity = micro.training and self.limits.capacity
        if rule is not None and not capacity and router.fits(x, logits, self.bias, rule):
            return self._by_kernels(x, logits, micro, divided, rule, factors)
        fixed = logits.detach()
        scores = self.routing.scores(fixed) if self.routing.needs_scores else fixed

        def choose() -> Choices:
            experts = self.routing.choose(scores, self.bias, self.per_token)
            return self._new_choices(x, experts, scores, micro, divided)

        choices = self._choices(micro, choose)
        found, bias, excess = Losses(), None, None
        if any(factors) and micro.weight is not None:
            chosen = choices.chosen
            shares = None if chosen is None else chosen * choices.share
            found, sums = losses(factors, self.routing, fixed, shares, micro.weight)
            if torch.is_grad_enabled():  # not in the first of two forwards
                self.tallies[1].add(sums)
        if micro.training and self.bias is not None:
            # times the number of experts, so that it is an integer, and its sum exact in any order
            total = choices.experts.numel()
            excess = torch.rsub(choices.counts, -total, alpha=-self.experts).to(self.bias.dtype)
            bias = self.bias
        return gates(self.routing, logits, scores, choices.experts, found, bias, excess), choices

    def _by_kernels(
        self, x: Tensor, logits: Tensor, micro: MicroBatch, divided: bool, rule: Rule,
        factors: LossFactors,
    ) -> tuple[Tensor, Choices]:  # fmt: skip
        """As `_routed`, by kernels (`ops.router`), with weights in bf16. Collective.

        Args:
            x: [n b h].
            logits: [n b e].
            micro: the micro-batch.
            divided: whether tensor ranks route a part of the same tokens each.
            rule: how experts are chosen and weighed.
            factors: the coefficients of the losses; 0 for losses that are not trained.
        """
        known = None if micro.memo is None else micro.memo.get(self.name)
        given = None if known is None else known.experts
        summed = any(factors) and torch.is_grad_enabled()  # not in the first of two forwards
        with torch.no_grad():
            found = router.route(logits, self.bias, given, summed, *rule)
        experts, weights, counts, sums = found

        def choose() -> Choices:
            ordered = router.sort(experts, counts)
            return self._new_choices(x, experts, logits, micro, divided, ordered)

        choices = self._choices(micro, choose)
        if summed:
            self.tallies[1].add(router.losses(sums, choices.chosen, choices.share))
        by = Kernels(
            rule, factors, choices.chosen, choices.share, micro.weight if any(factors) else None
        )
        bias = self.bias if micro.training else None
        excess = None if bias is None else choices.excess
        return gates_by_kernel(logits, weights, choices.experts, by, bias, excess), choices

    def _choices(self, micro: MicroBatch, choose: Callable[[], Choices]) -> Choices:
        """Returns the choices of the first forward, or new ones."""
        if micro.memo is not None and self.name in micro.memo:
            return micro.memo.pop(self.name)
        with torch.no_grad():
            choices = choose()
        if micro.memo is not None:
            micro.memo[self.name] = choices
        return choices

    def _new_choices(
        self, x: Tensor, experts: Tensor, scores: Tensor, micro: MicroBatch, divided: bool,
        ordered: Sorted | None = None,
    ) -> Choices:  # fmt: skip
        """Returns the choices of this rank's tokens x [n b h]. Collective.

        Args:
            x: the tokens.
            experts: the experts of each token, [n b k].
            scores: [n b e].
            micro: the micro-batch.
            divided: whether tensor ranks route a part of the same tokens each.
            ordered: the choices, sorted by expert; None to sort them.
        """
        one_kernel = all(grouped.in_one_kernel(x, w) for w in (self.gate_up, self.down))
        room, capacity = self.limits if micro.training else NO_LIMITS
        aux, share = micro.training and bool(self.losses.aux), 0.0
        chosen = None if ordered is None or not aux else ordered.chosen
        one_hot = kept = None
        if ordered is None and (capacity or aux):
            one_hot = torch.zeros_like(scores).scatter_(-1, experts, 1.0)
        if one_hot is not None and capacity:
            kept = self._kept(one_hot, experts, capacity, divided)
        routes, counts, overflow = open_routes(
            experts, self.experts, self.axis, room=room, one_kernel=one_kernel, kept=kept,
            ordered=ordered, assumed_load=self.assumed_load,
        )  # fmt: skip
        if overflow is not None:
            self.data_flags[0].note(overflow)
        if one_hot is not None and kept is not None:
            counts = one_hot.sum((0, 1))
        if micro.training:
            self.tallies[0].add(counts)
        if one_hot is not None and aux:
            chosen = one_hot.sum(0)
        if chosen is not None:
            chosen, share = self._of_full_sequences(chosen, len(scores), divided)
        excess = None if ordered is None else ordered.excess
        return Choices(experts, counts, chosen, share, routes, excess)

    def _sequence_axes(self, divided: bool) -> list[Axis]:
        """Returns the axes of the ranks that route other parts of this rank's sequences."""
        tp = [self.slicing.tp] if divided or self.slicing.sequence_parallel else []
        return [self.slicing.context.axis, *tp]

    def _of_full_sequences(
        self, chosen: Tensor, length: int, divided: bool
    ) -> tuple[Tensor, float]:
        """Returns `Choices.chosen`, and `share`. Collective over the ranks of a sequence's parts.

        Args:
            chosen: number of this rank's tokens of each sequence that chose an expert, [b e].
            length: number of this rank's tokens of a sequence.
            divided: whether tensor ranks route a part of the same tokens each.
        """
        for axis in self._sequence_axes(divided):
            chosen, length = collectives.all_reduce(chosen, axis), length * axis.size
        return chosen, self.experts / (self.per_token * length)

    def _kept(self, chosen: Tensor, experts: Tensor, capacity: float, divided: bool) -> Tensor:
        """Returns whether a choice is within the capacity of its expert, [n b k]. Collective."""
        axes, positions = self._sequence_axes(divided), self.slicing.context.positions
        length = len(chosen) * math.prod(axis.size for axis in axes)
        own, parts = positions(length), self.slicing.context.multiple
        for axis in axes[1:]:  # the tensor ranks
            own, parts = own.part(axis.size, axis.index), parts * axis.size
        parts = length if length % parts else parts  # then each position is a part
        size = length // parts
        own = Positions(tuple((first // size, last // size) for first, last in own.ranges), parts)
        limit = math.ceil(capacity * self.per_token * length / self.experts)
        return within_capacity(chosen, experts, limit, own, axes)

    def _run(
        self, x: Tensor, weights: Tensor, routes: Routes, shared_x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the weighted sum of each token's experts, and the shared expert's output. Collective.

        The shared expert runs while rows travel: its first product on their way to the experts, the
        second one on the way back.

        Args:
            x: [n b h].
            weights: [n b k].
            routes: routes of these tokens.
            shared_x: input of the shared expert.
        """
        rows = routes.take(x.flatten(0, -2))  # before the host waits for the sizes
        arrival = routes.arrival
        to, back = (
            conjugate.Exchange(self.axis, *sizes)
            for sizes in (arrival.sizes[:2], arrival.sizes[1::-1])
        )
        rows = to.start(rows)
        finish = None if self.shared is None else self.shared.start(shared_x)
        rows = arrival.sorted(to.wait(rows))
        groups = arrival.groups
        inner = _with_biases(_product(rows, self.gate_up, groups), self.gate_up_bias, groups)
        inner = self.recompute.run("activation", self._activate, inner)
        rows = _with_biases(_product(inner, self.down, groups), self.down_bias, groups)
        rows = arrival.unsorted(rows)
        rows = back.start(rows)
        shared = None if finish is None else finish()
        y = routes.combine(back.wait(rows), weights.flatten(0, -2))
        return y.view_as(x), shared

    def _activate(self, gate_up: Tensor) -> Tensor:
        return gated(self.activation, gate_up)


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
    return _Product.apply(x, weights, groups, *for_autograd(x, weights))


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
    return _AddBiases.apply(y, biases, groups, *for_autograd(y, biases))
