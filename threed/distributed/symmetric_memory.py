"""Products of sequence parallelism by torch's symmetric memory (`--parallel.symmetric-memory`).

    y, gathered = gather_and_multiply(x, matrix, axis, keep)
    part = multiply_and_scatter(x, matrix, axis)

A GPU reads the parts of the other GPUs from their memory, and multiplies each part when it has
arrived. The copies need no multiprocessors, unlike the kernels of NCCL. The operators are those of
torch's asynchronous tensor parallelism (`torch.ops.symm_mem`). Each process group has a workspace
in the memory of every GPU, of the size of the largest part that was sent.

The operators have not run on GPUs here. Tests run torch's own substitutes of them on CPUs.
"""

from __future__ import annotations

import importlib
import socket

import torch
from torch import Tensor

from threed.core.device import can_access
from threed.distributed import collectives
from threed.distributed.topology import Axis

OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def find_problem(axis: Axis, device: torch.device) -> str | None:
    """Returns why the ranks of an axis cannot use symmetric memory, or None. Collective.

    All ranks return the same result.

    Args:
        axis: the ranks.
        device: device of this rank.
    """
    ranks = collectives.exchange([socket.gethostname(), device.index, _missing(device)], axis)
    problems = [problem for _, _, problem in ranks if problem]
    if not problems and len({host for host, *_ in ranks}) > 1:
        problems = ["the tensor ranks are on several machines"]
    if problems:
        return str(problems[0])
    others = [index for _, index, _ in ranks if index != device.index]
    far = [index for index in others if not can_access(device, index)]
    own = f"GPU {device.index} cannot access the memory of GPU {far[0]}" if far else None
    return next((found for found in collectives.exchange(own, axis) if found), None)


def _missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")  # defines the operators
        for name in OPERATORS:
            getattr(torch.ops.symm_mem, name)
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} does not have it ({error})"
    return None


def gather_and_multiply(
    shard: Tensor, matrix: Tensor, axis: Axis, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Gathers a tensor along the sequence, and multiplies each rank's part when it arrives. Collective.

    Args:
        shard: this rank's part, [s/t b h].
        matrix: [h f].
        axis: the t tensor ranks.
        keep: whether to return the gathered tensor.

    Returns:
        The product [s b f], and the gathered tensor [s b h] or None, both in sequence order.
    """
    axis.count(shard.nbytes * (axis.size - 1))
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(
        shard.contiguous(), [matrix], 0, _group(axis), return_A=keep
    )
    return products[0].data, gathered


def multiply_and_scatter(x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
    """Multiplies, and sums the products of all ranks while further ones are computed. Collective.

    Args:
        x: this rank's features, [s b f].
        matrix: [f h].
        axis: the t tensor ranks.

    Returns:
        This rank's part of the sum, [s/t b h].
    """
    part: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x.contiguous(), matrix, "sum", 0, _group(axis)
    )
    axis.count(part.nbytes * (axis.size - 1))
    return part.data


def _group(axis: Axis) -> str:
    assert axis.channel is not None
    return axis.channel.group_name
