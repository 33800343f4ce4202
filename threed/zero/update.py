"""The results of a step, as scalar tensors: gradient norm, clip factor, skip flag, and others.

    bad = BadSteps(device, max_spike, rule)     `rule`: the `LossScale`
    outcome = bad.outcome(learning_rates, loss_scale, grad_clip)
    update = outcome(sums)                      when the sums over all ranks are known, or guessed
    bad.count(update)                           when the update is applied
    bad.observe(update)                         when the step's norm is known, not only guessed
    later = Later(results, faults.add)          `results`: function that returns the step's `Update`

A step is skipped if its loss or gradient norm is not finite, if its data are invalid, or if its
norm is a spike: more than `max_spike` times the running mean of the norms of steps that were not
skipped. The running mean weighs all norms equally for the first hundred of these steps; later the
newest norm has a weight of 1/100. Spikes are only detected once the mean contains twenty norms,
because the norms fall fast at the beginning of a run. All values stay on the device, so the host
does not wait for them.

A dynamic loss scale begins high and falls until gradients no longer overflow. Steps that overflow
while the scale is above its minimum are skipped, but do not count as consecutive bad steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threed.core.device import start_copy_in
from threed.ops.precision import LossScale
from threed.zero.layout import Bucket

# WINDOW: from this number of norms on, the newest norm has the weight 1 / WINDOW in the mean.
# JUDGED_FROM: from this number of norms in the mean on, spikes are detected.
WINDOW, JUDGED_FROM = 100.0, 20.0


@dataclass(frozen=True, eq=False)
class Update:
    """The results of a step, as scalar tensors.

    Attributes:
        grad_norm: gradient norm before clipping.
        clip: factor by which clipping multiplies the gradients, at most 1.
        rates: learning rate per parameter group, [groups].
        loss_scale: loss scale of the step's backward.
        skip: 1.0 if the step is skipped, else 0.0.
        skips: number of skipped steps so far, including this one.
        sums: the loss and the k flags of invalid data, summed over all ranks, fp64 [1 + k]; see
            `carry` of `Optimizer.step`.
        overflow: 1.0 if the step's loss or norm is not finite and its data are valid, else 0.0.
        in_a_row: number of consecutive skipped steps up to this one; see `BadSteps`.
    """

    grad_norm: Tensor
    clip: Tensor
    rates: Tensor
    loss_scale: Tensor
    skip: Tensor
    skips: Tensor
    sums: Tensor
    overflow: Tensor
    in_a_row: Tensor

    @property
    def lr(self) -> Tensor:
        """The learning rate of the first group, for metrics."""
        return self.rates[0]


Outcome = Callable[[Tensor], Update]


def loss_of(sums: Tensor) -> Tensor:
    """Returns the loss as a scalar tensor; NaN if a flag was set on any rank.

    Args:
        sums: fp64 [1 + number of flags]: the loss and the flags, summed over all ranks.
    """
    return torch.where(sums[1:].any(), torch.nan, sums[0])


@dataclass(frozen=True, eq=False)
class Numbers:
    """The results of a step, with the counts of flags for invalid data.

    Attributes:
        update: results of the step's update.
        counts: counts of all flags up to this step, fp64 [number of flags].
    """

    update: Update
    counts: Tensor

    @property
    def loss(self) -> Tensor:
        """The mean loss of the global batch; NaN if the batch has invalid data."""
        return loss_of(self.update.sums)


class Later:
    """A function without arguments that returns the results of a step.

    The first call computes the results, and may wait for other ranks. Later calls return them.

    Args:
        update: function that returns the results of the step's update. It is called once, and then
            released.
        count: `count(found)` adds the step's flags of invalid data to the counts, and returns a
            copy of the counts; see `Faults.add`.

    Attributes:
        found: the results; None before the first call.
    """

    def __init__(self, update: Callable[[], Update], count: Callable[[Tensor], Tensor]) -> None:
        self._update: Callable[[], Update] | None = update
        self._count = count
        self.found: Numbers | None = None

    def __call__(self) -> Numbers:
        if self._update is not None:
            update, self._update = self._update(), None
            self.found = Numbers(update, self._count(update.sums[1:]))
        assert self.found is not None
        return self.found


class BadSteps:
    """Determines which steps are skipped, and counts them.

    Args:
        device: device of the scalar tensors.
        max_spike: a step is skipped if its gradient norm is larger than `max_spike` times the
            running mean of norms; 0 for no limit.
        rule: rule of the loss scale.

    Attributes:
        skips: number of skipped steps.
        in_a_row: number of skipped steps since the last step that was not skipped. Overflows are
            not counted if the loss scale is dynamic and above its minimum.
        mean: running mean of the norms.
        norms: number of norms that were added to the mean.
    """

    def __init__(self, device: torch.device, max_spike: float, rule: LossScale) -> None:
        self.max_spike = max_spike
        self.counts_from = rule.minimum if rule.dynamic else math.inf
        self.skips, self.in_a_row, self.mean, self.norms = torch.zeros(
            4, dtype=torch.float64, device=device
        ).unbind()

    def outcome(self, rates: Tensor, loss_scale: Tensor, grad_clip: float) -> Outcome:
        """Returns a function that computes the results of the next step.

        The function uses the counters at the time of this call; later updates do not affect it.

        Args:
            rates: learning rate per parameter group, [groups].
            loss_scale: loss scale of the step's backward.
            grad_clip: norm to which larger gradients are clipped; 0 for no clipping.

        Returns:
            A function of the sums over all ranks, fp64 [3 + k]: the squared norm, the number of
            ranks with gradients that are not finite, the loss, and k flags of invalid data. The
            step is skipped if any flag is not 0.
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
            return Update(
                norm, clip, rates, loss_scale, skip, skips + skip, sums[2:], overflow, row
            )

        return update

    def count(self, update: Update) -> None:
        """Sets `skips` and `in_a_row` to their values after the step."""
        self.skips += update.skip
        self.in_a_row.copy_(update.in_a_row)

    def observe(self, update: Update) -> None:
        """Adds the step's gradient norm to the running mean, unless the step was skipped."""
        good = update.skip == 0
        norms = self.norms + good
        mean = self.mean + (update.grad_norm - self.mean) / norms.clamp(min=1, max=WINDOW)
        self.mean.copy_(torch.where(good, mean, self.mean))
        self.norms.copy_(norms)

    def state(self) -> dict[str, float]:
        """Returns the running mean of norms, and the number of norms in it, for a checkpoint.

        The dict is empty if spikes are not detected. Checkpoints store `skips` separately.
        """
        return {"norm_mean": float(self.mean), "norms": float(self.norms)} if self.max_spike else {}

    def restore(self, state: dict[str, float]) -> None:
        """Restores the counters of a checkpoint.

        `in_a_row` restarts at 0. If the checkpoint has no running mean, the mean restarts too.

        Args:
            state: the dict that `state` returned, with the number of skipped steps as "skips".
        """
        self.skips.fill_(state["skips"])
        self.in_a_row.zero_()
        self.mean.fill_(state.get("norm_mean") or 0.0)
        self.norms.fill_(state.get("norms") or 0.0)


