"""deepspeed.comm: the functions that differ from torch.distributed's; and deepspeed.utils.groups.

Without a process group, the world has one rank. `deepspeed.utils.groups` describes training without
a `PipelineModule`, which is split over data-parallel ranks only, so all other axes have one rank.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from threed.distributed import topology

is_initialized = topology.is_started


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True,
    distributed_port: int | None = None, verbose: bool = True, timeout: timedelta | None = None,
    init_method: str | None = None, dist_init_required: bool | None = None, config: Any = None,
    rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Creates the default process group, unless it exists. Collective.

    Rank and world size come from the variables of torchrun, srun or mpirun. Without
    these variables, the world has one rank, and the group is created, too.

    Args:
        dist_backend: torch's backend; None means NCCL on a GPU, and gloo otherwise.
        auto_mpi_discovery: no effect: the variables of srun and mpirun are always read.
        distributed_port: port of rank 0 if the launcher sets none; None means a port that is
            derived from the job.
        verbose: no effect.
        timeout: time limit of each collective; None means 10 minutes.
        init_method: URL of a rendezvous, such as tcp://host:port; needs `rank` and `world_size`.
        dist_init_required: False: the group must exist already.
        config: no effect.
        rank: rank of this process, for `init_method`.
        world_size: number of ranks, for `init_method`.

    Raises:
        RuntimeError: if `dist_init_required` is False, and there is no process group.
        LauncherError: if the launcher's variables are incomplete.
    """
    if topology.is_started():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "there is no process group: call deepspeed.init_distributed() without"
            " dist_init_required=False, or torch.distributed.init_process_group()"
        )
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    topology.start_always(
        dist_backend, timeout or topology.TIMEOUT, init_method, rank=rank, world=world_size
    )


def get_rank(group: Any = None) -> int:
    """Returns this process's rank in a group; None means all ranks."""
    return topology.everyone().index if group is None else group.rank()


def get_world_size(group: Any = None) -> int:
    """Returns the number of ranks in a group; None means all ranks."""
    return topology.everyone().size if group is None else group.size()


def get_local_rank() -> int:
    """Returns this process's rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Returns the process group of all ranks."""
    return topology.everyone().group
