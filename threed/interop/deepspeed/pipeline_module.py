"""DeepSpeed's `PipelineModule`, and the specifications of its layers.

    layers = [
        TiedLayerSpec("embedding", nn.Embedding, 1000, 64),
        *[LayerSpec(Block, 64) for _ in range(8)],
        TiedLayerSpec("embedding", nn.Embedding, 1000, 64, forward_fn=head),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss)
    engine, _, _, _ = threed.initialize(model=model, config="ds_config.json", training_data=data)
    engine.train_batch()

Every rank builds only the layers of its stage; of all other layers it builds the shapes, on the
meta device.
"""

from __future__ import annotations

import random
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from threed.config import ConfigError
from threed.distributed import collectives
from threed.distributed.sharding import attach, spec_of
from threed.distributed.topology import Topology
from threed.interop.deepspeed.api.checkpointing import checkpoint
from threed.interop.deepspeed.api.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
    find_stages,
)
from threed.interop.deepspeed.api.utils import set_random_seed
from threed.interop.deepspeed.names import REFUSED, Refused, refusal
from threed.interop.deepspeed.pipeline_layers import (
    LayerGroup,
    LayerRecord,
    PipelineModel,
    group_layers,
    outline,
)
from threed.layers import Slicing
from threed.models import partition, wrapped
from threed.ops.precision import DTYPES
from threed.schedules import registry

TIED = "tied_modules"
CHECKPOINTS = "use engine.save_checkpoint and engine.load_checkpoint"


