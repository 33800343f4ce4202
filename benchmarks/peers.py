"""The torch-native peers: each trains the reference model on the same global batch as `benchmarks.engines` does.

DDP, FSDP2 and ZeroRedundancyOptimizer (data), DTensor tensor parallelism with and without sequence parallelism; those
with pipelines are in `pipelines.py`. An engine takes the model's shapes and the run's `args` (`batch`, the global batch
in sequences, and `microbatches`).
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
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def optimizers(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """AdamW by torch's fused kernel, one for each device mesh among the parameters: a fused call takes one only."""
    groups: dict[str, list[nn.Parameter]] = {}
    for p in params:
        groups.setdefault(str(getattr(p, "device_mesh", None)), []).append(p)
    return [torch.optim.AdamW(group, fused=True, **ADAM) for group in groups.values()]


class Peer:
    """A model and its optimizers. step(x, y): one optimizer step on the global batch [b s], this rank's loss or None.

    loss_ranks: the ranks whose mean loss is the global one.
    """

    loss_ranks: list[int]
    optimizers: list[torch.optim.Optimizer]

    def finish(self) -> None:
        """Waits for what a step left under way: nothing here."""

    def update(self) -> None:
        """The optimizer's step."""
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
        """The model as this engine trains it."""
        return model

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = reference.loss_of(self.model(x), y)
        loss.backward()
        self.update()
        return local(loss.detach())


class Compiled(Single):
    """One process, the whole model through torch.compile."""

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
    """The same once more: beside DDP in one run it says what noise looks like."""


class TorchZero1(DDP):
    """DistributedDataParallel whose AdamW states are split by whole parameters (ZeRO-1)."""

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
    """fully_shard on every block and the rest; parameters are freed after the forward (ZeRO-3)."""

    reshard = True

    def wrap(self, model: Any) -> nn.Module:
        self.loss_ranks = list(range(self.size))
        mesh = init_device_mesh("cpu", (self.size,))
        for module in (*model.blocks.values(), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard)
        return model


class FSDP2Keep(FSDP2):
    """The same without reshard: parameters stay gathered until the backward has used them (ZeRO-2)."""

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
    """Heads, MLP and vocabulary split over the mesh; the logits stay split, for `loss_parallel`."""
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
