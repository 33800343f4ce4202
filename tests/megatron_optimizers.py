"""What Megatron's optimizers leave in checkpoints, made from states by part and our names, by the layout as it builds it.

    write_legacy(out, args, weights, tp=2, optimizer=Distributed(states, bucket=1000))

Buffers are filled as `_ParamAndGradBuffer` is filled, parameter by parameter (`threed.foreign.megatron_flat` and
`megatron_optim` name the sources); what reads them works its way from the files alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    groups = [[n for n, is_plain in zip(names, plain, strict=True) if is_plain == which] for which in (False, True)]
    return [{"wd_mult": 1.0 - number, "lr": 1e-3, "names": some} for number, some in enumerate(groups)]


SCALER = {"scale": torch.tensor([2.0**14]), "growth_tracker": 7, "hysteresis_tracker": 0}


@dataclass
class Distributed:
    """The distributed optimizer: `distrib_optim.pt` beside each rank's file; bucket: of how many elements, about."""

    states: dict[str, dict[str, Tensor]]
    bucket: int | None = None
    dp: int = 4

    def add(
        self, state: dict[str, Any], folder: Path, chunks: list[dict[str, dict[str, Tensor]]], shared: set[str]
    ) -> None:
        """Adds groups without parameters, and writes the buffers."""
        groups = [{"lr": 1e-3, "wd_mult": wd, "step": STEP} for wd in (1.0, 0.0)]
        state["optimizer"] = {"optimizer": {"param_groups": groups}, "grad_scaler": SCALER}
        torch.save(self.gathered(chunks, shared), folder / "distrib_optim.pt")

    def gathered(self, chunks: list[dict[str, dict[str, Tensor]]], shared: set[str]) -> dict[Any, Any]:
        """Buffers without what is behind buckets, as rank 0 of the data ranks gathers them."""
        found: dict[Any, Any] = {"buckets_coalesced": True}
        for index, parts in enumerate(chunks):
            layout = layout_of(parts["weight"], self.bucket, self.dp, shared)
            tensors: dict[str, Any] = {}
            for part, name in PARTS.items():
                flat = buffer_of(layout, parts[part])
                tensors[name] = torch.cat([flat[bucket.start : bucket.end] for bucket in layout.buckets])
            tensors["numel_unpadded"] = sum(bucket.end - bucket.start for bucket in layout.buckets)
            found[index] = {(torch.bfloat16, torch.float32): tensors}
        return found


@dataclass
class Whole:
    """An optimizer that is not distributed, of parameters in bf16 (with masters), or of fp32 ones."""

    states: dict[str, dict[str, Tensor]]
    masters: bool = True

    def add(
        self, state: dict[str, Any], folder: Path, chunks: list[dict[str, dict[str, Tensor]]], shared: set[str]
    ) -> None:
        """Adds groups, states by number, and masters."""
        found = {part: {f"{n}/{name}": tensor for n, chunk in enumerate(chunks) for name, tensor in chunk[part].items()}
                 for part in PARTS}  # fmt: skip
        groups = groups_of(list(found["weight"]), found["weight"])
        order = [name for group in groups for name in group["names"]]
        inner = {
            "state": {number: {part: found[part][name] for part in ("exp_avg", "exp_avg_sq")} for number, name in enumerate(order)},
            "param_groups": [{"wd_mult": group["wd_mult"], "step": STEP, "params": [order.index(name) for name in group["names"]]}
                             for group in groups],
        }  # fmt: skip
        masters = [[torch.nn.Parameter(found["weight"][name]) for name in group["names"]] for group in groups]
        state["optimizer"] = (
            {"optimizer": inner, "grad_scaler": SCALER, "fp32_from_fp16_params": masters} if self.masters else inner
        )
