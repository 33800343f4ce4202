"""deepspeed.zero: gathered parameters, and the optimizer's values of single parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from threed.distributed import collectives, topology
from threed.distributed.sharding import Piece, is_managed
from threed.engine import ModuleEngine
from threed.interop.deepspeed.api.init import share_changes
from threed.interop.deepspeed.api.marks import ZeroParamStatus, mark, unmark
from threed.interop.deepspeed.names import not_offered
from threed.interop.deepspeed.ownership import owner
from threed.memory.mapped import region_of
from threed.zero.layout import Slot
from threed.zero.state import WEIGHT, fill_states, read_records, records

# name of an optimizer's state in DeepSpeed -> its further name in threed
_STATES = {"momentum_buffer": ("momentum_buffer",), "exp_avg": ("exp_avg", "momentum_buffer")}


def mark_parameters(engine: ModuleEngine) -> None:
    """Sets DeepSpeed's attributes of an engine's parameters, under ZeRO stage 3; see `marks`.

    Under other stages, the attributes that `zero.Init` has set are removed.
    """
    if engine.config.zero.stage < 3:
        for param in engine.module.parameters():
            unmark(param)
        return
    status = {True: ZeroParamStatus.NOT_AVAILABLE, False: ZeroParamStatus.AVAILABLE}
    slots = ((group, slot) for group in engine.layout.groups for slot in group.slots)
    for number, (group, slot) in enumerate(slots):
        mark(slot.param, number, slot.shape, status[group.sliced])


def engine_of(param: Any) -> ModuleEngine | None:
    """Returns the engine that trains a parameter; None if no engine of DeepSpeed's API does."""
    found = owner(param) if isinstance(param, nn.Parameter) else None
    return None if found is None else found.engine


