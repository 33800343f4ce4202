"""DeepSpeed's process topologies: the ranks at the coordinates of named axes.

    topology = PipeDataParallelTopology(num_pp=2, num_dp=4)
    topology.get_rank(pipe=1, data=0)              # 4
    topology.get_axis_comm_lists("pipe")           # [[0, 4], [1, 5], [2, 6], [3, 7]]

`PipelineParallelGrid` is the position of this process in such a topology.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from threed.config import ConfigError
from threed.distributed.topology import Axis, Topology
from threed.interop.deepspeed.names import Refused

MODEL_AXIS = (
    "threed does not offer a PipelineModule with a model axis: use tensor-parallel layers of threed.layers with"
    " threed.Engine (docs/guide/own_models.md)"
)


class ProcessTopology:
    """Ranks in a grid of named axes; the last axis has adjacent ranks.

    Args:
        axes: names of the axes.
        dims: number of ranks per axis.

    Attributes:
        ProcessCoord: the class of coordinates, a named tuple with one field per axis.
        mapping: coordinates -> rank.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        make: Callable[..., Any] = namedtuple
        self.ProcessCoord = make("ProcessCoord", self.axes)
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*place): rank
            for rank, place in enumerate(product(*map(range, self.dims)))
        }

    def get_rank(self, **coordinates: int) -> int:
        """Returns the rank at the given coordinates, one per axis."""
        if set(coordinates) != set(self.axes):
            fix = "use filter_match for several ranks"
            raise ValueError(f"get_rank needs a coordinate for each of {self.axes}: {fix}")
        return self.mapping[self.ProcessCoord(**coordinates)]

    def get_axis_names(self) -> list[str]:
        """Returns the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Returns the number of ranks on an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Returns the coordinates of a rank."""
        if not 0 <= rank < len(self.mapping):
            raise ValueError(f"rank {rank} is not in the topology of {len(self.mapping)} ranks")
        return list(self.mapping)[rank]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:  # fmt: skip
        """Returns the coordinates of a rank as text, such as "model_00".

        Args:
            rank: the rank.
            omit_axes: axes to leave out.
            inner_sep: separator of an axis and its coordinate.
            outer_sep: separator of axes.
        """
        named = zip(self.axes, self.get_coord(rank), strict=True)
        return outer_sep.join(
            f"{axis}{inner_sep}{place:02d}" for axis, place in named if axis not in omit_axes
        )

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Returns the lists of ranks that differ only in the coordinate of `axis`."""
        if axis not in self.axes:
            return []
        lists: dict[Any, list[int]] = {}
        number = self.axes.index(axis)
        for place, rank in self.mapping.items():
            lists.setdefault((*place[:number], *place[number + 1 :]), []).append(rank)
        return list(lists.values())

    def filter_match(self, **coordinates: int) -> list[int]:
        """Returns the ranks that have the given coordinates."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == value for axis, value in coordinates.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Returns the ranks whose coordinate on `axis` is `idx`."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Returns the number of ranks."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """A topology of pipeline stages and data ranks; the data ranks of a stage are adjacent.

    Args:
        num_pp: number of pipeline stages.
        num_dp: number of data ranks per stage.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A topology with a model axis, which `PipelineModule` accepts only with size 1.

    Args:
        num_pp: number of pipeline stages.
        num_mp: number of model-parallel ranks.
        num_dp: number of data ranks per stage.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def find_stages(num_stages: int | None, topology: ProcessTopology | None) -> int:
    """Returns the number of pipeline stages that a program asks for.

    Args:
        num_stages: number of stages, or None.
        topology: a topology that replaces `num_stages`, or None.

    Raises:
        ConfigError: if neither is given, or if the topology is not supported.
    """
    if topology is None:
        if num_stages is None or num_stages < 1:
            raise ConfigError(
                [f"PipelineModule: num_stages {num_stages}: pass at least 1, or topology"]
            )
        return num_stages
    sizes = dict(zip(topology.get_axis_names(), topology.dims, strict=True))
    if sizes.get("model", 1) > 1:
        raise ConfigError([MODEL_AXIS])
    used = [axis for axis, size in sizes.items() if size > 1]
    if "pipe" not in sizes or used not in ([], ["pipe"], ["data"], ["pipe", "data"]):
        fix = "use PipeDataParallelTopology(num_pp, num_dp)"
        raise ConfigError([f"PipelineModule: a topology with the axes {[*sizes]}: {fix}"])
    return sizes["pipe"]


class PipelineParallelGrid:
    """The position of this process among pipeline stages and data ranks.

    Args:
        topology: the process topology.
        axes: the axes of this process.
    """

    model_parallel_size = 1

    def __init__(self, topology: ProcessTopology, axes: Topology) -> None:
        self._topology, self._axes = topology, axes
        self.global_rank, self.world_size = axes.rank, axes.world
        self.stage_id, self.pipe_parallel_size = axes.axis("pp").index, axes.pp
        self.data_parallel_id, self.data_parallel_size = axes.axis("dp").index, axes.dp
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.pp_group, self.dp_group = list(axes.axis("pp").ranks), list(axes.axis("dp").ranks)

    def topology(self) -> ProcessTopology:
        """Returns the process topology."""
        return self._topology

    def stage_to_global(self, stage_id: int, data: int | None = None) -> int:
        """Returns the rank of a stage.

        Args:
            stage_id: the stage.
            data: index of the data rank; None: the index of this process.
        """
        own = self.data_parallel_id if data is None else data
        return stage_id * self.data_parallel_size + own

    def get_global_rank(self) -> int:
        """Returns the rank of this process."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Returns the pipeline stage of this process."""
        return self.stage_id

    get_pipe_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Returns the number of pipeline stages."""
        return self.pipe_parallel_size

    def get_data_parallel_rank(self) -> int:
        """Returns the index of this process among the data ranks of its stage."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Returns the number of data ranks per stage."""
        return self.data_parallel_size

    def get_model_parallel_rank(self) -> int:
        """Returns 0, because layers are not split."""
        return 0

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        """Returns 1, because layers are not split."""
        return 1

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_pipe_parallel_group(self) -> Any:
        """Returns the process group of the stages with the data index of this process."""
        return self._group(self._axes.axis("pp"))

    def get_data_parallel_group(self) -> Any:
        """Returns the process group of the data ranks of this stage."""
        return self._group(self._axes.axis("dp"))

    # There is no model axis.
    get_model_parallel_group = Refused(
        "PipelineParallelGrid.get_model_parallel_group", "use get_pipe_parallel_group()"
    )

    def _group(self, axis: Axis) -> Any:
        if axis.size == 1 and self.world_size > 1:
            fix = "make one with torch.distributed.new_group"
            raise NotImplementedError(
                f"threed has no process group of the one rank on {axis.label}: {fix}"
            )
        return axis.group
