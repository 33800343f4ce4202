"""Bytes that one rank needs, by what they are for.

Use: `rank_bytes(stage_layers, live=timeline.peak_activations[rank], param_bytes=2, grad_bytes=4, zero_stage=3,
shards=8)`.

Model states follow ZeRO (arXiv 1910.02054, section 3): stage 1 spreads the optimizer state over the data-parallel
ranks, stage 2 the gradients too, stage 3 the parameters too. Which regime of bytes per parameter a configuration is,
`regime` says in words. Phases: states per parameter, then the whole rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from threed.planner.costs import LayerCost, sliced_parameters, stage_parameters
from threed.planner.gathering import gathering, in_turn

BUCKETS_IN_FLIGHT = 2  # one fills up or is used while the other one travels
UPDATES_AHEAD = 1  # buckets whose state comes from its drive while one is updated


@dataclass(frozen=True)
class Offload:
    """What of a rank's states has a place of its own: then it is slices also on one rank alone.

    optimizer: its state, and gradients from ZeRO-2 on. params: under ZeRO-3. ..._away: that place is not the memory
    that is counted. masters: the optimizer has weights of its own, also of wide parameters. delayed: it works on a copy
    of the gradients. buffers: bytes for what passes to and fro. tile: into how many tiles the blocks' layers are cut.
    """

    optimizer: bool = False
    params: bool = False
    optimizer_away: bool = False
    params_away: bool = False
    masters: bool = False
    delayed: bool = False
    buffers: int = 0
    tile: int = 1

    def stage(self, zero_stage: int, shards: int) -> int:
        """The ZeRO stage in effect."""
        if shards > 1:
            return zero_stage
        gradients = 2 if self.optimizer and zero_stage >= 2 else 0
        return 3 if self.params and zero_stage == 3 else gradients


NOWHERE = Offload()
_SLICED = {1: "optimizer state", 2: "gradients and optimizer state", 3: "parameters, gradients and optimizer state"}


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
    small = f"; parameters under {resident} elements stay whole" if stage == 3 and resident > 1 else ""
    how = f"ZeRO-{stage}: {_SLICED[stage]} sliced over {shards} ranks{copies}{small}"
    return f"{amount} bytes per parameter ({kinds}; {how})"


def rank_bytes(
    layers: Sequence[LayerCost],
    *,
    live: float,
    param_bytes: int,
    grad_bytes: int,
    zero_stage: int = 0,
    shards: int = 1,
    replicas: int = 1,
    moments: int = 2,
    resident: int = 0,
    prefetch: int = 1,
    bucket_bytes: int = 0,
    message_bytes: int = 0,
    parameters: int | None = None,
    offload: Offload = NOWHERE,
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer, activations and buffers of one rank, and their sum as `peak`.

    layers: those of the rank's stage (all its chunks). live: micro-batches whose activations are held at the worst
    moment, as in `Timeline.peak_activations`. shards, replicas: data-parallel ranks that ZeRO spreads the state over,
    and groups of such ranks. moments: of the optimizer. resident, prefetch: under ZeRO-3 parameters with fewer elements
    stay whole, and so many layers are gathered ahead. bucket_bytes: the size of a reduction bucket. message_bytes:
    pipeline sends and receives under way. parameters: default what the layers say. offload: what has a place of its
    own. Buffers are reduction buckets, messages, what the backward of the hungriest layer needs for itself, from
    stage 2 on the largest single gradient, and under stage 3 the layers gathered at once. What is kept elsewhere is
    `offloaded`, if there is any; it is no part of the peak. Raises ValueError for ZeRO stages that there are not.
    """
    check_zero(zero_stage)
    count = stage_parameters(layers) if parameters is None else parameters
    stage = offload.stage(zero_stage, shards)
    sliced = (sliced_parameters(layers, resident) if layers else count) if stage == 3 else 0
    gradients = (_share(count, shards) if stage >= 2 else count) * grad_bytes
    per_parameter = optimizer_bytes(param_bytes, moments, offload.masters) + offload.delayed * grad_bytes
    states = (_share(count, shards) if stage >= 1 else count) * per_parameter
    homes = {  # bytes, and whether they are elsewhere
        "parameters": (_share(sliced, shards) * param_bytes, offload.params_away),
        "gradients": (gradients, offload.optimizer_away and stage >= 2),
        "optimizer": (states, offload.optimizer_away),
    }
    parts = {kind: nbytes * (not away) for kind, (nbytes, away) in homes.items()}
    parts["parameters"] += (count - sliced) * param_bytes
    parts["activations"] = round(live * sum(layer.activation_bytes for layer in layers))
    parts["buffers"] = message_bytes + offload.buffers + max((layer.working_bytes for layer in layers), default=0)
    if shards * replicas > 1 or stage >= 2:
        parts["buffers"] += _bucket_bytes(stage, bucket_bytes, count * grad_bytes)
    if stage >= 2:
        parts["buffers"] += grad_bytes * max((layer.largest for layer in layers), default=0)
    if stage == 3 and layers:
        parts["buffers"] += param_bytes * _gathered(layers, prefetch, resident, offload.tile)
    elsewhere = round(live * sum(layer.offloaded_bytes for layer in layers))
    elsewhere += sum(nbytes for nbytes, away in homes.values() if away)
    return {**parts, "peak": sum(parts.values()), **({"offloaded": elsewhere} if elsewhere else {})}


