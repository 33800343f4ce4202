"""Steps that are skipped: what is not finite, what is a spike, and how many there were in a row.

    bad = BadSteps(device, max_spike=0.0, rule=scale.rule)
    update = bad.before(...).with_sums(sums)      whether a step is skipped: see `Update`
    bad.count(update)                             once it is done
    bad.observe(update)                           once its norm is known, and not guessed

A spike is a step whose gradient norm is more than `max_spike` times the running mean of the norms of the steps that
were not skipped: the mean of all, later one whose newest norm counts a hundredth. It is judged from the twentieth on,
for the first norms of a run fall fast. All are scalar tensors (fp64), and nothing here is read on the host. While the
loss scale is still falling, a gradient that is not finite is how that finds its way: such steps are skipped, but
neither begin a row nor make it longer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from threed.precision import LossScale
from threed.zero.update import Before, Update

WINDOW, JUDGED_FROM = 100.0, 20.0  # norms


class BadSteps:
    """Counts skipped steps. max_spike: a factor over the running mean of norms, 0 for none. rule: of the loss scale.

    skips: all of them. in_a_row: those that ended the run so far. mean, norms: of how many norms, and their mean.
    """

    def __init__(self, device: torch.device, max_spike: float, rule: LossScale) -> None:
        self.max_spike = max_spike
        self.counts_from = rule.minimum if rule.dynamic else math.inf
        self.skips, self.in_a_row, self.mean, self.norms = torch.zeros(
            4, dtype=torch.float64, device=device
        ).unbind()

    def before(self, lr: Tensor, loss_scale: Tensor, grad_clip: float) -> Before:
        """Returns what an update begins with."""
        limit = None
        if self.max_spike:
            limit = torch.where(self.norms < JUDGED_FROM, math.inf, self.mean * self.max_spike)
        row = self.in_a_row.clone()
        return Before(lr, loss_scale, self.skips.clone(), grad_clip, row, self.counts_from, limit)

    def count(self, update: Update) -> None:
        """Counts a step, which may be one that is undone and counted again."""
        self.skips += update.skip
        self.in_a_row.copy_(update.in_a_row)

    def observe(self, update: Update) -> None:
        """Adds the norm of a step that was not skipped to the running mean."""
        if not self.max_spike:
            return
        good = update.skip == 0
        norms = self.norms + good
        mean = self.mean + (update.grad_norm - self.mean) / norms.clamp(min=1, max=WINDOW)
        self.mean.copy_(torch.where(good, mean, self.mean))
        self.norms.copy_(norms)

    def state(self) -> dict[str, float]:
        """Returns what a checkpoint keeps of it, beside the number of skips."""
        return {"norm_mean": float(self.mean), "norms": float(self.norms)} if self.max_spike else {}

    def restore(self, state: dict[str, float]) -> None:
        """Takes up where a checkpoint left off; rows begin anew. One without norms begins to observe them."""
        self.skips.fill_(state["skips"])
        self.in_a_row.zero_()
        self.mean.fill_(state.get("norm_mean") or 0.0)
        self.norms.fill_(state.get("norms") or 0.0)