class GatheredParameters:
    """Context manager in which parameters have their full values, to read or edit. Collective.

    Blocks can be nested, also inside a step of an engine. Unlike in DeepSpeed, edits are kept by the
    optimizer: they also change the fp32 master weights, at every ZeRO stage. Parameters that belong
    to no engine have their full values already.

    Args:
        params: a parameter, an iterable of parameters, or a module. Entries that are None are
            ignored.
        modifier_rank: rank that edits the parameters; at the end of the block, all other ranks get
            its values. None: the program makes the same changes on every rank, or none.
        fwd_module: no effect, because parameters are gathered wherever they are used.
        enabled: if False, the block has no effect.

    Raises:
        ValueError: if no rank has the number `modifier_rank`.
        NotImplementedError: for a parameter of an engine of a `PipelineModule`.
    """

    def __init__(
        self,
        params: Iterable[Tensor | None] | Tensor | nn.Module,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        given = (params,) if isinstance(params, Tensor) else params
        found = [param for param in given if isinstance(param, Tensor)] if enabled else []
        self._modifier_rank = modifier_rank
        # by id, because `==` of tensors compares values
        self._params = list({id(param): param for param in found}.values())
        self._blocks = ExitStack()

    def __enter__(self) -> None:
        engines: dict[int, tuple[ModuleEngine, list[Tensor]]] = {}
        free: list[Tensor] = []
        for param in self._params:
            engine = engine_of(param)
            if engine is None and is_managed(param):
                raise NotImplementedError(
                    not_offered(
                        f"GatheredParameters for a parameter of shape {list(param.shape)} of an engine that"
                        " deepspeed.initialize has not made for a plain module",
                        "use engine.full_state_dict(), or engine.gathered() of a threed.ModuleEngine",
                    )
                )
            if engine is None:
                free.append(param)
            else:
                engines.setdefault(id(engine), (engine, []))[1].append(param)
        with ExitStack() as blocks:
            if free and self._modifier_rank is not None:
                blocks.enter_context(_broadcast(free, self._modifier_rank))
            for engine, params in engines.values():
                gathered = engine.gathered(params, modifier_rank=self._modifier_rank)
                blocks.enter_context(gathered)
            blocks.enter_context(_available(self._params))
            self._blocks = blocks.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._blocks.__exit__(*error)


@contextmanager
def _available(params: Sequence[Tensor]) -> Iterator[None]:
    """Context manager: in the block, `ds_status` of gathered parameters is AVAILABLE."""
    marked: list[Any] = [param for param in params if "ds_status" in vars(param)]
    before = [param.ds_status for param in marked]
    for param in marked:
        param.ds_status = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for param, status in zip(marked, before, strict=True):
            param.ds_status = status


@contextmanager
def _broadcast(params: Sequence[Tensor], rank: int) -> Iterator[None]:
    """Context manager: after the block, parameters of no engine have one rank's values. Collective.

    Args:
        params: the parameters. Those on the meta device are ignored.
        rank: rank whose values are copied.
    """
    everyone = topology.everyone()
    if not 0 <= rank < everyone.size:
        raise ValueError(f"modifier_rank {rank}: ranks are 0 to {everyone.size - 1}")
    try:
        with collectives.failing_together(everyone, "the block of GatheredParameters"):
            yield
    finally:  # also after an error, so that the ranks' values stay equal
        share_changes(params, rank)
        for param in params if everyone.size > 1 else ():
            if not param.is_meta and region_of(param) is None:
                values = param.detach().to(collectives.device_of(everyone)).contiguous()
                collectives.broadcast(values, everyone, rank)
                param.data.copy_(values)


# ------------------------------------------------------------------------------------------- values of the optimizer


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Returns the full master weight of a parameter, fp32 (fp64 if the model uses fp64). Collective.

    Args:
        param: a parameter of an engine.

    Returns:
        The master weight, or None if the parameter belongs to no engine.
    """
    return _read(param, (WEIGHT,))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Returns the full optimizer state of a parameter, fp32. Collective.

    Args:
        param: a parameter of an engine that requires gradients.
        optim_state_key: name of the state: "exp_avg", "exp_avg_sq", or "momentum_buffer" of SGD.

    Returns:
        The state, or None if the parameter belongs to no engine.

    Raises:
        ValueError: if the optimizer has no such state for the parameter.
    """
    return _read(param, _STATES.get(optim_state_key, (optim_state_key,)))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Returns `param.grad` of a parameter that belongs to no engine.

    Raises:
        NotImplementedError: if the parameter belongs to an engine, whose gradients are summed in
            its buffers.
    """
    if engine_of(param) is not None:
        instead = "use param.register_hook, or engine.get_global_grad_norm()"
        raise NotImplementedError(
            not_offered("safe_get_full_grad for a parameter of an engine", instead)
        )
    return param.grad


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Sets the full master weight of a parameter, and the parameter. Collective.

    Args:
        param: a parameter of an engine; other parameters are not changed.
        value: the new values, the same on every rank, with the parameter's shape.

    Raises:
        ValueError: if the shape differs.
    """
    _write(param, (WEIGHT,), value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Sets the full optimizer state of a parameter. Collective.

    Args:
        param: a parameter of an engine that requires gradients; other parameters are not changed.
        value: the new values, the same on every rank, with the parameter's shape.
        optim_state_key: see `safe_get_full_optimizer_state`.

    Raises:
        ValueError: if the optimizer has no such state for the parameter, or if the shape differs.
    """
    _write(param, _STATES.get(optim_state_key, (optim_state_key,)), value)


def _read(param: nn.Parameter, parts: tuple[str, ...]) -> Tensor | None:
    engine = engine_of(param)
    if engine is None:
        return None
    slot, part = _find(engine, param, parts)
    wanted = [one for one in records(engine.optimizer, (part,)) if _is_of(slot, one.piece)]
    dtype = torch.promote_types(torch.float32, slot.param.dtype)
    full = torch.zeros(slot.shape, dtype=dtype, device=engine.topology.device)
    for record, values in read_records(engine.optimizer, [one for one in wanted if one.owned]):
        full[_box(record.piece)] = values.to(full.device, dtype)
    # Each element has one owner, so the sum over the ranks is exact.
    return collectives.all_reduce(full, engine.topology.axis("world"))


def _write(param: nn.Parameter, parts: tuple[str, ...], value: Tensor) -> None:
    engine = engine_of(param)
    if engine is None:
        return
    slot, part = _find(engine, param, parts)
    if value.shape != slot.shape:
        raise ValueError(
            f"{slot.spec.name}: values of shape {list(value.shape)}, but the parameter has shape {list(slot.shape)}"
        )

    def write(_: str, piece: Piece, out: Tensor) -> None:
        if _is_of(slot, piece):
            out.copy_(value[_box(piece)])

    fill_states(engine.optimizer, write, (part,))


def _find(engine: ModuleEngine, param: nn.Parameter, parts: tuple[str, ...]) -> tuple[Slot, str]:
    """Returns a parameter's slot, and the first of `parts` that the optimizer has. Collective."""
    with engine.gathered(()):  # finishes the last update, and copies the program's edits
        pass
    slot = next(slot for slot in engine.layout.slots if slot.param is param)
    group = next(group for group in engine.layout.groups if slot in group.slots)
    states = engine.optimizer.states if group.key.trainable else ()
    known = {WEIGHT, *(name for state in states for name in state.storages)}
    for part in parts:
        if part in known:
            return slot, part
    raise ValueError(f"{slot.spec.name} has no state {parts[0]!r}, only {', '.join(sorted(known))}")


def _is_of(slot: Slot, piece: Piece) -> bool:
    return piece.name == slot.spec.name


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))


# ------------------------------------------------------------------------------------------ functions without effect


class ParameterOffload:
    """The hooks of DeepSpeed's stage 3, which trl removes during `generate`: here, there are none.

    Args:
        module: the module of the engine.

    Attributes:
        module: this object; it has the methods that trl calls on the module.
        forward_hooks: an empty list.
        backward_hooks: an empty list.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters_of = module
        self.module = self
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the names and parameters of the module."""
        return self._parameters_of.named_parameters(recurse=recurse)

    def ds_external_parameters(self) -> tuple[()]:
        """Returns an empty tuple, because modules need not register the parameters that they use."""
        return ()

    def _register_deepspeed_module(self, module: Any) -> None:
        """Has no effect, because no hooks were removed."""


def zero_wrapper_for_fp_tensor_constructor(fn: Any, *_: Any, **__: Any) -> Any:
    """Returns `fn`. transformers replaces this function while it builds a model in `zero.Init`."""
    return fn