class LayerSpec:
    """A layer of a `PipelineModule`, which is built only on the ranks of its stage.

    Args:
        typename: the class of the layer, an `nn.Module`.
        module_args: positional arguments of the class.
        module_kwargs: keyword arguments of the class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"LayerSpec({typename!r}): pass a class of torch.nn.Module")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        words = [
            *map(repr, self.module_args),
            *(f"{k}={v!r}" for k, v in self.module_kwargs.items()),
        ]
        return f"{self.typename.__name__}({', '.join(words)})"

    def build(self, log: bool = False) -> nn.Module:
        """Returns a new layer.

        Args:
            log: whether to print the layer's class and arguments to stderr.
        """
        if log:
            print(f"building {self!r}", file=sys.stderr)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all other `TiedLayerSpec`s of the same key.

    Args:
        key: the name of the shared module.
        typename: the class of the module; the first spec of the key builds it.
        module_args: positional arguments of the class.
        forward_fn: called with (module, inputs) instead of the module's forward.
        tied_weight_attr: names of the module's weights, which must exist. All parameters of the
            module are shared, not only these.
        module_kwargs: keyword arguments of the class.
    """

    def __init__(
        self, key: str, typename: type[nn.Module], *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",), **module_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        one = isinstance(tied_weight_attr, str)
        self.tied_weight_attr = [tied_weight_attr] if one else list(tied_weight_attr)


class PipelineModule(nn.Module):
    """A list of layers, split into pipeline stages. Collective.

    The output of each layer is the input of the next one: a tensor or a tuple of tensors. As a
    module, it contains only the layers of this rank's stage.

    Args:
        layers: the layers: a `LayerSpec`, an nn.Module, or any function of one argument.
        num_stages: number of stages; it must divide the number of ranks.
        topology: replaces `num_stages`: a topology with the axes "pipe" and "data".
        loss_fn: returns the mean loss of a micro-batch from (outputs, labels). None: the last layer
            returns the loss.
        seed_layers: whether layer number i is built with the seed base_seed + i, as in DeepSpeed.
            If False, its seed is derived from torch's initial seed and from the layer's number, so
            the values are the same for every number of stages.
        seed_fn: sets a seed; by default, the seed of torch, NumPy and Python.
        base_seed: see `seed_layers`.
        partition_method: "parameters" balances the numbers of parameters that require gradients,
            "uniform" the numbers of layers, and "type:REGEX" the numbers of layers with a matching
            class name.
        activation_checkpoint_interval: number of consecutive layers that are recomputed together in
            the backward; 0: no recomputation.
        activation_checkpoint_func: has no effect, because threed recomputes layers itself, without
            reentrant autograd. None: `deepspeed.checkpointing.checkpoint`.
        checkpointable_layers: names of the classes that may be recomputed; None: all layers with
            parameters.
        dynamic_shape: whether the shapes of activations may differ between micro-batches of the
            same shape. (They may always differ between micro-batches of different shapes.)
        schedule: threed's pipeline schedule; it must have one stage per rank.

    Attributes:
        num_stages: number of stages.
        stage_id: stage of this rank.
        parts: first layer of each stage, and the number of layers.
        forward_funcs: the functions of the layers on this rank.
        tied_modules: the modules of `TiedLayerSpec`s on this rank, by key.
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None, seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None, base_seed: int = 1234,
        partition_method: str = "parameters", activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: list[str] | None = None, dynamic_shape: bool = False, schedule: str = "1f1b",
    ) -> None:  # fmt: skip
        super().__init__()
        _check_schedule(schedule)
        specs = list(layers)
        if problems := list(_find_problems(specs)):
            raise ConfigError(problems)
        self.num_stages = find_stages(num_stages, topology)
        data = None if topology is None else max(1, topology.get_dim("data"))
        try:
            self.axes = Topology(pp=self.num_stages, dp=data)
        except ValueError as error:
            raise ConfigError([f"PipelineModule: num_stages {self.num_stages}: {error}"]) from None
        self._topology = topology or PipeDataParallelTopology(self.num_stages, self.axes.dp)
        self._grid = PipelineParallelGrid(self._topology, self.axes)
        self.stage_id, self.global_rank = self._grid.stage_id, self.axes.rank
        self.loss_fn, self.dynamic_shape, self.schedule = loss_fn, dynamic_shape, schedule
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func or checkpoint
        self.checkpointable_layers = checkpointable_layers
        self._layer_specs = specs
        self._records = list(_records(specs))
        self.parts = _partition(self._records, self.num_stages, partition_method)
        self._local_start, self._local_stop = self.parts[self.stage_id : self.stage_id + 2]
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[[Any], Any]] = []
        self._build()
        self.to(self.axes.device)

    def _build(self) -> None:
        """Builds the layers of this stage, and adds them to the module."""
        world = self.axes.axis("world")
        seed = collectives.exchange(torch.initial_seed(), world)[0]
        built: dict[str, nn.Module] = {}
        for number in range(self._local_start, self._local_stop):
            spec, record = self._layer_specs[number], self._records[number]
            if not record.path:
                self.forward_funcs.append(spec)
                continue
            module = built.get(record.path)
            if module is None:
                module = built[record.path] = self._module(spec, record, seed)
                owner, _, key = record.path.rpartition(".")
                (self.tied_modules if owner else self).add_module(key, module)
            function = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
            self.forward_funcs.append(module if function is None else partial(function, module))

    def _module(self, spec: Any, record: LayerRecord, seed: int) -> nn.Module:
        """Returns the module of a layer, whose parameters get the records of the layer's outline."""
        if isinstance(spec, nn.Module):
            module = spec
        else:
            number = next(i for i, other in enumerate(self._records) if other.path == record.path)
            with _own_seed(self.axes.device):
                if self.seed_layers:
                    (self.seed_fn or set_random_seed)(self.base_seed + number)
                else:
                    set_random_seed(zlib.crc32(f"{seed}/{record.path}".encode()))
                module = self._layer_specs[number].build()
        shapes = dict(record.shapes.named_parameters(remove_duplicate=False))
        for name, param in module.named_parameters(remove_duplicate=False):
            attach(param, spec_of(shapes[name]))
        return module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # other names may be attributes that a subclass lacks
            private = name.startswith("_") and not name.startswith("__")
            if f"PipelineModule.{name}" not in REFUSED and not private:
                raise
        raise AttributeError(refusal(f"PipelineModule.{name}"))

    def forward(self, forward_input: Any) -> Any:
        """Returns the output of this stage's layers; with one stage, of all layers.

        Args:
            forward_input: input of the first layer of the stage.
        """
        for function in self.forward_funcs:
            forward_input = function(forward_input)
        return forward_input

    # ----------------------------------------------------------------------------------------------- engine

    def describe(self) -> dict[str, tuple[bool, str]]:
        """Returns name -> (requires_grad, dtype) of the parameters of all stages. Collective.

        Raises:
            ValueError: on every rank, if the module of some rank belongs to an engine.
        """
        problem = ""
        try:
            wrapped.check(self)
        except ValueError as error:
            problem = str(error)
        collectives.raise_together([problem], self.axes.axis("world"), ValueError)
        names = {dtype: name for name, dtype in DTYPES.items()}
        own = {
            spec_of(p).name: (p.requires_grad, names.get(p.dtype, str(p.dtype)))
            for p in self.parameters()
        }
        everyone: dict[str, tuple[bool, str]] = {}
        for of_stage in collectives.exchange(own, self.axes.axis("pp")):
            everyone = {name: tuple(flags) for name, flags in of_stage.items()} | everyone
        return everyone

    def as_model(self, interval: int, flags: Mapping[str, tuple[bool, str]]) -> PipelineModel:
        """Returns the layers as a model of threed.

        Args:
            interval: number of layers that are recomputed together; 0: no recomputation.
            flags: result of `describe`.
        """
        own = {spec_of(param).name: param for param in self.parameters()}
        for param in (p for record in self._records for p in record.shapes.parameters()):
            param.requires_grad_(flags[spec_of(param).name][0])
        ranges = [range(*ends) for ends in zip(self.parts, self.parts[1:], strict=False)]
        groups = [
            self._group(group, stage == self.stage_id, interval, own)
            for stage, layers in enumerate(ranges)
            for group in group_layers(layers, self._records, interval)
        ]
        slicing = Slicing(self.axes.axis("tp"))
        ties = {n: (first, DTYPES[flags[n][1]]) for n, first in self._ties(ranges).items()}
        return PipelineModel(groups, own, ties, slicing, self, self.dynamic_shape)

    def counts(self, interval: int) -> tuple[int, ...]:
        """Returns the number of groups of layers per stage; `interval` as in `as_model`."""
        ranges = [range(*ends) for ends in zip(self.parts, self.parts[1:], strict=False)]
        return tuple(len(group_layers(layers, self._records, interval)) for layers in ranges)

    def _group(
        self, group: range, held: bool, interval: int, own: Mapping[str, nn.Parameter]
    ) -> LayerGroup:
        records = [self._records[number] for number in group]
        modules = {record.path: record.shapes for record in records if record.path}
        if held:
            modules = {path: self.get_submodule(path) for path in modules}
        else:
            for part in (part for shapes in modules.values() for part in shapes.modules()):
                # A parameter that this rank holds must be the same object in all groups.
                for key, param in part._parameters.items():
                    if param is not None:
                        part._parameters[key] = own.get(spec_of(param).name, param)
        first = group.start - self._local_start
        return LayerGroup(
            records, modules, self.forward_funcs[first:][: len(group)] if held else None, group.start,
            group.stop == len(self._records), self.loss_fn, interval > 0 and self._recomputable(records),
        )  # fmt: skip

    def _recomputable(self, records: Sequence[LayerRecord]) -> bool:
        if self.checkpointable_layers is None:
            return any(record.has_parameters for record in records)
        return all(record.kind in self.checkpointable_layers for record in records)

    def _ties(self, ranges: Sequence[range]) -> dict[str, int]:
        """Returns name -> first stage of the parameters that several stages hold."""
        found: dict[str, set[int]] = {}
        for stage, layers in enumerate(ranges):
            for param in (p for i in layers for p in self._records[i].shapes.parameters()):
                found.setdefault(spec_of(param).name, set()).add(stage)
        return {name: min(stages) for name, stages in found.items() if len(stages) > 1}

    # ------------------------------------------------------------------------------------------ DeepSpeed's methods

    def partitions(self) -> list[int]:
        """Returns `parts`."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Returns the stage of a layer."""
        ends = enumerate(zip(self.parts, self.parts[1:], strict=False))
        return next(stage for stage, (first, stop) in ends if first <= layer_idx < stop)

    def topology(self) -> ProcessTopology:
        """Returns the process topology."""
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """Returns the position of this process in the topology."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Returns the number of stages."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Sets `activation_checkpoint_interval`; has no effect after `initialize`.

        Args:
            interval: number of consecutive layers that are recomputed together; 0: none.
        """
        self.activation_checkpoint_interval = interval

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each layer of this stage; call it before `initialize`.

        Args:
            args: positional arguments of `torch.compile`.
            kwargs: keyword arguments of `torch.compile`.
        """
        for number, function in enumerate(self.forward_funcs):
            if isinstance(function, nn.Module):
                function.compile(*args, **kwargs)
            else:
                self.forward_funcs[number] = torch.compile(function, *args, **kwargs)

    save_state_dict = Refused("PipelineModule.save_state_dict", CHECKPOINTS)
    load_state_dir = Refused("PipelineModule.load_state_dir", CHECKPOINTS)
    allreduce_tied_weight_gradients = Refused(
        "PipelineModule.allreduce_tied_weight_gradients",
        "not needed: engine.train_batch sums the gradients of tied weights",
    )


@contextmanager
def _own_seed(device: torch.device) -> Iterator[None]:
    """Context manager: restores the states of the random generators at the end of the block."""
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numbers = None if numpy is None else numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numbers)


def _check_schedule(schedule: str) -> None:
    usable = [
        name
        for name in registry.available()
        if registry.own_chunks(name) == 1 and not registry.is_asynchronous(name)
    ]
    if schedule not in usable:
        text = (
            f"schedule {schedule!r} does not run one stage per rank: use one of {', '.join(usable)}"
        )
        raise ConfigError([f"PipelineModule: {text}, or threed.Engine with layers"])


def _find_problems(specs: Sequence[Any]) -> Iterator[str]:
    """Yields the reasons why a list of layers cannot be used."""
    if not specs:
        yield "PipelineModule: no layers"
    keys: dict[str, tuple[int, TiedLayerSpec]] = {}
    for number, spec in enumerate(specs):
        if isinstance(spec, PipelineModule):
            yield f"layer {number} is a PipelineModule: pass its layers instead"
        elif not (isinstance(spec, LayerSpec) or callable(spec)):
            fix = "pass a LayerSpec, an nn.Module or a function"
            yield f"layer {number} is a {type(spec).__name__}: {fix}"
        elif isinstance(spec, TiedLayerSpec):
            first, other = keys.setdefault(spec.key, (number, spec))
            if spec.typename is not other.typename:
                kinds = (
                    f"a {other.typename.__name__}, and layer {number} is a {spec.typename.__name__}"
                )
                yield f"layer {first} of the key {spec.key!r} is {kinds}: use one class, or two keys"


def _records(specs: Sequence[Any]) -> Iterator[LayerRecord]:
    """Yields the records of the layers.

    Raises:
        ConfigError: if tied layers have different shapes, or lack a tied weight.
        ValueError: if a module cannot be trained.
    """
    known: dict[int, nn.Parameter] = {}
    instances: dict[int, LayerRecord] = {}
    tied: dict[str, LayerRecord] = {}
    for number, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            record = LayerRecord(
                f"{TIED}.{spec.key}", spec.typename.__name__, _built(spec, spec.key)
            )
            first = tied.setdefault(spec.key, record)
            _check_tied(spec, number, record, first)
            yield first
        elif isinstance(spec, LayerSpec):
            yield LayerRecord(str(number), spec.typename.__name__, _built(spec, str(number)))
        elif isinstance(spec, nn.Module):
            wrapped.check(spec)
            if id(spec) not in instances:
                shapes = outline(spec, str(number), known)
                instances[id(spec)] = LayerRecord(str(number), type(spec).__name__, shapes)
            yield instances[id(spec)]
        else:
            yield LayerRecord("", getattr(spec, "__name__", type(spec).__name__), nn.Module())


def _built(spec: LayerSpec, name: str) -> nn.Module:
    """Returns the outline of a layer.

    The layer is built on the meta device or, if its constructor raises an error there, on the CPU.
    """
    prefix = f"{TIED}.{name}" if isinstance(spec, TiedLayerSpec) else name
    with _own_seed(torch.device("cpu")):
        try:
            with torch.device("meta"):
                module = spec.build()
        except Exception:  # the constructor reads values
            module = spec.build()
    wrapped.check(module)
    return outline(module, prefix)


def _check_tied(spec: TiedLayerSpec, number: int, record: LayerRecord, first: LayerRecord) -> None:
    shapes = [
        {name: list(param.shape) for name, param in one.shapes.named_parameters()}
        for one in (first, record)
    ]
    if shapes[0] != shapes[1]:
        fix = "give both the same arguments, or different keys"
        text = (
            f"parameters {shapes[1]}, but the first layer of the key {spec.key!r} has {shapes[0]}"
        )
        raise ConfigError([f"layer {number} has {text}: {fix}"])
    if missing := [name for name in spec.tied_weight_attr if name not in shapes[1]]:
        fix = f"its parameters are {', '.join(shapes[1]) or 'none'}"
        raise ConfigError([f"layer {number}: tied_weight_attr {missing} does not exist: {fix}"])


def _partition(records: Sequence[LayerRecord], stages: int, method: str) -> list[int]:
    """Returns the first layer of each stage, and the number of layers.

    Args:
        records: the layers.
        stages: number of stages.
        method: see `PipelineModule`.
    """
    kind = method.lower()
    if len(records) < stages:
        text = f"{len(records)} layers cannot fill {stages} stages: use a smaller num_stages"
        raise ConfigError([f"PipelineModule: {text}"])
    if kind == "uniform":
        ranges = partition.uniform(len(records), stages)
    elif kind == "parameters":
        ranges = partition.balanced([float(record.trained) for record in records], stages)
    elif kind.startswith("type:"):
        pattern = re.compile(method[5:], re.IGNORECASE)
        costs = [float(bool(pattern.search(record.kind))) for record in records]
        if not any(costs):
            kinds = ", ".join(dict.fromkeys(record.kind for record in records))
            text = f"matches no layer: the layers are {kinds}"
            raise ConfigError([f"PipelineModule: partition_method {method!r} {text}"])
        ranges = partition.balanced(costs, stages)
    else:
        fix = "use 'parameters', 'uniform' or 'type:REGEX'"
        raise ConfigError([f"PipelineModule: partition_method {method!r}: {fix}"])
    return [*(part.start for part in ranges), len(records)]
