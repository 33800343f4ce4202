"""Splits a batch into micro-batches and weighs their losses.

    micros = Batches(model, topology, config).micro_batches(batch, step, consumed, scale, training=True)

The loss of a step is the mean over all valid items (tokens) of the global batch, and must not
depend on how the batch is split. So the summed loss of each micro-batch is multiplied by a weight:
the loss scale divided by the number of valid items in the global batch.

A row may contain several documents, which the batch's 'documents' number. The label of the last
token of a document would be the first token of the next document, so it is ignored.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threed.config import Config, ConfigError
from threed.core.device import start_copy_in
from threed.core.messages import counted
from threed.distributed import collectives
from threed.distributed.topology import Axis, Topology
from threed.layers import Embedding, LanguageModelHead, MicroBatch
from threed.layers.contract import contract, title
from threed.layers.slicing import Flag
from threed.models import Model, Wrapped
from threed.models.loss_items import class_labels, count_items, with_some_label
from threed.ops.positions import IGNORED
from threed.ops.precision import dtype

Batch = Mapping[str, Tensor]


class Batches:
    """Splits this data rank's share of global batches into micro-batches.

    Args:
        model: the model. If it is a wrapped module, `Wrapped.count` counts the items of a
            micro-batch.
        topology: the process topology, with the data ranks and the device.
        config: the resolved configuration.
        layers: all layers of the model. They determine the ids that a batch must contain: 'tokens'
            for an `Embedding`, 'labels' for a `LanguageModelHead`.

    Raises:
        ConfigError: if `data.packing` is true, and the model does not support packed documents.
    """

    def __init__(
        self, model: Model, topology: Topology, config: Config, layers: Sequence[nn.Module] = ()
    ) -> None:
        self.wrapped = model if isinstance(model, Wrapped) else None
        self.topology, self.slicing = topology, model.slicing
        self.size, self.global_batch = config.train.micro_batch, config.train.global_batch
        self.dtype = dtype(config.precision.dtype)
        self.packing = config.data.packing
        self.casts, self.loss_chunks = config.precision.cast_inputs, config.recompute.loss_chunks
        needs = {"tokens": Embedding, "labels": LanguageModelHead}
        self.ids = [
            key for key, kind in needs.items() if any(isinstance(layer, kind) for layer in layers)
        ]
        self.empty = Flag("the global batch has no valid label (all are below 0)", error=False)
        self.decreasing = Flag(
            "'documents' that decrease along a row: number the documents of a row in their order"
        )
        self.differing = Difference(
            "tensor or context ranks with different batches: pass the same batch, with full sequences, on all ranks"
            " with the same index on the axis dp (`topology.axis('dp').index`)",
            [topology.axis("cp"), topology.axis("tp")],
        )
        # axes of several ranks that must have batches of the same shape; in training, experts as well
        axes = (topology.axis(name) for name in ("tp", "cp", "pp"))
        self._sharing = [axis for axis in axes if axis.size > 1]
        experts = self.slicing.experts.axis
        self._rooms = [experts] if config.experts.room and experts.size > 1 else []
        self._known_shapes = {True: set[str](), False: set[str]()}
        self._no_documents = documents_problem(model, layers, config, topology.device)
        check_packing(config, self._no_documents)

    def rows(self, batch: Batch) -> int:
        """Returns the number of rows (sequences) of a batch.

        Raises:
            ValueError: if a value is not a tensor with rows, if tensors differ in their number of
                rows, or if this number is 0 or not a multiple of the micro-batch size.
        """
        for name, value in batch.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise ValueError(
                    f"the batch's {name!r} is not a tensor with rows: pass tensors [b ...]"
                )
        sizes = {key: len(value) for key, value in batch.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the batch's tensors have different numbers of rows: {sizes}")
        rows = next(iter(sizes.values()), 0)
        if rows == 0 or rows % self.size:
            raise ValueError(
                f"this rank's batch of {counted(rows, 'sequence')} is not a multiple of micro-batch {self.size}"
            )
        return rows

    def _check_ids(self, batch: Batch) -> None:
        """Raises ValueError if ids that the model needs are missing, not int64 or not [b s]."""
        for key in self.ids:
            if key not in batch:
                raise ValueError(f"the batch has no {key!r}: the model needs int64 {key!r} [b s]")
            if (given := batch[key].dtype) != torch.int64:
                integral = not (given.is_floating_point or given.is_complex)
                fix = f"convert with batch[{key!r}].long()" if integral else "pass integer ids"
                raise ValueError(
                    f"the batch's {key!r} are {str(given).removeprefix('torch.')}, not int64: {fix}"
                )
            if batch[key].dim() != 2:
                raise ValueError(
                    f"the batch's {key!r} are {list(batch[key].shape)}: the model needs {key!r} [b s]"
                )

    def _end_documents(self, tensors: dict[str, Tensor]) -> None:
        """Ignores the label of each token whose next token belongs to another document.

        Raises:
            ValueError: if the batch has no documents, if the model does not support them, or if they
                are not int64 [b s].
        """
        documents, tokens = tensors.get("documents"), tensors.get("tokens")
        if documents is None:
            fix = "open the data with open_data(..., packing=True)"
            raise ValueError(f"--data.packing true, and the batch has no 'documents': {fix}")
        if self._no_documents:
            raise ValueError(f"the batch has 'documents': {self._no_documents}")
        if tokens is None or documents.shape != tokens.shape or documents.dtype != torch.int64:
            given = f"{str(documents.dtype).removeprefix('torch.')} {list(documents.shape)}"
            shape = "[b s]" if tokens is None else str(list(tokens.shape))
            fix = f"pass one int64 number per token, in the shape of the batch's 'tokens' {shape}"
            raise ValueError(f"the batch's 'documents' are {given}: {fix}")
        self.decreasing.note(documents[:, 1:] < documents[:, :-1])
        labels = class_labels(tensors)
        if labels is not None and labels.shape == documents.shape:
            ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1))
            tensors["labels"] = labels.masked_fill(ends, IGNORED)

    def check_rows(self, batch: Batch) -> None:
        """Checks that all data ranks evaluate equally many rows. Collective over dp.

        Ranks with unequal numbers of rows would hang. Training steps do not need this check,
        because their number of rows is configured.

        Raises:
            ValueError: if numbers of rows differ.
        """
        data = self.topology.axis("dp")
        given = {len(v) if isinstance(v, Tensor) and v.dim() else 0 for v in batch.values()}
        everyone = collectives.exchange(sorted(given), data) if data.size > 1 else []
        if any(rows != everyone[0] for rows in everyone):
            raise ValueError(
                f"data ranks evaluate different numbers of rows, {everyone}: pass equally many on each"
            )

    def _check_shapes(self, batch: Batch, training: bool) -> None:
        """Checks that the ranks that share a batch have batches of the same shapes. Collective.

        The shape of 'tokens' is compared, or of all tensors if there are no tokens. With
        `experts.room`, the expert ranks must have the same shapes too in training. Ranks exchange
        shapes that are new to them, so most steps send nothing. On CPUs, they exchange the shapes
        in every step once shapes have changed, because gloo aborts the process if ranks send
        messages of different sizes; on a GPU, the host would wait for the device.

        Raises:
            ValueError: if shapes differ.
        """
        names = ["tokens"] if "tokens" in batch else list(batch)
        shapes = {name: list(batch[name].shape) for name in names}
        known, text = self._known_shapes[training], repr(shapes)
        changing = len(known) > 1 and self.topology.device.type == "cpu"
        if text in known and not changing:
            return
        fix = "pass the same batch on all ranks with the same index on the axis dp"
        self._compare_shapes(shapes, "pipeline, tensor and context ranks", fix, self._sharing)
        if training:
            what, fix = "with --experts.room, expert ranks", "pad their batches to the same length"
            self._compare_shapes(shapes, what, fix, self._rooms)
        known.add(text)

    def _compare_shapes(
        self, shapes: Mapping[str, list[int]], what: str, fix: str, axes: Sequence[Axis]
    ) -> None:
        """Raises ValueError if shapes of the batch differ between ranks. Collective over axes."""
        ranks = {json.dumps(shapes): [self.topology.axis("world").index]}
        for axis in axes:
            parts, ranks = collectives.exchange(ranks, axis), {}
            for part in parts:
                for text, some in part.items():
                    ranks.setdefault(text, []).extend(some)
        if len(ranks) == 1:
            return
        found = [(some, json.loads(text)) for text, some in ranks.items()]
        for name in dict.fromkeys(name for _, one in found for name in one):
            of_shape: dict[str, list[int]] = {}
            for some, one in found:
                of_shape.setdefault(str(one.get(name, "missing")), []).extend(some)
            if len(of_shape) > 1:
                each = ", ".join(f"{s} on {_listed(sorted(some))}" for s, some in of_shape.items())
                raise ValueError(
                    f"the batch's {name!r} are {each}: {what} need equal shapes; {fix}"
                )

    def micro_batches(
        self, batch: Batch, step: int, consumed: int, scale: Tensor | float, training: bool
    ) -> list[MicroBatch]:
        """Returns the micro-batches of a batch. Collective.

        Args:
            batch: this data rank's share of the global batch, as a dict of tensors [b ...]. All
                pipeline stages of the data rank must pass the same batch. For a wrapped module, it
                has the keyword arguments of the module's forward. For other models, it may have
                'tokens' [b s]; 'labels' [b ...], integers (values below 0 are ignored);
                'samples' [b], the global indices of the samples; 'documents', int64 [b s], the
                number of each token's document; and any tensors that the model reads from
                `MicroBatch.inputs`. Without labels, every row counts as one item.
            step: number of completed steps.
            consumed: total number of samples in the global batches before this one.
            scale: the loss scale; the weight of each micro-batch contains it as a factor.
            training: True for a training step, False for an evaluation.

        Raises:
            ValueError: if the batch does not fit the model or the configuration.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(f"the batch is a {type(batch).__name__}: pass a dict of tensors")
        if not training:
            self.check_rows(batch)
        rows, data = self.rows(batch), self.topology.axis("dp")
        if training and data.size > 1 and rows != self.global_batch // data.size:
            raise ValueError(
                f"data rank {data.index} got a batch of {counted(rows, 'row')}; each of the {data.size} data ranks must get"
                f" train.global_batch / dp = {self.global_batch // data.size}"
            )
        self._check_ids(batch)
        tensors = {key: self._to_device(value) for key, value in batch.items()}
        if self.wrapped is None:
            if self._sharing or self._rooms:
                self._check_shapes(batch, training)
            if "tokens" in batch:
                shape = batch["tokens"].shape
                if not shape.numel():
                    fix = "pass at least one token per row"
                    raise ValueError(f"the batch's 'tokens' are {list(shape)}: {fix}")
                # this call raises an error if the sequence cannot be split over ranks
                self.slicing.positions(shape[1])
            if self.packing or "documents" in batch:
                self._end_documents(tensors)
            if self.differing.ranks > 1:
                self.differing.compare(tensors)
            first, device = consumed + data.index * rows, self.topology.device
            tensors.setdefault("samples", torch.arange(first, first + rows, device=device))
        parts = [
            {key: value[at : at + self.size] for key, value in tensors.items()}
            for at in range(0, rows, self.size)
        ]
        if self.wrapped is not None:
            return self._for_module(self.wrapped, parts, step, scale, training)
        weight = self._weight(count_items(tensors, shifted=False), scale)
        split = self.slicing.context.size > 1
        pairs = [self._own_positions(part) if split else (part, None) for part in parts]
        names = ("tokens", "labels", "samples", "documents")
        return [
            MicroBatch(
                **{name: part.pop(name, None) for name in names},  # type: ignore[arg-type]
                weight=weight, step=step,
                training=training, inputs=part or None, loss_chunks=self.loss_chunks, full=full,
            )
            for part, full in pairs
        ]  # fmt: skip

    def _own_positions(
        self, part: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]:
        """Returns a micro-batch with this context rank's columns of 'tokens' and 'labels'.

        The second result is `MicroBatch.full`.
        """
        if "tokens" not in part or part["tokens"].dim() != 2:
            raise ValueError("context parallelism needs the batch's 'tokens' [b s]")
        shape = part["tokens"].shape
        labels = part.get("labels")
        if labels is not None and labels.shape != shape:
            given = list(labels.shape)
            raise ValueError(
                f"the batch's 'labels' are {given}: context parallelism needs one per token, {list(shape)}"
            )
        own = self.slicing.context.positions(shape[1])
        names = {"tokens", "labels"} & part.keys()
        full = None if labels is None else (part["tokens"], labels)
        return part | {name: own.columns(part[name]) for name in names}, full

    def _for_module(
        self, wrapped: Wrapped, parts: Sequence[dict[str, Tensor]], step: int,
        scale: Tensor | float, training: bool,
    ) -> list[MicroBatch]:  # fmt: skip
        """Returns the micro-batches of a wrapped module.

        The module returns the mean loss of a micro-batch, so the weight of the micro-batch is
        multiplied by the number of items in this mean.
        """
        items = [wrapped.count(part) for part in parts]
        weight = self._weight(torch.stack(items).sum(0), scale)
        return [
            MicroBatch(
                weight=n * weight, step=step, training=training, inputs=with_some_label(part, n)
            )
            for n, part in zip(items, parts, strict=True)
        ]

    def _to_device(self, value: Tensor) -> Tensor:
        """Copies a tensor to the device.

        With `precision.cast_inputs`, floating-point tensors are also cast to the parameters' dtype.
        """
        casts = self.casts and value.is_floating_point()
        return start_copy_in(value, self.topology.device, self.dtype if casts else value.dtype)

    def _weight(self, valid: Tensor, scale: Tensor | float) -> Tensor:
        """Returns the loss scale divided by the global number of valid items. Collective over dp.

        Every pipeline stage computes this weight, because any layer may compute a loss.

        Args:
            valid: number of valid items in this data rank's share of the batch.
            scale: the loss scale, a factor of the result.
        """
        total = collectives.sum_of_scalars(valid.view(-1), self.topology.axis("dp"))
        self.empty.note(total.amax() == 0)
        return (scale / total.clamp(min=1)).view(valid.shape)