def _gathered(layers: Sequence[LayerCost], prefetch: int, resident: int, tile: int) -> int:
    """Elements that are whole at once: of the layers gathered ahead, or where they are tiled of two tiles."""
    if tile == 1:
        return gathering(layers, in_turn(1), prefetch=prefetch, resident=resident).most
    rest = [layer for layer in layers if not layer.name.startswith("blocks.")]
    whole = gathering(rest, in_turn(1), prefetch=prefetch, resident=resident).most if rest else 0
    return max(whole, 2 * -(-max((layer.largest for layer in layers if layer not in rest), default=0) // tile))


def drive_buffers(gathered: int, loans: int, state: int) -> tuple[int, int]:
    """How many buffers of a slice's size pass between memory and a drive; how many of them are idle between updates.

    That does not grow with the layers. gathered: slices of parameters that come from the drive at once. loans: see
    `update_loans`. state: parts of a bucket's state there, which fill the idle ones. In a step's forward and backward
    there are what is gathered, and gradients: on their way, being added to, and being written. In its update what the
    buckets that come need, the one at work, and the one that goes.
    """
    busy = gathered + BUCKETS_IN_FLIGHT + 2
    idle = max(0, (UPDATES_AHEAD + 2) * loans - busy)
    idle += -idle % max(1, state)
    return busy + idle, idle


def update_loans(optimizer: bool, params: bool, *, narrow: bool, zero_stage: int, moments: int) -> int:
    """What an update takes from a drive for one bucket, when the optimizer's state, or parameters, are there.

    narrow: parameters have masters beside them.
    """
    weights = optimizer + params if narrow else max(optimizer, params)
    return weights + optimizer * (moments + (zero_stage >= 2))


def _bucket_bytes(stage: int, bucket: int, gradients: int) -> int:
    """What buckets take under way: what arrives, and from stage 2 on also what leaves, and the one that fills."""
    if stage < 2:
        return BUCKETS_IN_FLIGHT * min(bucket, gradients)
    return min(BUCKETS_IN_FLIGHT * bucket, gradients) + min((BUCKETS_IN_FLIGHT + 1) * bucket, gradients)


def _share(elements: int, shards: int) -> int:
    return -(-elements // shards)


def check_zero(stage: int) -> None:
    """Raises ValueError unless `stage` is one of ZeRO's."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(
            f"there is no zero.stage {stage}: it slices nothing (0), optimizer states (1), gradients too (2), or "
            "parameters too (3)"
        )
