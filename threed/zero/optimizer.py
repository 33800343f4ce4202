"""The ZeRO optimizer (arXiv 1910.02054): each rank updates the slices it owns and gathers the rest.

    step(slices, carry) :  norm over everything -> clip factor and skip flag -> bucket by bucket: the rule (AdamW, SGD,
                           Lion) on the slice, the slice to the parameters, their gather begun

Nothing here reads a tensor's value on the host: norm, clip factor, skip flag, loss scale and learning rate stay
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed import collectives
from threed.ops.update import Moment, Rule
from threed.precision import LossScale, Scaler
from threed.topology import Axis
from threed.zero.gather import Gatherer
from threed.zero.layout import Bucket, Layout
from threed.zero.norm import sum_of_squares


@dataclass(eq=False)
class State:
    """What the optimizer keeps for a bucket slice [n]: the weights it updates, and what its rule keeps beside them.

    `master` is the parameter slice itself unless parameters are narrower than fp32, or frozen.
    """

    bucket: Bucket
    master: Tensor
    moments: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Update:
    """What a step found out, as scalar tensors: the gradient norm before clipping, the learning rate used, the loss
    scale of its backward, whether the step was skipped (1.0), and the sums it was asked to carry along."""

    grad_norm: Tensor
    lr: Tensor
    loss_scale: Tensor
    skipped: Tensor
    sums: Tensor


class Optimizer:
    """A rule over the buckets of a layout.

    learning_rate: from the number of updates done (a tensor) to a learning rate (a tensor). grad_clip: the largest
    norm a step may have, 0 for no clipping. everyone: the axis of all ranks, for the norm. loss_scale: what gradients
    come multiplied with.
    """

    def __init__(
        self, layout: Layout, gatherer: Gatherer, everyone: Axis, rule: Rule,
        learning_rate: Callable[[Tensor], Tensor], *, grad_clip: float, loss_scale: LossScale,
    ) -> None:  # fmt: skip
        self.layout, self.gatherer, self.everyone, self.rule = layout, gatherer, everyone, rule
        self.learning_rate, self.grad_clip = learning_rate, grad_clip
        self.states = [_new_state(bucket, rule.parts) for bucket in layout.buckets]
        self.frozen = [State(bucket, bucket.own, {}) for bucket in layout.frozen]
        device = layout.groups[0].params.device if layout.groups else torch.device("cpu")
        self.updates = torch.zeros((), dtype=torch.float64, device=device)  # done so far; a skipped step is none
        self.skips = torch.zeros((), dtype=torch.float64, device=device)
        self.scaler = Scaler(loss_scale, device)

    def step(self, slices: Sequence[Tensor], carry: Tensor) -> Update:
        """One update from every bucket's slice of the summed gradients.

        carry: fp64 [k], numbers of this rank (its loss) that are summed over all ranks in the same message.
        """
        mine = torch.cat((sum_of_squares(slices, self.layout.buckets), carry))
        sums = collectives.sum_of_scalars(mine, self.everyone)
        scale = self.scaler.scale.clone()  # that of this step's backward
        norm = sums[0].sqrt() / scale
        skip = ((sums[1] > 0) | ~torch.isfinite(norm)).double()
        clip = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0) if self.grad_clip else torch.ones_like(norm)
        lr = self.learning_rate(self.updates)
        self.updates += 1 - skip
        self.skips += skip
        self.scaler.update(skip)
        now = Moment(lr, self.updates.clamp(min=1), torch.where(skip == 0, clip / scale, 1.0), skip)
        # Forward order: the layers that the next forward needs first are updated and gathered first.
        for state, grad in zip(reversed(self.states), reversed(slices), strict=True):
            self._update(state, grad, now)
        return Update(norm, lr, scale, skip, sums[2:])

    def _update(self, state: State, grad: Tensor, now: Moment) -> None:
        rates = state.bucket.group.kind.rates
        if rates.factor != 1.0:
            now = Moment(now.lr * rates.factor, now.step, now.scale, now.skip)
        self.rule.update(state.master, grad, tuple(state.moments.values()), now, rates.decay)
        self.publish(state)

    def publish(self, state: State) -> None:
        """Puts a bucket's masters into the parameters, and begins to gather what stays whole."""
        own = state.bucket.own
        if own.data_ptr() != state.master.data_ptr():
            own.copy_(state.master)
        self.gatherer.publish(state.bucket)

    def settle(self) -> None:
        """Waits until all parameters that stay whole are."""
        self.gatherer.settle()


def _new_state(bucket: Bucket, parts: tuple[str, ...]) -> State:
    own = bucket.own
    wide = own.dtype in (torch.float32, torch.float64)
    master = own if wide else own.float()
    return State(bucket, master, {part: torch.zeros_like(master) for part in parts})
