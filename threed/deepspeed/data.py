"""Micro-batches from a dataset: each data-parallel rank gets its share, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from threed.topology import Topology


def deepspeed_io(
    data: Dataset[Any],
    topology: Topology,
    micro_batch: int,
    drop_last: bool,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """Returns a loader of this rank's share of a dataset, shuffled by DistributedSampler if not iterable."""
    axis = topology.axis("dp")
    whole = isinstance(data, IterableDataset)
    sampler: DistributedSampler[Any] | None = (
        None if whole else DistributedSampler(data, num_replicas=axis.size, rank=axis.index)
    )
    return DataLoader(
        data, micro_batch, sampler=sampler, collate_fn=collate, drop_last=drop_last,
        pin_memory=topology.device.type == "cuda",
    )  # fmt: skip


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device; a mapping of any kind becomes a dict."""
    whole = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(Tensor, lambda values: values.to(device, non_blocking=True), whole)


def repeat(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields a loader's batches, epoch after epoch, each shuffled anew."""
    epoch = 0
    while True:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("this rank's share of the training data has no batch")
        epoch += 1
