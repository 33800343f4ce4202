"""Wraps any `nn.Module` as a model of one pipeline layer, and divides it into units.

    model = Wrapped(hf_model)       # done by threed.Engine(hf_model, ...)

The parameters of a unit are gathered and released together. Each member of the outermost containers
(`nn.ModuleList`, `nn.ModuleDict`, `nn.Sequential`) is a unit, usually a transformer block. Every
other module that has direct parameters (not in a submodule) is a unit, too. The code and structure
of the wrapped module do not change, but its parameters get new storage.
"""

from __future__ import annotations

import copy
import functools
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from threed.distributed import collectives
from threed.distributed.sharding import (
    Piece,
    ShardSpec,
    attach,
    check_dense,
    check_separate,
    detach,
    few,
    is_managed,
    point,
    slices,
    spec_of,
)
from threed.distributed.topology import Axis
from threed.layers.contract import PipelineLayer
from threed.layers.slicing import MicroBatch, Slicing
from threed.memory.mapped import Region, leave_file, region_of
from threed.models.loss_items import Inputs, Items, with_dtype_note


def item_of(output: Any, name: str) -> Any:
    """Returns a value in a module's output.

    The value is the first of these that exists: the attribute `name` of the output; its entry
    `name` if it is a mapping; its first element if it is a tuple; or else the output itself.

    Args:
        output: the output of the module.
        name: name of the value.
    """
    found = getattr(output, name, None)
    if found is None and isinstance(output, Mapping):
        found = output.get(name)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    return output if found is None else found


def loss_of(output: Any) -> Tensor:
    """Returns the loss in a module's output, which is found by `item_of`.

    Raises:
        ValueError: if the loss is not a scalar tensor.
    """
    found = item_of(output, "loss")
    if not isinstance(found, Tensor) or found.numel() != 1:
        kind = (
            f"a tensor of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else type(found).__name__
        )
        raise ValueError(
            f"the module returned {kind} where a scalar loss is needed: pass labels in the batch, or wrap it as"
            " threed.models.Wrapped(module, loss=...)"
        )
    return found.reshape(())


