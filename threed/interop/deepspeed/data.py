"""Micro-batches from a dataset: each data-parallel rank gets its share, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from threed.config import ConfigError
from threed.topology import Topology


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler whose epoch is incremented after each complete pass, so that all passes are shuffled
    differently."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.epoch += 1


def deepspeed_io(
    data: Dataset[Any],
    topology: Topology,
    micro_batch: int,
    drop_last: bool,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """Returns a loader of this rank's share of a dataset, shuffled by `EpochSampler` if the dataset has indices.

    Raises:
        ConfigError: the dataset is an IterableDataset, or has no indices, and there are several data ranks, each of
            which would read all of it.
    """
    axis = topology.axis("dp")
    streams = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
    if streams and axis.size > 1:
        problem = (
            f"training_data: a {type(data).__name__} is iterable, without indices, and each of the {axis.size} data"
            " ranks would train on all of its rows: make a DataLoader of the rank's own part (itertools.islice(rows,"
            " rank, None, ranks), or datasets.distributed.split_dataset_by_node), and call engine.train_batch(iterator)"
        )
        raise ConfigError([problem])
    sampler = None if streams else EpochSampler(data, num_replicas=axis.size, rank=axis.index)
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
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("this rank's share of the training data has no batch")
