"""What an update begins with, what it finds out, and whether it is skipped: as scalar tensors.

    bad = BadSteps(device, max_spike=0.0, rule=scale.rule)
    outcome = bad.outcome(learning_rate, loss_scale, grad_clip)
    update = outcome(sums)                once the sums over all ranks are known, or guessed
    bad.count(update)                     once it is done
    bad.observe(update)                   once its norm is known, and not guessed

A step is skipped if its loss or gradient norm is not finite, if its data are invalid, or as a
spike: if its norm is more than `max_spike` times the running mean of the norms of the steps that
were not skipped. This is the mean of all, later one whose newest norm counts a hundredth; it is
judged from the twentieth on, since the first norms of a run fall fast. Nothing here is read on the
host. While a loss scale falls, gradients that are not finite are expected: such steps are skipped,
but do not count in a row of bad steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.device import start_copy_in
from threed.precision import LossScale
from threed.zero.layout import Bucket

WINDOW, JUDGED_FROM = 100.0, 20.0  # norms


@dataclass(frozen=True, eq=False)
class Update:
    """The results of a step: the gradient norm before clipping, the factor that clips it, the
    learning rate used, the loss scale of its backward, whether the step is skipped (1.0), how many
    were so far; and the sums over all ranks of its `carry` [k].

    overflow: whether it is skipped because its loss or norm is not finite (1.0), and not as a spike
    or for its data.
    in_a_row: skipped steps that count (`BadSteps`) since the last one that was not.
    """

    grad_norm: Tensor
    clip: Tensor
    lr: Tensor
    loss_scale: Tensor
    skip: Tensor
    skips: Tensor
    sums: Tensor
    overflow: Tensor
    in_a_row: Tensor


Outcome = Callable[[Tensor], Update]


class BadSteps:
    """Counts skipped steps. max_spike: a factor over the running mean of norms, 0 for none. rule:
    of the loss scale.

    skips: all of them. in_a_row: those that ended the run so far. mean, norms: of how many norms,
    and their mean.
    """

    def __init__(self, device: torch.device, max_spike: float, rule: LossScale) -> None:
        self.max_spike = max_spike
        self.counts_from = rule.minimum if rule.dynamic else math.inf
        self.skips, self.in_a_row, self.mean, self.norms = torch.zeros(
            4, dtype=torch.float64, device=device
        ).unbind()

    def outcome(self, lr: Tensor, loss_scale: Tensor, grad_clip: float) -> Outcome:
        """Returns a function that gives the results of the next step, which is not changed by
        updates in the meantime.

        Args:
            grad_clip: the largest norm, 0 for no clipping.

        Returns:
            A function of sums over all ranks, fp64 [3 + k]: the squared norm, ranks with gradients
            that are not finite, the loss, and k flags of invalid data, which skip the step if they
            are not 0.
        """
        skips, in_a_row, limit = self.skips.clone(), self.in_a_row.clone(), None
        if self.max_spike:
            limit = torch.where(self.norms < JUDGED_FROM, math.inf, self.mean * self.max_spike)

        def update(sums: Tensor) -> Update:
            norm = sums[0].sqrt() / loss_scale
            finite = (sums[1] == 0) & torch.isfinite(norm) & torch.isfinite(sums[2])
            invalid = (sums[3:] != 0).any()
            spike = torch.zeros_like(finite) if limit is None else finite & (norm > limit)
            skip, overflow = (~finite | spike | invalid).double(), (~finite & ~invalid).double()
            counts = spike | invalid | (~finite & (loss_scale <= self.counts_from))
            row = torch.where(skip == 0, 0.0, in_a_row + counts)
            clip = torch.ones_like(norm)
            if grad_clip:
                clip = (grad_clip / (norm + 1e-6)).clamp(max=1.0)
            return Update(norm, clip, lr, loss_scale, skip, skips + skip, sums[2:], overflow, row)

        return update

    def count(self, update: Update) -> None:
        """Counts a step, which may be one that is undone and counted again."""
        self.skips += update.skip
        self.in_a_row.copy_(update.in_a_row)

    def observe(self, update: Update) -> None:
        """Adds the norm of a step that was not skipped to the running mean, if `max_spike` is set."""
        good = update.skip == 0
        norms = self.norms + good
        mean = self.mean + (update.grad_norm - self.mean) / norms.clamp(min=1, max=WINDOW)
        self.mean.copy_(torch.where(good, mean, self.mean))
        self.norms.copy_(norms)

    def state(self) -> dict[str, float]:
        """Returns what a checkpoint keeps of it, beside the number of skips."""
        return {"norm_mean": float(self.mean), "norms": float(self.norms)} if self.max_spike else {}

    def restore(self, state: dict[str, float]) -> None:
        """Takes up where a checkpoint left off; rows begin anew. One without norms begins to
        observe them."""
        self.skips.fill_(state["skips"])
        self.in_a_row.zero_()
        self.mean.fill_(state.get("norm_mean") or 0.0)
        self.norms.fill_(state.get("norms") or 0.0)


class Scaler:
    """The loss scale of a run, as scalar tensors (fp64)."""

    def __init__(self, rule: LossScale, device: torch.device) -> None:
        self.rule = rule
        self.scale = torch.full((), rule.initial, dtype=torch.float64, device=device)
        # updates since the last overflow
        self.good = torch.zeros((), dtype=torch.float64, device=device)
        self.left = torch.full((), float(rule.hysteresis), dtype=torch.float64, device=device)

    def update(self, skipped: Tensor) -> None:
        """Updates the scale after a step. skipped: 1.0 if it overflowed, else 0.0."""
        if not self.rule.dynamic:
            return
        bad, full = skipped != 0, float(self.rule.hysteresis)
        self.good.copy_(torch.where(bad, 0.0, self.good + 1))
        halve = bad & (self.left <= 1)
        double = ~bad & (self.good % self.rule.window == 0)
        halved = (self.scale / 2).clamp(min=self.rule.minimum)
        grown = torch.where(double, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(halve, halved, grown))
        refill = ~bad if self.rule.consecutive else double
        spent = torch.where(bad & ~halve, self.left - 1, self.left)
        self.left.copy_(torch.where(refill, full, spent))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that an update changes."""
        return self.scale, self.good, self.left

    def state(self) -> dict[str, float]:
        """Returns the state for a checkpoint; a constant scale has none."""
        if not self.rule.dynamic:
            return {}
        return {
            "loss_scale": float(self.scale),
            "good_steps": float(self.good),
            "hysteresis_left": float(self.left),
        }

    def restore(self, state: dict[str, float]) -> None:
        """Restores the state of a checkpoint; without a loss scale there, the initial one."""
        if self.rule.dynamic:
            self.scale.fill_(state.get("loss_scale", self.rule.initial))
            self.good.fill_(state.get("good_steps", 0.0))
            self.left.fill_(state.get("hysteresis_left", float(self.rule.hysteresis)))


def sum_of_squares(
    parts: Sequence[Tensor], buckets: Sequence[Bucket], device: torch.device
) -> Tensor:
    """Returns this rank's share of the squared norm, and whether any gradient it holds is not finite (1.0): fp64 [2].

    parts: the squares of each bucket's slice. A bucket counts on its owner: the first of the ranks that replicate it,
    and the first stage that holds a tied weight. The other copies are only checked to be finite. Padding is zero.
    """
    total, others = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for part, bucket in zip(_on(device, parts), buckets, strict=True):
        total, others = (total + part, others) if bucket.group.owned else (total, others + part)
    return torch.stack((total, (~torch.isfinite(total + others)).double()))


def _on(device: torch.device, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns scalars on a device; those of the host by one copy."""
    away = [part for part in parts if part.device != device]
    arrived = iter(start_copy_in(torch.stack(away), device).unbind() if away else ())
    return [part if part.device == device else next(arrived) for part in parts]
