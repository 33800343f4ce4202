"""The layers of a `PipelineModule` as a model of threed: groups of layers, and their micro-batches.

    shapes = outline(module, "3")                    # the module's parameters, on the meta device
    model  = PipelineModel(pipeline_module)          # a `threed.models.Model`
    batch  = pack([(inputs, labels), ...])           # a batch of micro-batches of any shapes

A pipeline layer of threed (`LayerGroup`) is a group of consecutive layers of the program. Layers
without parameters join the group before them, so they may change their input in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from threed.distributed import collectives
from threed.distributed.sharding import Piece, ShardSpec, attach, slices, spec_of
from threed.distributed.topology import Topology
from threed.layers import MicroBatch, PipelineLayer, Slicing
from threed.pipeline.batches import Batch, Batches
from threed.pipeline.boundary import like, tensors

ROOT = "layers"  # name of every `LayerGroup`: names of buffers must not depend on the groups
INPUTS, LABELS = "inputs", "labels"


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """One layer of a `PipelineModule`.

    Attributes:
        path: path of the layer's module in the `PipelineModule`; "" for a function.
        kind: name of the module's class, or of the function.
        shapes: the parameters and buffers of the module, without values (`outline`).
    """

    path: str
    kind: str
    shapes: nn.Module

    @property
    def trained(self) -> int:
        """The number of elements of the parameters that require gradients."""
        return sum(param.numel() for param in self.shapes.parameters() if param.requires_grad)

    @property
    def has_parameters(self) -> bool:
        """Whether the layer has parameters."""
        return any(True for _ in self.shapes.parameters())


def outline(
    module: nn.Module, path: str, known: dict[int, nn.Parameter] | None = None
) -> nn.Module:
    """Returns a module with the parameters and buffers of another one, but without values and code.

    Parameters are on the meta device and have sharding records. Buffers are allocated on the CPU,
    but not written, so they take no memory.

    Args:
        module: the module.
        path: prefix of the parameters' names.
        known: id of a parameter -> the parameter that replaces it. Parameters of `module` are
            added. Modules that share parameters must pass the same dict.
    """
    known, made = {} if known is None else known, dict[int, nn.Module]()
    for name, owner in module.named_modules():
        out = made[id(owner)] = nn.Module()
        for key, param in owner._parameters.items():
            if param is not None and id(param) not in known:
                known[id(param)] = _without_values(param, ".".join(filter(None, (path, name, key))))
            out.register_parameter(key, None if param is None else known[id(param)])
        for key, buffer in owner._buffers.items():
            empty = None if buffer is None else torch.empty_like(buffer, device="cpu")
            persistent = key not in owner._non_persistent_buffers_set
            out.register_buffer(key, empty, persistent=persistent)
    for owner in module.modules():
        for key, child in owner._modules.items():
            made[id(owner)].add_module(key, None if child is None else made[id(child)])
    return made[id(module)]


def _without_values(param: nn.Parameter, name: str) -> nn.Parameter:
    shape = tuple(param.shape)
    spec = ShardSpec((Piece(name, shape, (0,) * len(shape), shape),), decay=len(shape) > 1)
    return attach(nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad), spec)


def group_layers(stage: range, records: Sequence[LayerRecord], interval: int) -> list[range]:
    """Returns the groups of a stage's layers.

    Args:
        stage: indices of the stage's layers.
        records: all layers.
        interval: number of layers per group; 0: one group for each layer with parameters, together
            with the layers without parameters that follow it.
    """
    if interval:
        return [
            range(first, min(first + interval, stage.stop))
            for first in range(stage.start, stage.stop, interval)
        ]
    starts = [number for number in stage if records[number].has_parameters][1:]
    stops = [*starts, stage.stop]
    return [range(*ends) for ends in zip([stage.start, *starts], stops, strict=True)]


class LayerGroup(PipelineLayer):
    """Consecutive layers of a `PipelineModule`, as one pipeline layer.

    Args:
        records: the layers.
        modules: path -> module of the layers that have one: the program's module, or its outline on
            ranks that do not hold the group.
        calls: the functions to run, one per layer; None on ranks that do not hold the group.
        first: index of the first layer in the `PipelineModule`.
        loss_fn: for the last group: returns the loss from (outputs, labels), or None if the last
            layer returns the loss.
        last: whether this is the last group.
        recomputable: whether the group may be recomputed in the backward.
    """

    name = ROOT

    def __init__(
        self, records: Sequence[LayerRecord], modules: Mapping[str, nn.Module],
        calls: Sequence[Callable[[Any], Any]] | None, first: int, last: bool,
        loss_fn: Callable[[Any, Any], Any] | None, recomputable: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kinds = [r.kind for r in records]
        self.calls = calls
        self.first = first
        self.last = last
        self.loss_fn, self.recomputable = loss_fn, recomputable
        # A first layer without parameters may change its input in place, but the input belongs to
        # the layer before it, which may need it in its backward.
        self.copies = first > 0 and not records[0].has_parameters
        tied = {path.partition(".")[2]: module for path, module in modules.items() if "." in path}
        for path, module in modules.items():
            if "." not in path:
                self.add_module(path, module)
        if tied:
            self.add_module("tied_modules", nn.ModuleDict(tied))

    def forward(self, x: Any, micro: MicroBatch) -> Any:
        """Returns the output of the layers; the last group returns the weighted loss.

        Args:
            x: output of the group before; None for the first group.
            micro: the micro-batch. If its weight is None, the last group returns the outputs.
        """
        assert self.calls is not None
        values = micro.inputs or {}
        if self.first == 0:
            x = unpack(values, INPUTS)
        elif self.copies:
            x = like(x, [part.clone() for part in tensors(x)])
        for number, (kind, call) in enumerate(zip(self.kinds, self.calls, strict=True), self.first):
            try:
                x = call(x)
            except Exception as error:
                error.add_note(f"threed: in layer {number} ({kind}) of the PipelineModule")
                raise
        return self._loss(x, values, micro.weight) if self.last and micro.weight is not None else x

    def _loss(self, x: Any, values: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        loss = x if self.loss_fn is None else self.loss_fn(x, unpack(values, LABELS))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            where = "loss_fn" if self.loss_fn is not None else f"the last layer ({self.kinds[-1]})"
            fix = "return one mean loss" if self.loss_fn is not None else "pass loss_fn"
            raise ValueError(f"PipelineModule: {where} returned {found}, not a scalar loss: {fix}")
        loss = loss.reshape(())
        loss = loss if loss.dtype == torch.float64 else loss.float()
        return loss * weight.to(loss.dtype)


class PipelineModel:
    """The layers of a `PipelineModule`, as a `threed.models.Model`.

    Args:
        groups: all groups of layers, with the program's modules in the groups of this rank's stage.
        own: the parameters of this rank's stage, by name.
        ties: name of each parameter that several stages hold -> (the lowest of these stages, dtype).
        slicing: the layers' slicing; there must be one tensor rank.
        module: the module of the program.
        boundaries_vary: whether shapes of activations may differ between micro-batches of the same
            shape.

    Attributes:
        given_dtype: dtype of this stage's parameters before training.
        weights: name -> whether it is trained, for the parameters of all stages.
    """

    hidden = 0

    def __init__(
        self, groups: Sequence[LayerGroup], own: Mapping[str, nn.Parameter],
        ties: Mapping[str, tuple[int, torch.dtype]], slicing: Slicing, module: nn.Module,
        boundaries_vary: bool,
    ) -> None:  # fmt: skip
        self.groups, self.slicing, self.module = list(groups), slicing, module
        self.boundaries_vary = boundaries_vary
        self._ties = dict(ties)
        self._values = {name: param.detach() for name, param in own.items()}
        self.given_dtype = next((p.dtype for p in own.values()), torch.float32)
        params = (param for group in self.groups for param in group.parameters())
        self.weights = {spec_of(param).name: param.requires_grad for param in params}

    def names(self) -> list[str]:
        """Returns the names of the parameters and persistent buffers of all stages."""
        found: dict[str, Any] = dict(self.weights)
        for group in self.groups:
            for prefix, module in group.named_modules():
                keys = module._buffers.keys() - module._non_persistent_buffers_set
                found |= dict.fromkeys(f"{prefix}.{key}" for key in sorted(keys))
        return [*found]

    def layers(self) -> list[nn.Module]:
        """Returns the groups of layers."""
        return [*self.groups]

    def initial(self, piece: Piece) -> Tensor:
        """Returns the values that a piece of this rank's parameters had before training."""
        return self._values[piece.name][slices(piece.start, piece.size)]

    def agree(self, topology: Topology) -> None:
        """Gives all replicas of a parameter the same initial values. Collective.

        Data ranks get the values of data rank 0. Stages with a tied parameter get the values of the
        first of these stages. A stage without the parameter allocates it for the broadcast.
        """
        data, pipe, device = topology.data, topology.axis("pp"), topology.device
        for value in self._values.values() if data.size > 1 else ():
            value.copy_(collectives.broadcast(value.to(device).contiguous(), data, 0))
        shapes = {spec_of(p).name: p.shape for group in self.groups for p in group.parameters()}
        for name, (source, dtype) in self._ties.items():
            own = self._values.get(name)
            value = torch.empty(shapes[name], dtype=dtype) if own is None else own
            value.copy_(collectives.broadcast(value.to(device).contiguous(), pipe, source))

    def initialized(self) -> None:
        """Drops the initial values. Buffers keep their dtypes, as in DeepSpeed."""
        self._values.clear()


