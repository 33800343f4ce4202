"""What Megatron's optimizers leave in checkpoints, from states by part and our names, by the layout as it builds it.

    write_legacy(out, args, weights, tp=2, optimizer=Distributed(states, bucket=1000))

Buffers are filled as `_ParamAndGradBuffer` is filled, parameter by parameter (`threed.foreign.megatron_flat` and
`megatron_optim` name the sources); what reads them works its way from the files alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import megatron_checkpoints as written

PARTS = {"weight": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
STEP = 97  # updates: 3 of 100 iterations overflowed


@dataclass
class Bucket:
    """Some parameters of a buffer: first and last element there, without and with what is behind."""

    start: int
    end: int
    padded: int


@dataclass
class Layout:
    """Where parameters are in a buffer, and its buckets."""

    places: dict[str, tuple[int, int]]
    buckets: list[Bucket]


def layout_of(params: dict[str, Tensor], size: int | None, dp: int, shared: set[str]) -> Layout:
    """A buffer of parameters, last one first; size: of a bucket, about."""
    places, buckets, start, at, empty = dict[str, tuple[int, int]](), list[Bucket](), 0, 0, True

    def close(end: int) -> int:
        step = math.lcm(dp, 128)
        buckets.append(Bucket(start, end, math.ceil(end / step) * step))
        return buckets[-1].padded

    for name in reversed(params):
        at = math.ceil(at / 64) * 64
        if name in shared and not empty:
            start = at = close(at)
        places[name] = (at, at + params[name].numel())
        at, empty = at + params[name].numel(), False
        if name in shared or (size is not None and at - start >= size):
            start = at = close(at)
            empty = True
    if not empty:
        close(at)
    return Layout(places, buckets)


def buffer_of(layout: Layout, tensors: dict[str, Tensor]) -> Tensor:
    """The values of a buffer, with what is behind buckets."""
    flat = torch.zeros(layout.buckets[-1].padded)
    for name, (first, last) in layout.places.items():
        flat[first:last] = tensors[name].flatten()
    return flat


def groups_of(names: list[str], tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Groups of an optimizer, as Megatron makes them: what is decayed, and biases and norms."""
    plain = [name.endswith(".bias") or tensors[name].dim() == 1 for name in names]
    groups = [
        [n for n, is_plain in zip(names, plain, strict=True) if is_plain == which]
        for which in (False, True)
    ]
    return [
        {"wd_mult": 1.0 - number, "lr": 1e-3, "names": some} for number, some in enumerate(groups)
    ]


SCALER = {"scale": torch.tensor([2.0**14]), "growth_tracker": 7, "hysteresis_tracker": 0}


@dataclass
class Distributed:
    """The distributed optimizer: `distrib_optim.pt` beside each rank's file; bucket: of how many elements, about."""

    states: dict[str, dict[str, Tensor]]
    bucket: int | None = None
    dp: int = 4

    def add(
        self,
        state: dict[str, Any],
        folder: Path,
        chunks: list[dict[str, dict[str, Tensor]]],
        shared: set[str],
    ) -> None:
        """Adds groups without parameters, and writes the buffers."""
        groups = [{"lr": 1e-3, "wd_mult": wd, "step": STEP} for wd in (1.0, 0.0)]
        state["optimizer"] = {"optimizer": {"param_groups": groups}, "grad_scaler": SCALER}
        torch.save(self.gathered(chunks, shared), folder / "distrib_optim.pt")

    def gathered(
        self, chunks: list[dict[str, dict[str, Tensor]]], shared: set[str]
    ) -> dict[Any, Any]:
        """Buffers without what is behind buckets, as rank 0 of the data ranks gathers them."""
        found: dict[Any, Any] = {"buckets_coalesced": True}
        for index, parts in enumerate(chunks):
            layout = layout_of(parts["weight"], self.bucket, self.dp, shared)
            tensors: dict[str, Any] = {}
            for part, name in PARTS.items():
                flat = buffer_of(layout, parts[part])
                tensors[name] = torch.cat(
                    [flat[bucket.start : bucket.end] for bucket in layout.buckets]
                )
            tensors["numel_unpadded"] = sum(bucket.end - bucket.start for bucket in layout.buckets)
            found[index] = {(torch.bfloat16, torch.float32): tensors}
        return found


@dataclass
class Whole:
    """An optimizer that is not distributed, of parameters in bf16 (with masters), or of fp32 ones."""

    states: dict[str, dict[str, Tensor]]
    masters: bool = True

    def add(
        self,
        state: dict[str, Any],
        folder: Path,
        chunks: list[dict[str, dict[str, Tensor]]],
        shared: set[str],
    ) -> None:
        """Adds groups, states by number, and masters."""
        found = {part: {f"{n}/{name}": tensor for n, chunk in enumerate(chunks) for name, tensor in chunk[part].items()}
                 for part in PARTS}  # fmt: skip
        groups = groups_of(list(found["weight"]), found["weight"])
        order = [name for group in groups for name in group["names"]]
        moments = [
            {part: found[part][name] for part in ("exp_avg", "exp_avg_sq")} for name in order
        ]
        numbers = [[order.index(name) for name in group["names"]] for group in groups]
        inner = {
            "state": dict(enumerate(moments)),
            "param_groups": [{"wd_mult": group["wd_mult"], "step": STEP, "params": some}
                             for group, some in zip(groups, numbers, strict=True)],
        }  # fmt: skip
        masters = [
            [torch.nn.Parameter(found["weight"][name]) for name in group["names"]]
            for group in groups
        ]
        state["optimizer"] = (
            {"optimizer": inner, "grad_scaler": SCALER, "fp32_from_fp16_params": masters}
            if self.masters
            else inner
        )


# --------------------------------------------------------------------------------------------------------- torch_dist


