"""What a layer costs, found by running it once on the meta device: FLOPs, bytes kept and needed, bytes sent.

    costs = Tracer(micro_batch, dtype, grad_dtype, traffic).trace(layers, recomputed)      one LayerCost a layer

Nothing is computed and nothing is sent: shapes pass through the layer's own code, forward and backward, as a stage runs
it. A layer that is built as one before it, for inputs of the same shape, is not run again.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from threed.layers.contract import contract, title
from threed.layers.recompute import Selective
from threed.layers.slicing import MicroBatch
from threed.ops import attention
from threed.ops.matmul import NATIVE, Matmul
from threed.pipeline.activation_checkpointing import Recomputed
from threed.pipeline.boundary import Form, gradients_of, tensors
from threed.pipeline.stage import AlwaysWhole, Stage

META = torch.device("meta")


@dataclass(frozen=True)
class LayerCost:
    """One layer and one micro-batch on one rank.

    flops: of the forward: matrix products at 2mnk, attention over the whole square of positions (arXiv 2204.02311,
    appendix B). kept: bytes alive from forward to backward, beside input and output; keeps_input, keeps_output: whether
    these are too. forward, backward: the most bytes alive while it runs, of what it keeps, its input and what it makes.
    input, output: bytes. cached: bytes that outlive the micro-batch, such as a table of rotary angles: no part of the
    others. elsewhere: bytes kept on a drive, or in the memory of the host. sent: bytes sent over each axis.
    """

    flops: int
    kept: int = 0
    keeps_input: bool = False
    keeps_output: bool = False
    forward: int = 0
    backward: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    elsewhere: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)


class Pass:
    """A chunk's activations: bytes kept for its backward, the most in a forward, and in the backward of each layer."""

    def __init__(self, layers: Sequence[LayerCost]) -> None:
        self.kept = self.forward = 0
        self.backward: list[int] = []
        kept_before = False  # whether the layer before keeps what it handed on
        for cost in layers:
            own = 0 if cost.keeps_input or not kept_before else cost.input
            self.forward = max(self.forward, self.kept + cost.forward)
            self.backward.append(self.kept + cost.backward + own)
            self.kept += cost.kept + cost.input * (cost.keeps_input or kept_before)
            kept_before = cost.keeps_output
        self.kept += layers[-1].output * kept_before


def stated_flops(layers: Iterable[nn.Module], tokens: int, seq: int) -> list[int] | None:
    """The forward FLOPs of layers that are made of `threed.layers` alone, which state them; None where one is not."""
    found: list[int] = []
    for layer in layers:
        found.append(0)
        for module in layer.modules():
            if not type(module).__module__.startswith("threed.layers."):
                return None
            states: Any = getattr(module, "flops", None)
            flops: int | None = 0 if states is None else states(tokens, seq)
            if flops is None:
                return None
            found[-1] += flops
    return found


@functools.cache
def _formula(operation: Any) -> Callable[..., int] | None:
    """Returns torch's count of an operation's FLOPs, which has `addmm` but not `addmm_`; for attention our own."""
    if operation in attention.FUSED:
        return attention.kernel_flops
    plain = getattr(torch.ops.aten, operation.__name__.removesuffix("_"), operation)
    formula: Callable[..., int] | None = flop_registry.get(operation, flop_registry.get(plain))
    return formula


class TraceError(ValueError):
    """A layer cannot be run on the meta device: the message names it, and what to do."""


class Watch(TorchDispatchMode):
    """While entered, counts FLOPs, and the bytes of the storages that operations make; `most`: at the worst moment.

    real: leaves out those on the meta device, which take no memory beside real ones.
    """

    def __init__(self, ignored: Iterable[Tensor] = (), real: bool = False) -> None:
        super().__init__()
        self._real = real
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._seen: dict[int, StorageWeakRef] = {}
        self._size: dict[int, int] = {}  # when it was last seen
        self._bound = 0  # no less than the bytes that are alive
        self.flops = self.most = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operation here goes through torch's compiler first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := _formula(func._overloadpacket)) is not None:
            # torch's formulas know no `out_dtype`
            known = [arg for arg in args if not isinstance(arg, torch.dtype)]
            self.flops += formula(*known, **(kwargs or {}), out_val=out)
        self.look_at((args, out))
        return out

    def look_at(self, values: Any) -> None:
        """Counts storages that were not seen before, or have grown; among arguments, tensors are in lists at most."""
        if isinstance(values, Tensor):
            storage = values.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._ignored or (self._real and values.is_meta):
                return
            known = self._seen.get(key)
            if known is None or known.expired():
                self._seen[key], self._size[key] = StorageWeakRef(storage), 0
            if nbytes != self._size[key]:  # new, or freed and allocated again
                self._bound += max(0, nbytes - self._size[key])
                self._size[key] = nbytes
                # only then is it worth while to see what has gone meanwhile
                if self._bound > self.most:
                    self.most = max(self.most, self.bytes())
        elif isinstance(values, list | tuple):
            for value in values:
                self.look_at(value)

    def bytes(self) -> int:
        """Bytes that are alive."""
        found = {
            key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            for key, ref in self._seen.items()
        }
        self._size = {
            key: storage.nbytes() for key, storage in found.items() if storage is not None
        }
        self._seen = {key: self._seen[key] for key in self._size}
        self._bound = sum(self._size.values())
        return self._bound

    def begin(self) -> int:
        """Looks for the worst moment from now on; gives the bytes that are alive now."""
        self.most = self.bytes()
        return self.most


