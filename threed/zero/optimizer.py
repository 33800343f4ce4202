"""The ZeRO optimizer (arXiv 1910.02054): each rank updates the slices it owns and gathers the rest.

    step(slices, loss) :  norm over everything -> clip factor and skip flag -> bucket by bucket: AdamW on the slice,
                          the slice into the parameter buffer, all-gather begun
    ready(unit)        :  waits for the parameters of one unit; so gathering overlaps the next forward

Nothing here reads a tensor's value on the host: norm, clip factor, skip flag and learning rate stay tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed import collectives
from threed.collectives import Pending
from threed.ops.adam import Adam, Moment, adamw_
from threed.topology import Axis
from threed.zero.layout import Bucket, Layout
from threed.zero.norm import sum_of_squares


@dataclass(eq=False)
class State:
    """What the optimizer keeps for a bucket slice [n]: the weights it updates, and AdamW's two moments.

    `master` is the parameter slice itself unless parameters are narrower than fp32.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, eq=False)
class Update:
    """What a step found out, as scalar tensors: the gradient norm before clipping, the learning rate used, whether the
    step was skipped (1.0), and the sums it was asked to carry along."""

    grad_norm: Tensor
    lr: Tensor
    skipped: Tensor
    sums: Tensor


class Optimizer:
    """AdamW over the buckets of a layout.

    learning_rate: from the number of updates done (a tensor) to a learning rate (a tensor). grad_clip: the largest
    norm a step may have, 0 for no clipping. everyone: the axis of all ranks, for the norm.
    """

    def __init__(
        self, layout: Layout, everyone: Axis, adam: Adam, learning_rate: Callable[[Tensor], Tensor], *,
        decay: float, grad_clip: float,
    ) -> None:  # fmt: skip
        self.layout, self.everyone, self.adam = layout, everyone, adam
        self.learning_rate, self.decay, self.grad_clip = learning_rate, decay, grad_clip
        self.states = [_new_state(bucket) for bucket in layout.buckets]
        device = layout.groups[0].params.device if layout.groups else torch.device("cpu")
        self.updates = torch.zeros((), dtype=torch.float64, device=device)  # done so far; a skipped step is none
        self.skips = torch.zeros((), dtype=torch.float64, device=device)
        self._gathering: dict[int, Pending] = {}
        self._buckets_of_unit = _buckets_of_units(layout)

    def step(self, slices: Sequence[Tensor], carry: Tensor) -> Update:
        """One update from every bucket's slice of the summed gradients.

        carry: fp64 [k], numbers of this rank (its loss) that are summed over all ranks in the same message.
        """
        squares = sum_of_squares(slices, self.layout.buckets)
        sums = collectives.sum_of_scalars(torch.cat((squares.view(1), carry)), self.everyone)
        norm = sums[0].sqrt()
        skip = (~torch.isfinite(norm)).double()
        scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0) if self.grad_clip else torch.ones_like(norm)
        lr = self.learning_rate(self.updates)
        self.updates += 1 - skip
        self.skips += skip
        now = Moment(lr, self.updates.clamp(min=1), torch.where(skip == 0, scale, 1.0), skip)
        # Forward order: the layers that the next forward needs first are updated and gathered first.
        for number in reversed(range(len(self.states))):
            self._update(number, slices[number], now)
        return Update(norm, lr, skip, sums[1:])

    def _update(self, number: int, grad: Tensor, now: Moment) -> None:
        state, bucket = self.states[number], self.layout.buckets[number]
        decay = self.decay if bucket.group.kind.decay else 0.0
        adamw_(state.master, grad, state.exp_avg, state.exp_avg_sq, now, self.adam, decay)
        self.publish(number)

    def publish(self, number: int) -> None:
        """Puts a bucket's masters into the parameter buffer and begins to gather the other ranks' slices."""
        state, bucket = self.states[number], self.layout.buckets[number]
        params = bucket.group.params
        own = params[bucket.own_first : bucket.own_last]
        if own.data_ptr() != state.master.data_ptr():
            own.copy_(state.master)
        if bucket.group.shard.size > 1:
            window = params[bucket.first : bucket.last]
            self._gathering[number] = collectives.start_all_gather(own, bucket.group.shard, out=window)

    def ready(self, unit: int) -> None:
        """Waits until all parameters of a unit are whole."""
        if self._gathering:
            for number in self._buckets_of_unit.get(unit, ()):
                if number in self._gathering:
                    self._gathering.pop(number).wait()

    def settle(self) -> None:
        """Waits until all parameters are whole."""
        for number in sorted(self._gathering, reverse=True):
            self._gathering.pop(number).wait()


def _new_state(bucket: Bucket) -> State:
    own = bucket.group.params[bucket.own_first : bucket.own_last]
    wide = own.dtype in (torch.float32, torch.float64)
    master = own if wide else own.float()
    return State(master, torch.zeros_like(master), torch.zeros_like(master))


def _buckets_of_units(layout: Layout) -> dict[int, list[int]]:
    table: dict[int, list[int]] = {}
    for number, bucket in enumerate(layout.buckets):
        for unit in {unit for slot in bucket.slots() for unit in slot.units}:
            table.setdefault(unit, []).append(number)
    return table
