"""Bytes of model states in words, and the constants of what is under way.

Model states follow ZeRO (arXiv 1910.02054, section 3): stage 1 spreads the optimizer state over the data-parallel
ranks, stage 2 the gradients too, stage 3 the parameters too.
"""

from __future__ import annotations

BUCKETS_IN_FLIGHT = 2  # one fills up or is used while the other one travels
UPDATES_AHEAD = 1  # buckets whose state comes from its drive while one is updated


_SLICED = {
    1: "optimizer state",
    2: "gradients and optimizer state",
    3: "parameters, gradients and optimizer state",
}


def optimizer_bytes(param_bytes: int, moments: int = 2, masters: bool = False) -> int:
    """Bytes of the optimizer's state per parameter; moments: 2 for AdamW, 1 for SGD with momentum and Lion.

    Moments are fp32 (fp64 for fp64 parameters), and so are the master weights of narrower parameters. masters: others
    have them too.
    """
    return (moments + (masters or param_bytes < 4)) * max(4, param_bytes)


def regime(
    param_bytes: int, grad_bytes: int, zero_stage: int, shards: int, *, replicas: int = 1, moments: int = 2,
    resident: int = 0,
) -> str:  # fmt: skip
    """Say how many bytes of model states a parameter takes, and what of them is spread over the `shards`.

    replicas: so many groups of shards hold the same. resident: parameters with fewer elements are whole under ZeRO-3.
    """
    check_zero(zero_stage)
    state = optimizer_bytes(param_bytes, moments)
    held = f"{state} bytes of optimizer state" if state else "no optimizer state"
    kinds = f"{param_bytes}-byte parameters, {grad_bytes}-byte gradients, {held}"
    total, stage = param_bytes + grad_bytes + state, zero_stage if shards > 1 else 0
    if stage == 0:
        nobody = f"; ZeRO-{zero_stage} has no other rank to share with" if zero_stage else ""
        return f"{total} bytes per parameter ({kinds}{nobody})"
    whole = param_bytes * (stage < 3) + grad_bytes * (stage < 2)
    amount = f"{whole} + {total - whole}/{shards}" if whole else f"{total}/{shards}"
    copies = f" in each of {replicas} groups" if replicas > 1 else ""
    small = (
        f"; parameters under {resident} elements stay whole" if stage == 3 and resident > 1 else ""
    )
    how = f"ZeRO-{stage}: {_SLICED[stage]} sliced over {shards} ranks{copies}{small}"
    return f"{amount} bytes per parameter ({kinds}; {how})"


def drive_buffers(gathered: int, buffers: int, early: int = 0) -> int:
    """Returns how many buffers of a slice's size pass between memory and a drive, whatever the number of layers.

    Forward and backward need buffers for gathered slices, and for gradients: on their way, being added to, and being
    written. An update needs them for the buckets being read, the one being updated, and the one being written.

    Args:
        gathered: slices of parameters that come from the drive at once.
        buffers: buffers per bucket in an update, see `update_buffers`.
        early: if updates begin in the backward, the buckets of a layer, whose gradients wait for their update; the
            update and the backward then use buffers at once.
    """
    busy = gathered + BUCKETS_IN_FLIGHT + 2
    if early:
        busy += early + (UPDATES_AHEAD + 1) * (buffers - 1)
    return max(busy, (UPDATES_AHEAD + 2) * buffers)


def update_buffers(
    optimizer: bool, params: bool, *, narrow: bool, zero_stage: int, moments: int
) -> int:
    """What an update takes from a drive for one bucket, when the optimizer's state, or parameters, are there.

    narrow: parameters have masters beside them.
    """
    weights = optimizer + params if narrow else max(optimizer, params)
    return weights + optimizer * (moments + (zero_stage >= 2))


def check_zero(stage: int) -> None:
    """Raises ValueError unless `stage` is one of ZeRO's."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(
            f"there is no zero.stage {stage}: it slices nothing (0), optimizer states (1), gradients too (2), or "
            "parameters too (3)"
        )