def _listed(ranks: Sequence[int]) -> str:
    """Returns ranks as text, such as "ranks 0, 1, 2, ... (64 ranks)"."""
    some = ", ".join(map(str, ranks[:3]))
    if len(ranks) > 3:
        return f"ranks {some}, ... ({len(ranks)} ranks)"
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {some}"


class Difference(Flag):
    """Detects different batches on ranks that must have the same one, without a further message.

    Every rank adds a number to the sum of the flag over all ranks: a hash of the batch, times a
    factor. The factors of a group of ranks with the same batch add up to 0, and so do the products.

    Args:
        what: description of the error.
        axes: the axes of a group, whose ranks have the same batch.

    Attributes:
        ranks: number of ranks of the group.
    """

    def __init__(self, what: str, axes: Sequence[Axis]) -> None:
        super().__init__(what)
        self.ranks = math.prod(axis.size for axis in axes)
        first = all(axis.index == 0 for axis in axes)
        self._factor = 1 - self.ranks if first else 1

    def compare(self, batch: Mapping[str, Tensor]) -> None:
        """Records a hash of the int64 tensors among 'tokens', 'labels' and 'documents'."""
        read = (batch.get(name) for name in ("tokens", "labels", "documents"))
        parts = [x.reshape(-1) for x in read if x is not None and x.dtype == torch.int64]
        if not parts:
            return
        numbers = torch.cat(parts)
        hashed = (numbers * _hash_factors(len(numbers), numbers.device)).sum()
        # 31 bits, so that sums over all ranks are exact in fp64
        self._found = ((hashed ^ (hashed >> 32)) & 0x7FFFFFFF) * self._factor


