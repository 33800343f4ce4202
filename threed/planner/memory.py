"""Bytes that one rank needs, by what they are for.

Use: `rank_bytes(stage_layers, live=timeline.peak_activations[rank], param_bytes=2, grad_bytes=4, zero_stage=1,
shards=8)`.

Model states follow ZeRO (arXiv 1910.02054, section 3): parameters, gradients, and an optimizer state that stage 1
spreads over the data-parallel ranks. Which regime of bytes per parameter a configuration is, `regime` says in words.
Phases: states per parameter, then the whole rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from threed.planner.costs import LayerCost, stage_parameters

BUCKETS_IN_FLIGHT = 2  # one fills up or is used while the other one travels


def optimizer_bytes(param_bytes: int) -> int:
    """Bytes of AdamW's state per parameter.

    Two moments in fp32 (in fp64 for fp64 parameters), and fp32 master weights of narrower parameters.
    """
    wide = max(4, param_bytes)
    return 2 * wide + (wide if param_bytes < 4 else 0)


def regime(param_bytes: int, grad_bytes: int, zero_stage: int, shards: int) -> str:
    """Say how many bytes of model states a parameter takes, and how many of them are spread over the `shards`."""
    _check_zero(zero_stage)
    whole, state = param_bytes + grad_bytes, optimizer_bytes(param_bytes)
    kinds = f"{param_bytes}-byte parameters, {grad_bytes}-byte gradients, {state} bytes of optimizer state"
    if zero_stage == 0:
        return f"{whole + state} bytes per parameter ({kinds})"
    return f"{whole} + {state}/{shards} bytes per parameter ({kinds}, ZeRO-{zero_stage})"


def rank_bytes(
    layers: Sequence[LayerCost],
    *,
    live: float,
    param_bytes: int,
    grad_bytes: int,
    zero_stage: int = 0,
    shards: int = 1,
    bucket_bytes: int = 0,
    message_bytes: int = 0,
    parameters: int | None = None,
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer, activations and buffers of one rank, and their sum as `peak`.

    layers: those of the rank's stage (all its chunks). live: micro-batches whose activations are held at the worst
    moment, as in `Timeline.peak_activations`. shards: data-parallel ranks that ZeRO spreads the state over.
    bucket_bytes: the size of a reduction bucket. message_bytes: pipeline sends and receives under way. parameters:
    default what the layers say. Buffers are reduction buckets, messages, and what the backward of the hungriest layer
    needs for itself. Raises ValueError for ZeRO stages that are not there.
    """
    _check_zero(zero_stage)
    count = stage_parameters(layers) if parameters is None else parameters
    owned = -(-count // shards) if zero_stage >= 1 else count
    buckets = BUCKETS_IN_FLIGHT * min(bucket_bytes, count * grad_bytes) if shards > 1 else 0
    parts = {
        "parameters": count * param_bytes,
        "gradients": count * grad_bytes,
        "optimizer": owned * optimizer_bytes(param_bytes),
        "activations": round(live * sum(layer.activation_bytes for layer in layers)),
        "buffers": buckets + message_bytes + max((layer.working_bytes for layer in layers), default=0),
    }
    return {**parts, "peak": sum(parts.values())}


def _check_zero(stage: int) -> None:
    if stage not in (0, 1):
        raise ValueError(
            f"zero.stage {stage} is not in this version: it is 0 (slice nothing) or 1 (slice the optimizer state)"
        )