@dataclass
class OfTheModel:
    """States in the model's shapes; kind: of masters' names. flat: each rank's box as ranges of data ranks."""

    states: dict[str, dict[str, Tensor]]
    kind: str = "param"
    flat: bool = False

    def add_to_dist(
        self,
        state: dict[str, Any],
        common: dict[str, Any],
        args: dict[str, Any],
        whole: dict[str, dict[str, Tensor]],
    ) -> None:
        """Adds states, and groups to what is common."""
        import torch.distributed as dist

        for part, name in (PARTS | {"weight": self.kind}).items():
            for key, mine, size in written.pieces(whole[part], args["swiglu"]):
                boxes, shape = self.ranges(mine, size) if self.flat else (mine, size)
                put = f"optimizer.state.{name}.{key}"
                state[put] = written.sharded(
                    [(f, b.clone()) for f, b in boxes], shape, dist.get_rank(), torch.float32
                )
        inner: dict[str, Any] = {
            "param_groups": [{"wd_mult": 1.0, "step": STEP}, {"wd_mult": 0.0, "step": STEP}]
        }
        if self.kind == "fp32_param" and not self.flat:  # not distributed
            inner = {
                "param_groups": [{"wd_mult": 1.0}],
                "state": {"common_step": torch.tensor(float(STEP))},
            }
        common["optimizer"] = {
            "optimizer": inner,
            "grad_scaler": SCALER,
            "param_state_sharding_type": "any",
        }

    def ranges(self, mine: written.Pieces, size: torch.Size) -> tuple[written.Pieces, torch.Size]:
        """Boxes as ranges of their flat elements: [1, ..., 1, n], at the number of the box and the first element."""
        if not mine:  # of one layer, whose copy the other rank saves
            return [], torch.Size([*(1 for _ in size), size.numel()])
        local, boxes = mine[0][1].shape, written.Pieces()
        for first, own in mine:
            number = [f // n for f, n in zip(first, own.shape, strict=True)]
            cut = own.numel() * 2 // 5
            for start, some in ((cut, own.flatten()[cut:]), (0, own.flatten()[:cut])):
                if some.numel():
                    boxes.append(([*number, start], some.view(*[1] * own.dim(), -1)))
        return boxes, torch.Size(
            [*(n // m for n, m in zip(size, local, strict=True)), local.numel()]
        )


@dataclass
class InBuffers:
    """States in flat buffers of each tensor and pipeline rank. gathered: as an object, else in buckets."""

    states: dict[str, dict[str, Tensor]]
    layers: list[list[int]]
    virtual: int = 1
    bucket: int | None = None
    dp: int = 2
    gathered: bool = False

    def add_to_dist(
        self,
        state: dict[str, Any],
        common: dict[str, Any],
        args: dict[str, Any],
        whole: dict[str, dict[str, Tensor]],
    ) -> None:
        """Adds buffers of all ranks, each from one of these, and their groups."""
        import torch.distributed as dist

        rank, tp, pp = dist.get_rank(), dist.get_world_size(), len(self.layers) // self.virtual
        model = written.model_of(args)
        shared = (
            {"embedding.word_embeddings.weight", "output_layer.weight"}
            if model.tied and pp > 1
            else set()
        )
        for stage in range(pp):
            for tensor_rank in range(tp):
                group = f"optimizer.distributed.dp_group_idx_{stage * tp + tensor_rank}"
                chunks = []
                for chunk in range(self.virtual):
                    first, last = chunk == stage == 0, (chunk, stage) == (self.virtual - 1, pp - 1)
                    cut = (
                        model,
                        args["swiglu"],
                        self.layers[chunk * pp + stage],
                        tensor_rank,
                        tp,
                        first,
                        last,
                        pp,
                    )
                    chunks.append(
                        {part: written.stage_tensors(some, *cut) for part, some in whole.items()}
                    )
                groups = [{"lr": 1e-3, "wd_mult": wd, "step": STEP} for wd in (1.0, 0.0)]
                state[f"{group}.optimizer/shard_0_1"] = [{"param_groups": groups}]
                state[f"{group}.grad_scaler/shard_0_1"] = [SCALER]
                if self.gathered:
                    gathered = Distributed(self.states, self.bucket, self.dp).gathered(
                        chunks, shared
                    )
                    state[f"{group}.param_state/shard_0_1"] = [gathered]
                    continue
                for index, parts in enumerate(chunks):
                    self.add_buckets(
                        state, f"{group}.gbuf_idx_{index}", parts, shared, rank == tensor_rank, rank
                    )

    def add_buckets(
        self,
        state: dict[str, Any],
        key: str,
        parts: dict[str, dict[str, Tensor]],
        shared: set[str],
        mine: bool,
        rank: int,
    ) -> None:
        """Adds a buffer's buckets: of each data rank what it has of each parameter, and what is between them."""
        layout = layout_of(parts["weight"], self.bucket, self.dp, shared)
        for part, name in PARTS.items():
            flat = buffer_of(layout, parts[part])
            for number, bucket in enumerate(layout.buckets):
                edges = {bucket.start, bucket.end}
                edges |= {edge for place in layout.places.values() for edge in place}
                edges |= {
                    bucket.start + n * (bucket.padded - bucket.start) // self.dp
                    for n in range(self.dp)
                }
                cuts = sorted(edge for edge in edges if bucket.start <= edge <= bucket.end)
                boxes = [
                    ([a - bucket.start], flat[a:b].clone()) for a, b in itertools.pairwise(cuts)
                ]
                put = f"{key}.dtype_{(torch.bfloat16, torch.float32)}.bucket_idx_{number}.{name}"
                size = torch.Size([bucket.end - bucket.start])
                state[put] = written.sharded(boxes if mine else [], size, rank, torch.float32)
