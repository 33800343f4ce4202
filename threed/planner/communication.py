"""Bytes that one rank sends in one step, by parallel axis.

Use: `communication_bytes(stage_layers, microbatches=8, shards=4, param_bytes=2, reduce_bytes=4,
zero_stage=1)`.

tp: what the layers say, per micro-batch, and once a step the gradients that are partial over tensor ranks. pp: one
activation forward and one gradient backward over each boundary and micro-batch. dp: 2 Psi (N-1)/N elements, as a
reduce-scatter of gradients and an all-gather of what comes of them (arXiv 1910.02054, section 7.1). cp: context
parallelism is not in this version. A few numbers for the gradient norm and the loss are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from threed.planner import ring
from threed.planner.costs import LayerCost, stage_parameters


def communication_bytes(
    layers: Sequence[LayerCost],
    *,
    microbatches: int,
    shards: int = 1,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    zero_stage: int = 0,
    input_bytes: int = 0,
    last: bool = True,
    tied_elsewhere: bool = False,
    parameters: int | None = None,
) -> dict[str, int]:
    """Bytes sent per step over tp, pp, dp and cp by a rank that holds these layers.

    shards: data-parallel ranks. reduce_bytes: of a gradient element on its way. input_bytes: what this stage receives
    per micro-batch, and so the size of the gradient it sends back; 0 on the first stage. last: whether the stage ends
    the model. tied_elsewhere: its tied parameters have a copy on another stage, with which their gradient is summed.
    parameters: default what the layers say.
    """
    count = stage_parameters(layers) if parameters is None else parameters
    partial = sum(layer.partial_elements for layer in layers)
    tied = max((layer.tied_parameters for layer in layers), default=0) if tied_elsewhere else 0
    output = 0 if last else layers[-1].output_bytes
    return {
        "tp": microbatches * sum(layer.tp_bytes for layer in layers)
        + _slice(partial, zero_stage, shards) * reduce_bytes,
        "pp": microbatches * (output + input_bytes)
        + ring.all_reduce(_slice(tied, zero_stage, shards) * reduce_bytes, 2),
        "dp": data_parallel_bytes(count, shards, param_bytes, reduce_bytes, zero_stage),
        "cp": 0,
    }


def data_parallel_bytes(parameters: int, shards: int, param_bytes: int, reduce_bytes: int, zero_stage: int) -> int:
    """Bytes sent to sum the gradients over data-parallel ranks and to give all of them the updated parameters.

    Stage 0 all-reduces gradients; stage 1 reduce-scatters them and all-gathers parameters, in the parameters' dtype.
    """
    if zero_stage not in (0, 1):
        raise ValueError(f"zero.stage {zero_stage} is not in this version: it is 0 or 1")
    gathered = reduce_bytes if zero_stage == 0 else param_bytes
    return ring.reduce_scatter(parameters * reduce_bytes, shards) + ring.all_gather(parameters * gathered, shards)


def _slice(elements: int, zero_stage: int, shards: int) -> int:
    """What a rank still sums over other axes: its slice, once ZeRO has scattered the gradients, or everything."""
    return -(-elements // shards) if zero_stage >= 1 else elements
