"""Loads data: splits a dataset over data-parallel ranks, and moves micro-batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from threed.config import ConfigError
from threed.distributed.topology import Topology
from threed.interop.deepspeed.config.translate import Translation


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that shuffles each pass over the dataset in a different order.

    The sampler increments its attribute `epoch` after each complete pass.
    """

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.epoch += 1


def deepspeed_io(
    data: Dataset[Any], topology: Topology, translation: Translation,
    collate: Callable[[list[Any]], Any] | None = None, *, batch_size: int | None = None,
    shuffle: bool = True, sampler: Sampler[Any] | None = None, workers: int = 0,
) -> DataLoader[Any]:  # fmt: skip
    """Returns a loader of this rank's part of a dataset.

    A dataset with indices (`__getitem__`) is split by an `EpochSampler`.

    Args:
        data: the full dataset.
        topology: the topology of the run. The dataset is split over the axis "dp".
        translation: the translated ds_config.
        collate: the DataLoader's `collate_fn`.
        batch_size: number of samples per batch; None: the micro-batch size.
        shuffle: whether to shuffle a dataset with indices.
        sampler: sampler to use instead of the `EpochSampler`; it must select this rank's samples.
        workers: number of worker processes.

    Raises:
        ConfigError: if there are several data ranks and the dataset cannot be split, because it is
            an IterableDataset or has no method `__getitem__`.
    """
    axis = topology.axis("dp")
    streams = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
    if streams and axis.size > 1 and sampler is None:
        problem = (
            f"training_data: a {type(data).__name__} is iterable, without indices, and each of the {axis.size} data"
            " ranks would train on all of its rows: make a DataLoader of this rank's rows (itertools.islice(rows,"
            " rank, None, ranks), or datasets.distributed.split_dataset_by_node), and call engine.train_batch(iterator)"
        )
        raise ConfigError([problem])
    if sampler is None and not streams:
        sampler = EpochSampler(data, axis.size, axis.index, shuffle=shuffle)
    return DataLoader(
        data, batch_size or translation.micro_batch, sampler=sampler, collate_fn=collate,
        drop_last=translation.drop_last, num_workers=workers, pin_memory=topology.device.type == "cuda",
    )  # fmt: skip


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns a batch with all tensors copied to `device`; a mapping is returned as a dict."""
    unpacked = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(Tensor, lambda values: values.to(device, non_blocking=True), unpacked)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Returns values with all floating-point tensors in them cast to `dtype`."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of a loader without end, one epoch after another.

    Raises:
        ValueError: if the loader has no batches.
    """
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("this rank's share of the training data has no batch")