@functools.lru_cache(maxsize=4)
def _hash_factors(count: int, device: torch.device) -> Tensor:
    """Returns a factor for each number of a hash, int64 [count]: odd, and different numbers."""
    return torch.arange(1, 2 * count, 2, device=device) * 0x9E3779B97F4A7C1


def documents_problem(
    model: Model, layers: Sequence[nn.Module], config: Config, device: torch.device
) -> str:
    """Returns why a model cannot train on rows of several documents; "" if it can.

    Args:
        model: the model, or a wrapped module.
        layers: all layers of the model.
        config: the configuration.
        device: device on which the model runs.
    """
    if isinstance(model, Wrapped):
        fix = "build the model from threed.layers, or pass the module its own mask and positions"
        return f"a wrapped module ({type(model.module).__name__}) has no mask for documents; {fix}"
    for number, layer in enumerate(layers):
        if not contract(layer).documents:
            fix = (
                "use an attention (and core) with a parameter `documents`, or set `documents = True` on the layer"
                " if it acts on each position alone or reads micro.documents"
            )
            return f"{title(layer, number)} may mix the tokens of different documents; {fix}"
    if config.run.compile and device.type == "cpu":
        return (
            "on CPUs attention reads the borders of documents on the host; use --run.compile false"
        )
    return ""


def check_packing(config: Config, problem: str) -> None:
    """Raises ConfigError if `data.packing` is set, but the model cannot train on such rows.

    Args:
        config: the configuration.
        problem: the result of `documents_problem`.
    """
    if config.data.packing and problem:
        raise ConfigError([f"--data.packing true: {problem}"])
