"""torch.distributed.pipelining as benchmarked engines.

It runs alone, and with data and tensor parallelism.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks import reference
from benchmarks.peers import Peer, local, optimizers, slice_by_tensor
from benchmarks.reference import GPTConfig


class Pipeline(Peer):
    """torch.distributed.pipelining with equal numbers of blocks per stage.

    It can be combined with data parallelism (fully_shard) and tensor parallelism. torch does not
    support tied weights here: the first and the last stage hold a replica each, and this class sums
    their gradients.

    Attributes:
        chunks: stages per rank.
        vee: whether the stages are placed as a V instead of round-robin.
    """

    schedule: Any = pipelining.Schedule1F1B
    dp, tp, sequence = 1, 1, False
    chunks, vee = 1, False

    def __init__(self, config: GPTConfig, args: Any) -> None:
        pp = dist.get_world_size() // (self.dp * self.tp)
        mesh = init_device_mesh("cpu", (pp, self.dp, self.tp), mesh_dim_names=("pp", "dp", "tp"))
        rank, self.share = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        self.numbers, self.total = self._stages_of(rank, pp), pp * self.chunks
        cuts = [n * config.n_layer // self.total for n in range(self.total + 1)]
        self.parts = [
            reference.build(config, cuts[n], cuts[n + 1], n == 0, n == self.total - 1)
            for n in self.numbers
        ]
        for part in self.parts:
            self._split(part, mesh)
        stages = [
            pipelining.PipelineStage(
                part, n, self.total, torch.device("cpu"), group=mesh["pp"].get_group()
            )
            for n, part in zip(self.numbers, self.parts, strict=True)
        ]
        self.plan = self.schedule(
            stages if self.chunks > 1 else stages[0], n_microbatches=args.microbatches, loss_fn=reference.loss_of,
            scale_grads=True,
        )  # fmt: skip
        last = next(one for one in range(pp) if self.total - 1 in self._stages_of(one, pp))
        self.loss_ranks = [int(one) for one in mesh.mesh[last, :, 0]]
        self.tied = self._tie(mesh.mesh[0], mesh.mesh[last])
        self.optimizers = optimizers(p for part in self.parts for p in part.parameters())

    def _stages_of(self, rank: int, pp: int) -> list[int]:
        return (
            [rank, 2 * pp - 1 - rank]
            if self.vee
            else [rank + chunk * pp for chunk in range(self.chunks)]
        )

    def _split(self, part: Any, mesh: DeviceMesh) -> None:
        if self.tp > 1:
            slice_by_tensor(part, mesh["tp"], self.sequence)
        if self.dp > 1:
            for module in (*part.blocks.values(), part):
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)

    def _tie(self, first: Tensor, last: Tensor) -> Any:
        """Returns the group of the ranks at both ends of the pipeline, or None on other ranks."""
        mine = None
        for pair in zip(first.flatten().tolist(), last.flatten().tolist(), strict=True):
            group = dist.new_group(sorted(set(pair)))
            mine = group if dist.get_rank() in pair else mine
        return mine

    def _tied_weights(self) -> list[Tensor]:
        first = [part.wte.weight for part in self.parts if part.first]
        return first + [part.head.weight for part in self.parts if part.last]

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        x, y = x.chunk(self.dp)[self.share], y.chunk(self.dp)[self.share]
        losses: list[Tensor] = []
        with loss_parallel() if self.tp > 1 else contextlib.nullcontext():
            target = {"target": y, "losses": losses} if self.total - 1 in self.numbers else {}
            self.plan.step(*((x,) if 0 in self.numbers else ()), **target)
        if tied := self._tied_weights():
            total = torch.stack([local(weight.grad) for weight in tied]).sum(0)
            dist.all_reduce(total, group=self.tied)
            for weight in tied:
                local(weight.grad).copy_(total)
        self.update()
        return torch.stack([local(loss.detach()) for loss in losses]).mean() if losses else None


class PipelineGPipe(Pipeline):
    """All forwards, then all backwards."""

    schedule = pipelining.ScheduleGPipe


class PipelineInterleaved(Pipeline):
    """Interleaved 1F1B with two stages per rank."""

    schedule, chunks = pipelining.ScheduleInterleaved1F1B, 2


class PipelineZeroBubble(PipelineInterleaved):
    """Interleaved with split backwards."""

    schedule = pipelining.ScheduleInterleavedZeroBubble


class PipelineZBV(Pipeline):
    """ZB-V."""

    schedule, chunks, vee = pipelining.ScheduleZBVZeroBubble, 2, True


class PipelineDualPipeV(PipelineZBV):
    """DualPipeV."""

    schedule = pipelining.schedules.ScheduleDualPipeV


class Composed(Pipeline):
    """1F1B, fully_shard and DTensor, each over two ranks."""

    dp, tp = 2, 2


class ComposedSequence(Composed):
    """The same topology with sequence parallelism."""

    sequence = True


PIPELINES = {
    "torch_gpipe": PipelineGPipe, "torch_1f1b": Pipeline, "torch_interleaved": PipelineInterleaved,
    "torch_zb": PipelineZeroBubble, "torch_zb-v": PipelineZBV, "torch_dualpipev": PipelineDualPipeV,
    "torch_3d": Composed, "torch_3d_sp": ComposedSequence,
}  # fmt: skip