# ------------------------------------------------------------------------------------------------------- micro-batches


def pack(micro_batches: Sequence[tuple[Any, Any]]) -> dict[str, Tensor]:
    """Returns a batch of micro-batches of any shapes; `PipelineBatches` splits it again.

    Args:
        micro_batches: (inputs, labels) per micro-batch. Each is a tensor, or a tuple or list of
            tensors; labels may be None. A number is passed as a scalar tensor.

    Raises:
        ValueError: if inputs or labels are anything else.
    """
    batch: dict[str, Tensor] = {}
    for number, pair in enumerate(micro_batches):
        for what, value in zip((INPUTS, LABELS), pair, strict=True):
            value = torch.tensor(value) if isinstance(value, bool | int | float) else value
            if isinstance(value, Tensor):
                batch[f"{number}/{what}"] = value
                continue
            parts = value if isinstance(value, tuple | list) else [value]
            if what == LABELS and value is None:
                parts = []
            for index, part in enumerate(parts):
                part = torch.tensor(part) if isinstance(part, bool | int | float) else part
                if not isinstance(part, Tensor):
                    kind = type(part).__name__
                    raise ValueError(
                        f"a micro-batch's {what} contain a {kind}: pass a tensor, or a tuple of tensors"
                    )
                batch[f"{number}/{what}/{index}"] = part
    return batch


