"""Any `nn.Module` as a model: one pipeline layer that calls it, and the units its parameters are gathered in.

    model = Wrapped(hf_model)       # threed.Engine(hf_model, ...) does this by itself

Units are what the outermost containers (`nn.ModuleList`, `nn.ModuleDict`, `nn.Sequential`) hold, transformer blocks as
a rule, and beside them every module that has parameters of its own. The module itself is not changed; its parameters
get new storage.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from threed import collectives
from threed.layers.contract import PipelineLayer
from threed.layers.slicing import MicroBatch, Slicing
from threed.models.counting import Inputs, Items
from threed.sharding import Piece, ShardSpec, attach, check_dense, few, is_managed, slices
from threed.topology import Axis


def loss_of(output: Any) -> Tensor:
    """The loss in what a module returned: its `.loss`, its entry 'loss', the first of a tuple, or itself.

    Raises ValueError when that is no scalar.
    """
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    found = output if found is None else found
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


@contextmanager
def noting_dtypes(inputs: Inputs) -> Iterator[None]:
    """Adds a note with the dtypes of a batch to an error about dtypes."""
    try:
        yield
    except RuntimeError as error:
        floats = [
            f"{k} is {v.dtype}"
            for k, v in inputs.items()
            if isinstance(v, Tensor) and v.is_floating_point()
        ]
        if "dtype" in str(error) and floats:
            error.add_note(
                f"threed: a batch's tensors keep their dtype ({', '.join(floats)}): cast them in the module's forward,"
                " or set precision.cast_inputs"
            )
        raise


class Unit:
    """Modules whose own parameters are gathered and released together; `module` is what runs them."""

    def __init__(self, name: str, module: nn.Module, members: Sequence[nn.Module]) -> None:
        self.name, self.module, self.members = name, module, members

    def modules(self) -> Iterator[nn.Module]:
        """The modules whose parameters belong to the unit."""
        return iter(self.members)


class Wrapped(PipelineLayer):
    """`module` as a model of one layer; see `threed.models.Model`.

    The batch's tensors are its keyword arguments. loss: from what the module returns to the scalar mean loss. count:
    from a micro-batch's inputs to the number of items its loss is a mean over (a scalar tensor), so that the loss of a
    step is the mean over the global batch however it is cut. By default valid labels, else rows.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any], Tensor] = loss_of,
        count: Callable[[Inputs], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.module, self.loss = module, loss
        self.count = count or Items(module)
        self.hidden, self.slicing, self.name = 0, Slicing(), "module"
        check(module)
        self.units = list(find_units(module))
        self._given: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        for name, param in module.named_parameters():
            names[id(param)] = name
            piece = Piece(name, tuple(param.shape), (0,) * param.dim(), tuple(param.shape))
            attach(param, ShardSpec((piece,), decay=param.dim() > 1))
            self._given[name] = param.detach()
        self._unit_of: dict[str, Unit] = {}
        for unit in self.units:
            for param in (p for member in unit.members for p in member.parameters(recurse=False)):
                self._unit_of.setdefault(names[id(param)], unit)
        # Copies of what is on the meta device cost nothing, and keep what a layout is about to replace.
        self._plans = {unit.name: meta_copy(unit) for unit in self.units if is_meta(unit.members)}
        self._fresh = functools.lru_cache(maxsize=2)(self._initialise)

    def layers(self) -> list[nn.Module]:
        """The module, as one layer."""
        return [self]

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        """The micro-batch's weighted loss."""
        inputs = micro.inputs or {}
        weight = micro.weight
        items = self.count if isinstance(self.count, Items) else None
        with nullcontext() if items is None else items.watching(inputs), noting_dtypes(inputs):
            loss = self.loss(self.module(**inputs))
        loss = loss if loss.dtype == torch.float64 else loss.float()
        if weight is None:
            return loss
        weight = weight if items is None else items.chosen(weight)
        # A mean over no items may be no number; it weighs nothing.
        return torch.where(weight > 0, loss, 0.0) * weight.to(loss.dtype)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """In evaluation mode for a while; every module then goes back to the mode it was in."""
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    # ------------------------------------------------------------------------------------------------ initial values

    def initial(self, piece: Piece, seed: int) -> Tensor:
        """The initial values of a piece: those the module came with, or for a module on the meta device those that its
        own initialisation gives, one unit in memory at a time."""
        given = self._given[piece.name]
        values = (
            given
            if given.device.type != "meta"
            else self._fresh(self._unit_of[piece.name].name, seed)[piece.name]
        )
        return values[slices(piece.start, piece.size)]

    def agree(self, axis: Axis, device: torch.device) -> None:
        """Makes the values that the module came with those of the axis's first rank: all begin alike."""
        for value in self._given.values():
            if axis.size > 1 and value.device.type != "meta":
                shared = collectives.broadcast(value.detach().to(device).contiguous(), axis, 0)
                value.copy_(shared)

    def initialised(self, device: torch.device, dtype: torch.dtype) -> None:
        """Forgets the values the module came with, moves buffers as `module.to(device, dtype)` does where parameters
        change their dtype, and gives those on the meta device the values of their module's own initialisation."""
        cast = dtype if any(values.dtype != dtype for values in self._given.values()) else None
        self._given.clear()
        self._fresh.cache_clear()
        self.module.__dict__["_threed"] = True
        self.module.register_load_state_dict_pre_hook(refuse_loading)
        for name, owner in self.module.named_modules():
            buffers = owner._buffers
            if any(
                buffer is not None and buffer.device.type == "meta" for buffer in buffers.values()
            ):
                buffers = self._initialised(shallow(owner), 0, name)._buffers
            for key, buffer in buffers.items():
                to = (
                    cast
                    if buffer is not None
                    and buffer.is_floating_point()
                    and not stays_wide(owner, key)
                    else None
                )
                owner._buffers[key] = None if buffer is None else buffer.to(device, to)

    def _initialise(self, unit: str, seed: int) -> dict[str, Tensor]:
        """A unit's parameters by their names in the whole module."""
        fresh = self._initialised(copy.deepcopy(self._plans[unit]), seed, unit)
        found = fresh.named_parameters(prefix=unit, remove_duplicate=False)
        return {name: param.detach() for name, param in found}

    def _initialised(self, plan: nn.Module, seed: int, name: str) -> nn.Module:
        """Allocates and initialises a module on the meta device, alike on every rank for one name and seed."""
        for module in plan.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    values = torch.full_like(param, torch.nan, device="cpu")
                    module._parameters[key] = nn.Parameter(values, param.requires_grad)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "meta":
                    module._buffers[key] = torch.empty_like(buffer, device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            plan.apply(self._reset)
        empty = [key for key, param in plan.named_parameters() if param.isnan().any()]
        if empty:
            raise ValueError(
                f"{name}: the module's own initialisation leaves {', '.join(empty)} without values; give what has them"
                " a reset_parameters(), or build the model on the CPU"
            )
        return plan

    def _reset(self, module: nn.Module) -> None:
        own = list(module.parameters(recurse=False)) + list(module.buffers(recurse=False))
        theirs = getattr(self.module, "_init_weights", None)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        if theirs is not None:
            theirs(module)
        elif own and reset is None:
            raise ValueError(
                f"{type(module).__name__} is on the meta device and has no reset_parameters(): build the model on"
                " the CPU, or give that module one"
            )


def check(module: nn.Module) -> None:
    """Raises ValueError naming what cannot be wrapped."""
    if "_threed" in module.__dict__:
        raise ValueError(
            f"this {type(module).__name__} belongs to an engine already: build it anew for another one"
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
        if not param.is_floating_point():
            raise ValueError(
                f"{name} is {param.dtype}: only real floating-point parameters can be trained or sliced"
            )
    if scripted := [
        name or type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, torch.jit.ScriptModule)
    ]:
        raise ValueError(
            f"{few(scripted)}: compiled by torch.jit, which reads parameters where no engine can gather them: pass the"
            " module as it was before torch.jit.script or trace, and script it after training"
        )
    check_dense((params | buffers).items())
    _check_one_dtype(params)


def _check_one_dtype(params: Mapping[str, nn.Parameter]) -> None:
    counts: Counter[torch.dtype] = Counter()
    for param in params.values():
        counts[param.dtype] += param.numel()
    if len(counts) > 1:
        most, _ = counts.most_common(1)[0]
        others = [
            f"{name} ({param.dtype})" for name, param in params.items() if param.dtype != most
        ]
        raise ValueError(
            f"parameters have several dtypes: {few(others)}, all others {most}. All parameters of an engine have one"
            f" dtype, and fp32 masters: convert the module with module.to({most}) (or module.float()), and compute in"
            " another precision by casts in the forward, such as F.linear(x.float(), self.weight.float())"
        )


def find_problems(module: nn.Module, data_ranks: int) -> list[str]:
    """Returns the problems of a module with `data_ranks` data ranks, each with its fix."""
    kinds, problems = (nn.Embedding, nn.EmbeddingBag), []
    renorm = [
        name
        for name, m in module.named_modules()
        if isinstance(m, kinds) and m.max_norm is not None
    ]
    if renorm and data_ranks > 1:
        problems.append(
            f"{', '.join(renorm)}: an embedding with max_norm: each data rank would change the rows it sees only;"
            " normalise rows in the forward, or use one data rank"
        )
    return problems


def stays_wide(owner: nn.Module, key: str) -> bool:
    """Whether a buffer keeps its dtype: `transformers` computes rotary angles in fp32, and casts them itself."""
    return "inv_freq" in key and type(owner).__module__.startswith("transformers.")


def refuse_loading(module: nn.Module, *_: Any) -> None:
    """Raises RuntimeError if an engine has the module's values: `load_state_dict` would not set slices and masters."""
    if any(map(is_managed, module.parameters())):
        raise RuntimeError(
            "the engine has this module's weights: use Engine.load_full_state_dict, or Engine.load"
        )


def is_meta(modules: Sequence[nn.Module]) -> bool:
    """Whether some parameter of these modules has a shape but no values."""
    return any(
        param.device.type == "meta"
        for module in modules
        for param in module.parameters(recurse=False)
    )


def meta_copy(unit: Unit) -> nn.Module:
    """A unit to be initialised later."""
    return copy.deepcopy(unit.module) if len(unit.members) > 1 else shallow(unit.module)


def shallow(module: nn.Module) -> nn.Module:
    """A copy of a module without its children."""
    alone = copy.copy(module)
    # an LSTM's weights
    alone.__dict__.update({k: list(v) for k, v in module.__dict__.items() if isinstance(v, list)})
    alone.__dict__["_modules"] = {}
    alone.__dict__["_parameters"] = dict(module._parameters)
    alone.__dict__["_buffers"] = dict(module._buffers)
    return alone


def find_units(root: nn.Module) -> Iterator[Unit]:
    """The units of a module, in order of registration: blocks whole, other modules with what they own themselves.

    Blocks are what the outermost containers hold. A container in a container is looked into, but for an `nn.Sequential`
    in a list or a dict, which is a block.
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
