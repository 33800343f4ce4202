"""The torch-native peers, which train the reference model on the same global batches.

They are DDP, FSDP2 and ZeroRedundancyOptimizer (data parallelism), and DTensor (tensor parallelism
with and without sequence parallelism); those with pipelines are in `pipelines.py`. An engine is
created from the shapes of the model and `args`: `batch`, the sequences in the global batch, and
`microbatches`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks import reference
from benchmarks.reference import ADAM, GPTConfig


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def optimizers(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Returns an AdamW with torch's fused kernel for each device mesh of the parameters.

    The fused kernel supports only parameters of one mesh.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for p in params:
        groups.setdefault(str(getattr(p, "device_mesh", None)), []).append(p)
    return [torch.optim.AdamW(group, fused=True, **ADAM) for group in groups.values()]


class Peer:
    """A model and its optimizers.

    `step(x, y)` runs one optimizer step on the global batch [b s], and returns this rank's loss or
    None.

    Attributes:
        loss_ranks: the ranks whose mean loss is the loss of the global batch.
    """

    loss_ranks: list[int]
    optimizers: list[torch.optim.Optimizer]

    def finish(self) -> None:
        """Waits for unfinished work of a step; there is none here."""

    def update(self) -> None:
        """Runs the step of the optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class Single(Peer):
    """One process."""

    def __init__(self, config: GPTConfig, args: Any) -> None:
        self.loss_ranks = [0]
        self.index, self.size = dist.get_rank(), dist.get_world_size()
        self.model = self.wrap(reference.build(config))
        self.optimizers = optimizers(self.model.parameters())

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the model in the form that this engine trains."""
        return model

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = reference.loss_of(self.model(x), y)
        loss.backward()
        self.update()
        return local(loss.detach())


class Compiled(Single):
    """One process, with the full model in torch.compile."""

    def wrap(self, model: nn.Module) -> nn.Module:
        model.compile(fullgraph=True)
        return model


class DDP(Single):
    """DistributedDataParallel."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.loss_ranks = list(range(self.size))
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return super().step(x.chunk(self.size)[self.index], y.chunk(self.size)[self.index])


class DDPAgain(DDP):
    """DDP a second time; its ratio to DDP in the same run shows the noise."""


class TorchZero1(DDP):
    """DistributedDataParallel with AdamW states divided by whole parameters (ZeRO-1)."""

    def __init__(self, config: GPTConfig, args: Any) -> None:
        super().__init__(config, args)
        split: Any = ZeroRedundancyOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            fused=True,
            **ADAM,
        )
        self.optimizers = [split]


class FSDP2(DDP):
    """fully_shard on every block and on the rest, with resharding after the forward (ZeRO-3)."""

    reshard = True

    def wrap(self, model: Any) -> nn.Module:
        self.loss_ranks = list(range(self.size))
        mesh = init_device_mesh("cpu", (self.size,))
        for module in (*model.blocks.values(), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard)
        return model


class FSDP2Keep(FSDP2):
    """FSDP2 without resharding (ZeRO-2): parameters stay gathered until the backward."""

    reshard = False


class TP(Single):
    """DTensor tensor parallelism."""

    sequence = False

    def wrap(self, model: Any) -> nn.Module:
        slice_by_tensor(model, init_device_mesh("cpu", (self.size,)), self.sequence)
        return model

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        with loss_parallel():
            return super().step(x, y)


class TPSequence(TP):
    """DTensor tensor parallelism with sequence parallelism."""

    sequence = True


def slice_by_tensor(part: Any, mesh: DeviceMesh, sequence: bool) -> None:
    """Splits heads, MLP and vocabulary over the mesh; logits stay split, for `loss_parallel`."""
    between = Shard(1) if sequence else Replicate()
    top: dict[str, Any] = {}
    if part.first:
        top["wte"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if part.first and sequence:
        top["wpe"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    if part.last and sequence:
        top["ln_f"] = SequenceParallel()
    if part.last:
        top["head"] = ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
    if top:
        parallelize_module(part, mesh, top)
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("attn.qkv", "mlp.up")}
    plan.update(
        {name: RowwiseParallel(output_layouts=between) for name in ("attn.proj", "mlp.down")}
    )
    if sequence:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan.update(
            {"attn": gather, "mlp": gather, "ln1": SequenceParallel(), "ln2": SequenceParallel()}
        )
    for block in part.blocks.values():
        parallelize_module(block, mesh, dict(plan))
    part.tie()


PEERS = {
    "single": Single, "compiled": Compiled, "ddp": DDP, "ddp_again": DDPAgain, "torch_zero1": TorchZero1,
    "fsdp2": FSDP2, "fsdp2_keep": FSDP2Keep, "dtensor_tp": TP, "dtensor_tp_sp": TPSequence,
}  # fmt: skip
