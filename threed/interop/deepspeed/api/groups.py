"""deepspeed.utils.groups: sizes and ranks of process groups.

They describe training without a `PipelineModule`, which is split over data-parallel ranks only. All
other sizes are therefore 1. With a `PipelineModule`, use the engine's attributes and `engine.grid`.
"""

from __future__ import annotations

from typing import Any

from threed.distributed import topology

mesh_device = None


def _get_data_parallel_group() -> Any:
    """Returns the process group of all ranks; None without process groups."""
    return topology.everyone().group


def _get_data_parallel_world_size() -> int:
    """Returns the number of ranks."""
    return topology.everyone().size


def _get_data_parallel_rank() -> int:
    """Returns this process's rank."""
    return topology.everyone().index


def _get_data_parallel_group_ranks() -> list[int]:
    """Returns the ranks of the data-parallel group."""
    return list(topology.everyone().ranks)


def _one() -> int:
    """Returns 1, the number of ranks over which layers and sequences are split."""
    return 1


def _zero() -> int:
    """Returns 0, this process's rank on an axis of one rank."""
    return 0


get_data_parallel_group = _get_sequence_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_sequence_data_parallel_world_size = (
    _get_data_parallel_world_size
)
get_data_parallel_rank = _get_sequence_data_parallel_rank = _get_data_parallel_rank
_get_model_parallel_world_size = _get_sequence_parallel_world_size = _one
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _one
_get_sequence_parallel_rank = get_model_parallel_rank = get_tensor_model_parallel_rank = _zero
_get_broadcast_src_rank = _zero