class _Fused(TorchFunctionMode):
    """Runs scaled dot-product attention by a fused operator; on the meta device torch takes the plain one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            func = attention.on_meta
        return func(*args, **(kwargs or {}))


class BufferSink:
    """Adds a parameter's gradient to a buffer, as ZeRO's sinks do; nothing is counted or reduced."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def add(self, grad: Tensor) -> None:
        self.target.add_(grad)

    def add_product(self, a: Tensor, b: Tensor, by: Matmul = NATIVE) -> None:
        by.add_product_(self.target, a, b, fresh=False)

    def add_products(self, pairs: Iterable[tuple[Tensor, Tensor]], by: Matmul = NATIVE) -> None:
        for a, b in pairs:
            self.add_product(a, b, by)

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        self.target.index_add_(0, index, rows.to(self.target.dtype))

    def memory(self) -> tuple[Tensor, bool]:
        return self.target, True

    def mark_added(self) -> None:
        """Counts nothing."""

    def in_forward(self) -> bool:
        return False

    def defers(self) -> bool:
        return False

    def take(self, param: Tensor) -> None:
        """Moves `param.grad` into the buffer."""
        if param.grad is not None:
            self.add(param.grad.to_dense() if param.grad.is_sparse else param.grad)
            param.grad = None


class Tracer:
    """Finds what layers cost.

    Args:
        micro: A micro-batch on the meta device, as the layers will see it.
        dtype, grad_dtype: Of parameters and activations, and of gradients.
        traffic: What the model's axes count.
    """

    def __init__(
        self, micro: MicroBatch, dtype: torch.dtype, grad_dtype: torch.dtype, traffic: Counter[str]
    ) -> None:  # fmt: skip
        self.micro, self.dtype, self.grad_dtype, self.traffic = micro, dtype, grad_dtype, traffic
        self._known: dict[Any, tuple[LayerCost, Form | None]] = {}

    def trace(
        self, layers: Sequence[nn.Module], recomputed: Recomputed | None = None
    ) -> list[LayerCost]:
        """The cost of every layer of a model, in order; `recomputed` as a stage is told, by the layer's number.

        Raises TraceError naming a layer that cannot be run on the meta device.
        """
        costs, form, recomputed = [], None, recomputed or Recomputed()
        for number, layer in enumerate(layers):
            again = number in recomputed.units
            key = alike(layer, layers, form, again)
            if key not in self._known:
                try:
                    self._known[key] = self._run(layer, form, recomputed if again else None)
                except Exception as error:  # whatever a layer of others may raise
                    raise TraceError(
                        f"{title(layer, number)} could not be run on the"
                        f" meta device, to find out what it costs: {error}; its memory cannot be forecast; to balance"
                        " its stages give the model a method costs(micro_batch), or choose --parallel.partition uniform"
                    ) from error
            cost, form = self._known[key]
            costs.append(cost)
        return costs

    def _run(
        self, layer: nn.Module, form: Form | None, recomputed: Recomputed | None
    ) -> tuple[LayerCost, Form | None]:
        """Runs a copy of the layer, so that what it remembers of this is forgotten."""
        traced = copy.deepcopy(layer)
        params = materialise(layer, traced, self._parameter, META)
        given = [
            *params,
            *(param.sink.target for param in params),  # type: ignore[attr-defined]
            *traced.buffers(),
            *vars(self.micro).values(),
            *(self.micro.inputs or {}).values(),
        ]
        stage = Stage([traced], AlwaysWhole(), recomputed=alone(recomputed, traced))
        before = Counter(self.traffic)
        try:
            with (
                Watch(value for value in given if isinstance(value, Tensor)) as watch,
                _Fused(),
            ):
                cost, output = _measure(stage, form, self.micro, watch)
            sent = {
                label: count - before[label]
                for label, count in self.traffic.items()
                if count > before[label]
            }
            return replace(cost, sent=sent), output
        finally:
            self.traffic.clear()
            self.traffic.update(before)

    def _parameter(self, param: nn.Parameter) -> nn.Parameter:
        """Returns a parameter on the meta device with a sink, as a stage has it."""
        new = nn.Parameter(
            torch.empty(param.shape, dtype=self.dtype, device=META), param.requires_grad
        )
        return attach_sink(new, BufferSink(torch.empty_like(new, dtype=self.grad_dtype)))