def unpack(values: Mapping[str, Tensor], what: str) -> Any:
    """Returns the inputs or the labels of a micro-batch: a tensor, a tuple of tensors, or None.

    Args:
        values: the tensors of the micro-batch, by name.
        what: `INPUTS` or `LABELS`.
    """
    if what in values:
        return values[what]
    parts = tuple(value for key, value in values.items() if key.startswith(f"{what}/"))
    return parts or None


class PipelineBatches(Batches):
    """Splits the batches of `pack` into micro-batches; each has the same weight in the loss."""

    def rows(self, batch: Batch) -> int:
        """Returns the number of rows (samples) of a batch."""
        firsts = {key.partition("/")[0]: value for key, value in reversed([*batch.items()])}
        return sum(len(value) if value.dim() else 1 for value in firsts.values())

    def micro_batches(
        self, batch: Batch, step: int, consumed: int, scale: Tensor | float, training: bool
    ) -> list[MicroBatch]:
        """Returns the micro-batches of a batch; see `Batches.micro_batches`."""
        parts: dict[str, dict[str, Tensor]] = {}
        for key, value in batch.items():
            number, _, name = key.partition("/")
            parts.setdefault(number, {})[name] = self._to_device(value)
        share = 1.0 / (len(parts) * self.topology.dp)
        weight = torch.full((), share, dtype=torch.float64, device=self.topology.device) * scale
        return [
            MicroBatch(weight=weight, step=step, training=training, inputs=part)
            for part in parts.values()
        ]
