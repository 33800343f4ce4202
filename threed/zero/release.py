"""The full values of all parameters, for a module that an engine gives back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from threed.distributed import collectives
from threed.zero.layout import Slot
from threed.zero.optimizer import Optimizer
from threed.zero.state import WEIGHT


def full_values(optimizer: Optimizer, dtype: torch.dtype) -> Iterator[tuple[Slot, Tensor]]:
    """Yields every parameter with a new tensor that has its full, current values. Collective.

    The values come from the master weights if there are any, else from the parameters.

    Args:
        optimizer: the optimizer of a wrapped module, which holds the states.
        dtype: dtype of the tensors.
    """
    optimizer.wait()
    states = {state.bucket: state for state in (*optimizer.states, *optimizer.frozen)}
    for group in optimizer.layout.groups:
        full = torch.empty(group.numel, dtype=dtype, device=group.params.device)
        for bucket in group.buckets:
            with optimizer.staged(states[bucket], (WEIGHT,)) as values:
                own = values[WEIGHT].to(full.device, dtype)
                window = full[bucket.first : bucket.last]
                collectives.start_all_gather(own, group.gather, out=window).wait()
        for slot in group.slots:
            yield slot, group.view(slot, full).clone()