def attach_sink(param: nn.Parameter, sink: BufferSink) -> nn.Parameter:
    """Returns the parameter, whose gradients go to the sink from now on."""
    param.sink = sink  # type: ignore[attr-defined]
    if param.requires_grad:
        param.register_post_accumulate_grad_hook(sink.take)
    return param


def materialise(
    layer: nn.Module,
    copied: nn.Module,
    make: Callable[[nn.Parameter], nn.Parameter],
    device: torch.device,
) -> list[nn.Parameter]:
    """Gives a copy of a layer parameters, and moves its buffers to a device; returns the parameters.

    Args:
        make: returns the parameter of the copy for one of the layer. Copied parameters have no
            records, those of the layer have.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for own, module in zip(layer.modules(), copied.modules(), strict=True):
        for name, param in own._parameters.items():
            if param is not None and param not in made:
                made[param] = make(param)
            module._parameters[name] = None if param is None else made[param]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return list(made.values())


def alone(recomputed: Recomputed | None, layer: nn.Module) -> Recomputed | None:
    """What a stage of this layer alone is told."""
    if recomputed is None or recomputed.selective is None:
        return recomputed and replace(recomputed, units=frozenset({0}))
    selective = Selective(recomputed.selective.ops)
    selective.install(layer)
    return Recomputed(frozenset({0}), selective=selective)


def _measure(
    stage: Stage, form: Form | None, micro: MicroBatch, watch: Watch
) -> tuple[LayerCost, Form | None]:
    """One forward and one backward."""
    x = None if form is None else form.value(form.empty(META, gradients=False))
    watch.look_at(tensors(x))
    size, came = watch.begin(), [StorageWeakRef(part.untyped_storage()) for part in tensors(x)]
    y = stage.forward(0, x, micro)
    forward, output, flops = watch.most, Form.of(y), watch.flops
    made = {
        part.untyped_storage()._cdata: StorageWeakRef(part.untyped_storage()) for part in tensors(y)
    }
    nbytes = sum(part.untyped_storage().nbytes() for part in tensors(y))
    last = y.dim() == 0 if isinstance(y, Tensor) else False
    del x, y
    keeps_input, keeps_output = _any_alive(came), _any_alive(made.values())
    kept = watch.begin() - size * keeps_input - nbytes * keeps_output
    dy = None if last else output.gradients(output.empty(META, gradients=True))
    watch.look_at(gradients_of(dy, len(output.shapes)))
    watch.begin()
    stage.backward(0, dy)
    del dy, stage
    cached, backward = watch.bytes(), watch.most
    cost = LayerCost(
        flops, kept - cached, keeps_input, keeps_output, forward - cached, backward - cached, size,
        0 if last else nbytes, cached,
    )  # fmt: skip
    return cost, None if last else output


def _any_alive(refs: Iterable[StorageWeakRef]) -> bool:
    return any(not ref.expired() for ref in refs)


def alike(layer: nn.Module, layers: Sequence[nn.Module], form: Form | None, again: bool) -> Any:
    """Returns what layers of a model have in common that cost the same; hashable.

    Args:
        form: of the layer's input.
        again: whether the layer is recomputed.
    """
    return fingerprint(layer, contract(layer).name, set()), form, again, layer is layers[-1]


def fingerprint(value: Any, name: str, around: set[int]) -> Any:
    """What is the same for two layers that are built alike, whatever their names; hashable. around: the ids of what
    this value is in: a part may refer back to its parent."""
    if isinstance(value, nn.Module | dict | list | tuple | set | frozenset):
        if id(value) in around:
            return id(value)
        around = around | {id(value)}
    if isinstance(value, nn.Module):
        return type(value), fingerprint(vars(value), name, around)
    if isinstance(value, dict):
        items = ((str(key).replace(name, "") if name else key, v) for key, v in value.items())
        return tuple((key, fingerprint(v, name, around)) for key, v in items)
    if isinstance(value, list | tuple):
        return tuple(fingerprint(item, name, around) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(fingerprint(item, name, around) for item in value)
    if is_dataclass(value) and type(value).__eq__ is not object.__eq__:
        return type(value), tuple(
            fingerprint(getattr(value, part.name), name, around) for part in fields(value)
        )
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, str):
        return value.replace(name, "") if name else value
    if isinstance(value, int | float | type(None) | torch.dtype):
        return value
    return id(value)
