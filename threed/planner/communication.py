"""Bytes that one rank sends in one step, by parallel axis.

Use: `communication_bytes(stage_layers, microbatches=8, shards=4, param_bytes=2, reduce_bytes=4,
zero_stage=1)`.

tp: what the layers say, per micro-batch, and once a step the gradients that are partial over tensor ranks. pp: one
activation forward and one gradient backward over each boundary and micro-batch. dp: 2 Psi (N-1)/N elements, as a
reduce-scatter of gradients and an all-gather of what comes of them; with ZeRO-3 3 Psi (N-1)/N (arXiv 1910.02054,
section 7). Stages 2 and 3 reduce, and stage 3 gathers, for every micro-batch anew. cp: context parallelism is not in
this version. A few numbers for the gradient norm and the loss are left out, and padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from threed.planner import ring
from threed.planner.costs import LayerCost, sliced_parameters, stage_parameters
from threed.planner.gathering import gathering, in_turn
from threed.planner.memory import check_zero
from threed.schedules.action import Action


def communication_bytes(
    layers: Sequence[LayerCost],
    *,
    microbatches: int,
    shards: int = 1,
    replicas: int = 1,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    zero_stage: int = 0,
    resident: int = 0,
    prefetch: int = 1,
    actions: Sequence[Action] | None = None,
    input_bytes: int = 0,
    last: bool = True,
    tied_elsewhere: bool = False,
    parameters: int | None = None,
) -> dict[str, int]:
    """Bytes sent per step over tp, pp, dp and cp by a rank that holds these layers.

    shards, replicas: data-parallel ranks that share one set of slices, and how many such sets there are. reduce_bytes:
    of a gradient element on its way. resident, prefetch: under ZeRO-3 parameters with fewer elements stay whole, and so
    many layers are gathered ahead. actions: what the rank does, on which ZeRO-3's gathers depend (`plan.ranks[rank]`);
    default: each micro-batch's forward and backward in turn. input_bytes: what this stage receives per micro-batch, and
    so the size of the gradient it sends back; 0 on the first stage. last: whether the stage ends the model.
    tied_elsewhere: its tied parameters have a copy on another stage, with which their gradient is summed. parameters:
    default what the layers say.
    """
    count = stage_parameters(layers) if parameters is None else parameters
    partial = sum(layer.partial_elements for layer in layers)
    tied = max((layer.tied_parameters for layer in layers), default=0) if tied_elsewhere else 0
    output = 0 if last else layers[-1].output_bytes
    gathered = None
    if zero_stage == 3 and layers:
        done = in_turn(microbatches) if actions is None else actions
        moved = gathering(layers, done, prefetch=prefetch, resident=resident).elements
        gathered = moved + count - sliced_parameters(layers, resident)
    return {
        "tp": microbatches * sum(layer.tp_bytes for layer in layers)
        + _slice(partial, zero_stage, shards) * reduce_bytes,
        "pp": microbatches * (output + input_bytes)
        + ring.all_reduce(_slice(tied, zero_stage, shards) * reduce_bytes, 2),
        "dp": data_parallel_bytes(
            count, shards, param_bytes, reduce_bytes, zero_stage,
            replicas=replicas, microbatches=microbatches, gathered=gathered,
        ),
        "cp": 0,
    }  # fmt: skip


def data_parallel_bytes(
    parameters: int,
    shards: int,
    param_bytes: int,
    reduce_bytes: int,
    zero_stage: int,
    *,
    replicas: int = 1,
    microbatches: int = 1,
    gathered: int | None = None,
) -> int:
    """Bytes sent to sum the gradients over data-parallel ranks and to give all of them the parameters.

    Stage 0 all-reduces gradients; stages 1 to 3 reduce-scatter them over `shards` (stage 1 once, 2 and 3 for every
    micro-batch), all-reduce the slices over `replicas` once, and all-gather parameters in their own dtype: stages 1 and
    2 once, stage 3 `gathered` elements in all (default: every parameter in every forward and backward). Over one shard
    all stages are stage 0.
    """
    check_zero(zero_stage)
    if zero_stage == 0 or shards == 1:
        return ring.all_reduce(parameters * reduce_bytes, shards * replicas)
    if zero_stage < 3:
        gathered = parameters
    elif gathered is None:
        gathered = 2 * microbatches * parameters
    reductions = microbatches if zero_stage >= 2 else 1
    return (
        reductions * ring.reduce_scatter(parameters * reduce_bytes, shards)
        + ring.all_reduce(_slice(parameters, zero_stage, shards) * reduce_bytes, replicas)
        + ring.all_gather(gathered * param_bytes, shards)
    )


def _slice(elements: int, zero_stage: int, shards: int) -> int:
    """What a rank still sums over other axes: its slice, once ZeRO has scattered the gradients, or everything."""
    return -(-elements // shards) if zero_stage >= 1 else elements