class Scaler:
    """The loss scale of a run, and the counters that change it, as fp64 scalar tensors.

    Attributes:
        rule: rule by which the scale changes.
        scale: the current loss scale.
        good: number of steps since the last overflow.
        hysteresis_left: number of further overflows that are needed to halve the scale.
    """

    def __init__(self, rule: LossScale, device: torch.device) -> None:
        self.rule = rule
        values = torch.tensor([rule.initial, 0.0, rule.hysteresis], dtype=torch.float64)
        self.scale, self.good, self.hysteresis_left = values.to(device).unbind()

    def update(self, skipped: Tensor) -> None:
        """Updates the loss scale after a step.

        Args:
            skipped: 1.0 if the step was skipped because of an overflow, else 0.0.
        """
        if not self.rule.dynamic:
            return
        bad, full = skipped != 0, float(self.rule.hysteresis)
        self.good.copy_(torch.where(bad, 0.0, self.good + 1))
        halve = bad & (self.hysteresis_left <= 1)
        double = ~bad & (self.good % self.rule.window == 0)
        halved = (self.scale / 2).clamp(min=self.rule.minimum)
        grown = torch.where(double, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(halve, halved, grown))
        refill = ~bad if self.rule.consecutive else double
        spent = torch.where(bad & ~halve, self.hysteresis_left - 1, self.hysteresis_left)
        self.hysteresis_left.copy_(torch.where(refill, full, spent))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that an update changes."""
        return self.scale, self.good, self.hysteresis_left

    def state(self) -> dict[str, float]:
        """Returns the state for a checkpoint; empty for a constant scale."""
        if not self.rule.dynamic:
            return {}
        return {
            "loss_scale": float(self.scale),
            "good_steps": float(self.good),
            "hysteresis_left": float(self.hysteresis_left),
        }

    def restore(self, state: dict[str, float]) -> None:
        """Restores the state of a checkpoint; uses the initial scale if the checkpoint has none."""
        if self.rule.dynamic:
            self.scale.fill_(state.get("loss_scale", self.rule.initial))
            self.good.fill_(state.get("good_steps", 0.0))
            self.hysteresis_left.fill_(state.get("hysteresis_left", float(self.rule.hysteresis)))


def sum_of_squares(
    parts: Sequence[Tensor], buckets: Sequence[Bucket], device: torch.device
) -> Tensor:
    """Returns this rank's term of the squared gradient norm, and a flag for non-finite gradients.

    If several ranks hold the same portion of a bucket, only the owner (`Group.owned`) adds the
    portion's squares to the norm. The owner is the first of these ranks; for a tied weight, it is
    on the first stage with this weight. The other ranks only check that the portion is finite.
    Padding is zero, so it does not change the norm. Gradients of parameters whose record
    names their rule (`ShardSpec.rule`) are only checked.

    Args:
        parts: per bucket, the sum of squares of this rank's portion, a scalar tensor.
        buckets: the buckets, in the same order.
        device: device of the result.

    Returns:
        fp64 [2]: the sum of squares of the owned buckets, and 1.0 if any sum is not finite, else
        0.0.
    """
    total, replicas = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for part, bucket in zip(_to_device(device, parts), buckets, strict=True):
        total, replicas = (
            (total + part, replicas) if bucket.group.in_norm else (total, replicas + part)
        )
    return torch.stack((total, (~torch.isfinite(total + replicas)).double()))


def _to_device(device: torch.device, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the scalar tensors on `device`; tensors on another device are moved in one copy."""
    away = [part for part in parts if part.device != device]
    arrived = iter(start_copy_in(torch.stack(away), device).unbind() if away else ())
    return [part if part.device == device else next(arrived) for part in parts]
