"""Computes the bytes of model states per parameter, and the host buffers that offloading needs.

Model states are parameters, gradients and optimizer state (ZeRO, arXiv 1910.02054, section 3).
Stage 1 shards the optimizer state over data-parallel ranks, stage 2 also the gradients, stage 3
also the parameters.
"""

from __future__ import annotations

# Number of buckets in flight: one bucket is filled or used while the other one is communicated.
BUCKETS_IN_FLIGHT = 2
UPDATES_AHEAD = 1  # number of buckets whose states are read ahead while another bucket is updated


_SLICED = {
    1: "optimizer state",
    2: "gradients and optimizer state",
    3: "parameters, gradients and optimizer state",
}


def optimizer_bytes(param_bytes: int, moments: int = 2, masters: bool = False) -> int:
    """Returns the bytes of optimizer state per parameter.

    Moments are fp32, or fp64 for fp64 parameters. Parameters narrower than fp32 also have master
    weights in fp32.

    Args:
        param_bytes: bytes of a parameter.
        moments: number of moments: 2 for AdamW; 1 for Lion and SGD with momentum.
        masters: whether parameters in fp32 or fp64 have separate master weights, too.
    """
    return (moments + (masters or param_bytes < 4)) * max(4, param_bytes)


def regime(
    param_bytes: int, grad_bytes: int, zero_stage: int, shards: int, *, replicas: int = 1, moments: int = 2,
    resident: int = 0,
) -> str:  # fmt: skip
    """Returns a text about the bytes of model states per parameter, and about their sharding.

    Args:
        param_bytes: bytes per parameter.
        grad_bytes: bytes per gradient element.
        zero_stage: ZeRO stage.
        shards: number of ranks over which states are sharded.
        replicas: number of groups of `shards` ranks; each group holds all states.
        moments: number of moments of the optimizer.
        resident: parameters with fewer elements than this stay unsharded under ZeRO-3.

    Raises:
        ValueError: if `zero_stage` is not a ZeRO stage.
    """
    check_zero(zero_stage)
    state = optimizer_bytes(param_bytes, moments)
    optimizer_text = f"{state} bytes of optimizer state" if state else "no optimizer state"
    kinds = f"{param_bytes}-byte parameters, {grad_bytes}-byte gradients, {optimizer_text}"
    total, stage = param_bytes + grad_bytes + state, zero_stage if shards > 1 else 0
    if stage == 0:
        unused = f"; ZeRO-{zero_stage} has no other rank to share with" if zero_stage else ""
        return f"{total} bytes per parameter ({kinds}{unused})"
    unsharded = param_bytes * (stage < 3) + grad_bytes * (stage < 2)
    amount = f"{unsharded} + {total - unsharded}/{shards}" if unsharded else f"{total}/{shards}"
    copies = f" in each of {replicas} groups" if replicas > 1 else ""
    small = ""
    if stage == 3 and resident > 1:
        small = f"; parameters under {resident} elements are not sharded"
    how = f"ZeRO-{stage}: {_SLICED[stage]} sliced over {shards} ranks{copies}{small}"
    return f"{amount} bytes per parameter ({kinds}; {how})"


def drive_buffers(gathered: int, buffers: int, early: int = 0) -> int:
    """Returns the number of host buffers that transfers to and from a drive need.

    Each buffer has the size of the largest slice of a bucket. Forward and backward need buffers for
    the slices of parameters that are being gathered, and for gradients that are in flight, being
    accumulated or being written. An update needs buffers for the buckets that are being read,
    updated or written.

    Args:
        gathered: number of parameter slices that are read from the drive at the same time.
        buffers: buffers per bucket in an update; see `update_buffers`.
        early: if updates run during the backward, the largest number of buckets of a layer, because
            all buckets of a layer may wait for their update while the backward also needs buffers.
            Otherwise 0, because updates after the backward reuse the backward's buffers.
    """
    busy = gathered + BUCKETS_IN_FLIGHT + 2
    if early:
        busy += early + (UPDATES_AHEAD + 1) * (buffers - 1)
    return max(busy, (UPDATES_AHEAD + 2) * buffers)


def update_buffers(
    optimizer: bool, params: bool, *, narrow: bool, zero_stage: int, moments: int
) -> int:
    """Returns the number of host buffers that an update needs to read one bucket from a drive.

    Each tensor that the update reads (weights, moments, gradients) needs one buffer.

    Args:
        optimizer: whether optimizer states are on the drive.
        params: whether parameters are on the drive.
        narrow: whether parameters have a narrower dtype than their master weights, so that both
            exist.
        zero_stage: ZeRO stage.
        moments: number of moments of the optimizer.
    """
    weights = optimizer + params if narrow else max(optimizer, params)
    return weights + optimizer * (moments + (zero_stage >= 2))


def check_zero(stage: int) -> None:
    """Raises ValueError if `stage` is not 0, 1, 2 or 3."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(
            f"zero.stage is {stage}: it must be 0 (nothing sharded), 1 (optimizer states), 2 (and gradients) or"
            " 3 (and parameters)"
        )