def _prompt_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of peft's prompt encoders.

    They stay unsharded, because peft's `save_pretrained` runs the prompt encoder on rank 0 alone.
    """
    peft: Any = sys.modules.get("peft.peft_model")
    for part in module.modules() if peft is not None else ():
        if isinstance(part, peft.PeftModel) and "prompt_encoder" in part._modules:
            yield from part.prompt_encoder.parameters()


class Unit:
    """Modules whose direct parameters are gathered and released together.

    Attributes:
        name: path of the unit in the wrapped module.
        module: the outermost module of the unit, which calls the other modules.
        members: the modules of the unit.
    """

    def __init__(self, name: str, module: nn.Module, members: Sequence[nn.Module]) -> None:
        self.name, self.module, self.members = name, module, members

    def modules(self) -> Iterator[nn.Module]:
        """Returns an iterator over the modules whose direct parameters belong to the unit."""
        return iter(self.members)


class Wrapped(PipelineLayer):
    """An `nn.Module` as a model with a single pipeline layer; see `threed.models.Model`.

    `threed.Engine(module, ...)` wraps a module with the default arguments. The tensors of a batch
    are passed as keyword arguments.

    Args:
        module: the module, from whose output the loss is computed.
        loss: returns the scalar mean loss from the module's output. Default: the attribute `loss` of
            the output, its entry 'loss', its first element, or the output itself.
        count: returns, from the inputs of a micro-batch, the number of items over which its loss is
            averaged, a scalar tensor. Micro-batches are weighted by these numbers, so that the loss
            of a step is the mean over the global batch, however the batch is split. By default
            valid labels are counted, or rows if the batch has no labels.
        initial: name of each parameter -> its initial values. The engine accesses one parameter
            after the other, so the mapping may read a tensor from a file on each access. Every rank
            passes the same values. Default: the values that the parameters have, or the module's
            initialization if it is on the meta device.
        cast_buffers: whether floating-point buffers are cast together with the parameters, as by
            `module.to(dtype)`.

    Attributes:
        module: the module.
        units: the units, whose parameters are gathered and released together.
        given_dtype: dtype of the module's parameters before the engine converted them.

    Raises:
        ValueError: if the module cannot be wrapped; the message names the cause.

    Example:

        model = Wrapped(autoencoder, loss=lambda output: output.error.square().mean())
        engine = threed.Engine(model, threed.Topology(), config)
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any], Tensor] | None = None,
        count: Callable[[Inputs], Tensor] | None = None,
        initial: Mapping[str, Tensor] | None = None,
        *,
        cast_buffers: bool = True,
    ) -> None:
        super().__init__()
        check(module)  # before hooks are registered
        self._params = dict(module.named_parameters())
        given = self._params if initial is None else initial
        if missing := [name for name in self._params if name not in given]:
            raise ValueError(f"initial has no values for {few(missing)}")
        self.module, self.loss = module, loss or loss_of
        self.count = count or Items(module)
        self.hidden, self.slicing, self.name = 0, Slicing(), "module"
        self.units = list(find_units(module))
        self._original: dict[str, Tensor] = {}
        self._given, self._read = initial, ("", torch.empty(0))
        self._casts_buffers = cast_buffers
        self._regions: dict[str, Region] = {}  # of parameters whose values are in a mapped file
        names = {id(param): name for name, param in self._params.items()}
        for name, param in self._params.items():
            self._original[name] = param.detach()
            if region := region_of(param):
                self._regions[name] = region
        self.given_dtype = next((p.dtype for p in module.parameters()), torch.float32)
        # floating-point buffers that `initialized` has cast: (owner, name, dtype before and after)
        self._cast: list[tuple[nn.Module, str, torch.dtype, torch.dtype]] = []
        # parameters, and buffers before `initialized`: (owner, name, parameter or buffer)
        self._given_tensors: list[tuple[nn.Module, str, Tensor | None]] = [
            (owner, key, param)
            for owner in module.modules()
            for key, param in owner._parameters.items()
        ]
        self._loading: RemovableHandle | None = None
        self._used = False  # whether an engine has used this object
        self._attached = False
        self._unit_of: dict[str, Unit] = {}
        for unit in self.units:
            for param in (p for member in unit.members for p in member.parameters(recurse=False)):
                self._unit_of.setdefault(names[id(param)], unit)
        # Each unit on the meta device is copied now, because its original parameters will be
        # replaced. The copies are initialized later; until then they take no memory.
        self._meta_copies = {
            unit.name: meta_copy(unit) for unit in self.units if has_meta_parameters(unit.members)
        }
        self._initialized_unit = functools.lru_cache(maxsize=2)(self._initialize)
        self._attach()

    def _attach(self) -> None:
        """Adds the sharding records of the parameters and the hooks that observe calls."""
        resident = set(_prompt_parameters(self.module))
        for name, param in self._params.items():
            piece = Piece(name, tuple(param.shape), (0,) * param.dim(), tuple(param.shape))
            attach(param, ShardSpec((piece,), decay=param.dim() > 1, resident=param in resident))
        if isinstance(self.count, Items):
            self.count.register()
        self._attached = True

    def layers(self) -> list[nn.Module]:
        """Returns the module as the only layer."""
        return [self]

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        """Returns the weighted loss of a micro-batch.

        Args:
            x: None, because this is the only layer.
            micro: the micro-batch; its inputs are the keyword arguments of the module's forward.
        """
        inputs = micro.inputs or {}
        weight = micro.weight
        items = self.count if isinstance(self.count, Items) else None
        with nullcontext() if items is None else items.observing(inputs), with_dtype_note(inputs):
            loss = self.mean_loss(micro)
        loss = loss if loss.dtype == torch.float64 else loss.float()
        if weight is None:
            return loss
        weight = weight if items is None else items.select_weight(weight)
        # The mean loss over no items may be NaN. Its weight is 0, but NaN * 0 would be NaN.
        return torch.where(weight > 0, loss, 0.0) * weight.to(loss.dtype)

    def mean_loss(self, micro: MicroBatch) -> Tensor:
        """Runs the module on a micro-batch, and returns its mean loss, a scalar."""
        return self.loss(self.module(**(micro.inputs or {})))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: evaluation mode in the block; restores the mode of every submodule."""
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    # ------------------------------------------------------------------------------------------------ initial values

    def initial(self, piece: Piece, seed: int) -> Tensor:
        """Returns the initial values of a piece.

        These are the values of the argument `initial` of the constructor, or else the values that
        the module had when it was wrapped. If the module is on the meta device, its own
        initialization computes the values, for one unit at a time to save memory.

        Args:
            piece: a piece of one of the module's parameters.
            seed: seed of the initialization of a module on the meta device.

        Raises:
            ValueError: if values of the argument `initial` have another shape than the parameter.
        """
        last, _ = self._read
        if piece.name != last:
            if last in self._regions:
                self._regions[last].drop_pages()
            self._read = piece.name, self._values_of(piece.name, seed)
        _, values = self._read
        return values[slices(piece.start, piece.size)]

    def _values_of(self, name: str, seed: int) -> Tensor:
        """Returns the initial values of a parameter."""
        original = self._original[name]
        if self._given is not None:
            given = self._given[name]
            if given.shape != original.shape:
                raise ValueError(
                    f"initial[{name!r}] has shape {list(given.shape)}, the parameter {list(original.shape)}"
                )
            return given
        if original.device.type != "meta":
            return original
        return self._initialized_unit(self._unit_of[name].name, seed)[name]

    def to_meta(self) -> None:
        """Moves the parameters to the meta device for a memory forecast, and drops their values."""
        self._original.clear()
        made: dict[nn.Parameter, nn.Parameter] = {}
        for owner in self.module.modules():
            for key, param in owner._parameters.items():
                if param is None:
                    continue
                if param not in made:
                    empty = torch.empty_like(param, device="meta")
                    made[param] = nn.Parameter(empty, param.requires_grad)
                    attach(made[param], spec_of(param))
                owner._parameters[key] = made[param]
        self._params = dict(self.module.named_parameters())
        self._given_tensors.clear()

    def agree(self, axis: Axis, device: torch.device) -> None:
        """Broadcasts the original parameter values from the first rank of the axis. Collective.

        Parameters in a file that all ranks of the axis map are equal already. If there is one file
        per machine, one rank per file writes the values that it receives.

        Args:
            axis: the ranks that must have equal values.
            device: the device on which the process group of the axis communicates.
        """
        if axis.size == 1 or self._given is not None:
            return
        mapped = {name: region.file.ranks == axis.ranks for name, region in self._regions.items()}
        everyone = collectives.exchange(mapped, axis)
        for name, value in self._original.items():
            if value.device.type == "meta" or all(other.get(name) for other in everyone):
                continue
            region = self._regions.get(name)
            # Received values must not change a private mapping, which would copy its pages.
            own = value.detach().to(device, copy=region is not None).contiguous()
            shared = collectives.broadcast(own, axis, 0)
            if region is None or region.file.writes:
                value.copy_(shared)
        if any(everyone):
            collectives.barrier(axis)  # all files are complete
        for region in self._regions.values():
            region.drop_pages()  # the values that this rank has written itself

    def initialized(self, device: torch.device, dtype: torch.dtype) -> None:
        """Finishes the initialization of the parameters, and initializes the buffers.

        Moves buffers to the device. If the original dtype of some parameter was not `dtype`, casts
        the floating-point buffers as `module.to(device, dtype)` would, unless `cast_buffers` is
        False. If a buffer is on the meta device, its values are computed by the initialization of
        the module that owns it. Original values are kept until `complete`.

        Args:
            device: the engine's device, to which buffers are moved.
            dtype: the engine's dtype of the parameters.
        """
        differs = any(values.dtype != dtype for values in self._original.values())
        cast = dtype if differs and self._casts_buffers else None
        self._initialized_unit.cache_clear()
        self.module.__dict__["_threed"] = True
        self._loading = self.module.register_load_state_dict_pre_hook(refuse_loading)
        for name, owner in self.module.named_modules():
            buffers = owner._buffers
            self._given_tensors += [(owner, key, buffer) for key, buffer in buffers.items()]
            if any(
                buffer is not None and buffer.device.type == "meta" for buffer in buffers.values()
            ):
                buffers = self._materialize(without_children(owner), 0, name)._buffers
            for key, buffer in buffers.items():
                if buffer is None:
                    continue
                casts = buffer.is_floating_point() and not keeps_dtype(owner, key)
                to = cast if casts else None
                if to not in (None, buffer.dtype):
                    self._cast.append((owner, key, buffer.dtype, dtype))
                owner._buffers[key] = buffer.to(device, to)

    def complete(self) -> None:
        """Ends the construction of an engine: drops the original values of the module."""
        self._used = True
        # Parameters on the meta device were replaced.
        self._params = dict(self.module.named_parameters())
        self._original.clear()
        self._given_tensors.clear()
        self._given, self._read = None, ("", torch.empty(0))
        if self._regions:
            self._regions.clear()
            for param in self._params.values():
                leave_file(param)

    def claim(self) -> None:
        """Prepares the module for an engine, if the constructor of an earlier engine has failed.

        Raises:
            ValueError: if an engine has used it.
        """
        if self._used:
            raise ValueError(
                f"this Wrapped({type(self.module).__name__}) has had an engine: call destroy() of that engine, and make"
                " a new threed.models.Wrapped of the module for another engine"
            )
        if not self._attached:
            self._attach()

    def remove(self) -> None:
        """Removes everything that wrapping and `initialized` have added to the module.

        Before `complete`, parameters and buffers get their original values back. Afterwards, only
        buffers change: they get the dtype back that they had before `initialized`.
        """
        for name, value in self._original.items():
            point(self._params[name], value)
        for owner, key, given in self._given_tensors:
            if getattr(owner, key) is not given:
                setattr(owner, key, given)
        for owner, key, before, after in self._cast if self._used else ():
            buffer = owner._buffers.get(key)
            if buffer is not None and buffer.dtype == after:
                owner._buffers[key] = buffer.to(before)
        self._cast.clear()
        for param in self._params.values():
            detach(param)
        if isinstance(self.count, Items):
            self.count.remove()
        if self._loading is not None:
            self._loading.remove()
        self.module.__dict__.pop("_threed", None)
        self._attached = False

    def _initialize(self, unit: str, seed: int) -> dict[str, Tensor]:
        """Returns the initialized parameters of a unit, by their names in the wrapped module."""
        fresh = self._materialize(copy.deepcopy(self._meta_copies[unit]), seed, unit)
        found = fresh.named_parameters(prefix=unit, remove_duplicate=False)
        return {name: param.detach() for name, param in found}

    def _materialize(self, copied: nn.Module, seed: int, name: str) -> nn.Module:
        """Allocates the parameters and buffers of `copied` on the CPU, and initializes them.

        `copied` is a copy of a module on the meta device. The values depend only on the name and
        the seed.
        """
        for module in copied.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    values = torch.full_like(param, torch.nan, device="cpu")
                    module._parameters[key] = nn.Parameter(values, param.requires_grad)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "meta":
                    module._buffers[key] = torch.empty_like(buffer, device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            copied.apply(self._reset)
        empty = [key for key, param in copied.named_parameters() if param.isnan().any()]
        if empty:
            raise ValueError(
                f"{name}: the module's initialization leaves {', '.join(empty)} without values; give their owners"
                " a reset_parameters(), or build the model on the CPU"
            )
        return copied

    def _reset(self, module: nn.Module) -> None:
        own = list(module.parameters(recurse=False)) + list(module.buffers(recurse=False))
        init_weights = getattr(self.module, "_init_weights", None)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        if init_weights is not None:
            init_weights(module)
        elif own and reset is None:
            raise ValueError(
                f"{type(module).__name__} is on the meta device and has no reset_parameters(): build the model on"
                " the CPU, or give that module this method"
            )


def check(module: nn.Module) -> None:
    """Raises ValueError if a module cannot be wrapped; the message names the cause."""
    # A copy of an engine's module has the mark, too, but its parameters belong to no engine.
    if "_threed" in module.__dict__ and any(map(is_managed, module.parameters())):
        raise ValueError(
            f"this {type(module).__name__} belongs to an engine already: call destroy() of that engine, or build a new"
            " module for another engine"
        )
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if shared := [name for name, param in params.items() if is_managed(param)]:
        raise ValueError(
            f"{few(shared)}: shared with a module that has an engine, which keeps the values and gradients of a"
            " parameter in its own buffers; make one engine of one nn.Module that holds both, or give this one a copy"
        )
    for name, param in params.items():
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: run the module once before it is wrapped")
        if param.is_inference():
            raise ValueError(f"{name} was created in inference mode: build the module outside")
        if not param.is_floating_point():
            raise ValueError(
                f"{name} is {param.dtype}: only real floating-point parameters can be trained or sliced;"
                " register integers as a buffer, and complex numbers as view_as_real(values)"
            )
    if scripted := [
        name or type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, torch.jit.ScriptModule)
    ]:
        raise ValueError(
            f"{few(scripted)}: compiled by torch.jit, which reads parameters without the engine's hooks: pass the"
            " original module, from before torch.jit.script or trace, and script it after training"
        )
    check_dense((params | buffers).items())
    check_separate(params, buffers)
    _check_one_dtype(params)


def _check_one_dtype(params: Mapping[str, nn.Parameter]) -> None:
    counts: Counter[torch.dtype] = Counter()
    for param in params.values():
        counts[param.dtype] += param.numel()
    if len(counts) > 1:
        majority, _ = counts.most_common(1)[0]
        different = [
            f"{name} ({param.dtype})" for name, param in params.items() if param.dtype != majority
        ]
        raise ValueError(
            f"parameters have several dtypes: {few(different)}, all others {majority}. All parameters of an engine have one"
            f" dtype, and fp32 masters: convert the module with module.to({majority}) (or module.float()), and compute in"
            " another precision by casts in the forward, such as F.linear(x.float(), self.weight.float())"
        )


def find_problems(module: nn.Module, data_ranks: int) -> list[str]:
    """Returns the reasons why a module cannot run on `data_ranks` data ranks, each with a fix."""
    kinds, problems = (nn.Embedding, nn.EmbeddingBag), []
    renorm = [
        name
        for name, m in module.named_modules()
        if isinstance(m, kinds) and m.max_norm is not None
    ]
    if renorm and data_ranks > 1:
        problems.append(
            f"{', '.join(renorm)}: an embedding with max_norm: each data rank would only change the rows in its own batch;"
            " normalize rows in the forward, or use one data rank"
        )
    return problems


def keeps_dtype(owner: nn.Module, key: str) -> bool:
    """Returns whether a buffer must not be cast.

    This is the case for the rotary frequencies in models of `transformers`, which compute angles in
    fp32 and cast the results themselves.
    """
    return "inv_freq" in key and type(owner).__module__.startswith("transformers.")


def refuse_loading(module: nn.Module, *_: Any) -> None:
    """Raises RuntimeError if the module belongs to an engine.

    This function is a pre-hook of `load_state_dict`, which would not set shards and master weights.
    """
    if any(map(is_managed, module.parameters())):
        raise RuntimeError(
            "the engine has this module's weights: load them by the engine's load_full_state_dict or load; with DeepSpeed's"
            " API by its load_state_dict or load_checkpoint"
        )


def has_meta_parameters(modules: Sequence[nn.Module]) -> bool:
    """Returns whether some direct parameter of these modules is on the meta device."""
    return any(
        param.device.type == "meta"
        for module in modules
        for param in module.parameters(recurse=False)
    )


def meta_copy(unit: Unit) -> nn.Module:
    """Returns a copy of a unit on the meta device, for its initialization."""
    return copy.deepcopy(unit.module) if len(unit.members) > 1 else without_children(unit.module)


def without_children(module: nn.Module) -> nn.Module:
    """Returns a shallow copy of a module without its children."""
    copied = copy.copy(module)
    # Lists are copied, too, because a module may change them: an LSTM keeps a list of its weights.
    copied.__dict__.update({k: list(v) for k, v in module.__dict__.items() if isinstance(v, list)})
    copied.__dict__["_modules"] = {}
    copied.__dict__["_parameters"] = dict(module._parameters)
    copied.__dict__["_buffers"] = dict(module._buffers)
    return copied


def find_units(root: nn.Module) -> Iterator[Unit]:
    """Yields the units of a module, in the order of registration.

    A unit is either a block with all its submodules, or a module outside of blocks with its direct
    parameters only. Blocks are the members of the outermost containers. A container inside another
    container is not a block; its members are. The exception is an `nn.Sequential` in an
    `nn.ModuleList` or `nn.ModuleDict`, which is a block.
    """
    inside: set[int] = set()
    for name, module in root.named_modules():
        if id(module) in inside:
            continue
        lists = (nn.ModuleList, nn.ModuleDict)
        if isinstance(module, (*lists, nn.Sequential)):
            for key, block in module.named_children():
                if isinstance(block, lists) or (
                    isinstance(block, nn.Sequential) and not isinstance(module, lists)
                ):
                    continue
                members = list(block.modules())
                inside.update(map(id, members))
                if any(True for _ in block.parameters()):
                    yield Unit(f"{name}.{key}" if name else key, block, members)
        if list(module.named_parameters(recurse=False)):
            yield Unit(name, module, [module])
